"""Correlation: findings with a shared cause are held back, remembered, and reported once for the run."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from rrl.core.types import Cause, Evidence, Finding, Flag, Incarnation, NodeName, Remedy, ReplicaId, Verdict
from rrl.health.detection.attribution.correlation import (
    SETTLE_S,
    SHARED_CAUSE_LIFETIME_S,
    SILENCE_GRACE_S,
    STALL_GRACE_S,
    WINDOW_S,
    CorrelationContext,
    CorrelationState,
    correlate,
    restore_state,
)


@pytest.fixture
def run() -> Run:
    return Run()


def on(
    node: str,
    cause: Cause = Cause.STORAGE,
    detector: str = "mount",
    component: str = "/data",
    proof: bool = False,
    verdict: Verdict = Verdict.FAIL,
) -> Finding:
    evidence = (Evidence("host", f"{component} does not answer", 0.0),)
    return Finding(
        detector, verdict, cause, Remedy.EXCLUDE, 0.0, evidence, node=NodeName(node), proof=proof, component=component
    )


def stalls(index: int, since: float = 0.0) -> Finding:
    incarnation = Incarnation(ReplicaId(f"rollout/{index}"), 1)
    evidence = (Evidence("worker", "no tokens", since),)
    return Finding("no_progress", Verdict.FAIL, Cause.HANG, Remedy.RESTART, since, evidence, incarnation=incarnation)


class Run:
    """A run with roles on all of its nodes, and a clock."""

    def __init__(self, nodes: int = 10, rollouts: int = 0, idle: Sequence[str] = ()) -> None:
        occupied = {NodeName(f"n{i}") for i in range(nodes)} - {NodeName(name) for name in idle}
        self.context = CorrelationContext(
            nodes, occupied, {Incarnation(ReplicaId(f"rollout/{i}"), 1) for i in range(rollouts)}
        )
        self.state, self.now, self.next_check = CorrelationState(), 1000.0, 0.0

    def finds(self, *findings: Finding, after: float = 0.0) -> dict[str, Verdict]:
        """Correlate findings. Return the verdict of each node or replica, and the run's own verdict under ``run``."""
        self.now += after
        reported, self.state, self.next_check = correlate(findings, self.context, self.state, self.now)
        self.published = reported
        return {
            str(one.node or (one.incarnation.replica if one.incarnation else "run")): one.verdict for one in reported
        }


FAIL, WARN = Verdict.FAIL, Verdict.WARN


def test_different_mounts_are_different_shared_causes(run: Run) -> None:
    run.finds(on("n1", component="/data"), on("n2", component="/scratch"))
    assert run.finds(on("n1", component="/data"), on("n2", component="/scratch"), after=SETTLE_S) == {
        "n1": FAIL,
        "n2": FAIL,
    }


def test_first_finding_of_a_shareable_cause_waits_for_other_nodes(run: Run) -> None:
    assert run.finds(on("n1")) == {"n1": WARN}
    assert run.next_check == run.now + SETTLE_S
    assert run.finds(on("n1"), after=SETTLE_S - 1.0) == {"n1": WARN}
    assert run.finds(on("n1"), after=1.0) == {"n1": FAIL}


def test_finding_on_an_unoccupied_node_does_not_wait() -> None:
    run = Run(idle=["n1"])
    assert run.finds(on("n1")) == {"n1": FAIL}


@pytest.mark.parametrize(("nodes", "many"), [(4, 2), (10, 2), (11, 3), (20, 4)])
def test_shared_cause_needs_a_fifth_of_the_nodes_and_at_least_two(nodes: int, many: int) -> None:
    few, enough = Run(nodes), Run(nodes)
    assert "run" not in few.finds(*(on(f"n{i}") for i in range(many - 1)))
    assert "run" in enough.finds(*(on(f"n{i}") for i in range(many)))


def test_two_nodes_failing_far_apart_have_no_shared_cause(run: Run) -> None:
    run.finds(on("n1"))
    assert run.finds(on("n1"), after=SETTLE_S) == {"n1": FAIL}
    assert run.finds(on("n1"), on("n2"), after=WINDOW_S + 1.0)["n1"] is FAIL
    assert "run" not in run.finds(on("n1"), on("n2"), after=SETTLE_S)


def test_recovered_node_still_counts_towards_its_shared_cause(run: Run) -> None:
    run.finds(on("n1"))
    assert run.finds(after=10.0) == {}
    assert run.finds(on("n2"), after=10.0) == {"n2": WARN, "run": WARN}


