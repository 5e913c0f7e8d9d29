"""Agents outside of the run: how they get an episode, what ends their attempt, and rewards that come later."""

from __future__ import annotations

from pathlib import Path

import pytest

from rrl.core.types import Incarnation
from rrl.roles.trajectories.episodes.requests import EpisodeItem, FinishEpisode, LeasedEpisodes, OpenEpisode, PostReward
from rrl.roles.trajectories.episodes.rules import EpisodeSettings
from rrl.roles.trajectories.server import answer
from rrl.roles.trajectories.store import Store
from rrl.roles.trajectories.types import Denied, Done, Scoring
from rrl.tests.support.roles.trajectories.agents import (
    CREW,
    episodes,
    fail,
    finish,
    is_over,
    open_agents_store,
    reopened,
    turn,
)
from rrl.tests.support.roles.trajectories.crew import BATCH, GROUP, REWARD, bind, incarnation_of, open_store

ENDPOINT, NEXT_ENDPOINT = incarnation_of("endpoint/0"), incarnation_of("endpoint/0", 2)
SETTINGS = EpisodeSettings(retries=1, timeout=60.0, reward_timeout=90.0)
MEMBERS = (*CREW, ENDPOINT)


@pytest.fixture
def item(store: Store) -> EpisodeItem:
    return _open(store)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_agents_store(tmp_path, MEMBERS, episodes=SETTINGS)


def _open(store: Store, request: str = "a", who: Incarnation = ENDPOINT) -> EpisodeItem:
    leased = answer(store, OpenEpisode(who, request))
    assert isinstance(leased, LeasedEpisodes), leased
    (item,) = leased.items
    return item


def test_repeated_request_returns_the_same_episode_and_another_request_the_next_one(
    store: Store, tmp_path: Path, item: EpisodeItem
) -> None:
    assert (item.episode, item.attempt) == (0, 1)
    assert _open(store) == item
    assert _open(store, "b").episode == 1
    store = reopened(store, tmp_path, MEMBERS, episodes=SETTINGS)
    assert _open(store) == item
    assert [each.episode for each in episodes(store, 2)] == [2, 3], (
        "agents of the run did not get the two other episodes"
    )


def test_death_of_the_endpoint_ends_no_attempt(store: Store, item: EpisodeItem) -> None:
    number = turn(store, item, (2,), (5, 1), who=ENDPOINT)
    store.update_membership((*CREW, NEXT_ENDPOINT))
    assert _open(store, who=NEXT_ENDPOINT) == item
    turn(store, item, (7,), (1,), number, 3, who=NEXT_ENDPOINT)
    finish(store, item, 1.0, NEXT_ENDPOINT)


def test_request_gets_another_episode_once_its_attempt_is_over(store: Store, item: EpisodeItem) -> None:
    turn(store, item, (2,), (5, 1), who=ENDPOINT)
    finish(store, item, 1.0, ENDPOINT)
    other = _open(store)
    assert other.episode == 1
    fail(store, other, who=ENDPOINT)
    again = _open(store)
    assert (again.episode, again.attempt) == (1, 2)


def test_attempt_beyond_its_time_limit_fails_and_is_repeated(store: Store, item: EpisodeItem) -> None:
    assert store.episodes.due < 1000.0, "the time limit of the new attempt is not due for a check in the next round"
    store.episodes.expire(1000.0)
    assert store.episodes.due == 1060.0
    store.episodes.expire(1059.0)
    assert _open(store) == item
    store.episodes.expire(1060.0)
    assert is_over(answer(store, FinishEpisode(ENDPOINT, item.episode, 1, 1.0)))
    again = _open(store, "b")
    assert (again.episode, again.attempt) == (item.episode, 2)
    store.episodes.expire(2000.0)
    store.episodes.expire(2060.0)
    assert store.audit().dropped == {"the agent did not finish within 1min": GROUP}


def test_time_limit_of_an_attempt_restarts_with_the_store_and_ends_with_its_result(
    store: Store, tmp_path: Path, item: EpisodeItem
) -> None:
    store.episodes.expire(1000.0)
    store = reopened(store, tmp_path, MEMBERS, episodes=SETTINGS)
    store.episodes.expire(5.0)
    assert store.episodes.due == 65.0
    turn(store, item, (2,), (5, 1), who=ENDPOINT)
    finish(store, item, 1.0, ENDPOINT)
    store.episodes.expire(65.0)
    assert store.audit().dropped == {}
    assert store.episodes.due == float("inf")


