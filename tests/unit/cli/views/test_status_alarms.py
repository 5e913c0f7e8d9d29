"""The lines of ``rrl status`` about unwritable storage, and about nodes that the cluster reclaims or holds."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import msgspec
import pytest

from rrl.api.watching.manager_liveness import INTERRUPTED, Liveness, SlurmJobs, liveness, storage_trouble
from rrl.cli.views.status import status_view
from rrl.cluster.base import AllocationState
from rrl.core.run_dir import RunDir
from rrl.core.text import span
from rrl.manager.model.events import AllocationChanged, ClusterUnknown
from rrl.manager.storage.lease import LeaseHolder
from rrl.tests.support.cli.story import Story, job_view
from rrl.tests.support.cli.text_snapshots import drawn


class _There:
    def __init__(self, free: int, flags: int = 0) -> None:
        self.f_bavail, self.f_frsize, self.f_flag = free // 4096, 4096, flags


WRITABLE = _There(2**40)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run with a manager on another machine, which Slurm does not list."""
    made = Story("small-1", job=job_view(cluster="slurm")).works().written(tmp_path)
    made.epochs.mkdir(exist_ok=True)
    return made


def _held(run: RunDir, age_s: float, number: int = 0) -> None:
    lease = run.epochs / "000001"
    lease.write_bytes(msgspec.json.encode(LeaseHolder("elsewhere", 7, 3, write_errno=number)))
    os.utime(lease, (time.time() - age_s,) * 2)


def _shown(run: RunDir) -> Liveness:
    return liveness(run, Story("small-1", job=job_view(cluster="slurm")).works().recorded(), SlurmJobs)


@pytest.mark.parametrize("age_s", [1.0, 3600.0], ids=["renewed", "old lease"])
@pytest.mark.parametrize(
    ("there", "number", "expected_text"),
    [
        (_There(0), 0, "the run directory is full: "),
        (_There(2**40, os.ST_RDONLY), 0, "the run directory is read-only: "),
        (WRITABLE, errno.ENOSPC, "the run directory is full: "),
        (WRITABLE, errno.EDQUOT, "the run directory is full (Disk quota exceeded): "),
        (WRITABLE, errno.EROFS, "the run directory is read-only: "),
        (WRITABLE, errno.EIO, "the run directory cannot be written (Input/output error): "),
    ],
    ids=["full", "read-only", "full for the manager", "quota", "read-only for the manager", "broken"],
)
def test_manager_that_cannot_write_is_neither_gone_nor_silent(
    run: RunDir, there: _There, number: int, expected_text: str, age_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal cannot record it: the file system and the lease say it, which need no space."""
    monkeypatch.setattr(os, "statvfs", lambda path: there)
    _held(run, age_s, number)
    shown = _shown(run)
    assert (shown.standing, shown.advice) == ("", "")
    assert shown.note.startswith(expected_text)
    assert "the roles go on" in shown.note


def test_storage_explains_no_manager_that_is_surely_gone(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: _There(0))
    assert _shown(run).standing == INTERRUPTED
    monkeypatch.setattr(os, "statvfs", lambda path: WRITABLE)
    _held(run, 1.0)
    assert _shown(run) == Liveness()


def test_missing_run_directory_is_shown(tmp_path: Path) -> None:
    assert storage_trouble(RunDir(tmp_path / "nothing")).startswith("the run directory is unavailable (No such file")


def test_cluster_that_does_not_answer_is_shown_with_its_beginning() -> None:
    story = Story().works()
    story.record(ClusterUnknown("squeue: timed out", story.now)).wait(300)
    shown = " ".join(drawn(status_view(story.recorded(), story.now, 80), 80).split())
    assert "cluster no complete answer for 5m00s (squeue: timed out): what needs one waits" in shown
    story.record(ClusterUnknown("", story.now))
    assert "cluster" not in drawn(status_view(story.recorded(), story.now, 80), 80)


def test_figures_that_nobody_updates_are_shown_as_such() -> None:
    story = Story().works()
    state, now = story.recorded(), story.now + 500.0
    fresh, frozen = (drawn(status_view(state, now, 100, notes), 100) for notes in ((), ("no manager is running",)))
    assert " left" in fresh
    assert "as of" not in fresh
    assert " left" not in frozen
    assert f"as of       {span(now - state.at)} ago: nothing has been recorded since" in frozen
    assert f"   {span(state.run_seconds(state.at))}\n" in frozen, "the run's time goes on although nobody knows it"


@pytest.mark.parametrize(
    ("changes", "expected_text"),
    [
        ({"state": AllocationState.SUSPENDED}, "suspended"),
        ({"reclaimed": True, "time_left_s": 30.0}, "preempted"),
        (
            {"state": AllocationState.PENDING, "nodes": (), "detail": "PENDING: held by an administrator"},
            "held by an administrator",
        ),
    ],
    ids=["suspended", "preempted", "held"],
)
def test_cluster_state_of_an_allocation_is_shown(changes: dict[str, object], expected_text: str) -> None:
    story = Story().works()
    (held,) = story.recorded().allocations.values()
    assert held.status is not None
    story.record(AllocationChanged(held.tag, msgspec.structs.replace(held.status, **changes)))
    picture = drawn(status_view(story.recorded(), story.now, 160), 160)
    assert expected_text in picture, picture
    assert expected_text not in drawn(status_view(Story().works().recorded(), story.now, 160), 160)