def test_late_findings_of_a_shared_cause_are_held_back_until_it_expires(run: Run) -> None:
    run.finds(on("n1"), on("n2"))
    run.finds(after=5.0)
    assert run.finds(on("n3"), after=SHARED_CAUSE_LIFETIME_S / 2)["n3"] is WARN
    assert run.finds(on("n3"), after=SHARED_CAUSE_LIFETIME_S / 2)["n3"] is FAIL
    assert "run" not in run.finds(on("n3"), after=1.0)


def lost(index: int, since: float = 990.0, detector: str = "node_lost", proof: bool = False) -> Finding:
    evidence = (Evidence("manager", f"agent of n{index} is silent", since),)
    return Finding(detector, FAIL, Cause.NODE, Remedy.EXCLUDE, since, evidence, node=NodeName(f"n{index}"), proof=proof)


def test_nodes_silent_at_once_are_held_back_for_a_while_and_only_once() -> None:
    run, every = Run(), [lost(1), lost(2, 991.0), lost(3, 992.0)]
    run.context = replace(run.context, silent_nodes={NodeName(f"n{i}"): 990.0 for i in (1, 2, 3)})
    assert run.finds(every[0]) == {"n1": WARN, "run": WARN}, "n1 must be held back: two more nodes are silent, too"
    (shared,) = [one for one in run.published if one.node is None]
    assert (shared.cause, shared.key) == (Cause.NODE, "correlated:run:node:node_lost")
    assert "n1, n2, n3" in shared.evidence[0].text
    assert set(run.finds(*every, after=1.0).values()) == {WARN}
    assert run.next_check == run.now - 1.0 + SILENCE_GRACE_S
    assert run.finds(*every, after=SILENCE_GRACE_S) == {"n1": FAIL, "n2": FAIL, "n3": FAIL, "run": WARN}
    assert run.finds(after=1.0) == {}, "findings remain although all nodes are back"
    assert run.finds(*(replace(one, since=run.now) for one in every), after=60.0)["n1"] is WARN, (
        "a later loss of all nodes was not held back again"
    )


@pytest.mark.parametrize("began", [(990.0, 990.0), (990.0, 970.0, 990.0), (990.0, 975.0, 960.0)])
def test_one_or_two_silent_nodes_fail(began: tuple[float, ...], run: Run) -> None:
    assert set(run.finds(*(lost(index, since) for index, since in enumerate(began))).values()) == {FAIL}


def test_nodes_reported_down_are_not_held_back(run: Run) -> None:
    down = [lost(index, detector="node_down", proof=True) for index in range(3)]
    assert set(run.finds(*down).values()) == {FAIL}
    silent = [lost(index) for index in range(3, 6)]
    assert run.finds(*down, *silent) == {
        **dict.fromkeys(("n0", "n1", "n2"), FAIL),
        **dict.fromkeys(("n3", "n4", "n5", "run"), WARN),
    }


def test_excluded_nodes_do_not_hold_back_findings_of_others() -> None:
    run, every = Run(), [lost(1), lost(2), lost(3)]
    run.context = replace(run.context, excluded={NodeName("n1"), NodeName("n2")})
    assert run.finds(*every) == {"n1": FAIL, "n2": FAIL, "n3": FAIL}


def test_next_manager_holds_silent_nodes_back_no_longer() -> None:
    run, every = Run(), [lost(1), lost(2), lost(3)]
    run.finds(*every)
    run.state = restore_state(run.published, run.now)
    assert run.finds(*every, after=SILENCE_GRACE_S - 1.0)["n1"] is WARN
    assert run.finds(*every, after=1.0)["n1"] is FAIL


def test_rollouts_all_stalled_at_once_are_held_back_for_a_while_and_only_once() -> None:
    run = Run(rollouts=3)
    every = [stalls(i, since=990.0 + i) for i in range(3)]
    assert set(run.finds(*every).values()) == {WARN}
    assert run.next_check == run.now + STALL_GRACE_S
    assert run.finds(*every, after=STALL_GRACE_S)["rollout/0"] is FAIL
    assert run.finds(*every, after=1.0)["rollout/0"] is FAIL
    assert run.finds(after=1.0) == {}


def test_first_failed_rollout_is_held_back_while_all_others_are_suspected() -> None:
    run = Run(rollouts=3)
    suspected = [replace(stalls(i, since=990.0), verdict=WARN, detector="suspected") for i in (1, 2)]
    verdicts = run.finds(stalls(0, since=985.0), *suspected)
    assert verdicts == {"rollout/0": WARN, "rollout/1": WARN, "rollout/2": WARN, "run": WARN}
    assert run.finds(stalls(0, since=985.0), *suspected, after=STALL_GRACE_S)["rollout/0"] is FAIL


