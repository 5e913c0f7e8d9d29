"""Samples: the plain values that readers return. The checks (:mod:`rrl.health.checks.evaluate`) judge them.

A value that could not be read is ``None`` (or an empty tuple for a tuple of devices), and ``unread`` of its struct
gives the reason under the field's name: absent, not permitted, not supported. An unread value is neither OK nor FAIL.
If a reader has no data or does not answer, the result is a :class:`Reading` without data.

``at`` is a time of the node's own monotonic clock (s). It orders the samples of one node and cannot be compared with
other clocks.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

MOUNT_ATTEMPTS = 3
"""Number of processes that probe an unanswered path within one read, started one after another."""

UnreadReasons = dict[str, str]
"""Reason why a field could not be read, by field: ``not supported``, ``not permitted``, ``no such function in this
driver`` ..."""


# ── accelerators ──────────────────────────────────────────────────────────────────────────────────────────────────────
class GpuProcess(Struct, frozen=True):
    """A compute process on a GPU."""

    pid: int
    uid: int | None
    """Real user id of the process; None if it has ended or is in another PID namespace."""
    memory: int | None
    """Bytes of GPU memory that the process uses."""
    name: str = ""


class Accelerator(Struct, frozen=True, kw_only=True):
    """One GPU or other accelerator of any vendor. The docstrings of the fields give the units."""

    index: int
    """Number among the accelerators that the reading process may use."""
    uuid: str
    pci: str = ""
    """PCI address in lower case, as in the kernel log: ``0000:1b:00``."""
    name: str = ""
    serial: str = ""
    vbios: str = ""
    lost: str = ""
    """Driver's error if the device no longer answers, else empty. ``Unknown Error`` names no failure and must be
    confirmed by further samples; an error with the word ``reset`` is one that a reset cures."""
    recovery_action: str | None = None
    """Recovery action that the driver requires: ``none``, ``gpu_reset``, ``node_reboot``, ``drain_p2p``,
    ``drain_and_reset``, ``recover_imex_domain``, ``bus_reset``, ``system_reboot`` or ``unknown (N)``."""
    ecc_volatile_corrected: int | None = None
    """Corrected memory errors since the driver was loaded."""
    ecc_volatile_uncorrected: int | None = None
    ecc_aggregate_uncorrected: int | None = None
    """Uncorrected memory errors over the device's lifetime."""
    temperature: int | None = None
    """Temperature in degrees Celsius, like all temperatures in this class."""
    temperature_slowdown: int | None = None
    """Temperature at which the device reduces its clocks."""
    temperature_memory: int | None = None
    temperature_memory_max: int | None = None
    clock_reasons: tuple[str, ...] | None = None
    """Reasons in effect for which clocks are below their maximum: ``gpu_idle``, ``applications_clocks``,
    ``sw_power_cap``, ``hw_slowdown``, ``sync_boost``, ``sw_thermal``, ``hw_thermal``, ``hw_power_brake``,
    ``display``."""
    clock_sm: int | None = None
    """Clock of the compute units (NVIDIA: SMs) in MHz."""
    clock_sm_max: int | None = None
    utilization: int | None = None
    """Percentage of the last sample period in which a kernel ran."""
    memory_used: int | None = None
    """Bytes of the device's memory in use; ``memory_total`` is in bytes too."""
    memory_total: int | None = None
    processes: tuple[GpuProcess, ...] | None = None
    """Compute processes on the device."""
    pcie_replays: int | None = None
    """Number of PCIe replays since the driver was loaded."""
    pcie_gen: int | None = None
    pcie_gen_max: int | None = None
    """Highest PCIe generation that both device and slot support."""
    pcie_width: int | None = None
    """Number of PCIe lanes in use."""
    pcie_width_max: int | None = None
    mig: bool | None = None
    """Whether the device is split into instances (NVIDIA: MIG)."""
    unread: UnreadReasons = {}


class AcceleratorData(Struct, frozen=True, kw_only=True, tag="accelerators"):
    """One sample of the node's accelerators. A vendor's reader may return a subclass with facts of its own."""

    driver: str
    """Version of the driver."""
    gpus: tuple[Accelerator, ...]
    """All accelerators that the driver lists, including lost ones."""
    granted: int = 0
    """Number of accelerators whose device files this process may open."""
    withheld: int = 0
    """Number of accelerators that a device cgroup (Slurm's ConstrainDevices) withholds from this process. The driver's
    library may omit them."""


