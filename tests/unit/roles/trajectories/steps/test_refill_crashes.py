"""The store is killed or loses power at any of its disk calls while it drops groups without signal."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path

import pytest

from rrl.roles.trajectories.batches import Batch
from rrl.roles.trajectories.durable.records import NO_SIGNAL
from rrl.roles.trajectories.store import Store
from rrl.roles.trajectories.types import CommittedState, Done, NotReady, Score, Scoring
from rrl.tests.support.fake_disk import FakeDisk
from rrl.tests.support.roles.trajectories.crew import BATCH, GROUP, REWARD, TRAINER, bind, commit, generate, open_store

STEPS = 5
SOLVED_FROM = 24
"""Group from which on all groups are solved, so that the limit on dropped groups ends each wait."""
TOKENS_PER_GROUP = 2 * GROUP
LIMIT = 3
"""Maximum number of groups that are dropped between two steps."""


def _open(folder: Path) -> Store:
    return open_store(folder, refill_limit=LIMIT / BATCH, compact_from=900, staleness=1)


def _training(trajectory: int) -> float:
    """Return a reward: of four groups, two are without signal, later all of them."""
    group = trajectory // GROUP
    return float(trajectory % GROUP) if group % 2 and group < SOLVED_FROM else float(group % 4 == 0)


def _step(store: Store, number: int) -> Batch:
    """Play until a step is bound, and return its batch."""
    for _ in count():
        if store.part(TRAINER, number) != NotReady():
            return bind(store, number)
        generate(store, at_most=GROUP, weights=number - 1)
        leased = store.lease_scoring(REWARD, 1000)
        assert isinstance(leased, Scoring)
        scores = [Score(one.trajectory, reward := _training(one.trajectory), reward) for one in leased.items]
        assert store.post_scores(REWARD, scores) == Done()
        store.flush()
        assert store._state.refilled.groups <= LIMIT
    raise AssertionError


def _play(store: Store, steps: Iterable[int], noted: Callable[[Batch], None] = lambda _: None) -> None:
    for number in steps:
        batch = _step(store, number)
        noted(batch)
        commit(store, batch)


def test_crash_at_any_call_binds_no_dropped_group_and_counts_each_drop_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda fd: None)
    (tmp_path / "store").mkdir()
    bound: list[Batch] = []
    with monkeypatch.context() as patch:
        disk = FakeDisk(tmp_path / "store", patch)
        store = _open(disk.folder)

        def note(batch: Batch) -> None:
            bound.append(batch)
            disk.note = len(bound)

        _play(store, range(1, STEPS), note)
        store.close()
    crashes = 0
    for crashes, (moment, _, folder) in enumerate(disk.crash_folders(tmp_path, lambda a, b: (a + 1, (a + b) // 2)), 1):
        if crashes % 3:
            continue
        store = _open(folder)
        start = store.committed(TRAINER)
        assert isinstance(start, CommittedState)
        first = (start.number or 0) + 1
        for batch in bound[max(0, first - 2) : moment.note]:
            assert bind(store, batch.number) == batch, "a bound step has changed"
        _play(store, range(first, STEPS + 4))
        audit = store.audit()
        trained = [group for step in audit.steps.values() for group in step]
        assert len(set(trained)) == len(trained) == (STEPS + 3) * BATCH
        assert audit.made == audit.trained + sum(audit.dropped.values()) + audit.open
        groups = [metrics["sampled_tokens"] / TOKENS_PER_GROUP for metrics in store._state.metrics.values()]
        assert len(groups) == STEPS + 3
        dropped = sum(groups) - len(groups) * BATCH + store._state.refilled.groups
        assert audit.dropped == {NO_SIGNAL: dropped * GROUP}, "the figures of the steps count a drop twice or never"
        store.close()
    assert crashes > 200
