"""Real trainer processes that train each step in three parts and die between two of them."""

from __future__ import annotations

import asyncio
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rrl.core.types import Incarnation
from rrl.roles.trajectories.store import Store
from rrl.roles.trajectories.types import Denied, NotReady, Share
from rrl.tests.support.roles import folders
from rrl.tests.support.roles.trainer.gang_runs import End, dies, end_of, goes_on_from, undisturbed
from rrl.tests.support.roles.trainer.mortal import AFTER_A_PART, MOMENTS, SEALED, SHARED
from rrl.tests.support.roles.trainer.stage import GANG, Stage

pytestmark = pytest.mark.torch


def test_two_members_with_parts_reach_the_weights_of_one_process_with_whole_batches(
    tmp_path: Path, processes: ForkServerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Incarnation, int, int | None]] = []
    bind = Store.bind

    def counted(
        store: Store, incarnation: Incarnation, number: int, index: int | None = None, share: Share | None = None
    ) -> NotReady | Denied | None:
        asked.append((incarnation, number, index))
        return bind(store, incarnation, number, index, share)

    monkeypatch.setattr(Store, "bind", counted)

    async def story() -> None:
        whole = await undisturbed(tmp_path / "whole", processes, 1, 3)
        asked.clear()
        parts = await undisturbed(tmp_path / "parts", processes, 2, 3, stream=True, micro_batch_tokens=12)
        assert {incarnation.gang.replica for incarnation, *_ in asked} == {GANG}
        assert sorted({(number, index) for _, number, index in asked}) == [
            (number, index) for number in (1, 2, 3) for index in (0, 1, 2)
        ]
        assert 0 < whole.distance(parts) < 1e-5

    asyncio.run(story())


@pytest.mark.parametrize(
    ("world", "rank", "moment"),
    [
        (2, 1, AFTER_A_PART),
        pytest.param(1, 0, AFTER_A_PART, marks=pytest.mark.long),
        pytest.param(2, 0, SHARED, marks=pytest.mark.long),
    ],
)
def test_trainer_killed_after_a_part_ends_bit_equal_to_one_that_was_not(
    tmp_path: Path, processes: ForkServerContext, world: int, rank: int, moment: str
) -> None:
    async def story() -> None:
        expected = await undisturbed(tmp_path / "whole", processes, world, 3, stream=True)
        async with Stage(tmp_path / "killed", processes, world=world, steps=3, stream=True).open() as stage:
            await dies(stage, moment, 3, rank)
            assert await stage.live() == [0] * world, stage.logs()
            assert goes_on_from(stage) in ("the commit of step 1", "the commit of step 2")
            assert end_of(stage) == expected

    asyncio.run(story())


@pytest.mark.long  # test_gang.py restores the snapshot of a whole step
def test_snapshot_of_a_step_in_parts_is_restored_and_its_commit_finished(
    tmp_path: Path, processes: ForkServerContext
) -> None:
    async def story() -> None:
        expected = await undisturbed(tmp_path / "whole", processes, 2, 3, stream=True)
        killed = Stage(tmp_path / "killed", processes, world=2, steps=3, stream=True, snapshots=True)
        async with killed.open() as stage:
            await dies(stage, SEALED, 2, rank=1)
            assert await stage.live() == [0, 0], stage.logs()
            assert goes_on_from(stage) == "the snapshot of step 2 (committed: step 1)"
            assert end_of(stage) == expected

    asyncio.run(story())


def _apart_from_files(end: End) -> End:
    """Return the final state without the files of the reference, whose names differ between runs."""
    rest = [msgspec.msgpack.decode(each) for each in end.rest]
    return End(end.tensors, [msgspec.msgpack.encode(each | {"reference": None}) for each in rest])


def test_a_bfloat16_gang_with_a_reference_ends_bit_equal_after_a_death_between_parts(
    tmp_path: Path, processes: ForkServerContext
) -> None:
    model = {"path": str(folders.tied_llama(tmp_path / "llama")), "dtype": "bfloat16"}
    settings: dict[str, Any] = {"kl": 0.1, "micro_batch_tokens": 12}

    def staged(name: str) -> Stage:
        return Stage(tmp_path / name, processes, world=2, steps=2, stream=True, model=model, **settings)

    async def story() -> None:
        async with staged("whole").open() as stage:
            assert await stage.live() == [0, 0], stage.logs()
            expected = _apart_from_files(end_of(stage))
        async with staged("killed").open() as stage:
            await dies(stage, AFTER_A_PART, 2)
            assert await stage.live() == [0, 0], stage.logs()
            assert _apart_from_files(end_of(stage)) == expected

    asyncio.run(story())


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("uncommitted", [1, 2])
@pytest.mark.parametrize("snapshots", [False, True])
def test_trainer_killed_repeatedly_between_and_in_parts_ends_bit_equal(
    tmp_path: Path, processes: ForkServerContext, world: int, uncommitted: int, snapshots: bool
) -> None:
    async def story() -> None:
        moments = (AFTER_A_PART, *MOMENTS, AFTER_A_PART, SEALED)
        steps = len(moments) + 2
        whole = await undisturbed(tmp_path / "whole", processes, world, steps, stream=True)
        killed = Stage(
            tmp_path / "killed",
            processes,
            world=world,
            steps=steps,
            snapshots=snapshots,
            uncommitted=uncommitted,
            stream=True,
        )
        async with killed.open() as stage:
            for step, moment in enumerate(moments, start=1):
                await dies(stage, moment, step, rank=0 if "commit" in moment else step % world)
                assert step - (stage.committed or 0) - 1 <= uncommitted, stage.logs()
            assert await stage.live() == [0] * world, stage.logs()
            assert end_of(stage) == whole

    asyncio.run(story())
