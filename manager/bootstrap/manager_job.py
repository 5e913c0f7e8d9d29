"""The Slurm jobs of a run's managers: one job runs, and its successor is pending until the running job ends.

Slurm's own requeue would start the same job again after about 120 s (measured). A successor with
``--dependency=singleton`` waits in the queue under the same name and starts within seconds. It is queued in advance:
``rrl submit`` queues the first successor, and each manager queues one if none is pending, as soon as it has begun its
epoch. Such a successor starts ``SUCCESSOR_DELAY_S`` later at the earliest, so that managers that keep failing are
started once a minute at most. Some sites do not let a job submit jobs. On such a site the only successor is the job
that ``rrl submit`` queued. At the end of the run the pending successor is cancelled.

With ``[manager] where = "pool"`` the manager has no job of its own: the pool's batch script keeps a manager running
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

from ...cluster.base import Refused, Unanswered
from ...cluster.slurm.commands import MANAGER, SlurmLimits, environment, output_of, unanswered
from ...cluster.slurm.requests import batch_script
from ...core.run_dir import RunDir, write_atomically
from ...core.run_spec import RunSpec
from ..planner.capacity.allocation_requests import initial_requests
from .pool_supervisor import MANAGER_PROGRAM

_log = logging.getLogger("rrl.manager")

POOL_LOG = "pool.log"
"""File in submitit's folder with the output of the pool's script and of the managers that it starts."""
CPUS = 1
"""CPUs of the manager's own job."""
MEM_GB = 1
"""Memory of the manager's own job, in GB."""
WALLTIME_MARGIN_S = 600.0
"""Seconds by which the manager's own job outlasts the run's walltime."""
MIN_WALLTIME_S = 600.0
"""Shortest walltime (s) of the manager's job. submitit makes a manager exit 90 s before the end of its job; by then the
manager has queued its successor."""
SUCCESSOR_DELAY_S = 60
"""Seconds after which a successor that a manager has queued may start at the earliest."""
QUEUE_RETRY_S = 60.0
"""Seconds until a manager that got no answer of Slurm tries again to queue its successor."""
_SLURM_LIMITS = SlurmLimits()


def manager_job_name(run_id: str) -> str:
    """Return the name that all manager jobs of a run share. Slurm runs only one job of this name at a time."""
    return f"{run_id}.{MANAGER}"


