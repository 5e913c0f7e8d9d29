"""Random failures and commands, many at the same time and in any order.

The planner reaches its fixpoint after each of them, and nothing is launched twice. After the last one, all replicas
work again or the run has ended. :class:`World` checks every plan. The seed in the test's name determines the sequence.
"""

from __future__ import annotations

import random

import msgspec
import pytest

from rrl.cluster.base import AllocationState, NodeState, NodeStatus
from rrl.core.run_spec import Recovery, RunSpec
from rrl.core.types import Cause, NodeName
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Launch
from rrl.manager.model.pools import spent_node_s
from rrl.manager.model.state import State, Status
from rrl.manager.model.table import as_dict
from rrl.manager.planner import plan
from rrl.tests.support.manager.jobs import gang_job, in_node_groups, with_pool
from rrl.tests.support.manager.node_world import Nodes
from rrl.tests.support.manager.world import found

FEW = 4
"""Number of stories that ``make test`` plays."""
MANY = 312
TROUBLES = 40
PAUSES = (0.0, 0.3, 1.0, 3.0, 10.0, 70.0, 700.0)


class Story(Nodes):
    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.made = 0
        job = _job(self.dice)
        if self.dice.random() < 0.4:
            low, high = self.dice.choice([(0, 3), (1, 3), (2, 5)])
            hours, walltime = self.dice.choice([0.2, 1.0, 100.0]), self.dice.choice([600.0, 86400.0])
            job = with_pool(job, low, high, node_hours=hours, walltime=walltime)
        super().__init__(job, job.nodes + self.dice.choice([0, 1, 3, 5]), may=self.dice.random() < 0.7)
        self.slow_to_stop = self.dice.choice([0.2, 3.0, 30.0])
        self.play(timeout_s=20.0)
        self.all_up()

    def _launch(self, action: Launch) -> None:
        super()._launch(action)
        if action.node in self.dead and action.standby is None:
            self._later(self.state.job.limits.join, lambda: self._never_joined(action))

    def _never_joined(self, action: Launch) -> None:
        replica = self.state.replica(action.incarnation.replica)
        if replica.incarnation == action.incarnation and replica.is_current and replica.status is not Status.JOINED:
            self.record(found(action.incarnation, "never_joined", self.now))

    def fresh(self, count: int) -> None:
        """Add ``count`` free nodes that the run has not used."""
        self._free += [NodeName(f"m{self.made + i}") for i in range(count)]
        self.made += count
        self.arrive(0)

    # ── events ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def trouble(self) -> None:
        dice = self.dice
        names = [name for name in self.state.nodes if name not in self.dead]
        current = [replica.id for replica in self.state.replicas.values() if replica.is_current]
        blow = dice.choice(_BLOWS)
        if blow in ("kill", "freeze") and current:
            (self.kill if blow == "kill" else self.freeze)(dice.choice(current))
        elif blow == "lose" and names:
            self.lose_node(dice.choice(names))
        elif blow == "condemn" and names:
            self.exclude(dice.choice(names), dice.choice([Cause.GPU, Cause.PROCESS]), proof=dice.random() < 0.5)
        elif blow in ("drain", "undrain") and self.state.nodes:
            self.send_command(blow, dice.choice(list(self.state.nodes)))
        elif blow == "restart":
            self.send_command(blow, dice.choice(list(self.state.replicas)))  # type: ignore[arg-type]
        elif blow == "commit":
            if all(replica.status is Status.JOINED for replica in self.state.workers if replica.role == "trainer"):
                self.commit(self.state.step + 1)
        elif blow == "resize":
            bounds = [(r.replicas, r.max_replicas + 1) for r in self.state.job.roles if r.max_replicas is not None]
            for low, high in bounds:
                number = dice.choice([None, *range(low, high)])
                self.happen(ev.CommandReceived(blow, "ada", f"c{len(self.events)}", "burst", replicas=number))
        elif blow == "arrive":
            self.fresh(1)
        elif blow == "manager":
            self.die_before = self.planned + dice.randint(1, 4)
        elif blow in ("preempt", "drop", "suspend", "go on"):
            self._allocation(blow)
        elif blow == "mute" and names:
            (self.unresponsive.add if dice.random() < 0.5 else self.unresponsive.discard)(dice.choice(names))
        elif blow == "refuse":
            self.refuse_launch = {dice.choice(names)} if names and dice.random() < 0.3 else set()
        elif blow == "resume":
            self.happen(
                ev.CommandReceived("cancel", "ada", f"c{len(self.events)}", keep_allocations=dice.random() < 0.5)
            )
            self.slow_to_stop = 0.2
            self.play(timeout_s=3000.0)
            assert self.over, "the run does not end within 3000 s after its cancellation"

    def _allocation(self, blow: str) -> None:
        running = [
            allocation
            for allocation in self.state.allocations.values()
            if allocation.running and self.held.get(allocation.tag)
        ]
        if not running:
            return
        allocation = self.dice.choice(running)
        assert allocation.status is not None
        if blow == "drop":
            self.drop(allocation.tag)
        elif blow == "preempt":
            self.happen(
                ev.AllocationChanged(
                    allocation.tag, msgspec.structs.replace(allocation.status, reclaimed=True, time_left_s=30.0)
                )
            )
            self.play(timeout_s=20.0)
            if allocation.tag in self.held:
                self.drop(allocation.tag, AllocationState.ENDED)
        else:
            state = AllocationState.SUSPENDED if blow == "suspend" else AllocationState.RUNNING
            self.happen(ev.AllocationChanged(allocation.tag, msgspec.structs.replace(allocation.status, state=state)))

    def resume(self) -> None:
        assert self.state.finish is not None
        self.record(ev.RunEnded(self.state.finish.outcome, "because"))
        self.now += self.dice.choice([1.0, 3600.0])
        self.over = False
        self.record(ev.Resumed("ada", f"r{len(self.events)}", self.state.job))
        self.fresh(6)
        self.happen(ev.ManagerStarted("login", 2))

    def heal(self) -> None:
        """Undo all failures, and add free nodes."""
        self.unresponsive.clear()
        self.refuse_launch, self.slow_to_stop = set(), 0.2
        for allocation in list(self.state.allocations.values()):
            if allocation.suspended and allocation.status is not None:
                status = msgspec.structs.replace(allocation.status, state=AllocationState.RUNNING)
                self.happen(ev.AllocationChanged(allocation.tag, status))
        self.fresh(12)
        for name in list(self.state.nodes):
            if name not in self.dead:
                self.happen(ev.NodeChanged(name, NodeStatus(NodeState.UP, "MIXED")))

    # ── invariants ───────────────────────────────────────────────────────────────────────────────────────────────────
    def check(self) -> None:
        for members in self.state.gangs:
            current_numbers = {replica.incarnation_number for replica in members if replica.is_current}
            assert current_numbers <= {max(replica.incarnation_number for replica in members)}
        steps = [replica.step for replica in self.state.replicas.values() if replica.is_current and replica.step]
        assert len(steps) == len(set(steps)), "two current incarnations have one step"
        for role in (role for role in self.state.job.roles if role.is_elastic):
            assert spent_node_s(self.state, role.name, self.now) <= role.node_seconds, "more than the budget"
        decoded = msgspec.json.decode(msgspec.json.encode(self.state, enc_hook=as_dict), type=State)
        assert plan(decoded, self.now) == plan(self.state, self.now), "the plan depends on how the state came about"


