"""The GPUs of a role, read from the fake NVIDIA driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from rrl.roles.launcher.environment import GPUS_ENV
from rrl.roles.launcher.gpus import NodeGpus, assigned_gpus
from rrl.tests.support.nvml.driver import STATE_ENV, FakeDriver


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver = FakeDriver(tmp_path).gpus(4)
    driver.load()
    monkeypatch.setenv(STATE_ENV, str(driver.state))
    return driver


def test_assigned_gpus_of_a_role_are_named_by_uuid(driver: FakeDriver) -> None:
    environ = {GPUS_ENV: "0,2", "CUDA_VISIBLE_DEVICES": "0,2"}
    assert assigned_gpus(environ) == (driver.uuid(0), driver.uuid(2))


def test_gpu_load_of_a_role_is_that_of_its_gpus(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    driver.set(0, "utilization", 90)
    gpus = NodeGpus()
    assert gpus.any_busy() is False, "the busy GPU is not one of this role"
    driver.set(2, "utilization", 3)
    assert gpus.any_busy() is True
    driver.lose(2)
    assert gpus.any_busy() is False
