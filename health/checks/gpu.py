"""Checks of the GPUs themselves, from the samples of their driver."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from ...config.health_rules import Rules
from ...core.types import Cause, Remedy
from ..readers.base import ACCELERATOR_READERS
from ..readers.samples import Accelerator, NvidiaGpu
from .base import Check, CheckFunction, CheckResult, Problem, Unknown, fail, warn
from .node_state import ALL_GPUS, NodeState

_RECOVERY_REMEDIES = {
    "gpu_reset": Remedy.RESET_GPU,
    "node_reboot": Remedy.REBOOT,
    "drain_p2p": Remedy.EXCLUDE,
    "drain_and_reset": Remedy.RESET_GPU,
    "bus_reset": Remedy.RESET_GPU,
    "system_reboot": Remedy.REBOOT,
}
"""Remedies by recovery action, for the actions that concern one GPU or one node. ``recover_imex_domain`` is missing: an
IMEX domain (GPUs that share memory over NVLink) contains many nodes."""
_UNKNOWN_ERROR = "Unknown Error"
"""Driver's error for a call that fails for an unknown reason; other errors, as ``GPU is lost``, name the failure."""
_MPS = "nvidia-cuda-mps"
"""Prefix of the names of the server processes of CUDA's multi-process service. The site runs them, so they are not
foreign processes. NVML lists the clients of the service separately."""
_MINUTE_S, _HOUR_S = 60.0, 3600.0
_MAX_GPUS_NAMED = 3
"""Maximum number of GPUs that one evidence line names."""


G = TypeVar("G", bound=Accelerator)


def for_each_gpu(
    kind: type[G], fields: tuple[str, ...], check: Callable[[G, NodeState, Rules], Iterable[Problem]]
) -> Callable[..., Iterator[CheckResult]]:
    """Return a check function that runs ``check`` on every GPU of this kind that answers its driver.

    If none of ``fields`` of a GPU could be read, the check function yields an `Unknown` about this GPU instead.
    """

    def run(state: NodeState, rules: Rules, now: float) -> Iterator[CheckResult]:
        blind: dict[str, list[G]] = {}
        for gpu in present(state, kind):
            if all(getattr(gpu, field) is None for field in fields):
                why = next((gpu.unread[field] for field in fields if field in gpu.unread), "not read")
                blind.setdefault(why, []).append(gpu)
            else:
                yield from check(gpu, state, rules)
        for why, gpus in blind.items():
            yield _unreadable(why, gpus)

    return run


def _unreadable(why: str, gpus: Sequence[Accelerator]) -> Unknown:
    """Return an `Unknown` that names the ``gpus`` that could not be read, and the reason ``why``."""
    some = ", ".join(str(gpu.index) for gpu in gpus[:_MAX_GPUS_NAMED]) + (
        ", ..." if len(gpus) > _MAX_GPUS_NAMED else ""
    )
    return Unknown(f"{why} (GPU {some})", components=tuple(gpu.uuid for gpu in gpus))


def present(state: NodeState, kind: type[G]) -> Iterator[G]:
    """Return the GPUs of this kind in their newest sample that are not lost."""
    data = state.accelerators()
    return (gpu for gpu in data.gpus if isinstance(gpu, kind) and not gpu.lost) if data is not None else iter(())


def gpu_check(name: str, run: CheckFunction, description: str, failure_description: str, source: str) -> Check:
    """Return a check of the GPUs of any vendor; the arguments are those of :class:`.base.Check`."""
    readers = tuple(ACCELERATOR_READERS)
    return Check(name, readers, run, description, failure_description, source, any_reader=True)


# ── presence ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def _count(state: NodeState, rules: Rules, now: float) -> Iterator[CheckResult]:
    """Compare the number of GPUs with the number that the rules expect and with the largest number ever listed.

    A smaller number is not a problem if Slurm gave the job only some of the node's GPUs, because the driver may list
    only the granted GPUs.
    """
    data, wanted = state.data(state.accelerator_reader), rules.expect.gpus
    count, least = len(data.gpus), min(wanted or 0, data.granted) if data.withheld else wanted or 0
    if wanted is not None and not least <= count <= wanted:
        access_note = f" of the {data.granted} that this process may use" if data.withheld and count < least else ""
        text = f"the driver lists {count} GPUs{access_note}, {wanted} are expected"
        yield fail(Cause.GPU, Remedy.EXCLUDE, text, proof=count < wanted)
    elif count < state.max_gpus:
        text = f"the driver lists {count} GPUs; it listed {state.max_gpus} before"
        yield fail(Cause.GPU, Remedy.REBOOT, text, proof=True)


