"""Properties of the nixl transport alone: slots that peers read, NIXL's ports, and frames. These tests need NIXL."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from rrl.tests.support.listening_manager import eventually, wait_until
from rrl.tests.support.security import attacks
from rrl.tests.support.weights.source import VERSION, content, described
from rrl.tests.support.weights.transports import (
    CHUNK,
    SECRET,
    SIZE,
    TIMEOUT_S,
    calm,
    complete,
    holding,
    served,
    transport_for,
    weight_source,
)
from rrl.transport.streams.connection import Connection, TransportError, authenticate
from rrl.transport.tcp_inspection import listening_addresses
from rrl.transport.weights import base as pipes
from rrl.transport.weights import nixl, nixl_memory, protocol, select
from rrl.transport.weights.nixl import NixlTransport
from rrl.transport.weights.nixl_memory import SLOT_BYTES, BufferClaim, NixlRuntime, Remote
from rrl.transport.weights.pull import pull
from rrl.transport.weights.store import WeightStore
from rrl.transport.weights.tcp import listen


# ── reads ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[NixlRuntime]:
    """Yield a runtime that reads over TCP, as between machines.

    Within a machine, memory would be read without any action of its owner.
    """
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    made = NixlRuntime("127.0.0.1")
    try:
        yield made
    finally:
        made.close()


class Other:
    """A process with a slot: memory that peers read over NIXL."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        name, metadata, address = process.stdout.readline().split()
        self.pid = process.pid
        self.name, self.replies, self.address = name.encode(), bytes.fromhex(metadata), int(address)


@contextmanager
def other() -> Iterator[Other]:
    argv = [sys.executable, "-m", "rrl.tests.support.weights.slots"]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Other(process)
    finally:
        process.kill()
        process.communicate()


def read(reads: NixlRuntime, remote: Remote, address: int) -> memoryview:
    into = memoryview(bytearray(SLOT_BYTES))
    reads.read_into(remote, address, into, BufferClaim())
    return into


def refused(reads: NixlRuntime, remote: Remote, address: int) -> bool:
    try:
        read(reads, remote, address)
    except TransportError as error:
        return "nixl: " in str(error)
    return False


def came(slot: nixl_memory.Slot) -> bool:
    """Return whether the slot has the fragment that was on its way when the read was abandoned."""
    return slot.view[: nixl_memory._FRAGMENT_BYTES] == content(nixl_memory._FRAGMENT_BYTES)


def test_abandoned_read_keeps_its_slot_until_it_has_ended(reads: NixlRuntime) -> None:
    with other() as stopped:
        remote = reads.add_remote(stopped.name, stopped.replies)
        os.kill(stopped.pid, signal.SIGSTOP)
        claim, into = BufferClaim(), memoryview(bytearray(SLOT_BYTES))
        landing = threading.Thread(target=reads.read_into, args=(remote, stopped.address, into, claim))
        landing.start()
        wait_until(lambda: len(reads._slots) == 1)
        claim.revoke()
        landing.join(TIMEOUT_S)
        assert not landing.is_alive()
        reads.release_remote(remote)
        slot = reads._acquire_slot()
        assert slot is not reads._slots[0]
        reads.give_back(slot)
        assert reads._slots[0].view == bytes(SLOT_BYTES)
        os.kill(stopped.pid, signal.SIGCONT)

        def swept() -> bool:
            reads._sweep()
            return reads._slots[0] in reads._free

        wait_until(swept)
        assert came(reads._slots[0])  # the read continued, into a slot that no other read uses
        assert into == bytes(SLOT_BYTES)
        assert reads._remotes == {}


class Landing:
    """A thread that reads from a stopped peer, and polls its read once.

    It then sleeps until the test lets it continue.
    """

    def __init__(self, reads: NixlRuntime, remote: Remote, address: int) -> None:
        self.polls, self.goes_on = threading.Event(), threading.Event()
        self.claim = BufferClaim()
        self.into = memoryview(bytearray(SLOT_BYTES))
        self._poll = reads._poll
        reads._poll = self._poll_once  # type: ignore[method-assign, assignment]
        self.thread = threading.Thread(target=reads.read_into, args=(remote, address, self.into, self.claim))
        self.thread.start()
        assert self.polls.wait(TIMEOUT_S)

    def _poll_once(self, poll: Callable[[int], Any], read: int) -> str | None:
        assert not self.polls.is_set() or self.goes_on.wait(TIMEOUT_S)
        outcome = self._poll(poll, read)
        self.polls.set()
        return outcome


