"""What a new manager awaits: replicas that had joined return one after the other, and those that do not are silent.

The scenarios in ``manager_restart`` have the times of single failures.
"""

from __future__ import annotations

from rrl.core.run_spec import Limits
from rrl.core.types import Incarnation, NodeName, ReplicaId
from rrl.health.detection.detectors.base import RECONNECT_S, heartbeat_slack
from rrl.tests.support.health.traces import LIMITS, ROLLOUT, Trace, agent_of, fail

NODES = 40
WORKERS = {NodeName(f"n{index}"): Incarnation(ReplicaId(f"rollout/{index}"), 1) for index in range(NODES)}


def many(limits: Limits = LIMITS) -> Trace:
    """Return a run on many nodes whose manager has just been replaced; no process has been heard since."""
    trace = Trace(limits)
    for node, worker in WORKERS.items():
        trace.node(node, worker)
    trace.play(5)
    trace.heartbeat_missing |= {view.incarnation for view in trace.monitor.replicas.values()}
    trace.monitor.restart(trace.now)
    return trace


def returns(trace: Trace, node: NodeName) -> None:
    """Let the processes of a node reach the new manager."""
    trace.heartbeat_missing -= {WORKERS[node], agent_of(node)}
    trace.monitor.on_agent_message(node, agent_of(node), trace.now)
    trace.monitor.on_hello(WORKERS[node], node, "generate", trace.now)


def test_nodes_that_return_one_after_the_other_are_not_lost_and_the_last_one_is() -> None:
    trace = many()
    *first, last = WORKERS
    for node in first:
        trace.play(heartbeat_slack(LIMITS) - LIMITS.heartbeat)
        assert trace.found() == set(), node
        returns(trace, node)
    trace.play(heartbeat_slack(LIMITS) - LIMITS.heartbeat)
    trace.monitor.on_job_status(last, False, trace.now, trace.now)
    assert trace.found() == set()
    trace.play(LIMITS.heartbeat)
    assert trace.found() == {fail("node_lost", last)}


def test_silence_that_was_found_is_waited_for_again_once_others_return() -> None:
    trace = many()
    first, *others = WORKERS
    trace.play(LIMITS.silence)
    found = trace.detection.detect(LIMITS, trace.now)[0]
    assert {finding.node for finding in found if finding.detector == "node_lost"} == set(WORKERS)
    returns(trace, first)
    assert trace.detection.detect(LIMITS, trace.now)[0] == []
    trace.play(heartbeat_slack(LIMITS))
    found = trace.detection.detect(LIMITS, trace.now)[0]
    assert {finding.node for finding in found if finding.detector == "node_lost"} == set(others)


def test_short_limits_of_silence_leave_the_time_to_connect() -> None:
    trace = many(Limits(heartbeat=0.5, silence=1.0))
    trace.play(RECONNECT_S - 0.5)
    assert trace.found() == set()
    trace.play(0.5)
    assert {subject for detector, subject, _ in trace.found() if detector == "node_lost"} == set(WORKERS)


def test_worker_on_a_node_that_returns_is_silent_without_its_node() -> None:
    trace = many()
    trace.heartbeat_missing = {ROLLOUT}
    trace.restart()
    trace.play(LIMITS.silence)
    assert trace.found() == {fail("worker_silence", ROLLOUT)}
