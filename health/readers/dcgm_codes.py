"""DCGM's error codes: by number as ``dcgmi diag -j`` tells them, and by message, for ``dcgmi health -c -j`` tells none.

Source: NVIDIA/DCGM, dcgmlib/dcgm_errors.h (``dcgmError_enum`` and the ``*_MSG`` texts), without the prefix DCGM_FR_.
"""

from __future__ import annotations

import re

_NAMES = """
OK UNKNOWN UNRECOGNIZED PCI_REPLAY_RATE VOLATILE_DBE_DETECTED VOLATILE_SBE_DETECTED PENDING_PAGE_RETIREMENTS
RETIRED_PAGES_LIMIT RETIRED_PAGES_DBE_LIMIT CORRUPT_INFOROM CLOCKS_EVENT_THERMAL POWER_UNREADABLE CLOCKS_EVENT_POWER
NVLINK_ERROR_THRESHOLD NVLINK_DOWN NVSWITCH_FATAL_ERROR NVSWITCH_NON_FATAL_ERROR NVSWITCH_DOWN NO_ACCESS_TO_FILE
NVML_API DEVICE_COUNT_MISMATCH BAD_PARAMETER CANNOT_OPEN_LIB DENYLISTED_DRIVER NVML_LIB_BAD GRAPHICS_PROCESSES
HOSTENGINE_CONN FIELD_QUERY BAD_CUDA_ENV PERSISTENCE_MODE LOW_BANDWIDTH HIGH_LATENCY CANNOT_GET_FIELD_TAG
FIELD_VIOLATION FIELD_THRESHOLD FIELD_VIOLATION_DBL FIELD_THRESHOLD_DBL UNSUPPORTED_FIELD_TYPE FIELD_THRESHOLD_TS
FIELD_THRESHOLD_TS_DBL THERMAL_VIOLATIONS THERMAL_VIOLATIONS_TS TEMP_VIOLATION THROTTLING_VIOLATION INTERNAL
PCIE_GENERATION PCIE_WIDTH ABORTED TEST_DISABLED CANNOT_GET_STAT STRESS_LEVEL CUDA_API FAULTY_MEMORY CANNOT_SET_WATCHES
CUDA_UNBOUND ECC_DISABLED MEMORY_ALLOC CUDA_DBE MEMORY_MISMATCH CUDA_DEVICE ECC_UNSUPPORTED ECC_PENDING
MEMORY_BANDWIDTH TARGET_POWER API_FAIL API_FAIL_GPU CUDA_CONTEXT DCGM_API CONCURRENT_GPUS TOO_MANY_ERRORS
NVLINK_CRC_ERROR_THRESHOLD NVLINK_ERROR_CRITICAL ENFORCED_POWER_LIMIT MEMORY_ALLOC_HOST GPU_OP_MODE NO_MEMORY_CLOCKS
NO_GRAPHICS_CLOCKS HAD_TO_RESTORE_STATE L1TAG_UNSUPPORTED L1TAG_MISCOMPARE ROW_REMAP_FAILURE UNCONTAINED_ERROR
EMPTY_GPU_LIST DBE_PENDING_PAGE_RETIREMENTS UNCORRECTABLE_ROW_REMAP PENDING_ROW_REMAP BROKEN_P2P_MEMORY_DEVICE
BROKEN_P2P_WRITER_DEVICE NVSWITCH_NVLINK_DOWN EUD_BINARY_PERMISSIONS EUD_NON_ROOT_USER EUD_SPAWN_FAILURE EUD_TIMEOUT
EUD_ZOMBIE EUD_NON_ZERO_EXIT_CODE EUD_TEST_FAILED FILE_CREATE_PERMISSIONS PAUSE_RESUME_FAILED PCIE_H_REPLAY_VIOLATION
GPU_EXPECTED_NVLINKS_UP NVSWITCH_EXPECTED_NVLINKS_UP XID_ERROR SBE_VIOLATION DBE_VIOLATION PCIE_REPLAY_VIOLATION
SBE_THRESHOLD_VIOLATION DBE_THRESHOLD_VIOLATION PCIE_REPLAY_THRESHOLD_VIOLATION CUDA_FM_NOT_INITIALIZED SXID_ERROR
GFLOPS_THRESHOLD_VIOLATION NAN_VALUE
"""
_NUMBERED = _NAMES.split()
"""by their number, from 0"""

