from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from rrl.core.run_dir import RunDir
from rrl.roles.checkpoints.folders import DamagedCheckpoint, describe, fresh_folder, verified
from rrl.roles.checkpoints.stored_tensors import INDEX, UnreadableTensors
from rrl.roles.launcher.end_report import Unrepairable
from rrl.roles.trainer.checkpoint import Checkpoints, read_tensors
from rrl.roles.trainer.learner import Learner
from rrl.tests.support.roles.trainer import harness

pytestmark = pytest.mark.torch


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


def test_files_of_the_manifest_are_restored_although_newer_files_exist(run_dir: RunDir) -> None:
    manifest = describe(run_dir.path, _write(Checkpoints(run_dir), run_dir, 4))
    _write(Checkpoints(run_dir), run_dir, 5)
    student, expected = _read(Checkpoints(run_dir), manifest), _learner(4)
    assert student.number == 4
    assert all(torch.equal(tensor, expected.tensors()[name]) for name, tensor in student.tensors().items())
    assert student.extra_state() == expected.extra_state()


@pytest.mark.parametrize("name", ["weights-0.safetensors", "moments-0.safetensors", INDEX, "rank-0.msgpack"])
def test_a_flipped_byte_is_noticed_before_anything_is_loaded(run_dir: RunDir, name: str) -> None:
    files = _write(Checkpoints(run_dir), run_dir, 1)
    manifest = describe(run_dir.path, files)
    damaged = next(path for path in files if path.name == name)
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
    manifest, data = describe(run_dir.path, files), files[0].with_name("weights-0.safetensors")
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(DamagedCheckpoint):
        verified(run_dir.path, manifest)
    data.unlink()
    with pytest.raises(DamagedCheckpoint, match="No such file"):
        verified(run_dir.path, manifest)


@pytest.mark.parametrize(
    ("names", "why"),
    [
        ([".metadata", "about.json", "__0_0.distcp"], "an older rrl wrote it in torch's format; export it with rrl at"),
        (["other.bin"], "resume the run with the trainer that wrote it"),
    ],
)
def test_checkpoint_that_this_trainer_did_not_write_ends_the_run(run_dir: RunDir, names: list[str], why: str) -> None:
    folder = fresh_folder(run_dir.checkpoints, 1, 1)
    for name in names:
        (folder / name).write_bytes(b"x")
    with pytest.raises(Unrepairable, match=r"step-1\.1\.0 lacks rrl_tensors\.json") as caught:
        _read(Checkpoints(run_dir), describe(run_dir.path, list(folder.iterdir())))
    assert caught.value.why.startswith(why)


@pytest.mark.parametrize(("shape", "found"), [((3,), r"the shape \(32,\)"), (None, "no such tensor")])
def test_tensor_that_does_not_fit_the_model_is_named(
    run_dir: RunDir, shape: tuple[int, ...] | None, found: str
) -> None:
    files = _write(Checkpoints(run_dir), run_dir, 1)
    name = "model.model.norm.weight" if shape else "model.other"
    with pytest.raises(UnreadableTensors, match=rf"{name} has the shape \(3,\) in the model; the files have {found}"):
        read_tensors({name: torch.zeros(3)}, files[0].parent, {path.name for path in files})


def test_checkpoint_is_written_in_less_memory_than_one_tensor_takes(run_dir: RunDir) -> None:
    tensors = {f"{prefix}w": torch.ones(2**13, 2**10) for prefix in ("model.", "exp_avg.")}
    folder = fresh_folder(run_dir.checkpoints, 1, 1)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _memory("VmRSS")
    assert not Checkpoints(run_dir).write(folder, tensors, tensors, b"").trouble
    assert _memory("VmHWM") - before < tensors["model.w"].nbytes / 2


def _memory(line: str) -> int:
    """Return a value of this process's memory in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(one for one in lines if one.startswith(line)).split()[1]) * 1024


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
