"""Delete the checkpoints that no later incarnation of the trainer can need, for built-in and user-written trainers.

The trajectory store deletes them, because only the store knows which steps are committed. It calls
:meth:`CheckpointCleaner.update` only with durable facts. If the store dies between a commit and the deletion, the next
store deletes the superseded folders. The numbers in these facts never decrease, so a store that does not notice its
successor deletes no folder that the successor needs. A trainer cannot lose the files of the newest commit while it
restores them, because only this trainer can make the next commit: its first request has fenced all older trainers.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import shutil
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath

from msgspec import Struct

from ...core.run_dir import attempt_of

_log = logging.getLogger("rrl.checkpoints")


class CommitStatus(Struct, frozen=True):
    """The durable facts that decide which checkpoint folders can be deleted (:func:`garbage`)."""

    committed: int
    """Newest committed step; 0 before the first commit."""
    oldest_trainer: int
    """Number of the oldest trainer incarnation that may still commit; -1 before the first request of a trainer."""
    folders: Mapping[int, str]
    """Checkpoint folders (relative to the run directory) of the newest commits, by step."""


def garbage(names: Iterable[str], status: CommitStatus, keep_checkpoints: int) -> list[str]:
    """Return the folders that can be deleted.

    These are the checkpoints of all commits except the newest ``keep_checkpoints`` ones, abandoned attempts at
    committed steps, and attempts of fenced trainers at later steps, which can no longer be committed. Three kinds of
    folders are never included: the folders in ``status.folders`` with their parents; folders of step 0 (the reference
    model of the built-in trainer, which no commit names); and folders whose name was not made by
    :func:`~rrl.roles.checkpoints.folders.fresh_folder`.

    Args:
        names: names of the folders in the run's folder of checkpoints.
        status: the durable facts.
        keep_checkpoints: number of newest commits whose checkpoints are kept, at least 1.
    """
    kept = sorted(status.folders)[-keep_checkpoints:]
    oldest_kept = kept[0] if len(kept) == keep_checkpoints else status.committed - keep_checkpoints + 1
    committed_folders = {part for folder in status.folders.values() for part in PurePath(folder).parts}

    def is_garbage(name: str) -> bool:
        attempt = attempt_of(name)
        if attempt is None or attempt.step == 0 or name in committed_folders:
            return False
        if attempt.step > status.committed:
            return attempt.incarnation < status.oldest_trainer
        return attempt.step < oldest_kept or attempt.step in status.folders

    return [name for name in names if is_garbage(name)]


class CheckpointCleaner:
    """Deletes the folders that :func:`garbage` returns, in a thread of its own.

    The thread exists because the deletion of a large checkpoint may take minutes.

    The cleaner is a context manager. Its normal exit waits until everything is deleted. After an exception the exit
    does not wait, and the next store deletes the rest.

    Args:
        checkpoints: The run's folder of checkpoints.
        keep_checkpoints: Number of newest commits whose checkpoints are kept, at least 1.
    """

    def __init__(self, checkpoints: Path, keep_checkpoints: int) -> None:
        self._checkpoints, self._keep_checkpoints = checkpoints, keep_checkpoints
        self._status: CommitStatus | None = None
        self._todo: queue.SimpleQueue[CommitStatus | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="rrl-cleaner", daemon=True)
        self._not_deleted: set[str] = set()
        """Names of the folders that could not be deleted; each is logged once and tried again after each commit."""

    def __enter__(self) -> CheckpointCleaner:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._todo.put(None)
        if kind is None:
            self._thread.join()

    def update(self, status: CommitStatus) -> None:
        """Start to delete the folders that :func:`garbage` returns for ``status``; return at once."""
        if status != self._status:
            self._status = status
            self._todo.put(status)

    def _run(self) -> None:
        while (status := self._todo.get()) is not None:
            self._delete(status)

    def _delete(self, status: CommitStatus) -> None:
        with contextlib.suppress(OSError):  # if the folder cannot be listed, the next commit tries again
            for name in garbage([entry.name for entry in self._checkpoints.iterdir()], status, self._keep_checkpoints):
                self._delete_folder(self._checkpoints / name)

    def _delete_folder(self, folder: Path) -> None:
        try:
            shutil.rmtree(folder)
        except OSError as error:
            if folder.exists() and folder.name not in self._not_deleted:
                self._not_deleted.add(folder.name)
                _log.warning("cannot delete the superseded checkpoint %s: %s", folder, error)
