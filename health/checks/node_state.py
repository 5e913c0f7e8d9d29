"""What the checks of one node remember: the newest reading of each reader, the history of counters, kernel messages,
and what rrl did to the node's processes. It judges nothing.

All times are seconds of the node's monotonic clock, as in the readings. The first value of a counter is its origin:
what was counted before is not an increase. The hardware that was present is remembered across agents, so that a
restarted agent notices what broke while there was none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Final

from msgspec import Struct, structs

from ...config.health_rules import XidRules
from ..readers.samples import (
    Data,
    DcgmData,
    FabricData,
    FabricPort,
    Gpu,
    HostData,
    KernelData,
    KernelEvent,
    NvmlData,
    Reading,
)
from .xid_events import XidEvent, XidEvents

_MERGE_INTERVAL_S = 5.0
"""s: rises closer to each other than this are one"""
_MISREAD_WINDOW_S = 300.0
"""s after a fall within which a total that is back where it was has never been away (ours)"""
_BeforeFall = tuple[float, float, int, int, list[tuple[float, int]], int]
"""when it fell, and ``start``, ``first``, ``_before``, ``_rises`` and ``last`` of then"""
_HISTORY_S = 7200.0
"""s of past; longer than any window of a rule but "within a day", which asks for the whole rise"""


class CounterHistory:
    """Totals only grow; one that shrinks (a driver was loaded anew) starts over. One that comes back in one step was
    misread meanwhile: only what it grew beyond its old total is a rise."""

    __slots__ = ("_before", "_fallen", "_rises", "first", "last", "start")

    def __init__(self, at: float, total: int) -> None:
        self.start, self.first, self.last, self._before = at, total, total, total
        self._rises: list[tuple[float, int]] = []
        """(at, total from then on), oldest first"""
        self._fallen: _BeforeFall | None = None
        """what it was before it fell, until it rises again"""

    def add(self, at: float, total: int) -> None:
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
        """Since we look."""
        return self.last - self.first

    def increase_within(self, window: float, now: float) -> int:
        """Its rise in the last ``window`` s."""
        before = self._before if window <= _HISTORY_S else self.first
        for at, total in self._rises:
            if at > now - window:
                break
            before = total
        return self.last - before

    def increase_times(self) -> Iterator[float]:
        """When it rose (s)."""
        return (at for at, _ in self._rises)


PORT_COUNTERS: Final = (
    "link_downed", "excessive_buffer_overrun_errors", "local_link_integrity_errors", "rnr_nak_retry_err",
    "symbol_error", "link_error_recovery", "port_rcv_errors", "local_ack_timeout_err", "port_xmit_discards",
    "roce_slow_restart", "carrier_changes",
)  # fmt: skip
"""of a port, those that a check judges"""
HEALTH_RUNS: Final = "dcgmi health"
REGISTERING_STATES: Final = ("not_started", "in_progress")
"""states of a GPU that is on its way into the NVLink fabric"""
ALL_GPUS: Final = "every"
"""GPU of the node"""
_MAX_LOG_LINES = 500
"""lines of the kernel log"""
_MAX_KILLS = 50


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of the kernel log that is no Xid."""

    event: KernelEvent
    at: float
    before_start: bool
    """from before we looked"""


