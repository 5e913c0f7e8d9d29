"""The fault ``disk_full``: a file that leaves no room on the run directory's file system. Blocking.

The room is everybody's on that file system, so it is taken only where little of it is left; and whatever happens to
whoever took it, the next manager, or an agent that misses its manager, gives it back.
"""

from __future__ import annotations

import os

from rrl.manager.cluster import Refused
from rrl.spec.rundir import RunDir

MOST_FREE = 2**30
"""bytes: where more is free, filling the file system would take minutes and room that others count on"""
_BLOCKS = (2**20, 2**12, 1)
"""bytes written at once, smaller and smaller as the last of the room goes"""


def fill(run: RunDir) -> str:
    """Take all the room; says how much. Raises Refused when there is too much of it."""
    try:
        there = os.statvfs(run.path)
        free = there.f_bavail * there.f_frsize
        if free > MOST_FREE:
            raise Refused(
                f"{free / 2**30:.1f} GiB are free on the file system of {run.path}, and no more than"
                f" {MOST_FREE / 2**30:g} GiB are ever filled: others need them too"
            )
        fd = os.open(run.ballast, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    except OSError as error:
        raise Refused(str(error)) from error
    taken = 0
    try:
        for block in _BLOCKS:
            taken += _write(fd, block, MOST_FREE - taken)
        os.fsync(fd)
    except OSError:  # it is as full as it gets
        pass
    finally:
        os.close(fd)
    return f"{run.ballast} takes {taken / 2**20:.1f} MiB: nothing is left"


def give_back(run: RunDir) -> bool:
    """Remove the file; True when there was one."""
    try:
        run.ballast.unlink()
    except FileNotFoundError:
        return False
    return True


def _write(fd: int, block: int, at_most: int) -> int:
    """Blocks until none fits, or so many bytes are written."""
    data, taken = b"\1" * block, 0
    while taken + block <= at_most:
        try:
            taken += os.write(fd, data)
        except OSError:  # ENOSPC, EDQUOT
            break
    return taken