_MESSAGES = tuple(
    (code, re.compile(message, re.IGNORECASE))
    for code, message in (
        ("PCI_REPLAY_RATE", r"more than \d+ PCIe replays per minute"),
        ("VOLATILE_DBE_DETECTED", r"volatile double-bit ECC error"),
        ("VOLATILE_SBE_DETECTED", r"single-bit ECC error\(s\) detected"),
        ("DBE_PENDING_PAGE_RETIREMENTS", r"Pending page retirements together with a DBE"),
        ("PENDING_PAGE_RETIREMENTS", r"pending retired page has been detected"),
        ("RETIRED_PAGES_LIMIT", r"or more retired pages have been detected"),
        ("RETIRED_PAGES_DBE_LIMIT", r"excess of \d+ retired pages due to DBEs"),
        ("CORRUPT_INFOROM", r"corrupt InfoROM"),
        ("CLOCKS_EVENT_THERMAL", r"clock(?:s event| throttling)\b.* due to thermal"),
        ("CLOCKS_EVENT_POWER", r"clock(?:s event| throttling)\b.* due to power"),
        ("POWER_UNREADABLE", r"Cannot reliably read the power usage"),
        ("NVLINK_CRC_ERROR_THRESHOLD", r"NvLink errors found occur+ing per second"),
        ("NVLINK_ERROR_CRITICAL", r"NvLink errors on GPU \d+'s NVLink \(should be 0\)"),
        ("NVLINK_ERROR_THRESHOLD", r"NvLink errors on GPU \d+'s NVLink which exceeds threshold"),
        ("NVSWITCH_DOWN", r"NvSwitch physical ID \d+'s NvLink port \d+ is currently down"),
        ("NVLINK_DOWN", r"GPU \d+'s NvLink link -?\d+ is currently down"),
        ("NVSWITCH_NVLINK_DOWN", r"NVSwitch \d+'s NvLink \d+ is down"),
        ("NVSWITCH_EXPECTED_NVLINKS_UP", r"NvSwitch \d+ - Only \d+ NvLinks are up"),
        ("GPU_EXPECTED_NVLINKS_UP", r"(?<!- )Only \d+ NvLinks are up out of the expected"),
        ("NVSWITCH_NON_FATAL_ERROR", r"nonfatal errors on NvSwitch"),
        ("NVSWITCH_FATAL_ERROR", r"\bfatal errors on NvSwitch"),
        ("SXID_ERROR", r"fatal NvSwitch SXID"),
        ("XID_ERROR", r"Detected XID \d+"),
        ("ROW_REMAP_FAILURE", r"row remapping failed"),
        ("PENDING_ROW_REMAP", r"row remappings are pending"),
        ("UNCORRECTABLE_ROW_REMAP", r"uncorrectable memory errors and \d+ rows were remapped"),
        ("UNCONTAINED_ERROR", r"uncontained error"),
        ("ECC_PENDING", r"ECC memory for GPU \d+ is in a pending state"),
        ("PERSISTENCE_MODE", r"Persistence mode for GPU \d+ is (?:currently )?disabled"),
        ("TOO_MANY_ERRORS", r"only return up to four errors per system"),
    )
)


def by_number(number: object) -> str:
    """Empty for a number of a later DCGM, or none."""
    return _NUMBERED[number] if isinstance(number, int) and 0 < number < len(_NUMBERED) else ""


def by_text(text: str) -> tuple[str, ...]:
    """The codes of all messages that ``text`` holds: dcgmi strings those of one system together."""
    return tuple(code for code, message in _MESSAGES if message.search(text))
