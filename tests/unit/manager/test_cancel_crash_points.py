"""All jobs of a run are cancelled at any moment while it has no manager, and the next manager continues the run.

The real manager runs in :class:`Site` in virtual time, as in ``test_crash_points``. Wherever the journal ends, the run
never holds more nodes than its pool has, and it completes.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest

from rrl.core.run_spec import Limits
from rrl.core.types import Outcome
from rrl.manager.model import events as ev
from rrl.manager.model.reducer import fold
from rrl.manager.model.state import State
from rrl.tests.support.manager.jobs import job
from rrl.tests.support.manager.scripted_runs import Script, run_to_end
from rrl.tests.support.manager.site import Site

LIMITS = Limits(heartbeat=2.0, silence=8.0, join=40.0, quiet=20.0, poll=10.0, lease=10.0)
JOB = msgspec.structs.replace(job(spares=1, steps=4, limits=LIMITS), cluster="slurm")
"""A job on Slurm, where no role is placed on a node before the node's agent has reported."""
SCRIPT = Script(Outcome.COMPLETED, granted=2, job=JOB)
POOL = JOB.nodes
SPARSE = 37
"""``make test`` kills the manager at every ``SPARSE``-th record, and ``make test-long`` at each record."""


def _assert_one_pool_at_a_time(site: Site, outcome: Outcome, state: State) -> None:
    assert (outcome, state.step) == (Outcome.COMPLETED, JOB.steps)
    assert site.max_nodes_held == POOL, f"{site.max_nodes_held} nodes were held at the same time: {site.granted}"
    assert (site.allocations, state.allocations) == ({}, {})
    folded = None
    for stamped in site.records:
        folded = fold(folded, stamped)
        wanted = [one for one in folded.allocations.values() if one.pending or one.running]
        asked = sum(one.request.count for one in wanted)
        assert asked <= POOL, f"{asked} nodes are requested or held after record {stamped}"


def _cancelled_after(kill_at: int, listed: bool, then_kill_at: int = -1) -> tuple[Site, Outcome, State]:
    """Kill the first manager at record ``kill_at``, and cancel all jobs.

    With ``listed``, the cluster lists the jobs as cancelled; otherwise it has forgotten them. The second manager is
    killed at record ``then_kill_at``, if there is such a record.
    """

    def doomed(site: Site) -> None:
        def cancel_once() -> None:
            if site.managers == 1:
                site.cancel_everything(listed)
                site.kill_at = then_kill_at

        site.kill_at, site.meanwhile = kill_at, cancel_once

    return run_to_end(SCRIPT, doomed)


def _check(listed: bool, numbers: Iterable[int]) -> None:
    for kill_at in numbers:
        try:
            site, outcome, state = _cancelled_after(kill_at, listed)
            _assert_one_pool_at_a_time(site, outcome, state)
        except BaseException as error:
            error.add_note(f"cancelled after record {kill_at}")
            raise


def _check_takeover(listed: bool, every: int) -> None:
    """Cancel a run during its work, and kill its second manager at every ``every``-th record.

    ``listed`` is that of :func:`_cancelled_after`.
    """
    commits = (one for one in run_to_end(SCRIPT)[0].records if isinstance(one.event, ev.StepCommitted))
    middle = next(commit.seq for commit in commits)
    records = len(_cancelled_after(middle, listed)[0].records)
    for then_kill_at in range(middle + 1, records + 1, every):
        try:
            site, outcome, state = _cancelled_after(middle, listed, then_kill_at)
            assert site.managers == 3
            _assert_one_pool_at_a_time(site, outcome, state)
        except BaseException as error:
            error.add_note(f"cancelled after record {middle}, the second manager killed over record {then_kill_at}")
            raise


@pytest.mark.parametrize("listed", [True, False], ids=["listed as cancelled", "forgotten by the cluster"])
def test_a_run_cancelled_at_a_record_never_holds_two_pools(listed: bool) -> None:
    _check(listed, range(2, len(run_to_end(SCRIPT)[0].records), SPARSE))


@pytest.mark.parametrize("listed", [True, False], ids=["listed as cancelled", "forgotten by the cluster"])
def test_manager_killed_while_restoring_a_cancelled_run_never_holds_two_pools(listed: bool) -> None:
    _check_takeover(listed, SPARSE)


@pytest.mark.long
@pytest.mark.parametrize("listed", [True, False], ids=["listed as cancelled", "forgotten by the cluster"])
def test_a_run_cancelled_at_any_record_never_holds_two_pools(listed: bool) -> None:
    _check(listed, range(2, len(run_to_end(SCRIPT)[0].records)))
    _check_takeover(listed, 1)
