"""The rules of the node checks: every threshold with its unit and source, the expected node, and which checks act.

A site's own rules are in a TOML file, which :mod:`rrl.config.health_rules_file` reads::

    [expect]
    gpus = 8
    mounts = ["/scratch"]

    [checks]
    gpu_throttle = "off"

The classes are plain msgspec, since ``rrl health check`` runs before each job and must not wait for pydantic. Names in
parentheses are the sources in docs/sources.md; "rrl's choice" marks a value without such a source.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Mode = Literal["act", "observe", "off"]
XidClass = Literal["node_out", "gpu_reset", "nvlink", "app", "ignore", "service", "rest"]


class Expect(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The expected hardware and settings of a node. A field that is not set is not checked."""

    gpus: int | None = None
    """Number of GPUs that the driver must list (gcm: 8)."""
    hcas: int | None = None
    """Number of InfiniBand or RoCE devices (gcm's example: 9)."""
    ports: tuple[str, ...] = ()
    """Ports that must be ACTIVE: ``mlx5_0/1``; if empty, the ports that were ACTIVE at the first sample."""
    mounts: tuple[str, ...] = ()
    """Paths that must respond, in addition to those that the caller names."""
    driver: str = ""
    """Expected version of the GPU driver."""
    vbios: str = ""
    """Expected VBIOS version of every GPU."""
    sm_clock: int | None = None
    """Minimum value (MHz) of a GPU's maximum SM clock (gcm, for A100s: 1155). It depends on the model of the GPUs."""
    memory: int | None = None
    """Expected bytes of main memory."""
    governor: str = ""
    """Expected CPU frequency governor, such as ``performance``, which gcm expects."""
    clock_source: str = ""
    """Expected clock source of the kernel, such as ``tsc``."""
    readers: tuple[str, ...] = ()
    """Readers (``nvml``, ``dcgm``, ``kernel``, ``fabric``, ``host``) without which the node's verdict is UNKNOWN;
    the reader of the node's GPUs is added if GPUs are expected, ``fabric`` if HCAs or ports are expected."""


class Hysteresis(Struct, frozen=True, forbid_unknown_fields=True):
    """How many equal samples in a row are needed if one sample is not proof (docs/sources.md, guard rails)."""

    bad: int = 3
    """Bad samples in a row that raise a finding."""
    good: int = 2
    """Good samples in a row that clear the finding."""


class GpuRules(Struct, frozen=True, forbid_unknown_fields=True):
    """Thresholds of the GPU checks."""

    ecc_corrected: int = 50_000_000
    """Volatile corrected ECC errors above which the check warns (gcm)."""
    ecc_corrected_rate: float = 100.0
    """Corrected ECC errors per second, over a minute, above which the check warns (rrl's choice: this rate reaches
    gcm's 50 million within six days)."""
    ecc_corrected_hour: int = 20_000
    """Corrected ECC errors within an hour above which the check warns (rrl's choice, to find memory that fails
    slowly; a healthy GPU has no such errors for days)."""
    retired_pages: int = 10
    """Retired pages above which the check warns, for GPUs before Ampere (gcm)."""
    retired_pages_most: int = 63
    """Retired pages from which a GPU fails (DCGM)."""
    retired_pages_soft: int = 15
    """Number of retired pages at which a GPU fails, if since the first sample more than one page was retired for a
    double-bit error (DCGM: within 7 days)."""
    hot: float = 300.0
    """Seconds at or above the device's own slowdown temperature after which a GPU fails (rrl's choice)."""
    throttled: int = 10
    """Samples in a row with thermal or power-brake slowdown before the slowdown is reported (rrl's choice: a single
    sample with slowdown is normal)."""
    slow_clock: float = 0.75
    """Share of its highest SM clock below which a busy GPU is slow (NVRx's straggler score: 0.75)."""
    busy: int = 50
    """Percent of utilization from which a GPU's clock and PCIe generation are meaningful (rrl's choice)."""
    memory_before_start: int = 512 * 2**20
    """Bytes of a GPU's memory that may be in use before a role starts (NVRx waits for 512 MB; gcm's 15 MiB is less than
    new drivers reserve)."""
    reclaim: int = 10
    """Samples in a row, one second apart, in which a GPU's memory may still be in use before a role starts. A process
    that has just ended frees its memory slowly (gcm: 3 retries of 3 s)."""
    unknown_error: int = 10
    """Samples in a row with NVML's "Unknown Error" after which a GPU fails (rrl's choice: on working GPUs single calls
    fail this way; a lost GPU has other error codes)."""


