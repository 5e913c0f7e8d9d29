"""Limit how many nodes Slurm's hooks (prolog, epilog and HealthCheckProgram) may drain. The module runs no command.

Slurm records the drains by hooks: a node drained by a hook is in state DRAIN, and its reason begins with
:data:`~rrl.core.drains.HOOK_PREFIX`. Only root, SlurmUser and administrators can set the state and the reason. So no
user can forge a drain by a hook. To exhaust the limit, a user must make as many nodes fail their check as the limit
permits.

Hooks run on all nodes at the same time and do not communicate. Each hook drains its own node first, and waits until
Slurm's clock has passed the second of this drain. Then it ranks all drains by hooks in the order of (time, node name).
A hook whose drain ranks beyond the limit removes its drain. When a hook reads the list of drains, the list contains all
drains that rank before the hook's own drain. So exactly as many drains remain as the limit permits, regardless of the
order in which hooks read the list.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec import Struct

from ..config.health_rules import HookRules


class HookDrain(Struct, frozen=True):
    """A node that a hook has drained."""

    at: float
    """Time of the drain in whole seconds since 1970, according to slurmctld's clock."""
    node: str


def over_limit(own: HookDrain, drains: Collection[HookDrain], nodes: int, rules: HookRules) -> str:
    """Return why the drain ``own`` exceeds the limit, or an empty string if it may remain.

    Args:
        own: Drain of the node on which the hook runs.
        drains: All nodes that hooks have drained, with or without ``own``.
        nodes: Number of nodes in the cluster.
        rules: Limits on drains by hooks.
    """
    earlier = [drain.at for drain in drains if (drain.at, drain.node) < (own.at, own.node)]
    before, lately = len(earlier), sum(at > own.at - rules.window for at in earlier)
    if lately >= max(1, int(rules.share * nodes)):
        return f"hooks have drained {lately} of {nodes} nodes within {rules.window:g} s (hooks.share)"
    if before >= max(1, int(rules.standing * nodes)):
        return f"{before} of {nodes} nodes are still drained by hooks (hooks.standing)"
    return ""
