"""Find out whether a run of rrl, a site hook of rrl, or another party drained a Slurm node.

Slurm stores only the reason of a drain, so rrl marks its own drains at the beginning of that text. Only this module
writes and parses the mark; all other code uses :class:`DrainOwner`.
"""

from __future__ import annotations

from enum import StrEnum

RUN_PREFIX = "rrl:"
"""Beginning of the reason of every drain by rrl, whether by a run or by a hook."""
HOOK_PREFIX = f"{RUN_PREFIX}health:"
"""Beginning of the reason of every drain by a hook: a prolog, an epilog or a HealthCheckProgram."""


class DrainOwner(StrEnum):
    """The origin of a node's drain."""

    RUN = "run"
    """A run of rrl, or a person through ``rrl health``."""
    HOOK = "hook"
    """One of the site's hooks (prolog, epilog, HealthCheckProgram), through rrl's node check."""
    OTHER = "other"
    """Another party; rrl never removes such a drain."""


def drain_owner(reason: str) -> DrainOwner:
    """Return the owner of a drain, according to the mark at the beginning of its ``reason``."""
    if reason.startswith(HOOK_PREFIX):
        return DrainOwner.HOOK
    return DrainOwner.RUN if reason.startswith(RUN_PREFIX) else DrainOwner.OTHER
