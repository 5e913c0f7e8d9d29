from __future__ import annotations

import errno
import io
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystem

from rrl.core.run_dir import RunDir
from rrl.roles.checkpoints.folders import DamagedCheckpoint, describe, fresh_folder, verified
from rrl.roles.trainer.checkpoint import Checkpoints
from rrl.roles.trainer.learner import Learner
from rrl.tests.support.roles.trainer import harness

pytestmark = pytest.mark.torch


class _AlmostFull(io.FileIO):
    """A file on a disk with 700 free bytes."""

    def write(self, data: Any) -> int:
        self.written = getattr(self, "written", 0) + len(data)
        if self.written > 700:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.create()
    return made


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


def _data(files: list[Path]) -> Path:
    return next(path for path in files if path.suffix == ".distcp")


def test_files_of_the_manifest_are_restored_although_newer_files_exist(run_dir: RunDir) -> None:
    manifest = describe(run_dir.path, _write(Checkpoints(run_dir), run_dir, 4))
    _write(Checkpoints(run_dir), run_dir, 5)
    student, expected = _read(Checkpoints(run_dir), manifest), _learner(4)
    assert student.number == 4
    assert all(torch.equal(tensor, expected.tensors()[name]) for name, tensor in student.tensors().items())
    assert student.extra_state() == expected.extra_state()


@pytest.mark.parametrize("suffix", [".distcp", ".metadata", ".msgpack", ".json"])
def test_a_flipped_byte_is_noticed_before_anything_is_loaded(run_dir: RunDir, suffix: str) -> None:
    files = _write(Checkpoints(run_dir), run_dir, 1)
    manifest = describe(run_dir.path, files)
    damaged = next(path for path in files if path.name.endswith(suffix))
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    student, before = _learner(2), harness.saved(_learner(2))[0]
    with pytest.raises(DamagedCheckpoint, match=re.escape(damaged.name)):
        Checkpoints(run_dir).read(manifest, student)
    assert student.number == 2
    assert all(torch.equal(tensor, before[name]) for name, tensor in student.tensors().items())


def test_missing_or_truncated_file_is_detected(run_dir: RunDir) -> None:
    files = _write(Checkpoints(run_dir), run_dir, 1)
    manifest, data = describe(run_dir.path, files), _data(files)
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(DamagedCheckpoint):
        verified(run_dir.path, manifest)
    data.unlink()
    with pytest.raises(DamagedCheckpoint, match="No such file"):
        verified(run_dir.path, manifest)


def test_manifest_without_torchs_metadata_is_refused(run_dir: RunDir) -> None:
    other = fresh_folder(run_dir.checkpoints, 1, 1) / "other.bin"
    other.write_bytes(b"x")
    with pytest.raises(DamagedCheckpoint, match=r"lacks the file \.metadata; it contains \['other\.bin'\]"):
        _read(Checkpoints(run_dir), describe(run_dir.path, [other]))


def test_write_error_is_returned_and_a_full_disk_is_distinguished(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    student, checkpoints = _learner(1), Checkpoints(run_dir)
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


def test_full_disk_is_recognised_behind_the_error_of_torchs_archive_writer(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch replaces the error of the disk by "unexpected pos 704 vs 598"."""
    monkeypatch.setattr(FileSystem, "create_stream", lambda *_: _AlmostFull("/dev/null", "wb"))
    student, folder = _learner(1), fresh_folder(run_dir.checkpoints, 1, 1)
    written = Checkpoints(run_dir).write(folder, student.tensors(), student.tensors(), student.extra_state())
    assert (written.files, written.disk_full) == ({}, True)
    assert "No space left on device" in written.trouble


def test_checkpoint_never_overwrites_another_one(run_dir: RunDir) -> None:
    files = _write(Checkpoints(run_dir), run_dir, 1)
    student = _learner(2)
    manifest = describe(run_dir.path, files)
    again = Checkpoints(run_dir).write(files[0].parent, student.tensors(), student.tensors(), b"")
    assert "File exists" in again.trouble
    assert again.files == {}
    assert verified(run_dir.path, manifest)


def test_new_reference_replaces_those_of_earlier_incarnations(run_dir: RunDir) -> None:
    unused, later = (fresh_folder(run_dir.checkpoints, 0, incarnation) for incarnation in (1, 3))
    kept = fresh_folder(run_dir.checkpoints, 1, 1)
    model = _learner().model
    folder = fresh_folder(run_dir.checkpoints, 0, 2)
    files = Checkpoints(run_dir).save_reference(folder, model, torch.float32)
    assert not unused.exists()
    assert kept.exists()
    assert later.exists(), "a fenced trainer that wakes up late has deleted a folder of its successor"
    assert verified(run_dir.path, {"folder": files.folder, "files": files.files})


def test_files_of_a_checkpoint_must_be_in_one_folder_of_the_run(run_dir: RunDir, tmp_path: Path) -> None:
    files = _write(Checkpoints(run_dir), run_dir, 1) + _write(Checkpoints(run_dir), run_dir, 2)
    for wrong in ([], files):
        with pytest.raises(ValueError, match="must be in one folder"):
            describe(run_dir.path, wrong)
    outside = tmp_path / "elsewhere.pt"
    outside.write_bytes(b"")
    with pytest.raises(ValueError, match="must be in the run directory"):
        describe(run_dir.path, [outside])
