"""Episodes at the store: attempts, turns, and their results."""

from __future__ import annotations

from pathlib import Path

import pytest

from rrl.core.types import Version
from rrl.roles.trajectories.durable.records import FIRST_TURN
from rrl.roles.trajectories.episodes.requests import (
    EpisodeItem,
    FailAttempt,
    FinishEpisode,
    Follow,
    LeaseEpisodes,
    OpenTurn,
    Turn,
)
from rrl.roles.trajectories.episodes.rules import NO_AGENTS, NO_ANSWER, REPLICA_ENDED, EpisodeSettings
from rrl.roles.trajectories.server import answer
from rrl.roles.trajectories.store import Store
from rrl.roles.trajectories.types import Denied, Done, Leased, NotReady, PartBound, Scoring, ToScore
from rrl.tests.support.roles.trajectories.agents import (
    AGENTS,
    CREW,
    OTHER_AGENTS,
    ask,
    episodes,
    fail,
    finish,
    follow,
    is_over,
    open_agents_store,
    reopened,
    turn,
    turns_of,
)
from rrl.tests.support.roles.trajectories.crew import (
    BATCH,
    GROUP,
    OTHER,
    REWARD,
    ROLLOUT,
    TRAINER,
    bind,
    commit,
    incarnation_of,
    lease,
    open_store,
    score,
    segment,
)


@pytest.fixture
def item(store: Store) -> EpisodeItem:
    return episodes(store, 1)[0]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_agents_store(tmp_path)


# ── attempts ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_leased_episodes_are_those_of_new_groups_in_order_each_in_its_first_attempt(store: Store) -> None:
    first = episodes(store, 3)
    assert [(item.episode, item.group, item.item, item.attempt) for item in first] == [
        (0, 0, 0, 1),
        (1, 0, 0, 1),
        (2, 1, 10, 1),
    ]
    assert [item.episode for item in episodes(store, 2, OTHER_AGENTS)] == [3, 4]


def test_number_of_unbound_groups_limits_the_episodes(store: Store) -> None:
    assert len(episodes(store)) == 2 * BATCH * GROUP
    assert episodes(store, who=OTHER_AGENTS) == []


def test_rollouts_begin_no_group_in_a_job_with_agents_and_wait_for_turns(store: Store) -> None:
    assert store.lease(ROLLOUT, 4, (), 0) == Leased(())
    assert store.audit().made == 0


def test_repeated_lease_after_a_lost_answer_returns_the_same_attempts(store: Store) -> None:
    items = episodes(store, 3)
    assert episodes(store, 3) == items
    assert episodes(store, 3, holding=[0, 1])[0] == items[2]


def test_failed_attempt_is_repeated_by_any_replica_with_the_next_number(store: Store, item: EpisodeItem) -> None:
    turn(store, item, (2,), (5, 1))
    fail(store, item)
    (again,) = episodes(store, 1, OTHER_AGENTS)
    assert (again.episode, again.attempt) == (item.episode, 2)
    assert turns_of(store, item.episode).turns == ()


def test_episode_that_fails_too_often_is_dropped_with_its_group_and_never_scored(store: Store) -> None:
    for attempt in range(1, 4):
        (item,) = [each for each in episodes(store, 1) if each.episode == 0]
        assert item.attempt == attempt
        fail(store, item, "no\nsandbox")
    audit = store.audit()
    assert list(audit.dropped.values()) == [GROUP]
    assert {item.group for item in episodes(store)} == {1, 2, 3, 4}


def test_repeated_report_of_a_failure_counts_once(store: Store, item: EpisodeItem) -> None:
    for _ in range(5):
        fail(store, item)
    (again,) = episodes(store, 1)
    assert again.attempt == 2


def test_requests_of_an_older_attempt_are_refused_as_over(store: Store, item: EpisodeItem) -> None:
    number = ask(store, item)
    fail(store, item)
    for request in (
        OpenTurn(AGENTS, item.episode, 1, "x", None, 0, (2,), 4),
        Follow(AGENTS, number, 0),
        FinishEpisode(AGENTS, item.episode, 1, 1.0),
    ):
        assert is_over(answer(store, request)), request
    (again,) = episodes(store, 1)
    assert is_over(answer(store, FailAttempt(AGENTS, item.episode, 1, "late")))
    assert ask(store, again) > number


