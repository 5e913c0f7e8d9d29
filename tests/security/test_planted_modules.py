"""Python modules that another user has put into the working folder or the job's folder never run as the owner."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from shutil import rmtree

import pytest

from rrl.core.run_dir import RUNS_ENV, RunDir
from rrl.tests.support.plain_user import PlainUser, popen_as
from rrl.tests.support.runs import RRL, TestRun, light_job, write_job
from rrl.tests.support.supervisor import end_runs_with_caller

TIMEOUT_S = 300.0
PLANTED = (
    *("asyncio", "calendar", "getpass", "inspect", "json", "logging", "pickle", "random", "socket", "subprocess"),
    *("tempfile", "tomllib", "uuid", "sitecustomize", "usercustomize", "submitit", "cloudpickle", "msgspec", "numpy"),
    *("psutil", "pydantic", "reasoning_gym", "rich", "rrl", "torch", "transformers", "typer", "yaml", "zmq"),
)
"""Modules that processes of rrl import, or that Python itself would import."""
NOTIFY = '[notify]\non = ["completed"]\ncommand = ["true"]\n'


@pytest.fixture
def folder(attacker: PlainUser) -> Iterator[Path]:
    """Yield a folder of the attacker in which every user may write, with planted modules that leave a mark."""
    path = Path(tempfile.mkdtemp(prefix="rrl-planted-", dir="/tmp"))
    path.chmod(0o777)
    (path / "marks").mkdir()
    (path / "marks").chmod(0o777)

    def plant() -> None:
        for name in PLANTED:
            mark = f"import os\nopen('{path}/marks/{name}.' + str(os.getpid()), 'w').close()\nraise SystemExit(9)\n"
            (path / f"{name}.py").write_text(mark)

    attacker.call(plant, TIMEOUT_S)
    yield path
    rmtree(path)


@pytest.mark.parametrize("where", ["working folder", "job's folder"])
def test_planted_modules_never_run(owner: PlainUser, folder: Path, where: str) -> None:
    place = folder if where == "job's folder" else owner.home / "planted"
    runs = owner.home / "runs"

    def rrl(*argv: str, **_: object) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return popen_as(owner.name, (RRL, *argv), owner.environment(**{RUNS_ENV: str(runs)}), folder, pipe, pipe, pipe)

    def called(*argv: str) -> tuple[int, str, str]:
        process = rrl(*argv)
        out, err = process.communicate(timeout=TIMEOUT_S)
        return process.returncode, out, err

    def write() -> None:
        place.mkdir(exist_ok=True)
        write_job(place, light_job("local", 2, rollouts=1, spares=0, warm=False, one_node=True, extra=NOTIFY))

    end_runs_with_caller(runs)
    owner.call(write, TIMEOUT_S)
    job, trust = str(place / "job.toml"), ["--trust-folder"] if place == folder else []
    if trust:
        (folder / "rrl.py").unlink()  # such a file is refused in any folder, for the user's own programs
        for command in ("check", "submit"):
            code, out, err = called(command, job)
            assert (code, out) == (2, "")
            assert (
                err == f"rrl: every user may write {folder}, and so make code run as you; to run this job"
                " nevertheless: --trust-folder\n"
            )
    code, out, err = called("check", job, *trust)
    assert (code, "the task, tried on this machine" in out) == (0, True), out + err
    assert ("imports find the installed asyncio, calendar, " in out) is bool(trust), out
    code, out, err = called("submit", job, *trust, "--json")
    assert code == 0, err
    run = TestRun(RunDir(runs / json.loads(out)["run"]), rrl)
    assert run.wait_end(TIMEOUT_S).outcome == "completed"
    run.wait_gone()
    code, out, err = called("resume", run.run.id, "--steps", "3", *trust)
    assert code == 0, err
    run.wait_resumed()
    assert run.wait_end(TIMEOUT_S).step == 3
    run.wait_gone()
    assert sorted(path.name for path in (folder / "marks").iterdir()) == []


def test_every_module_of_rrl_is_started_without_the_working_folder_in_its_path() -> None:
    """No program of the product starts Python without ``-P`` (the user's own commands excepted)."""
    root = Path(__file__).parents[2]
    listed = subprocess.check_output(["git", "ls-files", "*.py"], cwd=root, text=True).split()
    product = [name for name in listed if name.partition("/")[0] not in ("tests", "benchmarks", "docs")]
    for name in product:
        for line in (root / name).read_text().splitlines():
            if '"-m", ' in line or ('sys.executable, "-' in line):
                assert '"-P"' in line, f"{name}: {line}"
