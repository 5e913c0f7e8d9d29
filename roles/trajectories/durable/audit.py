"""The audit of a log: it computes the fate of every trajectory from the records.

It does not use the store's own state, so that it can find errors in that state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from msgspec import Struct

from .records import (
    DropCause,
    EpisodeFinished,
    GroupCreated,
    GroupDropped,
    Head,
    PackedSegment,
    Part,
    PartRetired,
    Record,
    SegmentsAppended,
    StepCommitted,
    TurnCreated,
    TurnEnded,
)


class Audit(Struct, frozen=True):
    """The number of trajectories for each fate: trained, dropped or still open.

    The store is consistent if ``made == trained + sum(dropped.values()) + open`` and no group is in two steps.
    """

    made: int
    trained: int
    """Number of trajectories in committed steps."""
    dropped: dict[str, int]
    """Number of dropped trajectories by the reason of the drop."""
    stale: int
    """Number of dropped trajectories whose tokens were too old."""
    open: int
    """Number of trajectories that are neither trained nor dropped, including those of uncommitted steps."""
    committed: int
    """Newest committed step; 0 before the first commit."""
    steps: dict[int, tuple[int, ...]]
    """Groups of every step that was ever bound completely, including uncommitted steps."""
    max_age: int = 0
    """Age, in training steps, of the oldest token in committed steps."""
    parts: dict[int, tuple[tuple[int, ...], ...]] = {}
    """Groups of each part of every step that was ever bound, by step. The newest step may lack groups."""
    ages: dict[int, int] = {}
    """Number of tokens in committed steps by their age in training steps."""
    episodes: dict[str, float] = {}
    """Numbers of episodes and turns by name (:class:`.records.EpisodesCounted`), as the store itself counts them. Empty
    in a job without agents, and in an audit that was computed from the records alone."""
    expected: tuple[str, ...] = ()
    """Those reasons in ``dropped`` that are no fault: ``[sampling] refill`` drops groups without signal."""


def audit(records: Iterable[Record]) -> Audit:
    """Compute the audit from the records of a log."""
    made = committed = stale = 0
    sizes: dict[int, int] = {}
    bound: dict[int, list[Part | PartRetired]] = {}
    tokens = _TokenCounts()
    ages: dict[tuple[int, int], Mapping[int, int]] = {}
    dropped: Counter[str] = Counter()
    expected: set[str] = set()
    for record in records:
        match record:
            case Head(trajectories=trajectory_count):
                made = trajectory_count
            case GroupCreated(group, first, size):
                sizes[group] = size
                made = max(made, first + size)
                tokens.add_group(record)
            case SegmentsAppended(segments=segments):
                tokens.add_segments(segments)
            case TurnCreated():
                tokens.add_turn(record)
            case TurnEnded(turn, _, length):
                tokens.end_turn(turn, length)
            case EpisodeFinished(episode, _, turns, unused=unused):
                tokens.finish_episode(episode, [turn for turn in turns if turn not in unused])
            case Part(number, index, groups):
                bound[number] = [*bound.get(number, [])[:index], record]
                ages[number, index] = tokens.ages(number, groups)
            case PartRetired(number, index):
                bound.setdefault(number, []).append(record)
                ages[number, index] = record.ages
                committed = max(committed, number)
            case StepCommitted(number):
                committed = max(committed, number)
            case GroupDropped(group, trajectories, reason, cause):
                sizes.pop(group, None)
                dropped[reason] += trajectories
                stale += trajectories if cause is DropCause.STALE else 0
                expected |= {reason} if cause is DropCause.NO_SIGNAL else set()
                for number in [n for n in bound if n > committed and any(group in part.groups for part in bound[n])]:
                    del bound[number]
            case _:
                pass
    trained, trained_ages, max_age = 0, Counter[int](), 0
    for part in (part for number, parts in bound.items() if number <= committed for part in parts):
        trained += part.trajectories
        trained_ages.update(ages[part.number, part.index])
        max_age = max(max_age, part.max_age if isinstance(part, Part) else 0)
        for group in part.groups:
            sizes.pop(group, None)
    complete = [
        number for number, parts in bound.items() if isinstance(parts[-1], PartRetired) or not parts[-1].lacking
    ]
    return Audit(
        made,
        trained,
        dict(dropped),
        stale,
        sum(sizes.values()),
        committed,
        {number: tuple(group for part in bound[number] for group in part.groups) for number in complete},
        max([max_age, *trained_ages]),
        {number: tuple(part.groups for part in parts) for number, parts in bound.items()},
        dict(sorted(trained_ages.items())),
        expected=tuple(sorted(expected)),
    )


class _TokenCounts:
    """Counts the tokens of each trajectory by the training step of the weights that sampled them."""

    def __init__(self) -> None:
        self._trajectories: dict[int, range] = {}
        self._tokens: dict[int, Counter[int]] = {}
        self._turns: dict[int, TurnCreated] = {}
        self._sampled: dict[int, list[int]] = {}
        """By turn, for each of its tokens the training step of the weights that sampled it."""

    def add_group(self, created: GroupCreated) -> None:
        self._trajectories[created.group] = range(created.first, created.first + created.size)

    def add_turn(self, created: TurnCreated) -> None:
        self._turns[created.turn] = created
        self._sampled[created.turn] = []

    def end_turn(self, turn: int, length: int) -> None:
        del self._sampled[turn][length:]

    def add_segments(self, segments: Iterable[PackedSegment]) -> None:
        for segment in segments:
            if segment.trajectory in self._turns:
                self._sampled[segment.trajectory] += [segment.step] * (segment.end - segment.offset)
                continue
            count = self._tokens.setdefault(segment.trajectory, Counter())
            count[segment.step] += segment.end - segment.offset

    def finish_episode(self, episode: int, turns: Iterable[int]) -> None:
        """Count the tokens of an episode that are in the path of any of ``turns``, except tokens of foreign turns."""
        used: dict[int, int] = {}
        for number in turns:
            if not self._sampled[number] or self._turns[number].sampling is not None:
                continue
            turn: TurnCreated | None = self._turns[number]
            end = turn.offset + len(turn.given) // 4 + len(self._sampled[number]) if turn else 0
            while turn is not None:
                own = max(0, end - turn.offset - len(turn.given) // 4) if turn.sampling is None else 0
                used[turn.turn] = max(own, used.get(turn.turn, 0))
                end = min(end, turn.offset)
                turn = None if turn.parent is None else self._turns[turn.parent]
        self._tokens[episode] = Counter()
        for number, own in used.items():
            self._tokens[episode].update(self._sampled[number][:own])

    def ages(self, number: int, groups: Iterable[int]) -> Counter[int]:
        """Return the number of tokens by their age at step ``number``."""
        ages: Counter[int] = Counter()
        for group in groups:
            for trajectory in self._trajectories[group]:
                for step, count in self._tokens.get(trajectory, {}).items():
                    ages[number - 1 - step] += count
        return ages
