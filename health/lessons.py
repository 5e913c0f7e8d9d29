"""What a watch has learned of the roles that it watches, so that the next manager need not learn it anew.

How long things take is no silence: it holds whoever listens. What one life does just now is not among it.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from rrl.health.usual import Took

CHANGE = 0.2
"""share by which a duration must change to be worth a record (ours: a tenth of what ``adaptive`` leaves)"""
LEAST = 1.0
"""s by which it must, too: below it no deadline moves"""


class Lesson(Struct, frozen=True):
    """Of one role."""

    phases: dict[str, Took] = {}
    tensor_seen: bool = False
    """tensor cores were seen at work: where they can be seen, their rest says something"""
    answers: bool = False
    """it answers probes while it waits"""
    slowest_load: float = 0.0
    """s: the longest that it lately took to load weights"""


def noticeable(before: Mapping[str, Lesson], after: Mapping[str, Lesson]) -> bool:
    """A deadline would be another one, or rest on twice as much."""
    return before.keys() != after.keys() or any(_differs(before[role], lesson) for role, lesson in after.items())


def _differs(before: Lesson, after: Lesson) -> bool:
    if before.phases.keys() != after.phases.keys():
        return True
    if (before.tensor_seen, before.answers) != (after.tensor_seen, after.answers):
        return True
    return _moved(before.slowest_load, after.slowest_load) or any(
        took.count >= 2 * old.count or _moved(old.median, took.median) or _moved(old.longest, took.longest)
        for old, took in ((before.phases[name], took) for name, took in after.phases.items())
    )


def _moved(before: float, after: float) -> bool:
    return abs(after - before) > max(LEAST, CHANGE * max(before, after))
