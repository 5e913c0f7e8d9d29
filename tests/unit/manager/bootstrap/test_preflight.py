"""A request that a real Slurm would reject is reported with the key of job.toml to change, and nothing is started."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import msgspec
import pytest

from rrl.config.job.document import dotted_key
from rrl.config.job.load import load_job
from rrl.config.job.resolve import resolve
from rrl.manager.bootstrap.preflight import Problem, SlurmAnswer, check_with_slurm
from rrl.tests.support.job_toml import JOB
from rrl.tests.support.slurm import accounting
from rrl.tests.support.slurm.lab import SlurmLab

pytestmark = pytest.mark.slurm
SLURM = JOB.replace(
    'kind = "local"\nnode = { cpus = 4, mem = "4GiB" }', 'kind = "slurm"\nspares = 0\nnode = { cpus = 2, mem = "1GiB" }'
)
FORM = "spares = 0"
BURST = "[rollouts.burst]\nreplicas = { max = 2 }\nnode_hours = 1\n"


@pytest.fixture
def lab(slurm_lab: SlurmLab) -> Iterator[SlurmLab]:
    yield slurm_lab
    assert slurm_lab.jobs() == [], "the preflight has left a job"


def problems_of(lab: SlurmLab, tomls: dict[str, str]) -> dict[str, list[Problem]]:
    """Return the problems of each job.toml, as a plain user gets them."""
    return {name: answer.problems for name, answer in answers_for(lab, tomls).items()}


def answers_for(lab: SlurmLab, tomls: dict[str, str]) -> dict[str, SlurmAnswer]:
    """Return Slurm's answer to each job.toml, as a plain user gets it."""
    folder = lab.user_home / "trial"
    path = Path(folder, "found")

    def check() -> None:
        folder.mkdir(exist_ok=True)
        answers = {}
        for name, toml in tomls.items():
            (folder / f"{name}.toml").write_text(toml)
            job = load_job(folder / f"{name}.toml")
            answers[name] = asyncio.run(check_with_slurm(job, resolve(job, "python")))
        path.write_bytes(msgspec.json.encode(answers))

    lab.call_as_user(check)
    return msgspec.json.decode(path.read_bytes(), type=dict[str, SlurmAnswer])


def test_valid_job_of_every_form_passes_preflight(lab: SlurmLab) -> None:
    het = SLURM.replace(FORM, 'form = "hetjob"\none_node_components = true')
    forms = {"pool": SLURM, "replica": SLURM.replace(FORM, 'form = "replica"'), "hetjob": het}
    assert problems_of(lab, forms) == {"pool": [], "replica": [], "hetjob": []}


def test_start_that_slurm_estimates_is_passed_on(lab: SlurmLab) -> None:
    het = SLURM.replace(FORM, 'form = "hetjob"\none_node_components = true')
    answers = answers_for(lab, {"pool": SLURM, "hetjob": het})
    assert set(answers["pool"].starts) == {"pool", "manager"}
    assert "manager" in answers["hetjob"].starts
    for start in answers["pool"].starts.values():
        assert abs((datetime.fromisoformat(start) - datetime.now()).total_seconds()) < 3600, (
            "the estimated start is not in local time"
        )


