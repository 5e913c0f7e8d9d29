"""From a job spec to a living manager: make the run directory, start the manager, say what would be done.

The manager is submitted through submitit, to Slurm or to this machine; its state is never asked from submitit.
"""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import io
import os
import secrets
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from rrl.manager.cluster import Cluster
from rrl.manager.journal import JournalError
from rrl.manager.lease import LeaseHeld, LeaseLost
from rrl.manager.runtime import Manager
from rrl.spec.job import Job
from rrl.spec.jobview import JobView
from rrl.spec.load import resolved
from rrl.spec.rundir import RunDir, runs_root, write_atomically
from rrl.spec.words import Outcome
from rrl.transport.address import own_address
from rrl.transport.keys import RunKeys

MANAGER_CPUS = 1
MANAGER_MEM_GB = 1
MANAGER_MARGIN = 600.0
"""s that the manager's own job outlives the pool's walltime"""
RETRIES = 3
"""times that a manager which ended by an error of its own is followed by another one in the same process"""
RETRY_PAUSE = 5.0
"""s before that"""
WALLTIME = "its walltime ends"
LOCAL_FOREVER = 60 * 24 * 365
"""min; nothing ends a manager of the local cluster but the end of its run"""


def create(job: Job, source: Path) -> RunDir:
    """A fresh run directory with everything that a manager needs. Raises OSError when it cannot be written."""
    # Chance in it, because Slurm's jobs are found by it: two folders of runs must not share an id.
    run = RunDir(runs_root() / f"{job.run.name}-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}")
    run.create()
    RunKeys.make().save(run.keys)
    write_atomically(run.job_toml, source.read_bytes())
    record = {"source": str(source.resolve()), "job": resolved(job), "user": getpass.getuser()}
    write_atomically(run.resolved, msgspec.json.format(msgspec.json.encode(record), indent=2))
    write_atomically(run.view, msgspec.json.encode(job.view(sys.executable)))
    return run


def submit(job: Job, source: Path) -> RunDir:
    """Create the run and start its manager in the background; returns at once. Raises OSError or RuntimeError when it
    could not be started: then nothing of it is left."""
    run = create(job, source)
    try:
        start_manager(run, job.view(sys.executable))
    except (OSError, RuntimeError):
        shutil.rmtree(run.path)
        raise
    return run


def start_manager(run: RunDir, view: JobView) -> None:
    """Start a manager for ``run`` through submitit: as a Slurm job, or as a process of this machine."""
    if view.cluster == "slurm":
        import submitit

        executor = submitit.SlurmExecutor(folder=run.submit, python=sys.executable)
        executor.update_parameters(**manager_job(run.id, view))
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # submitit repeats there what its error says anyhow
                executor.submit(run_here, run)
        except RuntimeError as error:
            raise RuntimeError("; ".join(dict.fromkeys(str(error).split("\n")))) from error
    elif (child := os.fork()) == 0:
        _submit_locally(run)
    elif os.waitpid(child, 0)[1] != 0:
        told = (run.submit / "controller.log").read_text(errors="replace").split("\n")
        raise OSError(next((line for line in reversed(told) if line), "its submission died without a word"))


