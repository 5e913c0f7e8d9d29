"""The rules by which a node's checks judge: every threshold with its unit and source, what is expected of the node, and
which checks act. Pure. A site's own lie in a TOML file, which :mod:`rrl.config.health_rules_file` reads:

    [expect]
    gpus = 8
    mounts = ["/scratch"]

    [checks]
    gpu_throttle = "off"

Plain msgspec: ``rrl health check`` is run before each job, and must not wait for pydantic. The sources in brackets are
those of docs/sources.md.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Mode = Literal["act", "observe", "off"]
XidClass = Literal["node_out", "gpu_reset", "nvlink", "app", "ignore", "service", "rest"]


class Expect(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is known of the node beforehand. What is not said here is not expected."""

    gpus: int | None = None
    """GPUs that NVML must see (gcm: 8)"""
    hcas: int | None = None
    """InfiniBand or RoCE devices (gcm's example: 9)"""
    ports: tuple[str, ...] = ()
    """ports that must be ACTIVE: ``mlx5_0/1``; without them, the ports that were ACTIVE when we first looked"""
    mounts: tuple[str, ...] = ()
    """paths that must answer, besides those that the caller names"""
    driver: str = ""
    """version of the GPU driver, the fleet's"""
    vbios: str = ""
    """version of every GPU's VBIOS, the fleet's"""
    sm_clock: int | None = None
    """MHz that every GPU's SM clock can reach at least (gcm, of the A100's time: 1155); take it from your GPU"""
    memory: int | None = None
    """bytes of main memory"""
    governor: str = ""
    """of CPU frequency (gcm: ``performance``)"""
    clock_source: str = ""
    """of the kernel (``tsc``)"""
    readers: tuple[str, ...] = ()
    """``nvml``, ``dcgm``, ``kernel``, ``fabric``, ``host``: those without which the node's verdict is UNKNOWN; nvml is
    where GPUs are expected, and fabric where HCAs are"""


class Hysteresis(Struct, frozen=True, forbid_unknown_fields=True):
    """How often a reading is needed where one is no proof [guard rail 2]."""

    bad: int = 3
    """readings in a row that condemn"""
    good: int = 2
    """readings in a row that make trusted again"""


class GpuRules(Struct, frozen=True, forbid_unknown_fields=True):
    ecc_corrected: int = 50_000_000
    """volatile corrected ECC errors above which is warned (gcm)"""
    ecc_corrected_rate: float = 100.0
    """a second, over a minute, above which is warned (ours: so many reach gcm's 50 million within six days)"""
    retired_pages: int = 10
    """pages above which is warned, of GPUs before Ampere (gcm)"""
    retired_pages_most: int = 63
    """pages from which a GPU is out (DCGM)"""
    retired_pages_soft: int = 15
    """pages from which it is out if more than one page was retired for a double-bit error since we look (DCGM: within
    7 days)"""
    hot: float = 300.0
    """s at or above the device's own slowdown temperature after which it is out (5 min: ours)"""
    throttled: int = 10
    """readings in a row with thermal or power-brake slowdown before it is told (ours: single ones come and go)"""
    slow_clock: float = 0.75
    """share of its highest SM clock below which a busy GPU is slow (NVRx's straggler score: 0.75)"""
    busy: int = 50
    """percent of utilization from which a GPU's clock and PCIe generation mean something (ours)"""
    memory_before_start: int = 512 * 2**20
    """bytes that may be in use before a role starts (NVRx waits for 512 MB; gcm's 15 MiB is below what new drivers
    reserve)"""
    reclaim: int = 10
    """looks in a row, a second apart, for which a GPU may still be held before a role starts (gcm: 3 retries of 3 s):
    what ended just now gives its memory back slowly"""
    unknown_error: int = 10
    """readings in a row for which NVML says "Unknown Error" of a GPU until it is out (ours: a call fails so now and
    then, and the GPU works on; what is lost for good says so in other words)"""


class LinkRules(Struct, frozen=True, forbid_unknown_fields=True):
    window: float = 60.0
    """s of one window of NVLink errors (NVRx)"""
    windows: int = 30
    """windows that are remembered (NVRx)"""
    flagged: int = 15
    """a link is out if more of them than this have errors (NVRx)"""
    crc: float = 100.0
    """CRC errors a second at which a link is out (DCGM)"""
    pcie_replays: tuple[float, ...] = (0.15, 0.3, 0.48, 0.96, 1.92, 3.84)
    """replays a minute and lane that are usual, of PCIe generations 1 to 6 (DCGM)"""
    fabric_registers: float = 120.0
    """s that a GPU may take to register with the NVLink fabric after a boot or a reset (ours: the fabric manager trains
    all links first)"""


class XidRules(Struct, frozen=True, forbid_unknown_fields=True):
    burst: float = 180.0
    """s in which one Xid on one GPU is one event, whoever tells it (docs/sources.md, Xids)"""
    day: float = 86400.0
    """s in which repeats are counted (docs/sources.md, Xids)"""
    repeats: int = 2
    """of an application's or NVLink's Xid on one GPU within a day: suspect hardware (docs/sources.md, Xids)"""
    support: int = 5
    """fatal Xids on one GPU within a day from which its maker is asked (docs/sources.md, Xids)"""
    kill: float = 60.0
    """s after our own kill of a step in which only the two gravest classes act (docs/sources.md, Xids)"""
    kill_lead: float = 10.0
    """s before we hear of a kill that are its end too: a sweep takes as long (ours; others say 60 s, in which a crash
    would be excused by the kill of what it left)"""
    died: float = 60.0
    """s between a role's death and a rare Xid on its GPU that make the Xid the cause (docs/sources.md, Xids)"""
    classes: dict[str, XidClass] = {}
    """by code: where a site disagrees with the catalogue (109, 43, 44, 68, 94, 62 and 137 are disputed)"""


