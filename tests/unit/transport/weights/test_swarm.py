"""Receivers in a chain over every transport: which source serves which receiver, and the cost of a faulty one.

The publisher gets its chunks one by one, so that each fault comes at a known place, between two chunks.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack

import pytest

from rrl.core.types import Version
from rrl.tests.support.weights.chain import Liar, Publisher, Receiver, Unresponsive, receiver, receiver_apart, until
from rrl.tests.support.weights.source import VERSION, content, described
from rrl.tests.support.weights.transports import (
    CHUNK,
    CHUNKS,
    SECRET,
    TIMEOUT_S,
    Run,
    calm,
    complete,
    served,
    weight_source,
)
from rrl.transport.streams import connection
from rrl.transport.weights import pull, tcp, ucx
from rrl.transport.weights.base import STARVATION_TIMEOUT_S
from rrl.transport.weights.manifest import Manifest
from rrl.transport.weights.pull import AdaptiveTimeout, PullFailed, WeightSource
from rrl.transport.weights.store import WeightStore

HALF = 5
"""Number of chunks that pass before the fault."""
NEWER = Version(4, 1)


@pytest.fixture(autouse=True)
def connections_may_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow connections more time. A source without a connection then counts as dead only after a kernel error."""
    for module, name in (
        (connection, "HANDSHAKE_TIMEOUT_S"),
        (tcp, "CONNECT_TIMEOUT_S"),
        (ucx, "CONNECT_TIMEOUT_S"),
        (pull, "FIRST_CHUNK_TIMEOUT_S"),
    ):
        monkeypatch.setattr(module, name, TIMEOUT_S)


def quick() -> AdaptiveTimeout:
    """Return a timeout of 0.5 s after the connection is established."""
    return AdaptiveTimeout(TIMEOUT_S, 0.5)


class Chain:
    """A publisher and three receivers, of which the test itself acts as the middle one."""

    def __init__(self, publisher: Publisher, at: WeightSource, first: Receiver, last: Receiver) -> None:
        self.publisher, self.at, self.first, self.last = publisher, at, first, last
        self.middle = weight_source("", "rollout/1", None)
        self.named = True
        """Whether the middle receiver is announced."""
        self._begun = False

    def holders(self) -> list[WeightSource]:
        return [self.at, self.first.source, *([self.middle] if self.named else []), self.last.source]

    def _last_known(self) -> list[WeightSource]:
        """Return the sources that the last receiver knows: until it has begun, only an announced middle receiver."""
        return self.holders() if self._begun or not self.named else [self.middle]

    async def half(
        self, stack: AsyncExitStack, last: AdaptiveTimeout
    ) -> tuple[asyncio.Task[Manifest], asyncio.Task[Manifest]]:
        """Let some chunks arrive at the last receiver, through all others.

        Return the pulls of the first and of the last receiver, which continue.
        """
        stack.enter_context(self.publisher.publishing())
        self.publisher.feed(HALF)
        first = asyncio.create_task(
            self.first.pull(self.holders, adaptive_timeout=calm(), starvation_timeout=TIMEOUT_S)
        )
        pulling = asyncio.create_task(
            self.last.pull(self._last_known, adaptive_timeout=last, starvation_timeout=TIMEOUT_S)
        )
        await until(lambda: self.last.verified() == HALF)
        self._begun = True
        return first, pulling

    async def rest(self, first: asyncio.Task[Manifest], last: asyncio.Task[Manifest]) -> None:
        """Publish the other chunks. Both receivers then have everything, and the publisher has sent each chunk once."""
        self.publisher.feed()
        await asyncio.gather(first, last)
        assert complete(self.first.store)
        assert complete(self.last.store)
        assert self.first.chunks_from(self.at) == CHUNKS
        assert self.last.chunks_from(self.at) == 0


async def chained(kind: str, stack: AsyncExitStack) -> Chain:
    publisher = Publisher()
    at = await stack.enter_async_context(served(kind, publisher.store))
    first = await stack.enter_async_context(receiver(kind, 0))
    last = await stack.enter_async_context(receiver(kind, 2))
    return Chain(publisher, weight_source(at, version=VERSION), first, last)


