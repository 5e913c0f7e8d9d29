"""The Slurm jobs that a run's managers are: one runs, the next one waits until it has ended, whatever ended it.

Slurm's own requeue would start the same job again after about 120 s (measured). A successor with
``--dependency=singleton`` waits in the queue under the same name and starts within seconds. It is queued beforehand:
by ``rrl submit`` the first, by each manager the one after its own; some sites let no job submit jobs, and then the one
from the login node is what there is. At the end of the run whoever waits is taken from the queue.

``[manager] where = "pool"`` has none of these: there the pool's own script keeps a manager
(:mod:`rrl.manager.bootstrap.pool_supervisor`).
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from typing import Any

from ...core.run_dir import RunDir, write_atomically
from ...core.run_spec import RunSpec
from ..cluster.base import Refused, Unanswered
from ..cluster.slurm.commands import MANAGER, SlurmLimits, environment, execute, failure, unanswered
from ..cluster.slurm.requests import batch_script
from ..planner.capacity.initial_request import initial_requests
from .pool_supervisor import MANAGER_PROGRAM

_log = logging.getLogger("rrl.manager")

POOL_LOG = "pool.log"
"""in the folder of submitit: output of the pool's script and of the managers that it keeps"""
CPUS = 1
MEM_GB = 1
WALLTIME_MARGIN_S = 600.0
"""s that the manager's own job outlives the run's walltime"""
MIN_WALLTIME_S = 600.0
"""s that it has at least: a manager leaves 90 s before its end (submitit), and has queued the next one by then"""
STABLE_AFTER_S = 60.0
"""s that a manager goes on before it queues the next one: what ends it sooner would end its successors, too"""
_SLURM_LIMITS = SlurmLimits()


def manager_job_name(run_id: str) -> str:
    """Of the jobs of all managers of a run: Slurm lets one of a name run at a time."""
    return f"{run_id}.{MANAGER}"