def test_attempt_of_an_agents_replica_has_no_time_limit_of_the_store(store: Store) -> None:
    episodes(store, 1)
    store.episodes.expire(0.0)
    assert store.episodes.due == float("inf")


def test_agent_waits_while_no_episode_may_begin_and_a_job_without_agents_refuses(store: Store, tmp_path: Path) -> None:
    for number in range(2 * BATCH * GROUP):
        _open(store, str(number))
    assert answer(store, OpenEpisode(ENDPOINT, "one more")) == LeasedEpisodes(())
    plain = open_store(tmp_path / "plain", MEMBERS)
    assert isinstance(answer(plain, OpenEpisode(ENDPOINT, "x")), Denied)


# ── rewards that come later ──────────────────────────────────────────────────────────────────────────────────────────
def _ended(store: Store, request: str = "a") -> EpisodeItem:
    """Finish an episode whose reward comes later."""
    item = _open(store, request)
    turn(store, item, (2,), (5, 1), who=ENDPOINT)
    finished = FinishEpisode(ENDPOINT, item.episode, item.attempt, None, later=True)
    assert answer(store, finished) == answer(store, finished) == Done()
    return item


def _post(store: Store, item: EpisodeItem, reward: float, attempt: int = 1) -> object:
    return answer(store, PostReward(ENDPOINT, item.episode, attempt, reward))


def test_late_reward_is_accepted_once(store: Store, tmp_path: Path) -> None:
    items = [_ended(store, str(number)) for number in range(BATCH * GROUP)]
    assert store.lease_scoring(REWARD, 9) == Scoring(())
    store = reopened(store, tmp_path, MEMBERS, episodes=SETTINGS)
    assert store.lease_scoring(REWARD, 9) == Scoring(()), (
        "an episode without its reward was leased for scoring after a restart"
    )
    for place, item in enumerate(items):
        assert _post(store, item, place / 4) == Done()
    store = reopened(store, tmp_path, MEMBERS, episodes=SETTINGS)
    assert _post(store, items[1], 0.25) == Done(), "a repeated reward was refused"
    second = _post(store, items[1], 0.5)
    assert isinstance(second, Denied)
    assert "is 0.25 and cannot change" in second.why
    assert [one.reward for one in bind(store, 1).trajectories] == [0.0, 0.25, 0.5, 0.75]


def test_overdue_reward_drops_the_group(store: Store, tmp_path: Path) -> None:
    item = _ended(store)
    store = reopened(store, tmp_path, MEMBERS, episodes=SETTINGS)
    store.episodes.expire(10.0)
    store.episodes.expire(99.0)
    assert store.audit().dropped == {}
    store.episodes.expire(100.0)
    assert store.audit().dropped == {"no reward within 90s": GROUP}
    assert is_over(_post(store, item, 1.0))


def test_reward_in_time_clears_the_limit(store: Store) -> None:
    item = _ended(store)
    store.episodes.expire(10.0)
    _post(store, item, 1.0)
    store.episodes.expire(100.0)
    assert store.audit().dropped == {}


def test_reward_before_the_end_of_another_attempt_or_that_is_no_number_is_refused(
    store: Store, item: EpisodeItem
) -> None:
    early = _post(store, item, 1.0)
    assert isinstance(early, Denied)
    assert "is not finished" in early.why
    fail(store, item, who=ENDPOINT)
    assert is_over(_post(store, item, 1.0))
    item = _ended(store, "b")
    assert item.attempt == 2
    assert is_over(_post(store, item, 1.0, attempt=1))
    wrong = _post(store, item, float("inf"), item.attempt)
    assert isinstance(wrong, Denied)
    assert "finite" in wrong.why
    scored = _open(store, "c")
    turn(store, scored, (2,), (5, 1), who=ENDPOINT)
    finish(store, scored, 1.0, ENDPOINT)
    assert is_over(_post(store, scored, 0.5)), "a later reward was accepted for an episode that was finished with one"
