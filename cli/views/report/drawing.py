"""The shapes of the report's page: lanes, curves and bars, in units of their drawings. The functions are pure.

A drawing is stretched to the width of the page, so it contains no text; the labels are beside it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import ceil, floor, log10
from typing import Any

from ....core.text import span
from ....manager.reporting.accounting.curves import CurvePoint
from ....manager.reporting.accounting.lanes import LaneIncarnation, Span
from ....manager.reporting.accounting.run_report import LaneReport, RunReport

WIDTH, LANE_HEIGHT, CURVE_HEIGHT = 1000, 10, 120
"""Sizes of the drawings."""
MAX_TITLED_SPANS = 3000
"""Maximum number of intervals in a page that titles each interval. In a page with more, only incarnations have
titles."""
TICKS = 4


class Axis:
    """Converts the manager's times (s) to positions, from ``since`` to ``until``."""

    def __init__(self, since: float, until: float) -> None:
        self.since, self.until = since, max(until, since + 1e-3)

    def x(self, at: float) -> float:
        """Return the position of a time."""
        share = (at - self.since) / (self.until - self.since)
        return round(WIDTH * min(1.0, max(0.0, share)), 1)

    @property
    def ticks(self) -> list[dict[str, Any]]:
        """Return marks (position in percent, text) at equal intervals from the beginning of the run."""
        length = self.until - self.since
        return [
            {"x": round(100 * index / TICKS, 1), "text": span(length * index / TICKS)} for index in range(TICKS + 1)
        ]


def lanes(report: RunReport, axis: Axis) -> list[dict[str, Any]]:
    """Return the shapes of each lane, with a mark for each incarnation.

    Each interval is a rectangle with a title. If the page has more than MAX_TITLED_SPANS intervals, a lane instead has
    one path for each use of time.
    """
    titled = sum(len(lane.spans) for lane in report.lanes) <= MAX_TITLED_SPANS
    return [_lane(lane, axis, titled) for lane in report.lanes]


def _lane(lane: LaneReport, axis: Axis, titled: bool) -> dict[str, Any]:
    return {
        "replica": lane.replica,
        "count": len(lane.incarnations),
        "paths": [] if titled else [{"use": use, "d": d} for use, d in _paths(lane.spans, axis)],
        "spans": [_rectangle(one, axis) for one in lane.spans] if titled else [],
        "starts": [
            {"x": axis.x(one.launched_at), "title": _start_text(lane.replica, one, axis)} for one in lane.incarnations
        ],
        "title": ", ".join(f"{phase} {span(seconds)}" for phase, seconds in lane.seconds.items() if seconds >= 1),
    }


def _start_text(replica: str, one: LaneIncarnation, axis: Axis) -> str:
    launched = f"{replica}#{one.number} on {one.node}, launched {span(one.launched_at - axis.since)} after the start"
    return launched if one.joined_at is None else f"{launched}, joined {one.joined_at - one.launched_at:.1f}s later"


def _rectangle(one: Span, axis: Axis) -> dict[str, Any]:
    x = axis.x(one.since)
    title = f"{one.activity.phase} {one.until - one.since:.1f}s"
    return {"use": one.activity.use.value, "x": x, "width": round(axis.x(one.until) - x, 1), "title": title}


def _paths(spans: Sequence[Span], axis: Axis) -> list[tuple[str, str]]:
    """Return (use, path) for each use of time that occurs."""
    paths: dict[str, list[str]] = defaultdict(list)
    for one in spans:
        x = axis.x(one.since)
        width = axis.x(one.until) - x
        if width > 0:
            paths[one.activity.use.value].append(f"M{x:g} 0h{width:.4g}v{LANE_HEIGHT}h-{width:.4g}z")
    return [(use, "".join(parts)) for use, parts in paths.items()]


def marks(report: RunReport, axis: Axis) -> dict[str, list[dict[str, Any]]]:
    """Return the marks of the injected faults and of the other decisions, under the keys ``faults`` and ``decisions``.

    A mark consists of its position ``x`` and its ``title``, which contains the evidence.
    """
    found: dict[str, list[dict[str, Any]]] = {"faults": [], "decisions": []}
    for one in report.decisions:
        title = f"{one.what} {one.about}: {'; '.join(one.evidence)}"
        found["faults" if one.is_fault else "decisions"].append({"x": axis.x(one.at), "title": title})
    return found


def curve(
    name: str, series: Sequence[tuple[str, Sequence[CurvePoint]]], axis: Axis, unit: str = ""
) -> dict[str, Any] | None:
    """Return a drawing of one curve or several over the time of the run; None without any point.

    The values begin at 0, or at the lowest value if that is below 0.
    """
    values = [point.value for _, points in series for point in points]
    if not values:
        return None
    low, high = min(0.0, *values), _rounded_up(max(values))
    reach = (high - low) or 1.0

    def y(value: float) -> float:
        return round(CURVE_HEIGHT - 2 - (CURVE_HEIGHT - 4) * (value - low) / reach, 1)

    lines = [
        {
            "name": label,
            "last": f"{points[-1].value:,.4f}".rstrip("0").rstrip("."),
            "points": " ".join(f"{axis.x(point.at):g},{y(point.value):g}" for point in points),
        }
        for label, points in series
        if points
    ]
    return {"name": name, "unit": unit, "lines": lines, "low": f"{low:,g}", "high": f"{high:,g}"}


def _rounded_up(value: float) -> float:
    """Return the end of an axis that reaches up to ``value``: ``value`` rounded up to two significant digits.

    0 if ``value`` is not positive.
    """
    if value <= 0:
        return 0.0
    digit = 10.0 ** (floor(log10(value)) - 1)
    return float(f"{ceil(value / digit - 1e-9) * digit:.2g}")
