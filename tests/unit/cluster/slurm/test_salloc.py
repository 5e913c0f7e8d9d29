"""Requests that salloc cannot serve at once, with scripts that print the output of Slurm's commands."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from rrl.cluster.base import AllocationRequest, AllocationState, Refused
from rrl.cluster.slurm.cluster import SlurmCluster
from rrl.cluster.slurm.commands import SlurmLimits
from rrl.core.types import Resources

REQUEST = AllocationRequest("run-1.pool", 1, Resources(cpus=1), 600.0, comment="rrl run-1")
TRIED = "5|5|CANCELLED||run-1.pool|None|0:00|10:00|0|0|rrl run-1 run-1.pool"
QUEUED = "6|6|PENDING||run-1.pool|Resources|10:00|10:00|N/A|NONE|rrl run-1 run-1.pool"
HELD = "4|4|RUNNING|n[1-2]|run-1.pool|None|9:00|10:00|100|700|rrl run-1 run-1.pool"


def squeue(*jobs: str) -> str:
    lines = "".join("\\036" + job.replace("|", "\\037") + "\\n" for job in jobs)
    return f'case "$*" in *" -s "*) ;; *) printf "{lines}" ;; esac'


def commands(folder: Path, **scripts: str) -> None:
    folder.mkdir(exist_ok=True)
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)


async def test_failed_salloc_does_not_end_the_job_that_sbatch_submits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = "salloc: Pending job allocation 5\nsalloc: error: Unable to allocate resources: Connection timed out"
    commands(tmp_path / "bin", salloc=f"echo '{output}' >&2; exit 1", scancel="", sbatch="echo 6", squeue=squeue(TRIED))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")

    slurm = SlurmCluster("run-1", "python", SlurmLimits(min_poll_interval_s=0.0), allocate_with="salloc")
    await slurm.request(REQUEST)
    early = await slurm.observe()  # squeue lists salloc's attempt before sbatch's job
    assert early.allocations == {}, early
    commands(tmp_path / "bin", squeue=squeue(TRIED, QUEUED))
    allocations = (await slurm.observe()).allocations
    assert allocations is not None
    assert (allocations["run-1.pool"].state, allocations["run-1.pool"].job) == (AllocationState.PENDING, "6")
    await slurm.close()


async def test_request_with_too_few_other_nodes_waits_for_own_ones_only_if_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no = "sbatch: error: Batch job submission failed: Requested node configuration is not available"
    picky = (
        f'text=$(cat); echo "$text" >> {tmp_path}/scripts; case $text in *exclude=*) echo "{no}" >&2; exit 1 ;; esac'
    )
    commands(tmp_path / "bin", sbatch=picky, squeue=squeue(HELD), scontrol="")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    more = msgspec.structs.replace(REQUEST, tag="run-1.more-1")

    slurm = SlurmCluster("run-1", "python", SlurmLimits(min_poll_interval_s=0.0), allocate_with="sbatch")
    await slurm.observe()
    with pytest.raises(Refused, match="not available"):
        await slurm.request(more)
    await slurm.request(msgspec.structs.replace(more, may_reuse_own_nodes=True))
    *_, last = (tmp_path / "scripts").read_text().split("#!")
    assert "--exclusive" in last
    assert "--exclude" not in last
    await slurm.close()