class NodeState:
    def __init__(self, burst: float = XidRules().burst) -> None:
        """``burst``: s in which one Xid on one GPU is one event (``rules.xid.burst``)."""
        self.newest: dict[str, Reading] = {}
        self.last_data: dict[str, Data] = {}
        """what each reader read last, however long ago"""
        self.reading_counts: dict[str, int] = {}
        """readings of each reader so far; of :data:`HEALTH` runs of ``dcgmi health``"""
        self.external_updates = 0
        """times that somebody told us something else than a reading"""
        self.hung_since: dict[str, float] = {}
        """s, of the first of the readings in a row that did not come back in time"""
        self.started_at: float | None = None
        self.counters: dict[tuple[str, str, str], CounterHistory] = {}
        """by kind, device and counter"""
        self.xids = XidEvents(burst)
        self.log: deque[LogLine] = deque(maxlen=_MAX_LOG_LINES)
        self.max_gpus = 0
        self.hot_since: dict[str, float] = {}
        """since when (s) each GPU has been at or above a limit of its own"""
        self.fabric_registering_since: dict[str, float] = {}
        """since when (s) each GPU has not completed its registration with the NVLink fabric"""
        self.links_up: dict[str, set[int]] = {}
        """NVLinks of each GPU that were active at some time"""
        self.ports_up: set[str] = set()
        """ports that were ACTIVE at some time"""
        self.max_port_rates: dict[str, float] = {}
        """the highest rate (Gbit/s) that each of them had"""
        self.hcas: set[str] = set()
        """devices that were there at some time"""
        self.boot_id = ""
        """the node's boot id, for the administrators"""
        self.gpu_labels: dict[str, str] = {}
        """GPUs by UUID as administrators and their vendor call them, one line each, as last read"""
        self.own_uid: int | None = None
        """of our own processes; None: it is not known whose are ours, but that root's are not"""
        self.our_kills: deque[float] = deque(maxlen=_MAX_KILLS)
        self.role_deaths: deque[tuple[float, frozenset[str]]] = deque(maxlen=_MAX_KILLS)
        self.expected_free: frozenset[str] = frozenset()
        self._tenants: dict[str, tuple[str, str]] = {}
        self._exporter_counts = False
        """the last reading of DCGM had the exporter's counts"""
        self._health_at: float | None = None
        """of the newest run of ``dcgmi health``"""
        self.memo: Any = None
        """of :func:`rrl.health.checks.evaluate.judge`"""

    # ── what readers say ────────────────────────────────────────────────────────────────────────────────────────────
    def add(self, reading: Reading) -> None:
        name = reading.reader
        if reading.state == "absent" and name == "fabric" and self.hcas:  # they were there: now there are none
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
            case NvmlData():
                self._add_nvml(reading.data, reading.at)
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
        """Without what DCGM says of GPUs that neither NVML nor the driver knows."""
        nvml = self.last_data.get("nvml")
        known = {gpu.uuid for gpu in nvml.gpus} if isinstance(nvml, NvmlData) else set()
        known |= set(data.driver_gpus)
        return structs.replace(data, gpus=tuple(gpu for gpu in data.gpus if gpu.uuid in known))

    def _repeats_health_run(self, data: DcgmData) -> bool:
        """Its incidents are of a run of ``dcgmi health`` that an earlier reading told."""
        before, self._health_at = self._health_at, data.health_at
        return data.health_at is not None and data.health_at == before

    def _add_nvml(self, data: NvmlData, at: float) -> None:
        self.max_gpus = max(self.max_gpus, len(data.gpus))
        self.xids.set_uuids({gpu.pci: gpu.uuid for gpu in data.gpus if gpu.pci and gpu.uuid})
        for gpu in data.gpus:
            self._add_gpu(gpu, at)
            if gpu.uuid and (gpu.serial or gpu.name):  # of a lost one they are gone
                named = (
                    ("serial", gpu.serial),
                    ("vbios", gpu.vbios),
                    ("driver", data.driver),
                    ("boot id", self.boot_id),
                )
                labels = (f"{name} {word}" for name, word in named if word)
                self.gpu_labels[gpu.uuid] = ", ".join((f"GPU {gpu.index} {gpu.name}".rstrip(), *labels))
        for event in data.xids:
            self._add_xid(event.uuid, event.xid, at, event.detail, "nvml")

    def _add_gpu(self, gpu: Gpu, at: float) -> None:
        self._count("gpu", gpu.uuid, "pcie_replays", gpu.pcie_replays, at)
        self._count("gpu", gpu.uuid, "ecc_aggregate_uncorrected", gpu.ecc_aggregate_uncorrected, at)
        self._count("gpu", gpu.uuid, "ecc_volatile_corrected", gpu.ecc_volatile_corrected, at)
        self._count("gpu", gpu.uuid, "retired_uncorrected", gpu.retired_uncorrected, at)
        if _is_hot(gpu):
            self.hot_since.setdefault(gpu.uuid, at)
        else:
            self.hot_since.pop(gpu.uuid, None)
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
        """The exporter counts the Xids of its last minutes: a code is told once it happened, and later no more."""
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

    def _add_xid(
        self, gpu: str, code: int, at: float, text: str, source: str, pci_exists: bool | None = None
    ) -> None:  # fmt: skip
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

    # ── what is done here ───────────────────────────────────────────────────────────────────────────────────────────
    def on_our_kill(self, now: float) -> None:
        """A step of ours was killed on this node: what its GPUs say around that is its own end."""
        self.our_kills.append(now)
        self.external_updates += 1

    def on_role_death(self, gpus: Collection[str], now: float) -> None:
        """A role that had these GPUs (UUIDs) died, and we did not kill it."""
        self.role_deaths.append((now, frozenset(gpus)))
        self.external_updates += 1

    def set_tenant(self, gpus: Collection[str], role: str, incarnation: str) -> None:
        """This life of that role has these GPUs (UUIDs) from now on: an application's fault follows the application."""
        self._tenants.update(dict.fromkeys(gpus, (role, incarnation)))

    def set_expected_free(self, gpus: Collection[str]) -> None:
        """These GPUs (UUIDs, indices, or :data:`EVERY`) are to be free: a role is about to start. Empty: none is."""
        self.expected_free = frozenset(gpus)
        self.external_updates += 1

    # ── looking ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def data(self, reader: str) -> Any:
        """What it read last; None where its newest reading has nothing."""
        newest = self.newest.get(reader)
        return newest.data if newest is not None and newest.state == "read" else None

    def reading_at(self, reader: str) -> float:
        return self.newest[reader].at

    def counter(self, kind: str, device: str, name: str) -> CounterHistory | None:
        return self.counters.get((kind, device, name))


def _is_hot(gpu: Gpu) -> bool:
    pairs = ((gpu.temperature, gpu.temperature_slowdown), (gpu.temperature_memory, gpu.temperature_memory_max))
    return any(now is not None and limit and now >= limit for now, limit in pairs)


class HardwareInventory(Struct, frozen=True):
    boot_id: str
    """id of the boot that it is of: another one may well bring other hardware up"""
    job: str = ""
    """of the cluster, in which its node is ours: another one may be given other GPUs of it, and comes later"""
    gpus: int = 0
    """the most that were there"""
    hcas: tuple[str, ...] = ()
    ports_up: tuple[str, ...] = ()
    links_up: dict[str, tuple[int, ...]] = {}
    """by GPU's UUID"""


def hardware_inventory(state: NodeState, job: str = "") -> HardwareInventory:
    links = {gpu: tuple(sorted(up)) for gpu, up in sorted(state.links_up.items())}
    return HardwareInventory(
        state.boot_id, job, state.max_gpus, tuple(sorted(state.hcas)), tuple(sorted(state.ports_up)), links
    )


def restore_inventory(state: NodeState, inventory: HardwareInventory, job: str = "") -> None:
    """Of the same boot and job, or nothing."""
    if not state.boot_id or (inventory.boot_id, inventory.job) != (state.boot_id, job):
        return
    state.max_gpus = max(state.max_gpus, inventory.gpus)
    state.hcas.update(inventory.hcas)
    state.ports_up.update(inventory.ports_up)
    for gpu, links in inventory.links_up.items():
        state.links_up.setdefault(gpu, set()).update(links)
