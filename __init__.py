"""rrl: reinforcement-learning post-training on Slurm that goes on when machines fail.

The worker API is all that a user's trainer or rollout needs::

    import rrl

    with rrl.join() as me:
        ...

It is imported lazily (PEP 562), so that the command line pays nothing for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rrl.roles.worker import Worker as Worker
    from rrl.roles.worker import join as join

__all__ = ["Worker", "join"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from rrl.roles import worker

        return getattr(worker, name)
    raise AttributeError(f"module 'rrl' has no attribute {name!r}")
