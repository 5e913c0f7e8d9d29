"""Runs the real checks on the invented samples of a node, in virtual time."""

from __future__ import annotations

from typing import Any

from rrl.config.health_rules import Rules
from rrl.core.types import Finding, NodeName, Verdict
from rrl.health.checks.evaluate import NodeChecks
from rrl.health.checks.node_state import NodeState
from rrl.health.readers.samples import (
    DcgmData,
    FabricData,
    FabricPort,
    GpuXid,
    HostData,
    KernelData,
    KernelEvent,
    Mount,
    NvidiaGpu,
    NvLink,
    NvmlData,
    Reading,
)

NODE = NodeName("n1")
FIELDS: dict[str, Any] = {
    "name": "NVIDIA H100",
    "vbios": "96.00",
    "recovery_action": "none",
    "ecc_volatile_corrected": 0,
    "ecc_volatile_uncorrected": 0,
    "ecc_aggregate_uncorrected": 0,
    "remap_pending": False,
    "remap_failed": False,
    "temperature": 50,
    "temperature_slowdown": 87,
    "temperature_memory": 60,
    "temperature_memory_max": 95,
    "clock_reasons": (),
    "clock_sm": 1900,
    "clock_sm_max": 1980,
    "utilization": 90,
    "memory_used": 0,
    "memory_total": 80 * 2**30,
    "processes": (),
    "pcie_replays": 7,
    "pcie_gen": 5,
    "pcie_gen_max": 5,
    "pcie_width": 16,
    "pcie_width_max": 16,
    "fabric_state": "completed",
    "fabric_status": "success",
    "retired_corrected": 0,
    "retired_uncorrected": 0,
    "retired_pending": False,
}
LINKS = tuple(NvLink(link=i, active=True, replay=0, recovery=0, crc_flit=0, crc_data=0) for i in range(4))


def gpu(index: int, **fields: Any) -> NvidiaGpu:
    named = {"uuid": f"GPU-{index}", "pci": f"0000:{index:02x}:00", "nvlinks": LINKS}
    return NvidiaGpu(index=index, **{**named, **FIELDS, **fields})


def port(device: str = "mlx5_0", **fields: Any) -> FabricPort:
    given: dict[str, Any] = {"state": "ACTIVE", "physical": "LinkUp", **fields}
    return FabricPort(device=device, port=1, **given)


def host(**fields: Any) -> HostData:
    given: dict[str, Any] = {
        "mounts": (Mount(path="/", answers=True, filesystem="ext4", used=0.2, inodes_used=0.1),),
        "memory_total": 512 * 2**30,
        "memory_available": 400 * 2**30,
        "clock_source": "tsc",
        "oom_kills": 3,
        "governor": "performance",
    }
    return HostData(**{**given, **fields})


class ObservedNode:
    """A node that runs its checks after each sample and then advances its time by 1 s; ``found`` has the findings."""

    def __init__(self, rules: Rules = Rules()) -> None:
        self.rules, self.node_state, self.now = rules, NodeState(rules.xid.burst), 1000.0
        self.checks = NodeChecks(NODE)
        self.found: list[Finding] = []

    def reads(self, *data: Any, times: int = 1, every: float = 1.0) -> ObservedNode:
        for _ in range(times):
            for one in data:
                self.node_state.add(Reading(_reader(one), self.now, one))
            self.check_again()
            self.now += every
        return self

    def cannot(self, reader: str, state: Any = "hung", why: str = "did not answer within 10 s") -> ObservedNode:
        self.node_state.add(Reading(reader, self.now, None, state, why))
        self.check_again()
        self.now += 1
        return self

    def gpus(self, *gpus: NvidiaGpu, times: int = 1, every: float = 1.0, xids: tuple[GpuXid, ...] = ()) -> ObservedNode:
        """Add ``times`` NVML samples, ``every`` s apart.

        A sample has ``gpus``, and a healthy GPU 0 and GPU 1 if ``gpus`` lacks these indices.
        """
        there = {**{i: gpu(i) for i in range(2)}, **{one.index: one for one in gpus}}
        return self.reads(NvmlData(driver="570.1", gpus=tuple(there.values()), xids=xids), times=times, every=every)

    def log(self, *events: KernelEvent) -> ObservedNode:
        return self.reads(KernelData(events=events))

    def xid(self, code: int, index: int = 0, text: str = "", age: float = 0.0) -> ObservedNode:
        line = f"NVRM: Xid (PCI:0000:{index:02x}:00): {code}, {text}"
        return self.log(
            KernelEvent(kind="xid", text=line, xid=code, pci=f"0000:{index:02x}:00", pci_exists=True, age=age)
        )

    def passes(self, seconds: float) -> ObservedNode:
        self.now += seconds
        return self

    def check_again(self) -> ObservedNode:
        self.found = self.checks.evaluate(self.node_state, self.rules, self.now)
        return self

    def of(self, detector: str) -> list[Finding]:
        return [one for one in self.found if one.detector == detector]

    def one(self, detector: str) -> Finding:
        (found,) = self.of(detector)
        return found

    def verdict(self, detector: str) -> Verdict:
        """Return the most severe verdict of this check."""
        found = {one.verdict for one in self.of(detector)}
        return next(v for v in (Verdict.FAIL, Verdict.WARN, Verdict.UNKNOWN, Verdict.OK) if v in found)

    def text(self, detector: str) -> str:
        return "\n".join(evidence.text for one in self.of(detector) for evidence in one.evidence)


def _reader(data: Any) -> str:
    names: dict[type, str] = {
        NvmlData: "nvml",
        DcgmData: "dcgm",
        KernelData: "kernel",
        FabricData: "fabric",
        HostData: "host",
    }
    return names[type(data)]
