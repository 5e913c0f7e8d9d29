"""Build what the first process of a step reads: its launch file, the cluster's step and, in a container, its command.

With apptainer the first process stays on the node and only the command runs in the image; with pyxis, a plugin of srun,
the whole step runs in it. Neither creates a process namespace, so the processes of a role are found and ended by their
marks as everywhere else. Sources: apptainer-exec(1) of 1.4 (man.archlinux.org), apptainer.org/docs/user/latest (bind
paths, environment), github.com/NVIDIA/pyxis (README, wiki/Usage).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ...core.launch import HEARTBEAT_INTERVAL_ENV, Launch
from ...core.log_lines import LOG_LEVEL_ENV
from ...core.role_environment import HOST_ONLY_VARIABLES, INHERITED_VARIABLES, prelude, select_variables
from ...core.run_dir import RunDir, write_atomically
from ...core.run_spec import ContainerSpec, Resources, RoleSpec, RunSpec
from ...core.types import AGENT, STANDBY_ROLE, role_of, standby_role_of
from ...transport.address import NETWORK_ENV
from ..cluster.base import NotStarted, Step
from ..model.actions import Launch as LaunchAction
from ..model.queries import readers_for, requires_admission
from ..model.state import State

APPTAINER, PYXIS = "apptainer", "pyxis"
_SHARED_MEMORY = "/dev/shm"
"""torch's data loaders and UCX meet there; pyxis's images have one of their own otherwise"""
_IMAGE_SUFFIXES = (".sif", ".sqsh", ".squashfs", ".img")
"""An image with such a name is a file, and like every path in job.toml it starts at the folder of job.toml. apptainer
would find it there by itself, pyxis takes a name without a slash for one in a registry."""
NO_USER_SITE = {"PYTHONNOUSERSITE": "1"}
"""For every container: ~/.local of the host holds packages for the host's Python."""


def mounts(container: ContainerSpec, run_dir: str, job_dir: str) -> tuple[tuple[str, str, str], ...]:
    """(source, target, flag) of each mount, the flag empty, ``ro`` or ``rw``: run directory, job folder, shared memory,
    and the job's own, which win where they have the same target. Raises NotStarted for a folder that cannot be one."""
    for folder in (run_dir, job_dir):
        if set(folder) & set(":,+"):
            raise NotStarted(f"{folder} cannot be mounted into a container: its name has one of : , +")
    by_target = {folder: (folder, folder, "") for folder in (run_dir, job_dir, _SHARED_MEMORY)}
    for text in container.mounts:
        source, _, rest = text.partition(":")
        target, _, flag = rest.partition(":")
        by_target[target or source] = (source, target or source, flag)
    return tuple(by_target.values())


def apptainer(
    role: RoleSpec, container: ContainerSpec, run_dir: str, job_dir: str, argv: Sequence[str]
) -> tuple[str, ...]:
    """``argv`` in the role's image. The environment that apptainer is started with reaches it, but for PATH and
    LD_LIBRARY_PATH, which are the image's (apptainer.org, environment and metadata); values are not evaluated
    (``--no-eval``): a password may hold a dollar sign. The site's default decides whether the home is mounted."""
    binds = (f"--bind={':'.join(filter(None, mount))}" for mount in mounts(container, run_dir, job_dir))
    gpus = ("--nv",) if role.per_member.gpus else ()
    return ("apptainer", "exec", "--no-eval", *binds, f"--pwd={job_dir}", *gpus, _image(role, job_dir), *argv)


def pyxis(role: RoleSpec, container: ContainerSpec, run_dir: str, job_dir: str) -> tuple[str, ...]:
    """Options of srun. No entry point and no home: a site's enroot.conf may have both, and the first is not ours."""
    listed = ",".join(":".join(filter(None, mount)) for mount in mounts(container, run_dir, job_dir))
    return (
        f"--container-image={_image(role, job_dir)}", f"--container-mounts={listed}", f"--container-workdir={job_dir}",
        "--no-container-mount-home", "--no-container-remap-root", "--no-container-entrypoint",
    )  # fmt: skip


