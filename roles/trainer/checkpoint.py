"""Checkpoints of a trainer of one process: written whole, read only by the manifest of the commit record.

A checkpoint counts once the store has committed it, not before. What is written here and never committed is garbage,
and so is what lies further back than the last few commits.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from rrl.roles.checkpoint_files import DamagedCheckpoint, incarnation_of, verified
from rrl.spec.rundir import RunDir

_FILE = "learner.pt"


class Checkpoints:
    """``incarnation`` is the trainer's; ``keep`` commits are kept, at least the newest."""

    def __init__(self, run_dir: RunDir, incarnation: int, keep: int) -> None:
        self._run_dir = run_dir
        self._incarnation = incarnation
        self._keep = keep
        self._committed: list[str] = []
        """names of the folders of the last commits, the newest last"""

    def write(self, folder: Path, state: dict[str, Any]) -> list[Path]:
        """The state as files in ``folder``, which is fresh. Returns the files to commit, which makes them durable."""
        path = folder / _FILE
        with path.open("xb") as file:
            # The commits before this one travel in it: whoever restores it must not take them for garbage.
            torch.save({"state": state, "before": self._committed[-self._keep + 1 :]}, file)
        return [path]

    def read(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """The state that was committed under ``manifest``. Raises DamagedCheckpoint when it is not what is there."""
        files = verified(self._run_dir.path, manifest)
        if _FILE not in files:
            raise DamagedCheckpoint(f"{manifest['folder']}: no {_FILE} was committed, but {sorted(files)}")
        saved = torch.load(files[_FILE], map_location="cpu", weights_only=True)
        self._committed = [*saved["before"], files[_FILE].parent.name]
        state: dict[str, Any] = saved["state"]
        return state

    def committed(self, files: list[Path]) -> None:
        """These files of :meth:`write` are committed now: remove what that makes garbage."""
        self._committed = [*self._committed, files[0].parent.name][-self._keep :]
        self.remove_garbage()

    def remove_garbage(self) -> None:
        """Remove every checkpoint of this life and earlier ones that is not among the last commits.

        Call it only with nothing written and not yet committed. Folders of *later* lives are left alone, so that a
        fenced trainer that wakes up late cannot harm its successor.
        """
        for folder in self._run_dir.checkpoints.iterdir():
            made_by = incarnation_of(folder.name)
            if made_by is not None and made_by <= self._incarnation and folder.name not in self._committed:
                shutil.rmtree(folder, ignore_errors=True)  # garbage that resists must not end the training
