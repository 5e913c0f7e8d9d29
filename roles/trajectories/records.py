"""The records of the store's log. A log that cannot be read whole is not read: an unknown kind is an error.

Token data is packed (int32 and float32): 8 bytes a token in memory and on disk.
"""

from __future__ import annotations

import math
from array import array
from typing import Any

import msgspec
from msgspec import Struct

from rrl.roles.trajectories.types import Score, Segment
from rrl.spec.words import Life, ReplicaId, Version

FORMAT = 1
STALE = "stale"
"""what the reason of every group begins with that was dropped for the age of its tokens"""


class Piece(Struct, frozen=True, array_like=True, gc=False):
    """A segment, packed: ``tokens`` as int32, ``logprobs`` as float32, in this machine's byte order."""

    trajectory: int
    offset: int
    tokens: bytes
    logprobs: bytes
    step: int
    incarnation: int

    @property
    def end(self) -> int:
        return self.offset + len(self.tokens) // 4


class Head(Struct, frozen=True, tag="head", array_like=True):
    """First record of a log: how far groups and trajectories had been numbered when it was written."""

    format: int
    groups: int
    trajectories: int


class Made(Struct, frozen=True, tag="made", array_like=True):
    """A group: ``size`` trajectories from ``first`` on, all of one prompt."""

    group: int
    first: int
    size: int
    item: int
    prompt: bytes


class Grown(Struct, frozen=True, tag="grown", array_like=True):
    life: Life
    pieces: tuple[Piece, ...]
    finished: tuple[int, ...]


class Scored(Struct, frozen=True, tag="scored", array_like=True):
    scores: tuple[Score, ...]


class Dropped(Struct, frozen=True, tag="dropped", array_like=True):
    group: int
    trajectories: int
    reason: str


class Binding(Struct, frozen=True, tag="binding", array_like=True):
    """These groups, with so many trajectories, are step ``number``'s for ever. ``digest`` covers their content."""

    number: int
    groups: tuple[int, ...]
    trajectories: int
    digest: str
    stale: int = 0
    """groups of the run that had been dropped as stale before"""
    max_age: int = 0
    """age of the oldest token of this and all earlier bindings, in weight versions"""


class Settled(Struct, frozen=True, tag="settled", array_like=True):
    """A binding so far below the committed step that its token data is gone. Kept for the audit."""

    number: int
    groups: tuple[int, ...]
    trajectories: int


class Commitment(Struct, frozen=True, tag="commitment", array_like=True):
    number: int
    life: Life
    manifest: dict[str, Any]
    digest: str


class Metrics(Struct, frozen=True, tag="metrics", array_like=True):
    """What the trainer measured in a step: written just before its commitment, and kept for longer."""

    number: int
    metrics: dict[str, float]


class Fence(Struct, frozen=True, tag="fence", array_like=True):
    """Trainer words of lives of ``replica`` below ``incarnation`` are refused from here on."""

    replica: ReplicaId
    incarnation: int


Record = Head | Made | Grown | Scored | Dropped | Binding | Settled | Metrics | Commitment | Fence
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)
encode = _encoder.encode


def decode(payload: bytes) -> Record:
    """Raises msgspec.DecodeError for a record of a kind that this version does not know: nothing is skipped."""
    record: Record = _decoder.decode(payload)
    return record


# ── packing ────────────────────────────────────────────────────────────────────────────────────────────────────────
def pack(segment: Segment) -> Piece:
    """Raises OverflowError for a token that is no int32, ValueError for lists that are not parallel or not finite."""
    if len(segment.tokens) != len(segment.logprobs):
        raise ValueError(f"{len(segment.tokens)} tokens with {len(segment.logprobs)} log-probabilities")
    if not math.isfinite(sum(segment.logprobs)):
        raise ValueError("a log-probability is not finite")
    tokens, logprobs = pack_tokens(segment.tokens), array("f", segment.logprobs).tobytes()
    version = segment.version
    return Piece(segment.trajectory, segment.offset, tokens, logprobs, version.step, version.incarnation)


def pack_tokens(tokens: tuple[int, ...]) -> bytes:
    return array("i", tokens).tobytes()


def unpack_tokens(packed: bytes) -> tuple[int, ...]:
    return tuple(array("i", packed))


def unpack(piece: Piece) -> Segment:
    tokens, logprobs = unpack_tokens(piece.tokens), tuple(array("f", piece.logprobs))
    return Segment(piece.trajectory, piece.offset, tokens, logprobs, Version(piece.step, piece.incarnation))
