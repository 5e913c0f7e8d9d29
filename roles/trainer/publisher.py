"""The trainer's publishing thread: it makes weight versions from the host copies of finished steps during training.

The saver copies the state of each step to host memory (:mod:`.host_buffers`). This thread casts the weights of such a
copy and writes them, tensor by tensor, into the memory of the version. If only adapters are trained, the copy has only
these, and each weight is merged with its adapter on its device (:mod:`.adapters`) before it is cast. Rank 0 receives
the shards of the other members directly in this memory. No further copy of the model is made. The publishing threads of
a gang's members use a separate process group, because two threads on one group would deadlock (docs/sources.md, torch).
An error in this thread ends the process.

Rank 0 chooses the newest copy and announces its step to the other members; all members skip older copies. If the
training thread is already copying a newer step into other memory, rank 0 waits for this step. The training thread waits
(in phase ``publish``, so that the manager finds a hung publication) in two cases:

- The memory for the next copy still contains an older copy that is neither published nor skipped.
- After step n, the newest published version is older than the version of step n - N (N: ``[sampling] staleness``). Step
  n + 1 may not contain any token of such an old version, so the training thread could only wait for data.

So if a publication hangs, the training thread waits for it after at most as many steps as there are buffers. The
training thread never waits for data that the rollouts cannot generate without the hung version.

No member waits forever, because these waits form no cycle:

- An announced version is always completed. Rank 0 announces a step only after its own training thread has handed over
  the copy. By then all members have done their part of the step's collectives, so their training threads reach the copy
  without rank 0. The memory for the copy is free, because the announcement has released all older copies, and the
  publishing thread has finished every earlier version.
- Between two versions, rank 0 waits only if it has no copy, or if its training thread is copying into free memory. If
  the training thread of another member waits for a copy that is not announced yet, rank 0 also reaches the step of this
  copy. Rank 0 then announces this step or a newer one.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist
from msgspec import Struct
from torch import Tensor
from torch.distributed.tensor import DTensor

import rrl

from ..worker.connection import Stopping
from . import exchange
from .host_buffers import shard_of
from .learner import Learner
from .process_group import COLLECTIVE_TIMEOUT_S, Gang, wait_to_be_fenced

_log = logging.getLogger("rrl.trainer")

_RANK0 = 0
_END = -1
"""Value that is announced instead of a step when the run ends."""
_NAME_PREFIX = "model."
"""Prefix of the weights among :meth:`.learner.Learner.tensors`."""


def end_process(problem: str, error: BaseException) -> None:
    """Log the ``problem`` and error of a thread other than the training thread, and end the process.

    The process must be ended, because the training thread may be inside torch and cannot be interrupted.
    """
    _log.critical("%s; this process ends and is restarted", problem, exc_info=error)
    os._exit(1)


class ThreadState:
    """State that the training thread shares with another thread: a condition for changes, and the other thread's error.

    Args:
        fail: Called with the error of the other thread, unless the run ends.
    """

    def __init__(self, fail: Callable[[BaseException], None]) -> None:
        self.changed = threading.Condition()
        self._fail = fail
        self._error: BaseException | None = None

    def on_error(self, error: BaseException) -> None:
        """Record the error that ended the thread; the training thread raises this error when it waits."""
        with self.changed:
            self._error = error
            self.changed.notify_all()
        if not isinstance(error, Stopping):
            self._fail(error)

    def is_settled(self, ready: Callable[[], bool]) -> bool:
        """Return whether :meth:`wait` would end at once, because the condition is true or the thread has failed."""
        with self.changed:
            return self._error is not None or ready()

    def wait(self, ready: Callable[[], bool], missing: Callable[[], str]) -> None:
        """Wait until ``ready``.

        Args:
            ready: The condition; evaluated with ``changed`` held.
            missing: Returns the beginning of the error message, which says what did not happen in time.

        Raises:
            TimeoutError: ``ready`` did not become true within ``COLLECTIVE_TIMEOUT_S``.
            Exception: The error of the thread.
        """
        with self.changed:
            in_time = self.changed.wait_for(lambda: self._error is not None or ready(), COLLECTIVE_TIMEOUT_S)
        if self._error is not None:
            raise self._error
        if not in_time:
            raise TimeoutError(f"{missing()} within {COLLECTIVE_TIMEOUT_S:g} s")


class _HostCopy(Struct, frozen=True):
    """This member's shards of the trained weights of one step: of the adapters, if only these are trained."""

    number: int
    tensors: Mapping[str, Tensor]
    memory: object
    """The memory that contains the shards; None for the live weights."""


