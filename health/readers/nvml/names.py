"""Names for NVML's numbers: its errors, and the enumerations that samples report by name.

Source: nvml.h of r575 as in nvidia-ml-py. The numbers are repeated here because an older nvidia-ml-py lacks the newer
names.
"""

from __future__ import annotations

SUCCESS = 0
UNINITIALIZED = 1
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
INSUFFICIENT_POWER = 8
DRIVER_NOT_LOADED = 9
TIMEOUT = 10
IRQ_ISSUE = 11
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
RESET_REQUIRED = 16
LIB_RM_VERSION_MISMATCH = 18
GPU_NOT_FOUND = 28
ARGUMENT_VERSION_MISMATCH = 25
DEPRECATED = 26
UNKNOWN = 999

SESSION_OVER_CODES = frozenset((UNINITIALIZED, DRIVER_NOT_LOADED, LIB_RM_VERSION_MISMATCH))
"""Errors that end the session: the driver was unloaded or replaced, and no handle is valid any longer."""
LOST_CODES = frozenset((GPU_IS_LOST, RESET_REQUIRED))
"""Errors that any call may give if the GPU does not answer until it is reset."""
NO_HANDLE_CODES = LOST_CODES | {UNKNOWN, INSUFFICIENT_POWER, IRQ_ISSUE}
"""Errors of nvmlDeviceGetHandleByIndex that show a fault of the GPU itself, if NVML lists the GPU."""
UNSUPPORTED_CODES = frozenset(
    (NOT_SUPPORTED, INVALID_ARGUMENT, FUNCTION_NOT_FOUND, ARGUMENT_VERSION_MISMATCH, DEPRECATED)
)
"""Errors of queries that the driver or GPU does not support; an alternative query may work."""

_ERROR_TEXTS = {
    UNINITIALIZED: "NVML is not initialised",
    INVALID_ARGUMENT: "not known to this driver",
    NOT_SUPPORTED: "not supported",
    NO_PERMISSION: "not permitted",
    INSUFFICIENT_POWER: "power cables are not attached properly",
    DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded",
    TIMEOUT: "the driver timed out",
    IRQ_ISSUE: "the driver has an interrupt problem with this GPU",
    LIBRARY_NOT_FOUND: "libnvidia-ml.so.1 is not found: no NVIDIA driver is installed",
    FUNCTION_NOT_FOUND: "no such function in this driver",
    14: "the infoROM is corrupted",
    GPU_IS_LOST: "GPU is lost",
    RESET_REQUIRED: "GPU requires reset",
    17: "blocked by the operating system",
    LIB_RM_VERSION_MISMATCH: "the NVML library and the loaded driver differ in version: the driver was replaced",
    ARGUMENT_VERSION_MISMATCH: "no such version of the function in this driver",
    DEPRECATED: "no longer in this driver",
    GPU_NOT_FOUND: "the NVIDIA driver finds no GPU",
    UNKNOWN: "Unknown Error",
}


def error_text(code: int, driver_text: str = "") -> str:
    """Return rrl's text for an error code; for other codes the number and ``driver_text``, which is NVML's own text."""
    return _ERROR_TEXTS.get(code) or f"NVML error {code}" + (f" ({driver_text})" if driver_text else "")


_ACTIONS = (
    "none",
    "gpu_reset",
    "node_reboot",
    "drain_p2p",
    "drain_and_reset",
    "recover_imex_domain",
    "bus_reset",
    "system_reboot",
)
"""Names of nvmlDeviceGpuRecoveryAction_t in r615; the last three were added after r575."""


def recovery_action(number: int) -> str:
    """Return the name of a recovery action."""
    return _ACTIONS[number] if number < len(_ACTIONS) else f"unknown ({number})"


def fabric_state(number: int) -> str:
    """Return the name of a state of the NVLink fabric registration."""
    states = ("not_supported", "not_started", "in_progress", "completed")
    return states[number] if number < len(states) else f"unknown ({number})"


def fabric_status(code: int) -> str:
    """Return the result of the NVLink fabric registration: ``success`` or the error."""
    return "success" if code == SUCCESS else error_text(code)


_REASONS = (
    "gpu_idle",
    "applications_clocks",
    "sw_power_cap",
    "hw_slowdown",
    "sync_boost",
    "sw_thermal",
    "hw_thermal",
    "hw_power_brake",
    "display",
)
"""Names by bit of nvmlDeviceGetCurrentClocksEventReasons."""


def clock_reasons(mask: int) -> tuple[str, ...]:
    """Return the names of the bits; a bit without a name is reported by its number."""
    bits = (bit for bit in range(mask.bit_length()) if mask >> bit & 1)
    return tuple(_REASONS[bit] if bit < len(_REASONS) else f"bit_{bit}" for bit in bits)


def kernel_bus_id(bus_id: str) -> str:
    """Return NVML's ``00000000:1B:00.0`` as the kernel log writes it: ``0000:1b:00``."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:]}:{rest.partition('.')[0]}" if rest else bus_id.lower()
