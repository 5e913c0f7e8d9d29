"""Render when rrl would fail a replica without progress (``rrl check --detection``). The functions are pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...core.run_spec import Limits
from ...core.text import span
from ...health.detection.bounds import Bound
from ...health.detection.detectors.base import SLOW_START_FACTOR, silence_limit

_HEAD = ("role", "phase", "loads", "first pass", "later", "because")


def detection_text(bounds: Sequence[Bound], limits: Limits) -> str:
    """Return a table of the bounds, after the deadlines that all replicas have."""
    rows = [_HEAD, *_rows(bounds)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD) - 1)]
    lines = ["  ".join([*map(str.ljust, row, widths), row[-1]]) for row in rows]
    return "\n".join([*deadlines_of_all(limits), "", *lines])


def deadlines_of_all(limits: Limits) -> Iterator[str]:
    """Yield a line about each deadline that does not depend on the phase."""
    yield f"An end of a process is found at once, silence after {span(silence_limit(limits))} without a heartbeat."
    yield (
        f"A start fails {span(limits.join)} after its agent last found it running without having joined,"
        f" {span(SLOW_START_FACTOR * limits.join)} after its launch at the latest."
    )
    yield (
        "Without progress a replica fails after these times: in the first pass of an incarnation, and once passes are"
        " known, if none took long (longer ones extend it)."
    )


def _rows(bounds: Sequence[Bound]) -> Iterator[tuple[str, ...]]:
    role = phase = ""
    for bound in bounds:
        same_role = bound.role == role
        same_phase = same_role and bound.phase == phase
        role, phase = bound.role, bound.phase
        times = ("never" if seconds is None else span(seconds) for seconds in (bound.first_s, bound.later_s))
        yield "" if same_role else role, "" if same_phase else phase, bound.condition, *times, bound.rule
