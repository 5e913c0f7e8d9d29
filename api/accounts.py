"""Compute the account of a run, which ``rrl report`` shows, from the journal of the run alone."""

from __future__ import annotations

from ..core.run_dir import RunDir, errors_about
from ..core.types import UsageError
from ..manager.reporting.accounting.pool_use import pool_uses
from ..manager.reporting.accounting.run_report import Account, NoEvents, account
from ..manager.storage.journal import replay
from .runs import read_state


def account_of(run: RunDir) -> Account:
    """Return the account of a run, up to the newest event of its journal.

    Raises:
        UsageError: The journal is damaged, or has no events yet.
        OperationFailed: The journal cannot be read.
    """
    with errors_about(run.journal):
        try:
            found = account(replay(run))
            if (state := read_state(run)) is not None:
                found.pools = pool_uses(state, found.now)
            return found
        except NoEvents:
            text = f"{run.id} has not begun: its journal has no events yet; see: rrl status {run.id}"
            raise UsageError(text) from None
