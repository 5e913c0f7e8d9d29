"""If the driver fails, the NVML reader gives the reason for each missing value, and never crashes."""

from __future__ import annotations

import select
import signal
import subprocess

import pynvml
import pytest

from rrl.health.readers.base import NotInstalled, PermissionDenied, ReaderOptions
from rrl.health.readers.nvml import queries
from rrl.health.readers.nvml import reader as nvml_reader
from rrl.health.readers.nvml.reader import NvmlReader
from rrl.health.readers.samples import GpuXid, NvidiaGpu
from rrl.tests.support.nvml.driver import FUNCTIONS, STATE_ENV, FakeDriver
from rrl.tests.support.nvml.reading import SECONDS, reading_error, result_of_child, start

ERRORS = {name: getattr(pynvml, name) for name in sorted(dir(pynvml)) if name.startswith("NVML_ERROR_")}
TREATED_APART = {
    "DRIVER_NOT_LOADED",  # ends the session
    "GPU_IS_LOST",  # reports a state of the GPU
    "FUNCTION_NOT_FOUND",  # makes the reader call another function
    "NOT_SUPPORTED",
    "NO_PERMISSION",
    "TIMEOUT",  # loses only the value
}
"""One error for each way in which the reader treats an error; ``make test-long`` has all of them."""
EACH_ERROR = [
    name if name.removeprefix("NVML_ERROR_") in TREATED_APART else pytest.param(name, marks=pytest.mark.long)
    for name in ERRORS
]
CALLED = sorted(FUNCTIONS - {"nvmlDeviceGetCount_v2", "nvmlInitWithFlags", "nvmlShutdown", "nvmlErrorString"})
"""All functions of NVML except those on which every value depends."""
FIELDS = [f"field:{number}" for number in (3, 4, 5, 6, 29, 30, 31, 82, 91, 94, 142, 143, 144, 145, 161, 162, 163, 230)]


def read_fresh() -> tuple[NvidiaGpu, ...]:
    reader = NvmlReader(ReaderOptions())
    try:
        return reader.read().gpus
    finally:
        reader.close()


