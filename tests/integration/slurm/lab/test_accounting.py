"""In a lab with slurmdbd, Slurm enforces limits and records jobs as at a real site."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rrl.tests.support.slurm import accounting
from rrl.tests.support.slurm.lab import SlurmLab

SLEEP = ("--parsable", "--mem=100M", "-o", "/dev/null", "--wrap", "sleep 1005")


@pytest.fixture
def lab(accounting_lab: SlurmLab) -> Iterator[SlurmLab]:
    yield accounting_lab
    accounting_lab.clear()


@pytest.mark.parametrize(
    ("option", "why"), [("--account=nobody", "Invalid account"), ("--qos=golden", "Invalid qos specification")]
)
def test_unknown_account_or_qos_is_refused(lab: SlurmLab, option: str, why: str) -> None:
    done = lab.run_as_user(["sbatch", option, *SLEEP], check=False)
    assert done.returncode != 0
    assert why in done.stderr
    assert lab.jobs() == []


def test_added_account_and_qos_are_accepted(lab: SlurmLab) -> None:
    accounting.add_account(lab, "physics")
    accounting.add_qos(lab, "fast")
    refused = lab.run_as_user(["sbatch", "--account=physics", "--qos=fast", *SLEEP], check=False)
    assert "Invalid qos" in refused.stderr, "a QOS that the user may not use was accepted"
    accounting.limit(lab, "physics", qos="+fast")
    job = lab.run_as_user(["sbatch", "--account=physics", "--qos=fast", *SLEEP]).stdout.strip()
    assert lab.slurm("squeue", "-h", "-j", job, "-o", "%a %q") == "physics fast\n"


def test_job_above_a_limit_is_pending_with_its_reason_or_refused(lab: SlurmLab) -> None:
    accounting.limit(lab, MaxJobs=1, MaxSubmitJobs=2)
    try:
        jobs = [lab.run_as_user(["sbatch", *SLEEP]).stdout.strip() for _ in range(2)]
        refused = lab.run_as_user(["sbatch", *SLEEP], check=False)
        assert refused.returncode != 0
        assert "AssocMaxSubmitJobLimit" in refused.stderr
        lab.wait_job(jobs[0], "RUNNING None")
        lab.wait_job(jobs[1], "PENDING AssocMaxJobsLimit")
    finally:
        accounting.limit(lab, MaxJobs=-1, MaxSubmitJobs=-1)


def test_accounting_remembers_ended_jobs(lab: SlurmLab) -> None:
    job = lab.run_as_user(
        ["sbatch", "--wait", "--parsable", "--mem=100M", "-o", "/dev/null", "--wrap", "exit 3"], check=False
    ).stdout.strip()
    lab.wait_for(
        lambda: lab.slurm("sacct", "-n", "-X", "-P", "-j", job, "-o", "State,ExitCode") == "FAILED|3:0\n",
        f"job {job} is not in the database",
    )
