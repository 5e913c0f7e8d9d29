"""The launcher copies a role's output to a file that works, fails or hangs."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rrl.core.log_lines import STAMP_BYTES, missing_notice, stamp
from rrl.roles.launcher.logs import pump
from rrl.roles.launcher.logs.files import RotatingLog
from rrl.roles.launcher.logs.pump import Backlog, LogPump
from rrl.tests.support.listening_manager import TIMEOUT_S, wait_until


class Pumped:
    def __init__(self, path: Path) -> None:
        reader, self.role = os.pipe()
        self.pump = LogPump(reader, RotatingLog(path))
        self.pump.start()

    def writes(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self.role, view) :]

    def ends(self) -> None:
        if self.role >= 0:
            os.close(self.role)
            self.role = -1


@contextmanager
def pumped(path: Path) -> Iterator[Pumped]:
    made = Pumped(path)
    try:
        yield made
    finally:
        made.ends()
        made.pump.finish(0.1)


@contextmanager
def hung(path: Path) -> Iterator[Path]:
    """Yield a log file whose open() hangs until the end of the test, as on NFS with an unreachable server."""
    os.mkfifo(path)
    try:
        yield path
    finally:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # releases the thread that hangs
        threading.Timer(1.0, os.close, (fd,)).start()


def recorded_tries(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Return a list to which each chunk is added that a log is told to write."""
    tried: list[bytes] = []
    append = RotatingLog.append

    def record(log: RotatingLog, data: bytes) -> int:
        tried.append(data)
        return append(log, data)

    monkeypatch.setattr(RotatingLog, "append", record)
    return tried


def texts(data: bytes) -> list[bytes]:
    return [line[STAMP_BYTES + 1 :] for line in data.splitlines()]


def test_role_output_is_in_its_file(tmp_path: Path) -> None:
    with pumped(tmp_path / "a.log") as at:
        at.writes(b"one\ntwo\nthr")
        at.ends()
        at.pump.finish(TIMEOUT_S)
        assert texts((tmp_path / "a.log").read_bytes()) == [b"one", b"two", b"thr"]


def test_unfinished_line_is_written_while_the_role_waits(tmp_path: Path) -> None:
    with pumped(tmp_path / "a.log") as at:
        at.writes(b"Password: ")
        wait_until(
            lambda: (tmp_path / "a.log").exists() and texts((tmp_path / "a.log").read_bytes()) == [b"Password: "]
        )


def test_role_continues_to_write_while_its_file_hangs(tmp_path: Path) -> None:
    with hung(tmp_path / "a.log") as path, pumped(path) as at:
        for n in range(100):  # 6.4 MiB, though a pipe holds only 64 KiB
            at.writes((b"%06d " % n + b"x" * 1000 + b"\n") * 64)
        at.writes(b"its last words\n")
        at.ends()
        assert at.pump.last_line() == "its last words"


def test_lines_of_a_temporary_disk_error_are_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = recorded_tries(monkeypatch)
    monkeypatch.setattr(pump, "RETRY_INTERVAL_S", 0.01)
    folder = tmp_path / "later"
    with pumped(folder / "a.log") as at:
        at.writes(b"one\ntwo\n")
        wait_until(lambda: bool(tried))  # the writer has taken the lines from the queue
        folder.mkdir()
        at.writes(b"three\n")
        wait_until(lambda: (folder / "a.log").exists())
        at.ends()
        at.pump.finish(TIMEOUT_S)
        assert texts((folder / "a.log").read_bytes()) == [b"one", b"two", b"three"]


def test_dropped_bytes_are_counted_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = recorded_tries(monkeypatch)
    monkeypatch.setattr(pump, "RETRY_INTERVAL_S", 0.01)
    monkeypatch.setattr(pump, "MAX_QUEUED_BYTES", 10_000)
    folder = tmp_path / "later"
    with pumped(folder / "a.log") as at:
        at.writes(b"first\n")
        wait_until(lambda: bool(tried))  # the writer has taken the lines from the queue
        at.writes(b"".join(b"%09d\n" % n for n in range(1000)))
        at.ends()
        assert at.pump.last_line() == "000000999"
        folder.mkdir()
        at.pump.finish(TIMEOUT_S)
        first, gap, *rest = texts((folder / "a.log").read_bytes())
        assert first == b"first"
        kept = [b"%09d" % n for n in range(1000 - len(rest), 1000)]
        assert rest == kept
        assert gap == b"[rrl: %d bytes of this log are missing here]" % ((1000 - len(rest)) * (STAMP_BYTES + 1 + 10))