def _image(role: RoleSpec, job_dir: str) -> str:
    if "://" in role.image or not role.image.endswith(_IMAGE_SUFFIXES):
        return role.image
    return str(Path(job_dir) / Path(role.image).expanduser())


AGENT_CPUS = 1
"""of a step that overlaps: an agent takes nothing of its own, but sees all of its node's GPUs"""
PROBE_TIMEOUT_S = 180.0
"""s for [env] probe; importing torch from a file server that a hundred nodes ask at once takes a minute or two"""
PROBE_SHARE = 0.5
"""of ``limits.join``: the agent says only after the probe that it is there"""

ADMISSION_TIMEOUT_S = 30.0
"""s for a first round of the readers (docs/health.md); each has a deadline of its own"""
ADMISSION_SHARE = 0.25
"""of ``limits.join``, as above"""


def write_launch(run: RunDir, state: State, action: LaunchAction, job_dir: str) -> Step:
    """Write the launch file of ``action`` (0600, durable) and return the step for the cluster.

    Raises OSError when the run directory cannot be read or written, Refused when there can be no such step."""
    name = role_of(action.incarnation.replica)
    if name == AGENT:
        launch, step = _agent(run, state, action, job_dir)
    elif name == STANDBY_ROLE:
        launch, step = _standby(run, state, action, job_dir)
    else:
        launch, step = _role(run, state, action, job_dir, state.job.role(name))
    write_atomically(step.launch_file, msgspec.json.encode(launch))
    return step


def _role(run: RunDir, state: State, action: LaunchAction, job_dir: str, role: RoleSpec) -> tuple[Launch, Step]:
    launch = msgspec.structs.replace(
        _launch(run, state.job, action, job_dir),
        argv=_argv(role, state.job, str(run.path), job_dir),
        env=_role_environment(role, state.job, job_dir, _load_passed_env(run, state.job)),
        watch=role.watch,
        gpus=role.per_member.gpus,
    )
    step = _step(run, action, role.per_member)
    if role.launcher == PYXIS:  # what [env] sets up is the host's, and the step is not on it
        options = pyxis(role, state.job.container, str(run.path), job_dir)
        launch = msgspec.structs.replace(launch, setup="", in_image=True)
        step = msgspec.structs.replace(step, container=options, python=state.job.container.python)
    return launch, step


def _standby(run: RunDir, state: State, action: LaunchAction, job_dir: str) -> tuple[Launch, Step]:
    """The command of the role that is kept warm. A rollout's has its engine running, and what it takes of the node to
    itself, as the rollout that it becomes. The trainer's waits beside whatever works there. Steps that overlap are all
    given the node's first CPUs and GPUs (measured): so it gets all of them, to have its share of whatever is free once
    it has become something; of the GPUs it is then told which."""
    role = state.job.role(standby_role_of(action.incarnation.replica))
    launch, step = _role(run, state, action, job_dir, role)
    launch = msgspec.structs.replace(launch, standby=True)
    if not role.standby_shares_node:
        return launch, step
    node = _node(state, action)
    gpus = node.gpus if role.per_member.gpus else 0
    resources = Resources(max(node.cpus, role.per_member.cpus), gpus, role.per_member.mem)
    return msgspec.structs.replace(launch, gpus=gpus), msgspec.structs.replace(step, resources=resources, overlap=True)


def _node(state: State, action: LaunchAction) -> Resources:
    """What we asked for of each node of the allocation."""
    allocation = state.allocations.get(action.allocation)
    return allocation.request.node if allocation is not None else Resources()


def _agent(run: RunDir, state: State, action: LaunchAction, job_dir: str) -> tuple[Launch, Step]:
    gpus = _node(state, action).gpus
    launch, probe = _launch(run, state.job, action, job_dir), _probe(state.job, str(run.path), job_dir)
    launch = msgspec.structs.replace(
        launch,
        env=environment(state.job, Resources(), job_dir) | (_load_passed_env(run, state.job) if probe else {}),
        probe=probe,
        probe_timeout=min(PROBE_TIMEOUT_S, PROBE_SHARE * state.job.limits.join),
        gpus=gpus if state.job.cluster != "local" else 0,
        readers=readers_for(state.job, gpus),
        admission_timeout=min(ADMISSION_TIMEOUT_S, ADMISSION_SHARE * state.job.limits.join)
        if requires_admission(state.job, gpus)
        else 0.0,
    )
    step = _step(run, action, Resources(cpus=AGENT_CPUS, gpus=gpus))
    return launch, msgspec.structs.replace(step, overlap=True, agent=True)


