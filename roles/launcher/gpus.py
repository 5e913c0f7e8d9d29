"""Find the GPUs assigned to a role, and whether kernels run on them.

A role reports its GPUs to the manager, which detects two roles on one GPU.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any

from .environment import GPUS_ENV

DRIVER_TIMEOUT_S = 5.0
"""Timeout (s) for reading the GPUs' names from the driver. After the timeout, a role joins without naming its GPUs."""


async def assigned_gpus_with_timeout(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the result of :func:`assigned_gpus`, or an empty tuple if the driver does not answer in time."""
    try:
        async with asyncio.timeout(DRIVER_TIMEOUT_S):  # Python 3.11's wait_for may lose a cancellation
            return await asyncio.to_thread(assigned_gpus, environ)
    except TimeoutError:
        return ()


def assigned_gpus(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the GPUs that Slurm assigned to this step.

    The GPUs are named by UUID if nvidia-ml-py and a driver are available, else by Slurm's numbers on this node. The
    result is empty if Slurm assigned no GPUs, as on the local cluster, where roles share the GPUs. The call hangs if
    the driver hangs.
    """
    numbers = tuple(name for name in environ.get(GPUS_ENV, "").split(",") if name)
    if not numbers:
        return ()
    return _uuids(environ.get("CUDA_VISIBLE_DEVICES", "")) or numbers


def open_nvml() -> Any:
    """Open a session of NVML and return nvidia-ml-py; None if it is not installed or finds no driver. May hang."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _uuids(visible: str) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs in CUDA_VISIBLE_DEVICES, whose entries are UUIDs or indices of visible GPUs."""
    pynvml = open_nvml()
    if pynvml is None:
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
    """Return NVML's handle of the GPU ``name``: a UUID, or a number among the GPUs that this process may open.

    Raises NVMLError if NVML does not find the GPU.
    """
    if name.isdigit():
        return pynvml.nvmlDeviceGetHandleByIndex(int(name))
    return pynvml.nvmlDeviceGetHandleByUUID(name)


class Gpus:
    """The GPUs of this step, queried through nvidia-ml-py if it is installed with a driver. Every call may hang."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: list[Any] | None = None

    def any_busy(self) -> bool:
        """Return whether a kernel ran on any of the GPUs within about the last second.

        The source is ``gpu`` of NVML's nvmlDeviceGetUtilizationRates. Without NVML the answer is False.
        """
        if self._handles is None:
            self._nvml = open_nvml()
        if self._nvml is None:
            self._handles = []
            return False
        try:
            if self._handles is None:
                names = _visible(self._nvml.nvmlDeviceGetCount())
                self._handles = [handle(self._nvml, name) for name in names]
            return any(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu > 0 for handle in self._handles)
        except self._nvml.NVMLError:
            self._handles = []
            return False


def _visible(count: int) -> list[str]:
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(i) for i in range(count)] if names is None else [name for name in names.split(",") if name]
