"""Agents, rollouts and a trainer use a store behind a socket, which is killed while they work."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from rrl.roles.trajectories.batches import decode
from rrl.roles.trajectories.client import Fenced, FencedAttempt, Refused, TrajectoryClient
from rrl.roles.trajectories.episodes.requests import (
    EndTurn,
    EpisodeItem,
    FailAttempt,
    FinishEpisode,
    Follow,
    GetEpisode,
    OpenEpisode,
    PostReward,
)
from rrl.roles.trajectories.types import Sampling
from rrl.tests.support.roles.trajectories.agents import AGENTS, CREW, OTHER_AGENTS, open_agents_store
from rrl.tests.support.roles.trajectories.crew import BATCH, GROUP, ROLLOUT, TRAINER, incarnation_of, manifest, segment
from rrl.tests.support.roles.trajectories.store_process import (
    StoreProcess,
    batch_of,
    lease_episodes,
    open_clients,
    open_turn,
)

DEADLINE_S = 60.0
_clients = partial(open_clients, DEADLINE_S)
STEPS = 30


@pytest.fixture
def process(tmp_path: Path) -> Iterator[StoreProcess]:
    process = StoreProcess(tmp_path, agents=True)
    yield process
    process.kill()


async def _ask(
    client: TrajectoryClient, item: EpisodeItem, request: str, parent: int | None, offset: int
) -> tuple[int, tuple[int, ...]]:
    """Open a turn and follow it to its end. Return its number and its tokens."""
    turn = await open_turn(client, item.episode, item.attempt, request, parent, offset, (2, 3), 4, "hash")
    tokens: tuple[int, ...] = ()
    while True:
        new = await client.ask(Follow, turn, len(tokens), wait=0.5)
        if new is not None:
            tokens += new.tokens
            if new.finished:
                return turn, tokens


class _Run:
    """A run that records the answers which agents have read.

    For each turn, a rollout samples the turn's number, and a count of how often the turn was sampled.
    """

    def __init__(self) -> None:
        self.read: dict[tuple[int, int], list[tuple[int, ...]]] = {}
        """Answers that an agent has read, by (episode, attempt)."""
        self.trained: dict[int, tuple[int, ...]] = {}
        self.step = 0
        self.done = asyncio.Event()
        self.advanced = asyncio.Condition()

    async def act(self, client: TrajectoryClient) -> None:
        """Make up to four attempts at a time, each of two turns, until the run is done."""
        ended = asyncio.create_task(self.done.wait())
        working: dict[asyncio.Task[None], int] = {}
        while not self.done.is_set():
            if len(working) < 4:
                for item in await lease_episodes(client, 4 - len(working), 0.2, tuple(sorted(working.values()))):
                    working[asyncio.create_task(self._attempt(client, item))] = item.episode
            else:
                await asyncio.wait([*working, ended], return_when=asyncio.FIRST_COMPLETED)
            for task in [each for each in working if each.done()]:
                task.result()
                del working[task]
        for task in working:
            task.cancel()

    async def _attempt(self, client: TrajectoryClient, item: EpisodeItem) -> None:
        answers = self.read.setdefault((item.episode, item.attempt), [])
        first, tokens = await _ask(client, item, "first", None, 0)
        answers.append(tokens)
        answers.append((await _ask(client, item, "second", first, 2 + len(tokens)))[1])
        await client.ask(FinishEpisode, item.episode, item.attempt, 1.0)

    async def roll(self, client: TrajectoryClient) -> None:
        while not self.done.is_set():
            items = await client.lease(9, wait=0.2)
            for place in range(2):
                segments = [
                    segment(item.trajectory, place, (item.trajectory % 2**30 + place,))
                    for item in items
                    if len(item.so_far) <= place
                ]
                lost = await client.append(segments, [item.trajectory for item in items] if place else [])
                items = tuple(item for item in items if item.trajectory not in lost)

    async def train(self, client: TrajectoryClient) -> None:
        for number in range(1, STEPS + 1):
            while (batch := await batch_of(client, number, 0.5)) is None:
                pass
            for one in decode(batch).trajectories:
                self.trained[one.id] = one.tokens
            await client.commit(number, manifest(number), batch.digest)
            async with self.advanced:
                self.step = number
                self.advanced.notify_all()
        self.done.set()

    async def at(self, step: int) -> None:
        async with self.advanced:
            await self.advanced.wait_for(lambda: self.step >= step)


def test_answers_read_by_agents_are_trained_token_for_token_although_the_store_is_killed(process: StoreProcess) -> None:
    async def main() -> _Run:
        run = _Run()
        process.start(CREW)
        async with (
            _clients(process, AGENTS, OTHER_AGENTS, ROLLOUT, TRAINER) as (one, other, rollout, trainer),
            asyncio.TaskGroup() as group,
        ):
            for work in (run.act(one), run.act(other), run.roll(rollout), run.train(trainer)):
                group.create_task(work)
            for step in (3, 8, 9, 20):
                await run.at(step)
                process.kill()
                await asyncio.to_thread(process.start, CREW)
        return run

    run = asyncio.run(main())
    process.kill()
    audit = open_agents_store(process.folder).audit()
    assert audit.trained == STEPS * BATCH * GROUP
    assert audit.dropped == {}
    assert {attempt for _, attempt in run.read} == {1}, "an attempt has ended because the store died"
    for episode, tokens in run.trained.items():
        first, second = run.read[episode, 1]
        assert tokens == (*first, 2, 3, *second)


async def test_agent_of_an_older_attempt_is_fenced_and_an_invalid_request_does_not_end_an_attempt(
    process: StoreProcess,
) -> None:
    process.start(CREW)
    async with _clients(process, AGENTS, OTHER_AGENTS) as (old, new):
        (item,) = await lease_episodes(old, 1)
        with pytest.raises(Refused, match="max_new is 99") as refused:
            await open_turn(old, item.episode, item.attempt, "x", None, 0, (2,), 99)
        assert not isinstance(refused.value, FencedAttempt)
        turn = await open_turn(old, item.episode, item.attempt, "x", None, 0, (2,), 4)
        waiting = asyncio.create_task(old.ask(Follow, turn, 0, wait=DEADLINE_S))
        await old.ask(FailAttempt, item.episode, item.attempt, "no sandbox")
        with pytest.raises(FencedAttempt, match="is over"):
            await waiting
        (again,) = await lease_episodes(new, 1)
        assert (again.episode, again.attempt) == (item.episode, 2)
        for call in (
            open_turn(old, item.episode, 1, "y", None, 0, (2,), 4),
            old.ask(FinishEpisode, item.episode, 1, 1.0),
            old.ask(FailAttempt, item.episode, 1, "late"),
        ):
            with pytest.raises(FencedAttempt, match="was succeeded by attempt 2"):
                await call
        assert (await new.ask(GetEpisode, item.episode)).attempt == 2
        turn = await open_turn(new, item.episode, 2, "x", None, 0, (2,), 4)
        assert await new.ask(Follow, turn, 0, wait=0.0) is None
        process.set_membership([*(each for each in CREW if each != OTHER_AGENTS), incarnation_of("agents/1", 2)])


async def test_replaying_replica_reads_tokens_sampled_before_and_after_the_death(process: StoreProcess) -> None:
    successor = incarnation_of("agents/0", 2)

    process.start(CREW)
    async with _clients(process, AGENTS, successor, ROLLOUT) as (old, new, rollout):
        (item,) = await lease_episodes(old, 1)
        asked = (item.episode, 1, "x", None, 0, (2, 3), 4, "hash", "{}")
        turn = await open_turn(old, *asked)
        await rollout.lease(1)
        await rollout.append([segment(turn, 0, (5, 6))])
        waiting = asyncio.create_task(old.ask(Follow, turn, 2, wait=DEADLINE_S))
        process.set_membership([*(each for each in CREW if each != AGENTS), successor])
        with pytest.raises(Fenced):
            await waiting
        await rollout.append([segment(turn, 2, (7,))])
        (again,) = await lease_episodes(new, 1)
        shown = await new.ask(GetEpisode, item.episode)
        assert [each.sampled for each in shown.recorded] == [(5, 6, 7)]
        assert await open_turn(new, item.episode, again.attempt, *asked[2:]) == turn
        await new.ask(EndTurn, turn, 2)
        read = await new.ask(Follow, turn, 0)
        assert read is not None
        assert (read.tokens, read.finished) == ((5, 6), True)
        assert await rollout.append([segment(turn, 3, (8,))]) == (turn,)
        assert (await new.ask(GetEpisode, item.episode, holding=(turn,))).turns == ()


async def test_agent_outside_of_the_run_gets_an_episode_and_posts_its_reward_later(process: StoreProcess) -> None:
    process.start(CREW)
    async with _clients(process, AGENTS, OTHER_AGENTS, ROLLOUT) as (one, other, rollout):
        opened = await one.ask(OpenEpisode, "my request")
        assert opened is not None
        assert await other.ask(OpenEpisode, "my request") == opened
        (item,) = opened.items
        turn = await open_turn(one, item.episode, 1, "x", None, 0, (2, 3), 4, sampling=Sampling(seed=1))
        trained = await open_turn(one, item.episode, 1, "y", None, 0, (2, 3), 4)
        assert {work.trajectory: work.sampling for work in await rollout.lease(2)} == {
            turn: Sampling(seed=1),
            trained: None,
        }
        await rollout.append([segment(trained)], [trained])
        await one.ask(FinishEpisode, item.episode, 1, None, later=True)
        await other.ask(PostReward, item.episode, 1, 0.5)
        with pytest.raises(Refused, match="and cannot change"):
            await one.ask(PostReward, item.episode, 1, 1.0)


def test_group_whose_reward_is_overdue_is_dropped_without_a_further_request(tmp_path: Path) -> None:
    process = StoreProcess(tmp_path, agents=True, reward_timeout=0.25)

    async def main() -> None:
        process.start(CREW)
        async with _clients(process, AGENTS, ROLLOUT) as (agents, rollout):
            item, sibling = await lease_episodes(agents, 2)
            turn = await open_turn(agents, item.episode, 1, "x", None, 0, (2, 3), 4)
            unended = await open_turn(agents, sibling.episode, 1, "x", None, 0, (2, 3), 4)
            await rollout.lease(2)
            await rollout.append([segment(turn)], [turn])
            await agents.ask(FinishEpisode, item.episode, 1, None, later=True)
            with pytest.raises(FencedAttempt, match="is not stored"):
                await agents.ask(Follow, unended, 0, wait=DEADLINE_S)

    try:
        asyncio.run(main())
    finally:
        process.kill()
    assert open_agents_store(process.folder).audit().dropped == {"no reward within 0.25s": GROUP}
