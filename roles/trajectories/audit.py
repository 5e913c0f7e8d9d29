"""What became of every trajectory, counted from the durable records alone: a witness beside the store's own state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from msgspec import Struct

from rrl.roles.trajectories.records import Binding, Commitment, DropCause, Dropped, Head, Made, Record, Settled


class Audit(Struct, frozen=True):
    """``made == trained + sum(dropped.values()) + open``, and no group is in two steps; else the store is wrong."""

    made: int
    trained: int
    """in committed steps"""
    dropped: dict[str, int]
    """by reason"""
    stale: int
    """of those, dropped for the age of their tokens"""
    open: int
    """neither yet, uncommitted steps included"""
    committed: int
    steps: dict[int, tuple[int, ...]]
    """the groups of every step ever bound, uncommitted ones included"""
    max_age: int = 0
    """age of the oldest token in committed steps, in weight versions"""


def audit(records: Iterable[Record]) -> Audit:
    made = committed = stale = 0
    sizes: dict[int, int] = {}
    steps: dict[int, tuple[int, ...]] = {}
    ages: dict[int, int] = {}
    in_step: Counter[int] = Counter()
    dropped: Counter[str] = Counter()
    for record in records:
        match record:
            case Head(trajectories=numbered):
                made = numbered
            case Made(group, first, size):
                sizes[group] = size
                made = max(made, first + size)
            case Binding(number, groups, trajectories) | Settled(number, groups, trajectories):
                steps[number], in_step[number] = groups, trajectories
                if isinstance(record, Settled):
                    committed = max(committed, number)
                else:
                    ages[number] = record.max_age
            case Commitment(number):
                committed = max(committed, number)
            case Dropped(group, trajectories, reason, cause):
                sizes.pop(group, None)
                dropped[reason] += trajectories
                stale += trajectories if cause is DropCause.STALE else 0
                for number in [n for n in steps if n > committed and group in steps[n]]:
                    del steps[number]
            case _:
                pass
    for number, groups in steps.items():
        if number <= committed:
            for group in groups:
                sizes.pop(group, None)
    trained = sum(count for number, count in in_step.items() if number <= committed)
    max_age = max((age for number, age in ages.items() if number <= committed), default=0)
    return Audit(made, trained, dict(dropped), stale, sum(sizes.values()), committed, steps, max_age)
