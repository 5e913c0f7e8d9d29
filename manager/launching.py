"""From a decision to start a life to what its first process reads: the launch file and the cluster's step."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from rrl.manager.actions import Launch as LaunchAction
from rrl.manager.cluster import Step
from rrl.manager.state import State
from rrl.spec.jobview import Resources
from rrl.spec.launch import Launch
from rrl.spec.rundir import RunDir, write_atomically
from rrl.spec.words import AGENT, role_of
from rrl.transport.address import NETWORK_ENV

ALLOWED = (
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "TMPDIR", "SHELL", "LD_LIBRARY_PATH", "VIRTUAL_ENV",
    NETWORK_ENV,
)  # fmt: skip
"""What roles inherit of the manager's environment. SLURM_*, PMI*, PMIX* and OMPI_* are misread by torch, Hugging Face
and mpi4py (docs/sources.md, sites), so that nothing passes that is not named."""
AGENT_RESOURCES = Resources(cpus=1, gpus=0, mem=0)
"""An agent shares its node's resources; it takes none of its own."""


def write_launch(run: RunDir, state: State, action: LaunchAction, job_dir: str) -> Step:
    """Write the launch file of ``action`` (0600, durable) and return the step for the cluster."""
    agent = role_of(action.life.replica) == AGENT
    role = None if agent else state.job.role(role_of(action.life.replica))
    each = AGENT_RESOURCES if role is None else role.each
    launch = Launch(
        tag=action.step,
        run_dir=str(run.path),
        life=action.life,
        node=action.node,
        argv=() if role is None else role.argv,
        env=environment(state, each, job_dir) | ({} if role is None else role.env),
        cwd=job_dir,
        grace=state.job.limits.step_grace,
        dies_with_launcher=state.job.cluster == "slurm",
    )
    path = run.launch_file(action.step)
    write_atomically(path, msgspec.json.encode(launch))
    return Step(
        tag=action.step,
        allocation=action.allocation,
        node=action.node,
        each=each,
        launch_file=path,
        log_file=run.log_file(f"{action.step}.step"),
        overlap=agent,
        agent=agent,
    )


def environment(state: State, each: Resources, job_dir: str) -> dict[str, str]:
    """The whole environment of a role but for what its spec adds."""
    inherited = {name: os.environ[name] for name in ALLOWED if name in os.environ}
    return inherited | {
        "RRL_BEAT": str(state.job.limits.beat),
        "RRL_JOB_DIR": job_dir,
        "OMP_NUM_THREADS": str(each.cpus),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",  # nothing that a run needs may depend on a download in the middle of it
    }


def job_dir_of(source: str) -> str:
    """The folder of the job file: the roles' working folder, where a user's module is found."""
    return str(Path(source).parent)
