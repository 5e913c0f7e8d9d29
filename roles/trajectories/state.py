"""What the store knows durably: a fold over its records. Who leases what is not here: that is volatile."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from itertools import groupby

from msgspec import Struct

from ...core.types import Life, ReplicaId
from .records import (
    FORMAT,
    Binding,
    Commitment,
    DropCause,
    Dropped,
    Fence,
    Grown,
    Head,
    Made,
    Metrics,
    Piece,
    Record,
    Scored,
    Settled,
    encode,
    unpack,
    unpack_tokens,
)
from .types import Item, PackedBatch, PackedTrajectory, Score, ToScore

METRICS_KEPT = 4096
"""newest steps whose metrics are kept for a manager that does not live: at 10 s a step those of eleven hours, in a
few MB"""


class Track(Struct, eq=False):
    """A trajectory on its way."""

    id: int
    group: Group
    pieces: list[Piece] = []
    writer: Life | None = None
    """whose words came last"""
    finished: bool = False
    score: Score | None = None

    @property
    def length(self) -> int:
        return self.pieces[-1].end if self.pieces else 0


class Group(Struct, eq=False):
    made: Made
    tracks: list[Track] = []
    unscored: int = 0
    bound: int | None = None
    """the step it is bound to"""
    oldest: int | None = None
    """step of the oldest weights that a token of it was sampled with; None: it has no token yet"""


class State:
    """``apply`` trusts its records: what may be written is the store's to judge. ``keep``: committed steps whose token
    data stays."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self.next_group = 0
        self.next_trajectory = 0
        self.groups: dict[int, Group] = {}
        self.tracks: dict[int, Track] = {}
        self.bindings: dict[int, Binding] = {}
        self.commitments: dict[int, Commitment] = {}
        self.metrics: dict[int, dict[str, float]] = {}
        """of the newest steps"""
        self.committed = 0
        """0 before the first commit: steps count from 1"""
        self.fences: dict[ReplicaId, int] = {}
        self.stale = 0
        """groups dropped for the age of their tokens, ever"""

    def apply(self, record: Record) -> None:
        match record:
            case Grown(life, pieces, finished):
                self._grow(life, pieces, finished)
            case Scored(scores):
                for score in scores:
                    track = self.tracks[score.trajectory]
                    track.score = score
                    track.group.unscored -= 1
            case Made():
                self._make(record)
            case Binding(number, groups):
                self.bindings[number] = record
                for group in groups:
                    self.groups[group].bound = number
            case Metrics(number, metrics):
                self.metrics[number] = metrics
                self.metrics.pop(number - METRICS_KEPT, None)
            case Commitment(number):
                self.commitments[number] = record
                self.committed = number
                self._settle(number - self._keep)
            case Dropped(group, cause=cause):
                self.stale += cause is DropCause.STALE
                if group in self.groups:  # else it is history, carried on for the audit
                    self.bindings.pop(self.groups[group].bound or 0, None)
                    self._forget(group)
            case Fence(replica, incarnation):
                self.fences[replica] = incarnation
            case Settled():
                pass
            case Head(format, groups, trajectories):
                if format != FORMAT:
                    raise ValueError(f"trajectory log of format {format}; this version of rrl reads {FORMAT}")
                self.next_group, self.next_trajectory = groups, trajectories

    def _make(self, made: Made) -> None:
        group = Group(made, unscored=made.size)
        group.tracks = [Track(i, group) for i in range(made.first, made.first + made.size)]
        self.groups[made.group] = group
        self.tracks.update((track.id, track) for track in group.tracks)
        self.next_group = max(self.next_group, made.group + 1)
        self.next_trajectory = max(self.next_trajectory, made.first + made.size)

    def _grow(self, life: Life, pieces: Iterable[Piece], finished: Iterable[int]) -> None:
        for piece in pieces:
            track = self.tracks[piece.trajectory]
            track.pieces.append(piece)
            track.writer = life
            oldest = track.group.oldest
            track.group.oldest = piece.step if oldest is None else min(oldest, piece.step)
        for trajectory in finished:
            track = self.tracks[trajectory]
            track.finished, track.writer = True, life

    def _settle(self, number: int) -> None:
        for old in [n for n in self.bindings if n <= number]:
            for group in self.bindings.pop(old).groups:
                self._forget(group)
            self.commitments.pop(old, None)

    def _forget(self, group: int) -> None:
        for track in self.groups.pop(group).tracks:
            del self.tracks[track.id]

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
            yield group.made
            for track in group.tracks:
                if track.writer is not None:
                    yield Grown(track.writer, tuple(track.pieces), (track.id,) if track.finished else ())
            if scores := tuple(track.score for track in group.tracks if track.score is not None):
                yield Scored(scores)
        for number, metrics in self.metrics.items():
            yield Metrics(number, metrics)
        for number in sorted(self.bindings):
            yield self.bindings[number]
            if number in self.commitments:
                yield self.commitments[number]

    def bind(self, number: int, groups: tuple[int, ...]) -> Binding:
        """The digest is over every token, log-probability, version and score that the step will see."""
        tracks = self._tracks(groups)
        seen = hashlib.sha256(str(number).encode())
        for track in tracks:
            seen.update(encode((track.id, track.group.made.prompt, track.pieces, track.score)))
        oldest = (self.groups[group].oldest for group in groups)
        ages = [number - 1 - step for step in oldest if step is not None]
        return Binding(number, groups, len(tracks), seen.hexdigest(), self.stale, max([self.max_age, *ages]))

    def batch(self, number: int) -> PackedBatch:
        binding = self.bindings[number]
        prompts = tuple(self.groups[group].made.prompt for group in binding.groups)
        trajectories = tuple(as_packed(track) for track in self._tracks(binding.groups))
        return PackedBatch(
            number, binding.groups, binding.digest, prompts, trajectories, binding.stale, binding.max_age
        )

    def _tracks(self, groups: Iterable[int]) -> list[Track]:
        return [track for group in groups for track in self.groups[group].tracks]


# ── as others see them ─────────────────────────────────────────────────────────────────────────────────────────────
def as_item(track: Track, max_new_tokens: int) -> Item:
    """As a rollout gets it: with what earlier lives made of it."""
    made = track.group.made
    so_far = tuple(unpack(piece) for piece in track.pieces)
    return Item(track.id, made.group, unpack_tokens(made.prompt), so_far, max(0, max_new_tokens - track.length))


def as_packed(track: Track) -> PackedTrajectory:
    """As the trainer gets it; only of a scored one."""
    assert track.score is not None
    return PackedTrajectory(
        id=track.id,
        group=track.group.made.group,
        tokens=b"".join(piece.tokens for piece in track.pieces),
        logprobs=b"".join(piece.logprobs for piece in track.pieces),
        runs=tuple(
            (sum(piece.end - piece.offset for piece in pieces), *version)
            for version, pieces in groupby(track.pieces, lambda piece: (piece.step, piece.incarnation))
        ),
        reward=track.score.reward,
        training=track.score.training,
    )


def as_to_score(track: Track) -> ToScore:
    """As a reward replica gets it."""
    tokens = tuple(token for piece in track.pieces for token in unpack_tokens(piece.tokens))
    return ToScore(track.id, track.group.made.item, tokens)
