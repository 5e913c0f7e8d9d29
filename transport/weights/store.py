"""Weight versions in memory: at most two, of which at most one is still arriving.

Only a complete and verified version can become current. Other processes can read each chunk of an arriving version once
the chunk is verified. While the version is being pulled, a request for an unverified chunk waits. An eviction only
drops the store's reference to a version: a reader (a send in progress, an engine that loads the version) keeps the
buffer alive until the reader is done.
"""

from __future__ import annotations

import asyncio
import mmap
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

from msgspec import Struct

from ...core.types import Version
from . import delta
from .changes import Changes, UnknownBase
from .manifest import Manifest, digest

MAX_VERSIONS = 2
"""Maximum number of versions in memory, including the arriving version. Each version is as large as the model."""
READER_IDLE_TIMEOUT_S = 1.0
"""Seconds without a request after which a reader counts as gone. Between two requests a reader verifies a chunk, which
takes milliseconds."""
READ_TIMEOUT_S = 30.0
"""Seconds for which a reader can prevent the eviction of a version, in addition to the time that reading the version at
MIN_READER_BYTES_PER_S takes."""
MIN_READER_BYTES_PER_S = 100e6
"""Minimum rate of a reader in bytes per second (a NIC of 1 Gbit/s). A slower reader may lose its version."""

T = TypeVar("T")


class StoredVersion(Struct, frozen=True):
    """A complete version. ``flat`` is read-only; a reader must keep a reference to this object while it reads."""

    manifest: Manifest
    flat: memoryview
    start: int = 0
    """Offset of the first byte of ``flat``. A publisher of one of several parts has only the bytes of its part."""


class Superseded(Exception):
    """The version that was being received has been replaced by another one."""


class NotReady(Exception):
    """The requested part is still being received."""


class VersionUnknown(NotReady):
    """The version is newer than all known versions, and may arrive later."""


class VersionEvicted(Exception):
    """The version, or the requested part of it, is neither in the store nor being received."""


def fresh_memory(nbytes: int) -> memoryview:
    """Return pages that the kernel zeroes when they are touched.

    A bytearray would be zeroed at once. This blocks all other threads for 0.4 to 2.7 s per GiB (measured), so that no
    heartbeat is sent.
    """
    return memoryview(mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))[:nbytes]


def _unused(pages: mmap.mmap) -> bool:
    """Return whether no view of the pages exists."""
    try:
        pages.resize(len(pages))  # changes nothing, and fails while a view exists
    except BufferError:
        return False
    return True


class _Arriving:
    """A version that is being received."""

    def __init__(self, manifest: Manifest, flat: memoryview, base: StoredVersion | None) -> None:
        self.manifest = manifest
        self.flat = flat
        self.base = base
        """The version of which deltas change the chunks; None if there are none."""
        self.missing = set(range(len(manifest.chunks)))
        self._starts = [chunk.offset for chunk in manifest.chunks]

    def verified(self, span: range) -> bool:
        """Return whether all chunks that contain any of the bytes ``span`` are verified."""
        first = bisect_right(self._starts, span.start) - 1
        last = bisect_right(self._starts, max(span.start, span.stop - 1)) - 1
        return self.missing.isdisjoint(range(first, last + 1))


class _Reader:
    """A connection that reads a version and has not received the whole version yet."""

    def __init__(self, version: Version, now: float) -> None:
        self.version, self.since, self.last, self.nbytes = version, now, now, 0
        self.sending = False
        """True if the connection has requested bytes and has not received all of them yet."""


