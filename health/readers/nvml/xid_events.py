"""Receive critical Xids through NVML's event sets, which need no permission to read the kernel log."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_void_p, cast
from typing import Any

from ..samples import GpuXid
from .names import SESSION_OVER_CODES, SUCCESS, TIMEOUT, error_text
from .session import SessionOver

_XID_CRITICAL = 0x8
"""Event type nvmlEventTypeXidCriticalError."""
_WAIT_MS = 1
"""Milliseconds to wait for the next event."""
_MAX_EVENTS = 256
"""Maximum number of events taken in one read. The other events wait for the next read, so that a storm of events does
not delay a sample."""
_RETRY_AFTER_READS = 20
"""Number of reads between two attempts to subscribe after a failure."""


class XidListener:
    """One event set of one session of NVML.

    Handles are kept as the pointers that nvidia-ml-py created, because integers would be truncated to 32 bits in calls
    of the library.
    """

    def __init__(self, nvml: Any, devices: Sequence[tuple[Any, str]]) -> None:
        """Subscribe to the events of ``devices``, each a pair of handle and UUID."""
        self.unavailable_reason = ""
        """Why events cannot be received from some or all GPUs; empty if they can be received from all GPUs."""
        self._nvml = nvml
        self._devices = devices
        self._uuids = {_address(handle): uuid for handle, uuid in devices}
        self._event_set: Any = None
        self._retry_in_reads = 0
        self._listen()

    def drain(self) -> tuple[GpuXid, ...]:
        """Return the Xids since the last call."""
        xids: list[GpuXid] = []
        while self._event_set is not None and len(xids) < _MAX_EVENTS:
            code, event = self._call("nvmlEventSetWait", self._event_set, _WAIT_MS)
            if code == TIMEOUT:
                break
            if code != SUCCESS:  # an error, for example of a lost GPU, may leave the event set unusable
                self.fail(f"waiting for events: {self._error_text(code)}")
            elif event.eventType & _XID_CRITICAL:
                xids.append(self._gpu_xid(event))
        if self.unavailable_reason:
            self._retry_in_reads -= 1
            if self._retry_in_reads < 0:
                self.close()
                self._listen()
        return tuple(xids)

    def fail(self, why: str) -> None:
        """Close the event set and wait some reads before the next attempt."""
        self.close()
        self.unavailable_reason = why
        self._retry_in_reads = _RETRY_AFTER_READS

    def close(self) -> None:
        """Free the event set."""
        if self._event_set is not None:
            self._call("nvmlEventSetFree", self._event_set)
            self._event_set = None

    def _listen(self) -> None:
        self.unavailable_reason = ""
        code, self._event_set = self._call("nvmlEventSetCreate")
        if code != SUCCESS:
            self.fail(self._error_text(code))
            return
        refused = {}
        for handle, uuid in self._devices:
            code, _ = self._call("nvmlDeviceRegisterEvents", handle, _XID_CRITICAL, self._event_set)
            if code != SUCCESS:
                refused[uuid] = self._error_text(code)
        if len(refused) == len(self._devices):
            self.fail("; ".join(dict.fromkeys(refused.values())) or "there is no GPU that could report events")
        elif refused:
            self.unavailable_reason = "; ".join(f"{uuid}: {why}" for uuid, why in refused.items())
            self._retry_in_reads = _RETRY_AFTER_READS

    def _gpu_xid(self, event: Any) -> GpuXid:
        address = _address(event.device)
        uuid = self._uuids.get(address, "")
        if not uuid and address:
            code, uuid = self._call("nvmlDeviceGetUUID", event.device)
            uuid = uuid if code == SUCCESS else ""
        return GpuXid(uuid, int(event.eventData), "" if uuid else "the driver did not name the GPU")

    def _call(self, function: str, *arguments: Any) -> tuple[int, Any]:
        try:
            return SUCCESS, getattr(self._nvml, function)(*arguments)
        except self._nvml.NVMLError as error:
            code = int(error.value)
        if code in SESSION_OVER_CODES and function == "nvmlEventSetWait":
            raise SessionOver(error_text(code))
        return code, None

    def _error_text(self, code: int) -> str:
        return error_text(code, str(self._nvml.NVMLError(code)))


def _address(handle: Any) -> int:
    return cast(handle, c_void_p).value or 0
