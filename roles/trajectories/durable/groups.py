"""Groups and trajectories whose data is stored, and how rollouts and reward replicas receive them.

In a job with agents, a trajectory is an *episode*: it has no tokens of its own, but turns. A *turn* is one sampled
answer. The *path* of a turn consists of the first ``offset`` tokens of its parent's path, the tokens that the turn was
given, and the sampled tokens, in this order. Turns are numbered apart from trajectories, from
:data:`..records.FIRST_TURN` on, and rollouts extend them as they extend trajectories.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator

import msgspec
from msgspec import Struct

from ....core.types import Incarnation
from ..extras import PackedExtras
from ..types import Item, Score, ToScore
from .records import GroupCreated, PackedSegment, TurnCreated, is_evaluated, unpack, unpack_tokens

_TOKEN_BYTES = 4
"""Bytes of a packed token."""


class TrajectoryState(Struct, eq=False):
    """A trajectory or turn whose data is still stored; see :class:`Group`."""

    id: int
    group: Group
    segments: list[PackedSegment] = []
    writer: Incarnation | None = None
    """Incarnation that appended the last segment."""
    finished: bool = False
    truncated: bool = False
    """True for an answer that the limit on its length cut."""
    score: Score | None = None
    turn: TurnCreated | None = None
    """The record that created the turn; None for a trajectory or episode."""
    unused: bool = False
    """True for a turn whose answer the agent has not used, as far as it is known now."""
    delivered: bool = False
    """True for a turn whose answer the agent has got, if an endpoint has said so."""
    asked_by: Incarnation | None = None
    """Incarnation that asked for the turn last; None if it did so at an earlier process of the store."""
    read_by: Incarnation | None = None
    """Incarnation that has got the end of the turn's answer from this process of the store; None if none has."""
    episode: EpisodeState | None = None
    """The attempts and turns of the episode; None for a turn, and in a job without agents."""

    @property
    def length(self) -> int:
        """Number of sampled tokens: those after the prompt, or after the given tokens of a turn; 0 for an episode."""
        return self.segments[-1].end if self.segments else 0

    @property
    def is_at_work(self) -> bool:
        """True for an episode whose newest attempt is being made."""
        return self.episode is not None and self.episode.holder is not None and not self.finished


class Run(Struct, frozen=True, gc=False):
    """Consecutive tokens of a sample that were all given, or all sampled under one version.

    ``tokens`` is int32 and ``logprobs`` float32. ``counts`` is True if the tokens are trained in this sample.
    """

    tokens: bytes
    logprobs: bytes
    version: tuple[int, int]
    counts: bool
    extras: PackedExtras = ()
    truncated: bool = False
    """True for the end of an answer that the limit on its length cut."""
    agent: str = ""
    """Name of the agent for which the tokens were sampled."""

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.tokens) // _TOKEN_BYTES


class EpisodeState(Struct, eq=False):
    """The attempts of an episode, the turns of its newest attempt, and the turns that this attempt may replay."""

    attempt: int = 0
    """Number of the newest attempt; 0 before the first."""
    holder: Incarnation | None = None
    """Incarnation that makes the newest attempt or has finished the episode with this attempt; None if the attempt
    failed. For an agent outside of the run, this is the incarnation that requested the episode for the agent."""
    request: str | None = None
    """Request of the agent outside of the run that makes the newest attempt; None if an agents replica makes it."""
    failures: int = 0
    """Number of attempts that count as failed."""
    turns: dict[int, TrajectoryState] = {}
    """Turns of the newest attempt, and recorded turns. Once the episode is finished, these are only the turns in
    ``counted`` and their ancestors."""
    recorded: set[int] = set()
    """Turns of earlier attempts, whose process died, that the newest attempt has not taken over."""
    counted: tuple[int, ...] = ()
    """Turns that were complete when the attempt finished the episode, in the order in which the attempt asked for them;
    empty until then."""
    awaits_reward: bool = False
    """True if the episode is finished and its reward comes later."""
    samples: list[list[Run]] = []
    """What the trainer reads of the finished episode (:mod:`.trained_samples`). It never changes once the group is
    scored."""
    agents: dict[str, float] = {}
    """What the trainer learns from, by agent, in a group with rewards by name; empty in any other group."""

    @property
    def made(self) -> list[TrajectoryState]:
        """The turns that the newest attempt has made or taken over."""
        return [turn for number, turn in self.turns.items() if number not in self.recorded]


