"""Whether a job can lend, and what trainer and guests need on a node."""

from __future__ import annotations

import tomllib

import pytest

from rrl.api.preflight.layouts import lending_doubt, lending_text
from rrl.api.preflight.local_machine import TORCH_BYTES
from rrl.config.job.resolve import resolve
from rrl.config.job.schema import Job
from rrl.config.model_size import weight_count
from rrl.core.run_spec import RunSpec
from rrl.tests.support.job_toml import JOB

GIB = 2**30
MODEL = "[model]\nhidden_size = 2048\nlayers = 24\nintermediate_size = 8192\nheads = 16\nhead_dim = 128\n"
LENDS = '[tags]\ntrainer = ["rollout"]\n[sampling]\nstream = true\n'


def spec(cluster: str = "slurm", replicas: int = 2, mem: str = "64GiB", gpus: int = 4, engine: str = "vllm") -> RunSpec:
    """Return a job with a trainer of 16 ranks on two nodes of eight GPUs, which lends them."""
    toml = JOB.replace('"local"', f'"{cluster}"').replace(
        "replicas = 2", f'replicas = {replicas}\ngpus = {gpus}\nengine = "{engine}"'
    )
    toml = toml.replace('cpus = 4, mem = "4GiB"', f'cpus = 64, gpus = 8, mem = "{mem}"')
    toml = toml.replace("[model.tokenizer]", f"{MODEL}[model.tokenizer]").replace('"rollout/0"\nat', '"reward/0"\nat')
    trainer = "[roles.trainer]\nranks = 16\nranks_per_node = 8\ngpus = 1\n"
    return resolve(Job.model_validate(tomllib.loads(f"{toml}{trainer}{LENDS}")), "/venv/bin/python")


def test_job_that_does_not_lend_has_no_text_and_no_doubt() -> None:
    job = resolve(Job.model_validate(tomllib.loads(JOB)), "/venv/bin/python")
    assert (lending_text(job), lending_doubt(job)) == ("", [])


@pytest.mark.parametrize(
    ("replicas", "layout"),
    [
        (2, "layout       multiplexed: 2 rollouts, and 2 guests on each of 2 nodes of the trainer"),
        (0, "layout       colocated: no rollout of its own, but 2 guests on each of 2 nodes of the trainer"),
    ],
)
def test_text_names_the_layout(replicas: int, layout: str) -> None:
    assert lending_text(spec(replicas=replicas)).splitlines()[0] == layout


def test_host_memory_is_that_of_buffers_versions_and_processes() -> None:
    job, weights = spec(gpus=1, engine="torch"), weight_count(spec().model)
    # two copies of the state on two nodes each, two versions of the first rank, two of each guest, and the processes
    trainer = 8 * (12 * 4 * weights // 16 + TORCH_BYTES) + 2 * 4 * weights
    guests = 8 * (2 * 4 * weights + TORCH_BYTES)
    line = lending_text(job).splitlines()[1]
    assert f"about {trainer / GIB:.1f} GiB for the trainer's processes, {guests / GIB:.1f} GiB for the guests" in line
    assert line.endswith("a node has 64.0 GiB")


def test_node_without_memory_for_trainer_and_guests_is_a_doubt_with_the_sum() -> None:
    assert lending_doubt(spec(mem="256GiB")) == []
    (doubt,) = lending_doubt(spec(mem="32GiB"))
    assert doubt.startswith("cluster.node.mem = 32GiB: trainer and guests of a node need about ")
    assert lending_doubt(spec(mem="32GiB", cluster="local")) == [], "virtual nodes do not limit memory"


def test_memory_of_an_unknown_model_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rrl.api.preflight.memory.weight_count", lambda _: 0)
    assert "host memory  unknown: this machine does not have the model" in lending_text(spec())
    assert lending_doubt(spec(mem="1GiB")) == []


def test_what_a_sleeping_guest_keeps_on_the_gpus_is_named_with_vllm_only() -> None:
    assert "GPU memory" not in lending_text(spec(gpus=1, engine="torch"))
    assert "a sleeping guest keeps 1 to 7 GiB of each GPU" in lending_text(spec())
