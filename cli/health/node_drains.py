"""Read which nodes the cluster has drained, and drain nodes for an administrator. All calls block."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterable
from datetime import datetime

from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

from ...cluster.base import NodeState, Refused, Unanswered
from ...cluster.slurm import parsing as text
from ...cluster.slurm.commands import SlurmLimits, execute, lacks_node
from ...cluster.slurm.node_states import node_state, takes_jobs
from ...cluster.slurm.nodes import SlurmNodes
from ...cluster.slurm.readers.command_reader import CommandReader
from ...cluster.slurm.requests import gpus_by_type
from ...core.command_runner import CommandResult
from ...core.drains import DrainOwner, drain_owner
from ...core.types import NodeName
from ...health.report.model import DrainState

MAX_NODES_PER_QUERY = 500
"""Maximum number of nodes in a query by name. For more nodes, all nodes of the cluster are queried."""
MAX_DRAINED_FRACTION = 0.1
"""Maximum share of the cluster's nodes that one command drains. The maximum is never less than one node.

The share is limited, because one mistaken cause can make many requests wrong at the same time.
"""
MAX_UNAVAILABLE_FRACTION = 0.25
"""Maximum share of the cluster's nodes that may be down or drained; above it no node is drained (docs/sources.md, guard
rails)."""
_LIMITS = SlurmLimits()


class SlurmUnavailable(Exception):
    """The cluster could not be queried; the text says why."""


def drain_states(nodes: Iterable[str]) -> dict[str, DrainState]:
    """Return the drain state of each node that Slurm knows. Raises SlurmUnavailable if Slurm cannot be queried."""
    return asyncio.run(_drain_states(sorted(nodes)))


def drain(wanted: Iterable[tuple[str, str]]) -> list[tuple[str, bool, str]]:
    """Drain nodes, given as (node, reason). Returns (node, whether this call drained it, outcome text) for each.

    ``MAX_DRAINED_FRACTION`` limits the nodes that a call drains, and ``MAX_UNAVAILABLE_FRACTION`` can prevent all
    drains. Raises SlurmUnavailable if Slurm cannot be queried.
    """
    return asyncio.run(_drain(list(wanted)))


async def _drain_states(nodes: list[str]) -> dict[str, DrainState]:
    wanted = set(nodes)
    node_arguments = (
        (_folded(nodes),) if len(nodes) <= MAX_NODES_PER_QUERY else ()
    )  # no arguments: one query for all nodes
    ended = await read(("scontrol", "show", "node", "-o", *node_arguments))
    lines = {match[1]: match[0] for match in re.finditer(r"^NodeName=(\S+) .*$", ended.out, re.MULTILINE)}
    if ended.code and not lines and not lacks_node(ended):
        raise SlurmUnavailable(f"scontrol: {error_line(ended)}")
    return {node: _drain_state(text.read_node_info(line), line) for node, line in lines.items() if node in wanted}


def _drain_state(mark: text.NodeInfo, line: str) -> DrainState:
    owner = drain_owner(mark.reason) if mark.draining else None
    whose = "" if owner is None else "foreign" if owner is DrainOwner.OTHER else "rrl"
    reason, by = (mark.reason, mark.reason_by) if mark.draining or mark.set_aside else ("", "")
    partitions = re.search(r" Partitions=(\S+)", line)
    return DrainState(
        mark.state,
        mark.draining,
        whose,
        reason,
        by,
        _boot_time(line),
        _gpus(line),
        tuple(partitions[1].split(",")) if partitions is not None else (),
        owner is DrainOwner.HOOK,
    )


def _gpus(line: str) -> int | None:
    """Return a node's number of GPUs from its ``scontrol`` line; None if Slurm does not manage GPUs on this node.

    ``Gres=gpu:h100:8(S:0-1),nic:4`` gives 8. A node for which the result is None may still have GPUs.
    """
    match = re.search(r" Gres=(\S+)", line)
    return sum(gpus_by_type(match[1]).values()) or None if match is not None else None


def _boot_time(line: str) -> float:
    """Return when the node was booted (s since the epoch) from its ``scontrol`` line; 0 if that is unknown.

    ``BootTime=2026-11-22T01:00:00`` is in the time zone of this machine.
    """
    match = re.search(r" BootTime=(\S+)", line)
    with contextlib.suppress(ValueError, OverflowError, OSError):
        return datetime.fromisoformat(match[1]).timestamp() if match is not None else 0.0
    return 0.0


async def _drain(wanted: list[tuple[str, str]]) -> list[tuple[str, bool, str]]:
    states = await _node_states()
    unavailable = sum(map(_is_unavailable, states.values()))
    max_drains = max(1, int(MAX_DRAINED_FRACTION * len(states)))
    nodes = SlurmNodes(CommandReader(read, write), write)
    outcomes: list[tuple[str, bool, str]] = []
    done = 0
    for node, reason in wanted:
        if node not in states:
            outcomes.append((node, False, "not known to Slurm"))
        elif unavailable > MAX_UNAVAILABLE_FRACTION * len(states):
            refusal = (
                f"{unavailable} of {len(states)} nodes are down or drained already: to drain it anyway, paste the"
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


def _is_unavailable(state: str) -> bool:
    """Return whether the node is down or drained. A node that is powered down to save power counts as available."""
    return node_state(state) in (NodeState.DOWN, NodeState.DRAINING) and not takes_jobs(state)


async def _node_states() -> dict[str, str]:
    ended = await read(("sinfo", "-h", "-N", "-o", "%N %T"))
    if ended.code:
        raise SlurmUnavailable(f"sinfo: {error_line(ended)}")
    return dict(fields for line in ended.out.splitlines() if len(fields := line.split(maxsplit=1)) == 2)


async def read(argv: tuple[str, ...]) -> CommandResult:
    """Run a command that only reads. Raises SlurmUnavailable if there is no Slurm or it does not answer."""
    return await _run(argv, _LIMITS.read_timeout_s)


async def write(argv: tuple[str, ...]) -> CommandResult:
    """Run a command that changes something. Raises SlurmUnavailable, or Unanswered if Slurm may have carried it out."""
    return await _run(argv, _LIMITS.write_timeout_s)


async def _run(argv: tuple[str, ...], timeout_s: float) -> CommandResult:
    try:
        return await execute(argv, timeout_s)
    except Refused as error:
        raise SlurmUnavailable(str(error)) from None
    except Unanswered as error:
        if argv[1] == "update":
            raise
        raise SlurmUnavailable(str(error)) from None


def _folded(nodes: list[str]) -> str:
    try:
        return str(NodeSet(",".join(nodes), resolver=RESOLVER_NOGROUP))
    except NodeSetException:
        return ",".join(nodes)


def error_line(ended: CommandResult) -> str:
    """Return why a command failed, in one line: the last line of its stderr, else its exit code.

    Earlier lines are left out, because in them Slurm's clients only report their attempts.
    """
    lines = [line.strip() for line in ended.err.splitlines() if line.strip()]
    return re.sub(r"^\w+: (?:fatal|error): ", "", lines[-1]) if lines else f"exit code {ended.code}"
