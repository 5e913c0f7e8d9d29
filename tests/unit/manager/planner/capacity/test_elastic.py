"""The elastic rollout pool in virtual time: it grows at once, shrinks by one, and never uses more than its budget."""

from __future__ import annotations

import msgspec
import pytest

from rrl.cluster.base import AllocationState, RejectReason
from rrl.core.run_spec import RunSpec, SamplingSpec
from rrl.core.types import Outcome, ReplicaId
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Finish, Release, Request, Resize
from rrl.manager.model.pools import affordable, pool_figures, pool_state
from rrl.manager.model.reducer import fold
from rrl.manager.model.state import Status
from rrl.tests.support.manager.balanced_world import POOL, Balanced
from rrl.tests.support.manager.jobs import TRAINER, in_node_groups, job, with_pool
from rrl.tests.support.manager.world import charged, fail, fences, lost

HOUR = 3600.0
LONG = 1_000_000
B0, B1, B2 = (ReplicaId(f"{POOL}/{index}") for index in range(3))


def spec(
    low: int = 0, high: int = 8, *, base: RunSpec | None = None, node_hours: float = 1000.0, walltime: float = 86400.0
) -> RunSpec:
    base = base or job(steps=LONG, spares=0, walltime=30 * 86400.0)
    return with_pool(base, low, high, node_hours=node_hours, walltime=walltime)


def grown(low: int = 0, high: int = 8, *, node_hours: float = 1000.0, walltime: float = 86400.0) -> Balanced:
    """Return a world whose pool has grown to the number that its trainer needs: 8 if its bounds allow it."""
    world = Balanced(spec(low, high, node_hours=node_hours, walltime=walltime))
    world.steady()
    world.train(16)
    assert world.at_work() == world.size() == high
    return world


def with_long_steps(world: Balanced) -> Balanced:
    """Let each step take ten times as long, so that hours pass in few steps."""
    world.tokens, world.train_s = 10 * world.tokens, 10 * world.train_s
    return world


def evidence(world: Balanced) -> str:
    return world.decided(Resize)[-1].why.evidence[0]


def release(world: Balanced, state: AllocationState, replica: ReplicaId = B0, **changes: object) -> None:
    """Let the cluster report a changed state of the allocation of a replica."""
    allocation = world.state.allocations[world.state.replica(replica).allocation or ""]
    assert allocation.status is not None
    status = msgspec.structs.replace(allocation.status, state=state, **changes)
    world.happen(ev.AllocationChanged(allocation.tag, status))


# ── the rule ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_pool_grows_at_once_to_the_number_with_which_the_trainer_does_not_wait() -> None:
    world = Balanced(spec())
    world.steady()
    world.paces["burst"] = 100.0  # as the other rollouts, from whose pace that of a new pool is taken
    world.train(5)
    assert (world.size(), world.tags()) == (0, []), "it decided on fewer than five steps"
    world.train(1)
    assert world.resizes() == [(4, 0)]
    assert evidence(world) == (
        "the trainer waited 67% of the last 5 steps; it could train 600 tokens/s, the other rollouts generate 200,"
        " a replica of burst 100: 4 wanted, 0 before"
    )
    assert [world.requests[tag].count for tag in world.tags()] == [1, 1, 1, 1]
    world.train(20)
    assert (world.resizes(), world.at_work()) == ([(4, 0)], 4)
    assert world.of_others() == dict.fromkeys(world.of_others(), 1)


def test_learned_pace_of_the_pool_corrects_its_size() -> None:
    world = grown()  # half as fast as the other rollouts
    assert world.resizes() == [(4, 0), (4, 0)]


def test_pool_shrinks_by_one_at_a_time_and_gives_the_nodes_back() -> None:
    world = grown()
    world.tokens = 3000
    begun = world.state.step
    world.train(60)
    assert world.resizes()[2:] == [(0, 1)] * 6
    assert world.state.step - begun >= 6 * 5
    assert world.size() == len([a for a in world.state.allocations.values() if a.request.node_group == POOL]) == 2
    assert world.of_others() == dict.fromkeys(world.of_others(), 1)


