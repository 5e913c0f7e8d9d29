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
from .xid_events import XidEvent, XidLog

_STEP = 5.0
"""s: rises closer to each other than this are one"""
_BLINK = 300.0
"""s after a fall within which a total that is back where it was has never been away (ours)"""
_Past = tuple[float, float, int, int, list[tuple[float, int]], int]
"""when it fell, and ``start``, ``first``, ``_before``, ``_rises`` and ``last`` of then"""
_KEPT = 7200.0
"""s of past; longer than any window of a rule but "within a day", which asks for the whole rise"""


class Trail:
    """Totals only grow; one that shrinks (a driver was loaded anew) starts over. One that comes back in one step was
    misread meanwhile: only what it grew beyond its old total is a rise."""

    __slots__ = ("_before", "_fallen", "_rises", "first", "last", "start")

    def __init__(self, at: float, total: int) -> None:
        self.start, self.first, self.last, self._before = at, total, total, total
        self._rises: list[tuple[float, int]] = []
        """(at, total from then on), oldest first"""
        self._fallen: _Past | None = None
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
            if total >= last and at - fell_at <= _BLINK:
                self.start, self.first, self._before, self._rises, self.last = start, first, before, rises, last
                self.add(at, total)
                return
        if self._rises and at - self._rises[-1][0] < _STEP:
            self._rises[-1] = (self._rises[-1][0], total)
        else:
            self._rises.append((at, total))
            while len(self._rises) > 1 and self._rises[0][0] < at - _KEPT:
                self._before = self._rises.pop(0)[1]
        self.last = total

    @property
    def rise(self) -> int:
        """Since we look."""
        return self.last - self.first

    def within(self, window: float, now: float) -> int:
        """Its rise in the last ``window`` s."""
        before = self._before if window <= _KEPT else self.first
        for at, total in self._rises:
            if at > now - window:
                break
            before = total
        return self.last - before

    def rises(self) -> Iterator[float]:
        """When it rose (s)."""
        return (at for at, _ in self._rises)


PORT_COUNTERS: Final = (
    "link_downed", "excessive_buffer_overrun_errors", "local_link_integrity_errors", "rnr_nak_retry_err",
    "symbol_error", "link_error_recovery", "port_rcv_errors", "local_ack_timeout_err", "port_xmit_discards",
    "roce_slow_restart", "carrier_changes",
)  # fmt: skip
"""of a port, those that a check judges"""
HEALTH: Final = "dcgmi health"
REGISTERS: Final = ("not_started", "in_progress")
"""states of a GPU that is on its way into the NVLink fabric"""
EVERY: Final = "every"
"""GPU of the node"""
_REMEMBERED = 500
"""lines of the kernel log"""
_KILLS = 50


@dataclass(frozen=True, slots=True)
class Logged:
    """A line of the kernel log that is no Xid."""

    event: KernelEvent
    at: float
    past: bool
    """from before we looked"""


