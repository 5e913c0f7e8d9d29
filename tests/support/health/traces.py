"""Simulates the heartbeats of nodes and replicas in virtual time, and returns the findings of the real detectors."""

from __future__ import annotations

import pickle
from collections.abc import Collection

from rrl.core.run_spec import Limits
from rrl.core.types import AGENT, DataReport, Finding, Incarnation, NodeName, ProbeResult, ReplicaId, Verdict, role_of
from rrl.health.detection.detect import Detection
from rrl.health.detection.detectors.probing import due_probes
from rrl.health.detection.health_monitor import HealthMonitor
from rrl.health.detection.records import ReplicaView

LIMITS = Limits()
STORE, TRAINER, REWARD = (Incarnation(ReplicaId(f"{role}/0"), 1) for role in ("trajectories", "trainer", "reward"))
ROLLOUTS = tuple(Incarnation(ReplicaId(f"rollout/{index}"), 1) for index in range(3))
ROLLOUT = ROLLOUTS[0]

Observed = tuple[str, str, str]
"""Detector, subject and verdict of a finding."""
BUSY, IDLE, SPINNING = (1.0, 0.97, 0.4), (0.01, 0.0, 0.0), (1.0, 1.0, 0.0)
"""Loads of a process: CPU cores in use, share of the time with a running kernel, share of the time with busy tensor
cores."""
WORKS, DEAD, NO_PROBE_HANDLER = (
    (ProbeResult.WORKS, "1 token"),
    (ProbeResult.FAILED, "EngineDeadError"),
    (ProbeResult.NO_HANDLER, ""),
)
"""Answers to a probe."""
_LOAD_INTERVAL_S = 2.0
"""Time (s) between two reports of load by an agent."""


def agent_of(node: str) -> Incarnation:
    return Incarnation(ReplicaId(f"{AGENT}/{node}"), 1)


def detect_fresh(monitor: HealthMonitor, now: float, limits: Limits = LIMITS) -> tuple[list[Finding], float]:
    """Return the result of a full evaluation of a copy of the monitor."""
    copy: HealthMonitor = pickle.loads(pickle.dumps(monitor))  # a sixth of the time of deepcopy
    return Detection(copy).detect(limits, now)


def brief(findings: Collection[Finding]) -> set[Observed]:
    return {(f.detector, str(f.incarnation or f.node), f.verdict.value) for f in findings}


