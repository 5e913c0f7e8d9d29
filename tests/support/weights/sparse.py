"""Versions that differ from each other in few values, as those of consecutive training steps do."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from rrl.core.types import Version
from rrl.tests.support.weights.transports import CHUNK, SECRET, SIZE
from rrl.transport.weights.changes import UnknownBase
from rrl.transport.weights.manifest import Manifest, ManifestBuilder, join_parts
from rrl.transport.weights.store import WeightStore

SHARE = 0.02
"""Share of the words (of two bytes) that change from one version to the next."""


def changed(flat: memoryview, seed: int, share: float = SHARE) -> memoryview:
    """Return a copy in which this share of the words has changed, at places that depend on ``seed``."""
    random = np.random.default_rng(seed)
    words = np.frombuffer(flat, "<u2", flat.nbytes // 2).copy()
    words[random.choice(words.size, round(share * words.size), replace=False)] += 1
    return memoryview(words.tobytes() + bytes(flat[words.nbytes :]))


@functools.cache
def versions(count: int, size: int = SIZE, share: float = SHARE) -> tuple[memoryview, ...]:
    """Return the bytes of consecutive versions."""
    made = [memoryview(np.random.default_rng(0).bytes(size))]
    while len(made) < count:
        made.append(changed(made[-1], len(made), share))
    return tuple(made)


def described(
    version: Version,
    flat: memoryview,
    before: memoryview | None = None,
    chunk: int = CHUNK,
    part: int = 0,
    of: int = 1,
    name: str = "w",
) -> tuple[Manifest, tuple[bytes | None, ...]]:
    """Return the manifest of one part of a version, and its changes since ``before``; part n is of rank n."""
    tensors = [(f"{name}{part}", "uint8", (flat.nbytes,), flat.nbytes)]
    with ManifestBuilder(version, tensors, flat, SECRET, chunk, part=part, of=of, rank=part, before=before) as builder:
        return builder.sign(), builder.changes


def publish(store: WeightStore, version: Version, flat: memoryview, chunk: int = CHUNK, name: str = "w") -> Manifest:
    """Publish a version of one part as ``roles.worker.publishing`` does: with the changes since the current version."""
    before = store.current()
    manifest, changes = described(version, flat, None if before is None else before.flat, chunk, name=name)
    store.offer(manifest, flat, changes=changes)
    return manifest


def publish_parts(
    stores: Sequence[WeightStore], version: Version, flats: Sequence[memoryview], chunk: int = CHUNK
) -> Manifest:
    """Publish a version of several parts, each from the store of its rank."""
    held = [store.current() for store in stores]
    parts = [
        described(version, flat, None if before is None else before.flat, chunk, part, len(stores))
        for part, (flat, before) in enumerate(zip(flats, held, strict=True))
    ]
    whole = join_parts([manifest for manifest, _ in parts], SECRET)
    for part, (store, flat) in enumerate(zip(stores, flats, strict=True)):
        store.offer(whole, flat, part, parts[part][1])
    return whole


def knows_base(store: WeightStore, version: Version, offset: int, base: bytes) -> bool:
    try:
        store.changes(version, offset, base)
    except UnknownBase:
        return False
    return True
