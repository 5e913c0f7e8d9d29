"""Two baselines that hear what rrl's detectors hear, and the same proof: exit records, processes that are gone, nodes
that the cluster calls down.

``FixedTimeout``: one timeout for everybody and everything, as PyTorch's process groups and NVRx's sections have it.
``RobustRL``: the rules that the paper prints (arXiv 2512.22492, 5.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Protocol

from rrl.core.types import (
    AGENT,
    Cause,
    Evidence,
    Finding,
    Life,
    NodeName,
    ProbeResult,
    Remedy,
    ReplicaId,
    Verdict,
    role_of,
)
from rrl.health.readers.samples import Reading
from rrl.tests.support.scenarios.judge import Believed
from rrl.tests.support.scenarios.rhythms import Loads

TIMEOUT = 600.0
"""s: torch.distributed's and NCCL's default"""
ZERO_TENSOR = 300.0
"""s (RobustRL)"""
ZERO_TOKENS = 60.0
"""s (RobustRL)"""
ANSWER = 30.0
"""s that a rollout has to answer the heartbeat; RobustRL does not say its own"""
TRAINS = frozenset({"train", "score"})
"""its training phases: reference, critic and reward forward, actor's forward and backward"""


@dataclass(slots=True)
class _One:
    """A life as a baseline sees it."""

    node: NodeName
    since: float
    """of the last progress: a rise of the counter, a phase that begins, its launch"""
    phase: str = ""
    done: int = -1
    joined: bool = False
    left: bool = False
    tokens_at: float = 0.0
    tensor_at: float = 0.0
    heard: float = 0.0
    asked: float | None = None
    answered: float = -inf


class _Rule(Protocol):
    def fails(self, life: Life, one: _One, now: float) -> bool: ...
    def asks(self, life: Life, one: _One, now: float) -> bool: ...


