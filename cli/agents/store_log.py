"""Read the log of a run's trajectory store, while the store may write it. This needs no manager and writes nothing."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from ...core.run_dir import RunDir
from ...core.run_spec import RunSpec
from ...core.types import OperationFailed, UsageError
from ...roles.trajectories.durable.log import LogDamaged, read_frames
from ...roles.trajectories.durable.records import LogFormatError, decode
from ...roles.trajectories.durable.state import State

_TRIES = 5
"""Number of tries to read a log. A try can fail because the store replaces its log, or appends to it, at the same
time."""
_PAUSE_S = 0.2
"""Seconds between two tries."""


def read_store(run: RunDir, job: RunSpec) -> State | None:
    """Return the state that the newest log of the store describes; None before the store has written one.

    The state has every group that the log still contains, even if the store itself has already retired it.

    Args:
        run: The run directory.
        job: Its run spec.

    Raises:
        UsageError: The log is damaged, or was written by another version of rrl.
        OperationFailed: The log cannot be read.
    """
    for left in reversed(range(_TRIES)):
        try:
            path = _newest_log(run.store)
            return None if path is None else _state(path, job)
        except (FileNotFoundError, LogDamaged) as error:
            if left:
                time.sleep(_PAUSE_S)
            elif isinstance(error, LogDamaged):
                raise UsageError(str(error)) from None
            else:
                raise OperationFailed(f"{run.store}: {error.strerror}") from None
        except LogFormatError as error:
            raise UsageError(f"the trajectory log in {run.store} {error}") from None
        except OSError as error:
            raise OperationFailed(f"{run.store}: {error.strerror}") from None
    raise AssertionError("the last try returns or raises")


def _newest_log(folder: Path) -> Path | None:
    """Return the newest log that is not empty; None if there is none.

    An empty log is passed over, because a store that has just claimed the folder has not written its log yet.
    """
    logs = [path for path in folder.iterdir() if path.name.startswith("log.") and path.suffix[1:].isdecimal()]
    written = [path for path in logs if path.name.count(".") == 1 and path.stat().st_size]
    return max(written, key=lambda path: int(path.suffix[1:]), default=None)


def _state(path: Path, job: RunSpec) -> State:
    state = State(retained_steps=sys.maxsize, max_new_tokens=job.sampling.max_new_tokens)
    for payload in read_frames(path):
        state.apply(decode(payload))
    return state
