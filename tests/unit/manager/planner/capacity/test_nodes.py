"""Plans for single nodes in virtual time: drains, releases, readmissions, and user commands about nodes."""

from __future__ import annotations

import msgspec
import pytest

from rrl.cluster.base import NodeState, NodeStatus
from rrl.core.role_environment import EnvSpec
from rrl.core.run_spec import HealthSpec, Recovery
from rrl.core.types import AGENT, Cause, Evidence, Finding, NodeName, Remedy, ReplicaId, Verdict, replica_id, role_of
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Drain, Exclude, Fence, Launch, Readmit, Release, Request, Shrink, Undrain
from rrl.manager.model.state import ReleaseResult, Status
from rrl.manager.model.table import as_dict
from rrl.manager.planner.capacity.nodes import NodeInventory
from rrl.manager.reporting.summary import summarize
from rrl.tests.support.manager.jobs import ROLLOUTS, RUN, TRAINER, in_node_groups, job
from rrl.tests.support.manager.node_world import UP, Nodes
from rrl.tests.support.manager.world import found, lost

R0, R1 = ROLLOUTS
HOUR = 3600.0


@pytest.fixture
def w() -> Nodes:
    return world()


def world(*, may: bool = True, spares: int = 1, nodes: int | None = None, **recovery: object) -> Nodes:
    settings = Recovery(backoff=0.0, breaker=1.0, **recovery)  # type: ignore[arg-type]
    made = Nodes(job(spares=spares, steps=1000, recovery=settings), nodes, may)
    made.steady()
    return made.all_up()


# ── drains ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_node_with_a_hardware_fault_is_drained_once_with_run_and_reason(w: Nodes) -> None:
    node = w.node_of(R0)
    w.exclude(node, Cause.GPU)
    w.play(w.works).wait(30.0)
    assert list(w.drains) == [node]
    assert w.drains[node] == f"rrl:{RUN}:gpu: xid: agent: Xid 79, GPU 3 has fallen off the bus"
    assert w.state.nodes[node].drain_reason == w.drains[node]
    assert w.tags(Drain, Undrain) == [f"{node}!drain"]


@pytest.mark.parametrize(
    ("cause", "remedy"),
    [
        *((cause, Remedy.DRAIN) for cause in (Cause.PROCESS, Cause.SOFTWARE, Cause.HANG, Cause.USER)),
        *((Cause.GPU, remedy) for remedy in (Remedy.NONE, Remedy.RESTART)),
    ],
)
def test_finding_about_a_process_or_that_allows_use_leaves_the_node_in_use(
    cause: Cause, remedy: Remedy, w: Nodes
) -> None:
    w.exclude(w.node_of(R0), cause, remedy=remedy)
    w.wait(30.0)
    assert not w.tags(Exclude, Drain, Fence)


@pytest.mark.parametrize("remedy", [Remedy.RESET_GPU, Remedy.REBOOT, Remedy.DRAIN, Remedy.SUPPORT, Remedy.EXCLUDE])
@pytest.mark.parametrize("cause", [Cause.GPU, Cause.FABRIC, Cause.STORAGE, Cause.NODE])
def test_node_with_a_hardware_remedy_is_left_and_drained_and_only_its_role_moves(
    cause: Cause, remedy: Remedy, w: Nodes
) -> None:
    node, before = w.node_of(R0), w.incarnations()
    w.exclude(node, cause, remedy=remedy)
    w.play(w.works)
    assert w.tags(Exclude, Drain) == [f"{node}!exclude", f"{node}!drain"]
    assert w.node_of(R0) != node
    assert w.incarnations() == before | {R0: before[R0] + 1}


def test_findings_of_two_gpus_are_separate_and_one_clears_only_its_own(w: Nodes) -> None:
    node = w.node_of(R0)
    for part in ("GPU-1", "GPU-2"):
        w.exclude(node, Cause.GPU, verdict=Verdict.WARN, component=part)
    w.exclude(node, Cause.GPU, verdict=Verdict.OK, component="GPU-1")
    assert [finding.component for finding in w.state.findings.values()] == ["GPU-2"]


