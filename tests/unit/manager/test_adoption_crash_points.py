"""The manager is killed at any record of a promotion, or of the start or stop of an extra.

Exactly one process becomes the trainer, and no replica changes but the extra whose node it takes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest

from rrl.core.faults import Fault, FaultKind, FaultTrigger
from rrl.core.run_dir import RunDir
from rrl.core.run_spec import Limits, RunSpec
from rrl.core.types import STANDBY_ROLE, Incarnation, Outcome, ReplicaId, Resources
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Exclude, Fence, Launch, Resize
from rrl.manager.model.reducer import fold
from rrl.manager.model.state import State
from rrl.manager.storage.journal import replay
from rrl.tests.support.manager import virtual
from rrl.tests.support.manager.jobs import RUN, TRAINER, gang_job
from rrl.tests.support.manager.site import Site, prepare
from rrl.transport.keys import RunKeys

LIMITS = Limits(heartbeat=0.5, silence=4.0, join=40.0, quiet=20.0, poll=10.0, lease=3.0)
KILL = Fault("f0", FaultKind.KILL, TRAINER, FaultTrigger(step=2))
JOB = gang_job(1, 1, rollouts=2, spares=1, steps=4, limits=LIMITS, faults=[KILL])
EXTRAS = gang_job(1, 1, rollouts=2, spares=1, steps=5, limits=LIMITS, extras=True)
EXTRA = ReplicaId("rollout/2")
KEYS = RunKeys.make()


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace fsync: no test here simulates a power loss."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def run_to_end(prepared: Callable[[Site], None] = lambda site: None, job: RunSpec = JOB) -> tuple[Site, State]:
    """Run to a successful end, and return the site and the final state."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        run = RunDir(Path(folder) / RUN)
        run.create()
        KEYS.save(run.keys)

        async def live() -> Site:
            site = Site(run, job, 8)
            prepared(site)
            prepare(site, patch)
            assert await site.manage() is Outcome.COMPLETED
            assert site.actors == {}, "steps have outlived the run"
            assert site.doubled == [], "nodes were requested twice, or a step was launched twice"
            await site.to_rest()
            return site

        site = virtual.run(live())
        state = None
        for stamped in replay(run):
            state = fold(state, stamped)
        assert state is not None
        assert (site.allocations, state.allocations, state.intents) == ({}, {}, {})
        assert state.step == job.steps
        assert len(site.granted) == 1
        return site, state


def incarnations_of(site: Site) -> dict[ReplicaId, set[Incarnation]]:
    """Return every incarnation that joined, by replica, without standby processes and agents."""
    found: dict[ReplicaId, set[Incarnation]] = {}
    for stamped in site.records:
        if isinstance(stamped.event, ev.Joined) and not stamped.event.incarnation.replica.startswith(STANDBY_ROLE):
            found.setdefault(stamped.event.incarnation.replica, set()).add(stamped.event.incarnation)
    return found


def assert_nobody_else_came_back(site: Site) -> None:
    again = [id for id, incarnations in incarnations_of(site).items() if id != TRAINER and len(incarnations) > 1]
    assert again == [], site.kill_at


def around_the_promotion(records: list[ev.Stamped]) -> range:
    """Return the numbers of the records from the trainer's fence to the first commit of its promoted process."""
    fence = next(s.seq for s in records if isinstance(s.event, ev.Decided) and isinstance(s.event.action, Fence))
    commit = next(
        s.seq
        for s in records
        if isinstance(s.event, ev.StepCommitted) and s.event.incarnation == Incarnation(TRAINER, 2)
    )
    return range(fence - 3, commit + 2)


@pytest.fixture(scope="module")
def unharmed() -> Site:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        site, _ = run_to_end()
    return site


def test_killed_trainer_is_replaced_by_the_standby_of_its_node(unharmed: Site) -> None:
    assert unharmed.promotions == [f"standby/{_node_of(unharmed)}#1 trainer/0#2"]
    assert_nobody_else_came_back(unharmed)
    assert len(incarnations_of(unharmed)[TRAINER]) == 2
    adoption = next(
        s.event.action
        for s in unharmed.records
        if isinstance(s.event, ev.Intended)
        and isinstance(s.event.action, Launch)
        and s.event.action.standby is not None
    )
    assert adoption.why.evidence


def _node_of(site: Site) -> str:
    joined = (stamped.event for stamped in site.records if isinstance(stamped.event, ev.Joined))
    return next(event.node for event in joined if event.incarnation.replica == TRAINER)


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_manager_killed_at_any_record_does_not_change_the_outcome(unharmed: Site, before: bool) -> None:
    """A standby process that got Promote before the intent was durable is fenced.

    The next manager promotes another one.
    """
    for kill_at in around_the_promotion(unharmed.records):

        def doomed(site: Site, at: int = kill_at) -> None:
            site.kill_at, site.before = at, before

        site, _ = run_to_end(doomed)
        assert site.managers == 2, kill_at
        assert_nobody_else_came_back(site)
        assert (len(site.promotions), len(incarnations_of(site)[TRAINER])) == (1, 2), kill_at


