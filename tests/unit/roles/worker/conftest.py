"""A fixture with the scene in which workers are tested."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rrl.tests.support.listening_manager import lab
from rrl.tests.support.roles.worker_scene import HEARTBEAT_S, Scene


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setenv("RRL_HEARTBEAT_INTERVAL", str(HEARTBEAT_S))
    with lab(tmp_path) as at:
        yield Scene(at)
