"""Drives the processes of :mod:`rrl.tests.support.weights.member`: starts, commands, stops and kills members."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import TypeVar

import msgspec

from rrl.core.run_spec import DeltaSetting
from rrl.core.types import Incarnation, ReplicaId, Version
from rrl.tests.support.weights import orders as say
from rrl.transport.weights.pull import WeightSource
from rrl.transport.weights.store import MAX_VERSIONS

TIMEOUT_S = 120.0
"""Deadline (s) of each operation of a member, which only a broken build reaches."""
SECRET = b"w" * 32
_PID_BYTES = 4

T = TypeVar("T")


class Nursery:
    """A process that forks members.

    ``inside`` is the beginning of its command line, which starts it in another network namespace. In this case UCX is
    limited to TCP, because it would otherwise use shared memory between the namespaces of one machine. With nixl, UCX
    is always limited to TCP. Over shared memory, a read would end within the call that begins it, so that a test could
    not interrupt the read.
    """

    def __init__(self, kind: str, inside: tuple[str, ...] = ()) -> None:
        self.kind = kind
        self._control, theirs = socket.socketpair()
        with theirs:
            argv = (*inside, sys.executable, "-m", "rrl.tests.support.weights.member", str(theirs.fileno()), kind)
            tls = {"UCX_TLS": "tcp,self"} if kind == "nixl" else {"UCX_TLS": "tcp"} if inside else {}
            env = os.environ | tls
            self._process = subprocess.Popen(argv, pass_fds=[theirs.fileno()], env=env, stdin=subprocess.DEVNULL)
        self._control.settimeout(TIMEOUT_S)
        if self._control.recv(1) != b"\n":
            raise RuntimeError(f"no nursery: {' '.join(argv)}")

    def fork(self) -> tuple[socket.socket, int]:
        """Fork a member; return the socket to control it, and its pid."""
        mine, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"+"], [theirs.fileno()])
            return mine, int.from_bytes(self._control.recv(_PID_BYTES), "little")

    def close(self) -> None:
        """End the process and with it every member."""
        self._control.close()
        self._process.wait(TIMEOUT_S)


class Member:
    """One member. Its reports are appended to :attr:`reports`, and ``on`` is called with each of them at once."""

    def __init__(self, incarnation: Incarnation, pid: int, on: Callable[[Member, say.Report], None] | None) -> None:
        self.incarnation, self.pid = incarnation, pid
        self._process = os.pidfd_open(pid)
        """Pidfd for signals, because the pid may belong to another process after the member's end."""
        self.reports: list[say.Report] = []
        self.gone = False
        self.versions: tuple[Version, ...] = ()
        """Newest versions that the member reported as complete, the newest first; it may have evicted the second."""
        self.serving: say.Serving
        self._on = on
        self._news = asyncio.Event()
        self._writer: asyncio.StreamWriter
        self._reading: asyncio.Task[None]

    @classmethod
    async def start(
        cls,
        nursery: Nursery,
        name: str,
        nbytes: int,
        *,
        host: str = "127.0.0.1",
        number: int = 1,
        check: bool = False,
        chunk_by: float = 10.0,
        chain: int = 8,
        delta: DeltaSetting = False,
        on: Callable[[Member, say.Report], None] | None = None,
    ) -> Member:
        """Start a member and return it once it serves."""
        incarnation = Incarnation(ReplicaId(name), number)
        control, pid = nursery.fork()
        self = cls(incarnation, pid, on)
        reader, self._writer = await asyncio.open_connection(sock=control, limit=say.MAX_LINE_BYTES)
        self._reading = asyncio.create_task(self._read(reader))
        self.send(say.Start(incarnation, nursery.kind, host, SECRET.hex(), nbytes, check, chunk_by, chain, delta))
        self.serving = await self.wait_for_report(say.Serving)
        return self

    @property
    def source(self) -> WeightSource:
        return WeightSource(self.incarnation, self.serving.address, self.versions)

    def send(self, command: say.Command) -> None:
        if not self.gone:
            self._writer.write(msgspec.json.encode(command) + b"\n")

    async def request(self, command: say.Command, kind: type[T]) -> T:
        """Send a command, and wait for the next report of this kind."""
        self.reports = [report for report in self.reports if not isinstance(report, kind)]
        self.send(command)
        return await self.wait_for_report(kind)

    async def wait_for_report(
        self, kind: type[T], which: Callable[[T], bool] = lambda report: True, timeout_s: float = TIMEOUT_S
    ) -> T:
        """Wait for the first report of this kind and return it.

        Raises TimeoutError, or ConnectionError if the member has ended.
        """
        async with asyncio.timeout(timeout_s):
            while True:
                self._news.clear()
                for report in self.reports:
                    if isinstance(report, kind) and which(report):
                        return report
                if self.gone:
                    raise ConnectionError(f"{self.incarnation} is gone")
                await self._news.wait()

    async def committed(self, version: Version, by: float = TIMEOUT_S) -> say.Committed:
        return await self.wait_for_report(say.Committed, lambda report: report.version == version, by)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    async def leave(self) -> None:
        """Make the member disconnect and then end, as a role does on request."""
        self.send(say.Leave())
        await asyncio.wait([self._reading], timeout=TIMEOUT_S)

    async def close(self) -> None:
        """Kill the member and wait until it has ended."""
        self.kill()
        await asyncio.wait([self._reading], timeout=TIMEOUT_S)
        self._writer.close()
        os.close(self._process)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, number)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        decoder = msgspec.json.Decoder(say.Report)
        try:
            while line := await reader.readline():
                report = decoder.decode(line)
                self.reports.append(report)
                if isinstance(report, say.Committed | say.Published):
                    self.versions = tuple(dict.fromkeys((report.version, *self.versions)))[:MAX_VERSIONS]
                elif isinstance(report, say.Forgot):
                    self.versions = ()
                self._news.set()
                if self._on is not None:
                    self._on(self, report)
        except ConnectionError:
            pass
        finally:
            self.gone = True
            self._news.set()
