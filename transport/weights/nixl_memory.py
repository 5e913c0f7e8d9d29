"""NVIDIA NIXL as the nixl transport uses it: memory that peers may read, and one-sided reads of the peers' memory.

The functions block for a while and are called from threads. Data is read from slots of the source into slots of the
receiver, and copied from there, because of what was measured with NIXL 1.5.1 (docs/rdma.md):

- A read that was given up continues to write, even after its handle is released and its peer is removed. A slot that a
  read fills is therefore kept until NIXL reports that the read has succeeded or failed.
- A process that unmaps memory while a peer reads it over TCP crashes. Slots are never unmapped while NIXL runs.
- A process that reaches the TCP ports of NIXL's UCX can read all memory of this process, even deregistered memory. So
  the kernel drops all packets to these ports, except while an authenticated peer connects.
- NIXL's own progress thread spins unless it has a delay. NIXL's Python class cannot set the delay, so this module uses
  the lower-level bindings.
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
from ..streams.connection import TransportError
from ..tcp_inspection import listening_addresses, set_port_blocked
from .base import installed_package
from .store import fresh_memory
from .ucx_settings import SETTINGS as UCX_SETTINGS
from .ucx_settings import ucx_limits

SLOT_BYTES = 4 * 2**20
"""Size of a slot in bytes: the largest piece of a transfer that a peer can announce."""
SETTINGS = {
    **UCX_SETTINGS,
    "UCX_TCP_CONN_NB": "y",  # otherwise a connection to an unreachable peer blocks all of NIXL for 134 s
    "UCX_TCP_SYN_CNT": "2",  # the kernel gives up connecting after 7 s, which frees the slot of the read
    # a TransportError reports a dead peer; the logs of UCX and NIXL would repeat that for every read without a reply
    "UCX_LOG_LEVEL": "fatal",
    "NIXL_LOG_LEVEL": "FATAL",
}
"""Environment variables that are set before NIXL starts, unless they are already set."""
_FRAGMENT_BYTES = 2**18
"""Number of bytes that one read takes from a slot. Over TCP the source's UCX replies in segments of
UCX_TCP_TX_SEG_SIZE. If a segment is sent to a peer that was killed, the next segment ends the whole process of the
source ("Fatal: unexpected error: Endpoint timeout"; docs/rdma.md). So a reply must be a single segment, and each
connection has only one read in flight."""
_PROGRESS_US = 10_000
"""Microseconds for which NIXL's thread sleeps unless UCX wakes it. An idle thread then takes 0.7 % of a core (66 % with
the default, 0)."""
_MIN_POLL_S, _MAX_POLL_S = 50e-6, 1e-3
"""Shortest and longest pause (s) between two polls of a read. The shortest is about a tenth of the time in which a slot
is read at 10 GB/s; the longest is a sixteenth of the time in which a slot is read at 2 Gbit/s."""

_LIMIT_VARIABLES = ("UCX_TLS", "UCX_NET_DEVICES")

_log = logging.getLogger("rrl.weights")


class Slot:
    """Registered memory of SLOT_BYTES. ``number`` counts slots in the order of registration."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.view = fresh_memory(SLOT_BYTES)
        self.address = int(numpy.frombuffer(self.view, numpy.uint8).ctypes.data)


