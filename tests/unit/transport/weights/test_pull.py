"""Pulls of weight versions over each transport, from sources that die, hang or send corrupt chunks."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Sequence
from typing import Any

import pytest

from rrl.core.types import Version
from rrl.tests.support.weights.chain import Publisher, until
from rrl.tests.support.weights.source import VERSION, content, described
from rrl.tests.support.weights.transports import (
    CHUNK,
    CHUNKS,
    SECRET,
    SIZE,
    TIMEOUT_S,
    SpyTransport,
    calm,
    child,
    complete,
    holding,
    served,
    transport_for,
    weight_source,
)
from rrl.transport.streams.connection import TransportError, authenticate
from rrl.transport.weights import protocol
from rrl.transport.weights import pull as swarm
from rrl.transport.weights.base import VersionUnavailable, WeightTransport
from rrl.transport.weights.delta import Buffer
from rrl.transport.weights.manifest import Manifest
from rrl.transport.weights.pull import AdaptiveTimeout, PullFailed, WeightSource, pull
from rrl.transport.weights.store import WeightStore

pytestmark = pytest.mark.usefixtures("runner")


# ── pulling ────────────────────────────────────────────────────────────────────────────────────────────────────────
async def test_pull_transfers_every_byte_and_the_manifest(kind: str) -> None:
    source, mine = holding(), WeightStore()
    async with served(kind, source) as at, transport_for(kind) as pipe:
        manifest = await pull(mine, VERSION, lambda: [weight_source(at)], pipe)
        held = source.get(VERSION)
        assert held is not None
        assert manifest == held.manifest
        assert complete(mine)


@pytest.mark.parametrize("size", [1, 63, 65537])
async def test_small_version_is_pulled_completely(kind: str, size: int) -> None:
    mine = WeightStore()
    async with served(kind, holding(size=size)) as at, transport_for(kind) as pipe:
        await pull(mine, VERSION, lambda: [weight_source(at)], pipe)
        assert complete(mine, size=size)


async def test_consecutive_versions_are_pulled_over_one_connection(kind: str) -> None:
    source, mine = WeightStore(), WeightStore()
    async with served(kind, source) as at, transport_for(kind) as pipe:
        dialled = []
        dial = pipe._client._dial  # type: ignore[attr-defined]

        async def counted(at: str) -> Any:
            dialled.append(at)
            return await dial(at)

        pipe._client._dial = counted  # type: ignore[attr-defined]
        for step in range(10):
            flat = content(2**19, seed=step)
            source.offer(described(Version(step, 1), flat, SECRET, CHUNK), flat)
            await pull(mine, Version(step, 1), lambda: [weight_source(at)], pipe)
            held = mine.current()
            assert held is not None
            assert held.flat == flat
        assert dialled == [at]


async def test_a_late_joiner_pulls_from_a_rollout_that_has_pulled(kind: str) -> None:
    middle, mine = WeightStore(), WeightStore()
    async with served(kind, middle) as second, transport_for(kind) as pipe:
        async with served(kind, holding()) as first:
            await pull(middle, VERSION, lambda: [weight_source(first)], pipe)
        await pull(mine, VERSION, lambda: [weight_source(second, "rollout/0")], pipe)
        assert complete(mine)


async def test_holder_that_will_soon_have_the_version_is_waited_for(kind: str) -> None:
    source, mine = WeightStore(), WeightStore()
    async with served(kind, source) as at, transport_for(kind) as pipe:
        with source.awaiting(VERSION):
            pulling = asyncio.create_task(
                pull(mine, VERSION, lambda: [weight_source(at)], pipe, adaptive_timeout=calm())
            )
            while not source._waiting:
                await asyncio.sleep(0.001)
            flat = content(SIZE)
            source.offer(described(VERSION, flat, SECRET, CHUNK), flat)
            await pulling
        assert complete(mine)


async def test_version_unknown_to_its_holder_is_awaited_for_a_limited_time(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, newer = holding(), Version(4, 1)
    async with served(kind, source) as at, transport_for(kind) as pipe:
        monkeypatch.setattr(protocol, "UNKNOWN_VERSION_TIMEOUT_S", TIMEOUT_S)
        asking = asyncio.create_task(pipe.manifest(at, newer, TIMEOUT_S))
        await until(lambda: source._waiting != {})
        flat = content(100, seed=1)
        source.offer(described(newer, flat, SECRET, CHUNK), flat)
        assert (await asking).version == newer
        monkeypatch.setattr(protocol, "UNKNOWN_VERSION_TIMEOUT_S", 0.1)
        with pytest.raises(VersionUnavailable):
            await pipe.manifest(at, Version(5, 1), TIMEOUT_S)
        with pytest.raises(VersionUnavailable):
            await pipe.manifest(at, Version(2, 1), TIMEOUT_S)


# ── sources that fail ──────────────────────────────────────────────────────────────────────────────────────────────
async def test_a_source_killed_in_mid_pull_costs_only_the_missing_chunks(kind: str) -> None:
    mine = WeightStore()
    async with child(kind) as (dying, pid), served(kind, holding()) as other, transport_for(kind) as pipe:

        def kill(at: str, count: int) -> None:
            if at == dying and count == 3:
                os.kill(pid, signal.SIGKILL)

        def named() -> Sequence[WeightSource]:
            return [weight_source(dying), *([weight_source(other)] if spy.came.get(dying, 0) >= 3 else [])]

        spy = SpyTransport(pipe, kill)
        await pull(mine, VERSION, named, spy, window=2, adaptive_timeout=calm())
        assert complete(mine)
        assert 3 <= spy.came[dying] < CHUNKS
        # the transport notices the death before any deadline
        assert not any("no reply within" in why for why in spy.failed[dying])
        assert spy.came[dying] + spy.came[other] == CHUNKS


async def test_a_stopped_source_is_left_at_the_chunks_deadline(kind: str) -> None:
    mine = WeightStore()
    async with child(kind) as (stopped, pid), served(kind, holding()) as other, transport_for(kind) as pipe:

        def stop(at: str, count: int) -> None:
            if at == stopped and count == 3:
                os.kill(pid, signal.SIGSTOP)

        def named() -> Sequence[WeightSource]:
            return [weight_source(stopped), *([weight_source(other)] if spy.came.get(stopped, 0) >= 3 else [])]

        spy = SpyTransport(pipe, stop)
        await pull(
            mine, VERSION, named, spy, window=2, chunk_timeout=0.5, adaptive_timeout=AdaptiveTimeout(TIMEOUT_S, 0.5)
        )
        assert complete(mine)
        assert "no reply within 0.5 s" in spy.failed[stopped]
        assert spy.came[stopped] + spy.came[other] == CHUNKS


async def test_the_only_source_is_asked_again_after_it_missed_a_deadline(kind: str) -> None:
    mine = WeightStore()
    async with child(kind) as (at, pid), transport_for(kind) as pipe:

        def stop(at: str, count: int) -> None:
            if count == 3:
                os.kill(pid, signal.SIGSTOP)

        def named() -> Sequence[WeightSource]:
            if spy.failed:
                os.kill(pid, signal.SIGCONT)
            return [weight_source(at)]

        spy = SpyTransport(pipe, stop)
        await pull(mine, VERSION, named, spy, chunk_timeout=0.5)
        assert complete(mine)
        assert spy.failed
        assert spy.came[at] == CHUNKS


async def test_source_can_be_pulled_from_after_it_was_stopped(kind: str) -> None:
    async with child(kind) as (at, pid), transport_for(kind) as pipe:
        os.kill(pid, signal.SIGSTOP)

        async def dial() -> None:
            with pytest.raises(TransportError, match="no reply within"):
                await authenticate(await pipe._dial(at), SECRET, dialled=True)  # type: ignore[attr-defined]

        await asyncio.gather(*(dial() for _ in range(10)))
        os.kill(pid, signal.SIGCONT)
        mine = WeightStore()
        await pull(mine, VERSION, lambda: [weight_source(at)], pipe)
        assert complete(mine)


async def connected(transport: WeightTransport, at: str, version: Version = VERSION) -> None:
    while True:
        try:
            await transport.manifest(at, version, TIMEOUT_S)
            return
        except TransportError as error:  # on a busy machine a connection may take more than the limit of 1 s
            assert "no reply within 1 s" in str(error)  # noqa: PT017


async def stopped_halfway(transport: WeightTransport, at: str, pid: int, into: memoryview) -> bool:
    """Fetch everything into ``into``, and stop the source at the first byte.

    Return whether the fetch was abandoned because of the stop.
    """
    fetching = asyncio.create_task(transport.fetch(at, VERSION, range(len(into)), into, 0.5))
    while into[0] == 0:
        await asyncio.sleep(0)
    os.kill(pid, signal.SIGSTOP)
    try:
        await fetching
    except TransportError as error:
        assert "no reply within 0.5 s" in str(error)  # noqa: PT017
        return True
    return False


async def test_stopped_source_without_a_connection_costs_one_timeout(kind: str) -> None:
    """The cost does not depend on the number of requested chunks.

    A listening socket accepts the connections, as the kernel does for a stopped process.
    """

    with socket.create_server(("127.0.0.1", 0), backlog=16) as stopped:
        stopped.setblocking(False)
        at = f"{kind}://127.0.0.1:{stopped.getsockname()[1]}"
        async with transport_for(kind) as pipe:
            spans = [range(place, place + 1) for place in range(4)]
            asked = [pipe.fetch(at, VERSION, span, memoryview(bytearray(1)), 1.0) for span in spans]
            results = await asyncio.gather(*asked, return_exceptions=True)
            assert all(isinstance(each, TransportError) for each in results), results
        came, _ = stopped.accept()
        came.close()
        with pytest.raises(BlockingIOError):
            stopped.accept()


async def test_a_buffer_is_not_written_to_after_its_fetch_was_given_up(kind: str) -> None:
    size = 64 * 2**20

    async with child(kind, size, size) as (at, pid), transport_for(kind) as pipe:
        await connected(pipe, at)
        into = memoryview(bytearray(size))
        while not await stopped_halfway(pipe, at, pid, into):
            os.kill(pid, signal.SIGCONT)  # all bytes had arrived before the signal, so the test tries again
            await connected(pipe, at)
            into = memoryview(bytearray(size))
        left = bytes(into)
        assert 0 in left
        os.kill(pid, signal.SIGCONT)
        again = memoryview(bytearray(size))
        while 0 in again:
            try:  # after this fetch, the bytes of the first answer have been received, too
                await pipe.fetch(at, VERSION, range(size), again, TIMEOUT_S)
            except TransportError as error:  # on a busy machine a connection may take more than the limit of 1 s
                assert "no reply within 1 s" in str(error)  # noqa: PT017
        assert again == content(size)
        assert into == left


async def test_source_of_corrupt_chunks_is_refused_and_put_aside(kind: str) -> None:
    mine, liar = WeightStore(), WeightStore()
    flat = content(SIZE)
    false = bytearray(flat)
    false[5 * CHUNK + 7] ^= 1
    manifest = described(VERSION, flat, SECRET, CHUNK)
    liar.offer(manifest, memoryview(false))
    async with served(kind, liar) as corrupt, served(kind, holding()) as other, transport_for(kind) as pipe:
        with pytest.raises(PullFailed, match="chunk 5 does not match its digest"):
            await pull(mine, VERSION, lambda: [weight_source(corrupt)], pipe, timeout=0.5)
        assert mine.current() is None
        missing = len(mine.begin(manifest))
        assert 5 in mine.begin(manifest)
        assert missing < CHUNKS
        spy = SpyTransport(pipe)
        await pull(mine, VERSION, lambda: [weight_source(corrupt), weight_source(other)], spy, adaptive_timeout=calm())
        assert complete(mine)
        assert spy.came[corrupt] + spy.came[other] == missing + 1  # only chunk 5 came twice


async def test_only_source_is_requested_again_after_one_corrupt_chunk(kind: str) -> None:
    class CorruptOnce(WeightStore):
        lied = False

        def read(self, version: Version, span: range, reader: object) -> memoryview:
            data = super().read(version, span, reader)
            if self.lied or span.start != 5 * CHUNK:
                return data
            self.lied = True
            false = bytearray(data)
            false[7] ^= 1
            return memoryview(false)

    source, mine, flat = CorruptOnce(), WeightStore(), content(SIZE)
    source.offer(described(VERSION, flat, SECRET, CHUNK), flat)
    async with served(kind, source) as at, transport_for(kind) as pipe:
        await pull(mine, VERSION, lambda: [weight_source(at)], pipe, adaptive_timeout=calm())
        assert source.lied
        assert complete(mine)


async def test_slow_source_is_kept_while_it_sends_chunks(kind: str) -> None:
    """The time for the version or for a chunk does not matter: a receiver leaves only a source that sends nothing."""

    class Slow(SpyTransport):
        one_at_a_time = asyncio.Lock()

        async def fetch(self, *asked: Any, **more: Any) -> bytearray | None:
            async with self.one_at_a_time:
                await asyncio.sleep(0.2)
            return await super().fetch(*asked, **more)

    mine = WeightStore()
    async with served(kind, holding()) as at, transport_for(kind) as pipe:
        await pull(
            mine,
            VERSION,
            lambda: [weight_source(at)],
            Slow(pipe),
            timeout=2.0,
            starvation_timeout=0.05,
            adaptive_timeout=calm(),
        )
        assert complete(mine)


async def test_receiver_that_verifies_slowly_loses_no_chunk(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(WeightStore):
        accepted = 0

        def accept(self, version: Version, index: int, frame: Buffer | None = None) -> bool:
            self.accepted += 1
            if self.accepted == 3:
                time.sleep(0.6)
            return super().accept(version, index, frame)

    monkeypatch.setattr(swarm, "_DIGEST_IN_THREAD_BYTES", 1)  # in threads
    mine = Slow()
    async with served(kind, holding()) as at, transport_for(kind) as pipe:
        await pull(mine, VERSION, lambda: [weight_source(at)], pipe, starvation_timeout=0.3, adaptive_timeout=calm())
        assert complete(mine)


async def test_a_pull_without_a_source_says_what_each_one_did(kind: str) -> None:
    async with served(kind, holding(Version(4, 1))) as newer, transport_for(kind) as pipe:
        await connected(pipe, newer, Version(4, 1))
        with pytest.raises(PullFailed, match="the source does not have"):
            await pull(WeightStore(), VERSION, lambda: [weight_source(newer)], pipe, timeout=1.0)
        with pytest.raises(PullFailed, match=r"not an address of the weight transport"):
            await pull(WeightStore(), VERSION, lambda: [weight_source("pigeon://a:1")], pipe, timeout=0.3)
        with pytest.raises(PullFailed, match="there is no source"):
            await pull(WeightStore(), VERSION, lambda: [], pipe, timeout=0.3)


async def test_source_gone_before_the_pull_is_skipped(kind: str) -> None:
    mine = WeightStore()
    async with served(kind, holding()) as gone:
        pass
    async with served(kind, holding()) as at, transport_for(kind) as pipe:
        await pull(mine, VERSION, lambda: [weight_source(gone), weight_source(at)], pipe)
        assert complete(mine)


async def test_a_pull_ends_when_another_version_is_begun(kind: str) -> None:
    mine = WeightStore()
    newer = described(Version(4, 1), content(100), SECRET, CHUNK)
    async with served(kind, holding()) as at, transport_for(kind) as pipe:

        def begin(at: str, count: int) -> None:
            if count == 3:
                mine.begin(newer)

        spy = SpyTransport(pipe, begin)
        with pytest.raises(PullFailed, match="not being received"):
            await pull(mine, VERSION, lambda: [weight_source(at)], spy)
        assert mine.versions() == (Version(4, 1),)


async def test_cancelled_pull_can_be_continued(kind: str) -> None:
    mine = WeightStore()
    async with served(kind, holding()) as at, transport_for(kind) as pipe:
        pulling: list[asyncio.Task[Manifest]] = []

        def cancel(at: str, count: int) -> None:
            if count == 3:
                pulling[0].cancel()

        spy = SpyTransport(pipe, cancel)
        pulling.append(asyncio.create_task(pull(mine, VERSION, lambda: [weight_source(at)], spy)))
        with pytest.raises(asyncio.CancelledError):
            await pulling[0]
        spy = SpyTransport(pipe)
        await pull(mine, VERSION, lambda: [weight_source(at)], spy)
        assert complete(mine)
        # the third chunk had arrived, and its verification may have been cancelled
        assert spy.came[at] <= CHUNKS - 2


async def test_an_error_in_one_fetch_ends_the_other_fetches_before_the_pull_raises(kind: str) -> None:
    class Broken(SpyTransport):
        begun = ended = 0

        async def fetch(self, *_: Any) -> None:
            self.begun += 1
            try:
                if self.begun == 1:
                    raise RuntimeError("a mistake in the program")
                await never.wait()
            finally:
                self.ended += 1

    never = asyncio.Event()

    async with served(kind, holding()) as at, transport_for(kind) as pipe:
        spy = Broken(pipe)
        with pytest.raises(RuntimeError, match="a mistake"):
            await pull(WeightStore(), VERSION, lambda: [weight_source(at)], spy)
        assert spy.begun == spy.ended > 1


# ── server side ────────────────────────────────────────────────────────────────────────────────────────────────────
def connections(transport: WeightTransport) -> int:
    """Return the number of connections that the source serves."""
    (_, desk), *_ = transport._served  # type: ignore[attr-defined]
    return len(desk.close.__self__._tasks)


async def test_death_of_a_receiver_during_a_send_is_detected_at_once(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "_SEND_TIMEOUT_S", 100 * TIMEOUT_S)

    publisher = Publisher()
    async with transport_for(kind) as pipe:
        at = await pipe.serve(publisher.store, "127.0.0.1")
        with publisher.publishing():
            async with child(kind, upstream=at) as (_, pid):
                # the receiver waits for chunks that the publisher does not have yet
                await until(lambda: publisher.store._waiting != {})
                os.kill(pid, signal.SIGSTOP)
                publisher.feed()
                os.kill(pid, signal.SIGKILL)
                await until(lambda: not connections(pipe))


async def test_only_a_connection_that_ends_without_a_goodbye_is_logged(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "rrl.weights")

    async with transport_for(kind) as pipe:
        at = await pipe.serve(holding(size=CHUNK), "127.0.0.1")
        for leaves in (True, False):
            async with transport_for(kind) as other:
                await connected(other, at)
                caplog.clear()
                if not leaves:
                    other.disconnect(at)
            await until(lambda: not connections(pipe))
            ended = [record.message for record in caplog.records if "a weight connection ended" in record.message]
            assert len(ended) == (0 if leaves else 1)


async def test_waiting_request_occupies_only_its_connection_and_ends_with_it(kind: str) -> None:
    publisher = Publisher()
    async with transport_for(kind) as pipe:
        at = await pipe.serve(publisher.store, "127.0.0.1")
        with publisher.publishing():
            async with transport_for(kind) as other:
                await connected(other, at)
                asking = [
                    asyncio.create_task(other.fetch(at, VERSION, range(8), memoryview(bytearray(8)), TIMEOUT_S))
                    for _ in range(100)
                ]
                await until(lambda: publisher.store._waiting != {})
                assert len(publisher.store._waiting) == connections(pipe) == 1
                for task in asking:
                    task.cancel()
                await asyncio.wait(asking)
            await until(lambda: not connections(pipe))
            assert publisher.store._waiting == {}


# ── authentication ─────────────────────────────────────────────────────────────────────────────────────────────────
async def test_secret_of_another_run_is_refused_by_the_connecting_side(kind: str) -> None:
    async with served(kind, holding()) as at, transport_for(kind, b"t" * 32) as pipe:
        with pytest.raises(TransportError, match="does not know this run's secret"):
            await pipe.manifest(at, VERSION, TIMEOUT_S)


@pytest.mark.parametrize("mirrored", [False, True])
async def test_false_or_mirrored_proof_is_refused_by_the_listening_side(kind: str, mirrored: bool) -> None:
    async with served(kind, holding()) as at, transport_for(kind) as pipe:
        line = await pipe._dial(at)  # type: ignore[attr-defined]
        await line.send(bytes(32))
        answer = bytearray(64)
        await line.receive(memoryview(answer))
        await line.send(bytes(answer[32:]) if mirrored else bytes(32))
        with pytest.raises(TransportError):
            await line.receive(memoryview(bytearray(9)))
        line.abort()
        await pipe.manifest(at, VERSION, TIMEOUT_S)


async def test_silent_unauthenticated_connection_is_closed(kind: str) -> None:
    async with served(kind, holding()) as at, transport_for(kind) as pipe:
        line = await pipe._dial(at)  # type: ignore[attr-defined]
        async with asyncio.timeout(TIMEOUT_S):
            with pytest.raises(TransportError):
                await line.receive(memoryview(bytearray(1)))
        line.abort()


@pytest.mark.parametrize("garbage", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 65536, b"\xff" * 65536, os.urandom(2**20)])
async def test_garbage_at_the_port_has_no_effect(kind: str, garbage: bytes) -> None:
    mine = WeightStore()
    async with served(kind, holding(size=CHUNK)) as at, transport_for(kind) as pipe:
        _, writer = await asyncio.open_connection("127.0.0.1", int(at.rpartition(":")[2]))
        writer.write(garbage)
        await pull(mine, VERSION, lambda: [weight_source(at)], pipe)
        assert complete(mine, size=CHUNK)
        writer.transport.abort()


async def test_request_beyond_the_end_of_a_version_is_refused(kind: str) -> None:
    async with served(kind, holding(size=100)) as at, transport_for(kind) as pipe:
        into = memoryview(bytearray(50))
        with pytest.raises(VersionUnavailable):
            await pipe.fetch(at, VERSION, range(51, 101), into, TIMEOUT_S)
        await pipe.fetch(at, VERSION, range(50, 100), into, TIMEOUT_S)
        assert into == content(100)[50:]
