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
from .base import Check, CheckResult, Passed, Problem, Unknown, fail
from .node_state import NodeState

_MAX_EVIDENCE_LINES = 5
_SEVERITY = {Verdict.WARN: 1, Verdict.FAIL: 2}
_DRIVER_FUNCTIONS = ("nv", "uvm", "rm_", "os_acquire")
"""beginnings of the kernel functions in which a process hangs that waits for NVIDIA's driver"""


_DRIVER_PROCESSES = ("nvidia", "nv-", "nv_queue")
"""beginnings of the names of processes that do nothing but ask that driver, or are of it. Users name their processes as
they like: root's count"""
_ROOT = 0
_HUNG_TASK = re.compile(r"INFO: task (?P<name>.+):\d+ blocked ")
_FAILED_STATES = ("hung", "broken")
"""states of a reader that should be able to read"""


# ── the check of the readers themselves ─────────────────────────────────────────────────────────────────────────────
def _is_missing(reader: str, state: NodeState, rules: Rules) -> bool:
    """It does not read and should: it is expected, something is wrong with it, or GPUs had a driver before."""
    gone = reader == "nvml" and reader in state.last_data
    return state.newest[reader].state in _FAILED_STATES or reader in rules.required_readers or gone


def _check_readers(state: NodeState, rules: Rules, now: float) -> Iterator[CheckResult]:
    if _hangs_for_long("nvml", state, rules, now):
        others = any(one.state not in _FAILED_STATES for one in state.newest.values())
        both = _hangs_for_long("dcgm", state, rules, now) and others
        witness = "DCGM does not answer either" if both else _stuck_in_driver(state)
        if witness:
            text = f"NVML does not answer, and {witness}"
            yield fail(Cause.GPU, Remedy.REBOOT, text, component="nvml", proof=True, source="nvml")
    for name in READERS:
        newest = state.newest.get(name)
        if newest is None:
            continue
        if newest.state in _FAILED_STATES:
            problem = "does not answer" if newest.state == "hung" else "fails"
            yield Unknown(f"{name} {problem}: {newest.why or newest.state}", makes_node_unknown=True)
        elif newest.state != "read" and _is_missing(name, state, rules):
            problem = "expected here" if name in rules.required_readers else "read before"
            yield Unknown(f"{name}, which is {problem}: {newest.why or newest.state}", makes_node_unknown=True)


def _hangs_for_long(reader: str, state: NodeState, rules: Rules, now: float) -> bool:
    """By the clock, not by readings: of a process that hangs in the kernel there are two, and no other is started."""
    since = state.hung_since.get(reader)
    return since is not None and now - since >= rules.readers.stall


def _stuck_in_driver(state: NodeState) -> str:
    data = state.data("host")
    stuck = data.stuck if isinstance(data, HostData) else ()
    found = (
        one for one in stuck
        if one.kernel_function.startswith(_DRIVER_FUNCTIONS) or (one.name.startswith(_DRIVER_PROCESSES) and one.uid == _ROOT)
    )  # fmt: skip
    if one := next(found, None):
        return f"process {one.pid} ({one.name}) is stuck in its driver"
    since = state.hung_since["nvml"]
    lines = (
        one.event.text for one in state.log
        if one.event.kind == "hung_task" and one.at >= since and one.event.uid == _ROOT
    )  # fmt: skip
    names = (match["name"] for line in lines if (match := _HUNG_TASK.search(line)))
    name = next((name for name in names if name.startswith(_DRIVER_PROCESSES)), "")
    return f"the kernel calls {name} hung" if name else ""


_READERS_CHECK = Check(
    "readers", READERS, _check_readers, "whether the readers of the node answer in time",
    "one does not: UNKNOWN; NVML does not for readers.stall s, nor does DCGM for as long, or a process is stuck"
    " in its driver: FAIL, reboot", "NVSentinel (probe deadline)", any_reader=True,
)  # fmt: skip

CHECKS: tuple[Check, ...] = (
    _READERS_CHECK, *gpu.CHECKS, *gpu_links.CHECKS, *xid.CHECKS, *dcgm.CHECKS,
    *kernel_log.CHECKS, *fabric.CHECKS, *host.CHECKS,
)  # fmt: skip


