"""Blame along wait chains: which replica is blamed when replicas wait for each other."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rrl.core.launch import ExitReason
from rrl.core.phases import PHASES, PhaseSpec
from rrl.core.run_spec import Limits, RoleSpec
from rrl.core.types import Cause, DataReport, Incarnation, ReplicaId
from rrl.health.detection.attribution.wait_chains import blame_ends_of_wait_chains
from rrl.health.detection.detectors.progress import ENDLESS_WAIT_FACTOR
from rrl.tests.support.health.traces import (
    LIMITS,
    NO_PROBE_HANDLER,
    REWARD,
    ROLLOUT,
    ROLLOUTS,
    STORE,
    TRAINER,
    Observed,
    Trace,
    fail,
)
from rrl.tests.support.manager.jobs import gang_job, with_fast_rollouts

ENDLESS_S = ENDLESS_WAIT_FACTOR * PHASES["wait_data"].longest
LONG = 900 + LIMITS.first_pass + 5
"""A time (s) that is longer than any permitted wait."""


@pytest.fixture
def trace() -> Trace:
    return job("wait_data", "wait_work")


def job(trainer: str, rollouts: str, reward: str = "wait_work") -> Trace:
    """Return a trace of a trainer, a store, a reward role and three rollouts, none of which makes progress."""
    trace = Trace().node("n1", TRAINER, phase=trainer).node("n2", *ROLLOUTS, phase=rollouts)
    trace.node("n3", STORE, phase="serve").node("n4", REWARD, phase=reward)
    trace.still |= {TRAINER, STORE, REWARD, *ROLLOUTS}
    return trace


def test_standby_process_is_neither_blamed_nor_counted_as_working(trace: Trace) -> None:
    standby = Incarnation(ReplicaId("standby/n1"), 1)
    trace.node("n5", standby, phase="standby")
    without = job("wait_data", "wait_work")
    for one in (trace, without):
        one.play(LONG)
    assert trace.found() == without.found() != set()


def test_no_replica_is_blamed_while_a_rollout_is_replaced(trace: Trace) -> None:
    trace.play(LONG - 100)
    trace.monitor.remove(ROLLOUTS[0])
    trace.launch(Incarnation(ROLLOUTS[0].replica, 2), "n2")
    trace.play(110)
    assert trace.found() == set()


def test_dead_rollout_explains_all_waits(trace: Trace) -> None:
    trace.monitor.on_step_ended(ROLLOUTS[2], None, 9, ExitReason.SIGNALED, trace.now)
    trace.play(LONG)
    assert trace.found() == {fail("exit_record", ROLLOUTS[2])}


def test_stalled_run_blames_the_service_at_the_end_of_the_chain(trace: Trace) -> None:
    trace.play(LONG)
    assert trace.found() == {fail("standstill", STORE)}
    finding = trace.only()
    assert finding.cause == Cause.HANG
    assert not finding.proof
    assert [one.text.split(":")[0] for one in finding.evidence] == [
        "trajectories/0",
        "reward/0",
        "rollout/0",
        "rollout/1",
        "rollout/2",
        "further waiting replicas",
    ]


@pytest.mark.parametrize(
    ("holders", "blamed"),
    [(None, set()), ({REWARD.replica}, set()), ({ROLLOUTS[1].replica}, {fail("standstill", ROLLOUTS[1])})],
)
def test_busy_replica_explains_endless_waits_unless_it_holds_nothing_that_is_missing(
    holders: set[ReplicaId] | None, blamed: set[Observed], trace: Trace
) -> None:
    trace.waiting = dict.fromkeys((TRAINER, REWARD, *ROLLOUTS), STORE.replica)
    trace.still -= {STORE, REWARD}
    trace.data = DataReport(holders=frozenset(holders or ()), only_holders=holders is not None)
    for second in range(0, int(ENDLESS_S), 10):
        assert trace.found() == set(), f"after {second} s"
        trace.done[STORE] = trace.done.get(STORE, 0) + 9  # the store serves the reward role, which works off a backlog
        trace.enter(REWARD, "score" if second % 20 else "wait_work")
        trace.play(10)
    assert trace.found() == blamed


def mutual_wait(*rollouts: Incarnation, roles: Sequence[RoleSpec] = ()) -> Trace:
    """Return a trace in which a trainer begins to wait for data after its rollouts have waited for weights for 5 min.

    The store works.
    """
    trace = Trace()
    trace.monitor.set_roles(roles)
    trace.node("n3", STORE, phase="serve").node("n2", *rollouts, phase="wait_weights")
    trace.still |= set(rollouts)
    play_served(trace, 300)
    trace.node("n1", TRAINER, phase="wait_data")
    trace.still.add(TRAINER)
    trace.waiting[TRAINER] = STORE.replica
    return trace


def play_served(trace: Trace, seconds: float) -> None:
    """Advance the clock while the store serves a replica, so that a short wait for the store is explained."""
    for _ in range(int(seconds / 10)):
        trace.done[STORE] = trace.done.get(STORE, 0) + 1
        trace.play(10)


def test_rollouts_of_two_roles_count_as_one_kind_when_they_and_the_trainer_wait_for_each_other() -> None:
    fast, roles = Incarnation(ReplicaId("fast/0"), 1), with_fast_rollouts(gang_job(1, 1, rollouts=1), 1).roles
    trace = mutual_wait(ROLLOUT, fast, roles=roles)
    play_served(trace, ENDLESS_S + 20)
    assert trace.found() == {fail("standstill", TRAINER)}


def test_worker_that_names_a_replica_waits_in_any_phase() -> None:
    trace = job("wait_data", "generate")
    trace.waiting = dict.fromkeys(ROLLOUTS, STORE.replica)  # blocked in an append
    trace.play(PHASES["generate"].longest + LIMITS.first_pass)
    assert trace.found() == {fail("standstill", STORE)}


def test_named_replica_precedes_the_role_of_the_phase() -> None:
    trace = job("wait_data", "wait_work", reward="serve")
    trace.waiting = dict.fromkeys((TRAINER, *ROLLOUTS), REWARD.replica)
    trace.play(LONG)
    assert trace.found() == {fail("standstill", REWARD)}


def test_chain_follows_the_replica_of_a_role_that_does_not_wait() -> None:
    trace = job("wait_data", "wait_work", reward="serve")
    trace.waiting = {ROLLOUTS[0]: REWARD.replica, ROLLOUTS[2]: REWARD.replica}
    trace.enter(ROLLOUTS[1], "serve")
    trace.play(LONG)
    assert trace.found() == {fail("standstill", ROLLOUTS[1]), fail("standstill", REWARD)}
    assert "trainer/0: phase wait_data" in trace.findings()[1].evidence[1].text


@pytest.mark.parametrize("order", [(TRAINER, ROLLOUTS[0]), (ROLLOUTS[0], TRAINER)])
def test_cycle_of_two_blames_the_replica_that_waits_longest(order: tuple[Incarnation, ...]) -> None:
    trace, phases = Trace(), {TRAINER: "wait_data", ROLLOUTS[0]: "wait_weights"}
    for index, incarnation in enumerate(order):
        trace.node(f"n{index}", incarnation, phase=phases[incarnation])
        trace.play(3)
    trace.play(LONG)
    assert trace.found() == {fail("standstill", order[0])}


@pytest.mark.parametrize("named", [True, False])
def test_waiting_for_an_unobserved_replica_blames_none(named: bool) -> None:
    trace = Trace().node("n2", *ROLLOUTS, phase="wait_weights")
    if named:
        trace.waiting = dict.fromkeys(ROLLOUTS, ReplicaId("trainer/0"))
    trace.play(LONG)
    assert trace.found() == set()


@pytest.mark.parametrize("word", ["on_stop_requested", "on_goodbye"])
def test_leaving_replica_counts_neither_as_working_nor_as_stalled(word: str, trace: Trace) -> None:
    trace.play(LONG - 100)
    getattr(trace.monitor, word)(ROLLOUTS[0], trace.now)
    trace.play(100)
    assert trace.found() == {fail("standstill", STORE)}


def test_job_defined_phase_may_wait_for_a_role() -> None:
    own = PhaseSpec(longest=100.0, progresses=False, waits_for="reward")
    trace = Trace(Limits(first_pass=0.0, phases={"wait_judge": own}))
    trace.node("n1", TRAINER, phase="wait_judge").node("n4", REWARD, phase="serve")
    trace.still |= {TRAINER, REWARD}
    trace.play(PHASES["serve"].shortest - 1)
    assert trace.found() == set()
    trace.play(1)
    assert trace.found() == {fail("standstill", REWARD)}


def test_failed_spare_node_does_not_hide_a_standstill() -> None:
    trace = job("wait_data", "wait_work").node("n9")
    trace.heartbeat_missing.add(agent_n9 := Incarnation(ReplicaId("agent/n9"), 1))
    trace.monitor.on_launched(agent_n9, trace.monitor.replicas[agent_n9.replica].node, trace.now)
    trace.monitor.on_node_status(trace.monitor.replicas[agent_n9.replica].node, "down", "", trace.now)
    trace.play(LONG)
    assert trace.found() == {fail("node_down", "n9"), fail("standstill", STORE)}


def test_blame_does_not_depend_on_the_order_of_findings() -> None:
    from rrl.health.detection.detectors.registry import PROGRESS_DETECTORS

    trace = job("wait_data", "wait_work")
    trace.play(LONG)
    raw = [
        next(f for detector in PROGRESS_DETECTORS if (f := detector(view, LIMITS, trace.now)[0]))
        for view in trace.monitor.workers()
    ]
    assert len(raw) == 6
    blamed = blame_ends_of_wait_chains(raw, trace.monitor)
    assert blamed == blame_ends_of_wait_chains(raw[::-1], trace.monitor) == trace.findings()


def test_thousand_waiting_replicas_are_visited_once_and_named_in_five_lines() -> None:
    trace = Trace().node("n3", STORE, phase="serve")
    chain = [Incarnation(ReplicaId(f"stage/{index}"), 1) for index in range(1000)]
    trace.node("n1", *chain, phase="wait_work")
    for before, after in zip(chain, [*chain[1:], STORE], strict=True):
        trace.waiting[before] = after.replica
    trace.play(3)
    for view in trace.monitor.workers():
        view.heartbeats, view.phase_since, view.done_changed_at = 3, -1e4, -1e4
    (finding,) = [f for f in trace.findings(trace.now) if f.detector == "standstill"]
    assert finding.incarnation == STORE
    assert len(finding.evidence) == 6


# ── services ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_call_that_just_began_is_not_a_standstill() -> None:
    trace = job("train", "generate")
    trace.play(400)
    trace.waiting = {ROLLOUTS[0]: STORE.replica}
    trace.play(60)
    assert all(about != str(STORE) for _, about, _ in trace.found())


def test_store_that_all_wait_for_is_blamed_at_the_idle_limit_of_services(trace: Trace) -> None:
    trace.play(PHASES["serve"].shortest - 1)
    assert trace.found() == set()
    trace.play(1)
    assert trace.found() == {fail("standstill", STORE)}


def test_store_is_blamed_for_a_blocked_call_while_the_trainer_works() -> None:
    trace = job("train", "generate")
    trace.play(10)
    trace.waiting = dict.fromkeys(ROLLOUTS, STORE.replica)
    trace.play(PHASES["serve"].shortest)
    assert trace.found() == set()
    trace.play(1)
    assert trace.found() == {fail("standstill", STORE)}


def test_replica_that_answers_probes_while_it_waits_is_blamed_last() -> None:
    trace = mutual_wait(ROLLOUT)
    trace.answers = {TRAINER: NO_PROBE_HANDLER}
    play_served(trace, ENDLESS_S + 20)
    assert trace.found() == {fail("standstill", TRAINER)}
