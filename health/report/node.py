"""One node of a report: what stands against it, what it cost, what to do. Pure."""

from __future__ import annotations

import re
import shlex
from math import inf

from ...core.drains import RUN_PREFIX, DrainOwner, drain_owner
from ...core.types import Cause, Flag, Remedy, Verdict
from ..history import rates
from ..history import rates as lemons
from ..history.incidents import HARDWARE, INFRA, Chapter, Incident, Raised
from ..history.rates import DAY
from ..history.records import Acted, clipped
from .corroboration import Signal, Witnesses, accused_by, confirmed, score_by_users, witnesses_of
from .index import Book
from .model import DrainState, Line, NodeReport

MOST_EVIDENCE = 5
WELL_AGAIN = 3600.0
"""s that a later run has had a node, without finding the same, after which what was never taken back counts as past"""
"""what the reason of every drain of ours begins with"""
ADVICE = {
    Remedy.NONE: "watch",
    Remedy.RESTART: "nothing: a restart of the application is enough",
    Remedy.EXCLUDE: "keep it from jobs until it was looked at",
    Remedy.RESET_GPU: "drain it and reset its GPU (nvidia-smi --gpu-reset)",
    Remedy.REBOOT: "drain it and reboot it",
    Remedy.DRAIN: "drain it",
    Remedy.SUPPORT: "drain it and run the vendor's field diagnostics",
}
_GRAVITY = [Remedy.NONE, Remedy.RESTART, Remedy.EXCLUDE, Remedy.RESET_GPU, Remedy.REBOOT, Remedy.DRAIN, Remedy.SUPPORT]
_FACT = re.compile(
    r"\b(serial|boot[ _]id|driver|vbios|uuid)(?:\s+(?:is\s+)?|\s*[=:]\s*)([A-Za-z0-9][\w.\-]*\d[\w.\-]*)", re.IGNORECASE
)
_GPU = re.compile(r"\bGPU-[0-9a-fA-F-]{8,}")


def node_report(book: Book, name: str, drain: DrainState) -> NodeReport:
    mine = [one for one in book.incidents_of.get(name, []) if one.at >= book.since]
    infra = [one for one in mine if one.owner == INFRA and not one.injected]
    seen = [one for one in book.findings.get(name, []) if one.found.at >= book.since or one.until >= book.since]
    standing = [one for one in seen if _stands(book, name, one)]
    shown = standing or seen[-1:]
    acts = [(chapter, act) for chapter, act in book.acted.get(name, []) if act.at >= book.since]
    held_for = book.held(name, book.since)
    by_cause = witnesses_of(seen)
    accusing = [one for one in standing if accused_by(one, by_cause, drain.by_check)]
    accusers = {user for one in accusing for user in accused_by(one, by_cause, drain.by_check)}
    remedy = _remedy(accusing, infra)
    lemon = _lemon(book, name, drain.by_check)
    verdict = _verdict(standing, accusing)
    witnesses = accusers | {one.user for one in seen if one.critical} | {who for one in infra for who in one.witnesses}
    return NodeReport(
        name, verdict, _as_of(book, name), _cause(shown, infra), sorted({one.found.detector for one in shown}),
        _evidence(shown, seen, infra), min([*(one.at for one in seen), *(one.at for one in infra)], default=None),
        max([*(_last(one) for one in seen), *(one.at for one in infra)], default=None),
        sum(one.found.count for one in seen), sorted({one.found.part for one in seen if one.found.part}),
        _facts(seen), len(infra), sum(one.owner != INFRA and not one.injected for one in mine),
        sum(one.injected for one in mine), round(sum(one.gpu_hours for one in mine if not one.injected), 3),
        round(held_for / 3600, 3), rates.per(len(infra), held_for / DAY, 1000.0),
        sorted({run for one in mine for run in one.runs} | {one.run for one in seen}),
        sorted({user for one in mine for user in one.users} | {one.user for one in seen}),
        sorted(witnesses), bool(accusing) or lemon.lemon,
        sorted({node for one in infra for node in one.also} | _also(book, name, seen)),
        [_action(chapter, act) for chapter, act in acts][-MOST_EVIDENCE:],
        _advice(verdict, remedy, lemon, drain, sorted({one.user for one in standing}) if not accusing else []),
        remedy.value, drain, _scontrol(name, verdict, lemon, drain, accusing or shown, acts), lemon,
    )  # fmt: skip


