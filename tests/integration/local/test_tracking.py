"""Each tracker gets every step of a run once, even if trackers or managers are killed.

A tracker that fails causes one line in the log.
"""

from __future__ import annotations

import csv
import io
import json
import subprocess
from pathlib import Path

import pytest

from rrl.manager.tracking.tracker_files import read_progress
from rrl.tests.support.runs import LIGHT, RRL, check_sound, light_job, submit_here
from rrl.tests.support.trackers.killed_run import (
    KEY,
    MANY_STEPS,
    TRACKERS,
    marked_processes,
    play,
    tracked_job,
    wait_until,
)
from rrl.tests.support.trackers.sent_steps import check_once_each, mlflow_runs, sent

pytestmark = pytest.mark.long


@pytest.mark.timeout(600)
def test_every_step_is_tracked_once_after_kills_of_trackers_and_manager_and_a_resume(tmp_path: Path) -> None:
    run = play(tmp_path, kills=3)
    steps = run.state().step
    for tracker in TRACKERS:
        check_once_each(sent(run.run, tracker, "reward"), steps)
        assert read_progress(run.run, tracker).finished
    assert len(mlflow_runs(run.run.trackers / "mlflow")[1]) == 1
    assert list(marked_processes(run.run)) == [], "a tracker process has outlived the run"
    written = (path for path in run.run.path.rglob("*") if path.is_file() and not path.is_symlink())
    files = [path for path in written if KEY.encode() in path.read_bytes()]
    launches = [path for path in files if path.parent == run.run.steps and path.suffix == ".launch"]
    assert launches
    assert sorted(files) == sorted([run.run.passed_env, *launches]), "the API key is in another file of the run"
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    check_sound(run.run)

    out = run.call("metrics", run.run.id, stdout=subprocess.PIPE).communicate(timeout=60)[0]
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["step"] for row in rows if row["step"] is not None] == list(range(1, steps + 1))
    kinds = {mark["kind"] for row in rows for mark in row["marks"]}
    assert kinds >= {"manager", "resumed", "ended"}


def test_tracker_that_refuses_is_logged_in_one_line_and_its_steps_are_sent_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://nowhere")
    run = submit_here(tmp_path, tracked_job(MANY_STEPS, ("mlflow",)))

    def logged() -> list[str]:
        log = "".join(path.read_text() for path in run.run.submit.glob("*.err"))
        return [line for line in log.splitlines() if "tracker mlflow" in line]

    wait_until(run, lambda: bool(logged()))
    run.wait_steps(run.state().step + 5)
    with run.call("cancel", run.run.id) as process:
        assert process.wait(120) == 0
    run.wait_gone(60.0)
    steps = run.state().step
    failed, unsent = logged()
    assert "nonsense" in failed
    assert unsent.endswith(f"rrl track {run.run.id} --to mlflow")

    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    done = subprocess.run([RRL, "track", str(run.run.path), "--to", "mlflow"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"mlflow: step {steps}; file://")
    check_once_each(sent(run.run, "mlflow", "reward"), steps)


def test_metrics_and_logged_values_of_a_run_that_goes_on_are_followed_to_its_end(tmp_path: Path) -> None:
    program, commit = (LIGHT / "light_trainer.py").read_text(), "me.commit(step, [file], metrics)"
    assert commit in program
    logging = f"me.log(first=step); me.log(second=-step); {commit}"
    (tmp_path / "my_trainer.py").write_text(program.replace(commit, logging))
    run = submit_here(
        tmp_path,
        light_job("local", 25, spares=0, warm=False, one_node=True).replace(
            f"{LIGHT}/light_trainer.py", "my_trainer.py"
        ),
    )
    process = run.call("metrics", run.run.id, "--follow", "--csv", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [row["step"] for row in rows] == [str(step) for step in range(1, 26)]
    assert all(float(row["tokens_per_second"]) > 0 for row in rows)
    assert all(float(row["seconds_train"]) > 0 for row in rows)
    logged = [(row["step"], row["trainer/0/first"], row["trainer/0/second"]) for row in rows]
    assert logged == [(step, f"{step}.0", f"-{step}.0") for step, *_ in logged], (
        "values were not logged with the step of the commit that follows them"
    )
