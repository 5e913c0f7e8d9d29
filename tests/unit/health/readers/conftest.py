"""A fake NVIDIA driver, and the NVML reader that uses it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rrl.health.readers.base import ReaderOptions
from rrl.health.readers.nvml.reader import NvmlReader
from rrl.tests.support.nvml.driver import STATE_ENV, FakeDriver


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver = FakeDriver(tmp_path).gpus(2)
    driver.load()
    monkeypatch.setenv(STATE_ENV, str(driver.state))
    return driver


@pytest.fixture
def reader(driver: FakeDriver) -> Iterator[NvmlReader]:
    reader = NvmlReader(ReaderOptions())
    yield reader
    reader.close()
