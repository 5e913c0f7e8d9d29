"""The failures of a run, from its events alone.

A failure is a finding, an unrequested end of a step or a rejected launch, with the recovery from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from signal import Signals

from msgspec import Struct, structs

from ...core.faults import FAULT_TRAITS, TargetKind
from ...core.launch import ExitReason, exit_text
from ...core.types import AGENT, STACKS, STANDBY_ROLE, Finding, Incarnation, NodeName, Verdict, role_of
from ...manager.model import events as ev
from ...manager.model.actions import Decision, Fence, Finish, Launch, RestartAll, StopStep
from ...manager.model.reduce_nodes import DRAIN, UNDRAIN

STACKS_WINDOW_S = 60.0
"""Greatest time (s) between a failure and stacks that are shown with it."""


class Failure(Struct, frozen=True):
    """An incarnation that failed, or a node that failed without any. Times are the manager's, in s since the epoch."""

    at: float
    """Time of the first trace of the failure."""
    incarnation: Incarnation | None
    node: NodeName | None
    evidence: tuple[str, ...]
    """Texts of the evidence of findings and of ends of steps, without duplicates."""
    injected: bool = False
    ended: bool = False
    """Whether the incarnation has ended or is no longer current; else it continued."""
    rung: str = ""
    """The repair that was chosen."""
    successor: Incarnation | None = None
    """The incarnation that replaced it and works (for an agent, or a role without a first unit of work: has joined)."""
    recovered_at: float | None = None
    has_stacks: bool = False
    """Whether ``evidence`` contains the stacks already."""


def failures(events: Iterable[ev.Stamped]) -> list[Failure]:
    """Return the failures in the order of their first traces."""
    collector = _FailureCollector()
    for stamped in events:
        collector.apply(stamped.event, stamped.at)
    return [collector.with_stacks(failure) for failure in collector.failures.values()]


