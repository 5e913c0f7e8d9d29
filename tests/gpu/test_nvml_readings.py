"""Values of the real driver: recorded, judged by the node checks, and complete."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from rrl.core.types import Verdict
from rrl.health.readers.base import ReaderOptions
from rrl.health.readers.nvml.gpu import _INITIAL_NAMESPACE
from rrl.health.readers.nvml.reader import NvmlReader
from rrl.health.readers.samples import NvidiaGpu
from rrl.tests.gpu.conftest import StartProcess
from rrl.tests.support.health.simulated_node import ObservedNode
from rrl.tests.support.listening_manager import wait_until
from rrl.tests.support.nvml.record import record as record_driver

pytestmark = pytest.mark.gpu

HELD_MIB = 900
"""Memory (MiB) that a test process allocates; CUDA's context takes some hundred MiB more."""


def test_readings_are_complete_and_no_check_fails_the_node(nvml: Any, record: Callable[[str, str], None]) -> None:
    """The recording is meant for tests/data/recorded/nvml, where the unit tests replay it."""
    recording = record_driver()
    name = re.sub(r"[^a-z0-9]+", "-", recording.reading.gpus[0].name.lower()).strip("-")
    record(f"{name}.json", msgspec.json.format(msgspec.json.encode(recording), indent=1).decode())
    assert recording.reading.driver
    for gpu in recording.reading.gpus:
        assert gpu.uuid.startswith("GPU-")
        silent = [field for field in _fields(gpu) if getattr(gpu, field) is None and not gpu.unread.get(field)]
        assert silent == [], "fields without a value and without a reason"
    node = ObservedNode().reads(recording.reading, times=5)
    failed = [f"{found.detector}: {found.evidence}" for found in node.found if found.verdict is Verdict.FAIL]
    assert failed == [], "either this GPU is broken, or a check misreads it"


_MAY_BE_NONE = {"tensor_active", "fabric_status", "lost"}
"""Fields of a reading that may be missing without a reason."""


def _fields(gpu: NvidiaGpu) -> list[str]:
    return [field for field in gpu.__struct_fields__ if field not in _MAY_BE_NONE]


def test_process_on_the_gpu_is_listed_with_its_memory(nvml: Any, cuda_process: StartProcess) -> None:
    def reading() -> NvidiaGpu:
        reader = NvmlReader(ReaderOptions())  # its first reading queries everything
        try:
            return reader.read().gpus[0]
        finally:
            reader.close()

    before = reading()
    process, _ = cuda_process(HELD_MIB, "idle")
    after = reading()
    assert (after.memory_used or 0) - (before.memory_used or 0) >= HELD_MIB * 2**20
    if os.readlink("/proc/self/ns/pid") != _INITIAL_NAMESPACE:
        pytest.skip("this container has process ids of its own, but NVML lists those of the host")
    (listed,) = [one for one in after.processes or () if one.pid == process.pid]
    assert listed.uid == os.getuid()
    assert listed.name
    process.kill()
    wait_until(lambda: all(one.pid != process.pid for one in reading().processes or ()))
