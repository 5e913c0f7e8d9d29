"""Readers: each reads one thing of this node and says what it read, without opinion.

A module of this package holds one class that is a :class:`Reader`. :mod:`rrl.health.readers.isolation.client` runs each
in a process of its own with a deadline, for any of them may hang.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

if TYPE_CHECKING:
    from .samples import Data

START_TIMEOUT_S = 20.0
"""s for a reader to be imported and made: the code may lie on slow shared storage"""


class NotInstalled(Exception):
    """There is nothing to read here: no driver, no such device, no such service. Its text says what is missing."""


class PermissionDenied(Exception):
    """It is there, but this user may not read it. Its text says which permission is missing."""


class ReaderOptions(Struct, frozen=True, kw_only=True):
    """What readers look at. The roots are other folders only in tests."""

    mounts: tuple[str, ...] = ("/", "/tmp")
    """paths that the node needs; the caller adds the run's folder and the home"""
    mount_timeout_s: float = 10.0
    """s that such a path has to answer (NVRx' storage check: the same)"""
    exporter: str = "http://127.0.0.1:9400/metrics"
    """dcgm-exporter's metrics (its default port)"""
    dcgmi: str = "dcgmi"
    """DCGM's command, by path or looked up in PATH"""
    dcgm_user: str = ""
    """user besides root to whom the exporter, DCGM's host engine and ``dcgmi`` may belong"""
    diag: bool = False
    """run ``dcgmi diag -r 1 -j`` once: it takes seconds, and its software checks use the GPUs"""
    sysfs: str = "/sys"
    proc: str = "/proc"
    dev: str = "/dev"
    kmsg: str = "/dev/kmsg"


class Reader(Protocol):
    """Made in the process that reads: nothing of a driver is opened before that."""

    name: str
    """of :data:`rrl.health.readers.samples.READERS`"""
    interval_s: float
    """s between the beginnings of two reads"""
    timeout_s: float
    """s that a read may take before it counts as hung; making a reader has :data:`STARTS_WITHIN`"""

    def __init__(self, options: ReaderOptions) -> None: ...

    def read(self) -> Data:
        """Raises :class:`Absent` or :class:`Denied`; any other exception means that the reader is broken."""
        ...

    def close(self) -> None: ...


READER_CLASSES = {
    "nvml": "rrl.health.readers.nvml.reader:NvmlReader",
    "dcgm": "rrl.health.readers.dcgm.reader:DcgmReader",
    "kernel": "rrl.health.readers.kernel_log:KernelReader",
    "fabric": "rrl.health.readers.fabric:FabricReader",
    "host": "rrl.health.readers.host:HostReader",
}
"""name → where its class lies: it is imported in the reader's own process only"""
