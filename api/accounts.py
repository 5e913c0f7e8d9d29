"""Compute the account of a run, which ``rrl report`` shows, from the journal of the run alone."""

from __future__ import annotations

from ..core.run_dir import RunDir
from ..core.types import OperationFailed, UsageError
from ..manager.reporting.accounting.run_report import Account, NoEvents, account
from ..manager.storage.journal import JournalError, replay


def account_of(run: RunDir) -> Account:
    """Return the account of a run, up to the newest event of its journal.

    Raises:
        UsageError: The journal is damaged, or has no events yet.
        OperationFailed: The journal cannot be read.
    """
    try:
        return account(replay(run))
    except JournalError as error:
        raise UsageError(str(error)) from None
    except NoEvents:
        raise UsageError(f"{run.id} has not begun: its journal has no events yet; see: rrl status {run.id}") from None
    except OSError as error:
        raise OperationFailed(f"{run.journal}: {error.strerror}") from None
