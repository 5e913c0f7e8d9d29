"""Find the folders with the weights of a run: the newest checkpoint, and the exports by the run itself.

The journal has the steps but not the folders, so the folders are found by their names.
"""

from __future__ import annotations

import os
import re

from msgspec import Struct

from ...core.run_dir import RunDir, attempt_of


class ModelFolder(Struct, frozen=True):
    """A folder with the weights of a step."""

    step: int
    path: str
    """Absolute path."""


class ModelFolders(Struct, frozen=True, kw_only=True):
    """The folders with the weights of a run."""

    checkpoint: ModelFolder | None = None
    """The newest committed checkpoint; None if there is none."""
    export: ModelFolder | None = None
    """The newest export by the run itself (``[roles.trainer] export``); None if there is none."""
    export_failure: str = ""
    """Why the newest export by the run itself failed; empty if it did not fail."""


def model_folders(run: RunDir, committed: int) -> ModelFolders:
    """Return the folders of a run whose newest committed step is ``committed``; unreadable folders are left out."""
    return ModelFolders(
        checkpoint=_newest_checkpoint(run, committed), export=_newest_export(run), export_failure=_export_failure(run)
    )


def _newest_checkpoint(run: RunDir, committed: int) -> ModelFolder | None:
    """Return the newest checkpoint of the steps up to ``committed``; None if there is none.

    If several attempts at a step remain, the newest one is the committed one, because another attempt begins only if
    the previous attempt has failed. Step 0 is the reference model of the trainer, not a checkpoint.
    """
    try:
        attempts = [attempt_of(entry.name) for entry in os.scandir(run.checkpoints)]
    except OSError:
        return None
    newest = max((one for one in attempts if one is not None and 0 < one.step <= committed), default=None)
    return None if newest is None else ModelFolder(newest.step, str(run.checkpoints / newest.folder))


def _newest_export(run: RunDir) -> ModelFolder | None:
    try:
        names = [re.fullmatch(r"step-(\d+)", entry.name, re.ASCII) for entry in os.scandir(run.exports)]
    except OSError:
        return None
    step = max((int(name[1]) for name in names if name is not None), default=None)
    return None if step is None else ModelFolder(step, str(run.export_of(step)))


def _export_failure(run: RunDir) -> str:
    try:
        return run.export_failure.read_text(errors="replace").strip()
    except OSError:
        return ""
