"""Which GPUs a role has got: so that two roles that were given the same one are found out."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any

from rrl.roles.environment import GPUS_ENV

DRIVER_WITHIN = 5.0
"""s for the driver to say which GPUs these are; one that hangs keeps nobody from joining"""


async def held_gpus_within(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """As :func:`held_gpus`; nothing where the driver does not answer."""
    try:
        async with asyncio.timeout(DRIVER_WITHIN):  # Python 3.11's wait_for may forget a cancellation
            return await asyncio.to_thread(held_gpus, environ)
    except TimeoutError:
        return ()


def held_gpus(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
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
    return str(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(int(name)))) if name.isdigit() else name
