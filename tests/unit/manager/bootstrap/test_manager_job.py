"""The manager's own Slurm jobs, the queue of successors, and the supervisor of a manager in a pool.

The tests in tests/integration/slurm use a real Slurm.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rrl.config.job.load import load_job
from rrl.config.job.resolve import resolve
from rrl.config.job.schema import Job
from rrl.core.run_dir import RUNS_ENV, RunDir
from rrl.core.run_spec import RunSpec
from rrl.manager.bootstrap import manager_job, pool_supervisor
from rrl.manager.bootstrap import start as starting
from rrl.manager.storage import lease
from rrl.manager.storage.journal import JournalError
from rrl.tests.support.cli.story import Story, completed
from rrl.tests.support.job_toml import JOB

RUN = "small-7"


def run_spec(tmp_path: Path, extra: str = "", cluster: str = "") -> RunSpec:
    path = tmp_path / "job.toml"
    path.write_text(JOB.replace('"local"', f'"slurm"\n{cluster}') + extra)
    return resolve(load_job(path), "python")


def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> Path:
    """Install shell scripts as Slurm's commands; return a file that gets one line for each call."""
    log = tmp_path / "log"
    log.touch()
    for name, script in scripts.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'#!/bin/sh\necho "{name} $*" >> {log}\n{script}\n')
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    return log


def test_manager_jobs_share_a_name_run_one_at_a_time_and_are_not_requeued(tmp_path: Path) -> None:
    extra = '[slurm]\npartition = "gpu"\naccount = "a"\n[manager]\nslurm = { partition = "cpu", exclusive = true }\n'
    job = manager_job.parameters(RUN, run_spec(tmp_path, extra))
    assert (job["job_name"], job["dependency"]) == (f"{RUN}.manager", "singleton")
    passed = {"no-requeue": True, "partition": "cpu", "account": "a", "exclusive": True}
    assert job["additional_parameters"] == passed
    assert job["time"] == (86400 + manager_job.WALLTIME_MARGIN_S) // 60
    delayed = manager_job.parameters(RUN, run_spec(tmp_path, extra), 60)
    assert delayed["additional_parameters"] == {**passed, "begin": "now+60"}


def test_walltime_limit_below_the_run_makes_managers_and_pools_follow_each_other(tmp_path: Path) -> None:
    small = run_spec(tmp_path, cluster='walltime = "3d"\njob_walltime = "1d"')
    assert (small.walltime, {node_group.walltime for node_group in small.node_groups}) == (3 * 86400.0, {86400.0})
    assert manager_job.parameters(RUN, small)["time"] == 1440
    short = run_spec(tmp_path, cluster='walltime = "3d"\njob_walltime = "5min"')
    assert manager_job.parameters(RUN, short)["time"] == manager_job.MIN_WALLTIME_S // 60


def test_pool_script_with_manager_adds_one_exec_line(tmp_path: Path) -> None:
    text = manager_job.pool_script(RUN, run_spec(tmp_path, '[manager]\nwhere = "pool"\n'), "/runs/small-7")
    assert f"#SBATCH --job-name={RUN}.pool\n" in text
    assert "#SBATCH --output=/runs/small-7/submit/pool.log\n" in text
    assert text.splitlines()[-1].endswith(" -P -m rrl.manager.bootstrap.pool_supervisor /runs/small-7")


def test_manager_in_pool_finds_its_allocation_by_the_name_of_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, job = run_spec(tmp_path, '[manager]\nwhere = "pool"\n'), run_spec(tmp_path)
    monkeypatch.setenv("SLURM_JOB_NAME", f"{RUN}.pool")
    assert manager_job.own_allocation_tag(RUN, pool) == f"{RUN}.pool"
    assert manager_job.own_allocation_tag(RUN, job) == ""
    monkeypatch.setenv("SLURM_JOB_NAME", "bash")  # a manager that was started by hand in an interactive job
    assert manager_job.own_allocation_tag(RUN, pool) == ""


def ensure_successor(run: RunDir, job: RunSpec, queued: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(run: RunDir, spec: RunSpec, manage: object, delay_s: int) -> None:
        assert delay_s == manager_job.SUCCESSOR_DELAY_S
        queued()

    monkeypatch.setattr(manager_job, "QUEUE_RETRY_S", 0.0)
    monkeypatch.setattr(manager_job, "submit", submit)
    asyncio.run(manager_job.ensure_successor(run, job, lambda run: None))


@pytest.mark.parametrize(("waiting", "queued"), [("", 1), ("echo 77", 0)])
def test_manager_queues_a_successor_unless_one_is_pending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waiting: str, queued: int
) -> None:
    log = commands(tmp_path, monkeypatch, squeue=waiting)
    monkeypatch.setenv("SLURM_JOB_NAME", f"{RUN}.manager")
    submissions: list[None] = []
    ensure_successor(RunDir(tmp_path / RUN), run_spec(tmp_path), lambda: submissions.append(None), monkeypatch)
    assert len(submissions) == queued
    assert log.read_text() == f"squeue --me -h --name={RUN}.manager -o %A -t PENDING\n"


