"""Which refusals and pending reasons of Slurm somebody has to change the request for; the others may be lifted."""

from __future__ import annotations

import pytest

from rrl.cluster.base import Refused, RefusedForNow, RejectReason
from rrl.cluster.slurm.commands import failure
from rrl.cluster.slurm.refusals import never_clears
from rrl.core.command_runner import CommandResult

_SUBMIT = "sbatch: error: Batch job submission failed: "
_POLICY = f"{_SUBMIT}Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
FINAL = f"""\
sbatch: error: invalid partition specified: nope / {_SUBMIT}Invalid partition name specified
{_SUBMIT}Invalid account or account/partition combination specified
{_SUBMIT}Invalid qos specification
{_SUBMIT}Invalid feature specification
{_SUBMIT}Invalid license specification
{_SUBMIT}Invalid node name specified
{_SUBMIT}Node count specification invalid
{_SUBMIT}Requested time limit is invalid (missing or exceeds some limit)
{_SUBMIT}Requested reservation is invalid
{_SUBMIT}Access denied to requested reservation
{_SUBMIT}User's group not permitted to use this partition
{_SUBMIT}Access/permission denied
sbatch: error: Memory specification can not be satisfied / {_SUBMIT}Requested node configuration is not available
sbatch: error: AssocMaxWallDurationPerJobLimit / {_POLICY}
sbatch: error: QOSMaxNodePerJobLimit / {_POLICY}
sbatch: error: QOSMinCpuNotSatisfied / {_POLICY}
sbatch: unrecognized option '--badopt'
sbatch: error: Invalid --time specification
sbatch: error: Invalid generic resource (gres) specification
srun: error: Unable to create step for job 7: More processors requested than permitted
srun: error: Unable to create step for job 7: Job/step already completing or completed
srun: error: Unable to confirm allocation for job 9: Invalid job id specified
"""
LIFTED = f"""\
sbatch: error: AssocMaxSubmitJobLimit / {_POLICY}
sbatch: error: AssocGrpSubmitJobsLimit / {_POLICY}
sbatch: error: QOSMaxSubmitJobPerUserLimit / {_POLICY}
sbatch: error: QOSMaxCpuPerUserLimit / {_POLICY}
salloc: error: AssocMaxSubmitJobLimit / salloc: error: Job submit/allocate failed: Job violates accounting/QOS policy
{_POLICY}
{_SUBMIT}Required partition not available (inactive or drain)
{_SUBMIT}Partition in DOWN state
{_SUBMIT}Licenses currently unavailable
{_SUBMIT}Requested reservation not usable now
{_SUBMIT}Requested account has breached requested QOS usage threshold
{_SUBMIT}MaxJobCount limit reached
{_SUBMIT}System submissions disabled
{_SUBMIT}Rate limit exceeded, please retry later
{_SUBMIT}Required node not available (down, drained or reserved)
{_SUBMIT}Invalid authentication credential
{_SUBMIT}a reason of a version that nobody here has run
srun: error: Unable to create step for job 33: Memory required by task is not available
srun: error: Unable to create step for job 1: Requested nodes are busy
srun: error: Unable to create step for job 1: Requested operation is presently disabled
"""


def _reason(line: str) -> RejectReason:
    found = failure("x", CommandResult(1, "", line.replace(" / ", "\n") + "\n"))
    assert isinstance(found, Refused), line
    return found.reason


@pytest.mark.parametrize("line", FINAL.splitlines())
def test_refusal_of_the_request_itself_is_final(line: str) -> None:
    assert _reason(line) is RejectReason.REFUSED


@pytest.mark.parametrize("line", LIFTED.splitlines())
def test_refusal_that_others_or_time_can_lift_or_that_is_not_known_is_for_now(line: str) -> None:
    assert _reason(line) is RefusedForNow.reason


@pytest.mark.parametrize(
    "reason",
    [
        "AccountNotAllowed",
        "BadConstraints",
        "DependencyNeverSatisfied",
        "InvalidAccount",
        "InvalidQOS",
        "JobHoldMaxRequeue",
        "PartitionNodeLimit",
        "PartitionTimeLimit",
        "QOSNotAllowed",
        "QOSMaxGRESPerJob",
        "AssocMaxWallDurationPerJobLimit",
        "QOSMaxCpuPerNode",
        "QOSMinCpuNotSatisfied",
        "AssocGrpCPUMinutesLimit",
        "QOSGrpGRESMinutes",
        "QOSGrpWallLimit",
        "Job's account not known, so it can't use this partition (short allows foo)",
    ],
)
def test_reasons_that_never_clear_are_recognised(reason: str) -> None:
    assert never_clears(reason)


@pytest.mark.parametrize(
    "reason",
    [
        "Resources",
        "Priority",
        "None",
        "Dependency",
        "BeginTime",
        "Licenses",
        "AssocGrpCpuLimit",
        "AssocGrpJobsLimit",
        "AssocMaxJobsLimit",
        "AssocGrpCPURunMinutesLimit",
        "QOSGrpGRESRunMinutes",
        "QOSMaxJobsPerUserLimit",
        "QOSMaxCpuPerUserLimit",
        "QOSMaxGRESPerUser",
        "PartitionDown",
        "PartitionInactive",
        "PartitionConfig",
        "ReqNodeNotAvail, UnavailableNodes:n[2-4]",
        "SomethingNew",
        "JobHeldAdmin",
        "JobHeldUser",
        "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
    ],
)
def test_reasons_that_may_clear_are_recognised(reason: str) -> None:
    assert not never_clears(reason)
