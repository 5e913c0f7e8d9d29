"""Plays a local run that is resumed once, whose trackers are killed repeatedly and whose manager is killed once."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rrl.core.run_dir import RunDir
from rrl.manager.storage.lease import holder
from rrl.manager.tracking.tracker_files import TRACKER_ENV, log_file, read_progress
from rrl.tests.support.runs import TIMEOUT_S, TestRun, light_job, submit_here

TRACKERS = ("tensorboard", "wandb", "mlflow")
STEPS_AFTER_RESUME = 10
MANY_STEPS = 100_000
"""Number of steps of the job: more than the run trains before it is cancelled."""
KEY_ENV, KEY = "TRACKER_TEST_KEY", "key-5a17c9"
"""An environment variable that the job passes to the trackers, as it would pass WANDB_API_KEY, and its value."""


def tracked_job(steps: int, trackers: tuple[str, ...], extra: str = "") -> str:
    names = ", ".join(f'"{name}"' for name in trackers)
    passed = f'[env]\npassed = ["{KEY_ENV}", "WANDB_MODE", "MLFLOW_TRACKING_URI"]\n'
    return light_job("local", steps, spares=0, warm=False, extra=f"[track]\nto = [{names}]\n{extra}{passed}")


def play(folder: Path, kills: int) -> TestRun:
    """Play the run, and return it after its end.

    Each tracker is killed ``kills`` times; the run is cancelled and resumed.
    """
    os.environ |= {"WANDB_MODE": "offline", KEY_ENV: KEY}
    run = submit_here(folder, tracked_job(MANY_STEPS, TRACKERS))
    run.wait_steps(1)
    for _ in range(kills):
        wait_for_more(run)
        for pid in list(tracker_pids(run.run)):
            os.kill(pid, signal.SIGKILL)
    wait_for_more(run)
    managing = holder(run.run)
    assert managing is not None
    os.kill(managing.pid, signal.SIGKILL)
    with run.call("manage", run.run.id, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
        run.wait(lambda state: state.epoch == 2)
        wait_for_more(run)
        _done(run, "cancel", run.run.id)
    run.wait_gone(60.0)
    steps = run.state().step + STEPS_AFTER_RESUME
    _done(run, "resume", run.run.id, "--steps", str(steps))
    run.wait_resumed()
    state = run.wait_end()
    assert state.step == steps, state.why
    run.wait_gone(60.0)
    return run


def wait_for_more(run: TestRun) -> None:
    """Wait until each tracker has received a step that it does not have now."""
    before = {name: read_progress(run.run, name).step for name in TRACKERS}
    wait_until(run, lambda: all(read_progress(run.run, name).step > step for name, step in before.items()))


def wait_until(run: TestRun, condition: Callable[[], bool]) -> None:
    until = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > until:
            outputs = [log_file(run.run, name) for name in TRACKERS]
            raise AssertionError("\n".join(path.read_text()[-2000:] for path in outputs if path.exists()))
        time.sleep(0.05)


def tracker_pids(run: RunDir) -> Iterator[int]:
    """Yield the pids of the trackers' processes, without the processes that these started."""
    return (pid for pid, command in marked_processes(run) if b"rrl.manager.tracking.main" in command)


def marked_processes(run: RunDir) -> Iterator[tuple[int, bytes]]:
    """Yield pid and command line of each process that belongs to a tracker of the run."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environ, command = (entry / "environ").read_bytes(), (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if f"{TRACKER_ENV}={run.path}/".encode() in environ:
                yield int(entry.name), command


def _done(run: TestRun, *argv: str) -> None:
    process = run.call(*argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    out, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, out
