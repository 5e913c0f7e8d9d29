"""How old tokens may be when they are trained on: ``[sampling] staleness``.

When step ``n`` is bound, the newest weights are those of step ``n - 1``: the trainer publishes them before it asks for
batch ``n``. A group may be bound to it if none of its tokens is of weights older than step ``n - 1 - most``. Weights
that a later incarnation publishes again are of the same step.

That a group is too old is known as soon as the step before is bound, or as soon as a token of such weights is
appended: it is dropped then, whole, and nobody works on it any more. So whatever is complete and not bound is in time.
And nothing is begun that would be too old in the end: the groups in line for the steps to come are counted, and a
rollout works on no group whose step comes too late for the weights that it holds. It waits for newer ones. While the
trainer waits for a batch there are no newer weights, and nothing grows older: a rollout with the newest ones always
finds as many groups as a step takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from rrl.roles.trajectories.records import STALE
from rrl.roles.trajectories.state import Group, State

_LOOKED_AT = 10
"""batches' worth of groups, trained and dropped, after which it is judged whether most were dropped"""


class Freshness:
    """``most``: weight versions that a token may be behind the newest; None: no limit."""

    def __init__(self, state: State, most: int | None, groups_per_batch: int) -> None:
        self._state = state
        self._most = most
        self._per_batch = groups_per_batch
        self.reason = f"{STALE}: a token is more than {most} weight versions old"
        self._judged = state.latest, state.stale

    @property
    def _oldest(self) -> float:
        """Step of the oldest weights whose tokens the next step takes."""
        return -math.inf if self._most is None else self._state.latest - self._most

    def refuses(self, group: Group, weights: int) -> bool:
        """A token of these weights would come too late for every step that the group can still be bound to."""
        return group.bound is None and weights < self._oldest

    def stale(self) -> Iterator[Group]:
        """The groups that no step can take any more."""
        for group in self._state.groups.values():
            if group.oldest is not None and self.refuses(group, group.oldest):
                yield group

    def end(self, weights: int | None) -> float:
        """The number of the first group (of those there are, and of those that may be made) whose turn comes too late
        for what is begun with these weights now. Groups are bound by and large in the order in which they were made."""
        if weights is None or self._most is None:
            return math.inf
        in_time = self._per_batch * max(0, weights + 1 - int(self._oldest))
        line = [number for number, group in self._state.groups.items() if group.bound is None]
        return line[in_time] if in_time < len(line) else self._state.next_group + in_time - len(line)

    def warning(self) -> str | None:
        """Once in a while, where more than half of what was made was dropped: what could be done about it."""
        steps, stale = self._state.latest - self._judged[0], self._state.stale - self._judged[1]
        made = steps * self._per_batch + stale
        if made < _LOOKED_AT * self._per_batch:
            return None
        self._judged = self._state.latest, self._state.stale
        if 2 * stale <= made:
            return None
        return (
            f"warning: {stale} of the last {made} groups were dropped: a token was more than {self._most} weight"
            " versions old; answers take longer than the trainer's steps: raise [sampling] staleness, lower"
            " max_new_tokens, or add rollouts"
        )
