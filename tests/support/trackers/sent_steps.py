"""Writes samples of a run, and reads what trackers have stored of its steps, by the trackers' own packages."""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rrl.core.run_dir import RunDir
from rrl.core.samples_file import Sample, SampleRun, StepSamples, frame
from rrl.manager.tracking.base import SAMPLES


def sent(run: RunDir, tracker: str, metric: str) -> list[tuple[int, float]]:
    """Return (step, value) of a metric in the order of the tracker, including NaN and infinite values."""
    folder = run.trackers / tracker
    if tracker == "tensorboard":
        return tensorboard_scalars(folder, metric)
    if tracker == "wandb":
        return wandb_scalars(folder, metric)
    return mlflow_scalars(folder, metric)


def write_samples(run: RunDir, steps: Sequence[int]) -> None:
    """Write a sample of each step, whose answer is the number of the step."""
    run.samples.mkdir()
    runs = (SampleRun(1, -1, 0, False), SampleRun(2, 0, 1, True))
    answers = [(step, array("i", (2, 2 + step // 10, 2 + step % 10)).tobytes()) for step in steps]
    samples = [(step, Sample(step, 0, 0, "", 1.0, 1.0, {}, 0.5, False, tokens, runs)) for step, tokens in answers]
    (run.samples / "1.1").write_bytes(b"".join(frame(StepSamples(step, 8, (one,))) for step, one in samples))


def sent_tables(run: RunDir, tracker: str) -> list[tuple[int, str]]:
    """Return (step, content as text) of each table of samples in the order of the tracker."""
    folder = run.trackers / tracker
    if tracker == "tensorboard":
        from rrl.manager.tracking.tensorboard import events

        return [
            (event.step, value.tensor.string_val[0].decode())
            for event in events(folder)
            for value in event.summary.value
            if value.tag == SAMPLES
        ]
    if tracker == "wandb":
        from rrl.manager.tracking.wandb import LOG_FILES, history

        found: list[tuple[int, str]] = []
        for path in sorted(folder.glob(LOG_FILES)):
            for step, values in history(path):
                if (file := values.get(f"{SAMPLES}/path")) is not None:
                    found.append((step, (path.parent / "files" / str(file)).read_text()))
        return found
    client, (run_id,) = mlflow_runs(folder)
    paths = [Path(one.path) for one in client.list_artifacts(run_id, SAMPLES)]
    return [(int(path.stem[5:]), Path(client.download_artifacts(run_id, str(path))).read_text()) for path in paths]


def tensorboard_scalars(folder: Path, metric: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.directory_watcher import DirectoryWatcher
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
    from tensorboard.backend.event_processing.io_wrapper import IsTensorFlowEventsFile

    watcher = DirectoryWatcher(str(folder), LegacyEventFileLoader, IsTensorFlowEventsFile)
    return [
        (event.step, value.simple_value)
        for event in watcher.Load()
        for value in event.summary.value
        if value.tag == metric
    ]


def wandb_scalars(folder: Path, metric: str) -> list[tuple[int, float]]:
    """Read wandb's log files folder by folder, in the order of their times, as ``wandb sync`` does."""
    from rrl.manager.tracking.wandb import LOG_FILES, history

    found = []
    for path in sorted(folder.glob(LOG_FILES)):
        for step, values in history(path):
            if isinstance(value := values.get(metric, math.nan), int | float) and not math.isnan(value):
                found.append((step, float(value)))
    return found


def mlflow_scalars(folder: Path, metric: str) -> list[tuple[int, float]]:
    client, run_ids = mlflow_runs(folder)
    assert len(run_ids) == 1, "the run has several runs in MLflow"
    return [(one.step, one.value) for one in client.get_metric_history(run_ids[0], metric)]


def mlflow_runs(folder: Path) -> tuple[Any, list[str]]:
    """Return MLflow's client and the ids of all runs in a store of files."""
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=folder.absolute().as_uri())
    experiments = [one.experiment_id for one in client.search_experiments()]
    return client, [one.info.run_id for one in client.search_runs(experiments)]


def check_once_each(found: Sequence[tuple[int, float]], steps: int) -> None:
    """Check that the tracker has steps 1 to ``steps``, once each and in order."""
    assert [step for step, _ in found] == list(range(1, steps + 1))