class Seen:
    def __init__(self, burst: float = XidRules().burst) -> None:
        """``burst``: s in which one Xid on one GPU is one event (``rules.xid.burst``)."""
        self.newest: dict[str, Reading] = {}
        self.kept: dict[str, Data] = {}
        """what each reader read last, however long ago"""
        self.turn: dict[str, int] = {}
        """readings of each reader so far; of :data:`HEALTH` runs of ``dcgmi health``"""
        self.told = 0
        """times that somebody told us something else than a reading"""
        self.hung_since: dict[str, float] = {}
        """s, of the first of the readings in a row that did not come back in time"""
        self.began: float | None = None
        self.trails: dict[tuple[str, str, str], Trail] = {}
        """by kind, device and counter"""
        self.xids = XidLog(burst)
        self.log: deque[Logged] = deque(maxlen=_REMEMBERED)
        self.most_gpus = 0
        self.hot: dict[str, float] = {}
        """since when (s) each GPU has been at or above a limit of its own"""
        self.registers: dict[str, float] = {}
        """since when (s) each GPU has not completed its registration with the NVLink fabric"""
        self.links_up: dict[str, set[int]] = {}
        """NVLinks of each GPU that were active at some time"""
        self.ports_up: set[str] = set()
        """ports that were ACTIVE at some time"""
        self.rates: dict[str, float] = {}
        """the highest rate (Gbit/s) that each of them had"""
        self.hcas: set[str] = set()
        """devices that were there at some time"""
        self.boot = ""
        """the node's boot id, for the administrators"""
        self.who: dict[str, str] = {}
        """GPUs by UUID as administrators and their vendor call them, one line each, as last read"""
        self.uid: int | None = None
        """of our own processes; None: it is not known whose are ours, but that root's are not"""
        self.kills: deque[float] = deque(maxlen=_KILLS)
        self.deaths: deque[tuple[float, frozenset[str]]] = deque(maxlen=_KILLS)
        self.free: frozenset[str] = frozenset()
        self._tenants: dict[str, tuple[str, str]] = {}
        self._counting = False
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
            self.kept[name] = reading.data
        self.turn[name] = self.turn.get(name, 0) + 1
        if reading.state == "hung":
            self.hung_since.setdefault(name, reading.at)
        else:
            self.hung_since.pop(name, None)
        if name == "dcgm" and not (isinstance(reading.data, DcgmData) and self._told_before(reading.data)):
            self.turn[HEALTH] = self.turn.get(HEALTH, 0) + 1
        if self.began is None:
            self.began = reading.at
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
        nvml = self.kept.get("nvml")
        known = {gpu.uuid for gpu in nvml.gpus} if isinstance(nvml, NvmlData) else set()
        known |= set(data.driver_gpus)
        return structs.replace(data, gpus=tuple(gpu for gpu in data.gpus if gpu.uuid in known))

    def _told_before(self, data: DcgmData) -> bool:
        """Its incidents are of a run of ``dcgmi health`` that an earlier reading told."""
        before, self._health_at = self._health_at, data.health_at
        return data.health_at is not None and data.health_at == before

    def _add_nvml(self, data: NvmlData, at: float) -> None:
        self.most_gpus = max(self.most_gpus, len(data.gpus))
        self.xids.name({gpu.pci: gpu.uuid for gpu in data.gpus if gpu.pci and gpu.uuid})
        for gpu in data.gpus:
            self._add_gpu(gpu, at)
            if gpu.uuid and (gpu.serial or gpu.name):  # of a lost one they are gone
                named = (("serial", gpu.serial), ("vbios", gpu.vbios), ("driver", data.driver), ("boot id", self.boot))
                words = (f"{name} {word}" for name, word in named if word)
                self.who[gpu.uuid] = ", ".join((f"GPU {gpu.index} {gpu.name}".rstrip(), *words))
        for told in data.xids:
            self._add_xid(told.uuid, told.xid, at, told.detail, "nvml")

    def _add_gpu(self, gpu: Gpu, at: float) -> None:
        self._count("gpu", gpu.uuid, "pcie_replays", gpu.pcie_replays, at)
        self._count("gpu", gpu.uuid, "ecc_aggregate_uncorrected", gpu.ecc_aggregate_uncorrected, at)
        self._count("gpu", gpu.uuid, "ecc_volatile_corrected", gpu.ecc_volatile_corrected, at)
        self._count("gpu", gpu.uuid, "retired_uncorrected", gpu.retired_uncorrected, at)
        if _is_hot(gpu):
            self.hot.setdefault(gpu.uuid, at)
        else:
            self.hot.pop(gpu.uuid, None)
        if gpu.fabric_state in REGISTERS:
            self.registers.setdefault(gpu.uuid, at)
        elif gpu.fabric_state is not None:
            self.registers.pop(gpu.uuid, None)
        for link in gpu.nvlinks or ():
            if link.active:
                self.links_up.setdefault(gpu.uuid, set()).add(link.link)
            told = [n for n in (link.replay, link.recovery) if n is not None]
            crc = [n for n in (link.crc_flit, link.crc_data) if n is not None]
            self._count("nvlink", gpu.uuid, f"{link.link} errors", sum(told + crc) if told or crc else None, at)
            self._count("nvlink", gpu.uuid, f"{link.link} crc", sum(crc) if crc else None, at)

    def _add_dcgm(self, data: DcgmData, at: float) -> None:
        """The exporter counts the Xids of its last minutes: a code is told once it happened, and later no more."""
        before, self._counting = self._counting, "exporter" not in data.unread
        for gpu in data.gpus:
            known = {int(code): 0 for kind, device, code in self.trails if (kind, device) == ("dcgm", gpu.uuid)}
            for code, total in {**known, **gpu.xid_counts}.items():
                key = ("dcgm", gpu.uuid, str(code))
                if before:
                    self.trails.setdefault(key, Trail(at, 0))
                trail = self.trails.get(key)
                if trail is not None and total > trail.last:
                    self._add_xid(gpu.uuid, code, at, "", "dcgm")
                self._count(*key, total, at)

    def _add_kernel(self, data: KernelData, at: float) -> None:
        for event in data.events:
            then = at - event.age
            if event.kind == "xid" and event.xid is not None:
                self._add_xid(event.pci, event.xid, then, event.text, "kernel", event.pci_exists)
            else:
                self.log.append(Logged(event, then, self._is_past(then)))

    def _add_port(self, port: FabricPort, at: float) -> None:
        name = f"{port.device}/{port.port}"
        self.hcas.add(port.device)
        if port.state == "ACTIVE":
            self.ports_up.add(name)
            self.rates[name] = max(self.rates.get(name, 0.0), port.rate or 0.0)
        for counter in PORT_COUNTERS:
            self._count("port", name, counter, port.counters.get(counter), at)

    def _add_xid(
        self, gpu: str, code: int, at: float, text: str, source: str, pci_exists: bool | None = None
    ) -> None:  # fmt: skip
        past = self._is_past(at)
        who = None if past else self._tenants.get(self.xids.named(gpu))
        event = XidEvent(gpu, code, at, text, past=past, who=who, sources={source}, pci_exists=pci_exists)
        self.xids.add(event)

    def _is_past(self, at: float) -> bool:
        return self.began is not None and at < self.began

    def _count(self, kind: str, device: str, counter: str, total: int | None, at: float) -> None:
        if total is None:
            return
        key = (kind, device, counter)
        trail = self.trails.get(key)
        if trail is None:
            self.trails[key] = Trail(at, total)
        else:
            trail.add(at, total)

    # ── what is done here ───────────────────────────────────────────────────────────────────────────────────────────
    def killed(self, now: float) -> None:
        """A step of ours was killed on this node: what its GPUs say around that is its own end."""
        self.kills.append(now)
        self.told += 1

    def role_died(self, gpus: Collection[str], now: float) -> None:
        """A role that had these GPUs (UUIDs) died, and we did not kill it."""
        self.deaths.append((now, frozenset(gpus)))
        self.told += 1

    def occupied(self, gpus: Collection[str], role: str, life: str) -> None:
        """This life of that role has these GPUs (UUIDs) from now on: an application's fault follows the application."""
        self._tenants.update(dict.fromkeys(gpus, (role, life)))

    def vacant(self, gpus: Collection[str]) -> None:
        """These GPUs (UUIDs, indices, or :data:`EVERY`) are to be free: a role is about to start. Empty: none is."""
        self.free = frozenset(gpus)
        self.told += 1

    # ── looking ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def data(self, reader: str) -> Any:
        """What it read last; None where its newest reading has nothing."""
        newest = self.newest.get(reader)
        return newest.data if newest is not None and newest.state == "read" else None

    def at(self, reader: str) -> float:
        return self.newest[reader].at

    def trail(self, kind: str, device: str, counter: str) -> Trail | None:
        return self.trails.get((kind, device, counter))