def test_death_of_the_agents_replica_begins_another_attempt_that_does_not_count_as_failed(store: Store) -> None:
    for number in range(5):
        (item,) = episodes(store, 1, incarnation_of("agents/0", number + 1))
        assert (item.episode, item.attempt) == (0, number + 1)
        store.update_membership([each for each in CREW if each != AGENTS] + [incarnation_of("agents/0", number + 2)])
    assert store.audit().dropped == {}


def test_death_of_the_agents_replica_drops_the_group_if_the_job_says_so(tmp_path: Path) -> None:
    store = open_agents_store(tmp_path, episodes=EpisodeSettings(on_death="drop"))
    episodes(store, GROUP)
    assert episodes(store, 1, OTHER_AGENTS)[0].group == 1
    store.update_membership([each for each in CREW if each != AGENTS])
    assert store.audit().dropped == {REPLICA_ENDED: GROUP}


def test_restart_of_the_store_ends_no_attempt(store: Store, tmp_path: Path) -> None:
    item, other = episodes(store, 2)
    fail(store, other)
    (other,) = episodes(store, 1, OTHER_AGENTS)
    number = ask(store, item)
    store = reopened(store, tmp_path)
    assert episodes(store, 1, holding=[]) == [item]
    assert episodes(store, 1, OTHER_AGENTS) == [other]
    assert other.attempt == 2
    assert ask(store, item) == number


def test_attempts_of_a_replica_that_ended_while_the_store_was_down_are_over(store: Store, tmp_path: Path) -> None:
    episodes(store, 1)
    store.flush()
    store.close()
    store = open_agents_store(tmp_path, [each for each in CREW if each != AGENTS])
    assert episodes(store, 1, OTHER_AGENTS)[0].attempt == 2


def test_unknown_or_fenced_replica_and_job_without_agents_get_no_episode(store: Store, tmp_path: Path) -> None:
    assert answer(store, LeaseEpisodes(incarnation_of("agents/9"), 1)) == NotReady()
    store.update_membership([incarnation_of("agents/0", 2)])
    fenced = answer(store, LeaseEpisodes(AGENTS, 1))
    assert isinstance(fenced, Denied)
    assert fenced.fenced
    plain = open_store(tmp_path / "plain", CREW)
    assert isinstance(answer(plain, LeaseEpisodes(AGENTS, 1)), Denied)


def test_job_resumed_without_agents_drops_its_unfinished_episodes(store: Store, tmp_path: Path) -> None:
    episodes(store, 1)
    store.flush()
    store.close()
    assert open_store(tmp_path, CREW).audit().dropped == {NO_AGENTS: GROUP}


# ── turns ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_turn_is_leased_to_a_rollout_with_the_tokens_before_its_answer(store: Store, item: EpisodeItem) -> None:
    first = ask(store, item, given=(2, 3), max_new=3)
    assert first == FIRST_TURN
    (work,) = lease(store)
    assert (work.trajectory, work.prompt, work.so_far, work.max_new) == (first, (2, 3), (), 3)
    store.append(ROLLOUT, [segment(first, 0, (5, 6))], (first,))
    second = ask(store, item, "2", (7,), first, 4)
    third = ask(store, item, "3", (8, 9), second, 3)
    assert {each.trajectory: each.prompt for each in lease(store)} == {second: (2, 3, 5, 6, 7), third: (2, 3, 5, 8, 9)}


def test_turn_moves_to_another_rollout_with_the_tokens_it_has(store: Store, item: EpisodeItem) -> None:
    number = ask(store, item)
    lease(store)
    store.append(ROLLOUT, [segment(number, 0, (5, 6))])
    store.update_membership([each for each in CREW if each != ROLLOUT])
    (work,) = lease(store, OTHER)
    assert work.prompt == (2, 3)
    assert [each.tokens for each in work.so_far] == [(5, 6)]
    assert work.max_new == 2


