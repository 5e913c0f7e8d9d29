"""The queries of a GPU: the function or field of NVML for each value, and how often it is read.

Each call goes to the driver, and on recent GPUs to a processor on the card, which is expensive. So values that must be
known immediately are queried at every read, and counters that the checks use over a minute or more are queried rarely.
One call reads many field values. If a query has alternatives, the later alternatives are for drivers or GPUs that do
not support the earlier alternatives.
"""

from __future__ import annotations

from ctypes import Structure, byref, c_ubyte, c_uint, sizeof
from typing import Any

from .names import clock_reasons, fabric_state, fabric_status, kernel_bus_id, recovery_action
from .session import FieldQuery, Query, QueryFunction

MEDIUM_EVERY = 5
"""Number of reads (once a second) from one query of the medium group to the next. The group contains memory, processes,
power and clocks. A single sample of these values never fails a GPU."""
SLOW_EVERY = 20
"""Number of reads (once a second) from one query of the slow group to the next. The group contains counters and link
states whose checks have windows of a minute or more. An Xid of the GPU, or a changed recovery action, causes an
immediate query of all values."""
FIXED_EVERY = 600
"""Number of reads (once a second) from one query of the fixed group to the next. The group contains names and limits,
which change only with the firmware or by an administrator's command."""

_CORRECTED, _UNCORRECTED = 0, 1
_VOLATILE, _AGGREGATE = 0, 1
_SM = 1
_CORE = 0
_SLOWDOWN, _MEMORY_MAX = 1, 2
_MULTIPLE_SINGLE_BIT, _DOUBLE_BIT = 0, 1
_SLOWDOWN_TLIMIT = 194


# ── alternatives to field values ──────────────────────────────────────────────────────────────────────────────────────
def _ecc(kind: int, counter: int) -> tuple[QueryFunction]:
    return (lambda nvml, handle: nvml.nvmlDeviceGetTotalEccErrors(handle, kind, counter),)


def _remapped(place: int) -> tuple[QueryFunction]:
    return (lambda nvml, handle: bool(nvml.nvmlDeviceGetRemappedRows(handle)[place]),)


def _retired(cause: int) -> tuple[QueryFunction]:
    return (lambda nvml, handle: len(nvml.nvmlDeviceGetRetiredPages(handle, cause)),)


# ── functions with details ────────────────────────────────────────────────────────────────────────────────────────────
def _memory_v2(nvml: Any, handle: Any) -> tuple[int, int]:
    """Return (used, total) bytes; ``used`` does not include memory reserved by the driver."""
    memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    return int(memory.used), int(memory.total)


def _memory(nvml: Any, handle: Any) -> tuple[int, int]:
    """Return (used, total) bytes for drivers older than r510; ``used`` includes memory reserved by the driver."""
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return int(memory.used), int(memory.total)


class _Fabric(Structure):
    """The struct nvmlGpuFabricInfo_t of nvml.h.

    The struct in nvidia-ml-py (12.560, 12.575, still in 13.580) has a different layout. It reads ``state`` from an
    offset beyond the field that the driver wrote, so a completed registration looks as if the GPU were not registered.
    """

    _fields_ = [("cluster", c_ubyte * 16), ("status", c_uint), ("clique", c_uint), ("state", c_ubyte)]


class _FabricV2(Structure):
    """The struct nvmlGpuFabricInfo_v2_t of nvml.h."""

    _fields_ = [("version", c_uint), *_Fabric._fields_, ("health", c_uint)]


_FABRIC_V2 = sizeof(_FabricV2) | 2 << 24
"""Version of nvmlGpuFabricInfo_v2, which combines the struct's size and version number (NVML_STRUCT_VERSION)."""


def _fabric_v2(nvml: Any, handle: Any) -> tuple[str, str]:
    info = _FabricV2(version=_FABRIC_V2)
    nvml.nvmlDeviceGetGpuFabricInfoV(handle, byref(info))
    return fabric_state(info.state), fabric_status(info.status)


def _fabric(nvml: Any, handle: Any) -> tuple[str, str]:
    info = _Fabric()
    nvml.nvmlDeviceGetGpuFabricInfo(handle, byref(info))
    return fabric_state(info.state), fabric_status(info.status)


def _threshold(which: int) -> QueryFunction:
    return lambda nvml, handle: int(nvml.nvmlDeviceGetTemperatureThreshold(handle, which))


