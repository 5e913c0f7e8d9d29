"""Write the launch file that the first process of a step reads, and build the command line of the step's container.

With apptainer the first process runs on the host, and only the command runs in the image. With pyxis, a plugin of srun,
the whole step runs in the image. Neither creates a process namespace, so the processes of a role are found and ended by
the marks in their environment, exactly as without a container. Sources: apptainer-exec(1) of 1.4 (man.archlinux.org),
apptainer.org/docs/user/latest (bind paths, environment), github.com/NVIDIA/pyxis (README, wiki/Usage).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ...cluster.base import NotStarted, Step
from ...cluster.traits import traits_of
from ...core.launch import HEARTBEAT_INTERVAL_ENV, Launch, read_launch, tag_of
from ...core.log_lines import LOG_LEVEL_ENV
from ...core.role_environment import HOST_ONLY_VARIABLES, INHERITED_VARIABLES, SAFE_PATH_ENV, prelude, select_variables
from ...core.run_dir import RunDir, write_atomically
from ...core.run_spec import ContainerSpec, RoleSpec, RunSpec
from ...core.types import AGENT, GUEST_ROLE, STANDBY_ROLE, TRAINER, Resources, role_of
from ...transport.address import NETWORK_ENV
from ..model.actions import Launch as LaunchAction
from ..model.queries import readers_for, requires_admission
from ..model.state import State

APPTAINER, PYXIS = "apptainer", "pyxis"
_SHARED_MEMORY = "/dev/shm"
"""Folder through which torch's data loaders and UCX share memory. The host's folder is mounted, because pyxis gives a
container a folder of its own."""
_IMAGE_SUFFIXES = (".sif", ".sqsh", ".squashfs", ".img")
"""Suffixes of images that are files. rrl resolves the path of such an image relative to the folder of job.toml, as
apptainer does. pyxis would look for a name without a slash in a registry."""
NO_USER_SITE = {"PYTHONNOUSERSITE": "1"}
"""Variables for every container. They keep its Python from importing packages in ~/.local, which are for the host's
Python."""


def mounts(container: ContainerSpec, run_dir: str, job_dir: str) -> tuple[tuple[str, str, str], ...]:
    """Return (source, target, flag) of each mount; the flag is empty, ``ro`` or ``rw``.

    The mounts are the run directory, the job folder, shared memory, and the mounts in job.toml. A mount in job.toml
    replaces a mount of rrl with the same target.

    Raises:
        NotStarted: the name of a folder has a character that a mount cannot express.
    """
    for folder in (run_dir, job_dir):
        if set(folder) & set(":,+"):
            raise NotStarted(f"{folder} cannot be mounted into a container: its name contains : or , or +")
    by_target = {folder: (folder, folder, "") for folder in (run_dir, job_dir, _SHARED_MEMORY)}
    for text in container.mounts:
        source, _, rest = text.partition(":")
        target, _, flag = rest.partition(":")
        by_target[target or source] = (source, target or source, flag)
    return tuple(by_target.values())


def apptainer(
    role: RoleSpec, container: ContainerSpec, run_dir: str, job_dir: str, argv: Sequence[str]
) -> tuple[str, ...]:
    """Return the command that runs ``argv`` in the role's image.

    The container inherits the environment of apptainer, except PATH and LD_LIBRARY_PATH, which the image sets
    (apptainer.org, environment and metadata). ``--no-eval`` keeps values as they are: a password may contain a dollar
    sign. The site's default decides whether the home directory is mounted.
    """
    binds = (f"--bind={':'.join(filter(None, mount))}" for mount in mounts(container, run_dir, job_dir))
    gpus = ("--nv",) if role.per_member.gpus else ()
    return ("apptainer", "exec", "--no-eval", *binds, f"--pwd={job_dir}", *gpus, _image(role, job_dir), *argv)


def pyxis(role: RoleSpec, container: ContainerSpec, run_dir: str, job_dir: str) -> tuple[str, ...]:
    """Return the options by which srun starts a step in the role's image.

    The options disable the image's entry point and the mount of the home directory, which a site's enroot.conf may
    enable.
    """
    listed = ",".join(":".join(filter(None, mount)) for mount in mounts(container, run_dir, job_dir))
    return (
        f"--container-image={_image(role, job_dir)}",
        f"--container-mounts={listed}",
        f"--container-workdir={job_dir}",
        "--no-container-mount-home",
        "--no-container-remap-root",
        "--no-container-entrypoint",
    )


def _image(role: RoleSpec, job_dir: str) -> str:
    if "://" in role.image or not role.image.endswith(_IMAGE_SUFFIXES):
        return role.image
    return str(Path(job_dir) / Path(role.image).expanduser())


AGENT_CPUS = 1
"""CPUs of an agent's step. The step overlaps with other steps and takes no resources of its own, but sees all GPUs of
its node."""
PROBE_TIMEOUT_S = 180.0
"""Timeout (s) of ``[env] probe``. Importing torch takes a minute or two if a hundred nodes read it from one file
server."""
PROBE_SHARE = 0.5
"""Maximum fraction of ``limits.join`` that ``[env] probe`` may take, because the agent joins only after it."""

ADMISSION_TIMEOUT_S = 30.0
"""Timeout (s) of the agent's first samples from all readers (docs/health.md); each reader also has its own deadline."""
ADMISSION_SHARE = 0.25
"""Maximum fraction of ``limits.join`` that the first samples may take, because the agent joins only after them."""


