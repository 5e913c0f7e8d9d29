"""Detection traces in virtual time: a few nodes whose agents and replicas beat, and what is found at the end."""

from __future__ import annotations

from collections.abc import Collection
from copy import deepcopy

from rrl.core.run_spec import Limits
from rrl.core.types import AGENT, Finding, Life, NodeName, ProbeResult, ReplicaId, Verdict, role_of
from rrl.health.detection.detect import detect
from rrl.health.detection.detectors.probing import to_probe
from rrl.health.detection.watch import ReplicaSighting, Watch

LIMITS = Limits()
STORE, TRAINER, REWARD = (Life(ReplicaId(f"{role}/0"), 1) for role in ("trajectories", "trainer", "reward"))
ROLLOUTS = tuple(Life(ReplicaId(f"rollout/{index}"), 1) for index in range(3))
ROLLOUT = ROLLOUTS[0]

Seen = tuple[str, str, str]
"""detector, about whom, verdict"""
BUSY, IDLE, SPINNING = (1.0, 0.97, 0.4), (0.01, 0.0, 0.0), (1.0, 1.0, 0.0)
"""loads: cores, share of the time with a kernel, with tensor cores at work"""
WORKS, DEAD, MUTE = (
    (ProbeResult.WORKS, "1 token"),
    (ProbeResult.FAILED, "EngineDeadError"),
    (ProbeResult.NO_HANDLER, ""),
)
"""answers to a probe"""
_LOADS = 2.0
"""s between two loads that agents tell"""


def agent_of(node: str) -> Life:
    return Life(ReplicaId(f"{AGENT}/{node}"), 1)


def look(watch: Watch, now: float, limits: Limits = LIMITS) -> tuple[list[Finding], float]:
    """A full look by somebody who remembers nothing; leaves the watch as it is."""
    copy = deepcopy(watch)
    copy.memo = None
    return detect(copy, limits, now)


def brief(findings: Collection[Finding]) -> set[Seen]:
    return {(f.detector, str(f.life or f.node), f.verdict.value) for f in findings}


class Trace:
    """``play`` lets a beat pass at a time; who is named as silent says nothing, who is still makes no progress."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.limits, self.watch, self.now = limits, Watch(), 1000.0
        self.watch.heed(limits)
        self.done: dict[Life, int] = {}
        self.silent: set[Life] = set()
        self.still: set[Life] = set()
        self.waiting: dict[Life, ReplicaId] = {}
        self.loads: dict[Life, tuple[float, float | None, float | None]] = {}
        """what agents tell, each while it is not silent"""
        self.answers: dict[Life, tuple[ProbeResult, str] | None] | None = None
        """None: nobody asks; of who is asked and has none, ``WORKS``"""
        self.asked: list[tuple[float, Life]] = []

    def node(self, name: str, *lives: Life, phase: str = "generate") -> Trace:
        """A node with its agent and replicas, all joined and in ``phase``."""
        agent = agent_of(name)
        self.watch.launched(agent, NodeName(name), self.now)
        self.watch.agent_heard(NodeName(name), agent, self.now, "boot-1")
        for life in lives:
            self.launch(life, name)
            self.watch.joined(life, NodeName(name), "starting", self.now)
            self.enter(life, phase)
        return self

    def launch(self, life: Life, name: str) -> None:
        self.watch.launched(life, NodeName(name), self.now)

    def enter(self, life: Life, phase: str) -> None:
        self.watch.entered(life, phase, self.done.get(life, 0), self.waiting.get(life), self.now)

    def play(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now + self.limits.beat <= until + 1e-9:
            self.now += self.limits.beat
            for seen in list(self.watch.replicas.values()):
                if seen.life not in self.silent:
                    self._beat(seen)
            if self.answers is not None:
                self._ask(self.answers)

    def _ask(self, answers: dict[Life, tuple[ProbeResult, str] | None]) -> None:
        for life in to_probe(self.watch, self.limits, self.now):
            self.watch.asked(life, self.now)
            self.asked.append((self.now, life))
            if life not in self.silent and (answer := answers.get(life, WORKS)) is not None:
                self.watch.answered(life, *answer, self.now)

    def _beat(self, seen: ReplicaSighting) -> None:
        life = seen.life
        if role_of(life.replica) == AGENT:
            self.watch.agent_heard(seen.node, life, self.now)
            if self.now % _LOADS == 0.0:
                for one in self.watch.on(seen.node):
                    if (load := self.loads.get(one)) is not None:
                        self.watch.load(one, load[0], load[1], self.now, load[2])
        elif seen.status == "joined" and not seen.ended:
            assert seen.phase is not None
            if self.limits.phase(seen.phase).progresses and life not in self.still:
                self.done[life] = self.done.get(life, 0) + 7
            self.watch.heard(life, seen.phase, self.done.get(life, 0), self.waiting.get(life), self.now)

    def restart(self) -> None:
        """A new manager; whoever is not silent says Hello to it."""
        self.watch.restart(self.now)
        for seen in self.watch.workers():
            if seen.life not in self.silent:
                assert seen.phase is not None
                self.watch.joined(seen.life, seen.node, seen.phase, self.now)

    def found(self, at: float | None = None) -> set[Seen]:
        return brief(self.findings(at))

    def findings(self, at: float | None = None) -> list[Finding]:
        return look(self.watch, self.now if at is None else at, self.limits)[0]

    def only(self, at: float | None = None) -> Finding:
        (finding,) = self.findings(at)
        return finding

    def learn(self, life: Life, name: str, seconds: float, passes: int = 4, between: str = "publish") -> None:
        """Take the replica through a phase a few times, so that its usual duration is known and its first pass past."""
        for _ in range(passes):
            self.enter(life, name)
            self.play(seconds)
            self.enter(life, between)
            self.play(1)


def fail(detector: str, about: object) -> Seen:
    return detector, str(about), Verdict.FAIL.value


def warn(detector: str, about: object) -> Seen:
    return detector, str(about), Verdict.WARN.value


def unknown(detector: str, about: object) -> Seen:
    return detector, str(about), Verdict.UNKNOWN.value
