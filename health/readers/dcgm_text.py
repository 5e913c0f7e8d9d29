"""What dcgm-exporter and ``dcgmi`` write, as values. Pure.

Shapes: dcgm-exporter 4.x, internal/pkg/rendermetrics/render_metrics.go and etc/default-counters.csv;
``dcgmi health -j`` from NVIDIA/DCGM, dcgmi/Health.cpp (GenerateOutputFromResponse) and dcgmi/DcgmiOutput.h (body,
value, children, overflow); ``dcgmi diag -j`` from nvvs/include/NvvsJsonStrings.h, and as DCGM 4.2.3 wrote it on a GB10.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any, Literal

import msgspec

from rrl.health.readers.dcgm_codes import by_number, by_text
from rrl.health.readings import DcgmIncident

XID_COUNT = "DCGM_EXP_XID_ERRORS_COUNT"
"""Xids of the exporter's last window (``window_size_in_ms``), by code. DCGM_FI_DEV_XID_ERRORS is none of ours: a gauge
that holds the last code until another comes"""
XID_TOTAL = "DCGM_EXP_XID_ERRORS_TOTAL"
"""Xids since the exporter began, by code: a true counter, of dcgm-exporter 4.8 and newer, where it is switched on"""
TENSOR = "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"
DOUBLE_BIT = "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL"
REMAP_FAILED = "DCGM_FI_DEV_ROW_REMAP_FAILURE"
_WANTED = (XID_COUNT, XID_TOTAL, TENSOR, DOUBLE_BIT, REMAP_FAILED)
_BLANK = 2.0**47
"""DCGM's blank values (dcgm_structs.h: DCGM_FP64_BLANK, and DCGM_INT64_BLANK far above) and what is beyond sense"""
_SAMPLE = re.compile(r'(\w+)\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\}\s+(\S+)')
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_HARMLESS = (1, 5)
"""severities of failed tests that do not stop work: monitor, and what can be configured (dcgmErrorSeverity_enum)"""


class NotUnderstood(Exception):
    """The text is none of the shapes above; what it says instead."""


class Sample(msgspec.Struct, frozen=True):
    metric: str
    labels: dict[str, str]
    value: float


def samples(text: str) -> Iterator[Sample]:
    """The metrics that we want; lines that are none, and blank values, are passed over."""
    for line in text.splitlines():
        if not line.startswith(_WANTED):
            continue
        match = _SAMPLE.match(line)
        if match is None or match[1] not in _WANTED:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        if isfinite(value) and 0 <= value < _BLANK:
            yield Sample(match[1], {key: _plain(held) for key, held in _LABEL.findall(match[2])}, value)


def health(text: str, uuids: Mapping[str, str]) -> tuple[DcgmIncident, ...]:
    """``dcgmi health -c -j``; ``uuids``: of GPUs by DCGM's number, as far as known. Raises NotUnderstood."""
    body = _object(text).get("body")
    if not isinstance(body, dict) or "Overall Health" not in body:
        raise NotUnderstood(_first_line(text))
    found: list[DcgmIncident] = []
    for group, entities in body.items():
        for number, entity in _children(entities):
            for system, error in _children(dict(_children(entity)).get("Errors", {})):
                severity: Literal["warn", "fail"] = "warn" if error.get("value") == "Warning" else "fail"
                said = " ".join(str(part) for part in error.get("overflow") or ())
                gpu = uuids.get(number, number) if group == "GPU" else ""
                name = system.removesuffix(" system") if gpu else f"{group} {number} {system.removesuffix(' system')}"
                for code in by_text(said) or ("",):
                    found.append(DcgmIncident(gpu, name, code, severity, said))
    return tuple(found)


def diag(text: str, uuids: Mapping[str, str]) -> tuple[DcgmIncident, ...]:
    """The failed tests of ``dcgmi diag -j``. Raises NotUnderstood."""
    root = _object(text)
    said = root.get("DCGM Diagnostic") or root.get("DCGM GPU Diagnostic") or root
    categories = said.get("test_categories") if isinstance(said, dict) else None
    if not isinstance(categories, list):
        error = said.get("runtime_error") if isinstance(said, dict) else None
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
            code = by_number(warning.get("error_id")) or next(iter(by_text(text)), "")
            severity: Literal["warn", "fail"] = "warn" if warning.get("error_severity") in _HARMLESS else "fail"
            yield DcgmIncident(uuids.get(gpu, gpu), test, code, severity, text, "diag")


def _gpus(result: dict[str, Any]) -> list[str]:
    """Numbers of the GPUs that a result is about: DCGM 4 tells an entity, DCGM 2 and 3 ``gpu_id`` or ``gpu_ids``."""
    if "entity_id" in result:
        return [str(result["entity_id"])] if result.get("entity_group", "GPU") == "GPU" else [""]
    told = str(result.get("gpu_ids", result.get("gpu_id", "")))
    return [gpu.strip() for gpu in told.split(",")]


def _object(text: str) -> dict[str, Any]:
    """The JSON document within what a command wrote: banners may stand before it."""
    try:
        found = msgspec.json.decode(text[text.index("{") : text.rindex("}") + 1])
    except (ValueError, msgspec.DecodeError):
        raise NotUnderstood(_first_line(text)) from None
    if not isinstance(found, dict):
        raise NotUnderstood(_first_line(text))
    return found


def _children(of: object) -> list[tuple[str, dict[str, Any]]]:
    below = of.get("children") if isinstance(of, dict) else None
    return [(name, one) for name, one in below.items() if isinstance(one, dict)] if isinstance(below, dict) else []


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _first_line(text: str) -> str:
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line[:200] or "it wrote nothing"


def _plain(text: str) -> str:
    """A label's value as it was before it was written."""
    return text.replace('\\"', '"').replace("\\n", "\n").replace("\\\\", "\\") if "\\" in text else text
