"""The control plane on loopback: authentication, lost messages, and changes of the listener."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import zmq
from msgspec import Struct

from rrl.tests.support.listening_manager import eventually
from rrl.tests.support.proxy import Proxy
from rrl.transport.control import endpoints, sockets
from rrl.transport.control.endpoints import Address, Dialer, Incoming, Listener
from rrl.transport.keys import RunKeys
from rrl.transport.messages import PROTOCOL_VERSION

SOON = 20.0  # time limit of a test's waits (s)


class Ping(Struct, frozen=True, tag=True):
    n: int
    load: bytes = b""


class Joined(Struct, frozen=True, tag=True):
    who: str


class Pong(Struct, frozen=True, tag=True):
    n: int


class News(Struct, frozen=True, tag=True):
    text: str
    load: bytes = b""


UP = Ping | Joined
DOWN = Pong | News
KEYS = RunKeys.make()


@asynccontextmanager
async def listening(
    keys: RunKeys = KEYS, epoch: int = 1, bounds: sockets.Bounds = sockets.CONTROL_BOUNDS
) -> AsyncGenerator[Listener]:
    listener = await Listener.open(keys, UP, epoch=epoch, bounds=bounds)
    try:
        yield listener
    finally:
        await listener.close()


@asynccontextmanager
async def dialling(
    find: Callable[[], Address | None], hello: tuple[Any, ...] = (), keys: RunKeys = KEYS
) -> AsyncGenerator[Dialer]:
    dialer = Dialer(keys, DOWN, find, lambda: hello)
    task = asyncio.create_task(dialer.run())
    try:
        yield dialer
    finally:
        await dialer.close()
        await task


async def receive(listener: Listener) -> Incoming:
    async with asyncio.timeout(SOON):
        return await listener.receive()


async def answer_pings(listener: Listener) -> None:
    while True:
        incoming = await listener.receive()
        if isinstance(incoming.message, Ping):
            await listener.send(incoming.peer, Pong(incoming.message.n), incoming.request_id)


@asynccontextmanager
async def answering(listener: Listener) -> AsyncGenerator[None]:
    task = asyncio.create_task(answer_pings(listener))
    try:
        yield
    finally:
        task.cancel()


def port_of(listener: Listener) -> int:
    return int(listener.endpoint.rpartition(":")[2])


def raw_dealer(context: zmq.Context[zmq.Socket[bytes]], keys: RunKeys | None = KEYS) -> zmq.Socket[bytes]:
    """Return a socket of a member of the run (or of a client without keys) that can violate rrl's own protocol."""
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.LINGER, 0)
    if keys is not None:
        socket.set(zmq.CURVE_SERVERKEY, keys.server_public.encode())
        socket.set(zmq.CURVE_PUBLICKEY, keys.client_public.encode())
        socket.set(zmq.CURVE_SECRETKEY, keys.client_secret.encode())
    return socket


# ── the conversation ───────────────────────────────────────────────────────────────────────────────────────────────
async def test_each_request_gets_its_own_answer_and_a_push_arrives() -> None:
    async with listening() as listener, dialling(lambda: listener.address) as dialer:
        requests = [asyncio.create_task(dialer.request(Ping(n), SOON)) for n in range(3)]
        got = [await receive(listener) for _ in requests]
        for incoming in reversed(got):
            await listener.send(incoming.peer, Pong(incoming.message.n), incoming.request_id)
        assert await asyncio.gather(*requests) == [Pong(0), Pong(1), Pong(2)]
        await listener.send(got[0].peer, News("hi"))
        assert await dialer.next_push() == News("hi")


async def test_hello_is_sent_before_messages_queued_before_the_connection() -> None:
    async with listening() as listener:
        ready = threading.Event()
        find = lambda: listener.address if ready.is_set() else None  # noqa: E731
        async with dialling(find, hello=(Joined("me"),)) as dialer:
            await dialer.send(Ping(1))
            ready.set()
            assert [(await receive(listener)).message for _ in range(2)] == [Joined("me"), Ping(1)]


async def test_request_without_an_answer_times_out() -> None:
    async with listening() as listener, dialling(lambda: listener.address) as dialer:
        with pytest.raises(TimeoutError):
            await dialer.request(Ping(1), 0.05)


