"""Run all node checks on a node's state and turn their results into findings.

The module is pure: `NodeChecks.evaluate` takes a `NodeState` and returns findings.

A check gives one finding for each component with a problem. If there is no problem, it gives one finding for the whole
check: OK, or UNKNOWN with the reason. A finding that is no longer returned has cleared. A FAIL needs proof, or several
failing runs in a row (``rules.hysteresis``); until then the problem is reported as a WARN that says how many failing
runs the FAIL needs. A missing sample neither clears nor causes a FAIL. An unchanged situation gives an equal finding,
including its times.

The check "readers" reports readers that hang or fail. It is in this module because all other checks depend on the
readers. A reader that hangs makes the node UNKNOWN at first: the machine may be under load, or another process may hold
the driver's lock for a moment. A hung NVML reader fails the node if the hang lasts (``rules.readers.stall``) and a
second observation shows that the driver hangs; without a second observation the check gives a warning. Three
observations count: DCGM's reader has been hung for the same time; a process is in state D inside the driver; or the
kernel reports a process of the driver as hung. DCGM's hang does not count if all readers hang or fail, because the
cause is then the machine or its storage.

Call `NodeChecks.evaluate` after each `NodeState.add`: a check runs at most once per call, however many samples were
added before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from msgspec import structs

from ...config.health_rules import Rules
from ...core.types import Cause, Evidence, Finding, Flag, NodeName, Remedy, Verdict
from ..readers.base import ACCELERATOR_READERS, READERS
from ..readers.samples import HostData
from . import dcgm, fabric, gpu, gpu_links, host, kernel_log, xid
from .base import Check, CheckResult, Passed, Problem, Unknown, fail, warn
from .node_state import NodeState

_MAX_EVIDENCE_LINES = 5
_SEVERITY = {Verdict.WARN: 1, Verdict.FAIL: 2}
_DRIVER_FUNCTIONS = ("nv", "uvm", "rm_", "os_acquire")
"""Prefixes of the kernel functions in which a process waits for NVIDIA's driver."""
_DRIVER_PROCESSES = ("nvidia", "nv-", "nv_queue")
"""Prefixes of the names of processes that belong to NVIDIA's driver or serve it. Only processes of root count, because
users can choose any name for their own processes."""
_ROOT = 0
_HUNG_TASK = re.compile(r"INFO: task (?P<name>.+):\d+ blocked ")
_FAILED_STATES = ("hung", "broken")
"""States of a reader that is installed and permitted, but does not work."""


# ── the check of the readers themselves ───────────────────────────────────────────────────────────────────────────────
def _is_missing(reader: str, state: NodeState, rules: Rules) -> bool:
    """Return whether the reader does not work although it should.

    A reader should work in three cases: the rules require it; its state is hung or broken, which shows that its source
    exists; or it reads accelerators and has returned data before. The caller has checked that the newest read failed.
    """
    gone = reader in ACCELERATOR_READERS and reader in state.last_data
    return state.newest[reader].state in _FAILED_STATES or _is_required(reader, state, rules) or gone


def _is_required(reader: str, state: NodeState, rules: Rules) -> bool:
    return reader in rules.required_readers(state.accelerator_reader)


def _check_readers(state: NodeState, rules: Rules, now: float) -> Iterator[CheckResult]:
    """Report readers that do not work, and a GPU driver that hangs."""
    if _hangs_for_long("nvml", state, rules, now):
        others = any(reading.state not in _FAILED_STATES for reading in state.newest.values())
        both = _hangs_for_long("dcgm", state, rules, now) and others
        witness = "DCGM does not answer either" if both else _stuck_in_driver(state)
        if witness:
            text = f"NVML does not answer, and {witness}"
            yield fail(Cause.GPU, Remedy.REBOOT, text, component="nvml", proof=True, source="nvml")
        else:
            text = "NVML does not answer, and nothing else shows that the driver hangs"
            yield warn(Cause.GPU, Remedy.SUPPORT, text, component="nvml", source="nvml")
    for name in READERS:
        newest = state.newest.get(name)
        if newest is None:
            continue
        if newest.state in _FAILED_STATES:
            problem = "does not answer" if newest.state == "hung" else "fails"
            yield Unknown(f"{name} {problem}: {newest.why or newest.state}", makes_node_unknown=True)
        elif newest.state != "read" and _is_missing(name, state, rules):
            problem = "expected here" if _is_required(name, state, rules) else "read before"
            yield Unknown(f"{name}, which is {problem}: {newest.why or newest.state}", makes_node_unknown=True)


