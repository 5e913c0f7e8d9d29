"""Which GPUs a role has got, so that two roles that were given the same one are found out; and whether they work."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any

from .environment import GPUS_ENV

DRIVER_TIMEOUT_S = 5.0
"""s for the driver to say which GPUs these are; one that hangs keeps nobody from joining"""


async def assigned_gpus_with_timeout(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """As :func:`held_gpus`; nothing where the driver does not answer."""
    try:
        async with asyncio.timeout(DRIVER_TIMEOUT_S):  # Python 3.11's wait_for may forget a cancellation
            return await asyncio.to_thread(assigned_gpus, environ)
    except TimeoutError:
        return ()


def assigned_gpus(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """UUIDs, where nvidia-ml-py and a driver say them; else Slurm's numbers of them on this node; nothing where Slurm
    gave none, as on the local cluster, where nothing keeps roles apart. May hang as long as the driver does."""
    given = tuple(name for name in environ.get(GPUS_ENV, "").split(",") if name)
    if not given:
        return ()
    return _uuids(environ.get("CUDA_VISIBLE_DEVICES", "")) or given


def _uuids(visible: str) -> tuple[str, ...]:
    """What CUDA_VISIBLE_DEVICES names: numbers among the GPUs that this process may open, or UUIDs."""
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        return tuple(sorted(_uuid(pynvml, name) for name in visible.split(",") if name))
    except pynvml.NVMLError:
        return ()
    finally:
        pynvml.nvmlShutdown()


def _uuid(pynvml: Any, name: str) -> str:
    return str(pynvml.nvmlDeviceGetUUID(handle(pynvml, name))) if name.isdigit() else name


def handle(pynvml: Any, name: str) -> Any:
    """NVML's, by its number among those that this process may open, or its UUID. Raises NVMLError."""
    if name.isdigit():
        return pynvml.nvmlDeviceGetHandleByIndex(int(name))
    return pynvml.nvmlDeviceGetHandleByUUID(name)


class Gpus:
    """The GPUs of this step, through nvidia-ml-py where it and a driver are installed. Every call may hang."""

    def __init__(self) -> None:
        self._handles: list[Any] | None = None

    def any_busy(self) -> bool:
        """NVML's nvmlDeviceGetUtilizationRates, gpu: percent of the past second or so in which a kernel ran."""
        try:
            import pynvml
        except ImportError:
            self._handles = []
            return False
        try:
            if self._handles is None:
                pynvml.nvmlInit()
                self._handles = [handle(pynvml, name) for name in _visible(pynvml.nvmlDeviceGetCount())]
            return any(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu > 0 for handle in self._handles)
        except pynvml.NVMLError:
            self._handles = []
            return False


def _visible(count: int) -> list[str]:
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(i) for i in range(count)] if given is None else [name for name in given.split(",") if name]