def test_replica_whose_allocation_ends_first_is_stopped_first_but_a_queued_request_before_it() -> None:
    world = grown(high=3, walltime=12 * HOUR)
    release(world, AllocationState.RUNNING, B1, time_left_s=11 * HOUR)
    world.hold(2)
    assert world.decided(Resize)[-1].stop == (B1,)
    world.closed[POOL] = "Priority"
    world.wait(60.0)
    world.hold(3)
    world.wait(60.0)
    assert world.state.replica(B1).status is Status.WANTED
    release(world, AllocationState.RUNNING, B0, time_left_s=10 * HOUR)
    world.hold(2)
    assert world.decided(Resize)[-1].stop == (B1,)
    world.wait(60.0)
    assert [one.allocation for one in world.decided(Release)][-1] == world.tags()[-1]


def test_number_of_replicas_keeps_to_its_bounds_and_to_the_work_that_staleness_allows() -> None:
    assert grown(low=2, high=3).size() == 3
    small = job(steps=LONG, spares=0, walltime=30 * 86400.0)
    sampling = SamplingSpec(prompts_per_step=4, group_size=4, staleness=4)  # 80 trajectories; the others lease 32
    world = Balanced(msgspec.structs.replace(spec(base=small), sampling=sampling))
    world.steady()
    world.train(60)
    assert world.size() == 3
    idle = Balanced(spec(low=2))
    idle.steady()
    idle.tokens = 600  # the other rollouts are fast enough
    idle.train(30)
    assert (idle.size(), idle.resizes()) == (2, [])


def test_trainer_that_does_not_wait_needs_no_further_replica() -> None:
    world = Balanced(spec())
    world.steady()
    world.tokens, world.paces["rollout"] = 2100, 105.0
    world.train(30)
    assert world.resizes() == []


@pytest.mark.parametrize("replica", ["trainer/0", "trajectories/0", "reward/0"])
def test_pool_does_not_change_while_another_role_is_repaired(replica: ReplicaId) -> None:
    world = Balanced(spec())
    world.steady()
    world.train(5)
    world.slow_to_join = 300.0
    fail(world, replica)
    world.happen(ev.StepCommitted(world.state.replica(TRAINER).incarnation, 6, {"tokens": 6000.0}))
    world.wait(200.0)
    assert world.resizes() == []
    world.wait(200.0)
    world.slow_to_join = 0.7
    world.train(8)
    assert world.size() > 0


def test_failing_rollout_neither_forbids_growth_nor_causes_it() -> None:
    world = Balanced(spec())
    world.steady()
    world.paces["burst"] = 100.0
    world.train(5)
    fail(world, ReplicaId("rollout/1"))
    world.train(1)
    assert world.resizes() == [(4, 0)]


def test_pool_does_not_grow_when_the_run_is_about_to_end() -> None:
    base = job(steps=30, spares=0, walltime=30 * 86400.0)
    world = Balanced(spec(base=base))  # a step takes 30 s before the pool grows, and a start at most 120 s
    world.steady()
    world.tokens = 600
    world.train(20)
    world.tokens = 6000
    world.train(10)
    assert world.resizes() == []


def test_queued_request_is_given_up_when_it_cannot_pay_back_any_more() -> None:
    base = job(steps=LONG, spares=0, walltime=4 * HOUR)
    world = Balanced(spec(base=base))
    world.steady()
    world.closed[POOL] = "Priority"
    world.train(7)
    assert (world.size(), world.at_work(), len(world.tags())) == (4, 0, 4)
    with_long_steps(world).train(600, lambda: world.size() == 0)
    assert world.size() == 0
    assert len(world.tags()) == 4
    assert "too short" in evidence(world)


# ── the budget ───────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(("hours", "walltime"), [(2.0, 86400.0), (2.0, 1200.0), (0.3, 86400.0), (0.05, 600.0)])
def test_pool_never_uses_more_than_its_budget_and_most_of_it(hours: float, walltime: float) -> None:
    world = Balanced(spec(node_hours=hours, walltime=walltime))
    world.steady()
    while world.now < 4 * HOUR and not (world.spent() > 0 and world.size() == 0 and not affordable_now(world)):
        world.step()
        assert world.spent() <= hours * HOUR
    assert world.spent() >= 0.75 * hours * HOUR
    world.train(60)
    assert (world.size(), world.spent() <= hours * HOUR) == (0, True)
    assert world.state.finish is None
    assert world.of_others() == dict.fromkeys(world.of_others(), 1)


