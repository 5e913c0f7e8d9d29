"""A rollout dies with a due group: one that no later step may train. The store is a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from rrl.roles.trajectories.client import TrajectoryClient
from rrl.roles.trajectories.types import Item, PostScores, Score, Segment
from rrl.tests.support.roles.trajectories.crew import ALL, OTHER, REWARD, ROLLOUT, TRAINER, manifest, segment
from rrl.tests.support.roles.trajectories.store_process import (
    StoreProcess,
    batch_of,
    lease_scoring,
    open_clients,
    part_of,
)

DEADLINE_S = 120.0
clients = partial(open_clients, DEADLINE_S)


@pytest.fixture
def processes() -> Iterator[list[StoreProcess]]:
    made: list[StoreProcess] = []
    yield made
    for process in made:
        process.kill()


async def _leased(client: TrajectoryClient, at_most: int, count: int, holding: Sequence[int] = ()) -> list[Item]:
    """Lease until the client has ``count`` items."""
    items: list[Item] = []
    while len(items) < count:
        items += await client.lease(at_most - len(items), 1.0, [*holding, *(item.trajectory for item in items)])
    return items


def _length(item: Item) -> int:
    return sum(len(each.tokens) for each in item.so_far)


async def test_step_goes_on_with_the_due_groups_of_a_dead_rollout_without_its_restart(
    tmp_path: Path, processes: list[StoreProcess]
) -> None:
    """Step 2 is the last step that may train the group of the dead rollout.

    The step waits for the group's tokens, which another rollout samples.
    """
    settings = {"staleness": 1, "groups_per_part": 1}

    process = StoreProcess(tmp_path, **settings)
    processes.append(process)
    process.start(ALL)
    weights = 0
    async with clients(process, REWARD, TRAINER) as (reward, trainer):
        first, second = (
            TrajectoryClient(process.keys, each, process.find, timeout=DEADLINE_S, weights=lambda: weights)
            for each in (ROLLOUT, OTHER)
        )
        running = [asyncio.create_task(each.run()) for each in (first, second)]

        async def finish(items: Sequence[Item], step: int) -> None:
            await second.append(
                [
                    Segment(each.trajectory, _length(each), (5,), (-0.5,), segment(0, step=step).version)
                    for each in items
                ],
                [each.trajectory for each in items],
            )
            left = len(items)
            while left:
                scored = await lease_scoring(reward, 8)
                await reward.ask(PostScores, tuple(Score(item.trajectory, 1.0, 1.0) for item in scored))
                left -= len(scored)

        due = await first.lease(2)  # a group that was begun with the weights of step 0
        await first.append([segment(each.trajectory, 0, (7, 8)) for each in due])
        await finish(await second.lease(4), 0)
        batch = await batch_of(trainer, 1)
        assert batch is not None
        await trainer.commit(1, manifest(1), batch.digest)
        weights = 1
        await finish(await second.lease(2), 1)
        part = await part_of(trainer, 2, 0)
        assert part is not None
        assert not part.last
        assert await part_of(trainer, 2, 1, 0.0) is None, "the place of the due group was given to another group"
        process.set_membership(ALL[1:])  # the rollout is dead, and no next incarnation has started
        taken = await _leased(second, 2, 2)
        assert {each.trajectory: each.so_far for each in taken} == {
            each.trajectory: (segment(each.trajectory, 0, (7, 8)),) for each in due
        }
        await finish(taken, 1)
        last = await part_of(trainer, 2, 1)
        assert last is not None
        assert last.last
        assert {each.id for each in last.trajectories} == {each.trajectory for each in due}
        assert last.max_age == 1
        for each in (first, second):
            await each.close()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
