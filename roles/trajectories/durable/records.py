"""Record types of the trajectory store's log.

A log is read completely or not at all: a record of an unknown kind is an error. Tokens are packed as int32 and
log-probabilities as float32, which takes 8 bytes per token in memory and on disk.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Literal

import msgspec
from msgspec import Struct

from ....core.run_spec import ExtraSpec
from ....core.types import Incarnation, ReplicaId, Version
from ...models.rewards import Reward
from ..dispatch.lengths import LengthState
from ..dispatch.token_times import Observed
from ..extras import PackedExtras, pack_extras
from ..types import Sampling, Score, Segment

FORMAT = 6
"""Format number of the log. In format 6 a turn has one hash of its conversation, and the name of its agent."""
READ_FORMATS = (4, 5, FORMAT)
"""Formats that can be read; a log of any other format is refused. Format 4 and 5 lack only fields that have defaults,
and their turns have a hash up to each message."""


FIRST_TURN = 2**40
"""Number of the first turn. Turns and trajectories share leases and appends, so their numbers must differ. No run has
as many trajectories."""


FIRST_EVALUATED = 2**50
"""Number from which on the answers of evaluations are numbered. They share leases and appends with trajectories and
turns, so all their numbers must differ."""


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
    digest: bytes = b""
    extras: PackedExtras = ()

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
    expected: float | None = None
    """Mean logarithm of the answers' lengths, as expected when the group was created; None if lengths were not expected
    to differ."""
    source: str = ""
    """Name of the prompt file ([[task.files]])."""


class SegmentsAppended(Struct, frozen=True, tag="segments_appended", array_like=True):
    """Segments that an incarnation appended, and the trajectories that these segments completed."""

    incarnation: Incarnation
    segments: tuple[PackedSegment, ...]
    finished: tuple[int, ...]
    truncated: tuple[int, ...] = ()
    """Those of ``finished`` that the limit on their length cut."""


class ScoresRecorded(Struct, frozen=True, tag="scores_recorded", array_like=True):
    """Scores that a reward replica posted."""

    scores: tuple[Score, ...]


class DropCause(StrEnum):
    """Why a group was dropped, for decisions and counts."""

    STALE = "stale"
    """A token of the group is, or would be, sampled with weights that are too old."""
    UNSCORED = "unscored"
    """An answer of the group could not be scored."""
    NO_SIGNAL = "no_signal"
    """All answers of the group have the same training reward (``[sampling] refill``)."""
    FAILED = "failed"
    """Too many attempts at an episode of the group failed."""
    OTHER = "other"
    """Any other cause."""


class Outcomes(Struct, frozen=True, array_like=True):
    """What came of some complete groups: sums over their answers or, with agents, their episodes."""

    groups: int = 0
    answers: int = 0
    reward: float = 0.0
    training: float = 0.0
    truncated: int = 0
    """Answers that a limit cut, and episodes with such an answer in a sample."""
    tokens: int = 0
    """Sampled tokens."""
    rewards: dict[str, tuple[int, float]] = {}
    """Number and sum of further rewards: of each part of the reward by its name, and of each source of prompts by
    ``source_<name>``."""

    def __add__(self, other: Outcomes) -> Outcomes:
        rewards = dict(self.rewards)
        for name, (count, total) in other.rewards.items():
            before = rewards.get(name, (0, 0.0))
            rewards[name] = before[0] + count, before[1] + total
        return Outcomes(
            self.groups + other.groups,
            self.answers + other.answers,
            self.reward + other.reward,
            self.training + other.training,
            self.truncated + other.truncated,
            self.tokens + other.tokens,
            rewards,
        )


NO_SIGNAL = "no signal: all answers of the group have the same training reward ([sampling] refill)"
"""Reason for dropping a group that has no gradient."""
MANY_GROUPS = -1
"""The ``group`` of a :class:`GroupDropped` that stands for all groups without signal, in a log that was rewritten."""


class GroupDropped(Struct, frozen=True, tag="group_dropped", array_like=True):
    """Removal of a group and its ``trajectories`` trajectories without training on them."""

    group: int
    trajectories: int
    reason: str
    """Explanation for people. The audit counts the dropped trajectories for each reason."""
    cause: DropCause = DropCause.OTHER
    outcomes: Outcomes = Outcomes()
    """What came of a group without signal; of :data:`MANY_GROUPS`, of those since the newest step that was bound
    completely."""


class Part(Struct, frozen=True, tag="part", array_like=True):
    """The choice of some or all groups of step ``number``, which never changes; ``index`` numbers the parts from 0.

    ``trajectories`` is how many trajectories the groups have. ``digest`` covers their content and the digest of the
    previous part.
    """

    number: int
    index: int
    groups: tuple[int, ...]
    trajectories: int
    digest: str
    lacking: int
    """Number of groups that the step lacks after this part; 0 for its last part, which binds the step."""
    stale: int
    """Number of groups that the run had dropped as stale before this part."""
    max_age: int
    """Age, in training steps, of the oldest token of this part and of all groups that the run bound before it."""
    ages: dict[int, int]
    """Number of tokens of the part by their age in training steps."""
    unscored: int = 0
    """Number of groups that the run had dropped before this part, because an answer could not be scored."""
    refilled: Outcomes = Outcomes()
    """In the last part of a step: what came of the groups without signal that were dropped since the last part of the
    previous step."""


class PartRetired(Struct, frozen=True, tag="part_retired", array_like=True):
    """A part whose token data was deleted after later commits. It is kept for the audit."""

    number: int
    index: int
    groups: tuple[int, ...]
    trajectories: int
    ages: dict[int, int]
    """Number of tokens of the part by their age in training steps."""


class StepCommitted(Struct, frozen=True, tag="step_committed", array_like=True):
    """The commit of step ``number`` and all steps since the previous commit: of their batches and of the checkpoint."""

    number: int
    incarnation: Incarnation
    manifest: dict[str, Any]
    digest: str


class Metrics(Struct, frozen=True, tag="metrics", array_like=True):
    """Metrics of a step, written just before the record of the step's commit, and kept longer than that record."""

    number: int
    metrics: dict[str, float]


