"""The comparison of two runs as tables of text, for a terminal and for the page. The functions are pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from ....core.text import span
from ....manager.reporting.accounting.comparison import REWARD, Comparison, Place, Point
from ....manager.tracking.base import EVALUATION_PREFIX
from ..formatting import stage

_T = TypeVar("_T")
SIDES = ("A", "B")
"""Names of the two runs in headings."""
MAX_EVALUATIONS = 8
"""Maximum number of evaluated steps in a table, the newest included; the JSON has all."""


class ComparisonTable(NamedTuple):
    """A table of text."""

    title: str
    columns: tuple[str, ...]
    """The first column has text, the others have figures."""
    rows: list[tuple[str, ...]]


def comparison_tables(comparison: Comparison) -> Iterator[ComparisonTable]:
    """Yield the tables that are not empty, the most important first."""
    steps = _of_points(comparison.by_step, "step", lambda at: f"{at:g}", evaluated=False)
    if steps:
        yield steps
    if comparison.evaluations:
        rows = [
            (str(one.step), *_pair([result.get(REWARD) for result in one.runs]))
            for one in _thinned(comparison.evaluations, MAX_EVALUATIONS)
        ]
        yield ComparisonTable("evaluations at equal steps", ("step", *_headings("reward")), rows)
    if comparison.by_step:
        yield _figures(comparison)
    for name, points in (("training time", comparison.by_training_time), ("wall time", comparison.by_wall_time)):
        timed = _of_points(points, "time", span, evaluated=bool(comparison.evaluations))
        if timed:
            yield timed._replace(title=f"at equal {name}")
    if comparison.keys:
        keys = [(one.key, *map(_value, one.values)) for one in comparison.keys]
        yield ComparisonTable("keys that differ", ("key", *SIDES), keys)


def _headings(name: str) -> tuple[str, ...]:
    return (*(f"{name} {side}" for side in SIDES), "B − A")


def _of_points(
    points: Sequence[Point], column: str, shown: Callable[[float], str], *, evaluated: bool
) -> ComparisonTable | None:
    """Return the rewards at the points, beside the steps or times that the runs had reached; None if there are none."""
    if not points:
        return None
    by_step = column == "step"
    names = ("training", "wall") if by_step else (("step", "evaluation") if evaluated else ("step",))
    columns = (column, *_headings("reward"), *(f"{name} {side}" for name in names for side in SIDES))
    cells: dict[str, Callable[[Place], str]] = {
        "training": lambda place: span(place.train_s),
        "wall": lambda place: span(place.wall_s),
        "step": lambda place: str(place.step),
        "evaluation": lambda place: _number(place.evaluation.get(REWARD)),
    }
    rows = [
        (
            shown(point.at),
            *_pair([place.rewards.get(REWARD) for place in point.runs]),
            *(cells[name](place) for name in names for place in point.runs),
        )
        for point in points
    ]
    return ComparisonTable("rewards at equal steps", columns, rows)


def _figures(comparison: Comparison) -> ComparisonTable:
    """Return all rewards of the newest common steps, and all results of the newest common evaluation."""
    last, rows = comparison.by_step[-1], list[tuple[str, ...]]()
    rows += _named([place.rewards for place in last.runs], "")
    if comparison.evaluations:
        rows += _named(comparison.evaluations[-1].runs, EVALUATION_PREFIX)
    for name, seconds in (
        ("training time", [place.train_s for place in last.runs]),
        ("wall time", [place.wall_s for place in last.runs]),
    ):
        rows.append((name, *map(stage, seconds), ""))
    title = f"figures at step {last.at:g}"
    if comparison.evaluations and comparison.evaluations[-1].step != last.at:
        title += f", evaluation at step {comparison.evaluations[-1].step}"
    return ComparisonTable(title, ("", *SIDES, "B − A"), rows)


def _named(runs: Sequence[Mapping[str, float]], prefix: str) -> Iterator[tuple[str, ...]]:
    for name in dict.fromkeys(name for run in runs for name in run if name != "step"):
        yield (f"{prefix}{name}", *_pair([run.get(name) for run in runs]))


def _pair(values: Sequence[float | None]) -> tuple[str, ...]:
    one, other = values
    difference = "–" if one is None or other is None else f"{other - one:+.4g}"
    return _number(one), _number(other), difference


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _value(value: Any) -> str:
    return "–" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _thinned(values: Sequence[_T], most: int) -> list[_T]:
    """Return at most ``most`` of the values, evenly, with the last one."""
    every = -(-len(values) // most)
    return list(values[::-1][::every])[::-1]