def test_full_disk_does_not_delay_the_end_of_the_step(tmp_path: Path) -> None:
    (tmp_path / "a.log").symlink_to("/dev/full")
    with pumped(tmp_path / "a.log") as at:
        at.writes(b"lost\n")
        at.ends()
        at.pump.finish(TIMEOUT_S)
        assert at.pump.last_line() == "lost"


def test_lines_are_on_the_disk_soon_after_they_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bytes] = []
    path = tmp_path / "a.log"
    monkeypatch.setattr(os, "fdatasync", lambda fd: synced.append(path.read_bytes()))
    with pumped(path) as at:
        at.writes(b"one\n")
        wait_until(lambda: bool(synced))
        assert texts(synced[-1]) == [b"one"]
        at.writes(b"two\n")
        wait_until(lambda: texts(synced[-1]) == [b"one", b"two"])


def test_end_of_the_output_is_written_even_after_a_burst(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pump, "MAX_QUEUED_BYTES", 2**30)  # a slow disk loses nothing: the backlog counts stamps, too
    flood = (b"x" * 1023 + b"\n") * 20_000  # more than a role may write at once
    last = b"Traceback (most recent call last):\nValueError: why it ended\n"
    with pumped(tmp_path / "a.log") as at:
        at.writes(flood + last)
        at.ends()
        assert at.pump.last_line() == "ValueError: why it ended"
        at.pump.finish(TIMEOUT_S)
    written = texts((tmp_path / "a.log").read_bytes())
    assert written[-2:] == last.splitlines()
    gaps = [line for line in written if line.startswith(b"[rrl: ")]  # one, or several on a slow machine
    missing = [int(gap.split()[1]) for gap in gaps]
    assert gaps == [missing_notice(count) for count in missing] != []
    kept = sum(len(line) + 1 for line in written if line not in gaps)
    assert kept + sum(missing) == len(flood + last), "the notices do not count the bytes that are missing"


FOLDER = Path("/home/anna/job")
TRACE = """Traceback (most recent call last):
  File "/home/anna/job/rollout.py", line 7, in <module>
    load(path)
    ~~~~^^^^^^
  File "/usr/lib/python3/dist-packages/torch/serialization.py", line 40, in load
    raise ValueError(path)
"""


@pytest.mark.parametrize(
    ("output", "place"),
    [
        (f"{TRACE}ValueError: x", "rollout.py:7"),
        (f"{TRACE}KeyError\n\nDuring handling of the above exception, ...:\n\n{TRACE}ValueError: x", "rollout.py:7"),
        (TRACE.replace("/home/anna/job", "/opt/tool") + "ValueError: x", "/opt/tool/rollout.py:7"),
        ('  File "/home/anna/job/rollout.py", line 3\n    with a as b\n         ^\nSyntaxError: x', "rollout.py:3"),
        (f"{TRACE}ValueError: x\nand then the end", ""),
        ("no traceback", ""),
        ("", ""),
    ],
)
def test_place_of_an_exception_is_read_from_a_traceback_at_the_end_of_the_output(output: str, place: str) -> None:
    lines = [line for line in output.splitlines() if line]
    assert pump.place_in_traceback(lines, FOLDER) == place


# ── lines that the file does not have yet ─────────────────────────────────────────────────────────────────────────────
def line(n: int, text: bytes = b"x") -> bytes:
    return stamp(n) + b" " + text + b"\n"


SIZE = len(line(1))


def test_lines_put_into_the_backlog_are_taken_once_in_order() -> None:
    backlog = Backlog(10 * SIZE)
    assert backlog.pop_oldest(100) == b""
    backlog.put(line(1) + line(2))
    backlog.put(line(3))
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
