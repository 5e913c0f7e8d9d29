"""rrl's own detectors as a judge: the watch and ``detect`` as the manager drives them, the checks as agents do, and
between both the gates of ``[health]`` and of correlation (rrl.manager.intake.finding_gate).

``factor`` multiplies the bounds in time, for the curve over thresholds.
"""

from __future__ import annotations

from math import inf

import msgspec

from rrl.config.health_rules import Rules
from rrl.core.launch import ExitReason
from rrl.core.phases import PHASES
from rrl.core.run_spec import HealthView, Limits, PhaseView
from rrl.core.types import AGENT, Finding, Life, NodeName, ProbeResult, ReplicaId, Verdict, index_of, role_of
from rrl.health.checks.evaluate import judge, pending
from rrl.health.checks.node_state import EVERY, HardwarePast, Seen, hardware_of, recall
from rrl.health.detection.attribution.correlation import Here, Memory, correlate
from rrl.health.detection.detect import detect
from rrl.health.detection.detectors.liveness import unheard
from rrl.health.detection.detectors.node_liveness import absent
from rrl.health.detection.detectors.probing import to_probe
from rrl.health.detection.watch import Watch
from rrl.health.readers.samples import READERS, Reading
from rrl.manager.intake.finding_gate import Lessons, heeded
from rrl.manager.model.events import Learned
from rrl.tests.support.scenarios.format import Scenario
from rrl.tests.support.scenarios.hardware import PACE, UPTIME
from rrl.tests.support.scenarios.judge import Believed
from rrl.tests.support.scenarios.rhythms import Loads, roles_of

_SCALED = ("silence", "join", "first_pass", "suspect", "probe", "idle")
_LOOKS = 8
"""beats between two looks while nothing but beats is heard and nothing is due; what is due is looked at in time"""
_ADMISSION = 30.0
"""s that a node is looked at at most before a role may start there (rrl.manager.execute.launch)"""


def limits_of(scenario: Scenario, factor: float = 1.0) -> Limits:
    given = {name: getattr(scenario.limits, name) for name in type(scenario.limits).model_fields}
    phases = {name: PhaseView(**table.model_dump()) for name, table in scenario.phases.items()}
    limits = Limits(**given, phases=phases)
    if "stragglers" in Limits.__struct_fields__:
        limits = msgspec.structs.replace(limits, stragglers=scenario.health.stragglers)
    if factor == 1.0:
        return limits
    views = {}
    for name in {*PHASES, *limits.phases}:
        phase = limits.phase(name)
        said = limits.phases.get(name, PhaseView())
        views[name] = msgspec.structs.replace(said, shortest=phase.shortest * factor, longest=phase.longest * factor)
    scaled = {name: getattr(limits, name) * factor for name in _SCALED}
    return msgspec.structs.replace(limits, phases=views, **scaled)


