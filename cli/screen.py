"""The terminal, or what stands in its place: one way to print, and JSON."""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec
from rich.console import Console

PLAIN_WIDTH = 100
"""columns where stdout is no terminal: the same text wherever it is piped"""


def console(error: bool = False) -> Console:
    """Nothing that a run says is taken for markup; no colours and a fixed width where there is no terminal."""
    stream = sys.stderr if error else sys.stdout
    columns = os.environ.get("COLUMNS", "")
    width = None if stream.isatty() else int(columns) if columns.isdigit() and int(columns) else PLAIN_WIDTH
    return Console(file=stream, markup=False, highlight=False, emoji=False, width=width, soft_wrap=False)


def print_json(value: Any) -> None:
    """One JSON document on stdout; keys and meanings are those of the struct or dict that it was."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")
