"""Who worked when, so that it can be taken back: a failure is found some time after its first trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rrl.spec.words import ReplicaId, role_of


class Worktime:
    """Intervals of work by replica, in order. Times in s."""

    def __init__(self) -> None:
        self._done: dict[ReplicaId, list[tuple[float, float]]] = {}
        self._since: dict[ReplicaId, float] = {}
        """of those at work now"""

    def begin(self, replica: ReplicaId, at: float) -> None:
        self._since.setdefault(replica, at)

    def end(self, replica: ReplicaId, at: float) -> None:
        """It has not worked since ``at``, which may lie in the past: what it was credited after that is taken back."""
        done = self._done.setdefault(replica, [])
        if (since := self._since.pop(replica, None)) is not None:
            done.append((since, max(since, at)))
        while done and done[-1][1] > at:
            since, _ = done.pop()
            if since < at:
                done.append((since, at))

    def intervals(self, until: float) -> Iterator[tuple[float, float, Counter[str]]]:
        """(start, end, replicas at work by role) of every interval up to ``until``, in order."""
        changes: list[tuple[float, int, str]] = []
        for replica in {**self._done, **self._since}:
            spans = [*self._done.get(replica, ())]
            if replica in self._since:
                spans.append((self._since[replica], until))
            for start, end in spans:
                if start < min(end, until):
                    changes += [(start, 1, role_of(replica)), (min(end, until), -1, role_of(replica))]
        at_work: Counter[str] = Counter()
        before = 0.0
        for at, change, role in sorted(changes):
            if at > before and at_work:
                yield before, at, at_work
            at_work[role] += change
            before = at
