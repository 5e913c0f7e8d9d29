"""A gang of real trainer processes that lends before each step trains as one that never lends, bit for bit."""

from __future__ import annotations

import asyncio
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

from rrl.core.types import Incarnation
from rrl.roles.trajectories.types import StoredMetrics
from rrl.tests.support.roles.trainer.gang_runs import dies, end_of, undisturbed
from rrl.tests.support.roles.trainer.mortal import LENDING
from rrl.tests.support.roles.trainer.stage import GANG, Stage

pytestmark = pytest.mark.torch

STEPS = 5


@pytest.mark.parametrize(("world", "snapshots"), [(2, True), (1, False)])
def test_trainer_that_lends_before_each_step_ends_bit_equal(
    tmp_path: Path, processes: ForkServerContext, world: int, snapshots: bool
) -> None:
    async def story() -> None:
        same: dict[str, Any] = {"stream": True, "kl": 0.1}
        never = await undisturbed(tmp_path / "never", processes, world, STEPS, **same)
        lends = Stage(tmp_path / "lends", processes, world=world, steps=STEPS, snapshots=snapshots, lends=True, **same)
        async with lends.open() as stage:
            assert await stage.live() == [0] * world, stage.logs()
            # a leader may take the baton back before the guest has bound it
            assert all(1 <= guest.turns <= STEPS for guest in stage.guests), stage.logs()
            assert end_of(stage) == never
            stored = stage.store.metrics(Incarnation(GANG, 1000), 0)
            assert isinstance(stored, StoredMetrics)
            assert all(step.metrics["lent_s"] > 0 for step in stored.commits)

    asyncio.run(story())


@pytest.mark.parametrize(("moment", "rank"), [(moment, index % 2) for index, moment in enumerate(LENDING)])
def test_member_killed_while_the_gpus_are_lent_costs_nothing_but_a_restart(
    tmp_path: Path, processes: ForkServerContext, moment: str, rank: int
) -> None:
    async def story() -> None:
        never = await undisturbed(tmp_path / "never", processes, 2, 3, stream=True)
        async with Stage(
            tmp_path / "lends", processes, world=2, steps=3, snapshots=True, lends=True, stream=True
        ).open() as stage:
            await dies(stage, moment, 2, rank)
            assert await stage.live() == [0, 0], stage.logs()
            assert end_of(stage) == never

    asyncio.run(story())
