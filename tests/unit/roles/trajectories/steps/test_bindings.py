"""A step that is bound in parts: the groups of each part, what cannot change, and the state after the step.

Random histories of parts are in ``test_waiting.py``, and crashes of the store in ``test_crash_points.py``.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rrl.core.types import Incarnation, Version
from rrl.roles.trajectories.batches import decode
from rrl.roles.trajectories.durable.log import Log
from rrl.roles.trajectories.durable.records import decode as decode_record
from rrl.roles.trajectories.durable.records import encode
from rrl.roles.trajectories.store import Store
from rrl.roles.trajectories.types import Denied, Done, NotReady, PackedPart, PartBound, Segment
from rrl.tests.support.roles.trajectories.crew import (
    ALL,
    BATCH,
    GROUP,
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
    score,
    segment,
    train,
)
from rrl.tests.support.roles.trajectories.crew import open_store as _open_store

STEP = 4
"""Number of groups in a step."""


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path)


def open_store(folder: Path, **changed: Any) -> Store:
    return _open_store(folder, **{"groups_per_batch": STEP, "groups_per_part": 1, **changed})


def part(store: Store, number: int, index: int, who: Incarnation = TRAINER) -> PackedPart:
    answer = store.part(who, number, index)
    assert isinstance(answer, PartBound), answer
    store.flush()
    return answer.part


def complete(store: Store, *groups: int, weights: int = 0, who: Incarnation = ROLLOUT) -> None:
    """Finish and score groups that ``who`` has leased, and of which it has appended nothing yet."""
    tracks = [GROUP * group + place for group in groups for place in range(GROUP)]
    assert store.append(who, [segment(t, 0, (5, 1), weights) for t in tracks], tracks) == Done()
    score(store)


# ── which groups a part gets ───────────────────────────────────────────────────────────────────────────────────────
def test_a_part_gets_all_complete_groups_but_no_more_than_the_step_lacks(store: Store) -> None:
    lease(store)
    assert store.part(TRAINER, 1, 0) == NotReady()
    complete(store, 2)
    assert part(store, 1, 0).groups == (2,)
    complete(store, 0, 5)
    assert part(store, 1, 1).groups == (0, 5)
    complete(store, 1, 3, 4)
    last = part(store, 1, 2)
    assert (last.groups, last.last) == ((1,), True)
    assert part(store, 2, 0).groups == (3, 4)


@pytest.mark.parametrize(
    ("groups", "wanted", "least"), [(16, None, 2), (17, None, 3), (4, None, 1), (4, 3, 3), (4, 9, 4)]
)
def test_part_has_at_least_the_requested_groups_or_an_eighth_of_the_step(
    tmp_path: Path, groups: int, wanted: int | None, least: int
) -> None:
    store = open_store(tmp_path, groups_per_batch=groups, groups_per_part=wanted)
    lease(store)
    complete(store, *range(least - 1))
    assert store.part(TRAINER, 1, 0) == NotReady()
    complete(store, least - 1)
    assert len(part(store, 1, 0).groups) == least


def test_the_last_part_may_have_fewer_groups_than_the_others(tmp_path: Path) -> None:
    store = open_store(tmp_path, groups_per_part=3)
    lease(store)
    complete(store, 0, 1, 2)
    assert not part(store, 1, 0).last
    complete(store, 3)
    assert (part(store, 1, 1).groups, part(store, 1, 1).last) == ((3,), True)


def test_a_part_leaves_places_for_the_groups_whose_last_step_it_is(tmp_path: Path) -> None:
    """Group 3 must be trained in step 1.

    Only three of the other four groups that are complete therefore have a place in this step.
    """
    store = open_store(tmp_path, staleness=0, max_ahead_batches=1)
    assert len(lease(store, weights=0)) == STEP * GROUP
    complete(store, 0, 1)
    assert part(store, 1, 0).groups == (0, 1)
    assert lease(store, OTHER, weights=0) == (), "work was leased although the two free places belong to groups 2 and 3"
    complete(store, 2)
    assert part(store, 1, 1).groups == (2,)
    assert store.part(TRAINER, 1, 2) == NotReady()
    assert store.wait_reason(1, 2) == (
        "the trainer waits for group 3 (rollout/0#1): step 1 is the last that may train it"
    )
    complete(store, 3)
    assert part(store, 1, 2).last
    assert store.audit().dropped == {}


def _with_a_late_group(folder: Path, **changed: Any) -> Store:
    """Return a store whose step 2 is open and is the last step for group 4.

    Group 4 is not complete, but groups 5 to 8 are, with newer weights.
    """
    store = open_store(folder, staleness=1, max_ahead_batches=3, **changed)
    assert len(lease(store, at_most=5 * GROUP, weights=0)) == 5 * GROUP
    complete(store, 0, 1, 2, 3)
    commit(store, bind(store, 1))
    assert len(lease(store, OTHER, 4 * GROUP, weights=1)) == 4 * GROUP
    complete(store, 5, 6, 7, 8, weights=1, who=OTHER)
    return store


def test_part_takes_no_place_of_an_older_incomplete_group(tmp_path: Path) -> None:
    store = _with_a_late_group(tmp_path)
    assert part(store, 2, 0).groups == (5, 6, 7)
    assert store.part(TRAINER, 2, 1) == NotReady(), "a part was bound although the last place belongs to group 4"
    assert store.part(TRAINER, 2) == NotReady()
    for index in (1, None):
        assert store.wait_reason(2, index) == (
            "the trainer waits for group 4 (rollout/0#1): step 2 is the last that may train it"
        )
    complete(store, 4)
    last = part(store, 2, 1)
    assert (last.groups, last.last) == ((4,), True)
    assert store.audit().dropped == {}


def test_with_late_drop_a_part_waits_for_no_group_and_the_last_part_drops_it(tmp_path: Path) -> None:
    store = _with_a_late_group(tmp_path, wait_for_late=False)
    assert part(store, 2, 0).groups == (5, 6, 7, 8)
    assert store.audit().dropped == {"stale: a token is more than 1 training steps old": GROUP}


def test_with_late_drop_nothing_is_dropped_while_the_step_lacks_groups(tmp_path: Path) -> None:
    store = open_store(tmp_path, staleness=0, wait_for_late=False)
    lease(store, weights=0)
    complete(store, 0, 1, 2)
    assert len(part(store, 1, 0).groups) == 3
    assert store.audit().dropped == {}
    complete(store, 3)
    assert part(store, 1, 1).groups == (3,)


def test_groups_of_a_part_leave_the_window_of_unbound_groups(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_ahead_batches=0)
    assert len(lease(store)) == STEP * GROUP
    complete(store, 0)
    assert lease(store, OTHER) == ()
    part(store, 1, 0)
    assert {item.group for item in lease(store, OTHER)} == {STEP}


# ── invariants of bound parts ──────────────────────────────────────────────────────────────────────────────────────
def test_parts_are_the_same_after_restarts_of_store_and_trainer(tmp_path: Path, store: Store) -> None:
    lease(store)
    complete(store, 0)
    parts = [part(store, 1, 0)]
    complete(store, 1, 2)
    parts.append(part(store, 1, 1))
    complete(store, 3)
    for who in (TRAINER, incarnation_of("trainer/0", 2)):
        store.flush()
        store = open_store(tmp_path, members=(ROLLOUT, REWARD, who))
        assert [part(store, 1, index, who) for index in range(2)] == parts
    last = part(store, 1, 2, who)
    assert last.last
    for _ in range(2):
        assert [part(store, 1, index, who) for index in range(3)] == [*parts, last]
        store = open_store(tmp_path, members=(ROLLOUT, REWARD, who), compact_from=1)


def test_each_digest_covers_the_content_of_the_part_and_the_parts_before(tmp_path: Path) -> None:
    digests: list[tuple[str, str]] = []
    for name, first, second in (("a", 1.0, 1.0), ("b", 1.0, 0.5), ("c", 0.5, 1.0), ("d", 1.0, 1.0)):
        store = open_store(tmp_path / name)
        assert generate(store, at_most=GROUP)
        score(store, reward=first)
        digest = part(store, 1, 0).digest
        assert generate(store, at_most=GROUP)
        score(store, reward=second)
        digests.append((digest, part(store, 1, 1).digest))
    (a, ab), (b, bb), (c, cb), same = digests
    assert same == (a, ab)
    assert a == b != c
    assert len({a, ab, bb, c, cb}) == 5, "digests must differ although the second parts of a and c have equal content"


def test_a_fenced_trainer_is_denied_parts_and_members_of_a_gang_get_the_same(tmp_path: Path) -> None:
    second = incarnation_of("trainer/0.1")
    store = open_store(tmp_path, members=(*ALL, second))
    lease(store)
    complete(store, 0)
    first = part(store, 1, 0, second)
    complete(store, 1)
    assert part(store, 1, 0) == first
    assert part(store, 1, 0, incarnation_of("trainer/0.1", 2)) == first
    for member in (TRAINER, second):
        answer = store.part(member, 1, 1)
        assert isinstance(answer, Denied)
        assert answer.fenced


# ── order of requests and commits ──────────────────────────────────────────────────────────────────────────────────
def _denied(answer: object) -> str:
    assert isinstance(answer, Denied)
    assert not answer.fenced
    return answer.why


def test_parts_are_requested_in_order_and_only_once_the_previous_step_is_complete(tmp_path: Path) -> None:
    store = open_store(tmp_path, keep_uncommitted=9)
    lease(store)
    complete(store, 0, 1)
    assert "is out of order: the next part of step 1 is part 0" in _denied(store.part(TRAINER, 1, 1))
    assert "is out of order" in _denied(store.part(TRAINER, 1, -1))
    assert "batch 2 is out of order" in _denied(store.part(TRAINER, 2, 0))
    part(store, 1, 0)
    assert "batch 2 is out of order" in _denied(store.part(TRAINER, 2, 0))
    assert "batch 2 is out of order" in _denied(store.part(TRAINER, 2))
    complete(store, 2, 3)
    assert part(store, 1, 1).last
    assert _denied(store.part(TRAINER, 1, 2)) == "part 2 of step 1 does not exist: the number of its parts is 2"
    assert store.part(TRAINER, 2, 0) == NotReady()


def test_with_too_many_uncommitted_steps_only_parts_already_bound_are_returned(tmp_path: Path) -> None:
    store = open_store(tmp_path, keep_uncommitted=1, groups_per_batch=BATCH)
    lease(store)
    complete(store, 0, 1)
    first = bind(store, 1)
    complete(store, 2)
    opened = part(store, 2, 0)
    store.flush()
    store = open_store(tmp_path, keep_uncommitted=0, groups_per_batch=BATCH)
    complete(store, 3)
    assert part(store, 2, 0) == opened
    assert store.part(TRAINER, 2, 1) == NotReady()
    assert store.wait_reason(2, 1) == (
        "the trainer waits for the commit of step 1: me.commit(1, files) has not been called, or has not finished"
    )
    commit(store, first)
    assert part(store, 2, 1).last


def test_a_step_is_committed_with_the_digest_of_its_last_part_and_not_before(store: Store) -> None:
    lease(store)
    complete(store, 0, 1)
    first = part(store, 1, 0)
    assert "out of order" in _denied(store.commit(TRAINER, 1, manifest(1), first.digest))
    complete(store, 2, 3)
    last = part(store, 1, 1)
    assert "is bound to" in _denied(store.commit(TRAINER, 1, manifest(1), first.digest))
    for _ in range(2):
        assert isinstance(store.commit(TRAINER, 1, manifest(1), last.digest), Done)
    assert store.audit().committed == 1


# ── parts and batches of one step ──────────────────────────────────────────────────────────────────────────────────
def test_a_step_that_was_bound_as_a_whole_has_one_part(store: Store) -> None:
    generate(store)
    score(store)
    batch = bind(store, 1)
    one = decode(part(store, 1, 0))
    assert one.last
    assert (one.groups, one.digest, one.trajectories) == (batch.groups, batch.digest, batch.trajectories)
    assert (one.stale, one.max_age) == (batch.stale, batch.max_age)
    assert isinstance(store.part(TRAINER, 1, 1), Denied)
    assert store.audit().parts == {1: (batch.groups,)}


def test_batch_request_for_an_open_step_waits_for_the_rest_as_its_last_part(store: Store) -> None:
    lease(store)
    complete(store, 1)
    first = part(store, 1, 0)
    complete(store, 0, 2)
    assert store.part(TRAINER, 1) == NotReady()
    assert store.wait_reason(1) == "the trainer waits for 1 more of the 4 groups of step 1 (bound already: 1)"
    assert store.wait_reason(1, 0) is None
    assert store.wait_reason(1, 1) is None
    complete(store, 3)
    batch = bind(store, 1)
    last = part(store, 1, 1)
    assert batch.groups == (1, 0, 2, 3) == first.groups + last.groups
    assert last.last
    assert batch.digest == last.digest
    assert batch.trajectories == (*decode(first).trajectories, *decode(last).trajectories)
    assert store.audit().parts == {1: ((1,), (0, 2, 3))}


def test_wait_reason_of_a_part_counts_the_missing_groups(tmp_path: Path) -> None:
    store = open_store(tmp_path, staleness=1, groups_per_part=2)
    assert len(lease(store, weights=0)) == 2 * STEP * GROUP
    assert store.wait_reason(1, 0) == "the trainer waits for 2 more of the 4 groups of step 1"
    complete(store, 6)
    assert store.wait_reason(1, 0) == "the trainer waits for 1 more of the 4 groups of step 1"
    complete(store, 5)
    assert store.wait_reason(1, 0) is None


# ── size of a message ──────────────────────────────────────────────────────────────────────────────────────────────
def test_part_is_cut_to_the_size_of_a_message(tmp_path: Path, store: Store) -> None:
    generate(store)
    score(store)
    size = store._state.message_bytes(0)
    for name, limit, cuts in (("two", 2 * size, [2, 2]), ("three", 4 * size - 1, [3, 1]), ("tiny", 1, [1, 1, 1, 1])):
        store = open_store(tmp_path / name, max_part_bytes=limit)
        generate(store)
        score(store)
        assert [len(part(store, 1, index).groups) for index in range(len(cuts))] == cuts
        assert part(store, 1, len(cuts) - 1).last


def test_batch_that_does_not_fit_into_a_message_is_bound_in_parts(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_part_bytes=1)
    generate(store)
    score(store)
    batch = bind(store, 1)
    parts = [part(store, 1, index) for index in range(STEP)]
    assert [one.groups for one in parts] == [(0,), (1,), (2,), (3,)]
    assert [one.last for one in parts] == [False, False, False, True]
    assert batch.digest == parts[-1].digest


@pytest.mark.parametrize("runs", [1, 64])
def test_bytes_of_groups_are_never_more_than_estimated(tmp_path: Path, runs: int) -> None:
    """All tokens have one version, or each token has a version of its own.

    All numbers are as large as they can be.
    """
    tokens, length = 64, 64 // runs
    store = open_store(tmp_path, max_new_tokens=tokens)
    for item in lease(store, at_most=3 * GROUP):
        for offset in range(0, tokens, length):
            content = (2**31 - 1,) * length, (-0.5,) * length
            piece = Segment(item.trajectory, offset, *content, Version(2**40 + offset, 2**40))
            done = [item.trajectory] if offset + length == tokens else []
            assert store.append(ROLLOUT, [piece], done) == Done()
    score(store, reward=0.1)
    estimate = sum(store._state.message_bytes(group) for group in range(3))
    encoded = len(msgspec.msgpack.encode(store.part(TRAINER, 1, 0)))
    assert encoded - 200 <= estimate <= 2 * encoded


# ── groups of a part stay ──────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(("waits", "groups"), [(True, STEP), (True, 1), (False, STEP)])
def test_smaller_staleness_limit_drops_only_groups_that_are_in_no_part(
    tmp_path: Path, waits: bool, groups: int
) -> None:
    store = open_store(tmp_path, staleness=1, max_ahead_batches=3)
    lease(store, weights=0)
    complete(store, 0, 1, 2, 3)
    commit(store, bind(store, 1))
    complete(store, 4, 5)
    opened = part(store, 2, 0)
    assert opened.max_age == 1
    assert store.append(ROLLOUT, [segment(GROUP * group, 0, (5,), 0) for group in (6, 7)]) == Done()
    store.flush()
    store = open_store(tmp_path, staleness=0, groups_per_batch=groups, wait_for_late=waits)
    assert part(store, 2, 0) == opened
    assert sum(store.audit().dropped.values()) == 2 * GROUP, (
        "the dropped groups are not 6 and 7, which are too old for step 2"
    )
    assert {item.group for item in lease(store, weights=1)} == {8, 9}, (
        "the leased groups are not those for the free places of step 2"
    )
    complete(store, 8, 9, weights=1)
    score(store)
    assert part(store, 2, 1).groups == (8, 9)


def test_a_failed_score_of_a_group_in_a_part_is_ignored(store: Store) -> None:
    lease(store)
    complete(store, 0)
    opened = part(store, 1, 0)
    assert store.post_scores(REWARD, [], {0: "broken", 1: "broken"}) == Done()
    assert store.audit().dropped == {}
    assert part(store, 1, 0) == opened


@pytest.mark.parametrize("groups", [1, 3, 8])
def test_step_that_has_parts_keeps_its_size_if_the_run_changes_its_step_size(tmp_path: Path, groups: int) -> None:
    store = open_store(tmp_path, max_ahead_batches=0)
    lease(store)
    complete(store, 0, 2)
    opened = part(store, 1, 0)
    store.flush()
    store = open_store(tmp_path, groups_per_batch=groups, max_ahead_batches=0)
    complete(store, 1, 3)
    last = part(store, 1, 1)
    assert (part(store, 1, 0), last.groups, last.last) == (opened, (1, 3), True)
    generate(store)
    score(store)
    assert len(bind(store, 2).groups) == groups


def test_batch_of_an_open_step_is_completed_despite_a_smaller_window(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_ahead_batches=0)
    lease(store, at_most=GROUP)
    complete(store, 0)
    part(store, 1, 0)
    store.flush()
    store = open_store(tmp_path, groups_per_batch=1, max_ahead_batches=0)
    assert len(generate(store)) == 3 * GROUP, (
        "the store must generate the three groups that step 1 lacks, though a step now has one"
    )
    score(store)
    assert bind(store, 1).groups == (0, 1, 2, 3)


def test_groups_of_an_open_step_are_dropped_when_the_run_is_complete(tmp_path: Path, store: Store) -> None:
    train(store, 1)
    generate(store, at_most=2 * GROUP)
    score(store)
    part(store, 2, 0)
    store.drop_uncommitted("the run is complete")
    audit = store.audit()
    assert (audit.trained, audit.open, list(audit.parts)) == (STEP * GROUP, 0, [1])
    assert audit.dropped == {"the run is complete": audit.made - STEP * GROUP}
    for _ in range(2):
        store = open_store(tmp_path)
        assert store.audit() == audit
    lease(store)
    complete(store, audit.made // GROUP)
    again = part(store, 2, 0)
    assert again.groups == (audit.made // GROUP,)
    assert store.audit().parts == {**audit.parts, 2: (again.groups,)}


# ── log and audit ──────────────────────────────────────────────────────────────────────────────────────────────────
def _records(folder: Path) -> list[Any]:
    log = Log(folder)
    return [decode_record(payload) for payload in log.inherited()]


def _write(folder: Path, records: list[Any]) -> None:
    log = Log(folder)
    log.rewrite(map(encode, records))
    log.close()


def _train_in_parts(store: Store, number: int, weights: int) -> None:
    """Train step ``number`` in two parts, whose tokens have different versions."""
    groups = sorted({item.group for item in lease(store, at_most=2 * GROUP, weights=weights)})
    complete(store, *groups, weights=weights)
    part(store, number, 0)
    groups = sorted({item.group for item in lease(store, at_most=2 * GROUP, weights=number - 1)})
    complete(store, *groups, weights=number - 1)
    last = part(store, number, 1)
    assert last.max_age == part(store, number, 0).max_age == number - 1 - weights
    assert isinstance(store.commit(TRAINER, number, manifest(number), last.digest), Done)
    store.flush()


def test_audit_counts_parts_and_ages_of_steps_whose_data_is_deleted(tmp_path: Path) -> None:
    store = open_store(tmp_path, staleness=2)
    for number in range(1, 7):
        _train_in_parts(store, number, max(0, number - 3))
    groups = {number: (4 * number - 4, 4 * number - 3, 4 * number - 2, 4 * number - 1) for number in range(1, 7)}
    tokens = 2 * GROUP * 2
    expected = Counter({0: tokens, 1: tokens, 2: 4 * tokens}) + Counter({0: 6 * tokens})
    for folder_is_rewritten in (False, True, True):
        audit = store.audit()
        assert audit.steps == groups
        assert audit.parts == {number: (step[:2], step[2:]) for number, step in groups.items()}
        assert audit.ages == expected, folder_is_rewritten
        assert (audit.max_age, sum(audit.ages.values())) == (2, 2 * audit.trained)
        store.close()
        store = open_store(tmp_path, staleness=2)
    assert part(store, 6, 0).groups == groups[6][:2]
    assert isinstance(store.part(TRAINER, 4, 0), Denied), (
        "a part of step 4 is still served; only the last two steps must be kept"
    )


def test_audit_counts_no_tokens_of_a_step_that_is_not_committed(tmp_path: Path) -> None:
    store = open_store(tmp_path, staleness=1, keep_uncommitted=1)
    lease(store, weights=0)
    complete(store, 0, 1)
    part(store, 1, 0)
    assert store.audit().ages == {}
    complete(store, 2, 3)
    last = part(store, 1, 1)
    complete(store, 4)
    assert part(store, 2, 0).max_age == 1
    assert isinstance(store.commit(TRAINER, 1, manifest(1), last.digest), Done)
    audit = store.audit()
    assert (audit.ages, audit.max_age) == ({0: 4 * GROUP * 2}, 0)
    assert (audit.steps, audit.parts) == ({1: (0, 1, 2, 3)}, {1: ((0, 1), (2, 3)), 2: ((4,),)})
