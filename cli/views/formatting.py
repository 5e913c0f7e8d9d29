"""Format values as text: spans of time, sizes, a curve, a bar, folded node names; and the look of all tables."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from math import isfinite, nan

from rich import box
from rich.table import Table
from rich.text import Text

from ...core.text import span

LABEL_COLUMNS = 10
"""Columns of a label before the facts about something, without padding."""
VERDICT_COLOUR = {"FAIL": "red", "WARN": "yellow", "OK": "green", "UNKNOWN": "magenta"}
OUTCOME_COLOUR = {"completed": "green", "cancelled": "yellow", "failed": "red", "rejected": "red"}
_BLOCKS = "▁▂▃▄▅▆▇█"


def plain_table(left: Iterable[str] = (), right: Iterable[str] = (), *, expand: bool = False) -> Table:
    """Return a table without borders: columns with these headings, texts on the left and then figures on the right.

    ``expand`` gives it the whole width.
    """
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
        collapse_padding=True,
        pad_edge=False,
        show_edge=False,
        expand=expand,
        header_style="bright_black",
        border_style="bright_black",
    )
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def grid(*styles: str, expand: bool = False, min_width: int | None = None) -> Table:
    """Return a table without headings: a column for each style, and a last one whose texts wrap.

    ``expand`` gives it the whole width.
    """
    table = Table.grid(padding=(0, 2), expand=expand)
    for style in styles:
        table.add_column(style=style, no_wrap=True, min_width=min_width)
    table.add_column(overflow="fold", ratio=1 if expand else None)
    return table


def labelled(rows: Iterable[tuple[str, str | Text]]) -> Table:
    """Return a table of (label, text) that has the whole width; its labels have a fixed number of columns.

    The number is fixed, so that a new row does not move other rows.
    """
    table = grid("bright_black", expand=True, min_width=LABEL_COLUMNS)
    for label, text in rows:
        table.add_row(label, text)
    return table


def stage(seconds: float | None) -> str:
    """Format the duration of a stage in seconds. A duration below 100 s has two decimals.

    Returns a dash for None, which means that the stage has not happened.
    """
    return "–" if seconds is None else f"{seconds:.2f}s" if seconds < 100 else span(seconds)


def number(value: float | None) -> str:
    """Format a number with two decimals; return a dash for None."""
    return "–" if value is None else f"{value:.2f}"


def size(nbytes: int) -> str:
    """Format a number of bytes in the largest fitting unit, with three significant digits."""
    for unit, length in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= length:
            return f"{nbytes / length:.3g} {unit}" if nbytes < 1000 * length else f"{nbytes / length:.0f} {unit}"
    return f"{nbytes} bytes"


def resampled(values: Sequence[float], columns: int) -> list[float]:
    """Return the means of ``columns`` equal sections of the values.

    A value that two sections share counts in each by its share. Values that are not finite are left out; a section
    without any finite value is nan.
    """
    means: list[float] = []
    for column in range(columns if values else 0):
        begin, end = column * len(values) / columns, (column + 1) * len(values) / columns
        weights = [
            (values[index], min(end, index + 1) - max(begin, index))
            for index in range(int(begin), min(len(values), int(end) + 1))
            if isfinite(values[index])
        ]
        total = sum(weight for _, weight in weights)
        means.append(sum(value * (weight / total) for value, weight in weights) if total > 0 else nan)
    return means


def curve(values: Sequence[float]) -> str:
    """Draw each value as a block, scaled to 0..1 if all are in this range, else to their own range.

    Values that are not finite are left blank.
    """
    finite = [value for value in values if isfinite(value)]
    if not finite:
        return " " * len(values)
    low, high = (0.0, 1.0) if min(finite) >= 0 and max(finite) <= 1 else (min(finite), max(finite))
    reach = (high / 8 - low / 8) or 1.0  # the difference of the largest floats is not finite
    return "".join(
        _BLOCKS[min(7, int((value / 8 - low / 8) / reach * 8))] if isfinite(value) else " " for value in values
    )


def bar(done: int, of: int, width: int) -> tuple[str, str]:
    """Return the full and the empty part of a progress bar."""
    full = min(width, width * done // max(1, of))
    return "━" * full, "─" * (width - full)


def folded(names: Iterable[str]) -> str:
    """Return the node names folded, as ``n[1-3,7]``; names that ClusterShell cannot parse are listed as they are."""
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

    listed = sorted(names)
    try:
        return str(NodeSet(",".join(listed), resolver=RESOLVER_NOGROUP))
    except NodeSetException:
        return ",".join(listed)


def utc_time(at: float) -> str:
    """Format a time in UTC, to the second."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at))
