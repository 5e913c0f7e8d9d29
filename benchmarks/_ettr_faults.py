"""The faults of benchmarks/ettr.py: when the trainer is killed, by SIGKILL from outside of the run.

``rrl inject`` and ``[faults]`` are not used, because the escalation rules exempt injected failures. The same seed gives
each arm the same faults: after the commit of the same step, at the same fraction of a step.
"""

from __future__ import annotations

import os
import random
import signal
import time

from msgspec import Struct

from rrl.core.types import TRAINER, Incarnation
from rrl.manager.model.state import State, Status
from rrl.tests.support.runs import TestRun


class Fault(Struct, frozen=True):
    """A kill of the trainer: ``fraction`` of a step after the commit of ``step``."""

    step: int
    fraction: float


class Kill(Struct, frozen=True):
    """A kill that was made, at this time (s, of the manager's clock, which is the machine's)."""

    at: float
    step: int
    """Newest committed step."""
    incarnation: Incarnation


def schedule(steps: int, faults: int, seed: int) -> list[Fault]:
    """Draw one fault for each of ``faults`` equal parts of the steps.

    The first step is not hit, because nothing could be restored, nor the last one, whose commit ends the run.
    """
    rng = random.Random(seed)
    length = steps / faults
    return [
        Fault(max(1, min(steps - 2, int(part * length) + rng.randrange(max(1, int(length))))), rng.random())
        for part in range(faults)
    ]


class Killer:
    """Kills the trainer of a run when its faults are due; call :meth:`due` with each new state.

    A fault that falls into an outage hits the trainer as soon as it has joined again.
    """

    def __init__(self, faults: list[Fault], step_s: float) -> None:
        self._faults = list(faults)
        self._step_s = step_s
        self._due_at: float | None = None
        self.kills: list[Kill] = []

    def due(self, state: State) -> None:
        """Kill the trainer if the next fault is due."""
        if not self._faults:
            return
        fault = self._faults[0]
        if self._due_at is None:
            if state.step < fault.step:
                return
            self._due_at = time.time() + fault.fraction * self._step_s
        trainer = state.replica(TRAINER)
        if time.time() < self._due_at or trainer.status is not Status.JOINED or trainer.pid is None:
            return
        if self.kills and self.kills[-1].incarnation == trainer.incarnation:
            return  # the state is older than the previous kill
        os.kill(trainer.pid, signal.SIGKILL)
        self.kills.append(Kill(time.time(), state.step, trainer.incarnation))
        self._faults.pop(0)
        self._due_at = None


def run_to_end(run: TestRun, faults: list[Fault], step_s: float, timeout_s: float) -> tuple[State, list[Kill]]:
    """Follow a run to its end, and let the faults hit it. Returns its last state, and the kills."""
    killer = Killer(faults, step_s)

    def ended(state: State) -> bool:
        if state.outcome is None:
            killer.due(state)
        return state.outcome is not None

    return run.wait(ended, timeout_s), killer.kills