def write_launch(run: RunDir, state: State, action: LaunchAction, job_dir: str) -> Step:
    """Write the launch file of ``action`` (mode 0600, durable) and return the step for the cluster.

    Raises:
        OSError: the run directory cannot be read or written.
        Refused: the mounts of the step's container cannot be expressed.
    """
    name = role_of(action.incarnation.replica)
    if name == AGENT:
        launch, step = _agent(run, state, action, job_dir)
    elif name == STANDBY_ROLE:
        launch, step = _standby(run, state, action, job_dir)
    elif name == GUEST_ROLE:
        launch, step = _guest(run, state, action, job_dir)
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
    if not role.per_member.gpus and _has_lost_nodes(state, action):
        step = _overlapping(step, _node(state, action).cpus, gpus=0)
    if role.launcher == PYXIS:  # [env] sets up the host, but the step runs in the image
        options = pyxis(role, state.job.container, str(run.path), job_dir)
        launch = msgspec.structs.replace(launch, setup="", in_image=True)
        step = msgspec.structs.replace(step, container=options, python=state.job.container.python)
    return launch, step


def _overlapping(step: Step, node_cpus: int, gpus: int) -> Step:
    """Return a copy of the step that shares all CPUs of its node, and ``gpus`` GPUs, with the node's other steps.

    Slurm assigns the first CPUs and GPUs of the node to every overlapping step (measured). So an overlapping step with
    fewer CPUs than the node would share the same few CPUs with all other such steps.
    """
    resources = Resources(max(node_cpus, step.resources.cpus), gpus, step.resources.mem)
    return msgspec.structs.replace(step, resources=resources, overlap=True)


def _has_lost_nodes(state: State, action: LaunchAction) -> bool:
    """Return whether the allocation has fewer nodes than it was granted.

    If a job loses a node, Slurm 22.05 does not free the cores of the steps that began earlier, even when such a step
    ends. A new step with cores of its own may then find none on the node: "Requested nodes are busy" (measured; 24.11
    and 26.05 free the cores). GPUs are freed. A step that overlaps with other steps needs no free cores, but gets the
    first GPUs of its node, so only a step without GPUs may overlap.
    """
    allocation = state.allocations.get(action.allocation)
    return (
        allocation is not None
        and allocation.status is not None
        and len(allocation.status.nodes) < allocation.request.count
    )


def _standby(run: RunDir, state: State, action: LaunchAction, job_dir: str) -> tuple[Launch, Step]:
    """Return the launch file and the step of a standby process, which runs the command of the trainer.

    It shares its node with other steps. Its step requests all GPUs of the node, and the Promote message names the GPUs
    that the promoted process must use.
    """
    role, node = state.job.role(role_of(TRAINER)), _node(state, action)
    launch, step = _role(run, state, action, job_dir, role)
    gpus = node.gpus if role.per_member.gpus else 0
    return msgspec.structs.replace(launch, standby=True, gpus=gpus), _overlapping(step, node.cpus, gpus)


def _guest(run: RunDir, state: State, action: LaunchAction, job_dir: str) -> tuple[Launch, Step]:
    """Return the launch file and the step of a guest, which runs the command of the rollouts.

    Its step gets all GPUs of the trainer on the node, of which its launcher shows it some, and shares the memory of
    the job.
    """
    role, node = state.job.role("rollout"), _node(state, action)
    launch, step = _role(run, state, action, job_dir, role)
    gpus = state.job.role(role_of(TRAINER)).members_on_node.gpus if role.per_member.gpus else 0
    step = _overlapping(step, node.cpus, gpus)
    return launch, msgspec.structs.replace(step, resources=msgspec.structs.replace(step.resources, mem=0))


def outdated_parts(run: RunDir, state: State, action: LaunchAction, job_dir: str) -> tuple[str, ...]:
    """Return the names of the parts in which a standby process differs from a new step of the incarnation to launch.

    A standby process has already read its environment: torch, for example, reads OMP_NUM_THREADS when it is imported.
    The environment of a new step differs, for example, if the next manager was started with another PATH. The result
    has the names of variables and of other parts of the launch file, without their values, which may be secret.

    Raises:
        OSError: a file of the run directory cannot be read.
        ValueError: the launch file of the standby process is damaged.
    """
    assert action.standby is not None
    started = read_launch(run.launch_file(tag_of(run.id, action.standby)))
    role = state.job.role(role_of(action.incarnation.replica))
    wanted, _ = _role(run, state, action, job_dir, role)
    pairs = ((name, started.env.get(name), wanted.env.get(name)) for name in sorted({*started.env, *wanted.env}))
    variables = tuple(name for name, had, has in pairs if had != has)
    parts = ("argv", "cwd", "setup", "network", "in_image")
    return (*variables, *(part for part in parts if getattr(started, part) != getattr(wanted, part)))


