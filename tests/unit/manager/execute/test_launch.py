"""Launch files and steps, with and without a container."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from rrl.cluster.base import AllocationRequest, AllocationState, AllocationStatus, Refused
from rrl.core.launch import Launch, read_launch, tag_of
from rrl.core.role_environment import EnvSpec
from rrl.core.run_dir import RunDir
from rrl.core.run_spec import ContainerSpec, RoleSpec, RunSpec, TrackSpec, TransportSpec
from rrl.core.types import TRAINER, Incarnation, NodeName, ReplicaId, Resources, guest_id, standby_id
from rrl.manager.execute.launch import (
    apptainer,
    environment,
    mounts,
    outdated_parts,
    pyxis,
    save_passed_env,
    write_launch,
)
from rrl.manager.model.actions import Launch as LaunchAction
from rrl.manager.model.actions import Why
from rrl.manager.model.state import Allocation, State
from rrl.tests.support.manager.jobs import gang_job, job, with_guests

NODE = Resources(cpus=8, gpus=4)
PROBE = "import sys; sys.path.append(sys.path.pop(0)); import torch"


def role(launcher: str, image: str = "rl.sif", gpus: int = 1) -> RoleSpec:
    resources = Resources(cpus=2, gpus=gpus)
    return RoleSpec("rollout", "rollout", 1, 1, resources, True, ("python", "go.py"), {"A": "1"}, launcher, image)


CONTAINER = ContainerSpec(("/data:/mnt/data:ro", "/scratch"), "python3.12")


def test_apptainer_command_line_is_as_expected() -> None:
    assert apptainer(role("apptainer"), CONTAINER, "/runs/r1", "/home/me/job", ("python", "go.py")) == (
        "apptainer",
        "exec",
        "--no-eval",
        "--bind=/runs/r1:/runs/r1",
        "--bind=/home/me/job:/home/me/job",
        "--bind=/dev/shm:/dev/shm",
        "--bind=/data:/mnt/data:ro",
        "--bind=/scratch:/scratch",
        "--pwd=/home/me/job",
        "--nv",
        "/home/me/job/rl.sif",
        "python",
        "go.py",
    )


def test_pyxis_srun_options_are_as_expected() -> None:
    assert pyxis(role("pyxis", "nvcr.io#nvidia/pytorch:25.01-py3"), CONTAINER, "/runs/r1", "/home/me/job") == (
        "--container-image=nvcr.io#nvidia/pytorch:25.01-py3",
        "--container-mounts=/runs/r1:/runs/r1,/home/me/job:/home/me/job,/dev/shm:/dev/shm,/data:/mnt/data:ro,"
        "/scratch:/scratch",
        "--container-workdir=/home/me/job",
        "--no-container-mount-home",
        "--no-container-remap-root",
        "--no-container-entrypoint",
    )


def test_image_path_starts_at_the_job_folder_and_only_gpu_roles_get_the_driver() -> None:
    assert pyxis(role("pyxis", "image.sqsh"), CONTAINER, "/r", "/job")[0] == "--container-image=/job/image.sqsh"
    assert "docker://rl:1" in apptainer(role("apptainer", "docker://rl:1"), CONTAINER, "/r", "/job", ())
    assert "--nv" not in apptainer(role("apptainer", gpus=0), CONTAINER, "/r", "/job", ())


def test_job_mounts_take_precedence_and_unmountable_folders_are_refused() -> None:
    own = mounts(ContainerSpec(("/big/shm:/dev/shm:rw",)), "/r", "/job")
    assert own == (("/r", "/r", ""), ("/job", "/job", ""), ("/big/shm", "/dev/shm", "rw"))
    with pytest.raises(Refused, match="/a:b cannot be mounted"):
        mounts(CONTAINER, "/a:b", "/job")


class Prepared:
    """The launch file and step of a role or agent."""

    def __init__(self, run: RunDir, run_spec: RunSpec, replica: str = "rollout/0") -> None:
        incarnation = Incarnation(ReplicaId(replica), 1)
        action = LaunchAction(incarnation, f"{run.id}.x.1", "pool", NodeName("n1"), Why(("wanted",)))
        allocation = Allocation("pool", AllocationRequest("pool", 1, NODE, 60.0), 0.0)
        self.step = write_launch(run, State(run.id, run_spec, allocations={"pool": allocation}), action, "/job")
        self.launch: Launch = read_launch(self.step.launch_file)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    run_spec = RunDir(tmp_path / "run")
    run_spec.create()
    for name, value in {
        "PATH": "/host/bin",
        "VIRTUAL_ENV": "/host/venv",
        "WANDB_API_KEY": "secret",
        "SLURM_NTASKS": "64",
        "OMPI_COMM_WORLD_RANK": "1",
        "RRL_NETWORK": "ib0",
    }.items():
        monkeypatch.setenv(name, value)
    return run_spec


def run_spec_with(launcher: str, **changes: object) -> RunSpec:
    env = EnvSpec(("true",), passed=("WANDB_*", "SLURM_*"), probe=("torch",), python="/opt/py", probe_python="/opt/py")
    roles = (role(launcher),)
    given = {"roles": roles, "env": env, "container": CONTAINER, "cluster": "slurm"} | changes
    return msgspec.structs.replace(job(), **given)


def test_apptainer_runs_only_the_command_in_the_image(run: RunDir) -> None:
    run_spec = run_spec_with("apptainer")
    save_passed_env(run, run_spec)
    prepared = Prepared(run, run_spec)
    assert prepared.launch.argv[:2] == ("apptainer", "exec")
    assert prepared.launch.argv[-2:] == ("python", "go.py")
    assert (prepared.step.container, prepared.step.python, prepared.launch.in_image) == ((), "", False)
    assert "rrl_at='setup line 1'" in prepared.launch.setup
    assert (prepared.launch.env["PYTHONNOUSERSITE"], prepared.launch.env["PATH"]) == ("1", "/opt:/host/bin")


def test_pyxis_runs_the_whole_step_in_the_image_without_host_variables(run: RunDir) -> None:
    run_spec = run_spec_with("pyxis")
    save_passed_env(run, run_spec)
    prepared = Prepared(run, run_spec)
    assert prepared.launch.argv == ("python", "go.py")
    assert prepared.step.container[0] == "--container-image=/job/rl.sif"
    assert (prepared.step.python, prepared.launch.in_image, prepared.launch.setup) == ("python3.12", True, "")
    assert not prepared.launch.env.keys() & {"PATH", "VIRTUAL_ENV"}


def test_passed_secrets_reach_roles_and_are_stored_in_private_files(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_spec = run_spec_with("direct")
    save_passed_env(run, run_spec)
    monkeypatch.delenv("WANDB_API_KEY")  # the manager runs elsewhere
    prepared = Prepared(run, run_spec)
    assert prepared.launch.env["WANDB_API_KEY"] == "secret"
    assert not prepared.launch.env.keys() & {"SLURM_NTASKS", "OMPI_COMM_WORLD_RANK"}
    assert b"secret" not in msgspec.json.encode(run_spec)
    secret_files = [path for path in run.path.rglob("*") if path.is_file() and b"secret" in path.read_bytes()]
    assert sorted(secret_files) == [run.passed_env, prepared.step.launch_file]
    assert {stat.S_IMODE(os.stat(path).st_mode) for path in secret_files} == {0o600}


@pytest.mark.parametrize(
    ("kind", "trackers", "gets"),
    [("rollout", ("wandb",), True), ("agents", (), True), ("agents", ("wandb",), False), ("reward", ("wandb",), False)],
)
def test_key_of_a_tracker_does_not_reach_roles_that_run_the_models_code(
    run: RunDir, kind: str, trackers: tuple[str, ...], gets: bool
) -> None:
    one = msgspec.structs.replace(role("direct"), name=kind, kind=kind)
    run_spec = run_spec_with("direct", roles=(one,), track=TrackSpec(trackers))
    save_passed_env(run, run_spec)
    assert ("WANDB_API_KEY" in Prepared(run, run_spec, f"{kind}/0").launch.env) is gets


@pytest.mark.parametrize(
    ("kind", "built_in", "safe"), [("rollout", True, True), ("rollout", False, False), ("agents", True, False)]
)
def test_only_programs_of_rrl_ignore_the_working_folder_when_they_start_python(
    run: RunDir, kind: str, built_in: bool, safe: bool
) -> None:
    one = msgspec.structs.replace(role("direct"), name=kind, kind=kind, built_in=built_in)
    run_spec = run_spec_with("direct", roles=(one,))
    save_passed_env(run, run_spec)
    assert ("PYTHONSAFEPATH" in Prepared(run, run_spec, f"{kind}/0").launch.env) is safe


def test_probe_finds_installed_modules_before_those_in_the_working_folder(tmp_path: Path) -> None:
    for name in ("msgspec", "rrl_beside"):
        (tmp_path / f"{name}.py").touch()
    shown = PROBE.replace("torch", "msgspec, rrl_beside; print(msgspec.__file__)")
    found = subprocess.run([sys.executable, "-c", shown], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == msgspec.__file__


@pytest.mark.parametrize(("gpus", "granted", "overlap", "cpus"), [(0, 2, False, 2), (0, 1, True, 8), (1, 1, False, 2)])
def test_step_without_gpus_overlaps_if_its_job_has_lost_a_node(
    run: RunDir, gpus: int, granted: int, overlap: bool, cpus: int
) -> None:
    spec = run_spec_with("direct", roles=(msgspec.structs.replace(role("direct"), per_member=Resources(2, gpus)),))
    save_passed_env(run, spec)
    nodes = tuple(NodeName(f"n{number}") for number in range(1, granted + 1))
    status = AllocationStatus(AllocationState.RUNNING, "1", nodes)
    allocation = Allocation("pool", AllocationRequest("pool", 2, NODE, 60.0), 0.0, status)
    state = State(run.id, spec, allocations={"pool": allocation})
    rollout = Incarnation(ReplicaId("rollout/0"), 2)
    step = write_launch(
        run, state, LaunchAction(rollout, tag_of(run.id, rollout), "pool", NodeName("n1"), Why(("failed",))), "/job"
    )
    assert (step.overlap, step.resources.cpus, step.resources.gpus) == (overlap, cpus, gpus)


def test_agent_sees_all_gpus_and_probes_in_the_environment_of_roles(run: RunDir) -> None:
    run_spec = run_spec_with("direct")
    save_passed_env(run, run_spec)
    prepared = Prepared(run, run_spec, "agent/n1")
    assert (prepared.step.overlap, prepared.step.agent, prepared.step.resources) == (
        True,
        True,
        Resources(cpus=1, gpus=4),
    )
    assert prepared.launch.probe == ("/opt/py", "-c", PROBE)
    assert prepared.launch.env["WANDB_API_KEY"] == "secret"
    assert prepared.launch.probe_timeout == run_spec.limits.join / 2


def test_probe_runs_where_roles_run(run: RunDir) -> None:
    for launcher, expected in (("apptainer", ("apptainer", "exec")), ("pyxis", ())):
        run_spec = run_spec_with(launcher)
        save_passed_env(run, run_spec)
        probe = Prepared(run, run_spec, "agent/n1").launch.probe
        assert probe[:2] == expected
        assert probe[-3:] == (("python3.12", "-c", PROBE) if probe else ())


def test_job_network_precedes_the_shells_which_counts_on_slurm_only(run: RunDir) -> None:
    for network, cluster, expected in (("eth1", "slurm", "eth1"), ("", "slurm", "ib0"), ("", "local", "")):
        run_spec = run_spec_with("direct", transport=TransportSpec(network=network), cluster=cluster)
        save_passed_env(run, run_spec)
        assert Prepared(run, run_spec).launch.network == expected


def test_role_inherits_only_named_variables_of_the_manager(run: RunDir) -> None:
    given = environment(job(), Resources(cpus=3), "/job")
    assert not [name for name in given if name.startswith(("SLURM", "OMPI", "PMI", "WANDB"))]
    assert (given["PATH"], given["OMP_NUM_THREADS"]) == ("/host/bin", "3")


def test_role_inherits_the_folders_of_caches_except_in_a_container(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {"TORCHINDUCTOR_CACHE_DIR": "/cache/torch", "MPLCONFIGDIR": "/cache/matplotlib"}
    for name, folder in folders.items():
        monkeypatch.setenv(name, folder)
    for launcher, inherited in (("direct", folders), ("pyxis", {})):
        run_spec = run_spec_with(launcher)
        save_passed_env(run, run_spec)
        env = Prepared(run, run_spec).launch.env
        assert {name: env[name] for name in folders if name in env} == inherited


# ── standby processes ────────────────────────────────────────────────────────────────────────────────────────────────
STANDBY = Incarnation(standby_id(NodeName("n1")), 1)


def promotion_of_standby(run: RunDir, spec: RunSpec) -> tuple[State, LaunchAction]:
    """Write the launch file of a standby process. Return the state and the action that promotes the process."""
    trainer = msgspec.structs.replace(spec.roles[0], name="trainer", kind="trainer")
    spec = msgspec.structs.replace(spec, roles=(trainer,))
    allocation = Allocation("pool", AllocationRequest("pool", 1, NODE, 60.0), 0.0)
    state = State(run.id, spec, allocations={"pool": allocation})
    tag, why = tag_of(run.id, STANDBY), Why(("wanted",))
    write_launch(run, state, LaunchAction(STANDBY, tag, "pool", NodeName("n1"), why), "/job")
    return state, LaunchAction(Incarnation(TRAINER, 2), tag, "pool", NodeName("n1"), why, STANDBY)


def test_standby_with_the_environment_of_a_new_step_lacks_nothing(run: RunDir) -> None:
    spec = run_spec_with("direct")
    save_passed_env(run, spec)
    state, promotion = promotion_of_standby(run, spec)
    assert outdated_parts(run, state, promotion, "/job") == ()


def test_outdated_parts_of_a_standby_are_named_without_their_values(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = run_spec_with("direct")
    save_passed_env(run, spec)
    state, promotion = promotion_of_standby(run, spec)
    monkeypatch.setenv("PATH", "/other/bin")  # as with a manager that was started in another environment
    monkeypatch.setenv("TZ", "UTC")
    assert outdated_parts(run, state, promotion, "/job") == ("PATH", "TZ")
    monkeypatch.setenv("WANDB_API_KEY", "new secret")
    save_passed_env(run, spec)
    assert outdated_parts(run, state, promotion, "/elsewhere") == ("PATH", "RRL_JOB_DIR", "TZ", "WANDB_API_KEY", "cwd")
    other = msgspec.structs.replace(state, job=msgspec.structs.replace(state.job, env=EnvSpec(("false",))))
    assert outdated_parts(run, other, promotion, "/job")[-1] == "setup"


# ── guests ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_guest_runs_the_program_of_the_rollouts_beside_the_trainer_on_all_its_gpus(run: RunDir) -> None:
    spec = with_guests(gang_job(4, 4, rollouts=0, min_rollouts=0), (2, 1))
    node = spec.node_groups[0].node
    status = AllocationStatus(AllocationState.RUNNING, "7", (NodeName("n1"),))
    pool = Allocation("pool", AllocationRequest("pool", 1, node, 60.0), 0.0, status)
    guest = Incarnation(guest_id(NodeName("n1"), 3), 2)
    action = LaunchAction(guest, tag_of("r1", guest), "pool", NodeName("n1"), Why(("due",)))
    save_passed_env(run, spec)
    step = write_launch(run, State("r1", spec, allocations={"pool": pool}), action, "/job")
    launch = read_launch(step.launch_file)
    assert (step.overlap, step.resources.gpus, step.resources.cpus, step.resources.mem) == (True, 8, node.cpus, 0)
    assert (launch.guest, launch.standby, launch.role, launch.gpus) == (True, False, "rollout", 1)
    assert launch.argv == spec.role("rollout").argv
