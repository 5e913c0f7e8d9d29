"""Record findings of the manager's detectors and of the node agents when they appear, change or clear.

A reported finding is accepted only from the current agent of a node and only about this node. The times of the finding
are converted to the manager's clock. Before findings are recorded they pass the last stages of the pipeline
(:mod:`rrl.health.detection.pipeline`). This module also records the learned baselines, and restores them for a new
manager from the journal.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from math import inf, isfinite

import msgspec
from msgspec.structs import replace

from ...core.phases import STOPPING
from ...core.types import AGENT, WORST_FIRST, Finding, Flag, Incarnation, NodeName, Verdict, replica_id
from ...health.detection.attribution.correlation import CorrelationContext, CorrelationState, restore_state
from ...health.detection.baselines import RoleBaseline, changed_noticeably
from ...health.detection.detectors.registry import NODE_DETECTORS
from ...health.detection.health_monitor import HealthMonitor
from ...health.detection.pipeline import HangStacks, PublicationContext, publish
from ...transport.messages import AgentHello, FindingReport
from ..context import RunContext
from ..model import events as ev
from ..model.events import BaselinesLearned
from ..model.state import State, Status

_log = logging.getLogger("rrl.manager")

MANAGER_DETECTORS = frozenset(detector.__name__ for detector in NODE_DETECTORS)
"""Detectors by which the manager itself judges nodes; every other finding about a node comes from its agent."""
MAX_FINDINGS_PER_NODE = 256
"""Maximum number of findings kept for one node. All checks on a node of 16 GPUs report fewer findings."""
_MAX_EVIDENCE_LINES, _MAX_EVIDENCE_CHARS = 8, 1000
"""Maximum number of evidence lines of one finding, and of characters in a line; agents write at most 5 lines of about
200 characters."""


def from_agent(finding: Finding) -> bool:
    """Return whether the finding is about a node and was reported by an agent."""
    return finding.node is not None and finding.detector not in MANAGER_DETECTORS


class ReportedFindings:
    """The findings of each agent about its node, by the findings' keys. Times are in the manager's clock (s)."""

    def __init__(self) -> None:
        self._by_node: dict[NodeName, dict[str, Finding]] = {}
        self.changes = 0
        """Number of changes so far; a caller compares it with an earlier value to notice a change."""

    @property
    def nodes(self) -> set[NodeName]:
        """Return the nodes with at least one finding."""
        return set(self._by_node)

    def all(self) -> list[Finding]:
        """Return the findings about all nodes."""
        return [finding for by_key in self._by_node.values() for finding in by_key.values()]

    def has_flag(self, node: NodeName, flag: Flag) -> bool:
        """Return whether a finding about the node has this flag."""
        return any(flag in finding.flags for finding in self._by_node.get(node, {}).values())

    def restore(self, finding: Finding) -> None:
        """Restore a finding recorded by an earlier manager. It is kept until the agent's next report."""
        if finding.node is not None:
            self.changes += 1
            self._by_node.setdefault(finding.node, {})[finding.key] = finding

    def on_agent_hello(self, hello: AgentHello, also: tuple[Finding, ...], now: float) -> None:
        """Replace the findings of a node by the findings in its agent's Hello.

        An earlier finding is kept if the agent now reports UNKNOWN for it. ``also`` are findings that the manager
        derived from other fields of the Hello.
        """
        self.changes += 1
        node = hello.node
        reported = [
            finding
            for finding in hello.findings
            if finding.verdict is not Verdict.OK and may_report(finding, hello.incarnation, node)
        ]
        before = self._by_node.pop(node, {})
        current = (*(to_manager_time(finding, hello.now, now) for finding in reported), *also)
        after = {finding.key: preserve_times(before.get(finding.key), finding) for finding in current}
        unread = [finding for finding in after.values() if finding.verdict is Verdict.UNKNOWN]
        keys, unread_detectors = (
            {finding.key for finding in unread},
            {finding.detector for finding in unread if not finding.component},
        )
        for key, finding in before.items():
            if finding.verdict is not Verdict.UNKNOWN and (
                key in keys or (finding.detector in unread_detectors and key not in after)
            ):
                after[key] = finding
        limited = sorted(after.values(), key=_severity, reverse=True)[:MAX_FINDINGS_PER_NODE]
        if limited:
            self._by_node[node] = {finding.key: finding for finding in limited}

    def on_report(self, message: FindingReport, now: float) -> None:
        """Store one finding that an agent reports as changed.

        UNKNOWN does not replace an earlier verdict: a value that cannot be read now does not disprove an earlier value.
        """
        self.changes += 1
        finding = to_manager_time(message.finding, message.now, now)
        by_key = self._by_node.setdefault(message.node, {})
        before = by_key.get(finding.key)
        if finding.verdict is Verdict.OK:
            by_key.pop(finding.key, None)
        elif before is not None and finding.verdict is Verdict.UNKNOWN and before.verdict is not Verdict.UNKNOWN:
            return
        elif before is not None or len(by_key) < MAX_FINDINGS_PER_NODE:
            by_key[finding.key] = preserve_times(before, finding)
        elif _severity(least := min(by_key.values(), key=_severity)) < _severity(finding):
            del by_key[least.key]
            by_key[finding.key] = finding
        if not by_key:
            del self._by_node[message.node]

    def forget(self, node: NodeName) -> None:
        """Remove all findings of a node that was released or readmitted."""
        self.changes += 1
        self._by_node.pop(node, None)


