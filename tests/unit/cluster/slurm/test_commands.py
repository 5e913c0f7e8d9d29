"""Slurm's commands: their environment, deadlines, and budget of reads.

Other tests are about the errors that mean "certainly not done".
"""

from __future__ import annotations

import asyncio
import os
import sys

import pytest

from rrl.cluster.base import Refused, Unanswered
from rrl.cluster.slurm import commands
from rrl.cluster.slurm.commands import (
    Budget,
    NoCluster,
    environment,
    execute,
    failure,
    lacks_free_nodes,
    lacks_node,
    rejects_job,
    task_exit_code,
    update_refused,
)
from rrl.core.command_runner import CommandResult

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


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("srun: error: n1: task 0: Exited with exit code 2\n", 2),
        ("srun: error: n1: task 0: Exited with exit code 127\nsrun: Terminating StepId=7.1\n", 127),
        ("srun: error: Unable to create step for job 7: Requested nodes are busy\n", None),
        ("", None),
    ],
)
def test_exit_code_of_a_task_is_read_from_sruns_errors(text: str, code: int | None) -> None:
    assert task_exit_code(text) == code


def test_answer_of_slurm_is_not_taken_for_a_lost_one() -> None:
    lost = "slurm_update error: Unable to contact slurm controller (connect failure)"
    refused = stderr_of("slurm_update error: Invalid node state specified")
    assert (update_refused(refused), update_refused(stderr_of(lost))) == (True, False)
    busy = "salloc: error: Unable to allocate resources: Requested nodes are busy"
    late = "salloc: error: Unable to allocate resources: Socket timed out on send/recv operation"
    assert (lacks_free_nodes(stderr_of(busy)), lacks_free_nodes(stderr_of(late))) == (True, False)
    unknown = CommandResult(1, "NodeName=n1 State=IDLE\nNode n9 not found\n", "")
    known = CommandResult(0, "NodeName=n1 Reason=cable not found [root]\n", "")
    assert (lacks_node(unknown), lacks_node(known)) == (True, False)
    unfit = stderr_of("allocation failure: Requested node configuration is not available")
    assert (rejects_job(unfit), rejects_job(stderr_of("allocation failure: Socket timed out"))) == (True, False)


def test_environment_drops_job_variables_and_keeps_slurm_conf() -> None:
    given = {
        "SLURM_CONF": "/c",
        "SLURM_JOB_ID": "7",
        "SBATCH_PARTITION": "p",
        "SQUEUE_FORMAT": "%i",
        "SRUN_X": "1",
        "PMIX_RANK": "0",
        "PATH": "/bin",
        "SLURMISH": "kept",
        "LC_ALL": "de_DE",
    }
    assert environment(given) == {"SLURM_CONF": "/c", "PATH": "/bin", "SLURMISH": "kept", "LC_ALL": "C"}


def test_command_beyond_its_deadline_is_unanswered() -> None:
    with pytest.raises(Unanswered, match=r"sleep: no answer within 0\.1 s"):
        asyncio.run(execute(("sleep", "1000"), timeout_s=0.1))


def test_output_beyond_the_limit_is_unanswered(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(*_: object, **__: object) -> CommandResult:
        return CommandResult(0, "half of a list", "", truncated=True)

    monkeypatch.setattr(commands, "run_async", answer)
    with pytest.raises(Unanswered, match="squeue: more than 64 MiB were printed"):
        asyncio.run(execute(("squeue",), timeout_s=10.0))


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
    assert sum(budget.spend(3) for _ in range(20)) == 6  # unused calls add up to at most the share of one minute
    budget.share(0)  # no manager is listed, not even this one
    assert budget.per_minute == 60