def _lost(state: NodeState, rules: Rules, now: float) -> Iterator[CheckResult]:
    """Fail each GPU whose query failed, but suspect the permissions if all queries failed with an unknown error."""
    gpus = state.data(state.accelerator_reader).gpus
    if len(gpus) > 1 and all(gpu.lost == _UNKNOWN_ERROR for gpu in gpus):
        text = f"the driver returns {_UNKNOWN_ERROR} for every GPU: rrl may have lost access to their device files"
        yield warn(Cause.SOFTWARE, Remedy.SUPPORT, f"{text} (a changed cgroup, a reload of systemd)")
        return
    for gpu in gpus:
        if gpu.lost:
            text = f"GPU {gpu.index} does not answer the driver: {gpu.lost}"
            otherwise = Remedy.RESET_GPU if "reset" in gpu.lost else Remedy.REBOOT
            remedy = _RECOVERY_REMEDIES.get(gpu.recovery_action or "", otherwise)
            vague = gpu.lost == _UNKNOWN_ERROR
            needs = rules.gpu.unknown_error if vague else None
            yield fail(
                Cause.GPU,
                remedy,
                text,
                component=gpu.uuid or f"gpu{gpu.index}",
                proof=not vague,
                failures_to_raise=needs,
            )


def _recovery(gpu: Accelerator, state: NodeState, rules: Rules) -> Iterator[Problem]:
    """Report the recovery action that the driver states."""
    action = gpu.recovery_action
    if not action or action == "none":
        return
    text = f"GPU {gpu.index}: the driver requires: {action.replace('_', ' ')}"
    if remedy := _RECOVERY_REMEDIES.get(action):
        yield fail(Cause.GPU, remedy, text, component=gpu.uuid, proof=True)
    else:
        yield warn(Cause.GPU, Remedy.SUPPORT, text, component=gpu.uuid)


# ── memory ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _ecc_uncorrected(gpu: Accelerator, state: NodeState, rules: Rules) -> Iterator[Problem]:
    if gpu.ecc_volatile_uncorrected:
        text = f"GPU {gpu.index} has uncorrectable ECC errors since its driver was loaded"
        yield fail(Cause.GPU, Remedy.RESET_GPU, text, component=gpu.uuid, proof=True)
    elif (counter := state.counter("gpu", gpu.uuid, "ecc_aggregate_uncorrected")) and counter.increase:
        text = f"GPU {gpu.index}: its uncorrectable ECC errors increased since monitoring began"
        yield fail(Cause.GPU, Remedy.RESET_GPU, text, component=gpu.uuid, proof=True)


def _ecc_corrected(gpu: Accelerator, state: NodeState, rules: Rules) -> Iterator[Problem]:
    if (gpu.ecc_volatile_corrected or 0) > rules.gpu.ecc_corrected:
        text = f"GPU {gpu.index}: more than {rules.gpu.ecc_corrected} corrected ECC errors since its driver was loaded"
        yield warn(Cause.GPU, Remedy.SUPPORT, text, component=gpu.uuid)
    if (counter := state.counter("gpu", gpu.uuid, "ecc_volatile_corrected")) is None or not counter.increase:
        return
    at, limits = state.reading_at(state.accelerator_reader), rules.gpu
    if counter.increase_within(_MINUTE_S, at) > limits.ecc_corrected_rate * _MINUTE_S:
        text = f"GPU {gpu.index}: more than {limits.ecc_corrected_rate:g} corrected ECC errors a second"
        yield warn(Cause.GPU, Remedy.SUPPORT, text, component=gpu.uuid)
    elif counter.increase_within(_HOUR_S, at) > limits.ecc_corrected_hour:
        text = f"GPU {gpu.index}: more than {limits.ecc_corrected_hour} corrected ECC errors within an hour"
        yield warn(Cause.GPU, Remedy.SUPPORT, text, component=gpu.uuid)


