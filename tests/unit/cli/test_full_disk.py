"""On a full file system, every command that writes reports it in one line and changes nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from rrl.core.run_dir import RUNS_ENV
from rrl.core.types import Outcome
from rrl.manager.storage.space_reserve import RELEASE_BYTES, RESERVE_BYTES, fill_reserve
from rrl.tests.support.cli.story import Story, job_view
from rrl.tests.support.manager.jobs import job
from rrl.tests.support.mounts import own_mounts
from rrl.tests.support.runs import light_job
from rrl.transport.keys import RunKeys

DEADLINE_S = 120.0
"""Time limit for one command (s). A command takes only a few seconds."""
_IN_A_FULL_FILE_SYSTEM = """
import os, subprocess, sys
from pathlib import Path
from rrl.tests.unit.cli import test_full_disk

disk = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(disk)], check=True)
test_full_disk.write_runs(disk)
with open(disk / "filler", "wb", buffering=0) as filler:
    try:
        while filler.write(bytes(4096)):
            pass
    except OSError:
        pass
os.execv(sys.executable, [sys.executable, "-c", *sys.argv[2:]])
"""


def write_runs(root: Path) -> None:
    """Write three runs: one without a manager, a cancelled one, and one without a manager but with a space reserve."""
    allowing = structs.replace(job_view(), faults_allowed=True)
    cancelled = Story("over-1").works().ends(Outcome.CANCELLED, "somebody asked")
    for made in (Story("mine-1", allowing).works().written(root), cancelled.written(root)):
        RunKeys.make().save(made.keys)
        made.run_spec.write_bytes(msgspec.json.encode(job()))
        made.job_toml.write_text(light_job("local", 40))
        made.resolved.write_text(json.dumps({"source": "/nowhere/job.toml", "job": {}}))
    fill_reserve(Story("reserved-1").works().written(root))


@pytest.mark.skipif(not own_mounts(), reason="this machine does not permit mounts")
@pytest.mark.parametrize(
    "command",
    [
        ["inject", "mine-1", "kill"],
        *(
            pytest.param(command, marks=pytest.mark.long)
            for command in (["manage", "mine-1"], ["cancel", "mine-1"], ["submit", "JOB"], ["resume", "over-1"])
        ),
        pytest.param(["submit", "JOB", "--foreground"], marks=pytest.mark.long),
    ],
)
def test_a_command_on_a_full_disk_ends_with_one_line(tmp_path: Path, command: list[str]) -> None:
    done = run_on_a_full_disk(tmp_path, command)
    assert done.returncode in (1, 2), done.stderr
    assert "No space left on device" in done.stderr
    assert done.stderr.startswith("rrl: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stdout == ""


@pytest.mark.skipif(not own_mounts(), reason="this machine does not permit mounts")
def test_cancel_on_a_full_disk_takes_its_space_from_the_reserve(tmp_path: Path) -> None:
    script = (
        "from rrl.cli.main import run; from rrl.core.run_dir import RunDir, runs_root;"
        "code = run(['cancel', 'reserved-1', '--no-wait']); found = RunDir(runs_root() / 'reserved-1');"
        "print(code, len(list(found.mailbox.iterdir())), found.space_reserve.stat().st_size)"
    )
    done = run_on_a_full_disk(tmp_path, [], script)
    left = RESERVE_BYTES - RELEASE_BYTES
    assert done.stdout.splitlines() == ["reserved-1: its manager is asked to end it", f"0 1 {left}"], done.stderr


def run_on_a_full_disk(
    tmp_path: Path, command: list[str], script: str = "from rrl.cli.main import main; main()"
) -> subprocess.CompletedProcess[str]:
    disk, job_toml = tmp_path / "disk", tmp_path / "job.toml"
    disk.mkdir()
    job_toml.write_text(light_job("local", 40))
    for source in (Path(__file__).parents[2] / "support" / "light_roles").glob("*_task.py"):
        (tmp_path / source.name).write_text(source.read_text())
    arguments = [str(job_toml) if word == "JOB" else word for word in command]
    argv = [*own_mounts(), sys.executable, "-c", _IN_A_FULL_FILE_SYSTEM, str(disk), script, *arguments]
    env = {**os.environ, RUNS_ENV: str(disk), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=DEADLINE_S)
