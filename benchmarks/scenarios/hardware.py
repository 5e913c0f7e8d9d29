"""The machines of a scenario: the values that their readers read, which are healthy until an event changes them.

Readers that can observe an event read at their normal rate, from shortly before the event until after its end. All
other readers read rarely.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, get_type_hints

import msgspec

from rrl.benchmarks.scenarios.format import Event, Scenario
from rrl.benchmarks.scenarios.rhythms import roles_of
from rrl.core.types import NodeName
from rrl.health.checks.node_state import PORT_COUNTERS
from rrl.health.readers import samples as r
from rrl.health.readers.base import READERS
from rrl.health.readers.kernel_log import recognise

PACE = {"nvml": 1.0, "kernel": 1.0, "fabric": 5.0, "host": 10.0, "dcgm": 15.0}
"""Seconds between two reads of each reader at its normal rate."""
_QUIET_INTERVAL_S = 600.0
"""Seconds between two reads of a node without events."""
_CALM_S = 15.0
"""Seconds between two reads of readers that cannot observe the events of their node."""
_BEFORE = 90.0
"""Seconds before the first event from which a node is read at the normal rate."""
_AFTER = 300.0
"""Seconds after the end of the last event until which a node is read at the normal rate."""
_REPORTED_BY = {
    "xid": ("kernel", "nvml", "dcgm"),
    "gpu": ("nvml", "dcgm"),
    "gpu_lost": ("nvml", "dcgm"),
    "gpu_gone": ("nvml", "dcgm"),
    "port": ("fabric",),
    "hca_gone": ("fabric",),
    "mount": ("host",),
    "host": ("host",),
    "kernel": ("kernel", "nvml"),
    "dcgm": ("dcgm", "nvml"),
}
"""For each kind of event, the readers that can observe it."""
_HUNG_FOR = 10.0
"""Seconds after which a read counts as hung (rrl.health.readers.base)."""
UPTIME = 20 * 3600.0
"""Seconds since the boot of every node when a scenario begins; ``at`` of samples is by the node's own clock. It is less
than a day, so that the checks still consider lines from the boot."""
_BOOTING = 60.0
"""Seconds between a node's boot and the kernel lines that exist when a scenario begins."""
_COUNTED = 300.0
"""Seconds for which dcgm-exporter counts an Xid, which is the default window of DCGM_EXP_XID_ERRORS_COUNT."""
_HEALTH_EVERY = 60.0
"""Seconds between two runs of ``dcgmi health`` (rrl.health.readers.dcgm.reader)."""
_GIB = 2**30
_FILESYSTEMS = {"/home": "nfs4", "/dev/shm": "tmpfs", "/tmp": "xfs", "/var": "xfs", "/local": "xfs"}
"""File system type by the beginning of a mount's path. The root has xfs, and all other paths have Lustre."""
MOUNTS = ("/", "/tmp", "/dev/shm", "/home", "/scratch")
_IN_USE = 70 * _GIB
"""Bytes of GPU memory that a role uses."""
PORTS = tuple(f"mlx5_{index}/1" for index in range(8))
LINKS = 18
"""NVLinks of each GPU."""


@dataclass(slots=True)
class _Change:
    """Changed values of fields, and rates of counters, from ``since`` until ``until``."""

    since: float
    until: float
    set: dict[str, Any]
    grow: dict[str, float]
    links: frozenset[int] | None = None
    """NVLinks of the GPU whose values change; None if the GPU's own values change."""


