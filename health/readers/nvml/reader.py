"""Reader of NVML through nvidia-ml-py: the state of all GPUs of this node, and the Xids since the last read.

One session of NVML is kept open, because opening a session takes seconds on a node without persistence mode. It is
reopened if the driver was unloaded or replaced, or if the number of GPUs changed. While a GPU is lost, the session is
reopened periodically, to find the GPU after a reset. Any call may hang; the client enforces the deadline.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any, ClassVar

from ..base import NotInstalled, PermissionDenied, ReaderOptions
from ..samples import Accelerator, NvmlData
from .gpu import Device, ProcessOwners, read_use
from .names import DRIVER_NOT_LOADED, GPU_NOT_FOUND, LIBRARY_NOT_FOUND, NO_PERMISSION, SESSION_OVER_CODES, error_text
from .session import SessionOver
from .xid_events import XidListener

_LOST_SEARCH_READS = 60
"""Number of reads between two new sessions while a GPU is lost."""
_REOPEN_AFTER_READS = 10
"""Number of reads, after the session was reopened, in which an error does not end the session again. Such an error
counts only as an error of the called function."""


class NvmlReader:
    """Reader of all GPUs of the node through NVML."""

    name: ClassVar[str] = "nvml"
    interval_s: ClassVar[float] = 1.0
    timeout_s: ClassVar[float] = 10.0

    def __init__(self, options: ReaderOptions) -> None:
        self._owners, self._dev = ProcessOwners(options.proc), options.dev
        self._nvml: Any = None
        """The module nvidia-ml-py while a session is open, else None."""
        self._driver = ""
        self._device_access = (0, 0)
        self._devices: list[Device] = []
        self._events: XidListener | None = None
        self._identities: dict[int, dict[str, str]] = {}
        self._read_count = 0
        self._opened_at_read = 0
        self._trust_errors_from_read = 0
        """Number of the first read in which an error may end the session."""

    def read(self) -> NvmlData:
        """Read all GPUs and the Xids since the last read; reopen the session if it ended."""
        self._read_count += 1
        if (
            any(device.lost for device in self._devices)
            and self._read_count - self._opened_at_read >= _LOST_SEARCH_READS
        ):
            self.close()
        try:
            return self._read(session_may_end=self._read_count >= self._trust_errors_from_read)
        except SessionOver:
            self._trust_errors_from_read = self._read_count + _REOPEN_AFTER_READS
            self.close()
            return self._read(session_may_end=False)

    def read_use(self, names: Sequence[str] | None) -> tuple[Accelerator, ...]:
        """Read what a launcher needs of some GPUs. Must not be mixed with :meth:`read`."""
        if self._nvml is None:
            self._nvml = _start_nvml()
        listed = [str(index) for index in range(self._count(session_may_end=False))] if names is None else names
        return tuple(read_use(self._nvml, name, index, self._owners) for index, name in enumerate(listed))

    def close(self) -> None:
        """End the session, if the driver permits it."""
        nvml, self._nvml = self._nvml, None
        if nvml is None:
            return
        self._identities = {index: device.identity for index, device in enumerate(self._devices)}
        try:
            if self._events is not None:
                self._events.close()
            nvml.nvmlShutdown()
        except nvml.NVMLError:
            pass  # the session has ended already, or will end with this process
        self._events, self._devices = None, []

    def _read(self, session_may_end: bool) -> NvmlData:
        opened = self._nvml is None
        if opened:
            self._open()
        if self._count(session_may_end) != len(self._devices):
            self.close()
            self._open()
            opened = True
        assert self._events is not None
        xids = self._events.drain() if session_may_end else self._drain_quietly()
        uuids_with_xid = {xid.uuid for xid in xids}
        gpus = tuple(
            device.read(
                self._read_count, opened or device.uuid in uuids_with_xid or "" in uuids_with_xid, session_may_end
            )
            for device in self._devices
        )
        granted, withheld = self._device_access
        return NvmlData(
            driver=self._driver,
            gpus=gpus,
            granted=granted,
            withheld=withheld,
            xids=xids,
            xid_events=self._events.unavailable_reason,
        )

    def _drain_quietly(self) -> tuple[Any, ...]:
        assert self._events is not None
        try:
            return self._events.drain()
        except SessionOver as over:
            self._events.fail(str(over))
            return ()

    def _open(self) -> None:
        self._nvml = _start_nvml()
        self._opened_at_read = self._read_count
        self._device_access = _device_files(self._dev)
        try:
            self._driver = str(self._nvml.nvmlSystemGetDriverVersion())
        except self._nvml.NVMLError:
            self._driver = ""
        known = self._identities if len(self._identities) == (count := self._count(session_may_end=False)) else {}
        self._devices = [Device(self._nvml, index, self._owners, known.get(index, {})) for index in range(count)]
        for device in self._devices:
            device.open()
        self._events = XidListener(self._nvml, [(d.handle, d.uuid) for d in self._devices if d.handle is not None])

    def _count(self, session_may_end: bool) -> int:
        try:
            return int(self._nvml.nvmlDeviceGetCount())
        except self._nvml.NVMLError as error:
            text = error_text(int(error.value), str(error))
            if error.value in SESSION_OVER_CODES and session_may_end:
                raise SessionOver(text) from None
            self.close()
            raise RuntimeError(f"NVML cannot count the GPUs: {text}") from None


def _device_files(dev: str) -> tuple[int, int]:
    """Return (number of GPUs that this process may open, number that it may not open).

    access(2) consults the device cgroup as open(2) does, but does not call the driver.
    """
    try:
        files = [f"{dev}/{name}" for name in os.listdir(dev) if re.fullmatch(r"nvidia\d+", name)]
    except OSError:
        return 0, 0
    granted = sum(os.access(file, os.R_OK | os.W_OK) for file in files)
    return granted, len(files) - granted


def _start_nvml() -> Any:
    """Open a session of NVML and return nvidia-ml-py."""
    try:
        import pynvml
    except ImportError:
        raise NotInstalled("nvidia-ml-py is not installed") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        text = error_text(int(error.value), str(error))
        if error.value in (LIBRARY_NOT_FOUND, DRIVER_NOT_LOADED, GPU_NOT_FOUND):
            raise NotInstalled(text) from None
        if error.value == NO_PERMISSION:
            raise PermissionDenied("the NVIDIA driver refuses access to this user") from None
        raise RuntimeError(f"NVML does not start: {text}") from None
    return pynvml
