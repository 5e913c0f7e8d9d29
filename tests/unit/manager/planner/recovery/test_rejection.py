"""Failures that would recur on any node end a run early, with a message of their own."""

from __future__ import annotations

from functools import partial

import msgspec
import pytest

from rrl.cluster.base import RejectReason
from rrl.core.launch import ExitReason
from rrl.core.role_environment import EnvSpec
from rrl.core.run_spec import Recovery, RunSpec
from rrl.core.types import AGENT, NodeName, Outcome, ReplicaId, role_of
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Exclude, Fence, Finish, Launch, Rung
from rrl.manager.model.state import NEVER_APPEARED, Status
from rrl.tests.support.manager.jobs import REWARD, ROLLOUTS, RUN, TRAINER, in_node_groups, job
from rrl.tests.support.manager.world import World, assert_nothing_is_left, found, requests

R0, R1 = ROLLOUTS
N1, N2, N3, N4, N5, N6 = (NodeName(f"n{i}") for i in range(1, 7))
MISSING = "not started: [Errno 2] No such file or directory: './train.sh'"


@pytest.fixture
def world() -> World:
    return World(job())


def why(world: World) -> tuple[str, ...]:
    (end,) = world.decided(Finish)
    return end.why.evidence


def tries(world: World, role: str) -> int:
    return sum(role_of(launch.incarnation.replica) == role for launch in world.decided(Launch))


# ── failed starts ────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(("spares", "nodes", "count"), [(0, "n2", 2), (1, "n2, n5", 3)])
def test_missing_command_is_tried_twice_and_once_on_another_node_before_the_run_ends(
    spares: int, nodes: str, count: int
) -> None:
    world = World(job(spares=spares))
    world.broken["trainer"] = MISSING
    world.play()
    assert why(world) == (f"trainer: {MISSING} on {nodes}",)
    assert tries(world, "trainer") == count
    assert world.now < 1010.0
    assert_nothing_is_left(world, Outcome.REJECTED)


def test_replica_without_gpu_memory_on_two_nodes_tries_a_third() -> None:
    world = World(job(spares=2, recovery=Recovery(first_start=9, per_node=1)))
    world.broken_nodes[N2] = "no room on its GPUs: 3072 MiB of GPU 0 are still in use by process 7"
    world.broken_nodes[N5] = world.broken_nodes[N2]
    world.steady()
    assert (world.node_of(TRAINER), world.state.finish) == (N6, None)


@pytest.mark.parametrize(("recovery", "broken"), [(Recovery(), MISSING), (Recovery(per_node=9), "exited: no GPU")])
def test_replica_that_fails_to_start_has_its_last_try_on_another_node(recovery: Recovery, broken: str) -> None:
    world = World(job(recovery=recovery))
    world.broken_nodes[N2] = broken
    world.steady()
    assert (world.node_of(TRAINER), world.state.replica(TRAINER).incarnation_number) == (N5, 3)


def test_command_missing_on_one_node_waits_for_replicas_that_still_start() -> None:
    world = World(job(spares=0))
    world.broken_nodes[N3] = MISSING
    world.slow_to_join = 30.0
    world.play(lambda: world.state.replica(R1).status is Status.JOINED, timeout_s=60.0)
    assert (world.state.replica(R1).status, world.state.finish) == (Status.JOINED, None)


def test_two_replicas_that_miss_the_command_on_two_nodes_end_the_run() -> None:
    world = World(job(rollouts=4, min_rollouts=1))
    world.broken["rollout"] = MISSING
    world.play()
    assert why(world)[0].startswith(f"rollout: {MISSING} on n3, n4")
    assert tries(world, "rollout") <= 5
    assert_nothing_is_left(world, Outcome.REJECTED)


def test_command_missing_on_one_node_is_its_failure_if_others_have_started() -> None:
    world = World(job()).steady()
    world.broken["rollout"] = MISSING
    for _ in range(3):
        world.kill(R0)
        world.play(timeout_s=20.0)
    assert world.state.finish is None
    world.broken = {}
    world.steady()


@pytest.mark.parametrize(
    ("spares", "starts", "text", "reason"),
    [(0, 2, MISSING, RejectReason.NOT_STARTED), (1, 3, NEVER_APPEARED, RejectReason.NEVER_APPEARED)],
)
def test_step_that_repeatedly_does_not_start_its_program_or_never_appears_ends_the_run(
    spares: int, starts: int, text: str, reason: RejectReason
) -> None:
    world = World(job(spares=spares))
    for incarnation in range(1, starts + 1):
        world.play(lambda incarnation=incarnation: len(launched(world, TRAINER)) == incarnation)  # type: ignore[misc]
        step = launched(world, TRAINER)[-1].step
        world.steps.pop(step, None)
        world.happen(ev.IntentSettled(step, False, text, reason=reason))
    world.play()
    assert text in why(world)[0]
    assert_nothing_is_left(world, Outcome.REJECTED)


def launched(world: World, replica: ReplicaId) -> list[Launch]:
    return [launch for launch in world.decided(Launch) if launch.incarnation.replica == replica]