# ── NVIDIA's own facts, which only checks of NVIDIA's hardware read ───────────────────────────────────────────────────
class NvLink(Struct, frozen=True, kw_only=True):
    """One NVLink of one GPU. Counters are totals since the driver was loaded."""

    link: int
    active: bool | None = None
    replay: int | None = None
    recovery: int | None = None
    crc_flit: int | None = None
    crc_data: int | None = None


class NvidiaGpu(Accelerator, frozen=True, kw_only=True):
    """One GPU, as NVML reports it."""

    remap_pending: bool | None = None
    """Whether a row of the memory is remapped at the next reset."""
    remap_failed: bool | None = None
    retired_corrected: int | None = None
    """Number of pages retired for multiple single-bit errors, on GPUs before Ampere."""
    retired_uncorrected: int | None = None
    """Number of pages retired for double-bit errors."""
    retired_pending: bool | None = None
    nvlinks: tuple[NvLink, ...] | None = None
    fabric_state: str | None = None
    """State of the registration with the NVLink fabric: ``not_supported``, ``not_started``, ``in_progress`` or
    ``completed``."""
    fabric_status: str | None = None
    """Result of the registration with the NVLink fabric: ``success``, or NVML's error."""


class GpuXid(Struct, frozen=True):
    """One critical Xid event since the previous sample."""

    uuid: str
    """UUID of the GPU; empty if the driver did not name it."""
    xid: int
    detail: str = ""


class NvmlData(AcceleratorData, frozen=True, kw_only=True, tag="nvml"):
    """One sample of NVML."""

    gpus: tuple[NvidiaGpu, ...]
    xids: tuple[GpuXid, ...] = ()
    xid_events: str = ""
    """Why Xid events cannot be received; empty if they can."""


# ── DCGM ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
class DcgmGpu(Struct, frozen=True, kw_only=True):
    """One GPU in dcgm-exporter's metrics."""

    uuid: str
    index: int | None = None
    xid_counts: dict[int, int] = {}
    """Total number of Xids by code, from DCGM_EXP_XID_ERRORS_COUNT or DCGM_EXP_XID_ERRORS_TOTAL."""
    tensor_active: float | None = None
    """Fraction of the time in which tensor cores worked (DCGM_FI_PROF_PIPE_TENSOR_ACTIVE)."""
    ecc_volatile_uncorrected: int | None = None
    remap_failed: bool | None = None


class DcgmIncident(Struct, frozen=True):
    """One line of ``dcgmi health -c -j``, or one failed test of ``dcgmi diag``."""

    gpu: str
    """UUID of the GPU if known, else its index as text; empty if the incident does not concern a single GPU."""
    system: str
    """System that DCGM checked (``PCIe``, ``Memory`` ...), or the name of the failed test."""
    code: str
    """Error code DCGM_FR_* without its prefix, if known; else empty."""
    severity: Literal["warn", "fail"]
    text: str
    source: Literal["health", "diag"] = "health"


class DcgmData(Struct, frozen=True, tag="dcgm"):
    """One sample of DCGM."""

    gpus: tuple[DcgmGpu, ...] = ()
    incidents: tuple[DcgmIncident, ...] = ()
    unread: UnreadReasons = {}
    """Why ``exporter``, ``health`` or ``diag`` could not be read, by name."""
    health_at: float | None = None
    """Time (s) of the run of ``dcgmi health`` that found the incidents; several samples may contain the same run. None
    if ``dcgmi health`` was not run, or if every sample is a new run."""
    driver_gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs that the driver lists in /proc."""


# ── kernel log ────────────────────────────────────────────────────────────────────────────────────────────────────────
class KernelEvent(Struct, frozen=True, kw_only=True):
    """One relevant line of the kernel log."""

    kind: Literal["xid", "sxid", "mce", "oom", "nic", "io", "filesystem", "filesystem_back", "hung_task"]
    """Kind of event; ``filesystem_back`` means that the server of a network file system answers again."""
    text: str
    """The line, at most 300 characters."""
    xid: int | None = None
    pci: str = ""
    """PCI address of the GPU (``0000:1b:00``), for an Xid."""
    pci_exists: bool | None = None
    """Whether an NVIDIA device of this node has the PCI address of the Xid or SXid; None if devices cannot be
    listed."""
    pid: int | None = None
    uid: int | None = None
    """User id of the process, for a hung task; None if it has ended."""
    device: str = ""
    """Interface, disk or mount, if the line names one."""
    age: float = 0.0
    """Seconds between the line and the sample. The first sample also contains lines that are older than the reader, so
    that admission knows the node's history."""