class BufferClaim:
    """The right of a connection to fill its buffers. Once the claim is revoked, no buffer is written to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.revoked = False

    def revoke(self) -> None:
        """Revoke the claim. Waits for a copy in progress, which takes less than 1 ms (at most one slot)."""
        with self._lock:
            self.revoked = True

    def copy(self, data: memoryview, into: memoryview) -> None:
        """Copy ``data`` into the buffer ``into``, unless this claim was revoked."""
        with self._lock:
            if not self.revoked:
                _copy(data, into)


class Remote:
    """A peer whose slots can be read. ``users`` counts the connections to the peer and the unfinished reads from it.

    The peer is removed from NIXL once it has no user. Reads count as users, because NIXL continues to write into the
    memory of this process if a peer is removed before a read ends.
    """

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.users = 0


class NixlRuntime:
    """NIXL's runtime for one transport. Its creation blocks for 0.5 s, or longer if network cards have to be opened.

    Args:
        trusted_host: Address at which NIXL's UCX may listen for TCP, or None if UCX must not use TCP.
        rdma_ports: Active RDMA ports of this machine.

    Raises:
        ImportError: NIXL is not installed.
        TransportError: NIXL does not start, NIXL listens at an address that is not permitted, or the kernel refuses to
            block NIXL's ports.
    """

    def __init__(self, trusted_host: str | None, rdma_ports: tuple[str, ...] = ()) -> None:
        name = installed_package("nixl")
        if name is None:
            raise ImportError("the nixl transport needs NIXL: run pip install '.[nixl]' in rrl's clone")
        for key, value in SETTINGS.items():
            os.environ.setdefault(key, value)
        try:
            os.environ.update(ucx_limits(os.environ, rdma_ports, interfaces(), trusted_host))
        except ValueError as error:
            raise TransportError(f"NIXL's UCX has no permitted transport here: {error}") from error
        self._trusted_host = trusted_host
        self._nixl: Any = importlib.import_module(f"{name}._bindings")
        self.name = os.urandom(8).hex().encode()
        """Random name of this process. A restarted process has a different name, so that peers need not remove its
        earlier incarnation first."""
        self._lock = threading.Lock()
        """Protects slots, counts of users and stalled reads. NIXL is never called while this lock is held."""
        self._remotes_lock = threading.Lock()
        """Protects remotes and calls of NIXL that may block. A thread that needs both locks must take this lock before
        ``_lock``. A task that must not wait never takes this lock."""
        self._slots: list[Slot] = []
        self._free: list[Slot] = []
        self._remotes: dict[bytes, Remote] = {}
        self._stalled: list[tuple[int, Slot, Remote]] = []
        """Reads that were given up and have not ended."""
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
            hint = limits or "set UCX_LOG_LEVEL=info to see the reason"
            raise TransportError(f"NIXL's UCX finds no usable transport ({hint})") from error
        metadata = self._agent.getLocalMD()  # contains NIXL's ports; other threads may have opened ports too
        new_ports = listening_addresses() - before
        opened = sorted((host, port) for host, port in new_ports if port.to_bytes(2, "big") in metadata)
        self.ports = frozenset(port for _, port in opened)
        try:
            if forbidden := [f"{host}:{port}" for host, port in opened if host != self._trusted_host]:
                allowed = f"only {self._trusted_host} is allowed" if self._trusted_host else "it must not listen at all"
                raise TransportError(f"NIXL's UCX listens at {', '.join(forbidden)}, but {allowed}")
            self.set_ports_open(False)
        except TransportError:
            self.close()
            raise

    def set_ports_open(self, accepting: bool) -> None:
        """Set whether peers can connect to the ports of NIXL's UCX. Does not block. Raises TransportError."""
        for port in self.ports:
            try:
                set_port_blocked(port, not accepting)
            except OSError as error:
                raise TransportError(
                    f"the kernel does not let this user block NIXL's port {port} (SO_ATTACH_FILTER: {error.strerror});"
                    ' write weights = "tcp" in [transport]'
                ) from error

    def close(self) -> None:
        """Stop NIXL's thread and close its ports. No read may be in progress, except those that were given up."""
        self.ports = frozenset()
        self._agent = None
        self._stalled.clear()

    # ── serving slots ──────────────────────────────────────────────────────────────────────────────────────────────
    def local_metadata(self) -> tuple[int, bytes]:
        """Return the number of slots, and the metadata with which peers can read them."""
        with self._lock:
            slots = len(self._slots)
        return slots, self._call(self._agent.getLocalMD)

    def fill(self, data: memoryview) -> Slot:
        """Copy ``data`` into a free slot and return the slot, which the caller must give back.

        Raises TransportError if there is no free slot and no further slot can be registered.
        """
        slot = self._acquire_slot()
        _copy(data, slot.view[: data.nbytes])
        return slot

    def give_back(self, slot: Slot) -> None:
        """Free a slot. Does not block."""
        with self._lock:
            self._free.append(slot)

    # ── reading slots of peers ─────────────────────────────────────────────────────────────────────────────────────
    def add_remote(self, name: bytes, metadata: bytes) -> Remote:
        """Register a peer and return it. Every call must be matched by one release.

        ``name`` is the peer's name, and ``metadata`` is the result of the peer's :meth:`local_metadata`.

        Raises:
            TransportError: NIXL refuses the metadata, or it belongs to another peer.
        """
        self._sweep()
        with self._remotes_lock:
            if self._call(self._agent.loadRemoteMD, metadata) != name:
                raise TransportError("the NIXL metadata that a peer sent names another peer")
            remote = self._remotes.setdefault(name, Remote(name))
            with self._lock:
                remote.users += 1
            return remote

    def release_remote(self, remote: Remote) -> None:
        """Release a peer, once per :meth:`add_remote`. May block."""
        with self._lock:
            remote.users -= 1
            if remote.users:
                return
        with self._remotes_lock:
            # before this thread took the lock, another thread may have added the peer again, or even released it
            if not remote.users and self._remotes.get(remote.name) is remote:
                del self._remotes[remote.name]
                try:
                    self._call(self._agent.invalidateRemoteMD, remote.name.decode())
                except TransportError as error:
                    _log.debug("NIXL does not remove the peer %s: %s", remote.name, error)

    def read_into(self, remote: Remote, address: int, into: memoryview, claim: BufferClaim) -> None:
        """Read memory at ``address`` of ``remote``, and copy it ``into`` a buffer unless ``claim`` was revoked.

        Raises:
            TransportError: The read failed, or the peer was released.
        """
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
        """Count a read as a user of its peer, because a read may continue after the connection to the peer is lost."""
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
        """Wait until a read has ended, or until ``claim`` is revoked.

        Returns an empty text if the read succeeded, the reason if it failed, and None if the claim was revoked before
        the read ended.
        """
        outcome = self._poll(self._agent.postXferReq, read)  # for a peer on this machine, this call may copy all data
        interval = _MIN_POLL_S
        while outcome is None and not claim.revoked:
            time.sleep(interval)
            interval = min(2 * interval, _MAX_POLL_S)
            outcome = self._poll(self._agent.getXferStatus, read)
        return outcome

    def _poll(self, call: Callable[[int], Any], read: int) -> str | None:
        try:
            return None if self._call(call, read) == self._nixl.NIXL_IN_PROG else ""
        except TransportError as error:
            return str(error)

    def _sweep(self) -> None:
        """Free the slots of given-up reads that have ended."""
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
        """Return a free slot, or register another one.

        Raises:
            TransportError: The memory cannot be registered, for example because RDMA would lock more than the limit.
        """
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
        except Exception as error:  # NIXL's exceptions have no common base class
            raise TransportError(f"nixl: {type(error).__name__}: {error}") from error


def _copy(data: memoryview, into: memoryview) -> None:
    """Copy bytes while other threads run; a copy between memoryviews would block them."""
    numpy.copyto(numpy.frombuffer(into, numpy.uint8), numpy.frombuffer(data, numpy.uint8))
