"""Requests that the cluster refuses for now wait like pending jobs; then replicas return to their own nodes."""

from __future__ import annotations

from itertools import pairwise

import pytest

from rrl.cluster.base import NodeState, NodeStatus, RejectReason
from rrl.core.run_spec import Limits, Recovery, RunSpec
from rrl.core.types import NodeName, Outcome, gang_of
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Fence, Finish, Request, Rung
from rrl.manager.model.state import Status
from rrl.tests.support.manager.jobs import ROLLOUTS, RUN, TRAINER, gang_job, in_node_groups, job
from rrl.tests.support.manager.world import World, assert_nothing_is_left, requests, rungs

POOL = f"{RUN}.pool"
R0, R1 = ROLLOUTS
LIMIT = "sbatch: sbatch: error: AssocMaxSubmitJobLimit / sbatch: error: Batch job submission failed: Job violates …"
SHORT = Limits(allocation=200.0)


def full(job: RunSpec, nodes: int | None = None) -> World:
    """Return a world whose cluster refuses every request because of a full submit limit."""
    world = World(job, nodes)
    return refusing(world)


def refusing(world: World) -> World:
    world.refuse, world.refuse_reason = LIMIT, RejectReason.REFUSED_FOR_NOW
    return world


def accepting(world: World) -> World:
    world.refuse, world.refuse_reason = "", None
    return world


def asked_at(world: World) -> list[float]:
    return [s.at for s in world.events if isinstance(s.event, ev.Intended) and isinstance(s.event.action, Request)]


def kill_thrice(world: World) -> None:
    """Kill the trainer as often as sends it to another node."""
    for step in range(world.state.job.recovery.per_node + 1):
        world.steady()
        world.commit(step + 1)
        world.kill(TRAINER)


def marked(world: World, node: NodeName, state: NodeState) -> None:
    world.happen(ev.NodeChanged(node, NodeStatus(state, state.value)))


# ── refusals that may be lifted ──────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("spec", [job(), in_node_groups("hetjob"), in_node_groups("replica")], ids=lambda one: one.form)
def test_first_request_that_is_refused_for_now_waits_and_is_granted_later(spec: RunSpec) -> None:
    world = full(spec, nodes=20).play(timeout_s=400.0)
    assert world.decided(Finish) == []
    assert {a.pending for a in world.state.allocations.values()} == {True}
    details = {a.status.detail for a in world.state.allocations.values() if a.status is not None}
    assert details == {f"refused for now: {LIMIT}"}
    accepting(world).steady()
    assert set(world.incarnations().values()) == {1}


def test_pause_before_a_refused_request_is_made_again_doubles_up_to_a_minute() -> None:
    world = full(job()).play(timeout_s=300.0)
    assert set(requests(world)) == {POOL}
    pauses = [later - earlier for earlier, later in pairwise(asked_at(world))]
    assert pauses[:6] == pytest.approx([10, 10, 20, 40, 60, 60], abs=2)


def test_first_request_that_is_refused_for_longer_than_the_limit_ends_the_run_with_the_reason() -> None:
    world = full(job(limits=SHORT)).play(timeout_s=SHORT.allocation - 1)
    assert world.decided(Finish) == []
    world.play()
    (end,) = world.decided(Finish)
    assert (end.outcome, end.why.evidence) == (Outcome.FAILED, (f"{POOL}: refused for now: {LIMIT}",))
    assert_nothing_is_left(world, Outcome.FAILED)


def test_replacement_that_is_refused_for_now_is_granted_later() -> None:
    world = refusing(World(job(spares=0), nodes=6).steady())
    world.lose_node(world.node_of(R0))
    world.play(timeout_s=600.0)
    assert (len(set(requests(world))), world.state.replica(R0).status) == (2, Status.WANTED)
    accepting(world).steady()
    assert (world.incarnations()[R0], world.decided(Finish)) == (2, [])


