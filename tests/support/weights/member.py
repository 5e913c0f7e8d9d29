"""A process that publishes and receives weights, as the torture test and benchmarks/weights.py command it.

The process is controlled over a socket. It publishes, and follows the newest version, by the code of the roles
(:class:`rrl.roles.worker.connection.ManagerConnection`). There is no manager and no store; the driver sends the newest
version and its sources. ``python -m rrl.tests.support.weights.member FD KIND`` is a nursery, which imports all modules
once, and forks a member for each socket that it receives. So a restart costs as much as a role's restart after its
imports. All members end with the process that started the nursery, even if they are stopped.

The content of a version follows from its number (:mod:`.sparse`) or is in a file, so every process can verify every
byte.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import mmap
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path

import msgspec

from rrl.core.launch import Launch
from rrl.core.run_dir import RunDir
from rrl.core.run_spec import ROLE_TRAITS, TransportSpec
from rrl.core.types import NodeName, Version
from rrl.roles.trajectories.types import NewestVersion
from rrl.roles.worker.connection import ManagerConnection
from rrl.tests.support.weights.orders import (
    MAX_LINE_BYTES,
    Check,
    Checked,
    Command,
    Committed,
    Dial,
    Dialled,
    Failed,
    Forget,
    Forgot,
    Leave,
    Measure,
    Peers,
    Publish,
    Published,
    Report,
    Serving,
    Start,
    Usage,
)
from rrl.tests.support.weights.sparse_content import PERIOD, sparse_content
from rrl.transport import messages as msg
from rrl.transport.keys import RunKeys
from rrl.transport.weights.base import WeightTransport
from rrl.transport.weights.delta import Buffer
from rrl.transport.weights.manifest import ManifestBuilder
from rrl.transport.weights.pull import PullFailed, WeightSource
from rrl.transport.weights.select import open_transport
from rrl.transport.weights.store import StoredVersion, WeightStore
from rrl.transport.weights.ucx_settings import SETTINGS

_PIECE = 2**23
"""Bytes that are compared in one step."""
_PR_SET_PDEATHSIG = 1
"""Option of prctl(2)."""


def announce(
    connection: ManagerConnection, number: int, newest: Version | None, sources: Iterable[WeightSource]
) -> None:
    """Give a connection the addresses of ``sources`` like a manager, and ``newest`` with its sources like a store."""
    sources = tuple(sources)
    peers = {
        one.incarnation.replica: msg.Peer(one.incarnation, joined=True, weight_address=one.address) for one in sources
    }
    holders = tuple((one.versions, (one.incarnation,)) for one in sources if newest in one.versions)
    connection._weight_sources.on_newest_version(None if newest is None else NewestVersion(newest, holders))
    connection._update_peers(msg.Peers(1, number, peers))


def right(held: StoredVersion, nbytes: int, file: str = "") -> bool:
    """Return whether every byte of the version is right, or, with a file, whether the file has the same bytes."""
    if not file:
        return right_bytes(held.flat, held.manifest.version, nbytes)
    contents = _mapped(file)
    return len(contents) == len(held.flat) and all(
        held.flat[start : start + _PIECE].tobytes() == contents[start : start + _PIECE]
        for start in range(0, len(contents), _PIECE)
    )


def _mapped(file: str) -> memoryview:
    with open(file, "rb") as opened:
        return memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))


def right_bytes(flat: memoryview, version: Version, nbytes: int) -> bool:
    """Return whether every byte is right, about as fast as a memcpy.

    Digests are not used, because they are under test.
    """
    pattern = bytes(sparse_content(version, _PIECE + PERIOD))
    return flat.nbytes == nbytes and all(
        flat[start : start + _PIECE].tobytes() == pattern[start % PERIOD :][: min(_PIECE, nbytes - start)]
        for start in range(0, nbytes, _PIECE)
    )


class _Store(WeightStore):
    """A store that records when the first chunk of a version was verified."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[Version, float] = {}

    def accept(self, version: Version, index: int, frame: Buffer | None = None) -> bool:
        good = super().accept(version, index, frame)
        if good and version not in self.first:
            self.first = {version: time.monotonic()}
        return good


