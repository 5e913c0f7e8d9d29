"""With ``late = "wait"`` no trained token is too old, and no group is dropped for its age.

No step waits without end.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrl.core.types import Version
from rrl.roles.trajectories.durable.audit import Audit
from rrl.roles.trajectories.types import Denied, Done, NotReady
from rrl.tests.support.examples import examples
from rrl.tests.support.roles.trajectories.crew import (
    BATCH,
    GROUP,
    OTHER,
    REWARD,
    ROLLOUT,
    TRAINER,
    bind,
    commit,
    generate,
    lease,
    open_store,
    score,
    segment,
)
from rrl.tests.support.roles.trajectories.virtual_run import BROKEN, Setting, VirtualRun

SIZE = BATCH * GROUP
"""Number of trajectories in a step."""
MAX_TICKS = 3000
"""Ticks within which the next few steps must be bound once no more failures happen.

They are about 20 times the usual number.
"""


# ── random runs ────────────────────────────────────────────────────────────────────────────────────────────────────
@st.composite
def _settings(draw: st.DrawFn) -> Setting:
    staleness = draw(st.integers(0, 4))
    return Setting(
        staleness=staleness,
        waits=draw(st.sampled_from([True, True, True, False])),
        groups=draw(st.integers(1, 5)),
        size=draw(st.integers(2, 3)),
        ahead=draw(st.integers(0, 6)),
        uncommitted=draw(st.integers(0, 3)),
        rollouts=draw(st.integers(1, 3)),
        step_ticks=draw(st.integers(1, 12)),
        publish_every=draw(st.integers(1, staleness + 1)),
        fetch_chance=draw(st.sampled_from([0.05, 0.3, 1.0])),
        segment=draw(st.integers(1, 8)),
        unaskable=draw(st.sampled_from([0.0, 0.2])),
        unscorable=draw(st.sampled_from([0.0, 0.05])),
        parts=draw(st.sampled_from([0.0, 0.5, 1.0])),
        groups_per_part=draw(st.sampled_from([None, 1, 2, 9])),
        max_part_bytes=draw(st.sampled_from([2**20, 1])),
        refill=draw(st.sampled_from([None, 0.5, 3.0])),
        solved=draw(st.sampled_from([0.0, 0.5, 0.9])),
    )


_Mishap = st.tuples(
    st.integers(0, 25),
    st.sampled_from(["rollout", "rollout", "trainer", "store", "limit", "size", "parts"]),
    st.integers(0, 4),
)
"""(ticks until the event, kind of event, number).

