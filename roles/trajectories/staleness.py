"""How old tokens may be when they are trained on: ``[sampling] staleness`` (N below) and ``late``.

When step n is bound, the newest weights are those of step n - 1. A token that was sampled with the weights of step v
has the age n - 1 - v there, so the last step that may train a group is v + 1 + N, where v is the step of the oldest
weights that any of its tokens was sampled with. Weights that a later incarnation publishes again are of the same step.

A group counts as *begun with* v from the moment that a rollout which holds the weights of step v leases one of its
trajectories: its first token is still to come, but its last step is known. Let B(v) be the number of unbound groups
begun with v or older weights, P the groups of a step, and L the newest bound step. All of them can be trained in time
exactly if

    B(v) <= P * (v + 1 + N - L)   for every v,                                                              (*)

since the steps L + 1 to v + 1 + N have so many places (earliest last step first; Hall's condition). With
``late = "wait"`` every change keeps (*), hence no group is ever too old:

- A lease that would break it is not given. The rollout waits for newer weights.
- A binding takes the groups with the earliest last step first, and is put off while the groups that it would leave do
  not fit into the steps after it. In particular it is never made without the groups whose last step it is.
- An append with older weights than the lease was given for would break it only after the store has restarted, which
  forgets leases. The trajectory is taken away then and leased anew; one append is lost, not the group.
- A store that is opened with a smaller limit, or with smaller steps, drops the groups that do not fit any more.

Nothing waits for ever. While the trainer waits for step L + 1, a rollout with weights of step L - N or newer can lease
every trajectory that is begun and that nobody holds; and if all begun groups are complete but fewer than P, it can
begin another one, because P * (v + 1 + N - L) >= P. So N also says how often the trainer must publish: at least once in
N + 1 steps.

With ``late = "drop"`` a binding waits for no group. A group that has become too old for the next step is dropped, which
trains short answers more often than long ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from math import inf

from ...core.types import Incarnation
from .state import Group, State

_WARNING_WINDOW_BATCHES = 10
"""batches' worth of groups, trained and dropped, after which it is judged whether most were dropped"""


