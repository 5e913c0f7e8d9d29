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
from ...core.run_spec import RunSpec

_log = logging.getLogger("rrl.manager")

_REQUEST_FILE = "request.json"


class ResumeRequest(Struct, frozen=True):
    by: str
    id: str
    job: RunSpec
    """as it goes on"""
    source: str
    """path of the job spec: the roles work in its folder"""
    ended: float
    """when the run ended (manager's time) that goes on: an order that comes late is none for the next end"""


class AlreadyRequested(RuntimeError):
    """Somebody was first."""


def write_request(run: RunDir, request: ResumeRequest, write_files: Callable[[RunDir], None]) -> None:
    """Leave the order, with the files that ``write_files`` makes. Raises AlreadyOrdered, or OSError; then there is nothing."""
    if (before := read_pending(run)) is not None:
        raise _already(run, before)
    staging = _temporary_path(run)
    staging.mkdir(mode=0o700)
    try:
        write_files(RunDir(staging))
        write_atomically(staging / _REQUEST_FILE, msgspec.json.encode(request))
        os.rename(staging, run.resume)
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            raise _already(run, read_pending(run)) from None
        raise


def _already(run: RunDir, before: ResumeRequest | None) -> AlreadyRequested:
    by = before.by if before is not None else "somebody"
    return AlreadyRequested(f"{by} has ordered that already; should no manager take it up: rrl manage {run.id}")


def read_pending(run: RunDir) -> ResumeRequest | None:
    """What has been ordered and is not in its place yet. Raises OSError where that cannot be seen."""
    for folder in (run.resume_claimed, run.resume):
        try:
            return msgspec.json.decode((folder / _REQUEST_FILE).read_bytes(), type=ResumeRequest)
        except FileNotFoundError:
            continue
        except msgspec.MsgspecError as error:
            _log.warning("%s does not hold a valid resume request, it is set aside: %s", folder, error)
            _move_aside(run, folder)
    return None


def requested_at(run: RunDir) -> float:
    """When the pending order was left, by the file server's clock; 0 where there is none. Raises OSError."""
    for folder in (run.resume_claimed, run.resume):
        with contextlib.suppress(FileNotFoundError):
            return (folder / _REQUEST_FILE).stat().st_mtime
    return 0.0


def withdraw(run: RunDir) -> bool:
    """False when a manager has taken it already."""
    return _move_aside(run, run.resume)


def claim(run: RunDir) -> ResumeRequest | None:
    """For the run's manager: from here on the order cannot be withdrawn."""
    if not (run.resume_claimed / _REQUEST_FILE).exists():
        with contextlib.suppress(FileNotFoundError):
            os.rename(run.resume, run.resume_claimed)
    return read_pending(run)


def install(run: RunDir) -> None:
    """It is in the journal: its files are the run's from now on. The same again is right."""
    for path in run.resume_claimed.iterdir() if run.resume_claimed.exists() else ():
        if path.name != _REQUEST_FILE:
            os.replace(path, run.path / path.name)
    discard(run)


def discard(run: RunDir) -> None:
    """What was taken is done with."""
    (run.resume_claimed / _REQUEST_FILE).unlink(missing_ok=True)  # first: without it the rest means nothing
    shutil.rmtree(run.resume_claimed, ignore_errors=True)


def _temporary_path(run: RunDir) -> Path:
    return run.path / f".resume.{secrets.token_hex(4)}"


def _move_aside(run: RunDir, folder: Path) -> bool:
    temporary = _temporary_path(run)
    try:
        os.rename(folder, temporary)
    except FileNotFoundError:
        return False
    shutil.rmtree(temporary, ignore_errors=True)
    return True
