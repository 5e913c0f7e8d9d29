"""``Detection``: stable findings, a correct time of the next evaluation, and no influence of earlier results."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from math import inf, nextafter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rrl.core.launch import ExitReason
from rrl.core.phases import PhaseSpec
from rrl.core.run_spec import Limits
from rrl.core.types import AGENT, Finding, Incarnation, NodeName, ProbeResult, ReplicaId, Verdict, role_of
from rrl.health.detection import detect as guards
from rrl.health.detection.detect import Detection
from rrl.health.detection.detectors.base import RECONNECT_S
from rrl.health.detection.detectors.probing import due_probes
from rrl.health.detection.detectors.progress import ENDLESS_WAIT_FACTOR
from rrl.health.detection.detectors.registry import is_waiting
from rrl.health.detection.health_monitor import HealthMonitor
from rrl.tests.support.examples import examples
from rrl.tests.support.health.traces import LIMITS, ROLLOUT, ROLLOUTS, TRAINER, Trace, agent_of, detect_fresh, fail

SHORT = Limits(
    heartbeat=1.0,
    silence=5.0,
    join=12.0,
    first_pass=20.0,
    suspect=8.0,
    probe=6.0,
    idle=7.0,
    phases={
        "tools": PhaseSpec(shortest=20.0, longest=60.0, progresses=True),
        "train": PhaseSpec(300.0, 1800.0),
        "stopping": PhaseSpec(longest=60.0),
    },
)


# ── examples ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_monitor_without_observations_has_no_findings_and_no_next_evaluation() -> None:
    assert Detection(HealthMonitor()).detect(LIMITS, 5.0) == ([], inf)


def test_clock_that_runs_backwards_causes_a_full_evaluation() -> None:
    trace = Trace().node("n1", ROLLOUT)
    assert trace.detection.detect(LIMITS, trace.now + 60)[0]
    assert trace.detection.detect(LIMITS, trace.now)[0] == []


def test_changed_limits_apply_at_once() -> None:
    trace = Trace().node("n1", ROLLOUT)
    trace.heartbeat_missing.add(ROLLOUT)
    trace.play(7)
    assert trace.detection.detect(LIMITS, trace.now)[0] == []
    assert [f.detector for f in trace.detection.detect(SHORT, trace.now)[0]] == ["worker_silence"]


def test_removed_replica_has_no_finding() -> None:
    trace = Trace().node("n1", *ROLLOUTS)
    trace.monitor.on_step_ended(ROLLOUT, 1, None, ExitReason.EXITED, trace.now)
    assert len(trace.detection.detect(LIMITS, trace.now)[0]) == 1
    trace.monitor.remove(ROLLOUT)
    assert trace.detection.detect(LIMITS, trace.now)[0] == []


def test_released_node_has_no_findings() -> None:
    trace = Trace().node("n1", *ROLLOUTS)
    trace.monitor.on_node_status(NodeName("n1"), "down", "", trace.now)
    assert len(trace.detection.detect(LIMITS, trace.now)[0]) == 1
    trace.monitor.remove_node(NodeName("n1"))
    assert trace.detection.detect(LIMITS, trace.now) == ([], inf)


def test_node_without_current_incarnations_has_no_findings() -> None:
    trace = Trace().node("n1")
    trace.monitor.remove(agent_of("n1"))
    assert len(trace.detection.detect(LIMITS, trace.now + 60)[0]) == 1
    trace.monitor.remove_node(NodeName("n1"))
    assert trace.detection.detect(LIMITS, trace.now + 60) == ([], inf)


def test_returned_list_belongs_to_the_caller() -> None:
    trace = Trace().node("n1", ROLLOUT)
    trace.monitor.on_step_ended(ROLLOUT, 1, None, ExitReason.EXITED, trace.now)
    trace.detection.detect(LIMITS, trace.now)[0].clear()
    assert len(trace.detection.detect(LIMITS, trace.now)[0]) == 1


def test_heartbeat_causes_evaluation_of_its_own_node_only(monkeypatch: Any) -> None:
    judged: list[str] = []
    judge = guards._run_detectors

    def counting(home: Any, limits: Limits, now: float) -> Any:
        judged.append(home.node)
        return judge(home, limits, now)

    monkeypatch.setattr(guards, "_run_detectors", counting)
    trace = Trace()
    for index in range(200):
        trace.node(f"n{index}", Incarnation(ReplicaId(f"rollout/{index}"), 1))
    trace.detection.detect(LIMITS, trace.now)
    judged.clear()
    trace.monitor.on_heartbeat(Incarnation(ReplicaId("rollout/7"), 1), "generate", 1, None, trace.now + 1)
    trace.detection.detect(LIMITS, trace.now + 1)
    assert judged == ["n7"]


def test_heartbeats_do_not_grow_the_queue() -> None:
    trace = Trace().node("n1", ROLLOUT).node("n2", TRAINER, phase="train")
    for _ in range(300):
        trace.play(1)
        trace.detection.detect(LIMITS, trace.now)
    results = trace.detection._results
    assert results is not None
    assert len(results.queue) <= 4


# ── properties ───────────────────────────────────────────────────────────────────────────────────────────────────────
NODES = [NodeName(f"n{index}") for index in range(3)]
REPLICAS = [ReplicaId(name) for name in ("trainer/0", "trainer/0.1", "rollout/0", "trajectories/0")]
NODE_OF = dict(zip(REPLICAS, (NODES[0], NODES[1], NODES[1], NODES[0]), strict=True))
PHASES = [
    "starting",
    "generate",
    "train",
    "wait_weights",
    "wait_data",
    "wait_work",
    "serve",
    "of_its_own",
    "tools",
    "score",
    "loading_weights",
]
RAW = ("wait_endless", "wait_overdue", "wait_long", "idle", "computes_nothing", "computes_nothing_long", "load_stalled")
WAITS = ["wait_weights", "wait_data", "wait_work", "serve"]

replicas = st.sampled_from(REPLICAS)
incarnations = st.builds(Incarnation, replicas, st.sampled_from([1, 1, 1, 2]))
nodes = st.sampled_from(NODES)
targets = st.none() | replicas
phases = st.sampled_from(PHASES) | st.sampled_from(WAITS)
agents = nodes.map(lambda node: Incarnation(ReplicaId(f"{AGENT}/{node}"), 1))
loads = st.tuples(
    st.sampled_from([0.0, 1.0]), st.sampled_from([None, 0.0, 0.5, 1.0]), st.sampled_from([None, 0.0, 0.0, 0.5])
)
beating = st.tuples(
    st.just("beating"),
    st.integers(3, 12),
    st.sampled_from([1.0, 30.0, 150.0]),
    st.just(set()) | st.sets(incarnations | agents, max_size=3),
    st.just(set()) | st.sets(replicas, max_size=2),
    st.just({}) | st.dictionaries(replicas, loads),
    st.booleans(),
)
unlikely = st.one_of(
    st.tuples(st.just("nothing")),
    st.tuples(st.just("on_launched"), incarnations, nodes),
    st.tuples(st.just("on_hello"), incarnations, nodes, phases),
    st.tuples(st.just("on_heartbeat"), incarnations, phases, st.integers(0, 5), targets),
    st.tuples(st.just("on_phase"), incarnations, phases, st.integers(0, 5), targets),
    st.tuples(st.just("all_enter"), st.sampled_from(WAITS), targets),
    st.tuples(
        st.just("step_ended"),
        incarnations,
        st.sampled_from([0, 1, None]),
        st.sampled_from([ExitReason.EXITED, ExitReason.STOPPED]),
    ),
    st.tuples(st.just("on_step_gone"), incarnations),
    st.tuples(st.just("load"), incarnations, loads),
    st.tuples(st.just("on_probe_sent"), incarnations),
    st.tuples(st.just("on_probe_answered"), incarnations, st.sampled_from(ProbeResult), st.just("")),
    st.tuples(st.just("on_stop_requested"), incarnations),
    st.tuples(st.just("delay_join_deadline"), incarnations),
    st.tuples(st.just("on_goodbye"), incarnations),
    st.tuples(st.just("on_step_alive"), incarnations),
    st.tuples(st.just("remove"), incarnations | agents),
    st.tuples(st.just("agent"), nodes, st.integers(1, 2)),
    st.tuples(st.just("agent_launched"), nodes, st.integers(1, 2)),
    st.tuples(st.just("cluster"), nodes, st.sampled_from(["up", "down", "draining", "unknown"])),
    st.tuples(st.just("job"), nodes, st.booleans()),
    st.tuples(st.just("remove_node"), nodes),
    st.tuples(st.just("restart")),
)
random_steps = st.integers(0, 2).flatmap(lambda dice: unlikely if dice == 0 else beating)
pauses = st.sampled_from([0.0, 0.0, 0.0, 0.0, 0.0, 0.5, 4.0, 12.0, 61.0])
steps = st.lists(st.tuples(pauses, random_steps), min_size=1, max_size=10)
beginnings = st.lists(phases, min_size=4, max_size=4) | st.lists(st.sampled_from(WAITS), min_size=4, max_size=4)
traces = st.tuples(beginnings, steps)


def agent(node: str, incarnation: int) -> Incarnation:
    return Incarnation(ReplicaId(f"{AGENT}/{node}"), incarnation)


def played(trace: Any) -> Iterator[tuple[HealthMonitor, float]]:
    """Start a small run, apply the steps of the trace, and yield (monitor, time) after each step."""
    beginning, rest = trace
    monitor, now = HealthMonitor(), 0.0
    for node in NODES:
        monitor.on_agent_message(node, agent(node, 1), now)
    for replica, phase_name in zip(REPLICAS, beginning, strict=True):
        monitor.on_hello(Incarnation(replica, 1), NODE_OF[replica], "starting", now)
        monitor.on_phase(Incarnation(replica, 1), phase_name, 0, None, now)
    for pause, step in rest:
        now += pause
        now = perform(monitor, step, now)
        yield monitor, now


def perform(monitor: HealthMonitor, step: Any, now: float) -> float:
    kind, *rest = step
    match kind:
        case "nothing":
            pass
        case "beating":
            for _ in range(rest[0]):
                now += rest[1]
                for view in list(monitor.replicas.values()):
                    if view.incarnation in rest[2]:
                        continue
                    if view.is_agent:
                        monitor.on_agent_message(view.node, view.incarnation, now)
                    elif view.phase is not None:
                        done = (view.done or 0) + (view.incarnation.replica in rest[3])
                        monitor.on_heartbeat(view.incarnation, view.phase, done, view.waits_for, now)
                        if (load := rest[4].get(view.incarnation.replica)) is not None:
                            monitor.on_load(view.incarnation, load[0], load[1], now, load[2])
                if rest[5]:
                    for incarnation in due_probes(monitor, SHORT, now):
                        monitor.on_probe_sent(incarnation, now)
        case "all_enter":
            for view in monitor.workers():
                monitor.on_phase(view.incarnation, rest[0], 0, rest[1], now)
        case "step_ended":
            monitor.on_step_ended(rest[0], rest[1], 9 if rest[1] is None else None, rest[2], now)
        case "load":
            monitor.on_load(rest[0], rest[1][0], rest[1][1], now, rest[1][2])
        case "agent":
            monitor.on_agent_message(rest[0], agent(*rest), now)
        case "agent_launched":
            monitor.on_launched(agent(*rest), rest[0], now)
        case "cluster":
            monitor.on_node_status(rest[0], rest[1], "reported", now)
        case "job":
            monitor.on_job_status(rest[0], rest[1], now, now)
        case "remove" | "remove_node":
            getattr(monitor, kind)(*rest)
        case _:
            getattr(monitor, kind)(*rest, now)
    return now


_few = examples(40, many=1000)


@_few
@given(traces)
def test_earlier_results_give_the_same_findings_as_a_full_evaluation(trace: Any) -> None:
    detection: Detection | None = None
    for monitor, now in played(trace):
        detection = detection or Detection(monitor)
        full = detect_fresh(monitor, now, SHORT)
        assert detection.detect(SHORT, now) == full
        assert detection.detect(SHORT, now) == full, "a second call without new input has another result"


@_few
@given(traces, st.floats(0.0, 1.0, exclude_max=True))
def test_findings_do_not_change_before_the_next_evaluation(trace: Any, share: float) -> None:
    *_, (monitor, now) = played(trace)
    found, again = detect_fresh(monitor, now, SHORT)
    assert again > now
    for _ in range(6):  # the same holds between each later evaluation and the one after it
        end = min(again, now + 1e5)
        for moment in (now + share * (end - now), nextafter(end, 0.0)):
            if now <= moment < again:
                assert detect_fresh(monitor, moment, SHORT) == (found, again)
                assert _to_probe(monitor, moment, found) == _to_probe(monitor, now, found)
        if again == inf:
            break
        now = again
        found, again = detect_fresh(monitor, now, SHORT)
        assert again > now


def _to_probe(monitor: HealthMonitor, now: float, found: list[Finding]) -> set[Incarnation]:
    """Return the due probes of replicas that have no other finding."""
    incarnations, lost = {finding.incarnation for finding in found}, {finding.node for finding in found}
    asked = set(due_probes(monitor, SHORT, now)) - incarnations
    return {incarnation for incarnation in asked if monitor.replicas[incarnation.replica].node not in lost}


@_few
@given(traces)
def test_due_probes_are_the_same_with_and_without_earlier_results(trace: Any) -> None:
    detection: Detection | None = None
    for monitor, now in played(trace):
        detection = detection or Detection(monitor)
        detection.detect(SHORT, now)
        remembered = due_probes(monitor, SHORT, now)
        everything = deepcopy(monitor)
        everything.dirty.update(monitor.nodes)
        assert remembered == due_probes(everything, SHORT, now)


@_few
@given(traces)
def test_findings_are_about_current_incarnations_with_one_per_subject(trace: Any) -> None:
    for monitor, now in played(trace):
        found, _ = Detection(monitor).detect(SHORT, now)
        subjects = [f.incarnation or f.node for f in found]
        assert len(subjects) == len(set(subjects))
        failed = {f.node for f in found if f.node is not None and f.verdict is Verdict.FAIL}
        for finding in found:
            assert (finding.incarnation is None) != (finding.node is None)
            assert finding.since <= now
            assert finding.evidence
            if finding.incarnation is not None:
                view = monitor.replicas[finding.incarnation.replica]
                assert view.incarnation == finding.incarnation
                assert finding.proof or finding.node not in failed
                assert finding.proof or view.node not in failed
            else:
                assert finding.node in monitor.nodes


@_few
@given(traces)
def test_waiting_replica_is_blamed_only_in_a_cycle_or_a_stalled_run(trace: Any) -> None:
    for monitor, now in played(trace):
        found = Detection(monitor).detect(SHORT, now)[0]
        for finding in found:
            assert finding.detector not in RAW
            if finding.incarnation is None or finding.verdict is not Verdict.FAIL or finding.cause != "hang":
                continue
            view = monitor.replicas[finding.incarnation.replica]
            if finding.detector == "standstill":
                called = [
                    one
                    for one in monitor.workers()
                    if one.waits_for == view.incarnation.replica and one.heartbeats >= 3
                ]
                endless = is_waiting(view) and now >= view.last_change_at + ENDLESS_WAIT_FACTOR * view.declared.longest
                assert (
                    called
                    or endless
                    or all(one.left_at is not None or one.heartbeats >= 3 for one in monitor.workers())
                )
                assert not is_waiting(view) or endless or _in_a_circle(monitor, view.incarnation.replica)
            elif finding.detector == "no_answer" and is_waiting(view):
                assert view.role.answers_probes, (
                    "a waiting replica failed though its role never answers probes while it waits"
                )
            elif finding.detector not in ("stop_overdue", "engine_dead"):
                assert not is_waiting(view) or view.declared.own_work


def _in_a_circle(monitor: HealthMonitor, start: ReplicaId) -> bool:
    """Return whether the wait of a replica may lead back to the replica itself, over all possible edges."""
    ahead, visited = [start], set()
    while ahead:
        view = monitor.replicas.get(ahead.pop())
        if view is None or view.incarnation.replica in visited:
            continue
        visited.add(view.incarnation.replica)
        role = view.declared.waits_for
        named = [view.waits_for] if view.waits_for else [r for r in monitor.replicas if role_of(r) == role]
        if start in named:
            return True
        ahead.extend(named)
    return False


@_few
@given(traces)
def test_only_proof_is_found_before_the_grace_after_a_restart_ends(trace: Any) -> None:
    *_, (monitor, now) = played(trace)
    monitor.restart(now)
    for moment in (now, nextafter(now + RECONNECT_S, 0.0)):
        found, _ = detect_fresh(monitor, moment, SHORT)
        assert all(f.detector in ("exit_record", "step_gone") for f in found)


def test_detect_changes_no_observation() -> None:
    trace = Trace().node("n1", *ROLLOUTS)
    trace.heartbeat_missing |= {ROLLOUT, agent_of("n1")}
    trace.play(30)
    copy = deepcopy(trace.monitor)
    assert trace.detection.detect(LIMITS, trace.now) == Detection(copy).detect(LIMITS, trace.now)
    assert trace.found() >= {fail("worker_silence", ROLLOUT)}