def affordable_now(world: Balanced) -> int:
    return affordable(world.state, world.state.job.role(POOL), world.now)[0]


def test_nodes_are_given_back_before_the_end_that_the_budget_sets() -> None:
    world = grown(high=2, node_hours=0.5, walltime=600.0)
    ends = []
    for tag in world.tags():
        world.play(lambda tag=tag: tag not in world.held, timeout_s=HOUR)  # type: ignore[misc]
        ends.append(tag)
    assert ends
    expired = [e for e in world.events if isinstance(e.event, ev.AllocationChanged) and "TIMEOUT" in str(e.event)]
    assert expired == []


def test_successor_of_an_allocation_is_requested_while_the_budget_allows_it() -> None:
    world = with_long_steps(grown(high=2, walltime=2 * HOUR))
    world.train(int(5 * HOUR / 200))
    assert world.at_work() == 2
    assert len(world.tags()) >= 6
    assert len(world.resizes()) <= 2
    assert charged(world) == []


def test_replica_whose_successor_is_queued_keeps_the_place_in_the_queue() -> None:
    world = with_long_steps(grown(high=2, walltime=2 * HOUR))
    world.closed[POOL] = "Priority"
    world.train(int(3 * HOUR / 200))
    assert (world.size(), world.at_work()) == (2, 0)
    queued = world.tags()[2:]
    assert len(queued) == 2
    world.train(int(HOUR / 200))
    assert world.tags()[2:] == queued
    world.open(POOL)
    world.train(10)
    assert world.at_work() == 2


# ── nodes that come and go ───────────────────────────────────────────────────────────────────────────────────────────
def test_preempted_replica_is_given_up_uncharged_and_another_is_requested_only_after_a_step() -> None:
    world = grown()
    made = len(world.tags())
    release(world, AllocationState.RUNNING, reclaimed=True, time_left_s=30.0)
    assert world.decided(Resize)[-1].stop == (B0,)
    assert "preempted" in evidence(world)
    assert (world.size(), len(world.tags()), fences(world)) == (7, made, [])
    world.wait(20.0)
    assert len(world.tags()) == made
    world.train(3)
    assert (world.at_work(), len(world.tags())) == (8, made + 1)
    assert world.state.replica(B0).incarnation_number == 2


@pytest.mark.parametrize("state", [None, AllocationState.ENDED])
def test_replica_whose_allocation_is_gone_is_given_up_uncharged(state: AllocationState | None) -> None:
    world = grown()
    world.drop(world.state.replica(B1).allocation or "", state)
    assert (world.decided(Resize)[-1].stop, fences(world)) == ((B1,), [])


def test_replica_on_an_excluded_node_is_given_up_uncharged() -> None:
    world = grown()
    node = world.node_of(B0)
    world.lose_node(node)
    world.play(timeout_s=60.0)
    assert world.decided(Resize)[-1].stop == (B0,)
    assert fences(world) == []
    world.train(5)
    assert world.at_work() == 8
    assert node not in {world.state.replica(ReplicaId(f"{POOL}/{n}")).node for n in range(8)}


def test_suspended_replica_is_given_up_after_the_limit_of_silence_and_its_time_is_not_counted() -> None:
    world = grown()
    tag = world.state.replica(B0).allocation or ""
    release(world, AllocationState.SUSPENDED)
    before = world.spent()
    silence = world.state.job.limits.silence
    world.wait(silence - 1.0)
    assert world.size() == 8
    assert world.spent() == pytest.approx(before + 7 * (silence - 1.0))
    world.wait(2.0)
    assert world.decided(Resize)[-1].stop == (B0,)
    assert "suspended" in evidence(world)
    world.wait(60.0)
    assert tag not in world.held
    world.train(3)
    assert world.at_work() == 8


def test_short_suspension_is_not_counted_and_changes_nothing() -> None:
    world = grown(high=2)
    tag = world.state.replica(B0).allocation or ""
    ends_at = world.state.allocations[tag].ends_at
    release(world, AllocationState.SUSPENDED)
    before = world.spent()
    world.wait(5.0)
    release(world, AllocationState.RUNNING)
    world.wait(5.0)
    assert world.spent() == pytest.approx(before + 15.0)
    assert world.state.allocations[tag].ends_at == ends_at + 5.0
    assert world.at_work() == 2


