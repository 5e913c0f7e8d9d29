"""Places processes on nodes when a scenario begins."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from rrl.benchmarks.scenarios.actors import Gang, Node, members_of, node_named
from rrl.benchmarks.scenarios.format import RoleTable, Scenario
from rrl.benchmarks.scenarios.rhythms import PROBED_ROLES, SMALL, STANDBY_RHYTHM, roles_of
from rrl.core.types import STANDBY_ROLE, NodeName, ReplicaId, replica_id, standby_id

_SOON = 2.0
"""Seconds within which all processes are launched."""


def placed(
    scenario: Scenario, seed: int, chance: Callable[[str], Random]
) -> tuple[dict[NodeName, Node], dict[ReplicaId, Gang], list[Node]]:
    """Return the nodes, the gangs and the spare nodes of a scenario.

    Each process has its own node, except that a role may name its nodes, and that the store, the reward role and roles
    without GPUs share one node.
    """
    nodes: dict[NodeName, Node] = {}
    gangs: dict[ReplicaId, Gang] = {}
    shared: Node | None = None

    def node(name: str = "") -> Node:
        name = name or next(each for n in range(1, 10_000) if NodeName(each := f"n{n}") not in nodes)
        return nodes.setdefault(NodeName(name), node_named(name, seed))

    for role, table in roles_of(scenario).items():
        named = iter(table.on)
        for index in range(table.replicas):
            gang_nodes: list[Node] = []
            for _ in range(table.ranks):
                if (name := next(named, "")) or not (role in SMALL or not table.gpus):
                    gang_nodes.append(node(name))
                else:
                    shared = shared or node()
                    gang_nodes.append(shared)
            gang = replica_id(role, index)
            probed = table.probed if table.probed is not None else role in PROBED_ROLES
            random = chance(f"{gang}:1")
            gangs[gang] = Gang(gang, role, table, members_of(gang, 1, gang_nodes, table.gpus or 0, probed), random)
            gangs[gang].launch_at = random.uniform(0.0, _SOON)
            for one in gang_nodes if table.standby else ():
                standby = standby_id(one.name)
                waiting = RoleTable(rhythm=STANDBY_RHYTHM, once=(), starts=table.starts)
                members = members_of(standby, 1, [one], 0, probed=False)
                gangs[standby] = Gang(standby, STANDBY_ROLE, waiting, members, chance(f"{standby}:1"))
                gangs[standby].launch_at = gangs[gang].launch_at
    return nodes, gangs, [node() for _ in range(scenario.cluster.spares)]
