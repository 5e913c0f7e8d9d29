"""What readers read on one node: plain values, no opinion. The checks (:mod:`rrl.health.checks.evaluate`) judge them.

A value that could not be read is ``None`` (or an empty tuple where a tuple of devices is told), and ``unread`` of its
struct says why under the field's name: absent, not permitted, not supported. That is never OK and never FAIL. A whole
reader that has nothing to say, or does not answer, is a :class:`Reading` without data.

``at`` is the node's own monotonic clock (s): it orders readings of one node and is compared with nothing else.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

READERS = ("nvml", "dcgm", "kernel", "fabric", "host")
"""names of the readers, each a module of :mod:`rrl.health.readers.base`"""

MOUNT_ATTEMPTS = 3
"""processes that look at a path which does not answer, within one look, one after another"""

UnreadReasons = dict[str, str]
"""field → why it could not be read: ``not supported``, ``not permitted``, ``no such function in this driver`` ..."""


# ── NVML ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
class NvLink(Struct, frozen=True, kw_only=True):
    """One link of one GPU. Counters are totals since the driver was loaded."""

    link: int
    active: bool | None = None
    replay: int | None = None
    recovery: int | None = None
    crc_flit: int | None = None
    crc_data: int | None = None


class GpuProcess(Struct, frozen=True):
    pid: int
    uid: int | None
    """of the process here; None: it is gone, or of another PID namespace"""
    memory: int | None
    """bytes"""
    name: str = ""


class Gpu(Struct, frozen=True, kw_only=True):
    """One GPU, as NVML says. Units as in the fields' notes; NVML's own names in the reader."""

    index: int
    uuid: str
    pci: str = ""
    """bus id as the kernel log has it in lower case: ``0000:1b:00``"""
    name: str = ""
    serial: str = ""
    vbios: str = ""
    lost: str = ""
    """the driver's word that this GPU cannot be talked to any more (``GPU is lost``, ``Unknown Error``); else empty"""
    recovery_action: str | None = None
    """``none``, ``gpu_reset``, ``node_reboot``, ``drain_p2p``, ``drain_and_reset``, ``recover_imex_domain``,
    ``bus_reset``, ``system_reboot`` or ``unknown (N)``"""
    ecc_volatile_corrected: int | None = None
    ecc_volatile_uncorrected: int | None = None
    ecc_aggregate_corrected: int | None = None
    ecc_aggregate_uncorrected: int | None = None
    remapped_corrected: int | None = None
    """rows"""
    remapped_uncorrected: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    retired_corrected: int | None = None
    """pages, of GPUs before Ampere: multiple single-bit errors"""
    retired_uncorrected: int | None = None
    """pages: double-bit errors"""
    retired_pending: bool | None = None
    temperature: int | None = None
    """degrees Celsius"""
    temperature_slowdown: int | None = None
    """at which the device slows itself down"""
    temperature_shutdown: int | None = None
    temperature_memory: int | None = None
    temperature_memory_max: int | None = None
    clock_reasons: tuple[str, ...] | None = None
    """clocks event reasons that hold now: ``gpu_idle``, ``applications_clocks``, ``sw_power_cap``, ``hw_slowdown``,
    ``sync_boost``, ``sw_thermal``, ``hw_thermal``, ``hw_power_brake``, ``display``"""
    clock_sm: int | None = None
    """MHz"""
    clock_sm_max: int | None = None
    power: int | None = None
    """mW"""
    power_limit: int | None = None
    utilization: int | None = None
    """percent of the last sample period in which a kernel ran"""
    memory_used: int | None = None
    """bytes"""
    memory_total: int | None = None
    processes: tuple[GpuProcess, ...] | None = None
    """compute processes"""
    pcie_replays: int | None = None
    """total"""
    pcie_gen: int | None = None
    pcie_gen_max: int | None = None
    """that GPU and slot can do together"""
    pcie_width: int | None = None
    """lanes"""
    pcie_width_max: int | None = None
    nvlinks: tuple[NvLink, ...] | None = None
    fabric_state: str | None = None
    """``not_supported``, ``not_started``, ``in_progress``, ``completed``"""
    fabric_status: str | None = None
    """``success`` or NVML's error of the registration"""
    mig: bool | None = None
    """it is split into instances (MIG)"""
    unread: UnreadReasons = {}


class GpuXid(Struct, frozen=True):
    """One critical Xid event, seen between the last reading and this one."""

    uuid: str
    """of the GPU; empty: the driver did not say which"""
    xid: int
    detail: str = ""


class NvmlData(Struct, frozen=True, tag="nvml"):
    driver: str
    gpus: tuple[Gpu, ...]
    """all that NVML counts, also one that is lost"""
    xids: tuple[GpuXid, ...] = ()
    xid_events: str = ""
    """why Xid events are not heard here; empty: they are"""
    granted: int = 0
    """GPUs whose device files this process may open"""
    withheld: int = 0
    """those that a device cgroup (Slurm's ConstrainDevices) keeps from it: NVML may not count them"""


# ── DCGM ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
class DcgmGpu(Struct, frozen=True, kw_only=True):
    """One GPU of dcgm-exporter's metrics."""

    uuid: str
    index: int | None = None
    xid_counts: dict[int, int] = {}
    """DCGM_EXP_XID_ERRORS_COUNT or the like: totals by code, never the gauge of the last one"""
    tensor_active: float | None = None
    """share of the time in which tensor cores worked (DCGM_FI_PROF_PIPE_TENSOR_ACTIVE)"""
    ecc_volatile_uncorrected: int | None = None
    remap_failed: bool | None = None