def _hangs_for_long(reader: str, state: NodeState, rules: Rules, now: float) -> bool:
    """Return whether the reader has been hung for ``rules.readers.stall`` s.

    The duration of the hang counts, not the number of samples: a reader whose process hangs in the kernel gives no
    further samples.
    """
    since = state.hung_since.get(reader)
    return since is not None and now - since >= rules.readers.stall


def _stuck_in_driver(state: NodeState) -> str:
    """Return a text about a process that hangs in NVIDIA's driver; empty if there is none."""
    data = state.data("host")
    stuck = data.stuck if isinstance(data, HostData) else ()
    found = (
        process
        for process in stuck
        if process.kernel_function.startswith(_DRIVER_FUNCTIONS)
        or (process.name.startswith(_DRIVER_PROCESSES) and process.uid == _ROOT)
    )
    if process := next(found, None):
        return f"process {process.pid} ({process.name}) is stuck in the driver"
    since = state.hung_since["nvml"]
    texts = (
        line.event.text
        for line in state.log
        if line.event.kind == "hung_task" and line.at >= since and line.event.uid == _ROOT
    )
    names = (match["name"] for text in texts if (match := _HUNG_TASK.search(text)))
    name = next((name for name in names if name.startswith(_DRIVER_PROCESSES)), "")
    return f"the kernel reports {name} as hung" if name else ""


_READERS_CHECK = Check(
    "readers",
    READERS,
    _check_readers,
    "whether each reader of the node answers in time",
    "a reader does not answer: UNKNOWN; NVML's reader does not answer for readers.stall s: WARN, support; DCGM's"
    " reader does not either, or a process is stuck in the driver: FAIL, reboot",
    "NVSentinel (probe deadline)",
    any_reader=True,
)

CHECKS: tuple[Check, ...] = (
    _READERS_CHECK,
    *gpu.CHECKS,
    *gpu_links.CHECKS,
    *xid.CHECKS,
    *dcgm.CHECKS,
    *kernel_log.CHECKS,
    *fabric.CHECKS,
    *host.CHECKS,
)


@dataclass(slots=True)
class CheckHysteresis:
    """Results of one check for one component of the node over the last runs."""

    problems_in_row: int = 0
    passes_in_row: int = 0
    failures_in_row: int = 0
    non_failures_in_row: int = 0
    since: float = 0.0
    """Time (s) at which the current problem began: the problem's ``at`` or, if it has none, the time of the first run
    that found the problem."""
    failure: Problem | None = None
    """Problem with verdict FAIL that is confirmed and not cleared."""
    warning: Problem | None = None
    """Problem with verdict WARN, or an unconfirmed FAIL, that is not cleared."""
    passes_to_clear: int = 1

    def update(self, problem: Problem | None, rules: Rules, at: float) -> None:
        """Count one run of the check at time ``at`` (s); ``problem`` is None if the run found nothing."""
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
        """Return the problem to report; None if there is none."""
        return self.failure or self.warning


