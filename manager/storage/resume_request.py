"""The order that a run which has ended goes on: all that its next manager needs, in a folder which appears whole.

``rrl resume`` gives ``resume/`` its name by a rename: of two at once one wins, on any file system, with its own files
and none of the other's. Until a manager takes the order, by another rename, nothing of the run is changed, and it can
be withdrawn; then it is journaled, and its files are put in the place of the old ones. A manager that dies between any
two of these is followed by one that goes on there.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from ...core.run_dir import RunDir, write_atomically
from ...core.run_spec import JobView

_log = logging.getLogger("rrl.manager")

_LETTER = "order.json"


class Order(Struct, frozen=True):
    by: str
    id: str
    job: JobView
    """as it goes on"""
    source: str
    """path of the job spec: the roles work in its folder"""
    ended: float
    """when the run ended (manager's time) that goes on: an order that comes late is none for the next end"""


class AlreadyOrdered(RuntimeError):
    """Somebody was first."""


def order(run: RunDir, one: Order, fill: Callable[[RunDir], None]) -> None:
    """Leave the order, with the files that ``fill`` makes. Raises AlreadyOrdered, or OSError; then there is nothing."""
    if (before := pending(run)) is not None:
        raise _already(run, before)
    making = _aside(run)
    making.mkdir(mode=0o700)
    try:
        fill(RunDir(making))
        write_atomically(making / _LETTER, msgspec.json.encode(one))
        os.rename(making, run.resume)
    except BaseException as error:
        shutil.rmtree(making, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            raise _already(run, pending(run)) from None
        raise


def _already(run: RunDir, before: Order | None) -> AlreadyOrdered:
    by = before.by if before is not None else "somebody"
    return AlreadyOrdered(f"{by} has ordered that already; should no manager take it up: rrl manage {run.id}")


def pending(run: RunDir) -> Order | None:
    """What has been ordered and is not in its place yet. Raises OSError where that cannot be seen."""
    for folder in (run.resuming, run.resume):
        try:
            return msgspec.json.decode((folder / _LETTER).read_bytes(), type=Order)
        except FileNotFoundError:
            continue
        except msgspec.MsgspecError as error:
            _log.warning("%s does not hold a valid resume request, it is set aside: %s", folder, error)
            _put_aside(run, folder)
    return None


def ordered_at(run: RunDir) -> float:
    """When the pending order was left, by the file server's clock; 0 where there is none. Raises OSError."""
    for folder in (run.resuming, run.resume):
        with contextlib.suppress(FileNotFoundError):
            return (folder / _LETTER).stat().st_mtime
    return 0.0


def withdraw(run: RunDir) -> bool:
    """False when a manager has taken it already."""
    return _put_aside(run, run.resume)


def take(run: RunDir) -> Order | None:
    """For the run's manager: from here on the order cannot be withdrawn."""
    if not (run.resuming / _LETTER).exists():
        with contextlib.suppress(FileNotFoundError):
            os.rename(run.resume, run.resuming)
    return pending(run)


def place(run: RunDir) -> None:
    """It is in the journal: its files are the run's from now on. The same again is right."""
    for path in run.resuming.iterdir() if run.resuming.exists() else ():
        if path.name != _LETTER:
            os.replace(path, run.path / path.name)
    drop(run)


def drop(run: RunDir) -> None:
    """What was taken is done with."""
    (run.resuming / _LETTER).unlink(missing_ok=True)  # first: without it the rest means nothing
    shutil.rmtree(run.resuming, ignore_errors=True)


def _aside(run: RunDir) -> Path:
    return run.path / f".resume.{secrets.token_hex(4)}"


def _put_aside(run: RunDir, folder: Path) -> bool:
    aside = _aside(run)
    try:
        os.rename(folder, aside)
    except FileNotFoundError:
        return False
    shutil.rmtree(aside, ignore_errors=True)
    return True
