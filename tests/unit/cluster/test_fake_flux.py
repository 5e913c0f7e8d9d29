"""A cluster with other traits than Slurm and the local one is planned, checked and opened by its traits alone."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from pydantic_core import PydanticCustomError

from rrl.api.preflight.job_preflight import CheckedJob, checked
from rrl.api.watching.manager_liveness import UNATTENDED, liveness
from rrl.cli.job.check import overview_text
from rrl.config.job.document import JobDocument
from rrl.config.job.load import job_from
from rrl.config.job.schema import Job
from rrl.config.job.validation import check
from rrl.core.run_dir import RUNS_ENV, RunDir
from rrl.core.run_spec import RunSpec
from rrl.core.types import Cause, Outcome, UsageError
from rrl.health.readers.base import READERS
from rrl.manager.bootstrap.preview import demand
from rrl.manager.bootstrap.start import open_cluster
from rrl.manager.model.actions import Exclude
from rrl.manager.model.queries import readers_for
from rrl.tests.support.cli.story import Story, job_view
from rrl.tests.support.fake_flux import FLUX, FakeFlux, FakeFluxCluster, install, on_flux
from rrl.tests.support.job_toml import JOB
from rrl.tests.support.manager.jobs import ROLLOUTS, TRAINER, gang_job, in_node_groups, job
from rrl.tests.support.manager.world import assert_nothing_is_left

R0, R1 = ROLLOUTS
SPECS = {"one": job(spares=2), "gang": gang_job(spares=2), "replica": in_node_groups()}


@pytest.fixture(autouse=True)
def _flux(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch)
    monkeypatch.setenv(RUNS_ENV, str(tmp_path / "runs"))
    monkeypatch.setenv("PATH", str(tmp_path))  # without sbatch and squeue


# ── the planner ──────────────────────────────────────────────────────────────────────────────────────────────────────
def at_work(spec: RunSpec) -> FakeFlux:
    world = FakeFlux(spec, spec.nodes + 4)
    world.steady()
    world.all_up()
    return world


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_replicas_leave_broken_nodes_which_are_neither_drained_nor_given_back(spec: RunSpec) -> None:
    world = at_work(spec)
    for cause, replica in ((Cause.GPU, TRAINER), (Cause.NODE, R0)):
        node = world.node_of(replica)
        world.exclude(node, cause)
        world.play(world.works).wait(30.0)
        assert world.node_of(replica) != node
    assert len(world.tags(Exclude)) == 2


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_run_survives_deaths_of_replicas_nodes_and_managers_and_completes(spec: RunSpec) -> None:
    world = at_work(spec)
    world.lose_node(world.node_of(R0))
    world.play(world.works)
    world.die_before = world.planned + 2
    world.kill(TRAINER)
    world.play(world.works)
    world.freeze(R1)
    world.play(world.works)
    for step in range(1, spec.steps + 1):
        world.commit(step)
    world.play()
    assert_nothing_is_left(world, Outcome.COMPLETED)


def test_drain_that_a_user_requests_takes_the_node_out_of_the_run_only() -> None:
    world = at_work(SPECS["one"])
    node = world.node_of(R0)
    world.send_command("drain", node, "fan")
    world.play(world.works).wait(30.0)
    assert world.node_of(R0) != node
    assert world.tags(Exclude) == [f"{node}!exclude"]


def test_agents_read_the_whole_node_since_it_is_a_machine_of_its_own() -> None:
    assert readers_for(job_view(cluster=FLUX), 0) == READERS
    assert readers_for(job_view(cluster="local"), 0) == ()


# ── the preflight ────────────────────────────────────────────────────────────────────────────────────────────────────
def preflight(folder: Path, more: str = "") -> CheckedJob:
    (folder / "job.toml").write_text(JOB + more)
    document = JobDocument([folder / "job.toml"])
    return checked(on_flux(job_from(document)), document)


def test_files_and_packages_that_this_machine_lacks_may_be_on_the_nodes(tmp_path: Path) -> None:
    mine = '[env]\nvenv = "/no/venv"\n[commands.judge]\ncommand = ["/no/judge"]\n'
    doubts = preflight(tmp_path, mine).preflight.doubts
    assert "env.venv = '/no/venv' does not exist on this machine; the nodes need it" in doubts
    assert any(doubt.startswith("commands.judge.command: ") and "the nodes need it" in doubt for doubt in doubts)


def test_manager_runs_on_this_machine_so_what_it_needs_must_be_here(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"transport\.network: no interface nosuch0"):
        preflight(tmp_path, '[transport]\nnetwork = "nosuch0"\n')
    with pytest.raises(UsageError, match=r"notify\.command: there is no command"):
        preflight(tmp_path, '[notify]\ncommand = ["no-such-pager"]\n')


def test_check_counts_jobs_without_a_manager_and_promises_no_test_by_slurm(tmp_path: Path) -> None:
    found = preflight(tmp_path)
    assert (found.preflight.limits, found.preflight.starts) == ("", {})
    assert [title for title, _ in found.plan] == ["flux cluster", "steps"]
    assert "virtual" not in found.plan[0][1]
    shown = overview_text(found.spec, demand(found.spec), {})
    assert "jobs       1 to start, at most 6 at the same time" in shown
    assert "of 4 cores" in shown
    assert "Slurm" not in shown


@pytest.mark.parametrize(
    ("more", "text"),
    [({"form": "hetjob"}, '"hetjob" needs kind = "slurm"; set `kind`, or remove this key'), ({"form": "replica"}, "")],
)
def test_job_may_use_only_forms_that_the_cluster_grants(more: dict[str, str], text: str) -> None:
    slurm = tomllib.loads(JOB)
    slurm["cluster"] |= {"kind": "slurm", "one_node_components": True, "spares": 0, **more}
    wanted = on_flux(Job.model_validate(slurm))
    if not text:
        check(wanted)
        return
    with pytest.raises(PydanticCustomError, match=text):
        check(wanted)


# ── the manager ──────────────────────────────────────────────────────────────────────────────────────────────────────
def test_manager_opens_the_cluster_from_its_row_and_listens_where_nodes_reach_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rrl.manager.bootstrap.start.own_address", lambda network: f"10.0.0.7 {network}")
    run = RunDir(tmp_path / "run")
    run.create()
    cluster, host = open_cluster(run, job_view(cluster=FLUX))
    assert isinstance(cluster, FakeFluxCluster)
    assert host == "10.0.0.7 "


def test_run_without_a_manager_is_unattended_and_no_queue_is_asked(tmp_path: Path) -> None:
    story = Story("small-1", job=job_view(cluster=FLUX)).works()
    found = liveness(story.written(tmp_path), story.recorded(), lambda: pytest.fail("Slurm is asked"))
    assert found.standing == UNATTENDED