def _never_granted(world: Balanced) -> None:
    world.closed[POOL] = "Priority"


def _held(world: Balanced) -> None:
    world.closed[POOL] = "JobHeldUser"


def _hopeless(world: Balanced) -> None:
    world.hopeless[POOL] = "PartitionNodeLimit"


def _refused_for_now(world: Balanced) -> None:
    world.refuse, world.refuse_reason = "QOSMaxSubmitJobPerUserLimit", RejectReason.REFUSED_FOR_NOW


def _rejected(world: Balanced) -> None:
    world.refuse = "Invalid account"


@pytest.mark.parametrize("trouble", [_never_granted, _held, _hopeless, _refused_for_now, _rejected])
@pytest.mark.parametrize("low", [0, 2])
def test_queue_that_gives_nothing_gets_few_requests_and_costs_the_run_nothing(trouble: object, low: int) -> None:
    world = with_long_steps(Balanced(spec(low)))
    world.steady()
    trouble(world)  # type: ignore[operator]
    for replica in [B0, B1][:low]:
        release(world, AllocationState.RUNNING, replica, reclaimed=True, time_left_s=30.0)
    begun, made = world.now, len(world.decided(Request))
    fenced = len(fences(world))
    world.train(10_000, lambda: world.now >= begun + 6 * HOUR)
    assert (len(world.decided(Request)) - made) / 6 <= 20
    assert world.at_work() == 0
    assert len(fences(world)) == fenced
    assert world.state.finish is None
    world.refuse = ""
    world.hopeless.clear()
    world.closed.clear()
    world.arrive(0)
    world.train(400, lambda: world.at_work() == 8)
    assert world.at_work() == 8


def test_one_request_finds_out_whether_a_cluster_that_refused_accepts_again() -> None:
    world = Balanced(spec())
    world.steady()
    _rejected(world)
    world.train(10)
    made = len(world.tags())
    assert (made, world.size()) == (4, 0)
    world.train(int(world.state.job.recovery.window / 30) + 3)
    assert len(world.tags()) == made + 1


# ── what a user sets ─────────────────────────────────────────────────────────────────────────────────────────────────
def test_number_that_a_user_sets_holds_until_auto() -> None:
    world = grown()
    world.hold(3)
    assert world.size() == 3
    world.train(20)
    assert (world.size(), pool_figures(world.state, world.state.job.role(POOL), world.now).held) == (3, 3)
    assert evidence(world) == "a user wants 3 replicas, 8 before"
    kept = next(replica.id for replica in world.state.workers if replica.role == POOL)
    release(world, AllocationState.RUNNING, kept, reclaimed=True, time_left_s=30.0)
    world.train(3)
    assert world.at_work() == 3
    world.hold(None)
    world.train(10)
    assert world.at_work() == 8


def test_number_that_a_user_sets_needs_no_figures_and_no_time_to_pay_back() -> None:
    world = Balanced(spec(base=job(steps=3, spares=0)))
    world.steady()
    world.hold(5)
    assert world.size() == 5
    world.play(lambda: world.at_work() == 5, timeout_s=60.0)
    assert world.at_work() == 5


@pytest.mark.parametrize(("pool", "replicas"), [(POOL, 9), (POOL, 0), (POOL, -1), ("rollout", 3), ("nothing", 3)])
def test_command_that_the_pool_cannot_follow_is_ignored(pool: str, replicas: int) -> None:
    world = Balanced(spec(low=1))
    world.steady()
    world.hold(replicas, pool)
    world.wait(60.0)
    assert (world.size(), world.state.pools.get(pool), world.resizes()) == (1, None, [])


def test_next_manager_continues_with_what_the_user_set_and_the_pool_has_spent() -> None:
    world = grown(high=4)
    world.hold(2)
    world.train(3)
    state, spent = world.state, world.spent()
    again = None
    for stamped in world.events:
        again = fold(again, stamped)
    assert again is not None
    assert (again.pools, again.balance, list(again.replicas)) == (state.pools, state.balance, list(state.replicas))
    assert pool_state(again, POOL).held == 2
    assert 0 < spent == pool_figures(again, again.job.role(POOL), world.now).spent_node_s


