"""Runs the built-in trainer and rollout, slowed down to the pace of GPUs that this machine lacks (``python -m``).

A job of a benchmark names this program as the ``command`` of its trainer and rollouts. The roles are rrl's own, with
one difference, which only this program makes: each engine step and each part of a training step takes at least as long
as it would on a GPU of its own. The process sleeps for the rest of that time, so that a few cores stand for several
GPUs. The computation itself is not changed: tokens are sampled and gradients are computed as without the pace.

τ(b) is the time of a token with b trajectories running. An engine step that gives several tokens to a trajectory takes
the sum of τ(b) over these tokens, where b is the number of trajectories that get this token. No time is added for
reading a prompt. Unlike the engine in plain torch, a paced engine takes new work whenever it has a free place, as vLLM
does. The trainer takes for a part of a step a time proportional to the part's answer tokens. Requests to the store,
checkpoints, transfers of weights and the optimizer are not slowed down.

With the argument ``trajectories`` this program is the built-in store, with leases in the order first come, first
served. benchmarks/dispatch.py compares leases by expected length with this arm.

Each process appends a line of JSON to a file in ``--record`` for each step or part: the time (s) that it should take,
the time that its computation took, and the time with the sleep. If the computation took longer than it should, the pace
was not kept. Benchmarks report the excess as a share of the due time (:func:`overrun`).
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from msgspec import Struct
from torch import Tensor

import rrl
from rrl.core.types import Version
from rrl.roles.rollout import main as rollout_program
from rrl.roles.rollout.engine import Engine, StepOutput
from rrl.roles.trainer import main as trainer_program
from rrl.roles.trainer.learner import Learner
from rrl.roles.trajectories import server as store_program
from rrl.roles.trajectories.batches import Part
from rrl.roles.trajectories.leases import WorkQueue
from rrl.roles.trajectories.types import Item, Segment


class Tau(Struct, frozen=True):
    """τ(b), the seconds that a token takes with b trajectories running: ``first + each * b``."""

    first: float
    each: float

    def __call__(self, running: int) -> float:
        """Return the seconds of a token with this many running trajectories; 0 if no trajectory runs."""
        return self.first + self.each * running if running else 0.0

    def seconds_of(self, tokens: Sequence[int]) -> float:
        """Return the time (s) of an engine step; ``tokens`` has the number of tokens that each trajectory gets."""
        return sum(self(sum(count > place for count in tokens)) for place in range(max(tokens, default=0)))


class Paced(Struct, frozen=True):
    """The times (s) of one engine step, or of one part of a training step."""

    due: float
    """The time that the work should take."""
    computed: float
    """The time that the computation took on this machine, without the sleep."""
    took: float
    """The time that the work took, including the sleep."""


class Pace:
    """Makes each piece of work last as long as it would on a GPU, and records its times.

    Args:
        record: File to which each piece of work is appended as a line of JSON.
    """

    def __init__(self, record: TextIO) -> None:
        self._record = record

    @contextmanager
    def lasting(self, seconds: Callable[[], float]) -> Iterator[None]:
        """Let the block take at least ``seconds()`` seconds; ``seconds`` is called at the end of the block."""
        begun = time.monotonic()
        yield
        computed, due = time.monotonic() - begun, seconds()
        if due > computed:
            time.sleep(due - computed)
        if due:
            took = time.monotonic() - begun
            self._record.write(json.dumps([round(due, 5), round(computed, 5), round(took, 5)]) + "\n")
            self._record.flush()


def recorded(folder: Path, role: str) -> list[Paced]:
    """Return the steps or parts that the processes of a role recorded."""
    lines = [line for path in sorted(folder.glob(f"{role}-*.jsonl")) for line in path.read_text().splitlines()]
    return [Paced(*json.loads(line)) for line in lines if line.endswith("]")]  # a killed process may leave half a line


def overrun(work: Iterable[Paced]) -> float:
    """Return the time that work took longer than it should, because cores were busy, as a share of its due time."""
    pairs = [(each.due, each.took) for each in work]
    return sum(took - due for due, took in pairs) / max(1e-9, sum(due for due, _ in pairs))


class PacedLearner(Learner):
    """A learner that takes for each part a time proportional to the part's answer tokens. :func:`paced` creates it."""

    pace: Pace
    token_seconds: float

    def add(self, part: Part) -> None:
        """See :class:`Learner`."""
        tokens = sum(len(trajectory.tokens) for trajectory in part.trajectories)
        with self.pace.lasting(lambda: tokens * self.token_seconds):
            super().add(part)


