"""The report of one run or two as tables for a terminal. The functions are pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ....core.text import span
from ....manager.reporting.accounting.comparison import Comparison
from ....manager.reporting.accounting.gpu_time import TrainerHours
from ....manager.reporting.accounting.lost_time import ALL_STAGES, OTHER
from ....manager.reporting.accounting.pool_use import PoolUse
from ....manager.reporting.accounting.run_report import InterruptionReport, RunReport
from ..formatting import plain_table, stage
from .comparison_tables import SIDES, comparison_tables

MAX_INTERRUPTIONS = 30
"""Maximum number of interruptions that the table shows; the JSON and the page have all."""


def figures(report: RunReport) -> list[tuple[str, str]]:
    """Return the figures of a run as (name, value); the names are the same for every run."""
    hours = report.gpu_hours
    unit = "GPU-hours" if hours.unit == "gpu" else "node-hours"
    trainer = report.trainer_hours
    return [
        ("outcome", f"{report.outcome}, {report.steps} steps in {span(report.run_seconds)}"),
        ("ETTR", percent(report.ettr)),
        ("first train to last commit", stage(report.wall_s)),
        ("undisturbed step", stage(report.step_s)),
        ("interruptions", interruptions_text(report)),
        (f"{unit} useful", _share_of(hours.useful, hours.reserved)),
        (f"{unit} redone", _share_of(hours.redone, hours.reserved)),
        (f"{unit} idle", _share_of(hours.idle, hours.reserved)),
        (f"{unit} reserved", amount(hours.reserved)),
        (f"{unit} of the trainer", "–" if trainer is None else _trainer_text(trainer)),
        ("managers", str(report.managers)),
    ]


def percent(share: float | None) -> str:
    """Format a share in percent with one decimal; a dash for None."""
    return "–" if share is None else f"{100 * share:.1f} %"


def _share_of(part: float, whole: float) -> str:
    return f"{amount(part)} ({100 * part / whole:.0f} %)" if whole else amount(part)


def _trainer_text(hours: TrainerHours) -> str:
    parts = {"train": hours.train, "lent": hours.lent, "idle": hours.idle}
    return ", ".join(f"{name} {_share_of(part, sum(parts.values()))}" for name, part in parts.items())


def amount(value: float) -> str:
    """Format a number: as a whole number from 1000 on, else with three significant digits."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def interruptions_text(report: RunReport) -> str:
    """Return the number of interruptions, and how many of them were injected or planned."""
    failed = [one for one in report.interruptions if one.charged]
    counts = {"injected": sum(one.injected for one in failed), "planned": len(report.interruptions) - len(failed)}
    more = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    return f"{len(report.interruptions)}{f' ({more})' if more else ''}"


def report_view(reports: Sequence[RunReport], comparison: Comparison | None = None) -> RenderableType:
    """Return the view of one report, or of two and their comparison."""
    return Group(*_parts(reports, comparison))


def _parts(reports: Sequence[RunReport], comparison: Comparison | None) -> Iterator[RenderableType]:
    yield _figures_table(reports)
    if comparison is not None:
        yield from _comparison(comparison, reports)
    for report in reports:
        name = f" of {report.run}" if len(reports) > 1 else ""
        if report.lost:
            yield Text(f"\ntime lost{name} (s), by cause and stage", "bold")
            yield _lost_table(report)
        if report.pools:
            yield Text(f"\nrollout pools{name}", "bold")
            yield _pools_table(report)
        if report.interruptions:
            yield Text(f"\ninterruptions{name} (s)", "bold")
            yield from _interruptions(report.interruptions)
    notes = dict.fromkeys(note for report in (comparison, *reports) if report is not None for note in report.missing)
    if notes:
        yield Text()
        yield from (Text(f"· {note}", "bright_black") for note in notes)


def _figures_table(reports: Sequence[RunReport]) -> Table:
    table = plain_table()
    table.add_column("")
    for report in reports:
        table.add_column(Text(report.run, "bold"), overflow="fold")
    of_runs = [figures(report) for report in reports]
    for row, (name, _) in enumerate(of_runs[0]):
        values = [values[row][1] for values in of_runs]
        if any(value != "–" for value in values):
            table.add_row(Text(name, "bright_black"), *map(Text, values))
    return table


def _comparison(comparison: Comparison, reports: Sequence[RunReport]) -> Iterator[RenderableType]:
    names = ", ".join(f"{side} is {report.run}" for side, report in zip(SIDES, reports, strict=True))
    yield Text(f"\ncomparison: {names}", "bright_black")
    for one in comparison_tables(comparison):
        yield Text(f"\n{one.title}", "bold")
        table = plain_table(one.columns[:1], one.columns[1:])
        for first, *cells in one.rows:
            table.add_row(Text(first), *map(Text, cells))
        yield table


def _lost_table(report: RunReport) -> Table:
    stages = [name for name in (*ALL_STAGES, OTHER) if any(one.stages.get(name) for one in report.lost)]
    table = plain_table(["cause"], ("total", "share", *stages))
    for one in report.lost:
        cells = [stage(one.stages[name]) if name in one.stages else "" for name in stages]
        table.add_row(Text(one.cause), stage(one.seconds), percent(one.seconds / report.wall_s), *cells)
    return table


POOL_COLUMNS = ("tokens", "node hours", "of", "tokens per node hour", "tokens/s of a replica")
"""Headings of the figures of a rollout pool; ``of`` are the node hours that an elastic pool may use."""


def pool_cells(pool: PoolUse) -> tuple[str, ...]:
    """Return the figures of a rollout pool, in the order of :data:`POOL_COLUMNS`."""
    values = (pool.node_hours, pool.budget_node_hours, pool.tokens_per_node_hour, pool.tokens_per_second)
    return (f"{pool.tokens:,}", *("–" if value is None else amount(value) for value in values))


def _pools_table(report: RunReport) -> Table:
    table = plain_table(["pool"], POOL_COLUMNS)
    for pool in report.pools:
        table.add_row(Text(pool.pool), *pool_cells(pool))
    return table


def _interruptions(interruptions: Sequence[InterruptionReport]) -> Iterator[RenderableType]:
    shown = interruptions[-MAX_INTERRUPTIONS:]
    stages = [name for name in ALL_STAGES if any(name in one.stages for one in shown)]
    table = plain_table(["replica", "cause"], ("total", *stages))
    for one in shown:
        cells = [stage(one.stages.get(name)) if name in one.stages else "" for name in stages]
        total = Text(stage(one.seconds), "none" if one.until is not None else "yellow")
        table.add_row(f"{one.replica}#{one.number}", f"{one.cause}{' *' * one.injected}", total, *cells)
    yield table
    if any(one.injected for one in shown):
        yield Text("* a fault was injected", "bright_black")
    if len(interruptions) > len(shown):
        yield Text(f"{len(interruptions) - len(shown)} earlier interruptions are in --json and --html", "bright_black")
