"""The content of a version, of which about 1 of 64 words differs from the previous version, as of real weights.

The content follows from the version's number, so every process can verify every byte without digests. A word of two
bytes has its own turn among 64 steps, and gets a new value in each step whose turn it is.
"""

from __future__ import annotations

import numpy

from rrl.core.types import Version

LINE = 1000
"""Number of incarnations of a trainer in a line. In a line the content of a step is the same, as if each trainer had
restarted from a snapshot. The contents of two lines differ in nearly every word, as if a trainer had started anew."""
PERIOD = 2 * 65521
"""Bytes after which a content repeats. Chunks have other sizes."""
_TURNS = 64
_STRIDE = 0x6487  # odd, so that a word has 65536 values before one repeats
_LINE_STRIDE = 1009 * _STRIDE
_CHANCE = numpy.random.default_rng(0)
_FIRST = _CHANCE.integers(0, 2**16, PERIOD // 2, numpy.uint32)
_TURN = _CHANCE.integers(0, _TURNS, PERIOD // 2)


def sparse_content(version: Version, nbytes: int) -> memoryview:
    changes = version.step // _TURNS + (version.step % _TURNS >= _TURN)
    values = _FIRST + changes * _STRIDE + version.incarnation // LINE * _LINE_STRIDE
    period = values.astype("<u2").tobytes()
    return memoryview((period * (nbytes // PERIOD + 1))[:nbytes])
