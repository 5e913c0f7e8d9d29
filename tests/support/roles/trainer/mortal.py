"""A real trainer process that kills itself by SIGKILL at a moment that the test names."""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy
import torch

from rrl.core.launch import LAUNCH_ENV, read_launch
from rrl.roles.snapshots.format import SnapshotError
from rrl.roles.trainer import checkpoint, main
from rrl.roles.trainer.async_saver import AsyncSaver
from rrl.roles.trainer.checkpoint import Written
from rrl.roles.trainer.learner import Learner
from rrl.roles.trainer.lending import DeviceState, Lender
from rrl.roles.trainer.publisher import Publisher
from rrl.roles.trajectories.batches import Part
from rrl.roles.trajectories.types import Balance
from rrl.roles.worker.api import Worker
from rrl.roles.worker.step_data import StepData

PUBLISHED = "published"
"""Folder in the run directory. If it exists, the trainer also writes each published version into this folder."""

LENDS = "lends"
"""Folder in the run directory. If it exists, the trainer finds each step to lack data until it has lent its GPUs."""


def play(launch_file: str, log: str, moment: str, step: int, dies: bool, seed: int) -> None:
    """Run the trainer of the launch file, with its output in ``log``.

    If ``dies``, the trainer kills itself at ``moment`` of ``step``. The random states begin with ``seed``. If a random
    state is not restored, the result of the training changes.
    """
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ[LAUNCH_ENV] = launch_file
    torch.manual_seed(seed)
    numpy.random.seed(seed)
    random.seed(seed)
    if read_launch(Path(launch_file)).gpus:
        _compute_deterministically()
    _mark_with_chance()
    if (published := Path(launch_file).parents[1] / PUBLISHED).exists():
        _keep_published(published)
    if (Path(launch_file).parents[1] / LENDS).exists():
        _lend_before_each_step()
    if moment == SEALED:
        _once_it_is_sealed(step, dies)
    elif dies:
        {**MOMENTS, **LENDING, SHARED: _while_the_batch_is_shared, AFTER_A_PART: _after_a_part}[moment](step)
    main.main()
    sys.stdout.flush()


def _keep_published(folder: Path) -> None:
    """Also write each version that this process publishes into ``folder``: name, dtype, shape and bytes of tensors."""
    publish = Worker.publish_written

    def keep(self: Worker, number: int, described: Any, writes: Any) -> None:
        kept: list[bytes] = []

        def keeping(write: Callable[[memoryview], None], memory: memoryview) -> None:
            write(memory)
            kept.append(bytes(memory))

        publish(self, number, described, (partial(keeping, write) for write in writes))
        tensors = [(*one[:3], content) for one, content in zip(described, kept, strict=True)]
        (folder / str(number)).write_bytes(msgspec.msgpack.encode(tensors))

    Worker.publish_written = keep  # type: ignore[method-assign]


def _lend_before_each_step() -> None:
    """Let the store tell rank 0 that each step lacks data, until the GPUs are lent."""

    def scripted(me: Worker, number: int, train_s: float, back_s: float, wait: float = 0.0) -> Balance:
        me.stopping.wait(0.1 if wait else 0.0)
        return Balance(0.0 if wait else math.inf, math.inf)

    Worker.await_balance = scripted  # type: ignore


