"""Checks of the connections of GPUs: NVLink, its fabric, PCI Express."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, floor

from ...config.health_rules import LinkRules, Rules
from ...core.types import Cause, Remedy
from ..readers.samples import Accelerator, NvidiaGpu
from .base import Check, Problem, fail, warn
from .gpu import for_each_gpu, gpu_check, present
from .node_state import REGISTERING_STATES, NodeState

_MINUTE_S = 60.0
_CRC_WINDOW_S = 60.0
"""Window (s) over which the rate of CRC errors is averaged. It contains about three samples, because NVML's reader
samples the NVLink counters every 20 s."""
_ON_BOARD = ("SXM", "HBM3")
"""Substrings of the names of GPUs whose links are wired on their board."""
_ON_BASEBOARD = ("NVIDIA H200", "NVIDIA B200")
"""Names of GPUs that exist only on the baseboards of HGX and DGX systems. The links of these GPUs lead to NVSwitches.
The PCIe card ``NVIDIA H200 NVL`` has another name."""


def _numbers(links: list[int]) -> str:
    """Return the links as text: ``link 1`` or ``links 1, 2``."""
    return f"link {links[0]}" if len(links) == 1 else f"links {', '.join(map(str, links))}"


# ── NVLink ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _down(gpu: NvidiaGpu, state: NodeState, rules: Rules) -> Iterator[Problem]:
    if gpu.mig:  # some boards switch off the links of a GPU in MIG mode
        return
    if down := lost_links(gpu, state):
        text = f"GPU {gpu.index}: NVLink {_numbers(down)} went down"
        yield fail(Cause.GPU, Remedy.EXCLUDE, text, component=gpu.uuid)
        return
    active = _active(gpu)
    max_active = max((_active(other) for other in present(state, NvidiaGpu) if other.name == gpu.name), default=0)
    if active < max_active and gpu.nvlinks and (active or is_wired(gpu)):
        text = f"GPU {gpu.index} has fewer active NVLinks than another GPU of its kind"
        yield warn(Cause.GPU, Remedy.SUPPORT, text, component=gpu.uuid)


def lost_links(gpu: NvidiaGpu, state: NodeState) -> list[int]:
    """Return the numbers of the GPU's NVLinks that were active at some time and are now inactive."""
    were = state.links_up.get(gpu.uuid, set())
    return [link.link for link in gpu.nvlinks or () if link.active is False and link.link in were]


def is_wired(gpu: NvidiaGpu) -> bool:
    """Return whether all NVLinks of this GPU are connected by design.

    The result is True for GPUs whose links are wired on their board or lead to NVSwitches. The links of a PCIe card are
    connected only if an NVLink bridge is installed, so the result is False for PCIe cards.
    """
    named = gpu.name in _ON_BASEBOARD or any(part in gpu.name for part in _ON_BOARD)
    return named or gpu.fabric_state not in (None, "not_supported")


def _active(gpu: NvidiaGpu) -> int:
    return sum(bool(link.active) for link in gpu.nvlinks or ())


def _errors(gpu: NvidiaGpu, state: NodeState, rules: Rules) -> Iterator[Problem]:
    limits, at = rules.links, state.reading_at(state.accelerator_reader)
    for link in gpu.nvlinks or ():
        component, name = f"{gpu.uuid}/nvlink{link.link}", f"GPU {gpu.index}: NVLink {link.link}"
        crc = state.counter("nvlink", gpu.uuid, f"{link.link} crc")
        if crc and crc.increase_within(_CRC_WINDOW_S, at) >= limits.crc * _CRC_WINDOW_S:
            text = f"{name} has more than {limits.crc:g} CRC errors a second"
            yield fail(Cause.GPU, Remedy.EXCLUDE, text, component=component)
        elif (flagged := _flagged(state, gpu.uuid, link.link, limits, at)) > limits.flagged:
            text = f"{name} has errors in more than {limits.flagged} of {limits.windows} windows of {limits.window:g} s"
            yield fail(Cause.GPU, Remedy.EXCLUDE, text, component=component, failures_to_raise=1)
        elif flagged:
            yield warn(Cause.GPU, Remedy.NONE, f"{name} has errors (replay, recovery or CRC)", component=component)


def _flagged(state: NodeState, uuid: str, link: int, limits: LinkRules, now: float) -> int:
    """Return how many of the last ``limits.windows`` windows, each of ``limits.window`` s, contain errors of the link.

    Windows are aligned to the start of the counter's history.
    """
    counter = state.counter("nvlink", uuid, f"{link} errors")
    if counter is None or not counter.increase:
        return 0
    newest = floor((now - counter.start) / limits.window)
    windows = {floor((at - counter.start) / limits.window) for at in counter.increase_times()}
    return sum(newest - limits.windows < window <= newest for window in windows)