def _stands(book: Book, node: str, one: Raised) -> bool:
    """It was never taken back, and no later run has had the node for a while and found it well."""
    if one.until < inf:
        return False
    after = book.held_by_others(node, (one.user, one.run), one.seen)
    same = any(other.found.detector == one.found.detector and other.at > one.at for other in book.findings[node])
    return after < WELL_AGAIN and not same


def _verdict(standing: list[Raised], accusing: list[Raised]) -> str:
    """FAIL needs evidence that accuses the node; anything that stands is at least a WARN."""
    if any(one.found.verdict is Verdict.FAIL for one in accusing):
        return Verdict.FAIL.value
    return Verdict.WARN.value if standing else Verdict.OK.value


def _as_of(book: Book, node: str) -> float:
    ends = [min(end, book.now) for (_, end), _ in book.spans.get(node, ())]
    return max([*ends, *(one.found.at for one in book.findings.get(node, ()))], default=0.0)


def _last(one: Raised) -> float:
    """When it was last said, or was over."""
    return one.found.at if one.until == inf else one.until


def _cause(shown: list[Raised], infra: list[Incident]) -> str:
    worst = sorted(shown, key=lambda one: (one.found.verdict is not Verdict.FAIL, not one.found.proof))
    return worst[0].found.cause.value if worst else infra[-1].cause if infra else ""


def _evidence(shown: list[Raised], seen: list[Raised], infra: list[Incident]) -> list[Line]:
    """At most five lines, in order: of each finding that stands one, then more of these, then what was seen before; of
    a node that was only lost, how."""
    told = [*(one for one in shown), *(one for one in reversed(seen) if one not in shown)]
    first = [_line(one, 0) for one in shown if one.found.evidence]
    rest = [_line(one, i) for one in told for i in range(len(one.found.evidence))]
    lost = [Line(one.at, "run", text) for one in infra for text in one.evidence] if not rest else []
    return sorted(list(dict.fromkeys((*first, *rest, *lost)))[:MOST_EVIDENCE], key=lambda one: one.at)


def _line(one: Raised, i: int) -> Line:
    said = one.found.evidence[i]
    return Line(said.at, one.found.detector, said.text)


def _facts(seen: list[Raised]) -> dict[str, str]:
    """What evidence says of serial numbers and versions: the newest word counts."""
    facts: dict[str, str] = {}
    for one in seen:
        if one.found.part.startswith("GPU-"):
            facts["uuid"] = one.found.part
        for said in one.found.evidence:
            for name, value in _FACT.findall(said.text):
                facts[name.lower().replace(" ", "_")] = value.rstrip(".")
            if gpus := _GPU.findall(said.text):
                facts["uuid"] = gpus[-1]
    return facts


def _also(book: Book, node: str, seen: list[Raised]) -> set[str]:
    """Where else a check of hardware failed for the same cause within 10 min."""
    mine = [one for one in seen if one.critical and one.found.cause in HARDWARE]
    return {other for one in mine for other in book.near(one.found.cause, one.at)} - {node}


def _remedy(accusing: list[Raised], infra: list[Incident]) -> Remedy:
    failing = [one.found.remedy for one in accusing if one.found.verdict is Verdict.FAIL]
    known = failing or [one.found.remedy for one in accusing]
    if not known and infra and infra[-1].lost:
        return Remedy.NONE
    return max(known, key=_GRAVITY.index, default=Remedy.NONE)


def _advice(verdict: str, remedy: Remedy, lemon: lemons.Lemon, drain: DrainState, alone: list[str]) -> str:
    """``alone``: users whose records stand against the node, and are not enough to accuse it."""
    if drain.whose == "foreign":
        return "none: it is drained already"
    if verdict == Verdict.FAIL.value:
        again = f"; it fails again and again (lemon score {lemon.score:g}): test it at length" if lemon.lemon else ""
        advice = ADVICE[Remedy.DRAIN if remedy in (Remedy.NONE, Remedy.RESTART) else remedy] + again
        return _drained_already(advice) if drain.drained else advice
    if lemon.lemon:
        advice = f"lemon: drain it and test it at length (score {lemon.score:g})"
        return _drained_already(advice) if drain.drained else advice
    if alone:
        return f"watch; only records of {' and '.join(alone)} say so: rrl health check on the node tells what is true"
    if verdict == Verdict.WARN.value:
        return f"watch; {ADVICE[remedy]}" if remedy is not Remedy.NONE else ADVICE[Remedy.NONE]
    return "undrain it if it was repaired" if drain.whose == "rrl" else "none"


def _drained_already(advice: str) -> str:
    return "find out what it has" if advice == ADVICE[Remedy.DRAIN] else advice.replace("drain it and ", "")