class Publisher:
    """Publishes versions in a separate thread. All members of the gang must create their publishers at the same time.

    Args:
        me: The worker.
        gang: The members of the trainer.
        learner: The learner. Its tensors must stay the same objects from now on.
        dtype: The dtype in which rollouts compute.
        fail: Called with the error of the thread.
    """

    def __init__(
        self,
        me: rrl.Worker,
        gang: Gang,
        learner: Learner,
        dtype: torch.dtype,
        *,
        fail: Callable[[BaseException], None] = partial(end_process, "a weight version could not be published"),
    ) -> None:
        self._me, self._gang = me, gang
        self._max_behind = me.job.sampling.staleness
        self._live, self._saved, self._adapters = learner.weights(), learner.saved_weights(), learner.adapters
        self._dtypes = {
            name: dtype if tensor.is_floating_point() else tensor.dtype for name, tensor in self._live.items()
        }
        self._shares = _shares(gang, self._live)
        self._copies: dict[int, _HostCopy] = {}
        """Copies that are not yet published or skipped, by step."""
        self._wanted: object = None
        """The memory for which the training thread waits, or into which it is copying; None if it does neither."""
        self._newest = self._published = -1
        """Newest step whose copy was handed over, and newest step whose version is published; -1 before the first."""
        self._blocked_s = 0.0
        self._ended = False
        self._state = ThreadState(fail)
        self._changed = self._state.changed
        self._thread = threading.Thread(target=self._main, name="rrl-publisher", daemon=True)
        self._thread.start()

    # ── the training thread ────────────────────────────────────────────────────────────────────────────────────────
    def publish_live(self, number: int) -> None:
        """Publish the learner's live weights as the version of step ``number``; return once they are published.

        Raises the same exceptions as :meth:`reserve`.
        """
        self._hand_over(_HostCopy(number, {name: shard_of(tensor) for name, tensor in self._saved.items()}, None))
        with self._me.phase("publish"):
            self._wait(lambda: self._published >= number)

    def reserve(self, buffer: memoryview) -> None:
        """Wait until the publishing thread no longer needs the memory of ``buffer``.

        The training thread calls this method before the next copy overwrites the memory.

        Raises:
            TimeoutError: A version was not published within ``COLLECTIVE_TIMEOUT_S``.
            Exception: The error of the publishing thread.
        """
        with self._changed:
            self._wanted = buffer.obj
            self._changed.notify_all()
        self._wait_until(lambda: not self._in_use(buffer.obj))

    def offer(self, number: int, tensors: Mapping[str, Tensor], buffer: memoryview) -> None:
        """Hand over the copy of step ``number``; ``tensors`` are the copied shards in ``buffer``, by their saved names.

        Waits while rollouts need an unpublished version to generate the next step. Raises the same exceptions as
        :meth:`reserve`.
        """
        weights = {name: tensors[_NAME_PREFIX + name] for name in self._saved}
        self._hand_over(_HostCopy(number, weights, buffer.obj))
        if self._max_behind is not None:
            oldest = number - self._max_behind
            self._wait_until(lambda: self._published >= oldest)

    def take_blocked_s(self) -> float:
        """Return the seconds that the training thread has waited for the publishing thread since the last call."""
        blocked, self._blocked_s = self._blocked_s, 0.0
        return blocked

    def await_published(self) -> None:
        """Wait until the newest version is published. Raises the exceptions of :meth:`reserve`."""
        self._wait_until(lambda: self._published >= self._newest)

    def finish(self) -> None:
        """Wait until the newest version is published, and end the thread. Raises the exceptions of :meth:`reserve`."""
        self.await_published()
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._thread.join()

    def _hand_over(self, copy: _HostCopy) -> None:
        """Pass the copy to the publishing thread, unless :meth:`publish_live` has published its version already."""
        with self._changed:
            self._wanted = None
            if copy.number > self._newest:
                self._newest = copy.number
                self._copies[copy.number] = copy
            self._changed.notify_all()

    def _wait_until(self, ready: Callable[[], bool]) -> None:
        """Wait in phase ``publish`` until ``ready``, and count the waiting time."""
        if self._state.is_settled(ready):
            self._wait(ready)
            return
        begun = time.monotonic()
        with self._me.phase("publish"), self._me.idle("publishing"):
            self._wait(ready)
        self._blocked_s += time.monotonic() - begun

    def _wait(self, ready: Callable[[], bool]) -> None:
        self._state.wait(ready, lambda: "a weight version was not published")

    def _in_use(self, memory: object) -> bool:
        return any(copy.memory is memory for copy in self._copies.values())

    # ── the publishing thread ──────────────────────────────────────────────────────────────────────────────────────
    def _main(self) -> None:
        try:
            with wait_to_be_fenced(self._me):
                while (copy := self._next()) is not None:
                    self._publish(copy)
                    self._on_published(copy.number)
                    del copy  # releases the copy's memory for the training thread
        except BaseException as error:
            self._state.on_error(error)

    def _next(self) -> _HostCopy | None:
        """Return the copy that rank 0 chooses, and skip all older copies; return None at the end of the run."""
        number = exchange.broadcast_from_rank0(self._gang.publish_group, self._gang.rank, self._choose, int)
        if number == _END:
            return None
        with self._changed:
            self._copies = {step: copy for step, copy in self._copies.items() if step >= number}
            self._changed.notify_all()  # before the wait: the training thread may wait for a skipped copy's memory
            self._changed.wait_for(lambda: number in self._copies)
            return self._copies[number]

    def _choose(self) -> int:
        """Wait for a copy, and return the step of the newest copy; return ``_END`` at the end of the run."""

        def newer_is_being_copied() -> bool:
            return self._wanted is not None and not self._in_use(self._wanted)

        with self._changed:
            self._changed.wait_for(lambda: self._ended or (self._copies and not newer_is_being_copied()))
            return max(self._copies, default=_END)

    def _on_published(self, number: int) -> None:
        with self._changed:
            self._published = number
            del self._copies[number]
            self._changed.notify_all()

    def _publish(self, copy: _HostCopy) -> None:
        if self._gang.rank == _RANK0:
            described = [
                (
                    name,
                    str(self._dtypes[name]).removeprefix("torch."),
                    tuple(tensor.shape),
                    tensor.numel() * self._dtypes[name].itemsize,
                )
                for name, tensor in self._live.items()
            ]
            writes = (partial(self._write, name, copy) for name in self._live)
            self._me.publish_written(copy.number, described, writes)
        else:
            for name in self._live:
                self._send(name, self._shard(name, copy))

    def _shard(self, name: str, copy: _HostCopy) -> Tensor:
        """Return this member's shard of a tensor of the version; all members must call it for each tensor."""
        if self._adapters is None:
            return copy.tensors[name]
        return self._adapters.merged(name, shard_of(self._live[name]), copy.tensors, self._gang.publish_group)

    def _write(self, name: str, copy: _HostCopy, memory: memoryview) -> None:
        """Write a tensor into the memory of the version: rank 0's shard, and the other shards as they arrive."""
        shard = self._shard(name, copy)
        if not memory.nbytes:
            return
        mine, *others = torch.split(torch.frombuffer(memory, dtype=self._dtypes[name]), self._shares[name])
        arriving = [
            dist.irecv(part.view(torch.uint8), group=self._gang.publish_group, group_src=rank)
            for rank, part in enumerate(others, start=1)
            if part.numel()
        ]
        mine.copy_(shard.reshape(-1))
        for part in arriving:
            assert part is not None
            part.wait()

    def _send(self, name: str, shard: Tensor) -> None:
        """Send this member's shard of a tensor to rank 0, unless rank 0 has the whole tensor."""
        if len(self._shares[name]) > 1 and shard.numel():
            cast = shard.reshape(-1).to("cpu", self._dtypes[name])
            dist.send(cast.view(torch.uint8), group=self._gang.publish_group, group_dst=_RANK0)


def _shares(gang: Gang, weights: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """Return the number of elements that each rank has of each tensor; only rank 0 has elements of unsharded tensors.

    All members must call this function.

    Raises:
        RuntimeError: The shards of a tensor are not its consecutive rows.
    """
    sizes = gang.gather([shard_of(tensor).numel() for tensor in weights.values()], list[int])
    shares = {}
    for index, (name, tensor) in enumerate(weights.items()):
        shares[name] = [of_rank[index] for of_rank in sizes] if isinstance(tensor, DTensor) else [tensor.numel()]
        if sum(shares[name]) != tensor.numel():
            raise RuntimeError(
                f"{name}: the members' shards have {shares[name]} elements, but the tensor has {tensor.numel()}"
            )
    return shares
