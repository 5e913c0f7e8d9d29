"""The values of the NVML reader, through the real nvidia-ml-py, when the driver answers."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pynvml
import pytest

from rrl.health.readers.base import ReaderOptions
from rrl.health.readers.nvml.queries import MEDIUM_EVERY, SLOW_EVERY
from rrl.health.readers.nvml.reader import NvmlReader
from rrl.health.readers.samples import GpuProcess, NvidiaGpu, NvLink
from rrl.tests.support.nvml.driver import FakeDriver, Value
from rrl.tests.support.nvml.reading import read_in_child

VALUES: dict[str, Value] = {
    "recovery_action": "drain_and_reset",
    "ecc_volatile_corrected": 11,
    "ecc_volatile_uncorrected": 12,
    "ecc_aggregate_uncorrected": 1 << 40,
    "remap_pending": True,
    "remap_failed": True,
    "retired_corrected": 19,
    "retired_uncorrected": 20,
    "retired_pending": True,
    "temperature": 22,
    "temperature_slowdown": 23,
    "temperature_memory": 25,
    "temperature_memory_max": 26,
    "clock_reasons": ("sw_power_cap", "hw_thermal"),
    "clock_sm": 28,
    "clock_sm_max": 29,
    "utilization": 32,
    "memory_used": 5 << 30,
    "memory_total": 80 << 30,
    "pcie_replays": 35,
    "pcie_gen": 3,
    "pcie_gen_max": 4,
    "pcie_width": 8,
    "pcie_width_max": 16,
    "fabric_state": "in_progress",
    "mig": True,
    "uuid": "GPU-1",
    "name": "NVIDIA H100",
    "serial": "123",
    "vbios": "96.00",
}
"""Fields of one GPU, with different values in all fields that could be confused."""


def after(reader: NvmlReader, reads: int) -> NvidiaGpu:
    """Read ``reads`` times, and return the first GPU of the last reading."""
    return [reader.read() for _ in range(reads)][-1].gpus[0]


def test_each_field_has_the_value_that_the_driver_reports(driver: FakeDriver, reader: NvmlReader) -> None:
    for field, value in VALUES.items():
        driver.set(0, field, value)
    driver.set(0, "pci", "00000000:C7:00.0").link(0, 3, "active", 0).link(0, 3, "replay", 41)
    driver.link(0, 3, "recovery", 42).link(0, 3, "crc_flit", 43).link(0, None, "crc_data", 44)
    driver.process(0, os.getpid(), 6 << 30)
    gpu = reader.read().gpus[0]
    assert {field: getattr(gpu, field) for field in VALUES} == VALUES
    assert (gpu.index, gpu.pci, gpu.lost, gpu.fabric_status) == (0, "0000:c7:00", "", "success")
    assert gpu.nvlinks is not None
    assert gpu.nvlinks[3] == NvLink(link=3, active=False, replay=41, recovery=42, crc_flit=43, crc_data=44)
    assert gpu.nvlinks[4] == NvLink(link=4, active=True, replay=0, recovery=0, crc_flit=0, crc_data=44)
    assert [(process.pid, process.uid, process.memory) for process in gpu.processes or ()] == [
        (os.getpid(), os.getuid(), 6 << 30)
    ]
    assert gpu.unread == {}
    checked = {*VALUES, "index", "pci", "lost", "fabric_status", "nvlinks", "processes", "unread"}
    assert checked == set(NvidiaGpu.__struct_fields__), "this test does not check all fields of a GPU"


def test_gpus_are_listed_in_the_order_of_nvml(driver: FakeDriver, reader: NvmlReader) -> None:
    driver.gpus(8).set(7, "temperature", 77).version("575.1")
    data = reader.read()
    assert [gpu.uuid for gpu in data.gpus] == [driver.uuid(index) for index in range(8)]
    assert [gpu.temperature for gpu in data.gpus] == [41] * 7 + [77]
    assert data.driver == "575.1"


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "none"),
        (1, "gpu_reset"),
        (2, "node_reboot"),
        (3, "drain_p2p"),
        (4, "drain_and_reset"),
        (7, "system_reboot"),
        (8, "unknown (8)"),
    ],
)
def test_recovery_action_is_reported_by_name(driver: FakeDriver, reader: NvmlReader, number: int, text: str) -> None:
    driver.set(0, "recovery_action", number)
    assert reader.read().gpus[0].recovery_action == text


def test_links_and_fabric_that_changed_are_read_with_each_of_the_next_reads(
    driver: FakeDriver, reader: NvmlReader
) -> None:
    """Without this rule, three samples of a check could come from a single read of the links."""
    reader.read()
    driver.link(0, 5, "active", 0)
    while (links := reader.read().gpus[0].nvlinks) and links[5].active:
        pass
    driver.link(0, 5, "active", 1)
    back = reader.read().gpus[0].nvlinks
    assert back is not None
    assert back[5].active


def test_fabric_that_is_not_ready_at_first_is_read_again_at_once(driver: FakeDriver, tmp_path: Path) -> None:
    driver.set(0, "fabric_state", "in_progress")
    reader = NvmlReader(ReaderOptions())
    assert reader.read().gpus[0].fabric_state == "in_progress"
    driver.set(0, "fabric_state", "completed")
    assert reader.read().gpus[0].fabric_state == "completed"
    reader.close()


def test_gpus_withheld_by_a_device_cgroup_are_counted_by_their_device_files(
    driver: FakeDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr("os.access", lambda path, mode: not str(path).endswith("nvidia2"))
    reader = NvmlReader(ReaderOptions(dev=str(tmp_path)))
    data = reader.read()
    assert (data.granted, data.withheld) == (2, 1)
    reader.close()


def test_failed_fabric_registration_states_the_reason(driver: FakeDriver, reader: NvmlReader) -> None:
    driver.set(0, "fabric_status", pynvml.NVML_ERROR_TIMEOUT)
    gpu = reader.read().gpus[0]
    assert (gpu.fabric_state, gpu.fabric_status) == ("completed", "the driver timed out")


def test_clock_reason_without_a_name_is_reported_by_number(driver: FakeDriver, reader: NvmlReader) -> None:
    driver.set(0, "clock_reasons", 1 << 3 | 1 << 20)
    assert reader.read().gpus[0].clock_reasons == ("hw_slowdown", "bit_20")


def test_no_clock_reason_is_not_the_same_as_an_unread_one(driver: FakeDriver, reader: NvmlReader) -> None:
    driver.set(0, "clock_reasons", 0).set(1, "clock_reasons", None)
    assert [gpu.clock_reasons for gpu in reader.read().gpus] == [(), None]


def test_temperature_limit_given_as_a_margin_becomes_a_temperature(driver: FakeDriver, reader: NvmlReader) -> None:
    """From Ada on, GPUs give limits as margins, and nvmlDeviceGetTemperatureThreshold returns no limit.

    The GPU is at 40 °C and its margin is 47 K, so that a margin of 0 K is reached at 87 °C.
    """
    driver.set(None, "temperature", 40).set(None, "temperature_margin", 47)
    driver.set(None, "temperature_slowdown", None).set(None, "temperature_slowdown_tlimit", -2)
    assert reader.read().gpus[0].temperature_slowdown == 89


def test_memory_in_use_is_without_the_drivers_own_reserve(driver: FakeDriver, reader: NvmlReader) -> None:
    driver.set(0, "memory_used", 0).set(0, "memory_reserved", 600 << 20)
    assert reader.read().gpus[0].memory_used == 0


def test_gpu_without_nvlink_has_no_links_and_states_the_reason(driver: FakeDriver, reader: NvmlReader) -> None:
    driver.set(0, "nvlinks", None).set(1, "nvlinks", 0)
    first, second = reader.read().gpus
    assert (first.nvlinks, first.unread["nvlinks"]) == (None, "not supported")
    assert (second.nvlinks, second.unread["nvlinks"]) == (None, "this GPU has no NVLink")


def test_counters_of_nvlink_before_hopper_are_read_by_function(driver: FakeDriver, reader: NvmlReader) -> None:
    driver.set(None, "nvlink_fields", None).set(None, "nvlinks", 12).link(0, 5, "replay", 9).link(0, 5, "crc_data", 8)
    driver.link(0, None, "crc_data", 0).link(0, 0, "active", 0)
    for counter in ("replay", "recovery", "crc_flit", "crc_data"):
        driver.link(0, 0, counter, None)  # a link that is down may have no counters
    links = reader.read().gpus[0].nvlinks
    assert links is not None
    assert len(links) == 12
    assert links[0] == NvLink(link=0, active=False)
    assert (links[5].replay, links[5].crc_data, links[4].replay) == (9, 8, 0)


def test_process_that_has_ended_has_no_owner(driver: FakeDriver, reader: NvmlReader) -> None:
    nobody = 4194304  # one above the highest pid of 64-bit Linux
    driver.process(0, nobody, 5)
    assert reader.read().gpus[0].processes == (GpuProcess(nobody, None, 5),)


def test_process_in_another_pid_namespace_has_no_owner(driver: FakeDriver, tmp_path: Path) -> None:
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    (tmp_path / "proc/self/ns/pid").symlink_to("pid:[4026532999]")
    (tmp_path / "proc/12").mkdir()
    (tmp_path / "proc/12/status").write_text("Name:\tsomebody else\nUid:\t7\t7\t7\t7\n")
    driver.process(0, 12, 5)
    reader = NvmlReader(ReaderOptions(proc=str(tmp_path / "proc")))
    assert reader.read().gpus[0].processes == (GpuProcess(12, None, 5),)
    reader.close()


def test_urgent_fields_are_read_every_time(driver: FakeDriver, reader: NvmlReader) -> None:
    reader.read()
    driver.set(0, "recovery_action", "gpu_reset").set(0, "temperature", 90).set(0, "ecc_volatile_uncorrected", 1)
    driver.set(0, "utilization", 100).set(0, "clock_reasons", ("hw_thermal",))
    gpu = reader.read().gpus[0]
    assert (gpu.recovery_action, gpu.temperature, gpu.ecc_volatile_uncorrected) == ("gpu_reset", 90, 1)
    assert (gpu.utilization, gpu.clock_reasons) == (100, ("hw_thermal",))


def test_slow_counters_are_read_at_their_interval_and_repeated_in_between(
    driver: FakeDriver, reader: NvmlReader
) -> None:
    before = reader.read().gpus[0]
    driver.link(0, 3, "replay", 7).set(0, "retired_uncorrected", 1).set(0, "clock_sm", 650)
    assert after(reader, 1).nvlinks == before.nvlinks
    assert after(reader, MEDIUM_EVERY).clock_sm == 650
    gpu = after(reader, SLOW_EVERY)
    assert gpu.nvlinks is not None
    assert (gpu.nvlinks[3].replay, gpu.retired_uncorrected) == (7, 1)


def test_changed_recovery_action_triggers_a_full_read(driver: FakeDriver, reader: NvmlReader) -> None:
    reader.read()
    driver.set(0, "remap_pending", 1).set(0, "recovery_action", "gpu_reset")
    assert reader.read().gpus[0].remap_pending is True


def test_xid_triggers_a_full_read_of_its_gpu(driver: FakeDriver, reader: NvmlReader) -> None:
    reader.read()
    driver.set(None, "ecc_aggregate_uncorrected", 3).xid(1, 48)
    assert [gpu.ecc_aggregate_uncorrected for gpu in reader.read().gpus] == [0, 3]


def test_read_of_urgent_fields_makes_four_nvml_calls_per_gpu(
    driver: FakeDriver, reader: NvmlReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call goes into the driver, and these calls are the cost of the reader on a real node."""
    calls: Counter[str] = Counter()

    class Counting:
        def __getattr__(self, name: str) -> Any:
            found = getattr(pynvml, name)
            calls[name] += name.startswith("nvml") and callable(found)
            return found

    monkeypatch.setitem(sys.modules, "pynvml", Counting())
    driver.gpus(8)
    reader.read()
    whole = calls.total()
    calls.clear()
    for _ in range(SLOW_EVERY):
        reader.read()
    assert calls["nvmlDeviceGetTemperature"] == calls["nvmlDeviceGetUtilizationRates"] == 8 * SLOW_EVERY
    assert calls["nvmlDeviceGetComputeRunningProcesses_v3"] == 8 * SLOW_EVERY // MEDIUM_EVERY
    assert calls["nvmlDeviceGetNvLinkState"] == 8 * 18
    assert calls.total() / SLOW_EVERY < 8 * 8, "a read of eight GPUs makes 64 or more calls on average"
    assert whole > calls.total() / SLOW_EVERY * 4, (
        "the first read, which reads all fields, makes few more calls than others"
    )


def test_old_driver_reports_the_fields_that_it_supports(tmp_path: Path) -> None:
    driver = FakeDriver(tmp_path, old=True).gpus(1).process(0, os.getpid(), 7)
    driver.set(0, "memory_used", 1 << 30).set(0, "memory_reserved", 0).set(0, "clock_reasons", ("hw_slowdown",))
    gpu = read_in_child(driver.env()).gpus[0]
    assert (gpu.recovery_action, gpu.unread["recovery_action"]) == (None, "not supported")
    assert (gpu.memory_used, gpu.clock_reasons, gpu.fabric_state) == (1 << 30, ("hw_slowdown",), "completed")
    assert [process.memory for process in gpu.processes or ()] == [7]
