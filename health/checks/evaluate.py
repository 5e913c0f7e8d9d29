"""``judge``: what the checks of one node conclude from what was seen of it. Pure: ``Seen`` in, findings out; what
condemns is remembered in ``Seen.memo``.

Of each check there is one finding for every part of the node with which something is wrong, else one for the check:
OK, or UNKNOWN with the reason. A finding that is not there any more is over. FAIL needs proof, or several looks in a
row (``rules.hysteresis``); until then it is a WARN that says so. What cannot be read changes nothing: who was condemned
stays so, and nobody is for that. An unchanged situation is an equal finding, its times included.

A reader that hangs or breaks is a finding of its own, of the check "readers", which lies here because whether a check
could read anything decides about every other check too. A hung call is UNKNOWN first: it may be the machine's load, or
somebody who holds the driver's lock for a moment. NVML's condemns the node if it lasts, and an independent witness of
the same driver hangs too: DCGM's reader for as long, a process that stays in state D within the driver, or one of the
driver's that the kernel calls hung. Where no other reader answers either, it is the machine, or the storage that it
starts programs from.

Call it after each ``Seen.add``: it counts readings that it was shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from msgspec import structs

from ...config.health_rules import Rules
from ...core.types import Cause, Evidence, Finding, Flag, NodeName, Remedy, Verdict
from ..readers.samples import READERS, HostData
from . import dcgm, fabric, gpu, gpu_links, host, kernel_log, xid
from .base import Bad, Check, Good, Said, Unknown, fail
from .node_state import Seen

_LINES = 5
_GRAVER = {Verdict.WARN: 1, Verdict.FAIL: 2}
_DRIVER = ("nv", "uvm", "rm_", "os_acquire")
"""beginnings of the kernel functions in which a process hangs that waits for NVIDIA's driver"""


_DRIVERS = ("nvidia", "nv-", "nv_queue")
"""beginnings of the names of processes that do nothing but ask that driver, or are of it. Users name their processes as
they like: root's count"""
_ROOT = 0
_HUNG_TASK = re.compile(r"INFO: task (?P<name>.+):\d+ blocked ")
_ILL = ("hung", "broken")
"""states of a reader that should be able to read"""


# ── the check of the readers themselves ─────────────────────────────────────────────────────────────────────────────
def _is_missed(reader: str, seen: Seen, rules: Rules) -> bool:
    """It does not read and should: it is expected, something is wrong with it, or GPUs had a driver before."""
    gone = reader == "nvml" and reader in seen.kept
    return seen.newest[reader].state in _ILL or reader in rules.needed or gone


def _judge_readers(seen: Seen, rules: Rules, now: float) -> Iterator[Said]:
    if _lasts("nvml", seen, rules, now):
        others = any(one.state not in _ILL for one in seen.newest.values())
        both = _lasts("dcgm", seen, rules, now) and others
        witness = "DCGM does not answer either" if both else _stuck_in_driver(seen)
        if witness:
            text = f"NVML does not answer, and {witness}"
            yield fail(Cause.GPU, Remedy.REBOOT, text, part="nvml", proof=True, source="nvml")
    for name in READERS:
        newest = seen.newest.get(name)
        if newest is None:
            continue
        if newest.state in _ILL:
            what = "does not answer" if newest.state == "hung" else "fails"
            yield Unknown(f"{name} {what}: {newest.why or newest.state}", decides=True)
        elif newest.state != "read" and _is_missed(name, seen, rules):
            what = "expected here" if name in rules.needed else "read before"
            yield Unknown(f"{name}, which is {what}: {newest.why or newest.state}", decides=True)


def _lasts(reader: str, seen: Seen, rules: Rules, now: float) -> bool:
    """By the clock, not by readings: of a process that hangs in the kernel there are two, and no other is started."""
    since = seen.hung_since.get(reader)
    return since is not None and now - since >= rules.readers.stall


def _stuck_in_driver(seen: Seen) -> str:
    data = seen.data("host")
    stuck = data.stuck if isinstance(data, HostData) else ()
    found = (
        one for one in stuck
        if one.where.startswith(_DRIVER) or (one.name.startswith(_DRIVERS) and one.uid == _ROOT)
    )  # fmt: skip
    if one := next(found, None):
        return f"process {one.pid} ({one.name}) is stuck in its driver"
    since = seen.hung_since["nvml"]
    lines = (
        one.event.text for one in seen.log
        if one.event.kind == "hung_task" and one.at >= since and one.event.uid == _ROOT
    )  # fmt: skip
    names = (match["name"] for line in lines if (match := _HUNG_TASK.search(line)))
    name = next((name for name in names if name.startswith(_DRIVERS)), "")
    return f"the kernel calls {name} hung" if name else ""