class LengthsLearned(Struct, frozen=True, tag="lengths_learned", array_like=True):
    """All that was learned about the lengths of answers up to this record (:mod:`..dispatch.lengths`)."""

    state: LengthState


class AnswersCounted(Struct, frozen=True, tag="answers_counted", array_like=True):
    """Counts of the run's answers and tokens up to this record. The records of these answers may be deleted."""

    ended: int = 0
    """Answers that ended or were cut by ``max_new_tokens``, and running answers whose group was dropped as stale."""
    ended_tokens: int = 0
    trained: int = 0
    """Answers of the steps that were bound completely."""
    trained_tokens: int = 0


class TimesObserved(Struct, frozen=True, tag="times_observed", array_like=True):
    """Times of a rollout's engine, observed in its appends. Times of earlier incarnations do not count."""

    incarnation: Incarnation
    observed: Observed


class AttemptStarted(Struct, frozen=True, tag="attempt_started", array_like=True):
    """Beginning of an attempt at an episode by an incarnation.

    ``weights`` is the step of the weights that the episode's first turn is expected to be sampled with; None if it is
    not known.
    """

    episode: int
    attempt: int
    incarnation: Incarnation
    weights: int | None = None
    request: str | None = None
    """The request by which an agent outside of the run got the episode; None if an agents replica makes the attempt.
    The attempt of an agent outside of the run does not end with the incarnation."""


class AttemptFailed(Struct, frozen=True, tag="attempt_failed", array_like=True):
    """End of an attempt without a result. ``failures`` is how many attempts at the episode count as failed."""

    episode: int
    attempt: int
    failures: int
    reason: str
    """Explanation for people."""
    replay: bool = False
    """True if the turns become recorded ones, which the next attempt may take over; otherwise they are deleted."""


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
    hashes: str | tuple[str, ...]
    """Hash of the conversation; up to format 5, the hashes of the conversation up to each of its messages."""
    options: str = ""
    """Text from the endpoint, which the store keeps but does not read."""
    sampling: Sampling | None = None
    """How to sample a turn that is not trained; None for any other turn."""
    agent: str = ""
    """Name of the agent that made the request."""

    @property
    def conversation(self) -> str:
        """Hash of all messages of the request; empty for a plain prompt."""
        return self.hashes if isinstance(self.hashes, str) else self.hashes[-1] if self.hashes else ""


class TurnTaken(Struct, frozen=True, tag="turn_taken", array_like=True):
    """The newest attempt at an episode has taken over a recorded turn."""

    turn: int
    episode: int


class TurnUnused(Struct, frozen=True, tag="turn_unused", array_like=True):
    """Whether the agent has used the answer of a turn, as far as it is known now."""

    turn: int
    episode: int
    unused: bool = True
    """True if the agent has not got the answer, or has made the same call again."""
    delivered: bool = False
    """True if the agent has got the answer."""


class TurnEnded(Struct, frozen=True, tag="turn_ended", array_like=True):
    """End of the answer of a turn after ``length`` sampled tokens; tokens that were sampled later are discarded."""

    turn: int
    episode: int
    length: int


class TurnsNumbered(Struct, frozen=True, tag="turns_numbered", array_like=True):
    """The number of the next turn: earlier turns may be deleted, but their numbers are not used again."""

    next: int


class EpisodeFinished(Struct, frozen=True, tag="episode_finished", array_like=True):
    """End of an episode with a result.

    ``turns`` are the complete turns of the attempt. ``reward`` is the score of the episode; None if another record has
    the score.
    """

    episode: int
    attempt: int
    turns: tuple[int, ...]
    reward: Reward | None = None
    later: bool = False
    """True if the reward comes later, so that no reward replica scores the episode."""
    unused: tuple[int, ...] = ()
    """The turns in ``turns`` whose answers the agent has not used. They are not trained."""