class _FailureCollector:
    def __init__(self) -> None:
        self.failures: dict[Incarnation | NodeName, Failure] = {}
        self._nodes: dict[Incarnation, NodeName] = {}
        self._launches: dict[str, Incarnation] = {}
        self._stop_requested: set[Incarnation] = set()
        self._injected: set[Incarnation] = set()
        self._faulted_nodes: set[NodeName] = set()
        self._drained_nodes: set[str] = set()
        """Nodes that a user has the run leave: the end of their agents and standby processes is not a failure."""
        self._stacks: dict[Incarnation, tuple[float, ev.StacksCollected]] = {}
        """The newest stacks of each incarnation, and when they were collected."""
        self._shutting_down = False
        """Whether the run is ending, so that every end of a step from here on was requested."""

    def apply(self, event: ev.Event, at: float) -> None:
        if isinstance(event, ev.Intended):
            self._on_intended(event)
        elif isinstance(event, ev.Decided):
            self._on_decided(event.action, at)
        elif isinstance(event, ev.FindingChanged):
            if event.finding.verdict is Verdict.FAIL and not self._shutting_down:
                self._on_finding(event.finding, at)
        elif isinstance(event, ev.StepEnded):
            self._on_step_ended(event, at)
        elif (
            isinstance(event, ev.IntentSettled)
            and not event.ok
            and event.tag in self._launches
            and not self._shutting_down
        ):
            self._record_failure(self._launches[event.tag], at, f"not launched: {event.detail}", ended=True)
        elif isinstance(event, ev.FaultInjected) and event.ok and not event.ended:
            self._on_fault(event)
        elif isinstance(event, ev.StacksCollected):
            self._stacks[event.incarnation] = at, event
        elif isinstance(event, ev.Resumed):
            self._shutting_down = False
        elif isinstance(event, ev.CommandReceived) and event.command == DRAIN:
            self._drained_nodes.add(event.target)
        elif isinstance(event, ev.CommandReceived) and event.command == UNDRAIN:
            self._drained_nodes.discard(event.target)
        elif isinstance(event, ev.Joined | ev.FirstWorkDone):
            self._record_recovery(event.incarnation, at, worked=isinstance(event, ev.FirstWorkDone))

    def with_stacks(self, failure: Failure) -> Failure:
        """Return the failure with the stacks of its processes as further evidence, unless it has stacks already.

        Only stacks taken within ``STACKS_WINDOW_S`` of the failure are added.
        """
        if failure.incarnation not in self._stacks:
            return failure
        at, stacks = self._stacks[failure.incarnation]
        lines = [*stacks.groups, *([f"whole: {stacks.file}"] if stacks.file else [])]
        if abs(at - failure.at) > STACKS_WINDOW_S or failure.has_stacks:
            return failure
        return structs.replace(failure, evidence=(*failure.evidence, *(f"stacks: {line}" for line in lines)))

    def _on_fault(self, event: ev.FaultInjected) -> None:
        if event.incarnation is not None:
            self._injected.add(event.incarnation)
        if (
            event.kind is not None and FAULT_TRAITS[event.kind].target_kind is TargetKind.NODE
        ):  # with everybody who is on it by now
            self._injected.update(incarnation for incarnation, node in self._nodes.items() if node == event.node)
            self._faulted_nodes.add(event.node)

    def _on_intended(self, event: ev.Intended) -> None:
        action = event.action
        if isinstance(action, Launch):
            self._nodes[action.incarnation] = action.node
            self._launches[action.step] = action.incarnation
        elif isinstance(action, StopStep):
            self._stop_requested.add(action.incarnation)

    def _on_decided(self, action: Decision, at: float) -> None:
        if isinstance(action, Finish):
            self._shutting_down = True
        elif isinstance(action, Fence | RestartAll) and not self._shutting_down:
            for fence in action.fences if isinstance(action, RestartAll) else (action,):
                is_support = role_of(fence.incarnation.replica) in (AGENT, STANDBY_ROLE)
                if not fence.charged or (is_support and self._nodes.get(fence.incarnation) in self._drained_nodes):
                    # it has not failed: it moves, or restarts for another's sake, or is not needed there any more
                    self._stop_requested.add(fence.incarnation)
                    continue
                self._record_failure(fence.incarnation, at, *fence.why.evidence, ended=True)
                failure = self.failures[fence.incarnation]
                self.failures[fence.incarnation] = structs.replace(failure, rung=fence.rung.value)

    def _on_finding(self, finding: Finding, at: float) -> None:
        evidence = [f"{finding.detector}: {one.source}: {one.text}" for one in finding.evidence]
        if finding.incarnation is not None:
            self._record_failure(finding.incarnation, at, *evidence)
            if any(one.source == STACKS for one in finding.evidence):
                self.failures[finding.incarnation] = structs.replace(
                    self.failures[finding.incarnation], has_stacks=True
                )
        elif finding.node is not None:
            known = self.failures.get(finding.node)
            if known is None:
                self.failures[finding.node] = Failure(
                    at, None, finding.node, tuple(evidence), finding.node in self._faulted_nodes
                )

    def _on_step_ended(self, event: ev.StepEnded, at: float) -> None:
        incarnation = event.incarnation
        if incarnation in self.failures:
            self.failures[incarnation] = structs.replace(self.failures[incarnation], ended=True)
        if (
            self._shutting_down
            or incarnation in self._stop_requested
            or event.reason is ExitReason.STOPPED
            or event.code == 0
        ):
            return
        number = event.signal
        how = f"exit code {event.code}, " if event.code is not None else f"{_signal(number)}, " if number else ""
        self._record_failure(
            incarnation, at, f"its step ended: {how}{exit_text(event.reason, event.detail)}", ended=True
        )

    def _record_failure(self, incarnation: Incarnation, at: float, *evidence: str, ended: bool = False) -> None:
        failure = self.failures.get(incarnation)
        if failure is None:
            failure = Failure(at, incarnation, self._nodes.get(incarnation), (), incarnation in self._injected)
        all_evidence = tuple(dict.fromkeys((*failure.evidence, *evidence)))
        self.failures[incarnation] = structs.replace(
            failure,
            evidence=all_evidence,
            ended=failure.ended or ended,
            injected=failure.injected or incarnation in self._injected,
        )

    def _record_recovery(self, incarnation: Incarnation, at: float, worked: bool) -> None:
        for key, failure in self.failures.items():
            if failure.incarnation is None or not _follows(incarnation, failure.incarnation):
                continue
            if failure.successor is None or (worked and failure.successor == incarnation):
                self.failures[key] = structs.replace(failure, successor=incarnation, recovered_at=at)


def _follows(incarnation: Incarnation, failed: Incarnation) -> bool:
    return incarnation.replica == failed.replica and incarnation.number > failed.number


def _signal(number: int) -> str:
    try:
        return f"signal {number} ({Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def concerns(selector: str | None, failure: Failure) -> bool:
    """Return whether the failure is of the selected role, replica or incarnation; True without a selector."""
    incarnation = failure.incarnation
    if selector is None or incarnation is None:
        return selector is None
    return selector in (role_of(incarnation.replica), incarnation.replica, str(incarnation))