def test_allocations_of_the_pool_are_released_although_a_user_keeps_those_of_the_run() -> None:
    world = grown(high=2)
    world.happen(ev.CommandReceived("cancel", "ada", "c1", keep_allocations=True))
    world.play()
    assert world.over
    assert {allocation.request.node_group for allocation in world.state.allocations.values()} == {"pool"}


@pytest.mark.parametrize("changed", ["same", "smaller", "gone", "renamed"])
def test_resumed_run_begins_with_the_least_number_and_what_is_left_of_the_budget(changed: str) -> None:
    world = grown(high=4, node_hours=10.0)
    world.hold(2)
    world.train(3)
    spent = world.spent()
    world.cancel()
    world.play()
    assert world.over
    assert world.state.finish is not None
    world.record(ev.RunEnded(world.state.finish.outcome, "because"))
    base = job(steps=LONG, spares=0, walltime=30 * 86400.0)
    jobs = {
        "same": spec(high=4, node_hours=10.0),
        "smaller": spec(high=2, node_hours=10.0),
        "gone": base,
        "renamed": with_pool(base, 0, 4, name="other"),
    }
    world.over = False
    world.record(ev.Resumed("ada", "r1", jobs[changed]))
    world.happen(ev.ManagerStarted("login", 2))
    world.steady()
    record = pool_state(world.state, POOL)
    assert record.spent_node_s == pytest.approx(spent, abs=60.0)
    assert (record.held, world.size(), world.state.balance) == (None, 0, ())
    if changed in ("same", "smaller"):
        world.train(16)
        assert world.size() == world.state.job.role(POOL).max_replicas
        assert world.state.replica(B0).incarnation_number > 1
        assert world.spent() > spent
    else:
        world.train(3)


# ── nothing about a further pool ends a run, or holds up its start ───────────────────────────────────────────────────
FORMS = ("pool", "replica", "hetjob")


def of_form(form: str, low: int = 2, high: int | None = None, **changes: object) -> RunSpec:
    base = job(steps=LONG, spares=0) if form == "pool" else in_node_groups(form, steps=LONG)
    return msgspec.structs.replace(with_pool(base, low, high), **changes)


@pytest.mark.parametrize("high", [None, 4])
@pytest.mark.parametrize("form", FORMS)
def test_nodes_of_a_further_pool_are_requested_by_themselves_once_the_run_has_its_own(
    form: str, high: int | None
) -> None:
    world = Balanced(of_form(form, high=high))
    world.closed["pool"] = world.closed["trainer"] = "Priority"
    world.wait(HOUR / 2)
    assert world.tags() == []
    world.closed.clear()
    world.arrive(0)
    world.steady()
    assert [world.requests[tag].count for tag in world.tags()] == [1, 1]
    assert all(not request.further_components for request in world.requests.values() if request.node_group == POOL)
    assert {c.node_group for r in world.decided(Request) for c in r.request.further_components}.isdisjoint({POOL})
    assert world.at_work() == 2


@pytest.mark.parametrize("high", [None, 4])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("trouble", [_never_granted, _hopeless])
def test_run_starts_and_goes_on_without_the_nodes_of_a_further_pool(
    form: str, high: int | None, trouble: object
) -> None:
    world = Balanced(of_form(form, high=high))
    trouble(world)  # type: ignore[operator]
    world.train(60)
    assert world.state.step > 30
    assert (world.at_work(), world.state.finish) == (0, None)
    assert world.of_others() == dict.fromkeys(world.of_others(), 1)


@pytest.mark.parametrize("high", [None, 4])
@pytest.mark.parametrize("form", FORMS)
def test_rejected_requests_of_a_further_pool_do_not_end_the_run(form: str, high: int | None) -> None:
    world = Balanced(of_form(form, high=high))
    world.play(lambda: bool(world.tags()), timeout_s=60.0)
    world.refuse = "Invalid account"
    for tag in world.tags():
        world.drop(tag, AllocationState.ENDED)
    world.train(60)
    assert (world.at_work(), world.state.finish) == (0, None)
    world.refuse = ""
    world.train(100)
    assert world.at_work() >= 2


BROKEN = ("not started: no such file", "invalid configuration: wrong engine", "it ended")


