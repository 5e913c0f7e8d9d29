"""The format of deltas: which bytes a receiver makes from its base and a frame, and which frames it refuses."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rrl.tests.support.weights.sparse import changed, versions
from rrl.transport.weights import delta
from rrl.transport.weights.delta import UNCHANGED, apply, changed_words, encode, union

SIZE = 2**21
WORDS = SIZE // 2


def at(positions: list[int], size: int, fill: int = 0) -> memoryview:
    """Return a chunk of equal bytes in which the words at these positions differ."""
    words = np.full(size // 2, fill, "<u2")
    words[positions] = 7
    return memoryview(words.tobytes() + bytes(size % 2))


def frame_between(base: memoryview, chunk: memoryview) -> bytes:
    gaps = changed_words(base, chunk)
    assert gaps is not None
    frame = encode(gaps, chunk)
    assert frame is not None
    return frame


def applied(frame: bytes, base: memoryview) -> bytes:
    into = bytearray(b"\x55" * len(base))  # what a buffer that is used again contains
    apply(frame, base, memoryview(into))
    return bytes(into)


# ── the result ─────────────────────────────────────────────────────────────────────────────────────────────────────
@given(
    st.integers(0, 3000).flatmap(
        lambda words: st.tuples(st.just(words), st.sets(st.integers(0, max(0, words - 1)), max_size=min(40, words)))
    ),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
@example((0, set()), True, 0)
@example((1024, set()), False, 0)
@example((1024, {0, 255, 511, 1023}), True, 0)
@example((1 + 255 * 4, {255 * 4}), True, 0)
def test_frame_makes_the_chunk_from_its_base_for_any_changes_and_sizes(
    changes: tuple[int, set[int]], odd: bool, seed: int
) -> None:
    (count, positions), random = changes, np.random.default_rng(seed)
    base = random.bytes(2 * count + odd)
    words = np.frombuffer(base, "<u2", count).copy()
    words[list(positions)] += random.integers(1, 2**16, len(positions), "u2")
    chunk = words.tobytes() + bytes(255 - byte for byte in base[2 * count :])
    gaps = changed_words(base, chunk)
    if gaps is None:
        assert len(positions) > 0.4 * count
        return
    frame = encode(gaps, memoryview(chunk))
    if frame is None:
        assert 8 + len(gaps) + 2 * len(positions) >= 0.6 * len(chunk)
        return
    assert applied(frame, memoryview(base)) == chunk


@pytest.mark.parametrize("gap", [0, 1, 254, 255, 256, 509, 510, 511, 255 * 7, 255 * 7 + 1])
def test_gap_of_any_length_is_exact(gap: int) -> None:
    base, chunk = at([], SIZE), at([gap, 2 * gap + 1], SIZE)
    assert applied(frame_between(base, chunk), base) == chunk


def test_changed_last_byte_of_an_odd_chunk_is_sent() -> None:
    base = memoryview(bytes(10_001))
    chunk = memoryview(bytes(10_000) + b"x")
    assert applied(frame_between(base, chunk), base) == chunk


@pytest.mark.parametrize("size", [1, 2, 5, 1000, 1001])
def test_empty_frame_copies_the_base(size: int) -> None:
    base = versions(1, size)[0]
    assert applied(UNCHANGED, base) == base


def test_frame_that_is_applied_to_its_own_result_changes_nothing() -> None:
    base, chunk = versions(2, SIZE)
    frame = frame_between(base, chunk)
    assert applied(frame, memoryview(applied(frame, base))) == chunk


@pytest.mark.parametrize("held", range(4))
def test_union_of_several_changes_brings_every_older_version_to_the_newest(held: int) -> None:
    *every, last = versions(5, SIZE + 1)
    every.append(changed(last, 3))  # at the places that changed from version 2 to 3
    changes = [changed_words(old, new) for old, new in zip(every[held:], every[held + 1 :], strict=False)]
    gaps = union([one for one in changes if one is not None], SIZE + 1)
    frame = encode(gaps, every[4])
    assert frame is not None
    assert applied(frame, every[held]) == every[4]


def test_gaps_of_an_applied_frame_lead_others_from_the_same_base() -> None:
    """A receiver passes on the changes that it has received."""
    base, chunk = versions(2, SIZE)
    into = bytearray(SIZE)
    assert apply(frame_between(base, chunk), base, memoryview(into)) == changed_words(base, chunk)
    assert apply(UNCHANGED, base, memoryview(into)) == changed_words(base, base) == b""


# ── size ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(("share", "size"), [(0.01, 0.0155), (0.02, 0.0302), (0.03, 0.0452)])
def test_frame_has_one_and_a_half_times_the_size_of_the_changed_words(share: float, size: float) -> None:
    base = versions(1, SIZE)[0]
    frame = frame_between(base, changed(base, 1, share))
    assert 1.5 * share < len(frame) / SIZE < size


@pytest.mark.parametrize("size", [1000, SIZE])
def test_too_many_changes_are_not_encoded(size: int) -> None:
    base = versions(1, size)[0]
    assert changed_words(base, changed(base, 1, 0.41)) is None
    assert changed_words(base, changed(base, 1, 1.0)) is None
    few = changed_words(base, changed(base, 1, 0.38))
    assert few is not None
    assert encode(few, base) is not None


def test_frame_of_more_than_three_fifths_of_its_chunk_is_not_sent() -> None:
    """The union of several versions' changes can be too large, even if each is small."""
    base = versions(1, SIZE)[0]
    changes = [changed_words(base, changed(base, seed, 0.3)) for seed in (1, 2)]
    assert encode(union([one for one in changes if one is not None], SIZE), base) is None