class Ours:
    asks_for_work = True

    def __init__(self, scenario: Scenario, factor: float = 1.0) -> None:
        self._limits = limits_of(scenario, factor)
        self._view = msgspec.convert(scenario.health.model_dump(), HealthView)
        self._rollouts = {name for name in roles_of(scenario) if name == "rollout"}
        self._rules = Rules(expect=scenario.expect)
        self._tenants: dict[Life, tuple[NodeName, list[str]]] = {}
        """whose are which GPUs (UUIDs)"""
        self._looked_at: dict[NodeName, float] = {}
        """nodes that are being admitted: since when"""
        self._tensor = "dcgm" in scenario.cluster.readers
        self._tensors: dict[Life, tuple[float, float]] = {}
        self._watch = Watch()
        self._watch.heed(self._limits)
        self._journal = Learned({})
        """what is usual, as recorded last"""
        self._lessons = Lessons(self._watch, {}, self._record)
        self._memory = Memory()
        self._seen: dict[NodeName, Seen] = {}
        self._past: dict[NodeName, HardwarePast] = {}
        """what agents that are gone had seen"""
        self._boots: dict[NodeName, str] = {}
        self._said: dict[NodeName, dict[str, Finding]] = {}
        self._fresh: set[NodeName] = set()
        """nodes with a reading that their agent has not judged yet"""
        self._speaks: dict[NodeName, float] = {}
        self._news = True
        self._again = 0.0
        self._looked = 0
        self._raw: list[Finding] = []
        self._found: list[Finding] = []

    # ── heard ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def launched(self, life: Life, node: NodeName, now: float) -> None:
        self._watch.launched(life, node, now)
        self._news = True

    def hello(self, life: Life, node: NodeName, phase: str, now: float) -> None:
        self._watch.joined(life, node, phase, now)
        self._admitted(node)
        self._news = True

    def gpus(self, life: Life, node: NodeName, uuids: list[str]) -> None:
        self._tenants.pop(life, None)  # the newest of a GPU comes last
        self._tenants[life] = node, uuids

    def beat(self, life: Life, phase: str, done: int, waits_for: ReplicaId | None, now: float) -> None:
        self._watch.heard(life, phase, done, waits_for, now)

    def entered(self, life: Life, phase: str, done: int, waits_for: ReplicaId | None, now: float) -> None:
        self._watch.entered(life, phase, done, waits_for, now)

    def goodbye(self, life: Life, now: float) -> None:
        self._watch.goodbye(life, now)
        self._news = True

    def exited(self, life: Life, code: int | None, signal: int | None, why: str, said: str, now: float) -> None:
        reason = ExitReason.EXITED if signal is None else ExitReason.SIGNALED
        self._watch.step_ended(life, code, signal, reason, now, said, why)
        self._news = True

    def gone(self, life: Life, now: float) -> None:
        self._watch.gone(life, now)
        self._watch.step_ended(life, None, None, ExitReason.LOST, now)
        self._news = True

    def agent(self, node: NodeName, life: Life, now: float, boot: str = "") -> None:
        self._watch.agent_heard(node, life, now, boot)
        self._boots[node] = boot or self._boots.get(node, "")
        self._speaks[node] = now

    def alive(self, life: Life, now: float) -> None:
        self._watch.step_alive(life, now)

    def load(self, life: Life, loads: Loads, has_gpu: bool, told: bool, now: float) -> None:
        if not told:
            return
        tensor = self._sampled(life, loads.tensor, now) if has_gpu and self._tensor else None
        self._watch.load(life, loads.cpu, loads.gpu if has_gpu else None, now, tensor)

    def _sampled(self, life: Life, tensor: float, now: float) -> float:
        """As DCGM told it last."""
        if life not in self._tensors or now - self._tensors[life][0] >= PACE["dcgm"]:
            self._tensors[life] = now, tensor
        return self._tensors[life][1]

    def cluster(self, states: dict[NodeName, tuple[str, str, bool]], asked_at: float, now: float) -> None:
        """As rrl.manager.intake.cluster_poller tells it."""
        known = self._watch.nodes
        gone = [name for name, (state, _, _) in states.items() if state in ("down", "unknown")]
        ceased = [name for name in gone if (home := known.get(name)) is not None and home.called_up]
        alone = 2 * len(ceased) <= max(2, len(states))
        for name, (state, detail, suspended) in states.items():
            self._watch.cluster_node(name, state, detail, now, alone)
            self._watch.cluster_job(name, suspended, asked_at, now)
        self._news = True

    def asks_cluster(self, now: float) -> bool:
        return self._watch.unsure(self._limits, now)

    def asks(self, now: float) -> list[Life]:
        if not self._looked_now:
            return []
        asked = to_probe(self._watch, self._limits, now)
        for life in asked:
            self._watch.asked(life, now)
            self._news = True
        return asked

    def answered(self, life: Life, result: ProbeResult, detail: str, now: float) -> None:
        self._watch.answered(life, result, detail, now)
        self._news = True

    # ── done by the manager ──────────────────────────────────────────────────────────────────────────────────────────
    def forget(self, life: Life, now: float) -> None:
        self._watch.forget(life)
        self._tenants.pop(life, None)
        if role_of(life.replica) == AGENT:  # what it had seen goes with it, but for what it has written
            node = NodeName(index_of(life.replica))
            if (seen := self._seen.pop(node, None)) is not None:
                self._past[node] = hardware_of(seen)
        self._news = True

    def forget_node(self, node: NodeName, now: float) -> None:
        self._watch.forget_node(node)
        for known in (self._said, self._seen, self._speaks, self._looked_at):
            known.pop(node, None)
        self._news = True

    def restarted(self, believed: Believed, now: float) -> None:
        before, self._watch, self._memory = self._watch.replicas, Watch(), Memory()
        self._watch.heed(self._limits)
        self._watch.remember(self._journal.lessons)
        self._lessons = Lessons(self._watch, self._journal.lessons, self._record)
        for life, node in believed:
            self._watch.launched(life, node, now)
            if (seen := before.get(life.replica)) is not None and seen.life == life:
                self._watch.adopted(life, seen.passed)
        self._news = True

    def _record(self, learned: Learned) -> None:
        self._journal = learned

    def paused(self, now: float) -> None:
        self._watch.restart(now)
        self._news = True

    # ── on the nodes ─────────────────────────────────────────────────────────────────────────────────────────────────
    def reading(self, node: NodeName, reading: Reading, now: float) -> None:
        if (seen := self._seen.get(node)) is None:
            seen = self._seen[node] = Seen(self._rules.xid.burst)
            seen.boot = self._boots.get(node, "")
            if node in self._past:
                recall(seen, self._past[node])
            if not any(one.node == node and one.status == "joined" for one in self._watch.replicas.values()
                       if role_of(one.life.replica) != AGENT):  # fmt: skip
                self._looked_at[node] = now
                seen.vacant((EVERY,))
        seen.add(reading)
        self._fresh.add(node)

    def killed(self, life: Life, node: NodeName, now: float) -> None:
        if (seen := self._seen.get(node)) is not None:
            seen.killed(UPTIME + now)
            self._fresh.add(node)

    def role_died(self, node: NodeName, gpus: list[str], now: float) -> None:
        if (seen := self._seen.get(node)) is not None:
            seen.role_died(gpus, UPTIME + now)
            self._fresh.add(node)

    def _judge_nodes(self, now: float) -> None:
        """Agents judge once a second; one that is silent tells nothing."""
        rules = self._rules
        for node in list(self._fresh):
            if now - self._speaks.get(node, -inf) > self._limits.beat:
                continue
            self._fresh.discard(node)
            seen = self._seen[node]
            for life, (home, uuids) in self._tenants.items():
                if home == node:
                    seen.occupied(uuids, role_of(life.replica), str(life))
            told = [_by_our_clock(one) for one in judge(seen, node, rules, UPTIME + now)
                    if one.verdict in (Verdict.WARN, Verdict.FAIL)]  # fmt: skip
            since = self._looked_at.get(node)
            if since is not None and (now - since >= _ADMISSION or (len(seen.newest) == len(READERS)
                                                                    and not pending(seen))):  # fmt: skip
                self._admitted(node)
            found = {one.key: one for one in told}
            if found != self._said.get(node, {}):
                self._said[node] = found
                self._news = True

    def _admitted(self, node: NodeName) -> None:
        """A role may start there, or has: nobody is asked any more whether its GPUs are free."""
        if self._looked_at.pop(node, None) is not None and (seen := self._seen.get(node)) is not None:
            seen.vacant(())

    # ── found ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def findings(self, now: float) -> list[Finding]:
        self._judge_nodes(now)
        self._looked += 1
        self._looked_now = self._news or now >= self._again or bool(self._raw) or self._looked % _LOOKS == 0
        if not self._looked_now:
            return self._found
        self._news = False
        self._raw, self._again = detect(self._watch, self._limits, now)
        self._lessons.consider(now)
        said = [one for found in self._said.values() for one in found.values()]
        every = [one for finding in (*self._raw, *said) if (one := heeded(finding, self._view)) is not None]
        self._found, self._memory, again = correlate(every, self._here(now), self._memory, now)
        self._again = min(self._again, again)
        return self._found

    _looked_now = False

    def _here(self, now: float) -> Here:
        working = [one for one in self._watch.replicas.values() if role_of(one.life.replica) != AGENT]
        joined = {one.life for one in working if one.status == "joined" and role_of(one.life.replica) in self._rollouts}
        return Here(len(self._watch.nodes), {one.node for one in working}, joined,
                    silent=unheard(self._raw, self._watch, self._limits, now),
                    absent=absent(self._raw, self._watch, self._limits, now))  # fmt: skip


def _by_our_clock(finding: Finding) -> Finding:
    """With its times by the manager's clock."""
    evidence = tuple(msgspec.structs.replace(one, at=one.at - UPTIME) for one in finding.evidence)
    return msgspec.structs.replace(finding, since=finding.since - UPTIME, evidence=evidence)