def test_mistake_is_reported_with_its_key_and_slurms_message(lab: SlurmLab) -> None:
    own = '[roles.rollout]\nslurm.partition = "spot"'
    replica = SLURM.replace(FORM, 'form = "replica"').replace("[roles.rollout]", own)
    results = problems_of(
        lab,
        {
            "partition": SLURM + '[slurm]\npartition = "nowhere"\n',
            "manager": SLURM + '[manager]\nslurm = { partition = "nowhere" }\n',
            "constraint": SLURM + '[slurm]\nconstraint = "v100"\n',
            "reservation": SLURM + '[slurm]\nreservation = "mine"\n',
            "option": SLURM + '[slurm]\npartitoin = "main"\n',
            "typed": SLURM + '[slurm]\ngres = "gpu:a100:1"\n',
            "role": replica,
            "elastic": f'{SLURM}{BURST}slurm = {{ partition = "spot" }}\n',
        },
    )
    reported = {
        name: [(dotted_key(problem.key), problem.text, problem.certain) for problem in problems]
        for name, problems in results.items()
    }
    invalid = "Slurm says for {}: invalid partition specified: {}; Invalid partition name specified"
    assert reported == {
        "partition": [("slurm.partition", invalid.format("pool", "nowhere"), True)],
        "manager": [("manager.slurm.partition", invalid.format("the manager's job", "nowhere"), True)],
        "constraint": [("slurm.constraint", "Slurm says for pool: Invalid feature specification", True)],
        "reservation": [("slurm.reservation", "Slurm says for pool: Requested reservation is invalid", True)],
        "option": [("slurm.partitoin", "Slurm says for pool: unrecognized option '--partitoin=main'", True)],
        "typed": [("slurm.gres", "Slurm says for pool: Requested node configuration is not available", True)],
        "role": [("roles.rollout.slurm.partition", invalid.format("rollout", "spot"), True)],
        "elastic": [("rollouts.burst.slurm.partition", invalid.format("burst", "spot"), True)],
    }


def test_request_beyond_the_partition_is_reported_with_numbers(lab: SlurmLab) -> None:
    has = "partition main has 5 of 8 CPUs, 8000 MiB, 2 GPUs"
    three = 'replicas = 2\ngpus = 3\nengine = "vllm"\nvllm = { tensor_parallel_size = 3 }'
    results = problems_of(
        lab,
        {
            "cpus": SLURM.replace("cpus = 2", "cpus = 9"),
            "mem": SLURM.replace("1GiB", "9GiB"),
            "gpus": SLURM.replace("cpus = 2", "cpus = 2, gpus = 3"),
            "nodes": SLURM.replace("replicas = 2", "replicas = 9"),
            "rollout": SLURM.replace(FORM, 'form = "replica"').replace("replicas = 2", three),
            "elastic": f'{SLURM}{BURST}mem = "9GiB"\n',
        },
    )
    reported = {
        name: [(dotted_key(problem.key), problem.text, problem.certain) for problem in problems]
        for name, problems in results.items()
    }
    assert reported == {
        "cpus": [("cluster.node.cpus", f"5 nodes of 9 CPUs, 1024 MiB for pool: {has}", True)],
        "mem": [("cluster.node.mem", f"4 nodes of 2 CPUs, 9216 MiB for pool: {has}", True)],
        "gpus": [("cluster.node.gpus", f"5 nodes of 2 CPUs, 1024 MiB, 3 GPUs for pool: {has}", True)],
        "nodes": [("cluster", f"12 nodes of 2 CPUs, 1024 MiB for pool: {has}", True)],
        "rollout": [("roles.rollout.gpus", f"1 node of 1 CPUs, 1024 MiB, 3 GPUs for rollout: {has}", True)],
        "elastic": [("rollouts.burst.mem", f"1 node of 1 CPUs, 9216 MiB for burst: {has}", True)],
    }


def test_request_that_would_stay_pending_forever_is_reported(lab: SlurmLab) -> None:
    lab.slurm("scontrol", "create", "partitionname=short", "nodes=n[1-5]", "maxtime=10", "maxnodes=2")
    try:
        (results,) = problems_of(lab, {"short": SLURM + '[slurm]\npartition = "short"\n'}).values()
    finally:
        lab.slurm("scontrol", "delete", "partitionname=short")
    assert [(dotted_key(problem.key), problem.text, problem.certain) for problem in results] == [
        ("cluster.walltime", "1d for pool: partition short allows at most 10min", True),
        ("cluster", "5 nodes for pool: partition short allows a job at most 2", True),
    ]


