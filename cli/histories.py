"""Which history folders are meant, what they say, and what of it can be true."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from rrl.cli.asking import BadInput
from rrl.cli.screen import print_line
from rrl.health.history import Told
from rrl.health.history_cache import HistoryCache, Sources
from rrl.health.plausibility import plausible
from rrl.health.report_values import DrainState
from rrl.spec.rundir import HISTORY_ENV

HOW = (
    f"no history is named: have runs keep one with [health] history = DIR in their job.toml, or for all with"
    f" {HISTORY_ENV}=DIR where they are submitted; then name it here with --history DIR or {HISTORY_ENV}"
)


def read(folders: Sequence[Path], since: float) -> tuple[list[Told], Sources]:
    """Records from ``since`` on, and what was read. Raises BadInput where there is no history."""
    named = list(folders) or [Path(one) for one in os.environ.get(HISTORY_ENV, "").split(os.pathsep) if one]
    if not named:
        raise BadInput(HOW)
    existing = [folder.expanduser() for folder in named]
    for folder in existing:
        if not folder.is_dir():
            raise BadInput(f"{folder}: no such folder of histories")
    cache = HistoryCache(existing)
    try:
        sources = cache.refresh()
        return cache.told(since), sources
    except OSError as error:
        raise BadInput(f"{error.filename}: {error.strerror}") from None
    finally:
        cache.close()


def without_impossible(
    told: Sequence[Told], sources: Sources, now: float, drains: Mapping[str, DrainState]
) -> tuple[list[Told], Sources]:
    """Records that can be true at ``now`` (s since 1970) on nodes as Slurm knows them, and what was left out."""
    kept, left_out = plausible(told, now, {node: one.gpus for node, one in drains.items() if one.gpus is not None})
    return kept, replace(sources, left_out=left_out)


def warn(sources: Sources) -> None:
    """Say on stderr, a line for each kind, what was not read, not believed or left out."""
    for what, lines in (("not read", sources.refused), ("left out", sources.left_out)):
        if lines:
            more = f" (and {len(lines) - 1} more; --format json names all)" if len(lines) > 1 else ""
            print_line(f"rrl: {what}: {lines[0]}{more}", to_stderr=True)
    if sources.skipped:
        print(f"rrl: {sources.skipped} lines were skipped: damaged, or of another version", file=sys.stderr)
