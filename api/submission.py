"""Create a run of a checked job and start its manager; continue a run that has ended."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ..config.input_files import check_inputs
from ..config.job.document import JobDocument, JobPart, Setting
from ..config.job.load import job_from, resolved
from ..config.job.schema import Job
from ..core.run_dir import RunDir, runs_root
from ..core.types import OperationFailed, Outcome, UsageError
from ..manager.bootstrap import start as starting
from ..manager.model.state import State
from .preflight.job_preflight import CheckedJob, checked
from .runs import check_manageable, read_state
from .watching.manager_liveness import manager_gone

FIXED_KEYS = ("run.name", "run.seed", "cluster.kind", "model", "task", "sampling.extras")
"""Keys of job.toml that a resume cannot change, since checkpoints and stored trajectories depend on their values."""
CHANGEABLE_KEYS = ("model.max_length",)
"""Keys of the tables in ``FIXED_KEYS`` that a resume can change nevertheless."""
KEYS_WITH_NAMES = ("sampling.extras", "task.rewards")
"""Tables in ``FIXED_KEYS`` whose keys are names that the user chose, so that an additional key is a change."""
LENGTH_KEYS = (("run", "steps"), ("cluster", "walltime"))
"""Keys that make a run longer. If a resume sets only these keys, the job is not compared with the job of the run."""


Announce = Callable[[RunDir, bool], None]
"""Names a run to the user, before a signal that has arrived (True) ends the command."""


# ── a new run ──────────────────────────────────────────────────────────────────────────────────────────────────────
def create(job: CheckedJob) -> RunDir:
    """Create the run directory of a new run. Raises UsageError if it cannot be written."""
    try:
        return starting.create(job.job, job.spec, job.document.source, job.document.text().encode())
    except OSError as error:
        where = f"{error.filename}: " if error.filename and str(error.filename) != str(runs_root()) else ""
        raise UsageError(
            f"no run can be made in {runs_root()}: {where}{error.strerror or error}; name another folder"
            " with --runs-dir"
        ) from None


def start(job: CheckedJob, announce: Announce) -> tuple[RunDir, list[str]]:
    """Create a run and start its manager in the background; return the run and warnings.

    Args:
        job: The job.
        announce: Called once the manager is started.

    Raises:
        UsageError: The run directory cannot be written.
        OperationFailed: No manager could be started. The run directory has been removed.
    """
    with signals_held() as arrived:
        run = create(job)
        try:
            if arrived():
                raise OSError("interrupted")
            warning = starting.start_manager(run, job.spec)
        except (OSError, RuntimeError) as error:  # submitit raises RuntimeError if sbatch is refused
            shutil.rmtree(run.path, ignore_errors=True)
            raise OperationFailed(f"the run could not be started: {error}") from None
        announce(run, arrived())
    return run, [warning] if warning else []


@contextmanager
def signals_held() -> Iterator[Callable[[], bool]]:
    """Hold back the signals that end a command, which must not leave a run of which the user does not know.

    Programs that are started meanwhile inherit this, so Ctrl-C does not end sbatch before it has answered. Yields a
    function that returns whether a signal has arrived. The signals are delivered at the end of the block.
    """
    held = {one for one in starting.ENDING_SIGNALS if signal.getsignal(one) is not signal.SIG_IGN}  # nohup ignores one
    before = signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        yield lambda: bool(held & signal.sigpending())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ── a run that has ended ───────────────────────────────────────────────────────────────────────────────────────────
class Resumption(NamedTuple):
    """A run that has ended, and the job with which it can continue."""

    run: RunDir
    state: State
    checked: CheckedJob
    source: Path
    """The path whose folder is the working folder of the roles."""


def prepare_resume(
    run: RunDir, parts: Sequence[JobPart], settings: Sequence[Setting], *, trust_folder: bool = False
) -> Resumption:
    """Check that a run has ended and can continue; nothing is changed.

    Args:
        run: The run.
        parts: The parts of the job spec to continue with; if empty, the run continues with its own job spec.
        settings: Settings that replace values of the job spec.
        trust_folder: Whether the run may continue although other users can write the job's folder.

    Raises:
        UsageError: The run cannot continue, or cannot continue with this job.
        OperationFailed: A file of the run is missing, damaged or another user's.
    """
    check_manageable(run)
    state = _ended_state(run)
    document, source = _document(run, parts, settings)
    job = job_from(document, source.parent)
    _check_unfinished(run, state, job)
    check_inputs(run, state.job)
    if parts or any(setting.key not in LENGTH_KEYS for setting in settings):
        _check_same_run(run, job, document)
    checked_job = checked(job, document, folder=source.absolute().parent, trust_folder=trust_folder)
    return Resumption(run, state, checked_job, source)


def resume(resumption: Resumption, announce: Announce) -> list[str]:
    """Continue the run under its id; return warnings. ``announce`` is called once a manager is started.

    Raises:
        UsageError: The journal of the run is damaged.
        OperationFailed: No manager could be started; the run is unchanged.
    """
    run, state, job, source = resumption
    assert state.ended is not None
    with signals_held() as arrived:
        try:
            warning = starting.resume(run, job.job, job.spec, job.document.text().encode(), source, state.ended)
        except (OSError, RuntimeError) as error:
            raise OperationFailed(f"{run.id} could not be resumed: {error}") from None
        announce(run, arrived())
    return [warning] if warning else []


def _ended_state(run: RunDir) -> State:
    """Return the state of a run that has ended. Raises UsageError for any other run."""
    state = read_state(run)
    if state is None:
        raise UsageError(f"{run.id} has not begun yet; see: rrl status {run.id}")
    if state.outcome is None:
        alone = manager_gone(run, state)
        raise UsageError(
            f"{run.id} has not ended{'; its manager: ' + alone if alone else ''}; see: rrl status {run.id}"
        )
    return state


def _document(run: RunDir, parts: Sequence[JobPart], settings: Sequence[Setting]) -> tuple[JobDocument, Path]:
    """Return the job spec to resume with, and the path whose folder is the roles' working folder."""
    if not parts and not run.job_toml.exists():
        raise UsageError(f"{run.job_toml}: no such file; it was a copy of your job spec: name the original with --job")
    document = JobDocument(parts or [run.job_toml], settings)
    if parts and document.file is not None:
        return document, document.file
    return document, Path(str(msgspec.json.decode(run.resolved.read_bytes())["source"]))


