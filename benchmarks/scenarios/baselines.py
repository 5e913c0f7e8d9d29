"""Baselines with which rrl's detectors are compared.

They receive the same messages and the same proof as rrl's detectors: exit records, ended processes, and nodes that the
cluster reports as down. ``FixedTimeout`` has one timeout for all phases, as PyTorch's process groups and NVRx's
sections have. ``RobustRL`` has the rules that the paper prints (arXiv 2512.22492, 5.2). ``WarnsOfAll`` warns of every
replica and node all the time. So it finds every failure that only requires a warning. This shows that false warnings
must count, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Protocol

from rrl.benchmarks.scenarios.judge import CurrentIncarnations
from rrl.benchmarks.scenarios.rhythms import Loads
from rrl.core.types import (
    AGENT,
    Cause,
    DataReport,
    Evidence,
    Finding,
    Incarnation,
    NodeName,
    ProbeResult,
    Remedy,
    ReplicaId,
    Verdict,
    role_of,
)
from rrl.health.detection.records import StackSample
from rrl.health.readers.samples import Reading

TIMEOUT_S = 600.0
"""Default timeout (s) of process groups in torch.distributed and NCCL."""
ZERO_TENSOR_S = 300.0
"""Seconds without busy tensor cores after which RobustRL fails a trainer."""
ZERO_TOKENS_S = 60.0
"""Seconds without a token after which RobustRL probes a rollout."""
TRAINS = frozenset({"train", "score"})
"""RobustRL's training phases: the forward passes of reference, critic and reward, and both passes of the actor."""


@dataclass(slots=True)
class _ReplicaState:
    """What a baseline knows about one incarnation."""

    node: NodeName
    since: float
    """Time of the last progress: an increase of the counter, the beginning of a phase, or the launch."""
    phase: str = ""
    done: int = -1
    joined: bool = False
    left: bool = False
    tokens_at: float = 0.0
    tensor_at: float = 0.0
    heartbeat_at: float = 0.0
    probed_at: float | None = None
    answered_at: float = -inf


class _Rule(Protocol):
    def fails(self, incarnation: Incarnation, one: _ReplicaState, now: float) -> bool: ...
    def needs_probe(self, incarnation: Incarnation, one: _ReplicaState, now: float) -> bool: ...


class Baseline:
    """The state that the baselines need; ``rule`` decides which replica fails."""

    probes_work = False

    def __init__(self, rule: _Rule) -> None:
        self._rule = rule
        self.replicas: dict[Incarnation, _ReplicaState] = {}
        self._proofs: dict[str, Finding] = {}

    def launched(
        self, incarnation: Incarnation, node: NodeName, now: float, standby: Incarnation | None = None
    ) -> None:
        self.replicas[incarnation] = _ReplicaState(node, now, tokens_at=now, tensor_at=now, heartbeat_at=now)

    def hello(self, incarnation: Incarnation, node: NodeName, phase: str, now: float) -> None:
        if (one := self.replicas.get(incarnation)) is not None:
            self._moves(one, phase, one.done, now)
            one.joined = True

    def heartbeat(
        self, incarnation: Incarnation, phase: str, done: int, waits_for: ReplicaId | None, data: DataReport, now: float
    ) -> None:
        if (one := self.replicas.get(incarnation)) is not None:
            one.heartbeat_at = now
            if phase != one.phase or done > one.done:
                self._moves(one, phase, done, now)

    def entered(self, incarnation: Incarnation, phase: str, done: int, waits_for: ReplicaId | None, now: float) -> None:
        if (one := self.replicas.get(incarnation)) is not None:
            self._moves(one, phase, done, now)

    def _moves(self, one: _ReplicaState, phase: str, done: int, now: float) -> None:
        one.since = one.heartbeat_at = now
        if done > one.done or phase != one.phase:
            one.tokens_at = now
        if phase != one.phase:
            one.tensor_at = now
        one.phase, one.done = phase, max(done, one.done)

    def goodbye(self, incarnation: Incarnation, now: float) -> None:
        if (one := self.replicas.get(incarnation)) is not None:
            one.left = True

    def exited(
        self, incarnation: Incarnation, code: int | None, signal: int | None, why: str, last_line: str, now: float
    ) -> None:
        if incarnation in self.replicas:
            self._proof("exit_record", Cause.PROCESS, now, incarnation=incarnation)

    def gone(self, incarnation: Incarnation, now: float) -> None:
        if incarnation in self.replicas:
            self._proof("step_gone", Cause.PROCESS, now, incarnation=incarnation)

    def cluster(self, states: dict[NodeName, tuple[str, str, bool]], polled_at: float, now: float) -> None:
        for node, (state, _, _) in states.items():
            if state == "down":
                self._proof("node_down", Cause.NODE, now, node=node)

    def _proof(
        self, what: str, cause: Cause, now: float, incarnation: Incarnation | None = None, node: NodeName | None = None
    ) -> None:
        found = _finding(what, cause, now, incarnation, node)
        self._proofs.setdefault(found.key, found)

    def agent(self, node: NodeName, incarnation: Incarnation, now: float, boot: str = "") -> None: ...
    def alive(self, incarnation: Incarnation, now: float) -> None: ...
    def gpus(self, incarnation: Incarnation, node: NodeName, uuids: list[str]) -> None: ...
    def reading(self, node: NodeName, reading: Reading, now: float) -> None: ...
    def killed(self, incarnation: Incarnation, node: NodeName, now: float) -> None: ...
    def role_died(self, node: NodeName, gpus: list[str], now: float) -> None: ...

    def load(self, incarnation: Incarnation, loads: Loads, has_gpu: bool, from_agent: bool, now: float) -> None:
        if (one := self.replicas.get(incarnation)) is not None and loads.tensor > 0:
            one.tensor_at = now

    def wants_poll(self, now: float) -> bool:
        return False

    def due_stacks(self, now: float) -> list[Incarnation]:
        return []

    def stacks(self, gang: Incarnation, sample: StackSample | None, now: float) -> None:
        pass

    def due_probes(self, now: float) -> list[Incarnation]:
        return [
            incarnation
            for incarnation, one in self.replicas.items()
            if one.joined and self._rule.needs_probe(incarnation, one, now)
        ]

    def answered(self, incarnation: Incarnation, result: ProbeResult, detail: str, now: float) -> None:
        if (one := self.replicas.get(incarnation)) is not None:
            one.probed_at, one.answered_at = None, now

    def forget(self, incarnation: Incarnation, now: float) -> None:
        self.replicas.pop(incarnation, None)
        self._proofs = {key: found for key, found in self._proofs.items() if found.incarnation != incarnation}

    def forget_node(self, node: NodeName, now: float) -> None:
        self._proofs = {key: found for key, found in self._proofs.items() if found.node != node}

    def restarted(self, current: CurrentIncarnations, now: float, clock_ahead: float) -> None:
        self.replicas.clear()
        for incarnation, node in current:
            if role_of(incarnation.replica) != AGENT:  # they know nothing of agents
                self.launched(incarnation, node, now)

    def paused(self, now: float) -> None:
        for one in self.replicas.values():
            one.since = one.tokens_at = one.tensor_at = one.heartbeat_at = now
            one.probed_at = None

    def findings(self, now: float) -> list[Finding]:
        return [
            *self._proofs.values(),
            *(
                _finding("silent", Cause.HANG, now, incarnation)
                for incarnation, one in self.replicas.items()
                if not one.left and self._rule.fails(incarnation, one, now)
            ),
        ]


