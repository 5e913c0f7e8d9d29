"""The run to which benchmarks/cli_startup.py writes events while it measures ``rrl status``."""

from __future__ import annotations

from pathlib import Path

from rrl.benchmarks._live_run import live_run
from rrl.core.run_dir import RunDir
from rrl.manager.storage.journal import SEGMENT_RECORDS, Follower
from rrl.tests.support.listening_manager import wait_until


def test_journal_of_a_live_run_begins_with_half_a_segment_and_goes_on(tmp_path: Path) -> None:
    with live_run(tmp_path, "live-7", 6):
        follower = Follower(RunDir(tmp_path / "live-7"))
        first = follower.state()
        assert first is not None
        assert first.outcome is None
        assert first.seq > SEGMENT_RECORDS // 2
        assert len([id for id in first.replicas if id.startswith("rollout/")]) == 3

        def goes_on() -> bool:
            now = follower.state()
            return now is not None and now.seq > first.seq and now.step > first.step

        wait_until(goes_on)
