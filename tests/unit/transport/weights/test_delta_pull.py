"""Pulls by deltas over each transport: from which base, from which source, and what a wrong delta costs."""

from __future__ import annotations

import asyncio
import logging
import struct
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack

import pytest

from rrl.core.types import TRAINER, Version, member_id
from rrl.tests.support.weights.chain import Receiver, receiver, until
from rrl.tests.support.weights.sparse import described, publish, publish_parts, versions
from rrl.tests.support.weights.transports import CHUNK, CHUNKS, SIZE, TIMEOUT_S, calm, served, weight_source
from rrl.transport.streams.connection import TransportError
from rrl.transport.weights import manifest as manifests
from rrl.transport.weights import protocol
from rrl.transport.weights import pull as swarm
from rrl.transport.weights import store as stores
from rrl.transport.weights.deltas import Deltas
from rrl.transport.weights.pull import AdaptiveTimeout, PullFailed, pull
from rrl.transport.weights.store import WeightStore

FEW = 0.05
"""Share of a version's bytes within which its deltas and its manifest stay: 2 % of the words change."""
V0, V1, V2, V3 = (Version(step, 1) for step in range(4))

pytestmark = pytest.mark.usefixtures("runner")


def flat(step: int) -> memoryview:
    return versions(4)[step]


def publisher(*steps: int, store: WeightStore | None = None) -> WeightStore:
    """Return a store that has published the versions of these steps."""
    store = WeightStore() if store is None else store
    for step in steps:
        publish(store, Version(step, 1), flat(step))
    return store


async def pulls(
    mine: Receiver, version: Version, *sources: str, pace: AdaptiveTimeout | None = None, timeout: float = TIMEOUT_S
) -> int:
    """Pull a version from sources in this order; return the number of bytes that have arrived."""
    named = [weight_source(at, f"rollout/{9 + number}", version) for number, at in enumerate(sources)]
    before = mine.deltas.traffic.received
    await pull(
        mine.store,
        version,
        lambda: named,
        mine.spy,
        adaptive_timeout=pace or calm(),
        deltas=mine.deltas,
        timeout=timeout,
    )
    return mine.deltas.traffic.received - before


def has(mine: Receiver, version: Version, step: int | None = None) -> bool:
    """Return whether the version is complete, with the bytes of this step."""
    held = mine.store.get(version)
    return held is not None and held.flat == flat(version.step if step is None else step)


def base_unknown(mine: Receiver) -> list[str]:
    """Return the sources that knew no changes from the receiver's base."""
    return [at for at, why in mine.spy.failed.items() if "the source does not know this base" in why]


# ── deltas ─────────────────────────────────────────────────────────────────────────────────────────────────────────
async def test_changed_values_arrive_instead_of_whole_chunks(kind: str) -> None:
    source = publisher(0)
    async with served(kind, source) as at, receiver(kind, 0) as mine:
        assert await pulls(mine, V0, at) > SIZE
        for step in (1, 2, 3):
            publisher(step, store=source)
            assert await pulls(mine, Version(step, 1), at) < FEW * SIZE
            assert has(mine, Version(step, 1))
        assert mine.deltas.traffic.nbytes == 4 * SIZE
        assert mine.deltas.traffic.fallbacks == 0
        assert mine.spy.failed == {}


async def test_receiver_that_skipped_versions_gets_one_delta(kind: str) -> None:
    source = publisher(0)
    async with served(kind, source) as at, receiver(kind, 0) as mine:
        await pulls(mine, V0, at)
        publisher(1, 2, 3, store=source)
        assert await pulls(mine, V3, at) < 3 * FEW * SIZE
        assert has(mine, V3)


