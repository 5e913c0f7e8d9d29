"""Pull one version of the weights from any process that has it or is receiving it, chunk by chunk.

Several chunks are in flight, and each is verified. The chunks of a part come from one source at a time: the first
source of the list that has not failed. A source is given up in four cases: it sends nothing for longer than usual
(:class:`AdaptiveTimeout`); it has itself waited too long for a chunk; it does not have the version; a chunk does not
match its digest. The missing chunks are then requested from the next source. Once all sources have failed, they are
tried again with twice the timeout, because on a busy machine the only source may have missed a deadline. A source that
sent several wrong chunks is not tried again. If the process has an earlier version, the sources are asked for deltas
(:mod:`.delta`), up to three sources that do not know the changes from that version, and then for whole chunks. If a
delta results in wrong bytes, the rest of the version is requested without deltas: the base may be wrong, not the
source. If several ranks of the trainer have published a version in parts, each
rank is a source only of the chunks of its part, and all parts are pulled at the same time. A version becomes current
only when it is complete, but each chunk is served to other processes as soon as it is verified.

Every receiver derives its list of sources itself, from the names of the processes that serve weights. Receivers form
chains in the order of their names, guests last, since they are stopped without notice: each receiver requests from the
receiver before it in the chain. The first receivers (heads) of the first two chains request from the publisher. The
head of each later chain requests from the last receiver (tail) of an earlier chain; each tail serves at most two heads.
So the publisher sends a version at most twice, for any number of receivers, and a late receiver pulls from a neighbour.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from msgspec import Struct

from ...core.types import TRAINER, Incarnation, ReplicaId, Version, is_support, is_trainer, member_id, natural_sort_key
from ..streams.connection import TransportError
from .base import STARVATION_TIMEOUT_S, BaseUnknown, WeightTransport
from .delta import UNCHANGED
from .deltas import Deltas
from .manifest import Chunk, Manifest, encode
from .protocol import ANSWER_BYTES
from .store import Superseded, WeightStore

_HEADS_PER_TAIL = 2
"""Number of chains that begin at the publisher, and of chains that continue from the tail of each earlier chain. With
two, the path to the last receiver grows with the logarithm of the number of receivers; with more, too many transfers
would share one NIC."""


class WeightSource(Struct, frozen=True):
    """A process that serves weights, and the address at which they can be pulled."""

    incarnation: Incarnation
    address: str
    versions: tuple[Version, ...] = ()
    """Complete versions of the source when it last completed one, as far as they are known. The source may be receiving
    a newer version by now, and have evicted an older one. A further member of the trainer reports none, but may have a
    part of a version."""


def select_sources(
    me: ReplicaId,
    all_sources: Sequence[WeightSource],
    version: Version,
    chain: int,
    direct: bool = False,
    base: Version | None = None,
) -> tuple[WeightSource, ...]:
    """Return the sources from which ``me`` requests ``version``, in the order in which they are tried.

    The order is: the predecessor of ``me`` in its chain; the receivers that have the complete version, first those that
    also have ``base`` (each receiver begins with a different one of them); the receivers further up the chain of
    ``me``; the publisher.

    Args:
        me: The receiver, which need not be among the sources.
        all_sources: All processes that serve weights.
        version: The version.
        chain: Length of a chain.
        direct: Whether the publisher is tried first. This helps a receiver whose pulls were superseded several times,
            because the publisher keeps a version that is being read, unless an older one is being read too.
        base: The complete version of ``me``; a source that has it too can send the changes only.
    """
    publishers = [source for source in all_sources if is_trainer(source.incarnation.replica)]
    receivers = {
        source.incarnation.replica: source
        for source in all_sources
        if not is_trainer(source.incarnation.replica) and source.incarnation.replica != me
    }
    order = sorted({*receivers, me}, key=lambda name: (is_support(name), natural_sort_key(name)))
    own_index = order.index(me)
    upstream = [receivers[order[index]] for index in _upstream(own_index, chain)]
    complete = [receivers[name] for name in order if name != me and version in receivers[name].versions]
    selected = upstream[:1]
    for has_base in (True, False):
        alike = [source for source in complete if (base in source.versions) is has_base]
        first = own_index % max(1, len(alike))
        selected += [*alike[first:], *alike[:first]]
    selected += [*upstream[1:], *publishers]
    if direct:
        selected = [*publishers, *selected]
    return tuple(dict.fromkeys(selected))


def _upstream(index: int, chain: int) -> list[int]:
    """Return the indexes of the receivers between the receiver at ``index`` and the publisher, nearest first."""
    path: list[int] = []
    while (previous := _predecessor(index, chain)) is not None:
        path.append(previous)
        index = previous
    return path


def _predecessor(index: int, chain: int) -> int | None:
    """Return the index of the receiver from which receiver ``index`` pulls; None if it pulls from the publisher."""
    if index % chain:
        return index - 1
    number = index // chain
    if number < _HEADS_PER_TAIL:
        return None
    return (number - _HEADS_PER_TAIL) // _HEADS_PER_TAIL * chain + chain - 1


FIRST_CHUNK_TIMEOUT_S = 1.0
"""Timeout (s) of a chunk while no durations are known. It includes the connection and its handshake (measured p99: 17
ms)."""
MIN_CHUNK_TIMEOUT_S = 0.2
"""Shortest timeout (s) of a chunk. A source is not given up before four NOT_READY replies
(protocol.NOT_READY_INTERVAL_S) are missing."""
_TIMEOUT_FACTOR = 4
"""Timeout as a multiple of the usual duration of a chunk. The duration varies by a factor of two if a NIC is shared."""
_SMOOTHING = 0.25
"""Weight of a new sample in the smoothed duration of a chunk."""


class AdaptiveTimeout:
    """The timeout of a chunk, derived from the durations of earlier chunks.

    One object serves all versions, so that from the second version on a slow source is detected at its first chunk.
    Durations are measured per chunk, not per byte, because even a short last chunk takes the latency of a message.
    """

    def __init__(self, first: float = FIRST_CHUNK_TIMEOUT_S, minimum: float = MIN_CHUNK_TIMEOUT_S) -> None:
        self._first, self._minimum = first, minimum
        self._typical: float | None = None

    def observe(self, seconds: float) -> None:
        """Add the duration of a chunk, in seconds.

        The duration begins with the chunk's request or the previous chunk's arrival, whichever was later.
        """
        self._typical = seconds if self._typical is None else self._typical + _SMOOTHING * (seconds - self._typical)

    def timeout(self) -> float:
        """Return the seconds of silence after which the source of a chunk is given up."""
        return max(self._minimum, self._first if self._typical is None else _TIMEOUT_FACTOR * self._typical)


MAX_CHUNK_TIMEOUT_S = 10.0
"""Longest timeout (s) of a chunk. A chunk of 8 MiB takes longer only at less than 1 MB/s."""
PULL_TIMEOUT_S = 120.0
"""Seconds without a chunk after which a pull fails. This only happens if no source can be reached, or if all sources
send wrong bytes."""
CHUNKS_IN_FLIGHT = 4
"""Number of chunks in flight, enough to fill a 2 Gbit/s link (docs/sources.md, UCX)."""
_MIN_TIMEOUT_S = 0.001
"""Shortest timeout (s) of any operation, so that a deadline never expires before it begins."""
_MAX_TIMEOUT_FACTOR = 64
"""Maximum factor of all timeouts. A smaller factor already extends the timeout of a chunk to MAX_CHUNK_TIMEOUT_S."""
_SOURCES_POLL_S = 0.25
"""Seconds between two requests for the list of sources, once all known sources have failed."""
_MAX_UNINFORMED = 3
"""Number of sources that do not know the changes from the base, after which whole chunks are requested."""
_MAX_CORRUPT_CHUNKS = 3
"""Number of wrong chunks after which a source is not used again for this version. More than one wrong chunk is
tolerated, because a wrong chunk costs no more than its own transfer."""
_DIGEST_IN_THREAD_BYTES = 2**20
"""Minimum size in bytes of a chunk whose digest is computed in a thread; a digest of this size takes 0.7 ms."""


class PullFailed(Exception):
    """The version could not be completed. The exception's text lists the failure of each source."""


