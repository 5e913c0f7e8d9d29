"""Rewards by the names of agents: which turns they train, what is compared, and which of them are refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rrl.core.run_spec import TrainerSettings
from rrl.core.types import Version
from rrl.roles.trajectories.batches import Batch
from rrl.roles.trajectories.durable.records import NO_SIGNAL
from rrl.roles.trajectories.durable.trained_samples import message_bytes
from rrl.roles.trajectories.episodes.requests import EpisodeItem, FinishEpisode, OpenTurn, PostReward, TurnOpened
from rrl.roles.trajectories.sample_writer import step_samples
from rrl.roles.trajectories.server import answer
from rrl.roles.trajectories.store import Store
from rrl.roles.trajectories.types import Denied, Done, PartBound, Sampling, Score, Trajectory
from rrl.tests.support.manager.jobs import job
from rrl.tests.support.roles.trajectories.agents import (
    AGENTS,
    OTHER_AGENTS,
    episodes,
    evaluated,
    finish,
    open_agents_store,
    reopened,
)
from rrl.tests.support.roles.trajectories.crew import (
    BATCH,
    GROUP,
    REWARD,
    ROLLOUT,
    TRAINER,
    bind,
    figures_of,
    lease,
    segment,
)

PLANNER, CODER = "planner", "coder"
Rewards = float | dict[str, float]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_agents_store(tmp_path)


@pytest.fixture
def item(store: Store) -> EpisodeItem:
    return episodes(store, 1)[0]


def _turn(
    store: Store,
    item: EpisodeItem,
    agent: str,
    given: Sequence[int],
    tokens: Sequence[int],
    parent: int | None = None,
    offset: int = 0,
    sampling: Sampling | None = None,
) -> int:
    """Open and complete a turn of an agent, and return its number."""
    request = OpenTurn(
        AGENTS, item.episode, item.attempt, f"{agent} {given} {parent}", parent, offset, tuple(given), 4, agent=agent
    )
    opened = answer(store, msgspec.structs.replace(request, sampling=sampling))
    assert isinstance(opened, TurnOpened), opened
    lease(store, weights=0)
    assert store.append(ROLLOUT, [segment(opened.turn, 0, tokens)], (opened.turn,)) == Done()
    return opened.turn


def _two_turns(store: Store, item: EpisodeItem) -> None:
    """Let the coder continue what the planner has answered."""
    first = _turn(store, item, PLANNER, (2, 3), (5, 6))
    _turn(store, item, CODER, (7,), (8, 9), first, 4)


def _finish(store: Store, item: EpisodeItem, reward: Any) -> object:
    return answer(store, FinishEpisode(AGENTS, item.episode, item.attempt, reward))


def _played(store: Store, *rewards: Rewards) -> Batch:
    """Finish the episodes of a step, each with a turn of planner and coder, with these rewards, and bind the step."""
    for item, reward in zip(episodes(store, BATCH * GROUP), rewards, strict=True):
        _two_turns(store, item)
        assert _finish(store, item, reward) == Done()
    return bind(store, 1)


def _trained(one: Trajectory) -> list[int]:
    masked = {start + place for start, count in one.masked for place in range(count)}
    return [token for place, token in enumerate(one.tokens) if place not in masked]


def _use(batch: Batch, episode: int) -> list[tuple[str, float, list[int]]]:
    """Return agent, reward and trained tokens of each sample of an episode."""
    return [(one.agent, one.training, _trained(one)) for one in batch.trajectories if one.id == episode]


BOTH: Rewards = {PLANNER: 0.25, CODER: 1.0}


# ── samples ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("restarts", [False, True])
def test_path_with_turns_of_two_agents_is_a_sample_for_each(store: Store, tmp_path: Path, restarts: bool) -> None:
    batch = _played(store, BOTH, BOTH, BOTH, BOTH)
    if restarts:
        store = reopened(store, tmp_path)
        assert bind(store, 1) == batch
    coder, planner = (one for one in batch.trajectories if one.id == 0)
    assert (planner.agent, planner.prompt, planner.tokens, planner.masked) == (PLANNER, (2, 3), (5, 6), ())
    assert (coder.agent, coder.prompt, coder.tokens, coder.masked) == (CODER, (2, 3, 5, 6, 7), (8, 9), ())
    assert (planner.reward, planner.training, coder.reward, coder.training) == (0.25, 0.25, 1.0, 1.0)
    figures = figures_of(store, 1)
    assert (figures["reward"], figures["reward_planner"], figures["reward_coder"]) == (0.625, 0.25, 1.0)
    assert (figures["completion_len"], figures["length_bias"], figures["untrained_turns"]) == (4.0, 1.0, 0.0)


def test_agent_that_is_called_again_has_one_sample_that_masks_the_other(store: Store, item: EpisodeItem) -> None:
    first = _turn(store, item, PLANNER, (2,), (5,))
    second = _turn(store, item, CODER, (3,), (6,), first, 2)
    _turn(store, item, PLANNER, (4,), (7,), second, 4)
    assert _finish(store, item, BOTH) == Done()
    batch = _with_others(store)
    coder, planner = (one for one in batch.trajectories if one.id == item.episode)
    assert (planner.prompt, planner.tokens, _trained(planner)) == ((2,), (5, 3, 6, 4, 7), [5, 7])
    assert (coder.prompt, coder.tokens, _trained(coder)) == ((2, 5, 3), (6,), [6])


def _with_others(store: Store, reward: Rewards = 0.5) -> Batch:
    """Finish all other episodes of the step with a turn of the planner, and bind the step."""
    for other in episodes(store, BATCH * GROUP - 1):
        _turn(store, other, PLANNER, (2,), (5, 1))
        assert _finish(store, other, reward) == Done()
    return bind(store, 1)


@pytest.mark.parametrize("restarts", [False, True])
def test_turns_of_an_agent_without_a_reward_are_context(store: Store, tmp_path: Path, restarts: bool) -> None:
    batch = _played(store, {CODER: 1.0}, {CODER: 0.0}, BOTH, BOTH)
    if restarts:
        store = reopened(store, tmp_path)
    assert _use(batch, 0) == [(CODER, 1.0, [8, 9])]
    assert figures_of(store, 1)["untrained_turns"] == 2
    assert figures_of(store, 1)["length_bias"] == 1.0


def test_star_is_the_reward_of_all_other_agents(store: Store) -> None:
    batch = _played(store, {CODER: 1.0, "*": 0.5}, BOTH, BOTH, {"*": 0.75})
    assert _use(batch, 0) == [(CODER, 1.0, [8, 9]), (PLANNER, 0.5, [5, 6])]
    assert _use(batch, 3) == [(CODER, 0.75, [8, 9]), (PLANNER, 0.75, [5, 6])]
    assert figures_of(store, 1)["reward_coder"] == 1.0, "a name that the dict does not write is no figure"


def test_number_for_all_agents_is_one_sample_for_each_leaf(store: Store) -> None:
    batch = _played(store, 1.0, 0.0, 1.0, 0.0)
    assert _use(batch, 0) == [("", 1.0, [5, 6, 8, 9])]


def test_number_is_compared_with_the_rewards_by_name_of_its_group(store: Store) -> None:
    batch = _played(store, 0.0, BOTH, 1.0, 0.0)
    assert _use(batch, 0) == [(CODER, 0.0, [8, 9]), (PLANNER, 0.0, [5, 6])]
    assert _use(batch, 1) == [(CODER, 1.0, [8, 9]), (PLANNER, 0.25, [5, 6])]
    assert _use(batch, 2) == [("", 1.0, [5, 6, 8, 9])]


def test_trainer_gets_the_name_of_each_sequence(store: Store) -> None:
    arrays = _played(store, BOTH, BOTH, 1.0, 0.0).arrays
    assert arrays.agents.tolist() == [CODER, PLANNER, CODER, PLANNER, "", ""]
    assert arrays.training.tolist() == [1.0, 0.25, 1.0, 0.25, 1.0, 0.0]


def test_message_of_samples_with_long_names_is_not_larger_than_was_computed(store: Store) -> None:
    name = "n" * 4000
    for item in episodes(store, BATCH * GROUP):
        _turn(store, item, name, (2, 3), (5, 6))
        assert _finish(store, item, {"*": 1.0}) == Done()
    bound = store.part(TRAINER, 1)
    assert isinstance(bound, PartBound)
    most = sum(message_bytes(group.trajectories, b"") for group in store._state.groups.values() if group.bound)
    assert len(msgspec.msgpack.encode(bound.part)) <= most + 100


# ── what is compared ─────────────────────────────────────────────────────────────────────────────────────────────────
def test_group_has_a_signal_if_the_rewards_of_one_agent_differ(tmp_path: Path) -> None:
    store = open_agents_store(tmp_path, refill_limit=2.0)
    groups = (BOTH, BOTH), ({PLANNER: 0.0, CODER: 1.0}, {PLANNER: 1.0, CODER: 0.0}), (0.0, {"*": 0.0}), (1.0, 0.0)
    for item, reward in zip(episodes(store, 4 * GROUP), [one for group in groups for one in group], strict=True):
        _two_turns(store, item)
        assert _finish(store, item, reward) == Done()
    assert bind(store, 1).groups == (1, 3), "the means of group 1 are equal, but not the rewards of its agents"
    assert store.audit().dropped == {NO_SIGNAL: 2 * GROUP}


def test_advantages_of_kept_samples_compare_the_samples_of_an_agent(store: Store) -> None:
    _played(store, {PLANNER: 0.0, CODER: 1.0}, {PLANNER: 1.0, CODER: 1.0}, {CODER: 1.0}, BOTH)
    groups = [store._state.groups[group] for group in store._state.groups_of(1)]
    made = job()
    roles = tuple(msgspec.structs.replace(role, built_in=True) for role in made.roles)
    made = msgspec.structs.replace(made, roles=roles, trainer=TrainerSettings(advantage_std=False))
    kept = step_samples(made, 1, groups).samples
    assert [(one.trajectory, one.agent, one.training, one.advantage) for one in kept] == [
        (0, CODER, 1.0, 0.0),
        (0, PLANNER, 0.0, -0.5),
        (1, CODER, 1.0, 0.0),
        (1, PLANNER, 1.0, 0.5),
        (2, CODER, 1.0, 0.0),
        (3, CODER, 1.0, 0.0),
        (3, PLANNER, 0.25, 0.0),
    ]


@pytest.mark.parametrize("restarts", [False, True])
def test_evaluated_episode_reports_the_mean_and_each_name(tmp_path: Path, restarts: bool) -> None:
    settings = evaluated("own", samples=1, count=2)
    store = open_agents_store(tmp_path, **settings)
    store.report_versions(TRAINER, (Version(0, 1),))
    first, second = episodes(store, 2)
    for item, reward in ((first, BOTH), (second, {PLANNER: 0.75})):
        assert item.evaluation
        _two_turns(store, item)
        assert _finish(store, item, reward) == Done()
        if restarts:
            store = reopened(store, tmp_path, **settings)
        if item == first:
            assert _finish(store, item, reward) == Done()
            assert isinstance(_finish(store, item, {PLANNER: 0.25}), Denied)
    metrics = store._state.evaluations.results[0].metrics
    assert (metrics["reward"], metrics["reward_planner"], metrics["reward_coder"]) == (0.6875, 0.5, 1.0)


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    "reward",
    [
        {},
        {PLANNER: math.nan},
        {PLANNER: math.inf, CODER: 1.0},
        {PLANNER: 1e200, CODER: 1.0},
        {"a\nb": 1.0, "*": 1.0},
        {"n" * 201: 1.0, "*": 1.0},
        {f"name {place}": 1.0 for place in range(65)} | {"*": 1.0},
    ],
)
def test_rewards_that_are_no_numbers_by_name_are_refused(store: Store, item: EpisodeItem, reward: Any) -> None:
    _two_turns(store, item)
    refused = _finish(store, item, reward)
    assert isinstance(refused, Denied)
    assert refused.wrong_argument
    assert "it must be a finite number, or a dict of 1 to 64 finite numbers" in refused.why
    finish(store, item)


@pytest.mark.parametrize(
    ("reward", "text"),
    [
        (
            {"plannr": 1.0, CODER: 0.5},
            "has ['plannr'], the model name of no call that is trained, but not ['planner'];"
            " correct the names, or add '*' for all others",
        ),
        (
            {"judge": 1.0},
            "has ['judge'], the model name of no call that is trained, but not ['coder', 'planner'];"
            " correct the names, or add '*' for all others",
        ),
    ],
)
def test_misspelt_name_is_refused_with_the_name_that_lacks_a_reward(
    store: Store, item: EpisodeItem, reward: Rewards, text: str
) -> None:
    _two_turns(store, item)
    _turn(store, item, "judge", (4,), (5, 1), sampling=Sampling())
    refused = _finish(store, item, reward)
    assert refused == Denied(f"the reward of episode {item.episode} {text}", wrong_argument=True)
    assert _finish(store, item, BOTH) == Done(), "a refused reward ended the episode"


@pytest.mark.parametrize("reward", [{PLANNER: 1.0, CODER: 0.5, "unused": 1.0}, {CODER: 0.5}, {"unused": 0.1, "*": 1.0}])
def test_name_without_a_call_or_agent_without_a_reward_alone_is_no_mistake(
    store: Store, item: EpisodeItem, reward: Rewards
) -> None:
    _two_turns(store, item)
    assert _finish(store, item, reward) == Done()


def test_name_of_a_call_that_the_agent_gave_up_is_no_mistake(store: Store, item: EpisodeItem) -> None:
    _turn(store, item, PLANNER, (2, 3), (5, 6))
    _turn(store, item, "critic", (4,), (5, 1))
    request = OpenTurn(AGENTS, item.episode, item.attempt, "given up", None, 0, (2, 8), 4, agent=CODER)
    assert isinstance(answer(store, request), TurnOpened)
    assert _finish(store, item, {PLANNER: 1.0, CODER: 0.0}) == Done()


def test_reward_replica_cannot_give_rewards_by_name(store: Store, item: EpisodeItem) -> None:
    _two_turns(store, item)
    assert _finish(store, item, None) == Done()
    score = Score(item.episode, 1.0, 1.0, {}, {PLANNER: 1.0})
    assert isinstance(store.post_scores(REWARD, [score]), Denied)


# ── exactly once ─────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("restarts", [False, True])
def test_finish_may_be_repeated_with_the_same_rewards_only(
    store: Store, item: EpisodeItem, tmp_path: Path, restarts: bool
) -> None:
    _two_turns(store, item)
    assert _finish(store, item, BOTH) == Done()
    if restarts:
        store = reopened(store, tmp_path)
    assert _finish(store, item, BOTH) == Done()
    assert isinstance(_finish(store, item, {PLANNER: 0.25, CODER: 0.5}), Denied)
    assert isinstance(_finish(store, item, {PLANNER: math.nan}), Denied)


@pytest.mark.parametrize("restarts", [False, True])
def test_later_rewards_by_name_are_accepted_once(
    store: Store, item: EpisodeItem, tmp_path: Path, restarts: bool
) -> None:
    def post(reward: Rewards) -> object:
        return answer(store, PostReward(OTHER_AGENTS, item.episode, item.attempt, reward))

    _two_turns(store, item)
    assert answer(store, FinishEpisode(AGENTS, item.episode, item.attempt, None, later=True)) == Done()
    assert isinstance(post({"plannr": 1.0}), Denied)
    assert post(BOTH) == Done()
    if restarts:
        store = reopened(store, tmp_path)
    assert post(BOTH) == Done()
    assert isinstance(post(0.625), Denied), "their mean is another reward"
    assert isinstance(post({CODER: 1.0}), Denied)
    batch = _with_others(store)
    assert _use(batch, item.episode) == [(CODER, 1.0, [8, 9]), (PLANNER, 0.25, [5, 6])]
