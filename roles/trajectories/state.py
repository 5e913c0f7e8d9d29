"""What the store knows durably: a fold over its records. Who leases what is not here: that is volatile."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from itertools import groupby

from msgspec import Struct

from ...core.types import Incarnation, ReplicaId
from .records import (
    FORMAT,
    Binding,
    BindingRetired,
    DropCause,
    Fence,
    GroupCreated,
    GroupDropped,
    Head,
    Metrics,
    PackedSegment,
    Record,
    ScoresRecorded,
    SegmentsAppended,
    StepCommitted,
    encode,
    unpack,
    unpack_tokens,
)
from .types import Item, PackedBatch, PackedTrajectory, Score, ToScore

METRICS_RETAINED_STEPS = 4096
"""newest steps whose metrics are kept for a manager that does not live: at 10 s a step those of eleven hours, in a
few MB"""


class TrajectoryState(Struct, eq=False):
    """A trajectory on its way."""

    id: int
    group: Group
    segments: list[PackedSegment] = []
    writer: Incarnation | None = None
    """whose words came last"""
    finished: bool = False
    score: Score | None = None

    @property
    def length(self) -> int:
        return self.segments[-1].end if self.segments else 0


class Group(Struct, eq=False):
    created: GroupCreated
    trajectories: list[TrajectoryState] = []
    unscored: int = 0
    bound: int | None = None
    """the step it is bound to"""
    oldest: int | None = None
    """step of the oldest weights that a token of it was sampled with; None: it has no token yet"""


class State:
    """``apply`` trusts its records: what may be written is the store's to judge. ``keep``: committed steps whose token
    data stays."""

    def __init__(self, retained_steps: int) -> None:
        self._retained_steps = retained_steps
        self.next_group = 0
        self.next_trajectory = 0
        self.groups: dict[int, Group] = {}
        self.trajectories: dict[int, TrajectoryState] = {}
        self.bindings: dict[int, Binding] = {}
        self.commitments: dict[int, StepCommitted] = {}
        self.metrics: dict[int, dict[str, float]] = {}
        """of the newest steps"""
        self.committed = 0
        """0 before the first commit: steps count from 1"""
        self.fences: dict[ReplicaId, int] = {}
        self.stale = 0
        """groups dropped for the age of their tokens, ever"""

    def apply(self, record: Record) -> None:
        match record:
            case SegmentsAppended(incarnation, pieces, finished):
                self._append_segments(incarnation, pieces, finished)
            case ScoresRecorded(scores):
                for score in scores:
                    track = self.trajectories[score.trajectory]
                    track.score = score
                    track.group.unscored -= 1
            case GroupCreated():
                self._create_group(record)
            case Binding(number, groups):
                self.bindings[number] = record
                for group in groups:
                    self.groups[group].bound = number
            case Metrics(number, metrics):
                self.metrics[number] = metrics
                self.metrics.pop(number - METRICS_RETAINED_STEPS, None)
            case StepCommitted(number):
                self.commitments[number] = record
                self.committed = number
                self._retire(number - self._retained_steps)
            case GroupDropped(group, cause=cause):
                self.stale += cause is DropCause.STALE
                if group in self.groups:  # else it is history, carried on for the audit
                    self.bindings.pop(self.groups[group].bound or 0, None)
                    self._forget(group)
            case Fence(replica, oldest_allowed):
                self.fences[replica] = oldest_allowed
            case BindingRetired():
                pass
            case Head(format, groups, trajectories):
                if format != FORMAT:
                    raise ValueError(f"trajectory log of format {format}; this version of rrl reads {FORMAT}")
                self.next_group, self.next_trajectory = groups, trajectories

    def _create_group(self, created: GroupCreated) -> None:
        group = Group(created, unscored=created.size)
        group.trajectories = [TrajectoryState(i, group) for i in range(created.first, created.first + created.size)]
        self.groups[created.group] = group
        self.trajectories.update((track.id, track) for track in group.trajectories)
        self.next_group = max(self.next_group, created.group + 1)
        self.next_trajectory = max(self.next_trajectory, created.first + created.size)

    def _append_segments(
        self, incarnation: Incarnation, pieces: Iterable[PackedSegment], finished: Iterable[int]
    ) -> None:
        for piece in pieces:
            track = self.trajectories[piece.trajectory]
            track.segments.append(piece)
            track.writer = incarnation
            oldest = track.group.oldest
            track.group.oldest = piece.step if oldest is None else min(oldest, piece.step)
        for trajectory in finished:
            track = self.trajectories[trajectory]
            track.finished, track.writer = True, incarnation

    def _retire(self, number: int) -> None:
        for old in [n for n in self.bindings if n <= number]:
            for group in self.bindings.pop(old).groups:
                self._forget(group)
            self.commitments.pop(old, None)

    def _forget(self, group: int) -> None:
        for track in self.groups.pop(group).trajectories:
            del self.trajectories[track.id]

    @property
    def latest(self) -> int:
        """The newest bound step, or the committed one."""
        return max(self.bindings, default=self.committed)

    @property
    def max_age(self) -> int:
        """Age of the oldest token of all steps up to the latest one, in weight versions. Each binding carries the
        maximum of those before it, and that of the committed step is always here."""
        return max((binding.max_age for binding in self.bindings.values()), default=0)

    def head(self) -> Head:
        return Head(FORMAT, self.next_group, self.next_trajectory)

    def records(self) -> Iterator[Record]:
        """The shortest log that folds into this state, after its ``head``."""
        for replica, incarnation in self.fences.items():
            yield Fence(replica, incarnation)
        for group in self.groups.values():
            yield group.created
            for track in group.trajectories:
                if track.writer is not None:
                    yield SegmentsAppended(track.writer, tuple(track.segments), (track.id,) if track.finished else ())
            if scores := tuple(track.score for track in group.trajectories if track.score is not None):
                yield ScoresRecorded(scores)
        for number, metrics in self.metrics.items():
            yield Metrics(number, metrics)
        for number in sorted(self.bindings):
            yield self.bindings[number]
            if number in self.commitments:
                yield self.commitments[number]

    def bind(self, number: int, groups: tuple[int, ...]) -> Binding:
        """The digest is over every token, log-probability, version and score that the step will see."""
        tracks = self._trajectories_of(groups)
        content_hash = hashlib.sha256(str(number).encode())
        for track in tracks:
            content_hash.update(encode((track.id, track.group.created.prompt, track.segments, track.score)))
        oldest = (self.groups[group].oldest for group in groups)
        ages = [number - 1 - step for step in oldest if step is not None]
        return Binding(number, groups, len(tracks), content_hash.hexdigest(), self.stale, max([self.max_age, *ages]))

    def batch(self, number: int) -> PackedBatch:
        binding = self.bindings[number]
        prompts = tuple(self.groups[group].created.prompt for group in binding.groups)
        trajectories = tuple(as_packed(track) for track in self._trajectories_of(binding.groups))
        return PackedBatch(
            number, binding.groups, binding.digest, prompts, trajectories, binding.stale, binding.max_age
        )

    def _trajectories_of(self, groups: Iterable[int]) -> list[TrajectoryState]:
        return [track for group in groups for track in self.groups[group].trajectories]


# ── as others see them ─────────────────────────────────────────────────────────────────────────────────────────────
def as_item(track: TrajectoryState, max_new_tokens: int) -> Item:
    """As a rollout gets it: with what earlier lives made of it."""
    made = track.group.created
    so_far = tuple(unpack(piece) for piece in track.segments)
    return Item(track.id, made.group, unpack_tokens(made.prompt), so_far, max(0, max_new_tokens - track.length))


def as_packed(track: TrajectoryState) -> PackedTrajectory:
    """As the trainer gets it; only of a scored one."""
    assert track.score is not None
    return PackedTrajectory(
        id=track.id,
        group=track.group.created.group,
        tokens=b"".join(piece.tokens for piece in track.segments),
        logprobs=b"".join(piece.logprobs for piece in track.segments),
        runs=tuple(
            (sum(piece.end - piece.offset for piece in pieces), *version)
            for version, pieces in groupby(track.segments, lambda piece: (piece.step, piece.incarnation))
        ),
        reward=track.score.reward,
        training=track.score.training,
    )


def as_to_score(track: TrajectoryState) -> ToScore:
    """As a reward replica gets it."""
    tokens = tuple(token for piece in track.segments for token in unpack_tokens(piece.tokens))
    return ToScore(track.id, track.group.created.item, tokens)
