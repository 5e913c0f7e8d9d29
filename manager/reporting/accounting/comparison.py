"""The comparison of two runs at equal steps and at equal times, and of the keys of their job specs. Pure.

It ends where the shorter of the two runs ends, or has come to.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from msgspec import Struct

from ..step_metrics import StepRow

POINTS = 8
"""Number of equal parts of the range that both runs have; the rewards in each part are averaged."""
REWARD = "reward"
"""Name of the reported reward; the names of its parts and sources begin with it."""


class Place(Struct, frozen=True):
    """What a run had reached at a step, or after a time."""

    step: int
    """Newest committed step; 0 before the first."""
    train_s: float
    """Seconds that the trainer had spent in the phase ``train`` at the commit of this step."""
    wall_s: float
    """Seconds from the first ``train`` to the commit of this step."""
    rewards: dict[str, float]
    """Means of the rewards of the steps since the previous place, by the metric's name; empty if there were none."""
    evaluation: dict[str, float]
    """The newest evaluation; empty if there was none."""


class Point(Struct, frozen=True):
    """A step or a time that both runs have reached."""

    at: float
    """The step, or the time (s)."""
    runs: list[Place]


class ComparedEvaluation(Struct, frozen=True):
    """The evaluations of one step."""

    step: int
    runs: list[dict[str, float]]


class ChangedKey(Struct, frozen=True):
    """A key of job.toml that differs."""

    key: str
    values: list[Any]
    """Its value in each run, with defaults; null where it is not set."""


class Comparison(Struct, frozen=True):
    """Two runs at equal steps and times. All lists of two have the runs in the order of the command line."""

    by_step: list[Point]
    by_training_time: list[Point]
    """Points at equal times of the trainer in its phase ``train``."""
    by_wall_time: list[Point]
    """Points at equal times since the first ``train``, interruptions included."""
    evaluations: list[ComparedEvaluation]
    """The steps that both runs have evaluated."""
    keys: list[ChangedKey]
    missing: list[str]
    """Sentences about what cannot be compared."""


class Course(Struct, frozen=True):
    """What is compared of one run."""

    rows: Sequence[StepRow]
    """Its rows, in order."""
    began: float | None
    """Time (s) of the first ``train``; None before."""
    job: Mapping[str, Any] | None
    """Every key of its job.toml with its value; None if it cannot be read."""


def compare(one: Course, other: Course) -> Comparison:
    """Compare two runs."""
    runs = [_Progress(course) for course in (one, other)]
    evaluations = [run.evaluations for run in runs]
    by_training_time = _points(runs, [run.train_s for run in runs])
    missing = list(_missing(runs, bool(by_training_time)))
    keys: list[ChangedKey] = []
    if one.job is None or other.job is None:
        missing.append("The job spec of a run cannot be read: its keys are not compared.")
    else:
        jobs = [dict(_flat(course.job, "")) for course in (one, other)]
        names = dict.fromkeys(key for job in jobs for key in job)
        keys = [
            ChangedKey(key, [job.get(key) for job in jobs]) for key in names if jobs[0].get(key) != jobs[1].get(key)
        ]
    return Comparison(
        _points(runs, [run.steps for run in runs], whole=True),
        by_training_time,
        _points(runs, [run.wall_s for run in runs]),
        [
            ComparedEvaluation(step, [of_run[step] for of_run in evaluations])
            for step in evaluations[0]
            if step in evaluations[1]
        ],
        keys,
        missing,
    )


class _Progress:
    """The committed steps of a run, and the times that it had needed at each."""

    def __init__(self, course: Course) -> None:
        # without a trainer, rows have only logged values
        self._rows = [row for row in course.rows if row.step and (row.metrics or row.seconds is not None)]
        self.steps = [row.step or 0 for row in self._rows]
        self.train_s: list[float] = []
        self.wall_s: list[float] = []
        began = course.began if course.began is not None else self._rows[0].at if self._rows else 0.0
        spent = 0.0
        for row in self._rows:
            spent += row.phase_seconds.get("train", 0.0)
            self.train_s.append(spent)
            self.wall_s.append(max(0.0, row.at - began))
        found = {int(row.evaluation["step"]): (row.step or 0, row.evaluation) for row in course.rows if row.evaluation}
        self.evaluations = {step: evaluation for step, (_, evaluation) in found.items()}
        self._evaluated = list(found.values())

    def place(self, before: int, count: int) -> Place:
        """Return the place after the first ``count`` steps; the previous place was after ``before`` steps."""
        rewards: dict[str, list[float]] = {}
        for row in self._rows[before:count]:
            for name, value in row.metrics.items():
                if name == REWARD or name.startswith(f"{REWARD}_"):
                    rewards.setdefault(name, []).append(value)
        step = self.steps[count - 1] if count else 0
        evaluation = next((one for at, one in reversed(self._evaluated) if at <= step), {})
        return Place(
            step,
            round(self.train_s[count - 1], 3) if count else 0.0,
            round(self.wall_s[count - 1], 3) if count else 0.0,
            {name: fmean(values) for name, values in rewards.items()},
            evaluation,
        )


def _points(runs: Sequence[_Progress], positions: Sequence[Sequence[float]], *, whole: bool = False) -> list[Point]:
    """Return up to :data:`POINTS` points at equal distances, up to the last that both runs have reached.

    Args:
        runs: The runs.
        positions: For each run the position of each of its steps: the step's number, or a time.
        whole: Whether positions are whole numbers.
    """
    last = min(position[-1] if position else 0.0 for position in positions)
    ends = [last * (index + 1) / POINTS for index in range(POINTS)]
    if whole:
        ends = [float(round(end)) for end in ends]
    points: list[Point] = []
    before = [0 for _ in runs]
    for end in dict.fromkeys(end for end in ends if end > 0):
        counts = [bisect_right(position, end) for position in positions]
        points.append(Point(end, [run.place(*part) for run, *part in zip(runs, before, counts, strict=True)]))
        before = counts
    return points


def _missing(runs: Sequence[_Progress], is_timed: bool) -> Iterator[str]:
    if not all(run.steps for run in runs):
        yield "A run has no committed step: rewards are not compared."
    elif not is_timed:
        yield "The trainer of a run did not report the phase `train`: nothing is compared at equal training time."
    if not any(run.evaluations for run in runs):
        return
    if not all(run.evaluations for run in runs):
        yield "Only one of the runs has evaluations."
    elif not runs[0].evaluations.keys() & runs[1].evaluations.keys():
        yield "The runs have evaluated no step in common."


def _flat(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yield each key below a value with its dotted name, as in ``--set``; a list of tables has its places as keys."""
    if isinstance(value, list) and any(isinstance(one, dict) for one in value):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        yield key, value
        return
    for name, inner in value.items():
        yield from _flat(inner, f"{key}.{name}" if key else str(name))
