"""The limit on the age of trained tokens: ``[sampling] staleness`` (N below) and ``late``.

Step n starts from the weights of step n - 1. A token of step n that was sampled with the weights of step v has the age
n - 1 - v, counted in training steps. The last step that may train a group is therefore v + 1 + N, where v is
the step of the oldest weights that sampled any of its tokens. If a later incarnation publishes weights of the same step
again, v is the same.

A group counts as *begun with* v from the moment that a rollout with the weights of step v leases one of its
trajectories: the group has no token yet, but its last step is known. Let B(v) be the number of unbound groups begun
with v or older weights, P the number of groups per step, L the newest step that is bound completely, and F the number
of groups that the open step L + 1 lacks: P, or fewer if it has parts already (:mod:`.bindings`). All unbound groups can
be trained in time if and only if B(v) = 0 for every v < L - N, and

    B(v) <= F + P * (v + N - L)   for every v >= L - N,                                                     (*)

because the open step has F places, and each of the v + N - L steps after it up to step v + 1 + N has P places (earliest
last step first; Hall's condition). With ``late = "wait"`` every change preserves (*), so no group ever becomes too old:

- A lease that would violate (*) is not granted. The rollout waits for newer weights.
- A part takes the complete groups with the earliest last steps. Let C(v) be how many of the B(v) groups are complete.
  If a part takes m <= F groups, then min(m, C(v)) of them were begun with v or older weights, and the open step lacks
  F - m groups afterwards. So (*) holds afterwards if B(v) - min(m, C(v)) <= F - m + P * (v + N - L). For m <= C(v) this
  follows from (*); otherwise it says

      m <= C(v) + F + P * (v + N - L) - B(v)   for every v >= L - N.                                       (**)

  The store takes no more groups than (**) allows. If a part needs more groups, the store postpones the part. For
  v = L - N, (**) says that the step keeps a place for every incomplete group that no later step may train.
- The last part of a step, or a step that is bound as a whole, is the case m = F. Then (*) for v = L - N says that no
  group begun with these weights is left. For later v, (*) is the same condition when step L + 1 has become the newest
  bound step: L + 1 replaces L, and P replaces F.
- An append with older weights than the lease was granted for can violate (*) only after a restart of the store, which
  forgets leases. The store then takes the trajectory away and leases it again; one append is lost, not the group.
- A complete group without signal may be dropped (``[sampling] refill``). B(v) and C(v) fall by the same number, so (*)
  still holds, and the right side of (**) stays the same.
- A store that is opened with a smaller limit, or with fewer groups per step, drops the groups that no longer fit. It
  drops no group of a part, and the open step, if it has parts, keeps its number of groups.

No process waits forever. While the trainer waits for m <= F groups of step L + 1, a rollout with weights of step L - N
or newer can lease every begun trajectory that is not leased. Once all begun groups are complete, C(v) = B(v), and (**)
allows F groups. If there are fewer than m complete groups, the rollout can begin another group: since B(v) < m <= F,
(*) still holds with the new group, and F unbound groups are always allowed. A group without signal that is dropped
costs another round of this, but their number is limited. N therefore also determines how often the trainer must
publish: at least once in N + 1 steps.

With ``late = "drop"`` a part or binding waits for no group. When a step is bound completely, the groups that have
become too old for the next step are dropped, so that short answers are trained more often than long ones. No group
becomes too old while parts of the open step are bound, since L stays the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from math import inf

from ....core.types import Incarnation
from ..durable.groups import Group
from ..durable.state import State

_WARNING_WINDOW_BATCHES = 10
"""Size, in batches, of the window for which the share of dropped groups is computed. The window counts the groups that
were bound to a step or dropped because of their age."""


class StalenessLimit:
    """Counts the unbound groups by the weights that they were begun with, and decides what may be leased and bound.

    Args:
        state: The store's state, which this class only reads.
        limit: Greatest age of a trained token, in training steps. If None, there is no limit, and nothing is
            counted.
        groups_per_batch: Number of groups that a step trains.
        wait_for_late: True for ``late = "wait"``.
    """

    def __init__(self, state: State, limit: int | None, groups_per_batch: int, wait_for_late: bool) -> None:
        self._state = state
        self._limit = limit
        self._per_batch = groups_per_batch
        self.wait_for_late = wait_for_late
        self.reason = (
            f"stale: no step can train the group before a token is more than {limit} training steps old"
            if wait_for_late
            else f"stale: a token is more than {limit} training steps old"
        )
        self._begun: dict[int, int] = {}
        """Step of the weights that a group was begun with, by group number."""
        self._counts: Counter[int] = Counter()
        """Number of unbound groups, by the step of the weights that they were begun with."""
        self._complete_counts: Counter[int] = Counter()
        """Number of complete unbound groups, by the step of the weights that they were begun with."""
        self._evaluated_at = state.latest, state.stale
        for group in state.groups.values():
            if group.bound is None and group.oldest is not None:
                self.mark_begun(group, group.oldest)
                if not group.unscored:
                    self.mark_complete(group)

    # ── counting ───────────────────────────────────────────────────────────────────────────────────────────────────
    def begun_with(self, group: Group) -> float:
        """Return v, the step of the weights that the group was *begun with*.

        Returns inf if the group has not begun, or if there is no limit; and -inf for an evaluated episode, which comes
        before all groups.
        """
        if group.is_evaluated:
            return -inf
        return self._begun.get(group.created.group, inf)

    def mark_begun(self, group: Group, weights: int | None) -> bool:
        """Count the group as begun with the weights of step ``weights``; return whether this changed the count.

        The count does not change if the group was begun with the same or older weights, if it is bound, if ``weights``
        is None, or if there is no limit.
        """
        if self._limit is None or weights is None or group.bound is not None or self.begun_with(group) <= weights:
            return False
        self._uncount(group)
        self._begun[group.created.group] = weights
        self._counts[weights] += 1
        return True

    def mark_complete(self, group: Group) -> None:
        """Count the group as complete."""
        if (weights := self._begun.get(group.created.group)) is not None:
            self._complete_counts[weights] += 1

    def forget(self, group: Group, *, complete: bool) -> None:
        """Stop counting a group that is bound or dropped; ``complete`` is True if it counted as complete."""
        if complete and (weights := self._begun.get(group.created.group)) is not None:
            _decrease(self._complete_counts, weights)
        self._uncount(group)

    def _uncount(self, group: Group) -> None:
        if (weights := self._begun.pop(group.created.group, None)) is not None:
            _decrease(self._counts, weights)

    # ── deciding ───────────────────────────────────────────────────────────────────────────────────────────────────
    def allows(self, group: Group | None, weights: int | None) -> bool:
        """Return whether a rollout with weights of this step may work on ``group``, or on a new group if it is None.

        A rollout that did not report its weights (None) may work on any group. An evaluation has rules of its own.
        """
        if group is not None and group.is_evaluated:
            return self._state.evaluations.allows(weights)
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
        """Return whether a token sampled with these weights is too old for the next step and every later one."""
        return self._limit is not None and self._places(weights) <= 0

    def bindable(self) -> float:
        """Return how many complete groups the open step may take now, so that all others can still be trained in time.

        The module's docstring derives this number as (**). The groups are taken in the order of the last steps that may
        train them. The result may be larger than the number of complete groups. It is inf if nothing limits the number,
        so always with ``late = "drop"`` or without a limit.
        """
        return min((count for _, count in self._bindable_by_weights()), default=inf)

    def blocking_weights(self, least: int) -> int | None:
        """Return the step v of the oldest weights whose groups prevent a binding of ``least`` groups now.

        Too few of the groups that were begun with v or older weights are complete. After the binding, the steps that
        may still train these groups would have too few places for the incomplete ones. Returns None if nothing prevents
        the binding, so always with ``late = "drop"`` or without a limit.
        """
        return next((weights for weights, count in self._bindable_by_weights() if count < least), None)

    def _bindable_by_weights(self) -> Iterator[tuple[int, int]]:
        """Yield (v, number of groups that (**) in the module's docstring allows for v), in ascending order of v.

        Each v is the step of the weights that unbound groups were begun with. Nothing is yielded with ``late = "drop"``
        or without a limit.
        """
        if self._limit is None or not self.wait_for_late:
            return
        begun = complete = 0
        for step in sorted(self._counts):
            begun += self._counts[step]
            complete += self._complete_counts[step]
            yield step, complete + self._places(step) - begun

    def untrainable(self) -> Iterator[Group]:
        """Yield the groups that no step can train in time.

        With ``late = "wait"`` such groups exist only if the store was opened with a smaller limit or fewer groups per
        step.
        """
        fitted = 0
        for group in sorted(self._unbound(), key=lambda group: (self.begun_with(group), group.created.group)):
            places = self._places(self._begun[group.created.group])
            if places <= 0 or (self.wait_for_late and fitted >= places):
                yield group
            else:
                fitted += 1

    def incomplete(self, weights: int) -> list[Group]:
        """Return the incomplete groups that were begun with the weights of step ``weights`` or with older weights.

        The groups are in the order of the last steps that may train them.
        """
        late = [group for group in self._unbound() if group.unscored and self.begun_with(group) <= weights]
        return sorted(late, key=lambda group: (self.begun_with(group), group.created.group))

    def describe(self, weights: int, holder: Callable[[int], Incarnation | None]) -> str:
        """Describe the groups of :meth:`incomplete` for a person; there must be at least one.

        The text names the groups, the last steps that may train them, and the incarnations that work on the first
        group. ``holder`` returns the incarnation that a trajectory is leased to.
        """
        groups = self.incomplete(weights)
        first, last = groups[0], groups[-1]
        holders = sorted(
            {str(incarnation) for track in first.trajectories if (incarnation := holder(track.id)) is not None}
        )
        working = f" ({', '.join(holders)})" if holders else ""
        steps = f"step {self.last_step(first):g} is"
        if len(groups) == 1:
            return f"group {first.created.group}{working}: {steps} the last that may train it"
        if self.begun_with(first) != self.begun_with(last):
            steps = f"steps {self.last_step(first):g} to {self.last_step(last):g} are"
        return f"group {first.created.group}{working} and {len(groups) - 1} more: {steps} the last that may train them"

    def last_step(self, group: Group) -> float:
        """Return the last step that may train the group; inf without a limit."""
        return inf if self._limit is None else self.begun_with(group) + 1 + self._limit

    @property
    def oldest_allowed(self) -> int | None:
        """Return the step of the oldest weights whose tokens the next step may train on; None without a limit."""
        return None if self._limit is None else self._state.latest - self._limit

    @property
    def publish_every(self) -> float:
        """Number of steps in which the trainer must publish at least once; inf without a limit."""
        return inf if self._limit is None else self._limit + 1

    def _places(self, weights: int) -> int:
        """Return how many groups fit into the steps that may still train on tokens of the weights of step ``weights``.

        Only places that are not bound yet count. The result is 0 if no further step may train on these tokens.
        """
        assert self._limit is not None
        steps = weights + 1 + self._limit - self._state.latest
        return self._state.lacking(self._per_batch) + self._per_batch * (steps - 1) if steps > 0 else 0

    def _unbound(self) -> Iterator[Group]:
        return (self._state.groups[number] for number in self._begun)

    # ── warning ────────────────────────────────────────────────────────────────────────────────────────────────────
    def warning(self) -> str | None:
        """Return a warning with possible remedies if more than half of the groups of the last window were dropped."""
        steps, stale = self._state.latest - self._evaluated_at[0], self._state.stale - self._evaluated_at[1]
        made = steps * self._per_batch + stale
        if made < _WARNING_WINDOW_BATCHES * self._per_batch:
            return None
        self._evaluated_at = self._state.latest, self._state.stale
        if 2 * stale <= made:
            return None
        return (
            f"warning: {stale} of the last {made} groups were dropped, because a token was more than {self._limit}"
            " training steps old. Answers take longer than the trainer's steps: raise [sampling] staleness, lower"
            " max_new_tokens, or add rollouts"
        )


def _decrease(counts: Counter[int], key: int) -> None:
    """Subtract one from a count, and remove it at zero, so that there are about as many keys as allowed ages."""
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