async def pull(
    store: WeightStore,
    version: Version,
    sources: Callable[[], Sequence[WeightSource]],
    transport: WeightTransport,
    *,
    timeout: float = PULL_TIMEOUT_S,
    chunk_timeout: float = MAX_CHUNK_TIMEOUT_S,
    window: int = CHUNKS_IN_FLIGHT,
    starvation_timeout: float = STARVATION_TIMEOUT_S,
    adaptive_timeout: AdaptiveTimeout | None = None,
    deltas: Deltas | None = None,
) -> Manifest:
    """Pull ``version`` into ``store``, commit it, and return its manifest.

    A cancelled or failed pull leaves the verified chunks in the store, from which the next pull of the version
    continues. Until then the store refuses requests of other receivers for the missing chunks, instead of letting them
    wait.

    Args:
        store: Store of this process.
        version: The version.
        sources: Function that returns the sources in order (:func:`select_sources`). Called at the start and whenever a
            source has been given up. May raise PullFailed if a newer version exists and the source of this version is
            gone.
        transport: Weight transport.
        timeout: Seconds without a chunk after which the pull fails.
        chunk_timeout: Longest timeout of a chunk (s).
        window: Number of chunks in flight.
        starvation_timeout: Seconds for which all replies of a source may be NOT_READY before the source is given up.
        adaptive_timeout: Timeout derived from the durations of earlier pulls.
        deltas: Whether deltas are requested, derived from earlier pulls.

    Raises:
        PullFailed: No chunk arrived for ``timeout`` s, or another version was begun in the store.
    """
    with store.awaiting(version):
        return await _Pull(
            store,
            version,
            sources,
            transport,
            timeout,
            chunk_timeout,
            window,
            starvation_timeout,
            adaptive_timeout or AdaptiveTimeout(),
            deltas or Deltas(),
        ).run()


