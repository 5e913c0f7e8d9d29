"""A source of one weight version in its own process, which tests kill and stop.

``python -m rrl.tests.support.weights.source KIND SECRET_HEX NBYTES CHUNK_BYTES [UPSTREAM]`` prints its address and
serves one version until its standard input ends. The version is :data:`VERSION` with :func:`content`, or the version
that it pulls from UPSTREAM.
"""

from __future__ import annotations

import asyncio
import os
import sys

from rrl.core.types import Incarnation, ReplicaId, Version
from rrl.transport.weights.base import WeightTransport
from rrl.transport.weights.manifest import Manifest, describe
from rrl.transport.weights.pull import AdaptiveTimeout, WeightSource, pull
from rrl.transport.weights.select import open_transport
from rrl.transport.weights.store import WeightStore

VERSION = Version(3, 1)
PULL_TIMEOUT_S = 30.0
"""Deadline of the pull in s."""


def content(nbytes: int, seed: int = 0) -> memoryview:
    """Return bytes without zeros, whose period is not a power of two."""
    period = bytes(range(1 + seed, 252)) + bytes(range(1, 1 + seed))
    return memoryview((period * (nbytes // len(period) + 1))[:nbytes])


def described(version: Version, flat: memoryview, secret: bytes, chunk_bytes: int) -> Manifest:
    return describe(version, [("w", "uint8", (flat.nbytes,), flat.nbytes)], flat, secret, chunk_bytes)


async def _main(kind: str, secret: bytes, nbytes: int, chunk_bytes: int, upstream: str = "") -> None:
    store, flat = WeightStore(), content(nbytes)
    if not upstream:
        store.offer(described(VERSION, flat, secret, chunk_bytes), flat)
    pipe = open_transport(kind, secret, trusted_network=True)
    print(await pipe.serve(store, "127.0.0.1"), flush=True)
    pulling = asyncio.create_task(_pull(store, pipe, upstream)) if upstream else None
    await asyncio.to_thread(sys.stdin.read)
    del pulling
    os._exit(0)


async def _pull(store: WeightStore, transport: WeightTransport, upstream: str) -> None:
    source = WeightSource(Incarnation(ReplicaId("rollout/0"), 1), upstream)
    await pull(
        store,
        VERSION,
        lambda: [source],
        transport,
        adaptive_timeout=AdaptiveTimeout(PULL_TIMEOUT_S, PULL_TIMEOUT_S),
        starvation_timeout=PULL_TIMEOUT_S,
    )


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], bytes.fromhex(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:]))
