"""Translate events of a run to records of the site's health history. Pure."""

from __future__ import annotations

from ...cluster.base import NodeState
from ...core.types import Cause, Finding, NodeName, Verdict, gang_of, is_support
from ...health.history.records import (
    MAX_EVIDENCE_LINES,
    ActionTaken,
    EvidenceLine,
    Failed,
    FindingRecord,
    NodeAcquired,
    NodeReleased,
    Record,
    RecoveryDone,
    RunEnded,
    RunStarted,
    clipped,
)
from ..model import events as ev
from ..model.actions import Drain, Exclude, Fence, Readmit, RestartAll, Undrain
from ..model.state import Node, State
from .failure_records import Changes
from .failure_timeline import FailureTimeline, fences

REPEAT_INTERVAL_S = 600.0
"""Seconds before a finding that has not changed is recorded again."""
RAISED = (Verdict.WARN, Verdict.FAIL)
"""Verdicts with which a finding counts as raised."""


class HistoryEvents:
    """Translates the events of one manager.

    ``state`` is the state that the manager restored, and ``timeline`` the timeline that continues from this state.
    ``user`` and ``cluster`` identify the run.
    """

    def __init__(
        self,
        run: str,
        user: str,
        cluster: str,
        job: str,
        epoch: int,
        at: float,
        state: State | None,
        timeline: FailureTimeline,
    ) -> None:
        self.initial_records: list[Record] = [RunStarted(at, run, user, cluster, job, epoch)]
        """Records that begin each file, so that a file can be read without the other files."""
        self._timeline = timeline
        self._written: dict[str, tuple[Verdict, float, int]] = {}
        """For each finding, by key: verdict and time (s) of its last record, and how often the finding was raised."""
        if state is not None:
            self.initial_records += [
                NodeAcquired(at, node.name, _gpus_on(state, node.name)) for node in _own_nodes(state).values()
            ]
            raised = {key: finding for key, finding in state.findings.items() if finding.verdict in RAISED}
            self.initial_records += [self._finding_record(state, finding, at, 0) for finding in raised.values()]
            self._written = {key: (finding.verdict, at, 0) for key, finding in raised.items()}

    def apply(self, before: State | None, after: State, stamped: ev.Stamped, changes: Changes) -> list[Record]:
        """Return the records that follow from an event.

        ``before`` and ``after`` are the states before and after the event. ``changes`` is what the event changed in the
        timeline.
        """
        event, at = stamped.event, stamped.at
        records: list[Record] = [
            RecoveryDone(at, outage.replica, outage.node, outage.since, round(outage.gpu_seconds(at) / 3600, 6), ok)
            for outage, ok in changes.ended_outages
        ]
        if before is None:
            return records
        if isinstance(event, ev.FindingChanged):
            records += self._finding_records(before, event.finding, at)
        elif isinstance(event, ev.Decided):
            records += self._decided(before, event, at)
        elif isinstance(event, ev.AllocationChanged):
            records += _node_changes(before, after, at)
        elif isinstance(event, ev.IntentSettled) and (intent := before.intents.get(event.tag)) is not None:
            if isinstance(intent.action, Drain | Undrain):
                records += _drain_records(after, intent.action, event, at)
        elif isinstance(event, ev.RunEnded):
            records.append(RunEnded(at, event.outcome.value, clipped(event.why)))
        return records

    def _finding_records(self, before: State, finding: Finding, at: float) -> list[Record]:
        """Return a record if the finding was raised, changed its verdict, or was cleared; else an empty list.

        An unchanged finding is recorded again once ``REPEAT_INTERVAL_S`` have passed since its last record.
        """
        verdict, then, count = self._written.get(finding.key, (Verdict.OK, 0.0, 0))
        if finding.verdict not in RAISED and (verdict not in RAISED or not _is_monitored(before, finding)):
            return []
        if finding.verdict is verdict and at < then + REPEAT_INTERVAL_S:
            return []
        count = (count if verdict in RAISED else 0) + (finding.verdict in RAISED)
        self._written[finding.key] = finding.verdict, at, count
        return [self._finding_record(before, finding, at, count)]

    def _finding_record(self, state: State, finding: Finding, at: float, count: int) -> FindingRecord:
        incarnation = finding.incarnation
        node = finding.node or (state.replica(incarnation.replica).node if incarnation is not None else None) or ""
        evidence = finding.evidence
        if len(evidence) > MAX_EVIDENCE_LINES:  # keep the last line, which may explain why a FAIL was downgraded
            evidence = (*evidence[: MAX_EVIDENCE_LINES - 1], evidence[-1])
        evidence_lines = tuple(EvidenceLine(line.at, clipped(line.source), clipped(line.text)) for line in evidence)
        injected = finding.node is not None and self._timeline.fault_on(finding.node, at) is not None
        return FindingRecord(
            at,
            node,
            finding.detector,
            finding.verdict,
            finding.cause,
            finding.remedy,
            finding.since,
            str(incarnation) if incarnation is not None else "",
            clipped(finding.component),
            finding.proof,
            count,
            evidence_lines,
            injected,
            finding.flags,
        )

    def _decided(self, before: State, event: ev.Decided, at: float) -> list[Record]:
        action = event.action
        if isinstance(action, Exclude):
            return self._excluded(before, action, at)
        if isinstance(action, Readmit):
            return [ActionTaken(at, action.node, "readmitted", evidence=_lines(action.why.evidence))]
        given_up = [fence for fence in fences(event) if not is_support(fence.incarnation.replica)]
        if before.finish is not None:
            return []
        charged = [fence for fence in given_up if fence.charged]
        if isinstance(action, RestartAll):  # the whole run waits for the replica that failed
            stalled = tuple(sorted({gang_of(fence.incarnation.replica) for fence in given_up}))
            return [
                self._failed(before, fence, stalled if fence is charged[0] else (), at)
                for fence in charged
                if fence is charged[0] or self._is_new(fence)
            ]
        return [
            self._failed(before, fence, (gang_of(fence.incarnation.replica),), at)
            for fence in charged
            if self._is_new(fence)
        ]

    def _is_new(self, fence: Fence) -> bool:
        """Return whether the fence is the first one for its failure; a later fence only changes the rung."""
        failure = self._timeline.failures[fence.incarnation]
        return failure.fence is fence and failure.continues is None

    def _failed(self, state: State, fence: Fence, stalled: tuple[str, ...], at: float) -> Failed:
        failure = self._timeline.failures[fence.incarnation]
        finding = failure.diagnosis.finding
        return Failed(
            at,
            failure.node,
            str(fence.incarnation),
            stalled,
            finding.cause.value if finding is not None else Cause.PROCESS.value,
            finding.detector if finding is not None else "",
            finding.remedy.value if finding is not None else "",
            failure.diagnosis.symptom_at,
            finding is not None and finding.proof,
            failure.injected,
            bool(failure.node) and _lost(state, failure.node),
            fence.rung.value,
            _lines(fence.why.evidence),
        )

    def _excluded(self, before: State, action: Exclude, at: float) -> list[Record]:
        """Return the record of an exclusion and, unless a user excluded the node, the record of its failure."""
        cause = action.cause.value if action.cause is not None else ""
        lines = _lines(action.why.evidence)
        acted = ActionTaken(at, action.node, "excluded", cause=cause, by=clipped(action.by), evidence=lines)
        if action.by or before.node_commands.get(action.node):
            return [acted]
        diagnosis = self._timeline.diagnose_node(action.node, at)
        finding = diagnosis.finding
        failed = Failed(
            at,
            action.node,
            cause=cause or (finding.cause.value if finding is not None else Cause.NODE.value),
            detector=finding.detector if finding is not None else "",
            remedy=finding.remedy.value if finding is not None else "",
            since=diagnosis.symptom_at,
            proof=action.proof,
            injected=diagnosis.fault_at is not None,
            node_lost=_lost(before, action.node),
            evidence=lines,
        )
        return [acted, failed]


