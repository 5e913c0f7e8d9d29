"""Pull one version from whoever holds it: chunk by chunk, each verified, several in flight.

A dead, hung or lying source costs the chunks that it had not delivered, and is put aside. Once everybody known has
failed, those who did not lie get another chance: on a busy machine the only holder may have missed one deadline.
Nothing is visible before the version is complete.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from rrl.spec.words import Version
from rrl.transport.messages import Holder
from rrl.transport.weights.manifest import Manifest
from rrl.transport.weights.pipe import NotHeld, Pipe, PipeError
from rrl.transport.weights.store import Superseded, WeightStore

CHUNK_BY = 10.0
"""s for one chunk: 8 MiB at under 1 MB/s"""
PULL_BY = 120.0
"""s for a version; only reached when nobody who holds it can be reached"""
WINDOW = 4
"""chunks in flight per source (docs/sources.md, UCX: enough to fill a 2 Gbit/s link)"""
SOURCES = 2
"""sources at once; the second is only used when there is more than a window to fetch"""
_ASK_AGAIN = 0.25
"""s between two looks at who holds the version, once everybody known has failed"""
_LARGE = 2**20
"""bytes; the digest of more than this (0.7 ms) is computed in a thread"""


class PullFailed(Exception):
    """The version could not be completed; the text says what each source did."""


async def pull(
    store: WeightStore,
    version: Version,
    holders: Callable[[], Sequence[Holder]],
    pipe: Pipe,
    *,
    by: float = PULL_BY,
    chunk_by: float = CHUNK_BY,
    window: int = WINDOW,
    sources: int = SOURCES,
) -> Manifest:
    """Bring ``version`` into ``store``, committed, and return its manifest.

    ``holders`` gives who holds it, nearest first; it is asked again when all it named have failed. A cancelled or
    failed pull leaves the verified chunks in the store: the next one for the same version goes on from there.

    Raises PullFailed after ``by`` s, or at once when another version is begun in the store meanwhile.
    """
    return await _Pull(store, version, holders, pipe, by, chunk_by, window, sources).run()


class _Pull:
    def __init__(
        self,
        store: WeightStore,
        version: Version,
        holders: Callable[[], Sequence[Holder]],
        pipe: Pipe,
        by: float,
        chunk_by: float,
        window: int,
        sources: int,
    ) -> None:
        self._store = store
        self._version = version
        self._holders = holders
        self._pipe = pipe
        self._by = by
        self._chunk_by = chunk_by
        self._window = window
        self._sources = sources
        self._end = asyncio.get_running_loop().time() + by
        self._aside: set[Holder] = set()
        self._liars: set[Holder] = set()
        self._told: dict[Holder, str] = {}
        self._missing: deque[int] = deque()
        self._superseded: Superseded | None = None

    async def run(self) -> Manifest:
        manifest = await self._manifest()
        self._missing.extend(self._store.begin(manifest))
        while self._missing:
            wanted = min(self._sources, -(-len(self._missing) // self._window))
            chosen = self._candidates()[:wanted]
            if not chosen:
                await self._pause()
            await asyncio.gather(*(self._drain(manifest, holder) for holder in chosen))
            if self._superseded is not None:
                raise PullFailed(str(self._superseded))
        self._store.commit(self._version)
        return manifest

    async def _manifest(self) -> Manifest:
        while True:
            for holder in self._candidates():
                try:
                    return await self._pipe.manifest(holder.serves, self._version, self._patience())
                except NotHeld as error:
                    self._told[holder] = str(error)  # it may in a moment: asked again
                except PipeError as error:
                    self._put_aside(holder, error)
            await self._pause()

    async def _drain(self, manifest: Manifest, holder: Holder) -> None:
        """Fetch from one holder until nothing is missing or it fails."""
        lanes = min(self._window, len(self._missing))
        await asyncio.gather(*(self._lane(manifest, holder) for _ in range(lanes)))

    async def _lane(self, manifest: Manifest, holder: Holder) -> None:
        while self._missing and holder not in self._aside and self._superseded is None:
            index = self._missing.popleft()
            chunk = manifest.chunks[index]
            span = range(chunk.offset, chunk.offset + chunk.nbytes)
            try:
                into = self._store.span(self._version, index)
                await self._pipe.fetch(holder.serves, self._version, span, into, self._patience())
                if chunk.nbytes > _LARGE:
                    good = await asyncio.to_thread(self._store.accept, self._version, index)
                else:
                    good = self._store.accept(self._version, index)
                if not good:
                    self._pipe.hang_up(holder.serves)
                    self._liars.add(holder)
                    raise PipeError(f"wrong bytes in chunk {index}")
            except PipeError as error:
                self._missing.appendleft(index)
                self._put_aside(holder, error)
            except Superseded as error:
                self._superseded = error  # a lane that is still fetching writes to memory that nobody reads

    def _candidates(self) -> list[Holder]:
        return [holder for holder in self._holders() if holder not in self._aside]

    def _put_aside(self, holder: Holder, error: PipeError) -> None:
        if holder not in self._aside:  # the first reason: the others on its line fail because of it
            self._told[holder] = str(error)
            self._aside.add(holder)

    def _patience(self) -> float:
        return min(self._chunk_by, max(self._end - asyncio.get_running_loop().time(), 0.001))

    async def _pause(self) -> None:
        """Everybody has failed: wait before asking again. Raises PullFailed when the time is over."""
        if asyncio.get_running_loop().time() + _ASK_AGAIN > self._end:
            told = "; ".join(f"{holder.life} at {holder.serves}: {why}" for holder, why in self._told.items())
            raise PullFailed(f"{self._version} not complete after {self._by:g} s: {told or 'no holder was named'}")
        await asyncio.sleep(_ASK_AGAIN)
        self._aside &= self._liars