# ── suspects and stragglers ──────────────────────────────────────────────────────────────────────────────────────────
def test_suspect_node_keeps_its_replicas_and_gets_new_ones_only_as_a_last_resort() -> None:
    w = world(spares=2)
    suspect, before = w.node_of(R0), w.incarnations()
    spares = sorted(set(w.state.nodes) - {replica.node for replica in w.state.workers})
    w.exclude(suspect, Cause.GPU, verdict=Verdict.WARN)
    w.exclude(spares[0], Cause.GPU, verdict=Verdict.WARN)
    w.wait(30.0)
    assert w.incarnations() == before
    w.happen(lost(w.node_of(R1), w.now))
    w.play(w.works)
    assert w.node_of(R1) == spares[1], "a suspected spare was used before a healthy one"


def test_suspect_node_is_used_if_no_other_node_is_free() -> None:
    w = world(spares=1, nodes=5)
    spare = next(iter(set(w.state.nodes) - {replica.node for replica in w.state.workers}))
    w.exclude(spare, Cause.GPU, verdict=Verdict.WARN)
    w.happen(lost(w.node_of(R1), w.now))
    w.play(w.works)
    assert w.node_of(R1) == spare


def slow(w: Nodes, replica: ReplicaId = R0, planned: bool = True) -> None:
    evidence = (Evidence("worker", "half the tokens of its peers", w.now),)
    finding = Finding(
        "straggler",
        Verdict.WARN,
        Cause.NODE,
        Remedy.EXCLUDE,
        w.now,
        evidence,
        incarnation=w.state.replica(replica).incarnation,
    )
    (w.happen if planned else w.record)(ev.FindingChanged(finding))


@pytest.mark.parametrize(("wish", "spares"), [("exclude", 1), ("exclude", 0), ("report", 1)])
def test_straggler_leaves_its_node_only_if_configured_and_a_spare_exists(wish: str, spares: int) -> None:
    spec = job(spares=spares, steps=1000, recovery=Recovery(backoff=0.0, breaker=1.0))
    w = Nodes(msgspec.structs.replace(spec, health=HealthSpec(stragglers=wish)), 8)
    w.steady()
    w.all_up()
    node, before = w.node_of(R0), w.incarnations()
    slow(w)
    w.play(timeout_s=60.0)
    moves = wish == "exclude" and spares > 0
    assert (w.node_of(R0) != node) == moves
    assert w.incarnations() == (before | {R0: before[R0] + 1} if moves else before)
    assert not w.tags(Drain), "a slow node that works was drained"
    assert w.works()


def test_only_one_of_two_stragglers_leaves_its_node_if_there_is_one_spare() -> None:
    spec = job(spares=1, steps=1000, recovery=Recovery(backoff=0.0, breaker=1.0))
    w = Nodes(msgspec.structs.replace(spec, health=HealthSpec(stragglers="exclude")), 5)
    w.steady()
    w.all_up()
    slow(w, planned=False)
    slow(w, R1)
    w.play(timeout_s=60.0)
    assert len(w.tags(Exclude)) == 1
    assert w.works()


# ── circuit breaker and outages ──────────────────────────────────────────────────────────────────────────────────────
def test_no_other_node_is_excluded_during_an_outage() -> None:
    w = world(spares=4)
    down = sorted(set(w.state.nodes) - {replica.node for replica in w.state.workers})[:3]
    for node in down:
        w.happen(ev.NodeChanged(node, NodeStatus(NodeState.DOWN, "DOWN")))
    w.exclude(w.node_of(R0), Cause.GPU)
    w.wait(5.0)
    assert not w.tags(Exclude)
    for node in down[1:]:
        w.happen(ev.NodeChanged(node, UP))
    w.play(w.works)
    assert w.decided(Exclude)[0].cause is Cause.GPU


