"""Holders and pipes under test: in this process or in one of their own, and a pipe that counts what passes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from rrl.core.types import Life, ReplicaId, Version
from rrl.tests.support.weights.source import VERSION, content, described
from rrl.transport.messages import Holder
from rrl.transport.weights.base import STARVED_BY, Pipe, PipeError
from rrl.transport.weights.manifest import Manifest
from rrl.transport.weights.pull import Pace
from rrl.transport.weights.select import open_pipe
from rrl.transport.weights.store import WeightStore

PIPES_ENV = "RRL_TEST_PIPES"
KINDS = tuple(os.environ.get(PIPES_ENV, "tcp").split(","))
"""ucx runs in a network namespace of its own (test_ucx_apart.py), since its ports authenticate nobody. nixl runs in a
process of its own (test_nixl_apart.py): its UCX and ucxx's do not get on with each other. With ucx, nixl, ucx in turn
UCX's thread crashed as a peer died (SIGSEGV in ucp_memh_invalidate, 4 of 4 runs); never without"""
SOON = 30.0
SECRET = b"s" * 32
CHUNK = 2**20
SIZE = 12 * CHUNK + 1234
CHUNKS = 13
Run = Callable[[Coroutine[Any, Any, None]], None]


def calm() -> Pace:
    """Patience with sources that are slow only because the machine is busy."""
    return Pace(SOON, SOON)


@asynccontextmanager
async def piped(kind: str, secret: bytes = SECRET) -> AsyncGenerator[Pipe]:
    pipe = open_pipe(kind, secret, trusted_network=True)
    try:
        yield pipe
    finally:
        await pipe.close()


def holder(at: str, name: str = "trainer/0", holds: Version | None = VERSION) -> Holder:
    return Holder(Life(ReplicaId(name), 1), at, holds)


@asynccontextmanager
async def served(kind: str, store: WeightStore, secret: bytes = SECRET) -> AsyncGenerator[str]:
    async with piped(kind, secret) as pipe:
        yield await pipe.serve(store, "127.0.0.1")


def holding(version: Version = VERSION, size: int = SIZE) -> WeightStore:
    store, flat = WeightStore(), content(size)
    store.offer(described(version, flat, SECRET, CHUNK), flat)
    return store


@asynccontextmanager
async def child(kind: str, size: int = SIZE, chunk: int = CHUNK, upstream: str = "") -> AsyncGenerator[tuple[str, int]]:
    """A source in a process of its own: its address and pid. ``upstream``: whom it pulls from itself."""
    argv = [
        sys.executable,
        "-m",
        "rrl.tests.support.weights.source",
        kind,
        SECRET.hex(),
        str(size),
        str(chunk),
    ]
    argv += [upstream] if upstream else []
    process = await asyncio.to_thread(subprocess.Popen, argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield (await asyncio.to_thread(process.stdout.readline)).strip(), process.pid
    finally:
        process.kill()
        process.communicate()


class Spy:
    """A pipe that counts chunks by source, and calls ``after`` at each one that came."""

    def __init__(self, pipe: Pipe, after: Callable[[str, int], None] = lambda at, count: None) -> None:
        self.kind = pipe.kind
        self.pipe = pipe
        self.after = after
        self.came: dict[str, int] = {}
        self.failed: dict[str, list[str]] = {}

    async def fetch(
        self, at: str, version: Version, span: range, into: memoryview, by: float, starved_by: float = STARVED_BY
    ) -> None:
        try:
            await self.pipe.fetch(at, version, span, into, by, starved_by)
        except PipeError as error:
            self.failed.setdefault(at, []).append(str(error))
            raise
        self.came[at] = self.came.get(at, 0) + 1
        self.after(at, self.came[at])

    async def serve(self, store: WeightStore, host: str) -> str:
        return await self.pipe.serve(store, host)

    async def manifest(self, at: str, version: Version, by: float, starved_by: float = STARVED_BY) -> Manifest:
        return await self.pipe.manifest(at, version, by, starved_by)

    def hang_up(self, at: str) -> None:
        self.pipe.hang_up(at)

    async def close(self) -> None:
        await self.pipe.close()


def complete(store: WeightStore, version: Version = VERSION, size: int = SIZE) -> bool:
    held = store.get(version)
    return held is not None and held.flat == content(size)