@dataclass(slots=True)
class NodeChecks:
    """All checks of one node, with what they keep from one evaluation to the next."""

    node: NodeName
    rules: Rules = field(default_factory=Rules)
    """Rules of the last evaluation."""
    hysteresis: dict[str, dict[str, CheckHysteresis]] = field(default_factory=dict)
    """Hysteresis by check and component."""
    last_counts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Sample counts at the last run of each check."""
    findings: dict[str, list[Finding]] = field(default_factory=dict)
    """Findings of the last run of each check."""

    def evaluate(self, state: NodeState, rules: Rules, now: float) -> list[Finding]:
        """Return the findings of all checks on this node, OK and UNKNOWN included, in the order of :data:`CHECKS`.

        ``now`` is in seconds of the clock of the samples.
        """
        if self.rules != rules:  # run every check again
            self.rules, self.last_counts = rules, {}
        found: list[Finding] = []
        for check in CHECKS:
            if rules.checks.get(check.name) == "off":
                continue
            external_updates = 0 if check.triggers else state.external_updates
            readings = (state.reading_counts.get(name, 0) for name in check.triggers or check.readers)
            counts = (external_updates, *readings)
            if self.last_counts.get(check.name) != counts:
                self.last_counts[check.name] = counts
                self.findings[check.name] = list(_run_check(check, state, self, now))
            found += self.findings[check.name]
        return found

    def pending(self) -> set[str]:
        """Return the names of the readers whose next samples can confirm or clear a failure that is not raised yet.

        Such a failure was found without proof, and in fewer consecutive samples than its check requires.
        """
        return {
            reader
            for check in CHECKS
            for hysteresis in self.hysteresis.get(check.name, {}).values()
            if hysteresis.failures_in_row and hysteresis.failure is None
            for reader in check.readers
        }


def is_uninformative(finding: Finding) -> bool:
    """Return whether the finding is an UNKNOWN about something that this node is not expected to report.

    Such an UNKNOWN does not indicate a problem.
    """
    return finding.verdict is Verdict.UNKNOWN and Flag.UNAVAILABLE in finding.flags


def unknown_checks(rules: Rules) -> list[str]:
    """Return the names in the rules' ``[checks]`` that are not names of checks."""
    return sorted(set(rules.checks) - {check.name for check in CHECKS})


# ── one check ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def _run_check(check: Check, state: NodeState, checks: NodeChecks, now: float) -> Iterator[Finding]:
    """Run one check and return its findings."""
    at = max((state.reading_at(reader) for reader in check.readers if reader in state.newest), default=now)
    blind = _unreadable(check, state, checks.rules)
    results: list[CheckResult] = [blind] if blind is not None else list(check.run(state, checks.rules, now))
    hysteresis = checks.hysteresis.setdefault(check.name, {})
    if blind is None:
        _update_hysteresis(results, hysteresis, checks.rules, at)
    fresh = [
        _with_gpu_label(_finding(check, checks, state, problem.verdict, standing.since, problem, component), state)
        for component, standing in hysteresis.items()
        if (problem := standing.reported) is not None
    ]
    unknown = [result for result in results if isinstance(result, Unknown)]
    # a problem without a component replaces UNKNOWN, which has the same key
    if unknown and all(finding.component for finding in fresh):
        fresh.append(_unknown_finding(check, unknown, at, checks, state))
    elif not fresh:
        text = next((result.text for result in results if isinstance(result, Passed)), "nothing wrong")
        fresh.append(_finding(check, checks, state, Verdict.OK, at, _plain_problem(text)))
    old = {(finding.component, finding.verdict): finding for finding in checks.findings.get(check.name, ())}
    return (_keep_unchanged(finding, old.get((finding.component, finding.verdict))) for finding in fresh)


def _unreadable(check: Check, state: NodeState, rules: Rules) -> Unknown | None:
    """Return why this check cannot run at all; None if it can."""
    newest = {reader: state.newest.get(reader) for reader in check.readers}
    unread = {reader: reading for reader, reading in newest.items() if reading is None or reading.state != "read"}
    if not unread or check.name == "readers" or (check.any_reader and len(unread) < len(newest)):
        return None  # the check "readers" reports the readers that do not work
    expected = any(reading is not None and _is_missing(reader, state, rules) for reader, reading in unread.items())
    reasons = (
        f"{reader}: {reading.why or reading.state}" if reading else f"{reader}: not read yet"
        for reader, reading in unread.items()
    )
    return Unknown("; ".join(reasons), makes_node_unknown=expected)


def _update_hysteresis(
    results: list[CheckResult], hysteresis: dict[str, CheckHysteresis], rules: Rules, at: float
) -> None:
    """Update the hysteresis of all components that this run judged.

    A component was judged if this run found a problem of the component. A component with an earlier problem was judged
    too, unless this run reports the component in an `Unknown`.
    """
    problems: dict[str, Problem] = {}
    for result in results:
        if isinstance(result, Problem):
            known = problems.get(result.component)
            problems[result.component] = result if known is None else _merge(known, result)
    unjudged = {component for result in results if isinstance(result, Unknown) for component in result.components}
    for component in problems.keys() - hysteresis.keys():
        hysteresis[component] = CheckHysteresis()
    for component, standing in list(hysteresis.items()):
        if component in problems or component not in unjudged:
            standing.update(problems.get(component), rules, at)
            if standing.reported is None and not standing.problems_in_row:
                del hysteresis[component]


