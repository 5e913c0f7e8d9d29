"""Find the GPUs assigned to a role, and whether kernels run on them.

A role reports its GPUs to the manager, which detects two roles on one GPU.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from importlib import import_module

from ...health.readers.base import ACCELERATOR_READERS, AcceleratorReader, ReaderOptions
from ...health.readers.samples import Accelerator
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

    The GPUs are named by UUID if a driver is available, else by Slurm's numbers on this node. The
    result is empty if Slurm assigned no GPUs, as on the local cluster, where roles share the GPUs. The call hangs if
    the driver hangs.
    """
    numbers = tuple(name for name in environ.get(GPUS_ENV, "").split(",") if name)
    if not numbers:
        return ()
    return _uuids(environ.get("CUDA_VISIBLE_DEVICES", "")) or numbers


class NodeGpus:
    """The GPUs of this node, read by the first reader that finds a driver. Every call may hang."""

    def __init__(self) -> None:
        self._candidates = [*ACCELERATOR_READERS.values()]
        self._reader: AcceleratorReader | None = None

    def read(self, names: Sequence[str] | None) -> tuple[Accelerator, ...]:
        """Return what ``AcceleratorReader.read_use`` returns; empty without a driver, and after its first error."""
        while self._candidates:
            try:
                if self._reader is None:
                    module, _, name = self._candidates[0].partition(":")
                    self._reader = getattr(import_module(module), name)(ReaderOptions())
                return self._reader.read_use(names)
            except Exception:  # no such driver, or a failure of it
                self.close()
                del self._candidates[0]
        return ()

    def any_busy(self) -> bool:
        """Return whether a kernel ran on any GPU of this step within about the last second; False without a driver."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = None if visible is None else [name for name in visible.split(",") if name]
        return any(gpu.utilization for gpu in self.read(names))

    def close(self) -> None:
        """Close the reader."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None


def _uuids(visible: str) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs in CUDA_VISIBLE_DEVICES, whose entries are UUIDs or indices of visible GPUs."""
    names = [name for name in visible.split(",") if name]
    numbers = [name for name in names if name.isdigit()]
    gpus = NodeGpus()
    try:
        uuids = {number: gpu.uuid for number, gpu in zip(numbers, gpus.read(numbers), strict=False)}
    finally:
        gpus.close()
    return tuple(sorted(uuids.get(name, name) for name in names)) if all(map(uuids.get, numbers)) else ()
