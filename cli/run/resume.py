"""``rrl resume``: continues a run that has ended from its last commit, under the same id."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ...config.job.document import JobDocument, Setting, parse_setting
from ...config.job.load import job_from, resolved
from ...config.job.resolve import resolve_for_submission
from ...config.job.schema import Job
from ...core.run_dir import RunDir
from ...core.types import Outcome
from ...core.units import seconds
from ...manager.bootstrap import start as starting
from ...manager.model.state import State
from ...manager.storage.journal import JournalError
from ..common.runs import OperationFailed, UsageError, check_manageable, find_run, read_state
from ..job.check import preflight, preview_or_fail, print_warnings
from .manager_liveness import manager_gone
from .submit import print_started, watch_until_end

FIXED_KEYS = ("run.name", "run.seed", "cluster.kind", "model", "task")
"""Keys of job.toml that a resume cannot change, since checkpoints and stored trajectories depend on their values."""
CHANGEABLE_KEYS = ("model.max_length",)
"""Keys within ``FIXED_KEYS`` that can change."""


def resume(
    name: str, files: Sequence[Path], settings: Sequence[str], *, steps: int | None, walltime: str | None, wait: bool,
    json: bool,
) -> int:  # fmt: skip
    """Continue a run that has ended. Exit codes are those of ``rrl submit``.

    The job is that of ``files``, or of the run without any, with ``settings`` (``KEY=VALUE``), ``steps`` and
    ``walltime``.
    """
    run = find_run(name)
    check_manageable(run)
    state = read_state(run)
    _check_ended(run, state)
    assert state is not None
    assert state.ended is not None
    document, source = _document(run, files, [*map(parse_setting, settings), *_shorthands(steps, walltime)])
    job = job_from(document, source.parent)
    _check_unfinished(run, state, job)
    if files or settings:
        _check_same_run(run, job, document)
    spec = resolve_for_submission(job)
    preview_or_fail(spec, document)
    print_warnings(preflight(job, spec, document).doubts)
    try:
        warning = starting.resume(run, job, spec, document.text().encode(), source, state.ended)
    except JournalError as error:
        raise UsageError(str(error)) from None
    except (OSError, RuntimeError) as error:
        raise OperationFailed(f"{run.id} could not be resumed: {error}") from None
    print_warnings([warning] if warning else [])
    return watch_until_end(run, json, state.seq) if wait else print_started(run, json)


def _check_ended(run: RunDir, state: State | None) -> None:
    if state is None:
        raise UsageError(f"{run.id} has not begun yet; see: rrl status {run.id}")
    if state.outcome is None:
        alone = manager_gone(run)
        raise UsageError(
            f"{run.id} has not ended{'; its manager: ' + alone if alone else ''}; see: rrl status {run.id}"
        )


def _document(run: RunDir, files: Sequence[Path], settings: Sequence[Setting]) -> tuple[JobDocument, Path]:
    """Return the job spec to resume with, and the path whose folder is the roles' working folder."""
    source = files[0] if files else Path(str(msgspec.json.decode(run.resolved.read_bytes())["source"]))
    if not files and not run.job_toml.exists():
        raise UsageError(f"{run.job_toml}: no such file; it was a copy of your job spec: name the original with --job")
    return JobDocument(files or [run.job_toml], settings), source


def _shorthands(steps: int | None, walltime: str | None) -> list[Setting]:
    """Return the settings for which ``rrl resume`` has options of their own."""
    settings = []
    if steps is not None:
        settings.append(Setting(("run", "steps"), steps, f"--steps {steps}"))
    if walltime is not None:
        _check_positive(walltime)
        settings.append(Setting(("cluster", "walltime"), walltime, f"--walltime {walltime}"))
    return settings


def _check_positive(text: str) -> None:
    """Check the value of ``--walltime``. Raises UsageError."""
    try:
        if seconds(text):
            return
    except ValueError as error:
        raise UsageError(f"--walltime: {error}") from None
    raise UsageError(f'--walltime: must be more than 0, not "{text}"')


def _check_unfinished(run: RunDir, state: State, job: Job) -> None:
    """Check that the job leaves something to do. Raises UsageError."""
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
            text = f"is not that of {run.id}; to change it start a new run"
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
    """Return whether two values of a key are equal; a key that an earlier rrl did not have makes no difference.

    ``key_path`` is the dotted path of the key in job.toml.
    """
    if key_path in CHANGEABLE_KEYS:
        return True
    if isinstance(before, dict) and isinstance(after, dict):
        return all(_is_unchanged(value, after.get(key), f"{key_path}.{key}") for key, value in before.items())
    return bool(before == after)