def _scontrol(
    name: str, verdict: str, lemon: lemons.Lemon, drain: DrainState, shown: list[Raised],
    acts: list[tuple[Chapter, Acted]],
) -> str:  # fmt: skip
    """Where nobody has drained it and somebody should. ``shown``: the evidence for that."""
    if drain.drained or not (verdict == Verdict.FAIL.value or lemon.lemon):
        return ""
    ours = next((act.reason for _, act in reversed(acts) if drain_owner(act.reason) is not DrainOwner.OTHER), "")
    if not ours:
        run = shown[-1].run if shown else "report"
        text = shown[-1].found.evidence[0].text if shown and shown[-1].found.evidence else "lemon node"
        cause = shown[-1].found.cause.value if shown else "node"
        ours = f"{RUN_PREFIX}{run}: {cause}: {text}"
    return drain_line(name, ours)


def drain_line(node: str, reason: str) -> str:
    """To be pasted into a shell; the reason may be anybody's words."""
    return f"scontrol update nodename={node} state=drain reason={shlex.quote(clipped(reason)[:200])}"


def _action(chapter: Chapter, act: Acted) -> Line:
    by = f" for {act.by}" if act.by else ""
    why = act.reason or (act.evidence[0] if act.evidence else "")
    said = f" (not drained: {act.said})" if act.said else ""
    return Line(act.at, f"{chapter.user}/{chapter.run}", f"{act.what}{by}: {why}{said}" if why else f"{act.what}{by}")


def _shared(book: Book, one: Raised) -> bool:
    """Others had the same at the same time, and nothing proves that it was this node's own."""
    doubtful = Flag.HELD_BACK in one.found.flags or not one.found.proof
    return doubtful and bool(book.near(one.found.cause, one.at) - {one.found.node})


def _lemon(book: Book, name: str, by_check: bool) -> lemons.Lemon:
    """``by_check``: the site's own check of the node has drained it."""
    since = book.lemon_since
    mine = [one for one in book.incidents_of.get(name, []) if book.counts_for_lemons(one)]
    found = [one for one in book.findings.get(name, []) if one.at >= since and one.critical]
    hardware = [one for one in found if one.found.cause in HARDWARE and not _shared(book, one)]
    xids = [one for one in found if "xid" in one.found.detector.lower()]
    acts = [(chapter, act) for chapter, act in book.acted.get(name, []) if act.at >= since]
    away = [(chapter, act) for chapter, act in acts if act.what in ("drained", "asked") and not act.by]
    out = [(chapter, act) for chapter, act in acts if act.what == "excluded" and act.cause and not act.by]
    held_for = book.held(name, since)
    told = [*(one.at for one in mine), *(one.at for one in hardware), *(act.at for _, act in away)]
    signals = lemons.Signals(
        node_failures_alone=sum(not one.also for one in mine),
        node_failures_together=sum(bool(one.also) for one in mine),
        failure_rate=int(lemons.fails_more(len(mine), held_for, book.lemon_failures, book.lemon_held)),
        out_of_service=len({act.at // DAY for _, act in away}),
        hardware_findings=len({one.at // DAY for one in hardware}),
        xids=len({(one.found.part, one.at // DAY) for one in xids}),
        excluded_by_users=len({chapter.user for chapter, _ in out}),
        days=len({at // DAY for at in told}),
    )
    weight = lemons.WEIGHTS
    said = [
        Signal(weight["node_failures_together" if one.also else "node_failures_alone"], one.witnesses, one.trusted)
        for one in mine
    ]  # fmt: skip
    by_cause = witnesses_of(found)
    once = {(one.user, one.at // DAY): one for one in hardware}
    said += [_signal(weight["hardware_findings"], one, by_cause, by_check) for one in once.values()]
    of_xids = {(one.user, one.found.part, one.at // DAY): one for one in xids}
    said += [_signal(weight["xids"], one, by_cause, by_check) for one in of_xids.values()]
    days_away = {(chapter.user, act.at // DAY, chapter.trusted) for chapter, act in away}
    said += [Signal(weight["out_of_service"], (user,), trusted) for user, _, trusted in days_away]
    users_out = {(chapter.user, chapter.trusted) for chapter, _ in out}
    said += [Signal(weight["excluded_by_users"], (user,), trusted) for user, trusted in users_out]
    return lemons.judged(signals, score_by_users(said))


def _signal(weight: float, one: Raised, by_cause: dict[Cause, Witnesses], by_check: bool) -> Signal:
    return Signal(weight, (one.user,), one.trusted, confirmed(one, by_cause, by_check))
