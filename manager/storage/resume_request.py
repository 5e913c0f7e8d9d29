"""The request to resume a run that has ended: a folder with everything that the next manager needs, created atomically.

``rrl resume`` prepares a folder and renames it to ``resume/``. Of two concurrent requests exactly one wins, on any file
system, and their files are never mixed. A manager claims the request by another rename. Before this claim the run is
unchanged, and the request can be withdrawn. The manager then journals the request and replaces the run's files by the
files in the folder. If a manager dies during this procedure, its successor continues it.
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
    """The request of a user to resume the run with a job spec."""

    by: str
    """Name of the user."""
    id: str
    job: RunSpec
    """The run spec with which the run resumes."""
    source: str
    """Path of the job spec; the roles work in its folder."""
    ended: float
    """Manager's time (s) at which the run ended before the request. If the run ends again, the request is void."""


class AlreadyRequested(RuntimeError):
    """A request to resume the run has already been made."""


def write_request(run: RunDir, request: ResumeRequest, write_files: Callable[[RunDir], None]) -> None:
    """Create the request, with the files that belong to it.

    On an exception the prepared files are removed.

    Args:
        run: The run to resume.
        request: The request.
        write_files: Function that writes the files into the folder of the RunDir that is passed to it.

    Raises:
        AlreadyRequested: there is a request already.
        OSError: the run directory cannot be written.
    """
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
    return AlreadyRequested(f"{by} has already requested to resume the run; if no manager starts: rrl manage {run.id}")


def read_pending(run: RunDir) -> ResumeRequest | None:
    """Return the request that no manager has carried out yet, or None. Raises OSError if it cannot be read.

    A request that cannot be decoded is removed.
    """
    for folder in (run.resume_claimed, run.resume):
        try:
            return msgspec.json.decode((folder / _REQUEST_FILE).read_bytes(), type=ResumeRequest)
        except FileNotFoundError:
            continue
        except msgspec.MsgspecError as error:
            _log.warning("%s does not contain a valid resume request and is removed: %s", folder, error)
            _move_aside(run, folder)
    return None


def requested_at(run: RunDir) -> float:
    """Return the time of the pending request (s since 1970, on the file server's clock); 0 if there is no request.

    Raises:
        OSError: the run directory cannot be read.
    """
    for folder in (run.resume_claimed, run.resume):
        with contextlib.suppress(FileNotFoundError):
            return (folder / _REQUEST_FILE).stat().st_mtime
    return 0.0


def withdraw(run: RunDir) -> bool:
    """Remove the request; return False if a manager has claimed it already."""
    return _move_aside(run, run.resume)


def claim(run: RunDir) -> ResumeRequest | None:
    """Claim the request for the run's manager, so that it cannot be withdrawn; return it, or None if there is none."""
    if not (run.resume_claimed / _REQUEST_FILE).exists():
        with contextlib.suppress(FileNotFoundError):
            os.rename(run.resume, run.resume_claimed)
    return read_pending(run)


def install(run: RunDir) -> None:
    """Move the files of the claimed request into the run directory. Repeating it is harmless.

    Called only after the request has been journaled.
    """
    for path in run.resume_claimed.iterdir() if run.resume_claimed.exists() else ():
        if path.name != _REQUEST_FILE:
            os.replace(path, run.path / path.name)
    discard(run)


def discard(run: RunDir) -> None:
    """Remove the claimed request."""
    (run.resume_claimed / _REQUEST_FILE).unlink(missing_ok=True)  # first: without it the other files are ignored
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
