"""Keep some space of the run directory's file system for the end of the run.

A manager carries out only what is in its journal, so a full file system (or a used-up quota) would leave a run that
nobody can end. A file of random bytes therefore holds some space, which is released piece by piece: by ``rrl cancel``
for its command, and by the manager of an ending run for its journal and summary. The space is released for nothing
else, because the roles would take it at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from ...core.run_dir import STORAGE_FULL_ERRNOS, RunDir

RESERVE_BYTES = 4 * 2**20
"""Bytes that are reserved. For a small run, the journal records of its end and its summary take some ten kilobytes. For
a run of a thousand replicas, the whole state, which is written once more, takes some hundred kilobytes."""
RELEASE_BYTES = 2**19
"""Bytes that are released at a time: the roles may take what the manager does not use at once."""


def fill_reserve(run: RunDir) -> None:
    """Write the reserve of a run. Raises OSError if there is no space; nothing of it is left then."""
    try:
        fd = os.open(run.space_reserve, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with open(fd, "wb") as file:
            file.write(os.urandom(RESERVE_BYTES))  # random, because some file systems compress
            file.flush()
            os.fsync(fd)
    except OSError:
        run.space_reserve.unlink(missing_ok=True)
        raise


def write_from_reserve(run: RunDir, write: Callable[[], object]) -> None:
    """Call ``write``; whenever it fails for want of space, release a part of the reserve and call it again.

    Raises OSError if it fails for another reason, or if the reserve is used up.
    """
    while True:
        try:
            write()
            return
        except OSError as error:
            if error.errno not in STORAGE_FULL_ERRNOS or not _release(run):
                raise


def _release(run: RunDir) -> bool:
    """Release ``RELEASE_BYTES`` of the reserve; return whether there was anything to release."""
    try:
        fd = os.open(run.space_reserve, os.O_WRONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        if not (size := os.fstat(fd).st_size):
            return False
        os.ftruncate(fd, max(0, size - RELEASE_BYTES))
        os.fsync(fd)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
