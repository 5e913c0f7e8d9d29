"""Checks of what connects GPUs: NVLink, its fabric, PCI Express."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, floor

from ...config.health_rules import LinkRules, Rules
from ...core.types import Cause, Remedy
from ..readers.samples import Gpu
from .base import Bad, Check, fail, warn
from .gpu import each, present
from .node_state import REGISTERS, Seen

_MINUTE = 60.0
_CRC_WINDOW = 60.0
"""s over which a rate "a second" is taken: several readings, of which NVML's reader makes one each 20 s"""
_ON_BOARD = ("SXM", "HBM3")
"""in the names of GPUs whose links are wired on their board"""


def _numbers(links: list[int]) -> str:
    return f"link {links[0]}" if len(links) == 1 else f"links {', '.join(map(str, links))}"


# ── NVLink ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def _down(gpu: Gpu, seen: Seen, rules: Rules) -> Iterator[Bad]:
    if gpu.mig:  # some boards switch its links off
        return
    if down := lost_links(gpu, seen):
        text = f"GPU {gpu.index}: NVLink {_numbers(down)} went down"
        yield fail(Cause.GPU, Remedy.EXCLUDE, text, part=gpu.uuid)
        return
    active = _active(gpu)
    most = max((_active(other) for other in present(seen) if other.name == gpu.name), default=0)
    if active < most and gpu.nvlinks and (active or is_wired(gpu)):
        text = f"GPU {gpu.index} has fewer active NVLinks than another one of its kind"
        yield warn(Cause.GPU, Remedy.SUPPORT, text, part=gpu.uuid)


def lost_links(gpu: Gpu, seen: Seen) -> list[int]:
    were = seen.links_up.get(gpu.uuid, set())
    return [link.link for link in gpu.nvlinks or () if link.active is False and link.link in were]


def is_wired(gpu: Gpu) -> bool:
    """All of its links lead somewhere; between PCIe cards only those do that a bridge connects."""
    return any(name in gpu.name for name in _ON_BOARD) or gpu.fabric_state not in (None, "not_supported")


def _active(gpu: Gpu) -> int:
    return sum(bool(link.active) for link in gpu.nvlinks or ())


def _errors(gpu: Gpu, seen: Seen, rules: Rules) -> Iterator[Bad]:
    limits, at = rules.links, seen.at("nvml")
    for link in gpu.nvlinks or ():
        part, name = f"{gpu.uuid}/nvlink{link.link}", f"GPU {gpu.index}: NVLink {link.link}"
        crc = seen.trail("nvlink", gpu.uuid, f"{link.link} crc")
        if crc and crc.within(_CRC_WINDOW, at) >= limits.crc * _CRC_WINDOW:
            text = f"{name} has more than {limits.crc:g} CRC errors a second"
            yield fail(Cause.GPU, Remedy.EXCLUDE, text, part=part)
        elif (flagged := _flagged(seen, gpu.uuid, link.link, limits, at)) > limits.flagged:
            text = f"{name} has errors in more than {limits.flagged} of {limits.windows} windows of {limits.window:g} s"
            yield fail(Cause.GPU, Remedy.EXCLUDE, text, part=part, needs=1)
        elif flagged:
            yield warn(Cause.GPU, Remedy.NONE, f"{name} has errors (replay, recovery or CRC)", part=part)


def _flagged(seen: Seen, uuid: str, link: int, limits: LinkRules, now: float) -> int:
    """Windows with errors, of the last ones; windows lie where the trail began."""
    trail = seen.trail("nvlink", uuid, f"{link} errors")
    if trail is None or not trail.rise:
        return 0
    newest = floor((now - trail.start) / limits.window)
    windows = {floor((at - trail.start) / limits.window) for at in trail.rises()}
    return sum(newest - limits.windows < window <= newest for window in windows)