class LinkRules(Struct, frozen=True, forbid_unknown_fields=True):
    """Thresholds of the NVLink and PCIe checks."""

    window: float = 60.0
    """Length (s) of one window in which NVLink errors are counted (NVRx)."""
    windows: int = 30
    """Number of windows whose NVLink errors are stored (NVRx)."""
    flagged: int = 15
    """Number of stored windows with errors above which an NVLink fails (NVRx)."""
    crc: float = 100.0
    """CRC errors per second at which an NVLink fails (DCGM)."""
    pcie_replays: tuple[float, ...] = (0.15, 0.3, 0.48, 0.96, 1.92, 3.84)
    """PCIe replays per minute and lane above which the check warns, for generations 1 to 6 (DCGM)."""
    fabric_registers: float = 120.0
    """Seconds within which a GPU must register with the NVLink fabric after a boot or a reset (rrl's choice: the fabric
    manager trains all links first)."""


class XidRules(Struct, frozen=True, forbid_unknown_fields=True):
    """Windows, counts and classes by which Xid errors are judged."""

    burst: float = 180.0
    """Seconds within which all reports of one Xid on one GPU, from any source, count as one event (docs/sources.md,
    Xids)."""
    day: float = 86400.0
    """Seconds within which repeated Xids are counted (docs/sources.md, Xids)."""
    repeats: int = 2
    """Number of application or NVLink Xids on one GPU, within ``day``, that makes the hardware suspect
    (docs/sources.md, Xids)."""
    support: int = 5
    """Number of fatal Xids on one GPU within ``day`` from which the remedy is the vendor's support (docs/sources.md,
    Xids)."""
    kill: float = 60.0
    """For this time (s) after rrl has killed a step, only Xids of the two most severe classes count (docs/sources.md,
    Xids)."""
    kill_lead: float = 10.0
    """An Xid that occurs at most this time (s) before the reported end of rrl's kill of a step counts as an effect of
    the kill, because a kill can take that long (rrl's choice). Other tools use 60 s. With 60 s the Xid of a crash would
    be ignored if rrl killed the remaining processes soon after the crash."""
    died: float = 60.0
    """Seconds between a role's death and a rare Xid on its GPU. If more time has passed, the Xid does not count as the
    cause of the death (docs/sources.md, Xids)."""
    classes: dict[str, XidClass] = {}
    """Class by Xid code, to override the catalogue (the classes of 109, 43, 44, 68, 94, 62 and 137 are disputed)."""


class KernelRules(Struct, frozen=True, forbid_unknown_fields=True):
    """Windows and counts by which the kernel log is judged."""

    window: float = 86400.0
    """Seconds for which an I/O error, a machine check or an OOM kill counts (rrl's choice)."""
    flap_window: float = 3600.0
    """Seconds for which a flap counts. Each line of the kernel log that reports a lost network link is a flap."""
    flaps: int = 3
    """Number of flaps within ``flap_window`` from which an InfiniBand port fails."""
    hung_window: float = 3600.0
    """Seconds for which rrl continues to report a task after the kernel reported it as hung (rrl's choice)."""
    stall_window: float = 1800.0
    """If the kernel log reports an unresponsive network file system, or a task that waits for storage, the storage
    counts as stalled for this time (s) after the newest such line. A later line which reports that storage is back
    ends the time. (rrl's choice: the kernel writes a line about each request that waits for minutes, so storage answers
    if there is no new line.)"""
    quiet_devices: tuple[str, ...] = ("sr", "fd", "loop")
    """Prefixes of the names of devices on which I/O errors and file system errors are ignored: virtual CDs, virtual
    floppies, and images of users' containers (rrl's choice)."""


class FabricRules(Struct, frozen=True, forbid_unknown_fields=True):
    """Thresholds of the InfiniBand and RoCE counters."""

    link_downs: int = 2
    """Number of increments of link_downed within an hour from which a port fails (rrl's choice; NVSentinel: any
    increment). Programs survive a short interruption, and a link that stays down is reported by its state."""
    symbol_errors_hour: int = 120
    """Symbol errors per hour above which a port fails (NVSentinel)."""
    symbol_errors: float = 10.0
    """Symbol errors per second above which the check warns (NVSentinel)."""
    recoveries: float = 5.0
    """Increments of link_error_recovery per minute above which the check warns (NVSentinel)."""
    receive_errors: float = 10.0
    """Increments of port_rcv_errors per second above which the check warns (NVSentinel)."""
    ack_timeouts: float = 1.0
    """Increments of local_ack_timeout_err per second above which the check warns (NVSentinel)."""
    discards: float = 100.0
    """Increments of port_xmit_discards per second above which the check warns (NVSentinel)."""
    slow_restarts: float = 10.0
    """Increments of roce_slow_restart per second above which the check warns (NVSentinel)."""
    carrier_changes: int = 2
    """Number of carrier changes within an hour above which the check warns (NVSentinel)."""