@dataclass(slots=True)
class _Machine:
    gpus: tuple[r.NvidiaGpu, ...]
    busy_from: float
    """Time (s) from which the node is read at the normal rate."""
    offset: float
    busy_until: float = 0.0
    watched: set[str] = field(default_factory=set)
    """Readers that can observe an event of the node."""
    gpu_changes: dict[int, list[_Change]] = field(default_factory=dict)
    port_changes: dict[str, list[_Change]] = field(default_factory=dict)
    mount_changes: dict[str, list[_Change]] = field(default_factory=dict)
    host_changes: list[_Change] = field(default_factory=list)
    kernel: list[tuple[float, r.KernelEvent]] = field(default_factory=list)
    incidents: list[tuple[float, float, r.DcgmIncident]] = field(default_factory=list)
    readers: dict[str, list[tuple[float, float, str, str]]] = field(default_factory=dict)
    """For each reader, its failures as (from, until, state, reason)."""
    lost: dict[int, tuple[float, str]] = field(default_factory=dict)
    xids: list[tuple[float, r.GpuXid, frozenset[str]]] = field(default_factory=list)
    """Time of each Xid, the Xid, and the readers that report it."""
    gone: dict[int, tuple[float, float]] = field(default_factory=dict)
    """For each GPU that is gone, the interval in which NVML does not list it."""
    hcas_gone: dict[str, tuple[float, float]] = field(default_factory=dict)
    read_at: float = -inf
    """Time (s) up to which kernel lines have been read."""
    nvml_read_at: float = inf
    """Time (s) of the NVML reader's newest read; inf before its first read. Only Xids of later times are still
    reported."""
    due: dict[str, float] = field(default_factory=dict)