@pytest.mark.parametrize("error", EACH_ERROR)
def test_error_of_any_nvml_function_loses_only_its_value_and_states_the_reason(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    """The first GPU is read by a new reader and by one that has read before.

    The second GPU keeps its values.
    """
    for often in ("MEDIUM_EVERY", "SLOW_EVERY", "FIXED_EVERY"):
        monkeypatch.setattr(queries, often, 1)
    driver.set(None, "memory_reserved", 0)  # an older function reports this value, too
    healthy = read_fresh()
    for function in (*CALLED, *FIELDS):
        reader = NvmlReader(ReaderOptions())
        reader.read()
        driver.fail(function, ERRORS[error], gpu=0)
        for gpus in (read_fresh(), reader.read().gpus, reader.read().gpus):
            assert reading_error(gpus[0], healthy[0]) == [], function
            assert gpus[1] == healthy[1], function
        driver.heal()
        reader.close()


@pytest.mark.parametrize("error", EACH_ERROR)
def test_error_of_an_nvml_function_on_all_gpus_loses_only_its_value(driver: FakeDriver, error: str) -> None:
    driver.set(None, "memory_reserved", 0)
    healthy = read_fresh()
    felt = set()
    for function in CALLED:
        driver.fail(function, ERRORS[error])
        for now, before in zip(read_fresh(), healthy, strict=True):
            assert reading_error(now, before) == [], function
            felt |= {function} if now != before else set()
        driver.heal()
    assert {"nvmlDeviceGetClockInfo", "nvmlDeviceGetName", "nvmlDeviceGetUtilizationRates"} <= felt


@pytest.mark.parametrize("error", EACH_ERROR)
def test_error_that_prevents_all_reads_is_one_line(driver: FakeDriver, reader: NvmlReader, error: str) -> None:
    reader.read()
    for function in ("nvmlDeviceGetCount_v2", "nvmlInitWithFlags"):
        driver.fail(function, ERRORS[error])
        reader.close()
        with pytest.raises((NotInstalled, PermissionDenied, RuntimeError), match=r"^[^\n]{10,}$"):
            reader.read()
        driver.heal()
        assert len(reader.read().gpus) == 2, "the reader does not recover at its next read"


def test_unsupported_and_forbidden_fields_are_reported_as_such(driver: FakeDriver, reader: NvmlReader) -> None:
    driver.set(0, "clock_sm", None).fail("nvmlDeviceGetComputeRunningProcesses_v3", "NO_PERMISSION", 0)
    driver.fail("field:230", "INVALID_ARGUMENT", 0).fail("nvmlDeviceGetMaxClockInfo", "FUNCTION_NOT_FOUND", 0)
    gpu = reader.read().gpus[0]
    assert gpu.unread["clock_sm"] == "not supported"
    assert gpu.unread["processes"] == "not permitted"
    assert gpu.unread["recovery_action"] == "not known to this driver"
    assert gpu.unread["clock_sm_max"] == "no such function in this driver"
    assert [gpu.clock_sm, gpu.processes, gpu.recovery_action, gpu.clock_sm_max, gpu.lost] == [None] * 4 + [""]


def test_without_field_values_the_older_functions_are_called(driver: FakeDriver, reader: NvmlReader) -> None:
    driver.set(0, "retired_uncorrected", 3).set(0, "retired_corrected", 0).set(0, "retired_pending", 1)
    driver.set(0, "ecc_volatile_uncorrected", 2).set(0, "remap_failed", 1).set(0, "pcie_replays", 9)
    driver.fail("nvmlDeviceGetFieldValues", "FUNCTION_NOT_FOUND")
    gpu = reader.read().gpus[0]
    assert (gpu.ecc_volatile_uncorrected, gpu.remap_failed, gpu.pcie_replays) == (2, True, 9)
    assert (gpu.retired_uncorrected, gpu.retired_corrected, gpu.retired_pending) == (3, 0, True)
    assert gpu.nvlinks is not None
    assert (len(gpu.nvlinks), gpu.nvlinks[0].replay) == (18, 0)


def test_a_value_that_is_read_again_is_no_longer_unread(driver: FakeDriver, reader: NvmlReader) -> None:
    driver.fail("nvmlDeviceGetTemperature", "TIMEOUT")
    assert reader.read().gpus[0].unread["temperature"] == "the driver timed out"
    driver.heal()
    gpu = reader.read().gpus[0]
    assert (gpu.temperature, gpu.unread.get("temperature")) == (41, None)


# ── GPUs that are lost ───────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("error", "text"),
    [("GPU_IS_LOST", "GPU is lost"), ("RESET_REQUIRED", "GPU requires reset"), ("UNKNOWN", "Unknown Error")],
)
def test_lost_gpu_is_listed_without_values_of_earlier_reads(
    driver: FakeDriver, reader: NvmlReader, error: str, text: str
) -> None:
    before = reader.read().gpus
    driver.lose(0, error)
    lost, other = reader.read().gpus
    assert lost.lost == text
    assert (lost.uuid, lost.pci, lost.serial) == (before[0].uuid, before[0].pci, before[0].serial)
    assert (lost.temperature, lost.nvlinks, lost.memory_used, lost.recovery_action) == (None, None, None, None)
    assert set(lost.unread.values()) == {text}
    assert other == before[1]


@pytest.mark.parametrize("error", ["GPU_IS_LOST", "UNKNOWN", "IRQ_ISSUE"])
def test_gpu_lost_before_the_first_read_is_listed_without_a_uuid(driver: FakeDriver, error: str) -> None:
    driver.lose(0, error)
    lost, other = read_fresh()
    assert (lost.index, lost.uuid, bool(lost.lost)) == (0, "", True)
    assert other.lost == ""


def test_a_lost_gpu_that_was_reset_is_found_again(driver: FakeDriver, reader: NvmlReader) -> None:
    driver.set(None, "recovery_action", None)  # otherwise a change of this value would make the reader read all fields
    reader.read()
    driver.lose(0)
    assert reader.read().gpus[0].lost
    driver.heal().set(0, "temperature", 30).set(0, "retired_uncorrected", 1)
    gpu = reader.read().gpus[0]
    assert (gpu.lost, gpu.temperature, gpu.name) == ("", 30, "NVIDIA H100 80GB HBM3 (stand-in)")
    assert gpu.retired_uncorrected == 1, "the value from before the reset is missing"
    assert "temperature" not in gpu.unread


