"""The lines of ``rrl status`` about unwritable storage, and about nodes that the cluster reclaims or holds."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from rrl.cli.run.status import MIN_FREE_BYTES, storage_trouble
from rrl.cli.views.status import status_view
from rrl.core.run_dir import RunDir
from rrl.manager.cluster.base import AllocationState
from rrl.manager.model.events import AllocationChanged
from rrl.tests.support.cli.story import Story
from rrl.tests.support.cli.text_snapshots import drawn


class _There:
    def __init__(self, free: int, flags: int = 0) -> None:
        self.f_bavail, self.f_frsize, self.f_flag = free // 4096, 4096, flags


@pytest.mark.parametrize(
    ("there", "expected_text"),
    [
        (_There(MIN_FREE_BYTES), ""),
        (_There(0), "the run directory is full"),
        (_There(2**40, os.ST_RDONLY), "the run directory is read-only"),
    ],
    ids=["room", "full", "read-only"],
)
def test_unwritable_storage_is_shown_although_the_journal_cannot_record_it(
    there: _There, expected_text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: there)
    reported = storage_trouble(RunDir(tmp_path))
    assert reported.startswith(expected_text)
    assert bool(reported) == bool(expected_text)
    assert not expected_text or "the roles go on" in reported


def test_missing_run_directory_is_shown(tmp_path: Path) -> None:
    assert storage_trouble(RunDir(tmp_path / "nothing")).startswith("the run directory is unavailable (No such file")


@pytest.mark.parametrize(
    ("changes", "expected_text"),
    [
        ({"state": AllocationState.SUSPENDED}, "suspended"),
        ({"reclaimed": True, "time_left_s": 30.0}, "preempted"),
        ({"state": AllocationState.PENDING, "nodes": (), "detail": "PENDING: held by an administrator"},
         "held by an administrator"),
    ],
    ids=["suspended", "preempted", "held"],
)  # fmt: skip
def test_cluster_state_of_an_allocation_is_shown(changes: dict[str, object], expected_text: str) -> None:
    story = Story().works()
    (held,) = story.recorded().allocations.values()
    assert held.status is not None
    story.record(AllocationChanged(held.tag, msgspec.structs.replace(held.status, **changes)))
    picture = drawn(status_view(story.recorded(), story.now, 160), 160)
    assert expected_text in picture, picture
    assert expected_text not in drawn(status_view(Story().works().recorded(), story.now, 160), 160)
