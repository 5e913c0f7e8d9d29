"""Record types of the trajectory store's log, and an audit that computes the fate of every trajectory from them.

A log is read completely or not at all: a record of an unknown kind is an error. Tokens are packed as int32 and
log-probabilities as float32, which takes 8 bytes per token in memory and on disk. The audit does not use the store's
own state, so that it can find errors in that state.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum
from itertools import islice
from typing import Any

import msgspec
from msgspec import Struct

from ....core.types import Incarnation, ReplicaId, Version
from ..dispatch.lengths import LengthState
from ..dispatch.token_times import Observed
from ..types import Sampling, Score, Segment

FORMAT = 2
"""Format number of the log. Format 2 renamed the record tags; a log of any other format is refused."""


FIRST_TURN = 2**40
"""Number of the first turn: turns and trajectories share leases and appends, and no run has as many trajectories."""


class LogFormatError(ValueError):
    """The log was written by a version of rrl whose records this version cannot read."""


class PackedSegment(Struct, frozen=True, array_like=True, gc=False):
    """A :class:`Segment` with ``tokens`` packed as int32 and ``logprobs`` as float32, in the machine's byte order."""

    trajectory: int
    offset: int
    tokens: bytes
    logprobs: bytes
    step: int
    incarnation: int

    @property
    def end(self) -> int:
        """Number of tokens after the prompt up to the end of this segment."""
        return self.offset + len(self.tokens) // 4


class Head(Struct, frozen=True, tag="head", array_like=True):
    """The first record of a log: its format, and how many groups and trajectories had been numbered before it."""

    format: int
    groups: int
    trajectories: int


class GroupCreated(Struct, frozen=True, tag="group_created", array_like=True):
    """Creation of a group of ``size`` trajectories, numbered from ``first`` on, for the prompt of item ``item``."""

    group: int
    first: int
    size: int
    item: int
    prompt: bytes
    expected: tuple[float, float] | None = None
    """Mean and variance of the mean logarithm of its answers' lengths, as expected when it was created; None if lengths
    were not expected to differ."""


class SegmentsAppended(Struct, frozen=True, tag="segments_appended", array_like=True):
    """Segments that an incarnation appended, and the trajectories that were complete afterwards."""

    incarnation: Incarnation
    segments: tuple[PackedSegment, ...]
    finished: tuple[int, ...]


class ScoresRecorded(Struct, frozen=True, tag="scores_recorded", array_like=True):
    """Scores that a reward replica posted."""

    scores: tuple[Score, ...]


class DropCause(StrEnum):
    """Why a group was dropped, for decisions and counts."""

    STALE = "stale"
    """A token of the group is, or would be, sampled with weights that are too old."""
    UNSCORED = "unscored"
    """An answer of the group could not be scored."""
    FAILED = "failed"
    """Too many attempts at an episode of the group failed."""
    OTHER = "other"
    """Any other cause."""


class GroupDropped(Struct, frozen=True, tag="group_dropped", array_like=True):
    """Removal of a group and its ``trajectories`` trajectories without training on them."""

    group: int
    trajectories: int
    reason: str
    """Explanation for people. The audit counts the dropped trajectories for each reason."""
    cause: DropCause = DropCause.OTHER


class Part(Struct, frozen=True, tag="part", array_like=True):
    """The choice of some groups of step ``number``, which never changes; parts are numbered from 0 by ``index``.

    ``trajectories`` is how many trajectories the groups have. ``digest`` covers their content and the digest of the
    part before.
    """

    number: int
    index: int
    groups: tuple[int, ...]
    trajectories: int
    digest: str
    lacking: int
    """Number of groups that the step lacks after this part; 0 for its last part, which a :class:`Binding` follows."""
    stale: int
    """Number of groups that the run had dropped as stale before this part."""
    max_age: int
    """Age, in training steps, of the oldest token of this part and everything that was bound before it."""
    ages: dict[int, int]
    """Number of tokens of the part by their age in training steps."""
    unscored: int = 0
    """Number of groups that the run had dropped before this part, because an answer could not be scored."""


class Binding(Struct, frozen=True, tag="binding", array_like=True):
    """The choice of the groups that step ``number`` trains, which never changes.

    ``trajectories`` is how many trajectories the groups have. ``digest`` covers their content; if the step was bound in
    parts, it is the digest of the last part.
    """

    number: int
    groups: tuple[int, ...]
    trajectories: int
    digest: str
    stale: int = 0
    """Number of groups that the run had dropped as stale before this binding."""
    max_age: int = 0
    """Age, in training steps, of the oldest token of this binding and all earlier ones of the run."""
    ages: dict[int, int] = {}
    """Number of tokens of the step by their age in training steps; empty in the log of an older version of rrl."""
    unscored: int = 0
    """Number of groups that the run had dropped before this binding, because an answer could not be scored."""


class BindingRetired(Struct, frozen=True, tag="binding_retired", array_like=True):
    """A binding (the groups of a step) whose token data was deleted after much later commits. Kept for the audit."""

    number: int
    groups: tuple[int, ...]
    trajectories: int
    ages: dict[int, int] = {}
    """As in :class:`Binding`."""
    parts: tuple[int, ...] = ()
    """Number of groups of each part; empty if the step was bound as a whole."""