class FixedTimeout:
    def __init__(self, factor: float = 1.0) -> None:
        self._timeout = TIMEOUT_S * factor

    def fails(self, incarnation: Incarnation, one: _ReplicaState, now: float) -> bool:
        return role_of(incarnation.replica) != AGENT and now - one.since >= self._timeout

    def needs_probe(self, incarnation: Incarnation, one: _ReplicaState, now: float) -> bool:
        return False


class RobustRL:
    """RobustRL's rules.

    ``answer_timeout`` is the time (s) that a suspected rollout has to answer, which the paper does not publish.
    """

    def __init__(self, answer_timeout: float, factor: float = 1.0) -> None:
        self._tensor, self._tokens, self._answer = (
            ZERO_TENSOR_S * factor,
            ZERO_TOKENS_S * factor,
            answer_timeout * factor,
        )

    def fails(self, incarnation: Incarnation, one: _ReplicaState, now: float) -> bool:
        role = role_of(incarnation.replica)
        if role == "trainer":
            return one.joined and one.phase in TRAINS and now - one.tensor_at >= self._tensor
        return role == "rollout" and one.probed_at is not None and now - one.probed_at >= self._answer

    def needs_probe(self, incarnation: Incarnation, one: _ReplicaState, now: float) -> bool:
        """Return whether to probe a rollout now, because it has generated no token for :data:`ZERO_TOKENS_S`.

        After an answer to a probe, the next probe follows :data:`ZERO_TOKENS_S` later at the earliest.
        """
        if role_of(incarnation.replica) != "rollout":
            return False
        if one.probed_at is not None and one.tokens_at > one.probed_at:
            one.probed_at = None
        if one.probed_at is not None or now - max(one.tokens_at, one.answered_at) < self._tokens:
            return False
        one.probed_at = now
        return True


class WarnsOfAll(Baseline):
    """Warns of each replica and node from its start on.

    It reports FAIL only with the proof that all methods receive.
    """

    def __init__(self) -> None:
        super().__init__(FixedTimeout(inf))
        self._warnings: dict[Incarnation | NodeName, Finding] = {}

    def launched(
        self, incarnation: Incarnation, node: NodeName, now: float, standby: Incarnation | None = None
    ) -> None:
        super().launched(incarnation, node, now, standby)
        self._warnings[incarnation] = _finding("warned", Cause.HANG, now, incarnation, verdict=Verdict.WARN)

    def agent(self, node: NodeName, incarnation: Incarnation, now: float, boot: str = "") -> None:
        if node not in self._warnings:
            self._warnings[node] = _finding("warned", Cause.NODE, now, None, node, Verdict.WARN)

    def forget(self, incarnation: Incarnation, now: float) -> None:
        super().forget(incarnation, now)
        self._warnings.pop(incarnation, None)

    def forget_node(self, node: NodeName, now: float) -> None:
        super().forget_node(node, now)
        self._warnings.pop(node, None)

    def findings(self, now: float) -> list[Finding]:
        return [*super().findings(now), *self._warnings.values()]


def _finding(
    what: str,
    cause: Cause,
    now: float,
    incarnation: Incarnation | None,
    node: NodeName | None = None,
    verdict: Verdict = Verdict.FAIL,
) -> Finding:
    remedy = Remedy.EXCLUDE if node is not None else Remedy.RESTART
    return Finding(
        what, verdict, cause, remedy, now, (Evidence("baseline", what, now),), incarnation=incarnation, node=node
    )