class _Connection(ManagerConnection):
    """A role's connection to the manager, reduced to following the newest version.

    It handles the driver's messages like messages of the manager, and gives its reports to callbacks instead of the
    manager.
    """

    def __init__(
        self,
        start: Start,
        store: WeightStore,
        report_version: Callable[[Version], None],
        dropped: Callable[[Failed], None],
    ) -> None:
        launch = Launch("", "", start.incarnation, NodeName(""), (), {}, "", 0, virtual_node=True)
        keys = RunKeys("", "", "", "", bytes.fromhex(start.secret))
        transport = TransportSpec(chunk_deadline=start.chunk_by, chain=start.chain, delta=start.delta)
        super().__init__(launch, RunDir(Path()), keys, 1.0, transport, ROLE_TRAITS["rollout"])
        self._loop.close()  # as in a role, the event loop runs in a thread of its own
        self.weights = store
        self._report_version, self._dropped = report_version, dropped
        self._received = 0

    def receive(self, message: Peers) -> None:
        self._received += 1
        announce(self, self._received, message.newest, message.sources)

    def announce_version(self, version: Version) -> None:
        self._report_version(version)

    def _sources(self, version: Version, direct: bool) -> tuple[WeightSource, ...]:
        try:
            return super()._sources(version, direct)
        except PullFailed as error:
            self._dropped(Failed(version, str(error)))
            raise


