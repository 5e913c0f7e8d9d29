"""Standby processes, the rollouts that can be preempted, and how long a launch waits for memory to be released."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ....core.phases import STANDBY
from ....core.run_spec import RoleSpec
from ....core.types import AGENT, STANDBY_ROLE, NodeName, ReplicaId, gang_of, natural_sort_key, role_of, standby_role_of
from ...model.queries import workers
from ...model.state import OrphanStep, Replica, State, Status
from ..deadlines import NEVER

Occupancy = dict[NodeName, list[Replica]]
"""Replicas that occupy each node."""
RELEASE_GRACES = 4
"""Number of grace periods that a gang waits for steps that are still ending, before it starts anyway. SIGTERM, the
grace and SIGKILL take one; a cluster that delivers them slowly two or three."""


def occupy(occupancy: Occupancy, node: NodeName, member: Replica) -> None:
    """Add the member to the occupants of a node, unless it is one already."""
    occupants = occupancy.setdefault(node, [])
    if all(one.id != member.id for one in occupants):
        occupants.append(member)


def waits_for_release(role: RoleSpec) -> bool:
    """Return whether members of the role start only after earlier occupants have released their memory.

    These are its own earlier incarnations and preempted rollouts; their steps are stopped without a grace.
    """
    return (role.warm and role.standby_shares_node) or role.ranks > 1


def release_deadline(state: State, members: Sequence[Replica], nodes_of_gang: Iterable[NodeName]) -> float:
    """Return the manager's time (s) until which a gang waits for steps that are still ending.

    It waits for its own earlier incarnations on any node that may answer, and for other roles' steps on its new nodes.
    """
    if not waits_for_release(state.job.role(members[0].role)):
        return 0.0
    gang_id, nodes = gang_of(members[0].id), set(nodes_of_gang)
    patience = RELEASE_GRACES * state.job.limits.step_grace
    return max((one.since + patience for one in state.orphan_steps.values() if _blocks_gang(state, one, gang_id, nodes)),
               default=0.0)  # fmt: skip


def standbys_released_at(
    state: State, exclusive_standbys: Sequence[Replica], nodes: set[NodeName], promoted_steps: set[str]
) -> float:
    """Return the manager's time (s) until which launches on these nodes wait for exclusive standby processes.

    It is inf until those have been stopped, then as long as a gang waits. Standby processes whose steps are in
    ``promoted_steps`` are not waited for.
    """
    if any(one.node in nodes and one.step not in promoted_steps for one in exclusive_standbys):
        return NEVER
    patience = RELEASE_GRACES * state.job.limits.step_grace
    ending = (
        one for one in state.orphan_steps.values() if one.node in nodes and is_exclusive(state, one.incarnation.replica)
    )
    return max((one.since + patience for one in ending if state.nodes[one.node].excluded is None), default=0.0)


def is_exclusive(state: State, id: ReplicaId) -> bool:
    """Return whether this is a standby process that takes a node's whole resources for its role."""
    return role_of(id) == STANDBY_ROLE and not state.job.role(standby_role_of(id)).standby_shares_node


def standby_processes(state: State) -> list[Replica]:
    """Return the current standby processes of all roles, in natural order of their names."""
    found = [one for one in state.replicas.values() if one.role == STANDBY_ROLE and one.is_current]
    return sorted(found, key=lambda one: natural_sort_key(one.id))


def _blocks_gang(state: State, one: OrphanStep, gang_id: ReplicaId, nodes: set[NodeName]) -> bool:
    """Return whether a gang waits for the end of this orphan step."""
    node = state.nodes.get(one.node)
    if node is None or node.excluded is not None:
        return False
    of_a_role = role_of(one.incarnation.replica) not in (AGENT, STANDBY_ROLE)
    return gang_of(one.incarnation.replica) == gang_id or (of_a_role and one.node in nodes)


def donors(state: State, occupancy: Occupancy) -> list[Replica]:
    """Return the working rollouts that could be preempted: those of roles with more than the minimum at work."""
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
    """Return the standby processes that can be promoted now, by node; ``usable``: names of usable nodes."""
    found: dict[NodeName, list[Replica]] = {}
    for one in standbys:
        is_ready = one.status is Status.JOINED and one.phase == STANDBY and one.step is not None
        if is_ready and one.node in usable and one.allocation == state.nodes[one.node].allocation:
            found.setdefault(one.node, []).append(one)
    return found
