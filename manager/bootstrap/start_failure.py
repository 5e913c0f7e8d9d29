"""Find out whether all managers that were submitted for a run have ended before any of them began to manage it.

The journal cannot show this: a new run has no journal yet, and the journal of a resumed run stops at its previous end.
The evidence is in submitit's folder and in Slurm's queue.
"""

from __future__ import annotations

import os
import re
import socket
import time
from pathlib import Path

from ...cluster.base import Refused, Unanswered
from ...cluster.traits import traits_of
from ...core.command_runner import run_coroutine
from ...core.run_dir import RunDir
from ...core.run_spec import RunSpec
from ...core.text import escaped
from ..storage.resume_request import requested_at
from . import manager_job
from .pool_supervisor import LOGGER

HOST_FILE = "host"
"""File in submitit's folder with the name of the machine on which the manager of a local run was started."""
_FOREIGN_LINES = (
    re.compile(rf"(srun|slurmstepd|slurmd|submitit|\S+ [A-Z]+ {re.escape(LOGGER)}:)"),
    re.compile("srun|submitit"),
)
"""Patterns for the beginnings of lines that Slurm, submitit and the pool's script add to a manager's log. Lines that
match the first pattern are skipped. If no line remains, only the lines that match the second pattern are skipped:
slurmstepd prints why a program cannot be started, but srun only reports that the program ended."""
SUBMISSION_S = 60.0
"""Seconds after which a command that creates a run has either started a manager or ended. sbatch takes some seconds if
slurmctld is busy."""
_TAIL_BYTES = 64 * 1024
"""Bytes of a log that are searched for its last line. A traceback takes a few KiB."""


def start_failure(run: RunDir, spec: RunSpec) -> str:
    """Return why no manager will begin the run; empty if a manager may still begin it, or if this is unknown.

    The run must await a manager (:func:`rrl.manager.bootstrap.pool_supervisor.awaits_manager`). The returned text is
    one line that quotes the last line that a manager logged. Queries Slurm once, and blocks up to the deadline of a
    read (10 s) if Slurm does not answer. Raises OSError.
    """
    marks = _submitted(run)
    starting = not marks and abs(time.time() - run.path.stat().st_mtime) < SUBMISSION_S
    if starting or _any_alive(run, spec, marks):
        return ""
    if not marks:
        return "the command that was to start its manager was interrupted"
    line = _last_line(run, marks)
    wrote = f"the last line logged: {line}" if line else "nothing was logged"
    managers = "its manager" if len(marks) == 1 else f"all {len(marks)} managers"
    return f"{managers} ended before the run began; {wrote} (logs: {run.submit})"


def _submitted(run: RunDir) -> list[str]:
    """Return the ids of the managers that were submitted to begin the run, oldest first.

    An id is the id of the Slurm job, or the pid of the process that submitit started.
    """
    since = requested_at(run)
    marks = [path for path in run.submit.glob("*_submitted*") if path.stat().st_mtime >= since]
    return [path.name.partition("_")[0] for path in sorted(marks, key=lambda path: path.stat().st_mtime)]


def _any_alive(run: RunDir, spec: RunSpec, ids: list[str]) -> bool:
    """Return whether any of these managers may be pending or running. Return True if this is unknown."""
    if traits_of(spec.cluster).manager_is_a_job:
        try:
            return run_coroutine(manager_job.is_queued(manager_job.job_name(run.id, spec)))
        except (Refused, Unanswered):
            return True
    try:
        if (run.submit / HOST_FILE).read_text() != socket.gethostname():
            return True
    except OSError:
        return bool(ids)  # the file is written before the first manager is started
    return any(_is_submitit_of(Path("/proc", pid), run) for pid in ids)


def _is_submitit_of(process: Path, run: RunDir) -> bool:
    """Return whether submitit may have started this process for the run; False if another process now has its pid.

    A process without a command line counts as submitit's if it is not a zombie, because a process has no command line
    during execve(2) (observed on a busy machine, right after Popen had returned).
    """
    try:
        line = process.joinpath("cmdline").read_bytes()
        state = process.joinpath("stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    if not line:
        return state not in ("Z", "X")
    *_, folder, _ = (b"", *line.split(b"\0"))  # python -m submitit.local._local FOLDER
    try:
        return os.path.samefile(folder, run.submit)
    except (OSError, ValueError):
        return False


def _last_line(run: RunDir, ids: list[str]) -> str:
    """Return the last line that a manager logged, searching the logs of the newest manager first.

    If no manager logged anything, return a line of Slurm or submitit; if all logs are empty, return "".
    """
    logs = [
        *(run.submit / f"{id}_0_log.{kind}" for id in reversed(ids) for kind in ("err", "out")),
        run.submit / manager_job.POOL_LOG,
        run.controller_log,
    ]
    lines = [line for log in logs for line in reversed(_tail(log))]
    chosen = (line for others in _FOREIGN_LINES for line in lines if not others.match(line))
    return next(chosen, lines[0] if lines else "")


def _tail(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [escaped(line) for line in map(str.strip, text.splitlines()) if line]
