from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from rrl.core.run_dir import RunDir
from rrl.roles.trainer.checkpoint import Checkpoints
from rrl.roles.trainer.learner import Learner
from rrl.roles.worker.checkpoint_files import DamagedCheckpoint, describe, fresh_folder, incarnation_of, verified
from rrl.tests.support.roles.trainer import harness

pytestmark = pytest.mark.torch


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.create()
    return made


def _commit(checkpoints: Checkpoints, run_dir: RunDir, number: int, incarnation: int = 1) -> dict[str, Any]:
    files = _write(checkpoints, run_dir, number, incarnation)
    manifest = describe(run_dir.path, files)
    checkpoints.on_committed(files[0].parent)
    return manifest


def _write(checkpoints: Checkpoints, run_dir: RunDir, number: int, incarnation: int = 1) -> list[Path]:
    folder = fresh_folder(run_dir.checkpoints, number, incarnation)
    student = _learner(number)
    written = checkpoints.write(folder, student.tensors(), student.tensors(), student.extra_state())
    assert not written.trouble
    return [folder / name for name in written.files]


def _learner(number: int = 0) -> Learner:
    student = harness.learner(seed=number)
    student.number = number
    return student


def _read(checkpoints: Checkpoints, manifest: dict[str, Any]) -> Learner:
    student = _learner()
    checkpoints.read(manifest, student)
    return student


def _there(run_dir: RunDir) -> set[str]:
    return {folder.name for folder in run_dir.checkpoints.iterdir()}


def _data(files: list[Path]) -> Path:
    return next(path for path in files if path.suffix == ".distcp")


def test_what_the_manifest_names_is_restored_though_newer_files_lie_beside_it(run_dir: RunDir) -> None:
    manifest = _commit(Checkpoints(run_dir, 1, retained=2), run_dir, 4)
    _write(Checkpoints(run_dir, 1, retained=2), run_dir, 5)
    student, expected = _read(Checkpoints(run_dir, 2, retained=2), manifest), _learner(4)
    assert student.number == 4
    assert all(torch.equal(tensor, expected.tensors()[name]) for name, tensor in student.tensors().items())
    assert student.extra_state() == expected.extra_state()


@pytest.mark.parametrize("suffix", [".distcp", ".metadata", ".msgpack", ".json"])
def test_a_flipped_byte_is_noticed_before_anything_is_loaded(run_dir: RunDir, suffix: str) -> None:
    files = _write(Checkpoints(run_dir, 1, retained=2), run_dir, 1)
    manifest = describe(run_dir.path, files)
    damaged = next(path for path in files if path.name.endswith(suffix))
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    student, before = _learner(2), harness.saved(_learner(2))[0]
    with pytest.raises(DamagedCheckpoint, match=re.escape(damaged.name)):
        Checkpoints(run_dir, 2, retained=2).read(manifest, student)
    assert student.number == 2
    assert all(torch.equal(tensor, before[name]) for name, tensor in student.tensors().items())


def test_a_missing_or_a_cut_off_file_is_noticed(run_dir: RunDir) -> None:
    files = _write(Checkpoints(run_dir, 1, retained=2), run_dir, 1)
    manifest, data = describe(run_dir.path, files), _data(files)
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(DamagedCheckpoint):
        verified(run_dir.path, manifest)
    data.unlink()
    with pytest.raises(DamagedCheckpoint, match="No such file"):
        verified(run_dir.path, manifest)


def test_a_manifest_without_our_files_is_refused(run_dir: RunDir) -> None:
    other = fresh_folder(run_dir.checkpoints, 1, 1) / "other.bin"
    other.write_bytes(b"x")
    with pytest.raises(DamagedCheckpoint, match=r"lacks the file \.metadata; it contains \['other\.bin'\]"):
        _read(Checkpoints(run_dir, 1, retained=2), describe(run_dir.path, [other]))


