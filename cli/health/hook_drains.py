"""``rrl health drain-node`` and ``undrain-node``: the drains of the site's hooks.

The node remembers what slurmctld last reported about its drain. So the HealthCheckProgram of a node that was not
drained does not query slurmctld. After a boot this check memory is empty, and the first check queries slurmctld.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from ...cluster.base import Refused, Unanswered
from ...cluster.slurm.nodes import NOT_RESPONDING_SUFFIX
from ...cluster.slurm.parsing import NodeInfo
from ...config.health_rules import HookRules
from ...core.drains import HOOK_PREFIX, DrainOwner
from ...core.types import NodeName, Verdict
from ...health.check_memory import memory_path, read_memory, update_memory
from ...health.node_check import EXIT_CODES
from .check import site_rules, this_node
from .node_drains import NODES, slurm_nodes

DRAIN_SETTLE_S = 2.0
"""Time (s) to wait after a drain until slurmctld's clock has passed the second that is recorded for the drain."""
_MAX_REASON_LENGTH = 150
"""Maximum number of characters of a hook's text in a drain's reason."""


def drain_node(why: str, node: str | None, config: Path | None) -> int:
    """Drain a node that failed its check, for the hooks in examples/health.

    Returns 0 if the node is drained, no matter by whom, 1 if the site's limit on drains by hooks prevented it, 3 if
    Slurm did not answer or refused. The reason for 1 or 3 is printed. Raises UsageError for a mistake in the site's
    rules.
    """
    named = node or this_node()
    reason, rules = " ".join(why.split())[:_MAX_REASON_LENGTH], site_rules(config).hooks
    _remember(named, "unknown")
    try:
        result = drain_by_hook(named, reason, rules)
    except (Refused, Unanswered) as error:
        print(f"not drained: {error}", flush=True)
        return EXIT_CODES[Verdict.UNKNOWN]
    if result.held_back_reason:
        print(f"held back: {result.held_back_reason}", flush=True)
        return 1
    if result.owner is not None:
        _remember(named, "by hook" if result.owner is DrainOwner.HOOK else "no")
    return 0


def undrain_node(node: str | None) -> int:
    """Take back any drain of a node by the hooks, after the node has passed its check again.

    Returns 0 if no drain by the hooks is left, 3 if Slurm did not answer or refused; the reason is printed. A drain by
    anybody else stays. Slurm is not queried if the node remembers that the hooks have not drained it.
    """
    named = node or this_node()
    if named == this_node() and read_memory(memory_path(this_node())).drained == "no":
        return 0
    try:
        undrained = undrain_by_hook(named)
    except (Refused, Unanswered) as error:
        print(f"not undrained: {error}", flush=True)
        return EXIT_CODES[Verdict.UNKNOWN]
    _remember(named, "no")
    if undrained:
        print("undrained", flush=True)
    return 0


def _remember(node: str, drained: Literal["unknown", "no", "by hook"]) -> None:
    """Remember whether the hooks have drained ``node``, if it is this node; for another node, do nothing."""
    if node == this_node():
        with contextlib.suppress(OSError):  # if nothing can be stored, Slurm is queried again
            update_memory(memory_path(this_node()), lambda memory: replace(memory, drained=drained))


class HookDrain(Struct, frozen=True):
    """A node that a hook has drained."""

    at: float
    """Time of the drain in whole seconds since 1970, according to slurmctld's clock."""
    node: str


class HookDrainResult(Struct, frozen=True):
    """The result of :func:`drain_by_hook`."""

    held_back_reason: str = ""
    """Why the node is not drained; empty if it is drained."""
    owner: DrainOwner | None = None
    """Who drained the node, according to Slurm; None if Slurm does not show a drain."""


def drain_by_hook(node: str, why: str, rules: HookRules) -> HookDrainResult:
    """Drain a node whose check failed, within the limit that all hooks of the cluster share (:func:`over_limit`).

    If a drain of this node by a hook exceeds the limit, undo that drain, whether this call or an earlier call made it.
    A node that somebody else has drained stays as it is. Raises Unanswered or Refused if Slurm does not answer or
    refuses; a drain beyond the limit may then remain until the next call.
    """
    return asyncio.run(_drain_by_hook(NodeName(node), why, rules))


async def _drain_by_hook(node: NodeName, why: str, rules: HookRules) -> HookDrainResult:
    known = await NODES.node_infos()
    if node not in known:
        raise Refused(f"{node} is not known to Slurm")
    if known[node].drain_owner is None:
        now = HookDrain(time.time(), node)  # this node's clock may be wrong: the query below decides
        if held_back_reason := over_limit(now, _by_hooks(known).values(), len(known), rules):
            return HookDrainResult(held_back_reason)
        await slurm_nodes().drain(node, f"{HOOK_PREFIX} {why}")
        await asyncio.sleep(DRAIN_SETTLE_S)
        known = await NODES.node_infos()
    drains = _by_hooks(known)
    if node not in drains or not (held_back_reason := over_limit(drains[node], drains.values(), len(known), rules)):
        return HookDrainResult(owner=known[node].drain_owner if node in known else None)
    await slurm_nodes().undrain(node, known[node].reason.removesuffix(NOT_RESPONDING_SUFFIX))
    return HookDrainResult(held_back_reason)


def _by_hooks(known: Mapping[NodeName, NodeInfo]) -> dict[NodeName, HookDrain]:
    """Return the present drains by hooks. A drain without a time counts as old."""
    by_hooks = {node: info for node, info in known.items() if info.drain_owner is DrainOwner.HOOK}
    return {node: HookDrain(info.reason_at, node) for node, info in by_hooks.items()}


def over_limit(own: HookDrain, drains: Collection[HookDrain], nodes: int, rules: HookRules) -> str:
    """Return why the drain ``own`` exceeds the limit, or an empty string if it may remain.

    Slurm records the drains by hooks: a node drained by a hook is in state DRAIN, and its reason begins with
    :data:`~rrl.core.drains.HOOK_PREFIX`. Only root, SlurmUser and administrators can set the state and the reason. So
    no user can forge a drain by a hook. To exhaust the limit, a user must make as many nodes fail their check as the
    limit permits.

    Hooks run on all nodes at the same time and do not communicate. Each hook drains its own node first, and waits until
    Slurm's clock has passed the second of this drain. Then it ranks all drains by hooks in the order of (time, node
    name). A hook whose drain ranks beyond the limit removes its drain. When a hook reads the list of drains, the list
    contains all drains that rank before the hook's own drain. So exactly as many drains remain as the limit permits,
    regardless of the order in which hooks read the list.

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


def undrain_by_hook(node: str) -> bool:
    """Remove a drain of the node by a hook, and return whether there was such a drain.

    Queries Slurm for this node only. Raises Unanswered if Slurm does not answer, Refused if it has no such node.
    """
    return asyncio.run(_undrain_by_hook(NodeName(node)))


async def _undrain_by_hook(node: NodeName) -> bool:
    found = await NODES.node(node)
    if found.drain_owner is not DrainOwner.HOOK:
        return False
    await slurm_nodes().undrain(node, found.reason.removesuffix(NOT_RESPONDING_SUFFIX))
    return True
