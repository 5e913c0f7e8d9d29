"""A virtual cluster (:mod:`.world`) whose rollouts generate and whose trainer trains, each at a pace of its own."""

from __future__ import annotations

from collections.abc import Callable

from rrl.core.phases import ClockReading, PhaseTime
from rrl.core.run_spec import RunSpec
from rrl.core.types import TRAINER, Incarnation, ReplicaId
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Resize
from rrl.manager.model.pools import spent_node_s
from rrl.manager.model.state import Status
from rrl.tests.support.manager.world import World

POOL = "burst"


class Balanced(World):
    """Steps take as long as the slower of trainer and rollouts, and each ends with a commit and all clocks."""

    def __init__(self, job: RunSpec, nodes: int | None = None) -> None:
        super().__init__(job, job.nodes + 40 if nodes is None else nodes)
        self.paces = {"rollout": 100.0, POOL: 50.0}
        """Tokens per second of a replica, by pool."""
        self.tokens = 6000
        """Tokens of each step."""
        self.train_s = 10.0
        """Seconds in which the trainer trains on a step, apart from its waits."""
        self._spent: dict[Incarnation, tuple[float, float, float]] = {}
        """Time (s) at work, idle time (s), and units of work of each process."""

    def train(self, count: int, until: Callable[[], bool] = lambda: False) -> Balanced:
        for _ in range(count):
            if until() or self.over:
                break
            self.step()
        return self

    def step(self) -> None:
        """Let one step pass; if nothing generates or trains, let a minute pass without one."""
        trainer = self.state.replica(TRAINER)
        rollouts = {
            r.incarnation: self.paces[r.role] for r in self.state.workers if r.role in self.paces and r.is_current
        }
        working = {
            one: pace for one, pace in rollouts.items() if self.state.replica(one.replica).status is Status.JOINED
        }
        if not working or trainer.status is not Status.JOINED:
            self.wait(60.0)
            return
        generate_s = self.tokens / sum(working.values())
        duration = max(generate_s, self.train_s)
        self.wait(duration)
        if self.over or not self.state.is_current(trainer.incarnation):
            return
        self._add(trainer.incarnation, self.train_s, duration - self.train_s, 1)
        for incarnation, pace in working.items():
            self._add(incarnation, generate_s, duration - generate_s, pace * generate_s)
        step = self.state.step + 1
        self.happen(ev.StepCommitted(trainer.incarnation, step, {"reward": 0.5, "tokens": float(self.tokens)}))
        known = (trainer.incarnation, *working)
        self.happen(ev.ClocksRecorded(tuple((one, self._clock(one)) for one in known if self.state.is_current(one))))

    def _add(self, incarnation: Incarnation, worked: float, idle: float, done: float) -> None:
        before = self._spent.get(incarnation, (0.0, 0.0, 0.0))
        self._spent[incarnation] = (before[0] + worked, before[1] + idle, before[2] + done)

    def _clock(self, incarnation: Incarnation) -> ClockReading:
        worked, idle, done = self._spent[incarnation]
        times = (PhaseTime("work", "", int(worked * 1e9)), PhaseTime("wait", "no_work", int(idle * 1e9)))
        return ClockReading(1, int(done), times)

    # ── the pool ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def size(self) -> int:
        """Return how many replicas the pool has."""
        return sum(replica.role == POOL for replica in self.state.workers)

    def at_work(self) -> int:
        return sum(replica.role == POOL and replica.status is Status.JOINED for replica in self.state.workers)

    def resizes(self) -> list[tuple[int, int]]:
        """Return how many replicas each decision started and stopped."""
        return [(len(one.start), len(one.stop)) for one in self.decided(Resize)]

    def spent(self) -> float:
        """Return the node seconds that the pool has used."""
        return spent_node_s(self.state, POOL, self.now)

    def tags(self) -> list[str]:
        """Return the tags of the pool's requests so far."""
        return [tag for tag, request in self.requests.items() if request.node_group == POOL]

    def hold(self, replicas: int | None, pool: str = POOL) -> None:
        """Send the command ``rrl resize``."""
        self.happen(ev.CommandReceived("resize", "ada", f"c{len(self.events)}", pool, replicas=replicas))

    def of_others(self) -> dict[ReplicaId, int]:
        """Return the incarnation numbers of all replicas outside of the pool."""
        return {id: number for id, number in self.incarnations().items() if not id.startswith(f"{POOL}/")}