def test_excluded_node_does_not_hold_back_findings_indefinitely(run: Run) -> None:
    both = (on("n1", Cause.GPU, "ecc"), on("n2", Cause.GPU, "ecc"))
    run.finds(both[0])
    run.context = replace(run.context, excluded={NodeName("n1")})
    assert run.finds(*both, after=10.0)["n2"] is WARN
    assert run.finds(*both, after=SHARED_CAUSE_LIFETIME_S)["n2"] is FAIL


@pytest.mark.parametrize(("nodes", "most"), [(2, 2), (4, 3), (10, 6)])
def test_proof_on_most_nodes_is_held_back(nodes: int, most: int) -> None:
    run = Run(nodes)
    proofs = [on(f"n{i}", Cause.GPU, "gpu_count", "", proof=True) for i in range(nodes)]
    assert set(run.finds(*proofs[: most - 1]).values()) == {FAIL}
    verdicts = run.finds(*proofs[:most], after=1.0)
    assert set(verdicts.values()) == {WARN}
    (shared,) = [one for one in run.published if one.node is None]
    assert "a rule of the site" in shared.evidence[0].text
    assert all(Flag.ON_MOST_NODES in finding.flags for finding in run.published), (
        "a finding lacks the flag that keeps the history from blaming the node"
    )


@pytest.mark.parametrize(
    ("cause", "detector", "shared"),
    [(Cause.FABRIC, "port_down", "the shared fabric"), (Cause.STORAGE, "mount", "the shared storage")],
)
def test_fabric_or_storage_proof_on_most_nodes_blames_the_shared_cause(
    cause: Cause, detector: str, shared: str
) -> None:
    run = Run(4)
    run.finds(*(on(f"n{i}", cause, detector, proof=True) for i in range(3)))
    (shared_finding,) = [one for one in run.published if one.node is None]
    assert shared in shared_finding.evidence[0].text
    assert "rule" not in shared_finding.evidence[0].text
    run.state = restore_state(run.published, run.now)
    assert run.finds(on("n0", cause, detector, proof=True))["n0"] is WARN, (
        "the next manager has not restored that most nodes have this finding"
    )


def test_next_manager_restores_shared_causes_and_starts_of_failures(run: Run) -> None:
    shared = (on("n1", component="/a:b"), on("n2", component="/a:b"))
    run.finds(*shared, on("n3", Cause.GPU, "ecc"))
    before = {one.key: one for one in run.published}
    run.state = restore_state(run.published, run.now)
    assert run.finds(shared[0], after=1.0)["n1"] is WARN
    assert all(before[one.key] == one for one in run.published)
    run.state = restore_state([on("n3", Cause.GPU, "ecc")], run.now)  # since the beginning
    assert run.finds(on("n3", Cause.GPU, "ecc"), on("n4", Cause.GPU, "ecc"))["n4"] is FAIL


def _without_heartbeats(run: Run, began: dict[str, float]) -> None:
    """Stop the heartbeats of workers at the given times. Each worker is on its own node, which still sends messages."""
    run.context = replace(
        run.context,
        silent_workers={
            Incarnation(ReplicaId(name), 1): (NodeName(f"n{index}"), at)
            for index, (name, at) in enumerate(began.items())
        },
    )


def silence(name: str, since: float) -> Finding:
    evidence = (Evidence("manager", "no heartbeat for 10 s after the last one", since),)
    return Finding(
        "worker_silence",
        FAIL,
        Cause.PROCESS,
        Remedy.RESTART,
        since,
        evidence,
        incarnation=Incarnation(ReplicaId(name), 1),
    )


@pytest.mark.parametrize(
    "began",
    [
        {"rollout/0": 990.0, "rollout/1": 990.0},
        {"rollout/0": 990.0, "rollout/1": 990.0, "rollout/2": 970.0},
        {"trainer/0.0": 990.0, "trainer/0.1": 990.0, "trainer/0.2": 990.0},
    ],
    ids=["two", "one long before", "one gang"],
)
def test_workers_silent_independently_fail(began: dict[str, float], run: Run) -> None:
    _without_heartbeats(run, began)
    first = next(iter(began))
    assert run.finds(silence(first, began[first])) == {first: FAIL}
