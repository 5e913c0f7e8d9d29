"""NVIDIA NIXL, as the nixl pipe uses it: memory that others may read, and one-sided reads of theirs.

What is here blocks for a while and is called from threads. What was measured of NIXL 1.5.1 (docs/rdma.md) is why
the bytes are read from slots into slots, and copied from there:

- A read that was given up goes on writing, also after its handle is released and its peer is removed. A slot that is
  being read into is therefore kept until NIXL says that the read has ended, however it did.
- Memory that is unmapped while somebody reads it over TCP crashes the process that it was in. Slots are never unmapped
  while NIXL runs.
- Deregistered memory can still be read over TCP, and so can all other: whoever reaches the ports of NIXL's UCX can read
  what this process has. So the kernel drops what comes there but when somebody who has proved itself connects.
- NIXL's own progress thread spins unless it is given a delay, which its Python class does not pass on: hence its
  bindings.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy

from ..address import interfaces
from ..tcp_inspection import listening_addresses, set_port_blocked
from .base import TransportError, installed_package
from .store import fresh_memory
from .ucx_settings import SETTINGS as UCX_SETTINGS
from .ucx_settings import ucx_limits

SLOT_BYTES = 4 * 2**20
"""what is read at once"""
SETTINGS = {
    **UCX_SETTINGS,
    "UCX_TCP_CONN_NB": "y",  # else all of NIXL stands still while it connects to who is unreachable: 134 s
    "UCX_TCP_SYN_CNT": "2",  # the kernel gives that up after 7 s then: a read's slot is kept for as long
    "UCX_LOG_LEVEL": "fatal",  # a peer that dies is told of by a PipeError; both logs would tell of it again,
    "NIXL_LOG_LEVEL": "FATAL",  # and of every read that it had not answered
}
"""Set before NIXL starts, unless the environment says otherwise."""
_FRAGMENT_BYTES = 2**18
"""of a slot, read one after the other. Over TCP the holder's UCX answers, in segments of UCX_TCP_TX_SEG_SIZE: where one
of them meets a connection whose other end was killed, the next one ends the whole process ("Fatal: unexpected error:
Endpoint timeout"; docs/rdma.md). So an answer is to be one segment, and one read of a line under way"""
_PROGRESS_US = 10_000
"""us; NIXL's thread sleeps until UCX wakes it, or for so long: idle it takes 0.7 % of a core (of 0, its default: 66)"""
_MIN_POLL_S, _MAX_POLL_S = 50e-6, 1e-3
"""s between two looks at a read: from a tenth of what a slot takes at 10 GB/s to a sixteenth of it at 2 Gbit/s"""

_LIMIT_VARIABLES = ("UCX_TLS", "UCX_NET_DEVICES")

_log = logging.getLogger("rrl.weights")


class Slot:
    """Registered memory of SLOT_BYTES. ``number`` counts in the order of registration."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.view = fresh_memory(SLOT_BYTES)
        self.address = int(numpy.frombuffer(self.view, numpy.uint8).ctypes.data)


class BufferClaim:
    """What a line has on the buffers that it was told to fill. Once it is given up, none of them is written to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.revoked = False

    def revoke(self) -> None:
        """Waits for a copy that is under way, which is of one slot: less than 1 ms."""
        with self._lock:
            self.revoked = True

    def copy(self, data: memoryview, into: memoryview) -> None:
        with self._lock:
            if not self.revoked:
                _copy(data, into)


class Remote:
    """Somebody whose slots can be read. ``users``: lines to it, and reads from it that have not ended. NIXL forgets it
    with the last of them: of a read whose remote it has forgotten it says that there is none, and goes on writing."""

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.users = 0


class NixlRuntime:
    """NIXL's runtime of one pipe. To make one blocks for 0.5 s, longer where there are cards to be opened.

    ``trusted_host``: the address at which its UCX may listen for TCP; None: it may not use TCP.
    Raises ImportError where NIXL is not installed, and PipeError where it does not start, listens anywhere else, or
    the kernel does not let us close its ports.
    """

    def __init__(self, trusted_host: str | None, rdma_ports: tuple[str, ...] = ()) -> None:
        name = installed_package("nixl")
        if name is None:
            raise ImportError("the nixl pipe needs NIXL: pip install '.[nixl]' in rrl's clone")
        for key, value in SETTINGS.items():
            os.environ.setdefault(key, value)
        try:
            os.environ.update(ucx_limits(os.environ, rdma_ports, interfaces(), trusted_host))
        except ValueError as error:
            raise TransportError(f"NIXL's UCX may use nothing here: {error}") from error
        self._trusted_host = trusted_host
        self._nixl: Any = importlib.import_module(f"{name}._bindings")
        self.name = os.urandom(8).hex().encode()
        """random: a process that was started again is somebody else, and nobody has to forget its former life first"""
        self._lock = threading.Lock()
        """over slots, counts of users and stalled reads; NIXL is never called with it held"""
        self._remotes_lock = threading.Lock()
        """over remotes, and over calls of NIXL that may block: never taken by who must not wait. Taken before _lock"""
        self._slots: list[Slot] = []
        self._free: list[Slot] = []
        self._remotes: dict[bytes, Remote] = {}
        self._stalled: list[tuple[int, Slot, Remote]] = []
        """reads that nobody waits for any more, and that have not ended"""
        self._start()

    def _start(self) -> None:
        config = self._nixl.nixlAgentConfig()
        config.useProgThread, config.pthrDelay = True, _PROGRESS_US
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_STRICT
        before = listening_addresses()
        self._agent = self._call(self._nixl.nixlAgent, self.name.decode(), config)
        try:
            self._call(self._agent.createBackend, "UCX", {})
        except TransportError as error:
            limits = ", ".join(f"{key}={os.environ[key]}" for key in _LIMIT_VARIABLES if key in os.environ)
            why = limits or "UCX_LOG_LEVEL=info says why"
            raise TransportError(f"NIXL's UCX finds nothing to work with ({why})") from error
        own_metadata = self._agent.getLocalMD()  # names its ports: others may have opened some meanwhile
        opened = sorted(at for at in listening_addresses() - before if at[1].to_bytes(2, "big") in own_metadata)
        self.ports = frozenset(port for _, port in opened)
        try:
            if astray := [f"{address}:{port}" for address, port in opened if address != self._trusted_host]:
                may = self._trusted_host or "no port"
                raise TransportError(f"NIXL's UCX listens at {', '.join(astray)}; it may only at {may}")
            self.set_ports_open(False)
        except TransportError:
            self.close()
            raise

    def set_ports_open(self, accepting: bool) -> None:
        """Whether anybody can connect to the ports of NIXL's UCX. Does not block. Raises PipeError."""
        for port in self.ports:
            try:
                set_port_blocked(port, not accepting)
            except OSError as error:
                raise TransportError(
                    f"the kernel does not let this user close NIXL's port {port} (SO_ATTACH_FILTER: {error.strerror});"
                    ' write weights = "tcp"'
                ) from error

    def close(self) -> None:
        """Stop NIXL's thread and close its ports. Nothing may be under way but reads that nobody waits for."""
        self.ports = frozenset()
        self._agent = None
        self._stalled.clear()

    # ── what others read ───────────────────────────────────────────────────────────────────────────────────────────
    def local_metadata(self) -> tuple[int, bytes]:
        """How many slots there are, and what others must know to read them."""
        with self._lock:
            slots = len(self._slots)
        return slots, self._call(self._agent.getLocalMD)

    def fill(self, data: memoryview) -> Slot:
        """A slot that holds ``data``, to be given back. Raises PipeError."""
        slot = self._acquire_slot()
        _copy(data, slot.view[: data.nbytes])
        return slot

    def give_back(self, slot: Slot) -> None:
        """Does not block."""
        with self._lock:
            self._free.append(slot)

    # ── what we read ───────────────────────────────────────────────────────────────────────────────────────────────
    def add_remote(self, name: bytes, metadata: bytes) -> Remote:
        """Who it is that :meth:`told` us so, to be left once for each time. Raises PipeError."""
        self._sweep()
        with self._remotes_lock:
            if self._call(self._agent.loadRemoteMD, metadata) != name:
                raise TransportError("what NIXL was told is of somebody else")
            remote = self._remotes.setdefault(name, Remote(name))
            with self._lock:
                remote.users += 1
            return remote

    def release_remote(self, remote: Remote) -> None:
        """Once for each time that it was met. May block."""
        with self._lock:
            remote.users -= 1
            if remote.users:
                return
        with (
            self._remotes_lock
        ):  # it may have been met again meanwhile, or forgotten: by who met and left it in between
            if not remote.users and self._remotes.get(remote.name) is remote:
                del self._remotes[remote.name]
                try:
                    self._call(self._agent.invalidateRemoteMD, remote.name.decode())
                except TransportError as error:
                    _log.debug("NIXL does not forget %s: %s", remote.name, error)

    def read_into(self, remote: Remote, address: int, into: memoryview, claim: BufferClaim) -> None:
        """Read what lies at ``address`` of ``remote``, and copy it ``into`` where it belongs unless the ``claim`` on
        that was given up. Raises PipeError, also when everybody has left it."""
        slot = self._acquire_slot()
        try:
            self._add_user(remote)
        except TransportError:
            self.give_back(slot)
            raise
        outcome: str | None = ""
        for at in range(0, into.nbytes, _FRAGMENT_BYTES):
            if claim.revoked:
                break
            nbytes = min(_FRAGMENT_BYTES, into.nbytes - at)
            try:
                read = self._begin(remote, address + at, slot.address + at, nbytes)
            except TransportError as error:
                outcome = str(error)
                break
            outcome = self._wait(read, claim)
            if outcome is None:
                with self._lock:
                    self._stalled.append((read, slot, remote))
                return
            self._release(read)
            if outcome:
                break
        if not outcome:
            claim.copy(slot.view[: into.nbytes], into)
        self.give_back(slot)
        self.release_remote(remote)
        if outcome:
            raise TransportError(outcome)

    def _add_user(self, remote: Remote) -> None:
        """From here on the read is a user of its remote: whose line is aborted leaves it while the read goes on."""
        with self._lock:
            if not remote.users:
                raise TransportError("the connection was aborted")
            remote.users += 1

    def _begin(self, remote: Remote, address: int, into: int, nbytes: int) -> int:
        local, remote_piece = self._descriptor(into, nbytes), self._descriptor(address, nbytes)
        read: int = self._call(
            self._agent.createXferReq, self._nixl.NIXL_READ, local, remote_piece, remote.name.decode()
        )
        return read

    def _wait(self, read: int, claim: BufferClaim) -> str | None:
        """Empty when the bytes are in, else why they are not; None when it was given up and goes on."""
        outcome = self._poll(self._agent.postXferReq, read)  # within a machine it may copy all of it here and now
        wait = _MIN_POLL_S
        while outcome is None and not claim.revoked:
            time.sleep(wait)
            wait = min(2 * wait, _MAX_POLL_S)
            outcome = self._poll(self._agent.getXferStatus, read)
        return outcome

    def _poll(self, call: Callable[[int], Any], read: int) -> str | None:
        try:
            return None if self._call(call, read) == self._nixl.NIXL_IN_PROG else ""
        except TransportError as error:
            return str(error)

    def _sweep(self) -> None:
        """Let go of the reads that have ended since nobody waits for them."""
        with self._lock:
            stalled, self._stalled = self._stalled, []
        for read, slot, remote in stalled:
            if self._poll(self._agent.getXferStatus, read) is None:
                with self._lock:
                    self._stalled.append((read, slot, remote))
            else:
                self._release(read)
                self.give_back(slot)
                self.release_remote(remote)

    def _release(self, read: int) -> None:
        try:
            self._call(self._agent.releaseXferReq, read)
        except TransportError as error:
            _log.debug("NIXL does not release a read that has ended: %s", error)

    # ── memory ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def _acquire_slot(self) -> Slot:
        """A free slot, or one more. Raises PipeError: RDMA locks it, and there may be a limit to that."""
        if not self._free:
            self._sweep()
        with self._lock:
            if self._free:
                return self._free.pop()
        with self._remotes_lock:
            slot = Slot(len(self._slots))
            area = self._nixl.nixlRegDList(self._nixl.DRAM_SEG, [(slot.address, SLOT_BYTES, 0, b"")])
            self._call(self._agent.registerMem, area, [])
            with self._lock:
                self._slots.append(slot)
            return slot

    def _descriptor(self, address: int, nbytes: int) -> Any:
        return self._nixl.nixlXferDList(self._nixl.DRAM_SEG, [(address, nbytes, 0)])

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:  # NIXL has a family of its own, without a common parent
            raise TransportError(f"nixl: {type(error).__name__}: {error}") from error


def _copy(data: memoryview, into: memoryview) -> None:
    """Lets other threads run, unlike a memoryview's own copy."""
    numpy.copyto(numpy.frombuffer(into, numpy.uint8), numpy.frombuffer(data, numpy.uint8))
