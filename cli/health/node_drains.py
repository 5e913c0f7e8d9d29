"""Read which nodes the cluster has drained, and drain nodes for an administrator or a hook. All calls block."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Collection, Iterable
from datetime import datetime

from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException
from msgspec import Struct

from ...cluster.base import NodeState, Refused, Unanswered
from ...cluster.slurm import parsing as text
from ...cluster.slurm.commands import SlurmLimits, execute, lacks_node
from ...cluster.slurm.node_states import node_state, takes_jobs
from ...cluster.slurm.nodes import NOT_RESPONDING_SUFFIX, SlurmNodes
from ...cluster.slurm.readers.command_reader import CommandReader
from ...cluster.slurm.requests import gpus_by_type
from ...config.health_rules import HookRules
from ...core.command_runner import CommandResult
from ...core.drains import HOOK_PREFIX, DrainOwner, drain_owner
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
DRAIN_SETTLE_S = 2.0
"""Time (s) to wait after a drain until slurmctld's clock has passed the second that is recorded for the drain."""
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
    A node that somebody else has drained stays as it is. Raises SlurmUnavailable if Slurm does not answer or refuses; a
    drain beyond the limit may then remain until the next call.
    """
    return asyncio.run(_drain_by_hook(node, why, rules))


async def _drain_by_hook(node: str, why: str, rules: HookRules) -> HookDrainResult:
    drains = await _hook_drains()
    if node not in drains.owners:
        raise SlurmUnavailable(f"{node} is not known to Slurm")
    nodes = SlurmNodes(CommandReader(_read, _write), _write)
    try:
        if drains.owners[node] is None:
            now = HookDrain(time.time(), node)  # this node's clock may be wrong: the query below decides
            if held_back_reason := over_limit(now, drains.by_hooks.values(), len(drains.owners), rules):
                return HookDrainResult(held_back_reason)
            await nodes.drain(NodeName(node), f"{HOOK_PREFIX} {why}")
            await asyncio.sleep(DRAIN_SETTLE_S)
            drains = await _hook_drains()
        own = drains.by_hooks.get(node)
        if own is None or not (
            held_back_reason := over_limit(own, drains.by_hooks.values(), len(drains.owners), rules)
        ):
            return HookDrainResult(owner=drains.owners.get(node))
        await nodes.undrain(NodeName(node), drains.reasons[node])
    except (Refused, Unanswered) as error:
        raise SlurmUnavailable(str(error)) from None
    return HookDrainResult(held_back_reason)


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

    Queries Slurm for this node only. Raises SlurmUnavailable if Slurm does not answer, refuses, or has no such node.
    """
    return asyncio.run(_undrain_by_hook(node))


async def _undrain_by_hook(node: str) -> bool:
    ended = await _read(("scontrol", "show", "node", "-o", node))
    if ended.code:
        raise SlurmUnavailable(f"scontrol: {_error_line(ended)}")
    try:
        found = text.read_node_info(ended.out)
    except text.Unreadable as error:
        raise SlurmUnavailable(f"scontrol: {error}") from None
    if not found.draining or drain_owner(found.reason) is not DrainOwner.HOOK:
        return False
    nodes = SlurmNodes(CommandReader(_read, _write), _write)
    try:
        await nodes.undrain(NodeName(node), found.reason.removesuffix(NOT_RESPONDING_SUFFIX))
    except (Refused, Unanswered) as error:
        raise SlurmUnavailable(str(error)) from None
    return True


class _HookDrains(Struct):
    """What one query of Slurm shows about the drains of all nodes; the drains by hooks in more detail."""

    owners: dict[str, DrainOwner | None] = {}
    """Who drained each node of the cluster; None for a node that is not drained."""
    by_hooks: dict[str, HookDrain] = {}
    """The present drains by hooks, by node."""
    reasons: dict[str, str] = {}
    """The reasons of the drains in ``by_hooks``, by node."""


async def _hook_drains() -> _HookDrains:
    """Query Slurm once for the drains of all nodes. Raises SlurmUnavailable if this fails."""
    ended = await _read(("sinfo", "-a", "-h", "-N", "-o", "%N|%T|%H|%E"))
    if ended.code:
        raise SlurmUnavailable(f"sinfo: {_error_line(ended)}")
    found = _HookDrains()
    for line in ended.out.splitlines():
        node, state, at, reason = [*line.split("|", 3), "", "", ""][:4]
        found.owners[node] = drain_owner(reason) if "drain" in state.lower() else None
        if found.owners[node] is DrainOwner.HOOK:
            drained_at = 0.0  # if Slurm reports no time, the drain counts as old
            with contextlib.suppress(ValueError):
                drained_at = datetime.fromisoformat(at).timestamp()
            found.by_hooks[node] = HookDrain(drained_at, node)
            found.reasons[node] = reason.strip().removesuffix(NOT_RESPONDING_SUFFIX)
    return found


async def _drain_states(nodes: list[str]) -> dict[str, DrainState]:
    wanted = set(nodes)
    node_arguments = (
        (_folded(nodes),) if len(nodes) <= MAX_NODES_PER_QUERY else ()
    )  # no arguments: one query for all nodes
    ended = await _read(("scontrol", "show", "node", "-o", *node_arguments))
    lines = {match[1]: match[0] for match in re.finditer(r"^NodeName=(\S+) .*$", ended.out, re.MULTILINE)}
    if ended.code and not lines and not lacks_node(ended):
        raise SlurmUnavailable(f"scontrol: {_error_line(ended)}")
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
    nodes = SlurmNodes(CommandReader(_read, _write), _write)
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
    ended = await _read(("sinfo", "-h", "-N", "-o", "%N %T"))
    if ended.code:
        raise SlurmUnavailable(f"sinfo: {_error_line(ended)}")
    return dict(fields for line in ended.out.splitlines() if len(fields := line.split(maxsplit=1)) == 2)


async def _read(argv: tuple[str, ...]) -> CommandResult:
    return await _run(argv, _LIMITS.read_timeout_s)


async def _write(argv: tuple[str, ...]) -> CommandResult:
    return await _run(argv, _LIMITS.write_timeout_s)


async def _run(argv: tuple[str, ...], timeout_s: float) -> CommandResult:
    """Run a Slurm command. Raises SlurmUnavailable if there is no Slurm or it does not answer.

    Raises Unanswered instead if an update got no answer, because Slurm may have carried it out.
    """
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


def _error_line(ended: CommandResult) -> str:
    """Return why a command failed, in one line: the last line of its stderr, else its exit code.

    Earlier lines are left out, because in them Slurm's clients only report their attempts.
    """
    lines = [line.strip() for line in ended.err.splitlines() if line.strip()]
    return re.sub(r"^\w+: (?:fatal|error): ", "", lines[-1]) if lines else f"exit code {ended.code}"
