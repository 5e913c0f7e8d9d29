"""Commits of several steps with one checkpoint (``checkpoint_every``): what is bound, accepted and retained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from rrl.roles.trajectories.batches import Batch
from rrl.roles.trajectories.store import Store
from rrl.roles.trajectories.types import CommittedState, Denied, Done, NotReady, StoredMetrics, TrainedStep
from rrl.tests.support.roles.trajectories.crew import (
    BATCH,
    GROUP,
    TRAINER,
    bind,
    commit,
    generate,
    manifest,
    open_store,
    score,
)


def _bound_step(store: Store, number: int) -> Batch:
    generate(store)
    score(store)
    return bind(store, number)


def _described(batches: Sequence[Batch]) -> list[TrainedStep]:
    return [TrainedStep(batch.number, batch.digest, {"loss": float(batch.number)}) for batch in batches]


def _bound(store: Store, count: int) -> list[Batch]:
    """Bind steps 1 to ``count``, and return their batches."""
    return [_bound_step(store, number) for number in range(1, count + 1)]


@pytest.mark.parametrize("most", [1, 2])
def test_steps_up_to_the_next_checkpoint_and_beside_its_write_are_bound(tmp_path: Path, most: int) -> None:
    store = open_store(tmp_path, keep_uncommitted=most, checkpoint_every=3)
    batches = _bound(store, 3 + most)
    generate(store)
    score(store)
    assert store.part(TRAINER, 4 + most) == NotReady()
    reason = "the trainer waits for the commit of one of the steps 1 to 3: me.commit(step, files) has not been called"
    assert str(store.wait_reason(4 + most)).startswith(reason)
    store = open_store(tmp_path, keep_uncommitted=most, checkpoint_every=3)
    assert [bind(store, batch.number) for batch in batches] == batches, "a restarted trainer gets other batches"
    commit(store, batches[2], earlier=batches[:2])
    bind(store, 4 + most)
    assert [bind(store, batch.number) for batch in batches[3:]] == batches[3:]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_commit_of_any_step_of_the_range_commits_the_steps_before_it(tmp_path: Path, number: int) -> None:
    store = open_store(tmp_path, checkpoint_every=3)
    batches = _bound(store, 4)
    earlier = _described(batches[: number - 1])
    done = store.commit(TRAINER, number, manifest(number), batches[number - 1].digest, {"loss": 9.0}, earlier)
    assert isinstance(done, Done)
    assert [step.step for step in done.earlier] == list(range(1, number))
    assert [step.metrics["loss"] for step in done.earlier] == [float(step) for step in range(1, number)]
    assert store.commit(TRAINER, number, manifest(number), batches[number - 1].digest, {}, earlier) == done
    store.flush()
    again = open_store(tmp_path, checkpoint_every=3)
    assert again.committed(TRAINER) == CommittedState(number, manifest(number))
    stored = again.metrics(TRAINER, 0)
    assert isinstance(stored, StoredMetrics)
    assert [(step.step, step.metrics["loss"]) for step in stored.commits][-1] == (number, 9.0)
    assert len(stored.commits) == number
    audit = again.audit()
    assert (audit.committed, audit.trained) == (number, number * BATCH * GROUP)
    assert [bind(again, batch.number) for batch in batches[number:]] == batches[number:]


def test_commit_that_is_not_a_range_of_bound_batches_is_denied(tmp_path: Path) -> None:
    store = open_store(tmp_path, checkpoint_every=3)
    batches = _bound(store, 4)
    steps = _described(batches)

    def denied(number: int, earlier: Sequence[TrainedStep]) -> str:
        answer = store.commit(TRAINER, number, manifest(number), batches[number - 1].digest, {}, earlier)
        assert isinstance(answer, Denied)
        return answer.why

    assert denied(4, steps[:3]) == (
        "commit of step 4 is out of order: step 0 was committed last; a commit has at most 3 steps"
    )
    assert denied(3, steps[:1]) == "commit of step 3 is out of order: it does not name step 2"
    other = TrainedStep(2, batches[2].digest, {})
    assert denied(3, [steps[0], other]) == (
        f"step 2 is bound to the batch {batches[1].digest}, not to the batch {batches[2].digest}"
    )
    assert store.committed(TRAINER) == CommittedState(None, None)
    commit(store, batches[2], earlier=batches[:2])
    assert "another manifest or digest" in denied(2, steps[:1]), (
        "a step that was committed without a checkpoint was committed with one later"
    )


def test_retained_commits_and_batches_are_bounded_if_commits_have_several_steps(tmp_path: Path) -> None:
    store = open_store(tmp_path, checkpoint_every=3, retained_commits=2)
    for first in range(1, 16, 3):
        batches = [_bound_step(store, number) for number in range(first, first + 3)]
        commit(store, batches[2], earlier=batches[:2])
    assert sorted(store.commit_status.folders) == [12, 15]
    assert isinstance(store.part(TRAINER, 13), Denied)
    assert bind(store, 14).number == 14
    again = open_store(tmp_path, checkpoint_every=3, retained_commits=2)
    assert again.commit_status == store.commit_status
