"""Critical Xids as they happen, through NVML's event sets: they need no right to read the kernel log."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_void_p, cast
from typing import Any

from ..samples import GpuXid
from .names import SESSION_OVER_CODES, SUCCESS, TIMEOUT, error_text
from .session import SessionOver

_XID_CRITICAL = 0x8
"""nvmlEventTypeXidCriticalError"""
_WAIT_MS = 1
"""ms that a look for the next event may take"""
_MAX_EVENTS = 256
"""events taken with one read; the rest stays for the next: a storm must not keep a reading from being told"""
_RETRY_AFTER_READS = 20
"""reads between two attempts to listen where it failed"""


class XidListener:
    """One event set of one session of NVML. Handles stay the pointers that nvidia-ml-py made: as numbers they would be
    cut to 32 bits on their way into the library."""

    def __init__(self, nvml: Any, devices: Sequence[tuple[Any, str]]) -> None:
        """``devices``: handle and UUID"""
        self.unavailable_reason = ""
        """events are not heard, or not of all GPUs"""
        self._nvml = nvml
        self._devices = devices
        self._uuids = {_address(handle): uuid for handle, uuid in devices}
        self._event_set: Any = None
        self._retry_in_reads = 0
        self._listen()

    def drain(self) -> tuple[GpuXid, ...]:
        """What happened since the last call."""
        xids: list[GpuXid] = []
        while self._event_set is not None and len(xids) < _MAX_EVENTS:
            code, event = self._call("nvmlEventSetWait", self._event_set, _WAIT_MS)
            if code == TIMEOUT:
                break
            if code != SUCCESS:  # of a GPU that is lost, for example: the set may not be of use any more
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
        """Nothing is heard for a while."""
        self.close()
        self.unavailable_reason = why
        self._retry_in_reads = _RETRY_AFTER_READS

    def close(self) -> None:
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
            self.fail("; ".join(dict.fromkeys(refused.values())) or "no GPU to hear them of")
        elif refused:
            self.unavailable_reason = "; ".join(f"{uuid}: {why}" for uuid, why in refused.items())
            self._retry_in_reads = _RETRY_AFTER_READS

    def _gpu_xid(self, event: Any) -> GpuXid:
        address = _address(event.device)
        uuid = self._uuids.get(address, "")
        if not uuid and address:
            code, uuid = self._call("nvmlDeviceGetUUID", event.device)
            uuid = uuid if code == SUCCESS else ""
        return GpuXid(uuid, int(event.eventData), "" if uuid else "the driver did not say of which GPU")

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
