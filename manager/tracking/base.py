"""The interface of experiment trackers, and the values that they get (:mod:`rrl.manager.reporting.step_metrics`).

Which steps a tracker has is read from its own files or its server. A separate record could be wrong, because the
process may be killed between sending a step and recording it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from msgspec import Struct

from ...core.sample_texts import DecodedSample, shortened_lines
from ...core.types import Outcome
from ..reporting.step_metrics import MarkKind, StepRow

EVALUATION_PREFIX = "eval/"
"""Prefix of the names of an evaluation's results."""
PREFIX = "rrl/"
"""Prefix of the names of values that are not metrics of the trainer."""
SAMPLES = f"{PREFIX}samples"
"""Name of the table of a step's samples."""
SAMPLE_COLUMNS = ("trajectory", "group", "source", "reward", "advantage", "truncated", "age", "prompt", "answer")


class TrackedRun(Struct, frozen=True):
    """The run that is tracked, and where its tracker keeps files."""

    id: str
    project: str
    """Name of the project in wandb, or of the experiment in MLflow."""
    folder: Path
    """Existing folder in the run directory for the files of this tracker."""
    job: dict[str, Any]
    """The job spec with every default, without values of environment variables."""
    changed: bool
    """True if the tracker does not have this job spec yet: the run is new, or a resume has changed the job spec."""


class Tracker(Protocol):
    """One run in one tracker, opened for writing. A call may raise any exception, and may hang."""

    newest_step: int
    """The newest step of which the tracker had all values when it was opened; -1 if it had no step."""
    place: str
    """Where a person finds the run: an address, or a command."""

    def send(self, row: StepRow, samples: Sequence[DecodedSample]) -> None:
        """Send the row of a step, with a table of its samples if there are any.

        Steps come in order, from ``newest_step`` + 1 on. If the process is killed in between, the same step is sent
        again with its table.
        """

    def flush(self) -> None:
        """Flush the sent data, so that it outlives this process."""

    def finish(self, outcome: Outcome, last: StepRow | None) -> None:
        """Mark the run as ended; ``last`` is the row after the newest step, if any. May be called repeatedly."""

    def close(self) -> None:
        """Close the connection or the files. The run may go on in another process."""


def scalars(row: StepRow) -> dict[str, float]:
    """Return the numbers of a row by name: the step's metrics, rrl's own figures, and logged values by replica."""
    own: dict[str, float | None] = {
        "seconds": row.seconds,
        "tokens_per_second": row.tokens_per_second,
        "tokens_per_second_gpu": row.tokens_per_second_gpu,
        **{f"seconds_{phase}": seconds for phase, seconds in row.phase_seconds.items()},
        "failures": sum(mark.kind is MarkKind.FAILURE for mark in row.marks),
        "restarts": sum(mark.kind is MarkKind.RESTART for mark in row.marks),
    }
    if not row.step:  # the row before the first step has only an evaluation
        own = {}
    evaluation = {f"{EVALUATION_PREFIX}{name}": value for name, value in row.evaluation.items()}
    known = {f"{PREFIX}{name}": value for name, value in own.items() if value is not None}
    numbers = {**row.metrics, **evaluation, **known}
    for replica, values in row.logged.items():
        numbers |= {f"{replica}/{name}": value for name, value in values.items()}
    return numbers


def sample_rows(samples: Sequence[DecodedSample]) -> list[list[Any]]:
    """Return the rows of a table of samples, with a value for each of ``SAMPLE_COLUMNS``."""
    return [
        [
            one.trajectory,
            one.group,
            one.source,
            one.reward,
            one.advantage,
            one.truncated,
            one.age,
            shortened_lines(one.prompt),
            shortened_lines(one.answer),
        ]
        for one in samples
    ]


def annotation(row: StepRow) -> str:
    """Return a line for each mark since the previous row; empty if there is none."""
    return "\n".join(f"{mark.kind.value}: {mark.about}: {mark.text}" for mark in row.marks)


def flattened(table: Mapping[str, Any], path: str = "") -> dict[str, str]:
    """Return the values of nested tables as text, by their paths, for example ``roles.trainer.learning_rate``."""
    flat: dict[str, str] = {}
    for key, value in table.items():
        at = f"{path}.{key}" if path else key
        if isinstance(value, Mapping):
            flat |= flattened(value, at)
        else:
            flat[at] = str(value)
    return flat
