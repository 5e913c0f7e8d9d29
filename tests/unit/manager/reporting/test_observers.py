"""The manager records the ETTR of its run as the journal shows it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rrl.core.run_dir import RunDir
from rrl.manager.model import events as ev
from rrl.manager.reporting.observers import EttrEstimator
from rrl.manager.storage.journal import Journal
from rrl.tests.support.manager.accounted import accounted, begun, trained


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "small")
    run.create()
    return run


def test_ettr_is_recorded_as_soon_as_it_is_known_and_whenever_it_changes(run: RunDir) -> None:
    journal, recorded, story = Journal(run, 1), list[ev.Event](), begun()
    estimator = EttrEstimator(run, recorded.append)

    def after(first: int, last: int) -> int:
        """Return how many records there are after these steps, which are the newest durable ones."""
        written = len(story.stamped) if first > 1 else 0
        for stamped in trained(story, first, last).stamped[written:]:
            journal.append(stamped)
        journal.flush()
        asyncio.run(estimator.estimate())
        return len(recorded)

    assert after(1, 1) == 0, "no step is undisturbed"
    assert after(2, 5) == after(6, 6) == 1
    story.wait(30)  # a slow step
    assert after(7, 7) == 2
    ettr = accounted(story).steps.ettr
    assert ettr is not None
    assert recorded == [ev.EttrEstimated(1.0), ev.EttrEstimated(round(ettr, 4))]
    journal.close()


def test_damaged_journal_leaves_the_ettr_as_it_is(run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    (run.journal / "000001-000001.seg").write_bytes(b"no journal")
    recorded: list[ev.Event] = []
    asyncio.run(EttrEstimator(run, recorded.append).estimate())
    assert recorded == []
    assert "the ETTR of the run is not updated" in caplog.text
