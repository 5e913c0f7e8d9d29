"""Learn what is usual in a run: durations of phases, times between signs of progress, and throughput of peers.

:class:`PhaseDurations` keeps durations per role and phase. :class:`ThroughputRounds` compares the replicas of a role at
the end of each *round* (a minute for rollouts, a training pass for members of a gang). It stores the result with each
replica, so that a detector needs only the view of this replica. For rollouts it compares tokens per second while they
generate and are not idle (waiting for a tool is not slowness). For members of a gang it compares the time from the
start of a training pass to its last sign of progress or, without such signs, to its end. Members in lockstep have equal
times, so none of them counts as slow. Thresholds: docs/sources.md (NVRx: < 0.75). Baselines are journaled, so that the
next manager does not have to learn them again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from msgspec import Struct

from ...core.types import Incarnation

THROUGHPUT_WINDOW_S = 60.0
"""Length (s) of a round of a role that generates tokens."""
SLOW_ROLLOUT_SHARE = 0.5
"""A rollout is slow if its rate is below this share of the median rate of the other rollouts. NVRx uses 0.75 for ranks
with equal work. The share is smaller here, because rollouts have unequal work: fewer concurrent answers give fewer
tokens per second."""
SLOW_RANK_SHARE = 0.75
"""A rank is slow if the median pass time of the other ranks is below this share of its own pass time (NVRx)."""
STRAGGLER_ROUNDS = 5
"""Number of consecutive slow rounds that make a replica a straggler."""
_MIN_ACTIVE_SHARE = 0.5
"""Minimum share of a round that a rollout must have spent generating to be compared."""
_MIN_MEDIAN_WORK = 64
"""Rollouts are compared only if the median of their work in the round is at least this number of tokens."""
_MIN_PEERS = 2
"""Minimum number of other rollouts for a comparison."""
_MIN_SLOWER_BY_S = 2.0
"""Minimum time (s) by which the pass time of a slow rank exceeds the median pass time of the other ranks. Smaller
differences may be errors, because heartbeats show progress only to the second."""


@dataclass(slots=True)
class Throughput:
    """Throughput of one incarnation in the current round of comparison, and how many rounds in a row it was slow."""

    work: int = 0
    """Work done in this round, in tokens."""
    seconds: float = 0.0
    """Time (s) spent working in this round."""
    last_added_at: float | None = None
    """Time (s) of the last call of ``add`` for this incarnation."""
    slow_rounds: int = 0
    """Consecutive rounds in which the incarnation was slow."""
    slow_since: float = 0.0
    """Time (s) at which the first of the ``slow_rounds`` ended."""
    by_tokens: bool = True
    """True if the incarnation is compared by tokens per second, False if by training passes within its gang."""


@dataclass(slots=True)
class _Round:
    began: float
    members: dict[Incarnation, Throughput] = field(default_factory=dict)


class ThroughputRounds:
    """The rounds in which replicas are compared by throughput: one per role that makes tokens, one per training gang.

    ``add`` and ``on_pass`` return the incarnations that detectors must evaluate again.
    """

    def __init__(self) -> None:
        self._rounds: dict[str, _Round] = {}
        self._passes: dict[Incarnation, dict[Incarnation, tuple[Throughput, float]]] = {}

    def add(
        self, role: str, incarnation: Incarnation, throughput: Throughput, work: int, working: bool, now: float
    ) -> list[Incarnation]:
        """Add work of a rollout, and compare the rollouts of its role if the round is over.

        Args:
            role: The role whose replicas are compared.
            incarnation: The rollout.
            throughput: Its throughput, updated here.
            work: Work done since the last call, in tokens.
            working: Whether it worked all the time since the last call.
            now: Manager's clock (s).

        Returns:
            Incarnations that became stragglers or are no longer stragglers.
        """
        running = self._rounds.setdefault(role, _Round(now))
        changed: list[Incarnation] = []
        if now - running.began >= THROUGHPUT_WINDOW_S:
            changed = _compare(running.members, now)
            self._rounds[role] = running = _Round(now)
        if (
            working
            and throughput.last_added_at is not None
            and 0 < now - throughput.last_added_at < THROUGHPUT_WINDOW_S / 4
        ):
            throughput.work += work
            throughput.seconds += now - throughput.last_added_at
        throughput.last_added_at = now
        running.members[incarnation] = throughput
        return changed

    def on_pass(
        self, gang: Incarnation, incarnation: Incarnation, throughput: Throughput, seconds: float, now: float
    ) -> list[Incarnation]:
        """Add a training pass of a gang's member, which took ``seconds``.

        The round ends when a member completes its second pass of the round; the members are then compared. Returns
        the incarnations that became stragglers or are no longer stragglers.
        """
        members = self._passes.setdefault(gang, {})
        changed: list[Incarnation] = []
        if incarnation in members:
            changed = _compare_ranks(members, now)
            members.clear()
        members[incarnation] = throughput, seconds
        throughput.by_tokens = False
        return changed

    def remove(self, incarnation: Incarnation, gang: Incarnation) -> None:
        """Remove an incarnation from the round of its role, and discard the whole round of its gang."""
        for running in self._rounds.values():
            running.members.pop(incarnation, None)
        self._passes.pop(gang, None)

    def reset(self) -> None:
        """Discard all rounds."""
        self._rounds.clear()
        self._passes.clear()


def _compare(members: Mapping[Incarnation, Throughput], now: float) -> list[Incarnation]:
    rates = {
        incarnation: throughput.work / throughput.seconds
        for incarnation, throughput in members.items()
        if throughput.seconds >= _MIN_ACTIVE_SHARE * THROUGHPUT_WINDOW_S
    }
    changed: list[Incarnation] = []
    if len(rates) > _MIN_PEERS and median(members[incarnation].work for incarnation in rates) >= _MIN_MEDIAN_WORK:
        ordered = sorted(rates.values())
        for incarnation, rate in rates.items():
            if _update_slow_rounds(
                members[incarnation], rate < SLOW_ROLLOUT_SHARE * _median_without(ordered, rate), now
            ):
                changed.append(incarnation)
    for throughput in members.values():
        throughput.work, throughput.seconds = 0, 0.0
    return changed


def _compare_ranks(members: Mapping[Incarnation, tuple[Throughput, float]], now: float) -> list[Incarnation]:
    if len(members) < 2:
        return []
    ordered = sorted(seconds for _, seconds in members.values())
    changed: list[Incarnation] = []
    for incarnation, (throughput, seconds) in members.items():
        others = _median_without(ordered, seconds)
        if _update_slow_rounds(
            throughput, others < SLOW_RANK_SHARE * seconds and seconds - others >= _MIN_SLOWER_BY_S, now
        ):
            changed.append(incarnation)
    return changed


def _median_without(ordered: list[float], value: float) -> float:
    """Return the upper median of the ascending list ``ordered`` after one ``value`` is removed."""
    middle = (len(ordered) - 1) // 2
    return ordered[middle + 1] if value <= ordered[middle] else ordered[middle]


def _update_slow_rounds(throughput: Throughput, slow: bool, now: float) -> bool:
    """Count a round, and return whether the replica became a straggler or is no longer a straggler."""
    before = throughput.slow_rounds >= STRAGGLER_ROUNDS
    if slow and throughput.slow_rounds == 0:
        throughput.slow_since = now
    throughput.slow_rounds = throughput.slow_rounds + 1 if slow else 0
    return before != (throughput.slow_rounds >= STRAGGLER_ROUNDS)


_MAX_DURATIONS = 32
"""Maximum number of durations kept per role and phase."""
_MIN_DURATIONS = 3
"""Minimum number of measured durations from which a usual duration is computed (docs/sources.md, guard rails: three in
a row)."""


class DurationStats(Struct, frozen=True):
    """A summary of a phase's durations: count, median (s) and longest (s), and separately the longest first pass."""

    count: int
    median: float
    longest: float
    longest_first_pass: float = 0.0
    """Longest first pass (s) of any incarnation; 0 if none is known."""


