"""``rrl top`` sorts, filters, opens and explains runs, and changes them after a confirmation."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import DataTable

from rrl.core.faults import FaultKind
from rrl.core.run_dir import OwnPath, RunDir
from rrl.core.types import Version
from rrl.manager.intake.user_commands import Command, pending_commands
from rrl.manager.model import events as ev
from rrl.manager.storage.journal import Journal
from rrl.tests.support.cli.status_scenes import crowded, gang
from rrl.tests.support.cli.story import Story, completed, job_view
from rrl.tests.support.cli.top import Top, allowing, managed, running


@pytest.fixture
def story() -> Story:
    return allowing()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / "rrl-runs"


def written(story: Story, root: Path, age: float = 0.0) -> RunDir:
    """Write a run that was submitted ``age`` seconds ago."""
    run = story.written(root)
    at = run.resolved.stat().st_mtime - age
    os.utime(run.resolved, (at, at))
    return run


def goes_on(story: Story, run: RunDir, *events: ev.Event) -> None:
    """Let the next manager of the run record events."""
    reported = len(story.stamped)
    story.record(*events)
    journal = Journal(run, 2)
    for stamped in story.stamped[reported:]:
        journal.append(stamped)
    journal.close()


def names(top: Top) -> list[str]:
    """Return the first word of each row of the table that has the focus."""
    table: DataTable[Any] = top.app.screen.query("DataTable:focus").first(DataTable)
    return [table.get_row_at(row)[0].plain for row in range(table.row_count)]


LAST = ["down"] * 4
"""The keys that move to the last replica of the usual run."""


# ── the table of runs ──────────────────────────────────────────────────────────────────────────────────────────────
def three_runs(root: Path) -> float:
    story = allowing("bbb-1")
    written(story, root, 20)
    written(completed("ccc-1"), root, 10)
    written(Story("aaa-1"), root, 30)
    return story.now


async def test_runs_are_listed_newest_first_and_sorted_by_keys(root: Path) -> None:
    now = three_runs(root)

    async with running(now) as top:
        shown = await top.shows("3 runs in ~/rrl-runs, 2 not ended", "ccc-1")
        assert shown.splitlines()[2].split()[:3] == ["ccc-1", "completed", "12/12"]
        assert names(top) == ["ccc-1", "bbb-1", "aaa-1"]
        await top.press("s")
        assert names(top) == ["aaa-1", "bbb-1", "ccc-1"]
        assert "run ▲" in top.text()
        await top.press("S")
        assert names(top) == ["ccc-1", "bbb-1", "aaa-1"]
        assert "run ▼" in top.text()
        await top.press("s", "s", "s")
        assert "reward ▲" in top.text()
        assert names(top)[-1] == "aaa-1", "the run without a reward is not the last one"
        await top.press("s", "s", "s", "s")
        assert "▲" not in top.text()
        assert names(top) == ["ccc-1", "bbb-1", "aaa-1"]


async def test_filter_shows_only_rows_that_contain_the_text(root: Path) -> None:
    now = three_runs(root)

    async with running(now) as top:
        await top.shows("ccc-1")
        await top.press("slash", *"COMPL", "enter")
        assert names(top) == ["ccc-1"]
        await top.press("escape")
        assert names(top) == ["ccc-1", "bbb-1", "aaa-1"]
        await top.press("slash", *"nothing of this kind")
        assert "bbb-1" not in top.text()


# ── runs that cannot be read ───────────────────────────────────────────────────────────────────────────────────────
async def test_journal_of_an_older_rrl_is_named_and_hides_no_other_run(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as older:
        older.setattr("rrl.manager.storage.journal.SCHEMA", 1)
        written(Story("old-1").works(), root)
    story = allowing("new-1")
    written(story, root, 10)

    async with running(story.now, (200, 60)) as top:
        await top.shows("old-1", "unreadable: ", "new-1")
        await top.press("enter")
        await top.shows("written by an older rrl", "submit the job again")
        await top.press("r", "d", "i")
        assert "written by an older rrl" in top.text()


async def test_run_screen_reports_a_folder_that_vanished(root: Path, story: Story) -> None:
    run = written(story, root)

    async with running(story.now) as top:
        await top.shows("quick-7")
        await top.press("enter")
        await top.shows("trajectories/0")
        run.path.rename(run.path.with_name(".removed"))
        shown = await top.shows("is no longer there")
        assert "trajectories/0" not in shown
        await top.press("r", "enter", "escape")
        await top.shows("0 runs in ~/rrl-runs")


async def test_run_on_slurm_without_a_manager_is_shown_as_unknown_and_slurm_is_not_asked(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs, asked = tmp_path / "bin", tmp_path / "asked"
    programs.mkdir()
    for name in ("squeue", "scontrol", "sacct", "sinfo", "scancel"):
        (programs / name).write_text(f"#!/bin/sh\necho {name} >> {asked}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    story = Story("slurm-1", job_view(cluster="slurm")).works()
    written(story, root)
    fresh = RunDir(root / "slurm-2")
    fresh.create()
    fresh.run_spec.write_bytes((root / "slurm-1" / "run_spec.json").read_bytes())

    async with running(story.now) as top:
        await top.shows("slurm-1", "unknown", "slurm-2", "submitted")
        await top.press("slash", *"unknown", "enter", "enter")
        await top.shows("whether the roles go on is unknown", "Slurm is not asked here: rrl status slurm-1")
        await top.press("d")
        await top.shows("Drain n1?", "Nothing happens before a manager is at work")
    assert not asked.exists()


async def test_storage_that_hangs_does_not_stop_the_keys(
    root: Path, monkeypatch: pytest.MonkeyPatch, story: Story
) -> None:
    segment = written(story, root).journal / "000009-000001.seg"
    hangs, answers = threading.Event(), threading.Event()

    def opened(path: OwnPath, mode: str) -> Any:
        if path == segment:
            hangs.set()
            answers.wait()
        return Path.open(path, mode)

    monkeypatch.setattr(OwnPath, "open", opened)

    async with running(story.now) as top:
        await top.shows("quick-7")
        segment.touch()
        await top.until(hangs.is_set)
        await top.press("question_mark")
        await top.shows("Keys", "Show the keys of a screen")
        answers.set()


# ── a run ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def opened(story: Story, root: Path) -> RunDir:
    return managed(written(story, root))


@pytest.fixture
def run(story: Story, root: Path) -> RunDir:
    return opened(story, root)


async def test_run_shows_new_steps_as_they_are_recorded(story: Story, run: RunDir) -> None:

    async with running(story.now, opened=run) as top:
        await top.shows("quick-7  ● running   step 12/40", "#2  n3    generate", "on login1")
        goes_on(
            story,
            run,
            ev.StepCommitted(story.incarnation("trainer/0"), 13, {"reward": 0.5}),
            ev.VersionAvailable(story.incarnation("rollout/1"), Version(13, 1)),
        )
        await top.shows("step 13/40", "v13")


async def test_enter_opens_a_replica_and_escape_goes_back(story: Story, run: RunDir) -> None:

    async with running(story.now, opened=run) as top:
        await top.shows("trajectories/0")
        await top.press("down", "down", "down", "enter")
        shown = await top.shows("rollout/0  #2  ● generate", "phases      loading_weights → generate")
        assert "failed on n3: killed by signal 9" in shown
        await top.press("escape")
        await top.shows("Replicas", "quick-7  ● running")
        await top.press("escape")
        await top.shows("1 runs in ~/rrl-runs")


async def test_replica_shows_the_end_of_its_log_and_new_lines(story: Story, run: RunDir) -> None:
    log = run.logs / f"{run.id}.rollout-1.1.log"
    log.write_text("".join(f"2026-11-20T09:00:{n:02}.000000Z line {n}\n" for n in range(60)))

    async with running(story.now, (100, 30), run) as top:
        await top.shows("trajectories/0")
        await top.press(*LAST, "enter")
        await top.shows("rollout/1#1 line 59")
        with log.open("a") as file:
            file.write("2026-11-20T09:01:00.000000Z \x1b]0;owned\x07 a new line\n")
        shown = await top.shows("a new line")
        assert "\\x1b]0;owned" in shown, "a control sequence of a role has reached the terminal"


async def test_explanation_is_that_of_rrl_explain(story: Story, run: RunDir) -> None:

    async with running(story.now, (100, 40), run) as top:
        await top.shows("trajectories/0")
        await top.press("down", "down", "down", "e")
        await top.shows("quick-7: decisions about rollout/0", "replace rollout/0#1 on n3", "killed by signal 9")
        await top.press("escape", "E")
        await top.shows("quick-7: decisions", "start 10 processes")


# ── changes ────────────────────────────────────────────────────────────────────────────────────────────────────────
def commands(run: RunDir) -> list[Command]:
    return pending_commands(run)


async def test_restart_is_requested_only_once_it_is_confirmed(story: Story, run: RunDir) -> None:

    async with running(story.now, opened=run) as top:
        await top.shows("trajectories/0")
        await top.press(*LAST, "r")
        shown = await top.shows("Restart rollout/1?", "rrl restart quick-7 rollout/1")
        assert "rollout/1#1 on n4 is ended, and rollout/1#2 is started." in shown
        await top.press("enter")  # the focus is on the button that changes nothing
        await top.until(lambda: "Restart rollout/1?" not in top.text())
        assert commands(run) == []
        await top.press("r")
        await top.shows("Restart rollout/1?")
        await top.pilot.click("#confirm")
        await top.shows("its manager is asked to", "restart rollout/1")
    (command,) = commands(run)
    assert (command.command, command.target) == ("restart", "rollout/1")


async def test_drain_takes_a_reason_and_names_what_moves(story: Story, run: RunDir) -> None:

    async with running(story.now, opened=run) as top:
        await top.shows("trajectories/0")
        await top.press("n")
        await top.shows("in use")
        await top.press("d")
        shown = await top.shows("Drain n1?", "rrl undrain quick-7 n1 undoes it")
        assert "reward/0, trajectories/0 move to other nodes first." in shown
        assert "Spare nodes now: n5." in shown
        await top.pilot.click("#reason")
        await top.press(*"fan is loud", "enter", "enter")
        await top.shows("its manager is asked to", "drain n1")
    (command,) = commands(run)
    assert (command.command, command.target, command.reason) == ("drain", "n1", "fan is loud")


async def test_fault_is_checked_described_and_then_confirmed(story: Story, run: RunDir) -> None:

    async with running(story.now, opened=run) as top:
        await top.shows("trajectories/0")
        await top.press(*LAST, "enter")
        await top.shows("rollout/1  #1")
        await top.press("i")
        await top.shows("Inject a fault into quick-7", "rollout/1")
        await top.pilot.click("#seconds")
        await top.press(*"10s", "enter")
        await top.shows("kill is permanent: it takes no seconds")
        await top.press(*["backspace"] * 3, "enter")
        await top.shows("Inject kill rollout/1?", "rollout/1#1 on n4 gets SIGKILL", "rrl inject quick-7 kill")
        assert commands(run) == []
        await top.pilot.click("#confirm")
        await top.shows("kill rollout/1 is requested")
    (command,) = commands(run)
    assert command.fault is not None
    assert (command.fault.kind, command.fault.target) == (FaultKind.KILL, "rollout/1")


async def test_faults_are_offered_only_where_the_job_allows_them(root: Path) -> None:
    story = Story("safe-1").works()
    run = opened(story, root)

    async with running(story.now, opened=run) as top:
        await top.shows("trajectories/0", "Restart")
        assert "Inject" not in top.text()
        await top.press("i", "enter", "i")
        await top.shows("trajectories/0  #1")
        assert "Inject" not in top.text()


async def test_nothing_of_a_run_that_has_ended_can_be_changed(root: Path) -> None:
    story = completed("done-1")
    run = written(story, root)

    async with running(story.now, opened=run) as top:
        shown = await top.shows("done-1  ● completed", "restart in place on n3")
        assert "Drain" not in shown
        await top.press("r", "d", "i", "enter", "r", "d", "i")
        assert "Restart" not in await top.shows("trajectories/0  #1")
    assert commands(run) == []


async def test_request_that_fails_is_shown_with_its_reason(story: Story, run: RunDir) -> None:

    async with running(story.now, (160, 40), run) as top:
        await top.shows("trajectories/0")
        await top.press("r")
        await top.shows("Restart trajectories/0?")
        run.mailbox.rmdir()
        await top.pilot.click("#confirm")
        await top.shows("such", "file", "directory")  # words of the message, which may wrap after a long folder name


async def test_rank_of_a_gang_is_restarted_with_all_its_ranks(root: Path) -> None:
    story = gang()
    run = opened(story, root)

    async with running(story.now, opened=run) as top:
        await top.shows("trainer/0.1")
        await top.press("slash", *"trainer/0.1", "enter", "r")
        await top.shows("Restart trainer/0?", "All 2 ranks of trainer/0 are ended and started again")
        await top.shows("Training goes on from the last committed step, 12")


# ── whole sessions ─────────────────────────────────────────────────────────────────────────────────────────────────
async def test_many_replicas_are_all_listed_and_can_be_filtered(root: Path) -> None:
    story = crowded()
    run = opened(story, root)

    async with running(story.now, opened=run) as top:
        await top.shows("trajectories/0")
        assert len(names(top)) == 43
        await top.press("slash", *"dead", "enter")
        assert names(top) == ["rollout/17"]
        await top.press("enter")
        await top.shows("rollout/17  #1  ● dead", "FAIL process ended", "step: its step ended by signal 9")