def test_standby_that_dies_with_its_trainer_leads_to_a_cold_start(unharmed: Site) -> None:
    """Either the manager receives both ends before it decides, or the promotion fails when the step ends.

    No other replica changes.
    """

    def doomed(site: Site) -> None:
        commit = site.commit

        def then_kill() -> None:
            commit()
            if site.committed == 2:
                for actor in [one for one in site.actors.values() if one.role in ("trainer", STANDBY_ROLE)]:
                    actor.die()

        site.commit = then_kill  # type: ignore[method-assign]

    site, _ = run_to_end(doomed)
    assert_nobody_else_came_back(site)
    assert len(incarnations_of(site)[TRAINER]) >= 2


# ── GPUs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def job_on_shared_gpus() -> RunSpec:
    """Return a job for a node with four GPUs: the rollouts have the first ones, the trainer has one of the others."""
    job = gang_job(1, 1, rollouts=2, spares=1, steps=4, limits=LIMITS, faults=[KILL])
    roles = {
        role.name: msgspec.structs.replace(
            role,
            exclusive=False,
            per_member=msgspec.structs.replace(role.per_member, gpus=int(role.name in ("trainer", "rollout"))),
        )
        for role in job.roles
    }
    in_order = tuple(roles[name] for name in ("rollout", "trainer", "trajectories", "reward"))
    node = Resources(cpus=8, gpus=4, mem=8 * 2**30)
    group = msgspec.structs.replace(job.node_groups[0], nodes=2, min_nodes=2, node=node)
    return msgspec.structs.replace(job, roles=in_order, node_groups=(group,))


@pytest.mark.parametrize("gap", [1.0, 1.25])
def test_manager_killed_at_any_record_of_a_promotion_assigns_no_gpu_that_is_in_use(gap: float) -> None:
    """The gap between the two managers determines which processes report first to the second manager."""
    job = job_on_shared_gpus()
    undisturbed, _ = run_to_end(job=job)
    assert (len(undisturbed.promotions), undisturbed.shared_gpus) == (1, [])
    for kill_at in around_the_promotion(undisturbed.records):

        def doomed(site: Site, at: int = kill_at) -> None:
            site.kill_at, site.gap = at, gap

        site, state = run_to_end(doomed, job)
        assert (site.managers, site.shared_gpus, state.findings) == (2, [], {}), kill_at
        assert len(site.promotions) == 1, kill_at
        assert_nobody_else_came_back(site)


# ── on the node of an extra ──────────────────────────────────────────────────────────────────────────────────────────
def lost(prepared: Callable[[Site], None] = lambda site: None) -> Site:
    """Lose the trainer's node after the third commit, when an extra works on the spare beside a standby process."""

    def crashing(site: Site) -> None:
        site.at_step = {3: lambda site: site.crash(site.working()[TRAINER][-1].node)}
        prepared(site)

    site, state = run_to_end(crashing, EXTRAS)
    assert_nobody_else_came_back(site)
    assert EXTRA not in state.replicas, site.kill_at
    return site


@pytest.fixture(scope="module")
def crashed() -> Site:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        return lost()


def resized(records: list[ev.Stamped]) -> list[int]:
    """Return the numbers of the records that change the number of rollouts."""
    return [s.seq for s in records if isinstance(s.event, ev.Decided) and isinstance(s.event.action, Resize)]


def test_trainer_of_a_crashed_node_takes_the_extras_node(crashed: Site) -> None:
    assert crashed.promotions == ["standby/n5#1 trainer/0#2"]
    assert len(resized(crashed.records)) == 2
    assert incarnations_of(crashed)[EXTRA] == {Incarnation(EXTRA, 1)}


def joined(records: list[ev.Stamped], incarnation: Incarnation) -> int:
    return next(s.seq for s in records if isinstance(s.event, ev.Joined) and s.event.incarnation == incarnation)


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_manager_killed_at_any_record_around_a_resize_starts_and_stops_the_same_extra(
    crashed: Site, before: bool
) -> None:
    start, stop = resized(crashed.records)
    excluded = next(
        s.seq for s in crashed.records if isinstance(s.event, ev.Decided) and isinstance(s.event.action, Exclude)
    )
    assert excluded < stop
    for kill_at in (
        *range(start - 1, joined(crashed.records, Incarnation(EXTRA, 1)) + 2),
        *range(excluded, joined(crashed.records, Incarnation(TRAINER, 2)) + 2),
    ):

        def doomed(site: Site, at: int = kill_at) -> None:
            site.kill_at, site.before = at, before

        site = lost(doomed)
        assert site.managers == 2, kill_at
        assert site.promotions == crashed.promotions, kill_at
        assert len(incarnations_of(site).get(EXTRA, ())) <= 1, kill_at