def parameters(run_id: str, spec: RunSpec, delay_s: int = 0) -> dict[str, Any]:
    """Return submitit's parameters for the manager's own job, which starts ``delay_s`` seconds from now or later."""
    begin = {"begin": f"now+{delay_s}"} if delay_s else {}
    return {
        "job_name": manager_job_name(run_id),
        "comment": f"rrl {run_id} {MANAGER}",
        "time": int(_walltime(spec) // 60),
        "cpus_per_task": CPUS,
        "mem": f"{MEM_GB}GB",
        "nodes": 1,
        "ntasks_per_node": 1,
        "dependency": "singleton",
        "additional_parameters": {"no-requeue": True, **begin, **_flags(spec.manager.sbatch)},
    }


def _walltime(spec: RunSpec) -> float:
    """Return the walltime (s) of the manager's job: the run's walltime and a margin, unless the site allows less.

    If the job is shorter than the run, one manager follows another.
    """
    max_walltime = spec.walltime + WALLTIME_MARGIN_S
    return min(max_walltime, max(spec.manager.walltime, MIN_WALLTIME_S)) if spec.manager.walltime else max_walltime


def _flags(options: dict[str, str]) -> dict[str, str | bool]:
    return {key: value or True for key, value in options.items()}


def submit(run: RunDir, spec: RunSpec, manage: Callable[[RunDir], Any], delay_s: int = 0) -> None:
    """Submit a Slurm job that runs one manager, and that starts ``delay_s`` seconds from now or later.

    The job runs ``MANAGER_PROGRAM`` instead of submitit's own command, which would call ``manage(run)``.

    Raises:
        RuntimeError: Slurm rejected the job; the text quotes Slurm.
        OSError: the submission cannot be written or started.
    """
    import submitit

    # submitit's own command waits for a file that this process writes only after sbatch has answered. If this process
    # died before that, for example because its login node failed, the job would give up after a minute.
    python = spec.env.python or sys.executable
    command = {"_submitit_command_str": shlex.join((python, "-u", "-P", "-c", MANAGER_PROGRAM, str(run.path)))}
    executor = type("SlurmExecutor", (submitit.SlurmExecutor,), command)(folder=run.submit, python=python)
    executor.update_parameters(**parameters(run.id, spec, delay_s))
    try:
        with contextlib.redirect_stderr(io.StringIO()), _outside_of_a_job():  # submitit also prints what it raises
            executor.submit(manage, run)
    except RuntimeError as error:
        raise RuntimeError("; ".join(dict.fromkeys(str(error).split("\n")))) from error


@contextlib.contextmanager
def _outside_of_a_job() -> Iterator[None]:
    """Hide the variables of a surrounding Slurm job.

    sbatch would read them as its options, and submitit passes its own environment to sbatch.
    """
    allowed = environment(os.environ)
    hidden = {key: os.environ.pop(key) for key in set(os.environ) - set(allowed)}
    try:
        yield
    finally:
        os.environ.update(hidden)


async def submit_pool(run: RunDir, spec: RunSpec) -> None:
    """Submit the pool whose script keeps the manager running. Raises RuntimeError, which quotes Slurm."""
    try:
        script = pool_script(run.id, spec, str(run.path))
        job = await output_of(("sbatch", "--parsable"), _SLURM_LIMITS.write_timeout_s, script)
    except (Refused, Unanswered) as error:
        raise RuntimeError(str(error)) from error
    with contextlib.suppress(OSError):  # the job is queued even if this file is missing
        write_atomically(run.submit / f"{job.strip().partition(';')[0]}_submitted", b"")  # as submitit does


def pool_script(run_id: str, spec: RunSpec, run_dir: str) -> str:
    """Return the batch script of the pool. Raises ValueError for an sbatch option that cannot be passed on."""
    request, *_ = initial_requests(run_id, spec)
    command = (spec.env.python or sys.executable, "-P", "-m", "rrl.manager.bootstrap.pool_supervisor", run_dir)
    return batch_script(request, command, output=f"{run_dir}/submit/{POOL_LOG}")


def own_allocation_tag(run_id: str, spec: RunSpec) -> str:
    """Return the tag of the allocation in which this process runs as the manager; empty if it runs elsewhere."""
    if spec.manager.where != "pool":
        return ""
    request, *_ = initial_requests(run_id, spec)
    return request.tag if os.environ.get("SLURM_JOB_NAME") == request.tag else ""


async def ensure_successor(run: RunDir, spec: RunSpec, manage: Callable[[RunDir], Any]) -> None:
    """Queue the successor of this manager, which has begun its epoch, if none is pending.

    Does nothing outside of a manager's job. Retries while Slurm does not answer. If this task is cancelled during a
    submission, it ends only after the submission, so that the job is queued by then and can be cancelled.
    """
    if os.environ.get("SLURM_JOB_NAME") != manager_job_name(run.id):
        return
    while True:
        try:
            if not await is_queued(manager_job_name(run.id), "-t", "PENDING"):
                submission = asyncio.create_task(asyncio.to_thread(submit, run, spec, manage, SUCCESSOR_DELAY_S))
                try:
                    await asyncio.shield(submission)
                except asyncio.CancelledError:
                    await asyncio.wait([submission])
                    raise
            return
        except (Refused, Unanswered, RuntimeError, OSError) as error:
            if isinstance(error, Unanswered) or unanswered(str(error)):
                await asyncio.sleep(QUEUE_RETRY_S)  # the next attempt shows whether Slurm has queued the job
                continue
            _log.warning(
                "cannot queue the next manager's job: %s; if this manager ends before the run, start the next one with"
                " rrl manage %s",
                error,
                run.id,
            )
            return


async def is_queued(job: str, *options: str) -> bool:
    """Return whether a job with the name ``job`` is pending or running; ``options`` are further options of squeue.

    Raises:
        Refused, Unanswered: squeue failed.
    """
    argv = ("squeue", "--me", "-h", f"--name={job}", "-o", "%A", *options)
    return bool((await output_of(argv, _SLURM_LIMITS.read_timeout_s)).split())


async def cancel_pending(run_id: str, spec: RunSpec) -> str:
    """Cancel pending manager jobs.

    Returns an error text on failure, else "". A failure is harmless: a manager that starts after the run's end exits at
    once.
    """
    try:
        argv = ("scancel", "--state=PENDING", f"--name={job_name(run_id, spec)}")
        await output_of(argv, _SLURM_LIMITS.write_timeout_s)
    except (Refused, Unanswered) as error:
        return str(error)
    return ""


async def none_pending(run_id: str, spec: RunSpec) -> bool:
    """Cancel pending manager jobs; return whether it is certain that no manager job is pending or running."""
    if await cancel_pending(run_id, spec):
        return False
    try:
        return not await is_queued(job_name(run_id, spec))
    except (Refused, Unanswered):
        return False


def job_name(run_id: str, spec: RunSpec) -> str:
    """Return the name of the Slurm job that a manager runs in: the pool's name or the name of the manager jobs."""
    return initial_requests(run_id, spec)[0].tag if spec.manager.where == "pool" else manager_job_name(run_id)
