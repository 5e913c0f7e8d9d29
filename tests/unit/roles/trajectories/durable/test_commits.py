"""Commits are read from a store's log while the store is at work."""

from __future__ import annotations

from pathlib import Path

import pytest

from rrl.roles.trajectories.durable import log as reading
from rrl.roles.trajectories.durable.log import LogDamaged, log_files, read_commits
from rrl.tests.support.roles.trajectories.crew import manifest, open_store, train


@pytest.fixture(autouse=True)
def _no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "RETRY_DELAY_S", 0.0)


def test_commits_of_an_open_store_are_read_with_their_manifests(tmp_path: Path) -> None:
    assert read_commits(tmp_path) == {}
    store = open_store(tmp_path)
    assert read_commits(tmp_path) == {}
    digests = {step: train(store, step).digest for step in (1, 2, 3)}
    found = read_commits(tmp_path)
    assert {step: (one.manifest, one.digest) for step, one in found.items()} == {
        step: (manifest(step), digest) for step, digest in digests.items()
    }


def test_store_keeps_as_many_commits_as_checkpoints(tmp_path: Path) -> None:
    store = open_store(tmp_path, retained_commits=3)
    for step in range(1, 6):
        train(store, step)
    store.close()
    open_store(tmp_path, retained_commits=3).close()  # writes the log anew
    assert sorted(read_commits(tmp_path)) == [3, 4, 5]
    store = open_store(tmp_path)
    assert store.commit_status.folders == {4: "checkpoints/4", 5: "checkpoints/5"}
    train(store, 6)
    assert store.commit_status.folders == {5: "checkpoints/5", 6: "checkpoints/6"}


def test_partly_written_flush_is_left_out(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    train(store, 1)
    before = log_files(tmp_path)[-1].stat().st_size
    train(store, 2)
    store.close()
    (path,) = log_files(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[: before + (len(content) - before) // 2])
    assert sorted(read_commits(tmp_path)) == [1]


def test_empty_log_claimed_by_a_new_store_is_left_out(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    train(store, 1)
    (tmp_path / "log.9").touch()
    assert sorted(read_commits(tmp_path)) == [1]


def test_a_log_that_is_replaced_while_it_is_read_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    train(store, 1)
    found, listed = [tmp_path / "log.0"], log_files(tmp_path)
    monkeypatch.setattr(reading, "log_files", lambda _: [found.pop()] if found else listed)
    assert sorted(read_commits(tmp_path)) == [1]


def test_a_damaged_log_is_reported(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    train(store, 1)
    train(store, 2)
    store.close()
    (path,) = log_files(tmp_path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(LogDamaged, match="but a later write"):
        read_commits(tmp_path)