_BLOWS = (
    *3 * ("kill", "commit"),
    *2 * ("freeze", "drain", "undrain", "restart", "manager", "arrive", "mute", "refuse"),
    "resize",
    "resize",
    "lose",
    "condemn",
    "preempt",
    "drop",
    "suspend",
    "go on",
    "resume",
)


def _job(dice: random.Random) -> RunSpec:
    recovery = Recovery(
        policy=dice.choice(["role", "role", "role", "job"]),
        per_replica=dice.choice([3, 10]),
        per_node=dice.choice([1, 2]),
        full_restarts=dice.choice([0, 2]),
        exclusion=dice.choice([50.0, 3600.0]),
        window=dice.choice([60.0, 600.0]),
    )
    if dice.random() < 0.3:
        return in_node_groups(dice.choice(["replica", "hetjob"]), rollouts=3, steps=99, recovery=recovery)
    ranks, per_node = dice.choice([(4, 2), (3, 1), (1, 1), (5, 2)])
    warm = dice.random() < 0.8
    return gang_job(
        ranks,
        per_node,
        warm=warm,
        donors=dice.random() < 0.6,
        extras=dice.random() < 0.5,
        rollouts=dice.choice([2, 3, 4]),
        spares=dice.choice([0, 1, 2]),
        steps=99,
        recovery=recovery,
    )


@pytest.mark.parametrize(
    "seed", [seed if seed < FEW else pytest.param(seed, marks=pytest.mark.long) for seed in range(MANY)]
)
def test_random_events_end_with_all_replicas_working_or_the_run_over(seed: int) -> None:
    story = Story(seed)
    for _ in range(TROUBLES):
        story.trouble()
        story.play(timeout_s=story.dice.choice(PAUSES))
        if story.over:
            story.resume()
        story.check()
    story.heal()
    story.play(lambda: story.over or story.works(), timeout_s=8000.0)
    assert story.over or story.works(), {replica.id: replica.status for replica in story.state.workers}
