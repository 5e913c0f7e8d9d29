"""The health report as one self-contained HTML file.

The functions are pure. The numbers of the plots are computed here, and the template (cli/views/health/health.html.j2)
escapes its input.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import jinja2

from ....core.text import span
from ....health.history.cache import Sources
from ....health.report.model import Day, NodeReport, Report, SiteReport
from ..formatting import folded, utc_time
from .health_report import drain_text, interval, is_notable, rows_of
from .health_report import figure as digits

WIDTH, HEIGHT, LEFT, BOTTOM = 900, 180, 34, 22
"""Sizes and margins of the plot, in units of its SVG viewBox."""
MAX_TICKS = 4
MAX_LABELS = 10
_COLOURS = {
    "gpu": "#d6453d",
    "node": "#e88b2e",
    "fabric": "#8a5cc2",
    "storage": "#b0872b",
    "software": "#3f7fc1",
    "user": "#6b93b8",
    "process": "#3f7fc1",
    "hang": "#2fa39a",
}
_OTHER = "#7c8794"
_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    undefined=jinja2.StrictUndefined,
    autoescape=True,
    trim_blocks=True,
    keep_trailing_newline=True,
)


def page(report: Report, sources: Sources, drains_unknown: str) -> str:
    """Return the HTML text of the report."""
    site = report.site
    quiet = [one.node for one in report.nodes if not is_notable(one)]
    return _TEMPLATES.get_template("health.html.j2").render(
        window=f"{utc_time(site.since)} to {utc_time(site.until)} UTC",
        made=utc_time(site.until),
        sources=sources,
        figures=_figures(site),
        chart=chart(site.days),
        causes=_causes(site),
        shared=site.correlated,
        moment=utc_time,
        drains_unknown=drains_unknown,
        nodes=[_row(one) for one in report.nodes if is_notable(one)],
        quiet_count=len(quiet),
        quiet_nodes=folded(quiet) if quiet else "",
    )


def _figures(site: SiteReport) -> list[dict[str, str]]:
    def figure(name: str, value: str, more: str) -> dict[str, str]:
        return {"name": name, "value": value, "more": more}

    rate, mtbf = site.failures_per_1000_node_days, site.node_hours_between_failures
    return [
        figure("failures per 1000 node-days", _short(rate.value), interval(rate)),
        figure("mean time between failures", f"{_short(mtbf.value)} node-h", interval(mtbf, " h")),
        figure(
            "failures",
            str(site.failures),
            f"of infrastructure; {site.other_failures} of software or users, {site.injected} injected",
        ),
        figure("GPU-hours lost", f"{site.gpu_hours_lost:.1f}", f"{site.gpu_hours_lost_to_infra:.1f} to infrastructure"),
        figure(
            "seen",
            f"{site.nodes} nodes",
            f"{digits(site.node_days)} node-days, {digits(site.gpu_days)} GPU-days,"
            f" {site.runs} runs of {site.users} users",
        ),
        figure("lemons", str(len(site.lemons)), folded(site.lemons) if site.lemons else "none"),
    ]


def _short(value: float | None) -> str:
    return "–" if value is None else digits(value)


def _causes(site: SiteReport) -> list[dict[str, Any]]:
    max_failures = max((one.failures for one in site.causes), default=1)
    return [
        {
            "owner": one.owner,
            "cause": one.cause,
            "failures": one.failures,
            "gpu_hours": f"{one.gpu_hours:.1f}",
            "share": round(100 * one.failures / max_failures),
            "colour": _COLOURS.get(one.cause, _OTHER),
        }
        for one in site.causes
    ]


def chart(days: list[Day]) -> dict[str, Any]:
    """Return the shapes of a chart of the failures by cause: one stacked bar for each day.

    If there was no failure on any day, the chart is empty.
    """
    max_failures = max((sum(day.failures.values()) for day in days), default=0)
    causes = sorted({cause for day in days for cause in day.failures})
    if not max_failures:
        return {"bars": [], "width": WIDTH, "height": HEIGHT, "ticks": [], "labels": [], "key": []}
    plot_height, step = HEIGHT - BOTTOM - 6, (WIDTH - LEFT) / len(days)
    every, apart = -(-max_failures // MAX_TICKS), -(-len(days) // MAX_LABELS)
    bars, labels = [], []
    for at, day in enumerate(days):
        x, top = LEFT + at * step, float(HEIGHT - BOTTOM)
        name = time.strftime("%m-%d", time.gmtime(day.at))
        if at % apart == 0:
            labels.append({"x": round(x + step / 2, 1), "text": name})
        for cause, number in day.failures.items():
            height = plot_height * number / max_failures
            top -= height
            bars.append(
                {
                    "x": round(x + step * 0.1, 1),
                    "y": round(top, 1),
                    "width": round(step * 0.8, 1),
                    "height": round(height, 1),
                    "colour": _COLOURS.get(cause, _OTHER),
                    "title": f"{name}: {number} {cause}",
                }
            )
    ticks = [
        {"y": round(HEIGHT - BOTTOM - plot_height * n / max_failures, 1), "label": n}
        for n in range(0, max_failures + 1, every)
    ]
    key = [{"name": cause, "colour": _COLOURS.get(cause, _OTHER)} for cause in causes]
    return {"bars": bars, "width": WIDTH, "height": HEIGHT, "ticks": ticks, "labels": labels, "key": key}


def _row(one: NodeReport) -> dict[str, Any]:
    first = f"first {utc_time(one.first_reported_at)}" if one.first_reported_at is not None else ""
    held_text = f"held for {span(one.node_hours * 3600)}"
    return {
        "node": one.node,
        "verdict": one.verdict,
        "cause": one.cause,
        "count": one.count,
        "incidents": one.incidents,
        "last": "" if one.last_reported_at is None else utc_time(one.last_reported_at),
        "gpu_hours": f"{one.gpu_hours_lost:.1f}",
        "score": f"{one.lemon.score:.2f}",
        "lemon": one.lemon.lemon,
        "drain": drain_text(one.drain),
        "action": one.action,
        "scontrol": one.scontrol,
        "details": [*rows_of(one), ("known", ", ".join(filter(None, (first, held_text))))],
    }