class HostRules(Struct, frozen=True, forbid_unknown_fields=True):
    """Thresholds of the checks of disk, memory, mounts, processes and clock."""

    disk: float = 0.80
    """Share of bytes or inodes in use above which the check warns (gcm)."""
    disk_full: float = 0.95
    """Share in use of a node's own file system above which the node fails (rrl's choice; gcm is critical at 0.85,
    where a run still has space). A full shared file system never fails a node."""
    memory: float = 0.05
    """Minimum share of memory that must be available. It is also the maximum relative difference between the total and
    the expected memory (NHC)."""
    stuck: float = 300.0
    """Seconds for which a process is in state D before the check warns (the default of gcm)."""
    stuck_after_kill: float = 60.0
    """Seconds after rrl's SIGKILL for which a process may still be in state D before the node fails (rrl's choice)."""
    mount_hung: float = 15.0
    """Seconds without a response of a path after which a single sample suffices to fail the node, on two conditions. At
    least three processes, started one after another, must have waited for the path. Another path must have responded
    in the sample, since otherwise the whole node may be stalled. (rrl's choice: longer than the 10 s that a path
    usually has in a sample, and short enough for a prolog.)"""
    zombies: int = 50
    """Maximum number of zombies that are older than 300 s; the check warns if there are more. (Meta's gcm warns of any
    zombie. Some are allowed here, because the first process of a container often reaps no children.)"""
    clock_sources: tuple[str, ...] = ("hpet", "acpi_pm", "jiffies", "refined-jiffies")
    """Slow clock sources, of which the check warns. A kernel uses them only if it has found a better source
    unreliable. (The list is rrl's choice.)"""


class ReaderRules(Struct, frozen=True, forbid_unknown_fields=True):
    """Limits for the readers themselves."""

    stall: float = 60.0
    """Seconds from the first missed deadline of a reader until the reader counts as stalled (rrl's choice: a reset of
    another user's GPU holds the driver's lock for about 40 s). A stalled NVML fails the node if a second witness
    shows that the driver hangs: a stalled DCGM, or a process that is stuck in the driver."""
    dcgm_user: str = ""
    """User besides root who runs dcgm-exporter and DCGM's host engine on this node, and who may own ``dcgmi``. The
    output of other users' programs is ignored."""


class HookRules(Struct, frozen=True, forbid_unknown_fields=True):
    """How many nodes the site's hooks (prolog, epilog and HealthCheckProgram) may drain.

    There is a limit, because failures of many nodes at the same time have a shared cause that a drain does not repair,
    or the findings are forged.
    """

    share: float = 0.2
    """Share of the cluster's nodes, at least one node, that hooks may drain within ``window`` (the same as the
    circuit breaker of a run; docs/sources.md, guard rails)."""
    window: float = 600.0
    """Seconds for which a drain by a hook counts against ``share`` (same as the circuit breaker of a run)."""
    standing: float = 0.25
    """Share of the cluster's nodes, at least one node, that may be drained by hooks at any time (a run uses the same
    share: while more than 25 % of its nodes are down, it excludes only nodes that are down)."""


class Rules(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """All rules of a site. Times are seconds of the node's monotonic clock."""

    expect: Expect = Expect()
    checks: dict[str, Mode] = {}
    """Mode by name of the check: ``act``, ``observe`` (FAIL is reported as WARN) or ``off``; default: ``act``."""
    hysteresis: Hysteresis = Hysteresis()
    gpu: GpuRules = GpuRules()
    links: LinkRules = LinkRules()
    xid: XidRules = XidRules()
    kernel: KernelRules = KernelRules()
    fabric: FabricRules = FabricRules()
    host: HostRules = HostRules()
    readers: ReaderRules = ReaderRules()
    hooks: HookRules = HookRules()

    def required_readers(self, of_gpus: str) -> frozenset[str]:
        """Return the readers that must work on this node, of whose GPUs the reader is ``of_gpus``."""
        readers = set(self.expect.readers)
        if self.expect.gpus:
            readers.add(of_gpus)
        if self.expect.hcas or self.expect.ports:
            readers.add("fabric")
        return frozenset(readers)