def test_node_with_proof_gets_nothing_new_while_the_breaker_keeps_it() -> None:
    w = Nodes(job(spares=3, steps=1000, recovery=Recovery(backoff=0.0)), 8)
    w.steady()
    w.all_up()
    spares, before = sorted(set(w.state.nodes) - {replica.node for replica in w.state.workers}), w.incarnations()
    for node in spares:
        w.exclude(node, Cause.GPU)
    assert w.tags(Exclude) == [f"{node}!exclude" for node in spares[:2]]
    w.kill(R0)
    w.play(w.works)
    w.kill(R1)
    w.play(w.works)
    assert w.incarnations() == before | {R0: 2, R1: 2}
    assert spares[2] not in {replica.node for replica in w.state.workers}
    assert NodeInventory(w.state, w.now).candidate(spares[2]) is None


def test_nothing_is_drained_if_disabled_or_without_slurm() -> None:
    forbidden = world(drain=False)
    local = Nodes(job(spares=1, steps=1000))
    local._state = msgspec.structs.replace(local.state, job=msgspec.structs.replace(local.state.job, cluster="local"))
    for w in (forbidden, local):
        w.steady()
        w.exclude(w.node_of(R0), Cause.GPU)
        w.play(w.works).wait(30.0)
        assert w.tags(Exclude)
        assert not w.tags(Drain)


@pytest.mark.parametrize("state", [NodeState.DOWN, NodeState.DRAINING])
def test_node_already_drained_or_down_is_not_drained_again(state: NodeState, w: Nodes) -> None:
    node = w.node_of(R0)
    w.happen(ev.NodeChanged(node, NodeStatus(state, "DOWN: bad fan")))
    w.exclude(node, Cause.NODE)
    w.play(w.works).wait(30.0)
    assert not w.tags(Drain)


def test_refused_drain_leaves_the_node_excluded_and_is_requested_once() -> None:
    w = world(may=False)
    node = w.node_of(R0)
    w.exclude(node, Cause.GPU)
    w.play(w.works).wait(2 * HOUR)
    assert w.tags(Drain) == [f"{node}!drain"]
    assert w.state.nodes[node].drain_error == "we may not drain nodes here"
    assert w.state.nodes[node].drain_reason == ""
    assert w.state.nodes[node].excluded is not None
    assert w.node_of(R0) != node


def test_drain_refused_while_the_node_was_down_is_tried_again_once_it_is_back() -> None:
    w = world(may=False)
    node = w.node_of(R0)
    w.exclude(node, Cause.GPU)
    w.play(w.works).wait(30.0)
    w.happen(ev.NodeChanged(node, NodeStatus(NodeState.DOWN, "DOWN: rebooted")))
    assert w.state.nodes[node].drain_error, "the error is gone although nothing has changed"
    w.may = True
    w.happen(ev.NodeChanged(node, NodeStatus(NodeState.UP, "IDLE")))
    w.wait(5.0)
    assert w.state.nodes[node].drain_error == ""
    assert w.drains[node].startswith(f"rrl:{RUN}:")


# ── releases ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_excluded_pool_node_is_released_once_drained_while_the_others_stay(w: Nodes) -> None:
    node, before = w.node_of(R0), w.incarnations()
    w.exclude(node, Cause.GPU)
    w.play(w.works).wait(30.0)
    assert [(shrink.allocation, shrink.nodes) for shrink in w.decided(Shrink)] == [(f"{RUN}.pool", (node,))]
    kinds = [type(action) for action in w.actions if isinstance(action, Drain | Shrink)]
    assert kinds == [Drain, Shrink]
    assert node not in w.held[f"{RUN}.pool"]
    assert w.state.nodes[node].allocation == ""
    assert w.incarnations() == before | {R0: 2}


def test_node_lost_without_proof_is_released_only_when_all_replicas_work() -> None:
    w = world(spares=0, nodes=5)
    w.closed["pool"] = "Resources"
    node = w.node_of(R0)
    w.lose_node(node)
    w.play(lambda: bool(w.tags(Request)[1:])).wait(60.0)
    assert not w.tags(Shrink)
    w.open("pool")
    w.play(w.works).wait(10.0)
    assert w.tags(Shrink) == [f"{RUN}.pool!shrink:{node}"]


