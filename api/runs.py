"""Find the run that the user names and read its files. Only the run directory is read, so no manager needs to run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from ..core.run_dir import RunDir, errors_about, run_dir_problem, runs_root
from ..core.run_spec import RunSpec
from ..core.types import OperationFailed, UsageError
from ..manager.model.state import State
from ..manager.storage.journal import Follower
from ..manager.storage.resume_request import read_pending


def all_runs() -> list[RunDir]:
    """Return this user's runs under the runs root, newest first; for root, the runs of all users."""
    with errors_about(runs_root()):
        try:
            # a dot begins the name of a run that rrl submit has not finished creating
            entries = [Path(entry.path) for entry in os.scandir(runs_root()) if not entry.name.startswith(".")]
        except FileNotFoundError:
            return []
    runs = [run for run in map(RunDir, entries) if _is_run(run) and not _problem(run)]
    return sorted(runs, key=lambda run: (submit_time(run), run.id), reverse=True)


def find_run(name: str | None) -> RunDir:
    """Return the run with this id, unambiguous prefix of an id, or folder; without a name the newest own run.

    Raises UsageError, with the ids of candidates, if no run or several runs match ``name``. Raises OperationFailed if
    this user may not read the run.
    """
    run = _resolve(name)
    if problem := _problem(run):
        raise OperationFailed(problem)
    if not os.access(run.journal, os.R_OK | os.X_OK):
        raise OperationFailed(_no_access_message(run))
    return run


def check_own(run: RunDir) -> None:
    """Check that this user may change or manage the run. Raises OperationFailed if not."""
    if problem := _problem(run, change=True):
        raise OperationFailed(problem)


def _problem(run: RunDir, *, change: bool = False) -> str:
    """Return why this user may not look at the run, or with ``change`` not change it; empty if the user may."""
    try:
        problem = run_dir_problem(run.path, change=change)
    except OSError as error:
        return f"{run.path}: {error.strerror}"
    return f"{run.id} {problem}" if problem else ""


def _resolve(name: str | None) -> RunDir:
    if name is not None and "/" in name:
        run = RunDir(Path(name).expanduser().absolute())
        if not _is_run(run):
            raise UsageError(f"{name} is not the directory of a run; list the runs with: rrl list")
        return run
    if name is not None and name.strip(".") and _is_run(exact := RunDir(runs_root() / name)):
        return exact
    runs = all_runs() if name is not None else [run for run in all_runs() if not _problem(run, change=True)]
    if not runs:
        raise UsageError(f"there are no runs in {runs_root()}; start one with: rrl submit job.toml")
    if name is None:
        return runs[0]
    matching = [run for run in runs if run.id.startswith(name)]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise UsageError(f'"{name}" fits {len(matching)} runs: {_names_text(matching)}')
    raise UsageError(f'no run "{name}" in {runs_root()}; newest: {_names_text(runs)}')


def read_state(run: RunDir) -> State | None:
    """Return the state from the journal of ``run``; None if the journal has no record yet.

    Raises UsageError if the journal is damaged, OperationFailed if its folder cannot be read.
    """
    return StateReader(run).state()


class StateReader:
    """Reads a run's state repeatedly: each call decodes only the journal records added since the last call."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._follower = Follower(run)

    @property
    def torn(self) -> int:
        """Return the number of bytes after the journal's last complete record."""
        return self._follower.torn_bytes

    def state(self) -> State | None:
        """Return the state from the journal's records so far; None before the first record.

        Raises UsageError if the journal is damaged, OperationFailed if its folder cannot be read.
        """
        try:
            return self._follower.state()
        except PermissionError:
            raise OperationFailed(_no_access_message(self._run)) from None
        except OSError as error:
            raise OperationFailed(f"{error.filename or self._run.journal}: {error.strerror}") from None


def resume_pending(run: RunDir) -> bool:
    """Return whether a user has requested to resume the run, and no manager has carried out the request yet.

    While such a request is open, the journal still shows the run as ended.
    Raises OperationFailed if the run cannot be read.
    """
    with errors_about(run.path):
        return read_pending(run) is not None


def job_of(run: RunDir) -> RunSpec | None:
    """Return the run spec; None if it cannot be read."""
    try:
        return msgspec.json.decode(run.run_spec.read_bytes(), type=RunSpec)
    except (OSError, msgspec.MsgspecError):
        return None


def summary_of(run: RunDir) -> dict[str, Any] | None:
    """Return the decoded summary.json; None if there is none yet or it cannot be read."""
    try:
        return msgspec.json.decode(run.summary.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError):
        return None


def check_manageable(run: RunDir) -> None:
    """Check that a manager of ``run`` could start.

    Raises OperationFailed if a file that it needs is missing, damaged or another user's.
    """
    from ..transport.keys import RunKeys

    check_own(run)
    for path, kind in ((run.run_spec, RunSpec), (run.resolved, dict[str, Any])):
        try:
            msgspec.json.decode(path.read_bytes(), type=kind)
        except PermissionError:
            raise OperationFailed(_no_access_message(run)) from None
        except OSError as error:
            raise OperationFailed(f"{path}: {error.strerror}; without it the run cannot be managed") from None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise OperationFailed(f"{path} is damaged: {error}; without it the run cannot be managed") from None
    try:
        RunKeys.load(run.keys)
    except OSError as error:
        raise OperationFailed(f"{run.keys}: {error.strerror}" if error.strerror else str(error)) from None
    if not os.access(run.journal, os.W_OK | os.X_OK) or not os.access(run.epochs, os.W_OK | os.X_OK):
        raise OperationFailed(_no_access_message(run))


def _is_run(run: RunDir) -> bool:
    """Return whether the folder contains a run; also True if this user has no permission to look into the folder."""
    try:
        return run.journal.is_dir()
    except PermissionError:
        return True
    except OSError:
        return False


def _no_access_message(run: RunDir) -> str:
    """Return one line that says why this user cannot work with the run."""
    yours = f"{run.path} is yours, but you may not read and write all of it: chmod -R u+rwX {run.path}"
    return _problem(run, change=True) or yours


def submit_time(run: RunDir) -> float:
    """Return when the run was submitted or last resumed (s since the epoch, the file server's clock); 0 if unknown.

    It is the modification time of resolved.json, which is written only at a submission or resume; if this file is
    missing, it is the modification time of the run directory.
    """
    for path in (run.resolved, run.path):
        try:
            return path.stat().st_mtime
        except OSError:
            continue
    return 0.0


def _names_text(runs: list[RunDir], max_names: int = 5) -> str:
    def names() -> Iterator[str]:
        yield from (run.id for run in runs[:max_names])
        if len(runs) > max_names:
            yield "..."

    return ", ".join(names())
