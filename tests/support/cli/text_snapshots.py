"""Compares output with stored files. ``RRL_SNAPSHOTS=write pytest tests/unit/cli`` rewrites them; review the diff."""

from __future__ import annotations

import io
import os
from pathlib import Path

from rich.console import Console, RenderableType

FOLDER = Path(__file__).parents[2] / "data" / "snapshots"


def drawn(view: RenderableType, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, markup=False, highlight=False, emoji=False)
    console.print(view)
    assert isinstance(console.file, io.StringIO)
    return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())


def matches_stored(name: str, text: str) -> None:
    equals_file(FOLDER / f"{name}.txt", text)


def equals_file(path: Path, text: str) -> None:
    if os.environ.get("RRL_SNAPSHOTS") == "write":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