def test_nodes_of_one_allocation_are_released_one_after_the_other() -> None:
    w = world(spares=4, drain=False)
    w.unanswered = True
    w.exclude(w.node_of(R0), Cause.GPU)
    w.exclude(w.node_of(R1), Cause.GPU)
    w.play(w.works).wait(60.0)
    (first,) = w.tags(Shrink)
    w.happen(ev.IntentSettled(first, True))
    w.wait(60.0)
    assert len(w.tags(Shrink)) == 2


@pytest.mark.parametrize("may", [True, False])
@pytest.mark.parametrize("later", [0.0, 0.3])
def test_node_being_released_gets_no_replica_even_if_a_user_undrains_it(later: float, may: bool) -> None:
    w = world(may=may)
    node = w.node_of(R0)
    w.send_command("drain", node)
    w.play(lambda: bool(w.tags(Shrink)), timeout_s=30.0)
    assert w.tags(Shrink)
    w.wait(later)
    assert w.state.nodes[node].allocation
    w.send_command("undrain", node)
    w.wait(30.0)
    assert node not in w.state.nodes, "the node is still in the run, though its release had begun"
    assert w.state.replica(replica_id(AGENT, node)).incarnation_number == 1


def test_orphan_steps_on_a_released_node_are_forgotten(w: Nodes) -> None:
    w.slow_to_stop = float("inf")
    node = w.node_of(R0)
    w.exclude(node, Cause.GPU)
    w.play(w.works).wait(30.0)
    assert w.state.nodes[node].allocation == ""
    assert [orphan.node for orphan in w.state.orphan_steps.values()] == []


def test_node_that_slurm_cannot_release_stays_and_is_not_tried_again(w: Nodes) -> None:
    w.shrinks = "Slurm does not shrink job 7"
    w.exclude(w.node_of(R0), Cause.GPU)
    w.play(w.works).wait(600.0)
    assert len(w.tags(Shrink)) == 1
    assert [node.release_result for node in w.state.nodes.values() if node.excluded] == [ReleaseResult.REFUSED]


def test_failed_replacement_node_is_released_whole_after_its_drain() -> None:
    w = world(spares=0, nodes=8)
    w.exclude(w.node_of(R0), Cause.GPU)
    w.play(w.works)
    second = w.all_up().node_of(R0)
    w.exclude(second, Cause.GPU)
    w.play(w.works).wait(30.0)
    [allocation] = [tag for tag in w.requests if tag != f"{RUN}.pool" and tag not in w.held]
    kinds = [action.tag for action in w.actions if isinstance(action, Drain | Release)]
    assert kinds[-2:] == [f"{second}!drain", f"{allocation}!release"]
    assert set(w.requests[[*w.requests][-1]].exclude) >= {second}


def test_failed_node_is_drained_before_its_release_in_form_replica_too() -> None:
    w = Nodes(in_node_groups(steps=1000, recovery=Recovery(backoff=0.0, breaker=1.0)), 8)
    w.steady()
    w.all_up()
    node = w.node_of(R0)
    w.exclude(node, Cause.GPU)
    w.play(w.works).wait(30.0)
    kinds = [type(action) for action in w.actions if isinstance(action, Drain | Release)]
    assert kinds == [Drain, Release]


# ── readmission ──────────────────────────────────────────────────────────────────────────────────────────────────────
def test_exclusion_without_proof_expires_and_its_duration_doubles_each_time() -> None:
    w = world(spares=1, exclusion=HOUR, drain=False)
    w.shrinks = "no"
    node = w.node_of(R0)
    for wait in (HOUR, 2 * HOUR, 4 * HOUR):
        w.exclude(node, Cause.NODE, proof=False)
        w.play(w.works).wait(wait - 10.0)
        assert w.state.nodes[node].excluded is not None
        w.wait(20.0)
        assert w.state.nodes[node].excluded is None, wait
        agent = w.state.replica(replica_id(AGENT, node))
        assert agent.status is Status.JOINED
        assert w.state.nodes[node].probe_error == ""


