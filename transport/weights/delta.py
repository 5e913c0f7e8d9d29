"""A chunk as its changed values, relative to the same chunk of an earlier version (its base).

A chunk counts as words of two bytes, the size of a bfloat16. A *gap* is the number of unchanged words before a changed
word. It takes one byte; the byte 255 stands for 255 unchanged words without a changed word after them. A frame contains
the size of the gaps, the gaps, the new values of the changed words, and the last byte of a chunk of odd size. Values,
not differences, are sent, so the union of the changes of several versions, with the newest values, is the change of all
of them together.

No general compression is used, because it would be slower than a fast network (docs/sources.md).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Buffer: TypeAlias = bytes | bytearray | memoryview

UNCHANGED = b""
"""The frame of a chunk that equals its base."""
MAX_SHARE = 0.6
"""Share of a chunk's size from which on the whole chunk is sent instead of a frame."""
_ESCAPE = 255
_HEAD = struct.Struct("<Q")  # bytes of the gaps
_WORD = np.dtype("<u2")
_SAMPLES, _SAMPLE_WORDS = 16, 2048
"""Number and size of the pieces of a chunk that are compared first: if most of their words have changed, the rest of
the chunk is not compared."""
_MAX_CHANGED = MAX_SHARE / 1.5
"""Share of changed words from which on a frame is too large: a changed word takes 1.5 times its size."""


def changed_words(base: Buffer, chunk: Buffer) -> bytes | None:
    """Return the gaps between the words in which ``chunk`` differs from ``base``; None if too many words differ."""
    old, new = _words(base), _words(chunk)
    if new.size > 4 * _SAMPLES * _SAMPLE_WORDS:
        piece = new.size // _SAMPLES
        a, b = (words[: piece * _SAMPLES].reshape(_SAMPLES, piece)[:, :_SAMPLE_WORDS] for words in (old, new))
        if np.count_nonzero(a != b) > _MAX_CHANGED * a.size:
            return None
    changed = old != new
    return None if np.count_nonzero(changed) > _MAX_CHANGED * new.size else _gaps(np.flatnonzero(changed))


def union(changes: Sequence[bytes], nbytes: int) -> bytes:
    """Return the gaps between all words that are in any of the ``changes`` of a chunk of ``nbytes`` bytes."""
    if len(changes) == 1:
        return changes[0]
    changed = np.zeros(nbytes // _WORD.itemsize, np.bool_)
    for gaps in changes:
        changed[_positions(np.frombuffer(gaps, np.uint8))[0]] = True
    return _gaps(np.flatnonzero(changed))


def encode(gaps: bytes, chunk: Buffer) -> bytes | None:
    """Return the frame with the values of the changed words of ``chunk``; None if it is too large."""
    words = _words(chunk)
    size = _HEAD.size + len(gaps) + (len(gaps) - gaps.count(_ESCAPE)) * _WORD.itemsize
    if size >= MAX_SHARE * len(chunk):
        return None
    positions, _ = _positions(np.frombuffer(gaps, np.uint8))
    return b"".join((_HEAD.pack(len(gaps)), gaps, words[positions].tobytes(), bytes(chunk[words.nbytes :])))


def apply(frame: Buffer, base: memoryview, into: memoryview) -> bytes:
    """Write to ``into`` the chunk that results from ``base`` and ``frame``, and return the gaps of the frame.

    Only the digest of the chunk shows whether it is right.

    Raises:
        ValueError: The frame does not fit a chunk of this size.
    """
    words, gaps, values = _words(into), b"", memoryview(frame)
    if frame:
        if len(frame) < _HEAD.size or (size := _HEAD.unpack_from(frame)[0]) > len(frame) - _HEAD.size:
            raise ValueError(f"a frame of {len(frame)} bytes ends before its gaps do")
        gaps, values = bytes(values[_HEAD.size : _HEAD.size + size]), values[_HEAD.size + size :]
    positions, end = _positions(np.frombuffer(gaps, np.uint8))
    changed = positions.size * _WORD.itemsize
    if end > words.size:
        raise ValueError(f"the gaps of a frame end at word {end}, but the chunk has {words.size} words")
    if frame and len(values) != changed + len(into) - words.nbytes:
        raise ValueError(f"a frame has {len(values)} bytes of values for {positions.size} changed words")
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(base, np.uint8))
    words[positions] = _words(values)[: positions.size]
    if frame:
        into[words.nbytes :] = values[changed:]
    return gaps


def _words(data: Buffer) -> NDArray[np.uint16]:
    return np.frombuffer(data, _WORD, len(data) // _WORD.itemsize)


def _gaps(positions: NDArray[np.intp]) -> bytes:
    gaps = np.diff(positions, prepend=-1) - 1
    far = np.flatnonzero(gaps >= _ESCAPE)
    escapes = gaps[far] // _ESCAPE
    gaps[far] %= _ESCAPE
    return np.insert(gaps.astype(np.uint8), np.repeat(far, escapes), _ESCAPE).tobytes()


def _positions(gaps: NDArray[np.uint8]) -> tuple[NDArray[np.int64], int]:
    """Return the positions of the changed words, and the number of words that the gaps cover."""
    changed = gaps != _ESCAPE
    ends = np.cumsum(gaps + changed, dtype=np.int64)  # a changed word adds at most 254 + 1, which fits a byte
    return ends[changed] - 1, int(ends[-1]) if ends.size else 0