@dataclass(slots=True)
class CheckHysteresis:
    """How often one part of the node looked bad to one check."""

    problems_in_row: int = 0
    passes_in_row: int = 0
    failures_in_row: int = 0
    non_failures_in_row: int = 0
    since: float = 0.0
    """when the looks in a row began (s)"""
    failure: Problem | None = None
    warning: Problem | None = None
    passes_to_clear: int = 1

    def update(self, problem: Problem | None, rules: Rules, at: float) -> None:
        failing = problem is not None and problem.verdict is Verdict.FAIL
        if problem is not None and not self.problems_in_row and self.failure is None and self.warning is None:
            self.since = at if problem.at is None else problem.at
        self.problems_in_row, self.passes_in_row = (
            (self.problems_in_row + 1, 0) if problem is not None else (0, self.passes_in_row + 1)
        )
        self.failures_in_row, self.non_failures_in_row = (
            (self.failures_in_row + 1, 0) if failing else (0, self.non_failures_in_row + 1)
        )
        if problem is not None:
            self.passes_to_clear = rules.hysteresis.good if problem.passes_to_clear is None else problem.passes_to_clear
        if self.failure is not None and self.non_failures_in_row >= self.passes_to_clear:
            self.failure = None
        if self.warning is not None and self.passes_in_row >= self.passes_to_clear:
            self.warning = None
        if problem is not None and failing:
            if problem.proof or self.failure is not None or self.failures_in_row >= _failures_needed(problem, rules):
                self.failure = problem
            else:
                self.warning = _unconfirmed(problem, rules)
        elif problem is not None and self.problems_in_row >= (problem.failures_to_raise or 1):
            self.warning = problem

    @property
    def reported(self) -> Problem | None:
        return self.failure or self.warning


@dataclass(slots=True)
class _Memo:
    rules: Rules
    node: NodeName
    hysteresis: dict[str, dict[str, CheckHysteresis]] = field(default_factory=dict)
    """by check and part"""
    last_counts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """by check: the readings that it was last shown"""
    findings: dict[str, list[Finding]] = field(default_factory=dict)
    """by check: the last ones"""


def evaluate(state: NodeState, node: NodeName, rules: Rules, now: float) -> list[Finding]:
    """All verdicts on this node, OK and UNKNOWN too, in the order of :data:`CHECKS`. ``now``: s, as readings have."""
    memo = state.memo
    if not isinstance(memo, _Memo) or memo.node != node:
        state.memo = memo = _Memo(rules, node)
    elif memo.rules != rules:  # other rules look anew; what is known of the node stays
        memo.rules, memo.last_counts = rules, {}
    found: list[Finding] = []
    for check in CHECKS:
        if rules.checks.get(check.name) == "off":
            continue
        external_updates = 0 if check.triggers else state.external_updates
        counts = (external_updates, *(state.reading_counts.get(name, 0) for name in check.triggers or check.readers))
        if memo.last_counts.get(check.name) != counts:
            memo.last_counts[check.name] = counts
            memo.findings[check.name] = list(_run_check(check, state, memo, now))
        found += memo.findings[check.name]
    return found


def pending(state: NodeState) -> set[str]:
    """Readers whose next reading decides whether something has failed: one look was bad, and is no proof."""
    if not isinstance(state.memo, _Memo):
        return set()
    return {
        reader
        for check in CHECKS
        for hysteresis in state.memo.hysteresis.get(check.name, {}).values()
        if hysteresis.failures_in_row and hysteresis.failure is None
        for reader in check.readers
    }


def is_uninformative(finding: Finding) -> bool:
    """Return whether the finding is UNKNOWN and no reason to doubt the node: nothing was expected to be known."""
    return finding.verdict is Verdict.UNKNOWN and Flag.UNAVAILABLE in finding.flags


def unknown_checks(rules: Rules) -> list[str]:
    """Names in [checks] that no check has."""
    return sorted(set(rules.checks) - {check.name for check in CHECKS})


# ── one check ────────────────────────────────────────────────────────────────────────────────────────────────────────
def _run_check(check: Check, state: NodeState, memo: _Memo, now: float) -> Iterator[Finding]:
    at = max((state.reading_at(reader) for reader in check.readers if reader in state.newest), default=now)
    blind = _unreadable(check, state, memo.rules)
    results: list[CheckResult] = [blind] if blind is not None else list(check.run(state, memo.rules, now))
    hysteresis = memo.hysteresis.setdefault(check.name, {})
    if blind is None:
        _update_hysteresis(results, hysteresis, memo.rules, at)
    fresh = [
        _with_gpu_label(_finding(check, memo, bad.verdict, hysteresis[component].since, bad, component), state)
        for component, standing in hysteresis.items()
        if (bad := standing.reported) is not None
    ]
    unknown = [one for one in results if isinstance(one, Unknown)]
    if unknown and all(finding.component for finding in fresh):  # else one of the same key, and worse, stands
        fresh.append(_unknown_finding(check, unknown, at, memo))
    elif not fresh:
        text = next((one.text for one in results if isinstance(one, Passed)), "nothing wrong")
        fresh.append(_finding(check, memo, Verdict.OK, at, _plain_problem(text)))
    old = {(one.component, one.verdict): one for one in memo.findings.get(check.name, ())}
    return (_keep_unchanged(finding, old.get((finding.component, finding.verdict))) for finding in fresh)