class StepCommitted(Struct, frozen=True, tag="step_committed", array_like=True):
    """The commit of step ``number``: checkpoint and consumed batch together."""

    number: int
    incarnation: Incarnation
    manifest: dict[str, Any]
    digest: str


class Metrics(Struct, frozen=True, tag="metrics", array_like=True):
    """Metrics of a step, written just before the record of the step's commit, and kept longer than that record."""

    number: int
    metrics: dict[str, float]


class LengthsLearned(Struct, frozen=True, tag="lengths_learned", array_like=True):
    """All that was learned of the lengths of answers up to this record (:mod:`..dispatch.lengths`)."""

    state: LengthState


class AnswersCounted(Struct, frozen=True, tag="answers_counted", array_like=True):
    """Numbers of answers and tokens of the run up to this record, whose own records may be deleted."""

    ended: int = 0
    """Answers that ended or were cut by ``max_new_tokens``, and running ones whose group was dropped as stale."""
    ended_tokens: int = 0
    trained: int = 0
    """Answers of the steps that were bound completely."""
    trained_tokens: int = 0


class TimesObserved(Struct, frozen=True, tag="times_observed", array_like=True):
    """What appends have shown of the times of a rollout's engine; times of its earlier incarnations do not count."""

    incarnation: Incarnation
    observed: Observed


class AttemptStarted(Struct, frozen=True, tag="attempt_started", array_like=True):
    """Begin of an attempt at an episode by an incarnation. The turns of all earlier attempts are deleted.

    ``weights`` is the step of the weights that the episode's first turn is expected to be sampled with; None if it is
    not known.
    """

    episode: int
    attempt: int
    incarnation: Incarnation
    weights: int | None = None


class AttemptFailed(Struct, frozen=True, tag="attempt_failed", array_like=True):
    """End of an attempt without a result. ``failures`` is how many attempts at the episode count as failed."""

    episode: int
    attempt: int
    failures: int
    reason: str
    """Explanation for people."""


class TurnCreated(Struct, frozen=True, tag="turn_created", array_like=True):
    """A turn of an attempt: it keeps ``offset`` tokens of its parent's path and continues with ``given`` tokens."""

    turn: int
    episode: int
    attempt: int
    request: str
    """Identifies the agent's request within the attempt."""
    parent: int | None
    offset: int
    given: bytes
    max_new: int
    """Maximum number of tokens to sample."""
    messages: tuple[str, ...]
    """Hashes of the messages of the request, from the first on, each with all messages before it."""
    options: str = ""
    """Text of the endpoint, which the store only keeps."""
    sampling: Sampling | None = None
    """How to sample a turn that is not trained; None for any other turn."""


class TurnsNumbered(Struct, frozen=True, tag="turns_numbered", array_like=True):
    """The number of the next turn: earlier turns may be deleted, but their numbers are not used again."""

    next: int


class EpisodeFinished(Struct, frozen=True, tag="episode_finished", array_like=True):
    """End of an episode with a result, to which ``turns`` count. Its score is ``reward`` unless that is None."""

    episode: int
    attempt: int
    turns: tuple[int, ...]
    reward: float | None = None


class ItemsOrdered(Struct, frozen=True, tag="items_ordered", array_like=True):
    """The items of the next groups, in the order in which the groups are created (``[sampling] window``)."""

    items: tuple[int, ...]


class Fence(Struct, frozen=True, tag="fence", array_like=True):
    """Refusal, from this record on, of the requests of all incarnations of ``replica`` before ``incarnation``."""

    replica: ReplicaId
    incarnation: int


Record = (
    Head
    | GroupCreated
    | SegmentsAppended
    | ScoresRecorded
    | GroupDropped
    | Part
    | Binding
    | BindingRetired
    | Metrics
    | StepCommitted
    | Fence
    | LengthsLearned
    | TimesObserved
    | AnswersCounted
    | ItemsOrdered
    | AttemptStarted
    | AttemptFailed
    | TurnCreated
    | TurnsNumbered
    | EpisodeFinished
)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)
encode = _encoder.encode


def decode(payload: bytes) -> Record:
    """Decode one record.

    Raises:
        LogFormatError: The record is of a kind that this version of rrl does not know. No record is skipped.
    """
    try:
        record: Record = _decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise LogFormatError(f"contains a record that this version of rrl cannot read: {error}") from error
    return record


# ── packing ────────────────────────────────────────────────────────────────────────────────────────────────────────
def pack(segment: Segment) -> PackedSegment:
    """Pack a segment.

    Raises:
        OverflowError: A token does not fit into an int32.
        ValueError: ``tokens`` and ``logprobs`` differ in length, or a log-probability is not finite.
    """
    if len(segment.tokens) != len(segment.logprobs):
        raise ValueError(f"{len(segment.tokens)} tokens have {len(segment.logprobs)} log-probabilities")
    if not math.isfinite(sum(segment.logprobs)):
        raise ValueError("a log-probability is not finite")
    tokens, logprobs = pack_tokens(segment.tokens), array("f", segment.logprobs).tobytes()
    version = segment.version
    return PackedSegment(segment.trajectory, segment.offset, tokens, logprobs, version.step, version.incarnation)


