"""The part ``faults`` of benchmarks/tags.py: guests that stop or die, and a trainer that dies while it lends."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from rrl.benchmarks._tags_runs import RANKS, RUN_TIMEOUT_S, Arm, Started, ended, start
from rrl.core.phases import WAIT_DATA
from rrl.core.types import GUEST_ROLE, TRAINER, NodeName, guest_id, member_id
from rrl.manager.model import events as ev
from rrl.manager.model.state import State, Status
from rrl.tests.support import fake_gpu

KILLS = 3
LENT = Arm("multiplexed", 2.0, 1)
NOT_LENT = Arm("disaggregated", 2.0, 1)
_READY = ("wait_data", "lend", "train")
"""Phases of a trainer that has restored its state."""


class Faults(Struct):
    """The results of the part."""

    trainer_late_s: float
    """Seconds from the request for the GPUs of a stopped guest until the trainer could train."""
    trainer_incarnations: int
    """Number of the trainer's incarnation after a guest was stopped and another one killed."""
    recovery_lent_s: list[float]
    """Seconds from the death of a member of the trainer, while the GPUs are lent, until the next can train."""
    recovery_not_lent_s: list[float]

    @property
    def recovery_over_not_lent(self) -> float:
        return statistics.mean(self.recovery_lent_s) / statistics.mean(self.recovery_not_lent_s)


def measure(folder: Path, kills: int = KILLS) -> Faults:
    """Run a job that lends and one that does not side by side, and injure one after the other."""
    with ended(start(LENT, 0, folder)) as lent, ended(start(NOT_LENT, 0, folder)) as other:
        stopped, late = _stop_guest(lent)
        killed = _awake_guest(lent, time.time(), but=stopped)
        _signal(lent, killed, signal.SIGKILL)
        since = time.time()
        _wait_restored(lent, since)
        incarnations = lent.test.state().replica(TRAINER).incarnation_number
        times: dict[str, list[float]] = {"lent": [], "other": []}
        for _ in range(kills):
            _awake_guest(lent, time.time())
            times["lent"].append(_recovery(lent))
            other.test.wait(_waits_for_data, RUN_TIMEOUT_S)
            times["other"].append(_recovery(other))
    return Faults(round(late, 3), incarnations, times["lent"], times["other"])


def _stop_guest(run: Started) -> tuple[NodeName, float]:
    """Stop a guest that generates, until it is killed; return its node, and how late (s) the trainer could train."""
    while True:
        node = _awake_guest(run, time.time())
        _signal(run, node, signal.SIGSTOP)
        since = time.time()
        _wait_restored(run, since)
        taken = [one for one in fake_gpu.events(run.gpu) if one["event"] == "taken" and one["at"] > since]
        if any(one["killed"] for one in taken):
            return node, max(_times(run, "restored", since)[:RANKS]) - min(_times(run, "take", since))
        _signal(run, node, signal.SIGCONT)  # it was already asleep


def _awake_guest(run: Started, since: float, but: NodeName | None = None) -> NodeName:
    """Wait until a guest wakes after ``since``; return its node."""
    found: list[NodeName] = []

    def awake(state: State) -> bool:
        newest = {one["node"]: one for one in fake_gpu.events(run.gpu)}
        found[:] = [
            NodeName(node)
            for node, one in newest.items()
            if one["event"] == "generates"
            and one["at"] > since
            and node != but
            and (guest := state.replicas.get(guest_id(NodeName(node)))) is not None
            and (str(guest.incarnation), guest.status) == (one["who"], Status.JOINED)
        ]
        return bool(found)

    run.test.wait(awake, RUN_TIMEOUT_S)
    return found[0]


def _signal(run: Started, node: NodeName, number: signal.Signals) -> None:
    pid = run.test.state().replica(guest_id(node)).pid
    assert pid is not None
    os.kill(pid, number)


def _wait(run: Started, condition: Callable[[], bool]) -> None:
    run.test.wait(lambda _: condition(), RUN_TIMEOUT_S)


def _times(run: Started, event: str, since: float) -> list[float]:
    return [
        one["at"]
        for one in fake_gpu.events(run.gpu)
        if one["event"] == event and one["at"] > since and not one["who"].startswith(GUEST_ROLE)
    ]


def _wait_restored(run: Started, since: float) -> None:
    _wait(run, lambda: len(_times(run, "restored", since)) >= RANKS)


def _waits_for_data(state: State) -> bool:
    trainer = state.replica(TRAINER)
    return trainer.status is Status.JOINED and trainer.phase == WAIT_DATA and state.step > 0


def _recovery(run: Started) -> float:
    """Kill rank 1 of the trainer; return the seconds until the next incarnation can train."""
    state = run.test.state()
    member, number = state.replica(member_id(TRAINER, 1)), state.replica(TRAINER).incarnation_number
    assert member.pid is not None
    os.kill(member.pid, signal.SIGKILL)
    since = time.time()
    ready: list[float] = []

    def recovered() -> bool:
        ready[:] = [
            each.at
            for each in run.test.events()
            if isinstance(each.event, ev.PhaseEntered)
            and each.event.incarnation.replica == TRAINER
            and each.event.incarnation.number > number
            and each.event.phase in _READY
        ]
        return bool(ready)

    _wait(run, recovered)
    return round(ready[0] - since, 3)
