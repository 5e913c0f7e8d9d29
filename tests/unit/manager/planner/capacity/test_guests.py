"""Guests: the nodes on which they run, when they start and stop, and what their failures lead to."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from rrl.cluster.base import AllocationState
from rrl.core.run_spec import Recovery, RunSpec
from rrl.core.types import GUEST_ROLE, NodeName, Outcome, RaisedException, ReplicaId, guest_id, member_id, replica_id
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Exclude, Fence, Finish, Launch, RestartAll, Rung, StopStep, WithdrawGuests
from rrl.manager.model.reduce_replicas import MAX_RESTART_BACKOFF_S
from rrl.manager.model.state import Status
from rrl.manager.peer_directory import build_directory
from rrl.manager.planner.capacity.nodes import NodeInventory
from rrl.manager.planner.capacity.warm_pool import release_deadline
from rrl.manager.reporting.decisions.explanations import explain
from rrl.tests.support.manager.jobs import TRAINER, gang_job, in_node_groups, with_guests
from rrl.tests.support.manager.world import GRACE_S, World, at_step, fences, found, preempt, with_status

M0, M1 = (member_id(TRAINER, rank) for rank in range(2))
R0, R1, R2 = (replica_id("rollout", i) for i in range(3))
N2, N3, N4, N7 = (NodeName(f"n{i}") for i in (2, 3, 4, 7))
"""The store and the reward role are on n1, the trainer is on n2 and n3, the rollouts are on n4 to n6; n7 is a spare."""
G2, G3, G7 = guest_id(N2), guest_id(N3), guest_id(N7)
BESIDE = with_guests(gang_job(2, 1))
COLOCATED = with_guests(gang_job(2, 1, rollouts=0, min_rollouts=0, spares=0))
TYPE_ERROR = RaisedException("TypeError", "no engine", "engine.py:3", "type-1")
HOUR = 3600.0
CROWDED = RaisedException("torch.OutOfMemoryError", "CUDA out of memory", "learner.py:9", "oom", environmental=True)


def guests(world: World) -> dict[ReplicaId, NodeName]:
    """Return the guests at work, each with its node."""
    at_work = (one for one in world.state.guests if one.status is Status.JOINED and one.step in world.steps)
    return {one.id: one.node for one in at_work if one.node is not None}


def in_own_allocation(walltime: float) -> RunSpec:
    """Return a job with guests whose trainer of two ranks has an allocation of its own, of this walltime (s)."""
    job = with_guests(in_node_groups(terms={"trainer": walltime}))
    roles = tuple(replace(one, ranks=2, per_node=1) if one.name == "trainer" else one for one in job.roles)
    groups = tuple(replace(one, nodes=2, min_nodes=2) if one.name == "trainer" else one for one in job.node_groups)
    return replace(job, roles=roles, node_groups=groups)


def of_guests(world: World) -> list[tuple[str, Rung]]:
    decided = (fence for fence in world.decided(Fence) if fence.incarnation.replica.startswith(GUEST_ROLE))
    return [(str(fence.incarnation), fence.rung) for fence in decided]


def _ends(event: ev.Event, guest: ReplicaId) -> bool:
    """Return whether the guest ends, or its stop is asked for."""
    if isinstance(event, ev.StepEnded):
        return event.incarnation.replica == guest
    action = event.action if isinstance(event, ev.Intended | ev.Decided) else None
    return isinstance(action, Fence | StopStep) and action.incarnation.replica == guest


def resumed(world: World, job: RunSpec) -> World:
    """Cancel the run, and resume it with this job."""
    world.cancel()
    world.play()
    world.record(ev.RunEnded(Outcome.CANCELLED, "because"))
    world.over = False
    world.record(ev.Resumed("me", "c2", job))
    world.happen(ev.ManagerStarted("login", 2))
    return world.steady().wait(30.0)


def with_them(job: RunSpec = BESIDE) -> World:
    return World(job).steady().wait(10.0)


# ── where and when ───────────────────────────────────────────────────────────────────────────────────────────────────
def test_guests_are_launched_once_all_members_have_joined_without_a_first_step() -> None:
    world = with_them()
    assert guests(world) == {G2: N2, G3: N3}
    launches = [str(launch.incarnation) for launch in world.decided(Launch)]
    first_guest = launches.index("guest/n2#1")
    assert max(launches.index("trainer/0#1"), launches.index("trainer/0.1#1")) < first_guest
    joined = [stamped.at for stamped in world.events if isinstance(stamped.event, ev.Joined)]
    asked = next(
        stamped.at
        for stamped in world.events
        if isinstance(stamped.event, ev.Intended)
        and isinstance(stamped.event.action, Launch)
        and stamped.event.action.incarnation.replica == G2
    )
    assert asked >= sorted(joined)[0]


@pytest.mark.parametrize(("gpus", "slots"), [((4, 1), 4), ((4, 2), 2), ((4, 4), 1), ((0, 0), 1)])
def test_each_node_has_as_many_guests_as_its_gpus_hold(gpus: tuple[int, int], slots: int) -> None:
    world = with_them(with_guests(gang_job(2, 1, rollouts=0, min_rollouts=0, spares=0), gpus))
    numbered = [slot if slots > 1 else None for slot in range(slots)]
    assert guests(world) == {guest_id(node, slot): node for node in (N2, N3) for slot in numbered}


def test_job_without_the_tag_and_run_that_withdrew_its_guests_have_none() -> None:
    assert guests(with_them(gang_job(2, 1))) == {}
    world = with_them()
    world.record(ev.Decided(WithdrawGuests(world.actions[0].why)))
    world.wait(5.0)
    assert guests(world) == {}
    assert {stop.grace for stop in world.decided(StopStep)} == {0.0}


def test_guests_stay_while_the_trainer_restarts_in_place() -> None:
    world = with_them()
    world.kill(M0)
    world.play(world.works)
    assert world.state.replica(M0).incarnation_number == 2
    assert guests(world) == {G2: N2, G3: N3}
    assert {world.state.replica(one).incarnation_number for one in (G2, G3)} == {1}
    assert world.decided(StopStep) == [] or all(
        not stop.incarnation.replica.startswith(GUEST_ROLE) for stop in world.decided(StopStep)
    )


def test_guest_is_stopped_without_grace_before_its_node_is_given_to_another_role() -> None:
    job = with_guests(gang_job(2, 1, spares=0, recovery=Recovery(breaker=0.9)))
    world = with_them(job)
    world.slow_to_stop = 3.0
    world.record(ev.Decided(Fence(world.state.replica(R0).incarnation, Rung.SPARE, world.actions[0].why, N2)))
    trainer = [world.state.replica(one).incarnation for one in (M0, M1)]
    for incarnation, node in zip(trainer, (N4, N3), strict=True):  # the trainer moves to the node of the rollout
        world.record(ev.Decided(Fence(incarnation, Rung.REPLACEMENT, world.actions[0].why, node, charged=False)))
    world.wait(60.0)
    stop = next(one for one in world.decided(StopStep) if one.incarnation.replica == G2)
    assert stop.grace == 0.0
    stopped = next(
        stamped.at
        for stamped in world.events
        if isinstance(stamped.event, ev.StepEnded) and stamped.event.incarnation.replica == G2
    )
    taken = [
        stamped.at
        for stamped in world.events
        if isinstance(stamped.event, ev.Intended)
        and isinstance(stamped.event.action, Launch)
        and stamped.event.action.node == N2
        and stamped.event.action.incarnation == world.state.replica(R0).incarnation
    ]
    assert taken
    assert min(taken) >= stopped
    assert guests(world) == {guest_id(N4): N4, G3: N3}


@pytest.mark.parametrize("how", ["drained", "preempted", "reclaimed", "ended", "rotated"])
def test_guests_end_with_the_trainers_nodes_and_the_trainer_goes_on_elsewhere_with_guests(how: str) -> None:
    world = World(in_own_allocation(2 * HOUR), nodes=12).steady().wait(10.0)
    world.commit(1)
    before, tag, begun = set(guests(world).values()), world.state.replica(M1).allocation or "", len(world.events)
    others = world.incarnations()
    assert before == {world.node_of(M0), world.node_of(M1)}
    if how == "drained":
        world.happen(ev.CommandReceived("drain", "me", "c1", target=world.node_of(M1)))
    elif how == "preempted":
        with_status(world, tag, time_left_s=GRACE_S, reclaimed=True)  # all processes are still there
    elif how == "reclaimed":
        preempt(world, tag)
    elif how == "ended":
        world.drop(tag, AllocationState.ENDED)
    world.play(lambda: world.state.replica(M1).incarnation_number == 2, timeout_s=3 * HOUR).steady().wait(30.0)
    moved = {world.node_of(M0), world.node_of(M1)}
    assert set(guests(world).values()) == moved
    left = before - moved
    assert left

    done = [one.event for one in world.events[begun:]]
    launched = [
        (number, one.action)
        for number, one in enumerate(done)
        if isinstance(one, ev.Intended) and isinstance(one.action, Launch)
    ]
    assert not left & {one.node for _, one in launched}, "something is launched on a node that is left"
    moves = min(number for number, one in launched if one.incarnation.replica in (M0, M1))
    for node in left:
        assert any(_ends(one, guest_id(node)) for one in done[:moves])
        assert {stop.grace for stop in world.decided(StopStep) if stop.incarnation.replica == guest_id(node)} <= {0.0}
    assert not [step for step, (_, node) in world.steps.items() if node in left]
    assert world.incarnations() == others | {M0: 2, M1: 2}
    assert world.state.recoveries == (how == "ended")  # the others are announced, and no failures


def test_trainer_waits_for_a_fenced_guest_that_still_holds_its_gpus() -> None:
    world = with_them()
    world.slow_to_stop = float("inf")
    world.freeze(G2)  # its step goes on: it is stopped, and never answers
    assert [str(one.incarnation) for one in world.state.orphan_steps.values()] == ["guest/n2#1"]
    members = [world.state.replica(M0), world.state.replica(M1)]
    assert release_deadline(world.state, members, (N2, N3)) > world.now
    assert release_deadline(world.state, members, (N7, N3)) == 0.0
    rollout = [world.state.replica(R0)]
    assert release_deadline(world.state, rollout, (N2,)) > world.now
    assert release_deadline(world.state, [world.state.replica(ReplicaId("reward/0"))], (N2,)) == 0.0


def test_guests_neither_occupy_nodes_nor_count_as_workers() -> None:
    world = with_them()
    inventory = NodeInventory(world.state, world.now)
    assert {one.role for node in inventory.occupied.values() for one in node} == {
        "trajectories",
        "reward",
        "trainer",
        "rollout",
    }
    assert not [one for one in world.state.workers if one.role == GUEST_ROLE]
    world.state.replica(G2)
    assert world.decided(Exclude) == []


def test_guests_are_announced_to_the_store_with_their_weights() -> None:
    world = with_them()
    world.record(ev.Joined(world.state.replica(G2).incarnation, N2, N2, 101, weight_address="tcp://n2:1"))
    peer = build_directory(world.state, 1).peers[G2]
    assert (peer.incarnation.number, peer.joined, peer.weight_address) == (1, True, "tcp://n2:1")
    assert G3 in build_directory(world.state, 1).peers


def test_next_manager_keeps_the_guests() -> None:
    world = with_them()
    for number in range(1, world.planned + 1):
        again = World(BESIDE)
        again.die_before = number
        again.steady().wait(90.0)
        assert guests(again) == {G2: N2, G3: N3}, number


def test_end_of_the_run_stops_the_guests_with_the_rollouts() -> None:
    world = with_them()
    world.commit(world.state.job.steps)
    world.play()
    assert world.over
    assert world.steps == {}
    graces = {stop.incarnation.replica.partition("/")[0]: stop.grace for stop in world.decided(StopStep)}
    assert graces[GUEST_ROLE] == graces["rollout"]


def test_resume_with_other_tags_has_no_guests() -> None:
    world = resumed(with_them(), gang_job(2, 1))
    assert world.works()
    assert guests(world) == {}


# ── failures beside rollouts ─────────────────────────────────────────────────────────────────────────────────────────
def test_guest_that_fails_twice_in_the_window_is_gone_for_the_rest_of_the_window() -> None:
    world = with_them()
    window = world.state.job.recovery.window
    world.kill(G2)
    world.wait(20.0)
    assert guests(world) == {G2: N2, G3: N3}
    world.kill(G2)
    world.wait(window - 60.0)
    assert guests(world) == {G3: N3}
    assert of_guests(world) == [("guest/n2#1", Rung.IN_PLACE), ("guest/n2#2", Rung.DEGRADED)]
    world.wait(MAX_RESTART_BACKOFF_S + 120.0)
    assert guests(world) == {G2: N2, G3: N3}
    assert fences(world) == []
    assert world.decided(Exclude) == []
    assert world.state.replica(M0).incarnation_number == 1


def test_guests_that_never_start_leave_the_run_alone() -> None:
    world = World(BESIDE)
    world.broken[GUEST_ROLE] = "no engine"
    world.steady()
    for step in range(1, 4):
        at_step(world, step).wait(300.0)
    assert (world.decided(Finish), world.decided(RestartAll)) == ([], [])
    assert fences(world) == []


def test_guest_of_a_lost_node_leaves_with_it_and_the_new_node_gets_one() -> None:
    world = with_them()
    world.lose_node(N2)
    world.wait(300.0)
    assert guests(world) == {G3: N3, G7: N7}
    assert [str(one.incarnation) for one in fences(world) if one.charged] == ["trainer/0#1"]


# ── failures where nothing else generates ────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("how", ["broken", "raises"])
def test_run_whose_essential_guests_never_start_ends(how: str) -> None:
    world = World(COLOCATED)
    if how == "broken":
        world.broken[GUEST_ROLE] = "no engine"
    else:
        world.raises[GUEST_ROLE] = TYPE_ERROR
    world.play(timeout_s=3600.0)
    assert world.over
    (finish,) = world.decided(Finish)
    assert finish.outcome is (Outcome.REJECTED if how == "broken" else Outcome.FAILED)
    assert any("guest/n" in line for line in finish.why.evidence)
    assert any(("no engine" if how == "broken" else "TypeError") in line for line in finish.why.evidence)


def test_invalid_config_of_an_essential_guest_rejects_the_run_at_once() -> None:
    world = World(COLOCATED)
    world.broken[GUEST_ROLE] = "invalid configuration: rollout.engine is wrong"
    world.play(timeout_s=3600.0)
    (finish,) = world.decided(Finish)
    assert finish.outcome is Outcome.REJECTED
    assert sum(launch.incarnation.replica == G2 for launch in world.decided(Launch)) == 1


def test_essential_guest_has_the_budget_of_rollouts_and_another_one_goes_on_without_it() -> None:
    budget = 3
    world = with_them(replace(COLOCATED, recovery=Recovery(per_replica=budget)))
    world.happen(ev.FirstWorkDone(world.state.replica(G2).incarnation))
    for _ in range(budget + 1):
        world.kill(G2)
        world.wait(70.0)
    assert [rung for _, rung in of_guests(world)] == [*[Rung.IN_PLACE] * budget, Rung.DEGRADED]
    assert guests(world) == {G3: N3}
    assert (world.decided(Finish), world.decided(RestartAll)) == ([], [])


def test_last_essential_guest_that_keeps_failing_restarts_the_run_and_then_ends_it() -> None:
    recovery = Recovery(per_replica=3, full_restarts=1)
    world = with_them(with_guests(gang_job(1, 1, rollouts=0, min_rollouts=0, spares=0, recovery=recovery)))
    world.happen(ev.FirstWorkDone(world.state.replica(G2).incarnation))
    for _ in range(12):
        world.kill(G2)
        world.wait(70.0)
        if world.over:
            break
    assert len(world.decided(RestartAll)) == 1
    assert [finish.outcome for finish in world.decided(Finish)] == [Outcome.FAILED]


def test_lost_node_of_the_only_essential_guest_ends_no_run() -> None:
    job = with_guests(gang_job(1, 1, rollouts=0, min_rollouts=0, spares=1))
    world = with_them(job)
    (node,) = guests(world).values()
    world.lose_node(node)
    world.wait(300.0)
    assert (world.decided(Finish), world.decided(RestartAll)) == ([], [])
    assert len(guests(world)) == 1
    assert node not in guests(world).values()


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def dies(world: World, exception: RaisedException) -> None:
    world.happen(found(world.state.replica(M1).incarnation, "exit_record", world.now, proof=True, exception=exception))
    world.play(world.works)
    world.wait(30.0)


def test_trainer_that_dies_of_memory_twice_beside_guests_goes_on_without_them_until_a_resume() -> None:
    world = with_them()
    dies(world, CROWDED)
    assert guests(world) == {G2: N2, G3: N3}
    dies(world, CROWDED)
    assert guests(world) == {}
    (decision,) = world.decided(WithdrawGuests)
    assert CROWDED.type in decision.why.evidence[0]
    assert "2 times within" in decision.why.evidence[1]
    assert world.works()
    assert world.decided(RestartAll) == []  # it is no fault of the software
    text = [line for one in explain(world.events) for line in one.action.why.evidence]
    assert decision.why.evidence[1] in text
    assert len(guests(resumed(world, BESIDE))) == 2


def test_next_manager_also_goes_on_without_guests() -> None:
    world = with_them()
    dies(world, CROWDED)
    begun = world.planned
    dies(world, CROWDED)
    for number in range(begun + 1, world.planned + 1):
        again = with_them()
        dies(again, CROWDED)
        again.die_before = number
        dies(again, CROWDED)
        again.wait(120.0)
        assert again.works(), number
        assert guests(again) == {}, number
        assert len(again.decided(WithdrawGuests)) == 1, number


def test_other_deaths_of_the_trainer_and_deaths_without_guests_withdraw_no_guests() -> None:
    world = with_them(replace(BESIDE, recovery=Recovery(per_replica=9, full_restarts=0)))
    dies(world, CROWDED)
    dies(world, TYPE_ERROR)
    world.wait(world.state.job.recovery.window)
    dies(world, CROWDED)  # the first one has left the window
    assert world.decided(WithdrawGuests) == []
    alone = World(gang_job(2, 1)).steady()
    dies(alone, CROWDED)
    dies(alone, CROWDED)
    assert alone.decided(WithdrawGuests) == []


def test_colocated_trainer_that_dies_of_memory_twice_ends_the_run_with_the_reason() -> None:
    world = with_them(COLOCATED)
    dies(world, CROWDED)
    dies(world, CROWDED)
    (finish,) = world.decided(Finish)
    assert finish.outcome is Outcome.FAILED
    assert any("shared them with guests" in line for line in finish.why.evidence)
