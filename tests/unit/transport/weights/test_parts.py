"""Versions of several parts, each of which another rank of the trainer serves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from rrl.core.types import TRAINER, member_id
from rrl.tests.support.weights.chain import receiver
from rrl.tests.support.weights.source import VERSION, content
from rrl.tests.support.weights.transports import (
    CHUNK,
    SECRET,
    TIMEOUT_S,
    SpyTransport,
    calm,
    served,
    transport_for,
    weight_source,
)
from rrl.transport.weights import manifest as manifests
from rrl.transport.weights.base import WeightTransport
from rrl.transport.weights.manifest import ALIGN_BYTES, Manifest, ManifestBuilder, describe, join_parts
from rrl.transport.weights.pull import WeightSource, pull
from rrl.transport.weights.store import NotReady, VersionEvicted, WeightStore

WORLD = 3
SIZE = 4 * CHUNK + 17
CHUNKS = 5
"""Number of chunks of a part."""

pytestmark = pytest.mark.usefixtures("runner")


def part_of(rank: int) -> tuple[Manifest, memoryview]:
    flat = content(SIZE, seed=rank)
    tensors = [(f"w{rank}", "uint8", (SIZE,), SIZE)]
    with ManifestBuilder(VERSION, tensors, flat, SECRET, CHUNK, part=rank, of=WORLD, rank=rank) as builder:
        return builder.sign(), flat


def whole() -> Manifest:
    return join_parts([part_of(rank)[0] for rank in (2, 0, 1)], SECRET)


def complete(store: WeightStore) -> bool:
    held = store.get(VERSION)
    return held is not None and {
        spec.name: held.flat[spec.offset : spec.offset + spec.nbytes] for spec in held.manifest.tensors
    } == {f"w{rank}": content(SIZE, seed=rank) for rank in range(WORLD)}


def rank_source(rank: int, at: str) -> WeightSource:
    """Return a rank as a source; only rank 0 reports the version."""
    return weight_source(at, member_id(TRAINER, rank), None if rank else VERSION)


@asynccontextmanager
async def ranks(kind: str) -> AsyncGenerator[list[WeightSource]]:
    async with AsyncExitStack() as stack:
        sources = []
        for rank in range(WORLD):
            store = WeightStore()
            store.offer(whole(), part_of(rank)[1], rank)
            sources.append(rank_source(rank, await stack.enter_async_context(served(kind, store))))
        yield sources


# ── pulls ──────────────────────────────────────────────────────────────────────────────────────────────────────────
async def test_each_part_is_pulled_from_its_rank(kind: str) -> None:
    async with ranks(kind) as sources, receiver(kind, 0) as mine:
        await mine.pull(lambda: sources, adaptive_timeout=calm())
        assert complete(mine.store)
        assert [mine.chunks_from(source) for source in sources] == [CHUNKS] * WORLD


class Together(SpyTransport):
    """A transport that fetches the first chunk of each part only when all parts are requested."""

    def __init__(self, transport: WeightTransport) -> None:
        super().__init__(transport)
        self._begun: set[str] = set()
        self._all_begun = asyncio.Barrier(WORLD)

    async def fetch(self, address: str, *words: Any) -> bytearray | None:
        if address not in self._begun:
            self._begun.add(address)
            await asyncio.wait_for(self._all_begun.wait(), TIMEOUT_S)
        return await super().fetch(address, *words)


async def test_all_parts_are_pulled_at_the_same_time(kind: str) -> None:
    """Otherwise a rank could evict its part while a slow receiver still reads another part."""
    mine = WeightStore()
    async with ranks(kind) as sources, transport_for(kind) as pipe:
        await pull(mine, VERSION, lambda: sources, Together(pipe), adaptive_timeout=calm())
        assert complete(mine)


async def test_receiver_that_has_the_version_serves_all_parts(kind: str) -> None:
    async with receiver(kind, 0) as first, receiver(kind, 1) as second:
        async with ranks(kind) as sources:
            await first.pull(lambda: sources, adaptive_timeout=calm())
        await second.pull(lambda: [*sources, first.source], adaptive_timeout=calm())
        assert complete(second.store)
        assert second.chunks_from(first.source) == WORLD * CHUNKS


async def test_receiver_that_ends_in_mid_pull_costs_the_next_one_only_the_missing_chunks(kind: str) -> None:
    async with ranks(kind) as sources, receiver(kind, 1) as second, AsyncExitStack() as stack:
        first = await stack.enter_async_context(receiver(kind, 0))
        pulling = asyncio.create_task(first.pull(lambda: sources, adaptive_timeout=calm()))
        following = asyncio.create_task(second.pull(lambda: [*sources, first.source], adaptive_timeout=calm()))

        def end(at: str, count: int) -> None:
            if at == sources[1].address and count == 2:
                pulling.cancel()

        first.spy.after = end
        await asyncio.wait([pulling])
        await first.spy.close()
        await following
        assert complete(second.store)
        got = [second.chunks_from(source) for source in (first.source, *sources)]
        assert sum(got) == WORLD * CHUNKS, "a chunk was transferred twice"
        assert all(got[1:]), "the missing chunks of each part can only come from its rank"


async def test_part_whose_rank_died_is_pulled_from_a_receiver_that_has_it(kind: str) -> None:
    async with ranks(kind) as sources, receiver(kind, 0) as first, transport_for(kind) as pipe:
        await first.pull(lambda: sources, adaptive_timeout=calm())
        spy, mine = SpyTransport(pipe), WeightStore()
        dead = [sources[0], weight_source("tcp://127.0.0.1:1", sources[1].incarnation.replica, None), sources[2]]

        def known() -> Sequence[WeightSource]:
            return [*dead, *([first.source] if spy.failed else [])]

        await pull(mine, VERSION, known, spy, adaptive_timeout=calm())
        assert complete(mine)
        assert spy.came[sources[0].address] == CHUNKS


async def test_manifest_of_one_part_is_not_taken_for_that_of_the_version(kind: str) -> None:
    store, mine = WeightStore(), WeightStore()
    manifest, flat = part_of(0)
    async with served(kind, store) as at, transport_for(kind) as pipe:
        with store.awaiting(VERSION, manifest):
            asked = False

            def known() -> Sequence[WeightSource]:
                nonlocal asked
                if asked:  # the source has been given up, or is tried again
                    store.offer(join_parts([manifest, part_of(1)[0], part_of(2)[0]], SECRET), flat, 0)
                asked = True
                return [rank_source(0, at)]

            pulling = asyncio.create_task(pull(mine, VERSION, known, pipe, adaptive_timeout=calm()))
            while VERSION not in mine.versions():
                await asyncio.sleep(0.001)
            pulling.cancel()
            await asyncio.wait([pulling])
        arriving = mine._arriving
        assert arriving is not None
        assert arriving.manifest == whole()


# ── manifests and stores ───────────────────────────────────────────────────────────────────────────────────────────
def test_manifest_of_a_version_has_the_tensors_and_chunks_of_all_parts_at_aligned_places() -> None:
    manifest = whole()
    assert manifests.decode(manifests.encode(manifest), VERSION, SECRET) == manifest
    assert [(part.number, part.rank) for part in manifest.parts] == [(0, 0), (1, 1), (2, 2)]
    assert [spec.offset for spec in manifest.tensors] == [part.offset for part in manifest.parts]
    assert not any(spec.offset % ALIGN_BYTES for spec in manifest.tensors)
    assert [manifest.part_at(chunk.offset).rank for chunk in manifest.chunks] == [0] * CHUNKS + [1] * CHUNKS + [
        2
    ] * CHUNKS
    assert not part_of(1)[0].is_whole
    assert manifest.is_whole


def test_part_may_be_empty() -> None:
    with ManifestBuilder(VERSION, [], memoryview(b""), SECRET, CHUNK, part=1, of=2, rank=1) as builder:
        empty = builder.sign()
    with ManifestBuilder(VERSION, [("w", "uint8", (9,), 9)], content(9), SECRET, CHUNK, of=2) as builder:
        builder.mark_filled(9)
        first = builder.sign()
    manifest = join_parts([empty, first], SECRET)
    assert manifests.decode(manifests.encode(manifest), VERSION, SECRET) == manifest


def test_manifest_of_the_only_part_is_that_of_the_version() -> None:
    manifest = describe(VERSION, [("w", "uint8", (9,), 9)], content(9), SECRET)
    assert join_parts([manifest], SECRET) == manifest


async def test_store_of_a_rank_serves_only_its_part_and_not_before_the_version_is_complete() -> None:
    store, (part, flat), manifest = WeightStore(), part_of(1), whole()
    place = manifest.parts[1]
    with store.awaiting(VERSION, part):
        assert store.manifest(VERSION) == part
        assert store.current() is None
        with pytest.raises(NotReady):
            store.read(VERSION, range(10), "reader")
        store.offer(manifest, flat, 1)
    assert store.manifest(VERSION) == manifest
    assert store.read(VERSION, range(place.offset + 5, place.offset + 9), "reader") == flat[5:9]
    for span in (range(place.offset - 1, place.offset + 1), range(place.offset, place.offset + place.nbytes + 1)):
        with pytest.raises(VersionEvicted):
            store.read(VERSION, span, "reader")
