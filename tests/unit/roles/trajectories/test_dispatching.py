"""The store leases by expected length, and a restarted store makes the same decisions."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from rrl.core.types import Incarnation
from rrl.roles.trajectories.dispatch.token_times import Observed, TokenTimes
from rrl.roles.trajectories.durable.log import read_frames
from rrl.roles.trajectories.durable.records import GroupCreated, ItemsOrdered, TimesObserved, decode
from rrl.roles.trajectories.store import Store
from rrl.roles.trajectories.types import Done, Item, Leased, Prompt
from rrl.tests.support.roles.trajectories.crew import (
    ALL,
    OTHER,
    ROLLOUT,
    TRAINER,
    bind,
    commit,
    figures_of,
    lease,
    manifest,
    open_store,
    score,
    segment,
)

SIZE = 2
GROUPS = 4
LIMIT = 400
SEGMENT = 20
TAUGHT = 20
"""Number of steps after which the store has learned that lengths differ."""
LENGTHS = (10, 40, 120, 300)
"""Median numbers of tokens of the answers to items 0, 1, 2 and 3. Item 4 is like item 0, and so on."""


def kind(item: int) -> int:
    return item % len(LENGTHS)


def _prompt(item: int) -> Prompt:
    return Prompt(item, (2, 30 + kind(item), 100 + item % 50))


def _open(folder: Path, **changed: Any) -> Store:
    settings = {"group_size": SIZE, "groups_per_batch": GROUPS, "max_ahead_batches": 0, "max_new_tokens": LIMIT}
    return open_store(folder, **{**settings, "next_prompt": _prompt, **changed})


def _length(item: Item) -> int:
    rng = random.Random(item.trajectory)
    return max(1, min(item.max_new, round(LENGTHS[item.prompt[1] - 30] * rng.uniform(0.8, 1.25))))


class Clock:
    """A virtual clock. A token takes (1 + b) / 100 s while b answers run."""

    def __init__(self) -> None:
        self.now = 0.0


def _step(store: Store, number: int, clock: Clock | None = None) -> list[int]:
    """Return, in order, the trajectories leased in a step of one rollout that works on two of them at a time."""
    clock = clock or Clock()
    held: dict[int, tuple[Item, int]] = {}
    order: list[int] = []
    while True:
        answer = store.lease(ROLLOUT, 2 - len(held), sorted(held), None, clock.now)
        assert isinstance(answer, Leased)
        order += [item.trajectory for item in answer.items]
        held |= {item.trajectory: (item, 0) for item in answer.items}
        if not held:
            break
        clock.now += SEGMENT * (1 + len(held)) / 100
        segments, finished = [], []
        for trajectory, (item, made) in sorted(held.items()):
            count = min(SEGMENT, _length(item) - made)
            segments.append(segment(trajectory, made, (5,) * count))
            held[trajectory] = item, made + count
            if made + count == _length(item):
                finished.append(trajectory)
                del held[trajectory]
        assert store.append(ROLLOUT, segments, finished, clock.now) == Done()
    store.flush()
    score(store)
    commit(store, bind(store, number))
    return order


def _taught(folder: Path, steps: int = TAUGHT, **changed: Any) -> Store:
    store = _open(folder, **changed)
    clock = Clock()
    for number in range(1, steps + 1):
        _step(store, number, clock)
    return store


def _kinds(store: Store, order: list[int]) -> list[int]:
    return [kind(store._state.trajectories[trajectory].group.created.item) for trajectory in order]


def test_longest_trajectories_are_leased_first_once_lengths_are_known_to_differ(tmp_path: Path) -> None:
    store = _open(tmp_path)
    assert _kinds(store, _step(store, 1)) == [0, 0, 1, 1, 2, 2, 3, 3], (
        "trajectories were not leased in the order of their creation"
    )
    for number in range(2, TAUGHT + 1):
        _step(store, number)
    assert _kinds(store, _step(store, TAUGHT + 1)) == [3, 3, 2, 2, 1, 1, 0, 0]


def test_order_of_creation_is_kept_if_lengths_do_not_differ(tmp_path: Path) -> None:
    store = _open(tmp_path, next_prompt=lambda item: Prompt(item, (2, 31)))
    for number in range(1, 9):
        order = _step(store, number)
        assert order == sorted(order)


def test_a_later_batch_is_not_leased_before_an_earlier_one(tmp_path: Path) -> None:
    store = _taught(tmp_path, max_ahead_batches=2)
    commit(store, bind(store, TAUGHT + 1))  # two more batches may be begun from here on
    held = [item.trajectory for item in lease(store, ROLLOUT, GROUPS * SIZE - 2)]
    short = lease(store, OTHER, 2)  # the last two trajectories of this batch
    begun = lease(store, ROLLOUT, 1, held)  # the first trajectory of the next batch
    assert short[0].group // GROUPS < begun[0].group // GROUPS
    assert _length(short[0]) < _length(begun[0])
    store.update_membership(each for each in ALL if each != OTHER)
    assert [item.trajectory for item in lease(store, ROLLOUT, 2, [*held, begun[0].trajectory])] == [
        item.trajectory for item in short
    ]


@pytest.mark.parametrize("compact_from", [2_000, 2**25])
def test_a_restarted_store_makes_the_same_thousand_decisions(tmp_path: Path, compact_from: int) -> None:
    """One store stays open, and the other one is reopened after every second step, which rewrites its log."""
    one = _open(tmp_path / "one", compact_from=2**25)
    other = _open(tmp_path / "other", compact_from=compact_from)
    decisions = 0
    for number in range(1, 127):
        first, second = _step(one, number), _step(other, number)
        assert first == second
        decisions += len(first)
        assert other._state.lengths.state() == one._state.lengths.state()
        if number % 2 == 0:
            other.close()
            other = _open(tmp_path / "other", compact_from=compact_from)
    assert decisions > 1000
    assert other._work.by_length


def _step_of_two(store: Store, number: int, clock: Clock) -> list[list[int]]:
    """Play a step with two rollouts of three places, of which the second is half as fast.

    Return the decisions of the store in order.
    """
    held: dict[Incarnation, dict[int, tuple[Item, int]]] = {ROLLOUT: {}, OTHER: {}}
    due = {ROLLOUT: clock.now, OTHER: clock.now}
    decided: list[list[int]] = []
    ended = 0
    for who in held:
        store.lease(who, 0, (), None, clock.now)  # tells a restarted store that this rollout has no free places yet
    while ended < GROUPS * SIZE:
        who = min(due, key=lambda each: (due[each], str(each)))
        clock.now, mine = due[who], held[who]
        segments, finished = [], []
        for trajectory, (item, made) in sorted(mine.items()):
            count = min(SEGMENT, _length(item) - made)
            segments.append(segment(trajectory, made, (5,) * count))
            mine[trajectory] = item, made + count
            if made + count == _length(item):
                finished.append(trajectory)
        if segments:
            assert store.append(who, segments, finished, clock.now) == Done()
        for trajectory in finished:
            del mine[trajectory]
        ended += len(finished)
        leased = store.lease(who, 3 - len(mine), sorted(mine), None, clock.now)
        assert isinstance(leased, Leased)
        decided.append([item.trajectory for item in leased.items])
        for item in leased.items:
            mine[item.trajectory] = item, 0
        due[who] = clock.now + SEGMENT * (1 + len(mine)) / (100 if who == ROLLOUT else 50)
    store.flush()
    score(store)
    commit(store, bind(store, number))
    return decided


def test_restarted_store_restores_token_times_and_shares_work_as_before(tmp_path: Path) -> None:
    one, other = _open(tmp_path / "one"), _open(tmp_path / "other")
    clocks = Clock(), Clock()
    decisions = 0
    for number in range(1, 61):
        first, second = _step_of_two(one, number, clocks[0]), _step_of_two(other, number, clocks[1])
        assert first == second
        decisions += len(first)
        for who in (ROLLOUT, OTHER):
            assert other._state.times_of(who).observations() == one._state.times_of(who).observations()
        if number % 2 == 0:
            other.close()
            other = _open(tmp_path / "other")
    assert decisions > 1000
    assert one._state.times_of(OTHER).table[4] > one._state.times_of(ROLLOUT).table[4]


def test_times_of_an_earlier_incarnation_do_not_count(tmp_path: Path) -> None:
    store = _open(tmp_path)
    store._durable.write(TimesObserved(ROLLOUT, Observed(((4, 0.5),))))
    later = Incarnation(ROLLOUT.replica, ROLLOUT.number + 1)
    assert store._state.times_of(later).table == TokenTimes().table
    store._durable.write(TimesObserved(later, Observed(((4, 0.25),))))
    assert store._state.times_of(later).table[4] == 0.25
    assert store._state.times_of(ROLLOUT).table == TokenTimes().table


def test_length_limit_of_truncated_answers_is_that_at_the_time_of_truncation(tmp_path: Path) -> None:
    cut = LIMIT // 4
    store = _taught(tmp_path, steps=2, max_new_tokens=cut)
    before = store._state.lengths.state()
    store.close()
    again = _open(tmp_path)
    assert again._state.lengths.limit == LIMIT
    again._state.lengths.limit = cut
    assert again._state.lengths.state() == before


# ── figures ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def _end(store: Store, lengths: dict[int, int], step: int = 0) -> None:
    """Append the given number of tokens to each trajectory, and end it."""
    for trajectory, length in lengths.items():
        assert store.append(ROLLOUT, [segment(trajectory, 0, (5,) * length, step)], [trajectory]) == Done()
    store.flush()


@pytest.mark.parametrize("restarts", [False, True])
def test_length_bias_compares_trained_answers_with_all_that_ended(tmp_path: Path, restarts: bool) -> None:
    store = _open(tmp_path, groups_per_batch=1, max_ahead_batches=2)
    leased = [item.trajectory for item in lease(store, ROLLOUT, 6)]
    _end(store, dict(zip(leased, (10, 20, 40, 50), strict=False)))  # two groups end, and the third one continues to run
    score(store)
    if restarts:
        store.close()
        store = _open(tmp_path, groups_per_batch=1, max_ahead_batches=2)
    batch = bind(store, 1)
    figures = figures_of(store, 1)
    assert figures["length_bias"] == pytest.approx(15 / 30)
    assert figures["tokens_aged_0"] == 30
    committed = store.commit(TRAINER, 1, manifest(1), batch.digest, {"loss": 1.0})
    assert committed == Done(metrics={"tokens": 30.0, "loss": 1.0, **figures})
    assert store.commit(TRAINER, 1, manifest(1), batch.digest, {"loss": 1.0}) == committed, (
        "a repeated commit got another answer"
    )


def test_running_answers_of_groups_dropped_for_age_count_with_the_tokens_they_had(tmp_path: Path) -> None:
    settings = {"groups_per_batch": 1, "max_ahead_batches": 2, "staleness": 0, "wait_for_late": False}
    store = _open(tmp_path, **settings)
    leased = [item.trajectory for item in lease(store, ROLLOUT, 4)]
    _end(store, {leased[0]: 10, leased[1]: 20, leased[2]: 30})
    store.append(ROLLOUT, [segment(leased[3], 0, (5,) * 60)])
    score(store)
    commit(store, bind(store, 1))  # drops the second group
    assert store._state.stale == 1
    for _ in range(2):
        assert figures_of(store, 1)["length_bias"] == pytest.approx(15 / 30)
        store.close()
        store = _open(tmp_path, **settings)


def test_recall_and_expected_long_groups_are_reported_once_lengths_are_learned(tmp_path: Path) -> None:
    store = _taught(tmp_path)
    figures = figures_of(store, TAUGHT)
    assert figures["recall20"] >= 0.5, "fewer than half of the longest groups were expected to be long"
    assert figures["long_groups"] == figures["longest_expected"] == 0.0, (
        "groups count as long before any group was begun"
    )
    lease(store, ROLLOUT, 8)
    figures = figures_of(store, TAUGHT)
    assert figures["long_groups"] >= 1
    assert LENGTHS[3] / 2 < figures["longest_expected"] < LENGTHS[3] * 2


# ── order of prompts ─────────────────────────────────────────────────────────────────────────────────────────────────
def test_window_orders_the_prompts_of_its_batches_and_uses_each_once(tmp_path: Path) -> None:
    store = _taught(tmp_path, steps=36, window=3)
    store.flush()
    ordered: list[int] = []
    created: list[int] = []
    windows = 0
    for record in map(decode, read_frames(max(tmp_path.glob("log.*")))):
        if isinstance(record, ItemsOrdered):
            windows += 1
            assert not ordered, "a new window of prompts was ordered before the last one was used up"
            ordered = list(record.items)
            assert sorted(ordered) == list(range(len(created), len(created) + 3 * GROUPS))
            kinds = [kind(item) for item in ordered]
            assert kinds == sorted(kinds, reverse=True), "the longest prompts do not come first"
        elif isinstance(record, GroupCreated):
            created.append(record.item)
            if ordered:
                assert record.item == ordered.pop(0)
    assert windows >= 4
    assert store._state.item_order == ordered
    assert sorted([*created, *ordered]) == list(range(len(created) + len(ordered)))


def test_changed_window_after_a_restart_loses_no_prompt(tmp_path: Path) -> None:
    store = _taught(tmp_path, window=3)
    created: set[int] = set()
    first = TAUGHT - 1
    for number, window in enumerate((3, 1, 1, 2, 5, 5, 1, 1), TAUGHT + 1):
        store.close()
        store = _open(tmp_path, window=window)
        _step(store, number)
        groups = [group.created for group in store._state.groups.values()]
        created |= {group.item for group in groups if group.group >= first * GROUPS}
    assert len(created) == 9 * GROUPS
    left = store._state.item_order
    before = set(range(store._state.next_group + len(left))) - created - {*left}
    assert len(before) == first * GROUPS, "an item was left out, or used twice"
