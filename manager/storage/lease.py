"""The epoch lease: the proof that a manager is the only one of its run.

An epoch is claimed by creating its file and held by increasing a counter in it. No clocks of different hosts are
compared: a manager that wants to succeed another manager watches the counter for a while on its own monotonic clock. If
several managers create the next epoch's file with O_EXCL, exactly one succeeds, on any file system. flock is not used,
because it may not be available. The counter is written in place, which needs no free space: a manager whose run
directory is full keeps its lease, and says there why it waits.
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

from ...core.run_dir import RunDir
from ...core.types import OperationFailed

_log = logging.getLogger("rrl.manager")

RELEASED = -1
"""Counter of a manager that exited cleanly; its successor need not wait."""
RENEWALS_PER_TIMEOUT = 5
"""Number of renewals of a lease within its timeout."""
MAX_RENEWALS_WITHOUT_RUN_DIR = 10
"""Number of consecutive renewals that do not find the run directory before it counts as removed: two lease timeouts."""


FILE_BYTES = 512
"""Size of an epoch's file, which never changes."""
READ_TRIES = 3
"""Number of reads of an epoch's file that may meet a write of it."""
CHECKS_PER_TIMEOUT = 20
"""Number of reads of the counter within the lease timeout, so that a takeover never depends on a single read."""
CHECK_TIMEOUT_S = 1.0
"""Seconds that a decision or message waits for a check of the lease. Shared storage answers within 10 ms, or hangs."""


class LeaseHolder(Struct, frozen=True):
    """The manager that holds an epoch, as recorded in the epoch's file."""

    host: str
    pid: int
    counter: int
    """Number of renewals so far, or ``RELEASED``."""
    job: str = ""
    """Id of the manager's own Slurm job; empty if the manager has no job of its own."""
    write_errno: int = 0
    """Error number with which the journal cannot be written at present; 0 if it can be written."""


class LeaseHeld(OperationFailed):
    """Another manager is running; the text says where."""


class LeaseLost(Exception):
    """A successor has taken over. This manager must exit without any further decision or change."""


