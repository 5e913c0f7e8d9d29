"""A model folder under a gang of real processes: tied embeddings, bfloat16, a reference, and parts of a batch.

One member dies.
"""

from __future__ import annotations

import asyncio
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rrl.tests.support.roles import folders
from rrl.tests.support.roles.trainer.gang_runs import End, dies, end_of, goes_on_from
from rrl.tests.support.roles.trainer.mortal import SEALED
from rrl.tests.support.roles.trainer.stage import Stage

pytestmark = pytest.mark.torch

_ALL_OF_IT: dict[str, Any] = {
    "kl": 0.1,
    "warm_start_steps": 2,
    "warm_start_batch": 8,
    "micro_batch_tokens": 12,
    "activation_checkpointing": True,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {"path": str(folders.tied_llama(tmp_path_factory.mktemp("model") / "llama"))}


def _apart_from_files(end: End) -> End:
    """Return the final state without the files of the reference.

    The names of these files differ between runs, and torch writes an identity of its own into them.
    """
    rest = [msgspec.msgpack.decode(each) for each in end.rest]
    assert all(each["reference"]["folder"].startswith("checkpoints/step-0.") for each in rest)
    return End(end.tensors, [msgspec.msgpack.encode(each | {"reference": None}) for each in rest])


@pytest.mark.long  # test_streaming_gang.py has a gang of this kind that trains in parts
@pytest.mark.parametrize(("world", "snapshots"), [(2, False), (1, False), (2, True)])
def test_a_bfloat16_gang_with_a_reference_ends_bit_equal_after_a_death(
    tmp_path: Path, processes: ForkServerContext, llama: dict[str, Any], world: int, snapshots: bool
) -> None:
    def staged(name: str) -> Stage:
        model = llama | {"dtype": "bfloat16"}
        return Stage(tmp_path / name, processes, world=world, steps=2, snapshots=snapshots, model=model, **_ALL_OF_IT)

    async def story() -> None:
        async with staged("whole").open() as stage:
            assert await stage.live() == [0] * world, stage.logs()
            expected = end_of(stage)
        async with staged("killed").open() as stage:
            await dies(stage, SEALED if snapshots else "after the commit", 1)
            assert await stage.live() == [0] * world, stage.logs()
            from_step_1 = "the snapshot of step 1 (committed: step 0)" if snapshots else "the commit of step 1"
            assert goes_on_from(stage) == from_step_1
            assert _apart_from_files(end_of(stage)) == _apart_from_files(expected)

    asyncio.run(story())


@pytest.mark.long
def test_two_members_with_a_folders_model_reach_the_weights_of_one_process(
    tmp_path: Path, processes: ForkServerContext, llama: dict[str, Any]
) -> None:
    async def story() -> None:
        ends = []
        for world in (1, 2):
            staged = Stage(tmp_path / str(world), processes, world=world, steps=2, model=llama, **_ALL_OF_IT)
            async with staged.open() as stage:
                assert await stage.live() == [0] * world, stage.logs()
                ends.append(end_of(stage))
        assert ends[0].distance(ends[1]) < 1e-5

    asyncio.run(story())