class CallBlamed(Struct, frozen=True, tag="call_blamed", array_like=True):
    """A process ended right after an agent of this group had made a call, whose meaning has the digest ``call``."""

    group: int
    call: str


class EpisodesCounted(Struct, frozen=True, tag="episodes_counted", array_like=True):
    """Counts of the run's episodes and turns up to this record. The records of these episodes may be deleted."""

    finished: int = 0
    retried: int = 0
    """Attempts that began an episode again without turns of an earlier attempt."""
    replayed: int = 0
    """Attempts that could take over turns of an earlier attempt."""
    dropped: int = 0
    turns: int = 0
    """Complete turns of the finished attempts."""
    branches: int = 0
    """Samples of the finished episodes: leaves of their trees of turns."""
    given_tokens: int = 0
    """Given tokens of the turns that ``turns`` counts."""
    untrained_turns: int = 0
    """Number of the turns in ``turns`` that were sampled from another policy, whose answers were not used, or whose
    agents have no reward."""
    token_drift: int = 0
    """Trained tokens that differ, or whose context differs, from what the engine had. It must be 0."""


AnsweredBy = Literal["", "own", "outside"]
"""The agents whose episodes are evaluated: those of the run, or those outside of it; empty in a job without agents."""


class EvaluationStarted(Struct, frozen=True, tag="evaluation_started", array_like=True):
    """Start of the evaluation of the weights of step ``step`` that the trainer's ``incarnation`` published.

    The answers are numbered from ``first`` on: ``samples`` answers to the first prompt, followed by ``samples`` answers
    to the next prompt, and so on. An unfinished earlier evaluation is abandoned.

    With ``agents``, each answer is an episode: by agents of the run, or by agents outside of it. Outside agents answer
    with the weights of the time. Then ``step`` is the step that was committed at the start, and ``incarnation`` is 0.
    """

    step: int
    incarnation: int
    first: int
    prompts: int
    samples: int
    agents: AnsweredBy = ""


class EvaluationAppended(Struct, frozen=True, tag="evaluation_appended", array_like=True):
    """Segments of answers of the evaluation, and the answers that were complete afterwards."""

    incarnation: Incarnation | None
    segments: tuple[PackedSegment, ...]
    finished: tuple[int, ...]


class EvaluationScored(Struct, frozen=True, tag="evaluation_scored", array_like=True):
    """Scores of answers of the evaluation. The answers in ``failed`` could not be scored and never get a score."""

    scores: tuple[Score, ...]
    failed: tuple[int, ...] = ()


class EvaluationFinished(Struct, frozen=True, tag="evaluation_finished", array_like=True):
    """The result of the evaluation of the committed step ``step``.

    The answers of the next evaluation are numbered from ``next`` on.
    """

    step: int
    incarnation: int
    metrics: dict[str, float]
    next: int


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
    | PartRetired
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
    | TurnTaken
    | TurnUnused
    | TurnEnded
    | TurnsNumbered
    | EpisodeFinished
    | CallBlamed
    | EpisodesCounted
    | EvaluationStarted
    | EvaluationAppended
    | EvaluationScored
    | EvaluationFinished
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
def pack(segment: Segment, extras: Mapping[str, ExtraSpec]) -> PackedSegment:
    """Pack a segment, whose extras must be those that the job declares.

    Raises:
        OverflowError: A token does not fit into an int32.
        TypeError: An extra is not of type bytes.
        ValueError: ``tokens`` and ``logprobs`` differ in length, a log-probability is not finite, or the extras are not
            as declared.
    """
    if len(segment.tokens) != len(segment.logprobs):
        raise ValueError(
            f"the number of tokens is {len(segment.tokens)}, but the number of log-probabilities is"
            f" {len(segment.logprobs)}; they must be equal"
        )
    if not math.isfinite(sum(segment.logprobs)):
        raise ValueError("a log-probability is not finite")
    tokens, logprobs = pack_tokens(segment.tokens), array("f", segment.logprobs).tobytes()
    version = segment.version
    return PackedSegment(
        segment.trajectory,
        segment.offset,
        tokens,
        logprobs,
        version.step,
        version.incarnation,
        segment.digest,
        pack_extras(segment.extras, len(segment.tokens), extras),
    )


def is_evaluated(number: int) -> bool:
    """Return whether a number is that of an answer of an evaluation, or of its group."""
    return number >= FIRST_EVALUATED


def pack_tokens(tokens: tuple[int, ...]) -> bytes:
    """Pack tokens as int32."""
    return array("i", tokens).tobytes()


def unpack_tokens(packed: bytes) -> tuple[int, ...]:
    """Return the tokens that :func:`pack_tokens` packed."""
    return tuple(array("i", packed))


def unpack(packed: PackedSegment) -> Segment:
    """Unpack a segment."""
    tokens, logprobs = unpack_tokens(packed.tokens), tuple(array("f", packed.logprobs))
    version = Version(packed.step, packed.incarnation)
    extras = {name: data for name, _, data in packed.extras}
    return Segment(packed.trajectory, packed.offset, tokens, logprobs, version, packed.digest, extras)
