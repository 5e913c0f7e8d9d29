"""Read what a site's Slurm offers this user: settings, partitions, accounts, limits, and whether it accepts a job.

Limits on the number of jobs belong to the user's association (account, possibly with a partition) and to a QOS. Slurm
enforces them only if AccountingStorageEnforce contains ``limits`` (slurm.conf(5), sacctmgr(1)).
"""

from __future__ import annotations

import getpass
from collections.abc import Iterable, Mapping

from msgspec import Struct

from ...core.command_runner import CommandResult
from ..base import Refused, Unanswered
from .commands import SlurmLimits, execute, failure, output_of, rejects_job
from .parsing import fields, parsed, read_config
from .requests import SHAPES_FORMAT, Partition, read_partitions

_LIMITS = SlurmLimits()
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


class Accounts(Struct, frozen=True, tag=True):
    """The user's entry in Slurm's accounting."""

    admin: str
    """Admin level: ``None``, ``Operator`` or ``Administrator``; empty if the user has no entry."""
    default: str
    """Account of jobs that name no account."""
    associations: tuple[dict[str, str], ...]
    """Fields of ``sacctmgr show assoc``, by name."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the accounts under which the user may submit."""
        return tuple(dict.fromkeys(row["account"] for row in self.associations))


async def query_config() -> dict[str, str]:
    """Return the settings of ``scontrol show config`` by name. Raises Refused or Unanswered."""
    text = await output_of(("scontrol", "show", "config"), _LIMITS.read_timeout_s)
    return parsed("scontrol", read_config, text)


async def query_partitions() -> tuple[Partition, ...]:
    """Return the partitions that this user sees. Raises Refused or Unanswered."""
    text = await output_of(("sinfo", "-e", "-h", "-o", fields(*SHAPES_FORMAT)), _LIMITS.read_timeout_s)
    return tuple(parsed("sinfo", read_partitions, text))


async def query_accounts() -> Accounts:
    """Return the user's accounts and their limits. Raises Refused or Unanswered."""
    user = getpass.getuser()
    entry = await _accounting("user", ("adminlevel", "defaultaccount"), "where", f"name={user}")
    associations = await _accounting("assoc", _ASSOC, "where", f"user={user}")
    row = next(iter(entry), {})
    return Accounts(row.get("adminlevel", ""), row.get("defaultaccount", ""), tuple(associations))


async def try_job(script: str, *options: str, timeout_s: float = _LIMITS.write_timeout_s) -> CommandResult:
    """Return slurmctld's answer to ``sbatch --test-only``; its exit code is 0 if it would accept the job.

    Nothing is submitted. Raises Refused or Unanswered if slurmctld does not answer.
    """
    ended = await execute(("sbatch", "--test-only", *options), timeout_s, script)
    if ended.code and not rejects_job(ended):
        raise failure("sbatch", ended)
    return ended


async def read_limits(options: Mapping[str, str]) -> JobLimits:
    """Read the limits for jobs with these sbatch options (account, partition, qos). Never raises."""
    try:
        config = await query_config()
        steps = config.get("MaxStepCount", "")
        per_job = int(steps) if steps.isdigit() else 0
        if not enforced(config):
            return JobLimits(steps_per_job=per_job)
        found, qos = await query_accounts(), await _accounting("qos", _QOS)
    except (Refused, Unanswered, OSError) as error:
        return JobLimits(unknown=str(error))
    account = options.get("account") or found.default
    limits, default_qos = association_limits(found, account, options.get("partition", ""))
    return JobLimits((*limits, *qos_limits(qos, options.get("qos") or default_qos)), "", per_job)


def enforced(config: Mapping[str, str]) -> bool:
    """Return whether Slurm enforces limits on jobs, according to its configuration."""
    return bool({"limits", "safe", "all", "2"} & set(config.get("AccountingStorageEnforce", "").lower().split(",")))


def association_limits(found: Accounts, account: str, partition: str) -> tuple[list[Limit], str]:
    """Return (limits, default QOS) of an account.

    An association of the account with the partition takes precedence over its association without a partition.
    """
    fitting = [row for row in found.associations if row["account"] == account and row["partition"] in ("", partition)]
    if not fitting:
        return [], ""
    row = max(fitting, key=lambda row: bool(row["partition"]))
    of = f"of account {account}"
    limits = [
        *_limit(row["maxjobs"], True, True, f"MaxJobs {of}"),
        *_limit(row["maxsubmitjobs"], False, True, f"MaxSubmitJobs {of}"),
        *_limit(row["grpjobs"], True, False, f"GrpJobs {of}"),
        *_limit(row["grpsubmitjobs"], False, False, f"GrpSubmitJobs {of}"),
    ]
    return limits, row["defaultqos"]


def qos_limits(rows: Iterable[Mapping[str, str]], name: str) -> list[Limit]:
    """Return the limits of the QOS ``name`` from the fields of ``sacctmgr show qos``."""
    return [
        limit
        for row in rows
        if name and row["name"] == name
        for limit in (
            *_limit(row["maxjobspu"], True, True, f"MaxJobsPerUser of QOS {name}"),
            *_limit(row["maxsubmitpu"], False, True, f"MaxSubmitJobsPerUser of QOS {name}"),
            *_limit(row["grpjobs"], True, False, f"GrpJobs of QOS {name}"),
            *_limit(row["grpsubmitjobs"], False, False, f"GrpSubmitJobs of QOS {name}"),
        )
    ]


def _limit(text: str, running_only: bool, per_user: bool, name: str) -> list[Limit]:
    return [Limit(int(text), running_only, per_user, name)] if text.isdigit() else []


async def _accounting(entity: str, names: tuple[str, ...], *conditions: str) -> list[dict[str, str]]:
    """Return the fields ``names`` of the entries that ``sacctmgr show`` prints. Raises Refused or Unanswered."""
    argv = ("sacctmgr", "-nP", "show", entity, *conditions, f"format={','.join(names)}")
    text = await output_of(argv, _LIMITS.read_timeout_s)
    rows = [line.split("|") for line in text.splitlines() if line.strip()]
    if any(len(row) != len(names) for row in rows):
        raise Unanswered(f"sacctmgr: its output has other fields than {', '.join(names)}: {text.strip()[:80]!r}")
    return [dict(zip(names, row, strict=True)) for row in rows]
