"""Watching several runs: each new record is read once, and an unreadable run does not hide the others."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import pytest

from rrl.api.watching import runs_watcher
from rrl.api.watching.run_state import run_state
from rrl.api.watching.runs_watcher import UNREAD, RunsWatcher
from rrl.core.run_dir import RUNS_ENV, RunDir
from rrl.core.types import OperationFailed, Outcome
from rrl.manager.model import events as ev
from rrl.manager.storage.journal import Journal
from rrl.tests.support.cli.story import Story, completed, job_view


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(RUNS_ENV, str(tmp_path / "runs"))
    monkeypatch.setattr(runs_watcher, "LIST_INTERVAL_S", 0.0)
    return tmp_path / "runs"


def appended(story: Story, run: RunDir, *events: ev.Event) -> None:
    """Record events in the newest segment of the journal, as the run's manager does."""
    reported = len(story.stamped)
    story.record(*events)
    lost = RunDir(run.path.parent / "elsewhere" / run.id)
    lost.create()
    journal = Journal(lost, 1)
    head = os.path.getsize(lost.journal / "000001-000001.seg")
    for stamped in story.stamped[reported:]:
        journal.append(stamped)
    journal.close()
    frames = (lost.journal / "000001-000001.seg").read_bytes()[head:]
    with (run.journal / "000001-000001.seg").open("ab") as file:
        file.write(frames)


def test_entries_are_those_of_rrl_list(root: Path) -> None:
    stories = [Story("aaa-1").works(), completed("bbb-1"), Story("ccc-1").requests_nodes()]
    runs = {run.id: run for run in (story.written(root) for story in stories)}
    found = RunsWatcher(now=time.time).poll()
    assert {one.run.id for one in found} == set(runs)
    for one in found:
        expected = run_state(runs[one.run.id])
        assert one.entry == msgspec.structs.replace(expected, run_seconds=one.entry.run_seconds)
        assert one.state is not None


def test_watcher_reads_each_record_of_a_journal_once(root: Path) -> None:
    story = Story("aaa-1").works()
    run = story.written(root)
    watcher = RunsWatcher()
    assert watcher.poll()[0].entry.step == 12
    segment = run.journal / "000001-000001.seg"
    read = segment.stat().st_size
    appended(story, run, ev.StepCommitted(story.incarnation("trainer/0"), 13, {}))
    with segment.open("r+b") as file:  # a second read of these bytes would report a damaged journal
        file.write(b"\xff" * read)
    (found,) = watcher.poll()
    assert (found.entry.step, found.trouble) == (13, "")


def test_run_that_ends_and_one_that_is_new_are_noticed(root: Path) -> None:
    story = Story("aaa-1").works()
    run = story.written(root)
    watcher = RunsWatcher()
    assert watcher.poll()[0].entry.outcome is None
    appended(story, run, ev.RunEnded(Outcome.FAILED, "no nodes"))
    Story("bbb-1").works().written(root)
    found = {one.run.id: one.entry for one in watcher.poll()}
    assert (found["aaa-1"].standing, found["aaa-1"].why) == ("failed", "no nodes")
    assert found["bbb-1"].standing == "unattended"


def test_run_that_is_removed_is_no_longer_listed(root: Path) -> None:
    run = Story("aaa-1").works().written(root)
    watcher = RunsWatcher()
    assert len(watcher.poll()) == 1
    run.path.rename(run.path.with_name(".aaa-1"))
    assert watcher.poll() == []


def test_damaged_journal_is_named_and_hides_no_other_run(root: Path) -> None:
    damaged = Story("aaa-1").works().written(root)
    (damaged.journal / "000009-000001.seg").write_bytes(b"something that is no journal at all")
    Story("bbb-1").works().written(root)
    found = {one.run.id: one for one in RunsWatcher().poll()}
    assert "not a journal of rrl" in found["aaa-1"].trouble
    assert found["aaa-1"].entry.standing.startswith("unreadable: ")
    assert found["bbb-1"].trouble == ""


def test_runs_beyond_the_time_of_a_poll_are_read_by_the_next(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Story("aaa-1").works().written(root)
    watcher = RunsWatcher()
    with monkeypatch.context() as hurried:
        hurried.setattr(runs_watcher, "FIRST_READS_S", 0.0)
        assert [one.entry.standing for one in watcher.poll()] == [UNREAD]
    assert [one.entry.standing for one in watcher.poll()] == ["unattended"]


def test_run_outside_of_the_folder_of_runs_is_watched_too(root: Path, tmp_path: Path) -> None:
    Story("aaa-1").works().written(root)
    elsewhere = Story("bbb-1").works().written(tmp_path / "other")
    assert [one.run.id for one in RunsWatcher(elsewhere).poll()] == ["bbb-1", "aaa-1"]
    inside = RunDir(root / "aaa-1")
    assert [one.run.id for one in RunsWatcher(inside).poll()] == ["aaa-1"]


def test_folder_of_runs_that_cannot_be_listed_is_an_error(root: Path) -> None:
    root.write_text("a file")
    with pytest.raises(OperationFailed, match="Not a directory"):
        RunsWatcher().poll()


def test_run_of_the_local_cluster_that_was_never_begun_is_rejected_and_one_on_slurm_is_not_asked_for(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    for name, cluster in (("aaa-1", "local"), ("bbb-1", "slurm")):
        run = RunDir(root / name)
        run.create()
        run.run_spec.write_bytes(msgspec.json.encode(job_view(cluster=cluster)))
    found = {one.run.id: one.entry for one in RunsWatcher().poll()}
    assert (found["bbb-1"].standing, found["bbb-1"].outcome) == ("submitted", None)
    assert found["aaa-1"] == run_state(RunDir(root / "aaa-1"))
