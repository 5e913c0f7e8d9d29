"""Draws the faults of benchmarks/ettr.py, and injects them from outside of the run.

``rrl inject`` and ``[faults]`` are not used, because the escalation rules exempt injected failures. With the same
seed, all arms have the same faults, after the same steps and at the same fractions of a step.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

from msgspec import Struct

from rrl.core.types import TRAINER, Incarnation, ReplicaId
from rrl.manager.model.queries import reached_step
from rrl.manager.model.state import Replica, State, Status
from rrl.manager.storage.lease import holder
from rrl.tests.support.runs import TestRun
from rrl.tests.support.slurm.lab import SlurmLab


class Target(StrEnum):
    """The part of the run that a fault hits."""

    TRAINER = "trainer"
    HANG = "trainer hangs"
    ROLLOUT = "rollout"
    STORE = "store"
    NODE = "node"
    MANAGER = "manager"


REPLICA_OF: Mapping[Target, ReplicaId] = {
    Target.TRAINER: TRAINER,
    Target.HANG: TRAINER,
    Target.ROLLOUT: ReplicaId("rollout/1"),
    Target.STORE: ReplicaId("trajectories/0"),
    Target.NODE: ReplicaId("rollout/0"),
}
"""The replica that each target names. ``HANG`` stops it by SIGSTOP, ``NODE`` crashes its node, and the other targets
kill it by SIGKILL."""
MIXED = (Target.HANG, Target.ROLLOUT, Target.STORE, Target.NODE, Target.MANAGER)
"""The targets of the mixed plan. Each is hit once, in an order that is drawn with the seed."""


class Fault(Struct, frozen=True):
    """A fault that is injected a ``fraction`` of a step after ``step`` was committed.

    If the step gets no checkpoint, the fraction counts from the step's publishing.
    """

    step: int
    fraction: float
    target: Target = Target.TRAINER


class Kill(Struct, frozen=True):
    """A fault that was injected at the time ``at`` (s, machine's clock, which the manager uses too)."""

    at: float
    step: int
    """Newest step that the trainer had finished when the fault was injected (``reached_step``)."""
    incarnation: Incarnation | None
    """The incarnation that was hit; None if the manager was hit."""
    target: Target = Target.TRAINER


def schedule(steps: int, faults: int, seed: int, targets: Sequence[Target] = (Target.TRAINER,)) -> list[Fault]:
    """Draw one fault for each of ``faults`` equal parts of the steps.

    The first step has no fault, because nothing could be restored. The last step has none, because its commit ends the
    run.

    Args:
        steps: Number of steps of the run.
        faults: Number of faults.
        seed: Seed of the draw.
        targets: Targets of the faults, in an order that is drawn with the seed. They are repeated if there are more
            faults.
    """
    rng = random.Random(seed)
    length = steps / faults
    times = [
        (max(1, min(steps - 2, int(part * length) + rng.randrange(max(1, int(length))))), rng.random())
        for part in range(faults)
    ]
    order = rng.sample(list(targets), len(targets))
    return [Fault(step, fraction, order[part % len(order)]) for part, (step, fraction) in enumerate(times)]


class Killer:
    """Injects the faults of a run when they are due; call :meth:`due` with each new state.

    If a fault is due during an outage of its target, the target is hit as soon as it has joined again.
    """

    def __init__(self, run: TestRun, lab: SlurmLab, faults: list[Fault], step_s: float) -> None:
        self._run, self._lab = run, lab
        self._faults = list(faults)
        self._step_s = step_s
        self._due_at: float | None = None
        self.kills: list[Kill] = []

    def due(self, state: State) -> None:
        """Inject the next fault if it is due and its target works."""
        if not self._faults:
            return
        fault = self._faults[0]
        if self._due_at is None:
            if reached_step(state) < fault.step:
                return
            self._due_at = time.time() + fault.fraction * self._step_s
        if time.time() < self._due_at or (inject := self._injection(fault.target, state)) is None:
            return
        replica = REPLICA_OF.get(fault.target)
        at = time.time()
        inject()
        incarnation = None if replica is None else state.replica(replica).incarnation
        self.kills.append(Kill(at, reached_step(state), incarnation, fault.target))
        self._faults.pop(0)
        self._due_at = None

    def _injection(self, target: Target, state: State) -> Callable[[], None] | None:
        """Return a function that injects the fault; None while the target does not work."""
        if target is Target.MANAGER:
            managing = holder(self._run.run)
            return None if managing is None else lambda: os.kill(managing.pid, signal.SIGKILL)
        replica = state.replica(REPLICA_OF[target])
        if replica.status is not Status.JOINED or replica.pid is None or self._was_hit(replica):
            return None
        pid, node = replica.pid, replica.node
        if target is Target.NODE:
            assert node is not None
            return lambda: self._lab.crash(node)
        return lambda: os.kill(pid, signal.SIGSTOP if target is Target.HANG else signal.SIGKILL)

    def _was_hit(self, replica: Replica) -> bool:
        """Return whether this incarnation was hit before, which means that the state is older than that fault."""
        return any(kill.incarnation == replica.incarnation for kill in self.kills)


def run_to_end(
    run: TestRun, lab: SlurmLab, faults: list[Fault], step_s: float, timeout_s: float
) -> tuple[State, list[Kill]]:
    """Follow a run to its end and inject the faults. Return the run's last state and the injected faults."""
    killer = Killer(run, lab, faults, step_s)

    def ended(state: State) -> bool:
        if state.outcome is None:
            killer.due(state)
        return state.outcome is not None

    return run.wait(ended, timeout_s), killer.kills
