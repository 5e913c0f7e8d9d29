"""Parse the output of dcgm-exporter and ``dcgmi``, and DCGM's error codes. The module is pure.

Formats: dcgm-exporter 4.x, internal/pkg/rendermetrics/render_metrics.go and etc/default-counters.csv; ``dcgmi health
-j`` from NVIDIA/DCGM, dcgmi/Health.cpp (GenerateOutputFromResponse) and dcgmi/DcgmiOutput.h (body, value, children,
overflow); ``dcgmi diag -j`` from nvvs/include/NvvsJsonStrings.h, and as DCGM 4.2.3 wrote it on a GB10.

Error codes: ``dcgmi diag -j`` gives numbers. ``dcgmi health -c -j`` gives only messages, which patterns recognise.
Source: NVIDIA/DCGM, dcgmlib/dcgm_errors.h (``dcgmError_enum`` and the ``*_MSG`` texts), without the prefix DCGM_FR_.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any, Literal

import msgspec

from ..samples import DcgmIncident

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
"""Names of the codes by number, from 0."""

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


def code_by_number(number: object) -> str:
    """Return the name of an error code; empty if ``number`` is not a number or not known to this module."""
    return _NUMBERED[number] if isinstance(number, int) and 0 < number < len(_NUMBERED) else ""


def codes_in_text(text: str) -> tuple[str, ...]:
    """Return the error codes of all messages in ``text``, since dcgmi concatenates the messages of one system."""
    return tuple(code for code, message in _MESSAGES if message.search(text))


XID_COUNT = "DCGM_EXP_XID_ERRORS_COUNT"
"""Metric: number of Xids in the exporter's current window (``window_size_in_ms``), by code. DCGM_FI_DEV_XID_ERRORS is
not used, because it shows the code of the newest Xid until another Xid occurs."""
XID_TOTAL = "DCGM_EXP_XID_ERRORS_TOTAL"
"""Metric: number of Xids since the exporter started, by code (dcgm-exporter 4.8 and newer, if enabled)."""
TENSOR = "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"
DOUBLE_BIT = "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL"
REMAP_FAILED = "DCGM_FI_DEV_ROW_REMAP_FAILURE"
_METRICS = (XID_COUNT, XID_TOTAL, TENSOR, DOUBLE_BIT, REMAP_FAILED)
_BLANK = 2.0**47
"""Values of this size and above are ignored, because they mean "no value" (in dcgm_structs.h, DCGM_FP64_BLANK is 2^47,
and DCGM_INT64_BLANK is far greater)."""
_SAMPLE = re.compile(r'(\w+)\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\}\s+(\S+)')
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_HARMLESS = (1, 5)
"""Severities of failed tests that do not prevent work: monitor, and configuration (dcgmErrorSeverity_enum)."""


class NotUnderstood(Exception):
    """The output has none of the formats that this module knows.

    The exception's text is the error message in the output, else the output's first line.
    """


class Sample(msgspec.Struct, frozen=True):
    """One line of a metrics page."""

    metric: str
    labels: dict[str, str]
    value: float


def samples(text: str) -> Iterator[Sample]:
    """Yield the samples of the used metrics; other lines and blank values are skipped."""
    for line in text.splitlines():
        if not line.startswith(_METRICS):
            continue
        match = _SAMPLE.match(line)
        if match is None or match[1] not in _METRICS:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        if isfinite(value) and 0 <= value < _BLANK:
            yield Sample(match[1], {key: _plain(value_text) for key, value_text in _LABEL.findall(match[2])}, value)


def health(text: str, uuids: Mapping[str, str]) -> tuple[DcgmIncident, ...]:
    """Return the incidents in the output of ``dcgmi health -c -j``.

    ``uuids`` maps DCGM's GPU numbers to UUIDs, as far as known. Raises NotUnderstood if the output has an unknown
    format.
    """
    body = _object(text).get("body")
    if not isinstance(body, dict) or "Overall Health" not in body:
        raise NotUnderstood(_first_line(text))
    found: list[DcgmIncident] = []
    for group, entities in body.items():
        for number, entity in _children(entities):
            for system, error in _children(dict(_children(entity)).get("Errors", {})):
                severity: Literal["warn", "fail"] = "warn" if error.get("value") == "Warning" else "fail"
                message = " ".join(str(piece) for piece in error.get("overflow") or ())
                gpu = uuids.get(number, number) if group == "GPU" else ""
                name = system.removesuffix(" system") if gpu else f"{group} {number} {system.removesuffix(' system')}"
                for code in codes_in_text(message) or ("",):
                    found.append(DcgmIncident(gpu, name, code, severity, message))
    return tuple(found)


def diag(text: str, uuids: Mapping[str, str]) -> tuple[DcgmIncident, ...]:
    """Return the failed tests in the output of ``dcgmi diag -j``. Raises NotUnderstood if its format is unknown."""
    root = _object(text)
    result_root = root.get("DCGM Diagnostic") or root.get("DCGM GPU Diagnostic") or root
    categories = result_root.get("test_categories") if isinstance(result_root, dict) else None
    if not isinstance(categories, list):
        error = result_root.get("runtime_error") if isinstance(result_root, dict) else None
        raise NotUnderstood(str(error) if error else _first_line(text))
    found: list[DcgmIncident] = []
    for category in filter(_is_object, categories):
        for test in filter(_is_object, category.get("tests") or ()):
            for result in filter(_is_object, test.get("results") or ()):
                if str(result.get("status", "")).lower().startswith("fail"):
                    found += _failed(str(test.get("name", "?")), result, uuids)
    return tuple(found)


def _failed(test: str, result: dict[str, Any], uuids: Mapping[str, str]) -> Iterator[DcgmIncident]:
    warnings = list(filter(_is_object, result.get("warnings") or ())) or [{}]
    for gpu in _gpus(result):
        for warning in warnings:
            text = " ".join(str(warning.get("warning", "failed")).split())
            code = code_by_number(warning.get("error_id")) or next(iter(codes_in_text(text)), "")
            severity: Literal["warn", "fail"] = "warn" if warning.get("error_severity") in _HARMLESS else "fail"
            yield DcgmIncident(uuids.get(gpu, gpu), test, code, severity, text, "diag")


def _gpus(result: dict[str, Any]) -> list[str]:
    """Return the GPU numbers of a result, from its entity (DCGM 4), or ``gpu_id`` or ``gpu_ids`` (DCGM 2 and 3)."""
    if "entity_id" in result:
        return [str(result["entity_id"])] if result.get("entity_group", "GPU") == "GPU" else [""]
    numbers = str(result.get("gpu_ids", result.get("gpu_id", "")))
    return [gpu.strip() for gpu in numbers.split(",")]


def _object(text: str) -> dict[str, Any]:
    """Return the JSON document in the output of a command; skip banners before it."""
    try:
        found = msgspec.json.decode(text[text.index("{") : text.rindex("}") + 1])
    except (ValueError, msgspec.DecodeError):
        raise NotUnderstood(_first_line(text)) from None
    if not isinstance(found, dict):
        raise NotUnderstood(_first_line(text))
    return found


def _children(node: object) -> list[tuple[str, dict[str, Any]]]:
    children = node.get("children") if isinstance(node, dict) else None
    if not isinstance(children, dict):
        return []
    return [(name, child) for name, child in children.items() if isinstance(child, dict)]


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _first_line(text: str) -> str:
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line[:200] or "the command printed nothing"


def _plain(text: str) -> str:
    """Return a label's value without escapes."""
    return text.replace('\\"', '"').replace("\\n", "\n").replace("\\\\", "\\") if "\\" in text else text