def test_readmitted_node_gets_no_role_before_its_agent_has_joined() -> None:
    w = world(spares=0, nodes=5, exclusion=HOUR)
    w.closed["pool"] = "Resources"
    w.shrinks = "no"
    node = w.node_of(R0)
    agent = replica_id(AGENT, node)
    w.exclude(node, Cause.NODE, proof=False)
    w.broken_incarnations[agent] = "its disk is full"
    w.wait(HOUR + 5.0)
    assert w.state.nodes[node].excluded is None
    assert w.state.replica(R0).status is not Status.JOINED
    assert not [
        launch for launch in w.decided(Launch) if launch.node == node and role_of(launch.incarnation.replica) != AGENT
    ][1:]
    del w.broken_incarnations[agent]
    w.play(w.works, timeout_s=700.0)
    assert w.node_of(R0) == node


def test_readmitted_node_that_is_cut_off_is_not_waited_for_without_end() -> None:
    w = world(spares=1, nodes=8)
    w.shrinks = "not here"
    spare = next(name for name in w.state.nodes if name not in {replica.node for replica in w.state.workers})
    w.send_command("drain", spare)
    w.wait(10.0)
    w.dead.add(spare)
    w.send_command("undrain", spare)
    w.wait(10.0)
    agent = replica_id(AGENT, spare)
    assert w.state.replica(agent).status is Status.LAUNCHING
    w.lose_node(w.node_of(R0))
    for _ in range(4):
        w.wait(w.state.job.limits.join)
        w.happen(found(w.state.replica(agent).incarnation, "never_joined", w.now))
    assert w.play(w.works).works()


def test_failed_probe_after_readmission_excludes_the_node_again() -> None:
    small = job(spares=1, steps=1000, recovery=Recovery(backoff=0.0, breaker=1.0, exclusion=HOUR))
    w = Nodes(msgspec.structs.replace(small, env=EnvSpec(probe=("torch",))))
    w.shrinks = "no"
    w.steady()
    w.all_up()
    node = w.node_of(R0)
    w.exclude(node, Cause.NODE, proof=False)
    w.unfit[node] = "no module torch"
    w.play(w.works).wait(HOUR + 30.0)
    assert [action.tag for action in w.actions if isinstance(action, Exclude | Readmit)] == [
        f"{node}!exclude",
        f"{node}!readmit",
        f"{node}!exclude",
    ]
    assert w.state.nodes[node].exclusions == 2


def test_node_with_proof_stays_excluded_while_the_proof_stands() -> None:
    w = world(exclusion=HOUR)
    w.shrinks = "no"
    node = w.node_of(R0)
    w.exclude(node, Cause.GPU)
    w.play(w.works).wait(20 * HOUR)
    assert w.state.nodes[node].excluded is not None
    assert w.drains
    w.exclude(node, Cause.GPU, verdict=Verdict.OK)
    w.wait(10.0)
    assert w.state.nodes[node].excluded is None
    assert w.tags(Undrain) == [f"{node}!undrain"]
    assert w.drains == {}


@pytest.mark.parametrize(
    "observed",
    [
        NodeStatus(NodeState.DOWN, "DOWN: Not responding"),
        NodeStatus(NodeState.DRAINING, "IDLE+DRAIN: bad fan"),
        NodeStatus(NodeState.UNKNOWN, "IDLE+NOT_RESPONDING"),
    ],
)
def test_node_that_the_cluster_reports_unhealthy_is_not_readmitted(observed: NodeStatus) -> None:
    w = world(exclusion=HOUR, drain=False)
    w.shrinks = "no"
    node = w.node_of(R0)
    w.exclude(node, Cause.NODE, proof=False)
    w.play(w.works)
    w.happen(ev.NodeChanged(node, observed))
    w.wait(5 * HOUR)
    assert w.state.nodes[node].excluded is not None
    w.happen(ev.NodeChanged(node, UP))
    assert w.state.nodes[node].excluded is None


