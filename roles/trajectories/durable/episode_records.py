"""The effect of episode records on the store's state and counts, and the records that a rewritten log needs.

If the process that makes an attempt dies in a job with ``on_death = "replay"``, the turns of the attempt become
*recorded* ones. Recorded turns stay in the state, and rollouts continue to extend those that are not complete. The next
attempt takes over each recorded turn that it asks for again. When this attempt finishes, the recorded turns that it has
not taken over are deleted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec.structs import asdict, replace

from ..extras import cut
from .groups import EpisodeState, Group, TrajectoryState, is_foreign, prompt_length, sampled_tokens, with_ancestors
from .records import (
    AttemptFailed,
    AttemptStarted,
    EpisodeFinished,
    EpisodesCounted,
    PackedSegment,
    Record,
    SegmentsAppended,
    TurnCreated,
    TurnEnded,
    TurnTaken,
    TurnUnused,
    pack_tokens,
)
from .trained_samples import divide_by_agent, samples, trainable_turns

EpisodeRecord = AttemptStarted | AttemptFailed | TurnCreated | TurnTaken | TurnUnused | TurnEnded | EpisodeFinished
"""The records that change one episode."""
FIGURES = {name: f"episodes_{name}" for name in ("finished", "retried", "replayed", "dropped")}
"""Metric names of fields of :class:`EpisodesCounted`. The name of any other field is also its metric name."""


class EpisodeRecords:
    """The fold over the records of episodes.

    Args:
        answers: The turns that rollouts extend, by number; this class adds and removes turns.
    """

    def __init__(self, answers: dict[int, TrajectoryState]) -> None:
        self._answers = answers
        self.counted = EpisodesCounted()
        self.changed: set[int] = set()
        """Turns that have grown, ended or been deleted since the reader of this set has cleared it."""

    def figures(self) -> dict[str, float]:
        """Return the counts of episodes and turns by metric name; empty until an episode is finished or dropped."""
        if self.counted == EpisodesCounted():
            return {}
        return {FIGURES.get(name, name): float(count) for name, count in asdict(self.counted).items()}

    def apply(self, record: EpisodeRecord, track: TrajectoryState) -> None:
        """Apply a record to its episode."""
        episode = episode_of(track)
        match record:
            case AttemptStarted():
                self._start(record, track.group, episode)
            case AttemptFailed(_, attempt, failures, _, replay):
                episode.attempt, episode.holder, episode.request, episode.failures = attempt, None, None, failures
                if replay:
                    episode.recorded = set(episode.turns)
                    self.changed |= episode.recorded
                else:
                    self._delete(episode, set(episode.turns))
            case TurnCreated(turn):
                self._answers[turn] = episode.turns[turn] = TrajectoryState(turn, track.group, turn=record)
                # Only in a rewritten log. A TurnTaken follows if the turn was taken over.
                if record.attempt < episode.attempt or episode.holder is None:
                    episode.recorded.add(turn)
            case TurnTaken(turn):
                episode.recorded.discard(turn)
                episode.turns[turn].unused = episode.turns[turn].delivered = False
                episode.turns[turn] = episode.turns.pop(turn)  # moved to the end: turns are in the order of requests
            case TurnUnused(turn, _, unused, delivered):
                episode.turns[turn].unused, episode.turns[turn].delivered = unused, delivered
            case TurnEnded(turn, _, length):
                self._end_turn(episode, episode.turns[turn], length)
            case EpisodeFinished(_, _, counted, reward, later, unused_turns):
                for turn_state in episode.turns.values():
                    turn_state.unused = turn_state.id in unused_turns
                track.finished, episode.counted, episode.awaits_reward = True, counted, later and reward is None
                self._delete(episode, episode.turns.keys() - with_ancestors(counted, episode.turns))
                for number in episode.turns.keys() - {*counted}:
                    self._answers.pop(number, None)  # rollouts must not extend an incomplete ancestor
                    self.changed.add(number)
                if not track.group.is_evaluated:
                    self._count_finished(track, episode)

    def grown(self, turn: TrajectoryState) -> None:
        """Note that segments were added to a turn, or that it is complete."""
        self.changed.add(turn.id)

    def forget(self, group: Group, *, dropped: bool) -> None:
        """Note that a group of episodes is deleted; ``dropped`` is False if it was trained."""
        self.changed.update(turn.id for turn in group.answers)
        if dropped:
            self.counted = replace(self.counted, dropped=self.counted.dropped + len(group.trajectories))

    def _start(self, record: AttemptStarted, group: Group, episode: EpisodeState) -> None:
        if group.is_evaluated:  # the counts are of the episodes that are trained
            pass
        elif episode.recorded:
            self.counted = replace(self.counted, replayed=self.counted.replayed + 1)
        elif episode.attempt:
            self.counted = replace(self.counted, retried=self.counted.retried + 1)
        episode.attempt, episode.holder, episode.request = record.attempt, record.incarnation, record.request
        if record.weights is not None:
            group.oldest = record.weights if group.oldest is None else min(group.oldest, record.weights)

    def _end_turn(self, episode: EpisodeState, turn: TrajectoryState, length: int) -> None:
        """Discard the tokens of a turn that were sampled after the first ``length``.

        If another turn continues after discarded tokens, it gets these tokens as given tokens.
        """
        assert turn.turn is not None
        whole, end = sampled_tokens(turn), prompt_length(turn) + length
        for other in episode.turns.values():
            created = other.turn
            if created is not None and created.parent == turn.id and created.offset > end:
                given = pack_tokens(whole[length : length + created.offset - end]) + created.given
                other.turn = replace(created, offset=end, given=given)
        turn.segments = list(_first(turn.segments, length))
        turn.finished, turn.truncated = True, False
        self.changed.add(turn.id)

    def _count_finished(self, track: TrajectoryState, episode: EpisodeState) -> None:
        episode.samples, drift = samples(track)
        counted = [episode.turns[number] for number in episode.counted]
        turns = [turn.turn for turn in counted if turn.turn is not None]
        before = self.counted
        self.counted = replace(
            before,
            finished=before.finished + 1,
            turns=before.turns + len(turns),
            branches=before.branches + len(episode.samples),
            given_tokens=before.given_tokens + sum(len(turn.given) // 4 for turn in turns),
            untrained_turns=before.untrained_turns + sum(is_foreign(turn) or turn.unused for turn in counted),
            token_drift=before.token_drift + drift,
        )

    def divide(self, track: TrajectoryState) -> None:
        """Divide the samples of a scored episode by agent, and count the turns that have no reward."""
        episode = episode_of(track)
        divide_by_agent(track)
        untrained = sum(turn.turn.agent not in episode.agents for turn in trainable_turns(episode) if turn.turn)
        self.counted = replace(self.counted, untrained_turns=self.counted.untrained_turns + untrained)

    def _delete(self, episode: EpisodeState, turns: Iterable[int]) -> None:
        for number in turns:
            del episode.turns[number]
            episode.recorded.discard(number)
            self._answers.pop(number, None)
            self.changed.add(number)


def records_of(track: TrajectoryState) -> Iterator[Record]:
    """Yield the records that restore a trajectory or turn, except the records of its creation and of its score."""
    if track.writer is not None:
        ended = (track.id,) if track.finished else ()
        yield SegmentsAppended(track.writer, tuple(track.segments), ended, ended if track.truncated else ())
    if (episode := track.episode) is None:
        return
    if episode.holder is None:
        if episode.attempt:
            yield AttemptFailed(track.id, episode.attempt, episode.failures, "", bool(episode.recorded))
    else:
        if episode.failures:
            yield AttemptFailed(track.id, episode.attempt - 1, episode.failures, "")
        yield AttemptStarted(track.id, episode.attempt, episode.holder, track.group.oldest, episode.request)
    for number, turn in episode.turns.items():
        assert turn.turn is not None
        yield turn.turn
        if number not in episode.recorded and turn.turn.attempt < episode.attempt:
            yield TurnTaken(number, track.id)
        if (turn.unused or turn.delivered) and not track.finished:
            yield TurnUnused(number, track.id, turn.unused, turn.delivered)
        yield from records_of(turn)
    if track.finished:
        unused = tuple(number for number, turn in episode.turns.items() if turn.unused)
        yield EpisodeFinished(track.id, episode.attempt, episode.counted, None, episode.awaits_reward, unused)


def _first(segments: Iterable[PackedSegment], length: int) -> Iterator[PackedSegment]:
    """Yield the segments that contain the first ``length`` sampled tokens, the last of them cut to this length."""
    for segment in segments:
        if segment.offset < length:
            size = 4 * (length - segment.offset)
            whole = segment.end <= length
            yield (
                segment
                if whole
                else replace(
                    segment,
                    tokens=segment.tokens[:size],
                    logprobs=segment.logprobs[:size],
                    digest=b"",
                    extras=cut(segment.extras, 0, length - segment.offset),
                )
            )


def episode_of(track: TrajectoryState) -> EpisodeState:
    """Return the episode of a trajectory that has one."""
    assert track.episode is not None
    return track.episode
