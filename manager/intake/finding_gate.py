"""Turn findings of the manager's detectors and of the node agents into events: when one appears, changes or clears.

A report of an agent is accepted only from the node's current agent and only about its own node; its times are converted
to the manager's clock. ``[health]`` of the job decides which findings count, and correlation holds back those that many
nodes or replicas show at once. The baselines that a new manager inherits from the journal are written here as well.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from math import inf, isfinite

import msgspec
from msgspec.structs import replace

from ...core.run_spec import HealthSpec
from ...core.types import (
    AGENT,
    WORST_FIRST,
    Cause,
    Evidence,
    Finding,
    Flag,
    Incarnation,
    NodeName,
    Remedy,
    Verdict,
    replica_id,
)
from ...health.detection.attribution.correlation import CorrelationContext, CorrelationState, correlate, restore_state
from ...health.detection.baselines import RoleBaseline, changed_noticeably
from ...health.detection.detectors.registry import NODE_DETECTORS
from ...health.detection.health_monitor import HealthMonitor
from ...transport.messages import AgentHello, FindingReport
from ..model import events as ev
from ..model.events import BaselinesLearned
from ..model.queries import workers
from ..model.state import State, Status

_log = logging.getLogger("rrl.manager")

MANAGER_DETECTORS = frozenset(detector.__name__ for detector in NODE_DETECTORS)
"""detectors by which the manager itself judges nodes; what else is found on one is its agent's word"""
TERMINAL_DETECTORS = frozenset({"exit_record", "step_gone", "node_down"})
"""detectors whose proof is that a process or a node is no more: no setting brings that back"""
NON_NODE_CAUSES = frozenset({Cause.USER, Cause.SOFTWARE, Cause.PROCESS, Cause.HANG})
"""causes of what is found on a node that is no fault of it: told, and no more"""
MAX_FINDINGS_PER_NODE = 256
"""findings of one node that are kept: 16 GPUs, and more checks than there are"""
_MAX_EVIDENCE_LINES, _MAX_EVIDENCE_CHARS = 8, 1000
"""lines of evidence of one finding, and characters of one: what agents write has five, and some 200"""


def apply_settings(finding: Finding, settings: HealthSpec) -> Finding | None:
    """The finding as the job wants it: None where its check is off, WARN for FAIL where it is only observed, or where
    the node is not to blame."""
    if finding.proof and finding.detector in TERMINAL_DETECTORS:
        return finding
    if finding.node is not None and finding.verdict is Verdict.FAIL and finding.cause in NON_NODE_CAUSES:
        finding = replace(finding, verdict=Verdict.WARN, proof=False)
    mode = settings.checks.get(finding.detector, "act")
    if mode == "off":
        return None
    if finding.verdict is not Verdict.FAIL or (mode == "act" and not settings.observe_only):
        return finding
    why = f"observe only: nothing is done ({'observe_only' if settings.observe_only else 'checks'} in [health])"
    evidence = (*finding.evidence, Evidence("job", why, finding.since))
    flags = (*finding.flags, Flag.OBSERVED)
    return replace(finding, verdict=Verdict.WARN, remedy=Remedy.NONE, proof=False, evidence=evidence, flags=flags)


def from_agent(finding: Finding) -> bool:
    """An agent found it on its node."""
    return finding.node is not None and finding.detector not in MANAGER_DETECTORS


