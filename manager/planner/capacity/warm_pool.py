"""What is kept warm, and what that may cost: shadows that wait for their moment, rollouts that can be taken away, and
how long a gang waits for the memory of those who had its nodes before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ....core.phases import STANDBY
from ....core.run_spec import RoleSpec
from ....core.types import AGENT, STANDBY_ROLE, NodeName, ReplicaId, gang_of, natural_sort_key, role_of, standby_role_of
from ...model.queries import workers
from ...model.state import OrphanStep, Replica, State, Status
from ..deadlines import NEVER

Occupancy = dict[NodeName, list[Replica]]
"""who takes room on which node"""
RELEASE_GRACES = 4
"""A gang waits for what still ends so many times ``limits.step_grace``, then goes on without (SIGTERM, the grace and
SIGKILL take one; a cluster that is slow to pass them on, two or three)."""


def occupy(occupancy: Occupancy, node: NodeName, member: Replica) -> None:
    """Whoever prefers this node has its room there already."""
    occupants = occupancy.setdefault(node, [])
    if all(one.id != member.id for one in occupants):
        occupants.append(member)


def waits_for_release(role: RoleSpec) -> bool:
    """Its members are launched only when nothing of their earlier lives, or of those that they drove away, still takes
    memory; and these are ended without grace."""
    return (role.warm and role.standby_shares_node) or role.ranks > 1


def release_deadline(state: State, members: Sequence[Replica], nodes_of_gang: Iterable[NodeName]) -> float:
    """Manager's time (s) until which a gang waits for what still ends: its own earlier lives, wherever they may answer,
    and whoever had its nodes before, for the sake of their memory."""
    if not waits_for_release(state.job.role(members[0].role)):
        return 0.0
    gang_id, nodes = gang_of(members[0].id), set(nodes_of_gang)
    patience = RELEASE_GRACES * state.job.limits.step_grace
    return max((one.since + patience for one in state.orphan_steps.values() if _blocks_gang(state, one, gang_id, nodes)),
               default=0.0)  # fmt: skip


def standbys_released_at(
    state: State, exclusive_standbys: Sequence[Replica], nodes: set[NodeName], promoted_steps: set[str]
) -> float:
    """Manager's time (s) until which whoever goes to these nodes waits for the ``engines`` there, whose room it needs:
    inf while one of them is not asked to end, and then no longer than a gang waits. ``but``: steps that are taken
    over."""
    if any(one.node in nodes and one.step not in promoted_steps for one in exclusive_standbys):
        return NEVER
    patience = RELEASE_GRACES * state.job.limits.step_grace
    ending = (
        one for one in state.orphan_steps.values() if one.node in nodes and is_exclusive(state, one.incarnation.replica)
    )
    return max((one.since + patience for one in ending if state.nodes[one.node].excluded is None), default=0.0)


def is_exclusive(state: State, id: ReplicaId) -> bool:
    """It is a shadow that holds all that one of its role takes of a node."""
    return role_of(id) == STANDBY_ROLE and not state.job.role(standby_role_of(id)).standby_shares_node


def standby_processes(state: State) -> list[Replica]:
    """Those that are believed, whatever they stand for, in the order of their names."""
    found = [one for one in state.replicas.values() if one.role == STANDBY_ROLE and one.is_current]
    return sorted(found, key=lambda one: natural_sort_key(one.id))


def _blocks_gang(state: State, one: OrphanStep, gang_id: ReplicaId, nodes: set[NodeName]) -> bool:
    node = state.nodes.get(one.node)
    if node is None or node.excluded is not None:
        return False
    of_a_role = role_of(one.incarnation.replica) not in (AGENT, STANDBY_ROLE)
    return gang_of(one.incarnation.replica) == gang_id or (of_a_role and one.node in nodes)


def donors(state: State, occupancy: Occupancy) -> list[Replica]:
    """Rollouts that generate, each of which could be taken away: enough others remain."""
    found: list[Replica] = []
    for role in state.job.kind("rollout"):
        at_work = [one for one in workers(state) if one.role == role.name and one.status is Status.JOINED
                   and one.node is not None and one in occupancy.get(one.node, ())]  # fmt: skip
        if role.ranks == 1 and len(at_work) > max(1, role.min_replicas):
            found += at_work
    return found


def ready_standbys_by_node(
    state: State, standbys: Iterable[Replica], usable: set[NodeName]
) -> dict[NodeName, list[Replica]]:
    """Of them those that can become a member at once, by node. ``good``: usable nodes."""
    found: dict[NodeName, list[Replica]] = {}
    for one in standbys:
        is_ready = one.status is Status.JOINED and one.phase == STANDBY and one.step is not None
        if is_ready and one.node in usable and one.allocation == state.nodes[one.node].allocation:
            found.setdefault(one.node, []).append(one)
    return found