def test_repeated_request_opens_one_turn_and_another_request_a_second(store: Store, item: EpisodeItem) -> None:
    number = ask(store, item)
    assert ask(store, item) == number
    assert ask(store, item, "2") == number + 1
    changed = OpenTurn(AGENTS, item.episode, item.attempt, "1", None, 0, (9,), 4)
    assert answer(store, changed) == Denied(f"the request of turn {number} was repeated with other tokens")


@pytest.mark.parametrize(
    ("parent", "offset", "given", "max_new", "words"),
    [
        (None, 1, (2,), 4, "offset is 1; it must be 0 to 0, the number of tokens of the parent's path"),
        (FIRST_TURN, 5, (2,), 4, "offset is 5; it must be 0 to 4, the number of tokens of the parent's path"),
        (FIRST_TURN, -1, (2,), 4, "offset is -1"),
        (FIRST_TURN + 7, 0, (2,), 4, "is not a turn of attempt 1 at episode 0"),
        (None, 0, (), 4, "at least one token"),
        (None, 0, (2**40,), 4, "malformed tokens"),
        (None, 0, (2,), 0, "max_new is 0; it must be 1 to 4"),
        (None, 0, (2,), 5, "max_new is 5; it must be 1 to 4"),
    ],
)
def test_turn_with_an_invalid_parent_is_refused_with_the_correct_form(
    store: Store, parent: int | None, offset: int, given: tuple[int, ...], max_new: int, words: str
) -> None:
    item, *_ = episodes(store, 1)
    turn(store, item, (2, 3), (5, 6))
    refused = answer(store, OpenTurn(AGENTS, item.episode, 1, "2", parent, offset, given, max_new))
    assert isinstance(refused, Denied)
    assert words in refused.why
    assert not refused.fenced_attempt


def test_follower_gets_the_tokens_after_its_position_and_waits_at_the_end(store: Store, item: EpisodeItem) -> None:
    number = ask(store, item)
    assert answer(store, Follow(AGENTS, number, 0)) == NotReady()
    lease(store)
    store.append(ROLLOUT, [segment(number, 0, (5, 6), 3)])
    store.append(ROLLOUT, [segment(number, 2, (7,), 4)])
    read = follow(store, number, 1)
    assert (read.tokens, read.logprobs, read.finished) == ((6, 7), (-0.5, -0.5), False)
    assert read.versions == (Version(3, 1), Version(4, 1))
    assert answer(store, Follow(AGENTS, number, 3)) == NotReady()
    store.append(ROLLOUT, [], (number,))
    assert follow(store, number, 3).finished
    assert isinstance(answer(store, Follow(AGENTS, number, 4)), Denied)


def test_episode_can_be_read_with_all_turns_by_a_new_reader(store: Store, tmp_path: Path, item: EpisodeItem) -> None:
    first = turn(store, item, (2, 3), (5, 6))
    second = ask(store, item, "2", (7,), first, 4)
    store = reopened(store, tmp_path)
    read = turns_of(store, item.episode)
    assert read.attempt == 1
    assert read.turns == (
        Turn(first, None, 0, (2, 3), (5, 6), True, "hash (2, 3) None 0", 1, "(2, 3) None 0"),
        Turn(second, first, 4, (7,), (), False, "hash 2", 1, "2"),
    )


def test_turn_numbers_are_never_used_again_although_turns_are_deleted(
    store: Store, tmp_path: Path, item: EpisodeItem
) -> None:
    number = ask(store, item)
    fail(store, item)
    store = reopened(store, tmp_path)
    (again,) = episodes(store, 1)
    assert ask(store, again) == number + 1


def test_append_to_a_turn_of_an_ended_attempt_is_lost_for_the_rollout(store: Store, item: EpisodeItem) -> None:
    number = ask(store, item)
    lease(store)
    fail(store, item)
    late = store.append(ROLLOUT, [segment(number)])
    assert isinstance(late, Denied)
    assert late.lost == (number,)
    assert lease(store) == ()


# ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_finished_episodes_with_their_rewards_complete_a_group_without_a_reward_role(store: Store) -> None:
    for place, item in enumerate(episodes(store, BATCH * GROUP)):
        turn(store, item, (2,), (5, 1))
        finish(store, item, place / 4)
    assert answer(store, FinishEpisode(AGENTS, 0, 1, 0.0)) == Done(), "a repeated request was refused"
    batch = bind(store, 1)
    assert [(one.id, one.reward, one.training) for one in batch.trajectories] == [
        (0, 0.0, 0.0),
        (1, 0.25, 0.25),
        (2, 0.5, 0.5),
        (3, 0.75, 0.75),
    ]
    commit(store, batch)
    audit = store.audit()
    assert (audit.made, audit.trained, audit.open) == (4, 4, 0)
    assert audit.ages == {0: 8}


def test_episode_without_a_reward_is_scored_by_its_last_answer(store: Store, item: EpisodeItem) -> None:
    first = turn(store, item, (2,), (5, 1))
    turn(store, item, (3,), (6, 1), first, 3)
    assert store.lease_scoring(REWARD, 9) == Scoring(())
    finish(store, item, None)
    assert store.lease_scoring(REWARD, 9) == Scoring((ToScore(item.episode, item.item, (6, 1)),))
    score(store)
    assert store.lease_scoring(REWARD, 9) == Scoring(())


def test_open_turn_of_an_ended_episode_is_taken_from_its_rollout_and_not_trained(
    store: Store, item: EpisodeItem
) -> None:
    first = turn(store, item, (2,), (5, 1))
    left = ask(store, item, "2", (3,), first, 3)
    lease(store)
    store.append(ROLLOUT, [segment(left, 0, (6,))])
    finish(store, item)
    late = store.append(ROLLOUT, [segment(left, 1, (7,))])
    assert isinstance(late, Denied)
    assert late.lost == (left,)
    assert [each.id for each in turns_of(store, item.episode).turns] == [first]


def test_episode_without_any_answer_counts_as_a_failed_attempt(store: Store, item: EpisodeItem) -> None:
    ask(store, item)
    finish(store, item, 1.0)
    (again,) = episodes(store, 1)
    assert (again.episode, again.attempt) == (item.episode, 2)
    finish(store, again)
    (again,) = episodes(store, 1)
    finish(store, again)
    assert store.audit().dropped == {NO_ANSWER: GROUP}


def test_reward_that_is_no_number_is_refused_and_the_episode_goes_on(store: Store, item: EpisodeItem) -> None:
    turn(store, item, (2,), (5, 1))
    refused = answer(store, FinishEpisode(AGENTS, item.episode, 1, float("nan")))
    assert isinstance(refused, Denied)
    assert "finite" in refused.why
    assert not refused.fenced_attempt
    finish(store, item)


# ── age ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_episodes_begin_only_if_steps_can_train_them_and_their_turns_are_always_leased(tmp_path: Path) -> None:
    store = open_agents_store(tmp_path, staleness=0)
    store.lease(ROLLOUT, 1, (), 0)  # reports its weights
    begun = episodes(store)
    assert {item.group for item in begun} == set(range(BATCH)), "episodes of more groups than step 1 trains were leased"
    assert all(ask(store, item) for item in begun)
    assert len(lease(store, weights=0)) == len(begun)


def test_group_of_an_episode_that_waits_for_its_first_token_stays_begun_across_a_restart(tmp_path: Path) -> None:
    store = open_agents_store(tmp_path, staleness=0)
    begun = episodes(store, 1)
    store.flush()
    store.close()
    store = open_agents_store(tmp_path, staleness=0)
    assert {item.group for item in episodes(store)} == set(range(BATCH))
    assert begun[0] in episodes(store)


def test_age_of_a_batch_of_episodes_counts_each_sampled_token_once(store: Store) -> None:
    for item in episodes(store, BATCH * GROUP):
        first = turn(store, item, (2, 3), (5, 6), step=0)
        turn(store, item, (7,), (8,), first, 4, step=-1)
        turn(store, item, (9,), (8, 8), first, 3, step=-1)
        finish(store, item)
    bound = store.part(TRAINER, 1)
    assert isinstance(bound, PartBound)
    assert bound.part.max_age == 1
    commit(store, bound.part)
    assert store.audit().ages == {0: 2 * BATCH * GROUP, 1: 3 * BATCH * GROUP}