def _merge(first_problem: Problem, second_problem: Problem) -> Problem:
    """Return the more severe of two problems of one component, with the evidence lines of both."""
    first, second = sorted((first_problem, second_problem), key=lambda bad: -_SEVERITY[bad.verdict])
    return structs.replace(first, text=(*first.text, *second.text)[:_MAX_EVIDENCE_LINES])


def _failures_needed(problem: Problem, rules: Rules) -> int:
    return rules.hysteresis.bad if problem.failures_to_raise is None else problem.failures_to_raise


def _unconfirmed(problem: Problem, rules: Rules) -> Problem:
    text = (*problem.text, f"FAIL only after {_failures_needed(problem, rules)} failing runs in a row")
    return structs.replace(problem, verdict=Verdict.WARN, remedy=Remedy.NONE, text=text)


def _plain_problem(*text: str) -> Problem:
    return Problem(Verdict.WARN, Cause.NODE, Remedy.NONE, text)


# ── findings ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def _finding(
    check: Check,
    checks: NodeChecks,
    state: NodeState,
    verdict: Verdict,
    since: float,
    problem: Problem,
    component: str = "",
) -> Finding:
    text, proof, remedy, flags = (
        problem.text[:_MAX_EVIDENCE_LINES],
        problem.proof and verdict is Verdict.FAIL,
        problem.remedy,
        problem.flags,
    )
    if verdict is Verdict.FAIL and checks.rules.checks.get(check.name) == "observe":
        verdict, proof, remedy, flags = Verdict.WARN, False, Remedy.NONE, (*flags, Flag.OBSERVED)
        text = (*text[: _MAX_EVIDENCE_LINES - 1], "observe only: no action is taken")
    of_gpus = state.accelerator_reader
    source = problem.source or (of_gpus if of_gpus in check.readers else check.readers[0])
    evidence = tuple(Evidence(source, line, since) for line in text)
    return Finding(
        check.name,
        verdict,
        problem.cause,
        remedy,
        since,
        evidence,
        node=checks.node,
        proof=proof,
        component=component,
        flags=flags,
    )


def _with_gpu_label(finding: Finding, state: NodeState) -> Finding:
    """Return the finding with a line on the GPU's model and serial number, which a replacement request needs."""
    if finding.verdict is not Verdict.FAIL or not (label := state.gpu_labels.get(finding.component)):
        return finding
    return structs.replace(
        finding,
        evidence=(
            *finding.evidence[: _MAX_EVIDENCE_LINES - 1],
            Evidence(state.accelerator_reader, label, finding.since),
        ),
    )


def _unknown_finding(check: Check, unknowns: list[Unknown], at: float, checks: NodeChecks, state: NodeState) -> Finding:
    reasons = tuple(dict.fromkeys(unknown.reason for unknown in unknowns))
    if any(unknown.makes_node_unknown for unknown in unknowns):
        return _finding(check, checks, state, Verdict.UNKNOWN, at, _plain_problem(*reasons), "")
    # the rules do not require this hardware, and the node lacks it or this user may not read it
    why = structs.replace(_plain_problem("cannot be known here: " + "; ".join(reasons)), flags=(Flag.UNAVAILABLE,))
    return _finding(check, checks, state, Verdict.UNKNOWN, at, why, "")


def _keep_unchanged(finding: Finding, old: Finding | None) -> Finding:
    """Return the old finding if the new one differs from it only in its times, else the new finding.

    If the verdict and the cause are unchanged, the new finding keeps the earlier start time.
    """
    if old is None or (finding.verdict, finding.cause) != (old.verdict, old.cause):
        return finding
    same = [e.text for e in finding.evidence] == [e.text for e in old.evidence]
    if same and (finding.remedy, finding.proof, finding.flags) == (old.remedy, old.proof, old.flags):
        return old
    return structs.replace(finding, since=min(finding.since, old.since))