class KernelRules(Struct, frozen=True, forbid_unknown_fields=True):
    window: float = 86400.0
    """s for which an I/O error, a machine check or an OOM kill counts (ours)"""
    flap_window: float = 3600.0
    """s in which link flaps are counted [5a: 1 h]"""
    flaps: int = 3
    """of one InfiniBand port within it: out [5a: three times in 1 h]"""
    hung_window: float = 3600.0
    """s for which is told that the kernel called a task hung (ours)"""
    quiet_devices: tuple[str, ...] = ("sr", "fd", "loop")
    """devices whose errors, and those of their file systems, mean nothing: virtual CDs and floppies, and images of
    users' containers (ours)"""


class FabricRules(Struct, frozen=True, forbid_unknown_fields=True):
    link_downs: int = 2
    """link_downed within an hour from which a port is out (ours; NVSentinel: any. Programs outlive a link that is down
    for a moment, and of one that stays down its state tells)"""
    symbol_errors_hour: int = 120
    """an hour, above which a port is out (NVSentinel)"""
    symbol_errors: float = 10.0
    """a second, above which is warned; as all below (NVSentinel)"""
    recoveries: float = 5.0
    """link_error_recovery a minute"""
    receive_errors: float = 10.0
    """port_rcv_errors a second"""
    ack_timeouts: float = 1.0
    """local_ack_timeout_err a second"""
    discards: float = 100.0
    """port_xmit_discards a second"""
    slow_restarts: float = 10.0
    """roce_slow_restart a second"""
    carrier_changes: int = 2
    """within an hour"""


class HostRules(Struct, frozen=True, forbid_unknown_fields=True):
    disk: float = 0.80
    """share of bytes or inodes in use above which is warned (gcm)"""
    disk_full: float = 0.95
    """of a file system of the node itself: out (ours; gcm is critical at 0.85, where a run still finds room). A shared
    one is never the node's fault"""
    memory: float = 0.05
    """share of memory that must be available at least, and by which memory may differ from what is expected (NHC)"""
    stuck: float = 300.0
    """s in state D from which is warned (gcm)"""
    stuck_after_kill: float = 60.0
    """s after our own kill that a process may still be in state D; then the node is out (ours)"""
    mount_hung: float = 15.0
    """s for which a path must not answer three processes, started one after another, to be out after one look; other
    paths must answer meanwhile, or the whole node stands still (ours: longer than a path has in any other look, and
    within the time that a prolog may take)"""
    zombies: int = 50
    """older than 300 s, above which is warned (gcm: any; a container's first process often reaps none)"""
    clock_sources: tuple[str, ...] = ("hpet", "acpi_pm", "jiffies", "refined-jiffies")
    """slow ones, of which is warned: the kernel gave up the better one (ours)"""


class ReaderRules(Struct, frozen=True, forbid_unknown_fields=True):
    stall: float = 60.0
    """s from its first missed deadline for which NVML does not answer until a second witness of the driver condemns the
    node, and for which DCGM does not until it is one (ours; 5a: 45 s. A reset of somebody else's GPU holds the driver's
    lock for some 40 s)"""
    dcgm_user: str = ""
    """user besides root who runs dcgm-exporter and DCGM's host engine here, and to whom ``dcgmi`` may belong: what
    others listen on or install is not believed"""


class HookRules(Struct, frozen=True, forbid_unknown_fields=True):
    """How many nodes the prolog and the HealthCheckProgram may drain. Many nodes that fail together have been talked
    into it, or share a cause that draining them does not mend."""

    share: float = 0.2
    """of the cluster's nodes, one at least, that hooks may drain within ``window`` (as the breaker of a run; guard
    rails)"""
    window: float = 600.0
    """s (as the breaker of a run)"""
    standing: float = 0.25
    """share of the cluster's nodes, one at least, that may stand drained by hooks (guard rails: none while more than
    25 % is down)"""


class Rules(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """All of it. Times are s of the node's monotonic clock."""

    expect: Expect = Expect()
    checks: dict[str, Mode] = {}
    """by check's name: ``act``, ``observe`` (FAIL is told as WARN) or ``off``; default: act"""
    hysteresis: Hysteresis = Hysteresis()
    gpu: GpuRules = GpuRules()
    links: LinkRules = LinkRules()
    xid: XidRules = XidRules()
    kernel: KernelRules = KernelRules()
    fabric: FabricRules = FabricRules()
    host: HostRules = HostRules()
    readers: ReaderRules = ReaderRules()
    hooks: HookRules = HookRules()

    @property
    def required_readers(self) -> frozenset[str]:
        """Readers that must be able to read here."""
        readers = set(self.expect.readers)
        if self.expect.gpus:
            readers.add("nvml")
        if self.expect.hcas or self.expect.ports:
            readers.add("fabric")
        return frozenset(readers)