class TypicalDuration(Struct, frozen=True):
    """The known durations of a phase."""

    median: float | None = None
    """Usual duration (s); None if fewer than ``_MIN_DURATIONS`` are known."""
    longest: float = 0.0
    """Longest (s) of the durations from which ``median`` is computed."""
    longest_pass: float | None = None
    """Longest completed pass (s), first passes included; None if no pass is known."""


class PhaseDurations:
    """Durations of phases over all replicas of a role.

    A replacement replica uses the durations of its predecessors. A single outlier does not change the median.
    """

    def __init__(self) -> None:
        self._durations: dict[tuple[str, str], deque[float]] = {}
        self._first_passes: dict[tuple[str, str], float] = {}
        """Longest first pass (s), by role and phase."""
        self._typical: dict[tuple[str, str], TypicalDuration] = {}

    def add(self, role: str, phase: str, seconds: float) -> None:
        """Add one duration; the oldest is dropped once ``_MAX_DURATIONS`` are kept."""
        key = role, phase
        self._durations.setdefault(key, deque(maxlen=_MAX_DURATIONS)).append(seconds)
        self._typical.pop(key, None)

    def add_first_pass(self, role: str, phase: str, seconds: float) -> None:
        """Add the duration of a first pass, which is only an upper bound of the usual duration.

        A first pass may include compilation.
        """
        key = role, phase
        self._first_passes[key] = max(seconds, self._first_passes.get(key, 0.0))
        self._typical.pop(key, None)

    def restore(self, role: str, phase: str, stats: DurationStats) -> None:
        """Restore an earlier manager's summary.

        The longest duration of the summary counts as the newest, so that it is dropped last.
        """
        key, count = (role, phase), min(stats.count, _MAX_DURATIONS)
        if count:
            self._durations[key] = deque([stats.median] * (count - 1) + [stats.longest], maxlen=_MAX_DURATIONS)
        if stats.longest_first_pass:
            self._first_passes[key] = stats.longest_first_pass
        self._typical.pop(key, None)

    def stats(self) -> dict[str, dict[str, DurationStats]]:
        """Return the summaries of durations, by role and phase."""
        known: dict[str, dict[str, DurationStats]] = {}
        for role, phase in dict.fromkeys((*self._durations, *self._first_passes)):
            durations = sorted(self._durations.get((role, phase), ()))
            known.setdefault(role, {})[phase] = DurationStats(
                len(durations),
                _upper_median(durations) if durations else 0.0,
                durations[-1] if durations else 0.0,
                self._first_passes.get((role, phase), 0.0),
            )
        return known

    def typical(self, role: str, phase: str) -> TypicalDuration:
        """Return the typical duration of a phase of a role. It is cached until a duration is added."""
        key = role, phase
        if (known := self._typical.get(key)) is None:
            durations = sorted(self._durations.get(key, ()))
            passes = [*durations, *([self._first_passes[key]] if key in self._first_passes else [])]
            longest_pass = max(passes, default=None)
            known = (
                TypicalDuration(_upper_median(durations), durations[-1], longest_pass)
                if len(durations) >= _MIN_DURATIONS
                else TypicalDuration(longest_pass=longest_pass)
            )
            self._typical[key] = known
        return known