class KernelData(Struct, frozen=True, tag="kernel"):
    """One sample of the kernel log."""

    events: tuple[KernelEvent, ...] = ()
    """Events since the previous sample."""
    dropped: int = 0
    """Lines that the kernel overwrote before they were read, or that exceeded the limit of one sample."""


# ── InfiniBand and RoCE ───────────────────────────────────────────────────────────────────────────────────────────────
class FabricPort(Struct, frozen=True, kw_only=True):
    """One port: ``/sys/class/infiniband/<device>/ports/<port>``. Counters are totals."""

    device: str
    port: int
    state: str | None = None
    """Logical state: ``ACTIVE``, ``DOWN``, ``INIT`` ..."""
    physical: str | None = None
    """Physical state: ``LinkUp``, ``Polling``, ``Disabled`` ..."""
    rate: float | None = None
    """Rate in Gbit/s."""
    counters: dict[str, int] = {}
    """Values of the files in ``counters`` and ``hw_counters`` by file name, and ``carrier_changes`` of the port's
    network interface."""
    unread: UnreadReasons = {}


class FabricData(Struct, frozen=True, tag="fabric"):
    """One sample of the InfiniBand and RoCE ports."""

    ports: tuple[FabricPort, ...] = ()
    missing_char_devices: tuple[str, ...] = ()
    """Devices (``uverbs0``, ``umad1`` ...) that the kernel lists but ``/dev/infiniband`` lacks."""


# ── host ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
class Mount(Struct, frozen=True, kw_only=True):
    """A path that the node needs, probed by a separate process because the path may hang."""

    path: str
    answers: bool
    """Whether stat and a read of the file system's figures returned in time."""
    why: str = ""
    """Why the path does not answer: ``did not answer within 10 s``, or the system's error."""
    attempts: int = 0
    """Number of processes that probed the path, one after another, without returning."""
    hung_for: float = 0.0
    """Seconds since the start of the first process that probed the path without returning."""
    filesystem: str = ""
    used: float | None = None
    """Fraction (0 to 1) of the bytes available to users that is in use."""
    inodes_used: float | None = None


class StuckProcess(Struct, frozen=True):
    """A process that was in uninterruptible sleep (state D) in every read for ``seconds``."""

    pid: int
    uid: int
    name: str
    seconds: float
    kernel_function: str = ""
    """Kernel function in which the process waits (wchan), if readable."""


class HostData(Struct, frozen=True, tag="host", kw_only=True):
    """One sample of the host."""

    mounts: tuple[Mount, ...] = ()
    stuck: tuple[StuckProcess, ...] = ()
    zombies: int = 0
    """Number of zombies older than 300 s."""
    memory_total: int | None = None
    """Size of main memory in bytes; ``memory_available`` is in bytes too."""
    memory_available: int | None = None
    load: float | None = None
    """Load average of the last minute."""
    cpus: int | None = None
    governor: str | None = None
    """Frequency governor of cpu0, if frequency scaling exists."""
    clock_source: str | None = None
    oom_kills: int | None = None
    """Number of processes that the kernel killed because memory ran out: the total in /proc/vmstat."""
    unread: UnreadReasons = {}


# ── one result of a reader ────────────────────────────────────────────────────────────────────────────────────────────
Data = AcceleratorData | NvmlData | DcgmData | KernelData | FabricData | HostData


class Reading(Struct, frozen=True):
    """Result of one read of one reader."""

    reader: str
    at: float
    data: Data | None = None
    state: Literal["read", "absent", "denied", "hung", "broken"] = "read"
    """Whether the source was ``read``, or why it was not. ``absent``: the node does not have the source (driver,
    device). ``denied``: this user may not read it. ``hung``: the call did not return within its deadline, and its
    process was left running or ended. ``broken``: another error."""
    why: str = ""
    """Reason of a state other than ``read``."""