async def test_resent_request_keeps_its_id_and_accepts_a_late_reply() -> None:
    async with listening() as listener, dialling(lambda: listener.address) as dialer:
        asked = asyncio.create_task(dialer.request(Ping(1), SOON, resend_after=0.05))
        got = [await receive(listener) for _ in range(3)]
        assert {incoming.request_id for incoming in got} == {got[0].request_id}
        await listener.send(got[0].peer, Pong(1), got[0].request_id)
        assert await asked == Pong(1)


async def test_request_without_a_receiver_is_queued_once() -> None:
    async with listening() as listener:
        ready = threading.Event()
        find = lambda: listener.address if ready.is_set() else None  # noqa: E731
        async with dialling(find) as dialer:
            asked = asyncio.create_task(dialer.request(Ping(1), SOON, resend_after=0.01))
            await asyncio.sleep(0.1)
            assert len(dialer._send_queue) == 1
            ready.set()
            dialer.refresh_address()
            incoming = await receive(listener)
            await listener.send(incoming.peer, Pong(1), incoming.request_id)
            assert await asked == Pong(1)


async def test_closed_dialer_fails_open_requests_and_sends_its_last_messages() -> None:
    async with listening() as listener:
        dialer = Dialer(KEYS, DOWN, lambda: listener.address)
        task = asyncio.create_task(dialer.run())
        asked = asyncio.create_task(dialer.request(Ping(1), SOON))
        assert (await receive(listener)).message == Ping(1)
        for n in range(20):  # more than can be sent between this loop and close()
            await dialer.send(Ping(n, bytes(2**16)))
        await dialer.close()
        with pytest.raises(ConnectionError):
            await asked
        await task
        assert [(await receive(listener)).message.n for _ in range(20)] == list(range(20))


# ── authentication ─────────────────────────────────────────────────────────────────────────────────────────────────
async def test_client_with_a_key_of_another_run_cannot_connect() -> None:
    other = RunKeys.make()
    stranger = msgspec.structs.replace(KEYS, client_public=other.client_public, client_secret=other.client_secret)
    async with listening() as listener:
        async with dialling(lambda: listener.address, (Joined("stranger"),), stranger) as refused:
            await eventually(lambda: listener.refused > 0)
            assert not refused.connected
            async with dialling(lambda: listener.address, (Joined("member"),)):
                assert (await receive(listener)).message == Joined("member")


async def test_listener_without_the_run_key_receives_nothing() -> None:
    async with listening(RunKeys.make()) as impostor:
        async with dialling(lambda: impostor.address, (Joined("me"),)) as dialer:
            await eventually(lambda: impostor.refused > 0)
            assert not dialer.connected


async def test_client_without_curve_cannot_connect() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    async with listening() as listener:
        plain = raw_dealer(context, None)
        plain.connect(listener.endpoint)
        plain.send(sockets.encode_frame(0, None, Joined("plain")))
        await eventually(lambda: listener.refused > 0)
        async with dialling(lambda: listener.address, (Joined("member"),)):
            assert (await receive(listener)).message == Joined("member")
        plain.close()
    context.term()


@pytest.mark.parametrize("garbage", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 65536, b"\xff" * 65536])
async def test_garbage_at_the_port_has_no_effect(garbage: bytes) -> None:
    async with listening() as listener:
        _, writer = await asyncio.open_connection("127.0.0.1", port_of(listener))
        writer.write(garbage)
        async with answering(listener), dialling(lambda: listener.address) as dialer:
            assert await dialer.request(Ping(7), SOON) == Pong(7)
        writer.close()


async def test_replayed_connection_is_refused() -> None:
    async with listening() as listener, Proxy(port_of(listener)) as proxy:
        via = Address(1, f"tcp://127.0.0.1:{proxy.port}")
        async with dialling(lambda: via, (Joined("me"),)):
            assert (await receive(listener)).message == Joined("me")
        assert listener.refused == 0
        _, writer = await asyncio.open_connection("127.0.0.1", port_of(listener))
        writer.write(proxy.from_client)
        await eventually(lambda: listener.refused > 0)
        writer.close()
        async with dialling(lambda: listener.address, (Joined("other"),)):
            assert (await receive(listener)).message == Joined("other")