class Group(Struct, eq=False):
    """A group whose data is stored, until the group is dropped or some steps after its own step are committed."""

    created: GroupCreated
    trajectories: list[TrajectoryState] = []
    unscored: int = 0
    """Number of trajectories of the group without a score."""
    bound: int | None = None
    """Training step that the group, or a part with the group, is bound to; None if neither is bound."""
    oldest: int | None = None
    """Training step of the oldest weights that sampled a token of the group, or with which an episode of the group was
    begun; None before the first token or episode."""
    guest_tokens: int = 0
    """Number of tokens that guests sampled; after a restart of the store it may be counted by last writers."""
    blamed: Counter[str] = msgspec.field(default_factory=Counter)
    """By the digest of a call of the group's agents, how many processes have ended right after such a call."""

    @property
    def is_evaluated(self) -> bool:
        """True for the group of one evaluated episode, which is never bound (:mod:`.evaluation_state`)."""
        return is_evaluated(self.created.group)

    @property
    def has_episodes(self) -> bool:
        """True if agents work on the group. Its prompt is empty, because agents write their own prompts."""
        return not self.created.prompt

    @property
    def answers(self) -> Iterator[TrajectoryState]:
        """The trajectories that rollouts extend: those of the group or, with agents, the turns of its episodes."""
        for track in self.trajectories:
            if track.episode is None:
                yield track
            else:
                yield from track.episode.turns.values()


def path_length(turn: TrajectoryState) -> int:
    """Return the number of tokens of the path of a turn."""
    return prompt_length(turn) + turn.length


def prompt_length(track: TrajectoryState) -> int:
    """Return the number of tokens before the sampled tokens of a trajectory or turn."""
    if track.turn is None:
        return len(track.group.created.prompt) // _TOKEN_BYTES
    return track.turn.offset + given_length(track.turn)


def given_length(turn: TurnCreated) -> int:
    """Return the number of tokens that a turn was given."""
    return len(turn.given) // _TOKEN_BYTES


def ancestry(turn: TrajectoryState, turns: dict[int, TrajectoryState]) -> list[tuple[TrajectoryState, int]]:
    """Return the turns that the path of a turn leads through, from the first to the turn itself.

    Each turn comes with the number of its own tokens, given and sampled, in the path. Turns without a token in the path
    are missing.
    """
    end = path_length(turn)
    path: list[tuple[TrajectoryState, int]] = []
    current: TrajectoryState | None = turn
    while current is not None and current.turn is not None:
        if end > current.turn.offset:
            path.append((current, end - current.turn.offset))
            end = current.turn.offset
        current = None if current.turn.parent is None else turns[current.turn.parent]
    return path[::-1]


def reached(turns: Collection[TrajectoryState], known: dict[int, TrajectoryState]) -> dict[int, int]:
    """Return, for each turn that others of these turns descend from, how many tokens of its path their paths share.

    If there are several, it is the largest number. A turn's number is greater than its parent's.
    """
    ids = {turn.id for turn in turns}
    shared: dict[int, int] = {}
    for number in sorted(known, reverse=True):
        created = known[number].turn
        if created is not None and created.parent is not None and (number in ids or number in shared):
            most = created.offset if number in ids else min(created.offset, shared[number])
            shared[created.parent] = max(most, shared.get(created.parent, 0))
    return shared


def continued(turns: Collection[TrajectoryState], known: dict[int, TrajectoryState]) -> set[int]:
    """Return the turns with a sampled token in the path of another one of these turns."""
    return {number for number, shared in reached(turns, known).items() if shared > prompt_length(known[number])}


def with_ancestors(turns: Iterable[int], known: dict[int, TrajectoryState]) -> set[int]:
    """Return these turns and all their ancestors, even ancestors that contribute no token to the turns' paths."""
    result: set[int] = set()
    for number in turns:
        current: int | None = number
        while current is not None and current not in result:
            result.add(current)
            created = known[current].turn
            current = None if created is None else created.parent
    return result


def sampled_tokens(track: TrajectoryState) -> tuple[int, ...]:
    """Return the sampled tokens of a trajectory or turn."""
    return tuple(token for segment in track.segments for token in unpack_tokens(segment.tokens))


def is_foreign(turn: TrajectoryState) -> bool:
    """Return whether a turn is not trained, because of how it is sampled or because its caller says so."""
    return turn.turn is not None and turn.turn.sampling is not None


