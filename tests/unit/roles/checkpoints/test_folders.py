from __future__ import annotations

from pathlib import Path

from rrl.roles.checkpoints.folders import Attempt, attempt_of, fresh_folder


def test_each_attempt_has_a_folder_whose_name_states_step_and_incarnation(tmp_path: Path) -> None:
    folders = [fresh_folder(tmp_path, 3, incarnation) for incarnation in (1, 1, 2)]
    assert len(set(folders)) == 3
    assert [attempt_of(folder.name) for folder in folders] == [Attempt(3, 1), Attempt(3, 1), Attempt(3, 2)]


def test_foreign_name_states_no_attempt() -> None:
    assert [attempt_of(name) for name in ("step-3", "lost+found", "step-3.x.0", "mine.1.2")] == [None] * 4