def test_own_drain_does_not_prevent_readmission_and_is_taken_back() -> None:
    w = world(exclusion=HOUR)
    w.shrinks = "no"
    node = w.node_of(R0)
    w.exclude(node, Cause.NODE, proof=False)
    w.play(w.works).wait(HOUR + 60.0)
    assert w.tags(Drain, Readmit, Undrain) == [f"{node}!drain", f"{node}!readmit", f"{node}!undrain"]
    assert w.state.replica(replica_id(AGENT, node)).status is Status.JOINED


def test_silence_before_readmission_does_not_exclude_the_node_again() -> None:
    w = world(exclusion=HOUR, drain=False)
    w.shrinks = "no"
    node = w.node_of(R0)
    w.lose_node(node)
    w.play(lambda: bool(w.decided(Exclude))).play(w.works)
    w.dead.clear()
    w.wait(HOUR + 60.0)
    assert w.state.nodes[node].excluded is None
    assert not w.state.findings
    assert w.tags(Exclude) == [f"{node}!exclude"]


def test_requests_exclude_bad_nodes_and_have_the_remaining_walltime() -> None:
    w = world(spares=0, nodes=8)
    w.wait(1000.0)
    node = w.node_of(R0)
    w.exclude(node, Cause.GPU)
    w.play(w.works).wait(2.0)
    [first, more] = w.decided(Request)
    assert node in more.request.exclude
    assert more.request.walltime <= first.request.walltime - 1000.0


# ── user commands ────────────────────────────────────────────────────────────────────────────────────────────────────
def test_replicas_on_a_node_to_be_drained_move_first_and_uncharged(w: Nodes) -> None:
    node, before = w.node_of(R0), w.incarnations()
    w.send_command("drain", node, "fan is loud")
    w.play(lambda: bool(w.drains)).play(w.works).wait(30.0)
    decided = [action for action in w.actions if isinstance(action, Fence | Exclude | Drain)]
    fence, exclude, drain = (
        action for action in decided if not isinstance(action, Fence) or role_of(action.incarnation.replica) != AGENT
    )
    assert [type(action) for action in (fence, exclude, drain)] == [Fence, Exclude, Drain]
    assert isinstance(fence, Fence)
    assert not fence.charged
    assert fence.why.evidence == (f"{node} is to be drained, requested by anna: fan is loud",)
    assert w.drains == {node: f"rrl:{RUN}:drain requested by anna: fan is loud"}
    assert w.incarnations() == before | {R0: 2}
    assert w.state.replica(R0).failures == ()
    assert w.state.node_commands == {}
    assert w.tags(Shrink) == [f"{RUN}.pool!shrink:{node}"]


def test_node_to_be_drained_waits_for_a_replacement_and_gets_nothing_new() -> None:
    w = world(spares=0, nodes=5)
    w.closed["pool"] = "Resources"
    node = w.node_of(R0)
    w.send_command("drain", node)
    w.wait(100.0)
    assert w.works()
    assert not w.tags(Exclude, Drain)
    assert len(w.decided(Request)) == 2
    w.open("pool")
    w.play(lambda: bool(w.drains)).play(w.works)
    assert w.node_of(R0) != node


def test_node_to_be_drained_is_drained_even_without_a_replacement() -> None:
    w = world(spares=0, nodes=5)
    w.closed["pool"] = "Resources"
    node = w.node_of(R0)
    w.send_command("drain", node)
    w.wait(w.state.job.limits.allocation + 10.0)
    assert list(w.drains) == [node]
    assert w.state.finish is None


def test_already_drained_node_is_only_excluded_on_a_users_request(w: Nodes) -> None:
    node = w.node_of(R0)
    w.happen(ev.NodeChanged(node, NodeStatus(NodeState.DRAINING, "MIXED+DRAIN: bad fan")))
    assert w.node_of(R0) == node
    w.send_command("drain", node)
    w.play(lambda: bool(w.tags(Exclude))).play(w.works)
    assert w.node_of(R0) != node
    assert not w.tags(Drain)


