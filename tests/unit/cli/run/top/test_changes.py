"""The changes by ``rrl top`` have the effects that its confirmations announce."""

from __future__ import annotations

from pathlib import Path

import pytest

from rrl.api.watching.runs_watcher import RunsWatcher, WatchedRun
from rrl.cli.run.top.changes import drain_of, injection_of, restart_of
from rrl.core.faults import Fault, FaultKind
from rrl.core.run_dir import RUNS_ENV
from rrl.core.types import NodeName, OperationFailed, ReplicaId, UsageError
from rrl.tests.support.cli.status_scenes import gang
from rrl.tests.support.cli.story import Story, job_view
from rrl.tests.support.cli.top import allowing, managed


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(RUNS_ENV, str(tmp_path))
    return tmp_path


def watched(story: Story, root: Path) -> WatchedRun:
    managed(story.written(root))
    (found,) = RunsWatcher(now=lambda: story.now).poll()
    return found


def test_restart_of_a_replica_without_a_process_is_described_as_a_start(root: Path) -> None:
    story = allowing()
    story.loses("rollout/1")
    story.fences("rollout/1")
    change = restart_of(watched(story, root), story.recorded(), ReplicaId("rollout/1"))
    assert change.effects == ("No process of rollout/1 runs now; a new one is started.",)


def test_drain_on_slurm_concerns_every_user_and_moves_a_whole_gang(root: Path) -> None:
    story = gang()
    run = watched(story, root)
    change = drain_of(run, story.recorded(), NodeName("n2"))
    assert "trainer/0 moves to other nodes first." in change.effects
    assert "trainer/0 restarts with all its ranks." in change.effects
    assert "Then the run no longer uses n2, a virtual node of this machine." in change.effects
    slurm = Story("slurm-1", job_view(cluster="slurm")).works()
    effects = drain_of(run, slurm.recorded(), NodeName("n5")).effects
    assert effects[0] == "No replica runs on n5: nothing has to move."
    assert "The run has no spare node now." in effects
    assert "Then n5 is drained in Slurm, for every user, and the run no longer uses it." in effects


@pytest.mark.parametrize(
    ("fault", "effect", "words"),
    [
        (
            Fault("i1", FaultKind.FREEZE, "rollout/1", seconds=10.0),
            "It ends by itself after 10 s.",
            "inject quick-7 freeze --target rollout/1 --for 10s",
        ),
        (
            Fault("i1", FaultKind.FREEZE, "rollout/1"),
            "It does not end by itself.",
            "inject quick-7 freeze --target rollout/1",
        ),
        (
            Fault("i1", FaultKind.EXIT, "reward/0", amount=3.0),
            "reward/0#1 on n1 exits with code 3.",
            "inject quick-7 exit --target reward/0 --amount 3",
        ),
        (
            Fault("i1", FaultKind.CRASH, "rollout/1"),
            "The node n4 (of rollout/1) is lost, with everything on it.",
            "inject quick-7 crash --target rollout/1",
        ),
        (
            Fault("i1", FaultKind.CRASH, "n5"),
            "The node n5 is lost, with everything on it.",
            "inject quick-7 crash --target n5",
        ),
        (
            Fault("i1", FaultKind.DISK_FULL, seconds=2.0),
            "The file system of the run directory is filled up.",
            "inject quick-7 disk_full --for 2s",
        ),
    ],
)
def test_fault_is_described_with_its_target_and_its_command(root: Path, fault: Fault, effect: str, words: str) -> None:
    story = allowing()
    change = injection_of(watched(story, root), story.recorded(), fault)
    assert effect in change.effects
    assert change.command == f"rrl {words}"


def test_request_that_the_run_rejects_meanwhile_is_an_error(root: Path) -> None:
    story = Story("safe-1").works()
    run, fault = watched(story, root), Fault("i1", FaultKind.KILL, "rollout/1")
    with pytest.raises(UsageError, match="allows no faults on demand"):
        injection_of(run, story.recorded(), fault).request("")
    with pytest.raises(UsageError, match='no node "n99" in this run'):
        drain_of(run, story.recorded(), NodeName("n99")).request("")


def test_request_that_cannot_be_written_is_an_error(root: Path) -> None:
    story = allowing()
    run = watched(story, root)
    run.run.mailbox.rmdir()
    with pytest.raises(OperationFailed, match="No such file or directory"):
        restart_of(run, story.recorded(), ReplicaId("rollout/1")).request("")


def test_run_outside_of_the_folder_of_runs_is_named_by_its_path(root: Path, tmp_path: Path) -> None:
    story = allowing()
    elsewhere = managed(story.written(tmp_path / "other"))
    (found,) = RunsWatcher(elsewhere, lambda: story.now).poll()
    change = restart_of(found, story.recorded(), ReplicaId("rollout/1"))
    assert change.command == f"rrl restart {elsewhere.path} rollout/1"