class ReportedFindings:
    """What each agent says of its node, by finding's key; times are the manager's (s)."""

    def __init__(self) -> None:
        self._by_node: dict[NodeName, dict[str, Finding]] = {}
        self.changes = 0
        """times that somebody said something"""

    @property
    def nodes(self) -> set[NodeName]:
        return set(self._by_node)

    def all(self) -> list[Finding]:
        return [finding for by_key in self._by_node.values() for finding in by_key.values()]

    def restore(self, finding: Finding) -> None:
        """An earlier manager heard it: it stands until the agent says what it finds now."""
        if finding.node is not None:
            self.changes += 1
            self._by_node.setdefault(finding.node, {})[finding.key] = finding

    def on_agent_hello(self, hello: AgentHello, also: tuple[Finding, ...], now: float) -> None:
        """All that its agent finds just now, but for what it cannot read any more: that takes back nothing. ``also``:
        what the manager makes of the rest of its words."""
        self.changes += 1
        node = hello.node
        reported = [
            one for one in hello.findings if one.verdict is not Verdict.OK and may_report(one, hello.incarnation, node)
        ]
        before = self._by_node.pop(node, {})
        after = {one.key: preserve_times(before.get(one.key), one)
                 for one in (*(to_manager_time(one, hello.now, now) for one in reported), *also)}  # fmt: skip
        unread = [one for one in after.values() if one.verdict is Verdict.UNKNOWN]
        keys, unread_detectors = {one.key for one in unread}, {one.detector for one in unread if not one.component}
        for key, one in before.items():
            if one.verdict is not Verdict.UNKNOWN and (
                key in keys or (one.detector in unread_detectors and key not in after)
            ):
                after[key] = one
        limited = sorted(after.values(), key=_severity, reverse=True)[:MAX_FINDINGS_PER_NODE]
        if limited:
            self._by_node[node] = {one.key: one for one in limited}

    def on_report(self, message: FindingReport, now: float) -> None:
        """Store one finding that an agent reports as changed.

        An UNKNOWN replaces no earlier verdict: a value that can no longer be read does not disprove what was read."""
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

    def forget(self, node: NodeName) -> None:
        """It was given back, or begins anew."""
        self.changes += 1
        self._by_node.pop(node, None)


def may_report(finding: Finding, agent: Incarnation, node: NodeName) -> bool:
    """The agent speaks of its own node, and of nothing that is the manager's to judge."""
    return is_agent_of(agent, node) and finding.node == node and finding.incarnation is None and from_agent(finding)


def is_agent_of(incarnation: Incarnation, node: NodeName) -> bool:
    return incarnation.replica == replica_id(AGENT, node)


def to_manager_time(finding: Finding, sent: float, now: float) -> Finding:
    """With its times in the manager's clock: ``sent`` is the node's clock as the message left, ``now`` the receipt."""

    def to_manager_clock(at: float) -> float:
        return now - max(0.0, sent - at) if isfinite(at) and isfinite(sent) else now

    evidence = tuple(
        replace(one, at=to_manager_clock(one.at), text=one.text[:_MAX_EVIDENCE_CHARS])
        for one in finding.evidence[:_MAX_EVIDENCE_LINES]
    )
    return replace(finding, since=to_manager_clock(finding.since), evidence=evidence)


def preserve_times(before: Finding | None, after: Finding) -> Finding:
    """The one before where the other says nothing else: its times differ only by the way that the message took."""
    return before if before is not None and _without_times(before) == _without_times(after) else after


def _severity(finding: Finding) -> int:
    return -WORST_FIRST.index(finding.verdict)


def _without_times(finding: Finding) -> Finding:
    return replace(finding, since=0.0, evidence=tuple(replace(one, at=0.0) for one in finding.evidence))


