"""Rollouts and stores die while answers move between rollouts, and a rollout dies with a due group.

A group is due if no later step may train it. The store is a process of its own, which is killed with SIGKILL.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rrl.roles.trajectories.client import Fenced, TrajectoryClient
from rrl.roles.trajectories.dispatch.lengths import Answer
from rrl.roles.trajectories.dispatch.token_times import Observed
from rrl.roles.trajectories.durable.records import LengthsLearned, TimesObserved
from rrl.roles.trajectories.types import Item, PostScores, Score, Segment
from rrl.tests.support.roles.trajectories.crew import (
    ALL,
    OTHER,
    REWARD,
    ROLLOUT,
    TRAINER,
    incarnation_of,
    manifest,
    open_store,
    segment,
)
from rrl.tests.support.roles.trajectories.store_process import (
    StoreProcess,
    batch_of,
    lease_scoring,
    open_clients,
    part_of,
)

DEADLINE_S = 120.0
clients = partial(open_clients, DEADLINE_S)
SUCCESSOR = incarnation_of("rollout/0", 2)
SEGMENT = 20
LIMIT = 400
PLACES = 4
CROWD: dict[str, Any] = {"group_size": 2, "groups_per_batch": 4, "max_ahead_batches": 0, "max_new_tokens": LIMIT}
"""Settings for a batch of eight answers, all of which the first rollout leases."""


@pytest.fixture
def processes() -> Iterator[list[StoreProcess]]:
    made: list[StoreProcess] = []
    yield made
    for process in made:
        process.kill()


def _crowded(tmp_path: Path, processes: list[StoreProcess]) -> StoreProcess:
    """Start a store that has learned enough to move answers.

    It knows lengths of answers, and that tokens take longer while more answers run.
    """
    process = StoreProcess(tmp_path, **CROWD)
    processes.append(process)
    store = open_store(process.folder, **CROWD)
    for number in range(40):
        store._state.lengths.observe((2, 3, number % 7), [Answer(length, True) for length in (60, 120, 240, 300)])
    store._durable.write(LengthsLearned(store._state.lengths.state()))
    for who in (ROLLOUT, OTHER):
        shown = tuple((running, (1 + running) / 100) for running in (8, 6, 4, 1) for _ in range(16))
        store._durable.write(TimesObserved(who, Observed(shown)))
    store.flush()
    store.close()
    process.start(ALL)
    return process


async def _grow(client: TrajectoryClient, made: dict[int, int], trajectories: Sequence[int]) -> tuple[int, ...]:
    """Append a segment to each trajectory, and return those on which the client no longer works."""
    segments = [segment(each, made[each], (5,) * SEGMENT) for each in trajectories]
    gone = await client.append(segments)
    for each in trajectories:
        made[each] += SEGMENT
    return gone


async def _begin(first: TrajectoryClient, second: TrajectoryClient) -> dict[int, int]:
    """Let the first rollout work on everything, while the second one has free places.

    Return the lengths of the answers once the first one was requested to hand over some of them.
    """
    made = {item.trajectory: 0 for item in await first.lease(8)}
    assert len(made) == 8
    assert await second.lease(PLACES, wait=0.0) == ()
    assert await _grow(first, made, list(made)) == ()
    assert first._requested_back
    return made


async def _leased(client: TrajectoryClient, at_most: int, count: int, holding: Sequence[int] = ()) -> list[Item]:
    """Lease until the client has ``count`` items."""
    items: list[Item] = []
    while len(items) < count:
        items += await client.lease(at_most - len(items), 1.0, [*holding, *(item.trajectory for item in items)])
    return items


def _length(item: Item) -> int:
    return sum(len(each.tokens) for each in item.so_far)


async def _end_step(
    workers: dict[TrajectoryClient, dict[int, int]], reward: TrajectoryClient, trainer: TrajectoryClient
) -> set[int]:
    """End all answers and train the step. Return the trajectories of the step."""
    for client, made in workers.items():
        assert await client.append([segment(each, made[each], (1,)) for each in made], list(made)) == ()
    scored: set[int] = set()
    while len(scored) < 8:
        items = await lease_scoring(reward, 8)
        await reward.ask(PostScores, tuple(Score(item.trajectory, 1.0, 1.0) for item in items))
        scored |= {item.trajectory for item in items}
    batch = None
    while batch is None:
        batch = await batch_of(trainer, 1)
    await trainer.commit(1, manifest(1), batch.digest)
    assert {each.id: each.length for each in batch.trajectories} == {
        each: length + 1 for made in workers.values() for each, length in made.items()
    }
    return {each.id for each in batch.trajectories}


async def test_rollout_that_dies_after_it_was_requested_to_hand_over_leaves_all_its_tokens_to_others(
    tmp_path: Path, processes: list[StoreProcess]
) -> None:
    process = _crowded(tmp_path, processes)
    async with clients(process, *ALL, SUCCESSOR) as (first, second, reward, trainer, successor):
        made = await _begin(first, second)
        process.set_membership({SUCCESSOR, *ALL[1:]})
        heirs = {successor: 4, second: PLACES}
        held = {
            client: {each.trajectory: _length(each) for each in await _leased(client, count, count)}
            for client, count in heirs.items()
        }
        with pytest.raises(Fenced):
            await _grow(first, dict(made), list(made))
        assert {trajectory: length for part in held.values() for trajectory, length in part.items()} == made
        assert not successor._requested_back
        assert len(await _end_step(held, reward, trainer)) == 8


async def test_store_killed_with_moves_under_way_moves_nothing_that_is_not_durable_and_loses_no_token(
    tmp_path: Path, processes: list[StoreProcess]
) -> None:
    """The store is killed after one answer was handed over and before it was leased again.

    At this time another answer is requested back.
    """

    process = _crowded(tmp_path, processes)
    async with clients(process, *ALL) as (first, second, reward, trainer):
        made = await _begin(first, second)
        gone = await _grow(first, made, list(made))
        assert gone
        process.kill()
        await asyncio.to_thread(process.start, ALL)
        kept = {each: length for each, length in made.items() if each not in gone}
        again = await first.lease(0, 1.0, list(kept))
        assert again == (), "the first rollout got answers that it already holds"
        moved = {item.trajectory: _length(item) for item in await _leased(second, PLACES, len(gone))}
        assert moved == {each: made[each] for each in gone}
        more = await _grow(first, kept, list(kept))
        more_moved = {}
        if more:
            more_moved = {
                item.trajectory: _length(item) for item in await _leased(second, PLACES, len(more), list(moved))
            }
        kept = {each: length for each, length in kept.items() if each not in more}
        assert len(await _end_step({first: kept, second: {**moved, **more_moved}}, reward, trainer)) == 8


async def test_store_killed_before_an_answer_to_a_hand_over_gives_the_repeated_request_the_same_result(
    tmp_path: Path, processes: list[StoreProcess]
) -> None:
    """The client does not learn whether its hand-over was carried out.

    It therefore sends the request again to the next store.
    """

    process = _crowded(tmp_path, processes)
    async with clients(process, *ALL) as (first, second, reward, trainer):
        made = await _begin(first, second)
        process.kill()
        growing = asyncio.create_task(_grow(first, made, list(made)))
        await asyncio.to_thread(process.start, ALL)
        gone = await growing
        assert gone
        kept = {each: length for each, length in made.items() if each not in gone}
        assert await first.lease(0, 1.0, list(kept)) == ()
        moved = {item.trajectory: _length(item) for item in await _leased(second, PLACES, len(gone))}
        assert moved == {each: made[each] for each in gone}
        assert len(await _end_step({first: kept, second: moved}, reward, trainer)) == 8


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