def parameters(run_id: str, spec: RunSpec) -> dict[str, Any]:
    """submitit's, for the manager's own job."""
    return {
        "job_name": manager_job_name(run_id),
        "comment": f"rrl {run_id} {MANAGER}",
        "time": int(_walltime(spec) // 60),
        "cpus_per_task": CPUS,
        "mem": f"{MEM_GB}GB",
        "nodes": 1,
        "ntasks_per_node": 1,
        "dependency": "singleton",
        "additional_parameters": {"no-requeue": True, **_flags(spec.manager.sbatch)},
    }


def _walltime(spec: RunSpec) -> float:
    """s: the run's and a margin; where the site allows less, one manager follows the other."""
    max_walltime = spec.walltime + WALLTIME_MARGIN_S
    return min(max_walltime, max(spec.manager.walltime, MIN_WALLTIME_S)) if spec.manager.walltime else max_walltime


def _flags(options: dict[str, str]) -> dict[str, str | bool]:
    return {key: value or True for key, value in options.items()}


def submit(run: RunDir, spec: RunSpec, manage: Callable[[RunDir], Any]) -> None:
    """Submit one manager's job, which does what ``manage(run)`` would. Raises RuntimeError with Slurm's words, or
    OSError."""
    import submitit

    # submitit's own command waits for a file that is put in place only after sbatch has answered: whoever dies in
    # between, as a login node may, would leave a job that gives up after a minute.
    python = spec.env.python or sys.executable
    command = {"_submitit_command_str": shlex.join((python, "-u", "-P", "-c", MANAGER_PROGRAM, str(run.path)))}
    executor = type("SlurmExecutor", (submitit.SlurmExecutor,), command)(folder=run.submit, python=python)
    executor.update_parameters(**parameters(run.id, spec))
    try:
        with contextlib.redirect_stderr(io.StringIO()), _outside_of_a_job():  # submitit repeats there what it raises
            executor.submit(manage, run)
    except RuntimeError as error:
        raise RuntimeError("; ".join(dict.fromkeys(str(error).split("\n")))) from error


@contextlib.contextmanager
def _outside_of_a_job() -> Iterator[None]:
    """sbatch takes the variables of the job that it is called in for options, and submitit passes on what it finds."""
    allowed = environment(os.environ)
    hidden = {key: os.environ.pop(key) for key in set(os.environ) - set(allowed)}
    try:
        yield
    finally:
        os.environ.update(hidden)


async def submit_pool(run: RunDir, spec: RunSpec) -> None:
    """Submit the pool whose script keeps the manager. Raises RuntimeError with Slurm's words."""
    try:
        ended = await execute(
            ("sbatch", "--parsable"), _SLURM_LIMITS.write_timeout_s, pool_script(run.id, spec, str(run.path))
        )
        if ended.code:
            raise failure("sbatch", ended)
    except (Refused, Unanswered) as error:
        raise RuntimeError(str(error)) from error
    with contextlib.suppress(OSError):  # the job is queued all the same
        write_atomically(run.submit / f"{ended.out.strip().partition(';')[0]}_submitted", b"")  # as submitit does


def pool_script(run_id: str, spec: RunSpec, run_dir: str) -> str:
    """Raises ValueError for an option that cannot be passed on."""
    (request,) = initial_requests(run_id, spec)
    command = (spec.env.python or sys.executable, "-P", "-m", "rrl.manager.bootstrap.pool_supervisor", run_dir)
    return batch_script(request, command, output=f"{run_dir}/submit/{POOL_LOG}")


def own_allocation_tag(run_id: str, spec: RunSpec) -> str:
    """Tag of the allocation that this process runs in as its manager; empty where it does not."""
    if spec.cluster != "slurm" or spec.manager.where != "pool":
        return ""
    (request,) = initial_requests(run_id, spec)
    return request.tag if os.environ.get("SLURM_JOB_NAME") == request.tag else ""


async def ensure_successor(run: RunDir, spec: RunSpec, manage: Callable[[RunDir], Any]) -> None:
    """From within a manager's job: once it has gone on for a while, see to it that another one waits."""
    if os.environ.get("SLURM_JOB_NAME") != manager_job_name(run.id):
        return
    while True:
        await asyncio.sleep(STABLE_AFTER_S)
        try:
            if not await is_queued(manager_job_name(run.id), "-t", "PENDING"):
                await asyncio.to_thread(submit, run, spec, manage)
            return
        except (Refused, Unanswered, RuntimeError, OSError) as error:
            if isinstance(error, Unanswered) or unanswered(str(error)):
                continue  # Slurm is away for a while, or has queued it after all: the next look tells
            _log.warning(
                "cannot queue a successor, this is the last manager that starts by itself: %s; if it ends before the"
                " run does: rrl manage %s", error, run.id,
            )  # fmt: skip
            return


async def is_queued(job: str, *options: str) -> bool:
    """A job of that name waits or runs."""
    ended = await execute(("squeue", "--me", "-h", f"--name={job}", "-o", "%A", *options), _SLURM_LIMITS.read_timeout_s)
    if ended.code:
        raise failure("squeue", ended)
    return bool(ended.out.split())


async def cancel_pending(run_id: str, spec: RunSpec) -> str:
    """Take from the queue what would start a manager. Returns why that could not be done: such a manager leaves by
    itself when its turn comes."""
    try:
        ended = await execute(
            ("scancel", "--state=PENDING", f"--name={job_name(run_id, spec)}"), _SLURM_LIMITS.write_timeout_s
        )
    except (Refused, Unanswered) as error:
        return str(error)
    return str(failure("scancel", ended)) if ended.code else ""


async def none_pending(run_id: str, spec: RunSpec) -> bool:
    """:func:`cancel_pending`, and certainly no manager of this run is in the queue any more, waiting or running."""
    if await cancel_pending(run_id, spec):
        return False
    try:
        return not await is_queued(job_name(run_id, spec))
    except (Refused, Unanswered):
        return False


def job_name(run_id: str, spec: RunSpec) -> str:
    """Name of the job that starts a manager."""
    return initial_requests(run_id, spec)[0].tag if spec.manager.where == "pool" else manager_job_name(run_id)