# ── a working chain ────────────────────────────────────────────────────────────────────────────────────────────────
def test_chunks_pass_down_the_chain_while_the_version_is_still_arriving(kind: str, run: Run) -> None:
    async def test() -> None:
        async with AsyncExitStack() as stack:
            chain = await chained(kind, stack)
            middle = await stack.enter_async_context(receiver(kind, 1))
            chain.middle = middle.source
            passing = asyncio.create_task(
                middle.pull(lambda: [chain.first.source], adaptive_timeout=calm(), starvation_timeout=TIMEOUT_S)
            )
            first, last = await chain.half(stack, calm())
            assert [one.store.current() for one in (chain.first, middle, chain.last)] == [None] * 3
            await chain.rest(first, last)
            await passing
            assert complete(middle.store)
            assert middle.chunks_from(chain.first.source) == chain.last.chunks_from(chain.middle) == CHUNKS

    run(test())


def test_late_receiver_pulls_nothing_from_the_publisher(kind: str, run: Run) -> None:
    async def test() -> None:
        async with AsyncExitStack() as stack:
            chain = await chained(kind, stack)
            chain.named = False
            chain.publisher.feed()
            await chain.first.pull(chain.holders, adaptive_timeout=calm())
            chain.first.source = weight_source(chain.first.source.address, chain.first.name, VERSION)
            for index, store in ((0, WeightStore()), (5, WeightStore())):
                late = await stack.enter_async_context(receiver(kind, index, store))
                others = [chain.at, weight_source(chain.first.source.address, "rollout/1", VERSION)]
                asked: list[str] = []
                manifest = late.spy.transport.manifest

                async def noted(
                    address: str,
                    version: Version,
                    timeout: float,
                    starvation_timeout: float = STARVATION_TIMEOUT_S,
                    asked: list[str] = asked,
                    ask: object = manifest,
                ) -> Manifest:
                    asked.append(address)
                    return await ask(address, version, timeout, starvation_timeout)  # type: ignore[operator, no-any-return]

                late.spy.transport.manifest = noted  # type: ignore[method-assign]
                await late.pull(lambda others=others: others, adaptive_timeout=calm())  # type: ignore[misc]
                assert complete(late.store)
                assert set(late.spy.came) == {chain.first.source.address} == set(asked)

    run(test())


def test_source_that_is_itself_waiting_does_not_count_as_hung(kind: str, run: Run) -> None:
    async def test() -> None:
        async with AsyncExitStack() as stack:
            chain = await chained(kind, stack)
            chain.named = False
            replies = 0
            within = chain.first.store.wait_until_ready

            async def counted(by: float, look: object) -> object:
                nonlocal replies
                try:
                    return await within(by, look)  # type: ignore[arg-type]
                finally:
                    replies += 1

            chain.first.store.wait_until_ready = counted  # type: ignore[method-assign, assignment]
            first, last = await chain.half(stack, AdaptiveTimeout(TIMEOUT_S, 1.0))
            before = replies
            await until(lambda: replies > before + 30)  # 1.5 s of "not yet"
            await chain.rest(first, last)
            assert chain.last.spy.failed == {}

    run(test())


# ── a chain with a faulty member ───────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_receiver_skips_a_dead_or_hung_neighbour(kind: str, run: Run, fault: signal.Signals) -> None:
    async def test() -> None:
        async with AsyncExitStack() as stack:
            chain = await chained(kind, stack)
            source = chain.first.source
            chain.middle, pid = await stack.enter_async_context(receiver_apart(kind, 1, source))
            first, last = await chain.half(stack, quick())
            assert chain.last.chunks_from(chain.middle) == HALF
            os.kill(pid, fault)
            await chain.rest(first, last)
            assert chain.last.chunks_from(chain.middle) + chain.last.chunks_from(source) == CHUNKS

    run(test())


async def _complete_past(
    chain: Chain, stack: AsyncExitStack, kind: str, store: WeightStore, timeout: AdaptiveTimeout
) -> Receiver:
    """Let the chain complete past a middle receiver that serves from ``store``, and return that receiver."""
    middle = await stack.enter_async_context(receiver(kind, 1, store))
    chain.middle = middle.source
    passing = asyncio.create_task(middle.pull(chain.holders, adaptive_timeout=calm(), starvation_timeout=TIMEOUT_S))
    first, last = await chain.half(stack, timeout)
    await chain.rest(first, last)
    await passing
    return middle


def test_corrupt_chunks_are_fetched_again_and_their_source_is_dropped(kind: str, run: Run) -> None:
    async def test() -> None:
        async with AsyncExitStack() as stack:
            chain = await chained(kind, stack)
            liar = await _complete_past(chain, stack, kind, Liar(HALF * CHUNK), calm())
            wrong = chain.last.chunks_from(liar.source) - HALF
            assert 1 <= wrong <= 8  # chunks that were on their way, or being verified
            assert chain.last.chunks_from(chain.first.source) == CHUNKS - HALF

    run(test())