class FindingGate:
    """Of one manager. ``state`` gives the newest state, ``record`` takes events, ``now`` is the manager's clock."""

    def __init__(
        self, state: Callable[[], State], record: Callable[[ev.Event], None], now: Callable[[], float]
    ) -> None:
        self._state, self._record, self._now = state, record, now
        self._detected: Sequence[Finding] = ()
        self._silent: Mapping[Incarnation, tuple[NodeName, float]] = {}
        self._absent: Mapping[NodeName, float] = {}
        self._reported = ReportedFindings()
        self._correlation_state = CorrelationState()
        self._published: dict[str, Finding] = {}
        """as the journal has it, by key"""
        self._input_key: object = None
        """what was last looked at, where nothing but that could change the answer"""

    @property
    def nodes(self) -> set[NodeName]:
        """Of which their agents have something to say."""
        return self._reported.nodes

    def restore(self) -> None:
        """Of what an earlier manager recorded, what is not found again is cleared: at once what its own detectors
        found without proof, with an agent's next Hello what that one found. What many had in common they still have."""
        recorded = self._state().findings
        for key, finding in recorded.items():
            if from_agent(finding):
                self._reported.restore(finding)
            if from_agent(finding) or not finding.proof:  # what was proved stays
                self._published[key] = finding
        self._correlation_state = restore_state(recorded.values(), self._now())

    def on_detected(
        self, findings: Sequence[Finding], silent: Mapping[Incarnation, tuple[NodeName, float]],
        absent: Mapping[NodeName, float] = {},
    ) -> float:  # fmt: skip
        """All that the detectors find now, and who else is not heard
        (:func:`rrl.health.detection.detectors.liveness.unheard`), nor which nodes
        (:func:`rrl.health.detection.detectors.node_liveness.absent`). Returns when (s) to tell again though nothing is
        found anew."""
        self._detected, self._silent, self._absent = findings, silent, absent
        return self.publish()

    def on_agent_hello(self, hello: AgentHello, *also: Finding) -> None:
        """An agent joins: what it finds is recorded before anything is placed on its node."""
        foreign = [one for one in hello.findings if not may_report(one, hello.incarnation, hello.node)]
        if foreign:
            _log.warning(
                "ignored finding %s from %s: an agent may only report its own node", foreign[0].key, hello.incarnation
            )
        self._reported.on_agent_hello(hello, also, self._now())
        self.publish()

    def on_report(self, message: FindingReport) -> None:
        """Handle a finding reported by the current agent of a node; ignore one that is about another node."""
        if not may_report(message.finding, message.incarnation, message.node):
            _log.warning(
                "ignored finding %s from %s: an agent may only report its own node",
                message.finding.key,
                message.incarnation,
            )
            return
        self._reported.on_report(message, self._now())
        self.publish()

    def forget(self, node: NodeName) -> None:
        """What was found on it counts no more: it has left, or is given another chance."""
        self._reported.forget(node)

    def publish(self) -> float:
        """Record what changed; what is no longer found is OK again."""
        settings = self._state().job.health
        input_key = (self._detected, self._reported.changes, settings)
        if input_key == self._input_key:  # a thousand nodes may have something to say, and this is asked at every turn
            return inf
        every = [
            one
            for finding in (*self._detected, *self._reported.all())
            if (one := apply_settings(finding, settings)) is not None
        ]
        found, self._correlation_state, next_check = correlate(
            every, self._context(), self._correlation_state, self._now()
        )
        published = self._published
        self._published = current = {
            one.key: preserve_times(published.get(one.key), one) if from_agent(one) else one for one in found
        }
        for key, finding in current.items():
            if published.get(key) != finding:
                self._record(ev.FindingChanged(finding))
        for key, finding in published.items():
            if key not in current and (key in self._state().findings or finding.verdict is Verdict.UNKNOWN):
                cleared = msgspec.structs.replace(finding, verdict=Verdict.OK, evidence=())
                self._record(ev.FindingChanged(cleared))
        self._input_key = (
            None if self._correlation_state.events or self._correlation_state.first_reported else input_key
        )
        return next_check

    def _context(self) -> CorrelationContext:
        state = self._state()
        if not self._detected and not self._reported.nodes and not self._correlation_state.events:
            return CorrelationContext(0)
        node_count = sum(bool(node.allocation) for node in state.nodes.values())
        working = [one for one in workers(state) if one.is_current]
        kinds = {role.name for role in state.job.kind("rollout")}
        rollouts = {one.incarnation for one in working if one.role in kinds and one.status is Status.JOINED}
        excluded = {name for name, node in state.nodes.items() if node.excluded is not None}
        occupied = {one.node for one in working if one.node is not None}
        return CorrelationContext(node_count, occupied, rollouts, excluded, self._silent, self._absent)


BASELINE_CHECK_INTERVAL_S = 60.0
"""s between two looks whether there is something to keep: so much at most is learned anew"""


def restore_monitor(monitor: HealthMonitor, state: State, now: float) -> None:
    """Everything believed is believed to live, with full grace from now. What each has been through is no silence."""
    monitor.set_limits(state.job.limits)
    monitor.restore_baselines(state.baselines)
    for replica in state.replicas.values():
        if replica.is_current and replica.node is not None:
            standby = replica.promoted_from if replica.status is Status.LAUNCHING else None
            monitor.on_launched(replica.incarnation, replica.node, now, standby, state.job.recovery.promote)
            monitor.restore_passed_phases(replica.incarnation, replica.past_phases)


class BaselineRecorder:
    """Of one manager; ``recorded`` is what the journal has."""

    def __init__(
        self, monitor: HealthMonitor, recorded: Mapping[str, RoleBaseline], record: Callable[[BaselinesLearned], None]
    ) -> None:
        self._monitor, self._recorded, self._record = monitor, recorded, record
        self._due_at = -inf

    def record_if_due(self, now: float) -> None:
        if now < self._due_at:
            return
        self._due_at = now + BASELINE_CHECK_INTERVAL_S
        baselines = self._monitor.baselines()
        if changed_noticeably(self._recorded, baselines):
            self._recorded = baselines
            self._record(BaselinesLearned(baselines))