class Machines:
    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.used: Callable[[NodeName], Collection[int]] = lambda node: ()
        """A function that returns the GPUs of a node that roles of the run use now."""
        self._present = scenario.cluster.readers
        self._gpus = gpus_of(scenario)
        self._machines: dict[NodeName, _Machine] = {}
        self._seed = seed

    def expect(self, node: NodeName, event: Event, at: float) -> None:
        """Announce an event of the node at time ``at`` (s)."""
        machine = self._machine(node)
        machine.busy_from = min(machine.busy_from, at - _BEFORE)
        machine.busy_until = max(machine.busy_until, at + _AFTER)
        machine.watched |= {event.reader} if event.do == "reader" else set(_REPORTED_BY[event.do])

    def _machine(self, node: NodeName) -> _Machine:
        if node not in self._machines:
            gpus = tuple(healthy_gpu(node, index) for index in range(self._gpus))
            self._machines[node] = _Machine(gpus, inf, (hash_of(node) + self._seed) % 7)
        return self._machines[node]

    # ── effects of events ────────────────────────────────────────────────────────────────────────────────────────────
    def happen(self, event: Event, node: NodeName, now: float, lasts: float, times: Sequence[float]) -> None:
        """Let an event happen for ``lasts`` s; ``times`` are the times of its kernel lines (s after ``now``)."""
        machine, until = self._machine(node), now + lasts
        self.expect(node, event, now)
        machine.busy_until = max(machine.busy_until, until + _AFTER, now + times[-1] + _AFTER)
        for reader in machine.watched:  # the next read of an unannounced event may be minutes away
            machine.due[reader] = min(machine.due.get(reader, machine.offset), now + PACE[reader])
        given = values_of(struct_of(event), event.set) if event.do in STRUCTS else event.set
        given = {**given, **dict.fromkeys(event.unread)}
        if event.unread:
            given["unread"] = dict.fromkeys(event.unread, "not supported")
        change = _Change(now, until, given, event.grow, None if event.link is None else frozenset(event.link))
        match event.do:
            case "xid":
                for gpu in event.gpus(len(machine.gpus)):
                    _xid(machine, event, machine.gpus[gpu], [now - (event.age or 0.0) + each for each in times])
            case "kernel":
                old = event.age if event.age is not None else UPTIME - _BOOTING if not now else 0.0
                machine.kernel += [(now - old + each, _kernel_event(event)) for each in times]
            case "gpu":
                for gpu in event.gpus(len(machine.gpus)):
                    machine.gpu_changes.setdefault(gpu, []).append(change)
            case "gpu_lost":
                machine.lost |= dict.fromkeys(event.gpus(len(machine.gpus)), (now, event.text or "GPU is lost"))
            case "gpu_gone":
                machine.gone |= dict.fromkeys(event.gpus(len(machine.gpus)), (now, until))
            case "port":
                machine.port_changes.setdefault(event.port, []).append(change)
            case "hca_gone":
                machine.hcas_gone[event.port.partition("/")[0]] = (now, until)
            case "mount":
                machine.mount_changes.setdefault(event.path or "/home", []).append(change)
            case "host":
                machine.host_changes.append(change)
            case "dcgm":
                for gpu_id in [machine.gpus[gpu].uuid for gpu in event.gpus(len(machine.gpus))] or [""]:
                    code = event.incident.removeprefix("DCGM_FR_")
                    incident = r.DcgmIncident(gpu_id, event.system, code, event.severity, event.text, event.source)
                    machine.incidents.append((now, until, incident))
            case "reader":
                machine.readers.setdefault(event.reader, []).append((now, until, event.state, event.text))
            case _:
                raise AssertionError(event.do)

    # ── readings ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def read(self, node: NodeName, now: float) -> list[r.Reading]:
        """Return the samples that are due at ``now``; their times ``at`` are ``UPTIME + now``, by the node's clock."""
        machine = self._machine(node)
        found: list[r.Reading] = []
        for reader in READERS:
            if now < machine.due.get(reader, machine.offset):
                continue
            busy = machine.busy_from <= now < machine.busy_until
            pace = (
                _QUIET_INTERVAL_S
                if not busy
                else PACE[reader]
                if reader in machine.watched
                else max(PACE[reader], _CALM_S)
            )
            soon = max(machine.busy_from, now + 1.0) if now < machine.busy_from else inf
            machine.due[reader] = now + pace if busy else min(now + pace, soon)
            found.append(self._reading(machine, node, reader, now))
            if found[-1].state == "hung":
                machine.due[reader] = now + max(pace, _HUNG_FOR)
        return found

    def _reading(self, machine: _Machine, node: NodeName, reader: str, now: float) -> r.Reading:
        at = UPTIME + now
        last_read = machine.nvml_read_at
        if reader == "nvml":
            machine.nvml_read_at = now
        if reader not in self._present or (reader == "nvml" and not machine.gpus):
            return r.Reading(reader, at, None, "absent", f"no {reader} here")
        for since, until, state, why in machine.readers.get(reader, ()):
            if since <= now < until:
                return r.Reading(reader, at, None, state, why or f"did not answer within {_HUNG_FOR:g} s")  # type: ignore[arg-type]
        data: r.Data
        if reader == "nvml":
            used = set(self.used(node))
            gpus = tuple(
                _gpu(machine, _idle(gpu) if gpu.index not in used else gpu, now)
                for gpu in machine.gpus
                if not _is_gone(machine.gone.get(gpu.index), now)
            )
            xids = tuple(xid for when, xid, by in machine.xids if "nvml" in by and last_read <= when < now)
            data = r.NvmlData(driver="570.124.06", gpus=gpus, xids=xids)
        elif reader == "kernel":
            new = [each for each in machine.kernel if machine.read_at <= each[0] < now]
            machine.read_at = now
            data = r.KernelData(tuple(msgspec.structs.replace(line, age=now - at) for at, line in new))
        elif reader == "fabric":
            there = [name for name in PORTS if not _is_gone(machine.hcas_gone.get(name.partition("/")[0]), now)]
            data = r.FabricData(tuple(_port(machine, name, now) for name in there))
        elif reader == "host":
            paths = dict.fromkeys((*MOUNTS, *machine.mount_changes))
            mounts = tuple(_changed(_healthy_mount(path), machine.mount_changes.get(path, ()), now) for path in paths)
            data = _changed(_healthy_host(mounts), machine.host_changes, now)
        else:
            active = tuple(incident for since, until, incident in machine.incidents if since <= now < until)
            run = now // _HEALTH_EVERY * _HEALTH_EVERY
            exported = tuple(_dcgm_gpu(machine, gpu, now) for gpu in machine.gpus)
            data = r.DcgmData(
                exported, active, health_at=UPTIME + run, driver_gpus=tuple(gpu.uuid for gpu in machine.gpus)
            )
        return r.Reading(reader, at, data)


