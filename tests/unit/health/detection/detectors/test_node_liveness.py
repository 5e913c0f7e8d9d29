"""``silent_nodes`` returns the nodes without messages: one such node has failed, many suggest a lost network."""

from __future__ import annotations

from rrl.health.detection.detectors.node_liveness import silent_nodes
from rrl.tests.support.health.traces import LIMITS, ROLLOUTS, STORE, Trace, agent_of


def four_nodes() -> Trace:
    trace = Trace().node("n0", STORE, phase="serve")
    for index, incarnation in enumerate(ROLLOUTS, 1):
        trace.node(f"n{index}", incarnation)
    trace.play(5)
    return trace


def test_nodes_silent_with_a_lost_one_are_returned_before_they_are_lost() -> None:
    trace = four_nodes()
    trace.heartbeat_missing |= {agent_of("n1"), ROLLOUTS[0]}
    trace.play(1)
    trace.heartbeat_missing |= {agent_of("n2"), ROLLOUTS[1], agent_of("n3")}
    last = trace.now
    trace.play(LIMITS.silence - 1)
    found = trace.findings()
    assert [one.key for one in found] == ["node_lost:n1"]
    assert silent_nodes(found, trace.monitor, LIMITS, trace.now) == {"n1": last - 1, "n2": last}, (
        "n3 is not silent: its rollout sends heartbeats"
    )


def test_silent_nodes_is_empty_while_no_node_is_lost() -> None:
    trace = four_nodes()
    trace.heartbeat_missing |= {agent_of("n1"), ROLLOUTS[0]}
    trace.play(LIMITS.silence - 1)
    assert silent_nodes(trace.findings(), trace.monitor, LIMITS, trace.now) == {}