def _row_remap(gpu: NvidiaGpu, state: NodeState, rules: Rules) -> Iterator[Problem]:
    if gpu.remap_failed:
        text = f"GPU {gpu.index}: remapping a row of its memory failed"
        yield fail(Cause.GPU, Remedy.SUPPORT, text, component=gpu.uuid, proof=True)
    elif gpu.remap_pending:
        text = f"GPU {gpu.index}: a row of its memory is remapped at the next reset"
        yield warn(Cause.GPU, Remedy.RESET_GPU, text, component=gpu.uuid)


def _retired_pages(gpu: NvidiaGpu, state: NodeState, rules: Rules) -> Iterator[Problem]:
    limits, total = rules.gpu, (gpu.retired_corrected or 0) + (gpu.retired_uncorrected or 0)
    counter = state.counter("gpu", gpu.uuid, "retired_uncorrected")
    grew = counter.increase if counter else 0
    if total >= limits.retired_pages_most:
        text = f"GPU {gpu.index}: at least {limits.retired_pages_most} pages of its memory are retired"
        yield fail(Cause.GPU, Remedy.SUPPORT, text, component=gpu.uuid, proof=True)
    elif total >= limits.retired_pages_soft and grew > 1:
        text = (
            f"GPU {gpu.index}: several pages were retired for double-bit errors since monitoring began, and many before"
        )
        yield fail(Cause.GPU, Remedy.SUPPORT, text, component=gpu.uuid, proof=True)
    elif total > limits.retired_pages:
        text = f"GPU {gpu.index}: more than {limits.retired_pages} pages of its memory are retired"
        yield warn(Cause.GPU, Remedy.SUPPORT, text, component=gpu.uuid)
    elif gpu.retired_pending:
        text = f"GPU {gpu.index}: a page of its memory is retired at the next reset"
        yield warn(Cause.GPU, Remedy.RESET_GPU, text, component=gpu.uuid)


# ── temperature and clocks ────────────────────────────────────────────────────────────────────────────────────────────
def _temperature(state: NodeState, rules: Rules, now: float) -> Iterator[CheckResult]:
    """Compare the temperatures with the device's own limits; fail a GPU that is at a limit for ``rules.gpu.hot`` s."""
    at = state.reading_at(state.accelerator_reader)
    blind: list[Accelerator] = []
    for gpu in present(state, Accelerator):
        core = _at_limit(gpu.temperature, gpu.temperature_slowdown)
        memory = _at_limit(gpu.temperature_memory, gpu.temperature_memory_max)
        if core is None and memory is None:
            blind.append(gpu)
        elif core or memory:
            limit_name = "its slowdown temperature" if core else "its memory's highest temperature"
            text = f"GPU {gpu.index} is at or above {limit_name}"
            long = at - state.hot_since.get(gpu.uuid, at) >= rules.gpu.hot
            if long:
                yield fail(Cause.GPU, Remedy.EXCLUDE, f"{text}, for {rules.gpu.hot:g} s or more", component=gpu.uuid)
            else:
                yield warn(Cause.GPU, Remedy.NONE, text, component=gpu.uuid)
    if blind:
        why = next((w for field in _TEMPERATURE_FIELDS for gpu in blind if (w := gpu.unread.get(field))), "not read")
        yield _unreadable(why, blind)


_TEMPERATURE_FIELDS = ("temperature", "temperature_slowdown", "temperature_memory", "temperature_memory_max")


def _at_limit(now: int | None, limit: int | None) -> bool | None:
    """Return whether a temperature is at or above its limit; None if the temperature or the limit is unknown."""
    return None if now is None or not limit else now >= limit


_SLOWDOWN_REASONS = {
    "hw_thermal": "heat",
    "sw_thermal": "heat",
    "hw_power_brake": "power brake",
    "hw_slowdown": "hardware",
}
"""Texts for the clock event reasons that indicate a fault, most specific first. Of several reasons in effect only the
first is reported. ``hw_slowdown`` is last: it stays in effect while more specific reasons alternate. A power cap is
missing, because it is normal operation (NVSentinel ignores it too)."""


def _throttle(gpu: Accelerator, state: NodeState, rules: Rules) -> Iterator[Problem]:
    if why := next(
        (text_of_reason for name, text_of_reason in _SLOWDOWN_REASONS.items() if name in (gpu.clock_reasons or ())), ""
    ):
        text = f"GPU {gpu.index}: its clocks are reduced: {why}"
        n = rules.gpu.throttled
        yield warn(Cause.GPU, Remedy.NONE, text, component=gpu.uuid, failures_to_raise=n, passes_to_clear=n)


