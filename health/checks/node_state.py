"""The recorded state of one node: the newest samples, counter histories, kernel messages and rrl's own actions.

The checks judge the node from this state. All times are in seconds of the node's monotonic clock, as in the samples.
The increase of a counter is measured from the first value that was read. The agent stores which hardware was present
(`HardwareInventory`), so that a restarted agent notices hardware that failed while no agent was running.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Final

from msgspec import Struct, structs

from ...config.health_rules import XidRules
from ..readers.base import ACCELERATOR_READERS
from ..readers.samples import (
    Accelerator,
    AcceleratorData,
    Data,
    DcgmData,
    FabricData,
    FabricPort,
    HostData,
    KernelData,
    KernelEvent,
    NvidiaGpu,
    NvmlData,
    Reading,
)
from .xid_events import XidEvent, XidEvents

_MERGE_INTERVAL_S = 5.0
"""Increases of a counter within this time (s) count as a single increase."""
_MISREAD_WINDOW_S = 300.0
"""If a counter returns to its old total within this time (s) after a decrease, the lower value counts as misread (our
choice)."""
_BeforeFall = tuple[float, float, int, int, list[tuple[float, int]], int]
"""State of a `CounterHistory` before its counter decreased: the time (s) of the decrease, and the values of ``start``,
``first``, ``_before``, ``_rises`` and ``last`` before the decrease."""
_HISTORY_S = 7200.0
"""Time (s) for which the increases of a counter are kept. For a longer window (a rule with the window "within a day"),
the total increase is used instead."""


class CounterHistory:
    """The history of one counter that only grows.

    A counter that decreases (the driver was reloaded) starts again from the lower value. If its next increase brings it
    back to the old total or above, within `_MISREAD_WINDOW_S`, the lower value counts as misread. The increase is then
    measured as if the lower value had not been read.
    """

    __slots__ = ("_before", "_fallen", "_rises", "first", "last", "start")

    def __init__(self, at: float, total: int) -> None:
        self.start, self.first, self.last, self._before = at, total, total, total
        self._rises: list[tuple[float, int]] = []
        """(time in s, total from then on) of each increase, oldest first."""
        self._fallen: _BeforeFall | None = None
        """Values before the counter decreased; None if it has not decreased since its last increase. If the counter has
        decreased several times in a row, these are the values before the first of these decreases."""

    def add(self, at: float, total: int) -> None:
        """Add the total that was read at time ``at`` (s)."""
        if total == self.last:
            return
        if total < self.last:
            self._fallen = self._fallen or (at, self.start, self.first, self._before, self._rises, self.last)
            self.start, self.first, self._before, self._rises, self.last = at, total, total, [], total
            return
        if self._fallen is not None:
            fell_at, start, first, before, rises, last = self._fallen
            self._fallen = None
            if total >= last and at - fell_at <= _MISREAD_WINDOW_S:
                self.start, self.first, self._before, self._rises, self.last = start, first, before, rises, last
                self.add(at, total)
                return
        if self._rises and at - self._rises[-1][0] < _MERGE_INTERVAL_S:
            self._rises[-1] = (self._rises[-1][0], total)
        else:
            self._rises.append((at, total))
            while len(self._rises) > 1 and self._rises[0][0] < at - _HISTORY_S:
                self._before = self._rises.pop(0)[1]
        self.last = total

    @property
    def increase(self) -> int:
        """Return the increase since the first sample, or since the last decrease."""
        return self.last - self.first

    def increase_within(self, window: float, now: float) -> int:
        """Return the increase in the last ``window`` s."""
        before = self._before if window <= _HISTORY_S else self.first
        for at, total in self._rises:
            if at > now - window:
                break
            before = total
        return self.last - before

    def increase_times(self) -> Iterator[float]:
        """Yield the times of the increases (s)."""
        return (at for at, _ in self._rises)


PORT_COUNTERS: Final = (
    "link_downed",
    "excessive_buffer_overrun_errors",
    "local_link_integrity_errors",
    "rnr_nak_retry_err",
    "symbol_error",
    "link_error_recovery",
    "port_rcv_errors",
    "local_ack_timeout_err",
    "port_xmit_discards",
    "roce_slow_restart",
    "carrier_changes",
)
"""Names of the port counters that checks use."""
HEALTH_RUNS: Final = "dcgmi health"
"""Key of `NodeState.reading_counts` for runs of ``dcgmi health``."""
REGISTERING_STATES: Final = ("not_started", "in_progress")
"""States of a GPU whose registration with the NVLink fabric is not complete."""
ALL_GPUS: Final = "every"
"""Name that stands for all GPUs of the node in `NodeState.set_expected_free`."""
_MAX_LOG_LINES = 500
"""Maximum number of kernel log lines that are kept."""
_MAX_KILLS = 50
"""Maximum length of each of the two lists ``our_kills`` and ``role_deaths`` of `NodeState`."""


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of the kernel log that is not an Xid."""

    event: KernelEvent
    at: float
    before_start: bool
    """Whether the line is older than the first sample."""


