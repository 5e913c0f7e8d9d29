"""The checkpoints that are deleted for a trainer that only uses the worker API, with a real store."""

from __future__ import annotations

import random
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from rrl.roles.checkpoints.folders import fresh_folder
from rrl.roles.checkpoints.retention import CheckpointCleaner, CommitStatus, garbage
from rrl.roles.trajectories.store import Store
from rrl.roles.trajectories.types import Done
from rrl.tests.support.listening_manager import TIMEOUT_S, wait_until
from rrl.tests.support.roles.trajectories.crew import TRAINER, bind, generate, incarnation_of, open_store, score


def _status(committed: int, oldest_trainer: int = 1, **folders: str) -> CommitStatus:
    return CommitStatus(committed, oldest_trainer, {int(step[1:]): folder for step, folder in folders.items()})


STATUS = _status(9, 3, s8="checkpoints/step-8.2.0", s9="checkpoints/step-9.3.1")


@pytest.mark.parametrize(
    ("name", "is_garbage"),
    [
        ("step-8.2.0", False),
        ("step-9.3.1", False),
        ("step-7.2.0", True),  # superseded
        ("step-9.3.0", True),  # an attempt that was not committed
        ("step-10.2.0", True),  # its trainer is fenced
        ("step-10.3.0", False),  # its trainer writes it now
        ("step-11.4.0", False),
        ("step-0.1.0", False),  # the reference model
        ("best", False),
        ("step-3", False),
    ],
)
def test_only_unneeded_folders_are_garbage(name: str, is_garbage: bool) -> None:
    assert (garbage([name], STATUS, keep_checkpoints=2) == [name]) is is_garbage


def test_retained_steps_whose_commits_are_forgotten_are_kept() -> None:
    names = [f"step-{step}.1.0" for step in range(1, 10)]
    assert garbage(names, STATUS, keep_checkpoints=4) == [*names[:5], "step-8.1.0", "step-9.1.0"]


def test_folder_of_an_old_step_that_the_newest_commit_names_is_kept() -> None:
    status = _status(9, s8="checkpoints/step-1.1.0/weights", s9="checkpoints/step-1.1.0/weights")
    assert garbage(["step-1.1.0", "step-2.1.0"], status, keep_checkpoints=2) == ["step-2.1.0"]


@pytest.mark.parametrize("seed", range(20))
def test_no_store_deletes_a_checkpoint_that_a_later_store_retains(seed: int) -> None:
    """A superseded store may delete checkpoints at any later time, according to outdated facts."""
    dice, keep_checkpoints = random.Random(seed), 2 + seed % 2
    committed, trainer, commits, attempts = 0, 1, dict[int, str](), list[str]()
    deleted_by_some_store: set[str] = set()
    for _ in range(200):
        match dice.randrange(3):
            case 0:
                trainer += dice.random() < 0.2
            case 1:
                attempts.append(f"step-{committed + dice.randint(1, 2)}.{trainer}.{len(attempts)}")
            case 2:
                mine = [name for name in attempts if name.startswith(f"step-{committed + 1}.{trainer}.")]
                if mine:
                    committed += 1
                    commits[committed] = dice.choice(mine)
        newest = {step: f"checkpoints/{name}" for step, name in commits.items() if step > committed - 2}
        deleted_by_some_store |= set(garbage(attempts, CommitStatus(committed, trainer, newest), keep_checkpoints))
        needed = {name for step, name in commits.items() if step > committed - keep_checkpoints}
        assert not needed & deleted_by_some_store
    assert committed > 5
    assert deleted_by_some_store


def _commit_step(store: Store, folder: Path, number: int, trainer: int = 1) -> None:
    """Commit a step with a checkpoint in ``folder``, as the worker API does, and make the commit durable."""
    who = incarnation_of(TRAINER.replica, trainer)
    generate(store)
    score(store)
    batch = bind(store, number, who)
    manifest: dict[str, Any] = {"folder": f"checkpoints/{folder.name}", "files": {}}
    assert isinstance(store.commit(who, number, manifest, batch.digest), Done)
    store.flush()


def _attempt(checkpoints: Path, number: int, trainer: int = 1) -> Path:
    checkpoints.mkdir(exist_ok=True)
    folder = fresh_folder(checkpoints, number, trainer)
    (folder / "state.pt").write_bytes(b"weights")
    return folder


def _names(checkpoints: Path) -> set[str]:
    return {folder.name for folder in checkpoints.iterdir()}


def test_store_keeps_the_newest_commits_and_deletes_the_older_ones(tmp_path: Path) -> None:
    store, checkpoints = open_store(tmp_path / "store"), tmp_path / "checkpoints"
    with CheckpointCleaner(checkpoints, keep_checkpoints=2) as cleaner:
        for number in range(1, 6):
            _commit_step(store, _attempt(checkpoints, number), number)
            cleaner.update(store.commit_status)
    assert _names(checkpoints) == {"step-4.1.0", "step-5.1.0"}


def test_store_that_died_between_commit_and_deletion_deletes_when_it_restarts(tmp_path: Path) -> None:
    store, checkpoints = open_store(tmp_path / "store"), tmp_path / "checkpoints"
    for number in range(1, 4):
        _commit_step(store, _attempt(checkpoints, number), number)
    store.close()
    assert len(_names(checkpoints)) == 3
    with CheckpointCleaner(checkpoints, keep_checkpoints=2) as cleaner:
        cleaner.update(open_store(tmp_path / "store").commit_status)
    assert _names(checkpoints) == {"step-2.1.0", "step-3.1.0"}


def test_attempts_of_a_fenced_trainer_are_deleted_before_the_next_commit(tmp_path: Path) -> None:
    store, checkpoints = open_store(tmp_path / "store"), tmp_path / "checkpoints"
    _commit_step(store, _attempt(checkpoints, 1), 1)
    _attempt(checkpoints, 2)  # and its trainer dies
    successor = incarnation_of(TRAINER.replica, 2)
    with CheckpointCleaner(checkpoints, keep_checkpoints=2) as cleaner:
        store.committed(successor)
        store.flush()
        cleaner.update(store.commit_status)
    assert _names(checkpoints) == {"step-1.1.0"}


def test_folder_that_cannot_be_deleted_is_reported_once_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step in range(1, 5):
        _attempt(tmp_path, step)

    def refuse(path: Path) -> None:
        raise OSError(39, "Directory not empty")

    with CheckpointCleaner(tmp_path, keep_checkpoints=2) as cleaner:
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", refuse)
            for committed in (3, 4):
                cleaner.update(_status(committed))
            wait_until(lambda: "step-2.1.0" in caplog.text)
        reported = sorted(re.findall(r"(step-\d)\.1\.0: .*Directory not empty", caplog.text))
        cleaner.update(_status(4, oldest_trainer=2))
    assert reported == ["step-1", "step-2"]
    assert _names(tmp_path) == {"step-3.1.0", "step-4.1.0"}


def test_store_that_fails_does_not_wait_for_a_deletion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _attempt(tmp_path, 1)
    begun, may_end = threading.Event(), threading.Event()

    def hang(path: Path) -> None:
        begun.set()
        may_end.wait()

    def serve() -> None:
        with CheckpointCleaner(tmp_path, keep_checkpoints=2) as cleaner:
            cleaner.update(_status(3))
            assert begun.wait(TIMEOUT_S)
            raise OSError("the log cannot be written")

    monkeypatch.setattr(shutil, "rmtree", hang)
    with pytest.raises(OSError, match="log"):
        serve()
    may_end.set()
