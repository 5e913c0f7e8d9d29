"""The health report as a table for people. The functions are pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ....core.text import plural, span
from ....health.history.cache import Sources
from ....health.history.rates import Rate
from ....health.report.model import DrainState, NodeReport, Report, SiteReport
from ..formatting import VERDICT_COLOUR, folded, grid, plain_table, utc_time

BAR_COLUMNS = 24
"""Width of a bar in columns."""


def report_view(report: Report, sources: Sources, drains_unknown: str) -> RenderableType:
    """Return the view: totals of the site, causes of failures, notable nodes in detail, and a summary of the rest."""
    shown = [one for one in report.nodes if is_notable(one)]
    quiet = [one.node for one in report.nodes if not is_notable(one)]
    parts: list[RenderableType] = [_site(report.site, sources)]
    if report.site.causes:
        parts += [Text(), _causes(report.site)]
    if shown:
        parts += [Text(), _table(shown, report.site.until), Text(), _details(shown)]
    if quiet:
        text = f"no problems found on {plural(len(quiet), 'node')}: {folded(quiet)}"
        parts += [Text(), Text.assemble(("OK  ", "green"), text)]
    if drains_unknown:
        parts += [Text(f"drains are unknown: {drains_unknown}", "yellow")]
    return Group(*parts)


def to_paste(report: Report) -> str:
    """Return the report's ``scontrol`` commands as lines that are not wrapped; an empty string if there are none."""
    lines = [one.scontrol for one in report.nodes if one.scontrol]
    return "".join(f"{line}\n" for line in ["", *lines]) if lines else ""


def drain_text(drain: DrainState) -> str:
    """Describe the drain of a node in one line."""
    if not drain.state:
        return "–"
    if not drain.drained:
        return drain.state.lower()
    by = f" ({drain.by})" if drain.by else ""
    return f"{'by rrl' if drain.owner == 'rrl' else 'foreign'}: {drain.reason or 'no reason'}{by}"


def figure(value: float) -> str:
    """Format a number with three significant digits: ``0.0687``, ``3.21``, ``226``, ``217,000``."""
    if value < 0.001:
        return f"{value:.0g}"
    digits = 2 - math.floor(math.log10(value))
    return f"{round(value, digits):,.{max(0, digits)}f}"


def interval(rate: Rate, unit: str = "") -> str:
    """Format a rate with its confidence interval, as ``3.21 (95 %: 1.04 to 7.48)``.

    A missing upper bound is shown as ``∞``. A rate without a value, such as the mean time between failures if there was
    no failure, is shown by its lower bound.
    """
    if rate.low is None:
        return "unknown: no run held a node"
    sure = f"{100 * rate.confidence:g} %"
    if rate.value is None:
        return f"more than {figure(rate.low)}{unit} ({sure} confidence; no failure was seen)"
    high = "∞" if rate.high is None else figure(rate.high)
    return f"{figure(rate.value)}{unit} ({sure}: {figure(rate.low)} to {high})"


def is_notable(one: NodeReport) -> bool:
    """Return whether the report about the node contains anything, such as incidents, a drain or actions."""
    return bool(
        one.verdict != "OK"
        or one.lemon.lemon
        or one.incidents
        or one.injected
        or one.drain.drained
        or one.actions
        or one.count
    )


