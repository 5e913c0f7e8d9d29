"""``rrl metrics``: one line for each committed step of a run, as JSON or CSV, also while the run goes on."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from typing import Any

from ...api.runs import find_run
from ...api.step_rows import step_rows
from ...core.text import escaped
from ...manager.reporting.step_metrics import StepRow
from ...manager.tracking.base import EVALUATION_PREFIX
from ..common.output import json_line, print_line

_FIXED = ("step", "at", "incarnation", "seconds", "tokens", "tokens_per_second", "token_age_p50", "token_age_max")
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