def _clock(gpu: Accelerator, state: NodeState, rules: Rules) -> Iterator[Problem]:
    wanted, best = rules.expect.sm_clock, gpu.clock_sm_max
    if wanted and best and best < wanted:
        text = f"GPU {gpu.index}: its highest SM clock is {best} MHz, {wanted} MHz are expected"
        yield warn(Cause.GPU, Remedy.NONE, text, component=gpu.uuid)
        return
    capped = {"sw_power_cap", "gpu_idle", "applications_clocks"} & set(gpu.clock_reasons or ())
    busy = gpu.utilization is not None and gpu.utilization >= rules.gpu.busy
    if busy and best and gpu.clock_sm is not None and not capped and gpu.clock_sm < rules.gpu.slow_clock * best:
        text = f"GPU {gpu.index} is busy, and its SM clock is below {rules.gpu.slow_clock:.0%} of its highest"
        n = rules.gpu.throttled
        yield warn(Cause.GPU, Remedy.NONE, text, component=gpu.uuid, failures_to_raise=n, passes_to_clear=n)


# ── before a role starts ──────────────────────────────────────────────────────────────────────────────────────────────
def _is_expected_free(gpu: Accelerator, state: NodeState) -> bool:
    """Return whether this GPU must be free because a role is about to start.

    A GPU in MIG mode need not be free, because jobs share it. On a node with a GPU in MIG mode, Slurm's numbers denote
    MIG instances, so GPU numbers are ignored.
    """
    if gpu.mig:
        return False
    by_number = str(gpu.index) in state.expected_free and not any(other.mig for other in present(state, Accelerator))
    return by_number or bool(state.expected_free & {ALL_GPUS, gpu.uuid})


def _memory(gpu: Accelerator, state: NodeState, rules: Rules) -> Iterator[Problem]:
    if _is_expected_free(gpu, state) and (gpu.memory_used or 0) > rules.gpu.memory_before_start:
        limit = rules.gpu.memory_before_start / 2**20
        text = f"GPU {gpu.index}: more than {limit:g} MiB of its memory are in use before a role starts"
        yield fail(Cause.USER, Remedy.NONE, text, component=gpu.uuid, failures_to_raise=rules.gpu.reclaim)


def _processes(gpu: Accelerator, state: NodeState, rules: Rules) -> Iterator[Problem]:
    foreign = [process for process in gpu.processes or () if not process.name.startswith(_MPS)]
    if foreign and _is_expected_free(gpu, state):
        processes = "; ".join(
            f"pid {p.pid}{f' of uid {p.uid}' if p.uid is not None else ''}" for p in foreign[:_MAX_GPUS_NAMED]
        )
        text = f"GPU {gpu.index} is used by another process before a role starts: {processes}"
        yield fail(Cause.USER, Remedy.NONE, text, component=gpu.uuid, failures_to_raise=rules.gpu.reclaim)


# ── versions ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def _versions(state: NodeState, rules: Rules, now: float) -> Iterator[CheckResult]:
    data, wanted = state.data(state.accelerator_reader), rules.expect
    if wanted.driver and data.driver != wanted.driver:
        yield warn(Cause.SOFTWARE, Remedy.SUPPORT, f"the GPU driver is {data.driver}, {wanted.driver} is expected")
    kinds: dict[str, set[str]] = {}
    for gpu in present(state, Accelerator):
        kinds.setdefault(gpu.name, set()).add(gpu.vbios)
        if wanted.vbios and gpu.vbios and gpu.vbios != wanted.vbios:
            text = f"GPU {gpu.index}: its VBIOS is {gpu.vbios}, {wanted.vbios} is expected"
            yield warn(Cause.SOFTWARE, Remedy.SUPPORT, text, component=gpu.uuid)
    for name, several in kinds.items():
        if not wanted.vbios and len(several - {""}) > 1:
            text = f"GPUs of one kind ({name}) have different VBIOSes: {', '.join(sorted(several - {''}))}"
            yield warn(Cause.SOFTWARE, Remedy.SUPPORT, text)


