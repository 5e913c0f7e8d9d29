"""``rrl submit``, ``rrl resume`` and ``rrl manage``: start a run, watch it, or run its manager in this process."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from functools import partial
from pathlib import Path

from ...api.fault_requests import parse_flag
from ...api.interventions import request_end
from ...api.preflight.job_preflight import checked
from ...api.runs import check_manageable, find_run, job_of, read_state, summary_of
from ...api.submission import create, prepare_resume, signals_held, start
from ...api.submission import resume as resume_run
from ...api.watching.run_watcher import await_resumed
from ...api.watching.start_check import NeverBegan
from ...config.job.document import JobDocument, Setting, parse_setting
from ...config.job.load import job_from
from ...config.model_folder import CONFIG
from ...core.run_dir import RunDir
from ...core.types import OperationFailed, Outcome, UsageError
from ...core.units import seconds
from ...manager.bootstrap import start as starting
from ...manager.storage.resume_request import read_pending
from ...roles.checkpoints.stored_tensors import INDEX
from ..common.output import print_json, print_warnings, program, show
from ..views.summary import next_steps_view, summary_view
from .follow import follow
from .json_documents import StartedRun, UnstartedRun

STOPPED_WATCHING = 130
"""Exit code if the user stopped watching before the run had an outcome: the usual code of a program ended by Ctrl-C."""


def submit(
    files: Sequence[Path], settings: Sequence[str], *, foreground: bool, wait: bool, trust: bool, json: bool
) -> int:
    """Start a run of the job that the files and settings (``KEY=VALUE``) describe together.

    Exit code: 0 when started (with ``wait``: completed), 1 when it failed or was cancelled, 2 when the cluster rejects
    the job.
    """
    document = JobDocument(files, [parse_setting(setting) for setting in settings])
    job = checked(job_from(document), document, foreground=foreground, trust_folder=trust)
    print_warnings(job.preflight.doubts)
    if foreground:
        with signals_held():
            return _foreground(create(job), json)
    run, warnings = start(job, partial(print_started, json=json, wait=wait))
    print_warnings(warnings)
    return watch_until_end(run, json) if wait else 0


def watch_until_end(run: RunDir, json: bool) -> int:
    """Watch the run until it ends, print its summary and return the exit code.

    ``q`` and Ctrl-C only stop watching: the exit code is then ``STOPPED_WATCHING``.

    If a resume was requested, waits for it first, because the earlier end of the run does not count.
    """
    try:
        await_resumed(run)
        with _progress_to_stderr(json):
            state = follow(run, require_manager=True, summary_follows=True)
    except NeverBegan as error:
        if json:
            print_json(UnstartedRun(run.id, Outcome.REJECTED, str(error)))
        raise
    except KeyboardInterrupt:
        state = None
    if state is None or state.outcome is None:
        print(f"\nstopped watching; {run.id} goes on", file=sys.stderr)
        again, end = f"{program()} status {run.id} --live", f"{program()} cancel {run.id}"
        print(f"to watch it again: {again}; to end it: {end}", file=sys.stderr)
        return STOPPED_WATCHING
    return _print_summary(run, json)


def manage(name: str) -> int:
    """Run the manager of an existing run in this process.

    Returns exit code 0 if the run completed, or if this manager ended before the run.
    """
    run = find_run(name)
    state = read_state(run)
    if state is not None and state.outcome is not None and read_pending(run) is None:  # and no resume is pending
        raise UsageError(f"{run.id} has ended already: {state.outcome.value}")
    check_manageable(run)
    # Ctrl-C ends this manager as SIGTERM does, and not the run: pressing it by mistake must do no damage
    signal.signal(signal.SIGINT, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    if _manager(run, foreground=False) is None:
        print(_manager_ended(run), file=sys.stderr)
        return 0
    return _print_summary(run, False)


def _manager_ended(run: RunDir) -> str:
    return f"this manager ended before the run, whose roles go on; start another manager: rrl manage {run.id}"


def _foreground(run: RunDir, json: bool) -> int:
    """Run the manager in this thread, which receives the signals, and draw the status view in another thread."""
    print(f"{run.id}  ({run.path}); Ctrl-C cancels it", file=sys.stderr, flush=True)
    stop = threading.Event()
    watching = threading.Thread(target=_watch, args=(run, stop), daemon=True)
    with _progress_to_stderr(json):
        watching.start()
        try:
            outcome = _manager(run, foreground=True)
        finally:
            stop.set()
            watching.join(timeout=10)
    if outcome is None:
        raise OperationFailed(_manager_ended(run))
    return _print_summary(run, json)


def _watch(run: RunDir, stop: threading.Event) -> None:
    try:
        follow(run, stop=stop, summary_follows=True, manages=True)
    except (UsageError, OperationFailed) as error:
        print(f"rrl: {error}", file=sys.stderr, flush=True)


def _manager(run: RunDir, *, foreground: bool) -> str | None:
    try:
        return starting.run_manager(run, foreground=foreground, by_hand=True)
    except OSError as error:
        raise OperationFailed(
            f"{error.filename or run.path}: {error.strerror}" if error.strerror else str(error)
        ) from None


def print_started(run: RunDir, interrupted: bool, *, json: bool, wait: bool) -> None:
    """Print that the run was started, before it is watched (``wait``) or the command ends.

    If nobody reads the output, or a signal has arrived (``interrupted``), say so on stderr. If nobody reads that
    either, end the run.
    """
    started = f"{run.id} was started; to end it: {program()} cancel {run.id}"
    try:
        if json and not wait:
            print_json(StartedRun(run.id, str(run.path)))
        elif not json:
            print(f"{run.id}  ({run.path})" if wait else run.id)
        sys.stdout.flush()
    except OSError:
        try:
            print(started, file=sys.stderr, flush=True)
        except OSError:
            request_end(run, keep=False)
        raise
    if interrupted or not (wait or json):
        hint = f"watch it with: {program()} status {run.id} --live"
        print(started if interrupted else hint, file=sys.stderr)


def _print_summary(run: RunDir, json: bool) -> int:
    summary = summary_of(run)
    if summary is None:
        raise OperationFailed(f"{run.id} has ended, but left no summary; see: rrl status {run.id}")
    if json:
        print_json(summary)
    else:
        print()
        show(summary_view(summary))
        print()
        steps = job.steps if (job := job_of(run)) is not None else 0
        show(next_steps_view(summary, steps, _weights(run), program()))
    return {Outcome.COMPLETED.value: 0, Outcome.REJECTED.value: 2}.get(str(summary.get("outcome")), 1)


def _weights(run: RunDir) -> str:
    """Return how the user gets the weights of a run; empty if the run has no checkpoint.

    For checkpoints of the built-in trainer and those with a Hugging Face folder, the text is the command that exports
    them. For other checkpoints it only names their folder.
    """
    if any(run.checkpoints.glob(f"step-*/{INDEX}")) or any(run.checkpoints.glob(f"step-*/**/{CONFIG}")):
        return f"{program()} export {run.id} FOLDER"
    return "checkpoints/ in this folder" if any(run.checkpoints.glob("*")) else ""


def _progress_to_stderr(wanted: bool) -> AbstractContextManager[object]:
    """Return a context that redirects stdout to stderr if ``wanted``.

    With ``--json``, stdout is for the one document at the end.
    """
    return redirect_stdout(sys.stderr) if wanted else nullcontext()


def resume(
    name: str, files: Sequence[Path], settings: Sequence[Setting], *, wait: bool, trust: bool, json: bool
) -> int:
    """Continue a run that has ended. The exit codes have the same meaning as for ``rrl submit``.

    The job comes from ``files``, or from the run if there are none; ``settings`` change it.
    """
    run = find_run(name)
    resumption = prepare_resume(run, files, settings, trust_folder=trust)
    print_warnings(resumption.checked.preflight.doubts)
    print_warnings(resume_run(resumption, partial(print_started, json=json, wait=wait)))
    return watch_until_end(run, json) if wait else 0


def changes(texts: Sequence[str], steps: int | None, walltime: str | None) -> list[Setting]:
    """Return the settings (``KEY=VALUE``), and those for which ``rrl resume`` has options of their own."""
    settings = [parse_setting(text) for text in texts]
    if steps is not None:
        settings.append(Setting(("run", "steps"), steps, f"--steps {steps}"))
    if walltime is not None:
        if not parse_flag(seconds, walltime, "--walltime"):
            raise UsageError(f'--walltime: must be more than 0, not "{walltime}"')
        settings.append(Setting(("cluster", "walltime"), walltime, f"--walltime {walltime}"))
    return settings