def test_lost_gpu_keeps_its_name_when_the_session_is_reopened(
    driver: FakeDriver, reader: NvmlReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml_reader, "_LOST_SEARCH_READS", 2)
    uuid = reader.read().gpus[0].uuid
    driver.lose(0)
    assert [reader.read().gpus[0].uuid for _ in range(5)] == [uuid] * 5
    driver.heal()
    assert [reader.read().gpus[0].lost for _ in range(3)][-1] == ""


def test_unknown_error_of_one_function_does_not_mark_the_gpu_lost(driver: FakeDriver, reader: NvmlReader) -> None:
    driver.fail("nvmlDeviceGetTemperature", "UNKNOWN")
    gpu = reader.read().gpus[0]
    assert (gpu.lost, gpu.temperature, gpu.unread["temperature"]) == ("", None, "Unknown Error")


def test_gpu_of_another_allocation_is_not_lost(driver: FakeDriver, reader: NvmlReader) -> None:
    """NVML counts a GPU that the job's cgroup forbids, but refuses its handle."""
    driver.fail("nvmlDeviceGetHandleByIndex_v2", "NO_PERMISSION", 0)
    forbidden, ours = reader.read().gpus
    assert (forbidden.lost, forbidden.uuid, forbidden.temperature) == ("", "", None)
    assert set(forbidden.unread.values()) == {"not permitted"}
    assert ours.temperature == 41


# ── Xid events ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_xids_are_reported_once_in_order_and_by_gpu(driver: FakeDriver, reader: NvmlReader) -> None:
    driver.xid(0, 13)
    assert reader.read().xids == (), "an Xid from before the first read was reported"
    driver.xid(1, 79).xid(0, 31).xid(1, 45)
    zero, one = driver.uuid(0), driver.uuid(1)
    data = reader.read()
    assert data.xids == (GpuXid(one, 79), GpuXid(zero, 31), GpuXid(one, 45))
    assert data.xid_events == ""
    assert reader.read().xids == ()


def test_xid_without_a_gpu_is_not_attributed_to_one(driver: FakeDriver, reader: NvmlReader) -> None:
    reader.read()
    driver.xid(None, 62)
    assert reader.read().xids == (GpuXid("", 62, "the driver did not name the GPU"),)


def test_storm_of_xids_is_spread_over_several_reads(driver: FakeDriver, reader: NvmlReader) -> None:
    reader.read()
    for _ in range(300):
        driver.xid(0, 31)
    assert [len(reader.read().xids) for _ in range(3)] == [256, 44, 0]


def test_xid_of_a_gpu_that_is_lost_at_once_is_read(driver: FakeDriver, reader: NvmlReader) -> None:
    reader.read()
    driver.lose(1).xid(1, 79)
    data = reader.read()
    assert data.xids == (GpuXid(driver.uuid(1), 79),)
    assert data.gpus[1].lost == "GPU is lost"


@pytest.mark.parametrize(
    ("function", "error", "why"),
    [
        ("nvmlEventSetCreate", "NO_PERMISSION", "not permitted"),
        ("nvmlDeviceRegisterEvents", "NOT_SUPPORTED", "not supported"),
        ("nvmlEventSetWait_v2", "GPU_IS_LOST", "waiting for events: GPU is lost"),
    ],
)
def test_reason_for_missing_xids_is_reported_until_they_arrive(
    driver: FakeDriver, reader: NvmlReader, function: str, error: str, why: str
) -> None:
    driver.fail(function, error)
    assert reader.read().xid_events == why
    driver.heal()
    assert "" in [reader.read().xid_events for _ in range(30)]
    driver.xid(0, 94)
    assert [xid.xid for xid in reader.read().xids] == [94]


def test_xids_of_other_gpus_are_read_if_one_gpu_has_no_events(driver: FakeDriver, reader: NvmlReader) -> None:
    driver.set(0, "xid_events", None)
    assert reader.read().xid_events == f"{driver.uuid(0)}: not supported"
    for code in range(30):  # more reads than pass before the reader tries the events of GPU 0 again
        driver.xid(1, code).xid(0, 99)
        assert [xid.xid for xid in reader.read().xids] == [code]


