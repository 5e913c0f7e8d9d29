"""The fake NVIDIA driver: what running processes read from it, and that roles find their GPUs with it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pynvml
import pytest

from rrl.roles.launcher.environment import GPUS_ENV
from rrl.roles.launcher.gpus import NodeGpus, assigned_gpus
from rrl.tests.support.nvml.driver import SONAME, STATE_ENV, FakeDriver, library


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


def test_separate_process_finds_the_fake_library_by_the_loader_path(driver: FakeDriver) -> None:
    program = "import pynvml; pynvml.nvmlInit(); print(pynvml.nvmlDeviceGetCount())"
    argv = [sys.executable, "-c", program]
    done = subprocess.run(argv, env={**os.environ, **driver.env()}, capture_output=True, text=True, timeout=60)
    assert done.stdout == "4\n", done.stderr


def test_fake_driver_without_a_state_file_reports_an_unloaded_driver(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In all other tests, a process that has loaded the fake library therefore finds no driver."""
    monkeypatch.delenv(STATE_ENV)
    with pytest.raises(pynvml.NVMLError_DriverNotLoaded):
        pynvml.nvmlInit()


def test_setting_of_one_gpu_overrides_that_of_all(driver: FakeDriver) -> None:
    driver.set(1, "temperature", 70).set(None, "temperature", 50)
    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(2)]
    assert [pynvml.nvmlDeviceGetTemperature(handle, 0) for handle in handles] == [50, 70]
    pynvml.nvmlShutdown()


def test_concurrent_builds_give_one_whole_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lambda _: library(), range(4)))
    (folder,) = folders
    assert [path.name for path in folder.iterdir()] == [SONAME]


def test_functions_may_be_named_without_their_version(driver: FakeDriver) -> None:
    driver.fail("nvmlDeviceGetCount", "TIMEOUT").fail("nvmlInit_v2", "MEMORY")
    with pytest.raises(pynvml.NVMLError_Memory):
        pynvml.nvmlInit()
    driver.heal().fail("nvmlDeviceGetCount", "TIMEOUT")
    pynvml.nvmlInit()
    with pytest.raises(pynvml.NVMLError_Timeout):
        pynvml.nvmlDeviceGetCount()
    pynvml.nvmlShutdown()


def test_function_that_the_driver_lacks_is_refused(driver: FakeDriver) -> None:
    for order in (driver.hang, lambda function: driver.fail(function, "TIMEOUT")):
        with pytest.raises(ValueError, match="no function"):
            order("nvmlDeviceGetTemprature")


@pytest.mark.parametrize("wrong", ["temprature", "lost"])
def test_unknown_field_is_refused_at_once(driver: FakeDriver, wrong: str) -> None:
    with pytest.raises(ValueError, match="no field"):
        driver.set(0, wrong, 1)