def _upper_median(ordered: list[float]) -> float:
    return ordered[len(ordered) // 2]


MIN_CHANGE_SHARE = 0.2
"""Minimum relative change of a duration that is recorded. Our choice: small compared with the factor ``adaptive`` (5)
of the deadlines."""
MIN_CHANGE_S = 1.0
"""Minimum change (s) of a duration that is recorded; smaller changes affect no deadline."""


class RoleBaseline(Struct, frozen=True):
    """The baselines of one role, which the journal keeps for the next manager."""

    phases: dict[str, DurationStats] = {}
    """Durations by phase."""
    uses_tensor_cores: bool = False
    """True if tensor cores were observed at work, so that idle tensor cores are evidence."""
    answers_probes: bool = False
    """True if replicas of the role answer probes while they wait."""
    slowest_load: float = 0.0
    """Longest recent time (s) to load weights."""


def changed_noticeably(before: Mapping[str, RoleBaseline], after: Mapping[str, RoleBaseline]) -> bool:
    """Return whether a duration differs noticeably in ``after``, or is based on at least twice as many measurements."""
    return before.keys() != after.keys() or any(_differs(before[role], baseline) for role, baseline in after.items())


def _differs(before: RoleBaseline, after: RoleBaseline) -> bool:
    if before.phases.keys() != after.phases.keys():
        return True
    if (before.uses_tensor_cores, before.answers_probes) != (after.uses_tensor_cores, after.answers_probes):
        return True
    return _moved(before.slowest_load, after.slowest_load) or any(
        stats.count >= max(1, 2 * old.count)
        or _moved(old.median, stats.median)
        or _moved(old.longest, stats.longest)
        or _moved(old.longest_first_pass, stats.longest_first_pass)
        for old, stats in ((before.phases[name], stats) for name, stats in after.phases.items())
    )


def _moved(before: float, after: float) -> bool:
    return abs(after - before) > max(MIN_CHANGE_S, MIN_CHANGE_SHARE * max(before, after))
