"""Totals of effective training time (RobustRL's ETTR) for ``summary.json`` and for Prometheus. Pure.

:mod:`rrl.manager.model.figures.training_time` has the definition, and the figures of ``rrl status``. The strict ETTR
and its estimate are in :mod:`.committed_steps`.

:class:`WorkIntervals` computes the total for ``summary.json`` with a correction: a failed replica counts as down from
the first symptom of its failure. :class:`EffectiveSeconds` computes the total for the metrics of a running manager
without this correction, since a Prometheus counter never decreases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ....core.run_spec import RunSpec
from ....core.types import ReplicaId, role_of
from ...model.figures.training_time import effective_share
from ..failure_records import WorkChange


class EffectiveSeconds:
    """Counts the seconds of effective training since ``at`` (s)."""

    def __init__(self, at: float) -> None:
        self._seconds, self._share, self._share_since = 0.0, 0.0, at

    def until(self, now: float) -> float:
        """Return the seconds of effective training up to ``now``."""
        return self._seconds + self._share * max(0.0, now - self._share_since)

    def set_share(self, share: float, at: float) -> None:
        """Set the share of time that counts as effective training. It applies from ``at`` (s) on."""
        self._seconds, self._share_since = self.until(at), max(at, self._share_since)
        self._share = share


class WorkIntervals:
    """The intervals (s) in which each member worked, in order."""

    def __init__(self) -> None:
        self._done: dict[ReplicaId, list[tuple[float, float]]] = {}
        self._since: dict[ReplicaId, float] = {}
        """Start (s) of the current interval of each member that is working."""

    def apply(self, change: WorkChange) -> None:
        """Begin or end an interval.

        If an interval ended in the past, the time that was counted after its end is subtracted.
        """
        if change.working:
            self._since.setdefault(change.replica, change.at)
            return
        done, at = self._done.setdefault(change.replica, []), change.at
        if (since := self._since.pop(change.replica, None)) is not None:
            done.append((since, max(since, at)))
        while done and done[-1][1] > at:
            since, _ = done.pop()
            if since < at:
                done.append((since, at))

    def effective(self, job: RunSpec, until: float, committed_at: float | None) -> float:
        """Return the seconds of effective training up to ``until``.

        ``committed_at`` is the time (s) of the first commit; None if there is no commit.
        """
        effective = 0.0
        for start, end, at_work in self._intervals(until):
            split = end if committed_at is None else min(max(start, committed_at), end)
            if split > start:
                effective += (split - start) * effective_share(job, at_work, committed=False)
            if end > split:
                effective += (end - split) * effective_share(job, at_work, committed=True)
        return effective

    def _intervals(self, until: float) -> Iterator[tuple[float, float, Counter[str]]]:
        """Yield (start, end, number of working members by role) for every interval up to ``until``, in order."""
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
