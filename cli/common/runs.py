"""Which run is meant, and what is known of it: from the run directory alone, so that it works on a dead manager too."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from ...core.run_dir import RunDir, runs_root
from ...core.run_spec import JobView
from ...manager.model.state import State
from ...manager.storage.journal import Follower, JournalError


class BadInput(Exception):
    """What was asked for cannot be meant; one line, exit code 2."""


class Failed(Exception):
    """It was meant well and did not work; one line, exit code 1."""


def all_runs() -> list[RunDir]:
    """Every run under the runs root, newest first."""
    try:
        entries = [Path(entry.path) for entry in os.scandir(runs_root()) if _named(entry)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise Failed(f"{runs_root()}: {error.strerror}") from None
    runs = [run for run in map(RunDir, entries) if _is_run(run)]
    return sorted(runs, key=lambda run: (_submitted(run), run.id), reverse=True)


def _named(entry: os.DirEntry[str]) -> bool:
    """A folder; one with a dot is a run that is being made, or whose rrl submit died over it."""
    return entry.is_dir() and not entry.name.startswith(".")


def find_run(name: str | None) -> RunDir:
    """The run of that id, of that unambiguous beginning of an id, or in that folder; without a name the newest one.

    Raises BadInput that names the candidates, Failed when it is a run that this user cannot read."""
    run = _meant(name)
    if not os.access(run.journal, os.R_OK | os.X_OK):
        raise Failed(_not_yours(run))
    return run


def _meant(name: str | None) -> RunDir:
    if name is not None and "/" in name:
        run = RunDir(Path(name).expanduser().absolute())
        if not _is_run(run):
            raise BadInput(f"{name}: no run directory of rrl")
        return run
    if name is not None and name.strip(".") and _is_run(exact := RunDir(runs_root() / name)):
        return exact
    runs = all_runs()
    if not runs:
        raise BadInput(f"there are no runs in {runs_root()}; start one with: rrl submit job.toml")
    if name is None:
        return runs[0]
    fitting = [run for run in runs if run.id.startswith(name)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise BadInput(f'"{name}" fits {len(fitting)} runs: {_listed(fitting)}')
    raise BadInput(f'no run "{name}" in {runs_root()}; newest: {_listed(runs)}')


def read(run: RunDir) -> State | None:
    """What the journal says of ``run``; None before its manager has written anything. Raises BadInput, Failed."""
    return Reader(run).state()


class Reader:
    """The same again and again, at the price of what is new."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._follower = Follower(run)

    @property
    def torn(self) -> int:
        """Bytes behind the journal's last whole record."""
        return self._follower.torn

    def state(self) -> State | None:
        """Raises BadInput when the journal is damaged, Failed when its folder cannot be read."""
        try:
            return self._follower.state()
        except JournalError as error:
            raise BadInput(str(error)) from None
        except PermissionError:
            raise Failed(_not_yours(self._run)) from None
        except OSError as error:
            raise Failed(f"{self._run.journal}: {error.strerror}") from None


def job_of(run: RunDir) -> JobView | None:
    """The job as submitted; None where it cannot be read."""
    try:
        return msgspec.json.decode(run.view.read_bytes(), type=JobView)
    except (OSError, msgspec.MsgspecError):
        return None


def summary_of(run: RunDir) -> dict[str, Any] | None:
    """The decoded summary.json; None while there is none."""
    try:
        return msgspec.json.decode(run.summary.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError):
        return None


def check_whole(run: RunDir) -> None:
    """Raises Failed where a manager of ``run`` could not begin: what it needs is missing, damaged or not ours."""
    from ...transport.keys import RunKeys

    for path, kind in ((run.view, JobView), (run.resolved, dict[str, Any])):
        try:
            msgspec.json.decode(path.read_bytes(), type=kind)
        except PermissionError:
            raise Failed(_not_yours(run)) from None
        except OSError as error:
            raise Failed(f"{path}: {error.strerror}; without it the run cannot be managed") from None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Failed(f"{path} is damaged: {error}; without it the run cannot be managed") from None
    try:
        RunKeys.load(run.keys)
    except OSError as error:
        raise Failed(f"{run.keys}: {error.strerror}" if error.strerror else str(error)) from None
    if not os.access(run.journal, os.W_OK | os.X_OK) or not os.access(run.epochs, os.W_OK | os.X_OK):
        raise Failed(_not_yours(run))


def _is_run(run: RunDir) -> bool:
    """Somebody else's, which cannot be looked into, is one too as far as anybody can tell."""
    try:
        return run.journal.is_dir()
    except PermissionError:
        return True
    except OSError:
        return False


def _not_yours(run: RunDir) -> str:
    """Why this user can do nothing with the run, in one line."""
    try:
        uid = run.path.stat().st_uid
    except OSError as error:
        return f"{run.path}: {error.strerror}"
    try:
        owner = pwd.getpwuid(uid).pw_name
    except KeyError:
        owner = str(uid)
    if uid == os.geteuid():
        return f"{run.path} is yours, but you may not read and write all of it: chmod -R u+rwX {run.path}"
    return f"{run.id} is a run of {owner}, and only {owner} can look at it or change it"


def _submitted(run: RunDir) -> float:
    """When it was submitted, by the file server's clock: its spec is written once."""
    for path in (run.resolved, run.path):
        try:
            return path.stat().st_mtime
        except OSError:
            continue
    return 0.0


def _listed(runs: list[RunDir], most: int = 5) -> str:
    def names() -> Iterator[str]:
        yield from (run.id for run in runs[:most])
        if len(runs) > most:
            yield "..."

    return ", ".join(names())