def _xid(machine: _Machine, event: Event, gpu: r.NvidiaGpu, times: Iterable[float]) -> None:
    """Report Xids by the kernel log, NVML's events and DCGM's counts, if these sources can be read.

    Only the log reports Xids from before the beginning.
    """
    text = f"NVRM: Xid (PCI:{gpu.pci}): {event.xid}, {event.text or 'pid=4711, name=python'}"
    line = r.KernelEvent(kind="xid", text=text, xid=event.xid, pci=gpu.pci, pci_exists=True)
    for at in times:
        if "kernel" in event.by_readers:
            machine.kernel.append((at, line))
        if event.age is None:
            machine.xids.append((at, r.GpuXid(gpu.uuid, event.xid), frozenset(event.by_readers)))


def _kernel_event(event: Event) -> r.KernelEvent:
    """Return the event as the reader reports it; keys of the file override the text."""
    known = recognise(event.text.encode(), 0.0)
    if event.kind is not None and (known is None or known.kind != event.kind):
        line = r.KernelEvent(kind=event.kind, text=event.text or event.kind)
    elif known is not None:
        line = known
    else:
        raise AssertionError(f"the reader ignores {event.text!r}, which loading the file should have reported")
    line = msgspec.structs.replace(line, device=event.path) if event.path else line
    return msgspec.structs.replace(line, pci_exists=event.exists) if line.kind == "sxid" else line


def _is_gone(times: tuple[float, float] | None, now: float) -> bool:
    return times is not None and times[0] <= now < times[1]


def _dcgm_gpu(machine: _Machine, gpu: r.NvidiaGpu, now: float) -> r.DcgmGpu:
    counted_xids = [
        xid.xid for at, xid, by in machine.xids if xid.uuid == gpu.uuid and "dcgm" in by and now - _COUNTED < at < now
    ]
    return r.DcgmGpu(
        uuid=gpu.uuid, index=gpu.index, xid_counts={code: counted_xids.count(code) for code in counted_xids}
    )


def _healthy_mount(path: str) -> r.Mount:
    kind = next((kind for start, kind in _FILESYSTEMS.items() if f"{path}/".startswith(f"{start}/")), "lustre")
    return r.Mount(path=path, answers=True, filesystem="xfs" if path == "/" else kind, used=0.4, inodes_used=0.1)


def healthy_gpu(node: str, index: int) -> r.NvidiaGpu:
    """Return a healthy H100 that works."""
    links = tuple(r.NvLink(link=n, active=True, replay=0, recovery=0, crc_flit=0, crc_data=0) for n in range(LINKS))
    return r.NvidiaGpu(
        index=index,
        uuid=uuid_of(node, index),
        pci=f"0000:{0x1B + 16 * index:02x}:00",
        name="NVIDIA H100 80GB HBM3",
        recovery_action="none",
        ecc_volatile_corrected=0,
        ecc_volatile_uncorrected=0,
        ecc_aggregate_uncorrected=0,
        remap_pending=False,
        remap_failed=False,
        temperature=58,
        temperature_slowdown=90,
        temperature_memory=70,
        temperature_memory_max=95,
        clock_reasons=("sw_power_cap",),
        clock_sm=1755,
        clock_sm_max=1980,
        utilization=95,
        memory_used=_IN_USE,
        memory_total=80 * _GIB,
        processes=(),
        pcie_replays=0,
        pcie_gen=5,
        pcie_gen_max=5,
        pcie_width=16,
        pcie_width_max=16,
        nvlinks=links,
        fabric_state="completed",
        fabric_status="success",
        unread=dict.fromkeys(("retired_corrected", "retired_uncorrected", "retired_pending"), "not supported"),
    )


def _idle(gpu: r.NvidiaGpu) -> r.NvidiaGpu:
    """Return the GPU with the values of an unused GPU."""
    return msgspec.structs.replace(
        gpu, memory_used=4 * 2**20, utilization=0, temperature=32, clock_sm=345, clock_reasons=("gpu_idle",)
    )


