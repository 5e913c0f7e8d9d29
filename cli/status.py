"""``rrl status``: one look at a run, or a picture that is kept up to date."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import msgspec
from rich.console import Group, RenderableType

from rrl.cli.asking import Failed, Reader, find_run, job_of, summary_of
from rrl.cli.run_jobs import Liveness, liveness, surely_gone
from rrl.cli.screen import console, print_json, print_line, show
from rrl.cli.start_check import StartCheck
from rrl.cli.views.status import standing, status_view
from rrl.cli.views.summary import recoveries_view
from rrl.manager.state import State
from rrl.spec.rundir import RunDir
from rrl.spec.words import Outcome

LEAST_FREE = 64 * 2**10
"""bytes: with less free, what a manager writes for one decision may not fit"""


def status(name: str | None, *, live: bool, json: bool) -> int:
    run = find_run(name)
    if live:
        from rrl.cli.following import follow

        follow(run, keys=True)
        return 0
    reader = Reader(run)
    state = reader.state()
    if reader.torn and manager_gone(run):  # else it is only being written
        told = f"the journal ends in {reader.torn} bytes of an unfinished record, which are ignored"
        print(f"rrl: {told}: nobody was told of it", file=sys.stderr)
    failure = StartCheck(run).failure(state)
    if state is not None and failure:
        print(f"rrl: {run.id} was to go on, but {failure}; to try again: rrl manage {run.id}", file=sys.stderr)
    if state is not None and json:
        print_json(_as_json(run, state))
    elif json:
        outcome = Outcome.REJECTED if failure else None
        print_json({"run": run.id, "outcome": outcome, "why": waiting(run, failure)})
    elif state is None:
        print_line(f"{run.id}: {waiting(run, failure)}")
    else:
        show(picture(run, state, console().width, _looked_after(run, state)))
    return 0


def _looked_after(run: RunDir, state: State) -> Liveness:
    if state.outcome is not None:
        return Liveness()
    found = liveness(run, state)
    return found if found.note else Liveness(storage_trouble(run))


def _as_json(run: RunDir, state: State) -> dict[str, Any]:
    """The state, and where the run stands by its journal and by what is known of its manager and its jobs."""
    found = _looked_after(run, state)
    stands = {"standing": found.standing or standing(state)[0], "note": str(found)}
    decoded: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(state))
    return decoded | stands


def picture(run: RunDir, state: State, width: int, found: Liveness = Liveness()) -> RenderableType:
    """The status view, and what the summary adds once the run has ended."""
    view = status_view(state, time.time(), width, (found.note, found.advice), found.standing)
    summary = summary_of(run) if state.outcome is not None else None
    if summary is None or not (recoveries := summary.get("recoveries")):
        return view
    return Group(view, "", recoveries_view(recoveries))


def waiting(run: RunDir, start_failure: str) -> str:
    """What a run without a journal waits for, or why that will never come."""
    if start_failure:
        return f"rejected: {start_failure}"
    job = job_of(run)
    if job is not None and job.cluster == "slurm":
        from rrl.manager.own_job import starting

        why = f"squeue --name={starting(run.id, job)} tells why; where it shows none: rrl manage {run.id}"
        return f"its manager has not started yet ({why})"
    return f"its manager has not started yet (its output: {run.submit}; where there is none: rrl manage {run.id})"


def manager_gone(run: RunDir) -> str:
    """Return that no manager lives, and what to do, where this machine can tell for certain; else an empty text."""
    from rrl.manager.lease import holder

    try:
        held = holder(run)
    except OSError as error:
        raise Failed(f"{run.epochs}: {error.strerror}") from None
    return f"none is running; the roles go on. Start one: rrl manage {run.id}" if surely_gone(held) else ""


def storage_trouble(run: RunDir) -> str:
    """Why nothing can be written to the run directory, as far as this machine can tell; empty: it can. What a manager
    cannot write down it does not do, and its journal cannot say so."""
    try:
        there = os.statvfs(run.path)
    except OSError as error:
        return f"the run directory is away ({error.strerror}): nothing is decided until it is back; the roles go on"
    if there.f_flag & os.ST_RDONLY:
        return "the run directory is read-only: nothing is decided until it can be written; the roles go on"
    if there.f_bavail * there.f_frsize < LEAST_FREE:
        return "the run directory is full: nothing is decided until there is room; the roles go on"
    return ""
