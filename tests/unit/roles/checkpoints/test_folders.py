from __future__ import annotations

from pathlib import Path

import pytest

from rrl.core.run_dir import Attempt, attempt_of
from rrl.roles.checkpoints.folders import as_paths, describe, fresh_folder


def test_each_attempt_has_a_folder_whose_name_states_step_and_incarnation(tmp_path: Path) -> None:
    folders = [fresh_folder(tmp_path, 3, incarnation) for incarnation in (1, 1, 2)]
    assert len(set(folders)) == 3
    assert [attempt_of(folder.name) for folder in folders] == [Attempt(3, 1, 0), Attempt(3, 1, 1), Attempt(3, 2, 0)]


def test_foreign_name_states_no_attempt() -> None:
    assert [attempt_of(name) for name in ("step-3", "lost+found", "step-3.x.0", "mine.1.2")] == [None] * 4


@pytest.mark.parametrize("files", ["state.pt", Path("state.pt"), 3])
def test_files_of_a_checkpoint_that_are_not_a_list_are_refused(files: object) -> None:
    with pytest.raises(TypeError, match="files must be a list of paths, not "):
        as_paths(files)


def test_paths_of_checkpoint_files_may_be_strings() -> None:
    assert as_paths(["a/state.pt"]) == [Path("a/state.pt")]


def test_files_outside_of_the_run_directory_are_refused_with_the_folder_to_use(tmp_path: Path) -> None:
    (tmp_path / "state.pt").write_text("x")
    with pytest.raises(ValueError, match=r"write them into the folder that me.checkpoint_dir\(step\) returns"):
        describe(tmp_path / "run", [tmp_path / "state.pt"])