def _unreadable(check: Check, state: NodeState, rules: Rules) -> Unknown | None:
    """Why this check cannot look at all."""
    newest = {reader: state.newest.get(reader) for reader in check.readers}
    unread = {reader: one for reader, one in newest.items() if one is None or one.state != "read"}
    if not unread or check.name == "readers" or (check.any_reader and len(unread) < len(newest)):
        return None  # "readers" judges those that do not read
    expected = any(one is not None and _is_missing(reader, state, rules) for reader, one in unread.items())
    reasons = (
        f"{reader}: {one.why or one.state}" if one else f"{reader}: not read yet" for reader, one in unread.items()
    )
    return Unknown("; ".join(reasons), makes_node_unknown=expected)


def _update_hysteresis(
    results: list[CheckResult], hysteresis: dict[str, CheckHysteresis], rules: Rules, at: float
) -> None:
    """One look: at the parts that are bad, and at those that were."""
    problems: dict[str, Problem] = {}
    for one in results:
        if isinstance(one, Problem):
            problems[one.component] = one if one.component not in problems else _merge(problems[one.component], one)
    unjudged = {component for one in results if isinstance(one, Unknown) for component in one.components}
    for component in problems.keys() - hysteresis.keys():
        hysteresis[component] = CheckHysteresis()
    for component, standing in list(hysteresis.items()):
        if component in problems or component not in unjudged:
            standing.update(problems.get(component), rules, at)
            if standing.reported is None and not standing.problems_in_row:
                del hysteresis[component]


def _merge(first_problem: Problem, second_problem: Problem) -> Problem:
    """Two things that a check says of one part: the graver, with the words of both."""
    first, second = sorted((first_problem, second_problem), key=lambda bad: -_SEVERITY[bad.verdict])
    return structs.replace(first, text=(*first.text, *second.text)[:_MAX_EVIDENCE_LINES])


def _failures_needed(problem: Problem, rules: Rules) -> int:
    return rules.hysteresis.bad if problem.failures_to_raise is None else problem.failures_to_raise


def _unconfirmed(problem: Problem, rules: Rules) -> Problem:
    text = (*problem.text, f"not seen {_failures_needed(problem, rules)} times in a row yet")
    return structs.replace(problem, verdict=Verdict.WARN, remedy=Remedy.NONE, text=text)


def _plain_problem(*text: str) -> Problem:
    return Problem(Verdict.WARN, Cause.NODE, Remedy.NONE, text)


# ── findings ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def _finding(
    check: Check, memo: _Memo, verdict: Verdict, since: float, problem: Problem, component: str = ""
) -> Finding:
    text, proof, remedy, flags = (
        problem.text[:_MAX_EVIDENCE_LINES],
        problem.proof and verdict is Verdict.FAIL,
        problem.remedy,
        problem.flags,
    )
    if verdict is Verdict.FAIL and memo.rules.checks.get(check.name) == "observe":
        verdict, proof, remedy, flags = Verdict.WARN, False, Remedy.NONE, (*flags, Flag.OBSERVED)
        text = (*text[: _MAX_EVIDENCE_LINES - 1], "observe only: nothing is done for it")
    evidence = tuple(Evidence(problem.source or check.readers[0], line, since) for line in text)
    return Finding(
        check.name, verdict, problem.cause, remedy, since, evidence, node=memo.node, proof=proof, component=component, flags=flags
    )  # fmt: skip


def _with_gpu_label(finding: Finding, state: NodeState) -> Finding:
    """What failed, in the words that a request for its replacement needs."""
    if finding.verdict is not Verdict.FAIL or not (label := state.gpu_labels.get(finding.component)):
        return finding
    return structs.replace(
        finding, evidence=(*finding.evidence[: _MAX_EVIDENCE_LINES - 1], Evidence("nvml", label, finding.since))
    )


def _unknown_finding(check: Check, unknowns: list[Unknown], at: float, memo: _Memo) -> Finding:
    reasons = tuple(dict.fromkeys(one.reason for one in unknowns))
    if any(one.makes_node_unknown for one in unknowns):
        return _finding(check, memo, Verdict.UNKNOWN, at, _plain_problem(*reasons), "")
    # nothing of the kind is here, or this user may not read it, and the rules do not expect it
    why = structs.replace(_plain_problem("not to be known here: " + "; ".join(reasons)), flags=(Flag.UNAVAILABLE,))
    return _finding(check, memo, Verdict.UNKNOWN, at, why, "")


def _keep_unchanged(finding: Finding, old: Finding | None) -> Finding:
    """The one that was told, times included, if it says the same; else since when it held is kept."""
    if old is None or (finding.verdict, finding.cause) != (old.verdict, old.cause):
        return finding
    same = [e.text for e in finding.evidence] == [e.text for e in old.evidence]
    if same and (finding.remedy, finding.proof, finding.flags) == (old.remedy, old.proof, old.flags):
        return old
    return structs.replace(finding, since=min(finding.since, old.since))
