"""Keep some space of the run directory's file system for the end of the run.

A manager carries out only actions that are in its journal. So if the file system is full, or a quota is used up, nobody
could end a run. A file of random bytes therefore reserves some space. ``rrl cancel`` releases a piece to write its
command. The manager of an ending run releases a piece to write its journal and summary. Nothing else may use the
reserve, because roles would take released space at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from ...core.run_dir import STORAGE_FULL_ERRNOS, RunDir

RESERVE_BYTES = 4 * 2**20
"""Bytes that are reserved. The last journal records and the summary of a small run take tens of kilobytes. The whole
state of a run of a thousand replicas, which is written, too, takes hundreds of kilobytes."""
RELEASE_BYTES = 2**19
"""Bytes that are released at a time. The number is small, since roles may take released space that the manager does not
use at once."""


def fill_reserve(run: RunDir) -> None:
    """Write the reserve of a run. If there is no space, remove it again and raise OSError."""
    try:
        fd = os.open(run.space_reserve, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with open(fd, "wb") as file:
            file.write(os.urandom(RESERVE_BYTES))  # random bytes, because some file systems compress other data
            file.flush()
            os.fsync(fd)
    except OSError:
        run.space_reserve.unlink(missing_ok=True)
        raise


def write_from_reserve(run: RunDir, write: Callable[[], object]) -> None:
    """Call ``write``; whenever it fails because the storage is full, release a part of the reserve and call it again.

    Raises OSError if ``write`` fails for another reason, or if the reserve is used up.
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