The number selects a rollout, a limit, a size of steps, or whether steps are requested in parts.
"""


@examples(20, many=500)
@given(setting=_settings(), mishaps=st.lists(_Mishap, max_size=15), seed=st.integers(0, 2**32))
def test_no_token_is_too_old_no_group_is_dropped_for_age_and_each_step_is_completed(
    tmp_path_factory: pytest.TempPathFactory, setting: Setting, mishaps: list[tuple[int, str, int]], seed: int
) -> None:
    """``VirtualRun`` checks that no batch or part changes, no group is in two steps, and no token is too old."""
    run = VirtualRun(tmp_path_factory.mktemp("run"), setting, seed)
    for ticks, what, n in mishaps:
        for _ in range(ticks):
            run.tick()
        if what == "rollout":
            run.kill_rollout(f"rollout/{n % setting.rollouts}")
        elif what == "trainer":
            run.kill_trainer()
        elif what == "store":
            run.restart_store()
        elif what == "parts":
            run.resume(parts=n / 4)
        else:
            before, old = run.store.audit(), run.setting
            run.resume(**{"staleness": max(n, setting.publish_every - 1)} if what == "limit" else {"groups": n + 1})
            dropped = _stale(run.store.audit().dropped) - _stale(before.dropped)
            shrank = (run.setting.staleness or 0, run.setting.groups) < (old.staleness or 0, old.groups)
            assert shrank or not dropped or not setting.waits, (
                "a resume has dropped groups, though neither the limit nor the steps have shrunk"
            )
    stale = _stale(run.store.audit().dropped)
    target, ticks = run.bound() + setting.groups + 8, 0
    while run.bound() < target:
        run.tick()
        ticks += 1
        assert ticks < MAX_TICKS, f"step {run.bound() + 1} was not bound: {run.store.wait_reason(run.bound() + 1)}"
    audit = run.store.audit()
    assert not setting.waits or _stale(audit.dropped) == stale, "a group was dropped for its age without a resume"
    _check_audit(run, audit)
    run.restart_store()
    assert run.store.audit() == audit
    run.store.close()


def _check_audit(run: VirtualRun, audit: Audit) -> None:
    """Check that the records agree with the batches and parts that the trainer got."""
    assert audit.made == audit.trained + sum(audit.dropped.values()) + audit.open
    assert audit.steps == {number: batch.groups for number, batch in run.batches.items()}
    assert {(number, index): groups for number, parts in audit.parts.items() for index, groups in enumerate(parts)} == {
        key: part.groups for key, part in run.parts.items()
    }
    trained = sum((ages for number, ages in run.ages.items() if number <= audit.committed), Counter())
    assert audit.ages == trained
    assert audit.max_age == max(trained, default=0)


def _stale(dropped: dict[str, int]) -> int:
    return sum(count for reason, count in dropped.items() if reason.startswith("stale"))


# ── single rules ───────────────────────────────────────────────────────────────────────────────────────────────────
def test_step_is_not_bound_before_the_group_whose_last_step_it_is(tmp_path: Path) -> None:
    store = open_store(tmp_path, staleness=0)
    items = [item.trajectory for item in lease(store, weights=0)]
    assert items == list(range(SIZE)), "not exactly the trajectories of step 1 were leased"
    assert store.append(ROLLOUT, [segment(t, 0, (5, 1), 0) for t in items], items[:-1]) == Done()
    score(store)
    assert store.part(TRAINER, 1) == NotReady()
    assert store.wait_reason(1) == "the trainer waits for group 1 (rollout/0#1): step 1 is the last that may train it"
    assert store.append(ROLLOUT, [], items[-1:]) == Done()
    score(store)
    assert bind(store, 1).groups == (0, 1)
    assert store.wait_reason(1) is None


def test_step_leaves_no_more_groups_than_the_steps_after_it_have_places_for(tmp_path: Path) -> None:
    """For no group is step 2 the last step that may train it.

    If step 2 trained the two complete groups, four older groups would be left for step 3, which is their last step and
    has two places.
    """
    store = open_store(tmp_path, staleness=2, max_ahead_batches=9)
    old = [item.trajectory for item in lease(store, ROLLOUT, weights=0)]
    assert len(old) == 3 * SIZE
    assert store.append(ROLLOUT, [segment(t) for t in old[:SIZE]], old[:SIZE]) == Done()
    score(store)
    commit(store, bind(store, 1))
    assert len(generate(store, OTHER, at_most=SIZE, weights=1)) == SIZE
    score(store)
    assert store.part(TRAINER, 2) == NotReady()
    assert (
        store.wait_reason(2)
        == "the trainer waits for group 2 (rollout/0#1) and 3 more: step 3 is the last that may train them"
    )
    assert store.append(ROLLOUT, [segment(t) for t in old[SIZE:]], old[SIZE:]) == Done()
    score(store)
    assert [bind(store, number).groups for number in (2,)] == [(2, 3)]
    commit(store, bind(store, 2))
    assert bind(store, 3).groups == (4, 5)
    assert store.audit().dropped == {}


def test_lease_counts_as_begun_before_its_first_token(tmp_path: Path) -> None:
    """Trajectories are as old as the weights with which they were leased, even before their first token."""
    store = open_store(tmp_path, staleness=1, max_ahead_batches=9)
    assert len(lease(store, ROLLOUT, weights=0)) == 2 * SIZE
    assert lease(store, OTHER, weights=0) == ()


def test_group_that_cannot_be_scored_occupies_no_place_in_a_step(tmp_path: Path) -> None:
    store = open_store(tmp_path, staleness=0)
    generate(store, weights=0)
    assert store.lease_scoring(REWARD, 1000)
    assert store.post_scores(REWARD, [], {0: BROKEN}) == Done()
    assert store.audit().dropped == {BROKEN: GROUP}
    generate(store, weights=0)
    store.update_membership((ROLLOUT, TRAINER, OTHER))
    score(store, OTHER)
    assert bind(store, 1).groups == (1, 2)


def test_trajectory_with_a_too_old_append_is_leased_again(tmp_path: Path) -> None:
    """Its tokens have older weights than those that the rollout named when it leased the trajectory."""
    store = open_store(tmp_path, staleness=0)
    generate(store, weights=0)
    score(store)
    commit(store, bind(store, 1))
    taken = [item.trajectory for item in lease(store, ROLLOUT, weights=1)]
    late, *rest = taken
    denied = store.append(ROLLOUT, [segment(late, 0, (5,), 0), *(segment(t, 0, (5,), 1) for t in rest)])
    assert isinstance(denied, Denied)
    assert denied.lost == (late,)
    assert store.append(ROLLOUT, [segment(t, 0, (5,), 1) for t in rest]) == Done()
    (again,) = lease(store, OTHER, weights=1)
    assert (again.trajectory, again.so_far) == (late, ())
    assert store.audit().dropped == {}


def test_begun_trajectories_are_leased_before_new_ones_and_oldest_first(tmp_path: Path) -> None:
    store = open_store(tmp_path, staleness=3, max_ahead_batches=9)
    generate(store, OTHER, at_most=SIZE, weights=0)
    score(store)
    (left,) = lease(store, ROLLOUT, 1, weights=0)
    assert store.append(ROLLOUT, [segment(left.trajectory, 0, (5,), 0)]) == Done()
    commit(store, bind(store, 1))
    newer = lease(store, OTHER, 1, weights=1)[0].trajectory
    assert store.append(OTHER, [segment(newer, 0, (5,), 1)]) == Done()
    store.update_membership((REWARD, TRAINER, OTHER))
    assert lease(store, OTHER, 1, [newer], weights=1)[0].trajectory == left.trajectory


def test_store_opened_with_a_smaller_limit_drops_only_groups_that_no_step_can_take(tmp_path: Path) -> None:
    store = open_store(tmp_path, staleness=4, max_ahead_batches=9)
    generate(store, at_most=4 * SIZE, weights=0)
    score(store)
    commit(store, bind(store, 1))
    store.flush()
    store = open_store(tmp_path, staleness=4, max_ahead_batches=9)
    assert store.audit().dropped == {}
    store.close()
    store = open_store(tmp_path, staleness=2, max_ahead_batches=9)
    assert _stale(store.audit().dropped) == SIZE, (
        "of six groups, not exactly the two without a place in steps 2 and 3 were dropped"
    )
    assert [bind(store, number).groups for number in (2, 3)] == [(2, 3), (4, 5)]


def test_wait_reason_of_outdated_rollouts_says_to_publish(tmp_path: Path) -> None:
    """The trainer has published only once, and the store reports why no further step is possible."""
    store = open_store(tmp_path, staleness=1, max_ahead_batches=9)
    for number in (1, 2):
        generate(store, at_most=SIZE, weights=0)
        score(store)
        commit(store, bind(store, number))
    answer = store.lease(ROLLOUT, 1, (), 0)
    assert answer == store.lease(ROLLOUT, 1, (), 0)
    assert store.wait_reason(3) == (
        "the trainer waits for step 3, and the rollouts wait for weights newer than those of step 0: the trainer"
        " must publish at least once in 2 steps"
    )


def test_wait_reason_before_the_first_weights_names_the_call_that_is_missing(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert store.wait_reason(1) == (
        "the trainer waits for answers, and the rollouts wait for its first weights: me.publish(step, tensors) has"
        " not been called; call it before the first batch"
    )
    store.report_versions(TRAINER, (Version(0, TRAINER.number),))
    assert store.wait_reason(1) == f"the trainer waits for {BATCH} more of the {BATCH} groups of step 1"


# ── no bias of trained lengths ─────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("waits", "parts", "low", "high"),
    [(True, False, 0.97, 1.03), (True, True, 0.97, 1.03), (False, False, 0.0, 0.9), (False, True, 0.0, 0.9)],
)
def test_lengths_of_trained_prompts_match_those_asked_for_only_if_steps_wait(
    tmp_path: Path, waits: bool, parts: bool, low: float, high: float
) -> None:
    """Lengths of answers are log-normal with sigma 1, and the prompt causes 65 % of the variance.

    A step of the trainer takes about as long as a typical answer.
    """
    biases = []
    for seed in range(3):
        median, length = _long_tailed(seed)
        setting = Setting(
            staleness=2,
            waits=waits,
            groups=8,
            size=4,
            ahead=2,
            step_ticks=1 if parts else 6,
            longest=80,
            fetch_chance=1.0,
            segment=1,
            parts=float(parts),
            max_part_bytes=2**20,
        )
        run = VirtualRun(tmp_path / f"{seed}", setting, seed, length)
        while run.bound() < 40:
            run.tick()
        trained = [median(group) for batch in run.batches.values() for group in batch.groups]
        asked = [median(group) for group in range(max(max(batch.groups) for batch in run.batches.values()) - 16)]
        biases.append(mean(trained) / mean(asked))
        run.store.close()
    assert low <= mean(biases) <= high


def _long_tailed(seed: int) -> tuple[Callable[[int], float], Callable[[int], int]]:
    """Return functions for the median length of an item's answers and the length of one answer, in ticks (median 4)."""
    answers = random.Random(seed)

    def median(item: int) -> float:
        return math.exp(random.Random(f"{seed} {item}").gauss(math.log(4), math.sqrt(0.65)))

    def length(item: int) -> int:
        return round(median(item) * answers.lognormvariate(0, math.sqrt(0.35)))

    return median, length
