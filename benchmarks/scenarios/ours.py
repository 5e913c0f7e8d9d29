"""rrl's own detectors as a judge, called as in a run.

The manager calls ``HealthMonitor`` and ``detect``, agents call the checks, and the findings of both pass the last
stages of the pipeline (rrl.health.detection.pipeline). No stacks are collected. ``factor`` multiplies all deadlines;
the curve of benchmarks/detection.py uses it.
"""

from __future__ import annotations

from math import inf

import msgspec

from rrl.benchmarks.scenarios.format import Scenario
from rrl.benchmarks.scenarios.hardware import PACE, UPTIME
from rrl.benchmarks.scenarios.judge import CurrentIncarnations
from rrl.benchmarks.scenarios.rhythms import Loads, roles_of
from rrl.config.health_rules import Rules
from rrl.core.launch import ExitReason
from rrl.core.phases import PHASES, PhaseSpec
from rrl.core.run_spec import HealthSpec, Limits, Recovery
from rrl.core.types import (
    AGENT,
    DataReport,
    Finding,
    Flag,
    Incarnation,
    NodeName,
    ProbeResult,
    ReplicaId,
    Verdict,
    index_of,
    role_of,
)
from rrl.health.checks.evaluate import NodeChecks
from rrl.health.checks.node_state import ALL_GPUS, HardwareInventory, NodeState, hardware_inventory, restore_inventory
from rrl.health.detection.attribution.correlation import CorrelationContext, CorrelationState
from rrl.health.detection.detect import Detection
from rrl.health.detection.detectors.base import expects_heartbeats
from rrl.health.detection.detectors.liveness import missing_heartbeats
from rrl.health.detection.detectors.node_liveness import silent_nodes
from rrl.health.detection.detectors.probing import due_probes
from rrl.health.detection.detectors.stack_samples import due_stack_samples
from rrl.health.detection.health_monitor import HealthMonitor
from rrl.health.detection.pipeline import PublicationContext, publish
from rrl.health.detection.records import StackSample
from rrl.health.readers.base import READERS
from rrl.health.readers.samples import Reading
from rrl.manager.intake.finding_gate import BaselineRecorder
from rrl.manager.model.events import BaselinesLearned

_SCALED = ("silence", "join", "first_pass", "suspect", "probe", "idle")
_MAX_TICKS_BETWEEN_CHECKS = 8
"""Maximum number of heartbeat intervals between two calls of ``detect`` while only heartbeats arrive and no check is
due."""
_ADMISSION_TIMEOUT_S = 30.0
"""Longest time (s) for which a node is checked before a role may start on it (rrl.manager.execute.launch)."""


def limits_of(scenario: Scenario, factor: float = 1.0) -> Limits:
    given = {name: getattr(scenario.limits, name) for name in type(scenario.limits).model_fields}
    phases = {name: PhaseSpec(**table.model_dump()) for name, table in scenario.phases.items()}
    limits = Limits(**given, phases=phases)
    if "stragglers" in Limits.__struct_fields__:
        limits = msgspec.structs.replace(limits, stragglers=scenario.health.stragglers)
    if factor == 1.0:
        return limits
    views = {}
    for name in {*PHASES, *limits.phases}:
        phase = limits.phase(name)
        given_phase = limits.phases.get(name, PhaseSpec())
        views[name] = msgspec.structs.replace(
            given_phase, shortest=phase.shortest * factor, longest=phase.longest * factor
        )
    scaled = {name: getattr(limits, name) * factor for name in _SCALED}
    return msgspec.structs.replace(limits, phases=views, **scaled)


