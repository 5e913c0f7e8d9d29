"""The weight plane over every pipe: the same suite for tcp and ucx, with sources that die, hang and lie."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rrl.spec.words import Life, ReplicaId, Version
from rrl.tests.transport.weights.source import VERSION, content, described
from rrl.transport.messages import Holder
from rrl.transport.weights import pipe as pipes
from rrl.transport.weights.manifest import Manifest
from rrl.transport.weights.pipe import NotHeld, Pipe, PipeError, open_pipe
from rrl.transport.weights.store import WeightStore
from rrl.transport.weights.swarm import PullFailed, pull

SOON = 30.0
SECRET = b"s" * 32
CHUNK = 2**20
SIZE = 12 * CHUNK + 1234
CHUNKS = 13
Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=["tcp", "ucx"], scope="module")
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "ucx" and importlib.util.find_spec("ucxx") is None:
        pytest.skip("ucxx is not installed")
    return str(request.param)


@pytest.fixture(scope="module")
def run(kind: str) -> Generator[Run]:
    """Runs each test in one loop per pipe: UCX's runtime belongs to a loop and takes 1 s to stop."""

    async def bounded(test: Coroutine[Any, Any, None]) -> None:
        async with asyncio.timeout(2 * SOON):
            await test

    async def opened() -> Pipe:
        return open_pipe(kind, SECRET)

    with asyncio.Runner() as runner:
        keeper = runner.run(opened())
        yield lambda test: runner.run(bounded(test))
        runner.run(keeper.close())


@asynccontextmanager
async def piped(kind: str, secret: bytes = SECRET) -> AsyncGenerator[Pipe]:
    pipe = open_pipe(kind, secret)
    try:
        yield pipe
    finally:
        await pipe.close()


def holder(at: str, name: str = "trainer/0") -> Holder:
    return Holder(Life(ReplicaId(name), 1), at)


@asynccontextmanager
async def served(kind: str, store: WeightStore, secret: bytes = SECRET) -> AsyncGenerator[str]:
    async with piped(kind, secret) as pipe:
        yield await pipe.serve(store, "127.0.0.1")


def holding(version: Version = VERSION, size: int = SIZE) -> WeightStore:
    store, flat = WeightStore(), content(size)
    store.offer(described(version, flat, SECRET, CHUNK), flat)
    return store