# ── a role that never joins ──────────────────────────────────────────────────────────────────────────────────────────
def test_required_replica_that_never_joins_ends_the_run_after_three_starts(world: World) -> None:
    world.broken["trainer"] = "exited: ModuleNotFoundError"
    world.play()
    assert tries(world, "trainer") == world.state.job.recovery.first_start == 3
    assert why(world) == ("exited: ModuleNotFoundError", "3 starts of trainer/0 failed, and it has never joined")
    assert_nothing_is_left(world, Outcome.REJECTED)


def _stands_at(world: World, expected: tuple[Status, int]) -> bool:
    replica = world.state.replica(TRAINER)
    return (replica.status, replica.incarnation_number) == expected


def test_replica_that_never_joins_is_reported_with_a_hint_at_join(world: World) -> None:
    world.broken["trainer"] = "waits"
    world._break = lambda action, why: None  # type: ignore[method-assign]
    for number in (1, 2, 3):
        expected = (Status.STARTING, number)
        world.play(partial(_stands_at, world, expected))
        world.wait(120.0)
        replica = world.state.replica(TRAINER)
        world.happen(found(replica.incarnation, "never_joined", world.now, text="no Hello within 120 s of its launch"))
    world.play()
    assert why(world)[0] == "trainer/0 did not join within 120 s in 3 starts: does its command call rrl.join()?"
    assert_nothing_is_left(world, Outcome.REJECTED)


def test_spare_replica_that_never_joins_is_retired(world: World) -> None:
    world.broken_incarnations = {R0: "exited"}
    world.play(timeout_s=60.0)
    assert (world.state.replica(R0).status, world.state.replica(R1).status) == (Status.RETIRED, Status.JOINED)
    (fence,) = [fence for fence in world.decided(Fence) if fence.rung is Rung.DEGRADED]
    assert fence.why.evidence[-1] == "3 starts of rollout/0 failed, and it has never joined"
    assert world.state.finish is None


@pytest.mark.parametrize("least", [0, 1])
def test_role_of_which_no_replica_ever_joins_ends_the_run(least: int) -> None:
    world = World(job(rollouts=3, min_rollouts=least))
    world.broken["rollout"] = "exited: OSError"
    world.play()
    assert tries(world, "rollout") <= 9
    assert world.now < 1030.0
    assert_nothing_is_left(world, Outcome.REJECTED)


def test_node_lost_at_the_start_is_not_charged_to_the_replica() -> None:
    world = World(job(recovery=Recovery(breaker=1.0)), nodes=20)
    for _ in range(4):
        world.play(lambda: world.state.replica(TRAINER).status is Status.LAUNCHING)
        node = world.node_of(TRAINER)
        world.lose_node(node)
        world.play(lambda node=node: world.state.nodes[node].excluded is not None)  # type: ignore[misc]
    world.steady()
    assert world.state.replica(TRAINER).failed_starts == 0


def test_replica_that_joined_at_its_third_start_is_restarted_normally() -> None:
    world = World(job(recovery=Recovery(per_node=99)))
    world.broken["trainer"] = "exited: OSError"
    world.play(lambda: world.state.replica(TRAINER).failed_starts == 2)
    world.broken = {}
    world.steady()
    world.kill(TRAINER)
    world.steady()
    assert world.state.replica(TRAINER).incarnation_number == 4


def test_replica_that_joined_once_has_its_whole_budget() -> None:
    world = World(job(recovery=Recovery(per_node=99))).steady()
    world.broken["reward"] = "exited: OSError"
    world.kill(REWARD)
    world.play(timeout_s=20.0)
    assert (world.state.finish, tries(world, "reward") > 3) == (None, True)


# ── nodes that cannot do what roles need ─────────────────────────────────────────────────────────────────────────────
PROBING = EnvSpec(probe=("torch",))
NO_TORCH = "import torch: ModuleNotFoundError: No module named 'torch'"


def probing(job: RunSpec) -> RunSpec:
    return msgspec.structs.replace(job, env=PROBING)


def test_nothing_is_launched_on_a_node_before_its_agent_reported_it_fit() -> None:
    world = World(probing(job()))
    world.play(lambda: bool(world.steps))
    assert {role_of(incarnation.replica) for incarnation, _ in world.steps.values()} == {AGENT}
    world.steady()
    joined = {s.event.node: s.seq for s in world.events if isinstance(s.event, ev.AgentJoined)}
    for stamped in world.events:
        if isinstance(stamped.event, ev.Intended) and isinstance(launch := stamped.event.action, Launch):
            assert role_of(launch.incarnation.replica) == AGENT or joined[launch.node] < stamped.seq
    assert requests(world) == [f"{RUN}.pool"]


def test_node_with_a_failed_probe_is_excluded_with_its_message_and_gets_no_role() -> None:
    world = World(probing(job(spares=1)))
    world.unfit[N2] = NO_TORCH
    world.steady()
    assert world.state.nodes[N2].excluded == f"probe: {NO_TORCH}"
    assert all(launch.node != N2 for launch in world.decided(Launch) if role_of(launch.incarnation.replica) != AGENT)
    assert len(requests(world)) == 1


