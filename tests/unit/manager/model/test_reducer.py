"""``fold``: the state after events in any order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrl.cluster.base import AllocationRequest, AllocationState, AllocationStatus, NodeState, NodeStatus, RejectReason
from rrl.core.faults import Fault, FaultKind, FaultTrigger
from rrl.core.launch import ExitReason, tag_of
from rrl.core.phases import ClockReading, PhaseTime
from rrl.core.run_spec import Recovery
from rrl.core.types import (
    Cause,
    Evidence,
    Finding,
    GpuUse,
    Incarnation,
    NodeName,
    Outcome,
    OutsideKind,
    OutsideWait,
    Remedy,
    ReplicaId,
    Verdict,
    Version,
    WeightTraffic,
)
from rrl.health.detection.baselines import DurationStats, RoleBaseline
from rrl.manager.model import events as ev
from rrl.manager.model.actions import (
    Drain,
    Exclude,
    Fence,
    Finish,
    InjectFault,
    Launch,
    Readmit,
    Release,
    Request,
    RestartAll,
    Rung,
    Shrink,
    StopStep,
    Undrain,
    Why,
)
from rrl.manager.model.queries import open_requests
from rrl.manager.model.reduce_replicas import RETRY_PAUSE_S
from rrl.manager.model.reducer import fold
from rrl.manager.model.state import OrphanStep, State, Status, UnchargedRestart
from rrl.manager.model.table import as_dict
from rrl.tests.support.examples import examples
from rrl.tests.support.manager.jobs import NODE, REWARD, ROLLOUTS, RUN, STORE, TRAINER, command, commands, job
from rrl.tests.support.manager.world import found, lost

POOL = f"{RUN}.pool"
N1, N2, N3 = (NodeName(f"n{i}") for i in (1, 2, 3))
R1 = Incarnation(ROLLOUTS[0], 1)
WHY = Why(("because",))
JOB = job(recovery=Recovery(window=100.0, backoff=1.0))


def state_after(*events: ev.Event, state: State | None = None, at: float = 10.0) -> State:
    """Return the state after these events, which happen one per second from ``at`` on."""
    if state is None:
        state = fold(None, ev.Stamped(1, 0.0, 1, ev.RunStarted(RUN, JOB)))
    for index, event in enumerate(events):
        state = fold(state, ev.Stamped(state.seq + 1, at + index, 1, event))
    return state


def launch(incarnation: Incarnation = R1, node: NodeName = N1) -> ev.Intended:
    return ev.Intended(Launch(incarnation, tag_of(RUN, incarnation), POOL, node, WHY))


def fence(incarnation: Incarnation = R1, rung: Rung = Rung.IN_PLACE) -> ev.Decided:
    return ev.Decided(Fence(incarnation, rung, WHY))


def pool(*nodes: NodeName, state: AllocationState = AllocationState.RUNNING) -> Sequence[ev.Event]:
    ask = AllocationRequest(POOL, len(nodes), NODE, 3600.0)
    changed = ev.AllocationChanged(POOL, AllocationStatus(state, "7", nodes))
    return ev.Intended(Request(ask, WHY)), ev.IntentSettled(POOL, True), changed


RUNNING = (
    *pool(N1, N2),
    launch(),
    ev.Admitted(R1, tag_of(RUN, R1), N1, 5),
    ev.Joined(R1, N1, "host", 6, "tcp://l", "tcp://s"),
    ev.PhaseEntered(R1, "generate"),
    ev.VersionAvailable(R1, Version(3, 1)),
)


def test_new_run_wants_every_replica_and_none_is_current() -> None:
    state = state_after()
    assert {r.id: (r.status, r.incarnation_number) for r in state.workers} == dict.fromkeys(
        (STORE, REWARD, TRAINER, *ROLLOUTS), (Status.WANTED, 0)
    )
    assert not state.is_current(Incarnation(TRAINER, 0))


def test_journal_without_run_started_is_rejected() -> None:
    with pytest.raises(ValueError, match="starts with ManagerStarted, not with RunStarted"):
        fold(None, ev.Stamped(1, 0.0, 1, ev.ManagerStarted("h", 1)))


def test_incarnation_is_launching_then_starting_then_joined_and_settles_its_launch() -> None:
    state = state_after(*RUNNING[:4])
    assert (state.replicas[R1.replica].status, list(state.intents)) == (Status.LAUNCHING, [tag_of(RUN, R1)])
    state = state_after(RUNNING[4], state=state)
    assert (state.replicas[R1.replica].status, state.intents) == (Status.STARTING, {})
    state = state_after(*RUNNING[5:], state=state)
    replica = state.replicas[R1.replica]
    assert (replica.status, replica.phase, replica.weight_version) == (Status.JOINED, "generate", Version(3, 1))
    assert (replica.listen_address, replica.weight_address, replica.pid, replica.node) == ("tcp://l", "tcp://s", 6, N1)


def test_join_settles_a_launch_whose_admission_was_missed() -> None:
    agent = Incarnation(ReplicaId("agent/n1"), 1)
    state = state_after(*pool(N1), launch(), launch(agent))
    assert len(state.intents) == 2
    state = state_after(ev.Joined(R1, N1, "host", 6), ev.AgentJoined(agent, N1, "host", 5), state=state)
    assert state.intents == {}
    state = state_after(ev.IntentSettled(tag_of(RUN, R1), False, "its step never appeared"), state=state)
    assert (state.replicas[R1.replica].status, state.replicas[R1.replica].failures) == (Status.JOINED, ())


def test_admitted_replica_is_not_reset_by_a_poll_that_missed_its_step() -> None:
    intents = state_after(*pool(N1), launch()).intents
    # a state that an older manager may have left
    state = msgspec.structs.replace(state_after(*RUNNING), intents=intents)
    for unheard in (True, False):
        missed = state_after(ev.IntentSettled(tag_of(RUN, R1), False, "its step never appeared", unheard), state=state)
        assert (missed.replicas, missed.intents) == (state.replicas, {})


def test_run_walltime_counts_from_the_first_running_pool() -> None:
    state = state_after(*pool(state=AllocationState.PENDING))
    assert (state.running_since, state.ends_at) == (None, float("inf"))
    state = state_after(
        ev.AllocationChanged(POOL, AllocationStatus(AllocationState.RUNNING, "7", (N1,))), state=state, at=50.0
    )
    assert (state.running_since, state.ends_at) == (50.0, 50.0 + JOB.walltime)
    state = state_after(ev.AllocationChanged(POOL, None), *pool(N2), state=state, at=90.0)
    assert state.running_since == 50.0


def test_allocation_granted_after_it_was_given_up_starts_no_walltime() -> None:
    state = state_after(ev.AllocationChanged(POOL, AllocationStatus(AllocationState.RUNNING, "7", (N1,))))
    assert (list(state.allocations), state.running_since) == ([POOL], None)


@pytest.mark.parametrize("observed", [None, AllocationStatus(AllocationState.ENDED, "7", (), "CANCELLED")])
def test_allocation_gone_before_it_ran_counts_as_undelivered_request(observed: AllocationStatus | None) -> None:
    gone = state_after(*pool(state=AllocationState.PENDING), ev.AllocationChanged(POOL, observed))
    assert [(r.tag, r.undelivered) for r in gone.rejected_requests] == [(POOL, True)]
    assert state_after(*RUNNING, ev.AllocationChanged(POOL, observed)).rejected_requests == ()
    given_back = (*pool(state=AllocationState.PENDING), ev.Intended(Release(POOL, WHY)))
    assert state_after(*given_back, ev.AllocationChanged(POOL, observed)).rejected_requests == ()


def test_new_incarnation_inherits_no_reports_of_the_old_one() -> None:
    state = state_after(*RUNNING, fence(), launch(Incarnation(R1.replica, 2), N2))
    replica = state.replicas[R1.replica]
    assert (replica.incarnation_number, replica.node, replica.status) == (2, N2, Status.LAUNCHING)
    assert (replica.weight_version, replica.phase, replica.listen_address, replica.weight_address, replica.pid) == (
        None,
        "",
        None,
        None,
        None,
    )


LATE: tuple[ev.Event, ...] = (
    ev.Admitted(R1, tag_of(RUN, R1), N3, 9),
    ev.Joined(R1, N3, "other", 9, "tcp://x", "tcp://x"),
    ev.PhaseEntered(R1, "generate"),
    ev.VersionAvailable(R1, Version(9, 9)),
    found(R1, "exit_record", 20.0),
    fence(R1, Rung.IN_PLACE),
    ev.Intended(StopStep(tag_of(RUN, R1), R1, 1.0, WHY)),
)


@pytest.mark.parametrize("late", LATE, ids=lambda event: type(event).__name__)
@pytest.mark.parametrize("launched", [False, True], ids=["wanted again", "launched again"])
def test_late_event_of_a_fenced_incarnation_changes_nothing(late: ev.Event, launched: bool) -> None:
    before = state_after(*RUNNING, fence(), *([launch(Incarnation(R1.replica, 2), N2)] if launched else []))
    after = state_after(late, state=before, at=50.0)
    assert after.replicas == before.replicas
    assert after.findings == before.findings


def test_late_end_of_a_fenced_incarnation_only_settles_its_orphan_step() -> None:
    before = state_after(*RUNNING, fence(), launch(Incarnation(R1.replica, 2), N2))
    assert before.orphan_steps == {tag_of(RUN, R1): OrphanStep(R1, N1, POOL, 18.0)}
    after = state_after(ev.StepEnded(R1, tag_of(RUN, R1), 0, None, ExitReason.STOPPED), state=before)
    assert after.orphan_steps == {}
    assert after.replicas == before.replicas


def test_fenced_incarnation_that_had_ended_leaves_no_orphan() -> None:
    state = state_after(*RUNNING, ev.StepEnded(R1, tag_of(RUN, R1), 1, None, ExitReason.EXITED), fence())
    assert state.orphan_steps == {}
    assert state.replicas[R1.replica].status is Status.WANTED


def test_stopped_step_is_an_orphan_until_its_end_or_stop_is_certain() -> None:
    stop = ev.Intended(StopStep(tag_of(RUN, R1), R1, 1.0, WHY))
    state = state_after(*RUNNING, fence(), stop)
    assert state.orphan_steps[tag_of(RUN, R1)].stop_requested
    done = state_after(ev.IntentSettled(f"{tag_of(RUN, R1)}!stop", True), state=state)
    assert (done.orphan_steps, done.intents) == ({}, {})
    refused = state_after(ev.IntentSettled(f"{tag_of(RUN, R1)}!stop", False, "no"), state=state, at=50.0)
    orphan = refused.orphan_steps[tag_of(RUN, R1)]
    assert (orphan.stop_requested, orphan.not_before, refused.intents) == (False, 50.0 + RETRY_PAUSE_S, {})


def test_current_replica_that_is_stopped_is_retired() -> None:
    state = state_after(*RUNNING, ev.Intended(StopStep(tag_of(RUN, R1), R1, 1.0, WHY)))
    assert state.replicas[R1.replica].status is Status.RETIRED
    assert state.orphan_steps[tag_of(RUN, R1)].stop_requested


def test_rejected_launch_keeps_replica_wanted_and_doubles_the_backoff() -> None:
    state, pauses = state_after(*pool(N1)), []
    for number in (1, 2, 3, 4):
        incarnation = Incarnation(R1.replica, number)
        state = state_after(
            launch(incarnation), ev.IntentSettled(tag_of(RUN, incarnation), False, "no"), state=state, at=20.0
        )
        replica = state.replicas[R1.replica]
        assert (replica.status, replica.incarnation_number, state.intents) == (Status.WANTED, number, {})
        pauses.append(replica.not_before - replica.since)
    assert pauses == [0.0, 1.0, 2.0, 4.0]


def test_failures_older_than_the_window_are_dropped_with_the_next_one() -> None:
    state = state_after(launch(), fence(), state=state_after(*pool(N1)), at=20.0)
    state = state_after(launch(Incarnation(R1.replica, 2)), fence(Incarnation(R1.replica, 2)), state=state, at=125.0)
    assert [start.at for start in state.replicas[R1.replica].failures] == [126.0]
    assert state.replicas[R1.replica].not_before == 126.0


def test_rejected_launch_of_a_fenced_incarnation_is_not_a_second_failure() -> None:
    state = state_after(
        *pool(N1), launch(), fence(), ev.IntentSettled(tag_of(RUN, R1), False, "its step never appeared")
    )
    assert len(state.replicas[R1.replica].failures) == 1
    assert state.intents == {}


def test_undelivered_launch_is_not_a_failure_and_is_repeated_on_the_same_node() -> None:
    state = state_after(
        *pool(N1), launch(), ev.IntentSettled(tag_of(RUN, R1), False, "its step never appeared", undelivered=True)
    )
    replica = state.replicas[R1.replica]
    assert (replica.status, replica.incarnation_number, replica.failures, replica.preferred_node) == (
        Status.WANTED,
        1,
        (),
        N1,
    )


def test_launch_is_settled_by_a_certain_stop_or_the_end_of_its_allocation() -> None:
    stop = StopStep(tag_of(RUN, R1), R1, 1.0, WHY)
    launched = state_after(*pool(N1), launch())
    assert state_after(ev.Intended(stop), ev.IntentSettled(stop.tag, True), state=launched).intents == {}
    assert state_after(ev.AllocationChanged(POOL, None), state=launched).intents == {}


def test_incarnation_fenced_after_its_allocation_ended_leaves_no_orphan() -> None:
    assert state_after(*RUNNING, ev.AllocationChanged(POOL, None), fence()).orphan_steps == {}


def test_only_a_restart_in_place_prefers_the_old_node() -> None:
    assert state_after(*RUNNING, fence(rung=Rung.IN_PLACE)).replicas[R1.replica].preferred_node == N1
    assert state_after(*RUNNING, fence(rung=Rung.SPARE)).replicas[R1.replica].preferred_node is None


def test_degrading_retires_current_and_wanted_replicas() -> None:
    assert state_after(*RUNNING, fence(rung=Rung.DEGRADED)).replicas[R1.replica].status is Status.RETIRED
    wanted = state_after(*RUNNING, fence(), fence(rung=Rung.DEGRADED))
    assert wanted.replicas[R1.replica].status is Status.RETIRED


def test_only_restarts_count_as_recoveries() -> None:
    assert state_after(*RUNNING, fence()).recoveries == 1
    assert state_after(*RUNNING, fence(rung=Rung.DEGRADED)).recoveries == 0


def test_rejected_request_leaves_no_allocation_and_is_kept_for_the_window() -> None:
    state = state_after(pool(N1)[0], ev.IntentSettled(POOL, False, "no such partition"))
    assert (state.allocations, state.intents) == ({}, {})
    assert [(r.tag, r.detail) for r in state.rejected_requests] == [(POOL, "no such partition")]
    again = state_after(pool(N1)[0], ev.IntentSettled(POOL, False, "still none"), state=state, at=200.0)
    assert [r.detail for r in again.rejected_requests] == ["still none"]


def test_nodes_enter_and_leave_with_their_allocation() -> None:
    state = state_after(*pool(N1, N2))
    assert {name: node.allocation for name, node in state.nodes.items()} == {N1: POOL, N2: POOL}
    shrunk = state_after(ev.AllocationChanged(POOL, AllocationStatus(AllocationState.RUNNING, "7", (N1,))), state=state)
    assert list(shrunk.nodes) == [N1]


@pytest.mark.parametrize("observed", [None, AllocationStatus(AllocationState.ENDED, "7", (N1, N2), "TIMEOUT")])
def test_lost_allocation_removes_its_nodes_and_orphan_steps(observed: AllocationStatus | None) -> None:
    state = state_after(*RUNNING, fence(), ev.AllocationChanged(POOL, observed))
    assert (state.allocations, state.nodes, state.orphan_steps) == ({}, {}, {})


def test_excluded_node_stays_recorded_after_it_left_and_when_it_returns() -> None:
    state = state_after(*pool(N1, N2), ev.Decided(Exclude(N1, WHY)), ev.AllocationChanged(POOL, None))
    assert (list(state.nodes), state.nodes[N1].allocation, state.nodes[N1].excluded) == ([N1], "", "because")
    again = state_after(*pool(N1), state=state)
    assert (again.nodes[N1].allocation, again.nodes[N1].excluded) == (POOL, "because")


def test_node_status_is_kept_for_own_nodes_only() -> None:
    down = NodeStatus(NodeState.DOWN, "DOWN*")
    state = state_after(*pool(N1), ev.NodeChanged(N1, down), ev.NodeChanged(N3, down))
    assert {name: node.status for name, node in state.nodes.items()} == {N1: down}


def test_findings_stand_until_cleared_or_until_their_incarnation_is_fenced() -> None:
    state = state_after(*RUNNING, found(R1, "worker_silence", 20.0), lost(N2, 20.0))
    assert list(state.findings) == [f"worker_silence:{R1}", "node_lost:n2"]
    assert list(state_after(fence(), state=state).findings) == ["node_lost:n2"]
    ok = msgspec.structs.replace(lost(N2, 20.0).finding, verdict=Verdict.OK)
    assert list(state_after(ev.FindingChanged(ok), state=state).findings) == [f"worker_silence:{R1}"]


@pytest.mark.parametrize("verdict", [Verdict.OK, Verdict.UNKNOWN])
def test_unknown_and_ok_are_not_stored_as_findings(verdict: Verdict) -> None:
    finding = msgspec.structs.replace(found(R1, "worker_silence", 20.0).finding, verdict=verdict)
    assert state_after(*RUNNING, ev.FindingChanged(finding)).findings == {}


def test_refused_release_can_be_repeated_after_a_pause() -> None:
    state = state_after(*pool(N1), ev.Intended(Release(POOL, WHY)))
    assert state.allocations[POOL].releasing
    state = state_after(ev.IntentSettled(f"{POOL}!release", False, "denied"), state=state, at=30.0)
    assert not state.allocations[POOL].releasing
    assert state.allocations[POOL].not_before == 30.0 + RETRY_PAUSE_S


def test_result_after_the_end_of_its_allocation_changes_nothing() -> None:
    state = state_after(*pool(N1), ev.Intended(Release(POOL, WHY)), ev.AllocationChanged(POOL, None))
    for ok in (True, False):
        assert state_after(ev.IntentSettled(f"{POOL}!release", ok), state=state).intents == {}


def test_commits_are_ordered_and_a_repeated_one_counts_once() -> None:
    committed = [ev.StepCommitted(R1, step, {"reward": step / 100}) for step in (1, 2, 2, 1, 3)]
    state = state_after(*RUNNING, *committed)
    assert (state.step, state.metrics) == (3, {"reward": 0.03})
    assert state.rewards.last == {1: 0.01, 2: 0.02, 3: 0.03}


def test_newest_step_reported_first_hides_none_of_the_earlier_steps() -> None:
    commits = [ev.StepCommitted(R1, 5), *(ev.StepCommitted(R1, step, {"reward": step / 10}) for step in (2, 3, 4, 5))]
    state = state_after(*RUNNING, ev.StepCommitted(R1, 1, {"reward": 0.1}), *commits)
    assert (state.step, state.metrics) == (5, {"reward": 0.5})
    assert state.rewards.last == {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4, 5: 0.5}
    assert state_after(*commits[1:], state=state).rewards == state.rewards


def test_planned_fault_is_triggered_by_its_intent_and_settled_by_the_agents_report() -> None:
    perform = InjectFault(Fault("f0", FaultKind.KILL, "rollout/0", FaultTrigger(step=1)), tag_of(RUN, R1), N1, WHY)
    state = state_after(*RUNNING, ev.Intended(perform))
    assert (state.triggered_faults, list(state.intents)) == (("f0",), ["fault:f0"])
    assert state_after(ev.FaultInjected("f0", R1, True), state=state).intents == {}


def test_requested_fault_is_kept_until_it_is_triggered_or_rejected() -> None:
    fault = Fault("i1", FaultKind.KILL, "rollout/0", FaultTrigger(step=9), by="ada")
    state = state_after(*RUNNING, ev.FaultRequested(fault, "ada", "c1"))
    assert (state.requested_faults, state.handled_commands, state.triggered_faults) == ((fault,), ("c1",), ())
    for then in (
        ev.Intended(InjectFault(fault, tag_of(RUN, R1), N1, WHY, R1)),
        ev.FaultInjected("i1", None, False, "no"),
    ):
        after = state_after(then, state=state)
        assert (after.requested_faults, after.triggered_faults) == ((), ("i1",))


@pytest.mark.parametrize(
    ("kind", "hit"), [(FaultKind.KILL, {"rollout/0"}), (FaultKind.CRASH, {"rollout/0", "agent/n1"})]
)
def test_failure_of_a_fault_target_is_marked_as_injected(kind: FaultKind, hit: set[str]) -> None:
    agent = Incarnation(ReplicaId("agent/n1"), 1)
    fault = InjectFault(
        Fault("f0", kind, "rollout/0"), tag_of(RUN, R1), N1, WHY, None if kind is FaultKind.CRASH else R1
    )
    before = state_after(*RUNNING, ev.Intended(Launch(agent, tag_of(RUN, agent), POOL, N1, WHY)), ev.Intended(fault))
    assert {replica.id for replica in before.replicas.values() if replica.fault} == hit
    fence = ev.Decided(Fence(R1, Rung.IN_PLACE, WHY))
    assert [start.injected for start in state_after(fence, state=before).replica(R1.replica).failures] == [True]
    for cleared in (ev.FaultInjected("f0", R1, False), ev.FaultInjected("f0", R1, True, ended=True)):
        assert not any(r.fault for r in state_after(cleared, state=before).replicas.values())
    again = Launch(Incarnation(R1.replica, 2), tag_of(RUN, Incarnation(R1.replica, 2)), POOL, N1, WHY)
    assert not state_after(fence, ev.Intended(again), state=before).replica(R1.replica).fault


def test_command_is_handled_once_and_cancel_records_the_user() -> None:
    state = state_after(ev.CommandReceived("cancel", "ada", "c1"), ev.CommandReceived("unheard of", "bob", "c2"))
    assert (state.handled_commands, state.cancelled_by) == (("c1", "c2"), "ada")


def test_last_record_sets_outcome_and_end_time() -> None:
    state = state_after(ev.Decided(Finish(Outcome.COMPLETED, WHY)), ev.RunEnded(Outcome.COMPLETED, "done"))
    assert (state.finish, state.outcome, state.why, state.ended) == (
        Finish(Outcome.COMPLETED, WHY),
        Outcome.COMPLETED,
        "done",
        11.0,
    )


# ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────────────
WHOLE = AllocationRequest(
    POOL,
    2,
    NODE,
    60.0,
    node_group="a",
    further_components=(AllocationRequest(f"{RUN}.b", 1, NODE, 60.0, node_group="b"),),
)
BOTH = (POOL, f"{RUN}.b")


def test_heterogeneous_request_has_an_allocation_per_component_and_none_if_rejected() -> None:
    state = state_after(ev.Intended(Request(WHOLE, WHY)))
    assert tuple(state.allocations) == BOTH
    assert (state.requests_made, state.requested_since) == ({"a": 1, "b": 1}, 10.0)
    assert open_requests(state) == dict.fromkeys(BOTH, POOL)
    assert open_requests(state_after(ev.IntentSettled(POOL, True), state=state)) == {}
    refused = state_after(ev.IntentSettled(POOL, False, "no"), state=state)
    assert (refused.allocations, refused.intents) == ({}, {})
    assert [(rejection.node_group, rejection.detail) for rejection in refused.rejected_requests] == [("a", "no")]


def test_node_keeps_its_group_after_it_left() -> None:
    status = AllocationStatus(AllocationState.RUNNING, "7+1", (N1,))
    state = state_after(
        ev.Intended(Request(WHOLE, WHY)), ev.AllocationChanged(f"{RUN}.b", status), ev.Decided(Exclude(N1, WHY))
    )
    assert state.nodes[N1].node_group == "b"
    assert state_after(ev.AllocationChanged(f"{RUN}.b", None), state=state).nodes[N1].node_group == "b"


def test_allocation_walltime_counts_from_running_and_restarts_when_requeued() -> None:
    running, queued = (
        AllocationStatus(allocation_state, "7", ())
        for allocation_state in (AllocationState.RUNNING, AllocationState.PENDING)
    )
    state = state_after(*pool(state=AllocationState.PENDING))
    assert state.allocations[POOL].ends_at == float("inf")
    state = state_after(ev.AllocationChanged(POOL, running), state=state, at=50.0)
    state = state_after(
        ev.AllocationChanged(POOL, AllocationStatus(AllocationState.RUNNING, "7", (N1,))), state=state, at=60.0
    )
    assert state.allocations[POOL].ends_at == 50.0 + 3600.0
    state = state_after(ev.AllocationChanged(POOL, queued), ev.AllocationChanged(POOL, running), state=state, at=90.0)
    assert state.allocations[POOL].ends_at == 91.0 + 3600.0


def test_release_of_an_unsatisfiable_request_counts_as_a_rejection() -> None:
    for hopeless in ("", "BadConstraints"):
        status = AllocationStatus(AllocationState.PENDING, "7", (), "BadConstraints", hopeless)
        asked = (ev.Intended(Request(WHOLE, WHY)), ev.IntentSettled(POOL, True), ev.AllocationChanged(POOL, status))
        state = state_after(*asked, ev.Intended(Release(POOL, WHY)))
        assert [rejection.detail for rejection in state.rejected_requests] == (
            [f"{POOL}: BadConstraints"] if hopeless else []
        )
        assert state_after(ev.AllocationChanged(POOL, None), state=state).rejected_requests == state.rejected_requests


def test_moved_replica_has_no_failure_and_prefers_its_target_node() -> None:
    state = state_after(*RUNNING, ev.Decided(Fence(R1, Rung.REPLACEMENT, WHY, target_node=N2, charged=False)))
    replica = state.replicas[R1.replica]
    assert (replica.status, replica.preferred_node, replica.failures, state.recoveries) == (Status.WANTED, N2, (), 0)
    assert replica.uncharged_restart == UnchargedRestart(state.at, N1, "; ".join(WHY.evidence))
    assert list(state.orphan_steps) == [tag_of(RUN, R1)]


# ── failed starts and completed commands ─────────────────────────────────────────────────────────────────────────────
def test_only_own_failures_before_any_join_count_as_failed_starts() -> None:
    alone = state_after(*pool(N1, N2), launch(), found(R1, "exit_record", 20.0), fence())
    assert alone.replicas[R1.replica].failed_starts == 1
    with_its_node = state_after(*pool(N1, N2), launch(), lost(N1, 20.0), fence())
    assert with_its_node.replicas[R1.replica].failed_starts == 0
    later = state_after(*RUNNING, found(R1, "exit_record", 20.0), fence())
    assert (later.replicas[R1.replica].ever_joined, later.replicas[R1.replica].failed_starts) == (True, 0)


@pytest.mark.parametrize(
    ("reason", "counts"),
    [
        (RejectReason.REFUSED, 0),
        (RejectReason.NEVER_APPEARED, 1),
        (RejectReason.EXITED_AT_ONCE, 1),
        (RejectReason.NOT_STARTED, 1),
    ],
)
def test_rejected_launch_counts_as_failed_start_if_the_step_ran_or_should_have(
    reason: RejectReason, counts: int
) -> None:
    state = state_after(*pool(N1), launch(), ev.IntentSettled(tag_of(RUN, R1), False, "said", reason=reason))
    assert state.replicas[R1.replica].failed_starts == counts
    unheard = state_after(*pool(N1), launch(), ev.IntentSettled(tag_of(RUN, R1), False, "said", True, reason))
    assert unheard.replicas[R1.replica].failed_starts == 0


SHARD = Incarnation(ReplicaId("shard/0"), 1)


@pytest.mark.parametrize(
    ("code", "reason", "service", "status"),
    [
        (0, ExitReason.EXITED, False, Status.COMPLETED),
        (0, ExitReason.EXITED, True, Status.JOINED),
        (0, ExitReason.STOPPED, False, Status.JOINED),
        (1, ExitReason.EXITED, False, Status.JOINED),
        (None, ExitReason.SIGNALED, False, Status.JOINED),
    ],
)
def test_command_that_exits_with_code_0_is_completed(
    code: int | None, reason: ExitReason, service: bool, status: Status
) -> None:
    state = fold(None, ev.Stamped(1, 0.0, 1, ev.RunStarted(RUN, commands(command("shard", service=service)))))
    tag = tag_of(RUN, SHARD)
    state = state_after(*pool(N1), launch(SHARD), ev.Joined(SHARD, N1, "host", 6), state=state)
    state = state_after(ev.StepEnded(SHARD, tag, code, None, reason), state=state)
    assert (state.replicas[SHARD.replica].status, state.replicas[SHARD.replica].step) == (status, None)
    assert state.is_current(SHARD) is (status is Status.JOINED)


def test_agent_report_is_stored_with_its_node() -> None:
    agent = Incarnation(ReplicaId("agent/n1"), 1)
    state = state_after(*pool(N1), launch(agent))
    assert state.nodes[N1].probe_error is None
    assert state_after(ev.AgentJoined(agent, N1, "host", 5), state=state).nodes[N1].probe_error == ""
    assert (
        state_after(ev.AgentJoined(agent, N1, "host", 5, "no torch"), state=state).nodes[N1].probe_error == "no torch"
    )


# ── events in any order ──────────────────────────────────────────────────────────────────────────────────────────────
_replicas = st.sampled_from([*ROLLOUTS, TRAINER, *map(ReplicaId, ("agent/n1", "standby/n1", "ghost/7"))])
_incarnations = st.builds(Incarnation, _replicas, st.integers(0, 3))
_nodes = st.sampled_from([N1, N2, N3])
_allocations = st.sampled_from([POOL, f"{RUN}.more-1"])
_requests = st.builds(
    AllocationRequest,
    _allocations,
    st.integers(1, 2),
    st.just(NODE),
    st.just(60.0),
    further_components=st.sampled_from([(), (AllocationRequest(f"{RUN}.other", 1, NODE, 60.0, node_group="other"),)]),
)
_whys = st.builds(Why, st.sampled_from([(), ("because",)]), st.sampled_from([None, *Rung]))
_moments = st.builds(FaultTrigger, st.integers(0, 2))
_faults = st.builds(Fault, st.sampled_from(["f0", "f1"]), st.sampled_from(FaultKind), _replicas, _moments)
_steps = _incarnations.map(lambda incarnation: tag_of(RUN, incarnation))
_outside = st.one_of(
    st.builds(Request, _requests, _whys),
    st.builds(Release, _allocations, _whys),
    _incarnations.flatmap(
        lambda incarnation: st.builds(
            Launch, st.just(incarnation), st.just(tag_of(RUN, incarnation)), _allocations, _nodes, _whys
        )
    ),
    _incarnations.flatmap(
        lambda standby: st.builds(
            Launch, _incarnations, st.just(tag_of(RUN, standby)), _allocations, _nodes, _whys, st.just(standby)
        )
    ),
    st.builds(Drain, _nodes, st.just("rrl:small-1:gpu"), _whys),
    st.builds(Undrain, _nodes, st.just("rrl:small-1:gpu"), _whys),
    st.builds(Shrink, _allocations, st.lists(_nodes, max_size=2).map(tuple), _whys),
    _incarnations.flatmap(
        lambda incarnation: st.builds(
            StopStep, st.just(tag_of(RUN, incarnation)), st.just(incarnation), st.just(1.0), _whys
        )
    ),
    st.builds(InjectFault, _faults, _steps, _nodes, _whys, st.none() | _incarnations),
)
_fences = st.builds(Fence, _incarnations, st.sampled_from(Rung), _whys, st.none() | _nodes, st.booleans())
_decisions = st.one_of(
    _fences,
    st.builds(Exclude, _nodes, _whys),
    st.builds(Readmit, _nodes, _whys),
    st.builds(RestartAll, _whys, st.lists(_fences, max_size=2).map(tuple)),
    st.builds(Finish, st.sampled_from(Outcome), _whys),
)
_statuses = st.builds(
    AllocationStatus,
    st.sampled_from(AllocationState),
    st.just("7"),
    st.lists(_nodes, unique=True).map(tuple),
    unsatisfiable_reason=st.sampled_from(["", "never"]),
)
_evidence = st.just((Evidence("step", "it ended", 1.0),))
_findings = st.one_of(
    st.builds(
        Finding,
        st.just("exit_record"),
        st.sampled_from(Verdict),
        st.just(Cause.PROCESS),
        st.just(Remedy.RESTART),
        st.just(1.0),
        _evidence,
        incarnation=_incarnations,
    ),
    st.builds(
        Finding,
        st.just("node_lost"),
        st.sampled_from(Verdict),
        st.just(Cause.NODE),
        st.just(Remedy.EXCLUDE),
        st.just(1.0),
        _evidence,
        node=_nodes,
    ),
)
_tags = st.one_of(
    _allocations,
    _steps,
    _allocations.map(lambda tag: f"{tag}!release"),
    _steps.map(lambda tag: f"{tag}!stop"),
    st.sampled_from(["fault:f0", "fault:f1"]),
)
_versions = st.builds(Version, st.integers(0, 3), st.integers(0, 3))
_times = st.lists(
    st.builds(PhaseTime, st.sampled_from(["train", "wait_data"]), st.sampled_from(["", "rollouts"]), st.integers(0, 9))
).map(tuple)
_BY_TYPE: dict[type, st.SearchStrategy[ev.Event]] = {
    ev.ManagerStarted: st.builds(ev.ManagerStarted, st.just("host"), st.just(1)),
    ev.ManagerStopped: st.builds(ev.ManagerStopped, st.just("SIGTERM")),
    ev.Intended: st.builds(ev.Intended, _outside),
    ev.IntentSettled: st.builds(
        ev.IntentSettled,
        _tags,
        st.booleans(),
        st.just("said"),
        st.booleans(),
        st.none() | st.sampled_from(RejectReason),
    ),
    ev.Decided: st.builds(ev.Decided, _decisions),
    ev.AllocationChanged: st.builds(ev.AllocationChanged, _allocations, st.none() | _statuses),
    ev.NodeChanged: st.builds(ev.NodeChanged, _nodes, st.builds(NodeStatus, st.sampled_from(NodeState))),
    ev.AgentJoined: st.builds(
        ev.AgentJoined, _incarnations, _nodes, st.just("host"), st.just(1), st.sampled_from(["", "no torch"])
    ),
    ev.Admitted: _incarnations.flatmap(
        lambda incarnation: st.builds(
            ev.Admitted, st.just(incarnation), st.just(tag_of(RUN, incarnation)), _nodes, st.just(1)
        )
    ),
    ev.Joined: st.builds(ev.Joined, _incarnations, _nodes, st.just("host"), st.just(1), st.none() | st.just("tcp://x")),
    ev.StepEnded: _incarnations.flatmap(
        lambda incarnation: st.builds(
            ev.StepEnded,
            st.just(incarnation),
            st.just(tag_of(RUN, incarnation)),
            st.none() | st.just(1),
            st.none() | st.just(9),
            st.sampled_from(ExitReason),
        )
    ),
    ev.PhaseEntered: st.builds(
        ev.PhaseEntered, _incarnations, st.sampled_from(["generate", "other"]), st.none() | _replicas
    ),
    ev.NoteChanged: st.builds(ev.NoteChanged, _incarnations, st.sampled_from(["", "the trainer waits for group 3"])),
    ev.OutsideWaitChanged: st.builds(
        ev.OutsideWaitChanged, _incarnations, st.none() | st.just(OutsideWait(OutsideKind.AGENT, 3, 60.0))
    ),
    ev.FirstWorkDone: st.builds(ev.FirstWorkDone, _incarnations),
    ev.VersionAvailable: st.builds(ev.VersionAvailable, _incarnations, _versions),
    ev.WeightsRecorded: st.builds(
        ev.WeightsRecorded,
        st.lists(st.tuples(_incarnations, _versions)).map(tuple),
        st.lists(st.builds(WeightTraffic, st.integers(0, 9), st.integers(0, 9))).map(tuple),
    ),
    ev.StepCommitted: st.builds(
        ev.StepCommitted, _incarnations, st.integers(0, 3), st.just({"reward": 0.5, "token_age_p50": 3.0}) | st.just({})
    ),
    ev.FindingChanged: st.builds(ev.FindingChanged, _findings),
    ev.FaultInjected: st.builds(
        ev.FaultInjected,
        st.sampled_from(["f0", "f1"]),
        st.none() | _incarnations,
        st.booleans(),
        st.just("said"),
        ended=st.booleans(),
        unknown=st.booleans(),
    ),
    ev.CommandReceived: st.builds(
        ev.CommandReceived,
        st.sampled_from(["cancel", "restart", "drain", "undrain", "other"]),
        st.just("me"),
        st.just("c1"),
        st.sampled_from(["rollout/0", "trainer/0", "n1", ""]),
    ),
    ev.FaultRequested: st.builds(ev.FaultRequested, _faults, st.just("me"), st.sampled_from(["c1", "c2"])),
    ev.Resumed: st.builds(ev.Resumed, st.just("me"), st.sampled_from(["c1", "c2"]), st.just(JOB)),
    ev.TokensCounted: st.builds(ev.TokensCounted, st.integers(0, 9), st.booleans()),
    ev.BaselinesLearned: st.builds(
        ev.BaselinesLearned,
        st.just({"trainer": RoleBaseline({"train": DurationStats(5, 60.0, 80.0)}, uses_tensor_cores=True)}),
    ),
    ev.ClocksRecorded: st.builds(
        ev.ClocksRecorded,
        st.lists(st.tuples(_incarnations, st.builds(ClockReading, st.integers(0, 3), st.integers(0, 9), _times))).map(
            tuple
        ),
    ),
    ev.ClusterUnknown: st.builds(ev.ClusterUnknown, st.sampled_from(["", "squeue: timed out"]), st.just(7.0)),
    ev.GpuUseRecorded: st.builds(ev.GpuUseRecorded, st.just({NodeName("n1"): GpuUse(8, 0.5, 2**30, 2**33)})),
    ev.EttrEstimated: st.builds(ev.EttrEstimated, st.just(0.9)),
    ev.Evaluated: st.builds(ev.Evaluated, _incarnations, st.integers(0, 9), st.just({"reward": 0.5})),
    ev.ValuesLogged: st.builds(ev.ValuesLogged, _incarnations, st.just({"accuracy": 0.5})),
    ev.StacksCollected: st.builds(
        ev.StacksCollected, _incarnations, st.just(("a line",)), st.tuples(_incarnations), st.just("stacks/x.txt")
    ),
    ev.RunEnded: st.builds(ev.RunEnded, st.sampled_from(Outcome), st.just("over")),
}
EVENTS = st.one_of(*_BY_TYPE.values())


def test_every_event_type_is_covered_below() -> None:
    assert set(_BY_TYPE) == set(get_args(ev.Event)) - {ev.RunStarted}


@examples(50, many=1000)
@given(st.lists(EVENTS, max_size=30))
def test_fold_accepts_events_in_any_order_and_its_state_survives_both_encodings(events: list[ev.Event]) -> None:
    state = state_after(*events)
    assert state.seq == len(events) + 1
    for replica in state.replicas.values():
        assert not replica.is_current or state.is_current(replica.incarnation)
    packed, text = (encode(state, enc_hook=as_dict) for encode in (msgspec.msgpack.encode, msgspec.json.encode))
    assert msgspec.msgpack.decode(packed, type=State) == state
    assert msgspec.json.decode(text, type=State) == state


@examples(100, many=1000)
@given(EVENTS)
def test_every_event_survives_the_journal_encoding(event: ev.Event) -> None:
    stamped = ev.Stamped(1, 2.5, 3, event)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(stamped), type=ev.Stamped) == stamped


METRICS = (
    "reward",
    "loss",
    "tokens",
    "parts",
    "length_bias",
    "recall20",
    "long_groups",
    "longest_expected",
    "tokens_aged_0",
    "tokens_aged_" + "9" * 30,
    "token_age_p50",
    "token_age_max",
    "token_age_run_max",
    "stale_groups",
    "unscored_groups",
    "episodes_at_work",
    "episodes_finished",
    "episodes_dropped",
    "turns",
    "branches",
    "token_drift",
)


@given(st.lists(st.dictionaries(st.sampled_from(METRICS), st.floats()), max_size=4))
def test_no_metric_of_a_trainer_makes_a_state_that_the_journal_cannot_hold(metrics: list[dict[str, float]]) -> None:
    state = state_after(*RUNNING, *(ev.StepCommitted(R1, step, each) for step, each in enumerate(metrics, 1)))
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(state, enc_hook=as_dict), type=State)
    assert again.step == len(metrics)