def test_succession_that_is_cancelled_during_a_submission_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands(tmp_path, monkeypatch, squeue="")
    monkeypatch.setenv("SLURM_JOB_NAME", f"{RUN}.manager")
    submitting, accepted, queued = threading.Event(), threading.Event(), threading.Event()

    def submit(run: RunDir, spec: RunSpec, manage: object, delay_s: int) -> None:
        submitting.set()
        assert accepted.wait(60.0)
        queued.set()

    async def end_of_the_run() -> None:
        run, job = RunDir(tmp_path / RUN), run_spec(tmp_path)
        succession = asyncio.create_task(manager_job.ensure_successor(run, job, lambda run: None))
        await asyncio.to_thread(submitting.wait, 60.0)
        succession.cancel()
        asyncio.get_running_loop().call_later(0.1, accepted.set)
        await asyncio.gather(succession, return_exceptions=True)
        assert queued.is_set()

    monkeypatch.setattr(manager_job, "submit", submit)
    asyncio.run(end_of_the_run())


@pytest.mark.parametrize("lost", ["squeue", "sbatch"])
def test_unanswered_squeue_is_repeated_before_a_successor_is_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lost: str
) -> None:
    fails_once = f"[ -e {tmp_path}/asked ] || {{ touch {tmp_path}/asked; echo Socket timed out >&2; exit 1; }}"
    commands(tmp_path, monkeypatch, squeue=fails_once if lost == "squeue" else "")
    monkeypatch.setenv("SLURM_JOB_NAME", f"{RUN}.manager")
    submissions: list[None] = []

    def queued() -> None:
        submissions.append(None)
        if lost == "sbatch" and len(submissions) == 1:
            raise RuntimeError("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation")

    ensure_successor(RunDir(tmp_path / RUN), run_spec(tmp_path), queued, monkeypatch)
    assert len(submissions) == (1 if lost == "squeue" else 2)
    assert not caplog.records


def test_manager_outside_of_a_job_queues_no_successor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = commands(tmp_path, monkeypatch, squeue="")
    monkeypatch.delenv("SLURM_JOB_NAME", raising=False)
    ensure_successor(
        RunDir(tmp_path / RUN), run_spec(tmp_path), lambda: pytest.fail("a successor was queued"), monkeypatch
    )
    assert log.read_text() == ""


def test_forbidden_submission_from_a_job_is_logged_as_no_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def forbidden() -> None:
        raise RuntimeError("sbatch: error: Access/permission denied")

    commands(tmp_path, monkeypatch, squeue="")
    monkeypatch.setenv("SLURM_JOB_NAME", f"{RUN}.manager")
    ensure_successor(RunDir(tmp_path / RUN), run_spec(tmp_path), forbidden, monkeypatch)
    warning = caplog.text
    assert "cannot queue the next manager's job: sbatch: error: Access/permission denied" in warning
    assert f"rrl manage {RUN}" in warning


def test_pending_manager_is_cancelled_and_a_running_one_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = commands(tmp_path, monkeypatch, scancel="", squeue="echo 77")
    assert asyncio.run(manager_job.cancel_pending(RUN, run_spec(tmp_path))) == ""
    assert log.read_text() == f"scancel --state=PENDING --name={RUN}.manager\n"
    assert not asyncio.run(manager_job.none_pending(RUN, run_spec(tmp_path))), "a pending manager was not found"
    commands(tmp_path, monkeypatch, scancel="", squeue="")
    assert asyncio.run(manager_job.none_pending(RUN, run_spec(tmp_path)))
    commands(tmp_path, monkeypatch, scancel="echo no >&2; exit 1")
    assert asyncio.run(manager_job.cancel_pending(RUN, run_spec(tmp_path))) == "scancel: no"


def test_submission_from_within_a_job_ignores_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SBATCH_PARTITION", "gpu")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    with manager_job._outside_of_a_job():
        assert {"SLURM_JOB_ID", "SBATCH_PARTITION"}.isdisjoint(os.environ)
        assert os.environ["SLURM_CONF"] == "/etc/slurm.conf"
    assert os.environ["SLURM_JOB_ID"] == "7"


