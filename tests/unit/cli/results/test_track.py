"""``rrl track`` sends the steps of a run on request, or prints why it cannot."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import msgspec
import pytest

from rrl.cli import main
from rrl.cli.results import track as command
from rrl.core.run_dir import RUNS_ENV, RunDir
from rrl.core.run_spec import TrackSpec
from rrl.core.types import Outcome
from rrl.tests.support.cli.story import Story, job_view
from rrl.tests.support.trackers.sent_steps import check_once_each, sent

RUN = "small-1120-064114"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """Return a run of twelve steps that has ended, and whose job names TensorBoard."""
    monkeypatch.setenv(RUNS_ENV, str(tmp_path))
    job = msgspec.structs.replace(job_view(12), track=TrackSpec(to=("tensorboard",)))
    run = Story(RUN, job).works().ends(Outcome.COMPLETED, "all steps are done").written(tmp_path)
    run.resolved.write_bytes(msgspec.json.encode({"job": {"run": {"name": "small"}}}))
    return run


def test_a_run_that_has_ended_is_sent_to_the_tracker_of_its_job(run: RunDir, capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert main.run(["track", RUN]) == 0
        assert capfd.readouterr().out == f"tensorboard: step 12; tensorboard --logdir {run.trackers}/tensorboard\n"
    check_once_each(sent(run, "tensorboard", "reward"), 12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--to", "comet"), '--to: no tracker "comet"; there are tensorboard, wandb, mlflow'),
        (("--to", "tensorboard,comet"), '--to: no tracker "comet"; there are tensorboard, wandb, mlflow'),
    ],
)
def test_an_unknown_tracker_is_refused(
    run: RunDir, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert main.run(["track", RUN, *arguments]) == 2
    assert capsys.readouterr().err == f"rrl: {message}\n"
    assert not run.trackers.exists()


def test_a_tracker_must_be_named_if_the_job_names_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(RUNS_ENV, str(tmp_path))
    Story(RUN, job_view(12)).works().written(tmp_path)
    assert main.run(["track", RUN]) == 2
    assert capsys.readouterr().err == f"rrl: the job of {RUN} names no tracker; write for example: --to tensorboard\n"


def test_a_missing_package_is_named_with_its_extra(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert main.run(["track", RUN, "--to", "wandb"]) == 2
    assert capsys.readouterr().err == (
        "rrl: the package wandb is not installed here; pip install '.[wandb]' in rrl's clone\n"
    )


def test_tracker_in_use_by_another_process_is_left_to_it(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    run.trackers.mkdir()
    lock = os.open(run.trackers / "tensorboard.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert main.run(["track", RUN]) == 1
    os.close(lock)
    assert capsys.readouterr().err == (
        f"rrl: tensorboard: another process sends the steps of {RUN} there, for example the process of its manager\n"
    )


def test_a_tracker_that_refuses_is_one_line_with_its_reason(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://x")
    assert main.run(["track", RUN, "--to", "mlflow"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("rrl: mlflow: UnsupportedModelRegistryStoreURIException: ") or "nonsense" in err
    assert err.count("\n") == 1