def test_receiver_leaves_a_silent_source_in_the_middle_of_the_chain(kind: str, run: Run) -> None:
    async def test() -> None:
        async with AsyncExitStack() as stack:
            chain = await chained(kind, stack)
            silent = await _complete_past(chain, stack, kind, Unresponsive(HALF * CHUNK), quick())
            assert chain.last.chunks_from(silent.source) == HALF
            assert chain.last.chunks_from(chain.first.source) == CHUNKS - HALF
            assert chain.last.spy.failed[silent.source.address][0].startswith("no reply within")

    run(test())


def test_source_that_only_replies_not_yet_is_left(kind: str, run: Run) -> None:
    async def test() -> None:
        async with AsyncExitStack() as stack:
            chain = await chained(kind, stack)
            starved = await stack.enter_async_context(receiver(kind, 1))
            chain.middle = starved.source
            stack.enter_context(starved.store.awaiting(VERSION))
            starved.store.begin(chain.publisher.manifest)
            chain.publisher.feed()
            await chain.first.pull(chain.holders, adaptive_timeout=calm())
            await chain.last.pull(chain.holders, adaptive_timeout=calm(), starvation_timeout=0.3)
            assert complete(chain.last.store)
            assert chain.last.chunks_from(chain.first.source) == CHUNKS

    run(test())


def test_receiver_pulls_from_publisher_when_the_chain_head_is_gone(kind: str, run: Run) -> None:
    async def test() -> None:
        async with AsyncExitStack() as stack:
            chain = await chained(kind, stack)
            source = weight_source(chain.at.address)
            chain.named = False
            chain.publisher.feed()
            async with receiver_apart(kind, 0, source) as (gone, _):
                pass
            chain.first.source = gone
            await chain.last.pull(chain.holders, adaptive_timeout=calm())
            assert complete(chain.last.store)
            assert chain.last.chunks_from(chain.at) == CHUNKS

    run(test())


def test_without_a_publisher_complete_holders_serve_the_version(kind: str, run: Run) -> None:
    async def test() -> None:
        async with AsyncExitStack() as stack:
            chain = await chained(kind, stack)
            chain.named = False
            chain.publisher.feed()
            await chain.first.pull(chain.holders, adaptive_timeout=calm())
            having = weight_source(chain.first.source.address, "rollout/7", VERSION)
            await chain.last.pull(lambda: [having], adaptive_timeout=calm())
            assert complete(chain.last.store)

    run(test())


# ── newer versions ─────────────────────────────────────────────────────────────────────────────────────────────────
def test_partly_received_version_is_completed_although_a_newer_one_exists(kind: str, run: Run) -> None:
    async def test() -> None:
        async with AsyncExitStack() as stack:
            chain = await chained(kind, stack)
            chain.named = False
            first, last = await chain.half(stack, calm())
            flat = content(100, seed=1)
            chain.publisher.store.offer(described(NEWER, flat, SECRET, CHUNK), flat)
            await chain.rest(first, last)

    run(test())


def test_source_that_drops_a_version_reports_it_to_waiting_receivers(kind: str, run: Run) -> None:
    async def test() -> None:
        async with AsyncExitStack() as stack:
            chain = await chained(kind, stack)
            chain.named = False
            superseded = False

            def holders() -> list[WeightSource]:
                if superseded:
                    raise PullFailed("a newer version is out")
                return chain.holders()

            stack.enter_context(chain.publisher.publishing())
            chain.publisher.feed(HALF)
            first = asyncio.create_task(
                chain.first.pull(holders, adaptive_timeout=calm(), starvation_timeout=TIMEOUT_S)
            )
            last = asyncio.create_task(chain.last.pull(holders, adaptive_timeout=calm(), starvation_timeout=TIMEOUT_S))
            await until(lambda: chain.last.verified() == HALF)
            superseded = True
            flat = content(100, seed=1)
            chain.publisher.store.discard(VERSION)
            for pulling in (first, last):
                with pytest.raises(PullFailed, match="a newer version is out"):
                    await pulling
            chain.publisher.store.offer(described(NEWER, flat, SECRET, CHUNK), flat)
            superseded = False
            await asyncio.gather(*(one.pull(chain.holders, version=NEWER) for one in (chain.first, chain.last)))
            for one in (chain.first, chain.last):
                held = one.store.current()
                assert held is not None
                assert held.flat == flat
                assert one.store.versions() == (NEWER,)

    run(test())
