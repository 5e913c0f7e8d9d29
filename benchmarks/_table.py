"""Prints a plain table of benchmark results. Each program prints its own JSON line after the table."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table with the first column aligned to the left and the other columns to the right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    for row in (header, tuple("-" * width for width in widths), *rows):
        first, *rest = (
            cell.ljust(width) if not i else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join((first, *rest)).rstrip())


def print_bars(figures: Mapping[str, Any], bars: Mapping[str, float | None], at_least: Collection[str]) -> None:
    """Print the figures that were measured beside their bars, which are minima for those in ``at_least``."""
    rows = []
    for name, bar in bars.items():
        if (value := figures.get(name)) is None:
            continue
        least = name in at_least
        verdict = "" if bar is None else "met" if (value >= bar if least else value <= bar) else "MISSED"
        rows.append([name, f"{value:.4g}", "" if bar is None else f"{'>=' if least else '<='} {bar}", verdict])
    print_table(["figure", "value", "bar", ""], rows)