def _die() -> None:
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def _compute_deterministically() -> None:
    """Choose GPU kernels that always give equal bits, because some of the fast kernels add in any order."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # torch demands this setting; cuBLAS reads it at its first use
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)


def _mark_with_chance() -> None:
    """Make each part and step depend on every random state, so that a state that is not restored changes the result.

    The model itself uses no random numbers, because it has no dropout.
    """
    add, close = Learner.add, Learner.close
    noise = [0.0]

    def noisy_add(self: Learner, part: Any) -> None:
        add(self, part)
        noise[0] = (0.0 if part.index == 0 else noise[0]) + torch.rand(()).item() + random.random()

    def noisy_close(self: Learner) -> dict[str, float]:
        metrics = close(self)
        factor = 1 + 1e-6 * (noise[0] + numpy.random.random())
        with torch.no_grad():
            for parameter in self._trained.values():
                parameter.mul_(factor)
        return metrics

    Learner.add = noisy_add  # type: ignore[method-assign]
    Learner.close = noisy_close  # type: ignore[method-assign]


def _before(owner: Any, name: str, when: Callable[..., bool]) -> None:
    real = getattr(owner, name)

    def wrapped(*words: Any, **named: Any) -> Any:
        if when(*words):
            _die()
        return real(*words, **named)

    setattr(owner, name, wrapped)


def _while_the_batch_is_shared(step: int) -> None:
    """Die while the members receive their shares: the first member after it has received its share, another before."""
    receive = StepData.part

    def wrapped(data: StepData, number: int, *words: Any) -> Part | None:
        if number == step and data._connection.rank:
            _die()
        received = receive(data, number, *words)
        if number == step:
            _die()
        return received

    StepData.part = wrapped  # type: ignore


def _in_the_step(step: int) -> None:
    _before(Learner, "_backward", lambda learner, *_: learner.number + 1 == step)


def _while_lent(step: int) -> None:
    _before(Lender, "_until_balanced", lambda _, number: number == step)


def _once_it_is_dropped(step: int) -> None:
    drop = DeviceState.drop

    def wrapped(state: DeviceState) -> None:
        drop(state)
        if state._learner.number + 1 == step:
            _die()

    DeviceState.drop = wrapped  # type: ignore


def _after_it_is_taken_back(step: int) -> None:
    _before(DeviceState, "restore", lambda state, *_: state._learner.number + 1 == step)


def _after_a_part(step: int) -> None:
    """Die after training on the first part, once the second part has arrived."""
    _before(Learner, "add", lambda _, part: (part.number, part.index) == (step, 1))


def _before_it_is_copied(step: int) -> None:
    _before(AsyncSaver, "save", lambda saver, *_: saver._learner.number == step)


def _once_it_is_sealed(step: int, dies: bool) -> None:
    """Die after all members have sealed and copied the snapshot, before any file of the step is written."""
    keep = AsyncSaver._write_and_commit

    def wrapped(saver: AsyncSaver, staged: Any) -> None:
        if staged.meta.number == step:
            client, buddy = saver._buffers._client, saver._buffers._buddy()
            if client is not None and buddy is not None:
                client.wait_until_sealed()
                with contextlib.suppress(SnapshotError):  # the test has ended this agent
                    client.copy_to(buddy)
            saver._gather(Written({}))
            if dies:
                _die()
        keep(saver, staged)

    AsyncSaver._write_and_commit = wrapped  # type: ignore


def _in_the_files(step: int) -> None:
    """Die after the checkpoint's files are written, before any of them is durable."""
    _before(checkpoint, "make_durable", lambda folder, _: folder.name.startswith(f"step-{step}."))


def _between_two_files(step: int) -> None:
    """Die once the weights of a checkpoint are written, before its moments are."""

    def moments(path: Path, *_: object) -> bool:
        return path.parent.name.startswith(f"step-{step}.") and path.name.startswith("moments")

    _before(checkpoint, "_write_rows", moments)


def _while_it_publishes(step: int) -> None:
    """Die after a part of the version is written or sent, before the version is offered."""
    publish = Publisher._publish

    def wrapped(publisher: Publisher, copy: Any) -> None:
        if copy.number == step:
            for name in ("_write", "_send"):
                _after_calls(publisher, name, 2)
        publish(publisher, copy)

    Publisher._publish = wrapped  # type: ignore


def _after_calls(owner: Any, name: str, calls: int) -> None:
    real, left = getattr(owner, name), [calls]

    def wrapped(*words: Any) -> Any:
        result = real(*words)
        left[0] -= 1
        if left[0] == 0:
            _die()
        return result

    setattr(owner, name, wrapped)


def _before_the_commit(step: int) -> None:
    _before(Worker, "commit", lambda me, number, *_: number == step)


def _after_the_commit(step: int) -> None:
    commit = Worker.commit

    def wrapped(me: Worker, number: int, *words: Any) -> None:
        commit(me, number, *words)
        if number == step:
            _die()

    Worker.commit = wrapped  # type: ignore


PUBLISHING = "while it publishes"
SEALED = "once it is sealed"
SHARED = "while the batch is shared"
"""Name of the moment that exists only in a gang."""
AFTER_A_PART = "after a part"
"""Name of the moment that exists only in a run that streams."""
LENDING: dict[str, Callable[[int], None]] = {
    "once it is dropped": _once_it_is_dropped,
    "while lent": _while_lent,
    "after it is taken back": _after_it_is_taken_back,
}
"""The moments that exist only in a run that lends."""
MOMENTS: dict[str, Callable[[int], None]] = {
    "in the step": _in_the_step,
    "before it is copied": _before_it_is_copied,
    "between two files": _between_two_files,
    "in the files": _in_the_files,
    PUBLISHING: _while_it_publishes,
    "before the commit": _before_the_commit,
    "after the commit": _after_the_commit,
}
