"""The time that a run lost, by cause and by stage, and its effective time over a sliding window. Pure.

The time between two commits consists of the time that counts for the step (``committed_steps``) and of lost time. The
lost time is divided in this order:

1. the interruption of the trainer, by its stages;
2. training that was discarded, as stage ``replay`` of the interruption that ended it;
3. interruptions of other replicas, by their stages, and times without a manager. If these intervals add up to more
   than the remaining lost time, each of them gets a part of this time, in proportion to its length;
4. the remaining lost time as cause ``slow steps``: the step took longer than the median of the undisturbed steps.

The losses add up to the time from the first ``train`` to the newest commit, less the time that counts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence

from msgspec import Struct

from ....core.types import TRAINER
from .committed_steps import CommittedStep, CommittedSteps, StepMedians
from .interruptions import STAGES, Interruption

REPLAY = "replay"
ALL_STAGES = (*STAGES, REPLAY)
OTHER = "other"
"""Stage of losses for which the journal has no stages."""
SLOW_STEPS = "slow steps"
MANAGER = "manager"
"""Cause of losses while no manager ran."""
WINDOW_S = 300.0
"""Shortest window (s) of the sliding ETTR: the five minutes of RobustRL's figures (docs/sources.md)."""
MAX_WINDOWS = 240
"""Maximum number of points of the sliding ETTR. A run that is longer than this many windows gets longer windows."""
MIN_WINDOWS = 10
"""Minimum number of points of the sliding ETTR. A run that is shorter than this many windows gets shorter windows."""


class Piece(Struct, frozen=True):
    """An interval (s) in which time was lost."""

    since: float
    until: float
    cause: str
    stage: str

    def within(self, since: float, until: float) -> float:
        """Return the seconds of this interval between two times."""
        return max(0.0, min(self.until, until) - max(self.since, since))


Losses = dict[str, dict[str, float]]
"""Lost seconds by cause and stage."""


def lost_time(
    steps: CommittedSteps, interruptions: Iterable[Interruption], away: Sequence[tuple[float, float]]
) -> Losses:
    """Return the lost seconds by cause and stage, largest cause first.

    ``away`` contains the intervals in which no manager ran.
    """
    medians, ended = steps.medians, steps.ended
    if medians is None or ended is None:
        return {}
    own: list[Piece] = []
    others = [Piece(since, until, MANAGER, OTHER) for since, until in away]
    for interruption in interruptions:
        kept = own if interruption.replica == TRAINER else others
        kept += [Piece(since, until, interruption.cause, stage) for stage, since, until in interruption.stages(ended)]
    own.sort(key=lambda piece: piece.since)
    others.sort(key=lambda piece: piece.since)
    losses: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for step, of_trainer, of_others in zip(
        steps.steps, _by_step(steps.steps, own), _by_step(steps.steps, others), strict=True
    ):
        for cause, stage, seconds in _divide(step, medians, of_trainer, of_others):
            losses[cause][stage] += seconds
    in_order = sorted(losses.items(), key=lambda item: -sum(item[1].values()))
    return {
        cause: {stage: stages[stage] for stage in (*ALL_STAGES, OTHER) if stages.get(stage)}
        for cause, stages in in_order
    }


def _by_step(steps: Sequence[CommittedStep], pieces: Sequence[Piece]) -> Iterable[list[Piece]]:
    """Yield for each step the pieces that overlap it. Steps and pieces must be in the order of their times."""
    active: list[Piece] = []
    following = 0
    for step in steps:
        while following < len(pieces) and pieces[following].since < step.at:
            active.append(pieces[following])
            following += 1
        active = [piece for piece in active if piece.until > step.since]
        yield active


def _divide(
    step: CommittedStep, medians: StepMedians, of_trainer: Sequence[Piece], of_others: Sequence[Piece]
) -> Iterable[tuple[str, str, float]]:
    """Yield (cause, stage, seconds) of the time lost between the previous commit and the commit of ``step``."""
    left = step.at - step.since - step.useful_s(medians)
    for piece in of_trainer:
        seconds = min(left, piece.within(step.since, step.at))
        if seconds > 0:
            yield piece.cause, piece.stage, seconds
            left -= seconds
    for attempt in step.discarded:
        seconds = min(left, attempt.until - attempt.since)
        if seconds > 0:
            yield attempt.ended_by.cause, REPLAY, seconds
            left -= seconds
    overlaps = [(piece, seconds) for piece in of_others if (seconds := piece.within(step.since, step.at)) > 0]
    total = sum(seconds for _, seconds in overlaps)
    if overlaps and left > 0:
        share = min(1.0, left / total)
        for piece, seconds in overlaps:
            yield piece.cause, piece.stage, share * seconds
        left -= share * total
    if left > 0:
        yield SLOW_STEPS, OTHER, left


class SlidingPoint(Struct, frozen=True, array_like=True):
    """The estimated ETTR (``share``) of one window of the run; the window ends at ``at`` (s)."""

    at: float
    share: float


def sliding_ettr(steps: CommittedSteps) -> tuple[float, list[SlidingPoint]]:
    """Return the length of the window (s), and the estimated ETTR of windows that end at regular intervals.

    The first window begins with the first ``train``, and the last window ends with the newest commit. The result is
    (0, []) if no step is undisturbed.
    """
    medians = steps.medians
    if medians is None or steps.began is None or steps.wall_s <= 0:
        return 0.0, []
    window_s = min(max(WINDOW_S, steps.wall_s / MAX_WINDOWS), steps.wall_s / MIN_WINDOWS)
    times, totals = [steps.began], [0.0]
    for step in steps.steps:
        useful = step.useful_s(medians)
        since, until = max(step.attempt_since, times[-1]), max(step.attempt_until, times[-1])
        times += [since, until]
        totals += [totals[-1], totals[-1] + useful]

    def total(at: float) -> float:
        index = bisect_right(times, at) - 1
        if index + 1 >= len(times):
            return totals[-1]
        span_s = times[index + 1] - times[index]
        part = (at - times[index]) / span_s if span_s else 0.0
        return totals[index] + part * (totals[index + 1] - totals[index])

    count = min(MAX_WINDOWS, max(MIN_WINDOWS, round(2 * steps.wall_s / window_s)))
    first, last = steps.began + window_s, steps.began + steps.wall_s
    points = (first + (last - first) * index / (count - 1) for index in range(count))
    return window_s, [SlidingPoint(at, min(1.0, (total(at) - total(at - window_s)) / window_s)) for at in points]