class Lease:
    """The claim on one epoch, made by :meth:`acquire`."""

    def __init__(self, run: RunDir, epoch: int, holder: LeaseHolder, timeout_s: float) -> None:
        self.epoch = epoch
        self.write_errno = 0
        """Error number with which the journal cannot be written at present; others learn it at the next renewal."""
        self._run = run
        self._holder = holder
        self._timeout_s = timeout_s
        self._checked_at = time.monotonic()
        """Monotonic time (s) at which a check last found no successor."""
        self._check_task: asyncio.Task[None] | None = None
        self._check_began = 0.0
        self._checking = asyncio.Lock()

    @classmethod
    async def acquire(cls, run: RunDir, timeout_s: float, job: str = "") -> Lease:
        """Claim the next epoch once the counter of the newest epoch has not changed for ``timeout_s`` seconds.

        Time during which the counter cannot be read, or during which this process was frozen, does not count.

        Raises:
            LeaseHeld: the counter changes, or another manager claims the epoch first.
        """
        epoch = _newest(run)
        if epoch:
            await _wait_until_still(run, epoch, timeout_s)
        holder = LeaseHolder(socket.gethostname(), os.getpid(), 0, job)
        try:
            _write(_file(run, epoch + 1), holder, os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            raise LeaseHeld(f"another manager of {run.id} has just started") from None
        return cls(run, epoch + 1, holder, timeout_s)

    def check(self) -> None:
        """Look for a successor. Blocks for as long as the storage does.

        Raises:
            LeaseLost: a successor exists.
            OSError: the storage cannot be read.
        """
        if _file(self._run, self.epoch + 1).exists():
            raise LeaseLost(f"epoch {self.epoch + 1} has begun: another manager of {self._run.id} took over")
        self._checked_at = time.monotonic()

    async def check_in_thread(self) -> None:
        """Run :meth:`check` in a thread, one check at a time.

        Called before every external action. So if the storage hangs, the action waits.
        """
        async with self._checking:
            await asyncio.to_thread(self.check)

    async def ensure_current(self) -> None:
        """Check the lease if the last check is older than half the timeout; raise LeaseLost if a successor exists.

        Called before the manager decides or sends anything. A manager that renews its lease in time needs no further
        check, but a manager that was frozen needs one. If the storage is unavailable or hangs, the manager keeps the
        lease for now, and this method returns at most ``CHECK_TIMEOUT_S`` seconds after the check began. If the check
        finds a successor later, the next call raises LeaseLost.
        """
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
        """Return the seconds since a check last found no successor."""
        return time.monotonic() - self._checked_at

    def renew(self) -> None:
        """Increase the counter. Blocks for about one write.

        Raises:
            LeaseLost: a successor exists.
            OSError: the counter cannot be written.
        """
        self.check()
        counter = self._holder.counter + 1
        self._holder = msgspec.structs.replace(self._holder, counter=counter, write_errno=self.write_errno)
        _write(_file(self._run, self.epoch), self._holder)
        self.check()  # an NFS client may have answered the first check from its cache of the folder

    async def renew_until_removed(self) -> None:
        """Renew the lease periodically; return once the run directory was removed. Raises LeaseLost."""
        removed = 0
        while removed < MAX_RENEWALS_WITHOUT_RUN_DIR:
            await asyncio.sleep(self._timeout_s / RENEWALS_PER_TIMEOUT)
            try:
                await asyncio.to_thread(self.renew)
                removed = 0
            except OSError as error:
                _log.warning("cannot renew the lease: %s", error)
                removed = removed + 1 if await asyncio.to_thread(self._run.removed) else 0

    def release(self) -> None:
        """Mark the epoch as released, so that a successor need not wait. Blocks for a write."""
        released = msgspec.structs.replace(self._holder, counter=RELEASED)
        _write(_file(self._run, self.epoch), released)


def holder(run: RunDir) -> LeaseHolder | None:
    """Return the holder of the newest epoch, whether or not it is still running.

    Returns None if no manager has started yet, or if the newest manager exited cleanly.
    """
    newest = _read(run, _newest(run))
    return None if newest is None or newest.counter == RELEASED else newest


def renewed_at(run: RunDir) -> float:
    """Return when the newest epoch's file was last written (s since 1970, on the storage's clock).

    Returns -inf before the first manager. Raises OSError.
    """
    newest = _newest(run)
    return _file(run, newest).stat().st_mtime if newest else -math.inf


def _file(run: RunDir, epoch: int) -> Path:
    return run.epochs / f"{epoch:06}"


def _write(path: Path, holder: LeaseHolder, flags: int = 0) -> None:
    """Write an epoch's file, durably and in place.

    With O_CREAT and O_EXCL in ``flags``, raise FileExistsError if it exists: only one process can create it.
    """
    with open(os.open(path, os.O_WRONLY | os.O_NOFOLLOW | flags, 0o600), "wb", buffering=0) as file:
        try:
            file.write(msgspec.json.encode(holder).ljust(FILE_BYTES))
            os.fsync(file.fileno())
        except OSError:
            if flags:  # an epoch without a holder would only delay the next manager
                path.unlink(missing_ok=True)
            raise


def _newest(run: RunDir) -> int:
    return max((int(name) for name in os.listdir(run.epochs) if name.isdigit()), default=0)


def _read(run: RunDir, epoch: int) -> LeaseHolder | None:
    for _ in range(READ_TRIES):
        with contextlib.suppress(msgspec.DecodeError):  # being written at this moment
            try:
                return msgspec.json.decode(_file(run, epoch).read_bytes(), type=LeaseHolder)
            except FileNotFoundError:
                return None
    return None


async def _wait_until_still(run: RunDir, epoch: int, timeout_s: float) -> None:
    """Return once many reads over ``timeout_s`` seconds have found the counter unchanged.

    Raises:
        LeaseHeld: the counter changes, or a newer epoch appears.
    """
    last_holder: LeaseHolder | None = None
    since = last = time.monotonic()
    logged_error = ""
    while True:
        now = time.monotonic()
        if now - last > timeout_s / 2:  # this process was frozen, and perhaps the holder too
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
                    "cannot read the lease of %s, so another manager may be running; trying again: %s",
                    run.id,
                    logged_error,
                )
        else:
            if holder is not None and holder.counter == RELEASED:
                return
            if holder is not None and last_holder is not None and holder != last_holder:
                raise LeaseHeld(f"a manager of {run.id} is running on {holder.host} (pid {holder.pid})")
            if holder != last_holder:  # the file could be read for the first time
                since = now
            last_holder, since = holder or last_holder, min(since, now)
            if now - since >= timeout_s:
                return
        await asyncio.sleep(timeout_s / CHECKS_PER_TIMEOUT)