class _Pull:
    """One pull of one version."""

    def __init__(
        self,
        store: WeightStore,
        version: Version,
        sources: Callable[[], Sequence[WeightSource]],
        transport: WeightTransport,
        timeout: float,
        chunk_timeout: float,
        window: int,
        starvation_timeout: float,
        adaptive_timeout: AdaptiveTimeout,
        deltas: Deltas,
    ) -> None:
        self._store = store
        self._version = version
        self._sources = sources
        self._transport = transport
        self._pull_timeout = timeout
        self._max_chunk_timeout = chunk_timeout
        self._window = window
        self._max_starvation = starvation_timeout
        self._adaptive_timeout = adaptive_timeout
        self._now = asyncio.get_running_loop().time
        self._deadline = self._now() + timeout
        self._timeout_factor = 1
        """Factor of all timeouts, doubled whenever all sources have failed."""
        self._quarantined: set[str] = set()
        """Addresses of sources that have failed."""
        self._corrupt: Counter[str] = Counter()
        self._failures: dict[str, str] = {}
        self._superseded: Superseded | None = None
        self._deltas = deltas
        self._uses_base = deltas.choose()
        self._uninformed: set[str] = set()
        """Addresses of sources that do not know the changes from the base."""
        self._whole = self._changed = 0
        """Bytes of the verified chunks that arrived whole, and of those that were made from deltas."""

    async def run(self) -> Manifest:
        """Pull and commit the version."""
        manifest = await self._fetch_manifest()
        began = self._now()
        parts: dict[int, list[int]] = {}
        for index in self._store.begin(manifest, self._uses_base):  # sorted, so each list is a heap
            parts.setdefault(manifest.part_at(manifest.chunks[index].offset).rank, []).append(index)
        window = max(1, self._window // max(1, len(parts)))
        await _all([self._fetch_part(manifest, rank, missing, window) for rank, missing in parts.items()])
        self._store.commit(self._version)
        self._deltas.on_pulled(manifest.nbytes, self._whole, self._changed, self._now() - began)
        return manifest

    async def _fetch_part(self, manifest: Manifest, rank: int, missing: list[int], window: int) -> None:
        """Fetch the chunks of the part that rank ``rank`` of the trainer publishes.

        ``missing`` is the heap of their indexes. Chunks are fetched in order, so that the receivers that pull from this
        process get them in order too. All parts are fetched at the same time, so that no rank evicts its part before it
        has been read.
        """
        publisher = Incarnation(member_id(TRAINER, rank), self._version.incarnation)
        while missing:
            source = await self._source(lambda one: one.incarnation == publisher or not _publishes(one))
            await self._fetch_from(manifest, missing, source, window)
            if self._superseded is not None:
                raise PullFailed(str(self._superseded))

    async def _source(self, eligible: Callable[[WeightSource], bool]) -> WeightSource:
        """Return the first eligible source that has not failed. Raises PullFailed when the deadline has passed.

        As long as deltas are requested, sources that do not know the base come last.
        """
        while True:
            working = [one for one in self._sources() if one.address not in self._quarantined and eligible(one)]
            if working:
                return next((one for one in working if self._base_helps(one)), working[0])
            if self._now() + _SOURCES_POLL_S > self._deadline:
                failures = "; ".join(f"{source}: {reason}" for source, reason in self._failures.items())
                raise PullFailed(
                    f"{self._version}: no data for {self._pull_timeout:g} s: {failures or 'there is no source'}"
                )
            await asyncio.sleep(_SOURCES_POLL_S)
            self._timeout_factor = min(2 * self._timeout_factor, _MAX_TIMEOUT_FACTOR)
            self._quarantined = {source for source in self._quarantined if self._corrupt[source] >= _MAX_CORRUPT_CHUNKS}

    def _base_helps(self, source: WeightSource) -> bool:
        """Return whether a source may answer a request that names the base."""
        asked_enough = len(self._uninformed) >= _MAX_UNINFORMED
        return self._uses_base and source.address not in self._uninformed and not asked_enough

    async def _fetch_manifest(self) -> Manifest:
        while True:
            source = await self._source(lambda one: bool(one.versions) or not _publishes(one))
            timeout = self._until_deadline(min(FIRST_CHUNK_TIMEOUT_S * self._timeout_factor, self._max_chunk_timeout))
            try:
                manifest = await self._transport.manifest(
                    source.address, self._version, timeout, self._starvation_timeout()
                )
            except TransportError as error:
                self._quarantine(source, str(error))
            else:
                self._deltas.on_received(len(encode(manifest)) + ANSWER_BYTES)
                if manifest.is_whole:
                    return manifest
                self._quarantine(source, "it describes only its part")

    async def _fetch_from(self, manifest: Manifest, missing: list[int], source: WeightSource, window: int) -> None:
        """Fetch from one source until no chunk is missing, or until the source has failed.

        After the call, no chunk of this source is still being written or verified.
        """
        progress = _SourceProgress(source)
        try:
            await _all([self._worker(manifest, missing, progress) for _ in range(min(window, len(missing)))])
        finally:
            checks = asyncio.gather(*progress.checks)
            try:
                await asyncio.shield(checks)
            except asyncio.CancelledError:  # a thread cannot be cancelled, and writes to the store
                await checks
                raise

    async def _worker(self, manifest: Manifest, missing: list[int], progress: _SourceProgress) -> None:
        """Fetch one chunk after the other; each chunk is verified while the next chunk arrives."""
        checking: asyncio.Task[None] | None = None
        source = progress.source
        names_base = self._base_helps(source)
        while missing and source.address not in self._quarantined and self._superseded is None:
            if names_base and source.address in self._uninformed:
                break
            index = heapq.heappop(missing)
            chunk = manifest.chunks[index]
            requested = self._now()
            frame: bytes | bytearray | None = UNCHANGED
            try:
                base = self._store.base(self._version, index) if self._uses_base else None
                if base != chunk.digest:
                    frame = await self._fetch(source, index, chunk, base if names_base else None)
            except BaseUnknown:
                heapq.heappush(missing, index)
                self._uninformed.add(source.address)
                break
            except TransportError as error:
                heapq.heappush(missing, index)
                self._quarantine(source, str(error))
                return
            except Superseded as error:
                self._superseded = error  # other workers may still write, but nothing reads that memory
                return
            except BaseException:
                heapq.heappush(missing, index)
                raise
            now = self._now()
            seconds = progress.on_chunk(requested, now)
            if frame is None:  # a later chunk may arrive whole again, even if most arrive as deltas
                self._adaptive_timeout.observe(seconds)
            self._deadline = now + self._pull_timeout
            previous, checking = checking, asyncio.create_task(self._verify(index, chunk, missing, source, frame))
            progress.checks.add(checking)  # added before any await, so that a cancelled worker loses no chunk
            checking.add_done_callback(progress.checks.discard)
            if previous is not None:
                await asyncio.wait([previous])
        if checking is not None:
            await asyncio.wait([checking])

    async def _fetch(self, source: WeightSource, index: int, chunk: Chunk, base: bytes | None) -> bytearray | None:
        """Fetch a chunk into the store; return the frame if the source sends one instead."""
        frame = await self._transport.fetch(
            source.address,
            self._version,
            range(chunk.offset, chunk.offset + chunk.nbytes),
            self._store.span(self._version, index),
            self._chunk_timeout(),
            self._starvation_timeout(),
            base,
        )
        self._deltas.on_received(ANSWER_BYTES + (chunk.nbytes if frame is None else len(frame)))
        return frame

    async def _verify(
        self, index: int, chunk: Chunk, missing: list[int], source: WeightSource, frame: bytes | bytearray | None
    ) -> None:
        try:
            if chunk.nbytes > _DIGEST_IN_THREAD_BYTES:
                good = await asyncio.to_thread(self._store.accept, self._version, index, frame)
            else:
                good = self._store.accept(self._version, index, frame)
        except Superseded as error:
            self._superseded = error
            return
        if good and frame is None:
            self._whole += chunk.nbytes
        elif good:
            self._changed += chunk.nbytes
        else:
            heapq.heappush(missing, index)
            if frame is not None:
                self._uses_base = False
                self._deltas.on_wrong(f"{source.incarnation} at {source.address}" if frame else "this process")
                return
            self._corrupt[source.address] += 1
            self._quarantine(source, f"chunk {index} does not match its digest")
            self._transport.disconnect(source.address)

    def _quarantine(self, source: WeightSource, reason: str) -> None:
        if source.address not in self._quarantined:  # later failures of the connection follow from the first failure
            self._failures[f"{source.incarnation} at {source.address}"] = reason
            self._quarantined.add(source.address)

    def _chunk_timeout(self) -> float:
        """Return the seconds of silence after which the source of a chunk is given up."""
        return self._until_deadline(
            min(self._adaptive_timeout.timeout() * self._timeout_factor, self._max_chunk_timeout)
        )

    def _starvation_timeout(self) -> float:
        """Return the seconds for which all replies of a source may be NOT_READY before the source is given up."""
        return self._until_deadline(self._max_starvation * self._timeout_factor)

    def _until_deadline(self, seconds: float) -> float:
        """Return ``seconds``, but at most the time until the pull itself fails."""
        return min(seconds, max(self._deadline - self._now(), _MIN_TIMEOUT_S))


def _publishes(source: WeightSource) -> bool:
    return is_trainer(source.incarnation.replica)


async def _all(coroutines: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines at the same time. When this returns or raises, none of them runs any more."""
    tasks = [asyncio.create_task(each) for each in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()  # if one task raises, gather() leaves the others running
        if tasks:
            await asyncio.wait(tasks)


class _SourceProgress:
    """The progress of the chunks from one source."""

    def __init__(self, source: WeightSource) -> None:
        self.source = source
        self.checks: set[asyncio.Task[None]] = set()
        """Running verifications of chunks."""
        self._last = 0.0

    def on_chunk(self, requested: float, now: float) -> float:
        """Record that a chunk arrived at ``now``, and return its duration (s) for :meth:`AdaptiveTimeout.observe`.

        ``requested`` is the time (s) at which the chunk was requested.
        """
        since, self._last = max(requested, self._last), now
        return now - since