async def test_each_part_arrives_as_deltas_from_its_rank(kind: str) -> None:
    ranks, size = [WeightStore(), WeightStore()], 3 * CHUNK + 18
    parts = versions(3, size)[:2], versions(3, size)[1:]
    async with AsyncExitStack() as stack, receiver(kind, 0) as mine:
        sources = [
            weight_source(await stack.enter_async_context(served(kind, store)), member_id(TRAINER, rank), V0)
            for rank, store in enumerate(ranks)
        ]
        for step in (0, 1):
            whole = publish_parts(ranks, Version(step, 1), [part[step] for part in parts])
            before = mine.deltas.traffic.received
            await pull(mine.store, whole.version, lambda: sources, mine.spy, deltas=mine.deltas)
        assert mine.deltas.traffic.received - before < FEW * whole.nbytes
        held = mine.store.get(Version(1, 1))
        assert held is not None
        for place, part in zip(whole.parts, parts, strict=True):
            assert held.flat[place.offset : place.offset + size] == part[1]


async def test_version_with_the_same_bytes_needs_no_chunk(kind: str) -> None:
    """A trainer restarts from its snapshot and publishes the same weights as a version of its own."""
    async with served(kind, publisher(1)) as at, receiver(kind, 0) as mine:
        await pulls(mine, V1, at)
        mine.spy.came.clear()
        restarted = WeightStore()
        publish(restarted, Version(1, 2), flat(1))
        async with served(kind, restarted) as at:
            assert await pulls(mine, Version(1, 2), at) < 0.001 * SIZE
        assert mine.spy.came == {}
        assert has(mine, Version(1, 2))


async def test_base_of_an_earlier_incarnation_gets_deltas(kind: str) -> None:
    async with served(kind, publisher(1)) as at, receiver(kind, 0) as mine:
        await pulls(mine, V1, at)
        restarted = WeightStore()
        publish(restarted, Version(1, 2), flat(1))
        publish(restarted, Version(2, 2), flat(2))
        async with served(kind, restarted) as at:
            assert await pulls(mine, Version(2, 2), at) < FEW * SIZE
        assert has(mine, Version(2, 2))


async def test_trainer_that_restarts_from_an_older_step_sends_whole_chunks_and_then_deltas(kind: str) -> None:
    async with served(kind, publisher(3)) as at, receiver(kind, 0) as mine:
        await pulls(mine, V3, at)
        restarted = WeightStore()
        publish(restarted, Version(1, 2), flat(1))
        async with served(kind, restarted) as at:
            assert await pulls(mine, Version(1, 2), at) > SIZE
            assert has(mine, Version(1, 2))
            publish(restarted, Version(2, 2), flat(2))
            assert await pulls(mine, Version(2, 2), at) < FEW * SIZE
            assert has(mine, Version(2, 2))


async def test_without_deltas_no_base_is_named_and_no_changes_are_kept(kind: str) -> None:
    source = publisher(0)
    async with served(kind, source) as at, receiver(kind, 0) as mine, receiver(kind, 1) as other:
        mine.deltas = Deltas(False)
        await pulls(mine, V0, at)
        await pulls(other, V0, at)
        publisher(1, store=source)
        assert await pulls(mine, V1, at) > SIZE
        assert mine.spy.named_base == {}
        await pulls(other, V1, mine.source.address)
        assert base_unknown(other) == [mine.source.address]
        assert has(mine, V1)
        assert has(other, V1)


async def test_deltas_do_not_shorten_the_timeout_of_a_whole_chunk(kind: str) -> None:
    """A whole chunk takes much longer than a delta. Its source must not be given up for that."""
    source = publisher(0)
    async with served(kind, source) as at, receiver(kind, 0) as mine:
        pace = AdaptiveTimeout(TIMEOUT_S, 0.0)
        pace.observe(TIMEOUT_S)
        usual = pace.timeout()
        await pulls(mine, V0, at)
        for step in (1, 2, 3):
            publisher(step, store=source)
            await pulls(mine, Version(step, 1), at, pace=pace)
        assert pace.timeout() == usual
        assert mine.deltas.traffic.received < (1 + 4 * FEW) * SIZE


