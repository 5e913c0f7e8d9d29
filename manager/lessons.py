"""What is usual, kept in the journal for the next manager: rarely, and all of it in one record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf

from rrl.health.lessons import Lesson, noticeable
from rrl.health.sightings import Watch
from rrl.manager.events import Learned

PAUSE = 60.0
"""s between two looks whether there is something to keep: so much at most is learned anew"""


class Lessons:
    """Of one manager; ``kept`` is what the journal has."""

    def __init__(self, watch: Watch, kept: Mapping[str, Lesson], record: Callable[[Learned], None]) -> None:
        self._watch, self._kept, self._record = watch, kept, record
        self._due = -inf
        watch.remember(kept)

    def consider(self, now: float) -> None:
        if now < self._due:
            return
        self._due = now + PAUSE
        lessons = self._watch.lessons()
        if noticeable(self._kept, lessons):
            self._kept = lessons
            self._record(Learned(lessons))