def _fabric(gpu: NvidiaGpu, state: NodeState, rules: Rules) -> Iterator[Problem]:
    if gpu.mig:  # MIG instances do not communicate with other GPUs
        return
    if gpu.fabric_state in REGISTERING_STATES:
        text = f"GPU {gpu.index}: its registration with the NVLink fabric is {gpu.fabric_state.replace('_', ' ')}"
        limit, at = rules.links.fabric_registers, state.reading_at(state.accelerator_reader)
        if at - state.fabric_registering_since.get(gpu.uuid, at) >= limit:
            yield fail(Cause.GPU, Remedy.EXCLUDE, f"{text}, for {limit:g} s or more", component=gpu.uuid)
        else:
            yield warn(Cause.GPU, Remedy.NONE, text, component=gpu.uuid)
    elif gpu.fabric_state == "completed" and gpu.fabric_status not in (None, "success"):
        text = f"GPU {gpu.index}: its registration with the NVLink fabric failed: {gpu.fabric_status}"
        yield fail(Cause.GPU, Remedy.EXCLUDE, text, component=gpu.uuid)


# ── PCI Express ───────────────────────────────────────────────────────────────────────────────────────────────────────
def _replays(gpu: Accelerator, state: NodeState, rules: Rules) -> Iterator[Problem]:
    counter = state.counter("gpu", gpu.uuid, "pcie_replays")
    rates, gen, lanes = rules.links.pcie_replays, gpu.pcie_gen_max or gpu.pcie_gen, gpu.pcie_width
    if counter is None or not counter.increase or not gen or not lanes or not rates:
        return
    limit = ceil(lanes * rates[min(gen, len(rates)) - 1])
    if counter.increase_within(_MINUTE_S, state.reading_at(state.accelerator_reader)) > limit:
        text = f"GPU {gpu.index}: more than {limit} PCIe replays a minute ({lanes} lanes of generation {gen})"
        yield warn(Cause.GPU, Remedy.SUPPORT, text, component=gpu.uuid)


def _width(gpu: Accelerator, state: NodeState, rules: Rules) -> Iterator[Problem]:
    if gpu.pcie_width and gpu.pcie_width_max and gpu.pcie_width < gpu.pcie_width_max:
        text = f"GPU {gpu.index}: its PCIe link has {gpu.pcie_width} of {gpu.pcie_width_max} lanes"
        yield warn(Cause.GPU, Remedy.SUPPORT, text, component=gpu.uuid)
        return
    busy = gpu.utilization is not None and gpu.utilization >= rules.gpu.busy  # an idle link runs at a lower generation
    if busy and gpu.pcie_gen and gpu.pcie_gen_max and gpu.pcie_gen < gpu.pcie_gen_max:
        text = f"GPU {gpu.index} is busy, and its PCIe link runs at generation {gpu.pcie_gen} of {gpu.pcie_gen_max}"
        n = rules.gpu.throttled
        yield warn(Cause.GPU, Remedy.SUPPORT, text, component=gpu.uuid, failures_to_raise=n, passes_to_clear=n)


CHECKS = (
    Check(
        "nvlink_state",
        ("nvml",),
        for_each_gpu(NvidiaGpu, ("nvlinks",), _down),
        "NVLinks that were active before; number of active NVLinks, compared with other GPUs of the same kind",
        "a link went down: FAIL, exclude; fewer active links than another GPU: WARN",
        "NVRx",
    ),
    Check(
        "nvlink_errors",
        ("nvml",),
        for_each_gpu(NvidiaGpu, ("nvlinks",), _errors),
        "replay, recovery and CRC errors of each NVLink",
        "errors in more than links.flagged of the last links.windows windows, or links.crc CRC errors a second:"
        " FAIL, exclude; other errors: WARN",
        "NVRx, DCGM",
    ),
    Check(
        "nvlink_fabric",
        ("nvml",),
        for_each_gpu(NvidiaGpu, ("fabric_state",), _fabric),
        "registration with the NVLink fabric (NVSwitch)",
        "not complete: WARN; not complete after links.fabric_registers s, or failed: FAIL, exclude",
        "NVRx",
    ),
    gpu_check(
        "pcie_replays",
        for_each_gpu(Accelerator, ("pcie_replays",), _replays),
        "PCIe replays per minute, with a limit for each generation",
        "> ceil(lanes x links.pcie_replays): WARN, support",
        "DCGM",
    ),
    gpu_check(
        "pcie_link",
        for_each_gpu(Accelerator, ("pcie_width", "pcie_gen"), _width),
        "width of the PCIe link; its generation while the GPU is busy",
        "less than GPU and slot support: WARN, support",
        "NVML; Meta",
    ),
)
