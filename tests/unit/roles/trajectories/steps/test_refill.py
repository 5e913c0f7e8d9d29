"""With ``[sampling] refill`` a group without signal is dropped before it is bound, and a step gets another one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rrl.roles.trajectories.durable.log import read_frames
from rrl.roles.trajectories.durable.records import NO_SIGNAL, GroupDropped, Outcomes, decode
from rrl.roles.trajectories.store import Store
from rrl.roles.trajectories.types import Denied, Done, NotReady, PartBound, Prompt, Score, Scoring
from rrl.tests.support.roles.trajectories.agents import episodes, finish, open_agents_store, turn
from rrl.tests.support.roles.trajectories.crew import (
    ALL,
    BATCH,
    GROUP,
    MAX_NEW,
    REWARD,
    TRAINER,
    bind,
    commit,
    figures_of,
    generate,
    incarnation_of,
    open_store,
)
from rrl.tests.support.roles.trajectories.script import log_in

SOLVED, FAILED, MIXED = (1.0, 1.0), (0.0, 0.0), (1.0, 0.0)
END = 1
LIMIT = 1.5
"""The limit in steps; three groups in groups of a step of two."""


def _open(folder: Path, **changed: Any) -> Store:
    return open_store(folder, **{"refill_limit": LIMIT, "end_tokens": (END,), **changed})


def _restarted(store: Store, folder: Path, **changed: Any) -> Store:
    """Open the store again twice, so that the second store reads a log that the first one has rewritten."""
    for _ in range(2):
        store.flush()
        store.close()
        store = _open(folder, **changed)
    return store


def _play(store: Store, *groups: Sequence[float], tokens: Sequence[int] = (5, END)) -> None:
    """Generate as many groups, and give their answers these training rewards; the reported ones are 10 higher."""
    generate(store, at_most=GROUP * len(groups), tokens=tokens)
    _score(store, *groups)


def _score(store: Store, *groups: Sequence[float]) -> None:
    leased = store.lease_scoring(REWARD, 1000)
    assert isinstance(leased, Scoring)
    rewards = [reward for group in groups for reward in group]
    scores = [Score(one.trajectory, 10 + reward, reward) for one, reward in zip(leased.items, rewards, strict=True)]
    assert store.post_scores(REWARD, scores) == Done()
    store.flush()


@pytest.mark.parametrize("restarts", [False, True])
def test_group_without_signal_is_dropped_and_counts_in_the_reward_of_the_step(tmp_path: Path, restarts: bool) -> None:
    store = _open(tmp_path)
    _play(store, SOLVED, MIXED, FAILED, MIXED)
    if restarts:
        store = _restarted(store, tmp_path)
    batch = bind(store, 1)
    assert batch.groups == (1, 3)
    if restarts:
        store = _restarted(store, tmp_path)
        assert bind(store, 1) == batch
    assert (store.audit().dropped, store.audit().expected) == ({NO_SIGNAL: 2 * GROUP}, (NO_SIGNAL,))
    figures = figures_of(store, 1)
    expected = {
        "reward": 10.5,
        "training_reward": 0.5,
        "reward_spread": 0.5**0.5,
        "no_signal": 0.5,
        "truncated": 0.0,
        "sampled_tokens": 16.0,
        "completion_len": 2.0,
        "length_bias": 1.0,
    }
    assert {name: pytest.approx(figures[name]) for name in expected} == expected
    commit(store, batch)
    _play(store, MIXED, MIXED)
    assert figures_of(store, bind(store, 2).number)["no_signal"] == 0.0, "groups of an earlier step count again"


@pytest.mark.parametrize("restarts", [False, True])
def test_at_the_limit_groups_are_bound_as_they_are_and_the_next_step_counts_anew(
    tmp_path: Path, restarts: bool
) -> None:
    store = _open(tmp_path, max_ahead_batches=0)
    for number in (1, 2):
        for dropped in range(1, 4):
            _play(store, SOLVED)
            assert store.part(TRAINER, number) == NotReady()
            assert store._state.refilled.groups == dropped
            if restarts:
                store = _restarted(store, tmp_path, max_ahead_batches=0)
        _play(store, SOLVED, SOLVED)
        assert store._state.refilled.groups == 3, "more groups were dropped than the limit says"
        batch = bind(store, number)
        assert figures_of(store, number)["no_signal"] == 1.0
        assert len(batch.groups) == BATCH
        commit(store, batch)
    assert store.audit().dropped == {NO_SIGNAL: 6 * GROUP}


def test_store_that_opens_drops_the_groups_whose_last_score_it_was_killed_after(tmp_path: Path) -> None:
    """Without ``refill`` the last record is that of the scores, as after a crash before the record of the drop."""
    store = _open(tmp_path, refill_limit=None)
    _play(store, SOLVED, MIXED)
    assert store.audit().dropped == {}
    store.close()
    store = _open(tmp_path)
    assert store.audit().dropped == {NO_SIGNAL: GROUP}
    _play(store, MIXED)
    assert bind(store, 1).groups == (1, 2)
    assert figures_of(store, 1)["no_signal"] == pytest.approx(1 / 3)


def test_bound_groups_are_never_dropped(tmp_path: Path) -> None:
    store = _open(tmp_path, refill_limit=None)
    _play(store, SOLVED, SOLVED)
    batch = bind(store, 1)
    store.close()
    store = _open(tmp_path)
    assert bind(store, 1) == batch
    assert store.audit().dropped == {}


def test_drops_between_the_parts_of_a_step_count_in_the_step_and_trainers_get_the_same_parts(tmp_path: Path) -> None:
    store = _open(tmp_path, groups_per_part=1, groups_per_batch=3)

    def part(index: int, number: int = 1) -> PartBound:
        bound = store.part(incarnation_of("trainer/0", number), 1, index)
        assert isinstance(bound, PartBound), bound
        return bound

    _play(store, SOLVED, MIXED)
    first = part(0)
    _play(store, FAILED, MIXED)
    second = part(1)
    store = _restarted(store, tmp_path, groups_per_part=1, groups_per_batch=3)
    store.update_membership((*ALL[:-1], incarnation_of("trainer/0", 2)))
    assert [part(0, 2), part(1, 2)] == [first, second], "another trainer got other parts"
    assert store._state.refilled.groups == 2, "a part began the count of the step anew"
    _play(store, FAILED, MIXED)
    assert part(2, 2).part.last
    assert figures_of(store, 1)["no_signal"] == 0.5
    assert store._state.refilled == Outcomes()


def test_drop_frees_a_place_on_both_sides_of_the_limit_on_ages(tmp_path: Path) -> None:
    """With staleness 0 a step has places for two groups that were begun with the weights of the step before it."""
    store = _open(tmp_path, staleness=0)
    assert len(generate(store, weights=0)) == BATCH * GROUP
    assert generate(store, weights=0) == [], "a third group was begun, which no step could train"
    _score(store, SOLVED, MIXED)
    assert store.part(TRAINER, 1) == NotReady()
    assert len(generate(store, weights=0)) == GROUP
    _score(store, MIXED)
    assert bind(store, 1).groups == (1, 2)


def test_with_truncated_answers_left_out_only_the_others_give_a_group_its_signal(tmp_path: Path) -> None:
    store = _open(tmp_path, ignores_truncated=True)
    generate(store, at_most=1, tokens=(5,) * MAX_NEW)
    generate(store, at_most=1)
    _score(store, MIXED)
    assert store.audit().dropped == {NO_SIGNAL: GROUP}
    _play(store, MIXED, MIXED)
    assert figures_of(store, bind(store, 1).number)["truncated"] == pytest.approx(1 / 6)


def test_episodes_without_signal_are_dropped_and_do_not_count_as_failed(tmp_path: Path) -> None:
    store = open_agents_store(tmp_path, refill_limit=LIMIT)
    leased = episodes(store, 3 * GROUP)
    for place, item in enumerate(leased):
        turn(store, item, (2, 3), (5, 1))
        finish(store, item, float(place % GROUP if place >= GROUP else 0))
    assert bind(store, 1).groups == (1, 2)
    figures = figures_of(store, 1)
    assert figures["no_signal"] == pytest.approx(1 / 3)
    assert (figures["episodes_dropped"], figures["episodes_finished"]) == (0.0, 6.0)
    assert figures["length_bias"] == 1.0


def test_log_has_one_record_of_all_groups_without_signal(tmp_path: Path) -> None:
    store = _open(tmp_path, compact_from=0)
    for number in range(1, 20):
        _play(store, SOLVED, FAILED, MIXED, MIXED)
        commit(store, bind(store, number))
    store = _restarted(store, tmp_path)
    dropped = [one for one in map(decode, read_frames(log_in(tmp_path))) if isinstance(one, GroupDropped)]
    assert [one.trajectories for one in dropped] == [19 * 2 * GROUP]
    audit = store.audit()
    assert audit.dropped == {NO_SIGNAL: 19 * 2 * GROUP}
    assert audit.made == audit.trained + sum(audit.dropped.values()) + audit.open


# ── figures of several rewards and sources ─────────────────────────────────────────────────────────────────────────
def test_parts_of_rewards_and_sources_are_figures_and_dropped_groups_count_in_them(tmp_path: Path) -> None:
    store = _open(tmp_path, next_prompt=lambda item: Prompt(item, (2, 3), source=("math", "code")[item % 2]))
    generate(store, at_most=4 * GROUP)
    leased = store.lease_scoring(REWARD, 1000)
    assert isinstance(leased, Scoring)
    scores = []
    for one in leased.items:
        group = one.trajectory // GROUP
        reward = float(group == 0 or (group > 1 and one.trajectory % GROUP))  # solved, failed, mixed, mixed
        scores.append(Score(one.trajectory, reward, reward, {"format": 1.0, "right": reward}))
    assert isinstance(store.post_scores(REWARD, [Score(0, 0.0, 0.0, {"right": float("nan")})]), Denied)
    assert store.post_scores(REWARD, scores) == Done()
    store = _restarted(store, tmp_path, next_prompt=lambda item: Prompt(item, (2,)))
    bind(store, 1)
    figures = figures_of(store, 1)
    expected = {"reward": 0.5, "reward_right": 0.5, "reward_format": 1.0}
    sources = {"reward_source_math": 0.75, "reward_source_code": 0.25}
    assert figures.items() >= (expected | sources).items()


def test_trainer_replaces_no_figure_of_the_store(tmp_path: Path) -> None:
    store = _open(tmp_path)
    _play(store, MIXED, MIXED)
    done = commit(store, bind(store, 1), metrics={"reward": 7.0, "loss": 1.0, "tokens": 3.0})
    names = ("reward", "trainer_reward", "loss", "tokens")
    assert [done.metrics[name] for name in names] == [10.5, 7.0, 1.0, 3.0]
    _play(store, MIXED, MIXED)
    assert commit(store, bind(store, 2)).metrics["tokens"] == 8.0
