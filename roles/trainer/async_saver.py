"""The trainer's saving thread: it writes copies of the training state to disk and commits them, in order.

Each step is copied to the host. Each ``checkpoint_every``-th copy becomes a checkpoint, whose commit also commits the
steps before it. The copy of the last step also becomes a checkpoint, even if the training is stopped early. The thread
works while the next step runs. The publishing thread (:mod:`.publisher`) reads the same copies. The saving threads of a
gang's members use a separate process group, because collectives of two threads on one group could be mixed up. An
error in this thread ends the process, because a trainer that cannot save must not continue.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

import rrl

from ..snapshots.mapping import anonymous_memory
from ..trajectories.types import TrainedStep
from ..worker.status.external_waits import waiting
from ..worker.uncommitted_steps import UncommittedSteps
from . import exchange
from .checkpoint import Checkpoints, Written, not_written
from .host_buffers import HostBuffers, Layout
from .learner import Learner
from .process_group import Gang, blocked_on_rank0, wait_to_be_fenced
from .publisher import Publisher, ThreadState, end_process

_log = logging.getLogger("rrl.trainer")

MAX_UNCOMMITTED = 2
"""Maximum number of steps that the trainer completes while a checkpoint is written; also the number of host buffers."""
COMMITS_CAUSE = "commits"
"""Idle cause of a training thread that waits until an older step is committed."""
_DISK_FULL_RETRY_S = 5.0
"""Seconds before another attempt to write to a full disk."""
_ATTEMPTS_PER_WAIT = 360
"""Attempts (half an hour) after which the wait for space is reported anew: a wait for a service that lasts for an hour
counts as a hang, but these attempts show that this thread works."""

T = TypeVar("T")


class SnapshotMeta(Struct, frozen=True):
    """Description of a snapshot, stored with its bytes."""

    number: int
    world: int
    layout: str
    extra_state: bytes
    digest: str
    """Digest of the batch that the last step of the snapshot trained on."""
    metrics: dict[str, float]
    earlier: tuple[TrainedStep, ...] = ()
    """The uncommitted steps before the step of the snapshot; the commit of this step must name them. Only rank 0 has
    them."""


class _Staged(Struct, frozen=True):
    """A step whose state is copied to the host and not saved yet."""

    meta: SnapshotMeta
    buffer: memoryview


class AsyncSaver:
    """Saves the state of ``learner`` in a thread of its own.

    Args:
        me: The worker.
        gang: The members of the trainer.
        learner: The learner, whose tensors must stay the same objects.
        checkpoints: Where checkpoints are written.
        buffers: Host memory for the copies.
        publisher: The thread that publishes the weights in the copies.
        max_uncommitted: Maximum number of steps that the trainer completes while a checkpoint is written; at most
            ``MAX_UNCOMMITTED``.
        uncommitted: The worker's uncommitted steps, on rank 0; None on the other ranks, which do not commit.
        is_checkpoint_step: Returns whether a step gets a checkpoint. The commit of its checkpoint also commits the
            steps before it.
        fail: Called with the error of a save.
    """

    def __init__(
        self,
        me: rrl.Worker,
        gang: Gang,
        learner: Learner,
        checkpoints: Checkpoints,
        buffers: HostBuffers,
        publisher: Publisher,
        max_uncommitted: int,
        *,
        uncommitted: UncommittedSteps | None = None,
        is_checkpoint_step: Callable[[int], bool] = lambda step: True,
        fail: Callable[[BaseException], None] = partial(end_process, "a checkpoint could not be saved"),
    ) -> None:
        self._me, self._gang, self._learner = me, gang, learner
        self._checkpoints, self._buffers, self._publisher = checkpoints, buffers, publisher
        self._max_uncommitted = min(max_uncommitted, MAX_UNCOMMITTED)
        self._tensors = learner.tensors()
        self.layout = Layout(self._tensors)
        buffers.prepare(self.layout.nbytes)
        self._uncommitted, self._is_checkpoint_step = uncommitted, is_checkpoint_step
        self._written: list[int] = []
        """Steps whose checkpoints are being written or are waiting to be written, in order."""
        self._newest: _Staged | None = None
        """The newest step if no checkpoint of it is due, else None. It gets a checkpoint if it is the last step."""
        self._copy: memoryview | None = None
        """The host copy of the learner's last step; None if there is none."""
        self._state = ThreadState(fail)
        self._todo: queue.SimpleQueue[_Staged | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="rrl-saver", daemon=True)
        self._thread.start()

    # ── the training thread ────────────────────────────────────────────────────────────────────────────────────────
    def save(self, digest: str, metrics: dict[str, float]) -> None:
        """Copy the learner's current state for its snapshot, for publishing, and for its checkpoint if one is due.

        Returns once the state is copied. Waits first until all checkpoints that are ``max_uncommitted`` or more steps
        old are committed. Then waits until the publisher (:mod:`.publisher`) no longer reads the memory for the copy.
        The metric ``publish_blocked_s`` is the time (s) of all waits for the publisher. ``digest`` is the digest of the
        batch of the learner's last step.

        Raises:
            TimeoutError: An older step was not committed within ``COLLECTIVE_TIMEOUT_S``.
            Exception: The error that prevented an older step from being saved or published.
        """
        learner = self._learner
        self._wait(learner.number - self._max_uncommitted)
        self._newest = self._copy = None  # the next copy may overwrite this step's memory
        buffer = self._buffers.buffer(self.layout.nbytes, learner.number)
        self._publisher.reserve(buffer)
        self.layout.fill(buffer, self._tensors)
        self._copy = buffer
        metrics = {**metrics, "publish_blocked_s": self._publisher.take_blocked_s()}
        earlier: tuple[TrainedStep, ...] = ()
        if self._uncommitted is not None:
            self._uncommitted.trained(learner.number, metrics)
            earlier = self._uncommitted.before(learner.number)
        meta = SnapshotMeta(
            learner.number, self._gang.world, self.layout.digest, learner.extra_state(), digest, metrics, earlier
        )
        self._buffers.seal(learner.number, msgspec.msgpack.encode(meta))
        self._newest = _Staged(meta, buffer)
        if self._is_checkpoint_step(learner.number):
            self._write_newest()
        self._publisher.offer(meta.number, self.layout.views(buffer), buffer)

    def host_copy(self) -> memoryview:
        """Return a host copy of the learner's tensors, which stays unchanged until the next :meth:`save`.

        It is the copy of the last step. Before the first :meth:`save` a copy is made, in memory of its own. It is not
        sealed: as a snapshot of the committed step by another incarnation than the one that committed the step, it
        could not be restored, and could displace the one that can be (:func:`.restore.candidates`). With adapters the
        weights that they change are not in the copy, and are no longer needed for publishing either.
        """
        if self._learner.adapters is not None:
            self._publisher.await_published()
        if self._copy is None:
            self._copy = anonymous_memory(self.layout.nbytes)
            self.layout.fill(self._copy, self._tensors)
        return self._copy

    def _write_newest(self) -> None:
        """Pass the newest step to the saving thread, unless the thread already has it."""
        if self._newest is not None:
            with self._state.changed:
                self._written.append(self._newest.meta.number)
            self._todo.put(self._newest)
        self._newest = None

    def finish(self) -> None:
        """Wait until all steps are committed and the newest version is published, then end both threads.

        The newest step gets a checkpoint, even if none is due. Raises the same exceptions as :meth:`save`.
        """
        self._write_newest()
        self._wait(self._learner.number)
        self._todo.put(None)
        self._thread.join()
        self._publisher.finish()

    def _wait(self, number: int) -> None:
        """Wait until the checkpoints of step ``number`` and of all earlier steps are written and committed.

        The timeout is long, because the store may be unavailable while it waits in Slurm's queue for a node. The
        manager detects a hung save much earlier, as a checkpoint that takes too long.
        """
        with self._me.idle(COMMITS_CAUSE):
            self._state.wait(
                lambda: not self._written or self._written[0] > number,
                lambda: f"the checkpoints of steps {self._written} were not committed",
            )

    # ── the saving thread ──────────────────────────────────────────────────────────────────────────────────────────
    def _main(self) -> None:
        while (staged := self._todo.get()) is not None:
            try:
                with wait_to_be_fenced(self._me):
                    self._write_and_commit(staged)
            except BaseException as error:
                self._state.on_error(error)
                return
            with self._state.changed:
                self._written.pop(0)
                self._state.changed.notify_all()

    def _write_and_commit(self, staged: _Staged) -> None:
        meta = staged.meta
        tensors = self.layout.views(staged.buffer)
        with contextlib.ExitStack() as waits:  # the wait lasts until an attempt succeeds
            for attempt in itertools.count(1):
                path, no_folder = self._broadcast_from_rank0(
                    lambda: self._create_folder(meta.number), tuple[str, Written]
                )
                folder, written = Path(path), [no_folder]
                if path:
                    written = self._gather(self._checkpoints.write(folder, tensors, self._tensors, meta.extra_state))
                failures = [result for result in written if result.trouble]
                if not failures:
                    break
                if not all(failure.disk_full for failure in failures) or self._me.stopping.is_set():
                    raise OSError(failures[0].trouble)
                if self._gang.rank == 0:
                    _log.warning("%s; trying again", failures[0].trouble)
                    if path:
                        shutil.rmtree(folder, ignore_errors=True)
                if attempt % _ATTEMPTS_PER_WAIT == 0:
                    waits.close()
                waits.enter_context(waiting(f"space for a checkpoint: {failures[0].trouble}"))
                time.sleep(_DISK_FULL_RETRY_S)
        with blocked_on_rank0(self._me, self._gang):
            self._broadcast_from_rank0(lambda: self._commit(meta, folder, written), None)

    def _create_folder(self, number: int) -> tuple[str, Written]:
        """Create the folder of a checkpoint. Return its path and an empty result, or an empty path and the error."""
        try:
            return str(self._me.checkpoint_dir(number)), Written({})
        except OSError as error:
            return "", not_written(error)

    def _commit(self, meta: SnapshotMeta, folder: Path, written: list[Written]) -> None:
        digests = {name: digest for result in written for name, digest in result.files.items()}
        self._me.commit(meta.number, [folder / name for name in digests], meta.metrics, digests)

    def _broadcast_from_rank0(self, do: Callable[[], T], kind: Any) -> T:
        """Do the same as :meth:`Gang.broadcast_from_rank0`, but over the process group of this thread."""
        return exchange.broadcast_from_rank0(self._gang.file_group, self._gang.rank, do, kind)

    def _gather(self, mine: Written) -> list[Written]:
        return exchange.gather(self._gang.file_group, mine, Written)
