"""Which history folders are meant, and what they say."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rrl.cli.asking import BadInput
from rrl.health.history import Told
from rrl.health.history_cache import HistoryCache, Sources
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


def warn(sources: Sources) -> None:
    """Of what was not believed or could not be read."""
    if sources.refused:
        more = f" (and {len(sources.refused) - 1} more)" if len(sources.refused) > 1 else ""
        print(f"rrl: not read: {sources.refused[0]}{more}", file=sys.stderr)
    if sources.skipped:
        print(f"rrl: {sources.skipped} lines were skipped: damaged, or of another version", file=sys.stderr)
