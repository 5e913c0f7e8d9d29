"""Read the committed steps of a run from its journal, each step once, also while the run goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator

from ..core.run_dir import RunDir, errors_about
from ..manager.model.events import Resumed, RunEnded
from ..manager.reporting.step_metrics import StepRow, StepRows
from ..manager.storage.journal import EventFollower

POLL_S = 0.5
"""Seconds between two reads of the journal."""


def step_rows(run: RunDir, *, follow: bool) -> Iterator[list[StepRow]]:
    """Yield the existing rows, and with ``follow`` also new rows until the run has ended.

    Raises:
        UsageError: The journal is damaged.
        OperationFailed: The journal cannot be read.
    """
    rows, follower = StepRows(), EventFollower(run)
    if not follow:
        yield [*_new_rows(run, rows, follower)[0], *rows.rest()]
        return
    ended = False
    while not ended:
        new, ended = _new_rows(run, rows, follower, ended)
        if new or ended:
            yield new
        if not ended:
            time.sleep(POLL_S)


def _new_rows(run: RunDir, rows: StepRows, follower: EventFollower, ended: bool = False) -> tuple[list[StepRow], bool]:
    """Return the rows of the events since the last call, and whether the run has ended."""
    new: list[StepRow] = []
    with errors_about(run.journal):
        for stamped in follower.events():
            new += rows.apply(stamped)
            if isinstance(stamped.event, (RunEnded, Resumed)):
                ended = isinstance(stamped.event, RunEnded)
    return new, ended
