"""``rrl resume``: continues a run that has ended from its last commit, under the same id."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec
from pydantic import ValidationError

from ...config.job.load import load_job, resolved
from ...config.job.render import as_toml
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


def resume(name: str, *, changed: Path | None, steps: int | None, walltime: str | None, wait: bool, json: bool) -> int:
    """Continue a run that has ended. Exit codes are those of ``rrl submit``."""
    run = find_run(name)
    check_manageable(run)
    state = read_state(run)
    _check_ended(run, state)
    assert state is not None
    assert state.ended is not None
    job, text, source = _job(run, changed, steps, walltime)
    _check_fits(run, state, job, changed)
    spec = resolve_for_submission(job)
    preview_or_fail(spec, source)
    warnings, _ = preflight(job, spec, source, False)
    print_warnings(warnings)
    try:
        warning = starting.resume(run, job, spec, text, source, state.ended)
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


def _job(run: RunDir, changed: Path | None, steps: int | None, walltime: str | None) -> tuple[Job, bytes, Path]:
    """Return the job to resume with, its text and its path, whose folder is the roles' working folder."""
    source = changed or Path(str(msgspec.json.decode(run.resolved.read_bytes())["source"]))
    if changed is None and not run.job_toml.exists():
        raise UsageError(f"{run.job_toml}: no such file; it was a copy of your job spec: name the original with --job")
    path = changed or run.job_toml
    job, text = load_job(path, source.parent), path.read_bytes()
    if steps is None and walltime is None:
        return job, text, source
    if steps is not None:
        job = job.model_copy(update={"run": job.run.model_copy(update={"steps": steps})})
    if walltime is not None:
        job = job.model_copy(update={"cluster": job.cluster.model_copy(update={"walltime": _seconds(walltime)})})
    return _validated(job, walltime), as_toml(job).encode(), source


def _validated(job: Job, walltime: str | None) -> Job:
    """Return ``job``, validated again as a whole.

    Raises UsageError if a changed value (``--walltime`` or ``--steps``) does not fit the rest of the job.
    """
    try:
        return Job.model_validate(tomllib.loads(as_toml(job)))
    except ValidationError as error:
        first_error = error.errors()[0]
        key = ".".join(map(str, first_error.get("ctx", {}).get("at", first_error["loc"])))
        given = f"--walltime {walltime}" if walltime else "--steps"
        raise UsageError(f"{given} does not fit the rest of the job: {key}: {first_error['msg']}") from None


def _seconds(text: str) -> float:
    try:
        if given := seconds(text):
            return given
    except ValueError as error:
        raise UsageError(f"--walltime: {error}") from None
    raise UsageError(f'--walltime: must be more than 0, not "{text}"')


def _check_fits(run: RunDir, state: State, job: Job, changed: Path | None) -> None:
    """Check that the job continues this run.

    Raises UsageError if nothing is left to do, or it would be a different run.
    """
    steps = job.run.steps or 0
    if state.outcome is Outcome.COMPLETED and not steps:
        raise UsageError(f"{run.id} is complete: nothing is left to do")
    if state.step >= steps > 0:
        raise UsageError(
            f"{run.id} has committed {state.step} steps already; to train more, for example:"
            f" rrl resume {run.id} --steps {2 * state.step}"
        )
    if changed is None:
        return
    before, after = msgspec.json.decode(run.resolved.read_bytes())["job"], resolved(job)
    for key in FIXED_KEYS:
        if not _is_unchanged(_value_at(before, key), _value_at(after, key), key):
            raise UsageError(f"{changed}: {key} is not that of {run.id}; to change it start a new run")
    if not _value_at(before, "roles.trainer").get("kl") and _value_at(after, "roles.trainer.kl"):
        raise UsageError(
            f"{changed}: roles.trainer.kl is 0 in {run.id}, which therefore kept no reference model;"
            " to change it start a new run"
        )


def _value_at(job: dict[str, Any], key: str) -> Any:
    value: Any = job
    for name in key.split("."):
        value = value.get(name)
    return value


def _is_unchanged(before: Any, after: Any, key_path: str) -> bool:
    """Return whether two values of a key are equal; a key that an earlier rrl did not have makes no difference.

    ``key_path`` says where the values stand in job.toml.
    """
    if key_path in CHANGEABLE_KEYS:
        return True
    if isinstance(before, dict) and isinstance(after, dict):
        return all(_is_unchanged(value, after.get(key), f"{key_path}.{key}") for key, value in before.items())
    return bool(before == after)