def _healthy_host(mounts: tuple[r.Mount, ...]) -> r.HostData:
    return r.HostData(
        mounts=mounts,
        memory_total=2048 * _GIB,
        memory_available=1500 * _GIB,
        load=20.0,
        cpus=128,
        governor="performance",
        clock_source="tsc",
        oom_kills=0,
    )


def _gpu(machine: _Machine, gpu: r.NvidiaGpu, now: float) -> r.NvidiaGpu:
    since, words = machine.lost.get(gpu.index, (inf, ""))
    if now >= since:
        return r.NvidiaGpu(index=gpu.index, uuid=gpu.uuid, pci=gpu.pci, lost=words)
    changed: r.NvidiaGpu = _changed(gpu, machine.gpu_changes.get(gpu.index, ()), now)
    return changed


def _port(machine: _Machine, name: str, now: float) -> r.FabricPort:
    device, port = name.split("/")
    counters = dict.fromkeys(PORT_COUNTERS, 0)
    usual = r.FabricPort(
        device=device, port=int(port), state="ACTIVE", physical="LinkUp", rate=400.0, counters=counters
    )
    for change in machine.port_changes.get(name, ()):
        for counter, rate in change.grow.items():
            counters[counter] = counters.get(counter, 0) + int(rate * max(0.0, min(now, change.until) - change.since))
        if change.since <= now < change.until:
            given = dict(change.set)
            counters.update(given.pop("counters", {}))
            usual = msgspec.structs.replace(usual, **given)
    return usual


def _changed(healthy: Any, changes: Any, now: float) -> Any:
    for change in changes:
        if change.links is not None:
            of_link = _Change(change.since, change.until, change.set, change.grow)
            links = tuple(_changed(one, [of_link], now) if one.link in change.links else one for one in healthy.nvlinks)
            healthy = msgspec.structs.replace(healthy, nvlinks=links)
            continue
        for name, rate in change.grow.items():
            rises = rate * max(0.0, min(now, change.until) - change.since)
            had = getattr(healthy, name) or 0
            healthy = msgspec.structs.replace(
                healthy, **{name: had + rises if isinstance(had, float) else had + int(rises)}
            )
        if change.since <= now < change.until:
            given = dict(change.set)
            if "nvlink" in given:  # a dict such as {link = 3, active = false} stands for one of the links
                link = given.pop("nvlink")
                links = tuple(
                    msgspec.structs.replace(one, **link) if one.link == link["link"] else one for one in healthy.nvlinks
                )
                healthy = msgspec.structs.replace(healthy, nvlinks=links)
            if "unread" in given:
                given["unread"] = {**healthy.unread, **given["unread"]}
            healthy = msgspec.structs.replace(healthy, **given)
    return healthy


STRUCTS: dict[str, type[msgspec.Struct]] = {
    "gpu": r.NvidiaGpu,
    "port": r.FabricPort,
    "mount": r.Mount,
    "host": r.HostData,
}


def values_of(struct: type[msgspec.Struct], given: dict[str, Any]) -> dict[str, Any]:
    """Convert values of a file to the types of the struct's fields. Raises ValidationError."""
    types = {**get_type_hints(struct), "nvlink": dict[str, Any]}
    return {name: msgspec.convert(value, types[name]) for name, value in given.items()}


def struct_of(event: Event) -> type[msgspec.Struct]:
    """Return the struct whose fields ``set`` and ``grow`` of this event change."""
    return r.NvLink if event.link is not None else STRUCTS[event.do]


def gpus_of(scenario: Scenario) -> int:
    """Return the number of GPUs of every node."""
    return max((table.gpus or 0 for table in roles_of(scenario).values()), default=0)


def uuid_of(node: str, index: int) -> str:
    return f"GPU-{node}-{index}"


def hash_of(text: str) -> int:
    """Return a hash that is the same in every process."""
    return sum(ord(character) * (index + 1) for index, character in enumerate(text))
