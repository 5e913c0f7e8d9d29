"""Slurm's commands: which errors mean "certainly not done", the environment, deadlines, and the budget of reads."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

from rrl.manager.cluster.base import Refused, Unanswered
from rrl.manager.cluster.slurm.commands import (  # fmt: skip
    Budget,
    CommandResult,
    NoCluster,
    environment,
    execute,
    failure,
)

REFUSALS = """\
sbatch: error: invalid partition specified: nope / sbatch: error: Batch job submission failed: Invalid partition name specified
sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified
sbatch: error: Batch job submission failed: Requested node configuration is not available
sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)
salloc: error: Job submit/allocate failed: Invalid feature specification
sbatch: error: Invalid generic resource (gres) specification
sbatch: unrecognized option '--badopt'
sbatch: error: Invalid --time specification
srun: error: Unable to confirm allocation for job 9: Invalid job id specified
srun: error: Unable to confirm allocation for job 34: Job is pending execution
srun: error: Unable to create step for job 33: Memory required by task is not available
srun: error: Unable to create step for job 1: Requested nodes are busy
"""  # noqa: E501
UNKNOWN_RESULTS = """\
sbatch: error: Batch job submission failed: Socket timed out on send/recv operation
sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)
sbatch: error: Batch job submission failed: Zero Bytes were transmitted or received
sbatch: error: Batch job submission failed: Unspecified error
srun: error: Unable to confirm allocation for job 5: Socket timed out on send/recv operation / srun: Check SLURM_JOB_ID environment variable. Expired or invalid job 5
salloc: error: Job submit/allocate failed: Socket timed out on send/recv operation
sbatch: error: Batch job submission failed: Resource temporarily unavailable
salloc: error: Job submit/allocate failed: Slurm temporarily unable to accept job, sleeping and retrying
slurm_load_jobs error: Unable to contact slurm controller (connect failure)
scancel: error: Kill job error on job id 5: Socket timed out on send/recv operation
a message that is not known
"""  # noqa: E501


def stderr_of(text: str) -> CommandResult:
    return CommandResult(1, "", text.replace(" / ", "\n") + "\n")


@pytest.mark.parametrize("line", REFUSALS.splitlines())
def test_known_rejections_of_slurm_are_refused(line: str) -> None:
    assert isinstance(failure("x", stderr_of(line)), Refused)


@pytest.mark.parametrize("line", UNKNOWN_RESULTS.splitlines())
def test_lost_answer_or_unknown_text_is_unanswered(line: str) -> None:
    assert isinstance(failure("x", stderr_of(line)), Unanswered)


def test_missing_configuration_is_reported_as_no_cluster() -> None:
    text = "sinfo: fatal: Could not establish a configuration source"
    assert isinstance(failure("sinfo", stderr_of(text)), NoCluster)
    assert not any(isinstance(failure("x", stderr_of(line)), NoCluster) for line in UNKNOWN_RESULTS.splitlines())


def test_environment_drops_job_variables_and_keeps_slurm_conf() -> None:
    given = {"SLURM_CONF": "/c", "SLURM_JOB_ID": "7", "SBATCH_PARTITION": "p", "SQUEUE_FORMAT": "%i", "SRUN_X": "1",
             "PMIX_RANK": "0", "PATH": "/bin", "SLURMISH": "kept", "LC_ALL": "de_DE"}  # fmt: skip
    assert environment(given) == {"SLURM_CONF": "/c", "PATH": "/bin", "SLURMISH": "kept", "LC_ALL": "C"}


def test_command_beyond_its_deadline_is_killed_with_its_children(tmp_path: Path) -> None:
    code = ("import os, subprocess, sys; p = subprocess.Popen(['sleep', '1000']);"
            "open(sys.argv[1], 'w').write(f'{os.getpid()} {p.pid}'); p.wait()")  # fmt: skip
    pids = tmp_path / "pids"
    with pytest.raises(Unanswered, match="no answer within"):
        asyncio.run(execute((sys.executable, "-c", code, str(pids)), timeout_s=2.0))
    left, deadline = [int(pid) for pid in pids.read_text().split()], time.monotonic() + 20.0
    while left := [pid for pid in left if _is_alive(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_cancellation_as_the_command_ends_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    class FakeProcess:
        returncode = 0

        def __init__(self) -> None:
            self.ended: asyncio.Future[tuple[bytes, bytes]] = asyncio.get_running_loop().create_future()

        async def communicate(self, given: bytes) -> tuple[bytes, bytes]:
            return await self.ended

    async def cancel_after(turns: int) -> None:
        command = FakeProcess()

        async def start(*argv: str, **how: object) -> FakeProcess:
            return command

        async def execute_repeatedly() -> None:
            while True:
                await execute(("squeue",), 10.0)
                command.ended = asyncio.get_running_loop().create_future()

        monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
        task = asyncio.create_task(execute_repeatedly())
        for _ in range(5):
            await asyncio.sleep(0)
        command.ended.set_result((b"", b""))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        for _ in range(20):
            await asyncio.sleep(0)
        assert task.cancelled(), turns

    for turns in range(4):
        asyncio.run(cancel_after(turns))


def test_missing_command_is_refused() -> None:
    with pytest.raises(Refused, match="cannot be started"):
        asyncio.run(execute((f"{os.getpid()}-no-such-command",), timeout_s=5.0))


def test_command_result_has_output_errors_and_exit_code() -> None:
    code = "import sys; print(sys.stdin.read()); print('e', file=sys.stderr); sys.exit(3)"
    ended = asyncio.run(execute((sys.executable, "-c", code), 20.0, "given"))
    assert (ended.code, ended.out, ended.err) == (3, "given\n", "e\n")


def test_budget_refills_steadily_and_actions_read_on_credit() -> None:
    now = 0.0
    budget = Budget(6, clock=lambda: now)
    assert budget.spend(3)
    assert budget.spend(3)
    assert not budget.spend(3)
    now = 29.0
    assert not budget.spend(3)
    now = 30.0
    assert budget.spend(3)
    assert budget.spend(2, credit=True)
    now = 70.0  # 4 refilled, 2 owed
    assert not budget.spend(3)
    now = 80.0
    assert budget.spend(3)


def test_managers_of_a_user_share_one_budget_by_their_number() -> None:
    now = 0.0
    budget = Budget(60, clock=lambda: now)
    budget.share(3)
    assert budget.per_minute == 20
    assert sum(budget.spend(3) for _ in range(20)) == 6
    now = 60.0
    assert sum(budget.spend(3) for _ in range(20)) == 6  # never more than a minute's share
    budget.share(0)  # nobody is seen, not even we ourselves
    assert budget.per_minute == 60
