"""A module that job.toml names comes from the job's folder; every other import finds installed packages first."""

from __future__ import annotations

import calendar
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rrl.roles.models.tasks import import_function

CALENDAR = "import calendar, {others}\ndef make(): return calendar.__file__, {others}.__file__, __file__\n"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    before, known = list(sys.path), set(sys.modules)
    yield tmp_path
    sys.path[:] = before
    for name in set(sys.modules) - known:
        del sys.modules[name]


def written(folder: Path, **modules: str) -> Callable[[str], Callable[..., Any]]:
    """Write modules (``__`` in a name separates the folder); return the import of a function."""
    for name, source in modules.items():
        path = folder / f"{name.replace('__', '/', 1)}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
    return lambda name: import_function(name, folder)


@pytest.mark.parametrize(
    ("modules", "name"),
    [
        ({"calendar": CALENDAR}, "calendar:make"),
        ({"rrl_mine__tasks": CALENDAR}, "rrl_mine.tasks:make"),
        ({"calendar____init__": "", "calendar__tasks": CALENDAR}, "calendar.tasks:make"),
        ({"calendar____init__": "from .tasks import make", "calendar__tasks": CALENDAR}, "calendar:make"),
        ({"rrl_mine": CALENDAR, "calendar": "raise SystemExit"}, "rrl_mine:make"),
        ({"rrl_own____init__": "", "rrl_own__tasks": CALENDAR, "calendar": "raise SystemExit"}, "rrl_own.tasks:make"),
    ],
    ids=["as installed", "folder", "package", "re-exported", "other name", "package of another name"],
)
def test_named_module_is_the_folders_and_its_imports_are_installed_first_then_the_folders(
    folder: Path, modules: dict[str, str], name: str
) -> None:
    sources = {key: text.format(others="rrl_helper") for key, text in modules.items()}
    make = written(folder, rrl_helper="", **sources)(name)
    installed, helper, own = make()
    assert installed == calendar.__file__ == sys.modules["calendar"].__file__
    assert (helper, Path(own).is_relative_to(folder)) == (str(folder / "rrl_helper.py"), True)
    assert import_function(name, folder) is make
    assert sys.path.index(str(folder)) == len(sys.path) - 1


def test_installed_module_is_used_if_the_folder_has_none_of_its_name(folder: Path) -> None:
    assert written(folder, calendar__data="")("calendar:isleap") is calendar.isleap


def test_objects_of_the_module_reach_spawned_processes(folder: Path) -> None:
    point = written(folder, rrl_points="class Point:\n    pass\n")("rrl_points:Point")()
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        assert type(pool.apply(pickle.loads, (pickle.dumps(point),))).__name__ == "Point"


def test_programs_of_the_users_code_find_the_modules_beside_their_script(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reward of a code task often runs a test that imports the answer from the same folder."""
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    written(folder, rrl_answer="", rrl_test="import rrl_answer", rrl_scorer="def score(): pass")("rrl_scorer:score")
    subprocess.run([sys.executable, str(folder / "rrl_test.py")], check=True, env=dict(os.environ))
