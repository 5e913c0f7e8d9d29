from __future__ import annotations

import os
from pathlib import Path

import pytest

from rrl.core.log_lines import STAMP_BYTES, seconds_of, stamp, stamp_of
from rrl.roles.launcher.logs.files import (
    MAX_LINE_BYTES,
    PARTIAL_LINE_TIMEOUT_S,
    LineTimestamper,
    RateLimiter,
    RotatingLog,
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Nanos:
    now = 1_800_000_000_000_000_000

    def __call__(self) -> int:
        return self.now


def texts(lines: bytes) -> list[bytes]:
    assert not lines or lines.endswith(b"\n")
    return [line[STAMP_BYTES + 1 :] for line in lines.splitlines()]


# ── the file ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_full_file_is_rotated_and_the_oldest_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    log = RotatingLog(path, file_bytes=10, files=3)
    for n in range(5):
        log.append(b"line %d..\n" % n)
    log.close()
    assert path.read_bytes() == b"line 4..\n"
    assert (tmp_path / "a.log.1").read_bytes() == b"line 3..\n"
    assert (tmp_path / "a.log.2").read_bytes() == b"line 2..\n"
    assert len(list(tmp_path.iterdir())) == 3


def test_reopened_log_is_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    for text in (b"one\n", b"two\n"):
        log = RotatingLog(path, file_bytes=100)
        log.append(text)
        log.close()
    assert path.read_bytes() == b"one\ntwo\n"


def test_failed_write_is_reported_and_repeated(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    log = RotatingLog(folder / "a.log")
    assert log.append(b"again\n") == 0
    folder.mkdir()
    assert log.append(b"again\n") == 6
    log.close()
    assert (folder / "a.log").read_bytes() == b"again\n"


def test_full_disk_raises_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.log").symlink_to("/dev/full")
    log = RotatingLog(tmp_path / "a.log")
    assert log.append(b"x\n") == 0
    log.close()


# ── the rate ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_output_above_the_rate_is_dropped_by_lines_and_counted() -> None:
    clock = Clock()
    limiter = RateLimiter(rate=40, burst=40, clock=clock)
    assert limiter.admit(b"first\nsecond\nthi") == b"first\n"
    assert limiter.admit(b"rd\nfourth\n") == b""
    assert limiter.dropped == len(b"second\nthird\nfourth\n")
    clock.now = 1.0
    assert limiter.admit(b"fifth\n") == b"fifth\n"
    assert limiter.dropped == len(b"second\nthird\nfourth\n")


def test_rest_of_a_dropped_line_is_dropped_too() -> None:
    clock = Clock()
    limiter = RateLimiter(rate=100, burst=100, clock=clock)
    assert limiter.admit(b"x" * 101) == b""
    clock.now = 10.0
    assert limiter.admit(b"its rest\nnext\n") == b"next\n"
    assert limiter.dropped == 101 + len(b"its rest\n")


def test_output_after_a_flood_resumes_with_many_lines_at_once() -> None:
    clock = Clock()
    limiter = RateLimiter(rate=1000, burst=16_000, clock=clock)
    line = b"." * (99 - STAMP_BYTES - 1) + b"\n"
    assert len(limiter.admit(line * 1000)) < 16_000
    clock.now = 0.9
    assert limiter.admit(line) == b""
    clock.now = 1.1
    assert limiter.admit(line * 5) == line * 5


def test_short_lines_count_with_their_timestamps() -> None:
    limiter = RateLimiter(rate=0, burst=10 * (STAMP_BYTES + 2), clock=Clock())
    assert limiter.admit(b"\n" * 1000).count(b"\n") in (9, 10)


# ── lines ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_timestamps_are_unique_and_never_decrease() -> None:
    clock = Nanos()
    stamper = LineTimestamper(clock)
    lines = stamper.feed(b"a\nb\n").splitlines()
    clock.now -= 3_600_000_000_000
    lines += stamper.feed(b"c\n").splitlines()
    clock.now += 7_200_000_000_000
    lines += stamper.feed(b"d\n").splitlines()
    times = [stamp_of(line) for line in lines]
    assert times == sorted(set(times))
    assert times[0] == b"2027-01-15T08:00:00.000000Z" == stamp(1_800_000_000_000_000)
    assert seconds_of(times[3]) - seconds_of(times[0]) == pytest.approx(3600, abs=0.001)
    assert texts(b"".join(line + b"\n" for line in lines)) == [b"a", b"b", b"c", b"d"]


def test_timestamps_continue_across_the_second() -> None:
    clock = Nanos()
    clock.now += 999_999_000
    assert [line[:STAMP_BYTES] for line in LineTimestamper(clock).feed(b"a\nb\n").splitlines()] == [
        b"2027-01-15T08:00:00.999999Z",
        b"2027-01-15T08:00:01.000000Z",
    ]


def test_line_received_in_pieces_is_written_as_one_line() -> None:
    stamper = LineTimestamper()
    assert stamper.feed(b"one ") == stamper.feed(b"two ") == b""
    assert texts(stamper.feed(b"three\nrest")) == [b"one two three"]
    assert texts(stamper.flush()) == [b"rest"]
    assert stamper.flush() == b""


def test_unfinished_line_is_held_for_a_bounded_time() -> None:
    stamper = LineTimestamper()
    assert stamper.flush_due_in(0.0) is None
    stamper.feed(b"Password: ", 10.0)
    stamper.feed(b"more", 10.5)
    assert stamper.flush_due_in(10.5) == pytest.approx(PARTIAL_LINE_TIMEOUT_S - 0.5)
    assert stamper.flush_due_in(99.0) == 0.0
    assert texts(stamper.flush()) == [b"Password: more"]
    assert stamper.flush_due_in(99.0) is None
    assert texts(stamper.feed(b"\nnext\n")) == [b"next"], (
        "a newline that ends a flushed line must not be a line of its own"
    )
    assert texts(stamper.feed(b"\n")) == [b""], "an empty line was dropped"


def test_newest_state_of_a_progress_bar_is_kept() -> None:
    stamper = LineTimestamper()
    assert stamper.feed(b"\r  1%\r  2%") == b""
    assert stamper.feed(b"\r  3%\r") == b""
    assert texts(stamper.flush()) == [b"  3%"]
    assert texts(stamper.feed(b" 99%\r100%\r\nwindows\r\n")) == [b"100%", b"windows"]


def test_endless_line_is_split() -> None:
    stamper = LineTimestamper()
    pieces = texts(stamper.feed(b"x" * (2 * MAX_LINE_BYTES + 5)))
    assert [len(piece) for piece in pieces] == [MAX_LINE_BYTES, MAX_LINE_BYTES, 5]
    assert texts(stamper.feed(b"y\n")) == [b"y"]


def test_gap_notice_is_between_the_lines_before_and_after_it() -> None:
    stamper = LineTimestamper()
    stamper.feed(b"half a")
    assert texts(stamper.gap(17)) == [b"half a", b"[rrl: 17 bytes of this log are missing here]"]
    assert texts(stamper.feed(b"\n")) == [b""]


def test_bytes_that_are_not_text_pass_unchanged() -> None:
    raw = os.urandom(1000).replace(b"\n", b"").replace(b"\r", b"")
    assert texts(LineTimestamper().feed(raw + b"\n")) == [raw]