# ── bases that a source does not know ──────────────────────────────────────────────────────────────────────────────
async def test_receivers_of_a_chain_with_different_bases_get_deltas(kind: str) -> None:
    """The first receiver has skipped version 1. So it does not know the base of the second, but that of the third."""
    source = publisher(0)
    async with (
        served(kind, source) as at,
        receiver(kind, 0) as first,
        receiver(kind, 1) as second,
        receiver(kind, 2) as third,
    ):
        for one in (first, second, third):
            await pulls(one, V0, at)
        publisher(1, store=source)
        await pulls(second, V1, at)
        publisher(2, store=source)
        received = await asyncio.gather(
            pulls(first, V2, at),
            pulls(second, V2, first.source.address, at),
            pulls(third, V2, first.source.address, at),
        )
        assert all(nbytes < 2 * FEW * SIZE for nbytes in received)
        assert all(has(one, V2) for one in (first, second, third))
        assert base_unknown(second) == [first.source.address]
        assert third.spy.came == {at: CHUNKS, first.source.address: CHUNKS}


@pytest.mark.parametrize("fate", ["holds a part of the base", "has restarted"])
async def test_relay_without_the_base_is_passed_over(kind: str, fate: str) -> None:
    source = publisher(0, 1)
    async with served(kind, source) as at, receiver(kind, 0) as relay, receiver(kind, 1) as mine:
        await pulls(mine, V1, at)
        if fate == "holds a part of the base":
            await pulls(relay, V0, at)
            relay.store.begin(described(V1, flat(1))[0], deltas=True)
            relay.store.span(V1, 0)[:] = flat(1)[:CHUNK]
            assert relay.store.accept(V1, 0)
        publisher(2, store=source)
        await pulls(relay, V2, at)
        assert await pulls(mine, V2, relay.source.address, at) < FEW * SIZE
        assert base_unknown(mine) == [relay.source.address]
        assert has(relay, V2)
        assert has(mine, V2)


async def test_rollout_that_has_both_versions_is_asked_after_a_publisher_that_restarted(kind: str) -> None:
    async with served(kind, publisher(1)) as at, receiver(kind, 0) as home, receiver(kind, 1) as mine:
        for one in (home, mine):
            await pulls(one, V1, at)
        restarted = WeightStore()
        publish(restarted, Version(2, 2), flat(2))
        async with served(kind, restarted) as at:
            assert await pulls(home, Version(2, 2), at) > SIZE
            assert await pulls(mine, Version(2, 2), at, home.source.address) < FEW * SIZE
        assert base_unknown(mine) == [at]
        assert has(mine, Version(2, 2))


async def test_three_sources_are_asked_for_a_base_and_then_for_whole_chunks(kind: str) -> None:
    async with AsyncExitStack() as stack:
        mine = await stack.enter_async_context(receiver(kind, 0))
        await pulls(mine, V0, await stack.enter_async_context(served(kind, publisher(0))))
        sources = [await stack.enter_async_context(served(kind, publisher(1))) for _ in range(5)]
        mine.spy.came.clear()
        assert await pulls(mine, V1, *sources) > SIZE
        assert has(mine, V1)
        assert base_unknown(mine) == sources[:3]
        assert mine.spy.came == {sources[0]: CHUNKS}


async def test_chunk_that_equals_the_base_is_copied_even_if_no_source_knows_the_base(kind: str) -> None:
    async with served(kind, publisher(0)) as at, receiver(kind, 0) as mine:
        await pulls(mine, V0, at)
        half = memoryview(bytes(flat(1)[: 6 * CHUNK]) + bytes(flat(0)[6 * CHUNK :]))
        restarted = WeightStore()
        publish(restarted, Version(1, 2), half)
        mine.spy.came.clear()
        async with served(kind, restarted) as at:
            await pulls(mine, Version(1, 2), at)
        assert mine.spy.came == {at: 6}
        held = mine.store.current()
        assert held is not None
        assert held.flat == half


# ── wrong deltas ───────────────────────────────────────────────────────────────────────────────────────────────────
async def test_corrupt_base_costs_whole_chunks_and_no_source(kind: str) -> None:
    source = publisher(0)
    async with served(kind, source) as at, receiver(kind, 0) as mine:
        await pulls(mine, V0, at)
        held = mine.store.current()
        assert held is not None
        words = (flat(0)[place : place + 2] == flat(1)[place : place + 2] for place in range(5 * CHUNK, 6 * CHUNK, 2))
        memoryview(held.flat.obj)[5 * CHUNK + 2 * list(words).index(True)] ^= 1
        del held
        publisher(1, store=source)
        received = await pulls(mine, V1, at)
        assert has(mine, V1)
        assert mine.deltas.traffic.fallbacks == 1
        assert mine.spy.failed == {}
        assert CHUNK < received < SIZE, "chunks before the wrong one were made from deltas"
        publisher(2, store=source)
        assert await pulls(mine, V2, at) < FEW * SIZE
        assert mine.deltas.traffic.fallbacks == 1