def _node(state: State, action: LaunchAction) -> Resources:
    """Return the resources that were requested of each node of the allocation."""
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
        gpus=0 if traits_of(state.job.cluster).roles_run_here else gpus,
        readers=readers_for(state.job, gpus),
        admission_timeout=min(ADMISSION_TIMEOUT_S, ADMISSION_SHARE * state.job.limits.join)
        if requires_admission(state.job, gpus)
        else 0.0,
    )
    step = _step(run, action, Resources(cpus=AGENT_CPUS, gpus=gpus))
    return launch, msgspec.structs.replace(step, overlap=True, agent=True)


def _launch(run: RunDir, job: RunSpec, action: LaunchAction, job_dir: str) -> Launch:
    virtual = traits_of(job.cluster).roles_run_here
    return Launch(
        tag=action.step,
        run_dir=str(run.path),
        incarnation=action.incarnation,
        node=action.node,
        argv=(),
        env={},
        cwd=job_dir,
        grace=job.limits.step_grace,
        virtual_node=virtual,
        setup=prelude(job.env),
        network=job.transport.network or ("" if virtual else os.environ.get(NETWORK_ENV, "")),
    )


def _step(run: RunDir, action: LaunchAction, resources: Resources) -> Step:
    log = run.log_file(f"{action.step}.step")
    return Step(action.step, action.allocation, action.node, resources, run.launch_file(action.step), log)


def _argv(role: RoleSpec, job: RunSpec, run_dir: str, job_dir: str) -> tuple[str, ...]:
    if role.launcher == APPTAINER:
        return apptainer(role, job.container, run_dir, job_dir, role.argv)
    return role.argv


def _probe(job: RunSpec, run_dir: str, job_dir: str) -> tuple[str, ...]:
    """Return the command that checks on a node whether the modules of ``[env] probe`` can be imported.

    The command is empty if no modules are listed, or if all roles run in containers of pyxis, where an agent cannot
    start a process. The probe runs on the host or, if no role runs on the host, in the container of apptainer.
    """
    # the job's folder, where "-c" looks first, comes last: a file there must not pass for an installed package
    modules = f"import sys; sys.path.append(sys.path.pop(0)); import {', '.join(job.env.probe)}"
    if not job.env.probe or all(role.launcher == PYXIS for role in job.roles):
        return ()
    if any(role.launcher == "direct" for role in job.roles):
        return (job.env.probe_python, "-c", modules)
    contained = next(role for role in job.roles if role.launcher == APPTAINER)
    return apptainer(contained, job.container, run_dir, job_dir, (job.container.python, "-c", modules))


def _role_environment(role: RoleSpec, job: RunSpec, job_dir: str, passed: dict[str, str]) -> dict[str, str]:
    # code that the model writes must not get variables such as WANDB_API_KEY
    trackers = tuple(f"{name.upper()}_" for name in job.track.to) if role.traits.runs_model_code else ()
    reaching = {name: value for name, value in passed.items() if not name.startswith(trackers)}
    given = environment(job, role.per_member, job_dir) | reaching
    if role.launcher == PYXIS:
        given = {name: value for name, value in given.items() if name not in HOST_ONLY_VARIABLES}
    given |= {SAFE_PATH_ENV: "1"} if role.built_in and not role.traits.runs_model_code else {}
    return given | ({} if role.launcher == "direct" else NO_USER_SITE) | role.env


def environment(job: RunSpec, resources: Resources, job_dir: str) -> dict[str, str]:
    """Return the environment that all roles with these resources share, without variables of the submitting shell."""
    inherited = {name: os.environ[name] for name in INHERITED_VARIABLES if name in os.environ}
    if folder := os.path.dirname(job.env.python):  # "python" in a command is the interpreter that has rrl
        inherited["PATH"] = os.pathsep.join((folder, inherited.get("PATH", os.defpath)))
    return inherited | {
        HEARTBEAT_INTERVAL_ENV: str(job.limits.heartbeat),
        LOG_LEVEL_ENV: os.environ.get(LOG_LEVEL_ENV) or job.manager.log_level,
        "RRL_JOB_DIR": job_dir,
        "OMP_NUM_THREADS": str(resources.cpus),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",  # a run must not depend on downloads while it is running
    }


def _load_passed_env(run: RunDir, job: RunSpec) -> dict[str, str]:
    """Read the variables that ``rrl submit`` saved from its shell.

    The variables are read again for each launch, so that neither the journal nor the manager's memory contains them.
    """
    return msgspec.json.decode(run.passed_env.read_bytes(), type=dict[str, str]) if job.env.passed else {}


def save_passed_env(run: RunDir, job: RunSpec) -> None:
    """Save those variables of this shell that roles receive, in a file with mode 0600.

    The file is needed because the manager may run on another host. Raises OSError.
    """
    write_atomically(run.passed_env, msgspec.json.encode(select_variables(job.env.passed, os.environ)))


def job_dir_of(source: str) -> str:
    """Return the folder of the job file: the roles' working folder, where the user's modules are found."""
    return str(Path(source).parent)