class NodeState:
    """Samples and events of one node, as the checks read them."""

    def __init__(self, burst: float = XidRules().burst) -> None:
        """Create an empty state.

        Args:
            burst: Seconds within which reports of one Xid on one GPU are one event (``rules.xid.burst``).
        """
        self.newest: dict[str, Reading] = {}
        """Newest sample of each reader."""
        self.last_data: dict[str, Data] = {}
        """Newest data of each reader, however old."""
        self.accelerator_reader = next(iter(ACCELERATOR_READERS))
        """Reader of the node's accelerators: the last that has read any, and before that the first of the table."""
        self.reading_counts: dict[str, int] = {}
        """Number of samples of each reader; under :data:`HEALTH_RUNS`, number of runs of ``dcgmi health``."""
        self.external_updates = 0
        """Number of events that are not samples: rrl's kills, ends of roles, and changes of ``expected_free``."""
        self.hung_since: dict[str, float] = {}
        """Time (s) since which all samples of a reader have been hung, by reader."""
        self.started_at: float | None = None
        """Time of the first sample (s)."""
        self.counters: dict[tuple[str, str, str], CounterHistory] = {}
        """History of each counter, by kind, device and name of the counter."""
        self.xids = XidEvents(burst)
        self.log: deque[LogLine] = deque(maxlen=_MAX_LOG_LINES)
        self.max_gpus = 0
        """Largest number of GPUs that the driver has listed."""
        self.hot_since: dict[str, float] = {}
        """Time (s) since which a GPU has been at or above one of its temperature limits, by GPU."""
        self.fabric_registering_since: dict[str, float] = {}
        """Time (s) since which a GPU's registration with the NVLink fabric has been incomplete, by GPU."""
        self.links_up: dict[str, set[int]] = {}
        """Numbers of the NVLinks that were active at some time, by GPU."""
        self.ports_up: set[str] = set()
        """Ports that were ACTIVE at some time."""
        self.max_port_rates: dict[str, float] = {}
        """Highest rate (Gbit/s) of a port so far, by port."""
        self.hcas: set[str] = set()
        """InfiniBand and RoCE devices that were present at some time."""
        self.boot_id = ""
        """The node's boot id."""
        self.gpu_labels: dict[str, str] = {}
        """One line with a GPU's model, serial number and versions for administrators and the vendor, by the GPU's
        UUID."""
        self.own_uid: int | None = None
        """User id of the run's processes. If it is unknown (None), any process of a user other than root may belong to
        the run."""
        self.our_kills: deque[float] = deque(maxlen=_MAX_KILLS)
        """Times (s) at which rrl killed a step of the run."""
        self.role_deaths: deque[tuple[float, frozenset[str]]] = deque(maxlen=_MAX_KILLS)
        """Times (s) at which a role ended without being killed by rrl, each with the role's GPUs."""
        self.expected_free: frozenset[str] = frozenset()
        """GPUs that must be free because a role is about to start; see `set_expected_free`."""
        self._tenants: dict[str, tuple[str, str]] = {}
        """Role and incarnation that use a GPU, by GPU."""
        self._exporter_counts = False
        """Whether the last sample of DCGM contained the Xid counts of dcgm-exporter."""
        self._health_at: float | None = None
        """Time of the newest run of ``dcgmi health``."""

    # ── samples ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def add(self, reading: Reading) -> None:
        """Add a sample and update counters, events and hardware inventory from it."""
        name = reading.reader
        # if devices were present before, "absent" counts as a sample without devices
        if reading.state == "absent" and name == "fabric" and self.hcas:
            reading = Reading(name, reading.at, FabricData())
        if isinstance(reading.data, DcgmData):
            reading = structs.replace(reading, data=self._of_known_gpus(reading.data))
        self.newest[name] = reading
        if reading.data is not None:
            self.last_data[name] = reading.data
        self.reading_counts[name] = self.reading_counts.get(name, 0) + 1
        if reading.state == "hung":
            self.hung_since.setdefault(name, reading.at)
        else:
            self.hung_since.pop(name, None)
        if name == "dcgm" and not (isinstance(reading.data, DcgmData) and self._repeats_health_run(reading.data)):
            self.reading_counts[HEALTH_RUNS] = self.reading_counts.get(HEALTH_RUNS, 0) + 1
        if self.started_at is None:
            self.started_at = reading.at
        match reading.data:
            case AcceleratorData():
                self.accelerator_reader = name
                self._add_accelerators(reading.data, reading.at)
            case DcgmData():
                self._add_dcgm(reading.data, reading.at)
            case KernelData():
                self._add_kernel(reading.data, reading.at)
            case FabricData():
                for port in reading.data.ports:
                    self._add_port(port, reading.at)
            case HostData():
                self._count("host", "", "oom_kills", reading.data.oom_kills, reading.at)

    def _of_known_gpus(self, data: DcgmData) -> DcgmData:
        """Return DCGM's data about the GPUs that NVML or the driver lists."""
        nvml = self.last_data.get("nvml")
        known = {gpu.uuid for gpu in nvml.gpus} if isinstance(nvml, NvmlData) else set()
        known |= set(data.driver_gpus)
        return structs.replace(data, gpus=tuple(gpu for gpu in data.gpus if gpu.uuid in known))

    def _repeats_health_run(self, data: DcgmData) -> bool:
        """Return whether the incidents come from a run of ``dcgmi health`` that an earlier sample already contained."""
        before, self._health_at = self._health_at, data.health_at
        return data.health_at is not None and data.health_at == before

    def _add_accelerators(self, data: AcceleratorData, at: float) -> None:
        self.max_gpus = max(self.max_gpus, len(data.gpus))
        self.xids.set_uuids({gpu.pci: gpu.uuid for gpu in data.gpus if gpu.pci and gpu.uuid})
        for gpu in data.gpus:
            self._add_gpu(gpu, at)
            if gpu.uuid and (gpu.serial or gpu.name):  # a lost GPU reports neither value, so its earlier label is kept
                named = (
                    ("serial", gpu.serial),
                    ("vbios", gpu.vbios),
                    ("driver", data.driver),
                    ("boot id", self.boot_id),
                )
                labels = (f"{name} {word}" for name, word in named if word)
                self.gpu_labels[gpu.uuid] = ", ".join((f"GPU {gpu.index} {gpu.name}".rstrip(), *labels))
        if isinstance(data, NvmlData):
            for event in data.xids:
                self._add_xid(event.uuid, event.xid, at, event.detail, "nvml")

    def _add_gpu(self, gpu: Accelerator, at: float) -> None:
        self._count("gpu", gpu.uuid, "pcie_replays", gpu.pcie_replays, at)
        self._count("gpu", gpu.uuid, "ecc_aggregate_uncorrected", gpu.ecc_aggregate_uncorrected, at)
        self._count("gpu", gpu.uuid, "ecc_volatile_corrected", gpu.ecc_volatile_corrected, at)
        if _is_hot(gpu):
            self.hot_since.setdefault(gpu.uuid, at)
        else:
            self.hot_since.pop(gpu.uuid, None)
        if isinstance(gpu, NvidiaGpu):
            self._add_nvidia_facts(gpu, at)

    def _add_nvidia_facts(self, gpu: NvidiaGpu, at: float) -> None:
        self._count("gpu", gpu.uuid, "retired_uncorrected", gpu.retired_uncorrected, at)
        if gpu.fabric_state in REGISTERING_STATES:
            self.fabric_registering_since.setdefault(gpu.uuid, at)
        elif gpu.fabric_state is not None:
            self.fabric_registering_since.pop(gpu.uuid, None)
        for link in gpu.nvlinks or ():
            if link.active:
                self.links_up.setdefault(gpu.uuid, set()).add(link.link)
            replays = [n for n in (link.replay, link.recovery) if n is not None]
            crc = [n for n in (link.crc_flit, link.crc_data) if n is not None]
            self._count("nvlink", gpu.uuid, f"{link.link} errors", sum(replays + crc) if replays or crc else None, at)
            self._count("nvlink", gpu.uuid, f"{link.link} crc", sum(crc) if crc else None, at)

    def _add_dcgm(self, data: DcgmData, at: float) -> None:
        """Add the counts of dcgm-exporter, and an Xid event for each count that increased.

        The exporter counts the Xids of the last minutes: a code appears when it occurs and disappears later.
        """
        before, self._exporter_counts = self._exporter_counts, "exporter" not in data.unread
        for gpu in data.gpus:
            known = {int(code): 0 for kind, device, code in self.counters if (kind, device) == ("dcgm", gpu.uuid)}
            for code, total in {**known, **gpu.xid_counts}.items():
                key = ("dcgm", gpu.uuid, str(code))
                if before:
                    self.counters.setdefault(key, CounterHistory(at, 0))
                counter = self.counters.get(key)
                if counter is not None and total > counter.last:
                    self._add_xid(gpu.uuid, code, at, "", "dcgm")
                self._count(*key, total, at)

    def _add_kernel(self, data: KernelData, at: float) -> None:
        for event in data.events:
            then = at - event.age
            if event.kind == "xid" and event.xid is not None:
                self._add_xid(event.pci, event.xid, then, event.text, "kernel", event.pci_exists)
            else:
                self.log.append(LogLine(event, then, self._is_before_start(then)))

    def _add_port(self, port: FabricPort, at: float) -> None:
        name = f"{port.device}/{port.port}"
        self.hcas.add(port.device)
        if port.state == "ACTIVE":
            self.ports_up.add(name)
            self.max_port_rates[name] = max(self.max_port_rates.get(name, 0.0), port.rate or 0.0)
        for counter in PORT_COUNTERS:
            self._count("port", name, counter, port.counters.get(counter), at)

    def _add_xid(self, gpu: str, code: int, at: float, text: str, source: str, pci_exists: bool | None = None) -> None:
        before_start = self._is_before_start(at)
        tenant = None if before_start else self._tenants.get(self.xids.uuid_of(gpu))
        event = XidEvent(
            gpu, code, at, text, before_start=before_start, tenant=tenant, sources={source}, pci_exists=pci_exists
        )
        self.xids.add(event)

    def _is_before_start(self, at: float) -> bool:
        return self.started_at is not None and at < self.started_at

    def _count(self, kind: str, device: str, counter: str, total: int | None, at: float) -> None:
        if total is None:
            return
        key = (kind, device, counter)
        history = self.counters.get(key)
        if history is None:
            self.counters[key] = CounterHistory(at, total)
        else:
            history.add(at, total)

    # ── our own actions ───────────────────────────────────────────────────────────────────────────────────────────────
    def on_our_kill(self, now: float) -> None:
        """Record that rrl killed a step on this node, because a kill can cause Xids."""
        self.our_kills.append(now)
        self.external_updates += 1

    def on_role_death(self, gpus: Collection[str], now: float) -> None:
        """Record that a role with these GPUs (UUIDs) ended without being killed by rrl."""
        self.role_deaths.append((now, frozenset(gpus)))
        self.external_updates += 1

    def set_tenant(self, gpus: Collection[str], role: str, incarnation: str) -> None:
        """Record which incarnation uses these GPUs (UUIDs) now, so that Xids can be attributed to applications."""
        self._tenants.update(dict.fromkeys(gpus, (role, incarnation)))

    def set_expected_free(self, gpus: Collection[str]) -> None:
        """Set the GPUs (UUIDs, indices, or :data:`ALL_GPUS`) that must be free because a role is about to start."""
        self.expected_free = frozenset(gpus)
        self.external_updates += 1

    # ── queries ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def data(self, reader: str) -> Any:
        """Return the data of the reader's newest sample; None if that sample has no data."""
        newest = self.newest.get(reader)
        return newest.data if newest is not None and newest.state == "read" else None

    def accelerators(self) -> AcceleratorData | None:
        """Return the accelerators in the newest sample of their reader; None if that sample has no data."""
        data = self.data(self.accelerator_reader)
        return data if isinstance(data, AcceleratorData) else None

    def reading_at(self, reader: str) -> float:
        """Return the time of the reader's newest sample (s)."""
        return self.newest[reader].at

    def counter(self, kind: str, device: str, name: str) -> CounterHistory | None:
        """Return the history of a counter; None if it was never read."""
        return self.counters.get((kind, device, name))


