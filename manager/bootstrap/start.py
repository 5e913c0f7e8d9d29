"""Create a run and start its manager: on this machine, in a Slurm job of its own, or in the run's pool.

On this machine, and in a job of its own, the manager is started with submitit. rrl never reads the manager's state from
submitit.
"""

from __future__ import annotations

import asyncio
import errno
import getpass
import logging
import os
import secrets
import shlex
import shutil
import signal
import socket
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from ...cluster.base import Cluster
from ...cluster.traits import traits_of
from ...config.input_files import check_inputs
from ...core.command_runner import run_coroutine
from ...core.launch import read_run_spec
from ...core.log_lines import start_logging
from ...core.processes import raise_nofile
from ...core.role_environment import SAFE_PATH_ENV
from ...core.run_dir import STORAGE_FULL_ERRNOS, RunDir, runs_root, write_atomically
from ...core.run_spec import RunSpec
from ...core.types import Outcome
from ...transport.address import NoAddress, own_address
from ...transport.keys import RunKeys
from ..execute.launch import save_passed_env
from ..runtime import Manager
from ..storage.journal import Follower, JournalError
from ..storage.lease import LeaseHeld, LeaseLost
from ..storage.resume_request import ResumeRequest, read_pending, withdraw, write_request
from ..storage.space_reserve import fill_reserve
from ..tracking.tracker_supervisor import TrackerSupervisor
from . import manager_job
from .pool_supervisor import MANAGER_PROGRAM, run_ended
from .start_failure import HOST_FILE

if TYPE_CHECKING:
    from ...config.job.schema import Job

_log = logging.getLogger("rrl.manager")

