"""The evaluations in the store's state: the answers of the open evaluation, and the results of finished ones.

Answers of an evaluation belong to no group, so no step can train on them, and expected lengths are not learned from
them. In a job with agents each answer is an episode. The rules of episodes and turns need a group, so the episode has
one of its own, which is not among the store's groups and has the episode's number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from statistics import fmean

from msgspec import Struct

from ....core.types import Incarnation
from ..types import Score
from .episode_records import records_of
from .groups import EpisodeState, Group, TrajectoryState
from .records import (
    FIRST_EVALUATED,
    CallBlamed,
    EvaluationAppended,
    EvaluationFinished,
    EvaluationScored,
    EvaluationStarted,
    GroupCreated,
    PackedSegment,
    Record,
)

RETAINED_RESULTS = 4096
"""Number of newest results that are kept. A manager that was not running when they were recorded gets them later."""
RIGHT_REWARD = 1.0
"""Minimum reward with which an answer counts as right."""

EvaluationRecord = EvaluationStarted | EvaluationAppended | EvaluationScored | EvaluationFinished


class EvaluatedAnswer(Struct, eq=False):
    """An answer of the open evaluation."""

    id: int
    item: int
    """Item of the evaluation's task."""
    segments: list[PackedSegment] = []
    writer: Incarnation | None = None
    """Incarnation that appended the last segment."""
    finished: bool = False
    score: Score | None = None
    failed: bool = False
    """True if the answer has no score and will never have one."""
    episode: TrajectoryState | None = None
    """The episode of an agent; None in a job without agents, and once the answer has failed."""

    @property
    def length(self) -> int:
        """Number of sampled tokens; those of the complete turns of an episode."""
        if self.episode is not None and self.episode.episode is not None:
            turns = self.episode.episode.turns
            return sum(turns[number].length for number in self.episode.episode.counted)
        return self.segments[-1].end if self.segments else 0

    @property
    def settled(self) -> bool:
        """True if the answer has a score, or will never have one."""
        return self.failed or self.score is not None