def test_replacements_for_unfit_nodes_are_requested_without_them() -> None:
    world = World(probing(job(spares=0)), nodes=9)
    world.unfit = {N1: NO_TORCH, N2: NO_TORCH}
    world.steady()
    more = [world.requests[tag] for tag in requests(world)[1:]]
    assert [(ask.count, ask.exclude) for ask in more] == [(2, (N1, N2))]
    assert len(world.decided(Exclude)) == 2  # the breaker permits both exclusions once the run has six nodes
    assert {world.node_of(r.id) for r in world.state.workers} == {N3, N4, N5, N6}


def test_probe_failed_on_every_node_ends_the_run_with_its_message() -> None:
    world = World(probing(job()))
    world.unfit = {NodeName(f"n{i}"): NO_TORCH for i in range(1, 10)}
    world.play()
    assert why(world) == (f"{NO_TORCH} on n1, n2, n3, n4 and 1 more",)
    assert_nothing_is_left(world, Outcome.REJECTED)


def test_probe_failed_on_two_nodes_and_all_of_a_group_ends_the_run() -> None:
    world = World(probing(in_node_groups()), nodes=9)
    world.unfit = {N4: NO_TORCH, N5: NO_TORCH}
    world.play()
    assert why(world) == (f"{NO_TORCH} on n4, n5",)
    assert_nothing_is_left(world, Outcome.REJECTED)


def test_unfit_node_of_a_group_is_replaced_before_the_run_starts() -> None:
    world = World(probing(in_node_groups()), nodes=9)
    world.unfit = {N4: NO_TORCH}
    world.steady()
    assert world.node_of(TRAINER) == N5
    assert N4 not in {node for nodes in world.held.values() for node in nodes}


def test_nodes_whose_agents_never_start_are_replaced_without_waiting() -> None:
    world = World(probing(job(spares=0)), nodes=9)
    world.broken_incarnations = {ReplicaId(f"agent/n{i}"): "exited: no python" for i in (1, 2)}
    world.play(lambda: len(requests(world)) > 1, timeout_s=60.0)
    assert [(world.requests[tag].count, world.requests[tag].exclude) for tag in requests(world)[1:]] == [(2, (N1, N2))]
    world.steady()


def test_agent_that_never_starts_leaves_its_node_unfit() -> None:
    world = World(probing(job()))
    world.broken_incarnations = {ReplicaId("agent/n2"): "exited: no python"}
    world.steady()
    world.play(lambda: world.state.nodes[N2].excluded is not None, timeout_s=60.0)
    assert world.state.nodes[N2].excluded == "probe: exited: no python"


# ── a role finds the configuration invalid ───────────────────────────────────────────────────────────────────────────
INVALID = "invalid configuration: [task] dataset has no argument 'digits'"


@pytest.mark.parametrize("role", ["trajectories", "rollout"])
def test_invalid_configuration_rejects_the_run_at_the_first_start(role: str, world: World) -> None:
    world.broken[role] = INVALID
    world.play()
    assert why(world) == (f"{role}/0: {INVALID}",)
    assert set(world.incarnations().values()) == {1}
    assert world.now < 1010.0
    assert_nothing_is_left(world, Outcome.REJECTED)


def test_invalid_configuration_rejects_the_run_with_policy_job() -> None:
    world = World(job(recovery=Recovery(policy="job")))
    world.broken["reward"] = INVALID
    world.play()
    assert (why(world), world.decided(Fence)) == ((f"reward/0: {INVALID}",), [])


def test_configuration_with_which_the_role_has_worked_is_not_rejected() -> None:
    """A single node may lack something that the configuration names. The ladder then moves the replica away."""
    world = World(job(spares=1)).steady()
    world.happen(ev.FirstWorkDone(world.state.replica(R1).incarnation))
    world.broken_nodes[N3] = INVALID
    world.kill(R0)
    world.play(timeout_s=60.0)
    assert (world.node_of(R0), world.state.finish) == (N5, None)


def test_changed_input_ends_the_run_although_the_role_has_worked() -> None:
    world = World(job(spares=1)).steady()
    world.happen(ev.FirstWorkDone(world.state.replica(R0).incarnation))
    changed = "/data/prompts.jsonl has changed"
    world.happen(
        found(
            world.state.replica(R0).incarnation,
            "exit_record",
            world.now,
            proof=True,
            text=changed,
            reason=ExitReason.INPUT_CHANGED,
            code=2,
        )
    )
    world.play()
    assert (why(world), world.decided(Fence)) == ((changed,), [])
    assert_nothing_is_left(world, Outcome.FAILED)


def test_exit_code_2_without_the_flag_is_a_failure_like_any_other(world: World) -> None:
    world.broken["reward"] = "exited: rrl: [task] dataset has no argument 'digits'"
    world.play()
    assert tries(world, "reward") == 3