def _is_hot(gpu: Gpu) -> bool:
    pairs = ((gpu.temperature, gpu.temperature_slowdown), (gpu.temperature_memory, gpu.temperature_memory_max))
    return any(now is not None and limit and now >= limit for now, limit in pairs)


class HardwarePast(Struct, frozen=True):
    boot: str
    """id of the boot that it is of: another one may well bring other hardware up"""
    job: str = ""
    """of the cluster, in which its node is ours: another one may be given other GPUs of it, and comes later"""
    gpus: int = 0
    """the most that were there"""
    hcas: tuple[str, ...] = ()
    ports_up: tuple[str, ...] = ()
    links_up: dict[str, tuple[int, ...]] = {}
    """by GPU's UUID"""


def hardware_of(seen: Seen, job: str = "") -> HardwarePast:
    links = {gpu: tuple(sorted(up)) for gpu, up in sorted(seen.links_up.items())}
    return HardwarePast(seen.boot, job, seen.most_gpus, tuple(sorted(seen.hcas)), tuple(sorted(seen.ports_up)), links)


def recall(seen: Seen, past: HardwarePast, job: str = "") -> None:
    """Of the same boot and job, or nothing."""
    if not seen.boot or (past.boot, past.job) != (seen.boot, job):
        return
    seen.most_gpus = max(seen.most_gpus, past.gpus)
    seen.hcas.update(past.hcas)
    seen.ports_up.update(past.ports_up)
    for gpu, links in past.links_up.items():
        seen.links_up.setdefault(gpu, set()).update(links)
