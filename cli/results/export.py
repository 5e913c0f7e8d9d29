"""``rrl export``: write a committed checkpoint as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from ...api import run as api
from ..common.output import print_json, print_line
from ..views.formatting import size


def export(name: str, folder: Path, step: int | None, *, json: bool) -> int:
    """Export a checkpoint and print what was written; returns exit code 0."""
    done = api.run(name).export(folder, step)
    if json:
        print_json(done)
    else:
        print_line(f"step {done.step} of {done.run}: {done.folder}  ({size(done.nbytes)}, {done.dtype})")
    return 0