def may_report(finding: Finding, agent: Incarnation, node: NodeName) -> bool:
    """Return whether the finding is one that this agent may report: about its own node, from an agent's check."""
    return is_agent_of(agent, node) and finding.node == node and finding.incarnation is None and from_agent(finding)


def is_agent_of(incarnation: Incarnation, node: NodeName) -> bool:
    """Return whether the incarnation is the agent of this node."""
    return incarnation.replica == replica_id(AGENT, node)


def to_manager_time(finding: Finding, sent: float, now: float) -> Finding:
    """Return the finding with limited evidence, and with times converted from the node's clock to the manager's.

    ``sent`` is the node's clock when the message was sent, ``now`` the manager's clock at receipt.
    """

    def to_manager_clock(at: float) -> float:
        return now - max(0.0, sent - at) if isfinite(at) and isfinite(sent) else now

    evidence = tuple(
        replace(line, at=to_manager_clock(line.at), text=line.text[:_MAX_EVIDENCE_CHARS])
        for line in finding.evidence[:_MAX_EVIDENCE_LINES]
    )
    return replace(finding, since=to_manager_clock(finding.since), evidence=evidence)


def preserve_times(before: Finding | None, after: Finding) -> Finding:
    """Return ``before`` if ``after`` differs only in its times, which vary with the message's delay; else ``after``."""
    return before if before is not None and _without_times(before) == _without_times(after) else after


def _severity(finding: Finding) -> int:
    return -WORST_FIRST.index(finding.verdict)


def _without_times(finding: Finding) -> Finding:
    return replace(finding, since=0.0, evidence=tuple(replace(line, at=0.0) for line in finding.evidence))


