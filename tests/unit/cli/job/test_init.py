"""The job.toml that ``rrl init`` writes always passes ``rrl check``, and gives the reason for every line."""

from __future__ import annotations

import tomllib
from pathlib import Path

import jsonschema
import msgspec
import pytest

from rrl.cli.doctor.facts import DoctorOptions, Facts, Trials
from rrl.cli.doctor.node_probe.host import Network, Unavailable
from rrl.cli.job.init import choose_shape, job_toml
from rrl.cluster.slurm.requests import Shape
from rrl.config.job.json_schema import json_schema
from rrl.config.job.load import load_job
from rrl.config.job.resolve import resolve
from rrl.config.job.schema import Job
from rrl.tests.support.cli import findings
from rrl.tests.support.cli.findings import ETH0, GIB, IB0, LO, REFUSED, TAKEN

TWO_NETWORKS = Network("login1", "10.1.0.5", "10.1.0.5", "", "", (LO, ETH0, IB0))
ODD = 'a "b" \\ c#d'


def written(tmp_path: Path, facts: Facts) -> tuple[str, Job]:
    path = tmp_path / "job.toml"
    path.write_text(job_toml(facts, Path("job.toml")))
    return path.read_text(), load_job(path)


def slurm(**other: object) -> Facts:
    return findings.facts(slurm=findings.slurm(**other))


PLACES: dict[str, Facts] = {
    "local": findings.facts(slurm=None, node=None, no_slurm="no sbatch on PATH"),
    "slurm": findings.facts(),
    "nobody_consented": findings.facts(node=Unavailable("nobody consented")),
    "two_networks": findings.facts(host=findings.host(network=TWO_NETWORKS), node=Unavailable("nobody consented")),
    "one_shared": findings.facts(host=findings.host(network=TWO_NETWORKS)),
    "many_accounts": slurm(accounts=findings.accounts("None", "astro", "astro", "bio")),
    "no_accounts": slurm(accounts=Unavailable("no slurmdbd")),
    "no_manager": slurm(trials=Trials({"pool": TAKEN, "replica": TAKEN, "hetjob": TAKEN}, {"gpu": REFUSED})),
    "other_manager": slurm(
        trials=Trials({"pool": TAKEN, "replica": TAKEN, "hetjob": TAKEN}, {"gpu": REFUSED, "cpu": TAKEN})
    ),
    "preempted": slurm(
        config=findings.config(PreemptType="preempt/qos", InactiveLimit="120 sec"),
        partitions=(findings.partition(max_walltime_s=1800.0, preempted=True),),
    ),
    "odd_names": msgspec.structs.replace(
        slurm(partitions=(findings.partition(findings.shape(1), name=ODD, max_walltime_s=float("inf")),)),
        wanted=DoctorOptions(ODD, ODD, ODD),
    ),
    "deaf": slurm(trials=Unavailable("Unable to contact\nslurm controller"), config=Unavailable("x")),
    "refused": slurm(trials=Trials({"pool": REFUSED, "replica": REFUSED, "hetjob": REFUSED}, {"gpu": REFUSED})),
    "no_nodes": slurm(partitions=(findings.partition(),)),
}


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft7Validator:
    return jsonschema.Draft7Validator(json_schema())


@pytest.mark.parametrize("place", PLACES)
def test_written_job_can_be_read_and_fits_the_schema_and_its_lines_are_short(
    tmp_path: Path, place: str, validator: jsonschema.Draft7Validator
) -> None:
    text, job = written(tmp_path, PLACES[place])
    assert [error.message for error in validator.iter_errors(tomllib.loads(text))] == []
    assert max(map(len, text.splitlines())) <= 120
    assert not any(line != line.rstrip() for line in text.splitlines())
    assert "\n\n\n" not in text
    assert "None" not in text
    assert job.cluster.kind == ("local" if place in ("local", "deaf", "refused") else "slurm")
    assert job.cluster.form == "pool"


def test_job_without_slurm_is_that_of_the_quickstart(tmp_path: Path) -> None:
    text, job = written(tmp_path, PLACES["local"])
    quickstart = load_job(Path(__file__).parents[4] / "examples/quickstart.toml")
    for part in ("model", "task", "sampling", "roles"):
        assert getattr(job, part) == getattr(quickstart, part)
    assert "there is no Slurm here" in text


