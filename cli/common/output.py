"""Print text, JSON, times and the version. Text of roles, nodes and users is always escaped."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment

from ...core.text import escaped, escaped_json, escaped_lines
from ...core.types import UsageError

PLAIN_WIDTH = 100
"""Width (columns) of output that does not go to a terminal."""
JSON_SCHEMA = 2
"""Version of the form of all JSON outputs (docs/json.md). Every object has this version in its key ``schema``. The
version is increased when a key is removed or changes its meaning; a new key does not change it."""


def console() -> Console:
    """Return a console for stdout that does not interpret text as markup.

    Without a terminal it has no colours, and its width is ``COLUMNS`` or else ``PLAIN_WIDTH``.
    """
    columns = os.environ.get("COLUMNS", "")
    width = None if sys.stdout.isatty() else int(columns) if columns.isdigit() and int(columns) else PLAIN_WIDTH
    return Console(file=sys.stdout, markup=False, highlight=False, emoji=False, width=width, soft_wrap=False)


class Escaped:
    """A view whose text is escaped after the layout, so that hostile text can shift only its own columns."""

    def __init__(self, view: RenderableType) -> None:
        self._view = view

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for text, style, control in console.render(self._view, options):
            yield Segment(text if control else escaped_lines(text), style, control)


def program() -> str:
    """Return how the user can start this program: ``rrl`` if it is on PATH, else its path.

    After ``make demo`` the program is only in ``.venv/bin``.
    """
    started = Path(sys.argv[0])
    found = shutil.which("rrl")
    if found is not None or started.name != "rrl":
        return "rrl"
    path = started.absolute()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def show(view: RenderableType) -> None:
    """Print a view to stdout; if stdout is not a terminal, without blanks at the ends of lines."""
    screen = console()
    if screen.is_terminal:
        screen.print(Escaped(view), crop=False)
        return
    with screen.capture() as captured:
        screen.print(Escaped(view), crop=False)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def print_line(text: str, *, to_stderr: bool = False) -> None:
    """Print one line and flush."""
    print(escaped(text), file=sys.stderr if to_stderr else sys.stdout, flush=True)


def print_warnings(warnings: Iterable[str]) -> None:
    """Print each warning on standard error."""
    for warning in warnings:
        print(f"rrl: warning: {warning}", file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """Print a struct, a dict or a list of these as one JSON document, with the key ``schema`` in each object."""
    sys.stdout.write(json_document(value))


def json_document(value: Any) -> str:
    """Return what :func:`print_json` prints."""
    return indented_json([with_schema(one) for one in value] if isinstance(value, list) else with_schema(value))


def json_line(value: Any) -> str:
    """Return a struct or dict as JSON in one line, with the key ``schema``."""
    return escaped_json(msgspec.json.encode(with_schema(value)).decode()) + "\n"


def with_schema(value: Any) -> dict[str, Any]:
    """Return the keys of a struct or dict after the key ``schema``."""
    keys: dict[str, Any] = msgspec.to_builtins(value, str_keys=True)
    return {"schema": JSON_SCHEMA} | keys


def indented_json(value: Any) -> str:
    """Return a value as indented JSON, without the key ``schema``."""
    return escaped_json(msgspec.json.format(msgspec.json.encode(value), indent=2).decode()) + "\n"


_AGO = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(s|m|min|h|d)")
_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_time(text: str, now: float | None = None) -> float:
    """Return the time of the option ``--since`` in s since the epoch.

    ``text`` is a span before ``now`` (``10m``) or a date and time. Raises UsageError for anything else.
    """
    if match := _AGO.fullmatch(text.strip()):
        return (time.time() if now is None else now) - float(match[1]) * _UNITS[match[2]]
    try:
        at = datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError, OSError):
        at = -1.0
    if at < 0:
        examples = '"90s", "10m", "2h", "1d" (ago) or a local time like "2026-11-20T09:00" (UTC with a Z at the end)'
        raise UsageError(f'--since "{text}" is not a time; write for example {examples}')
    return at


def print_version() -> int:
    """Print the version of rrl and return exit code 0."""
    from importlib.metadata import version

    print(f"rrl {version('rrl-slurm')}")
    return 0