class FindingGate:
    """Collects the findings of one manager's detectors and agents, and records changed findings."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._detected: Sequence[Finding] = ()
        self._stacks: Mapping[str, HangStacks] = {}
        self._silent: Mapping[Incarnation, tuple[NodeName, float]] = {}
        self._absent: Mapping[NodeName, float] = {}
        self._reported = ReportedFindings()
        self._correlation_state = CorrelationState()
        self._published: dict[str, Finding] = {}
        """Findings as last recorded in the journal, by key."""
        self._input_key: object = None
        """Inputs of the last call of :meth:`publish`; None if the result of the call may change with time alone."""

    @property
    def nodes(self) -> set[NodeName]:
        """Return the nodes about which agents have reported findings."""
        return self._reported.nodes

    def restore(self) -> None:
        """Take over the findings recorded by earlier managers.

        A finding without proof is cleared, unless the manager's detectors find it again at once, or the agent's next
        Hello contains it. Correlations among the recorded findings remain in effect.
        """
        recorded = self._context.state().findings
        for key, finding in recorded.items():
            if from_agent(finding):
                self._reported.restore(finding)
            if from_agent(finding) or not finding.proof:  # proven findings stay
                self._published[key] = finding
        for node in self._reported.nodes:
            self._update_storage(node)
        self._correlation_state = restore_state(recorded.values(), self._context.now())

    def on_detected(
        self,
        findings: Sequence[Finding],
        silent: Mapping[Incarnation, tuple[NodeName, float]],
        absent: Mapping[NodeName, float] = {},
        stacks: Mapping[str, HangStacks] = {},
    ) -> float:
        """Take the current findings of the manager's detectors, and record what changed.

        Args:
            findings: Result of ``detect``, and findings about the run.
            silent: Result of :func:`rrl.health.detection.detectors.liveness.missing_heartbeats`.
            absent: Result of :func:`rrl.health.detection.detectors.node_liveness.silent_nodes`.
            stacks: Stacks of hung processes, by the key of the finding about the hang.

        Returns:
            The time (s) at which the result may change without new findings.
        """
        self._detected, self._silent, self._absent, self._stacks = findings, silent, absent, stacks
        return self.publish()

    def on_agent_hello(self, hello: AgentHello, *also: Finding) -> None:
        """Record the findings that an agent reports when it joins, before any replica is placed on its node."""
        foreign = [finding for finding in hello.findings if not may_report(finding, hello.incarnation, hello.node)]
        if foreign:
            _log.warning(
                "ignored finding %s from %s: an agent may only report its own node", foreign[0].key, hello.incarnation
            )
        self._reported.on_agent_hello(hello, also, self._context.now())
        self._update_storage(hello.node)
        self.publish()

    def on_report(self, message: FindingReport) -> None:
        """Handle a finding reported by the current agent of a node; ignore a finding about another node."""
        if not may_report(message.finding, message.incarnation, message.node):
            _log.warning(
                "ignored finding %s from %s: an agent may only report its own node",
                message.finding.key,
                message.incarnation,
            )
            return
        self._reported.on_report(message, self._context.now())
        self._update_storage(message.node)
        self.publish()

    def forget(self, node: NodeName) -> None:
        """Remove the findings reported about a node that left the run or was readmitted."""
        self._reported.forget(node)
        self._update_storage(node)

    def _update_storage(self, node: NodeName) -> None:
        """Inform the health monitor whether the node's agent reports stalled storage.

        Replicas may then wait for the storage, although they have not failed.
        """
        stalled = self._reported.has_flag(node, Flag.STORAGE_STALLS)
        self._context.monitor.on_storage_report(node, stalled, self._context.now())

    def publish(self) -> float:
        """Record findings that changed, and clear recorded findings that are no longer found.

        Returns the time (s) at which :meth:`publish` must be called again; inf if only new findings can change the
        result.
        """
        settings = self._context.state().job.health
        input_key = (self._detected, self._stacks, self._reported.changes, settings)
        if input_key == self._input_key:  # unchanged; this method is called in each turn of the manager's loop
            return inf
        context = PublicationContext(
            self._context.now(), settings, self._stacks, self._correlation_context(), self._correlation_state
        )
        findings, context = publish((*self._detected, *self._reported.all()), context)
        self._correlation_state = context.correlation
        published = self._published
        self._published = current = {
            finding.key: preserve_times(published.get(finding.key), finding) if from_agent(finding) else finding
            for finding in findings
        }
        for key, finding in current.items():
            if published.get(key) != finding:
                self._context.record(ev.FindingChanged(finding))
        for key, finding in published.items():
            if key not in current and (key in self._context.state().findings or finding.verdict is Verdict.UNKNOWN):
                cleared = msgspec.structs.replace(finding, verdict=Verdict.OK, evidence=())
                self._context.record(ev.FindingChanged(cleared))
        self._input_key = (
            None if self._correlation_state.shared_causes or self._correlation_state.first_reported else input_key
        )
        return context.next_check

    def _correlation_context(self) -> CorrelationContext:
        """Return the facts of the run that correlation uses: nodes, rollouts, excluded nodes, missing heartbeats."""
        state = self._context.state()
        if not self._detected and not self._reported.nodes and not self._correlation_state.shared_causes:
            return CorrelationContext(0)
        node_count = sum(bool(node.allocation) for node in state.nodes.values())
        working = [replica for replica in state.workers if replica.is_current]
        rollouts = {
            replica.incarnation
            for replica in working
            if state.job.traits_of(replica.id).leases_turns and replica.status is Status.JOINED
        }
        excluded = {name for name, node in state.nodes.items() if node.excluded is not None}
        occupied = {replica.node for replica in working if replica.node is not None}
        return CorrelationContext(node_count, occupied, rollouts, excluded, self._silent, self._absent)


BASELINE_CHECK_INTERVAL_S = 60.0
"""Seconds between two checks for changed baselines. A new manager loses at most the observations of this time."""


def restore_monitor(monitor: HealthMonitor, state: State, now: float) -> None:
    """Restore the health monitor from the state; the timeouts of every current incarnation begin ``now``.

    An incarnation that had joined must send a message within the ordinary limits of silence; any other must join.
    Phases that an incarnation has passed through are restored, so that the next pass through them does not count as
    its first, which may take longer.
    """
    monitor.set_roles(state.job.roles)
    monitor.set_limits(state.job.limits)
    monitor.restore_baselines(state.baselines)
    for replica in state.replicas.values():
        if replica.is_current and replica.node is not None:
            standby = replica.promoted_from if replica.status is Status.LAUNCHING else None
            monitor.on_launched(replica.incarnation, replica.node, now, standby, state.job.recovery.promote)
            if replica.status is Status.JOINED:
                monitor.restore_joined(replica.incarnation, replica.past_phases)
            if replica.phase == STOPPING:
                monitor.on_goodbye(replica.incarnation, now)


class BaselineRecorder:
    """Records learned baselines when they changed noticeably. ``recorded`` are the baselines in the journal."""

    def __init__(
        self, monitor: HealthMonitor, recorded: Mapping[str, RoleBaseline], record: Callable[[BaselinesLearned], None]
    ) -> None:
        self._monitor, self._recorded, self._record = monitor, recorded, record
        self._due_at = -inf

    def record_if_due(self, now: float) -> None:
        """Record the baselines if the check is due and they changed noticeably."""
        if now < self._due_at:
            return
        self._due_at = now + BASELINE_CHECK_INTERVAL_S
        baselines = self._monitor.baselines()
        if changed_noticeably(self._recorded, baselines):
            self._recorded = baselines
            self._record(BaselinesLearned(baselines))
