"""Which run is meant, and what is known of it: from the run directory alone, so that it works on a dead manager too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from rrl.manager.journal import Follower, JournalError
from rrl.manager.state import State
from rrl.spec.jobview import JobView
from rrl.spec.rundir import RunDir, runs_root


class BadInput(Exception):
    """What was asked for cannot be meant; one line, exit code 2."""


class Failed(Exception):
    """It was meant well and did not work; one line, exit code 1."""


def all_runs() -> list[RunDir]:
    """Every run under the runs root, newest first."""
    try:
        entries = [Path(entry.path) for entry in os.scandir(runs_root()) if entry.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise Failed(f"{runs_root()}: {error.strerror}") from None
    runs = [run for run in map(RunDir, entries) if _is_run(run)]
    return sorted(runs, key=lambda run: (_submitted(run), run.id), reverse=True)


def find_run(name: str | None) -> RunDir:
    """The run of that id, of that unambiguous beginning of an id, or in that folder; without a name the newest one.

    Raises BadInput that names the candidates."""
    if name is not None and "/" in name:
        run = RunDir(Path(name).expanduser().absolute())
        if not _is_run(run):
            raise BadInput(f"{name}: no run directory of rrl")
        return run
    if name is not None and _is_run(exact := RunDir(runs_root() / name)):
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
    """What the journal says of ``run``; None before its manager has written anything. Raises Failed."""
    return Reader(run).state()


class Reader:
    """The same again and again, at the price of what is new."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._follower = Follower(run)

    def state(self) -> State | None:
        """Raises Failed when the journal cannot be read."""
        try:
            return self._follower.state()
        except JournalError as error:
            raise Failed(str(error)) from None
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


def _is_run(run: RunDir) -> bool:
    return run.journal.is_dir()


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