@contextmanager
def stopped(reads: NixlRuntime) -> Iterator[tuple[Other, Remote, Landing]]:
    with other() as still:
        remote = reads.add_remote(still.name, still.replies)
        os.kill(still.pid, signal.SIGSTOP)
        landing = Landing(reads, remote, still.address)
        try:
            yield still, remote, landing
        finally:
            landing.claim.revoke()
            landing.goes_on.set()
            landing.thread.join(TIMEOUT_S)
        assert landing.into == bytes(SLOT_BYTES)


def swept(reads: NixlRuntime) -> bool:
    reads._sweep()
    return not reads._stalled


def test_connection_abandoned_during_a_read_leaves_its_slot_to_the_read(reads: NixlRuntime) -> None:
    """As with a real connection, the reader releases its peer while the thread that reads sleeps between two polls."""
    with stopped(reads) as (still, remote, landing):
        landing.claim.revoke()
        reads.release_remote(remote)
        landing.goes_on.set()
        landing.thread.join(TIMEOUT_S)
        assert not landing.thread.is_alive()
        slot = reads._acquire_slot()
        os.kill(still.pid, signal.SIGCONT)
        wait_until(lambda: came(reads._slots[0]))
        wait_until(lambda: swept(reads))
        assert slot is not reads._slots[0]
        assert slot.view == bytes(SLOT_BYTES)
        assert reads._free == [reads._slots[0]]
        assert (reads._remotes, remote.users) == ({}, 0)


def test_connection_closed_while_nixl_is_busy_does_not_delay_other_reads(reads: NixlRuntime) -> None:
    """The reader releases its peer during a registration that takes long, and its thread continues."""
    with stopped(reads) as (still, remote, landing):
        leaving = threading.Thread(target=reads.release_remote, args=(remote,))
        with reads._remotes_lock:
            landing.claim.revoke()
            leaving.start()
            landing.polls.clear()
            landing.goes_on.set()
            assert landing.polls.wait(TIMEOUT_S)
        for thread in (leaving, landing.thread):
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()
        assert len(reads._stalled) == 1
        os.kill(still.pid, signal.SIGCONT)
        wait_until(lambda: swept(reads))
        assert (reads._remotes, remote.users) == ({}, 0)
        again = reads.add_remote(still.name, still.replies)
        assert read(reads, again, still.address) == content(SLOT_BYTES)
        reads.release_remote(again)


def test_peer_without_connections_is_no_longer_read(reads: NixlRuntime) -> None:
    with other() as one:
        remote = reads.add_remote(one.name, one.replies)
        reads.release_remote(remote)
        with pytest.raises(TransportError, match="aborted"):
            read(reads, remote, one.address)
        again = reads.add_remote(one.name, one.replies)
        assert again is not remote
        assert read(reads, again, one.address) == content(SLOT_BYTES)
        reads.release_remote(again)
    assert len(reads._free) == len(reads._slots) == 1


def test_killed_peer_fails_one_read_and_the_next_peer_is_read(reads: NixlRuntime) -> None:
    for _ in range(2):
        with other() as one:
            remote = reads.add_remote(one.name, one.replies)
            assert read(reads, remote, one.address) == content(SLOT_BYTES)
            os.kill(one.pid, signal.SIGKILL)
            wait_until(lambda: refused(reads, remote, one.address))  # noqa: B023 - bytes on their way may still arrive
            reads.release_remote(remote)
            with pytest.raises(TransportError, match="aborted"):
                read(reads, remote, one.address)
    assert (reads._remotes, reads._stalled, len(reads._slots)) == ({}, [], 1)


