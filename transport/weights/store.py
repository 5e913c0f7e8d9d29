"""Weight versions in memory: at most two, of which at most one is still arriving.

A version is complete and verified, or it is not current. Of one that is arriving, each chunk can be read by others from
when it is verified; who asks for more is told that it will come, as long as it is being pulled. Evicting a version only
drops the store's reference: who is reading it (a send in progress, an engine that loads it) keeps its buffer alive
until done.
"""

from __future__ import annotations

import asyncio
import mmap
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import TypeVar

from msgspec import Struct

from ...core.types import Version
from .manifest import Manifest, digest

MAX_VERSIONS = 2
"""versions in memory, the arriving one included: each costs the size of the model"""
READER_IDLE_TIMEOUT_S = 1.0
"""s without a request after which a reader is taken to have left; between two chunks it verifies one: milliseconds"""
READ_TIMEOUT_S = 30.0
"""s for which a reader can keep its version from being evicted before a newer one, beside what it takes at SLOW"""
MIN_READER_BYTES_PER_S = 100e6
"""bytes a second: a NIC of 1 Gbit/s; who is slower than that may lose its version"""

T = TypeVar("T")


class StoredVersion(Struct, frozen=True):
    """A complete version. ``flat`` is read-only; hold on to this object for as long as you read it."""

    manifest: Manifest
    flat: memoryview


class Superseded(Exception):
    """The version that was being received has been given up for another one."""


class NotReady(Exception):
    """This part is being received."""


class VersionUnknown(NotReady):
    """Nothing is known of this version, which is newer than all that is: it may be on its way."""


class VersionEvicted(Exception):
    """This version, or such a part of it, is not here and is not being received."""


def fresh_memory(nbytes: int) -> memoryview:
    """Pages that the kernel zeroes when they are touched. A bytearray would be zeroed here and now while no other
    thread runs: 0.4 to 2.7 s a GiB (measured), in which no beat goes out."""
    return memoryview(mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))[:nbytes]


def _unused(pages: mmap.mmap) -> bool:
    """Nobody has a view of them."""
    try:
        pages.resize(len(pages))  # changes nothing, and is refused while there are views
    except BufferError:
        return False
    return True


class _Arriving:
    def __init__(self, manifest: Manifest, flat: memoryview) -> None:
        self.manifest = manifest
        self.flat = flat
        self.missing = set(range(len(manifest.chunks)))
        self._starts = [chunk.offset for chunk in manifest.chunks]

    def verified(self, span: range) -> bool:
        first = bisect_right(self._starts, span.start) - 1
        last = bisect_right(self._starts, max(span.start, span.stop - 1)) - 1
        return self.missing.isdisjoint(range(first, last + 1))


class _Reader:
    """One connection that reads one version, until it has received all of it."""

    def __init__(self, version: Version, now: float) -> None:
        self.version, self.since, self.last, self.nbytes = version, now, now, 0
        self.sending = False
        """it has asked, and not yet got all that it asked for"""