CHECKS = (
    gpu_check(
        "gpu_count",
        _count,
        "number of GPUs that the driver lists, compared with expect.gpus and with the largest earlier number",
        "another number than expect.gpus: FAIL, exclude; fewer than before: FAIL, reboot",
        "gcm",
    ),
    gpu_check(
        "gpu_lost",
        _lost,
        "whether each GPU answers the driver",
        "a GPU does not answer: FAIL with the recovery action that the driver states, else reset or reboot (for Unknown"
        " Error only after gpu.unknown_error samples in a row); Unknown Error on all GPUs at the same time: WARN,"
        " support (cause software)",
        "NVML",
    ),
    gpu_check(
        "gpu_recovery_action",
        for_each_gpu(Accelerator, ("recovery_action",), _recovery),
        "the recovery action that the driver states for each GPU (r570 and newer)",
        "an action for one GPU or node: FAIL with that remedy; an unknown action, or one for an IMEX domain:"
        " WARN, support",
        "NVRx",
    ),
    gpu_check(
        "gpu_ecc_uncorrected",
        for_each_gpu(Accelerator, ("ecc_volatile_uncorrected", "ecc_aggregate_uncorrected"), _ecc_uncorrected),
        "uncorrectable ECC errors since the driver was loaded, and increases of their total over the GPU's lifetime",
        "any such error: FAIL, reset the GPU",
        "gcm, DCGM",
    ),
    gpu_check(
        "gpu_ecc_corrected",
        for_each_gpu(Accelerator, ("ecc_volatile_corrected",), _ecc_corrected),
        "corrected ECC errors since the driver was loaded",
        "> gpu.ecc_corrected, > gpu.ecc_corrected_rate a second, or > gpu.ecc_corrected_hour within an hour: WARN,"
        " support",
        "gcm",
    ),
    Check(
        "gpu_row_remap",
        ("nvml",),
        for_each_gpu(NvidiaGpu, ("remap_failed", "remap_pending"), _row_remap),
        "remapped memory rows",
        "a failed remap: FAIL, support; a pending one: WARN, reset at the next occasion",
        "gcm, DCGM, NVSentinel",
    ),
    Check(
        "gpu_retired_pages",
        ("nvml",),
        for_each_gpu(NvidiaGpu, ("retired_corrected", "retired_uncorrected", "retired_pending"), _retired_pages),
        "retired memory pages of GPUs before Ampere",
        ">= gpu.retired_pages_most, or >= gpu.retired_pages_soft and growing: FAIL, support;"
        " > gpu.retired_pages, or pending: WARN",
        "gcm, DCGM",
    ),
    gpu_check(
        "gpu_temperature",
        _temperature,
        "temperatures of core and memory, compared with the device's own limits",
        "at a limit: WARN; for gpu.hot s: FAIL, exclude",
        "NVML",
    ),
    gpu_check(
        "gpu_throttle",
        for_each_gpu(Accelerator, ("clock_reasons",), _throttle),
        "clocks event reasons: thermal, power brake (a power cap is ignored)",
        "gpu.throttled readings in a row: WARN, evidence of a straggler",
        "NVSentinel",
    ),
    gpu_check(
        "gpu_clock",
        for_each_gpu(Accelerator, ("clock_sm", "clock_sm_max"), _clock),
        "SM clock of a busy GPU, compared with its highest; highest SM clock, compared with expect.sm_clock",
        "below the share gpu.slow_clock of the highest, or highest below expect.sm_clock: WARN, evidence of a"
        " straggler",
        "gcm, NVRx",
    ),
    gpu_check(
        "gpu_memory",
        for_each_gpu(Accelerator, ("memory_used",), _memory),
        "memory in use before a role starts",
        "> gpu.memory_before_start in gpu.reclaim runs in a row: FAIL (cause user)",
        "NVRx, gcm",
    ),
    gpu_check(
        "gpu_processes",
        for_each_gpu(Accelerator, ("processes",), _processes),
        "foreign processes on a GPU before a role starts",
        "a process in gpu.reclaim runs in a row: FAIL (cause user); no process is killed",
        "gcm",
    ),
    gpu_check(
        "gpu_versions",
        _versions,
        "driver and VBIOS, compared with the expected ones; VBIOS among GPUs of one kind",
        "a difference: WARN",
        "gcm",
    ),
)