def test_write_error_is_returned_and_a_full_disk_is_distinguished(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    student, checkpoints = _learner(1), Checkpoints(run_dir, 1, retained=2)
    for number, full in ((errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EIO, False)):
        folder = fresh_folder(run_dir.checkpoints, 1, 1)

        def refuse(*_: object, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", refuse)
            written = checkpoints.write(folder, student.tensors(), student.tensors(), student.extra_state())
        assert (written.files, written.disk_full) == ({}, full)
        assert os.strerror(number) in written.trouble
        assert folder.name in written.trouble


def test_each_attempt_has_a_folder_of_its_own_that_tells_its_maker(run_dir: RunDir) -> None:
    folders = [fresh_folder(run_dir.checkpoints, 3, incarnation) for incarnation in (1, 1, 2)]
    assert len(set(folders)) == 3
    assert [incarnation_of(folder.name) for folder in folders] == [1, 1, 2]


def test_a_foreign_name_tells_no_maker() -> None:
    assert [incarnation_of(name) for name in ("step-3", "lost+found", "step-3.x.0", "mine.1.2")] == [None] * 4


def test_a_checkpoint_is_never_written_over_another(run_dir: RunDir) -> None:
    files = _write(Checkpoints(run_dir, 1, retained=2), run_dir, 1)
    student = _learner(2)
    manifest = describe(run_dir.path, files)
    again = Checkpoints(run_dir, 1, retained=2).write(files[0].parent, student.tensors(), student.tensors(), b"")
    assert "File exists" in again.trouble
    assert again.files == {}
    assert verified(run_dir.path, manifest)


def test_the_last_two_commits_are_kept(run_dir: RunDir) -> None:
    checkpoints = Checkpoints(run_dir, 1, retained=2)
    for number in range(1, 5):
        _commit(checkpoints, run_dir, number)
    assert _there(run_dir) == {"step-3.1.0", "step-4.1.0"}


def test_restarted_trainer_keeps_commits_and_removes_garbage(run_dir: RunDir) -> None:
    first = Checkpoints(run_dir, 1, retained=2)
    manifests = [_commit(first, run_dir, number) for number in (1, 2, 3)]
    _write(first, run_dir, 4)  # and killed before the commit
    second = Checkpoints(run_dir, 2, retained=2)
    _read(second, manifests[-1])
    second.remove_garbage()
    assert _there(run_dir) == {"step-2.1.0", "step-3.1.0"}
    _commit(second, run_dir, 4, incarnation=2)
    assert _there(run_dir) == {"step-3.1.0", "step-4.2.0"}


def test_a_fenced_trainer_that_wakes_up_late_harms_nothing_of_its_successor(run_dir: RunDir) -> None:
    fenced, successor = Checkpoints(run_dir, 1, retained=2), Checkpoints(run_dir, 2, retained=2)
    manifest = _commit(fenced, run_dir, 1)
    _read(successor, manifest)
    newest = _commit(successor, run_dir, 2, incarnation=2)
    fenced.remove_garbage()
    Checkpoints(run_dir, 1, retained=2).remove_garbage()  # even one that had not restored anything yet
    assert _read(successor, newest).number == 2


def test_who_goes_on_from_a_snapshot_keeps_the_commits_and_needs_nothing_of_them(
    run_dir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    first = Checkpoints(run_dir, 1, retained=2)
    manifest = [_commit(first, run_dir, number) for number in (1, 2)][-1]
    second = Checkpoints(run_dir, 2, retained=2)
    second.set_committed(manifest)
    second.remove_garbage()
    assert _there(run_dir) == {"step-1.1.0", "step-2.1.0"}
    (run_dir.path / manifest["folder"] / "about.json").write_text("damaged")
    third = Checkpoints(run_dir, 3, retained=2)
    third.set_committed(manifest)
    assert "about.json" in caplog.text
    _commit(third, run_dir, 3, incarnation=3)
    assert _there(run_dir) == {"step-2.1.0", "step-3.3.0"}


def test_what_is_not_a_checkpoint_folder_is_left_alone(run_dir: RunDir) -> None:
    (run_dir.checkpoints / "mine").mkdir()
    _commit(Checkpoints(run_dir, 1, retained=2), run_dir, 1)
    assert "mine" in _there(run_dir)


def test_the_files_of_a_checkpoint_lie_in_one_folder_of_the_run(run_dir: RunDir, tmp_path: Path) -> None:
    files = _write(Checkpoints(run_dir, 1, retained=2), run_dir, 1) + _write(
        Checkpoints(run_dir, 1, retained=2), run_dir, 2
    )
    for wrong in ([], files):
        with pytest.raises(ValueError, match="must be in one folder"):
            describe(run_dir.path, wrong)
    outside = tmp_path / "elsewhere.pt"
    outside.write_bytes(b"")
    with pytest.raises(ValueError, match="not in the subpath"):
        describe(run_dir.path, [outside])