def test_whole_gangs_move_off_a_node_to_be_drained() -> None:
    w = world(spares=1)
    node = w.node_of(TRAINER)
    w.send_command("drain", node)
    w.play(lambda: bool(w.drains)).play(w.works)
    assert w.node_of(TRAINER) != node
    assert w.incarnations()[TRAINER] == 2


def test_node_drained_by_a_user_is_readmitted_only_by_a_user() -> None:
    w = world(exclusion=HOUR)
    w.shrinks = "no"
    node = w.node_of(R0)
    w.send_command("drain", node)
    w.play(lambda: bool(w.drains)).play(w.works).wait(20 * HOUR)
    assert w.state.nodes[node].excluded is not None
    w.send_command("undrain", node)
    w.wait(10.0)
    assert w.state.nodes[node].excluded is None
    assert w.drains == {}
    assert w.state.node_commands == {}
    assert w.state.replica(replica_id(AGENT, node)).status is Status.JOINED


def test_user_may_undrain_a_node_against_any_proof(w: Nodes) -> None:
    w.shrinks = "no"
    node = w.node_of(R0)
    w.record(lost(node, w.now))
    w.exclude(node, Cause.GPU)
    w.play(w.works).wait(30.0)
    w.send_command("undrain", node)
    w.wait(30.0)
    assert w.state.nodes[node].excluded is None
    assert w.state.replica(replica_id(AGENT, node)).status is Status.JOINED
    w.exclude(node, Cause.GPU)
    assert w.state.nodes[node].excluded is not None


def test_pending_drain_can_be_taken_back() -> None:
    w = world(spares=0, nodes=5)
    w.closed["pool"] = "Resources"
    node = w.node_of(R0)
    w.send_command("drain", node)
    w.wait(10.0)
    w.send_command("undrain", node)
    w.wait(2 * HOUR)
    assert w.state.node_commands == {}
    assert not w.tags(Exclude, Drain)
    assert w.incarnations()[R0] == 1


def test_refused_drain_by_a_user_excludes_the_node_and_leaves_a_request() -> None:
    w = world(may=False)
    node = w.node_of(R0)
    w.send_command("drain", node)
    w.play(lambda: bool(w.tags(Drain))).play(w.works).wait(5.0)
    record = w.state.nodes[node]
    assert (record.drain_requested_by, record.drain_reason, record.drain_error) == (
        "anna",
        "",
        "we may not drain nodes here",
    )
    assert w.node_of(R0) != node


def test_excluded_node_is_drained_on_a_users_request(w: Nodes) -> None:
    node = w.node_of(R0)
    w.exclude(node, Cause.SOFTWARE)
    w.play(w.works).wait(5.0)
    assert not w.drains
    w.send_command("drain", node, "yes")
    w.wait(5.0)
    assert w.drains == {node: f"rrl:{RUN}:drain requested by anna: yes"}


@pytest.mark.parametrize("order", ["drain", "undrain"])
def test_command_about_a_foreign_node_changes_nothing(order: str, w: Nodes) -> None:
    before = w.state
    w.send_command(order, NodeName("n99"))
    assert msgspec.structs.replace(w.state, seq=before.seq, handled_commands=before.handled_commands) == before


def test_next_manager_continues_pending_node_commands() -> None:
    w = world(spares=0, nodes=4)
    node = w.node_of(R0)
    w.send_command("drain", node)
    state = msgspec.json.decode(msgspec.json.encode(w.state, enc_hook=as_dict), type=type(w.state))
    assert state.node_commands == {node: ("drain", "anna")}


def test_drain_reasons_are_short_and_plain(w: Nodes) -> None:
    node = w.node_of(R0)
    w.send_command("drain", node, 'it\'s "bad"\n=[x]= ' + "long " * 100)
    w.play(lambda: bool(w.drains))
    reason = w.drains[node]
    assert reason.startswith(f"rrl:{RUN}:drain requested by anna: it s bad x long")
    assert len(reason) <= 160
    assert not set(reason) & set("'\"\n=[]|")


