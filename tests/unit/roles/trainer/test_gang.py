"""Real trainer processes that die at every kind of moment; what they end with is compared bit for bit."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct
from torch import Tensor

from rrl.core.types import Incarnation, NodeName
from rrl.roles.models.policy import build_model
from rrl.roles.trainer.checkpoint import Checkpoints
from rrl.roles.trainer.learner import Learner
from rrl.roles.trajectories.store import Store
from rrl.roles.trajectories.types import CommittedState, Denied, NotReady
from rrl.roles.worker.connection import FENCED_EXIT
from rrl.tests.support.roles.trainer import harness
from rrl.tests.support.roles.trainer.mortal import MOMENTS, SEALED, SHARED
from rrl.tests.support.roles.trainer.stage import GANG, VOCABULARY, Stage, nursery

pytestmark = pytest.mark.torch

KILLED = -9


@pytest.fixture(scope="module")
def processes() -> Iterator[ForkServerContext]:
    with nursery() as context:
        yield context


class End(Struct):
    """What a run has committed last: all tensors, and what each member had beside."""

    tensors: dict[str, Tensor]
    rest: list[bytes]

    def __eq__(self, other: object) -> bool:
        """Bit for bit."""
        return isinstance(other, End) and self.rest == other.rest and self.distance(other) == 0.0

    def distance(self, other: End) -> float:
        assert self.tensors.keys() == other.tensors.keys()
        return max((tensor - other.tensors[name]).abs().max().item() for name, tensor in self.tensors.items())


def end_of(stage: Stage) -> End:
    state = stage.store.committed(Incarnation(GANG, 1000))
    assert isinstance(state, CommittedState)
    assert state.manifest is not None
    assert state.number == stage.steps, stage.logs()
    model = build_model(stage.job.model, VOCABULARY, seed=99)
    student = Learner(model, harness.settings(), steps=stage.steps, temperature=1.0)
    Checkpoints(stage.lab.run, 1000, retained=2).read(state.manifest, student)
    folder = stage.lab.run.path / state.manifest["folder"]
    return End(student.tensors(), [(folder / f"rank-{rank}.msgpack").read_bytes() for rank in range(stage.world)])


async def undisturbed(path: Path, processes: ForkServerContext, world: int, steps: int, **trainer: Any) -> End:
    async with Stage(path, processes, world=world, steps=steps, **trainer).open() as stage:
        assert await stage.live() == [0] * world, stage.logs()
        return end_of(stage)


async def dies(stage: Stage, moment: str, step: int, rank: int = 0) -> None:
    codes = await stage.live(moment, step, rank)
    assert codes[rank] == KILLED, (codes, stage.logs())
    assert all(code == FENCED_EXIT for code in codes[:rank] + codes[rank + 1 :]), (codes, stage.logs())


def goes_on_from(stage: Stage) -> str:
    """Return the state that the newest incarnation continued from."""
    lines = stage.log(stage.incarnation).splitlines()
    return next(line for line in lines if "continues from" in line).split("from ")[1]


def test_two_members_learn_what_one_process_learns(tmp_path: Path, processes: ForkServerContext) -> None:
    async def story() -> None:
        one = await undisturbed(tmp_path / "1", processes, 1, 3)
        two = await undisturbed(tmp_path / "2", processes, 2, 3)
        assert one.distance(two) < 1e-5

    asyncio.run(story())


def test_only_rank_0_requests_the_batch_and_each_member_gets_its_share(
    tmp_path: Path, processes: ForkServerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Incarnation, int]] = []
    bind = Store.bind

    def counted(store: Store, incarnation: Incarnation, number: int) -> NotReady | Denied | None:
        asked.append((incarnation, number))
        return bind(store, incarnation, number)

    monkeypatch.setattr(Store, "bind", counted)

    async def story() -> None:
        one = await undisturbed(tmp_path / "1", processes, 1, 2)
        asked.clear()
        two = await undisturbed(tmp_path / "2", processes, 2, 2, micro_batch=2)  # the second has none for its last part
        assert {incarnation.replica for incarnation, _ in asked} == {GANG}
        assert one.distance(two) < 1e-5

    asyncio.run(story())


@pytest.mark.parametrize("rank", [0, 1])
def test_member_killed_during_batch_sharing_is_blamed_and_the_batch_repeats(
    tmp_path: Path, processes: ForkServerContext, rank: int
) -> None:
    async def story() -> None:
        async with Stage(tmp_path / "killed", processes, world=2, steps=2).open() as stage:
            await dies(stage, SHARED, 2, rank)
            assert await stage.live() == [0, 0], stage.logs()
            assert end_of(stage) == await undisturbed(tmp_path / "whole", processes, 2, 2)

    asyncio.run(story())


def test_a_trainer_killed_while_it_saves_ends_bit_equal_to_one_that_was_not(
    tmp_path: Path, processes: ForkServerContext
) -> None:
    async def story() -> None:
        async with Stage(tmp_path / "killed", processes, world=1, steps=3).open() as stage:
            await dies(stage, "in the files", 2)
            await dies(stage, "after the commit", 2)
            assert goes_on_from(stage) == "the commit of step 1"
            assert await stage.live() == [0], stage.logs()
            assert goes_on_from(stage) == "the commit of step 2"
            assert end_of(stage) == await undisturbed(tmp_path / "whole", processes, 1, 3)

    asyncio.run(story())


def test_a_gang_goes_on_from_its_snapshots_and_finishes_their_commit(
    tmp_path: Path, processes: ForkServerContext
) -> None:
    async def story() -> None:
        async with Stage(tmp_path / "killed", processes, world=2, steps=3, snapshots=True).open() as stage:
            await dies(stage, SEALED, 2, rank=1)
            stage.agent_dies(NodeName("n1"))  # with the node: only its buddy has the second member's state
            stage.agent_starts(NodeName("n1"))
            assert await stage.live() == [0, 0], stage.logs()
            assert goes_on_from(stage) == "the snapshot of step 2; committed is 1"
            assert end_of(stage) == await undisturbed(tmp_path / "whole", processes, 2, 3)

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
                tmp_path / f"killed-{first}", processes, world=world, steps=steps, snapshots=snapshots,
                uncommitted=uncommitted,
            )  # fmt: skip
            async with killed.open() as stage:
                for step, moment in enumerate((*MOMENTS, SEALED), start=1 + first):
                    await dies(stage, moment, step, rank=0 if "commit" in moment else step % world)
                    lost = step - (stage.committed or 0) - 1
                    assert lost <= uncommitted, stage.logs()
                assert await stage.live() == [0] * world, stage.logs()
                assert end_of(stage) == whole

    asyncio.run(story())


def test_another_number_of_members_goes_on_from_the_same_checkpoint(
    tmp_path: Path, processes: ForkServerContext
) -> None:
    async def story() -> None:
        async with Stage(tmp_path / "changed", processes, world=2, steps=3).open() as stage:
            await dies(stage, "in the step", 3)
            assert await stage.live(world=1) == [0], stage.logs()
            assert end_of(stage).distance(await undisturbed(tmp_path / "whole", processes, 1, 3)) < 1e-5

    asyncio.run(story())
