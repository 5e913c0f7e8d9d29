"""Tell drains of Slurm nodes apart: Slurm keeps nothing about a drain but its reason, so rrl marks its own there.

The reason is written and read here and nowhere else; everybody else decides by :class:`DrainOwner`.
"""

from __future__ import annotations

from enum import StrEnum

RUN_PREFIX = "rrl:"
"""beginning of the reason of every drain by rrl, of runs and of hooks"""
HOOK_PREFIX = f"{RUN_PREFIX}health:"
"""beginning of the reason of every drain by a prolog or a HealthCheckProgram"""


class DrainOwner(StrEnum):
    """Who drained a node."""

    RUN = "run"
    """a run of rrl, or a person through ``rrl health``"""
    HOOK = "hook"
    """the site's prolog or HealthCheckProgram, with rrl's check"""
    OTHER = "other"
    """somebody else: rrl leaves such a drain alone"""


def drain_owner(reason: str) -> DrainOwner:
    """Return whose drain it is, by the mark at the beginning of its reason."""
    if reason.startswith(HOOK_PREFIX):
        return DrainOwner.HOOK
    return DrainOwner.RUN if reason.startswith(RUN_PREFIX) else DrainOwner.OTHER
