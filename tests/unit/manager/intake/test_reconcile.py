"""One poll of the cluster settles some of the open intents, and leaves the others open."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from rrl.cluster.base import (
    AllocationRequest,
    AllocationState,
    AllocationStatus,
    ClusterSnapshot,
    NodeState,
    NodeStatus,
    RejectReason,
)
from rrl.core.launch import tag_of
from rrl.core.types import AGENT, Incarnation, NodeName, replica_id
from rrl.health.detection.detectors.base import RECONNECT_S
from rrl.health.detection.health_monitor import HealthMonitor
from rrl.manager.intake.reconcile import (
    FAST_POLL_AFTER_REQUEST_S,
    AbsenceCounter,
    expects_change,
    has_undecided_launch,
    reconcile,
    unlisted_steps,
)
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Drain, Launch, Release, Request, Shrink, Undrain, Why
from rrl.manager.model.reducer import fold
from rrl.manager.model.state import State
from rrl.manager.planner import plan
from rrl.tests.support.manager.jobs import NODE, ROLLOUTS, RUN, job

POOL = f"{RUN}.pool"
N1, N2 = NodeName("n1"), NodeName("n2")
R1 = Incarnation(ROLLOUTS[0], 1)
STEP = tag_of(RUN, R1)
WHY = Why(("because",))
QUIET = job().limits.quiet
RUNNING = AllocationStatus(AllocationState.RUNNING, "7", (N1, N2))
PENDING = AllocationStatus(AllocationState.PENDING, "7", (), "Resources")
REQUEST = ev.Intended(Request(AllocationRequest(POOL, 2, NODE, 60.0), WHY))
LAUNCH = ev.Intended(Launch(R1, STEP, POOL, N1, WHY))
NOTHING = ClusterSnapshot(nodes={}, allocations={}, steps={})
BLIND = ClusterSnapshot(nodes=None, allocations=None, steps=None, unknown="squeue: timed out")


@pytest.fixture
def lost() -> LostNode:
    return LostNode()


@pytest.fixture
def looks() -> Polls:
    return Polls(*HELD)


class Polls:
    """A state after events at time 0, and polls of the cluster by one manager."""

    def __init__(self, *events: ev.Event) -> None:
        self.state: State | None = None
        self.misses = AbsenceCounter()
        for seq, event in enumerate((ev.RunStarted(RUN, job()), *events), 1):
            self.state = fold(self.state, ev.Stamped(seq, 0.0, 1, event))

    def poll(self, observed: ClusterSnapshot, at: float = 1.0, busy: frozenset[str] = frozenset()) -> list[ev.Event]:
        assert self.state is not None
        events = reconcile(self.state, observed, self.misses, at, busy)
        for event in events:
            self.state = fold(self.state, ev.Stamped(self.state.seq + 1, at, 1, event))
        return events


def _never_came(tag: str, detail: str) -> ev.IntentSettled:
    return ev.IntentSettled(tag, False, detail, True, RejectReason.NEVER_APPEARED)


def listed(status: AllocationStatus, **others: AllocationStatus) -> ClusterSnapshot:
    return ClusterSnapshot(nodes={}, allocations={POOL: status, **others}, steps={})


def steps(*tags: str) -> ClusterSnapshot:
    return ClusterSnapshot(nodes={}, allocations={POOL: RUNNING}, steps=dict.fromkeys(tags, N1))


HELD = (REQUEST, ev.IntentSettled(POOL, True), ev.AllocationChanged(POOL, RUNNING))


def test_unanswered_request_is_found_later_by_its_tag() -> None:
    looks = Polls(REQUEST)
    assert looks.poll(NOTHING, at=QUIET - 1) == []
    assert looks.poll(listed(PENDING), at=QUIET) == [
        ev.IntentSettled(POOL, True, "found by its tag"),
        ev.AllocationChanged(POOL, PENDING),
    ]
    assert looks.poll(listed(PENDING)) == []
    assert looks.poll(listed(RUNNING)) == [ev.AllocationChanged(POOL, RUNNING)]


def test_missing_request_is_refused_after_the_quiet_period_and_two_polls() -> None:
    looks = Polls(REQUEST)
    for at in (1.0, QUIET / 2, QUIET):
        assert looks.poll(NOTHING, at=at) == []
    assert looks.poll(NOTHING, at=QUIET + 1) == []
    assert looks.poll(NOTHING, at=QUIET + 2) == [_never_came(POOL, "never appeared in the queue")]
    assert looks.state is not None
    assert [refusal.tag for refusal in looks.state.rejected_requests] == [POOL]


def test_request_that_was_refused_for_now_is_not_missing_in_the_queue() -> None:
    refused = ev.IntentSettled(POOL, False, "AssocMaxSubmitJobLimit", reason=RejectReason.REFUSED_FOR_NOW)
    looks = Polls(REQUEST, refused)
    for at in (1.0, QUIET + 1, 3 * QUIET, 9 * QUIET):
        assert looks.poll(NOTHING, at=at) == []
    assert looks.state is not None
    assert looks.state.allocations[POOL].refused


HET = ev.Intended(
    Request(
        AllocationRequest(
            POOL, 2, NODE, 60.0, further_components=(AllocationRequest(f"{RUN}.b", 1, NODE, 60.0, node_group="b"),)
        ),
        WHY,
    )
)


def test_heterogeneous_request_is_found_by_any_of_its_components() -> None:
    looks = Polls(HET)
    assert looks.poll(NOTHING, at=QUIET - 1) == []
    component = ClusterSnapshot(nodes={}, allocations={f"{RUN}.b": PENDING}, steps={})
    assert looks.poll(component, at=QUIET) == [
        ev.IntentSettled(POOL, True, "found by its tag"),
        ev.AllocationChanged(f"{RUN}.b", PENDING),
    ]
    assert looks.poll(component, at=QUIET) == []
    assert looks.poll(component, at=2 * QUIET) == [ev.AllocationChanged(POOL, None)]
    assert looks.poll(NOTHING, at=2 * QUIET) == []
    assert looks.poll(NOTHING, at=3 * QUIET) == [ev.AllocationChanged(f"{RUN}.b", None)]


def test_heterogeneous_request_without_any_listed_component_is_settled_as_refused() -> None:
    looks = Polls(HET)
    looks.poll(NOTHING, at=QUIET + 1)
    assert looks.poll(NOTHING, at=QUIET + 2) == [_never_came(POOL, "never appeared in the queue")]
    assert looks.state is not None
    assert looks.state.allocations == {}


def test_request_whose_command_still_runs_is_not_settled_by_polls_without_it() -> None:
    looks = Polls(REQUEST)
    busy = frozenset({POOL})
    for at in (QUIET + 1, QUIET + 2, QUIET + 3):
        assert looks.poll(NOTHING, at=at, busy=busy) == []
    assert looks.poll(listed(PENDING), busy=busy) == [ev.AllocationChanged(POOL, PENDING)]


def test_ended_salloc_attempt_does_not_end_a_request_still_in_progress() -> None:
    cancelled = AllocationStatus(AllocationState.ENDED, "7", (), "CANCELLED")
    looks = Polls(REQUEST)
    busy = frozenset({POOL})
    assert looks.poll(listed(PENDING), busy=busy) == [ev.AllocationChanged(POOL, PENDING)]
    assert looks.poll(listed(cancelled), busy=busy) == []
    assert looks.poll(listed(cancelled)) == [
        ev.IntentSettled(POOL, True, "found by its tag"),
        ev.AllocationChanged(POOL, cancelled),
    ]


def test_allocation_missing_from_one_poll_is_kept(looks: Polls) -> None:
    for _ in range(5):
        assert looks.poll(NOTHING) == []
        assert looks.poll(listed(RUNNING)) == []


def test_allocation_missing_for_longer_than_the_quiet_period_is_gone(looks: Polls) -> None:
    for at in (1.0, 2.0, QUIET):
        assert looks.poll(NOTHING, at=at) == []
    assert looks.poll(NOTHING, at=QUIET + 1.0) == [ev.AllocationChanged(POOL, None)]
    assert looks.poll(NOTHING, at=QUIET + 1.0) == []


def test_released_allocation_is_gone_after_two_polls_without_it() -> None:
    looks = Polls(*HELD, ev.Intended(Release(POOL, WHY)), ev.IntentSettled(f"{POOL}!release", True))
    assert looks.poll(NOTHING) == []
    assert looks.poll(NOTHING) == [ev.AllocationChanged(POOL, None)]


def test_old_answer_with_a_pending_allocation_changes_nothing(looks: Polls) -> None:
    for at in (1.0, 2.0, QUIET):
        assert looks.poll(listed(PENDING), at=at) == []
    assert looks.poll(listed(RUNNING), at=QUIET + 1.0) == []
    assert looks.poll(listed(PENDING), at=QUIET + 2.0) == []
    assert looks.poll(listed(PENDING), at=2 * QUIET + 2.0) == [ev.AllocationChanged(POOL, PENDING)], (
        "an allocation that stays pending must count as requeued"
    )


def test_node_missing_once_is_kept_and_a_down_one_is_not() -> None:
    one = AllocationStatus(AllocationState.RUNNING, "7", (N1,))
    looks = Polls(*HELD)
    assert looks.poll(listed(one)) == []
    assert looks.poll(listed(RUNNING)) == []
    assert looks.poll(listed(one)) == []
    assert looks.poll(listed(one)) == [ev.AllocationChanged(POOL, one)]
    looks = Polls(*HELD)
    down = ClusterSnapshot(nodes={N2: NodeStatus(NodeState.DOWN, "DOWN")}, allocations={POOL: one}, steps={})
    assert looks.poll(down)[0] == ev.AllocationChanged(POOL, one), (
        "a node that is missing and down was not removed at the first poll"
    )


def test_ending_allocation_is_an_event_and_a_released_one_is_gone() -> None:
    ending = AllocationStatus(AllocationState.ENDING, "7", (N1, N2), "COMPLETING")
    looks = Polls(*HELD)
    assert looks.poll(listed(ending)) == [ev.AllocationChanged(POOL, ending)]
    assert looks.state is not None
    assert list(looks.state.allocations) == [POOL]
    assert expects_change(looks.state, HealthMonitor(), FAST_POLL_AFTER_REQUEST_S / 2), (
        "no change is expected, though the cluster will soon list the reason for the end"
    )
    looks = Polls(*HELD, ev.Intended(Release(POOL, WHY)), ev.IntentSettled(f"{POOL}!release", True))
    looks.poll(listed(ending))
    assert looks.state is not None
    assert looks.state.allocations == {}, "a released allocation is still listed while it ends"
    assert looks.poll(listed(ending)) == [], "a released allocation that is still ending counts as a new one"


def test_remaining_time_is_no_event_unless_the_end_moves(looks: Polls) -> None:

    def left(seconds: float, at: float, taken: bool = False) -> list[ev.Event]:
        return looks.poll(listed(msgspec.structs.replace(RUNNING, time_left_s=seconds, reclaimed=taken)), at)

    assert len(left(3600.0, 1.0)) == 1
    assert left(3500.0, 101.0) == left(3489.0, 110.0) == []
    assert len(left(240.0, 111.0)) == 1, "an earlier end of the allocation was not recorded"
    assert len(left(25.0, 112.0, taken=True)) == 1, "the preemption of the allocation was not recorded"
    assert looks.state is not None
    assert looks.state.allocations[POOL].ends_at == 137.0
    assert expects_change(looks.state, HealthMonitor(), 170.0), (
        "no change is expected, though the allocation ends at any moment"
    )
    assert not expects_change(looks.state, HealthMonitor(), 1000.0)


def test_suspended_allocation_is_kept_and_ends_later(looks: Polls) -> None:
    suspended = AllocationStatus(AllocationState.SUSPENDED, "7", (N1, N2), "SUSPENDED")
    looks.poll(listed(msgspec.structs.replace(RUNNING, time_left_s=100.0)), at=1.0)
    assert looks.poll(listed(suspended), at=50.0) == [ev.AllocationChanged(POOL, suspended)]
    assert looks.poll(listed(suspended), at=5000.0) == []
    looks.poll(listed(msgspec.structs.replace(RUNNING, time_left_s=51.0)), at=9000.0)
    assert looks.state is not None
    assert looks.state.allocations[POOL].ends_at == 9051.0


def test_new_manager_counts_absences_from_zero(looks: Polls) -> None:
    looks.poll(NOTHING)
    looks.misses = AbsenceCounter()
    assert looks.poll(NOTHING) == []


def test_allocation_that_the_cluster_reports_as_ended_is_gone_at_once() -> None:
    ended = AllocationStatus(AllocationState.ENDED, "7", (N1, N2), "TIMEOUT")
    looks = Polls(*HELD)
    assert looks.poll(listed(ended)) == [ev.AllocationChanged(POOL, ended)]
    assert looks.state is not None
    assert looks.state.allocations == {}
    assert looks.poll(listed(ended)) == []


def test_failed_poll_changes_nothing_and_counts_no_absence() -> None:
    looks = Polls(*HELD, LAUNCH)
    looks.poll(NOTHING)
    for at in (1.0, QUIET + 1, 10 * QUIET):
        assert looks.poll(BLIND, at=at) == []
    request = Polls(REQUEST)
    for at in (QUIET + 1, 10 * QUIET):
        assert request.poll(BLIND, at=at) == []


def test_request_granted_after_it_was_given_up_is_released() -> None:
    late = f"{RUN}.more-7"
    looks = Polls(*HELD)
    (found,) = looks.poll(listed(RUNNING, **{late: AllocationStatus(AllocationState.RUNNING, "9", (NodeName("n9"),))}))
    assert found == ev.AllocationChanged(late, AllocationStatus(AllocationState.RUNNING, "9", (NodeName("n9"),)))
    assert looks.state is not None
    assert NodeName("n9") not in looks.state.nodes
    actions = [action for action in plan(looks.state, 1.0).actions if isinstance(action, Release)]
    assert [action.allocation for action in actions] == [late]


def test_launch_with_a_listed_step_stays_open_until_its_admission() -> None:
    looks = Polls(*HELD, LAUNCH)
    for at in (1.0, QUIET + 1, 10 * QUIET):
        assert looks.poll(steps(STEP), at=at) == []


def test_launch_without_a_step_is_refused_after_the_quiet_period_and_two_polls() -> None:
    looks = Polls(*HELD, LAUNCH)
    assert looks.poll(steps(), at=QUIET) == []
    assert looks.poll(steps(), at=QUIET + 1) == []
    assert looks.poll(steps(STEP), at=QUIET + 2) == []
    assert looks.poll(steps(), at=QUIET + 3) == []
    assert looks.poll(steps(), at=QUIET + 4) == [
        ev.IntentSettled(STEP, False, "its step never appeared", reason=RejectReason.NEVER_APPEARED)
    ]


def test_launch_of_a_dead_manager_is_marked_as_undelivered() -> None:
    looks = Polls(*HELD, LAUNCH)
    assert looks.state is not None
    looks.state = fold(looks.state, ev.Stamped(99, 5.0, 2, ev.ManagerStarted("h", 2)))
    looks.poll(steps(), at=QUIET + 1)
    assert looks.poll(steps(), at=QUIET + 2) == [_never_came(STEP, "its step never appeared")]


def test_launch_whose_command_ended_is_settled_by_two_polls() -> None:
    looks = Polls(*HELD, LAUNCH)
    ended = msgspec.structs.replace(steps(), launchers_ended=frozenset({STEP}))
    assert looks.poll(ended, 1.0) == []
    (done,) = looks.poll(ended, 2.0)
    assert isinstance(done, ev.IntentSettled)
    assert (done.tag, done.ok) == (STEP, False)
    assert has_undecided_launch(Polls(*HELD, LAUNCH).state, ended)  # type: ignore[arg-type]
    assert not has_undecided_launch(looks.state, ended), "a settled launch counts as undecided"  # type: ignore[arg-type]


def test_launch_whose_step_is_listed_stays_open_after_its_command_has_ended() -> None:
    looks = Polls(*HELD, LAUNCH)
    ended = msgspec.structs.replace(steps(STEP), launchers_ended=frozenset({STEP}))
    assert [looks.poll(ended, at) for at in (1.0, 2.0, 3.0)] == [[], [], []]


def test_launch_whose_command_still_runs_is_not_settled_by_polls_without_it() -> None:
    looks = Polls(*HELD, LAUNCH)
    for at in (QUIET + 1, QUIET + 2, QUIET + 3):
        assert looks.poll(steps(), at=at, busy=frozenset({STEP})) == []


def test_changed_status_is_an_event_for_nodes_of_the_run_only(looks: Polls) -> None:
    down = NodeStatus(NodeState.DOWN, "DOWN*")
    observed = ClusterSnapshot(nodes={N1: down, NodeName("n9"): down}, allocations={POOL: RUNNING}, steps={})
    assert looks.poll(observed) == [ev.NodeChanged(N1, down)]
    assert looks.poll(observed) == []


def test_allocations_of_other_runs_are_ignored() -> None:
    assert Polls(*HELD).poll(listed(RUNNING, other=PENDING)) == []


@pytest.mark.parametrize(
    ("events", "soon", "later"),
    [
        ((), False, False),
        ((REQUEST,), True, True),
        ((REQUEST, ev.IntentSettled(POOL, True)), True, False),
        ((REQUEST, ev.IntentSettled(POOL, True), ev.AllocationChanged(POOL, PENDING)), True, False),
        (HELD, False, False),
        ((*HELD, ev.Intended(Release(POOL, WHY))), True, True),
    ],
    ids=["nothing", "asked", "answered", "pending", "held", "given back"],
)
def test_cluster_is_polled_faster_while_a_change_is_expected(
    events: tuple[ev.Event, ...], soon: bool, later: bool
) -> None:
    """While an allocation waits in the queue, the cluster is polled faster for at most a minute."""
    state = Polls(*events).state
    assert state is not None
    assert (
        expects_change(state, HealthMonitor(), FAST_POLL_AFTER_REQUEST_S - 1.0),
        expects_change(state, HealthMonitor(), FAST_POLL_AFTER_REQUEST_S),
    ) == (soon, later)


OURS = "rrl:small-1:gpu: xid"
DRAINED = NodeStatus(NodeState.DRAINING, f"IDLE+DRAIN: {OURS}", OURS)


@pytest.mark.parametrize(
    ("action", "observed", "so"),
    [
        (Drain(N1, OURS, WHY), DRAINED, True),
        (Drain(N1, OURS, WHY), NodeStatus(NodeState.DRAINING, "IDLE+DRAIN: bad fan", "bad fan"), False),
        (Drain(N1, OURS, WHY), NodeStatus(NodeState.UP, f"IDLE: {OURS}", OURS), False),  # 24.11 keeps old reasons
        (Undrain(N1, OURS, WHY), DRAINED, False),
        (Undrain(N1, OURS, WHY), NodeStatus(NodeState.UP, f"IDLE: {OURS}", OURS), True),
        (Undrain(N1, OURS, WHY), NodeStatus(NodeState.UNKNOWN, "not known to Slurm"), False),
    ],
)
def test_drain_with_a_lost_reply_is_settled_by_the_nodes_status(
    action: Drain | Undrain, observed: NodeStatus, so: bool
) -> None:
    looks = Polls(*HELD, ev.Intended(action))
    events = looks.poll(
        ClusterSnapshot(nodes={N1: observed}, allocations=None, steps=None), busy=frozenset({action.tag})
    )
    assert [event for event in events if isinstance(event, ev.IntentSettled)] == [
        ev.IntentSettled(action.tag, True, "confirmed by the cluster")
    ] * so
    assert looks.poll(BLIND) == []


def test_released_node_is_settled_by_the_allocation_without_it() -> None:
    shrink = Shrink(POOL, (N2,), WHY)
    looks = Polls(*HELD, ev.Intended(shrink))
    assert looks.poll(listed(RUNNING)) == []
    less = msgspec.structs.replace(RUNNING, nodes=(N1,))
    assert ev.IntentSettled(shrink.tag, True, "confirmed by the cluster") in looks.poll(listed(less))


# ── steps that the cluster no longer lists ───────────────────────────────────────────────────────────────────────────
R2, AGENT_1, AGENT_2 = (Incarnation(ROLLOUTS[1], 1), *(Incarnation(replica_id(AGENT, node), 1) for node in (N1, N2)))
STEPS = {tag_of(RUN, incarnation): node for incarnation, node in ((R2, N2), (AGENT_2, N2))}
"""Steps that still run after the node of the first rollout was lost."""
LIMITS = job().limits
LOST_AT = 1000.0
SILENT_AT = LOST_AT + LIMITS.silence


class LostNode:
    """A rollout on each of two nodes. After ``LOST_AT`` neither the rollout nor the agent of ``n1`` sends a message."""

    def __init__(self, allocation: str = POOL, component: str = POOL) -> None:
        held = AllocationStatus(AllocationState.RUNNING, "7", (N1, N2))
        request = AllocationRequest(allocation, 2, NODE, 60.0)
        if component != allocation:
            request = msgspec.structs.replace(
                request, further_components=(AllocationRequest(component, 1, NODE, 60.0, node_group="rollout"),)
            )
        on_nodes = ((R1, N1), (R2, N2), (AGENT_1, N1), (AGENT_2, N2))
        launches = [Launch(one, tag_of(RUN, one), component, node, WHY) for one, node in on_nodes]
        self.polls = Polls(
            ev.Intended(Request(request, WHY)),
            ev.IntentSettled(allocation, True),
            ev.AllocationChanged(component, held),
            *(ev.Intended(launch) for launch in launches),
            *(ev.Admitted(launch.incarnation, launch.step, launch.node, 1) for launch in launches),
            *(ev.Joined(one, node, node, 2) for one, node in on_nodes[:2]),
            *(ev.AgentJoined(one, node, node, 2) for one, node in on_nodes[2:]),
        )
        self.snapshot = ClusterSnapshot({}, {component: held}, dict(STEPS))
        self.monitor = HealthMonitor()
        for one, node in on_nodes:
            self.monitor.on_launched(one, node, LOST_AT)
        self.hears(R1, R2, AGENT_1, AGENT_2, at=LOST_AT)

    @property
    def state(self) -> State:
        assert self.polls.state is not None
        return self.polls.state

    def hears(self, *senders: Incarnation, at: float) -> None:
        for sender in senders:
            node = N1 if sender in (R1, AGENT_1) else N2
            if sender in (R1, R2):
                self.monitor.on_hello(sender, node, "generate", at)
            else:
                self.monitor.on_agent_message(node, sender, at)

    def gone(
        self,
        at: float,
        snapshot: ClusterSnapshot | None = None,
        busy: frozenset[str] = frozenset(),
        others_send: bool = True,
    ) -> list[Incarnation]:
        """Poll the cluster, and return the incarnations whose steps it no longer lists.

        With ``others_send``, the processes of the other node have just sent heartbeats. ``busy`` are the tags of
        actions whose command still runs.
        """
        if others_send:
            self.hears(R2, AGENT_2, at=at)
        observed = self.snapshot if snapshot is None else snapshot
        self.polls.poll(observed, at, busy)
        return unlisted_steps(self.state, observed, self.polls.misses, self.monitor, at)


def test_step_on_a_silent_node_is_gone_once_the_cluster_has_not_listed_it_for_the_quiet_period(lost: LostNode) -> None:
    assert lost.gone(SILENT_AT) == []
    assert lost.gone(SILENT_AT + QUIET - 1.0) == []
    assert lost.gone(SILENT_AT + QUIET) == [R1]


def test_step_missing_from_a_single_poll_is_not_gone() -> None:
    assert LostNode().gone(SILENT_AT + 10 * QUIET) == []


def test_poll_that_lists_the_step_restarts_the_quiet_period(lost: LostNode) -> None:
    assert lost.gone(SILENT_AT) == []
    listed = msgspec.structs.replace(lost.snapshot, steps={**STEPS, STEP: N1})
    assert lost.gone(SILENT_AT + QUIET - 1.0, listed) == []
    assert lost.gone(SILENT_AT + QUIET) == []
    assert lost.gone(SILENT_AT + 2 * QUIET) == [R1]


@pytest.mark.parametrize(
    ("allocation", "component"),
    [(POOL, POOL), (f"{RUN}.rollout-0",) * 2, (f"{RUN}.trainer", f"{RUN}.rollout")],
    ids=["pool", "replica", "hetjob"],
)
def test_gone_step_is_found_in_each_form_of_allocation(allocation: str, component: str) -> None:
    lost = LostNode(allocation, component)
    assert lost.gone(SILENT_AT) == []
    assert lost.gone(SILENT_AT + QUIET) == [R1]


def test_node_whose_agent_was_lost_earlier_and_is_restarting_needs_no_finding(lost: LostNode) -> None:
    lost.monitor.remove(AGENT_1)
    lost.monitor.on_launched(Incarnation(AGENT_1.replica, 2), N1, SILENT_AT)
    assert lost.gone(SILENT_AT) == []
    assert lost.gone(SILENT_AT + QUIET) == [R1]


def _snapshots(change: Callable[[ClusterSnapshot], ClusterSnapshot]) -> Callable[[LostNode, float], ClusterSnapshot]:
    return lambda lost, at: change(lost.snapshot)


def _with_steps(*tags: str) -> Callable[[LostNode, float], ClusterSnapshot]:
    return _snapshots(lambda snapshot: msgspec.structs.replace(snapshot, steps=dict.fromkeys(tags, N1)))


def _with_allocation(status: AllocationStatus | None) -> Callable[[LostNode, float], ClusterSnapshot]:
    allocations = {} if status is None else {POOL: status}
    return _snapshots(lambda snapshot: msgspec.structs.replace(snapshot, allocations=allocations))


def _hearing(sender: Incarnation, *listed: str) -> Callable[[LostNode, float], ClusterSnapshot]:
    def hears(lost: LostNode, at: float) -> ClusterSnapshot:
        lost.hears(sender, at=at)
        return msgspec.structs.replace(lost.snapshot, steps={**STEPS, **dict.fromkeys(listed, N1)})

    return hears


def _suspended(lost: LostNode, at: float) -> ClusterSnapshot:
    lost.monitor.on_job_status(N1, True, at, at)
    return lost.snapshot


def _stop_requested(lost: LostNode, at: float) -> ClusterSnapshot:
    lost.monitor.on_stop_requested(R1, at)
    return lost.snapshot


@pytest.mark.parametrize(
    "poll",
    [
        _with_steps(*STEPS, STEP),
        _snapshots(lambda _: BLIND),
        _snapshots(lambda snapshot: msgspec.structs.replace(snapshot, steps=None)),
        _snapshots(lambda snapshot: msgspec.structs.replace(snapshot, allocations=None)),
        _with_steps(),
        _with_steps(next(iter(STEPS))),
        _with_allocation(None),
        _with_allocation(msgspec.structs.replace(RUNNING, nodes=(N2,))),
        *(
            _with_allocation(msgspec.structs.replace(RUNNING, state=state))
            for state in AllocationState
            if state is not AllocationState.RUNNING
        ),
        _hearing(AGENT_1, tag_of(RUN, AGENT_1)),
        _hearing(R1),
        _suspended,
        _stop_requested,
    ],
    ids=[
        "the node is cut off, and its step is listed",
        "the cluster is silent",
        "the steps could not be read",
        "the allocations could not be read",
        "the list of steps is empty",
        "the list of steps breaks off",
        "the allocation is missing",
        "the allocation has lost the node",
        *(f"the allocation is {state.value}" for state in AllocationState if state is not AllocationState.RUNNING),
        "the agent sends heartbeats",
        "the replica sends heartbeats",
        "the node is suspended",
        "its stop is requested",
    ],
)
def test_step_stays_while_a_condition_for_its_loss_is_missing(
    poll: Callable[[LostNode, float], ClusterSnapshot], lost: LostNode
) -> None:
    for n in range(20):
        at = SILENT_AT + n * QUIET / 2
        assert lost.gone(at, poll(lost, at)) == []


@pytest.mark.parametrize(
    ("steps_read", "allocations_read"), [(True, True), (False, True), (True, False), (False, False)]
)
def test_lists_without_any_step_count_if_nothing_of_the_run_sends_messages(
    steps_read: bool, allocations_read: bool, lost: LostNode
) -> None:
    lost.snapshot = msgspec.structs.replace(
        lost.snapshot,
        steps={} if steps_read else None,
        allocations=lost.snapshot.allocations if allocations_read else None,
    )
    assert lost.gone(SILENT_AT, others_send=False) == []
    gone = lost.gone(SILENT_AT + QUIET, others_send=False)
    assert gone == ([R1, R2] if steps_read and allocations_read else [])


def _relaunched(lost: LostNode, *events: ev.Event) -> str:
    """Launch a second incarnation on the silent node, and return the tag of its step."""
    second = Incarnation(ROLLOUTS[0], 2)
    launch = Launch(second, tag_of(RUN, second), POOL, N1, WHY)
    for event in (ev.Intended(launch), *events):
        lost.polls.state = fold(lost.state, ev.Stamped(lost.state.seq + 1, SILENT_AT, 1, event))
    lost.monitor.on_launched(second, N1, SILENT_AT)
    return launch.step


def test_step_whose_launch_is_still_running_is_not_gone(lost: LostNode) -> None:
    step = _relaunched(lost)
    for n in range(20):
        assert lost.gone(SILENT_AT + n * QUIET / 2, busy=frozenset({step})) == []


def test_admitted_step_that_is_not_listed_yet_is_not_gone_before_it_had_to_join() -> None:
    lost, second = LostNode(), Incarnation(ROLLOUTS[0], 2)
    _relaunched(lost, ev.Admitted(second, tag_of(RUN, second), N1, 1))
    for at in (0.0, QUIET, LIMITS.join - 1.0, LIMITS.join):
        assert lost.gone(SILENT_AT + at) == []
    assert lost.gone(SILENT_AT + LIMITS.join + QUIET) == [second]


def test_new_manager_counts_polls_and_silence_from_its_own_start(lost: LostNode) -> None:
    assert lost.gone(SILENT_AT) == []
    lost.polls.misses = AbsenceCounter()
    lost.monitor.restart(SILENT_AT + QUIET)
    started = SILENT_AT + QUIET
    due = started + max(LIMITS.silence, RECONNECT_S)
    assert lost.gone(started) == []
    assert lost.gone(due - 1.0) == []
    assert lost.gone(due) == []
    assert lost.gone(due + QUIET) == [R1]
