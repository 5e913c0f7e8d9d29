"""Provides weight transports and sources under test, and a transport that counts chunks."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from rrl.core.types import Incarnation, ReplicaId, Version
from rrl.tests.support.weights.source import VERSION, content, described
from rrl.transport.streams.connection import TransportError
from rrl.transport.weights.base import STARVATION_TIMEOUT_S, WeightTransport
from rrl.transport.weights.manifest import Manifest
from rrl.transport.weights.pull import AdaptiveTimeout, WeightSource
from rrl.transport.weights.select import open_transport
from rrl.transport.weights.store import WeightStore

TRANSPORTS_ENV = "RRL_TEST_TRANSPORTS"
KINDS = tuple(os.environ.get(TRANSPORTS_ENV, "tcp").split(","))
"""Transports that the tests of this process use.

ucx runs in its own network namespace (test_ucx_apart.py), because its ports have no authentication. nixl runs in its
own process (test_nixl_apart.py), because its UCX and the UCX of ucxx cannot share a process. When one process ran tests
of ucx, nixl and ucx in turn, UCX's thread crashed when a peer died (SIGSEGV in ucp_memh_invalidate, in 4 of 4 runs).
Without nixl, the thread never crashed.
"""
TIMEOUT_S = 30.0
SECRET = b"s" * 32
CHUNK = 2**20
SIZE = 12 * CHUNK + 1234
CHUNKS = 13


def calm() -> AdaptiveTimeout:
    """Return timeouts of chunks that are so long that a busy machine does not reach them."""
    return AdaptiveTimeout(TIMEOUT_S, TIMEOUT_S)


@asynccontextmanager
async def transport_for(kind: str, secret: bytes = SECRET) -> AsyncGenerator[WeightTransport]:
    transport = open_transport(kind, secret, trusted_network=True)
    try:
        yield transport
    finally:
        await transport.close()


def weight_source(at: str, name: str = "trainer/0", version: Version | None = VERSION) -> WeightSource:
    return WeightSource(Incarnation(ReplicaId(name), 1), at, () if version is None else (version,))


@asynccontextmanager
async def served(kind: str, store: WeightStore, secret: bytes = SECRET) -> AsyncGenerator[str]:
    async with transport_for(kind, secret) as transport:
        yield await transport.serve(store, "127.0.0.1")


def holding(version: Version = VERSION, size: int = SIZE) -> WeightStore:
    store, flat = WeightStore(), content(size)
    store.offer(described(version, flat, SECRET, CHUNK), flat)
    return store


@asynccontextmanager
async def child(kind: str, size: int = SIZE, chunk: int = CHUNK, upstream: str = "") -> AsyncGenerator[tuple[str, int]]:
    """Start a source in a process of its own; provide its address and pid.

    Args:
        upstream: Address of the source from which the child pulls; if empty, the child has the version from the
            beginning.
    """
    argv = [sys.executable, "-m", "rrl.tests.support.weights.source", kind, SECRET.hex(), str(size), str(chunk)]
    argv += [upstream] if upstream else []
    process = await asyncio.to_thread(subprocess.Popen, argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield (await asyncio.to_thread(process.stdout.readline)).strip(), process.pid
    finally:
        process.kill()
        process.communicate()


class SpyTransport:
    """A transport that counts chunks by source, and calls ``after(address, count)`` after each fetched chunk."""

    def __init__(self, transport: WeightTransport, after: Callable[[str, int], None] = lambda at, count: None) -> None:
        self.kind = transport.kind
        self.transport = transport
        self.after = after
        self.came: dict[str, int] = {}
        self.failed: dict[str, list[str]] = {}
        self.named_base: dict[str, int] = {}
        """Number of requests that named a base, by source."""

    async def fetch(
        self,
        address: str,
        version: Version,
        span: range,
        into: memoryview,
        timeout: float,
        starvation_timeout: float = STARVATION_TIMEOUT_S,
        base: bytes | None = None,
    ) -> bytearray | None:
        if base is not None:
            self.named_base[address] = self.named_base.get(address, 0) + 1
        try:
            frame = await self.transport.fetch(address, version, span, into, timeout, starvation_timeout, base)
        except TransportError as error:
            self.failed.setdefault(address, []).append(str(error))
            raise
        self.came[address] = self.came.get(address, 0) + 1
        self.after(address, self.came[address])
        return frame

    async def serve(self, store: WeightStore, host: str) -> str:
        return await self.transport.serve(store, host)

    async def manifest(
        self, address: str, version: Version, timeout: float, starvation_timeout: float = STARVATION_TIMEOUT_S
    ) -> Manifest:
        return await self.transport.manifest(address, version, timeout, starvation_timeout)

    def disconnect(self, address: str) -> None:
        self.transport.disconnect(address)

    async def close(self) -> None:
        await self.transport.close()


def complete(store: WeightStore, version: Version = VERSION, size: int = SIZE) -> bool:
    held = store.get(version)
    return held is not None and held.flat == content(size)
