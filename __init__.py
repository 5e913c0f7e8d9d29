"""rrl: reinforcement-learning post-training on Slurm that goes on when machines fail.

The worker API is all that a user's trainer or rollout needs::

    import rrl

    with rrl.join() as me:
        ...

It is imported lazily (PEP 562), so that the command line pays nothing for it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rrl.roles.models.tensors import pack as pack
    from rrl.roles.models.tensors import unpack as unpack
    from rrl.roles.trajectories.types import Batch as Batch
    from rrl.roles.trajectories.types import Segment as Segment
    from rrl.roles.worker.api import Worker as Worker
    from rrl.roles.worker.api import join as join

_HOMES = {
    "join": "rrl.roles.worker.api",
    "Worker": "rrl.roles.worker.api",
    "Batch": "rrl.roles.trajectories.types",
    "Segment": "rrl.roles.trajectories.types",
    "pack": "rrl.roles.models.tensors",
    "unpack": "rrl.roles.models.tensors",
}
__all__ = ["Batch", "Segment", "Worker", "join", "pack", "unpack"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'rrl' has no attribute {name!r}")