READER = """
import sys, threading
from rrl.transport.weights.nixl_memory import SLOT_BYTES, BufferClaim, NixlRuntime

reads, (name, metadata, address) = NixlRuntime("127.0.0.1"), sys.argv[1:]
remote = reads.add_remote(name.encode(), bytes.fromhex(metadata))

def land():
    reads.read_into(remote, int(address), memoryview(bytearray(SLOT_BYTES)), BufferClaim())

def looked(ask, read, look=reads._poll):
    outcome = look(ask, read)
    print("asked", flush=True)
    return outcome

land()
print("read", flush=True)
sys.stdin.readline()
reads._poll = looked
land()
"""


def test_reader_killed_while_its_holder_is_stopped_does_not_affect_the_holder(reads: NixlRuntime) -> None:
    """UCX would end a holder that sent an answer of several segments to a closed connection."""
    with other() as holder:
        argv = [sys.executable, "-c", READER, holder.name.decode(), holder.replies.hex(), str(holder.address)]
        for _ in range(2):
            reader = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert reader.stdin is not None
            assert reader.stdout is not None
            try:
                assert reader.stdout.readline() == "read\n"
                os.kill(holder.pid, signal.SIGSTOP)
                reader.stdin.write("\n")
                reader.stdin.flush()
                assert reader.stdout.readline() == "asked\n"
            finally:
                reader.kill()
                reader.communicate()
                os.kill(holder.pid, signal.SIGCONT)
            remote = reads.add_remote(holder.name, holder.replies)
            assert read(reads, remote, holder.address) == content(SLOT_BYTES)
            reads.release_remote(remote)


def test_abandoned_buffer_is_not_written_to() -> None:
    claim, into = BufferClaim(), memoryview(bytearray(10))
    claim.copy(content(10), into)
    assert into == content(10)
    claim.revoke()
    claim.copy(memoryview(bytes(10)), into)
    assert into == content(10)


def test_unreachable_peer_does_not_delay_other_reads(reads: NixlRuntime) -> None:
    far, near = NixlRuntime("127.0.0.1"), NixlRuntime("127.0.0.1")
    try:
        near.set_ports_open(True)
        slot = far.fill(content(10))
        away = reads.add_remote(far.name, far.local_metadata()[1])  # all bytes that are sent to its ports are dropped
        claim, into = BufferClaim(), memoryview(bytearray(10))
        landing = threading.Thread(target=reads.read_into, args=(away, slot.address, into, claim))
        landing.start()
        slot = near.fill(content(SLOT_BYTES))
        remote = reads.add_remote(near.name, near.local_metadata()[1])
        assert read(reads, remote, slot.address) == content(SLOT_BYTES)
        claim.revoke()
        landing.join(TIMEOUT_S)
        assert into == bytes(10)
        for one in (away, remote):
            reads.release_remote(one)
    finally:
        far.close()
        near.close()


def test_metadata_of_another_peer_is_refused(reads: NixlRuntime) -> None:
    with pytest.raises(TransportError):
        reads.add_remote(b"0" * 16, b"garbage")
    other = NixlRuntime("127.0.0.1")
    with pytest.raises(TransportError, match="another peer"):
        reads.add_remote(b"0" * 16, other.local_metadata()[1])
    other.close()


# ── ports ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def deaf(reads: NixlRuntime) -> bool:
    """Return whether no process can connect to the first port of NIXL's UCX."""
    ports = [at for at in attacks.ports_of(os.getpid()) if at[1] in reads.ports]
    assert ports
    return all(attacks.deaf(at) for at in ports[:1])


def runtime(transport: Any) -> NixlRuntime:
    assert isinstance(transport, NixlTransport)
    assert transport._starting is not None
    return transport._starting.result().runtime


