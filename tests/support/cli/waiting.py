"""Waits for another thread or process, with a generous deadline."""

from __future__ import annotations

import io
import sys
import threading
import time
from collections.abc import Callable

import pytest

from rrl.cli import main

DEADLINE_S = 60.0


def eventually(condition: Callable[[], object]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "the condition did not become true before the deadline"
        time.sleep(0.02)


class CommandInThread:
    """A command of rrl that runs in a thread, and that waits for what a test does meanwhile."""

    def __init__(self, *words: str) -> None:
        self._codes: list[int] = []
        self._thread = threading.Thread(target=lambda: self._codes.append(main.run(words)), daemon=True)
        self._thread.start()

    def ends(self) -> int:
        """Wait until the command has ended, and return its exit code."""
        self._thread.join(timeout=DEADLINE_S)
        assert not self._thread.is_alive()
        return self._codes[0]


class Output:
    """A replacement of stdout that can be read while it is written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._stream = io.StringIO()
        monkeypatch.setattr(sys, "stdout", self._stream)

    @property
    def lines(self) -> list[str]:
        return self._stream.getvalue().splitlines()
