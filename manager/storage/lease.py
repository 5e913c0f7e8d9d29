"""One manager at a time: an epoch is claimed by creating its file, and kept by a counter that goes on changing.

Nobody's clock is compared with anybody else's: whoever wants to succeed watches the counter for a while by its own
monotonic clock. Creating the next epoch's file O_EXCL has exactly one winner, on any file system; flock may be absent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import socket
import time
from pathlib import Path

import msgspec
from msgspec import Struct

from ...core.run_dir import RunDir, write_atomically

_log = logging.getLogger("rrl.manager")

RELEASED = -1
"""Counter of a manager that left in order: its successor need not wait."""


CHECKS_PER_TIMEOUT = 20
"""within the patience, so that no single moment decides"""
CHECK_TIMEOUT_S = 1.0
"""s that whoever wants to decide or say something waits for a look; shared storage answers within 10 ms, or hangs"""


class LeaseHolder(Struct, frozen=True):
    host: str
    pid: int
    counter: int
    job: str = ""
    """the manager's own Slurm job"""


class LeaseHeld(Exception):
    """Another manager lives; the text says where."""


class LeaseLost(Exception):
    """A successor has taken over: decide nothing, touch nothing, leave."""


class Lease:
    """The claim on one epoch. Make it with :meth:`acquire`."""

    def __init__(self, run: RunDir, epoch: int, holder: LeaseHolder, timeout_s: float) -> None:
        self.epoch = epoch
        self._run = run
        self._holder = holder
        self._timeout_s = timeout_s
        self._checked_at = time.monotonic()
        """when it was last seen that there is no successor"""
        self._check_task: asyncio.Task[None] | None = None
        self._check_began = 0.0
        self._checking = asyncio.Lock()

    @classmethod
    async def acquire(cls, run: RunDir, timeout_s: float, job: str = "") -> Lease:
        """Claim the next epoch once the holder of the last one has been seen still for ``timeout_s`` s. Time in which
        its file cannot be read, or in which we were frozen ourselves, is not seen.

        Raises LeaseHeld when its counter moves, or when somebody else claims first."""
        epoch = _newest(run)
        if epoch:
            await _wait_until_still(run, epoch, timeout_s)
        holder = LeaseHolder(socket.gethostname(), os.getpid(), 0, job)
        try:
            _create(_file(run, epoch + 1), msgspec.json.encode(holder))
        except FileExistsError:
            raise LeaseHeld(f"another manager of {run.id} has just started") from None
        return cls(run, epoch + 1, holder, timeout_s)

    def check(self) -> None:
        """Raises LeaseLost when a successor exists. Raises OSError where that cannot be seen. Blocks for as long as the
        storage does."""
        if _file(self._run, self.epoch + 1).exists():
            raise LeaseLost(f"epoch {self.epoch + 1} has begun: another manager of {self._run.id} took over")
        self._checked_at = time.monotonic()

    async def check_in_thread(self) -> None:
        """:meth:`check` in a thread, one at a time: called before every mutation, which waits while storage hangs."""
        async with self._checking:
            await asyncio.to_thread(self.check)

    async def ensure_current(self) -> None:
        """Raises LeaseLost when a successor exists, and looks only where nobody has for half a lease: who is renewed
        has, who was frozen has not. Called before anything is decided or said. Storage that is away says nothing, nor
        does storage that hangs: the look is waited for by whoever comes within ``CHECK_TIMEOUT_S`` of its beginning, and what
        it sees in the end is heeded then."""
        if self._check_task is None and time.monotonic() - self._checked_at >= self._timeout_s / 2:
            self._check_task, self._check_began = asyncio.create_task(asyncio.to_thread(self.check)), time.monotonic()
        if (task := self._check_task) is None:
            return
        await asyncio.wait((task,), timeout=max(0.0, self._check_began + CHECK_TIMEOUT_S - time.monotonic()))
        if task.done():
            self._check_task = None if self._check_task is task else self._check_task
            with contextlib.suppress(OSError):
                task.result()

    @property
    def age(self) -> float:
        """s since it was last seen that there is no successor."""
        return time.monotonic() - self._checked_at

    def renew(self) -> None:
        """Move the counter (blocking, about a write). Raises LeaseLost, or OSError when it cannot be written."""
        self.check()
        self._holder = msgspec.structs.replace(self._holder, counter=self._holder.counter + 1)
        write_atomically(_file(self._run, self.epoch), msgspec.json.encode(self._holder))
        self.check()  # an NFS client may have answered the first time from what it remembered of the folder

    def release(self) -> None:
        released = msgspec.structs.replace(self._holder, counter=RELEASED)
        write_atomically(_file(self._run, self.epoch), msgspec.json.encode(released))


def holder(run: RunDir) -> LeaseHolder | None:
    """Who holds, or last held, the newest epoch; None before the first manager or after one that left in order."""
    newest = _read(run, _newest(run))
    return None if newest is None or newest.counter == RELEASED else newest


def renewed_at(run: RunDir) -> float:
    """When the newest epoch's file was last written (s since the epoch, by the clock of the storage); -inf before the
    first manager. Raises OSError."""
    newest = _newest(run)
    return _file(run, newest).stat().st_mtime if newest else -math.inf


def _file(run: RunDir, epoch: int) -> Path:
    return run.epochs / f"{epoch:06}"


def _create(path: Path, data: bytes) -> None:
    """Raises FileExistsError: on any file system exactly one creates it."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _newest(run: RunDir) -> int:
    return max((int(name) for name in os.listdir(run.epochs) if name.isdigit()), default=0)


def _read(run: RunDir, epoch: int) -> LeaseHolder | None:
    try:
        return msgspec.json.decode(_file(run, epoch).read_bytes(), type=LeaseHolder)
    except (FileNotFoundError, msgspec.DecodeError):  # being created at this moment
        return None


async def _wait_until_still(run: RunDir, epoch: int, timeout_s: float) -> None:
    """Returns once the counter was seen to stand for ``timeout_s`` s, between the first and the last of many looks."""
    last_holder: LeaseHolder | None = None
    since = last = time.monotonic()
    logged_error = ""
    while True:
        now = time.monotonic()
        if now - last > timeout_s / 2:  # we were frozen, and perhaps the holder with us
            since = now
        last = now
        try:
            if _newest(run) != epoch:
                raise LeaseHeld(f"another manager of {run.id} has just started")
            holder = _read(run, epoch)
        except OSError as error:
            since = math.inf
            if str(error) != logged_error:
                logged_error = str(error)
                _log.warning(
                    "cannot see whether a manager of %s is running, waiting until it can be seen: %s",
                    run.id,
                    logged_error,
                )
        else:
            if holder is not None and holder.counter == RELEASED:
                return
            if holder is not None and last_holder is not None and holder != last_holder:
                raise LeaseHeld(f"a manager of {run.id} lives on {holder.host} (pid {holder.pid})")
            if holder != last_holder:  # its first word
                since = now
            last_holder, since = holder or last_holder, min(since, now)
            if now - since >= timeout_s:
                return
        await asyncio.sleep(timeout_s / CHECKS_PER_TIMEOUT)
