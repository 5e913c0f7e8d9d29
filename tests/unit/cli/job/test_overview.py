"""The first lines of the output of ``rrl check``."""

from __future__ import annotations

import tomllib
from datetime import datetime

import pytest

from rrl.cli.job.check import overview_text
from rrl.config.job.resolve import resolve
from rrl.config.job.schema import Job
from rrl.core.run_spec import RunSpec
from rrl.manager.bootstrap.preview import demand
from rrl.tests.support.cli.story import POOLS
from rrl.tests.support.job_toml import JOB

NOW = datetime(2026, 11, 20, 9, 0)


def spec_of(text: str) -> RunSpec:
    return resolve(Job.model_validate(tomllib.loads(text)), "python")


def overview(text: str, starts: dict[str, str] | None = None) -> dict[str, str]:
    """Return the text of each line of the overview, by the name of the line."""
    lines = overview_text(spec_of(text), demand(spec_of(text)), starts or {}, NOW).splitlines()
    return {name: words.strip() for name, _, words in (line.partition(" ") for line in lines)}


def test_local_run_has_virtual_nodes_and_no_jobs() -> None:
    assert overview(JOB) == {
        "run": "small, 10 steps",
        "nodes": "5 virtual on this machine, 1 of them spare",
        "jobs": 'none: [cluster] kind = "local"',
        "GPU-hours": "none; at most 480 core-hours: 20 cores for 1d",
    }


def test_pools_are_counted_with_their_most_nodes() -> None:
    found = overview(JOB + POOLS)
    assert found["nodes"] == "at most 18 virtual on this machine, 1 of them spare"
    assert found["pools"] == "h20: 1 node"
    assert found["GPU-hours"] == "none; at most 704 core-hours"
    text = overview_text(spec_of(JOB + POOLS), demand(spec_of(JOB + POOLS)), {}, NOW)
    assert "burst: 0 to 12 nodes, at most 200 node hours\n" in text


def test_run_without_steps_ends_with_its_commands() -> None:
    text = '[run]\nname = "own"\n[cluster]\nspares = 0\n[commands.judge]\ncommand = ["true"]\n'
    assert overview(text)["run"] == "own, until its commands are complete"
    assert overview(text)["nodes"] == "1 virtual on this machine"


@pytest.mark.parametrize(
    ("starts", "expected"),
    [
        ({}, "Slurm gives no estimate"),
        ({"pool": "2026-11-20T09:00:30"}, "Slurm estimates pool 2026-11-20T09:00:30 (now)"),
        ({"pool": "2026-11-20T08:59:59"}, "Slurm estimates pool 2026-11-20T08:59:59 (now)"),
        (
            {"trainer": "2026-11-20T11:10:00", "manager": "2026-11-22T10:00:00"},
            "Slurm estimates trainer 2026-11-20T11:10:00 (in 2h10m), manager 2026-11-22T10:00:00 (in 2d01h)",
        ),
    ],
)
def test_start_is_slurms_estimate_for_each_job(starts: dict[str, str], expected: str) -> None:
    assert overview(JOB.replace('"local"', '"slurm"'), starts)["start"] == expected


def test_node_groups_are_named_with_what_each_node_has() -> None:
    text = JOB.replace('"local"', '"slurm"\nform = "replica"')
    nodes = overview(text.replace("replicas = 2", "replicas = 2\ngpus = 1"))["nodes"]
    assert nodes == (
        "4: 2 of 1 GPU, 1 core, 1 GiB for rollout; 1 of 4 cores, 4 GiB for shared; 1 of 1 core, 1 GiB for trainer"
    )
