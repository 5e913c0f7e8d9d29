"""``rrl metrics`` and ``rrl track``: the committed steps of a run, printed or sent to experiment trackers.

Both work while the run goes on, and after it has ended.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from ...api.runs import check_own, find_run, job_of
from ...api.step_rows import step_rows
from ...config.import_paths import TRACKERS
from ...core.run_dir import RunDir, errors_about
from ...core.text import escaped
from ...core.types import OperationFailed, UsageError
from ...manager.reporting.step_metrics import StepRow
from ...manager.tracking.base import EVALUATION_PREFIX
from ...manager.tracking.main import HUNG_EXIT, LOCKED_EXIT, UNTIL_END
from ...manager.tracking.tracker_files import TRACKER_ENV, log_file, mark_of, read_progress
from ...manager.tracking.tracker_supervisor import MODULE
from ..common.output import json_line, print_line

_FIXED = (
    "step",
    "at",
    "incarnation",
    "seconds",
    "tokens",
    "tokens_per_second",
    "tokens_per_second_gpu",
    "token_age_p50",
    "token_age_max",
)
"""First columns of the CSV: fields of a row."""


def metrics(name: str | None, *, as_csv: bool, follow: bool) -> int:
    """Print the rows of a run; with ``follow`` also the rows of later steps, until the run ends. Returns exit code 0.

    Raises:
        UsageError: There is no such run, or its journal is damaged.
        OperationFailed: The journal cannot be read.
    """
    batches = step_rows(find_run(name), follow=follow)
    if as_csv:
        _print_csv(batches)
        return 0
    for rows in batches:
        sys.stdout.writelines(map(json_line, rows))
        sys.stdout.flush()
    return 0


def _print_csv(batches: Iterator[list[StepRow]]) -> None:
    """Print a header and the rows. The first batch that has rows determines the columns."""
    columns: list[str] = []
    left_out: set[str] = set()
    writer = csv.writer(sys.stdout, lineterminator="\n")
    for rows in batches:
        cells = [_cells(row) for row in rows]
        if cells and not columns:
            columns = [*_FIXED, *dict.fromkeys(name for row in cells for name in row if name not in (*_FIXED, "marks"))]
            columns.append("marks")
            writer.writerow(map(escaped, columns))
        writer.writerows([row.get(name, "") for name in columns] for row in cells)
        sys.stdout.flush()
        if new := {name for row in cells for name in row} - {*columns, *left_out}:
            left_out |= new
            print_line(f"rrl: left out, because the header lacks them: {', '.join(sorted(new))}", to_stderr=True)


def _cells(row: StepRow) -> dict[str, Any]:
    """Return the values of a row by column; numbers that are not known are left out."""
    fixed = {name: getattr(row, name) for name in _FIXED}
    return {
        **{name: value for name, value in fixed.items() if value is not None},
        **{f"seconds_{phase}": seconds for phase, seconds in row.phase_seconds.items()},
        **{name: value for name, value in row.metrics.items() if name not in _FIXED},
        **{f"{EVALUATION_PREFIX}{name}": value for name, value in row.evaluation.items()},
        **{f"{replica}/{name}": value for replica, values in row.logged.items() for name, value in values.items()},
        "marks": escaped("; ".join(f"{mark.kind.value} {mark.about}: {mark.text}" for mark in row.marks)),
    }


def track(name: str, to: Sequence[str]) -> int:
    """Send all steps of a run that the trackers do not have, and follow the run to its end; returns exit code 0.

    The keys and addresses of the trackers come from the environment of this command.

    Raises:
        UsageError: There is no such run or tracker, or the package of a tracker is not installed.
        OperationFailed: A tracker failed, or another process sends the steps of this run to it.
    """
    run = find_run(name)
    check_own(run)
    trackers = _trackers(run, to)
    with errors_about(run.trackers):
        run.trackers.mkdir(mode=0o700, exist_ok=True)
        processes = {tracker: _start(run, tracker) for tracker in trackers}
    try:
        codes = {tracker: process.wait() for tracker, process in processes.items()}
    except KeyboardInterrupt:
        for process in processes.values():
            process.terminate()  # the process sends the steps in the journal, then ends
        codes = {tracker: process.wait() for tracker, process in processes.items()}
    for tracker, code in codes.items():
        progress = read_progress(run, tracker)
        if code == 0:
            print_line(f"{tracker}: step {progress.step}; {progress.place}")
    failures = [f"{tracker}: {_failure(run, tracker, code)}" for tracker, code in codes.items() if code]
    if failures:
        raise OperationFailed("; ".join(failures))
    return 0


def _trackers(run: RunDir, to: Sequence[str]) -> list[str]:
    """Return the trackers that the user names, else those of the job. Raises UsageError for an unusable tracker."""
    named = [one for text in to for one in text.split(",") if one]
    if unknown := [one for one in named if one not in TRACKERS]:
        raise UsageError(f'--to: no tracker "{unknown[0]}"; there are {", ".join(TRACKERS)}')
    job = job_of(run)
    trackers = [one for one in TRACKERS if one in named] if named else [*job.track.to] if job is not None else []
    if not trackers:
        raise UsageError(f"the job of {run.id} names no tracker; write for example: --to {next(iter(TRACKERS))}")
    if missing := [one for one in trackers if find_spec(one) is None]:
        raise UsageError(
            f"the package {missing[0]} is not installed here; pip install '.[{missing[0]}]' in rrl's clone"
        )
    return trackers


def _start(run: RunDir, tracker: str) -> subprocess.Popen[bytes]:
    """Start a tracker's process. It ends with this command, and its output goes to a file of the run."""
    environment = os.environ | {TRACKER_ENV: mark_of(run, tracker)}
    argv = [sys.executable, "-P", "-m", MODULE, str(run.path), tracker, str(os.getpid()), UNTIL_END]
    with log_file(run, tracker).open("ab") as log:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
            cwd=run.trackers,
        )


def _failure(run: RunDir, tracker: str, code: int) -> str:
    if code == LOCKED_EXIT:
        return f"another process sends the steps of {run.id} there, for example the process of its manager"
    reason = "it does not answer" if code == HUNG_EXIT else read_progress(run, tracker).error or f"exit code {code}"
    return f"{reason} (its output: {log_file(run, tracker)})"
