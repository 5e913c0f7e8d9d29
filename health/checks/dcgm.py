"""Checks of DCGM's own results. An incident's error code determines its remedy (from NVSentinel's table)."""

from __future__ import annotations

from collections.abc import Iterator

from ...config.health_rules import Rules
from ...core.types import Cause, Remedy, Verdict
from ..readers.samples import DcgmIncident, NvmlData
from .base import Check, CheckResult, Problem, Unknown, fail, warn
from .gpu_links import is_wired, lost_links
from .node_state import HEALTH_RUNS, NodeState

_REMEDY_CODES: dict[Remedy, tuple[str, ...]] = {
    Remedy.RESET_GPU: ("VOLATILE_DBE", "PENDING_ROW_REMAP", "CORRUPT_INFOROM", "NVSWITCH_DOWN"),
    Remedy.REBOOT: (
        "NVLINK_DOWN",
        "UNCONTAINED_ERROR",
        "POWER_UNREADABLE",
        "ECC_PENDING",
        "SXID_ERROR",
        "FIELD_",
        "DBE_PENDING_PAGE_RETIREMENTS",
    ),
    Remedy.SUPPORT: (
        "ROW_REMAP_FAILURE",
        "RETIRED_PAGES_",
        "NVLINK_ERROR_CRITICAL",
        "NVLINK_CRC",
        "FAULTY_MEMORY",
        "NVSWITCH_FATAL",
        "NAN_VALUE",
    ),
}
"""Prefixes of error codes, by remedy. An incident with such a code fails the GPU if its severity is ``fail``."""
_WARNING_CODES = (
    "GPU_EXPECTED_NVLINKS_UP",
    "NVSWITCH_EXPECTED_NVLINKS_UP",
    "NVSWITCH_NVLINK_DOWN",
    "FABRIC_MANAGER_TRAINING_ERROR",
    "CLOCKS_EVENT_THERMAL",
    "TEMP_VIOLATION",
    "THERMAL_VIOLATIONS",
)
"""Prefixes of error codes that give only a WARN. The codes concern the configuration of the fabric manager, or heat.
Other checks of rrl judge heat."""
_IGNORED_CODES = (
    "VOLATILE_SBE",
    "CLOCK_THROTTLE_POWER",
    "CLOCK_THROTTLE_THERMAL",
    "CLOCKS_EVENT_POWER",
    "CLOCKS_POWER",
    "UNCORRECTABLE_ROW_REMAP",
    "NVSWITCH_NON_FATAL",
    "NVLINK_ERROR_THRESHOLD",
    "PENDING_PAGE_RETIREMENTS",
    "TEST_SKIPPED",
    "TEST_DISABLED",
    "ABORTED",
    "TARGET_POWER",
    "XID_ERROR",
    "ERROR_SENTINEL",
    "NO_GRAPHICS_CLOCKS",
)
"""Prefixes of error codes that are ignored: the faults are harmless, or other checks report them in more detail (Xids,
for example)."""
_SKIPPED_TESTS = ("blacklist", "denylist", "inforom")
"""Prefixes of the names of tests of ``dcgmi diag`` that are ignored; Meta's gcm ignores them too."""
_LINK_DOWN_CODE = "NVLINK_DOWN"
_PENDING_REMAP_CODE = "PENDING_ROW_REMAP"
"""Error code of a pending row remap. As in the check ``gpu_row_remap``, the GPU stays in use until the next opportunity
for a reset."""


def _health(state: NodeState, rules: Rules, now: float) -> Iterator[CheckResult]:
    """Report the incidents of ``dcgmi health``."""
    data = state.data("dcgm")
    for incident in data.incidents:
        if incident.source == "health":
            yield from _problems(incident, _unbridged(state))
    if "health" in data.unread:
        yield Unknown(data.unread["health"])