class DcgmIncident(Struct, frozen=True):
    """One line of ``dcgmi health -c -j``, or one failed test of ``dcgmi diag``."""

    gpu: str
    """its UUID where it is known, else its index as text; empty: of no single GPU"""
    system: str
    """``PCIe``, ``Memory`` ..., or the test's name"""
    code: str
    """DCGM_FR_* without its prefix where it is told, else empty"""
    severity: Literal["warn", "fail"]
    text: str
    source: Literal["health", "diag"] = "health"


class DcgmData(Struct, frozen=True, tag="dcgm"):
    gpus: tuple[DcgmGpu, ...] = ()
    incidents: tuple[DcgmIncident, ...] = ()
    unread: UnreadReasons = {}
    """``exporter``, ``health``, ``diag`` → why not"""
    health_at: float | None = None
    """when ``dcgmi health`` was run that these incidents are of (s): one run is told with several readings. None: it
    was not run, or each reading is a run"""
    driver_gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs that the driver lists in /proc"""


# ── kernel log ────────────────────────────────────────────────────────────────────────────────────────────────────────
class KernelEvent(Struct, frozen=True, kw_only=True):
    """One line of the kernel log that means something."""

    kind: Literal["xid", "sxid", "mce", "oom", "nic", "io", "filesystem", "hung_task"]
    text: str
    """the line, at most 300 characters"""
    xid: int | None = None
    pci: str = ""
    """of the GPU (``0000:1b:00``), for an Xid"""
    pci_exists: bool | None = None
    """for an Xid or SXid: an NVIDIA device of this node has this PCI address; None: its devices cannot be listed"""
    pid: int | None = None
    uid: int | None = None
    """of that process, for a hung task; None: it is gone"""
    device: str = ""
    """interface, disk or mount, where the line names one"""
    age: float = 0.0
    """s before the reading at which the kernel wrote it; lines older than the reader's start are told with the first
    reading, so that a node's past is known at admission"""


class KernelData(Struct, frozen=True, tag="kernel"):
    events: tuple[KernelEvent, ...] = ()
    """new since the last reading"""
    dropped: int = 0
    """lines that the kernel overwrote before they were read, or beyond what one reading carries"""


# ── InfiniBand and RoCE ───────────────────────────────────────────────────────────────────────────────────────────────
class FabricPort(Struct, frozen=True, kw_only=True):
    """``/sys/class/infiniband/<device>/ports/<port>``. Counters are totals."""

    device: str
    port: int
    state: str | None = None
    """``ACTIVE``, ``DOWN``, ``INIT`` ..."""
    physical: str | None = None
    """``LinkUp``, ``Polling``, ``Disabled`` ..."""
    rate: float | None = None
    """Gbit/s"""
    link_layer: str = ""
    """``InfiniBand`` or ``Ethernet``"""
    counters: dict[str, int] = {}
    """of ``counters`` and ``hw_counters``, by the file's name; and ``carrier_changes`` of its network interface"""
    unread: UnreadReasons = {}


class FabricData(Struct, frozen=True, tag="fabric"):
    ports: tuple[FabricPort, ...] = ()
    missing_char_devices: tuple[str, ...] = ()
    """``uverbs0``, ``umad1`` ... that the kernel lists and that ``/dev/infiniband`` lacks"""


# ── host ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
class Mount(Struct, frozen=True, kw_only=True):
    """One path that the node needs: looked at by a process of its own, for it may hang."""

    path: str
    answers: bool
    """stat and a read of the file system's figures came back in time"""
    why: str = ""
    """why it does not answer: ``did not answer within 10 s``, or the system's word"""
    attempts: int = 0
    """processes that were started one after another to look at it, and none of which has come back"""
    hung_for: float = 0.0
    """s since the first of them was started"""
    filesystem: str = ""
    used: float | None = None
    """share of the bytes that users may have, 0 to 1"""
    inodes_used: float | None = None


class StuckProcess(Struct, frozen=True):
    """A process in uninterruptible sleep (state D), seen so at every look for ``seconds``."""

    pid: int
    uid: int
    name: str
    seconds: float
    kernel_function: str = ""
    """the kernel function (wchan), where it may be read"""


class HostData(Struct, frozen=True, tag="host", kw_only=True):
    mounts: tuple[Mount, ...] = ()
    stuck: tuple[StuckProcess, ...] = ()
    zombies: int = 0
    """older than 300 s"""
    memory_total: int | None = None
    """bytes"""
    memory_available: int | None = None
    load: float | None = None
    """of the last minute"""
    cpus: int | None = None
    governor: str | None = None
    """of cpu0, where frequency scaling is there"""
    clock_source: str | None = None
    oom_kills: int | None = None
    """total of /proc/vmstat"""
    unread: UnreadReasons = {}


# ── a reading ─────────────────────────────────────────────────────────────────────────────────────────────────────────
Data = NvmlData | DcgmData | KernelData | FabricData | HostData


class Reading(Struct, frozen=True):
    """What one reader said at one time."""

    reader: str
    at: float
    data: Data | None = None
    state: Literal["read", "absent", "denied", "hung", "broken"] = "read"
    """``absent``: there is nothing to read here (no driver, no such device); ``denied``: not permitted; ``hung``: the
    call did not come back within its deadline, and its process was left or ended; ``broken``: anything else"""
    why: str = ""
    """of a state other than ``read``"""