class Trace:
    """A monitor and a clock; ``play`` advances the clock by one heartbeat interval at a time.

    Replicas in ``heartbeat_missing`` send nothing, those in ``still`` make no progress.
    """

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.limits, self.monitor, self.now = limits, HealthMonitor(), 1000.0
        self.monitor.set_limits(limits)
        self.detection = Detection(self.monitor)
        self.done: dict[Incarnation, int] = {}
        self.heartbeat_missing: set[Incarnation] = set()
        self.still: set[Incarnation] = set()
        self.waiting: dict[Incarnation, ReplicaId] = {}
        self.data = DataReport()
        """What the store reports about the data of the trainer."""
        self.stopped: set[Incarnation] = set()
        """Replicas whose loads show a stopped process."""
        self.loads: dict[Incarnation, tuple[float, float | None, float | None]] = {}
        """Load that the agent reports of each replica, while the agent sends heartbeats."""
        self.answers: dict[Incarnation, tuple[ProbeResult, str] | None] | None = None
        """Answers to probes; None if no probes are sent. A replica with the answer None does not answer; a replica
        without an entry answers ``WORKS``."""
        self.probed_at: list[tuple[float, Incarnation]] = []

    def node(self, name: str, *incarnations: Incarnation, phase: str = "generate") -> Trace:
        """Add a node with its agent and replicas, all joined and in ``phase``."""
        agent = agent_of(name)
        self.monitor.on_launched(agent, NodeName(name), self.now)
        self.monitor.on_agent_message(NodeName(name), agent, self.now, "boot-1")
        for incarnation in incarnations:
            self.launch(incarnation, name)
            self.monitor.on_hello(incarnation, NodeName(name), "starting", self.now)
            self.enter(incarnation, phase)
        return self

    def launch(self, incarnation: Incarnation, name: str) -> None:
        self.monitor.on_launched(incarnation, NodeName(name), self.now)

    def enter(self, incarnation: Incarnation, phase: str) -> None:
        self.monitor.on_phase(
            incarnation, phase, self.done.get(incarnation, 0), self.waiting.get(incarnation), self.now
        )

    def play(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now + self.limits.heartbeat <= until + 1e-9:
            self.now += self.limits.heartbeat
            for view in list(self.monitor.replicas.values()):
                if view.incarnation not in self.heartbeat_missing:
                    self._heartbeat(view)
            if self.answers is not None:
                self._probe(self.answers)

    def _probe(self, answers: dict[Incarnation, tuple[ProbeResult, str] | None]) -> None:
        for incarnation in due_probes(self.monitor, self.limits, self.now):
            self.monitor.on_probe_sent(incarnation, self.now)
            self.probed_at.append((self.now, incarnation))
            if incarnation not in self.heartbeat_missing and (answer := answers.get(incarnation, WORKS)) is not None:
                self.monitor.on_probe_answered(incarnation, *answer, self.now)

    def _heartbeat(self, view: ReplicaView) -> None:
        incarnation = view.incarnation
        if role_of(incarnation.replica) == AGENT:
            self.monitor.on_agent_message(view.node, incarnation, self.now)
            if self.now % _LOAD_INTERVAL_S == 0.0:
                for resident in self.monitor.incarnations_on(view.node):
                    if (load := self.loads.get(resident)) is not None:
                        stopped = resident in self.stopped
                        self.monitor.on_load(resident, load[0], load[1], self.now, load[2], stopped)
        elif view.phase is not None and not view.ended:
            assert view.phase is not None
            if self.limits.phase(view.phase).progresses and incarnation not in self.still:
                self.done[incarnation] = self.done.get(incarnation, 0) + 7
            self.monitor.on_heartbeat(
                incarnation,
                view.phase,
                self.done.get(incarnation, 0),
                self.waiting.get(incarnation),
                self.now,
                self.data if incarnation == STORE else DataReport(),
            )

    def restart(self) -> None:
        """Restart the manager; each replica whose heartbeats are not missing sends a Hello."""
        self.monitor.restart(self.now)
        for view in self.monitor.workers():
            if view.incarnation not in self.heartbeat_missing:
                assert view.phase is not None
                self.monitor.on_hello(view.incarnation, view.node, view.phase, self.now)

    def found(self, at: float | None = None) -> set[Observed]:
        return brief(self.findings(at))

    def findings(self, at: float | None = None) -> list[Finding]:
        return detect_fresh(self.monitor, self.now if at is None else at, self.limits)[0]

    def only(self, at: float | None = None) -> Finding:
        (finding,) = self.findings(at)
        return finding

    def learn(
        self, incarnation: Incarnation, name: str, seconds: float, passes: int = 4, between: str = "publish"
    ) -> None:
        """Let the replica complete passes of the phase ``name``, so that a baseline exists and the first pass is over.

        Each pass takes ``seconds`` s. After it, the replica spends 1 s in the phase ``between``.
        """
        for _ in range(passes):
            self.enter(incarnation, name)
            self.play(seconds)
            self.enter(incarnation, between)
            self.play(1)


def fail(detector: str, about: object) -> Observed:
    return detector, str(about), Verdict.FAIL.value


def warn(detector: str, about: object) -> Observed:
    return detector, str(about), Verdict.WARN.value


def unknown(detector: str, about: object) -> Observed:
    return detector, str(about), Verdict.UNKNOWN.value


def until_found(trace: Trace, timeout_s: float) -> float:
    """Play until a finding with the verdict FAIL, and return the time (s) that has passed."""
    for passed in range(int(timeout_s) + 1):
        if any(observed[2] == "FAIL" for observed in trace.found()):
            return float(passed)
        trace.play(1)
    raise AssertionError(f"nothing found within {timeout_s:g} s: {trace.found()}")
