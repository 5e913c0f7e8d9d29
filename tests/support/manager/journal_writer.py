"""A journal that a test writes, with the state and records that should result from it."""

from __future__ import annotations

from rrl.core.run_dir import RunDir
from rrl.core.types import Incarnation, NodeName
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Launch, Why
from rrl.manager.model.reducer import fold
from rrl.manager.storage.journal import Journal
from rrl.tests.support.manager.jobs import RUN, TRAINER, job

TRAINER_1 = Incarnation(TRAINER, 1)
BEGUN: tuple[ev.Event, ...] = (
    ev.RunStarted(RUN, job()),
    ev.Intended(Launch(TRAINER_1, "step", "pool", NodeName("n1"), Why(("wanted",)))),
)


class Writer:
    """A journal, with the state and records that should result from it."""

    def __init__(self, run: RunDir, epoch: int = 1) -> None:
        self.journal = Journal(run, epoch)
        self.epoch = epoch
        self.state = self.journal.state
        self.written: list[ev.Stamped] = []

    def write(self, *events: ev.Event) -> Writer:
        for event in events:
            seq = self.state.seq + 1 if self.state else 1
            stamped = ev.Stamped(seq, float(seq), self.epoch, event)
            self.journal.append(stamped)
            self.state = fold(self.state, stamped)
            self.written.append(stamped)
        return self

    def begin(self) -> Writer:
        """Write the two records by which the trainer's first incarnation becomes current."""
        return self.write(*BEGUN).flush()

    def steps(self, *steps: int) -> Writer:
        return self.write(*(ev.StepCommitted(TRAINER_1, step, {"reward": 0.5}) for step in steps))

    def flush(self) -> Writer:
        self.journal.flush()
        return self

    def rotate(self) -> Writer:
        assert self.state is not None
        self.journal.rotate(self.state)
        return self