@asynccontextmanager
async def child(kind: str, size: int = SIZE, chunk: int = CHUNK) -> AsyncGenerator[tuple[str, int]]:
    """A source in a process of its own: its address and pid."""
    argv = [sys.executable, "-m", "rrl.tests.transport.weights.source", kind, SECRET.hex(), str(size), str(chunk)]
    process = await asyncio.to_thread(
        subprocess.Popen, argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
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

    async def fetch(self, at: str, version: Version, span: range, into: memoryview, by: float) -> None:
        try:
            await self.pipe.fetch(at, version, span, into, by)
        except PipeError as error:
            self.failed.setdefault(at, []).append(str(error))
            raise
        self.came[at] = self.came.get(at, 0) + 1
        self.after(at, self.came[at])

    async def serve(self, store: WeightStore, host: str) -> str:
        return await self.pipe.serve(store, host)

    async def manifest(self, at: str, version: Version, by: float) -> Manifest:
        return await self.pipe.manifest(at, version, by)

    def hang_up(self, at: str) -> None:
        self.pipe.hang_up(at)

    async def close(self) -> None:
        await self.pipe.close()


def complete(store: WeightStore, version: Version = VERSION, size: int = SIZE) -> bool:
    held = store.get(version)
    return held is not None and held.flat == content(size)


# ── pulling ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_pull_brings_every_byte_and_the_manifest(kind: str, run: Run) -> None:
    async def test() -> None:
        source, mine = holding(), WeightStore()
        async with served(kind, source) as at, piped(kind) as pipe:
            manifest = await pull(mine, VERSION, lambda: [holder(at)], pipe)
            held = source.get(VERSION)
            assert held is not None
            assert manifest == held.manifest
            assert complete(mine)

    run(test())


@pytest.mark.parametrize("size", [1, 63, 65537])
def test_small_versions_come_whole(kind: str, run: Run, size: int) -> None:
    async def test() -> None:
        mine = WeightStore()
        async with served(kind, holding(size=size)) as at, piped(kind) as pipe:
            await pull(mine, VERSION, lambda: [holder(at)], pipe)
            assert complete(mine, size=size)

    run(test())


def test_version_after_version_comes_over_one_connection(kind: str, run: Run) -> None:
    async def test() -> None:
        source, mine = WeightStore(), WeightStore()
        async with served(kind, source) as at, piped(kind) as pipe:
            dialled = []
            dial = pipe._calls._dial  # type: ignore[attr-defined]

            async def counted(at: str) -> Any:
                dialled.append(at)
                return await dial(at)

            pipe._calls._dial = counted  # type: ignore[attr-defined]
            for step in range(10):
                flat = content(2**19, seed=step)
                source.offer(described(Version(step, 1), flat, SECRET, CHUNK), flat)
                await pull(mine, Version(step, 1), lambda: [holder(at)], pipe)
                held = mine.current()
                assert held is not None
                assert held.flat == flat
            assert dialled == [at]

    run(test())


def test_a_late_joiner_pulls_from_a_rollout_that_has_pulled(kind: str, run: Run) -> None:
    async def test() -> None:
        middle, mine = WeightStore(), WeightStore()
        async with served(kind, middle) as second, piped(kind) as pipe:
            async with served(kind, holding()) as first:
                await pull(middle, VERSION, lambda: [holder(first)], pipe)
            await pull(mine, VERSION, lambda: [holder(second, "rollout/0")], pipe)
            assert complete(mine)

    run(test())


def test_two_sources_share_a_version(kind: str, run: Run) -> None:
    async def test() -> None:
        mine = WeightStore()
        async with served(kind, holding()) as a, served(kind, holding()) as b, piped(kind) as pipe:
            spy = Spy(pipe)
            await pull(mine, VERSION, lambda: [holder(a), holder(b)], spy, window=2, sources=2)
            assert complete(mine)
            assert set(spy.came) == {a, b}
            assert sum(spy.came.values()) == CHUNKS

    run(test())


def test_a_holder_that_will_hold_the_version_soon_is_asked_again(kind: str, run: Run) -> None:
    async def test() -> None:
        source, mine = WeightStore(), WeightStore()
        looks = 0

        async with served(kind, source) as at, piped(kind) as pipe:

            def holders() -> Sequence[Holder]:
                nonlocal looks
                looks += 1
                if looks == 2:
                    flat = content(SIZE)
                    source.offer(described(VERSION, flat, SECRET, CHUNK), flat)
                return [holder(at)]

            await pull(mine, VERSION, holders, pipe)
            assert complete(mine)

    run(test())


# ── sources that fail ──────────────────────────────────────────────────────────────────────────────────────────────
def test_a_source_killed_in_mid_pull_costs_only_the_missing_chunks(kind: str, run: Run) -> None:
    async def test() -> None:
        mine = WeightStore()
        async with child(kind) as (dying, pid), served(kind, holding()) as other, piped(kind) as pipe:

            def kill(at: str, count: int) -> None:
                if at == dying and count == 3:
                    os.kill(pid, signal.SIGKILL)

            spy = Spy(pipe, kill)
            await pull(mine, VERSION, lambda: [holder(dying), holder(other)], spy, sources=1, window=2)
            assert complete(mine)
            assert 3 <= spy.came[dying] < CHUNKS
            assert spy.came[dying] + spy.came[other] == CHUNKS

    run(test())


def test_a_stopped_source_is_left_at_the_chunks_deadline(kind: str, run: Run) -> None:
    async def test() -> None:
        mine = WeightStore()
        async with child(kind) as (stopped, pid), served(kind, holding()) as other, piped(kind) as pipe:

            def stop(at: str, count: int) -> None:
                if at == stopped and count == 3:
                    os.kill(pid, signal.SIGSTOP)

            spy = Spy(pipe, stop)
            await pull(
                mine, VERSION, lambda: [holder(stopped), holder(other)], spy, sources=1, window=2, chunk_by=0.5
            )
            assert complete(mine)
            assert "nothing within 0.5 s" in spy.failed[stopped]
            assert spy.came[stopped] + spy.came[other] == CHUNKS

    run(test())


def test_the_only_source_is_asked_again_after_it_missed_a_deadline(kind: str, run: Run) -> None:
    async def test() -> None:
        mine = WeightStore()
        async with child(kind) as (at, pid), piped(kind) as pipe:

            def stop(at: str, count: int) -> None:
                if count == 3:
                    os.kill(pid, signal.SIGSTOP)

            def named() -> Sequence[Holder]:
                if spy.failed:
                    os.kill(pid, signal.SIGCONT)
                return [holder(at)]

            spy = Spy(pipe, stop)
            await pull(mine, VERSION, named, spy, chunk_by=0.5)
            assert complete(mine)
            assert spy.failed
            assert spy.came[at] == CHUNKS

    run(test())


def test_a_stopped_source_harms_nobody_who_dials_it(kind: str, run: Run) -> None:
    async def test() -> None:
        async with child(kind) as (at, pid), piped(kind) as pipe:
            os.kill(pid, signal.SIGSTOP)

            async def dial() -> None:
                with pytest.raises(PipeError, match="nothing within"):
                    await pipes.shake_hands(await pipe._dial(at), SECRET, dialled=True)  # type: ignore[attr-defined]

            await asyncio.gather(*(dial() for _ in range(10)))
            os.kill(pid, signal.SIGCONT)
            mine = WeightStore()
            await pull(mine, VERSION, lambda: [holder(at)], pipe)
            assert complete(mine)

    run(test())


async def stopped_halfway(pipe: Pipe, at: str, pid: int, into: memoryview) -> bool:
    """Fetch everything into `into`, stop the source on the first byte: whether the fetch was given up for it."""
    fetching = asyncio.create_task(pipe.fetch(at, VERSION, range(len(into)), into, 0.5))
    while into[0] == 0:
        await asyncio.sleep(0)
    os.kill(pid, signal.SIGSTOP)
    try:
        await fetching
    except PipeError as error:
        assert "nothing within 0.5 s" in str(error)  # noqa: PT017
        return True
    return False


def test_a_buffer_is_not_written_to_after_its_fetch_was_given_up(kind: str, run: Run) -> None:
    size = 64 * 2**20

    async def test() -> None:
        async with child(kind, size, size) as (at, pid), piped(kind) as pipe:
            await pipe.manifest(at, VERSION, SOON)
            into = memoryview(bytearray(size))
            while not await stopped_halfway(pipe, at, pid, into):
                os.kill(pid, signal.SIGCONT)  # all of it had come before the signal: try again
                into = memoryview(bytearray(size))
            left = bytes(into)
            assert 0 in left
            os.kill(pid, signal.SIGCONT)
            again = memoryview(bytearray(size))
            while 0 in again:
                try:  # once it has come, the first answer has gone wherever it went
                    await pipe.fetch(at, VERSION, range(size), again, SOON)
                except PipeError as error:  # on a busy machine a connection may take more than its second
                    assert "nothing within 1 s" in str(error)  # noqa: PT017
            assert again == content(size)
            assert into == left

    run(test())


def test_a_lying_source_is_refused_and_put_aside(kind: str, run: Run) -> None:
    async def test() -> None:
        mine, liar = WeightStore(), WeightStore()
        flat = content(SIZE)
        false = bytearray(flat)
        false[5 * CHUNK + 7] ^= 1
        manifest = described(VERSION, flat, SECRET, CHUNK)
        liar.offer(manifest, memoryview(false))
        async with served(kind, liar) as lies, served(kind, holding()) as other, piped(kind) as pipe:
            with pytest.raises(PullFailed, match="wrong bytes in chunk 5"):
                await pull(mine, VERSION, lambda: [holder(lies)], pipe, by=0.5)
            assert mine.current() is None
            missing = len(mine.begin(manifest))
            assert 5 in mine.begin(manifest)
            assert missing < CHUNKS
            spy = Spy(pipe)
            await pull(mine, VERSION, lambda: [holder(lies), holder(other)], spy, sources=1)
            assert complete(mine)
            assert spy.came[lies] + spy.came[other] == missing + 1  # chunk 5 twice, nothing else

    run(test())


def test_a_pull_without_a_source_says_what_each_one_did(kind: str, run: Run) -> None:
    async def test() -> None:
        async with served(kind, WeightStore()) as empty, piped(kind) as pipe:
            with pytest.raises(PullFailed, match="not held there"):
                await pull(WeightStore(), VERSION, lambda: [holder(empty)], pipe, by=0.3)
            with pytest.raises(PullFailed, match=r"not an address of a"):
                await pull(WeightStore(), VERSION, lambda: [holder("pigeon://a:1")], pipe, by=0.3)
            with pytest.raises(PullFailed, match="no holder was named"):
                await pull(WeightStore(), VERSION, lambda: [], pipe, by=0.3)

    run(test())


def test_a_source_that_is_gone_before_the_pull_is_passed_over(kind: str, run: Run) -> None:
    async def test() -> None:
        mine = WeightStore()
        async with served(kind, holding()) as gone:
            pass
        async with served(kind, holding()) as at, piped(kind) as pipe:
            await pull(mine, VERSION, lambda: [holder(gone), holder(at)], pipe)
            assert complete(mine)

    run(test())


def test_a_pull_ends_when_another_version_is_begun(kind: str, run: Run) -> None:
    async def test() -> None:
        mine = WeightStore()
        newer = described(Version(4, 1), content(100), SECRET, CHUNK)
        async with served(kind, holding()) as at, piped(kind) as pipe:

            def begin(at: str, count: int) -> None:
                if count == 3:
                    mine.begin(newer)

            spy = Spy(pipe, begin)
            with pytest.raises(PullFailed, match="not being received"):
                await pull(mine, VERSION, lambda: [holder(at)], spy)
            assert mine.versions() == (Version(4, 1),)

    run(test())


def test_a_cancelled_pull_harms_neither_end_and_is_gone_on_with(kind: str, run: Run) -> None:
    async def test() -> None:
        mine = WeightStore()
        async with served(kind, holding()) as at, piped(kind) as pipe:
            pulling: list[asyncio.Task[Manifest]] = []

            def cancel(at: str, count: int) -> None:
                if count == 3:
                    pulling[0].cancel()

            spy = Spy(pipe, cancel)
            pulling.append(asyncio.create_task(pull(mine, VERSION, lambda: [holder(at)], spy)))
            with pytest.raises(asyncio.CancelledError):
                await pulling[0]
            spy = Spy(pipe)
            await pull(mine, VERSION, lambda: [holder(at)], spy)
            assert complete(mine)
            assert spy.came[at] <= CHUNKS - 2  # the third was in, its verification may have been cancelled

    run(test())


# ── who is spoken to ───────────────────────────────────────────────────────────────────────────────────────────────
def test_another_runs_secret_is_refused_by_the_one_who_dials(kind: str, run: Run) -> None:
    async def test() -> None:
        async with served(kind, holding()) as at, piped(kind, b"t" * 32) as pipe:
            with pytest.raises(PipeError, match="does not know this run's secret"):
                await pipe.manifest(at, VERSION, SOON)

    run(test())


def test_another_runs_secret_is_refused_by_the_one_who_listens(kind: str, run: Run) -> None:
    async def test() -> None:
        async with served(kind, holding()) as at, piped(kind) as pipe:
            line = await pipe._dial(at)  # type: ignore[attr-defined]
            await line.open()
            await line.send(bytes(32))
            await line.receive(memoryview(bytearray(64)))
            await line.send(bytes(32))  # a proof that proves nothing
            with pytest.raises(PipeError):
                await line.receive(memoryview(bytearray(9)))
            line.abort()
            await pipe.manifest(at, VERSION, SOON)

    run(test())


def test_a_proof_cannot_be_mirrored_back(kind: str, run: Run) -> None:
    async def test() -> None:
        async with served(kind, holding()) as at, piped(kind) as pipe:
            line = await pipe._dial(at)  # type: ignore[attr-defined]
            await line.open()
            await line.send(bytes(32))
            answer = bytearray(64)
            await line.receive(memoryview(answer))
            await line.send(bytes(answer[32:]))
            with pytest.raises(PipeError):
                await line.receive(memoryview(bytearray(9)))
            line.abort()

    run(test())


def test_a_silent_stranger_is_dropped(kind: str, run: Run) -> None:
    async def test() -> None:
        async with served(kind, holding()) as at, piped(kind) as pipe:
            line = await pipe._dial(at)  # type: ignore[attr-defined]
            await line.open()
            async with asyncio.timeout(SOON):
                with pytest.raises(PipeError):
                    await line.receive(memoryview(bytearray(1)))
            line.abort()

    run(test())


@pytest.mark.parametrize("garbage", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 65536, b"\xff" * 65536, os.urandom(2**20)])
def test_garbage_at_the_port_harms_nothing(kind: str, run: Run, garbage: bytes) -> None:
    async def test() -> None:
        mine = WeightStore()
        async with served(kind, holding(size=CHUNK)) as at, piped(kind) as pipe:
            _, writer = await asyncio.open_connection("127.0.0.1", int(at.rpartition(":")[2]))
            writer.write(garbage)
            await pull(mine, VERSION, lambda: [holder(at)], pipe)
            assert complete(mine, size=CHUNK)
            writer.transport.abort()

    run(test())


def test_what_a_member_asks_beyond_the_version_is_not_given(kind: str, run: Run) -> None:
    async def test() -> None:
        async with served(kind, holding(size=100)) as at, piped(kind) as pipe:
            into = memoryview(bytearray(50))
            with pytest.raises(NotHeld):
                await pipe.fetch(at, VERSION, range(51, 101), into, SOON)
            await pipe.fetch(at, VERSION, range(50, 100), into, SOON)
            assert into == content(100)[50:]

    run(test())
