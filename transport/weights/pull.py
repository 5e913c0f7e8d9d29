"""Pull one version of the weights from any process that has it or is receiving it, chunk by chunk.

Each chunk is verified; several are in flight. Chunks come from one source at a time, the first of the list that has not
failed. A source is given up when it sends nothing for longer than usual (:class:`Pace`), when it has itself waited
too long for a chunk, when it does not hold the version, or when a chunk does not match its digest; the missing chunks
are then requested from the next source. Once all sources have failed, all but those with wrong digests are tried again
with twice the patience: on a busy machine the only source may have missed one deadline. A version becomes current only
when it is complete; each chunk is served to others from the moment it is verified.

Every receiver derives its list of sources itself, from the names of those that serve weights. Receivers form chains in
the order of their names: each asks the one before it. The heads of the first two chains ask the publisher, the head of
a later chain asks the tail of an earlier one, at most two heads to a tail. The publisher therefore sends a version at
most twice, however many receivers there are, and a late receiver pulls from a neighbour.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Callable, Sequence

from ...core.types import TRAINER, ReplicaId, Version, natural_sort_key, role_of
from ..messages import WeightSource
from .base import STARVATION_TIMEOUT_S, TransportError, WeightTransport
from .manifest import Manifest
from .store import Superseded, WeightStore

_HEADS_PER_TAIL = 2
"""chains that go on from the end of an earlier one; also those that begin at the publisher. Two make the way to the
last receiver grow with the logarithm of their number; more would share one NIC"""


def select_sources(
    me: ReplicaId, all_sources: Sequence[WeightSource], version: Version, chain: int, direct: bool = False
) -> tuple[WeightSource, ...]:
    """Whom ``me`` asks for ``version``: the one before it in its chain, whoever holds it complete (each receiver begins
    at another one), those further up its chain, the publisher. ``holders`` is everybody who serves weights; ``me`` need
    not be among them. ``direct``: the publisher first, which keeps a version while it is read."""
    publishers = [each for each in all_sources if _is_publisher(each)]
    others = {
        each.incarnation.replica: each
        for each in all_sources
        if not _is_publisher(each) and each.incarnation.replica != me
    }
    order = sorted({*others, me}, key=natural_sort_key)
    own_place = order.index(me)
    upstream = [others[order[place]] for place in _upstream(own_place, chain)]
    complete = [others[one] for one in order if one != me and _has_version(others[one], version)]
    turn = own_place % max(1, len(complete))
    chosen = [*upstream[:1], *complete[turn:], *complete[:turn], *upstream[1:], *publishers]
    if direct:
        chosen = [*publishers, *chosen]
    return tuple(dict.fromkeys(chosen))


def _is_publisher(source: WeightSource) -> bool:
    return role_of(source.incarnation.replica) == role_of(TRAINER)


def _has_version(source: WeightSource, version: Version) -> bool:
    """It tells only its newest one; the one before it is kept as long as none newer arrives."""
    return source.version is not None and source.version >= version


def _upstream(place: int, chain: int) -> list[int]:
    """The receivers between this one and the publisher, nearest first."""
    places: list[int] = []
    while (before := _predecessor(place, chain)) is not None:
        places.append(before)
        place = before
    return places


def _predecessor(place: int, chain: int) -> int | None:
    """Whom the receiver at ``place`` stands behind; None: the publisher."""
    if place % chain:
        return place - 1
    number = place // chain
    if number < _HEADS_PER_TAIL:
        return None
    return (number - _HEADS_PER_TAIL) // _HEADS_PER_TAIL * chain + chain - 1


FIRST_CHUNK_TIMEOUT_S = 1.0
"""s of silence while no pace is known: what a connection and its handshake may take (measured p99: 17 ms)"""
MIN_CHUNK_TIMEOUT_S = 0.2
"""s; four of the answers that say "not yet" (protocol.NOT_YET_EVERY) must be missing before a source is silent"""
_TIMEOUT_FACTOR = 4
"""times the usual for a chunk; the time of one chunk varies by a factor of two where a NIC is shared"""
_SMOOTHING = 0.25
"""of a new sample in the smoothed value: follows a change within a window of chunks"""


class AdaptiveTimeout:
    """Kept across versions: from the second one on, a slow source is known by its first chunk. By chunk and not by
    byte: a version's last chunk may be short, and takes a message's time however few its bytes are."""

    def __init__(self, first: float = FIRST_CHUNK_TIMEOUT_S, minimum: float = MIN_CHUNK_TIMEOUT_S) -> None:
        self._first, self._minimum = first, minimum
        self._typical: float | None = None

    def observe(self, seconds: float) -> None:
        """A chunk came so long after the one before it, or after it was asked for."""
        self._typical = seconds if self._typical is None else self._typical + _SMOOTHING * (seconds - self._typical)

    def timeout(self) -> float:
        """s of silence after which the source of a chunk is given up."""
        return max(self._minimum, self._first if self._typical is None else _TIMEOUT_FACTOR * self._typical)


MAX_CHUNK_TIMEOUT_S = 10.0
"""s of silence at most, whatever was usual: 8 MiB at under 1 MB/s"""
PULL_TIMEOUT_S = 120.0
"""s without a chunk; only reached when nobody who holds the version can be reached, or who can only lies"""
CHUNKS_IN_FLIGHT = 4
"""chunks in flight (docs/sources.md, UCX: enough to fill a 2 Gbit/s link)"""
_MIN_TIMEOUT_S = 0.001
"""s; a deadline is never over before it begins"""
_MAX_TIMEOUT_FACTOR = 64
"""times; from LEAST that is more than CHUNK_BY, which bounds it anyway"""
_SOURCES_POLL_S = 0.25
"""s between two looks at who holds the version, once everybody known has failed"""
_MAX_CORRUPT_CHUNKS = 3
"""wrong chunks after which a source is not asked again for this version: a wrong one costs a chunk, no more"""
_DIGEST_IN_THREAD_BYTES = 2**20
"""bytes; the digest of more than this (0.7 ms) is computed in a thread"""


class PullFailed(Exception):
    """The version could not be completed; the text says what each source did."""


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
) -> Manifest:
    """Bring ``version`` into ``store``, committed, and return its manifest.

    ``sources`` says whom to ask, in this order (:func:`rrl.transport.weights.pull.sources`). It is asked at the start
    and whenever a source has been given up, and may then raise PullFailed: when a newer version is out and the source
    of this one is gone. ``pace`` is what earlier pulls have learnt; times in seconds.
    A cancelled or failed pull leaves the verified chunks in the store: the next one for the same version goes on from
    there, and until then nobody else is told that the rest will come.

    Raises PullFailed after ``by`` s in which no chunk came, or at once when another version is begun in the store
    meanwhile.
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
        ).run()