@pytest.mark.parametrize("place", ["local", "slurm"])
def test_commented_lines_of_the_job_can_be_used(tmp_path: Path, place: str) -> None:
    text = written(tmp_path, PLACES[place])[0]
    pool = ("# [rollouts.burst]", "# replicas = { max = 4 }", "# node_hours = 10")
    for line in ("# ranks = 2", *pool, "# [tags]", "# rollout = []", "# [recovery]", '# policy = "role"'):
        assert line in text
        text = text.replace(line, line[2:])
    (tmp_path / "used.toml").write_text(text)
    job = load_job(tmp_path / "used.toml")
    assert (job.roles.trainer.ranks, job.tags.rollout, job.recovery.policy) == (2, (), "role")
    assert job.rollouts["burst"].is_elastic


def test_slurm_that_accepts_no_job_is_named_as_the_reason_for_a_local_job(tmp_path: Path) -> None:
    assert "Slurm refuses jobs: sbatch: error: invalid partition" in written(tmp_path, PLACES["refused"])[0]
    assert "Slurm does not answer: Unable to contact slurm controller" in written(tmp_path, PLACES["deaf"])[0]


def test_partition_account_and_qos_are_those_found_or_requested(tmp_path: Path) -> None:
    assert written(tmp_path, PLACES["slurm"])[1].slurm == {"partition": "gpu", "account": "astro"}
    text, job = written(tmp_path, PLACES["many_accounts"])
    assert job.slurm == {"partition": "gpu"}
    assert "one of astro, bio" in text
    assert written(tmp_path, PLACES["odd_names"])[1].slurm == {"partition": ODD, "account": ODD, "qos": ODD}


def test_the_walltime_fits_the_partition(tmp_path: Path) -> None:
    assert written(tmp_path, PLACES["slurm"])[1].cluster.walltime == 3600.0
    assert written(tmp_path, PLACES["preempted"])[1].cluster.walltime == 1800.0
    assert "may be preempted" in written(tmp_path, PLACES["preempted"])[0]


def test_manager_is_placed_where_its_job_is_accepted(tmp_path: Path) -> None:
    assert written(tmp_path, PLACES["slurm"])[1].manager.where == "job"
    assert written(tmp_path, PLACES["no_manager"])[1].manager.where == "pool"
    other = written(tmp_path, PLACES["other_manager"])[1].manager
    assert (other.where, other.slurm) == ("job", {"partition": "cpu"})


def test_a_network_is_named_only_where_a_node_shares_one_of_several(tmp_path: Path) -> None:
    assert written(tmp_path, PLACES["slurm"])[1].transport.network == ""
    assert written(tmp_path, PLACES["one_shared"])[1].transport.network == "10.1.0.0/16"
    text, job = written(tmp_path, PLACES["two_networks"])
    assert job.transport.network == ""
    assert '# network = "10.2.0.0/16"' in text


def test_written_job_mentions_gpus_and_requests_none(tmp_path: Path) -> None:
    text, job = written(tmp_path, PLACES["slurm"])
    assert "6 nodes with 8 h100" in text
    assert job.cluster.node.gpus == 0


@pytest.mark.parametrize(
    ("there", "rollouts", "spares", "exclusive"),
    [
        (findings.shape(6), 2, 1, True),
        (findings.shape(5), 2, 1, True),
        (findings.shape(4), 2, 0, True),
        (findings.shape(3), 1, 0, True),
        (findings.shape(2), 2, 1, False),
        (findings.shape(1), 2, 0, False),
        (findings.shape(1, cpus=4), 1, 0, False),
        (findings.shape(9, cpus=1), 1, 0, False),
        (findings.shape(5, mem=2 * GIB), 1, 0, False),
    ],
)
def test_roles_are_distributed_over_the_available_nodes(
    tmp_path: Path, there: Shape, rollouts: int, spares: int, exclusive: bool
) -> None:
    text, job = written(tmp_path, slurm(partitions=(findings.partition(there),)))
    roles, node = job.roles, job.cluster.node
    assert (roles.rollout.replicas, job.cluster.spares, roles.trainer.exclusive) == (rollouts, spares, exclusive)
    fits = there.node.cpus >= node.cpus and there.node.mem >= node.mem
    if fits:
        assert resolve(job, "python").nodes <= there.count
    assert ("TOO LITTLE" in text) is not fits


def test_nodes_that_are_down_are_not_counted() -> None:
    down = findings.partition(findings.shape(2), findings.shape(6, usable=False))
    assert choose_shape(findings.slurm(partitions=(down,)), DoctorOptions()).exclusive is False


def test_written_job_names_its_schema_and_how_to_make_it(tmp_path: Path) -> None:
    text = job_toml(findings.facts(), Path("sub/job.toml"))
    assert text.startswith("#:schema ./job.schema.json\n")
    assert "rrl schema > sub/job.schema.json" in text
