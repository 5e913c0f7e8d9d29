"""Evaluations in the store: each has one weight version and one result, and no step trains on its answers."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rrl.core.task_spec import EvalSpec
from rrl.core.types import Incarnation, Version
from rrl.roles.trajectories.durable.records import FIRST_EVALUATED, EvaluationFinished
from rrl.roles.trajectories.steps.evaluations import RESEND_S, EvaluationReports, EvaluationSettings
from rrl.roles.trajectories.store import Store
from rrl.roles.trajectories.types import (
    Denied,
    Done,
    Item,
    NotReady,
    PartBound,
    Prompt,
    Sampling,
    Score,
    Scoring,
    Segment,
    ToScore,
)
from rrl.tests.support.roles.trajectories import crew
from rrl.tests.support.roles.trajectories.crew import (
    ALL,
    MAX_NEW,
    OTHER,
    REWARD,
    ROLLOUT,
    TRAINER,
    commit,
    generate,
    incarnation_of,
    lease,
    score,
)

STEPS, EVERY, COUNT, SAMPLES = 5, 2, 3, 2
NEXT = incarnation_of("trainer/0", 2)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path)


def held_out(item: int) -> Prompt:
    return Prompt(item, (9, 9, item))


def settings(prompt: Callable[[int], Prompt] = held_out, **changed: Any) -> EvaluationSettings:
    spec = EvalSpec(**{"every": EVERY, "count": COUNT, "samples": SAMPLES, "temperature": 0.5, **changed})
    return EvaluationSettings(spec, STEPS, 0, COUNT, prompt, MAX_NEW)


def open_store(folder: Path, members: Sequence[Incarnation] = ALL, **changed: Any) -> Store:
    return crew.open_store(folder, members, **{"evaluations": settings(), **changed})


def opened_twice(folder: Path) -> Store:
    """Open and close a store, which rewrites its log, and return a store that reads this log."""
    open_store(folder).close()
    return open_store(folder)


def publish(store: Store, step: int, trainer: Incarnation = TRAINER) -> None:
    """Report that the trainer serves the weights of a step."""
    assert store.report_versions(trainer, (Version(step, trainer.number),)) is None


def is_evaluated(items: Sequence[Item]) -> bool:
    assert {item.trajectory >= FIRST_EVALUATED for item in items} in ({True}, {False})
    return items[0].trajectory >= FIRST_EVALUATED


def tokens(item: Item, step: int, trainer: int = 1, given: Sequence[int] = (5, 1)) -> Segment:
    offset = MAX_NEW - item.max_new
    return Segment(item.trajectory, offset, tuple(given), (-0.5,) * len(given), Version(step, trainer))


def answer_all(store: Store, step: int, who: Incarnation = ROLLOUT, trainer: int = 1) -> list[int]:
    """Answer all evaluated prompts with the weights of a step, and return the numbers of the answers."""
    items = lease(store, who, weights=step)
    if not items or not is_evaluated(items):
        return []
    numbers = [item.trajectory for item in items]
    assert store.append(who, [tokens(item, step, trainer) for item in items], numbers) == Done()
    store.flush()
    return numbers


def evaluate(store: Store, step: int, trainer: int = 1, reward: float = 1.0) -> None:
    """Publish the weights of a step, answer its evaluation and score the answers."""
    publish(store, step, incarnation_of("trainer/0", trainer))
    assert len(answer_all(store, step, trainer=trainer)) == COUNT * SAMPLES
    score(store, reward=reward)


def train(store: Store, number: int, who: Incarnation = TRAINER) -> None:
    generate(store, weights=number - 1)
    score(store)
    commit(store, crew.bind(store, number, who), who)


def test_answers_of_an_evaluation_come_first_and_only_with_exactly_its_weights(store: Store) -> None:
    assert not is_evaluated(lease(store, OTHER, 2)), "an evaluated answer was leased before its weights were published"
    publish(store, 0)
    items = lease(store, ROLLOUT, 4, weights=0)
    assert is_evaluated(items)
    assert len(items) == 4
    assert [item.prompt for item in items] == [(9, 9, 0), (9, 9, 0), (9, 9, 1), (9, 9, 1)]
    seeds = [item.sampling.seed for item in items if item.sampling is not None]
    assert len(set(seeds)) == len(items)
    assert {item.sampling.temperature for item in items if item.sampling is not None} == {0.5}
    assert not is_evaluated(lease(store, incarnation_of("rollout/1"), 2, weights=1)), (
        "an evaluated answer was leased with newer weights"
    )


def test_greedy_answers_have_no_seed(tmp_path: Path) -> None:
    store = open_store(tmp_path, evaluations=settings(samples=1, temperature=0.0))
    publish(store, 0)
    items = lease(store, weights=0)
    assert [item.sampling for item in items] == [Sampling(temperature=0.0)] * COUNT


@pytest.mark.parametrize("stream", [False, True], ids=["batch", "part"])
def test_trainer_gets_no_data_of_the_next_step_before_the_evaluation_is_over(stream: bool, store: Store) -> None:

    def request() -> object:
        return store.part(TRAINER, 1, 0) if stream else store.part(TRAINER, 1)

    generate(store)
    score(store)
    assert request() == NotReady()
    assert not store.has_data()
    publish(store, 0)
    answer_all(store, 0)
    score(store, at_most=COUNT * SAMPLES - 1)
    assert request() == NotReady()
    assert store.wait_reason(1) == "the trainer waits for the evaluation of step 0: 5 of 6 answers are scored"
    score(store)
    assert isinstance(request(), PartBound)
    assert store.wait_reason(1) is None


def test_steps_between_evaluations_do_not_wait(store: Store) -> None:
    evaluate(store, 0)
    train(store, 1)
    publish(store, 1)
    train(store, 2)
    assert list(store.evaluations.results) == [0]
    assert store.part(TRAINER, 3) == NotReady()
    evaluate(store, 2)
    train(store, 3)
    train(store, 4)
    evaluate(store, 4)
    train(store, 5)
    evaluate(store, 5)
    assert list(store.evaluations.results) == [0, 2, 4, 5], "the evaluated steps are not 0, 2, 4 and the last one"


def test_token_of_another_version_is_refused_and_its_answer_leased_again(store: Store) -> None:
    publish(store, 0)
    item, *_ = lease(store, at_most=1, weights=0)
    answer = store.append(ROLLOUT, [tokens(item, step=1)], [item.trajectory])
    assert isinstance(answer, Denied)
    assert answer.lost == (item.trajectory,)
    assert item in lease(store, OTHER, weights=0)


def test_answer_of_a_dead_rollout_goes_on_where_it_ended(store: Store) -> None:
    publish(store, 0)
    items = lease(store, weights=0)
    assert store.append(ROLLOUT, [tokens(items[0], 0, given=(5,))], []) == Done()
    assert not is_evaluated(lease(store, OTHER, weights=0)), "an evaluated answer was leased twice"
    store.update_membership([one for one in ALL if one != ROLLOUT])
    again = lease(store, OTHER, weights=0)
    assert {item.trajectory for item in again} == {item.trajectory for item in items}
    continued = next(item for item in again if item.trajectory == items[0].trajectory)
    assert [segment.tokens for segment in continued.so_far] == [(5,)]
    fenced = store.append(ROLLOUT, [tokens(items[1], 0)], [])
    assert isinstance(fenced, Denied)


def test_answers_leased_by_a_dead_reward_replica_are_leased_to_another(store: Store) -> None:
    publish(store, 0)
    numbers = answer_all(store, 0)
    leased = store.lease_scoring(REWARD, 100)
    other = incarnation_of("reward/1")
    store.update_membership([*(one for one in ALL if one != REWARD), other])
    assert store.lease_scoring(other, 100) == leased
    assert isinstance(leased, Scoring)
    assert leased.items == tuple(ToScore(number, i // SAMPLES, (5, 1), True) for i, number in enumerate(numbers))


def test_new_trainer_begins_an_open_evaluation_again(store: Store) -> None:
    publish(store, 0)
    first = answer_all(store, 0)
    score(store, at_most=2)
    store.update_membership([*(one for one in ALL if one != TRAINER), NEXT])
    assert not is_evaluated(lease(store, weights=0)), (
        "evaluated answers were leased before the new trainer has published a version"
    )
    publish(store, 0, NEXT)
    again = answer_all(store, 0, trainer=2)
    assert len(again) == len(first)
    assert not {*first} & {*again}, (
        "the second attempt uses numbers of the first one, whose late scores would count for it"
    )
    store.post_scores(REWARD, [Score(number, 1.0, 1.0) for number in first])
    assert store.evaluations.results == {}
    score(store, reward=0.5)
    assert store.evaluations.results[0].metrics["reward"] == 0.5


def test_result_counts_once_its_step_is_committed(tmp_path: Path) -> None:
    store = open_store(tmp_path, keep_uncommitted=1)
    evaluate(store, 0)
    train(store, 1)
    generate(store, weights=1)
    score(store)
    batch = crew.bind(store, 2)
    evaluate(store, 2, reward=0.25)
    assert list(store.evaluations.results) == [0], "the result of a step counts before the step is committed"
    generate(store, weights=2)
    score(store)
    assert isinstance(store.part(TRAINER, 3), PartBound), "the trainer has to wait for the result of an evaluation"
    store.update_membership([*(one for one in ALL if one != TRAINER), NEXT])
    assert store.part(NEXT, 3) == NotReady(), "step 3 was bound before the new trainer has computed step 2 again"
    evaluate(store, 2, trainer=2, reward=0.75)
    commit(store, batch, NEXT)
    assert store.evaluations.results[2].metrics["reward"] == 0.75
    assert isinstance(store.part(NEXT, 3), PartBound)


def test_result_has_the_shares_of_right_and_of_cut_answers_and_their_mean_length(tmp_path: Path) -> None:
    store = open_store(tmp_path, end_tokens=(1,))
    publish(store, 0)
    items = lease(store, weights=0)
    answers = [(5,), (5, 5, 5, 5), (5, 5, 1), (5, 5, 5, 1), (5,), (5, 5, 5, 5)]
    segments = [tokens(item, 0, given=answer) for item, answer in zip(items, answers, strict=True)]
    assert store.append(ROLLOUT, segments, [item.trajectory for item in items]) == Done()
    rewards = [1.0, 0.0, 0.5, 0.0, 1.0]
    scores = [Score(item.trajectory, reward, 7.0) for item, reward in zip(items, rewards, strict=False)]
    store.post_scores(REWARD, scores, {items[5].trajectory: "no scorer"})
    assert store.evaluations.results[0].metrics == {
        "count": 5.0,
        "unscored": 1.0,
        "reward": 0.5,
        "pass@1": pytest.approx((0.5 + 0 + 1) / 3),
        "avg@2": pytest.approx((1.0 + 0.0 + 0.5 + 0.0) / 4),
        "pass@2": 0.5,
        "completion_len": 2.6,
        "truncated": 1 / 5,
    }


@pytest.mark.parametrize("numbers", [(math.nan, 0.0), (-math.inf, 0.0), (1.0, math.nan)])
def test_score_of_an_evaluated_answer_that_is_not_finite_is_denied(numbers: tuple[float, float], store: Store) -> None:
    publish(store, 0)
    first, *others = answer_all(store, 0)
    scores = [Score(other, 1.0, 0.0) for other in others]
    assert isinstance(store.post_scores(REWARD, [Score(first, *numbers), *scores]), Denied)
    assert store.evaluations.results == {}
    assert store.post_scores(REWARD, scores, {first: "score() returned nan"}) == Done()
    metrics = store.evaluations.results[0].metrics
    assert (metrics["unscored"], metrics["reward"]) == (1.0, 1.0)


def test_prompt_that_cannot_be_made_leaves_the_others(tmp_path: Path) -> None:
    def prompt(item: int) -> Prompt:
        if item == 1:
            raise SystemExit("no such prompt")
        return held_out(item)

    store = open_store(tmp_path, evaluations=settings(prompt))
    publish(store, 0)
    assert len(answer_all(store, 0)) == (COUNT - 1) * SAMPLES
    score(store)
    metrics = store.evaluations.results[0].metrics
    assert (metrics["count"], metrics["unscored"]) == ((COUNT - 1) * SAMPLES, SAMPLES)


def test_steps_train_the_same_groups_with_and_without_evaluations(tmp_path: Path) -> None:
    digests: dict[bool, list[str]] = {}
    for evaluated in (False, True):
        store = open_store(tmp_path / str(evaluated), evaluations=settings() if evaluated else None)
        batches = []
        for number in range(1, STEPS + 1):
            publish(store, number - 1)
            while answer_all(store, number - 1):
                score(store)
            generate(store, weights=number - 1)
            score(store)
            batch = crew.bind(store, number)
            assert all(one.id < FIRST_EVALUATED for one in batch.trajectories)
            commit(store, batch)
            batches.append(batch.digest)
        digests[evaluated] = batches
        assert store.audit().made == store.audit().trained + store.audit().open
    assert digests[True] == digests[False]


def _script(store: Store, after: Callable[[], None]) -> None:
    """Continue from any state to the end of the run, and call ``after`` after each flush."""
    state = store.committed(TRAINER)
    first = getattr(state, "number", None) or 0
    for number in range(first, STEPS + 1):
        publish(store, number)
        if number:
            batch = None
            while batch is None:
                generate(store, at_most=3, weights=number - 1)
                after()
                score(store, at_most=3)
                after()
                bound = store.part(TRAINER, number) if number > first else None
                batch = bound.part if isinstance(bound, PartBound) else None
                if number == first:
                    break
            if batch is not None:
                commit(store, batch)
                after()
        for who in (ROLLOUT, OTHER, ROLLOUT):
            items = lease(store, who, 3, weights=number)
            if items and is_evaluated(items):
                left = [item for item in items if item.max_new == MAX_NEW]
                assert store.append(who, [tokens(item, number, given=(5,)) for item in left]) == Done()
                store.flush()
                after()
                rest = lease(store, who, 3, weights=number)
                done = [item.trajectory for item in rest]
                assert store.append(who, [tokens(item, number, given=(6, 1)) for item in rest], done) == Done()
                store.flush()
                after()
                score(store, at_most=2)
                after()
        score(store)
        after()


def test_store_that_restarts_after_any_flush_has_each_result_once(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    store = open_store(folder)
    copies: list[tuple[Path, dict[int, EvaluationFinished]]] = []

    def copy() -> None:
        target = tmp_path / f"copy{len(copies)}"
        shutil.copytree(folder, target)
        copies.append((target, dict(store.evaluations.results)))

    _script(store, copy)
    assert list(store.evaluations.results) == [0, 2, 4, 5]
    assert len(copies) > 40
    for target, known in copies:
        again = opened_twice(target)
        assert dict(again.evaluations.results) == known
        _script(again, lambda: None)
        results = dict(again.evaluations.results)
        assert list(results) == [0, 2, 4, 5], target
        assert results.items() >= known.items()
        assert {result.metrics["count"] for result in results.values()} == {COUNT * SAMPLES}
        again.close()


def test_rewritten_log_keeps_an_open_evaluation(tmp_path: Path, store: Store) -> None:
    publish(store, 0)
    items = lease(store, weights=0)
    assert store.append(ROLLOUT, [tokens(item, 0) for item in items[:3]], [items[0].trajectory]) == Done()
    store.flush()
    score(store, reward=0.25)
    store.close()
    again = opened_twice(tmp_path)
    left = lease(again, weights=0)
    assert {item.trajectory for item in left} == {item.trajectory for item in items[1:]}
    assert sum(bool(item.so_far) for item in left) == 2
    done = [item.trajectory for item in left]
    assert again.append(ROLLOUT, [tokens(item, 0) for item in left], done) == Done()
    score(again, reward=0.25)
    assert again.evaluations.results[0].metrics["reward"] == 0.25


def test_result_is_reported_until_the_manager_confirms_it(store: Store) -> None:
    evaluate(store, 0)
    train(store, 1)
    train(store, 2)
    sent: list[int] = []
    reports = EvaluationReports(store.evaluations, lambda step, metrics: sent.append(step))
    reports.send(-1, now=0.0)
    reports.send(-1, now=RESEND_S / 2)
    assert sent == [0]
    reports.send(-1, now=RESEND_S)
    assert sent == [0, 0]
    evaluate(store, 2)
    reports.send(0, now=RESEND_S + 1)
    reports.send(2, now=3 * RESEND_S)
    assert sent == [0, 0, 2]
