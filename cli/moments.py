"""Times as people give them on the command line."""

from __future__ import annotations

import re
import time
from datetime import datetime

from rrl.cli.asking import BadInput

_AGO = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(s|m|min|h|d)")
_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def moment(text: str, now: float | None = None) -> float:
    """``--since``, in s since the epoch. Raises BadInput."""
    if match := _AGO.fullmatch(text.strip()):
        return (time.time() if now is None else now) - float(match[1]) * _UNITS[match[2]]
    try:
        at = datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError, OSError):
        at = -1.0
    if at < 0:
        right = '"90s", "10m", "2h", "1d" (ago) or a time like "2026-11-20T09:00" (yours; with Z: UTC)'
        raise BadInput(f'--since "{text}" is no time; write for example {right}')
    return at