def test_requests_that_are_never_answered_are_repeated_until_the_limit() -> None:
    world = World(job(spares=0, limits=SHORT), nodes=6).steady()
    world.refuse, world.refuse_reason = "never appeared in the queue", RejectReason.NEVER_APPEARED
    world.lose_node(world.node_of(R0))
    world.play(timeout_s=SHORT.allocation - 1)
    assert len(requests(world)) > 1 + 3
    assert (world.state.replica(R0).status, world.decided(Finish)) == (Status.WANTED, [])
    world.play(timeout_s=60.0)
    assert world.state.replica(R0).status is Status.RETIRED


# ── the own node ─────────────────────────────────────────────────────────────────────────────────────────────────────
def test_trainer_that_was_killed_thrice_returns_to_its_own_node_before_the_run_ends() -> None:
    world = refusing(World(job(spares=0, steps=99, limits=SHORT)).steady())
    home = world.node_of(TRAINER)
    kill_thrice(world)
    world.play(timeout_s=SHORT.allocation - 10)
    assert (world.state.replica(TRAINER).status, world.decided(Finish)) == (Status.WANTED, [])
    world.steady()
    assert (world.node_of(TRAINER), world.decided(Finish)) == (home, [])
    assert rungs(world)[-1] is Rung.IN_PLACE
    (evidence,) = world.decided(Fence)[-1].why.evidence
    assert evidence.endswith(f" s (refused for now: {LIMIT})")
    assert all(incarnation == 1 for id, incarnation in world.incarnations().items() if id != TRAINER)


def test_trainer_that_fails_on_its_own_node_once_more_ends_the_run() -> None:
    world = refusing(World(job(spares=0, steps=99, limits=SHORT, recovery=Recovery(full_restarts=0))).steady())
    home = world.node_of(TRAINER)
    kill_thrice(world)
    world.refuse_launch.add(home)
    world.play(timeout_s=4000.0)
    assert world.decided(Finish), "the trainer was tried on its own node without end"
    assert_nothing_is_left(world, Outcome.FAILED)


def test_final_refusal_of_a_replacement_sends_the_trainer_home_too() -> None:
    world = World(job(spares=0, steps=99)).steady()
    home = world.node_of(TRAINER)
    world.refuse = (
        "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified"
    )
    kill_thrice(world)
    world.steady()
    assert (world.node_of(TRAINER), world.decided(Finish)) == (home, [])


# ── nodes that reboot once they are idle ─────────────────────────────────────────────────────────────────────────────
def test_roles_on_a_leaving_node_work_on_and_no_role_is_placed_there() -> None:
    world = World(job(spares=2)).steady()
    spare = next(n for n in sorted(world.state.nodes) if n not in {world.node_of(r) for r in world.incarnations()})
    home = world.node_of(R0)
    for node in (home, spare):
        marked(world, node, NodeState.LEAVING)
    world.play(timeout_s=3000.0)
    assert (world.decided(Fence), set(world.incarnations().values())) == ([], {1})
    world.kill(R0)
    world.steady()
    assert world.node_of(R0) not in (home, spare)


def test_replica_returns_to_its_leaving_node_if_no_other_is_to_be_had() -> None:
    world = refusing(World(job(spares=0, steps=99, limits=SHORT)).steady())
    home = world.node_of(TRAINER)
    for node in world.state.nodes:
        marked(world, node, NodeState.LEAVING)
    world.kill(TRAINER)
    world.play(timeout_s=SHORT.allocation - 10)
    assert (world.state.replica(TRAINER).status, world.decided(Finish)) == (Status.WANTED, [])
    world.steady()
    assert (world.node_of(TRAINER), world.decided(Finish)) == (home, [])


def test_gang_moves_its_member_off_a_leaving_node_at_its_next_start_only_if_a_node_is_free() -> None:
    for spares in (0, 1):
        world = World(gang_job(ranks=2, per_node=1, warm=False, spares=spares)).steady()
        first, second = (r for r in world.incarnations() if gang_of(r) == TRAINER)
        home = world.node_of(second)
        marked(world, home, NodeState.LEAVING)
        world.kill(first)
        world.steady()
        assert (world.node_of(second) == home) is (spares == 0)