def _is_hot(gpu: Accelerator) -> bool:
    pairs = ((gpu.temperature, gpu.temperature_slowdown), (gpu.temperature_memory, gpu.temperature_memory_max))
    return any(now is not None and limit and now >= limit for now, limit in pairs)


class HardwareInventory(Struct, frozen=True):
    """Hardware that was present on a node since its boot, which an agent stores for its successor."""

    boot_id: str
    """Id of the boot. After another boot the node may have other hardware."""
    job: str = ""
    """Cluster job that held the node. Another job may get other GPUs of the node."""
    gpus: int = 0
    """Largest number of GPUs that were listed."""
    hcas: tuple[str, ...] = ()
    ports_up: tuple[str, ...] = ()
    links_up: dict[str, tuple[int, ...]] = {}
    """Numbers of the NVLinks that were active, by the GPU's UUID."""


def hardware_inventory(state: NodeState, job: str = "") -> HardwareInventory:
    """Return the inventory of the hardware that was present on the node."""
    links = {gpu: tuple(sorted(up)) for gpu, up in sorted(state.links_up.items())}
    return HardwareInventory(
        state.boot_id, job, state.max_gpus, tuple(sorted(state.hcas)), tuple(sorted(state.ports_up)), links
    )


def restore_inventory(state: NodeState, inventory: HardwareInventory, job: str = "") -> None:
    """Add the inventory to the state if it was stored in the same boot and job; otherwise ignore it."""
    if not state.boot_id or (inventory.boot_id, inventory.job) != (state.boot_id, job):
        return
    state.max_gpus = max(state.max_gpus, inventory.gpus)
    state.hcas.update(inventory.hcas)
    state.ports_up.update(inventory.ports_up)
    for gpu, links in inventory.links_up.items():
        state.links_up.setdefault(gpu, set()).update(links)