class StalenessLimit:
    """The unbound groups by the weights that they were begun with.

    ``most``: weight versions that a token may be behind the newest; None: no limit, and nothing is counted.
    ``waits``: ``late = "wait"``."""

    def __init__(self, state: State, limit: int | None, groups_per_batch: int, wait_for_late: bool) -> None:
        self._state = state
        self._limit = limit
        self._per_batch = groups_per_batch
        self.wait_for_late = wait_for_late
        self.reason = (
            f"stale: no step can train it before a token is more than {limit} weight versions old" if wait_for_late
            else f"stale: a token is more than {limit} weight versions old"
        )  # fmt: skip
        self._begun: dict[int, int] = {}
        """step of the weights that a group was begun with, by number of the group"""
        self._counts: Counter[int] = Counter()
        """groups by that step"""
        self._complete_counts: Counter[int] = Counter()
        """of these, groups that can be bound"""
        self._judged = state.latest, state.stale
        for group in state.groups.values():
            if group.bound is None and group.oldest is not None:
                self.mark_begun(group, group.oldest)
                if not group.unscored:
                    self.mark_complete(group)

    # ── what is begun ──────────────────────────────────────────────────────────────────────────────────────────────
    def begun_with(self, group: Group) -> float:
        """Step of the oldest weights that a token of the group has or may get; inf: not begun, or no limit."""
        return self._begun.get(group.created.group, inf)

    def mark_begun(self, group: Group, weights: int | None) -> bool:
        """Count the group as begun with the weights of this step. Returns whether they are older than it had before."""
        if self._limit is None or weights is None or group.bound is not None or self.begun_with(group) <= weights:
            return False
        self._uncount(group)
        self._begun[group.created.group] = weights
        self._counts[weights] += 1
        return True

    def mark_complete(self, group: Group) -> None:
        """Count the group among those that can be bound."""
        if (weights := self._begun.get(group.created.group)) is not None:
            self._complete_counts[weights] += 1

    def forget(self, group: Group, *, complete: bool) -> None:
        """The group was bound or dropped; ``complete``: it could be bound."""
        if complete and (weights := self._begun.get(group.created.group)) is not None:
            _decrease(self._complete_counts, weights)
        self._uncount(group)

    def _uncount(self, group: Group) -> None:
        if (weights := self._begun.pop(group.created.group, None)) is not None:
            _decrease(self._counts, weights)

    # ── what may happen ────────────────────────────────────────────────────────────────────────────────────────────
    def allows(self, group: Group | None, weights: int | None) -> bool:
        """Whether a rollout with the weights of this step may work on ``group`` (None: on a new one).

        ``weights`` None: the rollout does not say, and is not held back."""
        before = inf if group is None else self.begun_with(group)
        if self._limit is None or weights is None or before <= weights:
            return True
        total = 0
        for step in sorted({weights, *self._counts}):
            total += self._counts[step]
            if weights <= step < before and total >= self._places(step):
                return False
        return True

    def too_old(self, weights: int) -> bool:
        """A token of these weights is too old for the next step, and for every later one."""
        return self._limit is not None and self._places(weights) <= 0

    def blocking_weights(self) -> int | None:
        """With ``late = "wait"``, the step of the weights whose groups must be complete before the next step can be
        bound: more groups begun with these or older weights are incomplete than the steps after it have places for.
        None: it need not wait."""
        if self._limit is None or not self.wait_for_late:
            return None
        begun = complete = 0
        for step in sorted(self._counts):
            begun += self._counts[step]
            complete += self._complete_counts[step]
            if begun - min(self._per_batch, complete) > self._places(step) - self._per_batch:
                return step
        return None

    def untrainable(self) -> Iterator[Group]:
        """The groups that no step can train in time, judged by the tokens they have. With ``late = "wait"`` there are
        none unless the store was opened with a smaller limit or with smaller steps."""
        fitted = 0
        for group in sorted(self._unbound(), key=lambda group: (self.begun_with(group), group.created.group)):
            places = self._places(self._begun[group.created.group])
            if places <= 0 or (self.wait_for_late and fitted >= places):
                yield group
            else:
                fitted += 1

    def incomplete(self, weights: int) -> list[Group]:
        """The groups begun with these or older weights that cannot be bound yet, earliest last step first."""
        late = [group for group in self._unbound() if group.unscored and self.begun_with(group) <= weights]
        return sorted(late, key=lambda group: (self.begun_with(group), group.created.group))

    def describe(self, weights: int, holder: Callable[[int], Incarnation | None]) -> str:
        """Describe the groups of :meth:`incomplete`, of which there must be one, for a person.

        Names them, who works on the first of them (``holder`` gives the life that a trajectory is leased to), and the
        last steps that may train them.
        """
        groups = self.incomplete(weights)
        first, last = groups[0], groups[-1]
        holders = sorted(
            {str(incarnation) for track in first.trajectories if (incarnation := holder(track.id)) is not None}
        )
        working = f" ({', '.join(holders)})" if holders else ""
        steps = f"{self.last_step(first):g}"
        if len(groups) == 1:
            return f"group {first.created.group}{working}: its last step is {steps}"
        if self.begun_with(first) != self.begun_with(last):
            steps += f" to {self.last_step(last):g}"
        return f"group {first.created.group}{working} and {len(groups) - 1} more: their last step is {steps}"

    def last_step(self, group: Group) -> float:
        """The last step that may train the group; inf: any."""
        return inf if self._limit is None else self.begun_with(group) + 1 + self._limit

    @property
    def oldest_allowed(self) -> int | None:
        """Step of the oldest weights whose tokens the next step takes; None: no limit."""
        return None if self._limit is None else self._state.latest - self._limit

    @property
    def publish_every(self) -> float:
        """Steps in which the trainer must publish at least once; inf: no limit."""
        return inf if self._limit is None else self._limit + 1

    def _places(self, weights: int) -> int:
        """Return how many groups fit into the steps from the next one up to the last that may train these weights."""
        assert self._limit is not None
        return self._per_batch * (weights + 1 + self._limit - self._state.latest)

    def _unbound(self) -> Iterator[Group]:
        return (self._state.groups[number] for number in self._begun)

    # ── what a person should know ──────────────────────────────────────────────────────────────────────────────────
    def warning(self) -> str | None:
        """Once in a while, where more than half of what was made was dropped: what could be done about it."""
        steps, stale = self._state.latest - self._judged[0], self._state.stale - self._judged[1]
        made = steps * self._per_batch + stale
        if made < _WARNING_WINDOW_BATCHES * self._per_batch:
            return None
        self._judged = self._state.latest, self._state.stale
        if 2 * stale <= made:
            return None
        return (
            f"warning: {stale} of the last {made} groups were dropped: a token was more than {self._limit} weight"
            " versions old; answers take longer than the trainer's steps: raise [sampling] staleness, lower"
            " max_new_tokens, or add rollouts"
        )


def _decrease(counts: Counter[int], key: int) -> None:
    """One less; a key without a count goes, so that the number of keys stays about N."""
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
