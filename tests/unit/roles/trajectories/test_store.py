from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rrl.core.types import Version
from rrl.roles.trajectories.durable.log import Log, Superseded
from rrl.roles.trajectories.durable.records import FORMAT, LogFormatError, Metrics, encode
from rrl.roles.trajectories.prompts import FAULTS_WINDOW, MAX_ITEMS_WITHOUT_PROMPT, NO_PROMPT
from rrl.roles.trajectories.store import Store
from rrl.roles.trajectories.types import (
    CommittedState,
    Denied,
    Done,
    Leased,
    NotReady,
    PartBound,
    Prompt,
    Score,
    Scoring,
    Segment,
    StoredMetrics,
)
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
    generate,
    incarnation_of,
    lease,
    manifest,
    open_store,
    prompt,
    score,
    segment,
    train,
)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path)


def _is_fenced(answer: object) -> bool:
    return isinstance(answer, Denied) and answer.fenced


# ── metrics of commits ─────────────────────────────────────────────────────────────────────────────────────────────
def test_commit_metrics_outlive_store_and_trainer_and_are_returned_in_order(tmp_path: Path) -> None:
    store = open_store(tmp_path, compact_from=0)
    for number in range(1, 7):
        train(store, number, metrics={"loss": number / 10})
    store.close()
    again, successor = open_store(tmp_path), incarnation_of("trainer/0", 2)
    again.update_membership((ROLLOUT, REWARD, successor))
    answer = again.metrics(successor, 2)
    assert isinstance(answer, StoredMetrics)
    assert [one.step for one in answer.commits] == [3, 4, 5, 6]
    assert [one.metrics["loss"] for one in answer.commits] == [0.3, 0.4, 0.5, 0.6]
    assert all(one.metrics["length_bias"] == 1.0 for one in answer.commits), "the metrics lack the figures of the store"
    assert _is_fenced(again.metrics(TRAINER, 2))


