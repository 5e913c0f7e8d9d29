"""Read Slurm's limits on the number of this user's jobs, as far as the user may read these limits.

Limits belong to the user's association (account, possibly with a partition) and to a QOS. Slurm enforces them only if
AccountingStorageEnforce contains ``limits`` (slurm.conf(5), sacctmgr(1)).
"""

from __future__ import annotations

import getpass
import re
from collections.abc import Mapping

from msgspec import Struct

from ...core.command_runner import CommandResult
from ..base import Refused, Unanswered
from .commands import SlurmLimits, execute, failure

_TIMEOUT_S = SlurmLimits().read_timeout_s
_ASSOC = ("account", "partition", "maxjobs", "maxsubmitjobs", "grpjobs", "grpsubmitjobs", "defaultqos")
_QOS = ("name", "maxjobspu", "maxsubmitpu", "grpjobs", "grpsubmitjobs")


class Limit(Struct, frozen=True):
    """A limit on the number of jobs."""

    max_jobs: int
    running_only: bool
    """True if only running jobs count; False if pending jobs count too."""
    per_user: bool
    """True if only this user's jobs count; False if other users share the limit and may exhaust it."""
    name: str
    """The limit as an administrator would name it, for example ``MaxSubmitJobs of account astro``."""


class JobLimits(Struct, frozen=True, tag=True):
    """Limits on the number of jobs and steps, as far as they could be read."""

    limits: tuple[Limit, ...] = ()
    unknown: str = ""
    """Why the limits could not be read; empty if they were read."""
    steps_per_job: int = 0
    """MaxStepCount of Slurm's configuration; 0 if unknown."""


async def read_limits(options: Mapping[str, str]) -> JobLimits:
    """Read the limits for jobs with these sbatch options (account, partition, qos). Never raises."""
    try:
        config = (await _read("scontrol", "show", "config")).out
        steps = re.search(r"^MaxStepCount\s*=\s*(\d+)", config, re.MULTILINE)
        per_job = int(steps[1]) if steps else 0
        if not enforced(config):
            return JobLimits(steps_per_job=per_job)
        user = getpass.getuser()
        assoc = await _read("sacctmgr", "-nP", "show", "assoc", "where", f"user={user}", f"format={','.join(_ASSOC)}")
        default = await _read("sacctmgr", "-nP", "show", "user", "where", f"name={user}", "format=defaultaccount")
        qos = await _read("sacctmgr", "-nP", "show", "qos", f"format={','.join(_QOS)}")
    except (Refused, Unanswered, OSError) as error:
        return JobLimits(unknown=str(error))
    account = options.get("account") or default.out.strip()
    limits, default_qos = association_limits(assoc.out, account, options.get("partition", ""))
    return JobLimits((*limits, *qos_limits(qos.out, options.get("qos") or default_qos)), "", per_job)


def enforced(config: str) -> bool:
    """Return whether Slurm enforces limits on jobs, according to the output of ``scontrol show config``."""
    match = re.search(r"^AccountingStorageEnforce\s*=\s*(\S+)", config, re.MULTILINE)
    return match is not None and bool({"limits", "safe", "all", "2"} & set(match[1].lower().split(",")))


def association_limits(text: str, account: str, partition: str) -> tuple[list[Limit], str]:
    """Return (limits, default QOS) of an account from ``sacctmgr show assoc``.

    An association of the account with the partition takes precedence over its association without a partition.
    """
    rows = [dict(zip(_ASSOC, line.split("|"), strict=False)) for line in text.splitlines() if line.strip()]
    fitting = [row for row in rows if row["account"] == account and row.get("partition", "") in ("", partition)]
    if not fitting:
        return [], ""
    row = max(fitting, key=lambda row: bool(row.get("partition")))
    of = f"of account {account}"
    limits = [
        *_limit(row.get("maxjobs"), True, True, f"MaxJobs {of}"),
        *_limit(row.get("maxsubmitjobs"), False, True, f"MaxSubmitJobs {of}"),
        *_limit(row.get("grpjobs"), True, False, f"GrpJobs {of}"),
        *_limit(row.get("grpsubmitjobs"), False, False, f"GrpSubmitJobs {of}"),
    ]
    return limits, row.get("defaultqos", "")


def qos_limits(text: str, name: str) -> list[Limit]:
    """Return the limits of the QOS ``name`` from ``sacctmgr show qos``."""
    rows = [dict(zip(_QOS, line.split("|"), strict=False)) for line in text.splitlines() if line.strip()]
    return [
        limit
        for row in rows
        if name and row["name"] == name
        for limit in (
            *_limit(row.get("maxjobspu"), True, True, f"MaxJobsPerUser of QOS {name}"),
            *_limit(row.get("maxsubmitpu"), False, True, f"MaxSubmitJobsPerUser of QOS {name}"),
            *_limit(row.get("grpjobs"), True, False, f"GrpJobs of QOS {name}"),
            *_limit(row.get("grpsubmitjobs"), False, False, f"GrpSubmitJobs of QOS {name}"),
        )
    ]


def _limit(text: str | None, running_only: bool, per_user: bool, name: str) -> list[Limit]:
    return [Limit(int(text), running_only, per_user, name)] if text and text.isdigit() else []


async def _read(*argv: str) -> CommandResult:
    ended = await execute(argv, _TIMEOUT_S)
    if ended.code:
        raise failure(argv[0], ended)
    return ended
