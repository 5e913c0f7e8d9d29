"""A job folder in which others can put code is refused or doubted, and modules that imports cannot find are named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rrl.api.preflight.job_folder import folder_doubts, unimportable_modules
from rrl.cli import main
from rrl.config.job.document import JobDocument
from rrl.core.run_dir import RUNS_ENV
from rrl.core.types import UsageError
from rrl.tests.support.job_toml import JOB

STRANGER = 54321
"""Uid and gid of nobody on this machine."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a job in ``job/`` and a second job file in ``more/``."""
    monkeypatch.setenv(RUNS_ENV, str(tmp_path / "runs"))
    for name in ("job/job.toml", "job/tasks.py", "job/pack/__init__.py", "job/__pycache__/tasks.pyc", "more/more.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(JOB if name == "job/job.toml" else "")
    (tmp_path / "runs").mkdir()
    return tmp_path


def doubts(place: Path, *, trust: bool = False) -> list[str]:
    files = [place / "job" / "job.toml", place / "more" / "more.toml"]
    return folder_doubts(JobDocument(files), place / "job", trust)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("job", 0o777),
        ("job", 0o1777),
        (".", 0o777),
        ("job/job.toml", 0o666),
        ("job/tasks.py", 0o606),
        ("more", 0o777),
        ("more/more.toml", 0o666),
        ("job/pack", 0o777),
        ("job/__pycache__", 0o777),
    ],
)
def test_what_every_user_may_write_is_refused_unless_it_is_trusted(place: Path, name: str, mode: int) -> None:
    (place / name).chmod(mode)
    says = f"every user may write {(place / name).resolve()}, and so make code run as you"
    with pytest.raises(UsageError) as refused:
        doubts(place)
    assert str(refused.value) == f"{says}; to run this job nevertheless: --trust-folder"
    assert says in doubts(place, trust=True)


@pytest.mark.parametrize(("name", "mode"), [("job", 0o770), (".", 0o2775), ("job/tasks.py", 0o664)])
def test_what_a_group_may_write_is_doubted(place: Path, name: str, mode: int) -> None:
    (place / name).chmod(mode)
    at = (place / name).resolve()
    assert doubts(place)[0] == f"the group {at.group()} may write {at}, and so make code run as you"


def test_folder_of_this_user_in_a_folder_like_tmp_is_not_doubted(place: Path) -> None:
    place.chmod(0o1777)
    assert doubts(place) == []


def test_link_in_a_folder_that_every_user_may_write_is_refused(place: Path) -> None:
    (place / "shared").mkdir()
    (place / "shared" / "link").symlink_to(place / "job")
    (place / "shared").chmod(0o777)
    with pytest.raises(UsageError, match=f"every user may write {place}/shared,"):
        folder_doubts(JobDocument([place / "shared" / "link" / "job.toml"]), place / "shared" / "link", False)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a folder away")
@pytest.mark.parametrize(("name", "shared", "refused"), [("job", True, True), (".", False, True), (".", True, False)])
def test_folder_of_another_user_is_refused_but_a_parent_of_an_own_group_is_doubted(
    place: Path, name: str, shared: bool, refused: bool
) -> None:
    (place / name).chmod(0o755)
    os.chown(place / name, STRANGER, os.getgid() if shared else STRANGER)
    says = f"{(place / name).resolve()} belongs to {STRANGER}, and so make code run as you"
    if refused:
        with pytest.raises(UsageError, match=says):
            doubts(place)
    assert says in doubts(place, trust=True)


@pytest.mark.parametrize(("mode", "doubted"), [(0o700, False), (0o1777, False), (0o777, True)])
def test_folder_of_runs_in_which_others_may_rename_is_doubted(place: Path, mode: int, doubted: bool) -> None:
    (place / "runs").chmod(mode)
    says = f"every user may write {place}/runs, and so exchange run directories: chmod +t"
    assert doubts(place) == ([says] if doubted else [])


def test_modules_with_the_names_of_installed_ones_are_named(place: Path) -> None:
    for name in ("random", "msgspec.old", ".#tasks", "__main__"):  # only the first can be imported
        (place / "job" / f"{name}.py").touch()
    (place / "job" / "msgspec").mkdir()
    (place / "job" / "msgspec" / "__init__.py").touch()
    (place / "job" / "yaml").mkdir()  # without __init__.py an installed package comes first in any case
    names = f"imports find the installed msgspec, random, not what {place}/job has: use other names"
    assert unimportable_modules(place / "job") == [names]


def test_check_refuses_the_folder_in_one_line_and_trusts_it_on_request(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "job").chmod(0o777)
    check = ["check", str(place / "job" / "job.toml"), "--no-task"]
    assert main.run(check) == 2
    assert capsys.readouterr().err.endswith("--trust-folder\n")
    assert main.run([*check, "--trust-folder"]) == 0
    assert "and so make code run as you" in capsys.readouterr().out
