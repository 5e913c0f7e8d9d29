"""The newest lines of every incarnation, which a manager buffers, and the times at which it writes them."""

from __future__ import annotations

from pathlib import Path

from rrl.core.log_lines import is_notice, stamp
from rrl.core.run_dir import RunDir
from rrl.core.types import Incarnation, ReplicaId
from rrl.manager.reporting.logs.log_buffers import COMPLETION_GRACE_S, LogBuffers
from rrl.transport.control.log_messages import LOG_BOUNDS, TAIL_BYTES, LogLines

A, B, OLD = (
    Incarnation(ReplicaId("rollout/0"), 2),
    Incarnation(ReplicaId("rollout/1"), 1),
    Incarnation(ReplicaId("rollout/0"), 1),
)
LATER = 1000.0


def line(n: int, text: bytes = b"x") -> bytes:
    return stamp(n) + b" " + text + b"\n"


def current_state(incarnation: Incarnation) -> bool | None:
    return None if incarnation.replica == "judge/7" else incarnation != OLD


def copies(tmp_path: Path, all_bytes: int = 2**20, file_bytes: int = 2**20, epoch: int = 1) -> LogBuffers:
    run = RunDir(tmp_path / "run-1")
    if not run.path.exists():
        run.create()
    return LogBuffers(run, epoch, current_state, max_total_bytes=all_bytes, max_file_bytes=file_bytes)


def written(tmp_path: Path, incarnation: Incarnation = A, epoch: int = 1) -> bytes:
    tag = f"run-1.{incarnation.replica.replace('/', '-')}.{incarnation.number}"
    path = tmp_path / "run-1" / "logs" / f"{tag}.shipped-{epoch}.log"
    return path.read_bytes() if path.exists() else b""


def test_buffers_of_current_or_complete_incarnations_are_not_written(tmp_path: Path) -> None:
    at = copies(tmp_path)
    at.add(LogLines(A, line(1)), 0.0)
    at.add(LogLines(B, line(1)), 0.0)
    at.write_later(B, 0.0)
    at.add(LogLines(B, line(2), is_last=True), 1.0)
    at.write_due(LATER)
    assert written(tmp_path, A) == written(tmp_path, B) == b""
    assert at.size == len(line(1)), "the buffer still has a log that is complete and saved"


def test_buffer_of_a_failed_incarnation_is_written_after_a_grace_period(tmp_path: Path) -> None:
    at = copies(tmp_path)
    at.add(LogLines(A, line(1)), 0.0)
    at.write_later(A, 0.0)
    at.add(LogLines(A, line(2)), 0.1)
    at.write_due(COMPLETION_GRACE_S / 2)
    assert written(tmp_path) == b""
    at.write_due(COMPLETION_GRACE_S)
    assert written(tmp_path) == line(1) + line(2)


def test_lines_that_a_step_cannot_save_are_written_at_once(tmp_path: Path) -> None:
    at = copies(tmp_path)
    at.add(LogLines(A, line(1)), 0.0)
    at.add(LogLines(A, line(2), unsaved=True), 0.0)
    assert written(tmp_path) == line(1) + line(2)
    at.add(LogLines(A, line(3)), 0.0)
    at.add(LogLines(A, line(4), unsaved=True, is_last=True), 0.0)
    assert written(tmp_path) == b"".join(map(line, (1, 2, 3, 4)))
    assert at.size == 0


def test_line_received_twice_is_kept_once(tmp_path: Path) -> None:
    at = copies(tmp_path)
    at.add(LogLines(A, line(1) + line(2)), 0.0)
    at.add(LogLines(A, line(1) + line(2) + line(3), unsaved=True), 0.0)
    assert written(tmp_path) == line(1) + line(2) + line(3)


def test_each_manager_writes_a_file_of_its_own(tmp_path: Path) -> None:
    for epoch in (1, 2):
        copies(tmp_path, epoch=epoch).add(LogLines(A, line(1), unsaved=True), 0.0)
    assert written(tmp_path, A, 1) == written(tmp_path, A, 2) == line(1)


def test_lines_of_a_fenced_incarnation_are_kept(tmp_path: Path) -> None:
    at = copies(tmp_path)
    at.add(LogLines(OLD, line(1)), 0.0)
    at.write_due(LATER)
    assert written(tmp_path, OLD) == line(1)
    assert at.size == 0


def test_end_reported_before_any_line_counts_too(tmp_path: Path) -> None:
    at = copies(tmp_path)
    at.write_later(A, 0.0)
    at.write_later(B, 0.0)
    at.add(LogLines(A, line(1)), 0.5)
    at.write_due(LATER)
    assert written(tmp_path, A) == line(1)
    assert written(tmp_path, B) == b""


def test_buffer_of_an_incarnation_is_bounded_and_notes_its_gaps(tmp_path: Path) -> None:
    at = copies(tmp_path)
    for n in range(100):
        at.add(LogLines(A, line(n + 1, b"y" * 10_000)), 0.0)
        assert at.size <= TAIL_BYTES
    at.write_later(A, 0.0)
    at.write_due(LATER)
    first, *rest = written(tmp_path).splitlines()
    assert is_notice(first[28:])
    assert rest[-1] == line(100, b"y" * 10_000)[:-1]
    assert len(written(tmp_path)) <= TAIL_BYTES + 100


def test_buffer_without_messages_for_longest_is_evicted_first(tmp_path: Path) -> None:
    at = copies(tmp_path, all_bytes=3 * len(line(1)))
    at.add(LogLines(A, line(1)), 0.0)
    at.add(LogLines(B, line(1)), 0.0)
    at.add(LogLines(A, line(2)), 0.0)
    at.add(LogLines(A, line(3)), 0.0)
    assert at.size <= 3 * len(line(1))
    assert at.evicted == len(line(1))
    for incarnation in (A, B):
        at.write_later(incarnation, 0.0)
    at.write_due(LATER)
    assert written(tmp_path, A) == line(1) + line(2) + line(3)
    assert written(tmp_path, B) == b""


def test_file_of_a_buffer_is_bounded(tmp_path: Path) -> None:
    at = copies(tmp_path, file_bytes=4 * len(line(1)))
    for n in range(1, 12):
        at.add(LogLines(A, line(n), unsaved=True), 0.0)
    files = sorted((tmp_path / "run-1" / "logs").iterdir())
    assert [path.read_bytes() for path in files] == [
        b"".join(map(line, (9, 10, 11))), b"".join(map(line, (5, 6, 7, 8))),
    ]  # fmt: skip


def test_buffer_that_cannot_be_written_is_written_later(tmp_path: Path) -> None:
    at = copies(tmp_path)
    logs = tmp_path / "run-1" / "logs"
    logs.rename(tmp_path / "away")
    at.add(LogLines(A, line(1), unsaved=True), 0.0)
    at.add(LogLines(A, line(2), unsaved=True), 0.0)
    assert at.size == 2 * len(line(1))
    (tmp_path / "away").rename(logs)
    at.write_due(LATER)
    assert written(tmp_path) == line(1) + line(2)


def test_lines_that_are_not_of_this_run_are_refused_and_counted(tmp_path: Path) -> None:
    at = copies(tmp_path)
    far = line(1, b"x" * LOG_BOUNDS.max_frame_bytes)
    bad = [
        LogLines(Incarnation(ReplicaId("judge/7"), 1), line(1)),
        LogLines(A, b"no time\n"),
        LogLines(A, line(1)[:-1]),
        LogLines(A, far),
    ]
    for message in bad:
        at.add(message, 0.0)
    assert at.refused == len(bad)
    assert at.size == 0
