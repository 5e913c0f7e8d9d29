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

from ...core.types import TRAINER, ReplicaId, Version, natural, role_of
from ..messages import Holder
from .base import STARVED_BY, Pipe, PipeError
from .manifest import Manifest
from .store import Superseded, WeightStore

_HEADS_PER_TAIL = 2
"""chains that go on from the end of an earlier one; also those that begin at the publisher. Two make the way to the
last receiver grow with the logarithm of their number; more would share one NIC"""


def sources(
    me: ReplicaId, holders: Sequence[Holder], version: Version, chain: int, direct: bool = False
) -> tuple[Holder, ...]:
    """Whom ``me`` asks for ``version``: the one before it in its chain, whoever holds it complete (each receiver begins
    at another one), those further up its chain, the publisher. ``holders`` is everybody who serves weights; ``me`` need
    not be among them. ``direct``: the publisher first, which keeps a version while it is read."""
    publishers = [each for each in holders if _publishes(each)]
    others = {each.life.replica: each for each in holders if not _publishes(each) and each.life.replica != me}
    order = sorted({*others, me}, key=natural)
    mine = order.index(me)
    upstream = [others[order[place]] for place in _upstream(mine, chain)]
    having = [others[one] for one in order if one != me and _has(others[one], version)]
    turn = mine % max(1, len(having))
    chosen = [*upstream[:1], *having[turn:], *having[:turn], *upstream[1:], *publishers]
    if direct:
        chosen = [*publishers, *chosen]
    return tuple(dict.fromkeys(chosen))


def _publishes(holder: Holder) -> bool:
    return role_of(holder.life.replica) == role_of(TRAINER)


def _has(holder: Holder, version: Version) -> bool:
    """It tells only its newest one; the one before it is kept as long as none newer arrives."""
    return holder.holds is not None and holder.holds >= version


def _upstream(place: int, chain: int) -> list[int]:
    """The receivers between this one and the publisher, nearest first."""
    way: list[int] = []
    while (before := _before(place, chain)) is not None:
        way.append(before)
        place = before
    return way


def _before(place: int, chain: int) -> int | None:
    """Whom the receiver at ``place`` stands behind; None: the publisher."""
    if place % chain:
        return place - 1
    number = place // chain
    if number < _HEADS_PER_TAIL:
        return None
    return (number - _HEADS_PER_TAIL) // _HEADS_PER_TAIL * chain + chain - 1


FIRST = 1.0
"""s of silence while no pace is known: what a connection and its handshake may take (measured p99: 17 ms)"""
LEAST = 0.2
"""s; four of the answers that say "not yet" (protocol.NOT_YET_EVERY) must be missing before a source is silent"""
_FEW = 4
"""times the usual for a chunk; the time of one chunk varies by a factor of two where a NIC is shared"""
_GAIN = 0.25
"""of a new sample in the smoothed value: follows a change within a window of chunks"""


class Pace:
    """Kept across versions: from the second one on, a slow source is known by its first chunk. By chunk and not by
    byte: a version's last chunk may be short, and takes a message's time however few its bytes are."""

    def __init__(self, first: float = FIRST, least: float = LEAST) -> None:
        self._first, self._least = first, least
        self._usual: float | None = None

    def took(self, seconds: float) -> None:
        """A chunk came so long after the one before it, or after it was asked for."""
        self._usual = seconds if self._usual is None else self._usual + _GAIN * (seconds - self._usual)

    def patience(self) -> float:
        """s of silence after which the source of a chunk is given up."""
        return max(self._least, self._first if self._usual is None else _FEW * self._usual)


CHUNK_BY = 10.0
"""s of silence at most, whatever was usual: 8 MiB at under 1 MB/s"""
PULL_BY = 120.0
"""s without a chunk; only reached when nobody who holds the version can be reached, or who can only lies"""
WINDOW = 4
"""chunks in flight (docs/sources.md, UCX: enough to fill a 2 Gbit/s link)"""
_LAST = 0.001
"""s; a deadline is never over before it begins"""
_MOST_PATIENT = 64
"""times; from LEAST that is more than CHUNK_BY, which bounds it anyway"""
_ASK_AGAIN = 0.25
"""s between two looks at who holds the version, once everybody known has failed"""
_LIES = 3
"""wrong chunks after which a source is not asked again for this version: a wrong one costs a chunk, no more"""
_LARGE = 2**20
"""bytes; the digest of more than this (0.7 ms) is computed in a thread"""


class PullFailed(Exception):
    """The version could not be completed; the text says what each source did."""


