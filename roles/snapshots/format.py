"""The layout of a snapshot in memory.

A buffer is one memfd of the agent: the head, space for the writer's metadata (``meta``), then the snapshot's bytes. The
head is cleared before the first byte changes, and written after the last byte. So a buffer with a valid head contains a
complete snapshot, even if its writer was killed. The head also contains the digest, which readers verify.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from hashlib import blake2b

from msgspec import Struct

from ...core.types import ReplicaId
from ...transport.streams.framing import CHUNK_BYTES

HEAD_AREA_BYTES = 4096
"""Size of the head's area: one page, so that the data after it is page-aligned."""
SLOTS = (0, 1)
"""Numbers of the two buffers of one writer. While one buffer is written, the other contains the last complete
snapshot."""
MAX_META_BYTES = 2**20
"""Maximum size of ``meta``: names, shapes and offsets of some thousands of tensors. Unused space takes no memory."""
PAYLOAD_OFFSET = HEAD_AREA_BYTES + MAX_META_BYTES
"""Offset of the snapshot's bytes in a buffer."""
_MAGIC = b"rrlsnap1"
_FIELDS = struct.Struct("<8s5Q16s")  # magic, sequence, step, incarnation, bytes, bytes of meta, digest
_CHECK_BYTES = 8
"""Size in bytes of the head's own digest, which is invalid if a writer was killed while it wrote the head."""
HEAD_BYTES = _FIELDS.size + _CHECK_BYTES
EMPTY_HEAD = bytes(HEAD_BYTES)


class SnapshotError(Exception):
    """A snapshot could not be stored, sent or read. Snapshots that were valid before remain valid."""


class Fenced(SnapshotError):
    """A newer incarnation of the gang exists, so requests of this incarnation are refused."""


class Damaged(SnapshotError):
    """The bytes of a snapshot do not match its digest, or its buffer now contains another snapshot."""


class Head(Struct, frozen=True):
    """The head of a buffer. ``sequence`` orders the two buffers of one writer."""

    sequence: int
    step: int
    incarnation: int
    nbytes: int
    meta: int
    """Size of the writer's metadata in bytes."""
    digest: bytes

    def encode(self) -> bytes:
        """Return the head as bytes, with its own digest."""
        fields = _FIELDS.pack(_MAGIC, self.sequence, self.step, self.incarnation, self.nbytes, self.meta, self.digest)
        return fields + _check(fields)

    @classmethod
    def decode(cls, data: bytes) -> Head | None:
        """Return the head, or None if it is cleared, incomplete or was never written."""
        fields, check = data[: _FIELDS.size], data[_FIELDS.size : HEAD_BYTES]
        if len(data) < HEAD_BYTES or check != _check(fields) or not fields.startswith(_MAGIC):
            return None
        return cls(*_FIELDS.unpack(fields)[1:])


def next_slot(heads: Sequence[Head | None], step: int) -> int:
    """Return the number of the buffer that the snapshot of ``step`` overwrites.

    An empty buffer is chosen first. If there is none, a buffer with ``step`` or a later step is chosen, because the run
    was set back to an earlier step; of two such buffers the one with the later step. Otherwise the older buffer is
    chosen.
    """

    def value(slot: int) -> tuple[int, int]:
        head = heads[slot]
        if head is None:
            return 0, 0
        return (1, -head.step) if head.step >= step else (2, head.sequence)

    return min(SLOTS, key=value)


def _check(fields: bytes) -> bytes:
    return blake2b(fields, digest_size=_CHECK_BYTES).digest()


class Digest:
    """Digest of a snapshot: of ``meta`` and of the bytes, which are added in order in chunks of ``CHUNK_BYTES``.

    The digest is the blake2b of the CRC-32 of every chunk. It detects accidental damage, but not forgery, which
    authentication prevents. It takes as long as CRC-32: 0.2 s per GB (docs/sources.md).
    """

    def __init__(self, meta: bytes | bytearray | memoryview) -> None:
        self._hash = blake2b(digest_size=16)
        self._hash.update(len(meta).to_bytes(8, "little"))
        self.add(meta)

    def add(self, chunk: bytes | bytearray | memoryview) -> None:
        """Add the next chunk."""
        self._hash.update(zlib.crc32(chunk).to_bytes(4, "little"))  # releases the GIL

    def value(self) -> bytes:
        """Return the digest of everything added so far."""
        return self._hash.digest()


def digest_of(meta: bytes | memoryview, payload: memoryview) -> bytes:
    """Return the digest of a whole snapshot."""
    digest = Digest(meta)
    for start in range(0, payload.nbytes, CHUNK_BYTES):
        digest.add(payload[start : start + CHUNK_BYTES])
    return digest.value()


class SnapshotInfo(Struct, frozen=True):
    """Description of a complete snapshot of one rank.

    The snapshots of all ranks belong together if step and incarnation are equal; an equal step alone is not enough.
    """

    gang: ReplicaId
    rank: int
    step: int
    incarnation: int
    nbytes: int
    digest: bytes
    own: bool
    """True if a member on the node that stores the snapshot wrote it; False if it is a copy from another node."""

    @property
    def order(self) -> tuple[int, int]:
        """Sort key, newest last: the step, then the incarnation."""
        return self.step, self.incarnation

    def __str__(self) -> str:
        return f"step {self.step} of {self.gang}#{self.incarnation}, rank {self.rank}"
