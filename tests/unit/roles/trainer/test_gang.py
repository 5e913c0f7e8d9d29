"""Real trainer processes that are killed at every kind of moment end bit for bit as undisturbed ones."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

from rrl.core.types import Incarnation, NodeName, ReplicaId, Version, member_id
from rrl.roles.trajectories.store import Store
from rrl.roles.trajectories.types import Denied, NotReady, Share
from rrl.tests.support.roles.trainer.gang_runs import End, dies, end_of, goes_on_from, undisturbed
from rrl.tests.support.roles.trainer.mortal import MOMENTS, PUBLISHING, SEALED, SHARED
from rrl.tests.support.roles.trainer.stage import GANG, Stage

pytestmark = pytest.mark.torch


Undisturbed = Callable[[int, int], Awaitable[End]]


@pytest.fixture(scope="module")
def undisturbed_end(tmp_path_factory: pytest.TempPathFactory, processes: ForkServerContext) -> Undisturbed:
    """Return a function that computes the final state of an undisturbed run, once per number of members and steps."""
    ends: dict[tuple[int, int], End] = {}

    async def end(world: int, steps: int) -> End:
        if (world, steps) not in ends:
            ends[world, steps] = await undisturbed(tmp_path_factory.mktemp("undisturbed"), processes, world, steps)
        return ends[world, steps]

    return end


def test_two_members_reach_the_weights_of_one_process(undisturbed_end: Undisturbed) -> None:
    async def story() -> None:
        one, two = await undisturbed_end(1, 3), await undisturbed_end(2, 3)
        assert one.distance(two) < 1e-5
        assert len(one.metrics) == 3
        for expected, got in zip(one.metrics, two.metrics, strict=True):
            for metrics in (expected, got):
                metrics.pop("length_bias", None)  # depends on which further answers are complete at the commit
            assert got == pytest.approx(expected, rel=1e-4, abs=1e-6)

    asyncio.run(story())


def test_gang_that_diverges_keeps_the_last_good_step_and_every_member_says_what_was_observed(
    tmp_path: Path, processes: ForkServerContext
) -> None:
    """A rate of 1e39 is infinite in float32: the weights of step 1 are not finite, and step 1 is not published."""

    async def story() -> None:
        async with Stage(tmp_path, processes, world=2, steps=3, learning_rate=1e39).open() as stage:
            assert await stage.live() == [1, 1], stage.logs()
            assert stage.committed is None
            assert [version.step for version in stage.versions] == [0]
            for rank in range(2):
                assert "a weight is not finite after step 1: loss " in stage.log(1, rank), stage.logs()

    asyncio.run(story())


def test_each_member_requests_its_share_of_the_batch(
    tmp_path: Path, processes: ForkServerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: set[tuple[ReplicaId, int, Share | None]] = set()
    bind = Store.bind

    def counted(store: Store, incarnation: Incarnation, number: int, *words: Any) -> NotReady | Denied | None:
        asked.add((incarnation.replica, number, words[-1]))
        return bind(store, incarnation, number, *words)

    monkeypatch.setattr(Store, "bind", counted)

    async def story() -> None:
        one = await undisturbed(tmp_path / "1", processes, 1, 2)
        asked.clear()
        # the second member has no examples for its last micro-batch
        two = await undisturbed(tmp_path / "2", processes, 2, 2, micro_batch_tokens=12)
        assert asked == {
            (member_id(GANG, rank), step, Share(rank, 2, "sequence")) for rank in range(2) for step in (1, 2)
        }
        assert one.distance(two) < 1e-5

    asyncio.run(story())


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.long)])
def test_member_killed_during_batch_sharing_is_blamed_and_the_batch_repeats(
    tmp_path: Path, processes: ForkServerContext, undisturbed_end: Undisturbed, rank: int
) -> None:
    async def story() -> None:
        async with Stage(tmp_path / "killed", processes, world=2, steps=2).open() as stage:
            await dies(stage, SHARED, 2, rank)
            assert await stage.live() == [0, 0], stage.logs()
            assert end_of(stage) == await undisturbed_end(2, 2)

    asyncio.run(story())


def test_trainer_killed_while_it_saves_ends_bit_equal_to_an_undisturbed_one(
    tmp_path: Path, processes: ForkServerContext, undisturbed_end: Undisturbed
) -> None:
    async def story() -> None:
        async with Stage(tmp_path / "killed", processes, world=1, steps=3).open() as stage:
            await dies(stage, "in the files", 2)
            await dies(stage, "after the commit", 2)
            assert goes_on_from(stage) == "the commit of step 1"
            assert await stage.live() == [0], stage.logs()
            assert goes_on_from(stage) == "the commit of step 2"
            assert end_of(stage) == await undisturbed_end(1, 3)

    asyncio.run(story())


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.long), 1])
def test_gang_killed_while_publishing_serves_no_partial_version_and_publishes_its_commit_first(
    tmp_path: Path, processes: ForkServerContext, undisturbed_end: Undisturbed, rank: int
) -> None:
    async def story() -> None:
        async with Stage(tmp_path / "killed", processes, world=2, steps=3).open() as stage:
            await dies(stage, PUBLISHING, 2, rank)
            first, committed = list(stage.versions), stage.committed
            assert first == [Version(0, 1), Version(1, 1)]
            assert await stage.live() == [0, 0], stage.logs()
            later = stage.versions[len(first) :]
            assert later == [Version(step, 2) for step in range(committed or 0, 4)]
            assert end_of(stage) == await undisturbed_end(2, 3)

    asyncio.run(story())


def test_gang_resumes_from_its_snapshots_and_finishes_their_commit(
    tmp_path: Path, processes: ForkServerContext, undisturbed_end: Undisturbed
) -> None:
    async def story() -> None:
        async with Stage(tmp_path / "killed", processes, world=2, steps=3, snapshots=True).open() as stage:
            await dies(stage, SEALED, 2, rank=1)
            # as if the node was lost: only the agent of another node has the state of the second member
            stage.agent_dies(NodeName("n1"))
            stage.agent_starts(NodeName("n1"))
            assert await stage.live() == [0, 0], stage.logs()
            assert goes_on_from(stage) == "the snapshot of step 2 (committed: step 1)"
            assert end_of(stage) == await undisturbed_end(2, 3)

    asyncio.run(story())


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("uncommitted", [1, 2])
@pytest.mark.parametrize("snapshots", [False, True])
def test_trainer_killed_repeatedly_ends_bit_equal(
    tmp_path: Path, processes: ForkServerContext, world: int, uncommitted: int, snapshots: bool
) -> None:
    async def story() -> None:
        steps = len(MOMENTS) + 3
        whole = await undisturbed(tmp_path / "whole", processes, world, steps)
        for first in range(2):
            killed = Stage(
                tmp_path / f"killed-{first}",
                processes,
                world=world,
                steps=steps,
                snapshots=snapshots,
                uncommitted=uncommitted,
            )
            async with killed.open() as stage:
                for step, moment in enumerate((*MOMENTS, SEALED), start=1 + first):
                    await dies(stage, moment, step, rank=0 if "commit" in moment else step % world)
                    lost = step - (stage.committed or 0) - 1
                    assert lost <= uncommitted, stage.logs()
                assert await stage.live() == [0] * world, stage.logs()
                assert end_of(stage) == whole

    asyncio.run(story())


def test_gang_of_another_size_resumes_from_the_same_checkpoint(
    tmp_path: Path, processes: ForkServerContext, undisturbed_end: Undisturbed
) -> None:
    async def story() -> None:
        async with Stage(tmp_path / "changed", processes, world=2, steps=3).open() as stage:
            await dies(stage, "in the step", 3)
            assert await stage.live(world=1) == [0], stage.logs()
            assert end_of(stage).distance(await undisturbed_end(1, 3)) < 1e-5

    asyncio.run(story())
