"""The repair ladder: which rung is taken on which evidence, with which expectation, and when the run restarts or ends.

The tests read the decisions that :class:`World` records.
"""

from __future__ import annotations

import msgspec
import pytest

from rrl.config.job.schema import RecoveryTable
from rrl.core.run_spec import Recovery, TagsSpec
from rrl.core.types import AGENT, STANDBY_ROLE, Incarnation, NodeName, Outcome, ReplicaId, member_id, role_of
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Exclude, Fence, Finish, Launch, Release, RestartAll, Rung, StopStep, Why
from rrl.manager.model.state import Status
from rrl.manager.planner.deadlines import TRAINER_SHUTDOWN_GRACES
from rrl.manager.planner.recovery.ladder import POLICIES, SUPPORT_LADDER, severity
from rrl.manager.planner.shutdown import final_reason
from rrl.tests.support.manager.jobs import REWARD, ROLLOUTS, RUN, STORE, TRAINER, command, commands, gang_job, job
from rrl.tests.support.manager.world import (
    World,
    assert_nothing_is_left,
    at_step,
    charged,
    fail,
    fences,
    found,
    lost,
    requests,
)

POOL = f"{RUN}.pool"
R0, R1 = ROLLOUTS
ALL = (STORE, REWARD, TRAINER, R0, R1)
T0, T1, T2, T3 = GANG = tuple(member_id(TRAINER, rank) for rank in range(4))
N1, N2, N3, N4, N5, N6, N7 = (NodeName(f"n{i}") for i in range(1, 8))
_AWAY = "{} failed"


@pytest.fixture
def world() -> World:
    return World(job()).steady()