async def test_frames_that_cannot_be_read_are_dropped_and_counted() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    async with listening() as listener:
        member = raw_dealer(context)
        member.connect(listener.endpoint)
        good = sockets.encode_frame(0, None, Ping(1))
        future = msgspec.msgpack.encode((PROTOCOL_VERSION + 1, 0, None, Ping(2)))
        unknown = sockets.encode_frame(0, None, News("not for this direction"))
        for bad in (b"", b"\xc1", os.urandom(100), good[:-1], future, unknown, b"\x91" * 5000):
            member.send(bad)
        member.send_multipart([good, good])
        member.send(good)
        assert (await receive(listener)).message == Ping(1)
        assert listener.dropped == 8
        member.close()
    context.term()


# ── lost connections and messages ──────────────────────────────────────────────────────────────────────────────────
async def test_reconnect_sends_hello_and_open_requests_again() -> None:
    async with listening() as listener, Proxy(port_of(listener)) as proxy:
        via = Address(1, f"tcp://127.0.0.1:{proxy.port}")
        async with dialling(lambda: via, (Joined("me"),)) as dialer:
            asked = asyncio.create_task(dialer.request(Ping(1), SOON))
            assert [(await receive(listener)).message for _ in range(2)] == [Joined("me"), Ping(1)]
            proxy.cut()
            assert (await receive(listener)).message == Joined("me")
            again = await receive(listener)
            assert again.message == Ping(1)
            await listener.send(again.peer, Pong(1), again.request_id)
            assert await asked == Pong(1)


async def test_successor_at_another_address_gets_hello_and_open_requests() -> None:
    async with listening(epoch=1) as first, listening(epoch=2) as second:
        newest = [first.address]
        async with dialling(lambda: newest[0], (Joined("me"),)) as dialer:
            asked = asyncio.create_task(dialer.request(Ping(1), SOON))
            assert [(await receive(first)).message for _ in range(2)] == [Joined("me"), Ping(1)]
            newest[0] = second.address
            await first.close()
            assert (await receive(second)).message == Joined("me")
            again = await receive(second)
            assert again.message == Ping(1)
            await second.send(again.peer, Pong(1), again.request_id)
            assert await asked == Pong(1)


async def test_a_successor_is_found_though_the_old_listener_still_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "CONNECTED_ADDRESS_POLL_S", 0.05)

    async with listening(epoch=1) as first, listening(epoch=2) as second:
        newest = [first.address]
        async with dialling(lambda: newest[0], (Joined("me"),)):
            assert (await receive(first)).message == Joined("me")
            newest[0] = second.address
            assert (await receive(second)).message == Joined("me")


async def test_messages_of_a_listener_of_an_older_epoch_are_ignored() -> None:
    async with listening(epoch=1) as stale:
        async with dialling(lambda: Address(2, stale.endpoint), (Joined("me"),)) as dialer:
            peer = (await receive(stale)).peer
            await stale.send(peer, News("from the past"))
            await eventually(lambda: dialer.dropped == 1)
            stale.epoch = 2
            await stale.send(peer, News("from now"))
            assert await dialer.next_push() == News("from now")


async def test_an_address_of_an_older_epoch_is_not_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "CONNECTED_ADDRESS_POLL_S", 0.02)

    async with listening(epoch=1) as old, listening(epoch=2) as new:
        looks = 0
        newest = new.address

        def find() -> Address:
            nonlocal looks
            looks += 1
            return newest

        async with answering(new), dialling(find) as dialer:
            assert await dialer.request(Ping(1), SOON) == Pong(1)
            newest, before = old.address, looks
            await eventually(lambda: looks > before + 3)
            assert await dialer.request(Ping(2), SOON) == Pong(2)


async def test_silent_listener_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "_HEARTBEAT_MS", 100)
    monkeypatch.setattr(sockets, "_HEARTBEAT_TIMEOUT_MS", 1000)
    # so that only the missing heartbeats can make the dialer look up the address
    monkeypatch.setattr(endpoints, "CONNECTED_ADDRESS_POLL_S", 10 * SOON)

    async with listening(epoch=1) as first, listening(epoch=2) as second, Proxy(port_of(first)) as proxy:
        newest = [Address(1, f"tcp://127.0.0.1:{proxy.port}")]
        async with dialling(lambda: newest[0], (Joined("me"),)):
            assert (await receive(first)).message == Joined("me")
            proxy.hold()
            newest[0] = second.address
            assert (await receive(second)).message == Joined("me")


