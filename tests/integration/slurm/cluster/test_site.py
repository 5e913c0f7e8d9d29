"""Limits on a user's jobs are read from the output of sacctmgr, also by a plain user on a real Slurm with slurmdbd."""

from __future__ import annotations

import asyncio

import pytest

from rrl.cluster.slurm.site import Accounts, Limit, association_limits, enforced, qos_limits, read_limits
from rrl.tests.support.slurm import accounting
from rrl.tests.support.slurm.lab import SlurmLab

NAMES = ("account", "partition", "maxjobs", "maxsubmitjobs", "grpjobs", "grpsubmitjobs", "defaultqos")
ASSOCIATIONS = ("astro||4|10||40|normal", "astro|gpu|2||||", "physics||||||")
ACCOUNTS = Accounts("None", "astro", tuple(dict(zip(NAMES, line.split("|"), strict=True)) for line in ASSOCIATIONS))


def test_association_limits_are_parsed_for_account_and_partition() -> None:
    limits, qos = association_limits(ACCOUNTS, "astro", "main")
    assert limits == [
        Limit(4, True, True, "MaxJobs of account astro"),
        Limit(10, False, True, "MaxSubmitJobs of account astro"),
        Limit(40, False, False, "GrpSubmitJobs of account astro"),
    ]
    assert (qos, ACCOUNTS.names) == ("normal", ("astro", "physics"))
    assert association_limits(ACCOUNTS, "astro", "gpu")[0] == [Limit(2, True, True, "MaxJobs of account astro")]
    assert association_limits(ACCOUNTS, "nobody", "") == ([], "")


def test_qos_limits_are_parsed_for_each_user_and_for_all() -> None:
    names = ("name", "maxjobspu", "maxsubmitpu", "grpjobs", "grpsubmitjobs")
    rows = [dict(zip(names, line.split("|"), strict=True)) for line in ("normal||||", "low|3|6|100|")]
    assert qos_limits(rows, "low") == [
        Limit(3, True, True, "MaxJobsPerUser of QOS low"),
        Limit(6, False, True, "MaxSubmitJobsPerUser of QOS low"),
        Limit(100, True, False, "GrpJobs of QOS low"),
    ]


@pytest.mark.parametrize(
    ("text", "holds"), [("none", False), ("associations", False), ("associations,limits,qos", True), ("safe", True)]
)
def test_limits_hold_only_where_they_are_enforced(text: str, holds: bool) -> None:
    assert enforced({"AccountingStorageEnforce": text}) is holds


def test_limits_without_an_answer_are_unknown_with_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert "scontrol cannot be started" in asyncio.run(read_limits({})).unknown


@pytest.mark.slurm
def test_plain_user_can_read_its_own_limits(accounting_lab: SlurmLab) -> None:
    accounting.limit(accounting_lab, MaxJobs=3, MaxSubmitJobs=7)

    def check_limits() -> None:
        limits = asyncio.run(read_limits({}))
        assert limits.unknown == ""
        assert limits.steps_per_job == 40000
        by_name = {limit.name.partition(" ")[0]: limit for limit in limits.limits}
        assert (by_name["MaxJobs"].max_jobs, by_name["MaxSubmitJobs"].max_jobs) == (3, 7)

    try:
        accounting_lab.call_as_user(check_limits)
    finally:
        accounting.limit(accounting_lab, MaxJobs=-1, MaxSubmitJobs=-1)
