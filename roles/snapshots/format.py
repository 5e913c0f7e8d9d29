"""What a snapshot looks like in memory.

A buffer is one memfd of the agent: the head, room for the writer's own description (``meta``), then the bytes. The head
is cleared before the first byte changes and written when all are there: a buffer with a good head holds a whole
snapshot, whatever became of its writer. The digest, also in the head, is what a reader goes by.
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
"""bytes, so that what follows begins on a page"""
MAX_META_BYTES = 2**20
"""bytes of ``meta`` at most: names, shapes and offsets of some thousands of tensors. What is not used costs nothing"""
PAYLOAD_OFFSET = HEAD_AREA_BYTES + MAX_META_BYTES
_MAGIC = b"rrlsnap1"
_FIELDS = struct.Struct("<8s5Q16s")  # magic, sequence, step, incarnation, bytes, bytes of meta, digest
_CHECK = 8
"""bytes of the head's own digest: a kill in the middle of writing it leaves one that does not count"""
HEAD_BYTES = _FIELDS.size + _CHECK
EMPTY_HEAD = bytes(HEAD_BYTES)


class SnapshotError(Exception):
    """No snapshot could be kept, sent or had. Nothing that counted before is lost by it."""


class Fenced(SnapshotError):
    """A newer life of the gang is here: what this one says no longer counts."""


class Damaged(SnapshotError):
    """The bytes are not those that the head describes."""


class Head(Struct, frozen=True):
    """``sequence`` orders the two buffers of one writer."""

    sequence: int
    step: int
    incarnation: int
    nbytes: int
    meta: int
    """bytes of it"""
    digest: bytes

    def encode(self) -> bytes:
        fields = _FIELDS.pack(_MAGIC, self.sequence, self.step, self.incarnation, self.nbytes, self.meta, self.digest)
        return fields + _check(fields)

    @classmethod
    def decode(cls, data: bytes) -> Head | None:
        """None: cleared, torn, or never written."""
        fields, check = data[: _FIELDS.size], data[_FIELDS.size : HEAD_BYTES]
        if len(data) < HEAD_BYTES or check != _check(fields) or not fields.startswith(_MAGIC):
            return None
        return cls(*_FIELDS.unpack(fields)[1:])


def next_slot(heads: Sequence[Head | None], step: int) -> int:
    """Which of two buffers the snapshot of ``step`` replaces: one without any, one that a later life has gone back
    behind, else the older one."""

    def worth(slot: int) -> tuple[int, int]:
        head = heads[slot]
        if head is None:
            return 0, 0
        return (1, -head.step) if head.step >= step else (2, head.sequence)

    return min((0, 1), key=worth)


def _check(fields: bytes) -> bytes:
    return blake2b(fields, digest_size=_CHECK).digest()


class Digest:
    """Of ``meta``, then of the bytes in chunks of ``CHUNK``, given in order: crc32 of each, blake2b over those.

    Against accidents, not forgers (those never get as far). Costs what crc32 does: 0.2 s for a GB (docs/sources.md).
    """

    def __init__(self, meta: bytes | bytearray | memoryview) -> None:
        self._hash = blake2b(digest_size=16)
        self._hash.update(len(meta).to_bytes(8, "little"))
        self.add(meta)

    def add(self, chunk: bytes | bytearray | memoryview) -> None:
        self._hash.update(zlib.crc32(chunk).to_bytes(4, "little"))  # in C, other threads run meanwhile

    def value(self) -> bytes:
        return self._hash.digest()


def digest_of(meta: bytes | memoryview, payload: memoryview) -> bytes:
    digest = Digest(meta)
    for start in range(0, payload.nbytes, CHUNK_BYTES):
        digest.add(payload[start : start + CHUNK_BYTES])
    return digest.value()


class SnapshotInfo(Struct, frozen=True):
    """A whole snapshot that an agent has, by its head. Two of the same (step, incarnation) of all ranks fit together;
    a step alone does not say that."""

    gang: ReplicaId
    rank: int
    step: int
    incarnation: int
    nbytes: int
    digest: bytes
    own: bool
    """written by a member on that node, not sent there by another node's"""

    @property
    def order(self) -> tuple[int, int]:
        """Newest last. A later life's step counts more than the same one of an earlier life."""
        return self.step, self.incarnation

    def __str__(self) -> str:
        return f"step {self.step} of {self.gang}#{self.incarnation}, rank {self.rank}"
