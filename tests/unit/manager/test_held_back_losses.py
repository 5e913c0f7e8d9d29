"""A node loss that the breaker holds back: what the run does, and what ``rrl status`` shows.

The summary counts the loss once Slurm itself has taken the node from the job. The real manager runs in :class:`Site` in
virtual time.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable

import msgspec
import pytest

from rrl.core.run_spec import Limits
from rrl.core.types import Finding, NodeName, Outcome, ReplicaId, Verdict
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Exclude, Finish, Rung
from rrl.manager.model.reducer import fold
from rrl.manager.model.state import State
from rrl.manager.planner.recovery.node_exclusion import deferred_exclusions, exclusions_allowed
from rrl.manager.reporting.summary import summarize
from rrl.tests.support.manager.jobs import ROLLOUTS, job
from rrl.tests.support.manager.scripted_runs import Script, run_to_end
from rrl.tests.support.manager.site import Site

LIMITS = Limits(heartbeat=2.0, silence=8.0, join=40.0, quiet=20.0, poll=10.0, lease=10.0)
R0, R1 = ROLLOUTS
SLURM_NOTICES_S = 60.0
"""Time after which Slurm takes the lost node from the job (s). The default of SlurmdTimeout is 300 s."""


@pytest.mark.parametrize(
    ("nodes", "allowed"), [(1, 1), (2, 1), (3, 1), (4, 1), (5, 2), (6, 2), (14, 2), (15, 3), (100, 20)]
)
def test_breaker_allows_two_of_five_nodes_and_a_fifth_of_many(nodes: int, allowed: int) -> None:
    assert exclusions_allowed(0.2, nodes) == allowed


def _loses_node_of(replica: ReplicaId, noticed_after_s: float | None = None) -> Callable[[Site], None]:
    """Return a callback for ``at_step`` that crashes the node of the replica.

    With a number in ``noticed_after_s``, Slurm takes the node from its job after this time (s), and lists its steps
    until then. With None the cluster no longer lists the steps, but keeps the node in its job.
    """

    def crash(site: Site) -> None:
        node = site.working()[replica][-1].node
        site.crash(node, listed=noticed_after_s is not None)
        if noticed_after_s is not None:
            site.spawn(_taken_from_its_job(site, node, noticed_after_s))

    return crash


def _cuts_off_node_of(replica: ReplicaId, seconds: float, cluster_is_silent: bool) -> Callable[[Site], None]:
    """Return a callback for ``at_step`` that cuts off the node of the replica for some seconds.

    No message arrives from the node, though its processes run. With ``cluster_is_silent``, polls of the cluster also
    fail during this time.
    """

    def cut(site: Site) -> None:
        site.spawn(_cut_off(site, site.working()[replica][-1].node, seconds, cluster_is_silent))

    return cut


async def _cut_off(site: Site, node: NodeName, seconds: float, cluster_is_silent: bool) -> None:
    site.cut_off.add(node)
    site.is_silent = cluster_is_silent
    await asyncio.sleep(seconds)
    site.cut_off.remove(node)
    site.is_silent = False


async def _taken_from_its_job(site: Site, node: NodeName, after_s: float) -> None:
    await asyncio.sleep(after_s)
    for tag, nodes in site.allocations.items():
        site.allocations[tag] = tuple(one for one in nodes if one != node)


# Losses are 140 s apart. If they were less than 120 s apart, they would count as one fault that the nodes share.
JOB = msgspec.structs.replace(job(spares=0, steps=240, limits=LIMITS), cluster="slurm")
LOSES_TWO = Script(Outcome.COMPLETED, granted=3, job=JOB, at_step={10: _loses_node_of(R0), 80: _loses_node_of(R1)})
LOSES_THREE = msgspec.structs.replace(
    LOSES_TWO, granted=4, at_step={**LOSES_TWO.at_step, 150: _loses_node_of(R0, SLURM_NOTICES_S)}
)


@functools.cache
def _loses_three() -> tuple[Site, Outcome, State]:
    return run_to_end(LOSES_THREE)


def test_a_second_node_lost_within_ten_minutes_is_replaced_as_soon_as_it_is_found() -> None:
    site, outcome, _ = run_to_end(LOSES_TWO)
    assert outcome is Outcome.COMPLETED
    second = summarize(site.records).recoveries[1]
    assert second.detect_s is not None
    assert second.decide_s is not None
    assert second.replica == R1
    assert second.detect_s + second.decide_s < 2 * LIMITS.silence


def test_deferred_outage_counts_from_the_loss_of_the_node() -> None:
    site, outcome, _ = _loses_three()
    assert outcome is Outcome.COMPLETED
    third = summarize(site.records).recoveries[2]
    stages = (third.detect_s, third.decide_s, third.start_s, third.first_work_s, third.total_s)
    detect, decide, start, first_work, total = (stage or 0.0 for stage in stages)
    assert LIMITS.silence - LIMITS.heartbeat <= detect <= 2 * LIMITS.silence, stages
    assert detect + decide >= SLURM_NOTICES_S - LIMITS.heartbeat, stages
    assert total >= SLURM_NOTICES_S - LIMITS.heartbeat + start + first_work, stages


def test_open_breaker_names_the_node_its_finding_and_its_end() -> None:
    site, _, _ = _loses_three()
    state: State | None = None
    deferred = []
    for stamped in site.records:
        state = fold(state, stamped)
        if state.finish is None and state.findings:
            deferred += [(held, stamped.at, state) for held in deferred_exclusions(state, stamped.at)]
    assert deferred
    held, at, state = deferred[0]
    lost = next(finding for finding in state.findings.values() if finding.node == held.exclude.node)
    assert lost.detector == "node_lost"
    assert held.why == "2 of 6 nodes excluded within 600 s, and no more may be excluded"
    first = min(node.excluded_at for node in state.nodes.values() if node.excluded is not None)
    assert held.until == first + state.job.recovery.window > at


THIRD_STEP_ENDS = msgspec.structs.replace(LOSES_THREE, at_step={**LOSES_TWO.at_step, 150: _loses_node_of(R0)})


@functools.cache
def _third_step_ends() -> tuple[Site, Outcome, State]:
    return run_to_end(THIRD_STEP_ENDS)


def _excluded(site: Site) -> list[NodeName]:
    decisions = [stamped.event.action for stamped in site.records if isinstance(stamped.event, ev.Decided)]
    return [decision.node for decision in decisions if isinstance(decision, Exclude)]


def _node_lost(site: Site) -> list[Finding]:
    """Return the recorded findings ``node_lost`` in order, up to the decision that ends the run."""
    findings: list[Finding] = []
    for stamped in site.records:
        if isinstance(stamped.event, ev.FindingChanged) and stamped.event.finding.detector == "node_lost":
            findings.append(stamped.event.finding)
        elif isinstance(stamped.event, ev.Decided) and isinstance(stamped.event.action, Finish):
            break
    return findings


def test_replica_leaves_a_node_that_the_breaker_keeps_once_the_cluster_no_longer_lists_its_step() -> None:
    site, outcome, _ = _third_step_ends()
    assert outcome is Outcome.COMPLETED
    third = summarize(site.records).recoveries[2]
    assert (third.replica, third.incarnation, third.rung) == (R0, 3, Rung.REPLACEMENT)
    assert third.total_s is not None
    assert third.total_s < LIMITS.silence + LIMITS.quiet + 3 * LIMITS.poll, "the recovery has waited for the breaker"
    assert third.node_before not in _excluded(site)
    assert len(_excluded(site)) == 2


def test_node_counts_as_lost_after_its_replica_has_left() -> None:
    site, _, _ = _third_step_ends()
    node = summarize(site.records).recoveries[2].node_before
    assert [finding.verdict for finding in _node_lost(site) if finding.node == node][-1] is Verdict.FAIL


@pytest.mark.parametrize("before", [False, True], ids=["recorded", "not recorded"])
def test_manager_that_is_killed_when_it_finds_the_step_gone_leaves_the_repair_to_the_next_one(before: bool) -> None:
    """The next manager has not found the node lost yet.

    If the killed manager has recorded its finding about the step, the next one tries the node once more.
    """
    events = [stamped.event for stamped in _third_step_ends()[0].records]
    found = [isinstance(event, ev.FindingChanged) and event.finding.detector == "step_gone" for event in events]

    def kill_manager(site: Site) -> None:
        site.kill_at, site.before = 1 + found.index(True), before

    site, outcome, state = run_to_end(THIRD_STEP_ENDS, kill_manager)
    assert (outcome, site.managers, len(_excluded(site))) == (Outcome.COMPLETED, 2, 2)
    restarted = state.replica(R0)
    assert restarted.incarnation_number == (3 if before else 4)
    assert restarted.node not in site.dead_nodes


@pytest.mark.parametrize("cluster_is_silent", [False, True], ids=["step is listed", "cluster is silent"])
def test_replica_on_a_node_that_is_cut_off_continues_once_messages_arrive_again(cluster_is_silent: bool) -> None:
    """The exclusion of the node is held back, and its steps continue to run."""
    cut = _cuts_off_node_of(R0, 5 * LIMITS.quiet, cluster_is_silent)
    script = msgspec.structs.replace(LOSES_TWO, at_step={**LOSES_TWO.at_step, 150: cut})
    site, outcome, state = run_to_end(script)
    assert outcome is Outcome.COMPLETED
    assert len({finding.node for finding in _node_lost(site) if finding.verdict is Verdict.FAIL}) == 3
    assert state.replica(R0).incarnation_number == 2
    assert len(_excluded(site)) == 2
