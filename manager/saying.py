"""What a manager says for people: one line on its own output, which submitit keeps in the run directory."""

from __future__ import annotations

import contextlib
import sys


def say(text: str) -> None:
    """Never raises: that output lies on the run's disk, which may be full."""
    with contextlib.suppress(OSError):
        print(f"rrl: {text}", file=sys.stderr, flush=True)
