"""The manager's repairs in a simplified form, which suffices to show the effect of a wrong finding."""

from __future__ import annotations

from math import inf

from rrl.benchmarks.scenarios.actors import Gang, Member, Node, members_of, node_named
from rrl.benchmarks.scenarios.world import World
from rrl.core.types import STANDBY_ROLE, NodeName, standby_id

_PER_NODE = 2
"""After this number of restarts in place on one node within the window, the replica moves (recovery.per_node)."""
_WINDOW = 600.0
"""Window in s (recovery.window)."""


def restart(world: World, gang: Gang) -> None:
    """Fence and kill all members of the gang, and launch it again.

    A member starts on its node, or on another node if its node is excluded or has used up its restarts.
    """
    if gang.launch_at < inf:
        return
    now = world.now
    for member in gang.members:
        member.ended = True
        world.members_by_incarnation.pop(member.incarnation, None)
        world.judge.forget(member.incarnation, world.clock)
        world.judge.killed(member.incarnation, member.node.name, world.clock)
        gang.restarts.append((now, member.node.name))
    gang.incarnation += 1
    gang.random = world.chance(f"{gang.id}:{gang.incarnation}")
    gang.joined, gang.joins_at = False, inf
    gang.members = members_of(
        gang.id, gang.incarnation, [one.node for one in gang.members], gang.table.gpus or 0, gang.members[0].probed
    )
    waits = [_settle(world, gang, member) for member in gang.members]
    standbys = [world.gangs.get(standby_id(member.node.name)) for member in gang.members]
    if gang.table.standby and all(one is not None and one.alive for one in standbys):
        gang.promoted_from = [one.members[0].incarnation for one in standbys if one is not None]
        for one in standbys:
            if one is not None:
                restart(world, one)
    gang.launch_at = now + max(waits) + world.scenario.cluster.restart.draw(gang.random)


def exclude(world: World, node: Node) -> None:
    """Exclude a node for the rest of the run; its replicas start on other nodes."""
    node.excluded = True
    world.spares = [one for one in world.spares if one is not node]
    for gang in [one for one in world.gangs.values() if one.members[0].node is node and one.role == STANDBY_ROLE]:
        del world.gangs[gang.id]
    for gang in list(world.gangs.values()):
        if any(member.node is node for member in gang.members):
            if gang.launch_at == inf:
                restart(world, gang)
            else:
                gang.launch_at = max(gang.launch_at, world.now + max(_settle(world, gang, one) for one in gang.members))
    world.judge.forget_node(node.name, world.clock)


def agent_ends(world: World, node: Node, back_after: float) -> None:
    """End the agent; ``back_after`` s later another agent runs on its node."""
    node.agent_until = world.now
    if back_after < inf:
        world.later(world.now + back_after, lambda: restart_agent(world, node))


def restart_agent(world: World, node: Node) -> None:
    world.judge.forget(node.agent, world.clock)
    node.agent_returns()
    world.judge.launched(node.agent, node.name, world.clock)


def _settle(world: World, gang: Gang, member: Member) -> float:
    """Choose the node of the member's next incarnation, and return the time (s) until it can start there."""
    node = member.node
    often = sum(name == node.name and world.now - at < _WINDOW for at, name in gang.restarts) > _PER_NODE
    if not node.excluded and not (often and world.spares):
        return 0.0
    if world.spares:
        member.node = world.spares.pop(0)
        return 0.0
    number = next(n for n in range(1, 10_000) if NodeName(f"r{n}") not in world.nodes)
    member.node = node_named(f"r{number}", world.seed)
    world.nodes[member.node.name] = member.node
    return world.scenario.cluster.allocation.draw(world.random)