def _slowdown_by_margin(nvml: Any, handle: Any) -> int:
    """Return the temperature in degrees C at which the GPU slows down.

    On Ada and later, NVML reports how far a limit is below the temperature at which the thermal margin is 0. The value
    is negative for a limit above this temperature (note of nvmlDeviceGetTemperatureThreshold;
    NVML_FI_DEV_TEMPERATURE_*_TLIMIT). The limit follows from this value, the current temperature and margin.
    """
    (value,) = nvml.nvmlDeviceGetFieldValues(handle, [(_SLOWDOWN_TLIMIT, 0)])
    if value.nvmlReturn:
        raise nvml.NVMLError(value.nvmlReturn)
    margin = nvml.nvmlDeviceGetMarginTemperature(handle)
    return int(_temperature(nvml, handle) + margin - value.value.siVal)


def _temperature(nvml: Any, handle: Any) -> int:
    return int(nvml.nvmlDeviceGetTemperature(handle, _CORE))


# ── query groups ──────────────────────────────────────────────────────────────────────────────────────────────────────
FAST_FIELDS = (
    FieldQuery("recovery_action", 230, recovery_action),
    FieldQuery("ecc_volatile_uncorrected", 4, alternatives=_ecc(_UNCORRECTED, _VOLATILE)),
)
_UTILIZATION = Query(("utilization",), (lambda nvml, handle: int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu),))
FAST = (
    Query(("temperature",), (_temperature, lambda nvml, handle: nvml.nvmlDeviceGetTemperatureV(handle, _CORE))),
    Query(
        ("clock_reasons",),
        (
            lambda nvml, handle: clock_reasons(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)),
            lambda nvml, handle: clock_reasons(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
        ),
    ),
    _UTILIZATION,
)
MEDIUM_FIELDS = (
    FieldQuery("ecc_volatile_corrected", 3, alternatives=_ecc(_CORRECTED, _VOLATILE)),
    FieldQuery("temperature_memory", 82),
    FieldQuery(
        "pcie_replays", 94, alternatives=(lambda nvml, handle: int(nvml.nvmlDeviceGetPcieReplayCounter(handle)),)
    ),
)
MEDIUM = (
    Query(("memory_used", "memory_total"), (_memory_v2, _memory)),
    Query(("clock_sm",), (lambda nvml, handle: int(nvml.nvmlDeviceGetClockInfo(handle, _SM)),)),
    Query(("pcie_gen",), (lambda nvml, handle: int(nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle)),)),
    Query(("pcie_width",), (lambda nvml, handle: int(nvml.nvmlDeviceGetCurrPcieLinkWidth(handle)),)),
)
SLOW_FIELDS = (
    FieldQuery("ecc_aggregate_uncorrected", 6, alternatives=_ecc(_UNCORRECTED, _AGGREGATE)),
    FieldQuery("remap_pending", 144, bool, alternatives=_remapped(2)),
    FieldQuery("remap_failed", 145, bool, alternatives=_remapped(3)),
    FieldQuery("retired_corrected", 29, alternatives=_retired(_MULTIPLE_SINGLE_BIT)),
    FieldQuery("retired_uncorrected", 30, alternatives=_retired(_DOUBLE_BIT)),
    FieldQuery(
        "retired_pending", 31, bool, (lambda nvml, handle: bool(nvml.nvmlDeviceGetRetiredPagesPendingStatus(handle)),)
    ),
)
SLOW = (
    Query(("fabric_state", "fabric_status"), (_fabric_v2, _fabric)),
    Query(("mig",), (lambda nvml, handle: nvml.nvmlDeviceGetMigMode(handle)[0] == 1,)),
)
FIXED = (
    Query(("temperature_slowdown",), (_threshold(_SLOWDOWN), _slowdown_by_margin)),
    Query(("temperature_memory_max",), (_threshold(_MEMORY_MAX),)),
    Query(("clock_sm_max",), (lambda nvml, handle: int(nvml.nvmlDeviceGetMaxClockInfo(handle, _SM)),)),
    Query(("pcie_gen_max",), (lambda nvml, handle: int(nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)),)),
    Query(("pcie_width_max",), (lambda nvml, handle: int(nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)),)),
)
_UUID = Query(("uuid",), (lambda nvml, handle: nvml.nvmlDeviceGetUUID(handle),))
IDENTITY = (
    _UUID,
    Query(("pci",), (lambda nvml, handle: kernel_bus_id(_text(nvml.nvmlDeviceGetPciInfo(handle).busId)),)),
    Query(("name",), (lambda nvml, handle: nvml.nvmlDeviceGetName(handle),)),
    Query(("serial",), (lambda nvml, handle: nvml.nvmlDeviceGetSerial(handle),)),
    Query(("vbios",), (lambda nvml, handle: nvml.nvmlDeviceGetVbiosVersion(handle),)),
)
USE = (_UUID, _UTILIZATION, Query(("memory_used", "memory_total"), (_memory_v2,)))
"""What a launcher asks for. An older version of the memory would include the driver's reserve."""


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
