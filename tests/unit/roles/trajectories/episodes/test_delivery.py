"""Which answers count as delivered, for endpoints that ask the store, and for training, once endpoints have died."""

from __future__ import annotations

from pathlib import Path

import pytest

from rrl.core.types import Incarnation
from rrl.roles.trajectories.episodes.requests import (
    EpisodeItem,
    EpisodeTurns,
    FinishEpisode,
    Follow,
    GetEpisode,
    LeasedEpisodes,
    MarkAnswer,
    OpenEpisode,
)
from rrl.roles.trajectories.episodes.rules import EpisodeSettings
from rrl.roles.trajectories.server import answer
from rrl.roles.trajectories.store import Store
from rrl.roles.trajectories.types import Denied, Done
from rrl.tests.support.roles.trajectories.agents import (
    AGENTS,
    CREW,
    ask,
    episodes,
    finish,
    open_agents_store,
    reopened,
    sample,
    turns_of,
)
from rrl.tests.support.roles.trajectories.crew import incarnation_of

FIRST, SECOND, REPLICA = incarnation_of("endpoint/0"), incarnation_of("endpoint/0", 2), incarnation_of("endpoint/1")
SETTINGS = EpisodeSettings(retries=1, timeout=60.0, reward_timeout=90.0)
MEMBERS, AFTER_DEATH = (*CREW, FIRST, REPLICA), (*CREW, SECOND, REPLICA)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_agents_store(tmp_path, MEMBERS, episodes=SETTINGS)


@pytest.fixture
def item(store: Store) -> EpisodeItem:
    leased = answer(store, OpenEpisode(FIRST, "a"))
    assert isinstance(leased, LeasedEpisodes)
    return leased.items[0]


def answered(
    store: Store,
    item: EpisodeItem,
    call: str,
    who: Incarnation = FIRST,
    parent: int | None = None,
    offset: int = 0,
    first: int = 2,
) -> int:
    """Open and complete the turn of a call."""
    number = ask(store, item, f"{call}/1/0", (first,), parent, offset, who=who)
    sample(store, number, (5, 1))
    return number


def mark(store: Store, number: int, *, delivered: bool, who: Incarnation = FIRST) -> None:
    assert answer(store, MarkAnswer(who, number, delivered)) == Done()


def undelivered(store: Store, item: EpisodeItem, call: str, who: Incarnation) -> tuple[int, ...]:
    shown = answer(store, GetEpisode(who, item.episode, call=call))
    assert isinstance(shown, EpisodeTurns)
    return shown.undelivered


def dies(store: Store) -> None:
    store.update_membership(AFTER_DEATH)


def trained(store: Store, item: EpisodeItem, who: Incarnation) -> int:
    """Finish the episode, and return how many of its turns are trained."""
    turns = len(turns_of(store, item.episode, who).turns)
    finish(store, item, 1.0, who)
    return turns - int(store.audit().episodes["untrained_turns"])


def test_answer_that_a_live_endpoint_serves_is_given_to_no_other_call(store: Store, item: EpisodeItem) -> None:
    number = answered(store, item, "a")
    assert undelivered(store, item, "a", REPLICA) == ()
    mark(store, number, delivered=False)
    assert undelivered(store, item, "a", REPLICA) == (number,)
    assert undelivered(store, item, "other", REPLICA) == ()
    assert ask(store, item, "a/1/0", (2,), who=REPLICA) == number
    mark(store, number, delivered=False)  # the first endpoint notices late that its connection has broken
    assert undelivered(store, item, "a", FIRST) == ()
    mark(store, number, delivered=True, who=REPLICA)
    assert trained(store, item, FIRST) == 1


def test_answer_without_a_report_is_undelivered_once_its_endpoint_has_died(
    store: Store, item: EpisodeItem, tmp_path: Path
) -> None:
    got, lost = answered(store, item, "a"), answered(store, item, "b", first=3)
    mark(store, got, delivered=True)
    dies(store)
    for call, expected in (("a", ()), ("b", (lost,))):
        assert undelivered(store, item, call, SECOND) == expected
    store = reopened(store, tmp_path, AFTER_DEATH, episodes=SETTINGS)
    for call, expected in (("a", ()), ("b", (lost,))):
        assert undelivered(store, item, call, SECOND) == expected
    assert trained(store, item, SECOND) == 1


def test_undelivered_answer_that_a_later_turn_continues_is_used(store: Store, item: EpisodeItem) -> None:
    first = answered(store, item, "a")
    dies(store)
    answered(store, item, "b", SECOND, first, 2)
    assert undelivered(store, item, "a", SECOND) == ()
    assert trained(store, item, SECOND) == 2


def test_answer_that_nobody_got_and_that_is_given_to_a_repeated_call_is_trained(
    store: Store, item: EpisodeItem
) -> None:
    number = answered(store, item, "a")
    dies(store)
    assert ask(store, item, "a/1/0", (2,), who=SECOND) == number
    assert undelivered(store, item, "a", REPLICA) == ()
    assert trained(store, item, SECOND) == 1


def test_episode_whose_only_answer_died_with_its_endpoint_has_no_answer(store: Store, item: EpisodeItem) -> None:
    answered(store, item, "a")
    dies(store)
    refused = answer(store, FinishEpisode(SECOND, item.episode, item.attempt, 1.0))
    assert isinstance(refused, Denied)
    assert refused.no_answer


@pytest.mark.parametrize("who", [FIRST, SECOND])
def test_answer_whose_end_its_dead_endpoint_had_is_that_of_an_agent_that_ends_its_episode(
    store: Store, item: EpisodeItem, who: Incarnation
) -> None:
    number = answered(store, item, "a")
    answer(store, Follow(FIRST, number, 0))
    dies(store)
    assert undelivered(store, item, "a", SECOND) == (number,)
    if who == SECOND:  # a repeated call, whose endpoint has not read the answer when it dies
        ask(store, item, "a/1/0", (2,), None, 0, who=SECOND)
        store.update_membership((*CREW, REPLICA, incarnation_of("endpoint/0", 3)))
    ended = answer(store, FinishEpisode(REPLICA, item.episode, item.attempt, 1.0))
    assert isinstance(ended, Done) == (who == FIRST)


def test_restart_of_the_store_leaves_answers_of_the_runs_own_agents_delivered(store: Store, tmp_path: Path) -> None:
    (item,) = episodes(store, 1)
    answered(store, item, "a", AGENTS)
    store = reopened(store, tmp_path, MEMBERS, episodes=SETTINGS)
    assert undelivered(store, item, "a", AGENTS) == ()
    assert trained(store, item, AGENTS) == 1


def test_failed_attempt_is_scored_only_if_it_has_an_answer(store: Store) -> None:
    (item,) = episodes(store, 1)
    refused = answer(store, FinishEpisode(AGENTS, item.episode, item.attempt, -1.0, failed=True))
    assert isinstance(refused, Denied)
    assert refused.no_answer
    answered(store, item, "a", AGENTS)
    assert answer(store, FinishEpisode(AGENTS, item.episode, item.attempt, -1.0, failed=True)) == Done()
