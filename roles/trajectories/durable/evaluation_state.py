"""The evaluations in the store's state: the answers of the open evaluation, and the results of finished ones.

Answers of an evaluation belong to no group, so no step can train on them, and expected lengths are not learned from
them.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from ....core.types import Incarnation
from ..types import Score
from .records import (
    FIRST_EVALUATED,
    EvaluationAppended,
    EvaluationFinished,
    EvaluationScored,
    EvaluationStarted,
    PackedSegment,
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
    reward: float | None = None
    failed: bool = False
    """True if the answer has no score and will never have one."""

    @property
    def length(self) -> int:
        """Number of sampled tokens."""
        return self.segments[-1].end if self.segments else 0

    @property
    def settled(self) -> bool:
        """True if the answer has a score, or will never have one."""
        return self.failed or self.reward is not None


class EvaluationState:
    """The open evaluation and the results of earlier ones, computed from the records of evaluations."""

    def __init__(self) -> None:
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
            case EvaluationStarted(_, _, first, prompts, samples):
                self.open = record
                count = prompts * samples
                self.answers = {first + i: EvaluatedAnswer(first + i, i // samples) for i in range(count)}
                self.unsettled, self.next = count, first + count
            case EvaluationAppended(incarnation, segments, finished):
                for segment in segments:
                    answer = self.answers[segment.trajectory]
                    answer.segments.append(segment)
                    answer.writer = incarnation
                for number in finished:
                    self.answers[number].finished, self.answers[number].writer = True, incarnation
            case EvaluationScored(scores, failed):
                for score in scores:
                    self.answers[score.trajectory].reward = score.reward
                for number in failed:
                    self.answers[number].failed = True
                self.unsettled -= len(scores) + len(failed)
            case EvaluationFinished(step):
                self.results[step] = record
                if len(self.results) > RETAINED_RESULTS:
                    del self.results[min(self.results)]
                self.open, self.answers, self.unsettled, self.next = None, {}, 0, record.next

    def records(self) -> Iterator[EvaluationRecord]:
        """Yield the records that result in this state."""
        yield from self.results.values()
        if self.open is None:
            return
        yield self.open
        for answer in self.answers.values():
            if answer.segments or answer.finished:
                ended = (answer.id,) if answer.finished else ()
                yield EvaluationAppended(answer.writer, tuple(answer.segments), ended)
            if answer.reward is not None:
                yield EvaluationScored((Score(answer.id, answer.reward, answer.reward),))
            elif answer.failed:
                yield EvaluationScored((), (answer.id,))

    def metrics(self) -> dict[str, float]:
        """Return the result of the open evaluation, whose answers are all settled, by name (docs/evaluation.md).

        Answers without a score count only in ``unscored``, and prompts without a scored answer do not count.
        """
        by_item: dict[int, list[float]] = {}
        scored = [answer for answer in self.answers.values() if answer.reward is not None]
        for answer in scored:
            by_item.setdefault(answer.item, []).append(answer.reward or 0.0)
        metrics = {"count": float(len(scored))}
        if unscored := len(self.answers) - len(scored):
            metrics["unscored"] = float(unscored)
        if scored and self.open is not None:
            right = [[reward >= RIGHT_REWARD for reward in rewards] for rewards in by_item.values()]
            metrics["reward"] = sum(sum(rewards) for rewards in by_item.values()) / len(scored)
            metrics["pass@1"] = sum(sum(one) / len(one) for one in right) / len(right)
            if self.open.samples > 1:
                metrics[f"pass@{self.open.samples}"] = sum(map(any, right)) / len(right)
            metrics["completion_len"] = sum(answer.length for answer in scored) / len(scored)
        return metrics
