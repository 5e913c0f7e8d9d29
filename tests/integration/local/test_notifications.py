"""Real commands send the notifications of a run, each only once even if managers die."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from rrl.core.types import Outcome
from rrl.tests.support.runs import TestRun, check_sound, light_job, submit_here

SECRET = "s3cr3t"
STEPS = 12


def notify(folder: Path) -> str:
    """Return the table [notify] of a command that appends its input to ``received`` in the folder of the job."""
    script = folder / "notify.sh"
    script.write_text("#!/bin/sh\n{ cat; echo; } >> received\n")
    script.chmod(0o755)
    return f'[notify]\ncommand = ["./notify.sh", "{SECRET}"]\n'


def received(folder: Path) -> list[dict[str, Any]]:
    path = folder / "received"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def files_with_the_secret(run: TestRun) -> list[Path]:
    files = [path for path in run.run.path.rglob("*") if path.is_file()]
    return [path for path in files if SECRET.encode() in path.read_bytes()]


def test_run_that_loses_its_manager_notifies_once_that_it_is_complete(tmp_path: Path) -> None:
    run = submit_here(tmp_path, light_job("local", STEPS, spares=0, warm=False, one_node=True, extra=notify(tmp_path)))
    run.wait_steps(3)
    os.kill(json.loads((run.run.epochs / "000001").read_text())["pid"], signal.SIGKILL)
    with run.call("manage", run.run.id):
        state = run.wait_end()
    assert (state.outcome, state.epoch) == (Outcome.COMPLETED, 2)
    (message,) = received(tmp_path)
    assert message["text"] == f"rrl {run.run.id} completed: step {STEPS} of {STEPS} is committed"
    assert (message["kind"], message["step"]) == ("completed", STEPS)
    assert files_with_the_secret(run) == [run.run.job_toml]
    check_sound(run.run)
    run.wait_gone()