class PacedEngine:
    """An engine whose steps take the time that τ gives. As in plain torch, a step returns all tokens that it sampled.

    Args:
        engine: The engine that computes.
        lease: Maximum number of trajectories that run at once.
    """

    def __init__(self, engine: Engine, lease: int, tau: Tau, pace: Pace) -> None:
        self._engine, self._lease, self._tau, self._pace = engine, lease, tau, pace
        self._running: set[int] = set()

    @property
    def free_slots(self) -> int:
        """See :class:`Engine`."""
        return self._lease - len(self._running)

    @property
    def has_work(self) -> bool:
        """See :class:`Engine`."""
        return self._engine.has_work

    def add(self, items: Sequence[Item]) -> None:
        """See :class:`Engine`."""
        self._running.update(item.trajectory for item in items)
        self._engine.add(items)

    def step(self) -> StepOutput:
        """See :class:`Engine`."""
        segments: list[Segment] = []
        with self._pace.lasting(lambda: self._tau.seconds_of([len(segment.tokens) for segment in segments])):
            segments, finished = self._engine.step()
        self._running.difference_update(finished)
        return segments, finished

    def flush(self) -> StepOutput:
        """See :class:`Engine`."""
        return self._engine.flush()

    def abort(self, trajectories: Iterable[int]) -> None:
        """See :class:`Engine`."""
        aborted = list(trajectories)
        self._running.difference_update(aborted)
        self._engine.abort(aborted)

    def load(self, version: Version, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """See :class:`Engine`."""
        self._engine.load(version, tensors)

    def probe(self) -> None:
        """See :class:`Engine`."""
        self._engine.probe()

    def sleep(self) -> None:
        """See :class:`Engine`."""
        self._running.clear()
        self._engine.sleep()

    def wake(self) -> None:
        """See :class:`Engine`."""
        self._engine.wake()

    def close(self) -> None:
        """See :class:`Engine`."""
        self._engine.close()


class PacedVllmEngine(PacedEngine):
    """vLLM's engine at a pace. A step samples one token for each running trajectory; a later step returns the token."""

    def step(self) -> StepOutput:
        """See :class:`Engine`."""
        engine: Any = self._engine
        running = len(engine._running)
        with self._pace.lasting(lambda: self._tau(running)):
            segments, finished = engine.step()
        self._running.difference_update(finished)
        return segments, finished


def paced(make: Callable[..., PacedLearner], pace: Pace, token_seconds: float) -> Callable[..., PacedLearner]:
    """Return a function that makes learners like those of ``make``, but slowed down to the pace."""

    def make_paced(*args: Any, **settings: Any) -> PacedLearner:
        learner = make(*args, **settings)
        learner.pace, learner.token_seconds = pace, token_seconds
        return learner

    return make_paced


def paced_builder(pace: Pace, tau: Tau) -> Callable[[rrl.Worker], Callable[[], PacedEngine]]:
    """Return a function that builds the rollout's engine at a pace; it replaces the function that builds the engine."""
    build_role = rollout_program._builder

    def builder(me: rrl.Worker) -> Callable[[], PacedEngine]:
        build, settings = build_role(me), me.rollout
        kind = PacedVllmEngine if settings.engine == "vllm" else PacedEngine
        return lambda: kind(build(), settings.lease, tau, pace)

    return builder


def lease_first_come() -> None:
    """Make the store of this process lease answers in the order of their prompts, regardless of expected lengths."""
    WorkQueue.by_length = property(lambda _: False)  # type: ignore[assignment,method-assign]


def main() -> None:
    """Run the built-in trainer or rollout at a pace, or a store that leases answers in the order of their prompts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("role", choices=("trainer", "rollout", "trajectories"))
    parser.add_argument("--record", type=Path, required=True, help="folder of the records")
    parser.add_argument("--token-s", type=float, default=0.0, help="trainer: seconds per answer token")
    parser.add_argument("--tau", type=float, nargs=2, default=(0.0, 0.0), help="rollout: τ(b) = first + each * b (s)")
    given = parser.parse_args()
    if given.role == "trajectories":
        lease_first_come()
        store_program.main()
        return
    with (given.record / f"{given.role}-{os.getpid()}.jsonl").open("a") as record:
        pace = Pace(record)
        if given.role == "trainer":
            vars(trainer_program)["Learner"] = paced(PacedLearner, pace, given.token_s)
            trainer_program.main()
        else:
            vars(rollout_program)["_builder"] = paced_builder(pace, Tau(*given.tau))
            rollout_program.main()


if __name__ == "__main__":
    main()