class _Pull:
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
        """times the usual patience: doubled whenever everybody has failed"""
        self._quarantined: set[str] = set()
        """addresses of sources"""
        self._corrupt: Counter[str] = Counter()
        self._failures: dict[str, str] = {}
        self._missing: list[int] = []
        """a heap: in their order, so that who stands behind us gets them in theirs"""
        self._superseded: Superseded | None = None

    async def run(self) -> Manifest:
        manifest = await self._fetch_manifest()
        self._missing.extend(self._store.begin(manifest))  # sorted, and so a heap
        while self._missing:
            await self._fetch_from(manifest, await self._source())
            if self._superseded is not None:
                raise PullFailed(str(self._superseded))
        self._store.commit(self._version)
        return manifest

    async def _source(self) -> WeightSource:
        """The first that has not failed. Raises PullFailed when the time is over."""
        while True:
            for candidate in self._sources():
                if candidate.address not in self._quarantined:
                    return candidate
            if self._now() + _SOURCES_POLL_S > self._deadline:
                failures = "; ".join(f"{who}: {why}" for who, why in self._failures.items())
                raise PullFailed(
                    f"{self._version}: nothing came for {self._pull_timeout:g} s: {failures or 'no holder was named'}"
                )
            await asyncio.sleep(_SOURCES_POLL_S)
            self._timeout_factor = min(2 * self._timeout_factor, _MAX_TIMEOUT_FACTOR)
            self._quarantined = {source for source in self._quarantined if self._corrupt[source] >= _MAX_CORRUPT_CHUNKS}

    async def _fetch_manifest(self) -> Manifest:
        while True:
            source = await self._source()
            silent_by = self._until_deadline(min(FIRST_CHUNK_TIMEOUT_S * self._timeout_factor, self._max_chunk_timeout))
            try:
                return await self._transport.manifest(
                    source.address, self._version, silent_by, self._starvation_timeout()
                )
            except TransportError as error:
                self._quarantine(source, str(error))

    async def _fetch_from(self, manifest: Manifest, source: WeightSource) -> None:
        """Fetch from one source until nothing is missing, or it has failed and nothing is written for it any more."""
        flow = _SourceProgress(source)
        try:
            workers = min(self._window, len(self._missing))
            await asyncio.gather(*(self._worker(manifest, flow) for _ in range(workers)))
        finally:
            await asyncio.gather(*flow.checks)

    async def _worker(self, manifest: Manifest, flow: _SourceProgress) -> None:
        """One chunk after the other; while one comes, the one before it is verified in a thread."""
        checking: asyncio.Task[None] | None = None
        while self._missing and flow.source.address not in self._quarantined and self._superseded is None:
            index = heapq.heappop(self._missing)
            chunk = manifest.chunks[index]
            span = range(chunk.offset, chunk.offset + chunk.nbytes)
            asked = self._now()
            try:
                into = self._store.span(self._version, index)
                await self._transport.fetch(
                    flow.source.address, self._version, span, into, self._chunk_timeout(), self._starvation_timeout()
                )
            except TransportError as error:
                heapq.heappush(self._missing, index)
                self._quarantine(flow.source, str(error))
                return
            except Superseded as error:
                self._superseded = error  # a lane that is still fetching writes to memory that nobody reads
                return
            except BaseException:
                heapq.heappush(self._missing, index)
                raise
            now = self._now()
            self._adaptive_timeout.observe(flow.on_chunk(asked, now))
            self._deadline = now + self._pull_timeout
            before, checking = checking, asyncio.create_task(self._verify(index, chunk.nbytes, flow.source))
            flow.checks.add(checking)  # before anything is awaited: who is cancelled here has lost no chunk
            checking.add_done_callback(flow.checks.discard)
            if before is not None:
                await asyncio.wait([before])
        if checking is not None:
            await asyncio.wait([checking])

    async def _verify(self, index: int, nbytes: int, source: WeightSource) -> None:
        try:
            if nbytes > _DIGEST_IN_THREAD_BYTES:
                good = await asyncio.to_thread(self._store.accept, self._version, index)
            else:
                good = self._store.accept(self._version, index)
        except Superseded as error:
            self._superseded = error
            return
        if not good:
            heapq.heappush(self._missing, index)
            self._corrupt[source.address] += 1
            self._quarantine(source, f"wrong bytes in chunk {index}")
            self._transport.disconnect(source.address)

    def _quarantine(self, source: WeightSource, why: str) -> None:
        if source.address not in self._quarantined:  # the first reason: the others on its line fail because of it
            self._failures[f"{source.incarnation} at {source.address}"] = why
            self._quarantined.add(source.address)

    def _chunk_timeout(self) -> float:
        """s of silence after which the source of a chunk is given up."""
        return self._until_deadline(
            min(self._adaptive_timeout.timeout() * self._timeout_factor, self._max_chunk_timeout)
        )

    def _starvation_timeout(self) -> float:
        """s for which a source may say that it is waiting itself."""
        return self._until_deadline(self._max_starvation * self._timeout_factor)

    def _until_deadline(self, seconds: float) -> float:
        """No longer than until the pull itself is given up."""
        return min(seconds, max(self._deadline - self._now(), _MIN_TIMEOUT_S))


class _SourceProgress:
    """What comes from one source."""

    def __init__(self, source: WeightSource) -> None:
        self.source = source
        self.checks: set[asyncio.Task[None]] = set()
        """chunks that are being verified"""
        self._last = 0.0

    def on_chunk(self, requested: float, now: float) -> float:
        """s that this chunk took, which was asked for at ``asked``: it may have waited for the one before it."""
        since, self._last = max(requested, self._last), now
        return now - since
