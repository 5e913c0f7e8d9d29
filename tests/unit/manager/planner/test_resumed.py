"""A resumed run: its state, and that the causes of its first end do not end it again."""

from __future__ import annotations

import msgspec
import pytest

from rrl.cluster.base import AllocationState, AllocationStatus
from rrl.core.role_environment import EnvSpec
from rrl.core.run_spec import ManagerSpec, RunSpec
from rrl.core.types import NodeName, Outcome, ReplicaId
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Release, Request
from rrl.tests.support.manager.jobs import ROLLOUTS, RUN, in_node_groups, job
from rrl.tests.support.manager.world import World, requests

R0 = ROLLOUTS[0]
POOL = f"{RUN}.pool"


def ended(world: World, outcome: Outcome) -> World:
    """Play until everything is released, and write the last record of the run."""
    world.play(timeout_s=600.0)
    assert world.over
    assert world.state.finish is not None
    assert world.state.finish.outcome is outcome
    world.record(ev.RunEnded(outcome, "because"))
    return world


def cancelled(job: RunSpec, nodes: int | None = None, keep: bool = False) -> World:
    world = World(job, nodes).steady()
    world.happen(ev.CommandReceived("cancel", "ada", "c1", keep_allocations=keep))
    return ended(world, Outcome.CANCELLED)


def resume(world: World, job: RunSpec) -> World:
    """Resume the run an hour later."""
    world.now += 3600.0
    world.over = False
    world.record(ev.Resumed("ada", f"r{len(world.events)}", job))
    world.happen(ev.ManagerStarted("login", 2))
    return world


def test_resumed_run_wants_all_replicas_with_new_budgets_and_numbers() -> None:
    world = World(job(), nodes=9).steady()
    world.kill(R0)
    world.steady()
    world.cancel()
    resume(ended(world, Outcome.CANCELLED), job(rollouts=3)).steady()
    assert world.incarnations() == dict.fromkeys(world.incarnations(), 2) | {R0: 3, ReplicaId("rollout/2"): 1}
    assert [replica.failures for replica in world.state.workers] == [()] * 6


def test_earlier_external_cancellations_do_not_cancel_a_resumed_run() -> None:
    world = World(job(), nodes=9).steady()
    for _ in range(2):
        for tag in list(world.state.allocations):
            nodes = world._give_back(tag)
            status = AllocationStatus(AllocationState.ENDED, "7", nodes, "CANCELLED", cancelled=True)
            world.record(ev.AllocationChanged(tag, status))
        world.play(world.works, timeout_s=60.0)
    resume(ended(world, Outcome.CANCELLED), job()).steady()
    assert world.state.finish is None


def test_probe_results_are_forgotten_for_the_corrected_job() -> None:
    probing = msgspec.structs.replace(job(spares=6), env=EnvSpec(probe=("torch",)))
    world = World(probing)
    world.slow_to_join = float("inf")
    world.unfit = dict.fromkeys((NodeName("n1"), NodeName("n2")), "No module named 'torch'")
    world.play(timeout_s=10.0)
    assert [name for name, node in world.state.nodes.items() if node.excluded is not None] == ["n1", "n2"]
    world.cancel()
    ended(world, Outcome.CANCELLED)
    world.unfit, world.slow_to_join = {}, 0.7
    resume(world, probing).steady()
    assert not any(node.excluded for node in world.state.nodes.values())


def test_node_excluded_by_a_user_stays_excluded() -> None:
    world = World(job(), nodes=8).steady()
    spare = next(name for name in world.state.nodes if name not in {replica.node for replica in world.state.workers})
    world.happen(ev.CommandReceived("drain", "ada", "d1", target=spare))
    assert world.state.nodes[spare].excluded is not None
    world.cancel()
    resume(ended(world, Outcome.CANCELLED), job()).steady()
    assert world.state.nodes[spare].excluded is not None
    assert spare in world.decided(Request)[-1].request.exclude


def test_kept_allocations_are_used() -> None:
    world = resume(cancelled(job(), keep=True), job()).steady()
    assert requests(world) == [POOL]
    assert not world.decided(Release)


@pytest.mark.parametrize("change", ["shape", "partition", "form"])
def test_kept_allocations_that_do_not_fit_the_job_are_released(change: str) -> None:
    world = cancelled(job(), nodes=20, keep=True)
    (pool,) = job().node_groups
    wide = msgspec.structs.replace(pool.node, cpus=2 * pool.node.cpus)
    changed = {
        "shape": msgspec.structs.replace(job(), node_groups=(msgspec.structs.replace(pool, node=wide),)),
        "partition": msgspec.structs.replace(
            job(), node_groups=(msgspec.structs.replace(pool, sbatch={"partition": "b"}),)
        ),
        "form": in_node_groups(),
    }[change]
    resume(world, changed).steady()
    assert [action.allocation for action in world.decided(Release)] == [POOL]
    assert POOL not in world.held
    assert all(replica.allocation != POOL for replica in world.state.workers)


def test_manager_resumed_inside_its_pool_requests_that_pool_only() -> None:
    inside = msgspec.structs.replace(job(), manager=ManagerSpec("pool"))
    world = cancelled(inside)
    del world.requests[POOL]  # the job with this name has ended, and another one waits in the queue
    resume(world, inside).steady()
    assert requests(world) == [POOL, POOL]
