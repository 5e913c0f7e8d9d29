"""Read which nodes the cluster has drained, and drain nodes for an administrator. All calls block."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable

from ...cluster.base import NodeState, Refused, Unanswered
from ...cluster.slurm.commands import SlurmLimits, execute
from ...cluster.slurm.node_states import node_state, takes_jobs
from ...cluster.slurm.nodes import SlurmNodes
from ...cluster.slurm.parsing import NodeInfo
from ...cluster.slurm.readers.command_reader import CommandReader
from ...core.drains import DrainOwner
from ...core.types import NodeName
from ...health.report.model import DrainState

MAX_DRAINED_FRACTION = 0.1
"""Maximum share of the cluster's nodes that one command drains. The maximum is never less than one node.

The share is limited, because one mistaken cause can make many requests wrong at the same time.
"""
MAX_UNAVAILABLE_FRACTION = 0.25
"""Maximum share of the cluster's nodes that may be down or drained; above it no node is drained (docs/sources.md, guard
rails)."""
_LIMITS = SlurmLimits()
NODES = CommandReader.with_limits(_LIMITS)


def drain_states(nodes: Collection[str]) -> dict[str, DrainState]:
    """Return the drain state of each node that Slurm knows. Raises Refused or Unanswered if Slurm cannot be queried."""
    return {node: _drain_state(info) for node, info in asyncio.run(NODES.node_infos()).items() if node in nodes}


def drain(wanted: Iterable[tuple[str, str]]) -> list[tuple[str, bool, str]]:
    """Drain nodes, given as (node, reason). Returns (node, whether this call drained it, outcome text) for each.

    ``MAX_DRAINED_FRACTION`` limits the nodes that a call drains, and ``MAX_UNAVAILABLE_FRACTION`` can prevent all
    drains. Raises Refused or Unanswered if Slurm cannot be queried.
    """
    return asyncio.run(_drain(list(wanted)))


def slurm_nodes() -> SlurmNodes:
    """Return the object that drains and undrains nodes."""
    return SlurmNodes(NODES, lambda argv: execute(argv, _LIMITS.write_timeout_s))


def _drain_state(info: NodeInfo) -> DrainState:
    owner = info.drain_owner
    reason, by = (info.reason, info.reason_by) if info.draining or info.set_aside else ("", "")
    return DrainState(
        info.state,
        info.draining,
        "" if owner is None else "foreign" if owner is DrainOwner.OTHER else "rrl",
        reason,
        by,
        info.booted,
        info.gpus,
        info.partitions,
        owner is DrainOwner.HOOK,
    )


async def _drain(wanted: list[tuple[str, str]]) -> list[tuple[str, bool, str]]:
    known = await NODES.node_infos()
    unavailable = sum(map(_is_unavailable, known.values()))
    max_drains = max(1, int(MAX_DRAINED_FRACTION * len(known)))
    nodes = slurm_nodes()
    outcomes: list[tuple[str, bool, str]] = []
    done = 0
    for node, reason in wanted:
        if node not in known:
            outcomes.append((node, False, "not known to Slurm"))
        elif unavailable > MAX_UNAVAILABLE_FRACTION * len(known):
            refusal = (
                f"{unavailable} of {len(known)} nodes are down or drained already: to drain it anyway, paste the"
                " command that rrl health drain-requests prints"
            )
            outcomes.append((node, False, refusal))
        elif done >= max_drains:
            outcomes.append(
                (node, False, f"the limit of this command is reached ({done} drained): run it again for the others")
            )
        else:
            try:
                await nodes.drain(NodeName(node), reason)
                outcomes.append((node, True, f"drained: {reason}"))
                done, unavailable = done + 1, unavailable + 1
            except (Refused, Unanswered) as error:
                outcomes.append((node, False, str(error)))
    return outcomes


def _is_unavailable(info: NodeInfo) -> bool:
    """Return whether the node is down or drained. A node that is powered down to save power counts as available."""
    return node_state(info.state) in (NodeState.DOWN, NodeState.DRAINING) and not takes_jobs(info.state)
