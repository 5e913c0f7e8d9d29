"""``rrl status``: the state of one run. ``rrl list``: all runs of this user, newest first."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

from rich.console import Group, RenderableType
from rich.text import Text

from ...api.runs import StateReader, all_runs, find_run, job_of, submit_time, summary_of
from ...api.watching.manager_liveness import Liveness, liveness, manager_gone
from ...api.watching.run_state import listed_states
from ...api.watching.start_check import StartCheck
from ...cluster.traits import traits_of
from ...core.run_dir import RunDir, runs_root
from ...core.types import Outcome
from ...manager.model.state import State
from ...manager.storage.model_folders import ModelFolders, model_folders
from ..common.output import console, print_json, print_line, show
from ..views.replicas import MAX_LISTED
from ..views.status import status_view
from ..views.summary import recoveries_view, runs_view

START_PATIENCE_S = 60.0
"""Time (s) after a submission during which a run without a manager counts as starting.

A manager needs only some seconds to start. If the manager's job waits longer in Slurm's queue, ``squeue`` shows this to
the user.
"""


def status(name: str | None, *, json: bool) -> int:
    """Print the state of a run; returns exit code 0. ``rrl status --live`` is :func:`rrl.cli.run.follow.show_live`."""
    run = find_run(name)
    reader = StateReader(run)
    state = reader.state()
    if reader.torn and manager_gone(run, state):  # a running manager may still be writing a record
        torn_text = f"the journal ends in {reader.torn} bytes of an unfinished record, which are ignored"
        print(f"rrl: {torn_text}: no process has acted on this record", file=sys.stderr)
    failure = StartCheck(run).failure(state)
    if state is not None and failure:
        print(f"rrl: {run.id} was to be resumed, but {failure}; to try again: rrl manage {run.id}", file=sys.stderr)
    if state is not None and json:
        from .json_documents import status_document

        print_json(status_document(run, state, liveness(run, state), metrics_failure(run, state)))
    elif json:
        from .json_documents import UnstartedRun

        print_json(UnstartedRun(run.id, Outcome.REJECTED if failure else None, waiting_text(run, failure)))
    elif state is None:
        print_line(f"{run.id}: {waiting_text(run, failure)}")
    else:
        show(picture(run, state, console().width, liveness(run, state)))
    return 0


class RunFiles(NamedTuple):
    """The content of a run's files, other than its journal, that the view of the run shows."""

    folders: ModelFolders = ModelFolders()
    metrics_failure: str = ""
    recoveries: Sequence[dict[str, Any]] = ()
    """The recoveries in the summary of a run that has ended."""

    @classmethod
    def read(cls, run: RunDir, state: State) -> Self:
        """Read the files of a run, and return the content that the view shows."""
        summary = summary_of(run) if state.outcome is not None else None
        recoveries = (summary or {}).get("recoveries") or ()
        return cls(model_folders(run, state.step), metrics_failure(run, state), recoveries)

    def views(self) -> list[RenderableType]:
        """Return the parts below the status view, each after an empty line; often none."""
        parts: list[RenderableType] = []
        if self.metrics_failure:
            parts.append(Text(f"metrics of the manager: {self.metrics_failure}", "yellow", overflow="fold"))
        if self.recoveries:
            parts.append(recoveries_view(list(self.recoveries)))
        return [line for part in parts for line in ("", part)]


def picture(
    run: RunDir, state: State, width: int, manager_liveness: Liveness = Liveness(), max_listed: int = MAX_LISTED
) -> RenderableType:
    """Return the status view, with the summary once the run has ended."""
    files = RunFiles.read(run, state)
    view = status_view(
        state,
        time.time(),
        width,
        (manager_liveness.note, manager_liveness.advice),
        manager_liveness.standing,
        files.folders,
        max_listed,
    )
    return Group(view, *files.views())


def metrics_failure(run: RunDir, state: State) -> str:
    """Return why the manager of an unfinished run serves no metrics; empty if it serves them, or if none are wanted."""
    if state.outcome is not None or not state.job.health.metrics:
        return ""
    try:
        return run.metrics_failure.read_text(errors="replace").strip()
    except OSError:
        return ""


def waiting_text(run: RunDir, start_failure: str) -> str:
    """Return what a run without a journal waits for, or why it will never start."""
    if start_failure:
        return f"rejected: {start_failure}"
    job = job_of(run)
    queued = ""
    if job is not None and traits_of(job.cluster).manager_is_a_job:
        from ...manager.bootstrap.manager_job import job_name

        queued = f"squeue --name={job_name(run.id, job)}"
    if abs(time.time() - submit_time(run)) < START_PATIENCE_S:  # if the two clocks differ, only this text is wrong
        return f"its manager is starting ({queued} shows its job)" if queued else "its manager is starting"
    if queued:
        return f"its manager has not started yet ({queued} tells why; if it shows no job: rrl manage {run.id})"
    return f"its manager has not started yet (its output: {run.submit}; if there is no output: rrl manage {run.id})"


def list_runs(*, json: bool) -> int:
    """Print all runs of this user, newest first."""
    states = listed_states(all_runs())
    if json:
        print_json(states)
    elif states:
        show(runs_view(states, time.time()))
    else:
        print(f"no runs in {runs_root()}")
    return 0
