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


LOOKS = 20
"""within the patience, so that no single moment decides"""
LOOK_BY = 1.0
"""s that whoever wants to decide or say something waits for a look; shared storage answers within 10 ms, or hangs"""


class Holder(Struct, frozen=True):
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

    def __init__(self, run: RunDir, epoch: int, holder: Holder, patience: float) -> None:
        self.epoch = epoch
        self._run = run
        self._holder = holder
        self._patience = patience
        self._checked = time.monotonic()
        """when it was last seen that there is no successor"""
        self._look: asyncio.Task[None] | None = None
        self._look_began = 0.0
        self._checking = asyncio.Lock()

    @classmethod
    async def acquire(cls, run: RunDir, patience: float, job: str = "") -> Lease:
        """Claim the next epoch once the holder of the last one has been seen still for ``patience`` s. Time in which
        its file cannot be read, or in which we were frozen ourselves, is not seen.

        Raises LeaseHeld when its counter moves, or when somebody else claims first."""
        epoch = _newest(run)
        if epoch:
            await _wait_until_still(run, epoch, patience)
        mine = Holder(socket.gethostname(), os.getpid(), 0, job)
        try:
            _create(_file(run, epoch + 1), msgspec.json.encode(mine))
        except FileExistsError:
            raise LeaseHeld(f"another manager of {run.id} has just started") from None
        return cls(run, epoch + 1, mine, patience)

    def check(self) -> None:
        """Raises LeaseLost when a successor exists. Raises OSError where that cannot be seen. Blocks for as long as the
        storage does."""
        if _file(self._run, self.epoch + 1).exists():
            raise LeaseLost(f"epoch {self.epoch + 1} has begun: another manager of {self._run.id} took over")
        self._checked = time.monotonic()

    async def checked(self) -> None:
        """:meth:`check` in a thread, one at a time: called before every mutation, which waits while storage hangs."""
        async with self._checking:
            await asyncio.to_thread(self.check)

    async def heed(self) -> None:
        """Raises LeaseLost when a successor exists, and looks only where nobody has for half a lease: who is renewed
        has, who was frozen has not. Called before anything is decided or said. Storage that is away says nothing, nor
        does storage that hangs: the look is waited for by whoever comes within ``LOOK_BY`` of its beginning, and what
        it sees in the end is heeded then."""
        if self._look is None and time.monotonic() - self._checked >= self._patience / 2:
            self._look, self._look_began = asyncio.create_task(asyncio.to_thread(self.check)), time.monotonic()
        if (look := self._look) is None:
            return
        await asyncio.wait((look,), timeout=max(0.0, self._look_began + LOOK_BY - time.monotonic()))
        if look.done():
            self._look = None if self._look is look else self._look
            with contextlib.suppress(OSError):
                look.result()

    @property
    def age(self) -> float:
        """s since it was last seen that there is no successor."""
        return time.monotonic() - self._checked

    def renew(self) -> None:
        """Move the counter (blocking, about a write). Raises LeaseLost, or OSError when it cannot be written."""
        self.check()
        self._holder = msgspec.structs.replace(self._holder, counter=self._holder.counter + 1)
        write_atomically(_file(self._run, self.epoch), msgspec.json.encode(self._holder))
        self.check()  # an NFS client may have answered the first time from what it remembered of the folder

    def release(self) -> None:
        released = msgspec.structs.replace(self._holder, counter=RELEASED)
        write_atomically(_file(self._run, self.epoch), msgspec.json.encode(released))


def holder(run: RunDir) -> Holder | None:
    """Who holds, or last held, the newest epoch; None before the first manager or after one that left in order."""
    held = _read(run, _newest(run))
    return None if held is None or held.counter == RELEASED else held


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


def _read(run: RunDir, epoch: int) -> Holder | None:
    try:
        return msgspec.json.decode(_file(run, epoch).read_bytes(), type=Holder)
    except (FileNotFoundError, msgspec.DecodeError):  # being created at this moment
        return None


async def _wait_until_still(run: RunDir, epoch: int, patience: float) -> None:
    """Returns once the counter was seen to stand for ``patience`` s, between the first and the last of many looks."""
    seen: Holder | None = None
    since = last = time.monotonic()
    told = ""
    while True:
        now = time.monotonic()
        if now - last > patience / 2:  # we were frozen, and perhaps the holder with us
            since = now
        last = now
        try:
            if _newest(run) != epoch:
                raise LeaseHeld(f"another manager of {run.id} has just started")
            held = _read(run, epoch)
        except OSError as error:
            since = math.inf
            if str(error) != told:
                told = str(error)
                _log.warning(
                    "cannot see whether a manager of %s is running, waiting until it can be seen: %s", run.id, told
                )
        else:
            if held is not None and held.counter == RELEASED:
                return
            if held is not None and seen is not None and held != seen:
                raise LeaseHeld(f"a manager of {run.id} lives on {held.host} (pid {held.pid})")
            if held != seen:  # its first word
                since = now
            seen, since = held or seen, min(since, now)
            if now - since >= patience:
                return
        await asyncio.sleep(patience / LOOKS)
