"""Measures the baseline for weight transports: a broadcast by torch.distributed's gloo, with digests as in rrl.

``python -m rrl.benchmarks._weights_gloo FD RANK WORLD MASTER PORT SECONDS`` is one rank, which receives its commands
over the socket FD. :class:`Gloo` starts the ranks and commands them. SECONDS is the timeout of the process group.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import msgspec
from msgspec import Struct

from rrl.core.types import Version
from rrl.tests.support.weights.member import die_with_parent, right_bytes
from rrl.tests.support.weights.members import TIMEOUT_S
from rrl.tests.support.weights.sparse_content import sparse_content
from rrl.transport.weights.manifest import CHUNK_BYTES, digest, digest_threads
from rrl.transport.weights.store import fresh_memory


class FillBuffer(Struct, frozen=True, tag=True):
    """Command: rank 0 writes the content of this version into its buffer, all other ranks write zeros into theirs."""

    version: Version
    nbytes: int
    tensors: int


class StartBroadcast(Struct, frozen=True, tag=True):
    """Command: broadcast the buffer from rank 0 to the first ``receivers`` ranks after rank 0.

    With ``beside``, the buffer is sent in pieces of at most a chunk, and the digest of each chunk is computed while
    later pieces arrive. Otherwise all tensors are sent whole, and the digests are computed when every rank has all of
    them. As many threads as in rrl compute the digests.
    """

    receivers: int
    beside: bool


class Ready(Struct, frozen=True, tag=True):
    pass


class BroadcastDone(Struct, frozen=True, tag=True):
    """Report of a rank after a broadcast."""

    received: float
    """Time at which all bytes had arrived (s, monotonic clock of the machine)."""
    digest_s: float
    """Further seconds until all digests had been computed."""
    check_cpu_s: float
    """CPU time (s) of the comparison of the bytes, which is not part of the measurement."""
    is_correct: bool


class BroadcastFailed(Struct, frozen=True, tag=True):
    failed_at: float
    reason: str


class Gloo:
    """A process group of one source and some receivers, each a rank of its own."""

    def __init__(self) -> None:
        self._ranks: list[_Rank] = []

    @classmethod
    async def start(
        cls, prefixes: Sequence[tuple[str, ...]], master: str, interface: str, timeout: float = 600.0
    ) -> Gloo:
        """Start the ranks, whose command lines begin with ``prefixes``, and wait until they are ready."""
        self = cls()
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        for rank, inside in enumerate(prefixes):
            arguments = (str(rank), str(len(prefixes)), master, str(port), str(timeout))
            process, control = _spawn(inside, arguments, interface)
            self._ranks.append(_Rank(process, *await asyncio.open_connection(sock=control)))
        await asyncio.gather(*(rank.receive(Ready) for rank in self._ranks))
        return self

    async def fill(self, version: Version, nbytes: int, tensors: int, receivers: int) -> None:
        ranks = self._ranks[: receivers + 1]
        await asyncio.gather(*(rank.request(FillBuffer(version, nbytes, tensors), Ready) for rank in ranks))

    async def broadcast(
        self, receivers: int, *, beside: bool, timeout_s: float = TIMEOUT_S
    ) -> tuple[float, list[BroadcastDone | BroadcastFailed | BaseException]]:
        """Return the time at which a broadcast began (s, monotonic clock), and the report of each receiver.

        For a rank that sent no report within ``timeout_s`` seconds, the entry is a TimeoutError; for a rank that has
        ended, it is a ConnectionError.
        """
        ranks = self._ranks[: receivers + 1]
        began = time.monotonic()
        for rank in ranks:
            rank.send(StartBroadcast(receivers, beside))
        reports = await asyncio.gather(
            *(rank.receive(BroadcastDone | BroadcastFailed, timeout_s) for rank in ranks), return_exceptions=True
        )
        return began, reports[1:]

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self._ranks]

    def process(self, rank: int) -> subprocess.Popen[bytes]:
        return self._ranks[rank].process

    async def close(self) -> None:
        for rank in self._ranks:
            rank.process.kill()
            rank.process.wait()
            rank.writer.close()


def _spawn(
    inside: tuple[str, ...], arguments: tuple[str, ...], interface: str
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a rank; return its process and the socket for its commands.

    The rank's stderr is discarded, because torch prints very long messages when a rank is killed. Each rank reports its
    own failure.
    """
    env = {**os.environ, "GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1"}
    parent_end, rank_end = socket.socketpair()
    with rank_end:
        argv = (*inside, sys.executable, "-m", "rrl.benchmarks._weights_gloo", str(rank_end.fileno()), *arguments)
        return subprocess.Popen(
            argv, pass_fds=[rank_end.fileno()], env=env, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ), parent_end