def _fabric(gpu: Gpu, seen: Seen, rules: Rules) -> Iterator[Bad]:
    if gpu.mig:  # its instances speak to no other GPU
        return
    if gpu.fabric_state in REGISTERS:
        text = f"GPU {gpu.index}: its registration with the NVLink fabric is {gpu.fabric_state.replace('_', ' ')}"
        most, at = rules.links.fabric_registers, seen.at("nvml")
        if at - seen.registers.get(gpu.uuid, at) >= most:
            yield fail(Cause.GPU, Remedy.EXCLUDE, f"{text}, for {most:g} s or more", part=gpu.uuid)
        else:
            yield warn(Cause.GPU, Remedy.NONE, text, part=gpu.uuid)
    elif gpu.fabric_state == "completed" and gpu.fabric_status not in (None, "success"):
        text = f"GPU {gpu.index}: its registration with the NVLink fabric failed: {gpu.fabric_status}"
        yield fail(Cause.GPU, Remedy.EXCLUDE, text, part=gpu.uuid)


# ── PCI Express ──────────────────────────────────────────────────────────────────────────────────────────────────────
def _replays(gpu: Gpu, seen: Seen, rules: Rules) -> Iterator[Bad]:
    trail = seen.trail("gpu", gpu.uuid, "pcie_replays")
    rates, gen, lanes = rules.links.pcie_replays, gpu.pcie_gen_max or gpu.pcie_gen, gpu.pcie_width
    if trail is None or not trail.rise or not gen or not lanes or not rates:
        return
    usual = ceil(lanes * rates[min(gen, len(rates)) - 1])
    if trail.within(_MINUTE, seen.at("nvml")) > usual:
        text = f"GPU {gpu.index}: more than {usual} PCIe replays a minute ({lanes} lanes of generation {gen})"
        yield warn(Cause.GPU, Remedy.SUPPORT, text, part=gpu.uuid)


def _width(gpu: Gpu, seen: Seen, rules: Rules) -> Iterator[Bad]:
    if gpu.pcie_width and gpu.pcie_width_max and gpu.pcie_width < gpu.pcie_width_max:
        text = f"GPU {gpu.index}: its PCIe link has {gpu.pcie_width} of {gpu.pcie_width_max} lanes"
        yield warn(Cause.GPU, Remedy.SUPPORT, text, part=gpu.uuid)
        return
    busy = gpu.utilization is not None and gpu.utilization >= rules.gpu.busy  # an idle link saves power
    if busy and gpu.pcie_gen and gpu.pcie_gen_max and gpu.pcie_gen < gpu.pcie_gen_max:
        text = f"GPU {gpu.index} is busy, and its PCIe link runs at generation {gpu.pcie_gen} of {gpu.pcie_gen_max}"
        n = rules.gpu.throttled
        yield warn(Cause.GPU, Remedy.SUPPORT, text, part=gpu.uuid, needs=n, clears=n)


_NVML = ("nvml",)
CHECKS = (
    Check("nvlink_state", _NVML, each(("nvlinks",), _down), "NVLinks that were active, and those of GPUs of one kind",
          "one went down: FAIL, exclude; fewer than another GPU: WARN", "NVRx"),
    Check("nvlink_errors", _NVML, each(("nvlinks",), _errors), "replay, recovery and CRC errors of each NVLink",
          "in more than links.flagged of links.windows windows, or links.crc a second: FAIL, exclude; any: WARN",
          "NVRx, DCGM"),
    Check("nvlink_fabric", _NVML, each(("fabric_state",), _fabric), "registration with the NVLink fabric (NVSwitch)",
          "not completed: WARN; not within links.fabric_registers s, or with an error: FAIL, exclude", "NVRx"),
    Check("pcie_replays", _NVML, each(("pcie_replays",), _replays),
          "PCIe replays a minute, by generation and lanes", "> ceil(lanes x links.pcie_replays): WARN, support",
          "DCGM"),
    Check("pcie_link", _NVML, each(("pcie_width", "pcie_gen"), _width), "width of the PCIe link, and of a busy GPU its"
          " generation", "less than GPU and slot can do: WARN, support", "NVML; Meta"),
)  # fmt: skip
