"""``rrl metrics``: one line for each committed step of a run, as JSON or CSV, also while the run goes on."""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from ...core.run_dir import RunDir
from ...core.text import escaped, escaped_json
from ...manager.model.events import Resumed, RunEnded
from ...manager.reporting.step_metrics import StepRow, StepRows
from ...manager.storage.journal import EventFollower, JournalError
from ..common.output import print_line
from ..common.runs import OperationFailed, UsageError, find_run

POLL_S = 0.5
"""Seconds between two reads of the journal."""
_FIXED = ("step", "at", "incarnation", "seconds", "tokens", "tokens_per_second", "token_age_p50", "token_age_max")
"""First columns of the CSV: fields of a row."""
_encode = msgspec.json.Encoder().encode


def metrics(name: str | None, *, as_csv: bool, follow: bool) -> int:
    """Print the rows of a run; with ``follow`` also those of later steps, until the run ends. Returns exit code 0.

    Raises:
        UsageError: There is no such run, or its journal is damaged.
        OperationFailed: The journal cannot be read.
    """
    run = find_run(name)
    batches = _followed(run) if follow else iter([_all_rows(run)])
    if as_csv:
        _print_csv(batches)
        return 0
    for rows in batches:
        sys.stdout.writelines(escaped_json(_encode(row).decode()) + "\n" for row in rows)
        sys.stdout.flush()
    return 0


def _all_rows(run: RunDir) -> list[StepRow]:
    rows, follower = StepRows(), EventFollower(run)
    return [*_new_rows(run, rows, follower)[0], *rows.rest()]


def _followed(run: RunDir) -> Iterator[list[StepRow]]:
    """Yield the existing rows, then new ones, until the run has ended."""
    rows, follower, ended = StepRows(), EventFollower(run), False
    while not ended:
        new, ended = _new_rows(run, rows, follower, ended)
        if new or ended:
            yield new
        if not ended:
            time.sleep(POLL_S)


def _new_rows(run: RunDir, rows: StepRows, follower: EventFollower, ended: bool = False) -> tuple[list[StepRow], bool]:
    """Return the rows of the events since the last call, and whether the run has ended."""
    new: list[StepRow] = []
    try:
        for stamped in follower.events():
            new += rows.apply(stamped)
            if isinstance(stamped.event, (RunEnded, Resumed)):
                ended = isinstance(stamped.event, RunEnded)
    except JournalError as error:
        raise UsageError(str(error)) from None
    except OSError as error:
        raise OperationFailed(f"{run.journal}: {error.strerror}") from None
    return new, ended


def _print_csv(batches: Iterator[list[StepRow]]) -> None:
    """Print a header and the rows. The columns are those of the first batch that has rows."""
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
            print_line(f"rrl: left out, not in the header: {', '.join(sorted(new))}", to_stderr=True)


def _cells(row: StepRow) -> dict[str, Any]:
    """Return the values of a row by column; numbers that are not known are left out."""
    fixed = {name: getattr(row, name) for name in _FIXED}
    return {
        **{name: value for name, value in fixed.items() if value is not None},
        **{f"seconds_{phase}": seconds for phase, seconds in row.phase_seconds.items()},
        **{name: value for name, value in row.metrics.items() if name not in _FIXED},
        **{f"{replica}/{name}": value for replica, values in row.logged.items() for name, value in values.items()},
        "marks": escaped("; ".join(f"{mark.kind.value} {mark.about}: {mark.text}" for mark in row.marks)),
    }