MAX_RETRIES = 3
"""Maximum number of times that a manager is started again in the same process after an exception."""
RETRY_DELAY_S = 5.0
"""Seconds before a manager is started again after an exception."""
UNWRITABLE_STORAGE_ERRNOS = (*STORAGE_FULL_ERRNOS, errno.EFBIG, errno.EROFS)
"""Error numbers of storage that cannot be written at present."""
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals by which a user, or a terminal that is closed, ends a command."""
WALLTIME_REASON = "its walltime ends"
"""Reason that a manager gives for its exit when submitit announces the end of its Slurm job."""
LOCAL_TIMEOUT_MIN = 60 * 24 * 365
"""Time limit (minutes) of a manager of the local cluster: so long that the manager ends only with its run."""


def create(job: Job, spec: RunSpec, source: Path, text: bytes | None = None) -> RunDir:
    """Create a run directory with everything that a manager needs.

    Args:
        job: The job, which is recorded with every default.
        spec: The run spec of this job, which manager and roles read.
        source: The job.toml; the roles work in its folder.
        text: The job spec that is kept in the run directory; default: the content of ``source``.

    Raises:
        OSError: the directory cannot be written (no permission, no space, over quota); its written part is removed.
    """
    # Slurm's jobs are found by the run's id, so its random part keeps runs of different folders apart.
    run = RunDir(runs_root() / f"{spec.name}-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}")
    staging = RunDir(run.path.with_name(f".{run.id}"))
    try:
        _write_run_dir(staging, job, spec, source.read_bytes() if text is None else text, source)
        os.rename(staging.path, run.path)  # a crash leaves either no run or a run that can be managed
    except BaseException:
        shutil.rmtree(staging.path, ignore_errors=True)
        raise
    return run


def _write_run_dir(run: RunDir, job: Job, spec: RunSpec, text: bytes, source: Path) -> None:
    run.create()
    check_inputs(run, spec)  # records them
    fill_reserve(run)
    RunKeys.make().save(run.keys)
    _write_spec(run, job, spec, text, source)


def _write_spec(run: RunDir, job: Job, spec: RunSpec, text: bytes, source: Path) -> None:
    """Write the job file, its resolved form, the run spec that manager and roles read, and the passed environment."""
    from ...config.job.load import resolved  # this import takes 0.2 s, and a manager does not need it

    write_atomically(run.job_toml, text)
    record = {"source": str(source.resolve()), "job": resolved(job), "user": getpass.getuser()}
    write_atomically(run.resolved, msgspec.json.format(msgspec.json.encode(record), indent=2))
    write_atomically(run.run_spec, msgspec.json.encode(spec))
    save_passed_env(run, spec)


def resume(run: RunDir, job: Job, spec: RunSpec, text: bytes, source: Path, end: float) -> str:
    """Resume a run that ended at ``end`` (manager's time, s), with this job and its run spec.

    Returns a warning about a failure that did not prevent the resume, or "".

    Raises:
        OSError: no manager could be started; the run is unchanged.
        RuntimeError: Slurm rejected the manager's job, or another user resumed the run first; the run is unchanged.
    """
    request = ResumeRequest(getpass.getuser(), f"{time.time_ns()}-{os.getpid()}", spec, str(source.resolve()), end)
    write_request(run, request, lambda making: _write_spec(making, job, spec, text, source))
    try:
        state = Follower(run).state()
        if state is None or state.ended != end:  # a manager has claimed another resume request
            raise RuntimeError(f"the run has been resumed already; see: rrl status {run.id}")
        fill_reserve(run)
        return start_manager(run, spec)
    except (OSError, RuntimeError, JournalError) as error:
        if withdraw(run):
            run.space_reserve.unlink(missing_ok=True)
            raise
        return f"a manager has begun the run, although its start was reported as failed: {error}"


def start_manager(run: RunDir, spec: RunSpec) -> str:
    """Start a manager for ``run``; return a warning about a failure that did not prevent the start, or "".

    Depending on the run spec, the manager is a Slurm job of its own (with a successor in the queue), a process in the
    run's pool, or a process on this machine.

    Raises:
        OSError: the manager could not be started.
        RuntimeError: Slurm rejected the manager's job.
    """
    if not traits_of(spec.cluster).manager_is_a_job:
        _start_locally(run)
    elif spec.manager.where == "pool":
        run_coroutine(manager_job.submit_pool(run, spec))
    else:
        manager_job.submit(run, spec, run_manager)
        try:
            manager_job.submit(run, spec, run_manager)
        except (OSError, RuntimeError) as error:
            return f"cannot queue a second manager, so none takes over if the first manager's node fails: {error}"
    return ""


def _start_locally(run: RunDir) -> None:
    """Start a manager on this machine with submitit.

    Raises:
        OSError: nothing was started. If submitit failed, the text is the last line of its output.
    """
    write_atomically(run.submit / HOST_FILE, socket.gethostname().encode())
    if (child := os.fork()) == 0:
        _submit_locally(run)
    if os.waitpid(child, 0)[1] != 0:
        lines = run.controller_log.read_text(errors="replace").split("\n")
        raise OSError(next((line for line in reversed(lines) if line), "submitit failed without any output"))


def _submit_locally(run: RunDir) -> NoReturn:
    """Submit the manager with submitit from a child process in its own session, without a terminal.

    submitit's local controller must outlive this command and must not receive its Ctrl-C.
    """
    code = 1
    try:
        os.setsid()
        for handler in (signal.SIG_IGN, signal.SIG_DFL):  # first drop what the command holds back: it is not for us
            for number in ENDING_SIGNALS:
                signal.signal(number, handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
        devnull = os.open(os.devnull, os.O_RDWR)
        log = os.open(run.controller_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for fd, source in ((0, devnull), (1, log), (2, log)):
            os.dup2(source, fd)
        import submitit

        os.environ[SAFE_PATH_ENV] = "1"  # for submitit's controller, which it starts as a module
        program = f"import os; del os.environ[{SAFE_PATH_ENV!r}]; {MANAGER_PROGRAM}"
        manager = (sys.executable, "-u", "-P", "-c", program, str(run.path))
        started = {"_submitit_command_str": shlex.join(manager)}
        executor = type("LocalExecutor", (submitit.LocalExecutor,), started)(run.submit)
        executor.update_parameters(timeout_min=LOCAL_TIMEOUT_MIN)
        executor.submit(run_manager, run)
        code = 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def run_manager(run: RunDir, foreground: bool = False, by_hand: bool = False) -> str | None:
    """Run a manager for ``run`` in this process until the run has ended.

    A manager that fails with an exception is started again. On SIGTERM a manager exits cleanly: the roles keep running,
    and the next manager takes them over.

    Args:
        run: the run's directory.
        foreground: whether SIGINT cancels the run.
        by_hand: whether a person started the manager and waits for it. If so, unwritable storage raises OSError at
            once; an unattended manager retries, because space may become free.

    Returns:
        The outcome of the run, or None if the manager exited before the run had ended.
    """
    start_logging()
    raise_nofile()  # a descriptor for each step, agent and worker
    failures = 0
    while True:
        try:
            outcome = asyncio.run(_run(run, foreground))
            return None if outcome is None else outcome.value
        except (LeaseHeld, JournalError, NoAddress):  # trying again would not help
            raise
        except Exception as error:
            unwritable = isinstance(error, OSError) and error.errno in UNWRITABLE_STORAGE_ERRNOS
            failures += not unwritable  # space may become free: a manager that nobody waits for waits for it
            if failures > MAX_RETRIES or (unwritable and by_hand):
                raise
            if unwritable:
                _log.error("%s; the manager tries again in %.0f s", error, RETRY_DELAY_S)
            else:
                _log.exception("the manager failed; another one starts in %.0f s", RETRY_DELAY_S)
            time.sleep(RETRY_DELAY_S)  # the next epoch takes over the running steps, as after any death of a manager


async def _run(run: RunDir, foreground: bool) -> Outcome | None:
    if run_ended(run):  # this manager is a queued successor that started after the run's end
        return None
    if (request := read_pending(run)) is not None:
        spec, source = request.job, request.source
    else:
        spec = read_run_spec(run.run_spec)
        source = str(msgspec.json.decode(run.resolved.read_bytes())["source"])
    start_logging(spec.manager.log_level)
    cluster, host = open_cluster(run, spec)
    manager = Manager(run, cluster, spec, source, host)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, manager.leave, "SIGTERM")
    loop.add_signal_handler(signal.SIGUSR2, manager.leave, WALLTIME_REASON)  # submitit's warning
    if foreground:
        loop.add_signal_handler(signal.SIGINT, manager.cancel, f"{getpass.getuser()} (Ctrl-C)")
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # held back since the run was created
    succession = asyncio.create_task(_queue_successor(manager, run, spec))
    trackers, outcome = TrackerSupervisor(run, spec), None
    trackers.start()
    try:
        outcome = await manager.run(os.environ.get("SLURM_JOB_ID", ""))
    except LeaseLost as error:
        _log.warning("%s; this manager exits, the other one manages the run", error)
        return None
    finally:
        succession.cancel()
        await asyncio.gather(succession, return_exceptions=True)
        await trackers.close(ended=outcome is not None)
    has_successor = outcome is not None and traits_of(spec.cluster).manager_is_a_job and spec.manager.where == "job"
    if has_successor and (error_text := await manager_job.cancel_pending(run.id, spec)):
        _log.warning("cannot cancel the pending manager job; it will exit as soon as it starts: %s", error_text)
    return outcome


async def _queue_successor(manager: Manager, run: RunDir, spec: RunSpec) -> None:
    """Queue the manager's successor once the manager has begun.

    A manager that cannot begin, for example because another one holds the lease, must not queue a successor. The
    successor could not begin either, and would queue another successor, and so on.
    """
    await manager.begun.wait()
    await manager_job.ensure_successor(run, spec, run_manager)


def open_cluster(run: RunDir, spec: RunSpec) -> tuple[Cluster, str]:
    """Return the cluster and the address on which the manager listens."""
    traits, network = traits_of(spec.cluster), spec.transport.network
    host = "127.0.0.1" if traits.roles_run_here and not network else own_address(network)
    own_tag = manager_job.own_allocation_tag(run.id, spec)
    return import_module(traits.module).open_cluster(run, spec, own_tag), host