def _submit_locally(run: RunDir) -> NoReturn:
    """In a child of its own session, without our terminal: submitit's local controller must outlive this command and
    not be reached by its Ctrl-C."""
    code = 1
    try:
        os.setsid()
        devnull = os.open(os.devnull, os.O_RDWR)
        log = os.open(run.submit / "controller.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for fd, source in ((0, devnull), (1, log), (2, log)):
            os.dup2(source, fd)
        import submitit

        executor = submitit.LocalExecutor(folder=run.submit)
        executor.update_parameters(timeout_min=LOCAL_FOREVER)
        executor.submit(run_here, run)
        code = 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def manager_job(run_id: str, view: JobView) -> dict[str, Any]:
    """submitit's parameters for the manager's own Slurm job: small, requeued by Slurm when its node dies."""
    passed = {key: view.sbatch[key] for key in ("partition", "account", "qos") if key in view.sbatch}
    return {
        "job_name": f"{run_id}.manager",
        "comment": f"rrl {run_id} manager",
        "time": int((view.walltime + MANAGER_MARGIN) // 60),
        "cpus_per_task": MANAGER_CPUS,
        "mem": f"{MANAGER_MEM_GB}GB",
        "nodes": 1,
        "ntasks_per_node": 1,
        "additional_parameters": {"requeue": True, **passed},
    }


def run_here(run: RunDir, foreground: bool = False) -> str | None:
    """Run a manager for ``run`` in this process until the run has ended. Returns the outcome, or None if it left.

    SIGTERM makes it leave in order (roles go on, the next manager adopts them); SIGINT in the foreground cancels."""
    for attempt in range(RETRIES + 1):
        try:
            outcome = asyncio.run(_run(run, foreground))
            return None if outcome is None else outcome.value
        except (LeaseHeld, JournalError):
            raise
        except Exception:
            traceback.print_exc()
            if attempt == RETRIES:
                raise
            time.sleep(RETRY_PAUSE)  # the next epoch adopts what lives, as it would after any death of a manager
    raise AssertionError


async def _run(run: RunDir, foreground: bool) -> Outcome | None:
    view = msgspec.json.decode(run.view.read_bytes(), type=JobView)
    source = str(msgspec.json.decode(run.resolved.read_bytes())["source"])
    cluster, host = _cluster(run, view)
    manager = Manager(run, cluster, view, source, host)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, manager.leave, "SIGTERM")
    loop.add_signal_handler(signal.SIGUSR2, manager.leave, WALLTIME)  # submitit's warning
    if foreground:
        loop.add_signal_handler(signal.SIGINT, manager.cancel, f"{getpass.getuser()} (Ctrl-C)")
    try:
        outcome = await manager.run(os.environ.get("SLURM_JOB_ID", ""))
        if manager.leaving == WALLTIME and os.environ.get("SLURM_JOB_NAME") == manager_job(run.id, view)["job_name"]:
            await asyncio.to_thread(_submit_successor, run, view)
        return outcome
    except LeaseLost as error:
        print(f"rrl: {error}; leaving", file=sys.stderr, flush=True)
        return None


def _submit_successor(run: RunDir, view: JobView) -> None:
    """From within a manager's job whose walltime ends: another one goes on, for its pool may have begun much later."""
    from rrl.manager.cluster.slurm_commands import environment

    kept = environment(os.environ)  # sbatch would take this job's own variables for options
    for name in set(os.environ) - set(kept):
        del os.environ[name]
    try:
        start_manager(run, view)
    except (OSError, RuntimeError) as error:  # not every site lets jobs submit jobs; the roles go on
        print(f"rrl: no successor could be submitted: {error}; start one: rrl manage {run.id}", file=sys.stderr)


def _cluster(run: RunDir, view: JobView) -> tuple[Cluster, str]:
    """The backend, and the address to listen on."""
    if view.cluster == "slurm":
        from rrl.manager.cluster.slurm import SlurmCluster

        return SlurmCluster(run.id, sys.executable), own_address()
    from rrl.manager.cluster.local import LocalCluster

    return LocalCluster(run, python=sys.executable), "127.0.0.1"


def preview(job: Job) -> list[tuple[str, str]]:
    """Exactly what ``rrl submit`` would start, as (title, text); touches nothing."""
    view = job.view(sys.executable)
    steps = "\n".join(
        f"{role.name:13} {role.replicas} x ({role.each.cpus} cpus, {role.each.gpus} gpus,"
        f" {role.each.mem // 2**20} MiB{', a node of its own' if role.exclusive else ''})  {' '.join(role.argv)}"
        for role in view.roles
    )
    plan = [("steps", steps)]
    if view.cluster == "slurm":
        from rrl.slurm_templates.render import render_allocation

        script = render_allocation(f"{view.name}-<time>.pool", view)
        manager = "\n".join(f"{key} = {value}" for key, value in manager_job(f"{view.name}-<time>", view).items())
        return [("manager (submitit, one small Slurm job)", manager), ("allocation (sbatch)", script), *plan]
    nodes = f"{view.nodes} virtual nodes on this machine, {view.spares} of them spare; the manager as a process here"
    return [("local cluster", nodes), *plan]
