"""Records NVML's answers on a node with a real GPU, so that tests can compare the stand-in driver with them.

    python -m rrl.tests.support.nvml.record > tests/data/recorded/nvml/h100.json

The recording contains the reader's sample, NVML's answer to each of the reader's calls, and the output of ``nvidia-smi
-q -x`` if that is installed, as an independent source. It contains serial numbers: check it before you publish it.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from rrl.health.readers.base import NotInstalled, PermissionDenied, ReaderOptions
from rrl.health.readers.nvml import queries
from rrl.health.readers.nvml.names import SUCCESS
from rrl.health.readers.nvml.reader import NvmlReader
from rrl.health.readers.nvml.session import FieldQuery, Query, QueryResults
from rrl.health.readers.samples import NvmlData
from rrl.tests.support.nvml.driver import FakeDriver

READS = 30
"""Number of timed reads, which are 0.1 s apart."""
_SMI_TIMEOUT_S = 60.0
"""Deadline (s) of nvidia-smi."""


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    kernel: str
    ml_py: str
    """Version of nvidia-ml-py."""
    reading: NvmlData
    calls: tuple[dict[str, str], ...]
    """For each GPU: NVML's answer by field (and by alternative, if there are several), or the reason why there is no
    answer."""
    cpu_seconds: float
    """CPU time (s) of this process per read, over :data:`READS` reads."""
    smi: str = ""
    """Output of ``nvidia-smi -q -x``; empty if it is not installed."""


def record() -> Recording:
    """Record this node. Raises NotInstalled, PermissionDenied or RuntimeError, like the reader."""
    import pynvml

    reader = NvmlReader(ReaderOptions())
    reading = reader.read()
    began = time.process_time()
    for _ in range(READS):
        time.sleep(0.1)
        reader.read()
    spent = (time.process_time() - began) / READS
    reader.close()
    pynvml.nvmlInit()
    calls = tuple(_calls(pynvml, index) for index in range(len(reading.gpus)))
    pynvml.nvmlShutdown()
    return Recording(
        kernel=platform.release(), ml_py=_version(), reading=reading, calls=calls, cpu_seconds=spent, smi=_smi()
    )


def play(recording: Recording, folder: Path) -> FakeDriver:
    """Return a stand-in driver that answers as the recorded driver did.

    Processes are left out, because they were processes of another machine.
    """
    driver = FakeDriver(folder).gpus(len(recording.reading.gpus)).version(recording.reading.driver)
    for gpu in recording.reading.gpus:
        for field in ("uuid", "name", "serial", "vbios"):
            driver.set(gpu.index, field, getattr(gpu, field) or None)
        driver.set(gpu.index, "pci", f"0000{gpu.pci.upper()}.0")
        for field in (*_NUMBERS, "recovery_action", "fabric_state", "clock_reasons"):
            driver.set(gpu.index, field, getattr(gpu, field))
        driver.set(gpu.index, "nvlinks", None if gpu.nvlinks is None else len(gpu.nvlinks))
        for link in gpu.nvlinks or ():
            for field in ("active", "replay", "recovery", "crc_flit", "crc_data"):
                driver.link(gpu.index, link.link, field, getattr(link, field))
    return driver


_NUMBERS = tuple(
    field
    for group in (
        queries.FAST_FIELDS,
        queries.FAST,
        queries.MEDIUM_FIELDS,
        queries.MEDIUM,
        queries.SLOW_FIELDS,
        queries.SLOW,
        queries.FIXED,
    )
    for ask in group
    for field in (ask.fields if isinstance(ask, Query) else (ask.field,))
    if field not in ("recovery_action", "fabric_state", "fabric_status", "clock_reasons")
)


def _calls(nvml: Any, index: int) -> dict[str, str]:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:
        return {"handle": str(error)}
    answers, values = QueryResults(nvml, handle, session_may_end=False), dict[str, str]()
    for field in (*queries.FAST_FIELDS, *queries.MEDIUM_FIELDS, *queries.SLOW_FIELDS):
        ((code, number),) = answers.field_values([(field.number, 0)])
        values[f"{field.field} by field {field.number}"] = str(number) if code == SUCCESS else answers.describe(code)
        values.update(_ways(answers, field.field, field))
    for ask in (*queries.IDENTITY, *queries.FAST, *queries.MEDIUM, *queries.SLOW, *queries.FIXED):
        values.update(_ways(answers, ", ".join(ask.fields), ask))
    return values


def _ways(answers: QueryResults, name: str, query: Query | FieldQuery) -> dict[str, str]:
    values = {}
    for place, way in enumerate(query.alternatives):
        code, value = answers.call(way)
        values[f"{name} by way {place}"] = repr(value) if code == SUCCESS else answers.describe(code)
    return values


def _version() -> str:
    from importlib.metadata import version

    return version("nvidia-ml-py")


def _smi() -> str:
    try:
        done = subprocess.run(["nvidia-smi", "-q", "-x"], capture_output=True, text=True, timeout=_SMI_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def main() -> int:
    try:
        recording = record()
    except (NotInstalled, PermissionDenied, RuntimeError) as error:
        print(f"nothing to record: {error}", file=sys.stderr)
        return 2
    print(msgspec.json.format(msgspec.json.encode(recording), indent=1).decode(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