def test_unqueued_second_manager_gives_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [None, RuntimeError("AssocMaxSubmitJobLimit")]

    def queue(run: RunDir, spec: RunSpec, manage: Callable[[RunDir], object]) -> None:
        if isinstance(answer := answers.pop(0), Exception):
            raise answer

    monkeypatch.setattr(manager_job, "submit", queue)
    warning = starting.start_manager(RunDir(tmp_path / RUN), run_spec(tmp_path))
    assert warning.startswith("cannot queue a second manager")
    assert warning.endswith(": AssocMaxSubmitJobLimit")


def created_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """Create a local run without a manager."""
    monkeypatch.setenv(RUNS_ENV, str(tmp_path / "runs"))
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    job: Job = load_job(path)
    return starting.create(job, resolve(job, "python"), path)


def test_manager_that_finds_the_lease_held_queues_no_successor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a successor would find the lease held, too, and would queue the next one, and so on."""
    queued: list[None] = []

    async def ensure_successor(run: RunDir, spec: RunSpec, manage: object) -> None:
        queued.append(None)

    run = created_run(tmp_path, monkeypatch)
    monkeypatch.setattr(lease, "_newest", lambda run: 0)
    asyncio.run(lease.Lease.acquire(run, 1.0))
    monkeypatch.setattr(manager_job, "ensure_successor", ensure_successor)
    with pytest.raises(lease.LeaseHeld):
        starting.run_manager(run)
    assert queued == []


def test_manager_that_starts_after_the_end_exits_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = created_run(tmp_path, monkeypatch)
    for segment in completed(run.id).written(tmp_path / "other").journal.iterdir():
        (run.journal / segment.name).write_bytes(segment.read_bytes())
    before = sorted(os.listdir(run.path / "journal"))
    assert starting.run_manager(run) is None
    assert sorted(os.listdir(run.path / "journal")) == before
    assert os.listdir(run.epochs) == []


def test_pool_supervisor_restarts_managers_until_the_run_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    story = Story(RUN).works()
    run = story.written(tmp_path)
    calls: list[list[str]] = []

    def call(argv: list[str]) -> int:
        calls.append(argv)
        if len(calls) == 3:
            completed(RUN).written(tmp_path / "other")
            for segment in (tmp_path / "other" / RUN / "journal").iterdir():
                (run.journal / segment.name).write_bytes(segment.read_bytes())
            return 0
        return -9

    monkeypatch.setattr("subprocess.call", call)
    monkeypatch.setattr(pool_supervisor, "RESTART_DELAY_S", 0.0)
    monkeypatch.setattr("sys.argv", ["pool_supervisor", str(run.path)])
    assert pool_supervisor.main() == 0
    assert len(calls) == 3
    assert calls[0][-1] == str(run.path)
    assert caplog.text.count("the manager exited with code -9 before the run ended") == 2
    assert pool_supervisor.main() == 0
    assert len(calls) == 3, "a manager was started for a run that has ended"


def test_pool_supervisor_keeps_nodes_while_the_journal_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = Story(RUN).works().written(tmp_path)
    answers: list[bool | Exception] = [JournalError("torn"), OSError(116, "Stale file handle"), True]

    def ended(run: RunDir) -> bool:
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return answer

    monkeypatch.setattr(pool_supervisor, "run_ended", ended)
    monkeypatch.setattr(pool_supervisor, "RESTART_DELAY_S", 0.0)
    monkeypatch.setattr("subprocess.call", lambda argv: 1)
    monkeypatch.setattr("sys.argv", ["pool_supervisor", str(run.path)])
    assert pool_supervisor.main() == 0
    assert [record.message for record in caplog.records][:2] == ["torn", "[Errno 116] Stale file handle"]


def test_pool_supervisor_ends_after_the_run_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def call(argv: list[str]) -> int:
        calls.append(argv)
        assert len(calls) <= pool_supervisor.MAX_FUTILE_STARTS, "the supervisor holds the pool of a removed run"
        return 1

    monkeypatch.setattr("subprocess.call", call)
    monkeypatch.setattr(pool_supervisor, "RESTART_DELAY_S", 0.0)
    monkeypatch.setattr("sys.argv", ["pool_supervisor", str(tmp_path / "removed")])
    assert pool_supervisor.main() == 1
    assert len(calls) == pool_supervisor.MAX_FUTILE_STARTS
