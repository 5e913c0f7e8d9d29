"""What a new manager's watch inherits of the journal: who is believed to live, and what is usual, which is kept there
rarely, and all of it in one record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf

from rrl.health.lessons import Lesson, noticeable
from rrl.health.sightings import Watch
from rrl.manager.events import Learned
from rrl.manager.state import State, Status

PAUSE = 60.0
"""s between two looks whether there is something to keep: so much at most is learned anew"""


def inherit(watch: Watch, state: State, now: float) -> None:
    """Everything believed is believed to live, with full grace from now. What each has been through is no silence."""
    watch.heed(state.job.limits)
    watch.remember(state.lessons)
    for replica in state.replicas.values():
        if replica.believed and replica.node is not None:
            told = replica.shadow if replica.status is Status.LAUNCHING else None
            watch.launched(replica.life, replica.node, now, told, state.job.recovery.adopt)
            watch.adopted(replica.life, replica.passed)


class Lessons:
    """Of one manager; ``kept`` is what the journal has."""

    def __init__(self, watch: Watch, kept: Mapping[str, Lesson], record: Callable[[Learned], None]) -> None:
        self._watch, self._kept, self._record = watch, kept, record
        self._due = -inf

    def consider(self, now: float) -> None:
        if now < self._due:
            return
        self._due = now + PAUSE
        lessons = self._watch.lessons()
        if noticeable(self._kept, lessons):
            self._kept = lessons
            self._record(Learned(lessons))