async def test_address_lookup_with_unreadable_storage_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "ADDRESS_POLL_S", 0.02)

    async with listening() as listener:
        tries = 0

        def find() -> Address:
            nonlocal tries
            tries += 1
            if tries < 3:
                raise OSError("stale file handle")
            return listener.address

        async with dialling(find, (Joined("me"),)):
            assert (await receive(listener)).message == Joined("me")


# ── bounds ─────────────────────────────────────────────────────────────────────────────────────────────────────────
async def test_long_absence_drops_the_oldest_messages_and_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "MAX_QUEUED_MESSAGES", 10)
    monkeypatch.setattr(endpoints, "ADDRESS_POLL_S", 0.02)

    async with listening() as listener:
        ready = threading.Event()
        async with dialling(lambda: listener.address if ready.is_set() else None) as dialer:
            asked = asyncio.create_task(dialer.request(Ping(-1), SOON))
            await asyncio.sleep(0)  # so that the request comes before the messages
            for n in range(15):
                await dialer.send(Ping(n))
            assert dialer.dropped == 6
            ready.set()
            got = [await receive(listener) for _ in range(10)]
            assert [incoming.message.n for incoming in got] == [-1, *range(6, 15)]
            await listener.send(got[0].peer, Pong(-1), got[0].request_id)
            await asked


async def test_peer_that_does_not_read_does_not_block_other_peers() -> None:
    few = sockets.Bounds(sockets.CONTROL_BOUNDS.max_frame_bytes, 5)

    async with listening(bounds=few) as listener, Proxy(port_of(listener)) as proxy:
        via = Address(1, f"tcp://127.0.0.1:{proxy.port}")
        async with dialling(lambda: via, (Joined("slow"),)):
            slow = (await receive(listener)).peer
            proxy.hold()
            for _ in range(200):
                await listener.send(slow, News("much", bytes(2**18)))
            assert listener.dropped > 0
            async with answering(listener), dialling(lambda: listener.address) as other:
                assert await other.request(Ping(1), SOON) == Pong(1)


async def test_queue_of_unread_pushes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "MAX_QUEUED_MESSAGES", 10)

    async with listening() as listener, dialling(lambda: listener.address, (Joined("me"),)) as dialer:
        peer = (await receive(listener)).peer
        for n in range(15):
            await listener.send(peer, Pong(n))
        await eventually(lambda: dialer.dropped == 5)
        assert await dialer.next_push() == Pong(5)


async def test_an_answer_to_a_peer_that_is_gone_is_dropped_silently() -> None:
    async with listening() as listener:
        await listener.send(b"nobody", News("hi"))
        assert listener.dropped == 0


def test_several_endpoints_in_one_loop_leave_nothing_behind() -> None:
    def things() -> set[tuple[str, str]]:
        """Return the threads and the open descriptors by number, without the descriptor of this listing."""
        files = [number for number in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{number}")]
        return {("thread", number) for number in os.listdir("/proc/self/task")} | {("file", number) for number in files}

    async def test() -> None:
        async with listening() as one, listening() as two:
            async with answering(one), answering(two):
                async with dialling(lambda: one.address) as a, dialling(lambda: two.address) as b:
                    async with dialling(lambda: one.address) as c:
                        answers = await asyncio.gather(*(dialer.request(Ping(1), SOON) for dialer in (a, b, c)))
                        assert answers == [Pong(1)] * 3

    failures: list[BaseException] = []

    def in_thread() -> None:
        try:
            asyncio.run(test())
        except BaseException as error:
            failures.append(error)

    before = things()
    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join(SOON)
    assert not thread.is_alive()
    assert failures == []
    end = time.monotonic() + SOON
    while things() - before and time.monotonic() < end:
        time.sleep(0.01)  # join() returns a moment before the kernel removes the thread
    assert not things() - before  # threads and descriptors of earlier tests may have ended in the meantime
