"""If a spare node does not answer, its agent is restarted. After that the node is excluded and replaced."""

from __future__ import annotations

import pytest

from rrl.core.types import AGENT, NodeName, replica_id
from rrl.manager.model.actions import Exclude, Launch, Release, Request
from rrl.manager.model.state import Status
from rrl.tests.support.manager.jobs import RUN, TRAINER, in_node_groups, job
from rrl.tests.support.manager.world import World, fail, lost, requests

SPARE = NodeName("n5")
SPARE_AGENT = replica_id(AGENT, SPARE)
HOUR = 3600.0


@pytest.fixture
def world() -> World:
    return with_spare()


def with_spare(nodes: int = 6) -> World:
    """Return a run that works, with the spare node n5, on a cluster of ``nodes`` nodes."""
    world = World(job(spares=1), nodes=nodes).steady()
    assert SPARE not in {world.node_of(replica) for replica in world.incarnations()}
    return world


def die(world: World, node: NodeName = SPARE) -> None:
    """Let the node fail without a report of the cluster. The detectors report that its agent is silent."""
    world.dead.add(node)
    world.steps = {tag: step for tag, step in world.steps.items() if step[1] != node}
    fail(world, replica_id(AGENT, node), "agent_silence")
    world.wait(5.0)


def excluded(world: World) -> list[NodeName]:
    return [exclude.node for exclude in world.decided(Exclude)]


def test_silent_agent_of_a_spare_is_restarted_and_the_spare_stays(world: World) -> None:
    fail(world, SPARE_AGENT, "agent_silence")
    world.wait(30.0)
    agent = world.state.replica(SPARE_AGENT)
    assert (agent.status, agent.incarnation_number) == (Status.JOINED, 2)
    assert (excluded(world), requests(world)) == ([], [f"{RUN}.pool"])


def test_spare_whose_agent_is_silent_twice_is_excluded_and_replaced(world: World) -> None:
    die(world)
    assert (excluded(world), world.state.replica(SPARE_AGENT).incarnation_number) == ([], 2)
    fail(world, SPARE_AGENT, "never_joined")
    (exclude,) = world.decided(Exclude)
    assert exclude.node == SPARE
    assert [line.split(":")[0] for line in exclude.why.evidence] == ["agent", "next agent"]
    world.wait(60.0)
    request = world.decided(Request)[-1]
    assert (request.request.count, request.why.evidence) == (1, (f"spare nodes are excluded: {SPARE}",))
    assert world.state.replica(replica_id(AGENT, NodeName("n6"))).status is Status.JOINED
    world.wait(1800.0)
    assert len(requests(world)) == 2
    assert world.decided(Release) == []


def test_request_for_a_spare_waits_however_long_the_queue_takes() -> None:
    world = with_spare(nodes=5)
    die(world)
    fail(world, SPARE_AGENT, "never_joined")
    world.wait(HOUR / 2)
    assert len(requests(world)) == 2
    assert world.decided(Release) == []
    assert world.works()


def test_trainer_prefers_a_spare_whose_agent_is_responsive() -> None:
    world = World(job(spares=2), nodes=6).steady()
    die(world)
    world.lose_node(world.node_of(TRAINER))
    world.steady()
    assert world.node_of(TRAINER) == NodeName("n6")


def test_agents_that_end_by_themselves_do_not_exclude_their_spare(world: World) -> None:
    world.broken_incarnations[SPARE_AGENT] = "its disk is full"
    world.kill(SPARE_AGENT)
    world.wait(300.0)
    assert len([launch for launch in world.decided(Launch) if launch.incarnation.replica == SPARE_AGENT]) > 3
    assert excluded(world) == []


def test_silent_agents_do_not_exclude_a_node_whose_replica_works(world: World) -> None:
    node = world.node_of(TRAINER)
    agent = replica_id(AGENT, node)
    fail(world, agent, "agent_silence")
    world.broken_incarnations[agent] = "stuck"
    fail(world, agent, "never_joined")
    world.wait(5.0)
    assert excluded(world) == []


def test_excluded_node_of_a_replica_is_replaced_by_the_spare_only(world: World) -> None:
    world.lose_node(world.node_of(TRAINER))
    world.steady()
    world.wait(60.0)
    assert (len(excluded(world)), requests(world)) == (1, [f"{RUN}.pool"])


def test_run_with_a_job_for_each_replica_requests_no_spare() -> None:
    world = World(in_node_groups(), nodes=6).steady()
    world.happen(lost(world.node_of(TRAINER), world.now))
    world.steady()
    assert len(requests(world)) == 5
