"""Compute the account of a run, which ``rrl report`` shows, and compare two runs, from the files of the runs alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from ..core.run_dir import RunDir, errors_about
from ..core.types import UsageError
from ..manager.model.events import Stamped
from ..manager.reporting.accounting.comparison import Comparison, Course, compare
from ..manager.reporting.accounting.pool_use import pool_uses
from ..manager.reporting.accounting.run_report import Account, NoEvents, account
from ..manager.reporting.step_metrics import StepRow, StepRows
from ..manager.storage.journal import replay
from .runs import read_state


def account_of(run: RunDir) -> Account:
    """Return the account of a run, up to the newest event of its journal.

    Raises:
        UsageError: The journal is damaged, or has no events yet.
        OperationFailed: The journal cannot be read.
    """
    return _account_of(run, replay(run))


class ComparedRuns(NamedTuple):
    """The accounts of two runs, and their comparison."""

    accounts: tuple[Account, Account]
    comparison: Comparison


def compare_runs(one: RunDir, other: RunDir) -> ComparedRuns:
    """Return the accounts of two runs, up to the newest events of their journals, and their comparison.

    Raises:
        UsageError: It is the same run, or a journal is damaged or has no events yet.
        OperationFailed: A journal cannot be read.
    """
    if one.path.resolve() == other.path.resolve():
        raise UsageError(f"{one.id} is named twice; name another run to compare it with")
    (account, course), (other_account, other_course) = _course_of(one), _course_of(other)
    return ComparedRuns((account, other_account), compare(course, other_course))


def _course_of(run: RunDir) -> tuple[Account, Course]:
    """Read the journal of a run once, for its account and for its rows."""
    rows, complete = StepRows(), list[StepRow]()

    def events() -> Iterator[Stamped]:
        for stamped in replay(run):
            complete.extend(rows.apply(stamped))
            yield stamped

    found = _account_of(run, events())
    return found, Course([*complete, *rows.rest()], found.steps.began, _job_of(run))


def _account_of(run: RunDir, events: Iterator[Stamped]) -> Account:
    with errors_about(run.journal):
        try:
            found = account(events)
            if (state := read_state(run)) is not None:
                found.pools = pool_uses(state, found.now)
            return found
        except NoEvents:
            text = f"{run.id} has not begun: its journal has no events yet; see: rrl status {run.id}"
            raise UsageError(text) from None


def _job_of(run: RunDir) -> dict[str, Any] | None:
    """Return every key of the run's job.toml with its value; None if they cannot be read."""
    try:
        job: dict[str, Any] = msgspec.json.decode(run.resolved.read_bytes())["job"]
    except (OSError, msgspec.MsgspecError, KeyError, TypeError):
        return None
    return job
