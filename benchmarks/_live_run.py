"""A simulated run at work: its journal is written as by a manager, while ``rrl status`` reads it."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path

import msgspec

from rrl.core.phases import ClockReading, PhaseTime
from rrl.core.run_dir import RunDir
from rrl.core.types import Version
from rrl.manager.model import events as ev
from rrl.manager.model.reducer import fold
from rrl.manager.model.state import State
from rrl.manager.storage.journal import SEGMENT_RECORDS, Journal
from rrl.tests.support.cli.story import BEGAN, at_work
from rrl.tests.support.cli.top import managed

WRITES_PER_S = 10
RECORDS_PER_WRITE = 10
"""Records that are appended before each write to disk. A run of 1,024 replicas has about 100 records per second if its
steps take 42 s, as RobustRL's do (docs/sources.md). In each step, each replica has a weight version and two phases."""
STEPS = 1_000_000
"""Number of steps of the job, which the run never reaches."""
AGE_S = 600.0
"""Seconds since the run began."""
_EPOCH = 2
"""Epoch of the writer; the earlier events are of the first epoch."""


@contextmanager
def live_run(root: Path, name: str, replicas: int) -> Generator[None]:
    """Write a run with ``replicas`` replicas under ``root``, and append to its journal until the block ends.

    The segment is half full at the beginning, as it is on average when ``rrl status`` is called. This process holds the
    run's lease, as its manager would.
    """
    story = at_work(name, replicas, STEPS)
    shift = time.time() - AGE_S - BEGAN
    story.stamped = [msgspec.structs.replace(stamped, at=stamped.at + shift) for stamped in story.stamped]
    writer = _Writer(managed(story.written(root)), story.recorded())
    writer.append(SEGMENT_RECORDS // 2)
    over = threading.Event()
    thread = threading.Thread(target=writer.run, args=(over,), name="writer")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        writer.close()


class _Writer:
    """Appends events to the journal of a run, step by step."""

    def __init__(self, run: RunDir, state: State) -> None:
        self._run, self._state = run, state
        self._events = _events_at_work(state)
        self._journal = Journal(run, _EPOCH)
        self.close = self._journal.close

    def append(self, records: int) -> None:
        """Write this number of records to disk, renew the lease, and begin a new segment if the present one is full."""
        for event in islice(self._events, records):
            stamped = ev.Stamped(self._state.seq + 1, time.time(), _EPOCH, event)
            self._journal.append(stamped)
            self._state = fold(self._state, stamped)
        self._journal.flush()
        managed(self._run)
        if self._journal.full:
            self._journal.rotate(self._state)

    def run(self, over: threading.Event) -> None:
        while not over.wait(1 / WRITES_PER_S):
            self.append(RECORDS_PER_WRITE)


def _events_at_work(state: State) -> Iterator[ev.Event]:
    """Yield the events of endless steps: phases, a commit, clocks and weight versions of each step."""
    incarnations = [replica.incarnation for replica in state.workers]
    trainer = next(one for one in incarnations if one.replica.startswith("trainer"))
    rollouts = [one for one in incarnations if one.replica.startswith("rollout")]
    for step in count(state.step + 1):
        yield from (ev.PhaseEntered(trainer, phase) for phase in ("wait_data", "train", "checkpoint"))
        yield ev.StepCommitted(trainer, step, {"reward": 0.5, "loss": 0.5, "tokens": 1e6})
        spent = (PhaseTime("generate", "", int(step * 1e9)),)
        yield ev.ClocksRecorded(tuple((one, ClockReading(1, step, spent)) for one in incarnations))
        yield ev.WeightsRecorded(tuple((rollout, Version(step, 1)) for rollout in rollouts))
        for rollout in rollouts:
            yield ev.PhaseEntered(rollout, "wait_work")
            yield ev.PhaseEntered(rollout, "generate")