async def test_nixl_ports_accept_packets_only_while_a_member_connects() -> None:
    async with transport_for("nixl") as source, transport_for("nixl") as pipe:
        at = await source.serve(holding(), "127.0.0.1")
        reads = runtime(source)
        assert await asyncio.to_thread(deaf, reads)
        heard: list[bool] = []
        hear = reads.set_ports_open

        def noted(hears: bool) -> None:
            heard.append(hears)
            hear(hears)

        reads.set_ports_open = noted  # type: ignore[method-assign, assignment]
        await pipe.fetch(at, VERSION, range(SIZE), memoryview(bytearray(SIZE)), TIMEOUT_S)
        await eventually(lambda: heard == [True, False] * (len(heard) // 2) and bool(heard))
        assert await asyncio.to_thread(deaf, reads)


# ── lines ──────────────────────────────────────────────────────────────────────────────────────────────────────────
async def test_request_to_a_holder_that_waits_for_slots_is_answered_later() -> None:
    size, chunk = 40 * CHUNK, 20 * CHUNK

    store, flat = WeightStore(), content(size)
    store.offer(described(VERSION, flat, SECRET, chunk), flat)
    async with served("nixl", store) as at, transport_for("nixl") as pipe:
        parts = [memoryview(bytearray(chunk)), memoryview(bytearray(chunk)), memoryview(bytearray(7))]
        spans = [range(chunk), range(chunk, size), range(1, 8)]
        both = zip(spans, parts, strict=True)
        await asyncio.gather(*(pipe.fetch(at, VERSION, span, part, TIMEOUT_S) for span, part in both))
        assert parts[0] == flat[:chunk]
        assert parts[1] == flat[chunk:]
        assert parts[2] == flat[1:8]

    assert chunk > nixl._MAX_UNREAD_SLOTS * SLOT_BYTES


async def test_reader_that_takes_nothing_holds_few_slots_until_it_is_gone() -> None:
    async with transport_for("nixl") as source, transport_for("nixl") as pipe, transport_for("nixl") as other:
        at = await source.serve(holding(size=20 * CHUNK), "127.0.0.1")
        reads = runtime(source)
        idle = await pipe._dial(at)  # type: ignore[attr-defined]
        await authenticate(idle, SECRET, dialled=True)
        whole = (protocol._KIND_RANGE, VERSION.step, VERSION.incarnation, 0, 20 * CHUNK, protocol._NO_BASE)
        await idle.send(protocol._REQUEST.pack(*whole))
        await eventually(lambda: len(reads._slots) == nixl._MAX_UNREAD_SLOTS)
        into = memoryview(bytearray(20 * CHUNK))
        await other.fetch(at, VERSION, range(20 * CHUNK), into, TIMEOUT_S)
        assert into == content(20 * CHUNK)
        assert len(reads._slots) <= 2 * nixl._MAX_UNREAD_SLOTS
        other.disconnect(at)
        idle.abort()
        await eventually(lambda: len(reads._free) == len(reads._slots))


async def test_member_that_sends_invalid_messages_loses_only_its_own_connection() -> None:
    mad = [
        (nixl._KIND_READ, 0, b""),
        (nixl._KIND_PIECE, 10, bytes(8)),
        (nixl._KIND_METADATA, 100, bytes(100)),
        (nixl._KIND_BYTES, 34, bytes(34)),
        (9, 0, b""),
    ]

    async with served("nixl", holding(size=CHUNK)) as at, transport_for("nixl") as pipe:
        for frame in mad:
            line = await pipe._dial(at)  # type: ignore[attr-defined]
            await authenticate(line, SECRET, dialled=True)
            await line._write(*frame)
            with pytest.raises(TransportError):
                await line.receive(memoryview(bytearray(9)))
            line.abort()
        mine = WeightStore()
        await pull(mine, VERSION, lambda: [weight_source(at)], pipe, adaptive_timeout=calm())
        assert complete(mine, size=CHUNK)


async def test_source_with_invalid_frames_is_refused() -> None:
    mad = [
        ((nixl._KIND_METADATA, 100, bytes(100)), "not signed with this run's secret"),
        ((nixl._KIND_PIECE, 5, bytes(8)), "unexpected"),
        ((nixl._KIND_METADATA, nixl._MAX_METADATA_BYTES + 1, b""), "unexpected"),
    ]

    async with transport_for("nixl") as pipe:
        shared = await pipe._nixl()  # type: ignore[attr-defined]

        async def answer(tcp: Connection, frame: tuple[int, int, bytes]) -> None:
            line = nixl._NixlConnection(tcp, shared, SECRET, dialled=False)
            await authenticate(line, SECRET, dialled=False)
            await line._write(*frame)

        for frame, metadata in mad:
            answers = []
            meet = partial(lambda frame, tcp: answers.append(asyncio.create_task(answer(tcp, frame))), frame)  # noqa: B023
            server, port = await listen(meet, "127.0.0.1")
            with pytest.raises(TransportError, match=metadata):
                await pipe.fetch(f"nixl://127.0.0.1:{port}", VERSION, range(10), memoryview(bytearray(10)), TIMEOUT_S)
            server.close()
            await asyncio.gather(*answers)


async def test_event_loop_and_deadlines_work_while_nixl_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    released, land = threading.Event(), NixlRuntime.read_into

    def blocked(self: NixlRuntime, *args: Any) -> None:
        released.wait(TIMEOUT_S)
        land(self, *args)

    async with served("nixl", holding()) as at, transport_for("nixl") as pipe:
        await pipe.manifest(at, VERSION, TIMEOUT_S)
        monkeypatch.setattr(NixlRuntime, "read_into", blocked)
        into = memoryview(bytearray(SIZE))
        with pytest.raises(TransportError, match=r"no reply within 0\.3 s"):
            await pipe.fetch(at, VERSION, range(SIZE), into, 0.3)
        released.set()
        monkeypatch.undo()
        again = memoryview(bytearray(SIZE))
        await pipe.fetch(at, VERSION, range(SIZE), again, TIMEOUT_S)
        assert again == content(SIZE)
        assert into == bytes(SIZE)


async def test_repeated_connections_leave_no_resources() -> None:
    async with transport_for("nixl") as source, transport_for("nixl") as pipe:
        at = await source.serve(holding(size=CHUNK), "127.0.0.1")
        into = memoryview(bytearray(CHUNK))

        async def pass_by() -> None:
            await pipe.fetch(at, VERSION, range(CHUNK), into, TIMEOUT_S)
            pipe.disconnect(at)
            await eventually(lambda: not runtime(pipe)._remotes)

        for _ in range(5):
            await pass_by()
        before = attacks.Footprint.of(os.getpid())
        for _ in range(30):
            await pass_by()
        await eventually(lambda: attacks.Footprint.of(os.getpid()).descriptors <= before.descriptors + 2)
        assert len(runtime(source)._slots) <= 2
        assert len(runtime(pipe)._slots) == 1


async def test_slot_assigned_at_the_moment_of_an_abort_is_released() -> None:
    async with served("nixl", holding(size=CHUNK)) as at, transport_for("nixl") as pipe:
        line = await pipe._dial(at)  # type: ignore[attr-defined]
        reads = runtime(pipe)
        filled: Future[nixl_memory.Slot] = Future()
        line._nixl.start = lambda work, *args: filled  # the filling of the slot is the only work that is begun
        offering = asyncio.create_task(line._offer(content(10)))
        await asyncio.sleep(0)
        filled.set_result(reads.fill(content(10)))
        line.abort()
        with pytest.raises(TransportError, match="aborted"):
            await offering
        await eventually(lambda: len(reads._free) == len(reads._slots) == 1)


async def test_unavailable_ucx_transport_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "pigeons")

    async with transport_for("nixl") as pipe:
        with pytest.raises(TransportError, match="UCX_TLS=pigeons"):
            await pipe.serve(WeightStore(), "127.0.0.1")


def test_missing_nixl_fails_only_a_job_that_names_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pipes.PACKAGES, "nixl", ("no_such_package",))
    with pytest.raises(ImportError, match=r"\.\[nixl\]"):
        select.open_transport("nixl", SECRET, trusted_network=True)
    with pytest.raises(ImportError, match=r"\.\[nixl\]"):
        nixl_memory.NixlRuntime("127.0.0.1")


def test_nixl_does_not_start_where_its_ports_cannot_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")

    def refuse(port: int, silent: bool) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(nixl_memory, "set_port_blocked", refuse)
    before = listening_addresses()
    with pytest.raises(TransportError, match="SO_ATTACH_FILTER: Operation not permitted"):
        NixlRuntime("127.0.0.1")
    wait_until(lambda: listening_addresses() <= before)


def test_nixl_on_an_untrusted_network_opens_no_tcp_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,posix,cma,self")
    before = listening_addresses()
    made = NixlRuntime(None)
    try:
        assert os.environ["UCX_TLS"] == "posix,cma,self"
        assert listening_addresses() == before
        assert made.ports == frozenset()
    finally:
        made.close()
