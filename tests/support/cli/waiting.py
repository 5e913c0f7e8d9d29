"""Waits for another thread or process, with a generous deadline."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable

import pytest

DEADLINE_S = 60.0


def eventually(condition: Callable[[], object]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "the condition did not become true before the deadline"
        time.sleep(0.02)


class Output:
    """A replacement of stdout that can be read while it is written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._stream = io.StringIO()
        monkeypatch.setattr(sys, "stdout", self._stream)

    @property
    def lines(self) -> list[str]:
        return self._stream.getvalue().splitlines()