def _diag(state: NodeState, rules: Rules, now: float) -> Iterator[CheckResult]:
    """Report the failed tests of ``dcgmi diag``; a failed test with an unknown code also fails the GPU."""
    data = state.data("dcgm")
    if "diag" in data.unread:
        yield Unknown(data.unread["diag"])
        return
    for incident in data.incidents:
        if incident.source == "diag" and not incident.system.lower().startswith(_SKIPPED_TESTS):
            for bad in _problems(incident, _unbridged(state)):
                failed = incident.severity == "fail" and bad.verdict is Verdict.WARN and not _known(incident.code)
                yield (
                    Problem(Verdict.FAIL, bad.cause, Remedy.EXCLUDE, bad.text, bad.component, failures_to_raise=1)
                    if failed
                    else bad
                )


def _exporter(state: NodeState, rules: Rules, now: float) -> Iterator[CheckResult]:
    """Report memory errors that dcgm-exporter publishes, in case this user may not query NVML."""
    data = state.data("dcgm")
    for gpu in data.gpus:
        name = f"GPU {gpu.index if gpu.index is not None else gpu.uuid}"
        if gpu.remap_failed:
            text = f"{name}: remapping a row of its memory failed, according to DCGM"
            yield fail(Cause.GPU, Remedy.SUPPORT, text, component=gpu.uuid, proof=True)
        elif gpu.ecc_volatile_uncorrected:
            text = f"{name} has uncorrectable ECC errors since its driver was loaded, according to DCGM"
            yield fail(Cause.GPU, Remedy.RESET_GPU, text, component=gpu.uuid, proof=True)
    if "exporter" in data.unread:
        yield Unknown(f"cannot read the DCGM exporter: {data.unread['exporter']}")


def _known(code: str) -> bool:
    return code.startswith((*_WARNING_CODES, *_IGNORED_CODES))


def _unbridged(state: NodeState) -> set[str]:
    """Return the UUIDs and indices of the GPUs whose inactive NVLinks may simply be unconnected.

    The links of these GPUs need a bridge (:func:`.gpu_links.is_wired` is False), and none of the links has gone down.
    """
    data = state.data("nvml")
    gpus = data.gpus if isinstance(data, NvmlData) else ()
    steady = (gpu for gpu in gpus if not is_wired(gpu) and not lost_links(gpu, state))
    return {name for gpu in steady for name in (gpu.uuid, str(gpu.index))}


def _problems(incident: DcgmIncident, unbridged: set[str]) -> Iterator[Problem]:
    """Yield the problem that an incident reports, with the verdict and remedy of its code; ignored codes yield none."""
    code = incident.code.removeprefix("DCGM_FR_")
    if code.startswith(_IGNORED_CODES):
        return
    where = f"GPU {incident.gpu}" if incident.gpu else "the node"
    text = f"DCGM on {where}, {incident.system}: {code or incident.text}"
    component = "/".join(filter(None, (incident.gpu, code or incident.system)))
    remedy = next((remedy for remedy, codes in _REMEDY_CODES.items() if code.startswith(codes)), None)
    unconnected = code.startswith(_LINK_DOWN_CODE) and incident.gpu in unbridged
    if remedy is None or incident.severity == "warn" or code.startswith(_PENDING_REMAP_CODE) or unconnected:
        yield warn(Cause.GPU, remedy or Remedy.SUPPORT, text, component=component)
    else:
        yield Problem(Verdict.FAIL, Cause.GPU, remedy, (text,), component)


CHECKS = (
    Check(
        "dcgm_memory",
        ("dcgm",),
        _exporter,
        "uncorrectable ECC errors and failed row remaps in dcgm-exporter's metrics",
        "an uncorrectable error: FAIL, reset the GPU; a failed remap: FAIL, support",
        "gcm, DCGM",
    ),
    Check(
        "dcgm_health",
        ("dcgm",),
        _health,
        "incidents of dcgmi health, which is run once a minute",
        "a failure whose code has a remedy, in three runs in a row: FAIL with that remedy; other codes: WARN;"
        " power, single-bit errors and the like: ignored",
        "NVSentinel",
        triggers=(HEALTH_RUNS,),
    ),
    Check(
        "dcgm_diag",
        ("dcgm",),
        _diag,
        "tests of dcgmi diag -r 1, if the rules enable them",
        "a failed test: FAIL with the remedy of its code, or exclude if the code is unknown; Denylist and"
        " Inforom are skipped",
        "gcm",
    ),
)
