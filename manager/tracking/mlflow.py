"""MLflow as a tracker: one run of MLflow, found by its tag, in which each step is one batch of metrics.

The metric ``rrl/step`` is the last metric of each batch, so its history shows which steps are complete. MLflow's file
store writes a batch metric by metric, so it may already have some metrics of the step after the newest complete step.
These metrics are not sent again.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TypeVar

from mlflow.entities import Metric, Param, Run, RunTag, ViewType
from mlflow.tracking import MlflowClient

from ...core.sample_texts import DecodedSample
from ...core.types import Outcome
from ..reporting.step_metrics import StepRow
from .base import PREFIX, SAMPLE_COLUMNS, SAMPLES, TrackedRun, annotation, flattened, sample_rows, scalars

RUN_TAG = "rrl.run"
"""Tag with the id of rrl's run."""
STEP_METRIC = f"{PREFIX}step"
URI_ENV = "MLFLOW_TRACKING_URI"
MAX_BATCH = 100
"""Maximum number of params or tags in one request, according to MLflow's REST API. The limit for metrics is 1,000."""
MAX_VALUE_CHARS = 500
"""Maximum number of characters of a param's value. The limit of MLflow is 250 to 6,000, by version and store."""
MAX_TAG_CHARS = 5000
"""Maximum number of characters of a tag's value (MLflow's REST API)."""
_STATUS = {Outcome.COMPLETED: "FINISHED", Outcome.CANCELLED: "KILLED"}
_T = TypeVar("_T")


class MlflowRun:
    """The run in MLflow: at $MLFLOW_TRACKING_URI, else in files in the run directory."""

    def __init__(self, run: TrackedRun) -> None:
        uri = os.environ.get(URI_ENV)
        if not uri:
            os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # MLflow recommends a database, but that needs more packages
            uri = run.folder.absolute().as_uri()
        self._client = MlflowClient(tracking_uri=uri)
        found = self._find(run)
        self._id = found.info.run_id
        if found.info.status != "RUNNING":
            self._client.update_run(self._id, status="RUNNING")
        if run.changed:
            self._send_job(run, found.data.params)
        complete = self._client.get_metric_history(self._id, STEP_METRIC)
        self.newest_step: int = max((metric.step for metric in complete), default=-1)
        self._may_be_partial = True
        self.place = f"{uri} (run {self._id})"

    def send(self, row: StepRow, samples: Sequence[DecodedSample]) -> None:
        """Log the metrics of a step, and before them its samples as an artifact, which a repetition overwrites."""
        assert row.step is not None
        if samples:
            self._send_samples(row.step, samples)
        at = int(row.at * 1000)
        metrics = [Metric(_name(name), value, at, row.step) for name, value in scalars(row).items()]
        if self._may_be_partial:
            self._may_be_partial = False
            metrics = [metric for metric in metrics if not self._is_there(metric)]
        metrics.append(Metric(STEP_METRIC, row.step, at, row.step))
        if marks := annotation(row):  # sent before the batch, in which the file store would write it last
            self._client.set_tag(self._id, f"rrl.marks.{row.step:08d}", marks[:MAX_TAG_CHARS])
        for batch in _batches(metrics):
            self._client.log_batch(self._id, metrics=batch)

    def flush(self) -> None:
        """Do nothing, because each request returns only after MLflow has stored its batch."""

    def finish(self, outcome: Outcome, last: StepRow | None) -> None:
        """Set the status of the run."""
        if last is not None:
            self._client.set_tag(self._id, "rrl.end", annotation(last)[:MAX_TAG_CHARS])
        end = last.at if last is not None else time.time()
        self._client.set_terminated(self._id, _STATUS.get(outcome, "FAILED"), int(end * 1000))

    def close(self) -> None:
        """Do nothing: there is no connection to close."""

    def _find(self, run: TrackedRun) -> Run:
        """Return the run in MLflow; create it if it does not exist."""
        experiment = self._client.get_experiment_by_name(run.project)
        place = experiment.experiment_id if experiment is not None else self._client.create_experiment(run.project)
        found = self._client.search_runs([place], f"tags.`{RUN_TAG}` = '{run.id}'", ViewType.ACTIVE_ONLY, max_results=1)
        return found[0] if found else self._client.create_run(place, run_name=run.id, tags={RUN_TAG: run.id})

    def _send_job(self, run: TrackedRun, known: dict[str, str]) -> None:
        """Log the job as params. A param cannot be changed, so a value that a resume has changed becomes a tag."""
        job = {_name(key): value[:MAX_VALUE_CHARS] for key, value in flattened(run.job).items()}
        params = [Param(key, value) for key, value in job.items() if key not in known]
        tags = [RunTag(f"rrl.job.{key}", value) for key, value in job.items() if known.get(key, value) != value]
        for batch in _batches(params):
            self._client.log_batch(self._id, params=batch)
        for batch in _batches(tags):
            self._client.log_batch(self._id, tags=batch)

    def _send_samples(self, step: int, samples: Sequence[DecodedSample]) -> None:
        """Log a table in the form of ``mlflow.log_table``, which itself needs pandas."""
        table = {"columns": SAMPLE_COLUMNS, "data": sample_rows(samples)}
        try:
            self._client.log_text(self._id, json.dumps(table), f"{SAMPLES}/step_{step:08d}.json")
        except Exception as error:  # the store of artifacts may need keys of its own; the metrics do not wait for it
            sys.stderr.write(f"no samples are sent of step {step}: {type(error).__name__}: {error}\n")

    def _is_there(self, metric: Metric) -> bool:
        return any(known.step == metric.step for known in self._client.get_metric_history(self._id, metric.key))


def _name(name: str) -> str:
    """Return ``name`` with ``_`` in place of each character that MLflow does not allow."""
    return re.sub(r"[^\w./ -]", "_", name)


def _batches(values: Sequence[_T]) -> Iterator[list[_T]]:
    rest = iter(values)
    while batch := list(islice(rest, MAX_BATCH)):
        yield batch