# ── the ladder as data ───────────────────────────────────────────────────────────────────────────────────────────────
def test_every_policy_is_a_descending_ladder_that_ends_with_the_run() -> None:
    assert set(POLICIES) == set(RecoveryTable.model_fields["policy"].annotation.__args__)  # type: ignore[union-attr]
    for steps in POLICIES.values():
        depths = [severity(step.rung) for step in steps]
        assert depths == sorted(depths)
        assert (steps[-1].rung, steps[-1].fits(None)) == (Rung.GIVE_UP, True)  # type: ignore[arg-type]
    assert SUPPORT_LADDER[-1].fits(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_decision_names_evidence_rung_expectation_and_deadline(policy: str) -> None:
    recovery = Recovery(policy="job", per_replica=4)
    world = World(gang_job(recovery=recovery, donors=True), nodes=20).steady().warmed()
    for replica in (T1, R0, STORE, T0, T0, R1):
        world.kill(replica)
        world.play(world.works, timeout_s=300.0)
    if world.state.finish is None:
        world.lose_node(world.node_of(T2))
        world.play(world.works, timeout_s=2000.0)
    decided = [action for action in world.actions if isinstance(action, Fence | RestartAll | Finish)]
    assert len(decided) > 6
    for action in decided:
        assert action.why.evidence, action
        assert action.why.rung, action
        assert action.why.expects, action
        assert action.why.deadline is not None, action


# ── single rungs ─────────────────────────────────────────────────────────────────────────────────────────────────────
def test_failed_process_on_a_good_node_restarts_in_place_with_a_deadline_to_join(world: World) -> None:
    incarnation = world.state.replica(R0).incarnation
    fail(world, R0)
    (fence,) = fences(world)
    assert (fence.incarnation, fence.rung, fence.charged, fence.target_node) == (incarnation, Rung.IN_PLACE, True, None)
    assert fence.why.evidence == (_AWAY.format(incarnation),)
    assert (fence.why.expects, fence.why.deadline) == (f"joins again on {N3}", world.now + world.state.job.limits.join)


def test_ready_standby_on_the_same_node_is_promoted_with_a_deadline() -> None:
    world = World(gang_job(1, 1)).steady().warmed()
    home, limits = world.node_of(TRAINER), world.state.job.limits
    fail(world, TRAINER)
    (fence,) = fences(world)
    assert (fence.rung, fence.why.expects) == (Rung.IN_PLACE, f"its standby process on {home} is promoted to trainer/0")
    assert fence.why.deadline == world.now + limits.step_grace + world.state.job.recovery.promote
    world.steady()
    assert world.node_of(TRAINER) == home


def test_decision_says_why_the_standby_on_the_node_was_not_ready() -> None:
    world = World(gang_job(1, 1, donors=True, spares=0), nodes=20).steady()
    fail(world, TRAINER)
    world.play(world.works, timeout_s=300.0)
    home = world.node_of(TRAINER)
    world.warmed()
    fail(world, ReplicaId(f"standby/{home}"))
    fail(world, TRAINER)
    first, second = (
        " ".join(lower.needed for lower in fence.why.lower)
        for fence in fences(world)
        if fence.incarnation.replica == TRAINER
    )
    assert f"standby process of trainer on {home} (there was none: they start after its first step)" in first
    assert f"standby process of trainer on {home} (standby/{home} has been starting for 0 s)" in second


def test_spare_with_a_ready_standby_is_preferred() -> None:
    world = World(gang_job(1, 1, spares=2)).steady().warmed()
    (warm,) = [node for node in world.ready_standbys() if node != world.node_of(TRAINER)]
    world.lose_node(world.node_of(TRAINER))
    world.steady()
    (fence,) = [fence for fence in fences(world) if fence.charged]
    assert (fence.rung, fence.target_node) == (Rung.STANDBY, warm)
    assert fence.why.expects == f"the standby process on {warm} is promoted to trainer/0"
    assert world.node_of(TRAINER) == warm


def test_without_a_warm_spare_a_donor_leaves_its_node_and_restarts_elsewhere() -> None:
    world = World(gang_job(1, 1, donors=True, spares=0), nodes=20).steady().warmed()
    (stands,) = [node for node in world.ready_standbys() if node != world.node_of(TRAINER)]
    (rollout,) = [replica for replica in world.state.workers if replica.node == stands]
    world.lose_node(world.node_of(TRAINER))
    world.steady()
    fence, driven = fences(world)
    assert (fence.rung, fence.target_node, fence.charged) == (Rung.STANDBY, stands, True)
    assert fence.why.expects == f"the standby process on {stands} is promoted to trainer/0"
    assert (driven.incarnation, driven.rung, driven.charged) == (rollout.incarnation, Rung.STANDBY, False)
    assert driven.why.evidence == (f"trainer/0 is wanted on {stands}, where a standby process can be promoted to it",)
    assert world.node_of(TRAINER) == stands
    assert world.state.replica(rollout.id).failures == ()
    assert (len(requests(world)), world.requests[requests(world)[-1]].count) == (2, 1)


def test_donors_warm_node_is_preferred_to_a_cold_spare() -> None:
    cold = msgspec.structs.replace(gang_job(1, 1, spares=2), tags=TagsSpec((), ("train",)))
    world = World(cold).steady().warmed()
    stands = next(
        replica.node
        for replica in world.state.workers
        if replica.role == "rollout" and replica.node in world.ready_standbys()
    )
    world.happen(lost(world.node_of(TRAINER), world.now))
    assert [fence.rung for fence in fences(world)] == [Rung.STANDBY, Rung.STANDBY]
    world.steady()
    assert world.node_of(TRAINER) == stands
    assert requests(world) == [POOL]


def test_required_rollout_keeps_its_node() -> None:
    world = World(gang_job(1, 1, donors=True, spares=0, rollouts=1), nodes=20).steady().warmed()
    world.lose_node(world.node_of(TRAINER))
    world.steady()
    assert charged(world) == [("trainer/0#1", Rung.REPLACEMENT)]
    assert world.incarnations()[R0] == 1


def test_cold_spare_is_preferred_to_a_replacement_with_its_deadline() -> None:
    world = World(job(), nodes=9).steady()
    world.lose_node(world.node_of(TRAINER))
    world.steady()
    world.lose_node(world.node_of(TRAINER))
    world.steady()
    spare, replacement = (fence for fence in fences(world))
    assert (spare.rung, spare.why.expects) == (Rung.SPARE, "joins again on a spare node")
    assert (replacement.rung, replacement.why.expects) == (
        Rung.REPLACEMENT,
        "joins again once a replacement node is available",
    )
    limits = world.state.job.limits
    began = next(s.at for s in world.events if isinstance(s.event, ev.Decided) and s.event.action is replacement)
    assert replacement.why.deadline == began + limits.allocation + limits.join


def test_failed_promotion_counts_as_failed_restart_and_the_next_start_is_cold() -> None:
    world = World(gang_job(1, 1)).steady().warmed()
    world.unresponsive = {world.node_of(TRAINER)}
    world.kill(TRAINER)
    world.steady()
    assert charged(world) == [("trainer/0#1", Rung.IN_PLACE), ("trainer/0#2", Rung.IN_PLACE)]
    assert [start.joined for start in world.state.replica(TRAINER).failures] == [True, False]
    assert world.decided(RestartAll) == []


# ── gangs ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_failed_member_restarts_its_gang_and_alone_is_charged() -> None:
    world = World(gang_job(warm=False)).steady()
    homes = {id: world.node_of(id) for id in GANG}
    others = {replica.id: replica.incarnation_number for replica in world.state.workers if replica.role != "trainer"}
    fail(world, T1)
    assert charged(world) == [("trainer/0.1#1", Rung.IN_PLACE)]
    rest = [fence for fence in fences(world) if not fence.charged]
    assert [fence.incarnation for fence in rest] == [Incarnation(id, 1) for id in (T0, T2, T3)]
    for fence in rest:
        assert fence.rung is Rung.IN_PLACE
        assert fence.why.evidence == (f"trainer/0 restarts as a whole: trainer/0.1#1: {_AWAY.format('trainer/0.1#1')}",)
        assert fence.why.deadline == world.now + world.state.job.limits.join
    world.steady()
    assert {id: world.node_of(id) for id in GANG} == homes
    assert {id: len(world.state.replica(id).failures) for id in GANG} == {T0: 0, T1: 1, T2: 0, T3: 0}
    assert world.incarnations() == others | dict.fromkeys(GANG, 2)


def test_members_that_fail_after_the_first_are_not_charged() -> None:
    world = World(gang_job(warm=False)).steady()
    for late, member in ((0.2, T0), (0.0, T3), (0.1, T1)):
        world.record(found(world.state.replica(member).incarnation, "exit_record", world.now + late))
    world.steady()
    assert charged(world) == [("trainer/0.3#1", Rung.IN_PLACE)]


def test_gang_moves_only_the_members_of_a_lost_node() -> None:
    world = World(gang_job(warm=False), nodes=9).steady()
    homes = {id: world.node_of(id) for id in GANG}
    gone = homes[T2]
    assert homes[T3] == gone
    world.lose_node(gone)
    world.steady()
    assert charged(world) == [("trainer/0.2#1", Rung.SPARE)]
    assert {id: world.node_of(id) for id in (T0, T1)} == {id: homes[id] for id in (T0, T1)}
    assert world.node_of(T2) == world.node_of(T3) not in (gone, homes[T0])


def test_members_on_the_same_node_move_together_to_a_donors_node() -> None:
    view = gang_job(donors=True, spares=0, recovery=Recovery(per_node=2), steps=99)
    world = World(view, nodes=20).steady().warmed()
    for _ in range(3):
        world.kill(T3)
        world.steady().warmed()
    stand = next(fence for fence in fences(world) if fence.rung is Rung.STANDBY)
    assert (stand.incarnation.replica, stand.charged) == (T3, True)
    assert world.node_of(T2) == world.node_of(T3) == stand.target_node


def test_member_and_its_neighbour_leave_a_node_that_failed_it_too_often() -> None:
    world = World(gang_job(warm=False, recovery=Recovery(per_node=2), steps=99)).steady()
    home = world.node_of(T2)
    for step in range(1, 4):
        world.commit(step)
        world.kill(T2)
        world.steady()
    assert [rung for _, rung in charged(world)] == [Rung.IN_PLACE, Rung.IN_PLACE, Rung.SPARE]
    assert world.node_of(T2) == world.node_of(T3) != home


def test_failures_of_other_members_do_not_move_a_member() -> None:
    world = World(gang_job(warm=False, recovery=Recovery(per_node=2), steps=99)).steady()
    homes = {id: world.node_of(id) for id in GANG}
    for step, member in enumerate((*GANG, *GANG), 1):
        world.commit(step)
        world.kill(member)
        world.steady()
    assert {id: world.node_of(id) for id in GANG} == homes
    assert {rung for _, rung in charged(world)} == {Rung.IN_PLACE}


def test_gang_is_retired_as_a_whole() -> None:
    crew = msgspec.structs.replace(command("crew", 2, least=1), ranks=2, per_node=1)
    view = commands(crew, command("other"), recovery=Recovery(per_node=9, per_replica=1), spares=2)
    world = World(view).steady()
    member, its = ReplicaId("crew/1.1"), ReplicaId("crew/1")
    for _ in range(2):
        world.kill(member)
        world.play(timeout_s=30.0)
    assert {world.state.replica(id).status for id in (its, member)} == {Status.RETIRED}
    assert [(str(fence.incarnation), fence.rung, fence.charged) for fence in fences(world)][-2:] == [
        ("crew/1.1#2", Rung.DEGRADED, True),
        ("crew/1#2", Rung.DEGRADED, False),
    ]
    assert world.state.finish is None
    for _ in range(2):  # the role needs its other gang; single members do not count as replicas
        world.kill(ReplicaId("crew/0"))
        world.play(timeout_s=30.0)
    assert world.state.finish is not None
    assert "1 restarts of crew/0 within 600 s" in world.state.finish.why.evidence


def test_members_do_not_count_as_spare_replicas() -> None:
    crew = msgspec.structs.replace(command("crew", 2), ranks=2, per_node=1)
    world = World(commands(crew, recovery=Recovery(per_node=9, per_replica=1), spares=2)).steady()
    for _ in range(2):
        world.kill(ReplicaId("crew/1.1"))
        world.play(timeout_s=30.0)
    assert world.state.finish is not None
    assert Rung.DEGRADED not in [fence.rung for fence in fences(world)]


@pytest.mark.parametrize("donors", [False, True])
def test_manager_failure_before_any_record_leads_to_the_same_gang_and_standby(donors: bool) -> None:
    def played(die_before: int) -> World:
        world = World(gang_job(2, 1, donors=donors, spares=0), nodes=20).steady().warmed()
        world.die_before = world.planned + die_before if die_before else 0
        world.lose_node(world.node_of(T1))
        world.play(world.works)
        return world.wait(200.0)

    def ended(world: World) -> tuple[object, ...]:
        gang = [world.state.replica(id) for id in (T0, T1)]
        return (
            world.incarnations()[T0],
            [len(replica.failures) for replica in gang],
            world.works(),
            world.state.full_restarts,
        )

    unharmed = played(0)
    assert ended(unharmed)[1:] == ([0, 1], True, ())
    standing = [fence for fence in fences(unharmed) if fence.rung is Rung.STANDBY and not fence.charged]
    assert len(standing) == donors
    records = unharmed.planned - World(gang_job(2, 1, donors=donors, spares=0), nodes=20).steady().warmed().planned
    assert records > 5
    for number in range(1, records + 1):
        world = played(number)
        assert ended(world) == ended(unharmed), number
        driven = {fence.incarnation for fence in fences(world) if fence.rung is Rung.STANDBY and not fence.charged}
        assert len(driven) == donors, number


# ── restarts of the whole run ────────────────────────────────────────────────────────────────────────────────────────
def test_role_that_the_cluster_refuses_to_launch_ends_the_run_without_restart() -> None:
    world = World(job(recovery=Recovery(per_node=9, per_replica=2)))
    world.refuse_launch = {N1}
    world.play()
    assert world.decided(RestartAll) == []
    assert "its launches were refused" in world.decided(Finish)[0].why.evidence


def test_run_restarts_as_often_as_allowed_within_the_window_then_ends() -> None:
    world = World(job(steps=99, recovery=Recovery(full_restarts=2, per_replica=99, per_node=99))).steady()
    for step in range(1, 4):
        world.commit(step)
        for _ in range(2):
            world.kill(TRAINER)
            world.play(lambda: world.works() or world.over)
    assert len(world.decided(RestartAll)) == 2
    world.play()
    (end,) = world.decided(Finish)
    assert "2 restarts of the whole run within 600 s" in end.why.evidence
    assert_nothing_is_left(world, Outcome.FAILED)


def test_full_restarts_older_than_the_window_do_not_count() -> None:
    world = World(job(steps=99, recovery=Recovery(full_restarts=1, per_replica=99, per_node=99))).steady()
    for step in range(1, 5):
        world.commit(step)
        for _ in range(2):
            world.kill(TRAINER)
            world.steady()
        world.wait(700.0)
    assert len(world.decided(RestartAll)) == 4


def test_without_full_restarts_budgets_alone_decide() -> None:
    world = World(job(recovery=Recovery(full_restarts=0, per_node=99))).steady()
    for _ in range(5):
        world.kill(TRAINER)
        world.steady()
    assert (world.decided(RestartAll), world.state.finish) == ([], None)


def test_required_role_out_of_budget_restarts_the_run_once_and_then_ends_it() -> None:
    world = World(job(recovery=Recovery(per_node=9, per_replica=2))).steady()
    for _ in range(3):
        world.kill(STORE)
        world.play(world.works, timeout_s=200.0)
    (restart,) = world.decided(RestartAll)
    assert (restart.failed, restart.why.evidence[-1]) == (
        Incarnation(STORE, 3),
        "2 restarts of trajectories/0 within 600 s",
    )
    world.kill(STORE)
    world.play()
    assert len(world.decided(RestartAll)) == 1
    assert "it failed again after a restart of the whole run, and no step was finished since step 0" in (
        world.decided(Finish)[0].why.evidence
    )
    assert_nothing_is_left(world, Outcome.FAILED)


def test_run_without_a_trainer_is_not_restarted_as_a_whole() -> None:
    world = World(commands(command("solver"), recovery=Recovery(per_node=9, per_replica=1))).steady()
    for _ in range(2):
        world.kill(ReplicaId("solver/0"))
        world.play(timeout_s=30.0)
    world.play()
    assert world.decided(RestartAll) == []
    assert_nothing_is_left(world, Outcome.FAILED)


def test_full_restart_fences_all_in_place_and_charges_only_the_failed_member() -> None:
    world = at_step(World(gang_job()).steady().warmed(), 2)
    homes = {replica.id: replica.node for replica in world.state.workers}
    before = {replica.id: replica.incarnation_number for replica in world.state.workers}
    agents = {
        replica.id: replica.incarnation_number for replica in world.state.replicas.values() if replica.role == AGENT
    }
    standbys = [
        replica.incarnation
        for replica in world.state.replicas.values()
        if replica.role == STANDBY_ROLE and replica.is_current
    ]
    assert standbys
    world.kill(T1)
    world.steady()
    fail(world, T1)
    assert len(world.decided(RestartAll)) == 1
    stopped = {action.incarnation for action in world.decided(StopStep)}
    assert set(standbys) - {launch.standby for launch in world.decided(Launch)} <= stopped
    adopted = [launch for launch in world.decided(Launch) if launch.standby is not None]
    assert len(adopted) == 4  # promoted at the first failure; a full restart promotes no standby process
    world.steady()
    assert {replica.id: replica.node for replica in world.state.workers} == homes
    assert [launch for launch in world.decided(Launch) if launch.standby is not None] == adopted
    charged_with = {replica.id: len(replica.failures) for replica in world.state.workers if replica.failures}
    assert charged_with == {T1: 2}
    assert {
        replica.id: replica.incarnation_number for replica in world.state.replicas.values() if replica.role == AGENT
    } == agents
    assert world.incarnations() == {id: n + (2 if id in GANG else 1) for id, n in before.items()}


# ── several failures with one cause ──────────────────────────────────────────────────────────────────────────────────
def test_many_failures_at_once_restart_the_run_once() -> None:
    world = World(job(recovery=Recovery(policy="job")), nodes=20).steady()
    for replica in ALL:
        world.record(found(world.state.replica(replica).incarnation, "exit_record", world.now))
    world.steady()
    assert len(world.decided(RestartAll)) == 1
    assert sum(len(replica.failures) for replica in world.state.workers) == 1


def test_many_lost_nodes_cost_one_restart_for_replicas_on_excludable_nodes() -> None:
    world = World(job(rollouts=8, spares=0), nodes=10).steady()
    for node in (N3, N4, N5, N6, N7):
        world.record(lost(node, world.now))
    world.play(timeout_s=300.0)
    assert len(world.decided(Exclude)) == 2
    assert len(fences(world)) == 2
    assert (world.decided(RestartAll), world.state.finish) == ([], None)


# ── policy: job ──────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("replica", ALL)
def test_policy_job_restarts_all_in_place_on_any_failure(replica: ReplicaId) -> None:
    world = at_step(World(job(recovery=Recovery(policy="job"))).steady(), 1)
    homes = {replica.id: replica.node for replica in world.state.workers}
    fail(world, replica)
    (restart,) = world.decided(RestartAll)
    assert restart.failed == Incarnation(replica, 1)
    assert (restart.why.rung, restart.why.evidence) == (Rung.FULL_RESTART, (_AWAY.format(f"{replica}#1"),))
    assert restart.why.deadline == world.now + world.state.job.limits.join
    began = world.now
    world.steady()
    assert world.now - began < 10.0
    assert world.incarnations() == dict.fromkeys(ALL, 2)
    assert {replica.id: replica.node for replica in world.state.workers} == homes
    assert (requests(world), fences(world)) == ([POOL], [])


def test_policy_job_replaces_a_bad_node_and_keeps_the_others() -> None:
    world = World(job(recovery=Recovery(policy="job"), spares=0), nodes=9).steady()
    homes = {replica.id: replica.node for replica in world.state.workers}
    world.lose_node(N3)
    world.steady()
    assert world.incarnations() == dict.fromkeys(ALL, 2)
    assert {replica.id: replica.node for replica in world.state.workers} == homes | {R0: N5}
    assert [exclude.node for exclude in world.decided(Exclude)] == [N3]
    assert len(requests(world)) == 2


def test_policy_job_moves_a_member_that_fails_too_often_on_a_node() -> None:
    world = World(job(recovery=Recovery(policy="job", per_node=2))).steady()
    homes = []
    for _ in range(3):
        world.kill(R0)
        homes.append(world.steady().node_of(R0))
    assert homes == [N3, N3, N5]


def test_policy_job_ends_the_run_when_a_budget_is_exceeded() -> None:
    world = World(job(recovery=Recovery(policy="job", per_node=9, per_replica=3)), nodes=30).steady()
    for _ in range(4):
        world.kill(R0)
        world.play(lambda: world.works() or world.over)
    world.play()
    assert len(world.decided(RestartAll)) == 3
    assert "3 restarts of rollout/0 within 600 s" in world.decided(Finish)[0].why.evidence
    assert_nothing_is_left(world, Outcome.FAILED)


def test_only_policy_role_keeps_standbys() -> None:
    world = World(gang_job(2, 1, donors=True, recovery=Recovery(policy="job"))).steady().warmed()
    assert not world.ready_standbys()


def test_agent_failure_is_minor_with_policy_job() -> None:
    world = World(job(recovery=Recovery(policy="job"))).steady()
    world.kill(ReplicaId("agent/n3"))
    world.wait(10.0)
    assert world.incarnations() == dict.fromkeys(ALL, 1)
    assert world.state.replica(ReplicaId("agent/n3")).incarnation_number == 2


# ── user commands ────────────────────────────────────────────────────────────────────────────────────────────────────
def rung_order(world: World, target: ReplicaId) -> None:
    world.happen(ev.CommandReceived("restart", "ada", f"c{len(world.events)}", target=target))


def test_requested_restart_is_in_place_and_uncharged(world: World) -> None:
    home = world.node_of(R0)
    rung_order(world, R0)
    (fence,) = fences(world)
    assert (fence.incarnation, fence.rung, fence.charged) == (Incarnation(R0, 1), Rung.IN_PLACE, False)
    assert (fence.why.evidence, fence.why.deadline) == (
        ("restart requested by ada",),
        world.now + world.state.job.limits.join,
    )
    assert world.state.requested_restarts == {}
    world.steady()
    assert world.incarnations() == dict.fromkeys(ALL, 1) | {R0: 2}
    assert (world.node_of(R0), world.state.replica(R0).failures) == (home, ())


@pytest.mark.parametrize("target", [T0, T2])
def test_requested_restart_of_any_member_restarts_the_gang(target: ReplicaId) -> None:
    world = World(gang_job(warm=False)).steady()
    homes = {id: world.node_of(id) for id in GANG}
    rung_order(world, target)
    world.steady()
    assert {id: world.incarnations()[id] for id in GANG} == dict.fromkeys(GANG, 2)
    assert {id: world.node_of(id) for id in GANG} == homes
    assert charged(world) == []


def test_requested_restart_brings_a_retired_replica_back_with_a_new_budget() -> None:
    world = World(job(recovery=Recovery(per_node=9, per_replica=1))).steady()
    for _ in range(2):
        world.kill(R0)
        world.play(timeout_s=30.0)
    assert world.state.replica(R0).status is Status.RETIRED
    rung_order(world, R0)
    assert world.play(world.works, timeout_s=10.0).works()
    world.kill(R0)
    assert world.play(world.works, timeout_s=10.0).works()


def test_requested_restart_of_a_retired_gang_survives_a_manager_failure() -> None:
    crew = msgspec.structs.replace(command("crew", 2, least=1), ranks=3, per_node=1)
    for die_before in range(7):
        world = World(commands(crew, recovery=Recovery(per_node=9, per_replica=1), spares=4)).steady()
        for _ in range(2):
            world.kill(ReplicaId("crew/1.1"))
            world.play(timeout_s=30.0)
        world.die_before = world.planned + die_before if die_before else 0
        rung_order(world, ReplicaId("crew/1.2"))
        assert world.play(world.works, timeout_s=100.0).works(), die_before
        assert world.state.requested_restarts == {}


def test_requested_restart_ends_a_backoff() -> None:
    world = World(job(recovery=Recovery(backoff=60.0))).steady()
    for _ in range(2):
        world.kill(R0)
        world.play(timeout_s=5.0)
    assert world.state.replica(R0).status is Status.WANTED
    rung_order(world, R0)
    assert world.state.replica(R0).status is Status.LAUNCHING
    assert world.state.requested_restarts == {}


def test_requested_restart_in_backoff_keeps_the_preferred_node() -> None:
    world = World(job(spares=2, recovery=Recovery(backoff=60.0, per_node=9))).steady()
    left = world.node_of(R0)
    for command_ in ("drain", "undrain"):  # a free node with a lower number than the rollout's present node
        world.happen(ev.CommandReceived(command_, "ada", command_, target=left))
        world.play(timeout_s=10.0)
    for _ in range(2):
        world.kill(R0)
        world.play(timeout_s=5.0)
    home = world.state.replica(R0).preferred_node
    assert home != left
    rung_order(world, R0)
    assert home is not None
    assert (world.state.replica(R0).status, world.state.replica(R0).node) == (Status.LAUNCHING, home)


def test_requested_restart_of_a_retired_replica_outlasts_a_full_restart() -> None:
    world = World(job(recovery=Recovery(per_node=9, per_replica=1, policy="role"))).steady()
    for _ in range(2):
        world.kill(R0)
        world.play(timeout_s=30.0)
    assert world.state.replica(R0).status is Status.RETIRED
    why = Why(("because",), Rung.FULL_RESTART)
    fences_ = tuple(
        Fence(replica.incarnation, Rung.FULL_RESTART, why, replica.node, charged=replica.id == T0)
        for replica in world.state.workers
        if replica.is_current
    )
    world.record(ev.CommandReceived("restart", "ada", "c1", target=R0))
    world.happen(ev.Decided(RestartAll(why, fences_)))
    world.play(world.works, timeout_s=120.0)
    assert world.works()


def test_replica_just_retired_is_not_brought_back_by_a_full_restart(world: World) -> None:
    why = Why(("because",), Rung.FULL_RESTART)
    everybody = tuple(
        Fence(replica.incarnation, Rung.FULL_RESTART, why, replica.node, charged=replica.id == T0)
        for replica in world.state.workers
    )
    world.record(ev.Decided(Fence(Incarnation(R0, 1), Rung.DEGRADED, Why(("it fails too often",), Rung.DEGRADED))))
    before = world.state.replica(R0)
    world.record(ev.Decided(RestartAll(why, everybody)))
    assert world.state.replica(R0) == before
    assert before.status is Status.RETIRED


def test_due_restart_fulfils_a_requested_one(world: World) -> None:
    incarnation = world.state.replica(R0).incarnation
    world.record(ev.CommandReceived("restart", "ada", "c1", target=R0))
    world.happen(found(incarnation, "exit_record", world.now))
    world.steady()
    assert world.incarnations()[R0] == 2


# ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def end(world: World, outcome: Outcome) -> None:
    world.happen(ev.Decided(Finish(outcome, Why(("because",)))))


def stops(world: World) -> list[ReplicaId]:
    return [action.incarnation.replica for action in world.decided(StopStep)]


def test_failed_run_stops_the_trainer_first_with_time_to_commit() -> None:
    world = World(gang_job(2, 1)).steady().warmed()
    standbys = {ReplicaId(f"standby/{node}") for node in world.ready_standbys()}
    world.slow_to_stop = 3.0
    end(world, Outcome.FAILED)
    assert stops(world) == [T0, T1]
    assert {action.grace for action in world.decided(StopStep)} == {
        TRAINER_SHUTDOWN_GRACES * world.state.job.limits.step_grace
    }
    assert world.state.replica(STORE).is_current
    world.happen(ev.StepCommitted(Incarnation(T0, 1), 2))  # while it leaves
    world.play()
    order = stops(world)
    agents = [index for index, id in enumerate(order) if role_of(id) == AGENT]
    assert standbys
    assert standbys | {STORE, REWARD, R0} < set(order[2 : min(agents)])
    assert final_reason(world.state) == f"because; rrl resume {RUN} goes on from step 2"
    assert (world.over, world.steps, world.held) == (True, {}, {})


def test_trainer_that_does_not_leave_delays_the_end_within_its_limit(world: World) -> None:
    world.slow_to_stop = float("inf")
    began, grace = world.now, world.state.job.limits.step_grace
    end(world, Outcome.FAILED)
    world.play(lambda: STORE in stops(world))
    assert world.now == began + 2 * TRAINER_SHUTDOWN_GRACES * grace
    world.play()
    assert world.over


@pytest.mark.parametrize("outcome", [Outcome.COMPLETED, Outcome.REJECTED, Outcome.CANCELLED])
def test_other_runs_stop_all_roles_at_once(outcome: Outcome, world: World) -> None:
    end(world, outcome)
    assert set(stops(world)) == set(ALL)
    world.play()
    assert final_reason(world.state) == "because"
    assert world.over


def test_a_run_that_failed_after_its_last_step_has_nothing_to_resume() -> None:
    world = at_step(World(job(steps=3)).steady(), 2)
    end(world, Outcome.FAILED)
    world.happen(ev.StepCommitted(Incarnation(TRAINER, 1), 3))
    assert final_reason(world.state) == "because"


def test_run_without_a_trainer_mentions_no_steps() -> None:
    world = World(commands(command("solver"))).steady()
    end(world, Outcome.FAILED)
    assert final_reason(world.state) == "because"


def cancelled(world: World) -> World:
    world.happen(ev.CommandReceived("cancel", "me", "c1", keep_allocations=True))
    return world


def test_cancelled_run_with_kept_allocations_stops_everything_and_releases_nothing() -> None:
    world = cancelled(World(gang_job(2, 1)).steady().warmed()).play()
    assert (world.over, world.steps, world.state.orphan_steps) == (True, {}, {})
    assert (world.decided(Release), list(world.held)) == ([], [POOL])
    assert final_reason(world.state) == "cancelled by me; its nodes are kept as requested: job 7"


def test_queued_request_is_not_kept() -> None:
    world = World(job(spares=0)).steady()
    world.lose_node(N3)
    world.play(lambda: len(requests(world)) == 2)
    cancelled(world).play()
    assert world.over
    assert [action.allocation for action in world.decided(Release)] == requests(world)[1:]
    assert final_reason(world.state).endswith("job 7; processes on n3, which did not respond, may still run")


def test_allocation_with_an_orphan_step_is_not_kept(world: World) -> None:
    world.slow_to_stop = float("inf")
    cancelled(world).play()
    assert world.over
    assert [action.allocation for action in world.decided(Release)] == [POOL]
    assert final_reason(world.state) == "cancelled by me"
