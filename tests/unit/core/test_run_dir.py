from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from rrl.core.launch import ExitReason, ExitRecord, read_exit
from rrl.core.run_dir import write_atomically
from rrl.core.types import Incarnation, NodeName, ReplicaId

OLD, NEW = b"the old bytes", b"the new bytes, which are more than those"


@contextmanager
def no_file_larger_than(nbytes: int) -> Iterator[None]:
    """Imitate a full disk: a write stores the bytes that fit, and only the next write fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_is_replaced_and_readable_by_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(OLD)
    write_atomically(path, NEW)
    assert path.read_bytes() == NEW
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["file"]


def test_partial_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, OLD)
    with no_file_larger_than(len(NEW) - 5), pytest.raises(OSError, match="too large"):
        write_atomically(path, NEW)
    assert path.read_bytes() == OLD
    assert os.listdir(tmp_path) == ["file"]


def test_file_that_cannot_be_renamed_is_removed(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_atomically(tmp_path / "folder", NEW)
    assert os.listdir(tmp_path) == ["folder"]


# ── exit records ───────────────────────────────────────────────────────────────────────────────────────────────────
def test_an_exit_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = ExitRecord("run.a-0.1", Incarnation(ReplicaId("a/0"), 1), NodeName("n1"), 3, None, ExitReason.EXITED, 5.0)
    write_atomically(tmp_path / "exit", msgspec.json.encode(record))
    assert read_exit(tmp_path / "exit") == record


@pytest.mark.parametrize("content", [b"", b"{", b"\0" * 40, b"[1]", b'{"tag":"\xff"}'])
def test_invalid_exit_record_reads_as_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "exit").write_bytes(content)
    assert read_exit(tmp_path / "exit") is None


def test_unreadable_exit_record_reads_as_none(tmp_path: Path) -> None:
    assert read_exit(tmp_path / "absent") is None
    assert read_exit(tmp_path) is None  # fails with EISDIR, which stands for EIO and ESTALE