# ── reports about nodes ──────────────────────────────────────────────────────────────────────────────────────────────
def test_refused_drain_is_reported_to_administrators_with_its_evidence() -> None:
    w = world(may=False)
    node = w.node_of(R0)
    w.exclude(node, Cause.GPU)
    w.play(w.works)
    w.send_command("drain", w.node_of(R1), "fan")
    w.play(lambda: len(w.tags(Drain)) == 2).wait(5.0)
    first, second = summarize(w.events).drain_requests
    assert (first.node, first.cause, first.requested_by) == (node, "gpu", "")
    assert first.evidence == ["xid: agent: Xid 79, GPU 3 has fallen off the bus"]
    assert first.drain_error == "we may not drain nodes here"
    assert (second.cause, second.requested_by) == ("", "anna: fan")


def test_drained_or_readmitted_node_is_not_reported_to_administrators() -> None:
    drained = world()
    drained.exclude(drained.node_of(R0), Cause.GPU)
    drained.play(drained.works).wait(5.0)
    back = world(may=False, exclusion=HOUR)
    back.shrinks = "no"
    back.exclude(back.node_of(R0), Cause.NODE, proof=False)
    back.play(back.works)
    assert len(summarize(back.events).drain_requests) == 1
    back.wait(HOUR + 10.0)
    assert back.decided(Readmit)
    for w in (drained, back):
        assert summarize(w.events).drain_requests == []


def test_run_ends_only_after_pending_drains_are_settled(w: Nodes) -> None:
    w.unanswered = True
    node = w.node_of(R0)
    w.exclude(node, Cause.GPU)
    w.play(w.works)
    w.cancel()
    w.wait(600.0)
    assert w.state.finish is not None
    assert not w.over
    w.happen(ev.IntentSettled(f"{node}!drain", True))
    assert w.over


# ── admission ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_no_role_is_placed_on_a_node_before_its_agent_has_reported() -> None:
    w = Nodes(job(spares=1, steps=1000), 8)
    w.broken_incarnations = {replica_id(AGENT, NodeName(f"n{i}")): "cannot be started" for i in (1, 2)}
    w.play(w.works)
    assert w.works()
    assert not {NodeName("n1"), NodeName("n2")} & {replica.node for replica in w.state.workers}


@pytest.mark.parametrize(("cluster", "admission"), [("local", True), ("slurm", False)])
def test_without_admission_checks_roles_wait_for_no_agent(cluster: str, admission: bool) -> None:
    spec = msgspec.structs.replace(job(spares=0, steps=1000), health=HealthSpec(admission=admission))
    w = Nodes(spec, 4)
    w._state = msgspec.structs.replace(w.state, job=msgspec.structs.replace(w.state.job, cluster=cluster))
    w.broken_incarnations = {replica_id(AGENT, NodeName(f"n{i}")): "cannot be started" for i in range(1, 5)}
    w.play(w.works)
    assert w.works()


def test_node_that_reports_broken_when_it_joins_is_never_used() -> None:
    class Broken(Nodes):
        def record(self, event: ev.Event) -> None:
            if isinstance(event, ev.AgentJoined) and event.node == "n1":
                evidence = (Evidence("nvml", "uncorrectable ECC errors", self.now),)
                super().record(
                    ev.FindingChanged(
                        Finding(
                            "gpu_ecc_uncorrected",
                            Verdict.FAIL,
                            Cause.GPU,
                            Remedy.RESET_GPU,
                            self.now,
                            evidence,
                            node=event.node,
                            proof=True,
                        )
                    )
                )
            super().record(event)

    w = Broken(job(spares=1, steps=1000), 8)
    w.play(w.works)
    launched = {launch.node for launch in w.decided(Launch) if role_of(launch.incarnation.replica) != AGENT}
    assert NodeName("n1") not in launched
    assert [exclusion.node for exclusion in w.decided(Exclude)] == ["n1"]
