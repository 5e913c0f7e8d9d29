"""The durable state of the store, computed from its records. Leases are volatile and not part of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ....core.types import GUEST_ROLE, Incarnation, ReplicaId, role_of
from ..dispatch.lengths import Answer, Lengths
from ..dispatch.token_times import TokenTimes
from ..types import PackedPart, Score
from .episode_records import EpisodeRecord, EpisodeRecords, records_of
from .evaluation_state import EvaluationState
from .groups import EpisodeState, Group, TrajectoryState
from .records import (
    FIRST_TURN,
    FORMAT,
    MANY_GROUPS,
    NO_SIGNAL,
    READ_FORMATS,
    AnswersCounted,
    CallBlamed,
    DropCause,
    EpisodeFinished,
    EpisodesCounted,
    EvaluationAppended,
    EvaluationFinished,
    EvaluationScored,
    EvaluationStarted,
    Fence,
    GroupCreated,
    GroupDropped,
    Head,
    ItemsOrdered,
    LengthsLearned,
    LogFormatError,
    Metrics,
    Outcomes,
    Part,
    PartRetired,
    Record,
    ScoresRecorded,
    SegmentsAppended,
    StepCommitted,
    TimesObserved,
    TurnCreated,
    TurnsNumbered,
    is_evaluated,
    unpack_tokens,
)
from .trained_samples import content_digest, message_bytes, packed, score_of, token_ages, trained_tokens

METRICS_RETAINED_STEPS = 4096
"""Number of newest steps whose metrics are kept, so that a manager that was not running can read them later. If a step
takes 10 s, these are eleven hours of a run, in a few MB."""


class State:
    """The state that a log's records describe.

    Args:
        retained_steps: Number of committed steps whose token data is kept.
        max_new_tokens: Number of tokens at which answers are cut.
        retained_commits: Number of commits that are kept, with the digests of their checkpoints; at least
            ``retained_steps``.
    """

    def __init__(self, retained_steps: int, max_new_tokens: int, retained_commits: int = 0) -> None:
        self._retained_steps, self._retained_commits = retained_steps, max(retained_steps, retained_commits)
        self.lengths = Lengths(max_new_tokens)
        """The expected lengths of answers, learned from the answers of the run."""
        self._token_times: dict[ReplicaId, tuple[int, TokenTimes]] = {}
        """By rollout, the number of its newest incarnation with observed times, and these times."""
        self.counted = AnswersCounted()
        """Counts of the run's answers, except those of groups without signal."""
        self.item_order: list[int] = []
        """Items of the next groups; if empty, the next item has the number of the next group."""
        self.next_group = 0
        self.next_trajectory = 0
        self.groups: dict[int, Group] = {}
        self.next_turn = FIRST_TURN
        self.trajectories: dict[int, TrajectoryState] = {}
        """The trajectories that are scored and trained, by number; in a job with agents, the episodes."""
        self.answers: dict[int, TrajectoryState] = {}
        """The answers that rollouts extend, by number: the trajectories or, in a job with agents, the turns."""
        self.episode_records = EpisodeRecords(self.answers)
        self.evaluations = EvaluationState(self.trajectories, self._forget_evaluated)
        self.steps: dict[int, list[Part]] = {}
        """The parts of each step whose token data is kept. The last part of a step that is bound completely lacks no
        group."""
        self.commitments: dict[int, StepCommitted] = {}
        self.metrics: dict[int, dict[str, float]] = {}
        """Metrics of the newest steps, by step."""
        self.unbound = 0
        """Number of groups that are bound to no step and no part."""
        self.committed = 0
        """Newest committed step; 0 before the first commit, since steps are numbered from 1."""
        self.fences: dict[ReplicaId, int] = {}
        self.stale = 0
        """Number of groups that the run has dropped because their tokens were too old."""
        self.unscored = 0
        """Number of groups that the run has dropped because an answer could not be scored."""
        self.refilled = Outcomes()
        """What came of the groups without signal that were dropped since the newest step was bound completely."""

    def apply(self, record: Record) -> None:
        """Apply one record without checking it: the store decides which records may be written.

        Raises:
            LogFormatError: The record is the head of a log in another format.
        """
        match record:
            case SegmentsAppended():
                self._append_segments(record)
            case ScoresRecorded(scores):
                self._record_scores(scores)
            case GroupCreated():
                self._create_group(record)
            case Part(number, groups=groups):
                self.steps.setdefault(number, []).append(record)
                for group in groups:
                    self.unbound -= self.groups[group].bound is None
                    self.groups[group].bound = number
                if not record.lacking:
                    self.refilled = Outcomes()
                    tracks = self._trajectories_of(self.groups_of(number))
                    self._count(trained=len(tracks), trained_tokens=sum(map(trained_tokens, tracks)))
            case Metrics(number, metrics):
                self.metrics[number] = metrics
                self.metrics.pop(number - METRICS_RETAINED_STEPS, None)
            case StepCommitted(number):
                self.commitments[number] = record
                self.committed = number
                for step in list(self.commitments)[: -self._retained_commits]:
                    del self.commitments[step]
                self._retire(number - self._retained_steps)
            case GroupDropped(group, cause=cause):
                self.stale += cause is DropCause.STALE
                self.unscored += cause is DropCause.UNSCORED
                self.refilled += record.outcomes
                if group in self.groups:  # if not, only the audit needs the record
                    if cause is DropCause.NO_SIGNAL:  # trained answers are compared with those of groups with signal
                        tracks = self.groups[group].trajectories
                        self._count(ended=-len(tracks), ended_tokens=-sum(map(trained_tokens, tracks)))
                    if cause is DropCause.STALE:
                        running = [track.length for track in self.groups[group].answers if not track.finished]
                        self._count(ended=len(running), ended_tokens=sum(running))
                    self._observe_lengths(self.groups[group], cut=True)
                    self.steps.pop(self.groups[group].bound or 0, None)
                    self._forget(group, dropped=cause is not DropCause.NO_SIGNAL)
            case Fence(replica, oldest_allowed):
                self.fences[replica] = oldest_allowed
            case LengthsLearned(learned):
                self.lengths = Lengths(learned.limit, learned)
            case AnswersCounted():
                self.counted = record
            case TimesObserved(incarnation, observed):
                times = self.times_of(incarnation)
                times.add(observed)
                self._token_times[incarnation.replica] = incarnation.number, times
            case ItemsOrdered(items):
                self.item_order = list(items)
            case _ if isinstance(record, EpisodeRecord):
                self._apply_to_episode(record)
            case CallBlamed(group, call):
                blamed = self.trajectories[group].group if is_evaluated(group) else self.groups[group]
                blamed.blamed[call] += 1
            case EpisodesCounted():
                self.episode_records.counted = record
            case TurnsNumbered(number):
                self.next_turn = number
            case EvaluationStarted() | EvaluationAppended() | EvaluationScored() | EvaluationFinished():
                self.evaluations.apply(record)
            case PartRetired():
                pass
            case Head(format, groups, trajectories):
                if format not in READ_FORMATS:
                    older = ", ".join(map(str, READ_FORMATS[:-1]))
                    raise LogFormatError(
                        f"has format {format}, but this version of rrl reads formats {older} and {FORMAT} only; use the"
                        " version of rrl that wrote it, or start a new run"
                    )
                self.next_group, self.next_trajectory = groups, trajectories

    def _count(self, ended: int = 0, ended_tokens: int = 0, trained: int = 0, trained_tokens: int = 0) -> None:
        before = self.counted
        self.counted = AnswersCounted(
            before.ended + ended,
            before.ended_tokens + ended_tokens,
            before.trained + trained,
            before.trained_tokens + trained_tokens,
        )

    def times_of(self, incarnation: Incarnation) -> TokenTimes:
        """Return the times of a rollout's engine; a new object if nothing was observed of this incarnation."""
        number, times = self._token_times.get(incarnation.replica, (0, None))
        return times if times is not None and number == incarnation.number else TokenTimes()

    def _create_group(self, created: GroupCreated) -> None:
        if self.item_order:
            self.item_order.pop(0)
        group = Group(created, unscored=created.size)
        group.trajectories = [TrajectoryState(i, group) for i in range(created.first, created.first + created.size)]
        self.groups[created.group] = group
        self.unbound += 1
        if group.has_episodes:
            for track in group.trajectories:
                track.episode = EpisodeState()
        self.trajectories.update((track.id, track) for track in group.trajectories)
        self.answers.update((track.id, track) for track in group.answers)
        self.next_group = max(self.next_group, created.group + 1)
        self.next_trajectory = max(self.next_trajectory, created.first + created.size)

    def _append_segments(self, appended: SegmentsAppended) -> None:
        for segment in appended.segments:
            track = self.answers[segment.trajectory]
            track.segments.append(segment)
            track.writer = appended.incarnation
            if role_of(appended.incarnation.replica) == GUEST_ROLE:
                track.group.guest_tokens += segment.end - segment.offset
            oldest = track.group.oldest
            track.group.oldest = segment.step if oldest is None else min(oldest, segment.step)
            if track.turn is not None:
                self.episode_records.grown(track)
        ended = tokens = 0
        groups: set[int] = set()
        for trajectory in appended.finished:
            track = self.answers[trajectory]
            track.finished, track.writer = True, appended.incarnation
            track.truncated = trajectory in appended.truncated
            if track.turn is not None:  # turns are counted when their episode is finished
                self.episode_records.grown(track)
                continue
            tokens += track.length
            ended += 1
            groups.add(track.group.created.group)
        if ended:
            self._count(ended=ended, ended_tokens=tokens)
        for number in sorted(groups):
            self._observe_lengths(self.groups[number], cut=False)

    def _record_scores(self, scores: Iterable[Score]) -> None:
        for score in scores:
            if is_evaluated(score.trajectory):
                self.evaluations.score((score,))
                continue
            track = self.trajectories[score.trajectory]
            track.score = score
            track.group.unscored -= 1
            if track.episode is not None:
                self._divide_by_agent(track.group)

    def _divide_by_agent(self, group: Group) -> None:
        """Divide the samples of a group's scored episodes by agent, once one of them has rewards by name.

        An episode with one number, for example for a failure, is then compared with those that have rewards by name.
        """
        if any(track.score is not None and track.score.agents for track in group.trajectories):
            for track in group.trajectories:
                if track.score is None or track.episode is None or track.episode.agents:
                    continue
                before = trained_tokens(track)
                self.episode_records.divide(track)
                self._count(ended_tokens=trained_tokens(track) - before)

    def _observe_lengths(self, group: Group, *, cut: bool) -> None:
        """Learn the lengths of a group once all its trajectories are complete, or if it is dropped before (``cut``).

        Nothing is learned from episodes, because the length of a turn depends on the agent's request, not on the group.
        """
        if group.has_episodes:
            return
        complete = all(track.finished for track in group.trajectories)
        if complete != cut:
            answers = [Answer(track.length, track.finished) for track in group.trajectories]
            self.lengths.observe(unpack_tokens(group.created.prompt), answers)

    def _retire(self, number: int) -> None:
        for old in [n for n in self.steps if n <= number]:
            for group in self.groups_of(old):
                self._forget(group, dropped=False)
            del self.steps[old]

    def _forget(self, number: int, *, dropped: bool) -> None:
        group = self.groups.pop(number)
        if group.has_episodes:
            self.episode_records.forget(group, dropped=dropped)
        self.unbound -= group.bound is None
        self._forget_tracks(group)

    def _forget_evaluated(self, group: Group) -> None:
        self.episode_records.forget(group, dropped=False)
        self._forget_tracks(group)

    def _forget_tracks(self, group: Group) -> None:
        for track in group.answers:
            self.answers.pop(track.id, None)
        for track in group.trajectories:
            del self.trajectories[track.id]

    def _apply_to_episode(self, record: EpisodeRecord) -> None:
        track = self.trajectories[record.episode]
        self.episode_records.apply(record, track)
        match record:
            case TurnCreated(turn):
                self.next_turn = max(self.next_turn, turn + 1)
            case EpisodeFinished(number, _, _, reward):
                if is_evaluated(number):
                    self.evaluations.answers[number].finished = True
                else:
                    self._count(ended=1, ended_tokens=trained_tokens(track))
                if reward is not None:
                    self._record_scores((score_of(track, reward),))

    @property
    def latest(self) -> int:
        """Newest step that is bound completely, or the newest committed step if no step is bound."""
        newest = max(self.steps, default=0)
        return newest if self.is_bound(newest) else max(newest - 1, self.committed)

    def is_bound(self, number: int) -> bool:
        """Return whether a step, whose token data is kept, is bound completely."""
        return number in self.steps and not self.steps[number][-1].lacking

    def groups_of(self, number: int, index: int | None = None) -> tuple[int, ...]:
        """Return the groups of a part, or of all parts of the step if ``index`` is None."""
        parts = self.steps[number] if index is None else [self.steps[number][index]]
        return tuple(group for part in parts for group in part.groups)

    @property
    def open_parts(self) -> Sequence[Part]:
        """Parts of the open step, which is the step after :attr:`latest`."""
        return self.steps.get(self.latest + 1, ())

    def lacking(self, groups_per_batch: int) -> int:
        """Return how many groups the open step lacks; a step without parts lacks ``groups_per_batch`` groups."""
        parts = self.open_parts
        return parts[-1].lacking if parts else groups_per_batch

    @property
    def tokens_per_group(self) -> float:
        """Mean number of tokens that a group of the newest steps and parts took; 0 before the first part.

        These are its trained tokens, and its share of the tokens of groups that were dropped without signal.
        """
        parts = [part for parts in self.steps.values() for part in parts]
        groups = sum(len(part.groups) for part in parts)
        return sum(sum(part.ages.values()) + part.refilled.tokens for part in parts) / groups if groups else 0.0

    @property
    def max_age(self) -> int:
        """Age, in training steps, of the oldest token of everything that is bound.

        Each part records the maximum over itself and everything that was bound before, and the parts of the newest
        committed step are always retained.
        """
        return max((part.max_age for parts in self.steps.values() for part in parts), default=0)

    def head(self) -> Head:
        """Return the record with which a new log that describes this state begins."""
        return Head(FORMAT, self.next_group, self.next_trajectory)

    def records(self) -> Iterator[Record]:
        """Yield the records, except the head, of the shortest log that results in this state."""
        for replica, incarnation in self.fences.items():
            yield Fence(replica, incarnation)
        if self.next_turn > FIRST_TURN:
            yield TurnsNumbered(self.next_turn)
        for group in self.groups.values():
            yield group.created
            yield from (CallBlamed(group.created.group, call) for call in group.blamed.elements())
            for track in group.trajectories:
                yield from records_of(track)
            if scores := tuple(track.score for track in group.trajectories if track.score is not None):
                yield ScoresRecorded(scores)
        for number, metrics in self.metrics.items():
            yield Metrics(number, metrics)
        for number in sorted(self.commitments.keys() | self.steps.keys()):
            yield from self.steps.get(number, ())
            if number in self.commitments:
                yield self.commitments[number]
        for id, (number, times) in self._token_times.items():
            yield TimesObserved(Incarnation(id, number), times.observations())
        if self.refilled.groups:  # after the parts, each of which begins these sums anew
            yield GroupDropped(MANY_GROUPS, 0, NO_SIGNAL, DropCause.NO_SIGNAL, self.refilled)
        if self.item_order:
            yield ItemsOrdered(tuple(self.item_order))
        yield from self.evaluations.records()
        if self.episode_records.counted != EpisodesCounted():
            yield self.episode_records.counted
        yield self.counted
        yield LengthsLearned(
            self.lengths.state()
        )  # last, because these records replace the counts and lengths that a reader derives from the records above

    # ── binding ────────────────────────────────────────────────────────────────────────────────────────────────────
    def next_part(self, groups: tuple[int, ...], lacking: int) -> Part:
        """Return the record of the next part of the open step; after this part the step lacks ``lacking`` groups.

        The digest of the part covers every token, log-probability, version and score that the step will train on, and
        the previous part's digest.
        """
        number, before = self.latest + 1, self.open_parts
        tracks = self._trajectories_of(groups)
        ages = token_ages(number, tracks)
        digest = content_digest(f"{number} {len(before)} {before[-1].digest if before else ''}", tracks)
        max_age = max([self.max_age, *ages])
        return Part(
            number,
            len(before),
            groups,
            len(tracks),
            digest,
            lacking,
            self.stale,
            max_age,
            ages,
            self.unscored,
            Outcomes() if lacking else self.refilled,
        )

    def part(self, number: int, index: int | None) -> PackedPart:
        """Return a part of a step, or all its parts as one if ``index`` is None; the step is then bound completely."""
        last, groups = self.steps[number][-1 if index is None else index], self.groups_of(number, index)
        prompts = tuple(self.groups[group].created.prompt for group in groups)
        trajectories = tuple(one for track in self._trajectories_of(groups) for one in packed(track))
        return PackedPart(
            number,
            groups,
            last.digest,
            prompts,
            trajectories,
            index or 0,
            not last.lacking,
            last.stale,
            last.max_age,
            last.unscored,
        )

    def message_bytes(self, group: int) -> int:
        """Return an upper bound of the bytes that a complete group takes in a batch or part."""
        stored = self.groups[group]
        return message_bytes(stored.trajectories, stored.created.prompt)

    def _trajectories_of(self, groups: Iterable[int]) -> list[TrajectoryState]:
        return [track for group in groups for track in self.groups[group].trajectories]
