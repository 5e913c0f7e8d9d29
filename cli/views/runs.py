"""The list of runs as something to look at. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from rrl.cli.views.figures import number, span

_COLOUR = {"completed": "green", "running": "green", "failed": "red", "cancelled": "yellow", "interrupted": "red"}


def runs_view(rows: Sequence[dict[str, Any]], now: float) -> RenderableType:
    """``rows`` as :mod:`rrl.cli.listing` makes them; ``now``: wall clock (s)."""
    table = Table(
        box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False, show_edge=False,
        header_style="bright_black", border_style="bright_black",
    )  # fmt: skip
    table.add_column("run", no_wrap=True)
    table.add_column("standing", no_wrap=True, overflow="ellipsis", max_width=30)
    for name in ("step", "reward", "recoveries", "took", "started"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        started, ended = row["started"], row["ended"]
        table.add_row(
            row["run"],
            Text(row["standing"], _COLOUR.get(row["standing"], "cyan")),
            _steps(row["step"], row["steps"]),
            number(row["reward"]),
            str(row["recoveries"]),
            "–" if started is None else span((ended or now) - started),
            "–" if started is None else f"{span(now - started)} ago",
        )
    return table


def _steps(step: int, steps: int | None) -> str:
    """A run of commands alone has none."""
    return "–" if steps == 0 else f"{step}/{'?' if steps is None else steps}"