_READERS_CHECK = Check(
    "readers", READERS, _judge_readers, "whether the readers of the node answer in time",
    "one does not: UNKNOWN; NVML does not for readers.stall s, nor does DCGM for as long, or a process is stuck"
    " in its driver: FAIL, reboot", "NVSentinel (probe deadline)", any_reader=True,
)  # fmt: skip

CHECKS: tuple[Check, ...] = (
    _READERS_CHECK, *gpu.CHECKS, *gpu_links.CHECKS, *xid.CHECKS, *dcgm.CHECKS,
    *kernel_log.CHECKS, *fabric.CHECKS, *host.CHECKS,
)  # fmt: skip


@dataclass(slots=True)
class _Standing:
    """How often one part of the node looked bad to one check."""

    bads: int = 0
    goods: int = 0
    fails: int = 0
    no_fails: int = 0
    since: float = 0.0
    """when the looks in a row began (s)"""
    condemned: Bad | None = None
    warned: Bad | None = None
    clears: int = 1

    def look(self, bad: Bad | None, rules: Rules, at: float) -> None:
        failing = bad is not None and bad.verdict is Verdict.FAIL
        if bad is not None and not self.bads and self.condemned is None and self.warned is None:
            self.since = at if bad.at is None else bad.at
        self.bads, self.goods = (self.bads + 1, 0) if bad is not None else (0, self.goods + 1)
        self.fails, self.no_fails = (self.fails + 1, 0) if failing else (0, self.no_fails + 1)
        if bad is not None:
            self.clears = rules.hysteresis.good if bad.clears is None else bad.clears
        if self.condemned is not None and self.no_fails >= self.clears:
            self.condemned = None
        if self.warned is not None and self.goods >= self.clears:
            self.warned = None
        if bad is not None and failing:
            if bad.proof or self.condemned is not None or self.fails >= _needed(bad, rules):
                self.condemned = bad
            else:
                self.warned = _pending(bad, rules)
        elif bad is not None and self.bads >= (bad.needs or 1):
            self.warned = bad

    @property
    def shown(self) -> Bad | None:
        return self.condemned or self.warned


@dataclass(slots=True)
class _Memo:
    rules: Rules
    node: NodeName
    standings: dict[str, dict[str, _Standing]] = field(default_factory=dict)
    """by check and part"""
    looked: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """by check: the readings that it was last shown"""
    findings: dict[str, list[Finding]] = field(default_factory=dict)
    """by check: the last ones"""


def judge(seen: Seen, node: NodeName, rules: Rules, now: float) -> list[Finding]:
    """All verdicts on this node, OK and UNKNOWN too, in the order of :data:`CHECKS`. ``now``: s, as readings have."""
    memo = seen.memo
    if not isinstance(memo, _Memo) or memo.node != node:
        seen.memo = memo = _Memo(rules, node)
    elif memo.rules != rules:  # other rules look anew; what is known of the node stays
        memo.rules, memo.looked = rules, {}
    found: list[Finding] = []
    for check in CHECKS:
        if rules.checks.get(check.name) == "off":
            continue
        told = 0 if check.turns else seen.told
        turns = (told, *(seen.turn.get(name, 0) for name in check.turns or check.readers))
        if memo.looked.get(check.name) != turns:
            memo.looked[check.name] = turns
            memo.findings[check.name] = list(_conclude(check, seen, memo, now))
        found += memo.findings[check.name]
    return found


def pending(seen: Seen) -> set[str]:
    """Readers whose next reading decides whether something has failed: one look was bad, and is no proof."""
    if not isinstance(seen.memo, _Memo):
        return set()
    return {
        reader
        for check in CHECKS
        for standing in seen.memo.standings.get(check.name, {}).values()
        if standing.fails and standing.condemned is None
        for reader in check.readers
    }


def tells_nothing(finding: Finding) -> bool:
    """Return whether the finding is UNKNOWN and no reason to doubt the node: nothing was expected to be known."""
    return finding.verdict is Verdict.UNKNOWN and Flag.UNAVAILABLE in finding.flags


def unknown_checks(rules: Rules) -> list[str]:
    """Names in [checks] that no check has."""
    return sorted(set(rules.checks) - {check.name for check in CHECKS})


# ── one check ────────────────────────────────────────────────────────────────────────────────────────────────────────
def _conclude(check: Check, seen: Seen, memo: _Memo, now: float) -> Iterator[Finding]:
    at = max((seen.at(reader) for reader in check.readers if reader in seen.newest), default=now)
    blind = _unreadable(check, seen, memo.rules)
    said: list[Said] = [blind] if blind is not None else list(check.look(seen, memo.rules, now))
    standings = memo.standings.setdefault(check.name, {})
    if blind is None:
        _count(said, standings, memo.rules, at)
    fresh = [
        _named(_make(check, memo, bad.verdict, standings[part].since, bad, part), seen)
        for part, standing in standings.items()
        if (bad := standing.shown) is not None
    ]
    unknown = [one for one in said if isinstance(one, Unknown)]
    if unknown and all(finding.part for finding in fresh):  # else one of the same key, and worse, stands
        fresh.append(_unknown(check, unknown, at, memo))
    elif not fresh:
        text = next((one.text for one in said if isinstance(one, Good)), "nothing wrong")
        fresh.append(_make(check, memo, Verdict.OK, at, _plain(text)))
    old = {(one.part, one.verdict): one for one in memo.findings.get(check.name, ())}
    return (_as_before(finding, old.get((finding.part, finding.verdict))) for finding in fresh)


