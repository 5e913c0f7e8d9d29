"""The reports of ``rrl status`` and ``rrl list`` about a run on Slurm whose manager no longer renews its lease."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import msgspec
import pytest

from rrl.api.watching.manager_liveness import INTERRUPTED, UNATTENDED, UNKNOWN, SlurmJobs, judge
from rrl.api.watching.run_state import listed_states
from rrl.cli import main
from rrl.cluster.base import AllocationState
from rrl.cluster.slurm.parsing import Job
from rrl.core.run_dir import RunDir
from rrl.core.types import Outcome
from rrl.manager.model.actions import Finish, Why
from rrl.manager.model.events import Decided
from rrl.manager.storage.lease import LeaseHolder
from rrl.tests.support.cli.story import Story, completed, job_view

RUN = "small-1"
GONE = "no manager is running"


class Squeue:
    """A squeue command on PATH that prints a given output, and counts its calls."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._calls, self._output = folder / "calls", folder / "output"
        (folder / "bin").mkdir()
        command = folder / "bin" / "squeue"
        command.write_text(f"#!/bin/sh\necho call >> {self._calls}\ncat {self._output} || exit 1\n")
        command.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
        self.prints("")

    def prints(self, output: str) -> None:
        self._output.write_text(output)

    def breaks(self) -> None:
        self._output.unlink()

    @property
    def calls(self) -> int:
        return len(self._calls.read_text().splitlines()) if self._calls.exists() else 0


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Squeue:
    return Squeue(tmp_path, monkeypatch)


def on_slurm(root: Path, run: str = RUN) -> RunDir:
    return Story(run, job=job_view(cluster="slurm")).works().written(root)


def held(run: RunDir, age_s: float) -> None:
    """Write the lease of a manager on another host, as renewed ``age_s`` seconds ago."""
    lease = run.epochs / "000001"
    lease.write_bytes(msgspec.json.encode(LeaseHolder("elsewhere", 7, 3)))
    os.utime(lease, (time.time() - age_s,) * 2)


def job(name: str, state: AllocationState = AllocationState.RUNNING, detail: str = "RUNNING") -> Job:
    return Job("12", state, (), f"{RUN}.{name}", detail, f"rrl {RUN} {name}")


def test_run_without_any_slurm_job_is_interrupted_with_the_command_to_continue() -> None:
    found = judge(Story(RUN, job=job_view(cluster="slurm")).works().recorded(), GONE, SlurmJobs())
    assert (found.standing, found.advice) == (INTERRUPTED, f"rrl manage {RUN} goes on from step 12")


@pytest.mark.parametrize("slurm", [None, SlurmJobs(), SlurmJobs((job("pool"),))], ids=["local", "no job", "nodes"])
def test_run_whose_end_was_decided_does_not_go_on(slurm: SlurmJobs | None) -> None:
    story = Story(RUN, job=job_view(cluster="slurm")).works()
    story.record(Decided(Finish(Outcome.FAILED, Why(("the trainer failed",)))))
    assert f"; the run was ending (failed); rrl manage {RUN} ends it" in str(judge(story.recorded(), GONE, slurm))
    assert "go on" not in str(judge(story.recorded(), GONE, slurm))


def test_run_with_nodes_and_no_manager_job_is_unattended() -> None:
    found = judge(Story(RUN).works().recorded(), GONE, SlurmJobs((job("pool"),)))
    assert (found.standing, str(found)) == (UNATTENDED, f"{GONE}; the roles go on; start one: rrl manage {RUN}")


def test_job_of_another_run_with_the_same_name_prefix_does_not_count() -> None:
    other = Job("12", AllocationState.RUNNING, (), f"{RUN}0.pool", "RUNNING", f"rrl {RUN}0 {RUN}0.pool")
    assert judge(Story(RUN).works().recorded(), GONE, SlurmJobs((other,))).standing == INTERRUPTED


def test_a_manager_that_waits_in_the_queue_is_named_with_slurms_reason() -> None:
    waiting = job("manager", AllocationState.PENDING, "PENDING: Priority")
    found = judge(Story(RUN).works().recorded(), GONE, SlurmJobs((job("pool"), waiting)))
    assert found.advice == "the next manager waits in Slurm's queue: job 12 (PENDING: Priority)"
    assert found.standing == UNATTENDED
    alone = judge(Story(RUN).works().recorded(), GONE, SlurmJobs((waiting,)))
    assert (alone.note, alone.standing) == (f"{GONE}; no nodes are held", UNATTENDED)


def test_a_run_whose_manager_job_runs_is_not_called_unattended() -> None:
    found = judge(Story(RUN).works().recorded(), "silent for 40 s", SlurmJobs((job("pool"), job("manager"))))
    assert (found.standing, found.advice) == ("", "its job 12 is running")


def test_status_and_list_of_a_local_run_without_a_manager_say_unattended(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Story(RUN).works().written(root)
    assert main.run(["status"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{RUN}  ● unattended   step 12/40")
    assert "manager     no manager is running; the roles go on\n" in shown
    assert f"\n            start one: rrl manage {RUN}\n" in shown, "the command is not on a line of its own"
    assert main.run(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["standing"] == UNATTENDED
    assert main.run(["list"]) == 0
    assert "unattended" in capsys.readouterr().out


def test_time_that_a_run_took_ends_with_its_last_record_while_no_manager_works(root: Path) -> None:
    story = Story(RUN).works()
    (listed,) = listed_states([story.written(root)])
    assert listed.run_seconds == round(story.recorded().run_seconds(story.recorded().at), 2)


def test_manager_liveness_is_unknown_if_slurm_does_not_answer() -> None:
    found = judge(Story(RUN).works().recorded(), GONE, SlurmJobs(unknown="squeue: no answer within 5 s"))
    assert found.standing == UNKNOWN
    assert "squeue: no answer within 5 s" in found.advice


def test_status_and_list_of_a_run_without_any_job_say_interrupted(
    root: Path, squeue: Squeue, capsys: pytest.CaptureFixture[str]
) -> None:
    on_slurm(root)
    assert main.run(["status"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{RUN}  ● interrupted   step 12/40")
    assert f"rrl manage {RUN} goes on from step 12" in shown
    assert main.run(["list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["standing"] == INTERRUPTED
    assert main.run(["status", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["standing"], shown["step"]) == (INTERRUPTED, 12)
    assert f"rrl manage {RUN} goes on from step 12" in shown["note"]


def test_status_and_list_say_unknown_where_squeue_fails(
    root: Path, squeue: Squeue, capsys: pytest.CaptureFixture[str]
) -> None:
    on_slurm(root)
    squeue.breaks()
    assert main.run(["status"]) == 0
    assert capsys.readouterr().out.startswith(f"{RUN}  ● unknown   step 12/40")
    assert main.run(["list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["standing"] == UNKNOWN


def test_squeue_is_called_once_for_a_list_and_never_for_ended_or_renewed_runs(root: Path, squeue: Squeue) -> None:
    for index in range(3):
        on_slurm(root, f"lost-{index}")
    assert main.run(["list"]) == 0
    assert squeue.calls == 1
    held(on_slurm(root, "alive-1"), age_s=1.0)
    completed("done-1").written(root)
    assert main.run(["status", "alive-1"]) == 0
    assert main.run(["status", "done-1"]) == 0
    assert squeue.calls == 1
    held(RunDir(root / "alive-1"), age_s=3600.0)
    assert main.run(["status", "alive-1"]) == 0
    assert squeue.calls == 2
