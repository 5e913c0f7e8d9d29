"""``rrl resume``: continues an ended run from its last commit, under the same id."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ...api.runs import find_run
from ...api.submission import prepare_resume
from ...api.submission import resume as resume_run
from ...config.job.document import Setting, parse_setting
from ...core.types import UsageError
from ...core.units import seconds
from ..common.output import print_warnings
from .submit import print_started, watch_until_end


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
        _check_positive(walltime)
        settings.append(Setting(("cluster", "walltime"), walltime, f"--walltime {walltime}"))
    return settings


def _check_positive(text: str) -> None:
    """Check the value of ``--walltime``. Raises UsageError if it is not a positive duration."""
    try:
        if seconds(text):
            return
    except ValueError as error:
        raise UsageError(f"--walltime: {error}") from None
    raise UsageError(f'--walltime: must be more than 0, not "{text}"')