@pytest.mark.parametrize("high", [None, 4])
@pytest.mark.parametrize("why", BROKEN)
def test_pool_whose_engine_cannot_start_is_retired(why: str, high: int | None) -> None:
    world = Balanced(of_form("pool", high=high))
    world.broken[POOL] = why
    world.train(40)
    assert world.state.finish is None
    assert {r.status for r in world.state.workers if r.role == POOL} == {Status.RETIRED}
    assert world.state.step > 10
    assert world.of_others() == dict.fromkeys(world.of_others(), 1)


@pytest.mark.parametrize("why", BROKEN)
def test_run_goes_on_with_a_further_pool_if_the_first_cannot_start(why: str) -> None:
    world = Balanced(of_form("pool"))
    world.broken["rollout"] = why
    world.train(40)
    assert (world.state.finish, world.at_work()) == (None, 2)
    assert world.state.step > 5


@pytest.mark.parametrize("why", BROKEN)
def test_run_is_rejected_if_no_pool_can_start(why: str) -> None:
    world = Balanced(of_form("pool"))
    world.broken["rollout"] = world.broken[POOL] = why
    world.train(60)
    assert [finish.outcome for finish in world.decided(Finish)] == [Outcome.REJECTED]


def test_unfit_nodes_of_a_further_pool_do_not_reject_the_run() -> None:
    spec_ = of_form("pool")
    world = Balanced(msgspec.structs.replace(spec_, env=msgspec.structs.replace(spec_.env, probe="import x")))
    world.play(lambda: bool(world.tags()), timeout_s=60.0)
    for node in list(world._free):
        world.unfit[node] = "no module x"
    for tag in world.tags():
        for node in world.held.get(tag, ()):
            world.unfit[node] = "no module x"
    world.train(40)
    assert (world.state.finish, world.at_work()) == (None, 0)
    assert world.state.step > 10


def test_loss_of_a_pools_whole_partition_does_not_hold_back_the_exclusion_of_the_trainers_node() -> None:
    world = Balanced(of_form("pool", low=8))
    world.steady()
    for index in range(8):
        world.happen(lost(world.node_of(ReplicaId(f"{POOL}/{index}")), world.now))
    trainer = world.node_of(TRAINER)
    world.happen(lost(trainer, world.now))
    world.wait(5.0)
    assert world.state.nodes[trainer].excluded is not None


def test_last_rollouts_are_started_again_at_once_and_without_figures() -> None:
    base = job(steps=LONG, rollouts=0, spares=0, walltime=30 * 86400.0)
    world = Balanced(spec(low=1, high=4, base=base))
    world.steady()
    release(world, AllocationState.RUNNING, reclaimed=True, time_left_s=30.0)
    world.play(lambda: world.at_work() == 1, timeout_s=60.0)
    assert world.at_work() == 1
    world.train(20)
    assert world.at_work() == 4


def test_state_without_an_elastic_pool_collects_no_samples() -> None:
    world = Balanced(job(steps=LONG))
    world.steady()
    world.train(8)
    assert (world.state.balance, world.state.pools, world.resizes()) == ((), {}, [])


# ── the manager dies ─────────────────────────────────────────────────────────────────────────────────────────────────
def _story(die_before: int) -> Balanced:
    """Let a pool grow, lose a replica, shrink and grow again, under a manager that dies before one of its records."""
    world = Balanced(spec(high=2, node_hours=50.0))
    world.die_before = die_before
    world.steady()
    world.train(7)
    if world.at_work():
        first = next(replica.id for replica in world.state.workers if replica.role == POOL)
        release(world, AllocationState.RUNNING, first, reclaimed=True, time_left_s=30.0)
    world.train(4)
    world.hold(1)
    world.train(2)
    world.hold(None)
    world.train(9)
    return world


def test_manager_may_die_before_any_record_about_the_pool() -> None:
    alone = _story(0)
    first = alone.actions.index(alone.decided(Resize)[0])
    assert alone.at_work() == 2
    for number in range(first + 1, alone.planned + 1):
        world = _story(number)
        assert (world.at_work(), world.size()) == (2, 2), number
        held = {tag for tag, nodes in world.held.items() if nodes and world.requests[tag].node_group == POOL}
        assert held == {world.state.replica(ReplicaId(f"{POOL}/{n}")).allocation for n in range(2)}, number
        assert world.of_others() == alone.of_others(), number
        assert len(world.resizes()) == len(alone.resizes()), number