async def pull(
    store: WeightStore,
    version: Version,
    sources: Callable[[], Sequence[Holder]],
    pipe: Pipe,
    *,
    by: float = PULL_BY,
    chunk_by: float = CHUNK_BY,
    window: int = WINDOW,
    starved_by: float = STARVED_BY,
    pace: Pace | None = None,
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
        return await _Pull(store, version, sources, pipe, by, chunk_by, window, starved_by, pace or Pace()).run()


class _Pull:
    def __init__(
        self,
        store: WeightStore,
        version: Version,
        sources: Callable[[], Sequence[Holder]],
        pipe: Pipe,
        by: float,
        chunk_by: float,
        window: int,
        starved_by: float,
        pace: Pace,
    ) -> None:
        self._store = store
        self._version = version
        self._sources = sources
        self._pipe = pipe
        self._by = by
        self._chunk_by = chunk_by
        self._window = window
        self._starved_by = starved_by
        self._pace = pace
        self._now = asyncio.get_running_loop().time
        self._end = self._now() + by
        self._patient = 1
        """times the usual patience: doubled whenever everybody has failed"""
        self._aside: set[str] = set()
        """addresses of sources"""
        self._lies: Counter[str] = Counter()
        self._told: dict[str, str] = {}
        self._missing: list[int] = []
        """a heap: in their order, so that who stands behind us gets them in theirs"""
        self._superseded: Superseded | None = None

    async def run(self) -> Manifest:
        manifest = await self._manifest()
        self._missing.extend(self._store.begin(manifest))  # sorted, and so a heap
        while self._missing:
            await self._drain(manifest, await self._source())
            if self._superseded is not None:
                raise PullFailed(str(self._superseded))
        self._store.commit(self._version)
        return manifest

    async def _source(self) -> Holder:
        """The first that has not failed. Raises PullFailed when the time is over."""
        while True:
            for holder in self._sources():
                if holder.serves not in self._aside:
                    return holder
            if self._now() + _ASK_AGAIN > self._end:
                told = "; ".join(f"{who}: {why}" for who, why in self._told.items())
                raise PullFailed(f"{self._version}: nothing came for {self._by:g} s: {told or 'no holder was named'}")
            await asyncio.sleep(_ASK_AGAIN)
            self._patient = min(2 * self._patient, _MOST_PATIENT)
            self._aside = {source for source in self._aside if self._lies[source] >= _LIES}

    async def _manifest(self) -> Manifest:
        while True:
            holder = await self._source()
            silent_by = self._within(min(FIRST * self._patient, self._chunk_by))
            try:
                return await self._pipe.manifest(holder.serves, self._version, silent_by, self._starving())
            except PipeError as error:
                self._put_aside(holder, str(error))

    async def _drain(self, manifest: Manifest, holder: Holder) -> None:
        """Fetch from one source until nothing is missing, or it has failed and nothing is written for it any more."""
        flow = _Flow(holder)
        try:
            lanes = min(self._window, len(self._missing))
            await asyncio.gather(*(self._lane(manifest, flow) for _ in range(lanes)))
        finally:
            await asyncio.gather(*flow.checks)

    async def _lane(self, manifest: Manifest, flow: _Flow) -> None:
        """One chunk after the other; while one comes, the one before it is verified in a thread."""
        checking: asyncio.Task[None] | None = None
        while self._missing and flow.holder.serves not in self._aside and self._superseded is None:
            index = heapq.heappop(self._missing)
            chunk = manifest.chunks[index]
            span = range(chunk.offset, chunk.offset + chunk.nbytes)
            asked = self._now()
            try:
                into = self._store.span(self._version, index)
                await self._pipe.fetch(
                    flow.holder.serves, self._version, span, into, self._patience(), self._starving()
                )
            except PipeError as error:
                heapq.heappush(self._missing, index)
                self._put_aside(flow.holder, str(error))
                return
            except Superseded as error:
                self._superseded = error  # a lane that is still fetching writes to memory that nobody reads
                return
            except BaseException:
                heapq.heappush(self._missing, index)
                raise
            now = self._now()
            self._pace.took(flow.came(asked, now))
            self._end = now + self._by
            before, checking = checking, asyncio.create_task(self._check(index, chunk.nbytes, flow.holder))
            flow.checks.add(checking)  # before anything is awaited: who is cancelled here has lost no chunk
            checking.add_done_callback(flow.checks.discard)
            if before is not None:
                await asyncio.wait([before])
        if checking is not None:
            await asyncio.wait([checking])

    async def _check(self, index: int, nbytes: int, holder: Holder) -> None:
        try:
            if nbytes > _LARGE:
                good = await asyncio.to_thread(self._store.accept, self._version, index)
            else:
                good = self._store.accept(self._version, index)
        except Superseded as error:
            self._superseded = error
            return
        if not good:
            heapq.heappush(self._missing, index)
            self._lies[holder.serves] += 1
            self._put_aside(holder, f"wrong bytes in chunk {index}")
            self._pipe.hang_up(holder.serves)

    def _put_aside(self, holder: Holder, why: str) -> None:
        if holder.serves not in self._aside:  # the first reason: the others on its line fail because of it
            self._told[f"{holder.life} at {holder.serves}"] = why
            self._aside.add(holder.serves)

    def _patience(self) -> float:
        """s of silence after which the source of a chunk is given up."""
        return self._within(min(self._pace.patience() * self._patient, self._chunk_by))

    def _starving(self) -> float:
        """s for which a source may say that it is waiting itself."""
        return self._within(self._starved_by * self._patient)

    def _within(self, seconds: float) -> float:
        """No longer than until the pull itself is given up."""
        return min(seconds, max(self._end - self._now(), _LAST))


class _Flow:
    """What comes from one source."""

    def __init__(self, holder: Holder) -> None:
        self.holder = holder
        self.checks: set[asyncio.Task[None]] = set()
        """chunks that are being verified"""
        self._last = 0.0

    def came(self, asked: float, now: float) -> float:
        """s that this chunk took, which was asked for at ``asked``: it may have waited for the one before it."""
        since, self._last = max(asked, self._last), now
        return now - since
