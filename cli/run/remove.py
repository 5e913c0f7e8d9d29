"""``rrl rm``: remove runs that have ended, with everything in their run directories.

A run directory is first renamed: its new name begins with a dot and ends with :data:`REMOVED`. So no command finds a
run that is only partly removed. An interrupted removal is completed by the next ``rrl rm``. Symbolic links are removed
and never followed.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from pathlib import Path

from ...api.fault_requests import parse_flag
from ...api.runs import all_runs, check_own, find_run, read_state, submit_time
from ...api.watching.manager_liveness import surely_gone
from ...api.watching.start_check import StartCheck
from ...core.run_dir import RunDir, run_dir_problem, runs_root
from ...core.text import plural
from ...core.types import OperationFailed, UsageError
from ...core.units import seconds
from ...manager.bootstrap.start_failure import SUBMISSION_S
from ...manager.model.state import State
from ...manager.storage.lease import holder, renewed_at
from ...manager.storage.resume_request import read_pending
from ..common.output import print_line
from ..views.formatting import size
from ..views.status import retained_jobs

REMOVED = ".removed"
"""End of the name of a run directory that is being removed."""
MANAGER_EXIT_S = 60.0
"""Seconds after the last renewal of a manager's epoch lease. Until then the manager may still write the summary of an
ended run."""


def remove(names: list[str], older_than: str | None, *, yes: bool) -> int:
    """Remove the named runs, or all of this user's runs that ended longer ago than ``older_than``.

    Asks the user first, except with ``yes``. Returns exit code 0, or 1 if the user does not agree. Raises UsageError,
    before anything is removed, if a named run has not ended, is another user's, or is not in the folder of runs.
    """
    if bool(names) == (older_than is not None):
        raise UsageError("name the runs to remove, or give --older-than; see: rrl rm --help")
    if older_than is None:
        runs = list({run.path: run for run in map(_named, names)}.values())
    else:
        runs = _ended_before(time.time() - parse_flag(seconds, older_than, "--older-than"))
    leftovers = _leftovers()
    if not runs and not leftovers:
        print(f"no run to remove in {runs_root()}")
        return 0
    sizes = {run: disk_usage(run.path) for run in runs}
    if not yes and runs and not _confirmed(sizes):
        print("nothing was removed", file=sys.stderr)
        return 1
    freed = sum(map(_delete, leftovers))
    for run in runs:
        hidden = run.path.with_name(f".{run.id}{REMOVED}")
        try:
            os.rename(run.path, hidden)
        except OSError as error:
            raise OperationFailed(f"{run.path}: {error.strerror}") from None
        freed += _delete(hidden)
        print_line(f"removed {run.id}  {size(sizes[run])}")
    print(f"freed {size(freed)}")
    return 0


def _named(name: str) -> RunDir:
    """Return the run of this name. Raises UsageError if it may not be removed."""
    if "/" in name:  # links are not resolved: "link/../run" is the run beside the link
        path = Path(os.path.abspath(Path(name).expanduser()))
        if path.parent != runs_root():
            raise UsageError(f"{name} is not in {runs_root()}; --runs-dir names the folder of runs")
        name = path.name
    run = find_run(name)
    check_own(run)
    state = read_state(run)
    if problem := _not_ended(run, state):
        raise UsageError(f"{run.id} {problem}; it is not removed")
    if state is not None and (jobs := retained_jobs(state)):
        print(f"rrl: {run.id} kept job {jobs} when it was cancelled; scancel {jobs} ends it", file=sys.stderr)
    return run


def _ended_before(moment: float) -> list[RunDir]:
    """Return this user's runs that ended before ``moment`` (s since the epoch), oldest last.

    A run whose journal cannot be read is not returned; a line on stderr names it.
    """
    found = []
    for run in all_runs():
        if run_dir_problem(run.path, change=True):
            continue
        try:
            state = read_state(run)
            ended = state.ended if state is not None and state.ended is not None else submit_time(run)
            if ended < moment and not _not_ended(run, state):
                found.append(run)
        except (UsageError, OperationFailed) as error:
            print_line(f"rrl: {run.id} is not removed: {error}", to_stderr=True)
    return found


def _not_ended(run: RunDir, state: State | None) -> str:
    """Return why the run may still go on; empty if it has ended, or was rejected before it began."""
    if state is None:
        return "" if StartCheck(run).failure(None) else f"has not begun yet (rrl cancel {run.id} ends it)"
    if state.outcome is None:
        return f"has not ended (rrl cancel {run.id} ends it)"
    if read_pending(run) is not None:
        return "is to be resumed"
    try:
        last = holder(run)
        if last is not None and not surely_gone(last) and time.time() - renewed_at(run) < MANAGER_EXIT_S:
            return "has a manager that has not ended yet"
    except OSError as error:
        raise OperationFailed(f"{run.epochs}: {error.strerror}") from None
    return ""


def _leftovers() -> list[Path]:
    """Return this user's run directories whose removal, or whose creation (long ago), was interrupted."""
    try:
        entries = list(os.scandir(runs_root()))
    except OSError:
        return []
    return [
        Path(entry.path)
        for entry in entries
        if entry.is_dir(follow_symlinks=False)
        and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
        and ((entry.name.startswith(".") and entry.name.endswith(REMOVED)) or _is_unfinished(entry))
    ]


def _is_unfinished(entry: os.DirEntry[str]) -> bool:
    id = re.fullmatch(r"\..+-\d{4}-\d{6}-[0-9a-f]{4}", entry.name, re.ASCII)
    return id is not None and time.time() - entry.stat().st_mtime > SUBMISSION_S


def disk_usage(folder: Path) -> int:
    """Return the bytes that the folder occupies; symbolic links count without their targets.

    A file with several names counts once.
    """
    counted: dict[tuple[int, int], int] = {}
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files, "."):
            try:
                found = os.lstat(os.path.join(parent, name))
            except OSError:  # removed in the meantime
                continue
            counted[found.st_dev, found.st_ino] = found.st_blocks * 512
    return sum(counted.values())


def _confirmed(sizes: dict[RunDir, int]) -> bool:
    """Ask whether these runs shall be removed. Raises UsageError if stdin is not a terminal."""
    for run, nbytes in sizes.items():
        print_line(f"{run.id}  {size(nbytes)}", to_stderr=True)
    count = f"{plural(len(sizes), 'run')} ({size(sum(sizes.values()))})"
    if not sys.stdin.isatty():
        raise UsageError(
            f"{count} would be removed, but stdin is no terminal, so you cannot be asked; to remove without a question:"
            " --yes"
        )
    try:
        return input(f"Remove {count} with logs and checkpoints? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _delete(folder: Path) -> int:
    """Delete the folder, which is not a link; return the bytes that this frees.

    Raises OperationFailed if a file cannot be deleted.
    """
    nbytes = disk_usage(folder)
    try:
        shutil.rmtree(folder)  # rmtree opens folders, so it follows no link that appears meanwhile
    except OSError as error:
        raise OperationFailed(
            f"{error.filename or folder}: {error.strerror or error}; the rest is still there"
        ) from None
    return nbytes
