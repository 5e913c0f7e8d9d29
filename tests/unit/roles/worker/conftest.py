"""A fixture with the scene in which workers are tested."""

from __future__ import annotations

import pytest

from rrl.tests.support.listening_manager import Lab
from rrl.tests.support.roles.worker_scene import HEARTBEAT_S, Scene


@pytest.fixture
def scene(at: Lab, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setenv("RRL_HEARTBEAT_INTERVAL", str(HEARTBEAT_S))
    return Scene(at)
