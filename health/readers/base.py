"""The interface of readers. A reader reads one source on this node and returns the data without judging it.

Each reader is a class that implements :class:`Reader`. :mod:`rrl.health.readers.isolation.client` runs each reader in a
process of its own with a deadline, because any reader may hang.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

if TYPE_CHECKING:
    from .samples import Accelerator, Data

START_TIMEOUT_S = 20.0
"""Seconds that importing and creating a reader may take. The limit is high, because the code of the reader may be on
slow shared storage."""


class NotInstalled(Exception):
    """The node lacks the reader's source: a driver, device or service, which the text names."""


class PermissionDenied(Exception):
    """This user may not read the source. The text names the missing permission."""


class ReaderOptions(Struct, frozen=True, kw_only=True):
    """Sources that the readers read. The root folders differ from the defaults only in tests."""

    mounts: tuple[str, ...] = ("/", "/tmp")
    """Paths that must answer; the caller adds the run's folder and the home directory."""
    mount_timeout_s: float = 10.0
    """Seconds within which each of ``mounts`` must answer (the same as in NVRx's storage check)."""
    exporter: str = "http://127.0.0.1:9400/metrics"
    """URL of dcgm-exporter's metrics (its default port)."""
    dcgmi: str = "dcgmi"
    """DCGM's command: a path, or a name that is looked up in PATH."""
    dcgm_user: str = ""
    """User besides root who may own the exporter, DCGM's host engine and ``dcgmi``."""
    diag: bool = False
    """Whether to run ``dcgmi diag -r 1 -j`` once. The command takes seconds, and its software checks use the GPUs."""
    sysfs: str = "/sys"
    proc: str = "/proc"
    dev: str = "/dev"
    kmsg: str = "/dev/kmsg"


class Reader(Protocol):
    """A reader of one source. It is created in the process that reads, so that no other process opens the driver."""

    name: str
    """Name of the reader, one of :data:`READERS`."""
    interval_s: float
    """Seconds between the starts of two reads."""
    timeout_s: float
    """Seconds that a read may take before it counts as hung; creating a reader may take :data:`START_TIMEOUT_S`."""

    def __init__(self, options: ReaderOptions) -> None: ...

    def read(self) -> Data:
        """Read the source once.

        Raises:
            NotInstalled: The node has no such source.
            PermissionDenied: This user may not read it.
            Exception: Any other exception means that the reader is broken.
        """
        ...

    def close(self) -> None:
        """Close everything that the reader has opened."""
        ...


class AcceleratorReader(Reader, Protocol):
    """A reader of the accelerators of one vendor; :meth:`read` returns an ``AcceleratorData``."""

    def read_use(self, names: Sequence[str] | None) -> tuple[Accelerator, ...]:
        """Return the accelerators ``names``, in this order, with only those values that a launcher needs.

        These are uuid, utilization, processes, and memory_used without the driver's own reserve. A name is a UUID, or a
        number among the accelerators that this process may use; None means all of them. Raises what :meth:`read`
        raises.
        """
        ...


ACCELERATOR_READERS = {"nvml": "rrl.health.readers.nvml.reader:NvmlReader"}
"""``module:Class`` of each :class:`AcceleratorReader`, by its name. The driver of at most one of them is on a node."""
READER_CLASSES = {
    **ACCELERATOR_READERS,
    "dcgm": "rrl.health.readers.dcgm.reader:DcgmReader",
    "kernel": "rrl.health.readers.kernel_log:KernelReader",
    "fabric": "rrl.health.readers.fabric:FabricReader",
    "host": "rrl.health.readers.host:HostReader",
}
"""``module:Class`` of each reader, by its name. The class is imported only in the process that reads."""
READERS = tuple(READER_CLASSES)
"""Names of the readers."""