# ── making and leasing ─────────────────────────────────────────────────────────────────────────────────────────────
def test_trajectories_of_a_group_share_a_prompt_and_groups_take_prompts_in_order(tmp_path: Path) -> None:
    items = lease(open_store(tmp_path))
    assert [(item.trajectory, item.group) for item in items[:4]] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert [item.prompt for item in items] == [prompt(i // GROUP).tokens for i in range(len(items))]
    assert all(item.max_new == MAX_NEW and item.so_far == () for item in items)


def test_groups_in_progress_are_limited_by_batches_ahead(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_ahead_batches=2)
    assert len(lease(store)) == 3 * BATCH * GROUP
    assert lease(store, OTHER) == ()


FLEET = [incarnation_of(f"rollout/{n}") for n in range(5)]
STEP = BATCH * GROUP


def _batches_begun(store: Store) -> int:
    """Let each rollout of the fleet, which has places for a batch, request work; return the batches that they got."""
    return sum(len(lease(store, rollout, STEP)) for rollout in FLEET) // STEP


@pytest.mark.parametrize(("staleness", "batches"), [(9, 5), (3, 4), (1, 2), (None, 2)])
def test_rollouts_with_places_for_many_steps_work_further_ahead_within_staleness(
    tmp_path: Path, staleness: int | None, batches: int
) -> None:
    store = open_store(tmp_path, (*FLEET, REWARD, TRAINER), staleness=staleness)
    assert _batches_begun(store) == batches


def test_fixed_fleet_works_only_as_far_ahead_as_the_job_says(tmp_path: Path) -> None:
    store = open_store(tmp_path, (*FLEET, REWARD, TRAINER), staleness=9, fleet_varies=False)
    assert _batches_begun(store) == 2


def test_places_for_a_single_step_do_not_raise_ahead(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_ahead_batches=0, staleness=4)
    assert len(lease(store, OTHER, STEP // 2)) == len(generate(store, ROLLOUT, STEP // 2)) == STEP // 2
    assert generate(store, ROLLOUT, STEP // 2) == []


def test_restarted_store_learns_the_places_again_and_keeps_the_work_begun_ahead(tmp_path: Path) -> None:
    store = open_store(tmp_path, (*FLEET, REWARD, TRAINER), staleness=9)
    assert _batches_begun(store) == 5
    store.flush()
    store.close()
    store = open_store(tmp_path, (ROLLOUT, REWARD, TRAINER), staleness=9)
    made = [trajectory for _ in range(5) for trajectory in generate(store, at_most=STEP)]
    assert sorted(made) == list(range(5 * STEP)), "a restart lost or repeated work"
    score(store)
    for number in range(1, 4):
        assert generate(store, at_most=STEP) == [], "one rollout works as far ahead as five"
        commit(store, bind(store, number))
    commit(store, bind(store, 4))
    assert len(generate(store, at_most=STEP)) == STEP


def test_new_groups_are_created_after_a_binding_not_a_commit(store: Store) -> None:
    assert len(generate(store)) == 2 * BATCH * GROUP
    score(store)
    assert lease(store) == ()
    batch = bind(store, 1)
    assert len(lease(store)) == BATCH * GROUP
    commit(store, batch)
    assert lease(store, OTHER) == ()


def test_two_rollouts_never_lease_the_same_trajectory(store: Store) -> None:
    mine = {item.trajectory for item in lease(store, ROLLOUT, 3)}
    yours = {item.trajectory for item in lease(store, OTHER, 3)}
    assert len(mine) == len(yours) == 3
    assert not mine & yours


def test_trajectory_leased_in_a_lost_answer_is_sent_again(store: Store) -> None:
    first = lease(store, ROLLOUT, 2)
    assert lease(store, ROLLOUT, 2) == first
    more = lease(store, ROLLOUT, 2, holding=[item.trajectory for item in first])
    assert [item.trajectory for item in more] == [2, 3]


def test_request_without_a_list_of_held_trajectories_gets_only_new_work(store: Store) -> None:
    first = lease(store, ROLLOUT, 2)
    assert [item.trajectory for item in lease(store, ROLLOUT, 1, holding=None)] == [2]
    assert lease(store, ROLLOUT, 1, holding=[2]) == first[:1], (
        "a request with a list of held items did not get the items of the lost answer"
    )


def test_lease_of_a_dead_rollout_goes_to_the_next_one_with_all_its_tokens(store: Store) -> None:
    (item,) = lease(store, ROLLOUT, 1)
    made = [segment(item.trajectory, 0, (5,)), segment(item.trajectory, 1, (6, 7), step=3)]
    assert store.append(ROLLOUT, made) == Done()
    assert [other.trajectory for other in lease(store, OTHER, 1)] == [1]
    store.update_membership({OTHER, REWARD, TRAINER})
    (taken,) = lease(store, OTHER, 1, holding=[1])
    assert taken.trajectory == item.trajectory
    assert list(taken.so_far) == made
    assert taken.max_new == MAX_NEW - 3


def test_trajectory_of_two_incarnations_keeps_the_version_of_each_token(store: Store) -> None:
    lease(store, ROLLOUT)
    store.append(ROLLOUT, [segment(0, 0, (5, 6), step=3)])
    store.update_membership({OTHER, REWARD, TRAINER})
    lease(store, OTHER)
    rest = [segment(t, 0, (1,), step=4) for t in range(1, 8)]
    assert store.append(OTHER, [segment(0, 2, (7, 1), step=4), *rest], range(8)) == Done()
    score(store)
    first = bind(store, 1).trajectories[0]
    assert first.id == 0
    assert first.tokens == (5, 6, 7, 1)
    assert first.versions == (Version(3, 1), Version(3, 1), Version(4, 1), Version(4, 1))


# ── items without a prompt ─────────────────────────────────────────────────────────────────────────────────────────
def _without(*items: int) -> Callable[[int], Prompt]:
    def made(index: int) -> Prompt:
        if index in items:
            raise KeyError(f"item {index}") if index % 2 else ValueError(f"item {index} is too long")
        return prompt(index)

    return made


def test_item_without_a_prompt_is_dropped_and_replaced_by_the_next_one(tmp_path: Path) -> None:
    store = open_store(tmp_path, next_prompt=_without(0, 2, 3))
    items = lease(store)
    assert len(items) == 2 * BATCH * GROUP, "items without a prompt have reduced the number of leased trajectories"
    assert sorted({item.group for item in items}) == [1, 4, 5, 6]
    assert {item.prompt for item in items} == {prompt(index).tokens for index in (1, 4, 5, 6)}
    store.flush()
    store.close()
    again = open_store(tmp_path, next_prompt=_without(7))
    assert again.audit().dropped == {NO_PROMPT: 3 * GROUP}
    for number in range(1, 5):
        train(again, number)
    audit = again.audit()
    assert audit.dropped == {NO_PROMPT: 4 * GROUP}
    assert audit.made == audit.trained + 4 * GROUP + audit.open


def test_item_whose_prompt_ends_the_program_is_dropped(tmp_path: Path) -> None:
    def exits(index: int) -> Prompt:
        return sys.exit() if index == 1 else prompt(index)

    store = open_store(tmp_path, next_prompt=exits)
    assert 1 not in {item.group for item in lease(store)}


def test_items_without_a_prompt_do_not_make_a_rollout_wait_for_newer_weights(tmp_path: Path) -> None:
    """Without this rule, a rollout with the newest weights would be asked to wait for newer ones, which do not
    exist."""
    store = open_store(tmp_path, staleness=0, next_prompt=_without(*range(BATCH)))
    answer = store.lease(ROLLOUT, 1, (), 0)
    assert isinstance(answer, Leased)
    assert not answer.outdated
    assert [item.group for item in answer.items] == [BATCH]
    more = lease(store, OTHER, weights=0)
    assert len(answer.items) + len(more) == BATCH * GROUP, "the leased trajectories are not as many as the step has"


def test_item_without_prompt_is_warned_about_once(tmp_path: Path) -> None:
    store = open_store(tmp_path, next_prompt=_without(0, 1))
    lease(store)
    warning_text = store.warning()
    assert warning_text is not None
    assert "item 0 of [task] is dropped: item 0 is too long" in warning_text
    assert store.warning() is None


@pytest.mark.parametrize("good", [0, 5])
def test_task_without_prompts_ends_the_store_and_records_every_item(tmp_path: Path, good: int) -> None:
    bad = range(good, good + MAX_ITEMS_WITHOUT_PROMPT)
    store = open_store(tmp_path, max_ahead_batches=20, next_prompt=_without(*bad))
    with pytest.raises(
        ValueError, match=rf"{MAX_ITEMS_WITHOUT_PROMPT} consecutive items of \[task\], up to item {bad[-1]}, have no"
    ):
        lease(store)
    store.close()
    healed = open_store(tmp_path)
    assert healed.audit().dropped == {}
    assert [item.group for item in lease(healed, at_most=1)] == [0]


def test_few_consecutive_items_without_a_prompt_do_not_end_the_store(tmp_path: Path) -> None:
    bad = [index for index in range(4 * MAX_ITEMS_WITHOUT_PROMPT) if index % MAX_ITEMS_WITHOUT_PROMPT]
    store = open_store(tmp_path, max_ahead_batches=1, next_prompt=_without(*bad))
    assert [item.group for item in lease(store)][::GROUP] == [0, 32, 64, 96]


# ── appending ──────────────────────────────────────────────────────────────────────────────────────────────────────
def test_repeated_segments_change_nothing(store: Store) -> None:
    lease(store)
    words = ([segment(0, 0, (5, 6)), segment(0, 2, (7,))], [0])
    assert store.append(ROLLOUT, *words) == Done()
    assert store.append(ROLLOUT, *words) == Done()
    generate(store)
    score(store)
    assert bind(store, 1).trajectories[0].tokens == (5, 6, 7)


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(segment(0, 3, (7,)), id="a gap"),
        pytest.param(segment(0, 0, (5, 7)), id="other tokens"),
        pytest.param(Segment(0, 0, (5, 6), (-0.5, -0.6), Version(0, 1)), id="other log-probabilities"),
        pytest.param(segment(0, 0, (5, 6), step=1), id="another version"),
        pytest.param(segment(0, 0, (5,)), id="a part"),
        pytest.param(segment(0, 1, (6, 7)), id="an overlap"),
        pytest.param(segment(0, 2, (7, 7, 7)), id="more tokens than permitted"),
        pytest.param(segment(99, 0, (7,)), id="an unknown trajectory"),
    ],
)
def test_segment_that_neither_continues_nor_repeats_is_denied_and_not_stored(wrong: Segment, store: Store) -> None:
    lease(store)
    assert store.append(ROLLOUT, [segment(0, 0, (5, 6))]) == Done()
    answer = store.append(ROLLOUT, [segment(1, 0, (9,)), wrong])
    assert isinstance(answer, Denied)
    assert (answer.lost, answer.fenced) == ((wrong.trajectory,), False)
    store.update_membership({OTHER})
    so_far = {item.trajectory: item.so_far for item in lease(store, OTHER)}
    assert so_far[0] == (segment(0, 0, (5, 6)),)
    assert so_far[1] == ()


@pytest.mark.parametrize(
    "bad",
    [
        Segment(0, 0, (5, 6), (-0.5,), Version(0, 1)),
        Segment(0, 0, (5,), (math.nan,), Version(0, 1)),
        segment(0, 0, (2**40,)),
    ],
)
def test_a_malformed_segment_is_denied(bad: Segment, store: Store) -> None:
    lease(store)
    answer = store.append(ROLLOUT, [bad])
    assert isinstance(answer, Denied)
    assert "malformed" in answer.why


def test_append_of_a_rollout_without_the_lease_is_denied(store: Store) -> None:
    lease(store, ROLLOUT)
    answer = store.append(OTHER, [segment(0)])
    assert isinstance(answer, Denied)
    assert answer.lost == (0,)
    assert isinstance(store.append(OTHER, [], [0]), Denied)


def test_fenced_rollout_is_refused_by_the_store(store: Store) -> None:
    lease(store)
    store.update_membership({incarnation_of("rollout/0", 2), *ALL[1:]})
    assert _is_fenced(store.append(ROLLOUT, [segment(0)]))
    assert _is_fenced(store.lease(ROLLOUT, 1))
    assert isinstance(store.lease(incarnation_of("rollout/0", 2), 1), Leased)


def test_replica_removed_from_the_membership_without_a_successor_is_refused(store: Store) -> None:
    lease(store)
    store.update_membership({OTHER, REWARD, TRAINER})
    assert _is_fenced(store.append(ROLLOUT, [segment(0)]))
    assert _is_fenced(store.lease(ROLLOUT, 1))
    store.update_membership({OTHER, TRAINER})
    assert _is_fenced(store.lease_scoring(REWARD, 1))
    assert _is_fenced(store.post_scores(REWARD, ()))


def test_replica_not_yet_in_the_membership_gets_not_ready(store: Store) -> None:
    new = incarnation_of("rollout/0", 2)
    assert store.lease(new, 1) == NotReady()
    assert store.append(new, [segment(0)]) == NotReady()
    store.update_membership({new, *ALL[1:]})
    assert isinstance(store.lease(new, 1), Leased)


def test_trajectory_at_its_maximum_length_is_finished(store: Store) -> None:
    lease(store)
    assert store.append(ROLLOUT, [segment(0, 0, (5,) * MAX_NEW)]) == Done()
    scoring = store.lease_scoring(REWARD, 9)
    assert isinstance(scoring, Scoring)
    assert [item.trajectory for item in scoring.items] == [0]


def test_rollout_continues_at_its_position_after_a_restart_of_the_store(tmp_path: Path, store: Store) -> None:
    lease(store)
    store.append(ROLLOUT, [segment(0, 0, (5, 6))])
    store.flush()
    store = open_store(tmp_path)
    assert store.append(ROLLOUT, [segment(0, 0, (5, 6))]) == Done()
    assert store.append(ROLLOUT, [segment(0, 2, (7,))], [0]) == Done()


def test_trajectories_held_by_a_rollout_are_not_leased_to_others_after_a_restart_of_the_store(
    tmp_path: Path, store: Store
) -> None:
    held = [item.trajectory for item in lease(store, ROLLOUT, 3)]
    store.flush()
    store = open_store(tmp_path)
    lease(store, ROLLOUT, 0, holding=held)
    assert not {item.trajectory for item in lease(store, OTHER)} & set(held)


def test_tokens_are_never_appended_to_a_prefix_they_were_not_sampled_from(tmp_path: Path, store: Store) -> None:
    lease(store, ROLLOUT)
    store.append(ROLLOUT, [segment(0, 0, (5,))])
    store.flush()
    store = open_store(tmp_path)  # ROLLOUT has lost its lease, but has got no message about it
    lease(store, OTHER)
    store.append(OTHER, [segment(0, 1, (6,))])
    store.update_membership({ROLLOUT, REWARD, TRAINER})  # OTHER dies, so that the trajectory is free again
    # the segment fits by its offset, but follows another token at offset 1
    late = store.append(ROLLOUT, [segment(0, 2, (9,))])
    assert isinstance(late, Denied)
    assert late.lost == (0,)


def test_rollout_that_only_finishes_a_trajectory_can_repeat_the_append(store: Store) -> None:
    lease(store, ROLLOUT)
    store.append(ROLLOUT, [segment(0, 0, (5,))])
    store.update_membership(ALL[1:])
    lease(store, OTHER)
    assert store.append(OTHER, [], [0]) == Done()
    assert store.append(OTHER, [], [0]) == Done()


# ── scoring ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_only_finished_trajectories_are_offered_for_scoring(store: Store) -> None:
    lease(store)
    store.append(ROLLOUT, [segment(0, 0, (5, 6)), segment(2, 0, (7,))], [2])
    answer = store.lease_scoring(REWARD, 9)
    assert isinstance(answer, Scoring)
    assert [(x.trajectory, x.item, x.tokens) for x in answer.items] == [(2, prompt(1).item, (7,))]
    assert isinstance(store.post_scores(REWARD, [Score(0, 1.0, 1.0)]), Denied)


def test_scoring_lease_of_a_dead_replica_is_freed_and_that_of_a_live_one_is_repeated(tmp_path: Path) -> None:
    store = open_store(tmp_path, members=(*ALL, incarnation_of("reward/1")))
    generate(store, at_most=2)
    first = store.lease_scoring(REWARD, 9)
    assert store.lease_scoring(REWARD, 9) == first
    assert store.lease_scoring(incarnation_of("reward/1"), 9) == Scoring(())
    store.update_membership({ROLLOUT, incarnation_of("reward/1")})
    assert store.lease_scoring(incarnation_of("reward/1"), 9) == first


def test_first_score_is_kept(store: Store) -> None:
    generate(store)
    score(store, reward=0.25)
    assert store.post_scores(REWARD, [Score(t, 1.0, 1.0) for t in range(8)]) == Done()
    assert [(t.reward, t.training) for t in bind(store, 1).trajectories] == [(0.25, 0.125)] * 4


def test_a_score_that_is_not_finite_is_denied(store: Store) -> None:
    generate(store)
    assert isinstance(store.post_scores(REWARD, [Score(0, math.nan, 0.0)]), Denied)
    assert isinstance(store.post_scores(REWARD, [Score(0, 0.0, math.inf)]), Denied)


def test_unscorable_group_is_dropped_with_its_reason_and_replaced(tmp_path: Path, store: Store) -> None:
    generate(store)
    assert store.post_scores(REWARD, [Score(0, 1.0, 1.0)], {1: "scorer raised KeyError"}) == Done()
    assert store.post_scores(REWARD, [], {1: "scorer raised KeyError"}) == Done()
    assert store.audit().dropped == {"scorer raised KeyError": GROUP}
    assert [item.group for item in lease(store)] == [4, 4]
    score(store)
    batch = bind(store, 1)
    assert batch.groups == (1, 2)
    commit(store, batch)
    audit = open_store(tmp_path).audit()
    assert (audit.made, audit.trained, audit.dropped, audit.open) == (10, 4, {"scorer raised KeyError": 2}, 4)


def fail_group(store: Store, *, faulty: bool = True) -> int:
    """Finish the next group, report that one answer cannot be scored, and return the store's number of faulty groups.

    With ``faulty``, the report says that the scorer's own code is at fault.
    """
    generate(store, at_most=GROUP)
    answer = store.lease_scoring(REWARD, GROUP)
    assert isinstance(answer, Scoring)
    failed = answer.items[0].trajectory
    done = store.post_scores(REWARD, [], {failed: "the scorer raised"}, [failed] if faulty else [])
    assert isinstance(done, Done)
    return done.faulty_groups


def score_group(store: Store) -> None:
    generate(store, at_most=GROUP)
    score(store)


HALF = FAULTS_WINDOW // 2


def test_scorer_is_at_fault_once_it_has_failed_for_more_than_half_of_the_newest_groups(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_ahead_batches=FAULTS_WINDOW)
    assert [fail_group(store) for _ in range(HALF)] == [0] * HALF
    for _ in range(HALF + 1):  # removes the oldest failure from the window
        score_group(store)
    assert [fail_group(store) for _ in range(HALF)] == [0] * (HALF - 1) + [0]
    assert fail_group(store) == HALF + 1
    assert fail_group(store) == HALF + 2


def test_failures_without_a_fault_of_the_scorer_are_counted_and_do_not_end_it(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_ahead_batches=FAULTS_WINDOW)
    assert {fail_group(store, faulty=False) for _ in range(2 * HALF)} == {0}
    assert fail_group(store) == 0
    score_group(store)
    score_group(store)
    assert bind(store, 1).unscored == FAULTS_WINDOW + 1


def test_several_failed_answers_of_a_group_are_one_fault(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_ahead_batches=FAULTS_WINDOW)
    generate(store, at_most=HALF * GROUP)
    failed = dict.fromkeys(range(HALF * GROUP), "the scorer raised")
    assert store.post_scores(REWARD, [], failed, list(failed)) == Done()
    assert fail_group(store) == HALF + 1


def test_reopened_store_keeps_the_number_of_unscored_groups_and_begins_to_count_faults_again(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_ahead_batches=FAULTS_WINDOW)
    for _ in range(HALF):
        fail_group(store)
    store.flush()
    store = open_store(tmp_path, max_ahead_batches=FAULTS_WINDOW)
    assert fail_group(store) == 0
    score_group(store)
    score_group(store)
    batch = bind(store, 1)
    assert (batch.unscored, batch.stale) == (HALF + 1, 0)
    assert bind(open_store(tmp_path), 1) == batch


# ── binding and committing ─────────────────────────────────────────────────────────────────────────────────────────
def test_batch_consists_of_the_oldest_complete_scored_groups(store: Store) -> None:
    lease(store)
    store.append(ROLLOUT, [segment(t) for t in (6, 7, 4, 5, 0)], (6, 7, 4, 5, 0))
    assert store.part(TRAINER, 1) == NotReady()
    score(store)
    assert bind(store, 1).groups == (2, 3)


def test_repeated_batch_request_returns_the_same_batch_after_a_restart(tmp_path: Path, store: Store) -> None:
    generate(store)
    score(store)
    batch = bind(store, 1)
    generate(store)
    score(store)
    assert bind(store, 1) == batch
    store = open_store(tmp_path)
    assert bind(store, 1) == batch
    assert bind(store, 1, incarnation_of("trainer/0", 2)) == batch


def test_batch_digest_depends_on_tokens_and_rewards(tmp_path: Path) -> None:
    digests = set()
    for name, tokens, reward in (("a", (5, 1), 1.0), ("b", (6, 1), 1.0), ("c", (5, 1), 0.5), ("d", (5, 1), 1.0)):
        store = open_store(tmp_path / name)
        generate(store, tokens=tokens)
        score(store, reward=reward)
        digests.add(bind(store, 1).digest)
    assert len(digests) == 3


def test_batches_are_numbered_without_gaps(store: Store) -> None:
    generate(store)
    score(store)
    assert isinstance(store.part(TRAINER, 0), Denied)
    assert isinstance(store.part(TRAINER, 2), Denied)
    bind(store, 1)
    assert isinstance(store.part(TRAINER, 3), Denied)
    assert isinstance(store.part(TRAINER, 2), PartBound)


@pytest.mark.parametrize("most", [1, 2])
def test_steps_beyond_the_limit_of_uncommitted_steps_are_not_bound(tmp_path: Path, most: int) -> None:
    store = open_store(tmp_path, keep_uncommitted=most, max_ahead_batches=5)
    generate(store)
    score(store)
    batches = [bind(store, number) for number in range(1, most + 2)]
    assert store.part(TRAINER, most + 2) == NotReady()
    assert isinstance(store.commit(TRAINER, 2, manifest(2), batches[1].digest), Denied)
    commit(store, batches[0])
    bind(store, most + 2)
    assert store.part(TRAINER, most + 3) == NotReady()
    store = open_store(tmp_path, keep_uncommitted=most, max_ahead_batches=5)
    assert [bind(store, number) for number in range(1, most + 2)] == batches
    assert store.part(TRAINER, most + 3) == NotReady()


def test_commit_may_be_repeated_and_counts_once(tmp_path: Path, store: Store) -> None:
    assert store.committed(TRAINER) == CommittedState(None, None)
    batch = train(store, 1)
    commit(store, batch)
    assert store.committed(TRAINER) == CommittedState(1, manifest(1))
    store = open_store(tmp_path)
    commit(store, batch)
    assert store.committed(TRAINER) == CommittedState(1, manifest(1))


def test_commit_whose_digest_differs_from_the_bound_or_committed_batch_is_denied(store: Store) -> None:
    generate(store)
    score(store)
    batch = bind(store, 1)
    assert isinstance(store.commit(TRAINER, 1, manifest(1), "0" * 64), Denied)
    assert isinstance(store.commit(TRAINER, 2, manifest(2), batch.digest), Denied)
    commit(store, batch)
    assert isinstance(store.commit(TRAINER, 1, manifest(9), batch.digest), Denied)
    assert isinstance(store.commit(TRAINER, 1, manifest(1), "0" * 64), Denied)
    assert isinstance(store.commit(TRAINER, 2, manifest(2), batch.digest), Denied)  # nothing is bound to 2


def test_trainer_is_fenced_by_the_managers_membership(store: Store) -> None:
    generate(store)
    score(store)
    batch = bind(store, 1)
    store.update_membership({ROLLOUT, REWARD, incarnation_of("trainer/0", 2)})
    assert _is_fenced(store.commit(TRAINER, 1, manifest(1), batch.digest))
    assert _is_fenced(store.part(TRAINER, 1))
    assert _is_fenced(store.committed(TRAINER))
    commit(store, batch, incarnation_of("trainer/0", 2))


@pytest.mark.parametrize("word", ["committed", "batch"])
def test_trainer_is_fenced_by_the_first_message_of_its_successor(tmp_path: Path, word: str, store: Store) -> None:
    generate(store)
    score(store)
    batch = bind(store, 1)
    new = incarnation_of("trainer/0", 2)
    assert not isinstance(store.committed(new) if word == "committed" else store.part(new, 1), Denied)
    assert _is_fenced(store.commit(TRAINER, 1, manifest(1), batch.digest))
    store.flush()
    store = open_store(tmp_path, members=ALL)  # a manager with an old state still names the old incarnation
    assert _is_fenced(store.commit(TRAINER, 1, manifest(1), batch.digest))
    commit(store, batch, new)


def test_fence_by_the_manager_holds_after_a_restart_before_a_new_membership_arrives(
    tmp_path: Path, store: Store
) -> None:
    generate(store)
    score(store)
    batch = bind(store, 1)
    store.update_membership({ROLLOUT, REWARD, incarnation_of("trainer/0", 2)})
    store.flush()
    store = open_store(tmp_path, members=())
    assert _is_fenced(store.commit(TRAINER, 1, manifest(1), batch.digest))


def test_next_trainer_can_finish_the_commit_of_its_predecessor(store: Store) -> None:
    batch = train(store, 1)
    new = incarnation_of("trainer/0", 2)
    commit(store, batch, new)
    assert isinstance(store.part(new, 2), PartBound)


# ── gangs ──────────────────────────────────────────────────────────────────────────────────────────────────────────
SECOND = incarnation_of("trainer/0.1")


def test_each_gang_member_gets_the_same_batch_and_only_rank_0_commits(tmp_path: Path) -> None:
    store = open_store(tmp_path, members=(*ALL, SECOND))
    generate(store)
    score(store)
    batch = bind(store, 1, SECOND)
    assert bind(store, 1, TRAINER) == batch
    denied = store.commit(SECOND, 1, manifest(1), batch.digest)
    assert isinstance(denied, Denied)
    assert not denied.fenced
    commit(store, batch, TRAINER)
    assert store.committed(SECOND) == CommittedState(1, manifest(1))


@pytest.mark.parametrize("first", ["trainer/0", "trainer/0.1"])
def test_first_message_of_the_next_gang_fences_the_previous_one(tmp_path: Path, first: str) -> None:
    store = open_store(tmp_path, members=(*ALL, SECOND))
    generate(store)
    score(store)
    batch = bind(store, 1)
    assert isinstance(store.committed(incarnation_of(first, 2)), CommittedState)
    for member in (TRAINER, SECOND):
        assert _is_fenced(store.committed(member))
        assert _is_fenced(store.part(member, 1))
        assert _is_fenced(store.commit(member, 1, manifest(1), batch.digest))
    store.flush()
    store = open_store(tmp_path, members=(*ALL, SECOND))  # a manager with an old state still names the old incarnations
    assert _is_fenced(store.part(SECOND, 1))
    assert bind(store, 1, incarnation_of("trainer/0.1", 2)) == batch


def test_membership_of_one_member_fences_the_previous_gang(tmp_path: Path) -> None:
    store = open_store(tmp_path, members=(*ALL, SECOND))
    store.update_membership({ROLLOUT, REWARD, incarnation_of("trainer/0.1", 2)})
    assert _is_fenced(store.committed(TRAINER))
    assert _is_fenced(store.committed(SECOND))
    assert isinstance(store.committed(incarnation_of("trainer/0", 2)), CommittedState)


# ── retention ──────────────────────────────────────────────────────────────────────────────────────────────────────
def test_last_two_committed_batches_can_be_requested_again_and_older_ones_cannot(store: Store) -> None:
    batches = [train(store, n) for n in range(1, 5)]
    assert bind(store, 4) == batches[3]
    assert bind(store, 3) == batches[2]
    assert isinstance(store.part(TRAINER, 2), Denied)


def test_memory_and_disk_stay_bounded_and_the_audit_still_knows_every_step(tmp_path: Path) -> None:
    store = open_store(tmp_path, compact_from=4000)
    largest = 0
    for number in range(1, 121):
        train(store, number)
        assert len(list(tmp_path.iterdir())) == 1
        largest = max(largest, next(tmp_path.glob("log.*")).stat().st_size)
    metrics = sum(len(encode(Metrics(*step))) for step in store._state.metrics.items())
    assert largest < 40_000 + 2 * metrics  # the records of 120 steps are larger; only their metrics are kept
    assert len(store._state.trajectories) <= (2 + 2) * BATCH * GROUP
    for audit in (store.audit(), open_store(tmp_path).audit()):
        assert sorted(audit.steps) == list(range(1, 121))
        groups = [group for step in audit.steps.values() for group in step]
        assert len(set(groups)) == len(groups)
        assert audit.trained == 120 * BATCH * GROUP
        assert audit.made == audit.trained + audit.open


def test_at_the_end_of_the_run_every_trajectory_is_trained_or_dropped(tmp_path: Path, store: Store) -> None:
    train(store, 1)
    generate(store)
    score(store)
    bind(store, 2)
    generate(store, at_most=1)
    store.drop_uncommitted("the run is complete")
    audit = store.audit()
    assert (audit.trained, audit.open) == (4, 0)
    assert audit.dropped == {"the run is complete": audit.made - 4}
    assert sorted(audit.steps) == [1]
    store = open_store(tmp_path)
    assert store.audit() == audit
    train(store, 2)


def test_superseded_store_acknowledges_no_append(tmp_path: Path) -> None:
    old = open_store(tmp_path)
    generate(old)
    old.append(ROLLOUT, [segment(0)])
    new = open_store(tmp_path)
    with pytest.raises(Superseded):
        old.flush()
    train(new, 1)
    third = open_store(tmp_path)
    for stale in (old, new):
        with pytest.raises(Superseded):
            stale.flush()
    third.flush()


def test_flush_syncs_after_writing_and_a_new_log_before_its_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    for name in ("write", "fdatasync", "fsync", "replace"):

        def noted(*words: Any, _name: str = name, _real: Callable[..., Any] = getattr(os, name)) -> Any:
            done.append(_name)
            return _real(*words)

        monkeypatch.setattr(os, name, noted)
    store = open_store(tmp_path)
    assert done == ["fsync", "fsync", "replace", "fsync"]  # the claim's folder, the file, and the folder of the file
    done.clear()
    lease(store)
    store.append(ROLLOUT, [segment(0)], [0])
    assert done == []
    store.flush()
    assert done == ["write", "fdatasync"]
    store.flush()
    assert done == ["write", "fdatasync"]  # without new records nothing is written


# ── logs of other formats ──────────────────────────────────────────────────────────────────────────────────────────
def _write_log(folder: Path, *records: object) -> None:
    log = Log(folder)
    log.rewrite(msgspec.msgpack.encode(record) for record in records)
    log.close()


def test_log_of_format_1_is_refused_in_one_line_and_left_unchanged(tmp_path: Path) -> None:
    _write_log(tmp_path, ["head", 1, 1, 2], ["made", 0, 0, 2, 0, b""], ["grown", ["rollout/0", 1], [], [0]])
    content = (tmp_path / "log.1").read_bytes()
    with pytest.raises(LogFormatError) as refused:
        open_store(tmp_path)
    assert str(refused.value) == (
        f"the trajectory log in {tmp_path} has format 1, but this version of rrl reads formats 4, 5 and {FORMAT} only;"
        " use the version of rrl that wrote it, or start a new run"
    )
    assert (tmp_path / "log.1").read_bytes() == content


def test_log_with_an_unknown_record_is_refused_in_one_line(tmp_path: Path) -> None:
    _write_log(tmp_path, ["head", FORMAT, 1, 2], ["made", 0, 0, 2, 0, b""])
    with pytest.raises(
        LogFormatError, match=r"contains a record that this version of rrl cannot read: .*'made'"
    ) as refused:
        open_store(tmp_path)
    assert "\n" not in str(refused.value)