class EvaluationState:
    """The open evaluation and the results of earlier ones, computed from the records of evaluations.

    Args:
        episodes: All episodes by number; this class adds those of the open evaluation.
        forget: Removes the episode of a group, and its turns.
    """

    def __init__(self, episodes: dict[int, TrajectoryState], forget: Callable[[Group], None]) -> None:
        self._episodes, self._forget = episodes, forget
        self.open: EvaluationStarted | None = None
        """The evaluation that was started last, if it is not finished."""
        self.answers: dict[int, EvaluatedAnswer] = {}
        """Answers of the open evaluation by number."""
        self.unsettled = 0
        """Number of answers of the open evaluation that are not settled."""
        self.results: dict[int, EvaluationFinished] = {}
        """Results by step, in the order of the steps."""
        self.next = FIRST_EVALUATED

    def apply(self, record: EvaluationRecord) -> None:
        """Apply one record of the log."""
        match record:
            case EvaluationStarted(_, _, first, prompts, samples, agents):
                self._close()
                self.open = record
                count = prompts * samples
                self.answers = {first + i: EvaluatedAnswer(first + i, i // samples) for i in range(count)}
                self.unsettled, self.next = count, first + count
                for answer in self.answers.values() if agents else ():
                    answer.episode = self._episodes[answer.id] = _new_episode(answer)
            case EvaluationAppended(incarnation, segments, finished):
                for segment in segments:
                    answer = self.answers[segment.trajectory]
                    answer.segments.append(segment)
                    answer.writer = incarnation
                for number in finished:
                    self.answers[number].finished, self.answers[number].writer = True, incarnation
            case EvaluationScored(scores, failed):
                self.score(scores)
                for number in failed:
                    self._fail(self.answers[number])
                self.unsettled -= len(failed)
            case EvaluationFinished(step):
                self.results[step] = record
                if len(self.results) > RETAINED_RESULTS:
                    del self.results[min(self.results)]
                self._close()
                self.next = record.next

    def score(self, scores: Iterable[Score]) -> None:
        """Note the scores of answers that had none."""
        for score in scores:
            answer = self.answers[score.trajectory]
            answer.score = score
            self.unsettled -= 1
            if answer.episode is not None:
                answer.episode.score = score

    def _fail(self, answer: EvaluatedAnswer) -> None:
        answer.failed = True
        if answer.episode is not None:
            self._forget(answer.episode.group)
            answer.episode = None

    def _close(self) -> None:
        for answer in self.answers.values():
            if answer.episode is not None:
                self._forget(answer.episode.group)
        self.open, self.answers, self.unsettled = None, {}, 0

    def allows(self, weights: int | None) -> bool:
        """Return whether a rollout with the weights of a step may extend turns of the open evaluation."""
        return self.open is not None and (self.open.agents == "outside" or weights == self.open.step)

    def accepts(self, segment: PackedSegment) -> bool:
        """Return whether the open evaluation may have tokens of the weight version of a segment."""
        started = self.open
        if started is None or started.agents == "outside":
            return started is not None
        return (segment.step, segment.incarnation) == (started.step, started.incarnation)

    def records(self) -> Iterator[Record]:
        """Yield the records that result in this state."""
        yield from self.results.values()
        if self.open is None:
            return
        yield self.open
        for answer in self.answers.values():
            if answer.episode is not None:
                yield from (CallBlamed(answer.id, call) for call in answer.episode.group.blamed.elements())
                yield from records_of(answer.episode)
            elif answer.segments or answer.finished:
                ended = (answer.id,) if answer.finished else ()
                yield EvaluationAppended(answer.writer, tuple(answer.segments), ended)
            if answer.score is not None:
                yield EvaluationScored((answer.score,))
            elif answer.failed:
                yield EvaluationScored((), (answer.id,))

    def metrics(self, source: Callable[[int], str], is_cut: Callable[[EvaluatedAnswer], bool]) -> dict[str, float]:
        """Return the result of the open evaluation so far, by name (docs/evaluation.md).

        Answers that cannot be scored count only in ``unscored``, and prompts without a scored answer do not count.
        ``source`` returns the name of the prompt file of an item; empty if there is only one source. ``is_cut`` tells
        whether the limit on its length cut a scored answer.
        """
        by_item: dict[int, list[Score]] = {}
        scored = [answer for answer in self.answers.values() if answer.score is not None]
        for answer in scored:
            if answer.score is not None:
                by_item.setdefault(answer.item, []).append(answer.score)
        metrics = {"count": float(len(scored))}
        if unscored := sum(answer.failed for answer in self.answers.values()):
            metrics["unscored"] = float(unscored)
        if scored and self.open is not None:
            metrics |= _rewards(list(by_item.values()), self.open.samples)
            metrics["completion_len"] = fmean(answer.length for answer in scored)
            metrics["truncated"] = fmean(map(is_cut, scored))
            sources = {item: source(item) for item in by_item}
            for name in sorted({*sources.values()} - {""}):
                figures = _rewards([scores for item, scores in by_item.items() if sources[item] == name], 1)
                metrics |= {f"{figure}_source_{name}": figures[figure] for figure in ("reward", "pass@1")}
        return metrics


def _rewards(prompts: list[list[Score]], samples: int) -> dict[str, float]:
    """Return the figures of the scores of some prompts, each with at least one of ``samples`` scores."""
    scores = [score for prompt in prompts for score in prompt]
    figures = {"reward": fmean(score.reward for score in scores)}
    for name in sorted({name for score in scores for name in score.parts}):
        figures[f"reward_{name}"] = fmean(score.parts[name] for score in scores if name in score.parts)
    figures["pass@1"] = fmean(fmean(map(_is_right, prompt)) for prompt in prompts)
    complete = [prompt for prompt in prompts if len(prompt) == samples]
    if samples > 1 and complete:
        figures[f"avg@{samples}"] = fmean(score.reward for prompt in complete for score in prompt)
        figures[f"pass@{samples}"] = fmean(any(map(_is_right, prompt)) for prompt in complete)
    return figures


def _is_right(score: Score) -> bool:
    return score.reward >= RIGHT_REWARD


def _new_episode(answer: EvaluatedAnswer) -> TrajectoryState:
    group = Group(GroupCreated(answer.id, answer.id, 1, answer.item, b""), unscored=1)
    track = TrajectoryState(answer.id, group, episode=EpisodeState())
    group.trajectories = [track]
    return track