class RrlDetectors:
    probes_work = True

    def __init__(self, scenario: Scenario, factor: float = 1.0) -> None:
        self._limits = limits_of(scenario, factor)
        self._view = msgspec.convert(scenario.health.model_dump(), HealthSpec)
        self._rollouts = {name for name in roles_of(scenario) if name == "rollout"}
        self._rules = Rules(expect=scenario.expect)
        self._tenants: dict[Incarnation, tuple[NodeName, list[str]]] = {}
        """Node and GPUs (UUIDs) of each incarnation."""
        self._admitting_since: dict[NodeName, float] = {}
        """Start time (s) of each node's admission, while it lasts."""
        self._tensor = "dcgm" in scenario.cluster.readers
        self._tensors: dict[Incarnation, tuple[float, float]] = {}
        self._monitor = HealthMonitor()
        self._detection = Detection(self._monitor)
        self._monitor.set_limits(self._limits)
        self._journal = BaselinesLearned({})
        """The baselines as last recorded in the journal."""
        self._baselines = BaselineRecorder(self._monitor, {}, self._record)
        self._memory = CorrelationState()
        self._node_states: dict[NodeName, NodeState] = {}
        self._checks: dict[NodeName, NodeChecks] = {}
        self._past: dict[NodeName, HardwareInventory] = {}
        """Hardware inventory of each node whose agent ended."""
        self._boots: dict[NodeName, str] = {}
        self._node_clock_ahead = UPTIME
        """Seconds by which the clocks of the nodes are ahead of the manager's clock."""
        self._reported: dict[NodeName, dict[str, Finding]] = {}
        self._fresh: set[NodeName] = set()
        """Nodes with samples that their agent has not checked yet."""
        self._agent_heartbeat_at: dict[NodeName, float] = {}
        self._has_new_input = True
        self._next_check = 0.0
        self._ticks = 0
        self._raw: list[Finding] = []
        self._found: list[Finding] = []

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def launched(
        self, incarnation: Incarnation, node: NodeName, now: float, standby: Incarnation | None = None
    ) -> None:
        self._monitor.on_launched(incarnation, node, now, standby, Recovery().promote)
        self._has_new_input = True

    def hello(self, incarnation: Incarnation, node: NodeName, phase: str, now: float) -> None:
        self._monitor.on_hello(incarnation, node, phase, now)
        self._admitted(node)
        self._has_new_input = True

    def gpus(self, incarnation: Incarnation, node: NodeName, uuids: list[str]) -> None:
        self._tenants.pop(incarnation, None)  # the newest sample of a GPU comes last
        self._tenants[incarnation] = node, uuids

    def heartbeat(
        self, incarnation: Incarnation, phase: str, done: int, waits_for: ReplicaId | None, data: DataReport, now: float
    ) -> None:
        self._monitor.on_heartbeat(incarnation, phase, done, waits_for, now, data)

    def entered(self, incarnation: Incarnation, phase: str, done: int, waits_for: ReplicaId | None, now: float) -> None:
        self._monitor.on_phase(incarnation, phase, done, waits_for, now)

    def goodbye(self, incarnation: Incarnation, now: float) -> None:
        self._monitor.on_goodbye(incarnation, now)
        self._has_new_input = True

    def exited(
        self, incarnation: Incarnation, code: int | None, signal: int | None, why: str, last_line: str, now: float
    ) -> None:
        reason = ExitReason.EXITED if signal is None else ExitReason.SIGNALED
        self._monitor.on_step_ended(incarnation, code, signal, reason, now, last_line, why)
        self._has_new_input = True

    def gone(self, incarnation: Incarnation, now: float) -> None:
        self._monitor.on_step_gone(incarnation, now)
        self._monitor.on_step_ended(incarnation, None, None, ExitReason.LOST, now)
        self._has_new_input = True

    def agent(self, node: NodeName, incarnation: Incarnation, now: float, boot: str = "") -> None:
        self._monitor.on_agent_message(node, incarnation, now, boot)
        self._boots[node] = boot or self._boots.get(node, "")
        self._agent_heartbeat_at[node] = now

    def alive(self, incarnation: Incarnation, now: float) -> None:
        self._monitor.on_step_alive(incarnation, now)

    def load(self, incarnation: Incarnation, loads: Loads, has_gpu: bool, from_agent: bool, now: float) -> None:
        if not from_agent:
            return
        tensor = self._sampled(incarnation, loads.tensor, now) if has_gpu and self._tensor else None
        gpu, stopped = loads.gpu if has_gpu else None, loads.state in ("T", "t")
        self._monitor.on_load(incarnation, loads.cpu, gpu, now, tensor, stopped)

    def _sampled(self, incarnation: Incarnation, tensor: float, now: float) -> float:
        """Return the tensor load as DCGM shows it: the value of its newest read, which may be older than ``tensor``."""
        if incarnation not in self._tensors or now - self._tensors[incarnation][0] >= PACE["dcgm"]:
            self._tensors[incarnation] = now, tensor
        return self._tensors[incarnation][1]

    def cluster(self, states: dict[NodeName, tuple[str, str, bool]], polled_at: float, now: float) -> None:
        """Report a node status as rrl.manager.intake.cluster_poller does."""
        known = self._monitor.nodes
        gone = [name for name, (state, _, _) in states.items() if state in ("down", "unknown")]
        newly_down = [name for name in gone if (home := known.get(name)) is not None and home.reported_up]
        alone = 2 * len(newly_down) <= max(2, len(states))
        for name, (state, detail, suspended) in states.items():
            self._monitor.on_node_status(name, state, detail, now, alone)
            self._monitor.on_job_status(name, suspended, polled_at, now)
        self._has_new_input = True

    def wants_poll(self, now: float) -> bool:
        awaited = any(one.status == "awaited" and expects_heartbeats(one) for one in self._monitor.replicas.values())
        return awaited or self._monitor.needs_suspend_check(self._limits, now)

    def due_probes(self, now: float) -> list[Incarnation]:
        if not self._checked_now:
            return []
        probed = due_probes(self._monitor, self._limits, now)
        for incarnation in probed:
            self._monitor.on_probe_sent(incarnation, now)
            self._has_new_input = True
        return probed

    def answered(self, incarnation: Incarnation, result: ProbeResult, detail: str, now: float) -> None:
        self._monitor.on_probe_answered(incarnation, result, detail, now)
        self._has_new_input = True

    def due_stacks(self, now: float) -> list[Incarnation]:
        return due_stack_samples(self._monitor, self._limits, now)[0]

    def stacks(self, gang: Incarnation, sample: StackSample | None, now: float) -> None:
        self._monitor.on_stacks(gang, sample, now)
        self._has_new_input = True

    # ── decisions of the manager ─────────────────────────────────────────────────────────────────────────────────────
    def forget(self, incarnation: Incarnation, now: float) -> None:
        self._monitor.remove(incarnation)
        self._tenants.pop(incarnation, None)
        if role_of(incarnation.replica) == AGENT:  # keeps only the part of its node state that is on disk
            node = NodeName(index_of(incarnation.replica))
            if (node_state := self._node_states.pop(node, None)) is not None:
                self._past[node] = hardware_inventory(node_state)
        self._has_new_input = True

    def forget_node(self, node: NodeName, now: float) -> None:
        self._monitor.remove_node(node)
        for known in (self._reported, self._node_states, self._checks, self._agent_heartbeat_at, self._admitting_since):
            known.pop(node, None)
        self._has_new_input = True

    def restarted(self, current: CurrentIncarnations, now: float, clock_ahead: float) -> None:
        self._node_clock_ahead = UPTIME - clock_ahead
        before, self._monitor, self._memory = self._monitor.replicas, HealthMonitor(), CorrelationState()
        self._detection = Detection(self._monitor)
        self._monitor.set_limits(self._limits)
        self._monitor.restore_baselines(self._journal.baselines)
        self._baselines = BaselineRecorder(self._monitor, self._journal.baselines, self._record)
        for incarnation, node in current:
            self._monitor.on_launched(incarnation, node, now)
            view = before.get(incarnation.replica)
            if view is not None and view.incarnation == incarnation and view.status != "launched":
                self._monitor.restore_joined(incarnation, view.passed_phases)
                if view.goodbye_at is not None:
                    self._monitor.on_goodbye(incarnation, now)
        for node in self._reported:
            self._report_storage(node, now)
        self._has_new_input = True

    def _record(self, learned: BaselinesLearned) -> None:
        self._journal = learned

    def paused(self, now: float) -> None:
        self._monitor.restart(now)
        self._has_new_input = True

    # ── on the nodes ─────────────────────────────────────────────────────────────────────────────────────────────────
    def reading(self, node: NodeName, reading: Reading, now: float) -> None:
        if (node_state := self._node_states.get(node)) is None:
            node_state = self._node_states[node] = NodeState(self._rules.xid.burst)
            self._checks[node] = NodeChecks(node)
            node_state.boot_id = self._boots.get(node, "")
            if node in self._past:
                restore_inventory(node_state, self._past[node])
            if not any(
                one.node == node and one.status == "joined"
                for one in self._monitor.replicas.values()
                if role_of(one.incarnation.replica) != AGENT
            ):
                self._admitting_since[node] = now
                node_state.set_expected_free((ALL_GPUS,))
        node_state.add(reading)
        self._fresh.add(node)

    def killed(self, incarnation: Incarnation, node: NodeName, now: float) -> None:
        if (node_state := self._node_states.get(node)) is not None:
            node_state.on_our_kill(now + self._node_clock_ahead)
            self._fresh.add(node)

    def role_died(self, node: NodeName, gpus: list[str], now: float) -> None:
        if (node_state := self._node_states.get(node)) is not None:
            node_state.on_role_death(gpus, now + self._node_clock_ahead)
            self._fresh.add(node)

    def _judge_nodes(self, now: float) -> None:
        """Run the checks of each agent once per second; an agent that sends no heartbeats reports no findings."""
        rules = self._rules
        for node in list(self._fresh):
            if now - self._agent_heartbeat_at.get(node, -inf) > self._limits.heartbeat:
                continue
            self._fresh.discard(node)
            node_state = self._node_states[node]
            for incarnation, (home, uuids) in self._tenants.items():
                if home == node:
                    node_state.set_tenant(uuids, role_of(incarnation.replica), str(incarnation))
            ahead = self._node_clock_ahead
            reported = [
                _with_times(one, -ahead)
                for one in self._checks[node].evaluate(node_state, rules, now + ahead)
                if one.verdict in (Verdict.WARN, Verdict.FAIL)
            ]
            since = self._admitting_since.get(node)
            if since is not None and (
                now - since >= _ADMISSION_TIMEOUT_S
                or (len(node_state.newest) == len(READERS) and not self._checks[node].pending())
            ):
                self._admitted(node)
            found = {one.key: one for one in reported}
            if found != self._reported.get(node, {}):
                self._reported[node] = found
                self._report_storage(node, now)
                self._has_new_input = True

    def _report_storage(self, node: NodeName, now: float) -> None:
        stalled = any(Flag.STORAGE_STALLS in finding.flags for finding in self._reported[node].values())
        self._monitor.on_storage_report(node, stalled, now)

    def _admitted(self, node: NodeName) -> None:
        """End the admission of a node; from now on its GPUs may be in use."""
        if (
            self._admitting_since.pop(node, None) is not None
            and (node_state := self._node_states.get(node)) is not None
        ):
            node_state.set_expected_free(())

    # ── findings ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def findings(self, now: float) -> list[Finding]:
        self._judge_nodes(now)
        self._ticks += 1
        self._checked_now = (
            self._has_new_input
            or now >= self._next_check
            or bool(self._raw)
            or self._ticks % _MAX_TICKS_BETWEEN_CHECKS == 0
        )
        if not self._checked_now:
            return self._found
        self._has_new_input = False
        self._raw, self._next_check = self._detection.detect(self._limits, now)
        self._baselines.record_if_due(now)
        reported = [one for found in self._reported.values() for one in found.values()]
        context = PublicationContext(now, self._view, {}, self._context(now), self._memory)
        self._found, context = publish((*self._raw, *reported), context)
        self._memory, self._next_check = context.correlation, min(self._next_check, context.next_check)
        return self._found

    _checked_now = False

    def _context(self, now: float) -> CorrelationContext:
        working = [one for one in self._monitor.replicas.values() if role_of(one.incarnation.replica) != AGENT]
        joined = {
            one.incarnation
            for one in working
            if one.status != "launched" and role_of(one.incarnation.replica) in self._rollouts
        }
        return CorrelationContext(
            len(self._monitor.nodes),
            {one.node for one in working},
            joined,
            silent_workers=missing_heartbeats(self._raw, self._monitor, self._limits, now),
            silent_nodes=silent_nodes(self._raw, self._monitor, self._limits, now),
        )


def _with_times(finding: Finding, ahead: float) -> Finding:
    """Return the finding with all its times increased by ``ahead`` s, as another clock shows them."""
    evidence = tuple(msgspec.structs.replace(one, at=one.at + ahead) for one in finding.evidence)
    return msgspec.structs.replace(finding, since=finding.since + ahead, evidence=evidence)