class WeightStore:
    """The weight versions of one process.

    Thread-safe: a trainer's thread offers versions while the event loop's thread serves readers. Digests are computed
    outside the lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._complete: dict[Version, StoredVersion] = {}
        """Complete versions in order of arrival. After a restart of the trainer, a version may be of an earlier step
        than the version that arrived before it."""
        self._arriving: _Arriving | None = None
        self._awaited: Version | None = None
        self._part: Manifest | None = None
        """This process's part of the awaited version; None if it has none to offer."""
        self._readers: dict[object, _Reader] = {}
        self._changes = Changes()
        self._encoding = threading.Lock()
        """Held while a frame is made, so that each frame is made once."""
        self._waiting: dict[asyncio.Future[None], asyncio.AbstractEventLoop] = {}
        self._spare: mmap.mmap | None = None
        """Memory of the version that was dropped last; None if there is none. The next version is stored in this
        memory, because fresh pages cost 0.5 to 1 s per GiB (measured)."""

    # ── writing ────────────────────────────────────────────────────────────────────────────────────────────────────
    def offer(self, manifest: Manifest, flat: memoryview, part: int = 0, changes: Sequence[bytes | None] = ()) -> None:
        """Publish a complete version, which becomes the current one. ``flat`` must not be written to afterwards.

        This process serves only part ``part``, whose bytes are in ``flat``. ``changes`` are those since the current
        version (:attr:`.manifest.ManifestBuilder.changes`).

        Raises:
            ValueError: The buffer does not have the size in the manifest.
        """
        held = manifest.parts[part]
        if flat.nbytes != held.nbytes:
            raise ValueError(
                f"{manifest.version}: the buffer has {flat.nbytes} bytes, but the manifest describes {held.nbytes}"
            )
        with self._changing():
            before = next(reversed(self._complete.values()), None)
            if changes and before is not None and before.start == held.offset and before.manifest != manifest:
                self._changes.begin(before.manifest, manifest.version)
                offsets = range(held.offset, held.offset + held.nbytes)
                mine = [chunk.offset for chunk in manifest.chunks if chunk.offset in offsets]
                for offset, gaps in zip(mine, changes, strict=True):
                    self._changes.put(manifest.version, offset, gaps)
            self._add(StoredVersion(manifest, flat.toreadonly(), held.offset))

    def allocate(self, nbytes: int) -> memoryview:
        """Return memory for a version that will be offered.

        If the store is full, the oldest version is evicted to free memory, unless that version is being read.
        """
        with self._changing():
            if len(self._complete) >= MAX_VERSIONS and not self._is_being_read(next(iter(self._complete))):
                self._evict(MAX_VERSIONS - 1)
            return self._allocate(nbytes)

    @contextmanager
    def awaiting(self, version: Version, part: Manifest | None = None) -> Generator[None]:
        """Return a context manager for the time in which the version is being pulled or published.

        Within it, requests for missing bytes of the version wait. Requests for its manifest get the manifest of this
        process's part; without ``part`` they wait.
        """
        with self._changing():
            self._awaited, self._part = version, part
        try:
            yield
        finally:
            with self._changing():
                self._awaited = self._part = None

    def begin(self, manifest: Manifest, deltas: bool = False) -> list[int]:
        """Prepare to receive a version, and return the indexes of its missing chunks: none if the version is complete.

        If this version has been received in part, its verified chunks are kept. If another version has been received in
        part, that version is dropped. With ``deltas``, the current version is the base of deltas, and the changes since
        this base are kept for other receivers.
        """
        with self._changing():
            stored = self._complete.get(manifest.version)
            if stored is not None and stored.manifest == manifest:
                return []
            if self._arriving is None or self._arriving.manifest != manifest:
                if self._arriving is not None:  # the old buffer must be free before the next one is allocated
                    self._recycle(self._arriving.flat)
                    self._changes.drop(self._arriving.manifest.version)
                    self._arriving = None
                self._evict(MAX_VERSIONS - 1)
                base = next(iter(self._complete.values()), None) if deltas else None
                if base is not None and base.manifest.has_layout_of(manifest):
                    self._changes.begin(base.manifest, manifest.version)
                else:
                    base = None
                self._arriving = _Arriving(manifest, self._allocate(manifest.nbytes), base)
            return sorted(self._arriving.missing)

    def span(self, version: Version, index: int) -> memoryview:
        """Return the memory for chunk ``index`` of the arriving version ``version``. Raises Superseded."""
        chunk = (arriving := self._receiving(version)).manifest.chunks[index]
        return arriving.flat[chunk.offset : chunk.offset + chunk.nbytes]

    def base(self, version: Version, index: int) -> bytes | None:
        """Return the digest of the base of chunk ``index`` of the arriving version, or None. Raises Superseded."""
        base = self._receiving(version).base
        return None if base is None else base.manifest.chunks[index].digest

    def accept(self, version: Version, index: int, frame: delta.Buffer | None = None) -> bool:
        """Verify the bytes written for chunk ``index``. Return False if their digest is wrong. Raises Superseded.

        If there is a ``frame``, the bytes are first made from it and the base.
        """
        arriving = self._receiving(version)
        chunk, base = arriving.manifest.chunks[index], arriving.base
        span = slice(chunk.offset, chunk.offset + chunk.nbytes)
        into, gaps = arriving.flat[span], None
        if frame is not None and base is not None:
            try:
                gaps = delta.apply(frame, base.flat[span], into)
            except ValueError:
                return False
        if digest(into, arriving.manifest.part_at(chunk.offset).hash) != chunk.digest:
            return False
        if base is not None and frame is None:
            gaps = delta.changed_words(base.flat[span], into)
        with self._changing():
            if base is not None:
                self._changes.put(version, chunk.offset, gaps)
            arriving.missing.discard(index)
        return True

    def commit(self, version: Version) -> StoredVersion:
        """Make the arriving version, which must be complete, the current one.

        Raises:
            Superseded: The version is not being received.
            ValueError: Chunks are missing.
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
        """Remove a version, complete or not."""
        with self._changing():
            if (stored := self._complete.pop(version, None)) is not None:
                self._recycle(stored.flat)
            self._changes.drop(version)
            if self._arriving is not None and self._arriving.manifest.version == version:
                self._arriving = None
            if self._awaited == version:
                self._awaited = None

    # ── reading ────────────────────────────────────────────────────────────────────────────────────────────────────
    def current(self) -> StoredVersion | None:
        """Return the version that was completed last; None if no version is complete."""
        with self._lock:
            return next(reversed(self._complete.values()), None)

    def get(self, version: Version) -> StoredVersion | None:
        """Return a version if it is complete, else None."""
        with self._lock:
            return self._complete.get(version)

    def complete_versions(self) -> tuple[Version, ...]:
        """Return the complete versions, the newest first."""
        with self._lock:
            return tuple(reversed(self._complete))

    def versions(self) -> tuple[Version, ...]:
        """Return all versions in memory, including the arriving version."""
        with self._lock:
            arriving = () if self._arriving is None else (self._arriving.manifest.version,)
            return (*self._complete, *arriving)

    def manifest(self, version: Version) -> Manifest:
        """Return the manifest of a complete or arriving version, or of this process's part of an awaited version.

        Raises NotReady or VersionEvicted.
        """
        with self._lock:
            if (stored := self._complete.get(version)) is not None:
                return stored.manifest
            if self._arriving is not None and self._arriving.manifest.version == version:
                return self._arriving.manifest
            if self._part is not None and self._part.version == version:
                return self._part
            raise self._unavailable(version)

    def read(self, version: Version, span: range, reader: object) -> memoryview:
        """Return verified bytes of a complete or arriving version as a read-only view.

        The view stays valid as long as it is referenced.

        Args:
            version: The version.
            span: The bytes.
            reader: Identifies the connection, also in :meth:`on_sent` and :meth:`on_reader_left`.

        Raises:
            NotReady: The bytes are still being received.
            VersionEvicted: The bytes are neither in the store nor being received.
        """
        with self._lock:
            if (stored := self._complete.get(version)) is not None:
                flat, start = stored.flat, stored.start
            elif self._arriving is not None and self._arriving.manifest.version == version:
                flat, start = self._arriving.flat.toreadonly(), 0
            else:
                raise self._unavailable(version)
            end = start + flat.nbytes
            if span.start < start or span.stop > end:
                raise VersionEvicted(f"bytes {span.start} to {span.stop} of {version}: only {start} to {end} are here")
            if stored is None and self._arriving is not None and not self._arriving.verified(span):
                raise NotReady if self._awaited == version else VersionEvicted(f"{version} was given up")
            self._note_request(reader, version, len(span), flat.nbytes)
            return flat[span.start - start : span.stop - start]

    def changes(self, version: Version, offset: int, base: bytes) -> list[bytes] | None:
        """Return :meth:`.changes.Changes.since`; None if the version is not here. Raises UnknownBase."""
        with self._lock:
            arriving = None if self._arriving is None else self._arriving.manifest.version
            return self._changes.since(base, version, offset) if version in (*self._complete, arriving) else None

    def frame(self, version: Version, offset: int, base: bytes, chunk: memoryview) -> bytes | None:
        """Return a chunk's frame (:mod:`.delta`) for a receiver that has ``base``; None if it is too large or unknown.

        Args:
            version: The version.
            offset: Offset of the chunk.
            base: Digest of the base.
            chunk: The chunk, which :meth:`read` has returned.
        """
        with self._encoding:
            with self._lock:
                if (frame := self._changes.frame(base, version, offset)) is not None:
                    return frame
                try:
                    changes = self._changes.since(base, version, offset)
                except UnknownBase:
                    return None
            if changes is None or (frame := delta.encode(delta.union(changes, len(chunk)), chunk)) is None:
                return None
            with self._lock:
                self._changes.keep_frame(base, version, offset, frame)
            return frame

    def on_sent(self, reader: object) -> None:
        """Record that a reader has received all requested bytes."""
        with self._lock:
            if (reading := self._readers.get(reader)) is not None:
                reading.sending, reading.last = False, time.monotonic()

    def on_reader_left(self, reader: object) -> None:
        """Record that a reader has left."""
        with self._lock:
            self._readers.pop(reader, None)

    async def wait_until_ready(self, timeout: float, read: Callable[[], T]) -> T:
        """Return the result of ``read``; while it raises NotReady, call it again at every change of the store.

        Args:
            timeout: Seconds for which ``read`` is retried.
            read: Calls :meth:`manifest` or :meth:`read`.

        Raises:
            NotReady: ``read`` still raised NotReady after ``timeout`` s.
        """
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
        """Hold the lock, and after its release wake all waiting tasks, each in its own event loop."""
        with self._lock:
            yield
            waiting, self._waiting = self._waiting, {}
        for changed, loop in waiting.items():
            with suppress(RuntimeError):  # that loop has ended, so no task waits in it
                loop.call_soon_threadsafe(_wake, changed)

    def _unavailable(self, version: Version) -> Exception:
        if version == self._awaited:
            return NotReady(f"{version} is being received")
        known = [*self._complete] if self._arriving is None else [*self._complete, self._arriving.manifest.version]
        if all(version > other for other in known):
            return VersionUnknown(f"{version} is unknown")
        return VersionEvicted(f"{version} is not in the store")

    def _note_request(self, reader: object, version: Version, nbytes: int, held: int) -> None:
        """Record a request of ``nbytes`` bytes; this process holds ``held`` bytes of the version."""
        now = time.monotonic()
        reading = self._readers.get(reader)
        if reading is None or reading.version != version:
            reading = self._readers[reader] = _Reader(version, now)
        reading.last, reading.sending = now, True
        reading.nbytes += nbytes
        if reading.nbytes >= held:
            del self._readers[reader]

    def _is_being_read(self, version: Version) -> bool:
        """Return whether a reader has begun the version and not finished it; idle and too slow readers do not count."""
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
        self._complete.pop(stored.manifest.version, None)  # a version that is offered again becomes the newest
        self._complete[stored.manifest.version] = stored
        self._evict(MAX_VERSIONS - (self._arriving is not None))

    def _evict(self, max_versions: int) -> None:
        """Evict the oldest versions that are not being read, but never the current version.

        If all older versions are being read, the newest of them is evicted, so that the readers of the oldest version
        can always finish.
        """
        while len(self._complete) > max_versions:
            older = list(self._complete)[:-1]
            idle = [version for version in older if not self._is_being_read(version)]
            self._recycle(self._complete.pop(idle[0] if idle else older[-1]).flat)

    def _recycle(self, flat: memoryview) -> None:
        self._spare = flat.obj if isinstance(flat.obj, mmap.mmap) else None

    def _allocate(self, nbytes: int) -> memoryview:
        """Return the memory of the version that was dropped last if it has the right size and is unused.

        Otherwise return fresh memory.
        """
        pages, self._spare = self._spare, None
        if pages is not None and len(pages) == max(1, nbytes) and _unused(pages):
            return memoryview(pages)[:nbytes]
        return fresh_memory(nbytes)


def _wake(changed: asyncio.Future[None]) -> None:
    if not changed.done():
        changed.set_result(None)