def _unreadable(check: Check, seen: Seen, rules: Rules) -> Unknown | None:
    """Why this check cannot look at all."""
    newest = {reader: seen.newest.get(reader) for reader in check.readers}
    mute = {reader: one for reader, one in newest.items() if one is None or one.state != "read"}
    if not mute or check.name == "readers" or (check.any_reader and len(mute) < len(newest)):
        return None  # "readers" judges those that do not read
    ill = any(one is not None and _is_missed(reader, seen, rules) for reader, one in mute.items())
    told = (f"{reader}: {one.why or one.state}" if one else f"{reader}: not read yet" for reader, one in mute.items())
    return Unknown("; ".join(told), decides=ill)


def _count(said: list[Said], standings: dict[str, _Standing], rules: Rules, at: float) -> None:
    """One look: at the parts that are bad, and at those that were."""
    bads: dict[str, Bad] = {}
    for one in said:
        if isinstance(one, Bad):
            bads[one.part] = one if one.part not in bads else _together(bads[one.part], one)
    untold = {part for one in said if isinstance(one, Unknown) for part in one.parts}
    for part in bads.keys() - standings.keys():
        standings[part] = _Standing()
    for part, standing in list(standings.items()):
        if part in bads or part not in untold:
            standing.look(bads.get(part), rules, at)
            if standing.shown is None and not standing.bads:
                del standings[part]


def _together(one: Bad, other: Bad) -> Bad:
    """Two things that a check says of one part: the graver, with the words of both."""
    first, second = sorted((one, other), key=lambda bad: -_GRAVER[bad.verdict])
    return structs.replace(first, text=(*first.text, *second.text)[:_LINES])


def _needed(bad: Bad, rules: Rules) -> int:
    return rules.hysteresis.bad if bad.needs is None else bad.needs


def _pending(bad: Bad, rules: Rules) -> Bad:
    text = (*bad.text, f"not seen {_needed(bad, rules)} times in a row yet")
    return structs.replace(bad, verdict=Verdict.WARN, remedy=Remedy.NONE, text=text)


def _plain(*text: str) -> Bad:
    return Bad(Verdict.WARN, Cause.NODE, Remedy.NONE, text)


# ── findings ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def _make(check: Check, memo: _Memo, verdict: Verdict, since: float, bad: Bad, part: str = "") -> Finding:
    text, proof, remedy, flags = bad.text[:_LINES], bad.proof and verdict is Verdict.FAIL, bad.remedy, bad.flags
    if verdict is Verdict.FAIL and memo.rules.checks.get(check.name) == "observe":
        verdict, proof, remedy, flags = Verdict.WARN, False, Remedy.NONE, (*flags, Flag.OBSERVED)
        text = (*text[: _LINES - 1], "observe only: nothing is done for it")
    evidence = tuple(Evidence(bad.source or check.readers[0], line, since) for line in text)
    return Finding(
        check.name, verdict, bad.cause, remedy, since, evidence, node=memo.node, proof=proof, part=part, flags=flags
    )  # fmt: skip


def _named(finding: Finding, seen: Seen) -> Finding:
    """What failed, in the words that a request for its replacement needs."""
    if finding.verdict is not Verdict.FAIL or not (who := seen.who.get(finding.part)):
        return finding
    return structs.replace(finding, evidence=(*finding.evidence[: _LINES - 1], Evidence("nvml", who, finding.since)))


def _unknown(check: Check, said: list[Unknown], at: float, memo: _Memo) -> Finding:
    whys = tuple(dict.fromkeys(one.why for one in said))
    if any(one.decides for one in said):
        return _make(check, memo, Verdict.UNKNOWN, at, _plain(*whys), "")
    # nothing of the kind is here, or this user may not read it, and the rules do not expect it
    why = structs.replace(_plain("not to be known here: " + "; ".join(whys)), flags=(Flag.UNAVAILABLE,))
    return _make(check, memo, Verdict.UNKNOWN, at, why, "")


def _as_before(finding: Finding, old: Finding | None) -> Finding:
    """The one that was told, times included, if it says the same; else since when it held is kept."""
    if old is None or (finding.verdict, finding.cause) != (old.verdict, old.cause):
        return finding
    same = [e.text for e in finding.evidence] == [e.text for e in old.evidence]
    if same and (finding.remedy, finding.proof, finding.flags) == (old.remedy, old.proof, old.flags):
        return old
    return structs.replace(finding, since=min(finding.since, old.since))
