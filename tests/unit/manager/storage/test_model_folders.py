"""The newest checkpoint of a run and its exports are found by the names of their folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from rrl.core.run_dir import RunDir
from rrl.manager.storage.model_folders import ModelFolder, ModelFolders, model_folders


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.create()
    return made


def test_newest_committed_checkpoint_is_found_among_attempts(run: RunDir) -> None:
    names = ("step-0.1.0", "step-9.1.0", "step-10.1.0", "step-10.2.0", "step-10.2.1", "step-11.2.0", "step-99", "mine")
    for name in names:
        (run.checkpoints / name).mkdir()
    found = model_folders(run, 10).checkpoint
    assert found == ModelFolder(10, str(run.checkpoints / "step-10.2.1"))
    found = model_folders(run, 8).checkpoint
    assert found is None, "the reference model of step 0 counts as a checkpoint"


def test_export_of_a_step_is_found_once_it_is_complete(run: RunDir) -> None:
    for name in ("step-9", "step-10", ".step-11.manager"):
        (run.exports / name).mkdir(parents=True)
    run.export_failure.write_text("step 11: the disk is full\n")
    exported = ModelFolder(10, str(run.export_of(10)))
    assert model_folders(run, 12) == ModelFolders(export=exported, export_failure="step 11: the disk is full")


def test_run_without_checkpoints_or_without_its_folder_has_none(run: RunDir) -> None:
    assert model_folders(run, 3) == ModelFolders()
    assert model_folders(RunDir(run.path / "none"), 3) == ModelFolders()