class WeightStore:
    """Thread-safe: a trainer's thread offers while the loop's thread serves. Digests are computed outside the lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._complete: dict[
            Version, StoredVersion
        ] = {}  # in order of arrival: after a restart the newest may count lower
        self._arriving: _Arriving | None = None
        self._awaited: Version | None = None
        self._readers: dict[object, _Reader] = {}
        self._waiting: dict[asyncio.Future[None], asyncio.AbstractEventLoop] = {}
        self._spare: mmap.mmap | None = None
        """of the version given up last, to be written to again: fresh pages cost 0.5 to 1 s a GiB (measured)"""

    # ── what comes in ──────────────────────────────────────────────────────────────────────────────────────────────
    def offer(self, manifest: Manifest, flat: memoryview) -> None:
        """Publish a complete version: from now on it is the current one. ``flat`` must not be written to any more.

        Raises ValueError when the buffer is not of the manifest's size.
        """
        if flat.nbytes != manifest.nbytes:
            raise ValueError(f"{manifest.version}: {flat.nbytes} bytes offered, {manifest.nbytes} described")
        with self._changing():
            self._add(StoredVersion(manifest, flat.toreadonly()))

    def allocate(self, nbytes: int) -> memoryview:
        """Where to write a version that is to be offered. The oldest one makes room for it, unless it is being read."""
        with self._changing():
            if len(self._complete) >= MAX_VERSIONS and not self._is_being_read(next(iter(self._complete))):
                self._evict(MAX_VERSIONS - 1)
            return self._allocate(nbytes)

    @contextmanager
    def awaiting(self, version: Version) -> Generator[None]:
        """Inside, this version is being pulled: who asks for what is not here yet is told that it will come."""
        with self._changing():
            self._awaited = version
        try:
            yield
        finally:
            with self._changing():
                self._awaited = None

    def begin(self, manifest: Manifest) -> list[int]:
        """Make room for a version and say which chunks are missing; none when it is complete already.

        Another half-received version is dropped, the same one is gone on with.
        """
        with self._changing():
            stored = self._complete.get(manifest.version)
            if stored is not None and stored.manifest == manifest:
                return []
            if self._arriving is None or self._arriving.manifest != manifest:
                if self._arriving is not None:  # its buffer goes before the next one comes
                    self._recycle(self._arriving.flat)
                    self._arriving = None
                self._evict(MAX_VERSIONS - 1)
                self._arriving = _Arriving(manifest, self._allocate(manifest.nbytes))
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
        with self._changing():
            arriving.missing.discard(index)
        return True

    def commit(self, version: Version) -> StoredVersion:
        """The arriving version is complete: from now on it is the current one.

        Raises Superseded, or ValueError while chunks are missing.
        """
        with self._changing():
            stored = self._complete.get(version)
            if stored is not None and (self._arriving is None or self._arriving.manifest.version != version):
                return stored
            arriving = self._arriving
            if arriving is None or arriving.manifest.version != version:
                raise Superseded(f"{version} is not being received")
            if arriving.missing:
                raise ValueError(f"{version} lacks {len(arriving.missing)} of {len(arriving.manifest.chunks)} chunks")
            self._arriving = None
            stored = StoredVersion(arriving.manifest, arriving.flat.toreadonly())
            self._add(stored)
            return stored

    def discard(self, version: Version) -> None:
        """Forget a version, complete or not."""
        with self._changing():
            if (stored := self._complete.pop(version, None)) is not None:
                self._recycle(stored.flat)
            if self._arriving is not None and self._arriving.manifest.version == version:
                self._arriving = None
            if self._awaited == version:
                self._awaited = None

    # ── what is here ───────────────────────────────────────────────────────────────────────────────────────────────
    def current(self) -> StoredVersion | None:
        """The version that was completed last."""
        with self._lock:
            return next(reversed(self._complete.values()), None)

    def get(self, version: Version) -> StoredVersion | None:
        """A complete version, or None."""
        with self._lock:
            return self._complete.get(version)

    def versions(self) -> tuple[Version, ...]:
        """Everything in memory, the arriving one included."""
        with self._lock:
            arriving = () if self._arriving is None else (self._arriving.manifest.version,)
            return (*self._complete, *arriving)

    def manifest(self, version: Version) -> Manifest:
        """Also of an arriving version. Raises NotYet, Gone."""
        with self._lock:
            if (stored := self._complete.get(version)) is not None:
                return stored.manifest
            if self._arriving is not None and self._arriving.manifest.version == version:
                return self._arriving.manifest
            raise self._unavailable(version)

    def read(self, version: Version, span: range, reader: object) -> memoryview:
        """These bytes, complete or arriving: read-only, verified, and good for as long as you hold on to them.

        ``reader`` is whose request it is, until :meth:`sent` and :meth:`left`. Raises NotYet, Gone."""
        with self._lock:
            if (stored := self._complete.get(version)) is not None:
                manifest, flat = stored.manifest, stored.flat
            elif self._arriving is not None and self._arriving.manifest.version == version:
                manifest, flat = self._arriving.manifest, self._arriving.flat.toreadonly()
            else:
                raise self._unavailable(version)
            if span.stop > manifest.nbytes:
                raise VersionEvicted(f"{version} has {manifest.nbytes} bytes")
            if stored is None and self._arriving is not None and not self._arriving.verified(span):
                raise NotReady if self._awaited == version else VersionEvicted(f"{version} was given up")
            self._note_request(reader, manifest, len(span))
            return flat[span.start : span.stop]

    def on_sent(self, reader: object) -> None:
        """It has got what it asked for."""
        with self._lock:
            if (reading := self._readers.get(reader)) is not None:
                reading.sending, reading.last = False, time.monotonic()

    def on_reader_left(self, reader: object) -> None:
        """It reads nothing any more."""
        with self._lock:
            self._readers.pop(reader, None)

    async def wait_until_ready(self, timeout: float, read: Callable[[], T]) -> T:
        """What ``look`` (:meth:`manifest` or :meth:`read`) gives as soon as it does not raise NotYet, tried again at
        every change; that NotYet after ``by`` s."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout
        while True:
            changed: asyncio.Future[None] = loop.create_future()
            with self._lock:
                self._waiting[changed] = loop
            try:
                return read()
            except NotReady:
                await asyncio.wait([changed], timeout=max(0.0, end - loop.time()))
                if not changed.done():
                    raise
            finally:
                with self._lock:
                    self._waiting.pop(changed, None)

    # ── inside ─────────────────────────────────────────────────────────────────────────────────────────────────────
    @contextmanager
    def _changing(self) -> Generator[None]:
        """The lock; who waits looks again afterwards, in its own loop."""
        with self._lock:
            yield
            waiting, self._waiting = self._waiting, {}
        for changed, loop in waiting.items():
            with suppress(RuntimeError):  # that loop has ended, and nobody waits in it
                loop.call_soon_threadsafe(_wake, changed)

    def _unavailable(self, version: Version) -> Exception:
        if version == self._awaited:
            return NotReady(f"{version} is being received")
        known = [*self._complete] if self._arriving is None else [*self._complete, self._arriving.manifest.version]
        if all(version > each for each in known):
            return VersionUnknown(f"nothing is known of {version}")
        return VersionEvicted(f"{version} is not held")

    def _note_request(self, reader: object, manifest: Manifest, nbytes: int) -> None:
        now = time.monotonic()
        reading = self._readers.get(reader)
        if reading is None or reading.version != manifest.version:
            reading = self._readers[reader] = _Reader(manifest.version, now)
        reading.last, reading.sending = now, True
        reading.nbytes += nbytes
        if reading.nbytes >= manifest.nbytes:
            del self._readers[reader]

    def _is_being_read(self, version: Version) -> bool:
        """Somebody is in the middle of it."""
        now = time.monotonic()
        return any(
            reading.version == version
            and (reading.sending or now - reading.last < READER_IDLE_TIMEOUT_S)
            and now - reading.since < READ_TIMEOUT_S + self._complete[version].flat.nbytes / MIN_READER_BYTES_PER_S
            for reading in self._readers.values()
        )

    def _receiving(self, version: Version) -> _Arriving:
        with self._lock:
            if self._arriving is None or self._arriving.manifest.version != version:
                raise Superseded(f"{version} is not being received")
            return self._arriving

    def _add(self, stored: StoredVersion) -> None:
        self._complete.pop(stored.manifest.version, None)  # offered again: it counts as the newest
        self._complete[stored.manifest.version] = stored
        self._evict(MAX_VERSIONS - (self._arriving is not None))

    def _evict(self, max_versions: int) -> None:
        """The oldest goes that nobody reads. Where all are being read, the oldest stays: one reader after the other
        comes to an end, however fast new versions follow. The current one always stays."""
        while len(self._complete) > max_versions:
            older = list(self._complete)[:-1]
            idle = [version for version in older if not self._is_being_read(version)]
            self._recycle(self._complete.pop(idle[0] if idle else older[-1]).flat)

    def _recycle(self, flat: memoryview) -> None:
        self._spare = flat.obj if isinstance(flat.obj, mmap.mmap) else None

    def _allocate(self, nbytes: int) -> memoryview:
        """What was given up last, when it is of that size and nobody reads it or writes to it any more; else fresh."""
        pages, self._spare = self._spare, None
        if pages is not None and len(pages) == max(1, nbytes) and _unused(pages):
            return memoryview(pages)[:nbytes]
        return fresh_memory(nbytes)


def _wake(changed: asyncio.Future[None]) -> None:
    if not changed.done():
        changed.set_result(None)