# ── malformed frames ───────────────────────────────────────────────────────────────────────────────────────────────
def frame(gaps: bytes, values: bytes, announced: int | None = None) -> bytes:
    return struct.pack("<Q", len(gaps) if announced is None else announced) + gaps + values


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(frame(b"", b"")[:7], id="header cut"),
        pytest.param(frame(b"\1", b"ab", announced=4), id="gaps longer than the frame"),
        pytest.param(frame(b"", b"", announced=4), id="no gaps, although they are announced"),
        pytest.param(frame(b"\1", b"ab", announced=2**64 - 1), id="gaps of 2**64 bytes"),
        pytest.param(frame(b"\1", b"ab", announced=2**63), id="gaps of 2**63 bytes"),
        pytest.param(frame(bytes([99, 0]), b"abcd"), id="one word too far"),
        pytest.param(frame(bytes([100]), b"ab"), id="past the chunk"),
        pytest.param(frame(b"\xff", b""), id="unchanged words past the chunk"),
        pytest.param(frame(b"\xff" * 2**20 + b"\0", b"ab"), id="far past the chunk"),
        pytest.param(frame(bytes([3, 4]), b"ab"), id="values too few"),
        pytest.param(frame(bytes([3, 4]), b"abc"), id="half a value"),
        pytest.param(frame(bytes([3, 4]), b""), id="no values"),
        pytest.param(frame(bytes([3, 4]), b"abcde"), id="values too many"),
        pytest.param(frame(b"", b"ab"), id="values without changes"),
    ],
)
def test_malformed_frame_is_refused(bad: bytes) -> None:
    base = memoryview(bytes(200))
    with pytest.raises(ValueError, match="frame"):
        apply(bad, base, memoryview(bytearray(200)))


def test_last_byte_of_an_odd_chunk_must_be_there() -> None:
    base, into = memoryview(bytes(201)), memoryview(bytearray(201))
    apply(frame(bytes([3, 4]), b"abcdx"), base, into)
    for values in (b"abcd", b"abcdxy"):
        with pytest.raises(ValueError, match="values"):
            apply(frame(bytes([3, 4]), values), base, into)


@given(st.binary(min_size=1, max_size=400), st.integers(1, 300))
def test_any_bytes_are_applied_within_the_chunk_or_refused(garbage: bytes, size: int) -> None:
    around = memoryview(bytearray(b"\xaa" * (size + 64)))
    base = memoryview(bytes(size))
    try:
        apply(garbage, base, around[32 : 32 + size])
    except ValueError:
        assert around == b"\xaa" * (size + 64), "a refused frame was applied in part"
    assert around[:32] == around[32 + size :] == b"\xaa" * 32


def test_sum_of_the_largest_gaps_does_not_overflow() -> None:
    gaps = np.full(2**24, 255, np.uint8)
    assert delta._positions(gaps)[1] == 255 * 2**24
