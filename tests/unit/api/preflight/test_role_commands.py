"""``rrl check`` reports commands of roles that are missing on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from rrl.api.preflight.role_commands import command_problems
from rrl.config.job.resolve import resolve
from rrl.config.job.schema import Job
from rrl.manager.bootstrap.preflight import Problem


def problems(folder: Path, command: list[str], kind: str = "local", **tables: Any) -> list[Problem]:
    table = {
        "run": {"name": "test"},
        "cluster": {"kind": kind},
        "commands": {"judge": {"command": command, **tables.pop("role", {})}},
        **tables,
    }
    job = Job.model_validate(table)
    return command_problems(job, resolve(job, "/usr/bin/python3"), folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "judge.py").write_text("#!/usr/bin/env python3\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "judge").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "judge").chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        ["sh", "-c", "no such file"],
        ["bin/judge"],
        ["./bin/judge", "no-such-file"],
        ["python3", "judge.py"],
        ["python3", "-m", "judge"],
        ["/bin/sh", "judge.py"],
    ],
)
def test_command_that_can_be_started_is_accepted(folder: Path, command: list[str]) -> None:
    assert problems(folder, command) == []


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (["juge"], 'there is no command "juge" in PATH'),
        (["judge.py"], 'there is no command "judge.py" in PATH; for the file in {} write "python", "judge.py"'),
        (["./juge.py"], '"./juge.py" does not exist in {}, the folder of job.toml; did you mean "judge.py"?'),
        (["./judge.py"], '"./judge.py" is not executable; run chmod +x on it, or name its interpreter first'),
        (["./bin"], '"./bin" is a folder'),
        (["/no/such/program"], '"/no/such/program" does not exist'),
        (["python3", "juge.py"], '"juge.py" does not exist in {}, the folder of job.toml; did you mean "judge.py"?'),
        (["bash", "other/run.sh"], '"other/run.sh" does not exist in {}, the folder of job.toml'),
    ],
)
def test_command_that_cannot_be_started_is_named(folder: Path, command: list[str], text: str) -> None:
    assert problems(folder, command) == [Problem(("commands", "judge", "command"), text.format(folder))]


@pytest.mark.parametrize(
    ("files", "command", "text"),
    [
        ({"a.py": "x = 1\nwith x\n"}, ["{}", "a.py"], "a.py:2: expected ':'"),
        ({"a.py": "return 1\n"}, ["{}", "-u", "a.py", "--x"], "a.py:1: 'return' outside function"),
        ({"sub/a.py": "import b\n", "sub/b.py": "x = (\n"}, ["{}", "sub/a.py"], "sub/b.py:1: '(' was never closed"),
        ({"p/a.py": "\0"}, ["{}", "-m", "p.a"], "p/a.py:1: source code string cannot contain null bytes"),
        ({"a.py": b"# \xe9\n"}, ["{}", "a.py"], "a.py:1: "),
    ],
)
def test_syntax_error_in_a_python_file_of_a_command_is_named(
    folder: Path, files: dict[str, str | bytes], command: list[str], text: str
) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (found,) = problems(folder, [word.format(sys.executable) for word in command])
    assert found.text.startswith(text)
    assert found.certain
    (other,) = problems(folder, ["env", *[word.format("python") for word in command]])
    assert not other.certain, "another interpreter may know another syntax"


def test_files_of_a_command_are_compiled_and_not_run(folder: Path, recwarn: pytest.WarningsRecorder) -> None:
    text = "import missing, judge\nfrom os import path\nopen('run', 'w')\nif 1 is 1: pass\n"
    (folder / "judge.py").write_text(text)
    assert problems(folder, ["python3", "judge.py"]) == []
    assert not (folder / "run").exists()
    assert not list(folder.glob("__pycache__"))
    assert [str(one.message) for one in recwarn if one.category is SyntaxWarning] == []


def test_file_that_hides_the_package_rrl_is_named(folder: Path) -> None:
    (folder / "rrl.py").write_text("")
    [problem] = problems(folder, ["sh"])
    assert problem.text.startswith(f"rrl.py in {folder} hides the package rrl")


def test_path_of_the_role_determines_which_commands_are_found(folder: Path) -> None:
    assert problems(folder, ["judge"], role={"env": {"PATH": str(folder / "bin")}}) == []
    assert problems(folder, ["sh"], role={"env": {"PATH": str(folder / "bin")}}) != []


def test_setup_that_may_change_path_limits_the_check_to_files(folder: Path) -> None:
    env = {"setup": ["module load judge"]}
    assert problems(folder, ["juge"], env=env) == []
    assert problems(folder, ["./juge"], env=env) != []


def test_missing_file_is_uncertain_and_a_command_unknown_on_a_slurm_cluster(folder: Path) -> None:
    assert problems(folder, ["juge"], "slurm") == []
    (found,) = problems(folder, ["python", "juge.py"], "slurm")
    assert not found.certain


def test_command_in_a_container_is_not_looked_for(folder: Path) -> None:
    role = {"launcher": "apptainer", "image": "judge.sif"}
    assert problems(folder, ["/opt/judge"], role=role) == []


def test_missing_interpreter_of_the_built_in_roles_is_named_once(folder: Path) -> None:
    job = Job.model_validate(
        {
            "run": {"name": "test", "steps": 1},
            "model": {"tokenizer": {"pieces": "01"}},
            "task": {"function": "mine:make"},
        }
    )
    assert command_problems(job, resolve(job, "/no/python"), folder) == [
        Problem(("env", "python"), '"/no/python" does not exist')
    ]
