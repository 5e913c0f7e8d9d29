"""With ``late = "drop"`` no token is trained that is older than ``[sampling] staleness``, and the run goes on.

``late = "wait"`` is tested in ``test_waiting.py``. Tests of rules that hold in both cases are here. Most of them are
about the weights with which a rollout may begin a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrl.core.types import Incarnation
from rrl.roles.trajectories.store import Store
from rrl.roles.trajectories.types import CommittedState, Denied, Done, Leased, NotReady, PackedPart, PartBound
from rrl.tests.support.examples import examples
from rrl.tests.support.roles.trajectories.crew import (
    ALL,
    BATCH,
    GROUP,
    MAX_NEW,
    OTHER,
    REWARD,
    ROLLOUT,
    TRAINER,
    bind,
    commit,
    figures_of,
    generate,
    incarnation_of,
    lease,
    score,
    segment,
    train,
)
from rrl.tests.support.roles.trajectories.crew import open_store as _open_store

SIZE = BATCH * GROUP
"""Number of trajectories in a step."""


def open_store(folder: Path, members: Sequence[Incarnation] = ALL, **changed: Any) -> Store:
    return _open_store(folder, members, wait_for_late=False, **changed)


def _too_old(limit: int) -> str:
    return f"stale: a token is more than {limit} training steps old"


def _outdated(store: Store, weights: int, who: Incarnation = ROLLOUT) -> bool:
    answer = store.lease(who, 1, (), weights)
    assert isinstance(answer, Leased)
    assert not (answer.items and answer.outdated)
    return answer.outdated


# ── dropped groups ─────────────────────────────────────────────────────────────────────────────────────────────────
def test_groups_too_old_for_the_next_step_are_dropped_at_the_binding(tmp_path: Path) -> None:
    store = open_store(tmp_path, staleness=1, max_ahead_batches=3)
    generate(store)
    score(store)
    # at step 2 the newest weights are those of step 1
    assert [bind(store, number).number for number in (1, 2)] == [1, 2]
    audit = store.audit()
    assert audit.dropped == {_too_old(1): 2 * SIZE}
    assert audit.made == audit.trained + sum(audit.dropped.values()) + audit.open
    commit(store, bind(store, 1))
    assert store.part(TRAINER, 3) == NotReady()
    generate(store, weights=1)
    score(store)
    assert {v.step for t in bind(store, 3).trajectories for v in t.versions} == {1}


@pytest.mark.parametrize("most", [0, 1, 3])
def test_token_of_the_maximum_age_is_trained_and_one_version_older_is_not(tmp_path: Path, most: int) -> None:
    store = open_store(tmp_path, staleness=most, max_ahead_batches=9)
    lease(store, weights=None)
    for number in range(1, most + 2):
        first = SIZE * (number - 1)
        these = range(first, first + SIZE)
        assert store.append(ROLLOUT, [segment(t) for t in these], these) == Done()
        score(store)
        commit(store, bind(store, number))
    denied = store.append(ROLLOUT, [segment(t) for t in range(first + SIZE, first + 2 * SIZE)])
    assert isinstance(denied, Denied)
    assert store.part(TRAINER, most + 2) == NotReady()


def test_one_old_token_drops_its_whole_group_and_no_other(tmp_path: Path) -> None:
    store = open_store(tmp_path, staleness=0)
    lease(store)
    assert store.append(ROLLOUT, [segment(t, 0, (5, 6), 0) for t in range(SIZE)], range(SIZE)) == Done()
    assert store.append(ROLLOUT, [segment(5, 0, (5,), 0)]) == Done()
    score(store)
    commit(store, bind(store, 1))
    rest = [segment(t, 0, (5, 6), 1) for t in (4, 6, 7)]
    denied = store.append(ROLLOUT, [*rest, segment(5, 1, (6,), 1)], (4, 5, 6, 7))
    assert isinstance(denied, Denied)
    assert set(denied.lost) == {4, 5}  # another rollout that worked on 4 and 5 would get this answer, too
    assert store.append(ROLLOUT, rest[1:], (6, 7)) == Done()
    assert store.audit().dropped == {_too_old(0): GROUP}


def test_unfinished_group_that_is_too_old_is_dropped_and_not_leased(tmp_path: Path) -> None:
    store = open_store(tmp_path, staleness=0)
    generate(store, at_most=SIZE)
    half = [item.trajectory for item in lease(store, ROLLOUT, GROUP)]
    assert store.append(ROLLOUT, [segment(t, 0, (5,)) for t in half]) == Done()
    score(store)
    commit(store, bind(store, 1))
    store.update_membership({OTHER, REWARD, TRAINER})
    assert not set(half) & {item.trajectory for item in lease(store, OTHER, weights=1)}


def test_append_with_too_old_weights_is_denied_and_its_group_dropped(tmp_path: Path) -> None:
    store = open_store(tmp_path, staleness=0)
    train(store, 1)
    (item, *_) = lease(store, weights=1)
    denied = store.append(ROLLOUT, [segment(item.trajectory, 0, (5, 1), 0)], [item.trajectory])
    assert isinstance(denied, Denied)
    assert item.trajectory in denied.lost
    assert store.append(OTHER, [segment(item.trajectory + GROUP, 0, (5,), 0)]) != Done()  # not its to end
    assert store.audit().dropped[_too_old(0)] >= GROUP


def test_digest_of_a_bound_batch_is_valid_again_however_old_it_is(tmp_path: Path) -> None:
    store = open_store(tmp_path, staleness=0, keep_uncommitted=2)
    generate(store, at_most=SIZE)
    score(store)
    first = bind(store, 1)
    generate(store, at_most=SIZE, weights=1)
    score(store)
    bind(store, 2)
    assert store.append(ROLLOUT, [segment(t) for t in range(SIZE)], range(SIZE)) == Done()
    assert bind(store, 1) == first


def test_without_a_limit_no_group_is_dropped_and_no_rollout_waits(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_ahead_batches=20)
    generate(store, weights=0)
    for number in range(1, 20):
        score(store)
        commit(store, bind(store, number))
    assert not _outdated(store, 0)
    assert store.audit().dropped == {}


# ── bound groups ───────────────────────────────────────────────────────────────────────────────────────────────────
def test_trainer_set_back_gets_the_same_batches_and_versions(tmp_path: Path) -> None:
    store = open_store(tmp_path, staleness=0, keep_uncommitted=2)
    batches = []
    for number in (1, 2, 3):
        generate(store, at_most=SIZE, weights=number - 1)
        score(store)
        batches.append(bind(store, number))
    again = incarnation_of("trainer/0", 2)
    store = open_store(tmp_path, staleness=0, keep_uncommitted=2, members=(ROLLOUT, REWARD, again))
    assert store.committed(again) == CommittedState(None, None)
    assert _outdated(store, 0)  # weights of the new incarnation, which are as old as those of the first one
    for batch in batches:
        assert bind(store, batch.number, again) == batch
        commit(store, batch, again)
    generate(store, weights=3)
    score(store)
    assert bind(store, 4, again).stale == 0


def test_new_staleness_limit_applies_to_groups_of_a_reopened_store(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_ahead_batches=3)
    generate(store)
    score(store)
    bound = [bind(store, number) for number in (1, 2)]
    store.flush()
    store = open_store(tmp_path, staleness=1)
    assert store.audit().dropped == {_too_old(1): 2 * SIZE}
    assert [bind(store, number) for number in (1, 2)] == bound


def test_batch_always_has_the_number_of_groups_dropped_before_it(tmp_path: Path) -> None:
    changed: dict[str, Any] = {"staleness": 0, "compact_from": 1}
    store = open_store(tmp_path, **changed)
    train(store, 1)  # by a rollout that does not name its weights: half of its work is for step 2
    generate(store, weights=1)
    score(store)
    second = bind(store, 2)
    assert (bind(store, 1).stale, second.stale) == (0, BATCH)
    for _ in range(2):
        store.flush()
        store = open_store(tmp_path, **changed)
        assert bind(store, 2) == second
    commit(store, second)
    generate(store, weights=2)
    score(store)
    assert bind(store, 3).stale == BATCH


# ── groups that could not be trained ───────────────────────────────────────────────────────────────────────────────
def test_rollout_waits_for_newer_weights_instead_of_beginning_groups_that_would_be_too_old(tmp_path: Path) -> None:
    store = open_store(tmp_path, staleness=0, max_ahead_batches=3)
    assert len(lease(store, weights=0)) == SIZE, "not exactly the trajectories of step 1 were leased"
    assert _outdated(store, 0, OTHER)
    store.append(ROLLOUT, [segment(t) for t in range(SIZE)], range(SIZE))
    score(store)
    commit(store, bind(store, 1))
    assert _outdated(store, 0)
    assert len(lease(store, weights=1)) == SIZE
    assert store.audit().dropped == {}


def test_rollout_leases_as_far_ahead_as_its_weights_stay_fresh(tmp_path: Path) -> None:
    third = incarnation_of("rollout/2")
    store = open_store(tmp_path, staleness=2, max_ahead_batches=9, members=(ROLLOUT, OTHER, third, REWARD, TRAINER))
    for number in (1, 2, 3):
        generate(store, at_most=SIZE, weights=number - 1)
        score(store)
        commit(store, bind(store, number))
    assert _outdated(store, 0)
    assert len(lease(store, OTHER, weights=1)) == SIZE
    assert len(lease(store, ROLLOUT, weights=2)) == SIZE
    assert _outdated(store, 2, third)
    assert len(lease(store, third, weights=3)) == SIZE
    assert _outdated(store, 3, incarnation_of("rollout/2")) is False, (
        "a rollout with leased work was asked to wait for newer weights"
    )


def test_full_store_does_not_request_newer_weights(tmp_path: Path) -> None:
    store = open_store(tmp_path, staleness=5)
    for _ in range(3):
        assert len(generate(store, at_most=SIZE // 2, weights=0)) == SIZE // 2
    assert len(lease(store, at_most=SIZE, weights=0)) == SIZE // 2
    assert not _outdated(store, 0, OTHER)


def test_trajectory_of_a_dead_rollout_is_not_leased_to_one_with_too_old_weights(tmp_path: Path) -> None:
    store = open_store(tmp_path, staleness=0)
    train(store, 1)
    store.append(ROLLOUT, [segment(item.trajectory, 0, (5,), 1) for item in lease(store, weights=1)])
    store.update_membership({OTHER, REWARD, TRAINER})
    assert _outdated(store, 0, OTHER)
    assert len(lease(store, OTHER, weights=1)) == SIZE


# ── progress of the run ────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("ahead", [0, 1, 4])
@pytest.mark.parametrize("most", [0, 1, 2])
def test_one_slow_rollout_with_current_weights_is_enough_for_each_step(tmp_path: Path, most: int, ahead: int) -> None:
    """The rollout is as slow as possible: it works on one trajectory at a time, and appends one token at a time."""
    store = open_store(tmp_path, staleness=most, max_ahead_batches=ahead)
    for number in range(1, 6):
        for _ in range(2 * SIZE):
            if isinstance(answer := store.part(TRAINER, number), PartBound):
                break
            for item in lease(store, at_most=1, weights=number - 1):
                for offset in range(MAX_NEW - item.max_new, MAX_NEW):
                    assert store.append(ROLLOUT, [segment(item.trajectory, offset, (5,), number - 1)]) == Done()
            score(store)
        assert isinstance(answer, PartBound)
        commit(store, answer.part)
    assert store.audit().dropped == {}


class _Run:
    """A trainer that publishes after each step, and rollouts that get its weights at random times."""

    def __init__(self, folder: Path, staleness: int, ahead: int) -> None:
        self.folder, self.staleness = folder, staleness
        self.changed: dict[str, Any] = {"staleness": staleness, "max_ahead_batches": ahead, "compact_from": 3000}
        self.incarnations = {"rollout/0": 1, "rollout/1": 1, "trainer/0": 1, "reward/0": 1}
        self.weights = {"rollout/0": 0, "rollout/1": 0}
        self.hands: dict[Incarnation, dict[int, int]] = {}
        self.published = 0
        self.batches: dict[int, PackedPart] = {}
        self.store = self.open()

    def members(self) -> list[Incarnation]:
        return [incarnation_of(*each) for each in self.incarnations.items()]

    def open(self) -> Store:
        return open_store(self.folder, self.members(), **self.changed)

    def restart(self) -> None:
        self.store.flush()
        self.store.close()
        self.store = self.open()

    def succeed(self, name: str) -> None:
        self.incarnations[name] += 1
        self.store.update_membership(self.members())
        if name == "trainer/0":
            warning_text = self.store.committed(incarnation_of(name, self.incarnations[name]))
            assert isinstance(warning_text, CommittedState)
            self.published = warning_text.number or 0

    def lease(self, name: str, at_most: int) -> None:
        who = incarnation_of(name, self.incarnations[name])
        hands = self.hands.setdefault(who, {})
        for item in lease(self.store, who, at_most, list(hands), self.weights[name]):
            hands[item.trajectory] = MAX_NEW - item.max_new

    def grow(self, name: str, which: int, by: int) -> None:
        who = incarnation_of(name, self.incarnations[name])
        if hands := self.hands.setdefault(who, {}):
            trajectory = sorted(hands)[which % len(hands)]
            by = min(by, MAX_NEW - hands[trajectory])
            piece = segment(trajectory, hands[trajectory], (by + 2,) * by, self.weights[name])
            hands[trajectory] += by
            if self.store.append(who, [piece]) != Done() or hands[trajectory] == MAX_NEW:
                del hands[trajectory]

    def bind(self) -> bool:
        """Let the trainer request its next batch, train it and publish. Return whether it got a batch."""
        who, number = incarnation_of("trainer/0", self.incarnations["trainer/0"]), self.published + 1
        answer = self.store.part(who, number)
        if not isinstance(answer, PartBound):
            assert answer == NotReady()
            return False
        assert self.batches.setdefault(number, answer.part) == answer.part
        oldest = min(step for each in answer.part.trajectories for _, step, _ in each.runs)
        assert oldest >= number - 1 - self.staleness
        self.published = number
        return True

    def commit(self) -> None:
        warning_text = self.store.committed(incarnation_of("trainer/0", self.incarnations["trainer/0"]))
        assert isinstance(warning_text, CommittedState)
        if (number := (warning_text.number or 0) + 1) <= self.published:
            commit(self.store, self.batches[number], incarnation_of("trainer/0", self.incarnations["trainer/0"]))


_Move = st.tuples(
    st.sampled_from(["lease", "grow", "work", "work", "score", "fetch", "bind", "bind", "commit", "restart", "die"]),
    st.integers(0, 11),
)


@examples(20, many=400)
@given(moves=st.lists(_Move, max_size=80), most=st.integers(0, 2), ahead=st.integers(0, 2))
def test_steps_stay_fresh_after_any_history_with_current_weights(
    tmp_path_factory: pytest.TempPathFactory, moves: list[tuple[str, int]], most: int, ahead: int
) -> None:
    run = _Run(tmp_path_factory.mktemp("any"), most, ahead)
    for what, n in moves:
        name = f"rollout/{n % 2}"
        if what == "lease":
            run.lease(name, n)
        elif what == "grow":
            run.grow(name, n // 2, 1 + n % 3)
        elif what == "work":
            run.lease(name, n)
            for _ in range(n):
                run.grow(name, 0, MAX_NEW)
            score(run.store)
        elif what == "score":
            score(run.store, at_most=n)
        elif what == "fetch":
            run.weights[name] = run.published
        elif what == "bind":
            run.bind()
        elif what == "commit":
            run.commit()
        elif what == "restart":
            run.restart()
        elif what == "die":
            run.succeed("trainer/0" if n < 3 else name)
    run.succeed("rollout/0")  # its manager replaces a rollout that makes no progress; the other rollout is slow
    for _ in range(4):
        for _ in range(3 * SIZE + 8):
            run.weights["rollout/1"] = run.published
            run.lease("rollout/1", 1)
            run.grow("rollout/1", 0, MAX_NEW)
            score(run.store)
            run.commit()
            if run.bind():
                break
        else:
            raise AssertionError(f"step {run.published + 1} was not bound")
    audit = run.store.audit()
    assert audit.made == audit.trained + sum(audit.dropped.values()) + audit.open
    assert set(audit.dropped) <= {_too_old(most)}
    assert {number: batch.groups for number, batch in run.batches.items()} == audit.steps
    run.store.close()


def test_batch_metrics_have_token_ages_and_dropped_groups(tmp_path: Path) -> None:
    store = open_store(tmp_path, staleness=1)
    items = [item.trajectory for item in lease(store, at_most=2 * SIZE, weights=0)]
    assert store.append(ROLLOUT, [segment(t, 0, (5, 1), 0) for t in items[:SIZE]], items[:SIZE]) == Done()
    assert store.append(ROLLOUT, [segment(t, 0, (5,), 0) for t in items[SIZE:]]) == Done()
    score(store)
    commit(store, bind(store, 1))
    assert store.append(ROLLOUT, [segment(t, 1, (6, 1), 1) for t in items[SIZE:]], items[SIZE:]) == Done()
    score(store)
    batch = bind(store, 2)
    ages = {"token_age_p50": 0.0, "token_age_max": 1.0, "token_age_run_max": 1.0}
    figures = figures_of(store, 2)
    assert figures.items() >= ages.items()
    assert "stale_groups" not in figures
    assert figures_of(store, 2, ages_limited=True) == {**figures, "stale_groups": 0.0, "stale_share": 0.0}
    store._state.steps[2] = [msgspec.structs.replace(store._state.steps[2][0], stale=BATCH, unscored=2 * BATCH)]
    shares = {"stale_share": BATCH / (3 * BATCH), "unscored_groups": 2 * BATCH, "unscored_share": 0.5}
    assert figures_of(store, 2, ages_limited=True).items() >= {"stale_groups": BATCH, **shares}.items()
    assert store.audit().max_age == 0, "tokens of a step that is not committed count"
    commit(store, batch)
    assert store.audit().max_age == 1


# ── warnings ───────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(("vain", "warned"), [(1, 0), (2, 1)])
def test_one_warning_is_given_if_most_groups_are_dropped_for_their_age(tmp_path: Path, vain: int, warned: int) -> None:
    store = open_store(tmp_path, staleness=0)
    warnings_given = []
    for number in range(1, 8):
        for _ in range(vain if number > 1 else 0):
            items = [item.trajectory for item in lease(store, at_most=SIZE)]
            assert isinstance(store.append(ROLLOUT, [segment(t, 0, (5,), number - 2) for t in items]), Denied)
        generate(store, at_most=SIZE, weights=number - 1)
        score(store)
        commit(store, bind(store, number))
        warnings_given += [warning_text for warning_text in [store.warning()] if warning_text is not None]
    assert len(warnings_given) == warned
    assert all(
        "were dropped" in warning_text and "raise [sampling] staleness" in warning_text
        for warning_text in warnings_given
    )
