"""Random kills, freezes and restarts of sources and receivers while versions flow."""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import signal

import pytest

from rrl.tests.support.weights.source import VERSION
from rrl.tests.support.weights.torture import NBYTES, RECEIVERS, Tally, torture
from rrl.tests.support.weights.transports import TIMEOUT_S, child, transport_for
from rrl.transport.streams.connection import TransportError
from rrl.transport.weights.base import WeightTransport

_HELD_UP = RECEIVERS * NBYTES
"""Bytes of the versions that hung readers keep, for up to 30 s (calls._SEND_BY)."""
_LEAKED = 16 * 2**20
"""Bytes by which the mean memory may grow from the earlier to the later measurements.

A leak of one version at every 40th of 250 faults would exceed them. The memory that readers keep varies.
"""
_DESCRIPTORS = 24
"""Limit for new descriptors: one or two connections to and from each other process, with some descriptors each."""
_THREADS = (os.cpu_count() or 1) + 4
"""Limit for new threads: asyncio's pool, if it was not full before."""


def check(tally: Tally, faults: int, memory: int) -> None:
    assert tally.faults.total() == faults
    assert tally.wrong == []
    assert tally.commits > faults / 4, tally
    assert tally.deltas > tally.commits / 4, tally
    assert tally.fallbacks == 0, tally
    assert all(len(looks) >= 2 for looks in tally.usage.values())
    grown = tally.growth()
    assert grown.anonymous <= memory, tally.usage
    assert grown.descriptors < _DESCRIPTORS, tally.usage
    assert grown.threads <= _THREADS, tally.usage


@pytest.mark.long
def test_committed_versions_are_correct_after_kills_stops_and_restarts_of_any_process(kind: str) -> None:
    check(asyncio.run(torture(kind, 15, seed=1)), 15, _HELD_UP + _LEAKED)


async def broken_off(kind: str, transport: WeightTransport, pages: mmap.mmap) -> bool:
    """Kill the source in the middle of a fetch into these pages.

    Return False if the kill came too late, or if a busy machine did not connect in time.
    """
    into = memoryview(pages)
    async with child(kind, len(pages), len(pages)) as (at, pid):
        try:
            await transport.manifest(at, VERSION, TIMEOUT_S)
        except TransportError:
            return False
        fetching = asyncio.create_task(transport.fetch(at, VERSION, range(len(pages)), into, TIMEOUT_S))
        while into[0] == 0:
            await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        await asyncio.wait([fetching])
        return isinstance(fetching.exception(), TransportError)


@pytest.mark.usefixtures("runner")
async def test_interrupted_fetch_releases_its_buffer(kind: str) -> None:
    async with transport_for(kind) as pipe:
        pages = mmap.mmap(-1, 64 * 2**20)
        while not await broken_off(kind, pipe, pages):
            pages = mmap.mmap(-1, 64 * 2**20)
        gc.collect()
        pages.close()  # raises BufferError if a view of the pages still exists


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_hundreds_of_faults_leave_correct_versions_and_no_leaks(kind: str) -> None:
    check(asyncio.run(torture(kind, 250, seed=2)), 250, _LEAKED)