def _site(site: SiteReport, sources: Sources) -> RenderableType:
    facts = grid("bright_black")
    facts.add_row("window", f"{utc_time(site.since)} to {utc_time(site.until)} UTC ({span(site.until - site.since)})")
    exposed = f"{figure(site.node_days)} node-days ({figure(site.gpu_days)} GPU-days)"
    whom = f"{plural(site.runs, 'run')} of {plural(site.users, 'user')}"
    facts.add_row("seen", f"{plural(site.nodes, 'node')} of {', '.join(site.clusters) or '–'} for {exposed}, by {whom}")
    injected = f"; {site.injected} more injected on purpose" if site.injected else ""
    others = f"{site.other_failures} of software or users{injected}"
    facts.add_row("failures", f"{site.failures} of infrastructure, {others}")
    facts.add_row("rate", interval(site.failures_per_1000_node_days, " per 1000 node-days"))
    facts.add_row("MTBF", interval(site.node_hours_between_failures, " node-hours"))
    facts.add_row(
        "lost", f"{site.gpu_hours_lost:.1f} GPU-hours, {site.gpu_hours_lost_to_infra:.1f} of them to infrastructure"
    )
    if site.lemons:
        facts.add_row("lemons", Text(folded(site.lemons), "red"))
    for line in site.correlated:
        facts.add_row("shared", Text(f"{line.text}  {utc_time(line.at)} ({line.source})", "yellow"))
    read = f"{plural(sources.files, 'file')}, {plural(sources.records, 'record')}"
    doubts = [f"{plural(sources.skipped, 'line')} skipped"] * bool(sources.skipped)
    doubts += [f"{plural(len(sources.refused), 'file')} refused"] * bool(sources.refused)
    doubts += [f"records left out ({len(sources.left_out)} reasons)"] * bool(sources.left_out)
    doubts += [f"{site.lines_lost} lines lost by runs"] * bool(site.lines_lost)
    facts.add_row("from", Text(", ".join([read, *doubts]), "yellow" if doubts else "none"))
    return facts


def _causes(site: SiteReport) -> RenderableType:
    max_failures = max(one.failures for one in site.causes)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bright_black")
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    table.add_column(justify="right")
    for at, one in enumerate(site.causes):
        bar = "█" * max(1, round(BAR_COLUMNS * one.failures / max_failures))
        label = f"{one.owner}: {one.cause}"
        table.add_row(
            "causes" if not at else "",
            label,
            str(one.failures),
            Text(bar, _owner_colour(one.owner)),
            f"{one.gpu_hours:.1f} GPU-h",
        )
    return table


def _owner_colour(owner: str) -> str:
    return "red" if owner == "infra" else "blue"


def _table(nodes: Sequence[NodeReport], now: float) -> RenderableType:
    table = plain_table(("node", "verdict", "cause"), ("last seen", "count", "fails", "GPU-h", "lemon"))
    for one in nodes:
        last = "–" if one.last_reported_at is None else f"{span(now - one.last_reported_at)} ago"
        table.add_row(
            Text(one.node, "bold"),
            Text(one.verdict, VERDICT_COLOUR.get(one.verdict, "none")),
            one.cause or "–",
            last,
            str(one.count),
            str(one.incidents),
            f"{one.gpu_hours_lost:.1f}",
            Text(f"{one.lemon.score:.2f}", "red" if one.lemon.lemon else "none"),
        )
    return table


def _details(nodes: Sequence[NodeReport]) -> RenderableType:
    """Return, for each node, the action and the evidence for it, to be shown below the table."""
    table = grid("none", "bright_black")
    for one in nodes:
        for at, (label, text) in enumerate([("to do", one.action), *rows_of(one)]):
            table.add_row(Text(one.node if not at else "", VERDICT_COLOUR.get(one.verdict, "none")), label, Text(text))
    return table


def rows_of(one: NodeReport) -> list[tuple[str, str]]:
    """Return labelled lines: the evidence for the verdict, the actions, and the owner of the drain."""
    rows = [("seen", f"{line.source}: {line.text}  {utc_time(line.at)}") for line in one.evidence]
    if one.components:
        rows.append(("about", ", ".join(one.components)))
    if one.facts:
        rows.append(("facts", ", ".join(f"{name} {value}" for name, value in sorted(one.facts.items()))))
    if one.runs:
        rows.append(("met by", f"{', '.join(one.runs)} of {', '.join(one.users)}"))
    if one.witnesses:
        enough = "" if one.accused else ": not enough users for the verdict FAIL"
        rows.append(("by", f"records of {', '.join(one.witnesses)}{enough}"))
    if one.related_nodes:
        rows.append(("also", f"{folded(one.related_nodes)} within 10 min: fabric or storage?"))
    if one.injected:
        rows.append(("note", f"{plural(one.injected, 'failure')} injected on purpose, not counted"))
    rows += [("done", f"{line.text}  {utc_time(line.at)}") for line in one.actions]
    if one.drain.state:
        rows.append(("drain" if one.drain.drained else "Slurm", drain_text(one.drain)))
    return rows
