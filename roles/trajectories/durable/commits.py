"""The committed steps in a store's log, for readers beside the store, which may be running."""

from __future__ import annotations

import time
from pathlib import Path

from .log import LogDamaged, log_files, read_frames
from .records import StepCommitted, decode

READ_ATTEMPTS = 5
"""Number of attempts to read a log before it counts as damaged. A reader can find a flush that is half written, or a
log that its store is replacing. Both states last only a moment."""
RETRY_DELAY_S = 0.2
"""Seconds between two attempts."""
_TAG = b"step_committed"
_TAG_WITHIN_BYTES = 24
"""Number of first bytes of a payload that contain the tag of its record. Only payloads with the tag of a commit are
decoded, because a log has far more bytes of tokens."""


def read_commits(folder: Path) -> dict[int, StepCommitted]:
    """Return the commits in the newest log of ``folder``, by step; empty if there is no log or no commit yet.

    A store keeps the commits whose checkpoints are kept. Its log may also contain older commits.

    Raises:
        LogDamaged: The log cannot be read.
        LogFormatError: A commit was written by a version of rrl that this version cannot read.
        OSError: The folder or the log cannot be read.
    """
    for attempt in range(READ_ATTEMPTS):
        try:
            return _read(folder)
        except (LogDamaged, OSError):
            if attempt == READ_ATTEMPTS - 1:
                raise
            time.sleep(RETRY_DELAY_S)
    raise AssertionError


def _read(folder: Path) -> dict[int, StepCommitted]:
    commits: dict[int, StepCommitted] = {}
    written = [path for path in log_files(folder) if path.stat().st_size]  # a new store begins with an empty log
    for payload in read_frames(written[-1]) if written else ():
        if _TAG in payload[:_TAG_WITHIN_BYTES] and isinstance(record := decode(payload), StepCommitted):
            commits[record.number] = record
    return commits