def _is_monitored(state: State, finding: Finding) -> bool:
    """Return whether the run still monitors the finding's object; a released node is no longer monitored."""
    return finding.node is None or (finding.node in _own_nodes(state) and state.finish is None)


def _own_nodes(state: State) -> dict[NodeName, Node]:
    return {name: node for name, node in state.nodes.items() if node.allocation}


def _node_changes(before: State, after: State, at: float) -> list[Record]:
    had, has = _own_nodes(before), _own_nodes(after)
    records: list[Record] = [NodeAcquired(at, name, _gpus_on(after, name)) for name in has if name not in had]
    return records + [NodeReleased(at, name) for name in had if name not in has]


def _lost(state: State, name: NodeName) -> bool:
    """Return whether a node is lost: the cluster lists it as DOWN, or a FAIL finding with cause NODE is about it."""
    node = state.nodes.get(name)
    down = node is not None and node.status is not None and node.status.state is NodeState.DOWN
    silent = any(
        finding.node == name and finding.verdict is Verdict.FAIL and finding.cause is Cause.NODE
        for finding in state.findings.values()
    )
    return down or silent


def _drain_records(after: State, tried: Drain | Undrain, event: ev.IntentSettled, at: float) -> list[Record]:
    if isinstance(tried, Undrain):
        return [ActionTaken(at, tried.node, "undrained", clipped(tried.reason))] if event.ok else []
    node = after.nodes.get(tried.node)
    cause = node.cause.value if node is not None and node.cause is not None else ""
    by = node.drain_requested_by if node is not None else ""
    kind = "drained" if event.ok else "drain_requested"
    drain_error = "" if event.ok else clipped(event.detail)
    return [
        ActionTaken(
            at, tried.node, kind, clipped(tried.reason), cause, clipped(by), drain_error, _lines(tried.why.evidence)
        )
    ]


def _lines(evidence: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(clipped(text) for text in evidence[:MAX_EVIDENCE_LINES])


def _gpus_on(state: State, node: NodeName) -> int:
    """Return the number of GPUs that the run has allocated on a node."""
    node_record = state.nodes.get(node)
    allocation = state.allocations.get(node_record.allocation) if node_record is not None else None
    return allocation.request.node.gpus if allocation is not None else 0
