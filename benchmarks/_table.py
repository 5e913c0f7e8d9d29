"""A plain table for benchmark results; the JSON line after it is each program's own."""

from __future__ import annotations

from collections.abc import Sequence


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """The first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    for row in (header, tuple("-" * width for width in widths), *rows):
        first, *rest = (cell.ljust(width) if not i else cell.rjust(width)
                        for i, (cell, width) in enumerate(zip(row, widths, strict=True)))  # fmt: skip
        print("  ".join((first, *rest)).rstrip())