class Baseline:
    """What both hear and know alike; ``rule`` says who fails."""

    asks_for_work = False

    def __init__(self, rule: _Rule) -> None:
        self._rule = rule
        self.lives: dict[Life, _One] = {}
        self._proofs: dict[str, Finding] = {}

    def launched(self, life: Life, node: NodeName, now: float) -> None:
        self.lives[life] = _One(node, now, tokens_at=now, tensor_at=now, heard=now)

    def hello(self, life: Life, node: NodeName, phase: str, now: float) -> None:
        if (one := self.lives.get(life)) is not None:
            self._moves(one, phase, one.done, now)
            one.joined = True

    def beat(self, life: Life, phase: str, done: int, waits_for: ReplicaId | None, now: float) -> None:
        if (one := self.lives.get(life)) is not None:
            one.heard = now
            if phase != one.phase or done > one.done:
                self._moves(one, phase, done, now)

    def entered(self, life: Life, phase: str, done: int, waits_for: ReplicaId | None, now: float) -> None:
        if (one := self.lives.get(life)) is not None:
            self._moves(one, phase, done, now)

    def _moves(self, one: _One, phase: str, done: int, now: float) -> None:
        one.since = one.heard = now
        if done > one.done or phase != one.phase:
            one.tokens_at = now
        if phase != one.phase:
            one.tensor_at = now
        one.phase, one.done = phase, max(done, one.done)

    def goodbye(self, life: Life, now: float) -> None:
        if (one := self.lives.get(life)) is not None:
            one.left = True

    def exited(self, life: Life, code: int | None, signal: int | None, why: str, said: str, now: float) -> None:
        if life in self.lives:
            self._proof("exit_record", Cause.PROCESS, now, life=life)

    def gone(self, life: Life, now: float) -> None:
        if life in self.lives:
            self._proof("step_gone", Cause.PROCESS, now, life=life)

    def cluster(self, states: dict[NodeName, tuple[str, str, bool]], asked_at: float, now: float) -> None:
        for node, (state, _, _) in states.items():
            if state == "down":
                self._proof("node_down", Cause.NODE, now, node=node)

    def _proof(
        self, what: str, cause: Cause, now: float, life: Life | None = None, node: NodeName | None = None
    ) -> None:
        found = _finding(what, cause, now, life, node)
        self._proofs.setdefault(found.key, found)

    def agent(self, node: NodeName, life: Life, now: float, boot: str = "") -> None: ...
    def alive(self, life: Life, now: float) -> None: ...
    def gpus(self, life: Life, node: NodeName, uuids: list[str]) -> None: ...
    def reading(self, node: NodeName, reading: Reading, now: float) -> None: ...
    def killed(self, life: Life, node: NodeName, now: float) -> None: ...
    def role_died(self, node: NodeName, gpus: list[str], now: float) -> None: ...

    def load(self, life: Life, loads: Loads, has_gpu: bool, told: bool, now: float) -> None:
        if (one := self.lives.get(life)) is not None and loads.tensor > 0:
            one.tensor_at = now

    def asks_cluster(self, now: float) -> bool:
        return False

    def asks(self, now: float) -> list[Life]:
        return [life for life, one in self.lives.items() if one.joined and self._rule.asks(life, one, now)]

    def answered(self, life: Life, result: ProbeResult, detail: str, now: float) -> None:
        if (one := self.lives.get(life)) is not None:
            one.asked, one.answered = None, now

    def forget(self, life: Life, now: float) -> None:
        self.lives.pop(life, None)
        self._proofs = {key: found for key, found in self._proofs.items() if found.life != life}

    def forget_node(self, node: NodeName, now: float) -> None:
        self._proofs = {key: found for key, found in self._proofs.items() if found.node != node}

    def restarted(self, believed: Believed, now: float) -> None:
        self.lives.clear()
        for life, node in believed:
            if role_of(life.replica) != AGENT:  # they know nothing of agents
                self.launched(life, node, now)

    def paused(self, now: float) -> None:
        for one in self.lives.values():
            one.since = one.tokens_at = one.tensor_at = one.heard = now
            one.asked = None

    def findings(self, now: float) -> list[Finding]:
        return [*self._proofs.values(), *(
            _finding("silent", Cause.HANG, now, life) for life, one in self.lives.items()
            if not one.left and self._rule.fails(life, one, now)
        )]  # fmt: skip


class FixedTimeout:
    def __init__(self, factor: float = 1.0) -> None:
        self._timeout = TIMEOUT * factor

    def fails(self, life: Life, one: _One, now: float) -> bool:
        return role_of(life.replica) != AGENT and now - one.since >= self._timeout

    def asks(self, life: Life, one: _One, now: float) -> bool:
        return False


class RobustRL:
    def __init__(self, factor: float = 1.0) -> None:
        self._tensor, self._tokens, self._answer = ZERO_TENSOR * factor, ZERO_TOKENS * factor, ANSWER * factor

    def fails(self, life: Life, one: _One, now: float) -> bool:
        role = role_of(life.replica)
        if role == "trainer":
            return one.joined and one.phase in TRAINS and now - one.tensor_at >= self._tensor
        return role == "rollout" and one.asked is not None and now - one.asked >= self._answer

    def asks(self, life: Life, one: _One, now: float) -> bool:
        """A heartbeat to a rollout without tokens; who has answered is asked again after as long."""
        if role_of(life.replica) != "rollout":
            return False
        if one.asked is not None and one.tokens_at > one.asked:
            one.asked = None
        if one.asked is not None or now - max(one.tokens_at, one.answered) < self._tokens:
            return False
        one.asked = now
        return True


def _finding(what: str, cause: Cause, now: float, life: Life | None, node: NodeName | None = None) -> Finding:
    remedy = Remedy.EXCLUDE if node is not None else Remedy.RESTART
    return Finding(what, Verdict.FAIL, cause, remedy, now, (Evidence("baseline", what, now),), life=life, node=node)