def _check_unfinished(run: RunDir, state: State, job: Job) -> None:
    """Check that the job leaves something to do. Raises UsageError if it does not."""
    steps = job.run.steps or 0
    if state.outcome is Outcome.COMPLETED and not steps:
        raise UsageError(f"{run.id} is complete: nothing is left to do")
    if state.step >= steps > 0:
        raise UsageError(
            f"{run.id} has committed {state.step} steps already; to train more, for example:"
            f" rrl resume {run.id} --steps {2 * state.step}"
        )


def _check_same_run(run: RunDir, job: Job, document: JobDocument) -> None:
    """Check that the changed job continues this run. Raises UsageError if it would be a different run."""
    before, after = msgspec.json.decode(run.resolved.read_bytes())["job"], resolved(job)
    for key in FIXED_KEYS:
        if not _is_unchanged(_value_at(before, key), _value_at(after, key), key):
            text = f"is different in {run.id}; to change it start a new run"
            raise UsageError(document.complaint(tuple(key.split(".")), text))
    if not _value_at(before, "roles.trainer").get("kl") and _value_at(after, "roles.trainer.kl"):
        text = f"it is 0 in {run.id}, which therefore kept no reference model; to change it start a new run"
        raise UsageError(document.complaint(("roles", "trainer", "kl"), text))


def _value_at(job: dict[str, Any], key: str) -> Any:
    value: Any = job
    for name in key.split("."):
        value = value.get(name)
    return value


def _is_unchanged(before: Any, after: Any, key_path: str) -> bool:
    """Return whether a resume leaves the value of a key unchanged; ``key_path`` is the key's dotted path in job.toml.

    Tables are compared key by key. A key that only ``after`` has is ignored, since the version of rrl that created the
    run may not have known the key. A key in :data:`CHANGEABLE_KEYS` always counts as unchanged.
    """
    if key_path in CHANGEABLE_KEYS:
        return True
    if isinstance(before, dict) and isinstance(after, dict) and key_path not in KEYS_WITH_NAMES:
        return all(_is_unchanged(value, after.get(key), f"{key_path}.{key}") for key, value in before.items())
    return bool(before == after)
