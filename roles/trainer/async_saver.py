"""The trainer's second thread: what the training thread has copied to the host it writes to disk and commits, one step
after another, while the next step runs.

The members do each step of it together, over a group of their own; two saves at once on one group would lock each other
out (docs/sources.md, torch). An error here ends the process: a trainer that cannot save must not go on.
"""

from __future__ import annotations

import logging
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

import rrl

from ..worker.connection import Stopping
from . import exchange
from .checkpoint import Checkpoints, Written, not_written
from .host_buffers import HostBuffers, Layout
from .learner import Learner
from .process_group import COLLECTIVE_TIMEOUT_S, Gang, blocked_on_rank0, wait_to_be_fenced

_log = logging.getLogger("rrl.trainer")

COMMIT_TIMEOUT_S = COLLECTIVE_TIMEOUT_S
"""s that the training thread waits for an older step's commit. The manager judges it before, as a checkpoint; and not
at all while it is the store that is away, which may wait in Slurm's queue for a node"""
MAX_UNCOMMITTED = 2
"""steps done and not committed: so many host buffers there are"""
_DISK_FULL_RETRY_S = 5.0
"""s before a full disk is tried again"""

T = TypeVar("T")


class SnapshotMeta(Struct, frozen=True):
    """What a snapshot says of itself beside its bytes."""

    number: int
    world: int
    layout: str
    extra_state: bytes
    digest: str
    """of the batch that its last step learnt from"""
    metrics: dict[str, float]


class _Staged(Struct, frozen=True):
    note: SnapshotMeta
    buffer: memoryview


def end_process(error: BaseException) -> None:
    """Log the error of the saving thread and end the process: the training thread may be anywhere, in torch too."""
    _log.critical("a checkpoint could not be saved, this process ends", exc_info=error)
    os._exit(1)


class AsyncSaver:
    """Made with the learner as it is to be saved: its tensors never change their places. ``most``: steps that may be
    done and not committed."""

    def __init__(
        self, me: rrl.Worker, gang: Gang, learner: Learner, checkpoints: Checkpoints, buffers: HostBuffers, max_uncommitted: int,
        *, fail: Callable[[BaseException], None] = end_process,
    ) -> None:  # fmt: skip
        self._me, self._gang, self._learner = me, gang, learner
        self._checkpoints, self._buffers = checkpoints, buffers
        self._max_uncommitted = min(max_uncommitted, MAX_UNCOMMITTED)
        self._tensors = learner.tensors()
        self.layout = Layout(self._tensors)
        buffers.prepare(self.layout.nbytes)
        self._fail = fail
        self._error: BaseException | None = None
        self._uncommitted = 0
        self._changed = threading.Condition()
        self._todo: queue.SimpleQueue[_Staged | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="rrl-saver", daemon=True)
        self._thread.start()

    # ── the training thread ────────────────────────────────────────────────────────────────────────────────────────
    def save(self, digest: str, metrics: dict[str, float]) -> None:
        """The learner's state as it is now: returns once it is copied, and as soon as so many steps are uncommitted
        as may be. ``digest``: of the batch of its last step. Raises TimeoutError, or what kept an older one from
        being saved."""
        self._wait(self._max_uncommitted - 1)
        learner = self._learner
        buffer = self._buffers.buffer(self.layout.nbytes, learner.number)
        self.layout.fill(buffer, self._tensors)
        note = SnapshotMeta(
            learner.number, self._gang.world, self.layout.digest, learner.extra_state(), digest, metrics
        )
        self._buffers.seal(learner.number, msgspec.msgpack.encode(note))
        with self._changed:
            self._uncommitted += 1
        self._todo.put(_Staged(note, buffer))

    def finish(self) -> None:
        """Returns once all is committed. Raises as :meth:`save`."""
        self._wait(0)
        self._todo.put(None)
        self._thread.join()

    def _wait(self, at_most: int) -> None:
        with self._changed:
            settled = self._changed.wait_for(lambda: self._error or self._uncommitted <= at_most, COMMIT_TIMEOUT_S)
        if self._error is not None:
            raise self._error
        if not settled:
            raise TimeoutError(f"{self._uncommitted} checkpoints have not been committed in {COMMIT_TIMEOUT_S:g} s")

    # ── the saving thread ──────────────────────────────────────────────────────────────────────────────────────────
    def _main(self) -> None:
        while (staged := self._todo.get()) is not None:
            try:
                with wait_to_be_fenced(self._me):
                    self._write_and_commit(staged)
            except BaseException as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                if not isinstance(error, Stopping):
                    self._fail(error)
                return
            with self._changed:
                self._uncommitted -= 1
                self._changed.notify_all()

    def _write_and_commit(self, staged: _Staged) -> None:
        note = staged.note
        tensors = self.layout.views(staged.buffer)
        while True:
            path, trouble = self._broadcast_from_rank0(lambda: self._fresh_folder(note.number), tuple[str, Written])
            folder, written = Path(path), [trouble]
            if path:
                written = self._gather(self._checkpoints.write(folder, tensors, self._tensors, note.extra_state))
            troubles = [each for each in written if each.trouble]
            if not troubles:
                break
            if not all(each.disk_full for each in troubles) or self._me.stopping.is_set():
                raise OSError(troubles[0].trouble)
            if self._gang.rank == 0:
                _log.warning("%s; trying again", troubles[0].trouble)
                if path:
                    shutil.rmtree(folder, ignore_errors=True)
            time.sleep(_DISK_FULL_RETRY_S)
        with blocked_on_rank0(self._me, self._gang):
            self._broadcast_from_rank0(lambda: self._commit(note, folder, written), None)

    def _fresh_folder(self, number: int) -> tuple[str, Written]:
        """Its path; empty, with the reason, where there is none: a folder takes room too."""
        try:
            return str(self._me.checkpoint_dir(number)), Written({})
        except OSError as error:
            return "", not_written(error)

    def _commit(self, note: SnapshotMeta, folder: Path, written: list[Written]) -> None:
        digests = {name: digest for each in written for name, digest in each.files.items()}
        self._me.commit(note.number, [folder / name for name in digests], note.metrics, digests)
        self._checkpoints.on_committed(folder)

    def _broadcast_from_rank0(self, do: Callable[[], T], kind: Any) -> T:
        """As :meth:`Gang.from_first`, on the group of this thread."""
        return exchange.broadcast_from_rank0(self._gang.file_group, self._gang.rank, do, kind)

    def _gather(self, mine: Written) -> list[Written]:
        return exchange.gather(self._gang.file_group, mine, Written)
