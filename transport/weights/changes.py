"""The changes between the newest versions of a process, from which it sends deltas to others.

For each version, the changes from the version before it are kept: the gaps of :mod:`.delta`, by chunk. They need no
bytes of the older version, so a receiver that has skipped versions still gets a delta. A base is named by the digest of
its chunk: what matters is which bytes the receiver has, not of which version or incarnation of the trainer they are.
"""

from __future__ import annotations

from msgspec import Struct

from ...core.types import Version
from .manifest import Manifest

MAX_VERSIONS = 8
"""Number of versions whose changes are kept."""
MAX_SHARE = 0.1
"""Maximum size of all changes but the newest, and of all frames, as a share of a version. The changes of one version
have at most a fifth of its size, because larger ones are not kept (:data:`.delta.MAX_SHARE`)."""


class UnknownBase(Exception):
    """The process does not know the changes from this base."""


class _Step(Struct):
    """The changes from ``base`` to the version after it."""

    base: Version
    digests: dict[int, bytes]
    """Digests of the base's chunks, by offset."""
    gaps: dict[int, bytes | None]
    """Changes of the chunks that are complete, by offset; None if too many words of the chunk have changed."""

    @property
    def nbytes(self) -> int:
        return sum(len(gaps or b"") for gaps in self.gaps.values())


class Changes:
    """The changes between versions, and the frames that were made of them. Not thread-safe."""

    def __init__(self) -> None:
        self._steps: dict[Version, _Step] = {}
        """By the version after the changes, oldest first."""
        self._frames: dict[tuple[Version, int, bytes], bytes] = {}
        """Frames made since the newest version was begun, by version, offset and digest of the base."""
        self._frame_bytes_left = 0.0
        """Bytes that further frames may have."""

    def begin(self, base: Manifest, version: Version) -> None:
        """Begin to keep the changes from ``base`` to ``version``."""
        self.drop(version)
        limit = MAX_SHARE * base.nbytes
        self._frames, self._frame_bytes_left = {}, limit
        while len(self._steps) >= MAX_VERSIONS or sum(step.nbytes for step in self._steps.values()) > limit:
            del self._steps[next(iter(self._steps))]
        self._steps[version] = _Step(base.version, {chunk.offset: chunk.digest for chunk in base.chunks}, {})

    def drop(self, version: Version) -> None:
        """Drop the changes to a version."""
        self._steps.pop(version, None)

    def put(self, version: Version, offset: int, gaps: bytes | None) -> None:
        """Keep the changes of the chunk at ``offset``, if those of ``version`` are kept."""
        if version in self._steps:
            self._steps[version].gaps[offset] = gaps

    def since(self, base: bytes, version: Version, offset: int) -> list[bytes] | None:
        """Return the changes that lead from ``base``, the digest of a chunk, to the chunk of ``version``, newest first.

        Return None if too many words have changed, or are not known to be unchanged.

        Raises:
            UnknownBase: No kept change begins at this base.
        """
        found = list[bytes | None]()
        while (step := self._steps.get(version)) is not None and len(found) < MAX_VERSIONS:
            found.append(step.gaps.get(offset))
            if step.digests.get(offset) == base:
                return [gaps for gaps in found if gaps is not None] if None not in found else None
            version = step.base
        raise UnknownBase

    def frame(self, base: bytes, version: Version, offset: int) -> bytes | None:
        """Return the frame that :meth:`keep_frame` kept, or None."""
        return self._frames.get((version, offset, base))

    def keep_frame(self, base: bytes, version: Version, offset: int, frame: bytes) -> None:
        """Keep a frame for further receivers, unless the frames would become too large."""
        if version in self._steps and len(frame) <= self._frame_bytes_left:
            self._frames[version, offset, base] = frame
            self._frame_bytes_left -= len(frame)
