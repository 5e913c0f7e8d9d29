"""Limit how many nodes the prolog and the HealthCheckProgram may drain. Pure.

The limit's memory is Slurm itself: a drain by a hook is a node in state DRAIN whose reason begins with
:data:`~rrl.health.drains.HOOK_PREFIX`, and only root, SlurmUser and administrators can set either. No file is shared,
so no user can forge drains, or use them up without making that many nodes fail their check.

Hooks run on all nodes at the same time and know nothing of each other. Each hook drains its own node first, waits until
Slurm's clock has passed that second, and then ranks all drains by hooks by (time, name). A hook whose drain ranks
beyond the limit takes it back. All drains that rank before its own are in the list that a hook reads, so exactly as
many drains remain as the limit permits, in whatever order the hooks read.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec import Struct

from ..config.health_rules import HookRules


class HookDrain(Struct, frozen=True):
    """A node that stands drained by a hook."""

    at: float
    """when it was drained, in whole s since 1970, by slurmctld's clock"""
    node: str


def over_limit(own: HookDrain, drains: Collection[HookDrain], nodes: int, rules: HookRules) -> str:
    """Return why the drain ``own`` exceeds the limit, or an empty string if it may stand.

    ``drains``: all that stand, with or without ``own``. ``nodes``: how many the cluster has.
    """
    earlier = [drain.at for drain in drains if (drain.at, drain.node) < (own.at, own.node)]
    before, lately = len(earlier), sum(at > own.at - rules.window for at in earlier)
    if lately >= max(1, int(rules.share * nodes)):
        return f"hooks have drained {lately} of {nodes} nodes within {rules.window:g} s (hooks.share)"
    if before >= max(1, int(rules.standing * nodes)):
        return f"{before} of {nodes} nodes stand drained by hooks (hooks.standing)"
    return ""
