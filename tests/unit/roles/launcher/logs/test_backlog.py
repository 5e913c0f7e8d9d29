from __future__ import annotations

from rrl.core.log_lines import STAMP_BYTES, missing_notice, stamp
from rrl.roles.launcher.logs.backlog import Backlog


def line(n: int, text: bytes = b"x") -> bytes:
    return stamp(n) + b" " + text + b"\n"


SIZE = len(line(1))


def test_lines_put_into_the_backlog_are_taken_once_in_order() -> None:
    backlog = Backlog(10 * SIZE)
    assert backlog.pop_oldest(100) == b""
    backlog.put(line(1) + line(2))
    backlog.put(line(3))
    backlog.put(b"")
    assert backlog.pop_oldest(2 * SIZE + 1) == line(1) + line(2)
    assert backlog.pop_oldest(1) == line(3), "pop_oldest() must return at least one line"


def test_excess_lines_are_dropped_oldest_first_with_a_stamped_notice() -> None:
    backlog = Backlog(3 * SIZE)
    for n in range(1, 6):
        backlog.put(line(n))
    assert backlog.size == 3 * SIZE
    assert backlog.pop_oldest(2 * SIZE) == stamp(2) + b" " + missing_notice(2 * SIZE) + b"\n" + line(3) + line(4)
    assert backlog.pop_oldest(2 * SIZE) == line(5)


def test_chunk_larger_than_the_bound_keeps_its_end() -> None:
    backlog = Backlog(2 * SIZE + 3)
    backlog.put(b"".join(line(n) for n in range(100)))
    assert backlog.size == 2 * SIZE
    assert backlog.pop_oldest(10**9).splitlines()[0][:STAMP_BYTES] == stamp(97)
    backlog.put(line(100, b"y" * 10 * SIZE))
    assert not backlog.size
    assert backlog.pop_oldest(10**9) == stamp(100) + b" " + missing_notice(len(line(100, b"y" * 10 * SIZE))) + b"\n"