class _Rank:
    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.process, self.writer, self._reader = process, writer, reader

    def send(self, command: FillBuffer | StartBroadcast) -> None:
        self.writer.write(msgspec.json.encode(command) + b"\n")

    async def receive(self, kind: Any, timeout_s: float = TIMEOUT_S) -> Any:
        """Return the next report of the rank. Raises TimeoutError, or ConnectionError if the rank has ended."""
        async with asyncio.timeout(timeout_s):
            line = await self._reader.readline()
        if not line:
            raise ConnectionError("the rank has ended")
        report = msgspec.json.decode(line, type=Ready | BroadcastDone | BroadcastFailed)
        if not isinstance(report, kind):
            raise RuntimeError(f"gloo: {report}")
        return report

    async def request(self, command: FillBuffer | StartBroadcast, kind: Any) -> Any:
        self.send(command)
        return await self.receive(kind)


def _main(control: socket.socket, rank: int, world: int, master: str, port: int, seconds: float) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=seconds)
    dist.init_process_group("gloo", rank=rank, world_size=world, init_method=f"tcp://{master}:{port}", timeout=timeout)
    groups = {receivers: dist.new_group(range(receivers + 1), timeout=timeout) for receivers in range(1, world)}
    lines = control.makefile("rwb")

    def send(report: Ready | BroadcastDone | BroadcastFailed) -> None:
        lines.write(msgspec.json.encode(report) + b"\n")
        lines.flush()

    send(Ready())
    flat, filled = memoryview(b""), FillBuffer(Version(0, 0), 0, 1)
    for line in lines:
        command = msgspec.json.decode(line, type=FillBuffer | StartBroadcast)
        if isinstance(command, FillBuffer):
            del flat
            filled, flat = command, fresh_memory(command.nbytes)
            flat[:] = sparse_content(command.version, command.nbytes) if rank == 0 else bytes(command.nbytes)
            send(Ready())
        else:
            send(_broadcast(dist, torch, flat, filled, groups[command.receivers], rank, command.beside))


def _broadcast(
    dist: Any, torch: Any, flat: memoryview, filled: FillBuffer, group: Any, rank: int, beside: bool
) -> BroadcastDone | BroadcastFailed:
    ends = [filled.nbytes * i // filled.tensors // 64 * 64 for i in range(filled.tensors)] + [filled.nbytes]
    if beside:
        ends = sorted({*ends, *range(0, filled.nbytes, CHUNK_BYTES)})
    chunks = [flat[start : start + CHUNK_BYTES] for start in range(0, flat.nbytes, CHUNK_BYTES)]
    digests: list[Future[bytes]] = []
    with ThreadPoolExecutor(digest_threads()) as pool:

        def submit(end: int) -> None:
            while rank and len(digests) < len(chunks) and len(digests) * CHUNK_BYTES + len(chunks[len(digests)]) <= end:
                digests.append(pool.submit(digest, chunks[len(digests)]))

        try:
            for start, end in pairwise(ends):
                dist.broadcast(torch.frombuffer(flat[start:end], dtype=torch.uint8), 0, group=group)
                if beside:
                    submit(end)
        except RuntimeError as error:
            return BroadcastFailed(time.monotonic(), str(error).splitlines()[0])
        received = time.monotonic()
        if not beside:
            with contextlib.suppress(RuntimeError):
                dist.barrier(group=group)  # because one rank's digests would slow down another rank's transfer
        since = received if beside else time.monotonic()
        submit(filled.nbytes)
        for future in digests:
            future.result()
        digest_s = time.monotonic() - since
    before = time.process_time()
    is_correct = not rank or right_bytes(flat, filled.version, filled.nbytes)
    return BroadcastDone(received, digest_s, time.process_time() - before, is_correct)


if __name__ == "__main__":
    die_with_parent()
    descriptor, rank, world, master, port, seconds = sys.argv[1:]
    _main(socket.socket(fileno=int(descriptor)), int(rank), int(world), master, int(port), float(seconds))