def test_nodes_that_are_down_at_present_are_not_a_certain_problem(lab: SlurmLab) -> None:
    lab.slurm("scontrol", "update", "nodename=n[2-5]", "state=drain", "reason=test")
    try:
        (results,) = problems_of(lab, {"pool": SLURM}).values()
    finally:
        lab.slurm("scontrol", "update", "nodename=n[2-5]", "state=resume")
        lab.clear()
    assert [problem.certain for problem in results] == [False]
    assert "fewer nodes are up at present; the job would wait for them" in results[0].text


def narrowed(option: str, value: str) -> str:
    return SLURM + f'[slurm]\naccount = "any"\n{option} = "{value}"\n'


def test_option_that_leaves_no_node_is_named_whatever_others_wait_for(lab: SlurmLab) -> None:
    """A pending job of somebody else keeps nodes planned, and one node is reserved."""
    options = {"tmp": "1T", "mincpus": "99", "sockets-per-node": "9", "cores-per-socket": "99", "exclude": "n[1-5]"}
    busy = lab.slurm("sbatch", "--parsable", "--exclusive", "-N1", "-wn1", "-t10", "--wrap=sleep 300").strip()
    waiting = lab.slurm("sbatch", "--parsable", "--exclusive", "-N4", "-t10", "--wrap=sleep 300").strip()
    lab.slurm(
        "scontrol",
        "create",
        "reservation",
        "reservation=r",
        "starttime=now",
        "duration=infinite",
        "user=root",
        "flags=ignore_jobs",
        "nodes=n5",
    )
    try:
        lab.wait_for(lambda: {"plnd", "resv"} <= set(lab.states().values()), f"no node is planned: {lab.states()}")
        results = problems_of(lab, {"fits": SLURM, **{name: narrowed(name, value) for name, value in options.items()}})
    finally:
        lab.slurm("scancel", busy, waiting)
        lab.slurm("scontrol", "delete", "reservation=r")
        lab.clear()
    assert results.pop("fits") == [], "a job that only waits for others was refused"
    reported = {name: [(problem.key, problem.certain) for problem in problems] for name, problems in results.items()}
    assert reported == {name: [(("slurm", name), True)] for name in options}


def test_refusal_that_may_be_lifted_is_not_a_certain_problem(accounting_lab: SlurmLab) -> None:
    small = SLURM.replace("replicas = 2", "exclusive = false").replace('2, mem = "1GiB"', '4, mem = "4GiB"')
    small = small.replace("[roles.rollout]", "[roles.trainer]\nexclusive = false\n[roles.rollout]")
    accounting.limit(accounting_lab, MaxSubmitJobs=0)
    try:
        (results,) = problems_of(accounting_lab, {"full": small}).values()
    finally:
        accounting.limit(accounting_lab, MaxSubmitJobs=-1)
    assert {problem.certain for problem in results} == {False}
    assert all("AssocMaxSubmitJobLimit" in problem.text and "for now" in problem.text for problem in results)


def test_unanswered_check_is_not_a_certain_problem(lab: SlurmLab) -> None:
    with lab.controller_stopped():
        (results,) = problems_of(lab, {"pool": SLURM}).values()
    assert [problem.certain for problem in results] == [False]
    assert results[0].text.startswith("cannot check the job with Slurm: sinfo: ")


def test_unknown_account_and_qos_are_reported_where_accounts_are_enforced(accounting_lab: SlurmLab) -> None:
    small = SLURM.replace("replicas = 2", "exclusive = false").replace('2, mem = "1GiB"', '4, mem = "4GiB"')
    small = small.replace("[roles.rollout]", "[roles.trainer]\nexclusive = false\n[roles.rollout]")
    results = problems_of(
        accounting_lab, {"account": small + '[slurm]\naccount = "nobody"\n', "qos": small + '[slurm]\nqos = "golden"\n'}
    )
    reported = {
        name: [dotted_key(problem.key) for problem in problems if problem.certain] for name, problems in results.items()
    }
    assert reported == {"account": ["slurm.account"], "qos": ["slurm.qos"]}
    assert "Invalid account" in results["account"][0].text
    assert "Invalid qos specification" in results["qos"][0].text