def _launch(run: RunDir, job: RunSpec, action: LaunchAction, job_dir: str) -> Launch:
    slurm = job.cluster == "slurm"
    return Launch(
        tag=action.step,
        run_dir=str(run.path),
        incarnation=action.incarnation,
        node=action.node,
        argv=(),
        env={},
        cwd=job_dir,
        grace=job.limits.step_grace,
        dies_with_launcher=slurm,
        setup=prelude(job.env),
        network=job.network or (os.environ.get(NETWORK_ENV, "") if slurm else ""),
    )


def _step(run: RunDir, action: LaunchAction, resources: Resources) -> Step:
    log = run.log_file(f"{action.step}.step")
    return Step(action.step, action.allocation, action.node, resources, run.launch_file(action.step), log)


def _argv(role: RoleSpec, job: RunSpec, run_dir: str, job_dir: str) -> tuple[str, ...]:
    if role.launcher == APPTAINER:
        return apptainer(role, job.container, run_dir, job_dir, role.argv)
    return role.argv


def _probe(job: RunSpec, run_dir: str, job_dir: str) -> tuple[str, ...]:
    """The command by which a node shows that [env] probe can be imported: on the host, or where no role runs on it in
    apptainer's container. In pyxis's there is no looking from outside."""
    modules = f"import {', '.join(job.env.probe)}"
    if not job.env.probe or all(role.launcher == PYXIS for role in job.roles):
        return ()
    if any(role.launcher == "direct" for role in job.roles):
        return (job.env.probe_python, "-c", modules)
    contained = next(role for role in job.roles if role.launcher == APPTAINER)
    return apptainer(contained, job.container, run_dir, job_dir, (job.container.python, "-c", modules))


def _role_environment(role: RoleSpec, job: RunSpec, job_dir: str, passed: dict[str, str]) -> dict[str, str]:
    given = environment(job, role.per_member, job_dir) | passed
    if role.launcher == PYXIS:
        given = {name: value for name, value in given.items() if name not in HOST_ONLY_VARIABLES}
    return given | ({} if role.launcher == "direct" else NO_USER_SITE) | role.env


def environment(job: RunSpec, resources: Resources, job_dir: str) -> dict[str, str]:
    """The environment of a role but for what the submitting shell, its spec and its node add."""
    inherited = {name: os.environ[name] for name in INHERITED_VARIABLES if name in os.environ}
    if folder := os.path.dirname(job.env.python):  # "python" in a command is the one that has rrl
        inherited["PATH"] = os.pathsep.join((folder, inherited.get("PATH", os.defpath)))
    return inherited | {
        HEARTBEAT_INTERVAL_ENV: str(job.limits.heartbeat),
        LOG_LEVEL_ENV: os.environ.get(LOG_LEVEL_ENV) or job.manager.log_level,
        "RRL_JOB_DIR": job_dir,
        "OMP_NUM_THREADS": str(resources.cpus),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",  # nothing that a run needs may depend on a download in the middle of it
    }


def _load_passed_env(run: RunDir, job: RunSpec) -> dict[str, str]:
    """What ``rrl submit`` kept of its shell. It is read for each launch: the journal and our memory stay free of it."""
    return msgspec.json.decode(run.passed_env.read_bytes(), type=dict[str, str]) if job.env.passed else {}


def save_passed_env(run: RunDir, job: RunSpec) -> None:
    """Keep the variables of this shell that roles get, 0600: the manager may run elsewhere. Raises OSError."""
    write_atomically(run.passed_env, msgspec.json.encode(select_variables(job.env.passed, os.environ)))


def job_dir_of(source: str) -> str:
    """The folder of the job file: the roles' working folder, where a user's module is found."""
    return str(Path(source).parent)
