"""A chain of receivers under test, with a publisher that offers its version chunk by chunk.

Receivers run in this process or in their own processes. Faulty stores in the chain send wrong bytes or do not answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

from rrl.core.types import ReplicaId, Version
from rrl.tests.support.weights.source import VERSION, content, described
from rrl.tests.support.weights.transports import CHUNK, SECRET, SIZE, SpyTransport, child, transport_for, weight_source
from rrl.transport.weights.base import STARVATION_TIMEOUT_S
from rrl.transport.weights.deltas import Deltas
from rrl.transport.weights.manifest import Manifest
from rrl.transport.weights.pull import AdaptiveTimeout, WeightSource, pull, select_sources
from rrl.transport.weights.store import WeightStore

LENGTH = 8
POLL_INTERVAL_S = 0.002
"""Seconds between two checks of a condition."""

T = TypeVar("T")


async def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition is true; only the deadline of the test ends the wait before that."""
    while not condition():
        await asyncio.sleep(POLL_INTERVAL_S)


class Publisher:
    """A publisher whose version becomes available chunk by chunk (:meth:`feed`).

    Requests for later chunks get NOT_READY.
    """

    def __init__(self, version: Version = VERSION, seed: int = 0) -> None:
        self.store = WeightStore()
        self.flat = content(SIZE, seed)
        self.manifest = described(version, self.flat, SECRET, CHUNK)
        self._left = self.store.begin(self.manifest)

    @contextmanager
    def publishing(self) -> Generator[None]:
        with self.store.awaiting(self.manifest.version):
            yield

    def feed(self, chunks: int | None = None) -> None:
        """Make this many further chunks available; None means all remaining chunks."""
        version = self.manifest.version
        count = len(self._left) if chunks is None else chunks
        feeding, self._left = self._left[:count], self._left[count:]
        for index in feeding:
            chunk = self.manifest.chunks[index]
            self.store.span(version, index)[:] = self.flat[chunk.offset : chunk.offset + chunk.nbytes]
            assert self.store.accept(version, index)
        if not self._left:
            self.store.commit(version)


class Receiver:
    """A receiver of the chain: it pulls from the receivers before it, and serves."""

    def __init__(self, name: str, spy: SpyTransport, store: WeightStore) -> None:
        self.name, self.spy, self.store = name, spy, store
        self.deltas = Deltas(True)  # "auto" would choose by durations
        self.source = weight_source("", name, None)

    def chunks_from(self, source: WeightSource) -> int:
        """Return the number of chunks that the receiver got from this source."""
        return self.spy.came.get(source.address, 0)

    def verified(self, version: Version = VERSION) -> int:
        arriving = self.store._arriving
        if arriving is not None and arriving.manifest.version == version:
            return len(arriving.manifest.chunks) - len(arriving.missing)
        held = self.store.get(version)
        return 0 if held is None else len(held.manifest.chunks)

    async def pull(
        self,
        holders: Callable[[], list[WeightSource]],
        *,
        version: Version = VERSION,
        adaptive_timeout: AdaptiveTimeout | None = None,
        starvation_timeout: float = STARVATION_TIMEOUT_S,
    ) -> Manifest:
        def named() -> tuple[WeightSource, ...]:
            return select_sources(ReplicaId(self.name), holders(), version, LENGTH)

        return await pull(
            self.store,
            version,
            named,
            self.spy,
            adaptive_timeout=adaptive_timeout,
            starvation_timeout=starvation_timeout,
            deltas=self.deltas,
        )


@asynccontextmanager
async def receiver(kind: str, index: int, store: WeightStore | None = None) -> AsyncGenerator[Receiver]:
    async with transport_for(kind) as pipe:
        one = Receiver(f"rollout/{index}", SpyTransport(pipe), WeightStore() if store is None else store)
        one.source = weight_source(await pipe.serve(one.store, "127.0.0.1"), one.name, None)
        yield one


@asynccontextmanager
async def receiver_apart(kind: str, index: int, source: WeightSource) -> AsyncGenerator[tuple[WeightSource, int]]:
    """Provide a receiver that pulls from ``source`` in a process of its own, and the pid of this process."""
    async with child(kind, upstream=source.address) as (at, pid):
        yield weight_source(at, f"rollout/{index}", None), pid


class Liar(WeightStore):
    """A store that sends wrong bytes from byte ``after`` on."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self._after = after

    def read(self, version: Version, span: range, reader: object) -> memoryview:
        true = super().read(version, span, reader)
        return true if span.start < self._after else memoryview(bytes(255 - byte for byte in true))


class Unresponsive(WeightStore):
    """A store that sends no reply from byte ``after`` on, not even NOT_READY."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self._after = after
        self._requested = 0

    def read(self, version: Version, span: range, reader: object) -> memoryview:
        self._requested = span.start
        return super().read(version, span, reader)

    async def wait_until_ready(self, timeout: float, read: Callable[[], T]) -> T:
        found = await super().wait_until_ready(timeout, read)
        if self._requested >= self._after:
            await asyncio.Event().wait()
        return found
