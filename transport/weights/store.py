"""Weight versions in memory: at most two, of which at most one is still arriving.

A version is either complete and verified, or nobody sees it. Evicting one only drops the store's reference: who is
reading it (a send in progress, an engine that loads it) keeps its buffer alive until done.
"""

from __future__ import annotations

import mmap
import threading

from msgspec import Struct

from rrl.spec.words import Version
from rrl.transport.weights.manifest import Manifest, digest

KEEP = 2
"""versions in memory, the arriving one included: each costs the size of the model"""


class Held(Struct, frozen=True):
    """A complete version. ``flat`` is read-only; hold on to this object for as long as you read it."""

    manifest: Manifest
    flat: memoryview


class Superseded(Exception):
    """The version that was being received has been given up for another one."""


def fresh_memory(nbytes: int) -> memoryview:
    """Pages that the kernel zeroes when they are touched. A bytearray would be zeroed here and now while no other
    thread runs: 0.4 to 2.7 s a GiB (measured), in which no beat goes out."""
    return memoryview(mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))[:nbytes]


class _Arriving:
    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.flat = fresh_memory(manifest.nbytes)
        self.missing = set(range(len(manifest.chunks)))


class WeightStore:
    """Thread-safe: a trainer's thread offers while the loop's thread serves. Digests are computed outside the lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._complete: dict[Version, Held] = {}  # in order of arrival: after a restart the newest may count lower
        self._arriving: _Arriving | None = None

    def offer(self, manifest: Manifest, flat: memoryview) -> None:
        """Publish a complete version: from now on it is the current one. ``flat`` must not be written to any more.

        Raises ValueError when the buffer is not of the manifest's size.
        """
        if flat.nbytes != manifest.nbytes:
            raise ValueError(f"{manifest.version}: {flat.nbytes} bytes offered, {manifest.nbytes} described")
        with self._lock:
            self._add(Held(manifest, flat.toreadonly()))

    def begin(self, manifest: Manifest) -> list[int]:
        """Make room for a version and say which chunks are missing; none when it is complete already.

        Another half-received version is dropped, the same one is gone on with.
        """
        with self._lock:
            held = self._complete.get(manifest.version)
            if held is not None and held.manifest == manifest:
                return []
            if self._arriving is None or self._arriving.manifest != manifest:
                self._arriving = None  # its buffer goes before the next one comes
                self._evict(KEEP - 1)
                self._arriving = _Arriving(manifest)
            return sorted(self._arriving.missing)

    def span(self, version: Version, index: int) -> memoryview:
        """Where chunk ``index`` of the arriving version is to be written. Raises Superseded."""
        chunk = (arriving := self._receiving(version)).manifest.chunks[index]
        return arriving.flat[chunk.offset : chunk.offset + chunk.nbytes]

    def accept(self, version: Version, index: int) -> bool:
        """Verify what was written for chunk ``index``; False when its digest is wrong. Raises Superseded."""
        arriving = self._receiving(version)
        chunk = arriving.manifest.chunks[index]
        if digest(arriving.flat[chunk.offset : chunk.offset + chunk.nbytes]) != chunk.digest:
            return False
        with self._lock:
            arriving.missing.discard(index)
        return True

    def commit(self, version: Version) -> Held:
        """The arriving version is complete: from now on it is the current one.

        Raises Superseded, or ValueError while chunks are missing.
        """
        with self._lock:
            held = self._complete.get(version)
            if held is not None and (self._arriving is None or self._arriving.manifest.version != version):
                return held
            arriving = self._arriving
            if arriving is None or arriving.manifest.version != version:
                raise Superseded(f"{version} is not being received")
            if arriving.missing:
                raise ValueError(f"{version} lacks {len(arriving.missing)} of {len(arriving.manifest.chunks)} chunks")
            self._arriving = None
            held = Held(arriving.manifest, arriving.flat.toreadonly())
            self._add(held)
            return held

    def discard(self, version: Version) -> None:
        """Forget a version, complete or not."""
        with self._lock:
            self._complete.pop(version, None)
            if self._arriving is not None and self._arriving.manifest.version == version:
                self._arriving = None

    def current(self) -> Held | None:
        """The version that was completed last."""
        with self._lock:
            return next(reversed(self._complete.values()), None)

    def get(self, version: Version) -> Held | None:
        """A complete version, or None."""
        with self._lock:
            return self._complete.get(version)

    def versions(self) -> tuple[Version, ...]:
        """Everything in memory, the arriving one included."""
        with self._lock:
            arriving = () if self._arriving is None else (self._arriving.manifest.version,)
            return (*self._complete, *arriving)

    def _receiving(self, version: Version) -> _Arriving:
        with self._lock:
            if self._arriving is None or self._arriving.manifest.version != version:
                raise Superseded(f"{version} is not being received")
            return self._arriving

    def _add(self, held: Held) -> None:
        self._complete.pop(held.manifest.version, None)
        self._complete[held.manifest.version] = held
        self._evict(KEEP - (self._arriving is not None))

    def _evict(self, keep: int) -> None:
        while len(self._complete) > keep:
            del self._complete[next(iter(self._complete))]
