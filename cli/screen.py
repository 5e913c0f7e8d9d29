"""The terminal, or what stands in its place: one way to print, and JSON."""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec
from rich.console import Console, RenderableType

PLAIN_WIDTH = 100
"""columns where stdout is no terminal: the same text wherever it is piped"""


def console() -> Console:
    """Nothing that a run says is taken for markup; no colours and a fixed width where there is no terminal."""
    columns = os.environ.get("COLUMNS", "")
    width = None if sys.stdout.isatty() else int(columns) if columns.isdigit() and int(columns) else PLAIN_WIDTH
    return Console(file=sys.stdout, markup=False, highlight=False, emoji=False, width=width, soft_wrap=False)


def show(view: RenderableType) -> None:
    """Print to stdout; without a terminal there are no blanks at the ends of lines."""
    screen = console()
    if screen.is_terminal:
        screen.print(view)
        return
    with screen.capture() as captured:
        screen.print(view)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def print_json(value: Any) -> None:
    """One JSON document on stdout; keys and meanings are those of the struct or dict that it was."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")
