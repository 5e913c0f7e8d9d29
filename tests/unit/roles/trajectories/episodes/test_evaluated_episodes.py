"""Evaluations of agents: episodes of their own, which no step trains on, with one result for each due step."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rrl.core.types import DataReport, Incarnation, OutsideKind, OutsideWait, Version
from rrl.roles.trajectories.episodes.requests import (
    EpisodeItem,
    FinishEpisode,
    LeasedEpisodes,
    OpenEpisode,
    OpenTurn,
    PostReward,
    TurnOpened,
)
from rrl.roles.trajectories.episodes.rules import EpisodeSettings
from rrl.roles.trajectories.server import answer
from rrl.roles.trajectories.store import Store
from rrl.roles.trajectories.types import Denied, Done, NotReady, Sampling, Scoring, Segment
from rrl.tests.support.fake_disk import FakeDisk
from rrl.tests.support.roles.trajectories.agents import (
    AGENTS,
    CREW,
    OTHER_AGENTS,
    ask,
    episodes,
    evaluated,
    fail,
    finish,
    is_over,
    open_agents_store,
    reopened,
    turns_of,
)
from rrl.tests.support.roles.trajectories.crew import (
    MAX_NEW,
    OTHER,
    REWARD,
    ROLLOUT,
    TRAINER,
    bind,
    commit,
    incarnation_of,
    lease,
    score,
)

COUNT, SAMPLES, STEPS = 3, 2, 6
DUE = [0, 2, 4, 6]
COMPACTS = 1500
"""Size (bytes) from which the log is compacted, several times in a run."""
SPARSE = 7
"""Every ``SPARSE``-th folder that a crash could leave is opened."""
NEXT_TRAINER, NEXT_AGENTS = incarnation_of("trainer/0", 2), incarnation_of("agents/0", 2)
ENDPOINT, NEXT_ENDPOINT = incarnation_of("endpoint/0"), incarnation_of("endpoint/0", 2)
MEMBERS = (*CREW, ENDPOINT)
SETTINGS = EpisodeSettings(retries=1, timeout=60.0, reward_timeout=90.0)


def open_own(folder: Path, **changed: Any) -> Store:
    return open_agents_store(folder, MEMBERS, **{**evaluated("own"), "episodes": SETTINGS, "staleness": 2, **changed})


def open_outside(folder: Path, **changed: Any) -> Store:
    return open_own(folder, **evaluated("outside"), **changed)


@pytest.fixture
def own(tmp_path: Path) -> Store:
    return open_own(tmp_path)


@pytest.fixture
def outside(tmp_path: Path) -> Store:
    return open_outside(tmp_path)


def publish(store: Store, step: int, trainer: Incarnation = TRAINER) -> None:
    assert store.report_versions(trainer, (Version(step, trainer.number),)) is None


def replaced(store: Store, *new: Incarnation) -> None:
    """Replace the incarnations of the same replicas."""
    ids = {one.replica for one in new}
    store.update_membership([*(one for one in MEMBERS if one.replica not in ids), *new])


def play(
    store: Store,
    item: EpisodeItem,
    step: int,
    reward: float | None = 1.0,
    who: Incarnation = AGENTS,
    trainer: int = 1,
    tokens: tuple[int, ...] = (5, 1),
) -> None:
    """Make a turn with the weights of a step, and finish the episode."""
    number = ask(store, item, who=who)
    sample(store, number, step, trainer, tokens=tokens)
    assert answer(store, FinishEpisode(who, item.episode, item.attempt, reward)) == Done()
    store.flush()


def sample(
    store: Store, number: int, step: int, trainer: int = 1, who: Incarnation = ROLLOUT, tokens: tuple[int, ...] = (5, 1)
) -> object:
    lease(store, who, weights=step)
    segment = Segment(number, 0, tokens, (-0.5,) * len(tokens), Version(step, trainer))
    return store.append(who, [segment], [number])


def play_all(store: Store, step: int, reward: float | None = 1.0, trainer: int = 1) -> list[EpisodeItem]:
    """Play the evaluated episodes that an agents replica gets, and give all others back by ending the replica."""
    items = [item for item in episodes(store) if item.evaluation]
    for item in items:
        play(store, item, step, reward, trainer=trainer)
    return items


def train(store: Store, number: int) -> None:
    for item in episodes(store, 4, OTHER_AGENTS):
        assert not item.evaluation
        play(store, item, number - 1, float(number), OTHER_AGENTS)
    commit(store, bind(store, number))


def opened(store: Store, request: str, who: Incarnation = ENDPOINT) -> EpisodeItem | None:
    leased = answer(store, OpenEpisode(who, request, evaluation=True))
    assert isinstance(leased, LeasedEpisodes), leased
    return leased.items[0] if leased.items else None


# ── agents of the run ────────────────────────────────────────────────────────────────────────────────────────────────
def test_agents_get_evaluated_episodes_first_and_the_trainer_waits_for_them(own: Store) -> None:
    assert not any(item.evaluation for item in episodes(own, 1)), "the weights of step 0 are not published yet"
    publish(own, 0)
    items = episodes(own, COUNT * SAMPLES, OTHER_AGENTS)
    assert [(item.evaluation, item.item) for item in items] == [(True, i) for i in (0, 0, 1, 1, 2, 2)]
    assert not any(item.evaluation for item in episodes(own, 1))
    assert own.part(TRAINER, 1) == NotReady()
    for place, item in enumerate(items):
        assert own.wait_reason(1) == f"the trainer waits for the evaluation of step 0: {place} of 6 episodes are scored"
        play(own, item, 0, place / 4, OTHER_AGENTS, tokens=(5, 1) if place else (5,) * MAX_NEW)
    assert own.evaluations.results[0].metrics == {
        "count": 6.0,
        "reward": 15 / 24,
        "pass@1": 1 / 3,
        "avg@2": 15 / 24,
        "pass@2": 1 / 3,
        "completion_len": pytest.approx((5 * 2 + MAX_NEW) / 6),
        "truncated": pytest.approx(1 / 6),
    }
    for item in episodes(own, 3):
        play(own, item, 0)
    (first,) = (one for one in own._state.groups.values() if not one.unscored)
    assert not first.is_evaluated
    audit = own.audit()
    assert (audit.made, audit.dropped) == (4, {}), "evaluated episodes count as trajectories of the run"
    assert audit.episodes["episodes_finished"] == 3


def test_answer_that_is_not_trained_does_not_count_as_truncated(own: Store) -> None:
    publish(own, 0)
    for item in episodes(own, COUNT * SAMPLES):
        probe = OpenTurn(AGENTS, item.episode, item.attempt, "probe", None, 0, (9,), 1, sampling=Sampling())
        opened = answer(own, probe)
        assert isinstance(opened, TurnOpened)
        sample(own, opened.turn, 0, tokens=(5,))
        play(own, item, 0)
    assert own.evaluations.results[0].metrics["truncated"] == 0.0


def test_turns_are_sampled_as_the_evaluation_says_and_only_with_its_weights(own: Store) -> None:
    publish(own, 0)
    item, second = episodes(own, 2)
    numbers = [ask(own, item), ask(own, item, "2"), ask(own, second)]
    late = own.lease(OTHER, 9, (), 1)
    assert (late.items, late.outdated) == ((), True), "a turn was leased with other weights"  # type: ignore[union-attr]
    other = ask(own, next(one for one in episodes(own) if not one.evaluation))
    assert [one.trajectory for one in lease(own, OTHER, 9, (), 1)] == [other], "other work waits for the evaluation"
    sampled = {one.trajectory: one.sampling for one in lease(own, ROLLOUT, weights=0)}
    assert all(sampling is not None and sampling.temperature == 0.5 for sampling in sampled.values())
    assert len({sampling.seed for sampling in sampled.values() if sampling is not None}) == len(numbers)
    refused = sample(own, numbers[0], 1)
    assert isinstance(refused, Denied)
    assert refused.lost == (numbers[0],)
    assert sample(own, numbers[0], 0, who=OTHER) == Done()


def test_greedy_turns_have_no_seed(tmp_path: Path) -> None:
    store = open_own(tmp_path, **evaluated("own", 1, 0.0))
    publish(store, 0)
    ask(store, episodes(store, 1)[0])
    assert [one.sampling for one in lease(store, weights=0)] == [Sampling(temperature=0.0)]


def test_only_what_an_agent_has_requested_differs_from_the_evaluation(tmp_path: Path) -> None:
    store = open_own(tmp_path, **evaluated("own", 1, 0.0))
    publish(store, 0)
    item = episodes(store, 1)[0]
    asked = (Sampling(), Sampling(constraint="start: /a/"), Sampling(temperature=0.7, constraint="start: /a/"))
    numbers = [ask(store, item, str(place), sampling=each) for place, each in enumerate(asked)]
    leased = {one.trajectory: one.sampling for one in lease(store, weights=0)}
    assert [leased[number] for number in numbers] == [
        Sampling(temperature=0.0),
        Sampling(temperature=0.0, constraint="start: /a/"),
        asked[2],
    ]


def test_task_scores_an_episode_without_a_reward_as_an_evaluated_one(own: Store) -> None:
    publish(own, 0)
    items = play_all(own, 0, None)
    leased = own.lease_scoring(REWARD, 100)
    assert isinstance(leased, Scoring)
    assert [(one.trajectory, one.item, one.tokens, one.evaluation) for one in leased.items] == [
        (item.episode, item.item, (5, 1), True) for item in items
    ]
    own.post_scores(REWARD, [], {items[0].episode: "the scorer raised ValueError"})
    other = incarnation_of("reward/1")
    own.update_membership([*(one for one in MEMBERS if one != REWARD), other])
    score(own, other, reward=0.25)
    metrics = own.evaluations.results[0].metrics
    assert (metrics["count"], metrics["unscored"], metrics["reward"], metrics["avg@2"]) == (5.0, 1.0, 0.25, 0.25)


def test_episode_that_fails_too_often_counts_as_unscored_and_not_as_zero(own: Store) -> None:
    publish(own, 0)
    item, *others = episodes(own, COUNT * SAMPLES)
    fail(own, item)
    again = next(one for one in episodes(own, 1, OTHER_AGENTS))
    assert (again.episode, again.attempt) == (item.episode, 2)
    fail(own, again, who=OTHER_AGENTS)
    assert is_over(answer(own, FinishEpisode(OTHER_AGENTS, item.episode, 2, 1.0)))
    for one in others:
        play(own, one, 0)
    metrics = own.evaluations.results[0].metrics
    assert (metrics["count"], metrics["unscored"], metrics["reward"]) == (5.0, 1.0, 1.0)
    assert own.audit().dropped == {}


def test_reward_that_does_not_come_counts_as_unscored(own: Store) -> None:
    publish(own, 0)
    items = episodes(own, COUNT * SAMPLES)
    for item in items:
        sample(own, ask(own, item), 0)
        assert answer(own, FinishEpisode(AGENTS, item.episode, 1, None, later=True)) == Done()
    own.episodes.expire(0.0)
    assert answer(own, PostReward(AGENTS, items[0].episode, 1, 1.0)) == Done()
    own.episodes.expire(90.0)
    metrics = own.evaluations.results[0].metrics
    assert (metrics["count"], metrics["unscored"], metrics["reward"]) == (1.0, 5.0, 1.0)


def test_run_waits_outside_if_all_episodes_lack_a_reward_from_there(own: Store) -> None:
    publish(own, 0)
    items = episodes(own, COUNT * SAMPLES)
    for place, item in enumerate(items):
        assert own.data_report(1, None, 0.0, 9.0, False) == DataReport(), f"{place} episodes are finished"
        sample(own, ask(own, item), 0)
        assert answer(own, FinishEpisode(AGENTS, item.episode, 1, None, later=True)) == Done()
    own.episodes.expire(0.0)
    waits = own.data_report(1, None, 5.0, 9.0, False).outside
    assert waits == OutsideWait(OutsideKind.REWARD, items[0].episode, 5.0)


def test_next_agents_replica_takes_over_the_turns_of_a_dead_one(own: Store) -> None:
    publish(own, 0)
    (item,) = episodes(own, 1)
    number = ask(own, item)
    sample(own, number, 0)
    replaced(own, NEXT_AGENTS)
    (again,) = episodes(own, 1, NEXT_AGENTS)
    assert (again.episode, again.attempt, again.evaluation) == (item.episode, 2, True)
    assert [turn.id for turn in turns_of(own, item.episode, NEXT_AGENTS).recorded] == [number]
    assert ask(own, again, who=NEXT_AGENTS) == number
    finish(own, again, 1.0, NEXT_AGENTS)
    assert own.audit().episodes == {}, "a replayed episode of an evaluation counts as one of the run"


def test_turn_of_a_dead_rollout_goes_on_where_it_ended(own: Store) -> None:
    publish(own, 0)
    number = ask(own, episodes(own, 1)[0])
    lease(own, ROLLOUT, weights=0)
    assert own.append(ROLLOUT, [Segment(number, 0, (5,), (-0.5,), Version(0, 1))]) == Done()
    replaced(own, incarnation_of("rollout/0", 2))
    (item,) = lease(own, OTHER, weights=0)
    assert (item.trajectory, [segment.tokens for segment in item.so_far]) == (number, [(5,)])


def test_new_trainer_ends_an_open_evaluation_and_begins_it_again(own: Store, tmp_path: Path) -> None:
    publish(own, 0)
    done, running, *_ = items = episodes(own, COUNT * SAMPLES)
    play(own, done, 0, 0.0)
    number = ask(own, running)
    replaced(own, NEXT_TRAINER)
    assert is_over(answer(own, FinishEpisode(AGENTS, running.episode, 1, 1.0))), "the agent of an ended episode goes on"
    assert isinstance(sample(own, number, 0), Denied)
    assert not any(item.evaluation for item in episodes(own)), "the new trainer has published no version"
    own = reopened(own, tmp_path, [*CREW[:-3], NEXT_TRAINER, AGENTS], **evaluated("own"), episodes=SETTINGS)
    publish(own, 0, NEXT_TRAINER)
    again = play_all(own, 0, 0.5, trainer=2)
    assert len(again) == len(items)
    assert not {item.episode for item in items} & {item.episode for item in again}
    assert own.evaluations.results[0].metrics["reward"] == 0.5


def test_evaluation_ends_if_a_resumed_job_has_none(own: Store, tmp_path: Path) -> None:
    publish(own, 0)
    (item,) = episodes(own, 1)
    ask(own, item)
    own = reopened(own, tmp_path, MEMBERS, episodes=SETTINGS)
    assert is_over(answer(own, FinishEpisode(AGENTS, item.episode, 1, 1.0)))
    assert lease(own, weights=0) == ()
    train(own, 1)


# ── agents outside of the run ────────────────────────────────────────────────────────────────────────────────────────
def test_agents_outside_get_evaluated_episodes_only_on_request_and_the_trainer_never_waits(outside: Store) -> None:
    publish(outside, 0)
    assert list(outside.evaluations.results) == [0], "the evaluation of step 0 waits for agents"
    item = opened(outside, "a")
    assert item is not None
    assert (item.evaluation, item.item) == (True, 0)
    assert opened(outside, "a") == item
    other = answer(outside, OpenEpisode(ENDPOINT, "b"))
    assert isinstance(other, LeasedEpisodes)
    assert not other.items[0].evaluation
    assert not any(one.evaluation for one in episodes(outside, 1))
    fail(outside, other.items[0], who=ENDPOINT)
    outside.update_membership(MEMBERS[:-1])
    outside.update_membership((*CREW, NEXT_ENDPOINT))
    for number in (1, 2):
        publish(outside, number - 1)
        outside.update_membership([one for one in (*CREW, NEXT_ENDPOINT) if one != AGENTS])
        train(outside, number)
        if number == 1:
            play(outside, item, 1, 0.5, NEXT_ENDPOINT)
    figures = {"count": 1.0, "reward": 0.5, "pass@1": 0.0, "completion_len": 2.0, "truncated": 0.0}
    assert outside.evaluations.results[2].metrics == figures


def test_result_of_a_step_has_what_was_finished_since_the_last_one(outside: Store) -> None:
    items = [item for number in range(4) if (item := opened(outside, str(number))) is not None]
    for item, reward in zip(items[:3], (1.0, 0.0, 1.0), strict=True):
        play(outside, item, 0, reward, ENDPOINT)
    train(outside, 1)
    assert list(outside.evaluations.results) == [0]
    train(outside, 2)
    metrics = outside.evaluations.results[2].metrics
    assert (metrics["count"], metrics["pass@1"], metrics["pass@2"]) == (3.0, 0.75, 1.0), "the fourth one is unfinished"
    assert "unscored" not in metrics
    assert is_over(answer(outside, FinishEpisode(ENDPOINT, items[3].episode, 1, 1.0)))
    for number in range(3, STEPS + 1):
        train(outside, number)
    assert {step: result.metrics["count"] for step, result in outside.evaluations.results.items()} == {
        0: 0.0,
        2: 3.0,
        4: 0.0,
        6: 0.0,
    }
    assert opened(outside, "after the end") is None


def test_all_episodes_of_an_evaluation_may_be_taken(outside: Store) -> None:
    items = [opened(outside, str(number)) for number in range(COUNT * SAMPLES + 1)]
    assert [item and item.item for item in items] == [0, 0, 1, 1, 2, 2, None]


def test_time_limit_ends_the_attempt_of_an_agent_outside(outside: Store, tmp_path: Path) -> None:
    item = opened(outside, "a")
    assert item is not None
    outside = reopened(outside, tmp_path, MEMBERS, **evaluated("outside"), episodes=SETTINGS)
    assert opened(outside, "a") == item
    for now in (0.0, 60.0):
        outside.episodes.expire(now)
    again = opened(outside, "b")
    assert again is not None
    assert (again.episode, again.attempt) == (item.episode, 2)
    for now in (100.0, 160.0):
        outside.episodes.expire(now)
    train(outside, 1)
    train(outside, 2)
    assert outside.evaluations.results[2].metrics == {"count": 0.0, "unscored": 1.0}


# ── restarts of the store ────────────────────────────────────────────────────────────────────────────────────────────
def _run(store: Store, mode: str, after: Callable[[], None]) -> None:
    """Continue from any state to the end of the run, and call ``after`` after each flush."""
    first = store._state.committed
    for number in range(first, STEPS + 1):
        if number > first:
            train(store, number)
            after()
        publish(store, number)
        while item := opened(store, f"at {number}") if mode == "outside" else _evaluated(store):
            who = ENDPOINT if mode == "outside" else AGENTS
            turn = ask(store, item, "1", who=who)
            store.flush()
            after()
            sample(store, turn, number)
            store.flush()
            after()
            finish(store, item, None, who)
            store.flush()
            after()
            if mode == "outside" or number == 2:
                score(store, at_most=1)
                after()
        score(store)
        after()


def _evaluated(store: Store) -> EpisodeItem | None:
    step = store._state.committed
    if not store.evaluations.awaited(step, 1) or not store.evaluations.unfinished(step, lambda _: True)[0]:
        return None
    (item,) = episodes(store, 1)
    return item


@pytest.mark.parametrize("mode", ["own", "outside"])
def test_crash_of_the_store_at_any_call_leaves_each_result_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    made = {"own": open_own, "outside": open_outside}[mode]
    disk = FakeDisk(tmp_path / "store", monkeypatch)
    store = made(disk.folder, compact_from=COMPACTS)
    known = [dict(store.evaluations.results)]

    def note() -> None:
        known.append(dict(store.evaluations.results))
        disk.note = len(known) - 1

    _run(store, mode, note)
    assert list(store.evaluations.results) == DUE
    disk.recording = False
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda _: None)
    tried = 0
    crashes = disk.crash_folders(tmp_path, lambda start, end: ((start + end) // 2, end - 1))
    for moment, _, folder in list(crashes)[::SPARSE]:
        made(folder).close()  # which rewrites the log
        again = made(folder)
        assert again.evaluations.results.items() >= known[moment.note].items()
        _run(again, mode, lambda: None)
        results, audit = again.evaluations.results, again.audit()
        assert list(results) == DUE, (moment.number, moment.call)
        assert results.items() >= known[moment.note].items()
        if mode == "own":
            assert {result.metrics["count"] for result in results.values()} == {COUNT * SAMPLES}
        assert (audit.trained, audit.dropped, audit.episodes["token_drift"]) == (STEPS * 4, {}, 0)
        again.close()
        tried += 1
    assert tried > 30