def pack_tokens(tokens: tuple[int, ...]) -> bytes:
    """Pack tokens as int32."""
    return array("i", tokens).tobytes()


def unpack_tokens(packed: bytes) -> tuple[int, ...]:
    """Return the tokens that :func:`pack_tokens` packed."""
    return tuple(array("i", packed))


def unpack(packed: PackedSegment) -> Segment:
    """Unpack a segment."""
    tokens, logprobs = unpack_tokens(packed.tokens), tuple(array("f", packed.logprobs))
    return Segment(packed.trajectory, packed.offset, tokens, logprobs, Version(packed.step, packed.incarnation))


class Audit(Struct, frozen=True):
    """The number of trajectories for each fate: trained, dropped or still open.

    The store is consistent if ``made == trained + sum(dropped.values()) + open``, no group is in two steps, and the
    groups of a step that was bound in parts are those of its parts.
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
    """Groups of each part, of every step that was ever bound in parts; the newest step may lack groups."""
    ages: dict[int, int] = {}
    """Number of tokens in committed steps by their age in training steps. Steps whose tokens were deleted by a version
    of rrl that did not count them are missing."""


def audit(records: Iterable[Record]) -> Audit:
    """Compute the audit from the records of a log."""
    made = committed = stale = 0
    sizes: dict[int, int] = {}
    steps: dict[int, tuple[int, ...]] = {}
    parts: dict[int, tuple[tuple[int, ...], ...]] = {}
    tokens = _TokenCounts()
    ages: dict[int, Mapping[int, int]] = {}
    max_ages: dict[int, int] = {}
    in_step: Counter[int] = Counter()
    dropped: Counter[str] = Counter()
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
            case EpisodeFinished(episode, _, turns):
                tokens.finish_episode(episode, turns)
            case Part(number, index, groups):
                parts[number] = (*parts.get(number, ())[:index], groups)
            case Binding(number, groups, trajectories):
                steps[number], in_step[number] = groups, trajectories
                ages[number], max_ages[number] = tokens.ages(number, groups), record.max_age
            case BindingRetired(number, groups, trajectories, recorded_ages, part_sizes):
                steps[number], in_step[number], ages[number] = groups, trajectories, recorded_ages
                if part_sizes:
                    left = iter(groups)
                    parts[number] = tuple(tuple(islice(left, size)) for size in part_sizes)
                committed = max(committed, number)
            case StepCommitted(number):
                committed = max(committed, number)
            case GroupDropped(group, trajectories, reason, cause):
                sizes.pop(group, None)
                dropped[reason] += trajectories
                stale += trajectories if cause is DropCause.STALE else 0
                for number in [n for n in steps if n > committed and group in steps[n]]:
                    del steps[number]
                for number in [n for n in parts if n > committed and any(group in part for part in parts[n])]:
                    del parts[number]
            case _:
                pass
    for number, groups in steps.items():
        if number <= committed:
            for group in groups:
                sizes.pop(group, None)
    trained = sum(count for number, count in in_step.items() if number <= committed)
    trained_ages: Counter[int] = Counter()
    for number, counts in ages.items():
        if number <= committed:
            trained_ages.update(counts)
    max_age = max([*trained_ages, *(age for number, age in max_ages.items() if number <= committed)], default=0)
    return Audit(made, trained, dict(dropped), stale, sum(sizes.values()), committed, steps, max_age, parts,
                 dict(sorted(trained_ages.items())))  # fmt: skip


class _TokenCounts:
    """Counts the tokens of each trajectory by the training step of the weights that sampled them."""

    def __init__(self) -> None:
        self._trajectories: dict[int, range] = {}
        self._tokens: dict[int, Counter[int]] = {}
        self._turns: dict[int, TurnCreated] = {}
        self._sampled: dict[int, list[int]] = {}
        """For each token of a turn the training step of the weights that sampled it."""

    def add_group(self, created: GroupCreated) -> None:
        self._trajectories[created.group] = range(created.first, created.first + created.size)

    def add_turn(self, created: TurnCreated) -> None:
        self._turns[created.turn] = created
        self._sampled[created.turn] = []

    def add_segments(self, segments: Iterable[PackedSegment]) -> None:
        for segment in segments:
            if segment.trajectory in self._turns:
                self._sampled[segment.trajectory] += [segment.step] * (segment.end - segment.offset)
                continue
            count = self._tokens.setdefault(segment.trajectory, Counter())
            count[segment.step] += segment.end - segment.offset

    def finish_episode(self, episode: int, turns: Iterable[int]) -> None:
        """Count the tokens of an episode: those that the path of any counted turn has."""
        used: dict[int, int] = {}
        for number in turns:
            if not self._sampled[number]:
                continue
            turn: TurnCreated | None = self._turns[number]
            end = turn.offset + len(turn.given) // 4 + len(self._sampled[number]) if turn else 0
            while turn is not None:
                own = max(0, end - turn.offset - len(turn.given) // 4)
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
