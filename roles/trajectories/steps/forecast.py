"""When a step is *balanced*: what is missing will be complete by the time that what is there has been trained.

The trainer lends its GPUs before it trains part 0 of a step that is not balanced, and takes them back at balance. It
never lends in the middle of a step, so a step must not count as balanced if only guests can complete it:

- Beside other rollouts, the trainer would wait for as long as these need for the missing groups, less the time that it
  trains the others. That the GPUs cannot be back at once shifts the balance by the time that handing them back takes.
  If guests can get no work, nothing is lent, and what is lent is taken back once a part is there.
- If there are no other rollouts, the whole step must be there. Work that cannot be leased now may become leasable
  later: a group is dropped because its answers cannot be scored, or an agent continues.

An evaluation that the trainer waits for counts as missing work, ahead of which nothing can be trained.
"""

from __future__ import annotations

from math import inf

from msgspec import Struct

from ..types import Balance


class Outlook(Struct, frozen=True):
    """What the store knows about a step before the trainer trains part 0 of it. Counts are in groups."""

    size: int
    """Groups of a step."""
    there: int
    """Groups of the step that are bound, or that may be bound now (:meth:`.staleness.StalenessLimit.bindable`)."""
    has_part: bool
    """Whether these are enough for part 0."""
    missing: int
    """Groups that the step needs further; 0 for the step after the last one, which does not exist."""
    evaluation: float
    """Unfinished answers of the evaluation that the trainer waits for, as a number of groups with as many answers; 0 if
    it waits for none."""
    evaluated: bool
    """Whether the trainer waits for no evaluation. If not, it can train nothing, however many groups are there."""
    has_rollouts: bool
    """Whether there are rollouts beside the guests."""
    pace: float | None
    """Groups per second that these rollouts make while all their places are used; None or 0 if it is not known yet."""
    has_work: bool
    """Whether a guest could get work now, or has some."""


def balance(step: Outlook, train_s: float, back_s: float, *, lent: bool) -> Balance:
    """Return whether a step is balanced, for a trainer that needs ``train_s`` for a step (:class:`Balance`).

    ``back_s`` is the time (s) that handing the GPUs back takes. ``lent`` is whether the trainer has lent them now.
    """
    alone_s = step.size / step.pace if step.has_rollouts and step.pace else inf
    if step.evaluated and not step.missing:
        return Balance(0.0, alone_s)
    if not step.has_rollouts:
        return Balance(inf, alone_s)
    trains_now = step.evaluated and step.has_part
    if not step.has_work and (trains_now or not lent):
        return Balance(0.0, alone_s)
    if not step.pace:
        return Balance(0.0 if trains_now else inf, alone_s)
    train_left_s = train_s * step.there / step.size
    short_s = step.evaluation / step.pace + max(0.0, step.missing / step.pace - train_left_s)
    return Balance(short_s if short_s > back_s else 0.0, alone_s)