class _Member:
    def __init__(self, start: Start, transport: WeightTransport, writer: asyncio.StreamWriter) -> None:
        self._start, self._transport, self._writer = start, transport, writer
        self._secret = bytes.fromhex(start.secret)
        self.store = _Store()
        self._announced_at: dict[Version, float] = {}
        """Times at which the member received the messages about versions that are newer than its own."""
        self._checking = asyncio.Lock()
        self._report_task: set[asyncio.Task[None]] = set()
        self._link = _Connection(start, self.store, self._on_version, self.report_to_driver)
        self.following = asyncio.create_task(self._link._follow_weights(transport))
        self.following.add_done_callback(_loud)

    def report_to_driver(self, report: Report) -> None:
        self._writer.write(msgspec.json.encode(report) + b"\n")

    async def do(self, command: Command) -> None:
        match command:
            case Peers():
                if command.newest is not None:
                    self._announced_at.setdefault(command.newest, time.monotonic())
                self._link.receive(command)
            case Publish():
                self.report_to_driver(await asyncio.to_thread(self._publish, command))
            case Check():
                held = self.store.current()
                good = held is not None and await asyncio.to_thread(right, held, self._start.nbytes, command.file)
                self.report_to_driver(Checked(held.manifest.version if held else None, good))
            case Forget():
                self._link.receive(Peers(None, ()))
                self._announced_at.clear()
                for version in self.store.versions():
                    self.store.discard(version)
                if command.memory:
                    self.store.allocate(1)  # replaces the kept buffer, which has another size
                self.report_to_driver(Forgot())
            case Dial():
                self.report_to_driver(Dialled(tuple([await self._dial(command) for _ in range(command.times)])))
            case Measure():
                gc.collect()
                self.report_to_driver(usage(self.store))
            case Leave():
                self.following.cancel()
                await asyncio.wait([self.following])
                await self._transport.close()
                os._exit(0)
            case Start():
                raise ValueError("started already")

    def _publish(self, command: Publish) -> Published:
        """Publish as :meth:`rrl.Worker.publish_each` does: from separate tensors into one buffer."""
        asked = time.monotonic()
        whole = _mapped(command.file) if command.file else sparse_content(command.version, self._start.nbytes)
        ends = [whole.nbytes * i // command.tensors // 64 * 64 for i in range(command.tensors)] + [whole.nbytes]
        tensors = [(f"w{i}", "uint8", (b - a,), b - a) for i, (a, b) in enumerate(pairwise(ends))]
        began = time.monotonic()
        flat, current = self.store.allocate(whole.nbytes), self.store.current()
        before = current.flat if current is not None and self._link.deltas.enabled else None
        with ManifestBuilder(
            command.version, tensors, flat, self._secret, command.chunk_bytes, before=before
        ) as describing:
            for a, b in pairwise(ends):
                for start in range(a, b, _PIECE):
                    flat[start : min(start + _PIECE, b)] = whole[start : min(start + _PIECE, b)]
                describing.mark_filled(b)
            manifest = describing.sign()
        self.store.offer(manifest, flat, changes=describing.changes)
        return Published(command.version, began - asked, time.monotonic() - began)

    async def _dial(self, command: Dial) -> float:
        self._transport.disconnect(command.at)
        began = time.monotonic()
        await self._transport.manifest(command.at, command.version, 10.0)
        return time.monotonic() - began

    def _on_version(self, version: Version) -> None:
        held, at = self.store.current(), time.monotonic()
        assert held is not None
        announced_at, first = self._announced_at.get(version, at), self.store.first.get(version, at)
        committed = Committed(version, announced_at, first, at, None, self._link.deltas.traffic)
        self._announced_at = {newer: at for newer, at in self._announced_at.items() if newer > version}
        telling = asyncio.create_task(self._report_committed(committed, held))
        self._report_task.add(telling)
        telling.add_done_callback(self._report_task.discard)
        telling.add_done_callback(_loud)

    async def _report_committed(self, committed: Committed, held: StoredVersion) -> None:
        async with self._checking:  # versions are checked one by one, in their order
            if self._start.check:
                good = held.manifest.version == committed.version
                good = good and await asyncio.to_thread(right, held, self._start.nbytes)
                committed = msgspec.structs.replace(committed, is_correct=good)
            self.report_to_driver(committed)


def usage(store: WeightStore) -> Usage:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return Usage(
        int(status["RssAnon"].split()[0]) * 1024,
        len(os.listdir("/proc/self/fd")) - 1,
        int(status["Threads"]),
        store.versions(),
    )


def _open_transport(start: Start) -> WeightTransport:
    return open_transport(start.kind, bytes.fromhex(start.secret), host=start.host, trusted_network=True)


async def _live(control: socket.socket, born: float) -> None:
    reader, writer = await asyncio.open_connection(sock=control, limit=MAX_LINE_BYTES)
    decoder = msgspec.json.Decoder(Command)
    start = decoder.decode(await reader.readline())
    assert isinstance(start, Start)
    member = _Member(start, _open_transport(start), writer)
    member.report_to_driver(Serving(born, await member._transport.serve(member.store, start.host)))
    while line := await reader.readline():
        await member.do(decoder.decode(line))
    os._exit(0)


def _loud(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        traceback.print_exception(error)
        os._exit(1)


def die_with_parent() -> None:
    """Make the kernel send SIGKILL to this process when its parent ends; SIGKILL also ends a stopped process."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def nursery(control: socket.socket) -> None:
    """Fork a member for each socket that arrives on ``control``, and reply with its pid, until ``control`` ends."""
    die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    control.sendall(b"\n")
    while True:
        data, handed, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            os._exit(0)
        born = time.monotonic()
        if pid := os.fork():
            os.close(handed[0])
            control.sendall(pid.to_bytes(4, "little"))
            continue
        die_with_parent()
        control.close()
        try:
            asyncio.run(_live(socket.socket(fileno=handed[0]), born))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)


if __name__ == "__main__":
    if sys.argv[2] == "ucx":
        os.environ.update(SETTINGS)  # UCX reads some of these settings while it is loaded
        import ucxx  # noqa: F401
    # imported by its full name, because commands and reports must be classes of that module, not of __main__
    from rrl.tests.support.weights import member as _this

    _this.nursery(socket.socket(fileno=int(sys.argv[1])))