def parent_of(turn: TrajectoryState) -> TrajectoryState:
    """Return the turn that a turn continues; the turn must have a parent."""
    assert turn.turn is not None
    assert turn.turn.parent is not None
    return _episode_of(turn).turns[turn.turn.parent]


def _path_before(turn: TrajectoryState, turns: dict[int, TrajectoryState]) -> tuple[int, ...]:
    """Return the tokens of a turn's path that precede the tokens sampled for this turn."""
    tokens: list[int] = []
    for each, count in ancestry(turn, turns):
        assert each.turn is not None
        own = unpack_tokens(each.turn.given) + sampled_tokens(each)
        tokens += own[:count]
    return tuple(tokens[: prompt_length(turn)])


# ── as other processes receive them ────────────────────────────────────────────────────────────────────────────────
def as_item(track: TrajectoryState, max_new_tokens: int) -> Item:
    """Return an unfinished trajectory or turn as a rollout receives it, with the segments it has so far."""
    created = track.group.created
    so_far = tuple(unpack(segment) for segment in track.segments)
    if track.turn is None:
        prompt, limit, sampling = unpack_tokens(created.prompt), max_new_tokens, None
    else:
        prompt, limit = _path_before(track, _episode_of(track).turns), track.turn.max_new
        sampling = track.turn.sampling
    return Item(track.id, created.group, prompt, so_far, max(0, limit - track.length), sampling)


def as_to_score(track: TrajectoryState) -> ToScore:
    """Return what a reward replica receives to score: a complete trajectory, or the last answer of an episode."""
    last = track
    if track.episode is not None:
        answers = [track.episode.turns[number] for number in track.episode.counted]
        last = next(turn for turn in reversed(answers) if not turn.unused)
    return ToScore(track.id, track.group.created.item, sampled_tokens(last), track.group.is_evaluated)


def new_segments(
    answers: dict[int, TrajectoryState],
    packed_segments: Iterable[PackedSegment],
    finished: Iterable[int],
    lost: set[int],
    max_new_tokens: int,
) -> tuple[list[PackedSegment], set[int]]:
    """Return the segments that an append adds to ``answers``, and the answers that it completes.

    Adds to ``lost`` the answers whose segments neither continue nor repeat the stored segments.
    """
    new: list[PackedSegment] = []
    lengths: dict[int, int] = {}
    limits: dict[int, int] = {}
    for packed in packed_segments:
        if packed.trajectory in lost:
            continue
        track = answers[packed.trajectory]
        limits[track.id] = _limit(track, max_new_tokens)
        length = lengths.get(track.id, track.length)
        if packed.offset == length and length < packed.end <= limits[track.id] and not track.finished:
            new.append(packed)
            lengths[track.id] = packed.end
        elif packed not in track.segments:
            lost.add(track.id)
    ends = {trajectory for trajectory, length in lengths.items() if length == limits[trajectory]}
    ends |= {t for t in finished if t not in lost and not answers[t].finished}
    return new, ends


def cut_answers(
    answers: dict[int, TrajectoryState],
    new: Iterable[PackedSegment],
    ends: Iterable[int],
    max_new_tokens: int,
    end_tokens: Collection[int],
) -> tuple[int, ...]:
    """Return those of the answers ``ends``, which are complete with the segments ``new``, that their limit cut.

    These are the answers with as many tokens as they may have, of which the last does not end an answer. So it does not
    matter which engine or program of the user's samples.
    """
    last = {segment.trajectory: segment for segment in new}
    found = []
    for number in sorted(ends):
        segments = answers[number].segments
        segment = last.get(number, segments[-1] if segments else None)
        limit = _limit(answers[number], max_new_tokens)
        if segment is not None and segment.end >= limit and unpack_tokens(segment.tokens)[-1] not in end_tokens:
            found.append(number)
    return tuple(found)


def _limit(track: TrajectoryState, max_new_tokens: int) -> int:
    """Return how many tokens an answer may have."""
    return max_new_tokens if track.turn is None else track.turn.max_new


def _episode_of(turn: TrajectoryState) -> EpisodeState:
    """Return the episode of a turn."""
    assert turn.turn is not None
    created = turn.group.created
    episode = turn.group.trajectories[turn.turn.episode - created.first].episode
    assert episode is not None
    return episode