class WrongDeltas(WeightStore):
    """A store that makes another frame of each frame that it sends."""

    def __init__(self, spoil: Callable[[bytes, int], bytes]) -> None:
        super().__init__()
        self._spoil = spoil

    def frame(self, version: Version, offset: int, base: bytes, chunk: memoryview) -> bytes | None:
        frame = super().frame(version, offset, base, chunk)
        return None if frame is None else self._spoil(frame, len(chunk))


SPOILED: dict[str, Callable[[bytes, int], bytes]] = {
    "another value": lambda frame, _: frame[:-1] + bytes([frame[-1] ^ 1]),
    "another place": lambda frame, _: frame[:8] + bytes([(frame[8] + 1) % 255]) + frame[9:],
    "no change": lambda *_: bytes(8),
    "malformed": lambda frame, _: frame[:-1],
    "one byte": lambda *_: b"x",
    "noise": lambda _, nbytes: bytes(range(256)) * (nbytes // 512),
    "as long as the chunk": lambda _, nbytes: bytes(nbytes),
    "longer than the chunk": lambda frame, nbytes: frame + bytes(nbytes),
}


@pytest.mark.parametrize("how", SPOILED)
async def test_source_of_wrong_deltas_costs_whole_chunks_and_is_logged_once(
    kind: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "rrl.weights")
    source = publisher(0, store=WrongDeltas(SPOILED[how]))
    async with served(kind, source) as at, receiver(kind, 0) as mine:
        await pulls(mine, V0, at)
        for step in (1, 2):
            publisher(step, store=source)
            assert await pulls(mine, Version(step, 1), at) > SIZE
            assert has(mine, Version(step, 1))
            assert step <= mine.deltas.traffic.fallbacks <= step * swarm.CHUNKS_IN_FLIGHT * 2
        assert mine.spy.failed == {}, "its whole chunks are right"
        warnings = [record.message for record in caplog.records]
        assert len(warnings) == 1
        assert f"a delta of rollout/9#1 at {at} results in wrong bytes" in warnings[0]


async def test_receiver_of_wrong_deltas_passes_on_right_ones(kind: str) -> None:
    source = publisher(0, store=WrongDeltas(SPOILED["another value"]))
    async with served(kind, source) as at, receiver(kind, 0) as relay, receiver(kind, 1) as mine:
        for one in (relay, mine):
            await pulls(one, V0, at)
        publisher(1, store=source)
        await pulls(relay, V1, at)
        assert await pulls(mine, V1, relay.source.address) < FEW * SIZE
        assert mine.deltas.traffic.fallbacks == 0
        assert has(mine, V1)


class WrongChunk(WeightStore):
    """A store that has no deltas, and of which one chunk is wrong."""

    def frame(self, version: Version, offset: int, base: bytes, chunk: memoryview) -> bytes | None:
        return None

    def read(self, version: Version, span: range, reader: object) -> memoryview:
        true = super().read(version, span, reader)
        if version == V0 or span.start != 5 * CHUNK:
            return true
        return memoryview(bytes([true[0] ^ 1]) + bytes(true[1:]))


async def test_wrong_whole_chunk_counts_against_its_source_although_a_base_was_named(kind: str) -> None:
    source = publisher(0, store=WrongChunk())
    async with served(kind, source) as at, receiver(kind, 0) as mine:
        await pulls(mine, V0, at)
        publisher(1, store=source)
        with pytest.raises(PullFailed, match=f"rollout/9#1 at {at}: chunk 5 does not match its digest"):
            await pulls(mine, V1, at, timeout=0.5)
        assert mine.deltas.traffic.fallbacks == 0
        assert not has(mine, V1)
        async with served(kind, publisher(1)) as right:
            await pulls(mine, V1, at, right)
        assert has(mine, V1)


# ── replies that no request asked for ──────────────────────────────────────────────────────────────────────────────
OK, UNAVAILABLE, NOT_READY, DELTA, NO_BASE = range(5)
BASE = b"d" * 16


class Scripted:
    """A connection on which these bytes arrive."""

    broken = False

    def __init__(self, arriving: bytes) -> None:
        self._arriving = arriving
        self.aborted = False

    async def send(self, data: bytes | memoryview) -> None: ...

    async def receive(self, into: memoryview) -> None:
        if len(into) > len(self._arriving):
            raise TransportError("nothing arrives")
        into[:], self._arriving = self._arriving[: len(into)], self._arriving[len(into) :]

    def abort(self) -> None:
        self.aborted = True


def reply(status: int, body: bytes = b"", announced: int | None = None) -> bytes:
    return struct.pack("<BQ", status, len(body) if announced is None else announced) + body


@pytest.mark.parametrize(
    ("bad", "kind_of_request", "base"),
    [
        pytest.param(reply(DELTA, b"abc"), protocol._KIND_RANGE, None, id="delta without a base"),
        pytest.param(reply(DELTA, b"abc"), protocol._KIND_MANIFEST, None, id="delta for a manifest"),
        pytest.param(reply(NO_BASE), protocol._KIND_RANGE, None, id="no base without a base"),
        pytest.param(reply(NO_BASE), protocol._KIND_MANIFEST, None, id="no base for a manifest"),
        pytest.param(reply(NO_BASE, b"x"), protocol._KIND_RANGE, BASE, id="no base with bytes"),
        pytest.param(reply(DELTA), protocol._KIND_RANGE, BASE, id="empty delta"),
        pytest.param(reply(DELTA, announced=2**40), protocol._KIND_RANGE, BASE, id="delta of 1 TiB"),
        pytest.param(reply(DELTA, b"ab", announced=50), protocol._KIND_RANGE, BASE, id="delta that ends early"),
        pytest.param(reply(OK, b"abc"), protocol._KIND_RANGE, BASE, id="whole chunk of another size"),
        pytest.param(reply(5), protocol._KIND_RANGE, BASE, id="unknown status"),
    ],
)
async def test_reply_that_does_not_fit_the_request_ends_the_connection(
    bad: bytes, kind_of_request: int, base: bytes | None
) -> None:
    line, into = Scripted(bad), bytearray(100)
    client = protocol._ClientConnection(line)
    asked = memoryview(into) if kind_of_request == protocol._KIND_RANGE else None
    with pytest.raises(TransportError):
        await client.request(kind_of_request, V1, range(100), asked, TIMEOUT_S, TIMEOUT_S, base)
    assert line.aborted
    assert into == bytes(100)


# ── pulls that end in between ──────────────────────────────────────────────────────────────────────────────────────
async def test_pull_that_is_cancelled_between_a_delta_and_its_verification_continues(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swarm, "_DIGEST_IN_THREAD_BYTES", 1)  # in threads
    source, loop = publisher(0), asyncio.get_running_loop()
    async with served(kind, source) as at, receiver(kind, 0) as mine:
        await pulls(mine, V0, at)
        publisher(1, store=source)
        pulling: list[asyncio.Task[int]] = []
        verified = 0

        async def cancel() -> None:
            pulling[0].cancel()

        def digest(data: memoryview, name: manifests.HashName | None = None) -> bytes:
            nonlocal verified
            verified += 1
            if verified == 3:
                asyncio.run_coroutine_threadsafe(cancel(), loop).result(TIMEOUT_S)
            return made(data, name)

        made = manifests.digest
        monkeypatch.setattr(stores, "digest", digest)
        mine.spy.came.clear()
        pulling.append(asyncio.create_task(pulls(mine, V1, at)))
        with pytest.raises(asyncio.CancelledError):
            await pulling[0]
        left = mine.store.begin(described(V1, flat(1))[0], deltas=True)
        assert 0 < len(left) <= CHUNKS - 3, "the verification had ended before the pull did"
        mine.spy.came.clear()
        assert await pulls(mine, V1, at) < FEW * SIZE
        assert has(mine, V1)
        assert mine.spy.came == {at: len(left)}
        assert mine.deltas.traffic.fallbacks == 0


async def test_pull_that_is_cancelled_after_its_source_failed_ends_when_no_thread_writes_a_chunk(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the thread would write to a chunk that the next pull has verified."""
    monkeypatch.setattr(swarm, "_DIGEST_IN_THREAD_BYTES", 1)  # in threads
    source, begun, go_on = publisher(0), threading.Event(), threading.Event()
    async with served(kind, source) as at, receiver(kind, 0) as mine:
        await pulls(mine, V0, at)
        publisher(1, store=source)

        def digest(data: memoryview, name: manifests.HashName | None = None) -> bytes:
            begun.set()
            assert go_on.wait(TIMEOUT_S)
            return made(data, name)

        def evict(_: str, count: int) -> None:
            if count == CHUNKS + 1:
                source.discard(V1)

        made = manifests.digest
        monkeypatch.setattr(stores, "digest", digest)
        mine.spy.after = evict
        pulling = asyncio.create_task(pulls(mine, V1, at))
        await asyncio.to_thread(begun.wait, TIMEOUT_S)
        await until(lambda: len(mine.spy.failed.get(at, ())) == swarm.CHUNKS_IN_FLIGHT)
        await asyncio.sleep(0)
        pulling.cancel()
        ended, _ = await asyncio.wait([pulling], timeout=0.2)
        go_on.set()
        assert not ended
        with pytest.raises(asyncio.CancelledError):
            await pulling
        assert len(mine.store.begin(described(V1, flat(1))[0], deltas=True)) < CHUNKS


async def test_version_that_replaces_a_half_received_one_is_made_from_the_complete_base(kind: str) -> None:
    source = publisher(0)
    async with served(kind, source) as at, receiver(kind, 0) as mine, receiver(kind, 1) as other:
        await pulls(mine, V0, at)
        publisher(1, store=source)
        await pulls(other, V1, at)
        newer = publish(source, V2, flat(2))
        mine.spy.came.clear()

        def begin(_: str, count: int) -> None:
            if count == 3:
                mine.store.begin(newer, deltas=True)

        mine.spy.after = begin
        with pytest.raises(PullFailed, match="not being received"):
            await pulls(mine, V1, at)
        mine.spy.after = lambda *_: None
        assert await pulls(mine, V2, at) < 2 * FEW * SIZE
        assert has(mine, V2)
        await pulls(other, V2, mine.source.address, at)
        assert base_unknown(other) == [mine.source.address], "it has never had all of version 1"
        assert has(other, V2)


async def test_version_that_a_source_evicts_between_two_deltas_comes_from_another_source(kind: str) -> None:
    source = publisher(0, 1)
    async with served(kind, source) as at, served(kind, publisher(0, 1)) as other, receiver(kind, 0) as mine:
        await pulls(mine, V0, at)
        mine.spy.came.clear()

        def evict(at: str, count: int) -> None:
            if count == 3:
                source.discard(V1)

        mine.spy.after = evict
        in_flight = swarm.CHUNKS_IN_FLIGHT * CHUNK  # these chunks may be sent whole, since their changes are gone
        assert await pulls(mine, V1, at, other) < FEW * SIZE + in_flight
        assert has(mine, V1)
        assert mine.spy.came[at] + mine.spy.came[other] == CHUNKS
        assert mine.deltas.traffic.fallbacks == 0


async def test_receivers_pull_deltas_from_each_other_while_the_version_is_still_arriving(kind: str) -> None:
    source = publisher(0)
    async with served(kind, source) as at, AsyncExitStack() as stack:
        chain = [await stack.enter_async_context(receiver(kind, index)) for index in range(4)]
        for one in chain:
            await pulls(one, V0, at)
        for step in (1, 2, 3):
            version = Version(step, 1)
            upstream = [at, *(one.source.address for one in chain)]
            publisher(step, store=source)
            received = await asyncio.gather(
                *(pulls(one, version, before) for one, before in zip(chain, upstream[:-1], strict=True))
            )
            assert all(nbytes < FEW * SIZE for nbytes in received)
            assert all(has(one, version) for one in chain)