# ── absent, unloaded and reloaded drivers ────────────────────────────────────────────────────────────────────────────
def test_without_the_nvml_library_the_reader_is_absent() -> None:
    output = result_of_child({})
    assert output == "NotInstalled: libnvidia-ml.so.1 is not found: no NVIDIA driver is installed"


def test_without_a_loaded_driver_the_reader_is_absent(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STATE_ENV)
    with pytest.raises(NotInstalled, match="driver is not loaded"):
        read_fresh()


def test_driver_without_any_gpu_makes_the_reader_absent(driver: FakeDriver) -> None:
    driver.fail("nvmlInitWithFlags", "GPU_NOT_FOUND")
    with pytest.raises(NotInstalled, match="finds no GPU"):
        read_fresh()


def test_driver_that_refuses_access_is_denied(driver: FakeDriver) -> None:
    driver.fail("nvmlInitWithFlags", "NO_PERMISSION")
    with pytest.raises(PermissionDenied, match="refuses access"):
        read_fresh()


def test_reading_continues_with_a_reloaded_driver(driver: FakeDriver, reader: NvmlReader) -> None:
    reader.read()
    driver.reload().version("575.1").set(0, "temperature", 33)
    data = reader.read()
    assert (data.driver, data.gpus[0].temperature, data.gpus[0].unread.get("temperature")) == ("575.1", 33, None)
    driver.xid(0, 48)
    assert [xid.xid for xid in reader.read().xids] == [48]


def test_replaced_driver_is_reported_and_reopened(driver: FakeDriver, reader: NvmlReader) -> None:
    reader.read()
    driver.reload().fail("nvmlInitWithFlags", "LIB_RM_VERSION_MISMATCH")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="differ in version"):
            reader.read()
    driver.heal()
    assert len(reader.read().gpus) == 2


def test_unloaded_driver_is_absent_until_it_is_loaded_again(driver: FakeDriver, reader: NvmlReader) -> None:
    reader.read()
    driver.reload().fail("nvmlInitWithFlags", "DRIVER_NOT_LOADED")
    with pytest.raises(NotInstalled):
        reader.read()
    driver.heal()
    assert len(reader.read().gpus) == 2


def test_gpus_that_appear_or_disappear_change_the_list(driver: FakeDriver, reader: NvmlReader) -> None:
    for count in (2, 7, 8, 1, 0, 2):
        driver.gpus(count)
        assert [gpu.index for gpu in reader.read().gpus] == list(range(count))
    driver.xid(1, 31)
    assert [xid.xid for xid in reader.read().xids] == [31]


# ── calls that hang ──────────────────────────────────────────────────────────────────────────────────────────────────
SHORT = 1.0
"""A time limit (s) that is many times the duration of a read, and short enough for a test."""


def query(process: subprocess.Popen[str]) -> None:
    assert process.stdin
    process.stdin.write("read\n")
    process.stdin.flush()


def awaited(process: subprocess.Popen[str], seconds: float) -> str:
    """Return the next line of the process, or an empty string if none comes within ``seconds``."""
    assert process.stdout
    return process.stdout.readline() if select.select([process.stdout], [], [], seconds)[0] else ""


@pytest.mark.parametrize(
    "function",
    ["nvmlInitWithFlags", "nvmlDeviceGetTemperature", "nvmlEventSetWait_v2", "nvmlDeviceGetHandleByIndex_v2"],
)
def test_hung_call_blocks_only_its_process_and_continues_on_return(driver: FakeDriver, function: str) -> None:
    driver.hang(function)
    process = start(driver.env())
    query(process)
    assert awaited(process, SHORT) == "", "the hung call has returned"
    assert process.poll() is None
    driver.heal()
    assert awaited(process, SECONDS).startswith('{"type":"nvml"')
    process.communicate(timeout=SECONDS)
    assert process.returncode == 0


def test_process_blocked_in_a_hung_nvml_call_can_be_ended(driver: FakeDriver) -> None:
    driver.hang("nvmlDeviceGetUtilizationRates", gpu=1)
    process = start(driver.env())
    query(process)
    assert awaited(process, SHORT) == "", "the hung call has returned"
    process.terminate()
    process.communicate(timeout=SECONDS)
    assert process.returncode == -signal.SIGTERM
