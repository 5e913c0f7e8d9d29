"""A gang of real trainer processes that trains adapters, and one that updates its weights in host memory."""

from __future__ import annotations

import asyncio
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from rrl.tests.support.roles import folders
from rrl.tests.support.roles.trainer.gang_runs import dies, end_of, goes_on_from
from rrl.tests.support.roles.trainer.mortal import PUBLISHED
from rrl.tests.support.roles.trainer.stage import Stage

pytestmark = pytest.mark.torch

_ADAPTED: dict[str, Any] = {"lora": {"rank": 3, "alpha": 6.0}, "learning_rate": 1e-2, "kl": 0.1}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {"path": str(folders.tied_llama(tmp_path_factory.mktemp("model") / "llama"))}


def _published(stage: Stage, number: int) -> dict[str, torch.Tensor]:
    content = (stage.lab.run.path / PUBLISHED / str(number)).read_bytes()
    return {
        name: torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).view(shape)
        for name, dtype, shape, data in msgspec.msgpack.decode(content)
    }


def test_members_with_shards_of_adapters_reach_and_publish_the_weights_of_one_process(
    tmp_path: Path, processes: ForkServerContext, llama: dict[str, Any]
) -> None:
    async def story() -> None:
        ends, versions = [], []
        for world in (1, 2):
            staged = Stage(tmp_path / str(world), processes, world=world, steps=2, model=llama, **_ADAPTED)
            (staged.lab.run.path / PUBLISHED).mkdir()
            async with staged.open() as stage:
                assert await stage.live() == [0] * world, stage.logs()
                ends.append(end_of(stage))
                versions.append([_published(stage, number) for number in range(3)])
        assert ends[0].distance(ends[1]) < 1e-5
        for one, two in zip(*versions, strict=True):
            assert all(torch.allclose(tensor, two[name], atol=1e-5) for name, tensor in one.items())
        first, last = versions[1][0], versions[1][2]
        assert not torch.equal(first["model.layers.0.mlp.up_proj.weight"], last["model.layers.0.mlp.up_proj.weight"])

    asyncio.run(story())


@pytest.mark.parametrize(
    ("dtype", "more"),
    [
        pytest.param("float32", _ADAPTED, id="adapters"),
        pytest.param("bfloat16", _ADAPTED | {"offload_optimizer": True}, id="both", marks=pytest.mark.long),
        pytest.param("float32", {"offload_optimizer": True}, id="host memory", marks=pytest.mark.long),
    ],
)
def test_member_killed_between_weights_and_moments_of_a_checkpoint_commits_nothing_and_ends_bit_equal(
    tmp_path: Path, processes: ForkServerContext, llama: dict[str, Any], dtype: str, more: dict[str, Any]
) -> None:
    async def story() -> None:
        model = llama | {"dtype": dtype}
        async with Stage(tmp_path / "whole", processes, world=2, steps=2, model=model, **more).open() as stage:
            assert await stage.live() == [0, 0], stage.logs()
            expected = end_of(stage)
        async with Stage(tmp_path / "killed", processes, world=2, steps=2, model=model, **more).open() as stage:
            await dies(stage, "between two files", 2, 1)
            assert stage.committed == 1
            assert await stage.live() == [0, 0], stage.logs()
            assert goes_on_from(stage) == "the commit of step 1"
            assert end_of(stage) == expected

    asyncio.run(story())
