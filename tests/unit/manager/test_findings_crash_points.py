"""The manager is killed at any record of a run in which agents report findings about their nodes.

They report before roles work on these nodes, and later. The run ends as without the kill: it excludes the same nodes,
and records no finding twice.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable

import msgspec
import pytest

from rrl.core.run_spec import Limits, Recovery
from rrl.core.types import AGENT, Cause, Evidence, Finding, NodeName, Outcome, Remedy, Verdict
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Launch
from rrl.manager.model.state import State
from rrl.tests.support.manager.jobs import ROLLOUTS, TRAINER, command, commands, job
from rrl.tests.support.manager.scripted_runs import Script, run_to_end
from rrl.tests.support.manager.site import Site

LIMITS = Limits(heartbeat=2.0, silence=8.0, join=40.0, quiet=20.0, poll=10.0, lease=10.0)
R0, R1 = ROLLOUTS
N2 = NodeName("n2")
SPARSE = 31
"""``make test`` kills the manager at every ``SPARSE``-th record, and ``make test-long`` at each record."""


def ill(
    node: NodeName,
    detector: str,
    component: str = "GPU-1",
    *,
    cause: Cause = Cause.GPU,
    proof: bool = False,
    verdict: Verdict = Verdict.FAIL,
) -> Finding:
    remedy = Remedy.REBOOT if verdict is Verdict.FAIL else Remedy.NONE
    return Finding(
        detector,
        verdict,
        cause,
        remedy,
        0.0,
        (Evidence("nvml", "it is broken", 0.0),),
        node=node,
        proof=proof,
        component=component,
    )


def _breaks_under_a_rollout(site: Site) -> None:
    site.finds(ill(site.working()[R1][0].node, "gpu_ecc"))


def _is_hot_under_another(site: Site) -> None:
    site.finds(ill(site.working()[R0][0].node, "gpu_hot", verdict=Verdict.WARN))


JOB = msgspec.structs.replace(job(spares=2, steps=16, limits=LIMITS, recovery=Recovery(breaker=0.5)), cluster="slurm")
STORY = Script(Outcome.COMPLETED, granted=1, job=JOB, at_step={2: _breaks_under_a_rollout, 3: _is_hot_under_another})


def prepared(site: Site) -> None:
    site.finds(ill(N2, "gpu_lost", proof=True))


def changes(site: Site) -> Counter[tuple[str, str]]:
    """Return how often each finding (by its key) changed to each verdict, as (key, verdict) in durable records.

    A change whose record was lost with its manager is recorded again, and counts once.
    """
    every = (one.event for one in {one.seq: one for one in site.records}.values())
    return Counter((one.finding.key, one.finding.verdict.value) for one in every if isinstance(one, ev.FindingChanged))


def _break_together(site: Site) -> None:
    site.finds(*(ill(actors[0].node, "gpu_ecc") for id, actors in site.working().items() if id in (R0, R1, TRAINER)))


TOGETHER = Script(
    Outcome.COMPLETED,
    granted=1,
    at_step={2: _break_together},
    job=msgspec.structs.replace(
        job(spares=2, steps=12, limits=LIMITS, recovery=Recovery(breaker=0.8)), cluster="slurm"
    ),
)


@functools.cache
def unharmed() -> list[ev.Stamped]:
    site, outcome, state = run_to_end(STORY, prepared)
    assert site.managers == 1
    assert_ended_well(site, outcome, state)
    return site.records


def assert_ended_well(site: Site, outcome: Outcome, state: State) -> None:
    assert (outcome, state.step, site.allocations, state.intents) == (Outcome.COMPLETED, JOB.steps, {}, {})
    left = {name for name, node in state.nodes.items() if node.excluded is not None}
    broken = {name for name, found in site.ill.items() if any(one.verdict is Verdict.FAIL for one in found)}
    assert (left, set(site.drained), len(left)) == (broken, broken, 2)
    assert not [tag for tag in site.started if AGENT not in tag and _node(site, tag) == N2], (
        "a role was started on a broken node"
    )
    incarnations = Counter(incarnation.replica for incarnation in site.worked)
    assert incarnations[R1] in (2, 3)
    assert all(incarnations[one] in (1, 2) for one in (R0, TRAINER)), incarnations
    often = {key: times for key, times in changes(site).items() if times > 1}
    assert not often, "a finding was recorded more than once"


def _node(site: Site, tag: str) -> NodeName:
    actions = (one.event.action for one in site.records if isinstance(one.event, ev.Intended))
    return next(action.node for action in actions if isinstance(action, Launch) and action.step == tag)


def _die_over(before: bool, numbers: Iterable[int]) -> None:
    records = unharmed()
    for kill_at in numbers:

        def doomed(site: Site, at: int = kill_at) -> None:
            prepared(site)
            site.kill_at, site.before = at, before

        try:
            site, outcome, state = run_to_end(STORY, doomed)
            assert site.managers == 2
            assert_ended_well(site, outcome, state)
        except BaseException as error:
            error.add_note(f"killed {'before' if before else 'after'} record {kill_at}: {records[kill_at - 1]}")
            raise


def _finding_records() -> list[int]:
    """Return the numbers of the records of findings, and of the records after them."""
    numbers = [number for number, one in enumerate(unharmed(), 1) if isinstance(one.event, ev.FindingChanged)]
    return sorted({near for number in numbers for near in (number, number + 1) if near <= len(unharmed())})


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_manager_killed_at_a_finding_does_not_change_the_outcome(before: bool) -> None:
    _die_over(before, sorted({*_finding_records(), *range(1 + before, len(unharmed()) + 1, SPARSE)}))


@pytest.mark.long
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_manager_killed_at_any_record_does_not_change_the_outcome(before: bool) -> None:
    _die_over(before, range(1, len(unharmed()) + 1))


def test_run_whose_only_node_is_broken_ends_with_that_reason() -> None:
    def poor(site: Site) -> None:
        site.free = [N2]
        prepared(site)

    alone = msgspec.structs.replace(commands(command("x"), limits=LIMITS), cluster="slurm")
    _, outcome, state = run_to_end(Script(Outcome.FAILED, granted=1, job=alone), poor)
    assert outcome is Outcome.FAILED
    assert state.why == "not enough nodes; x/0 has no node; n2 is excluded: gpu lost: nvml: it is broken"


@pytest.mark.parametrize("proof", [True, False])
def test_rule_that_fails_every_node_does_not_end_the_run(proof: bool) -> None:
    def wrong(site: Site) -> None:
        site.finds(*(ill(node, "gpu_count", proof=proof) for node in site.free))

    plain = msgspec.structs.replace(job(spares=0, limits=LIMITS), cluster="slurm")
    site, outcome, state = run_to_end(Script(Outcome.COMPLETED, granted=1, job=plain), wrong)
    assert (outcome, len(site.granted)) == (Outcome.COMPLETED, 1)
    assert not [name for name, node in state.nodes.items() if node.excluded is not None]
    shared = state.findings["correlated:run:gpu:gpu_count"]
    assert "suspected: a driver or a rule of the site" in shared.evidence[0].text


@pytest.mark.parametrize("distance", [SPARSE, pytest.param(1, marks=pytest.mark.long)])
def test_finding_common_to_many_nodes_excludes_none_across_managers(distance: int) -> None:
    site, _, state = run_to_end(TOGETHER)
    assert not [name for name, node in state.nodes.items() if node.excluded is not None]
    finding_numbers = [number for number, one in enumerate(site.records, 1) if isinstance(one.event, ev.FindingChanged)]
    assert changes(site)["correlated:run:gpu:gpu_ecc", "WARN"] == 1
    for kill_at in range(finding_numbers[0] + 1, len(site.records), distance):
        again, outcome, state = run_to_end(TOGETHER, lambda site, at=kill_at: setattr(site, "kill_at", at))  # type: ignore[misc]
        left = [name for name, node in state.nodes.items() if node.excluded is not None]
        # the manager died after the report of the first agent, and before the other reports
        first = kill_at < finding_numbers[-1]
        assert (outcome, again.managers, len(left) <= first) == (Outcome.COMPLETED, 2, True), (kill_at, left)
