"""Standby processes, the rollouts that can be preempted, and how long a launch waits for memory to be released."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ....core.phases import STANDBY
from ....core.run_spec import RoleSpec
from ....core.types import STANDBY_ROLE, NodeName, ReplicaId, gang_of, is_support, natural_sort_key, role_of
from ...model.queries import shares_node
from ...model.state import OrphanStep, Replica, State, Status
from ..deadlines import NEVER

Occupancy = dict[NodeName, list[Replica]]
"""Replicas that occupy each node."""
RELEASE_GRACES = 4
"""Number of grace periods for which a gang waits for ending steps before it starts anyway. A stop (SIGTERM, grace,
SIGKILL) takes one grace period, or two to three if the cluster delivers signals slowly."""


def occupy(occupancy: Occupancy, node: NodeName, member: Replica) -> None:
    """Add the member to the occupants of a node, unless it is an occupant already."""
    occupants = occupancy.setdefault(node, [])
    if all(occupant.id != member.id for occupant in occupants):
        occupants.append(member)


def waits_for_release(role: RoleSpec) -> bool:
    """Return whether members of the role start only after earlier occupants have released their memory.

    Earlier occupants are the role's own earlier incarnations and preempted rollouts; their steps are stopped without a
    grace.
    """
    return (role.warm and role.standby_shares_node) or role.ranks > 1


def release_deadline(state: State, members: Sequence[Replica], nodes_of_gang: Iterable[NodeName]) -> float:
    """Return the manager's time (s) until which a gang waits for steps that are still ending.

    The gang waits for its own earlier incarnations on all nodes that may still work, and for other roles' steps on its
    new nodes.
    """
    if not waits_for_release(state.job.role(members[0].role)):
        return 0.0
    gang_id, nodes = gang_of(members[0].id), set(nodes_of_gang)
    patience = RELEASE_GRACES * state.job.limits.step_grace
    return max(
        (
            orphan.since + patience
            for orphan in state.orphan_steps.values()
            if _blocks_gang(state, orphan, gang_id, nodes)
        ),
        default=0.0,
    )


def standbys_released_at(
    state: State, exclusive_standbys: Sequence[Replica], nodes: set[NodeName], promoted_steps: set[str]
) -> float:
    """Return the manager's time (s) until which launches on these nodes wait for exclusive standby processes to end.

    The time is inf until these standby processes are being stopped. After that, launches wait for the ends of these
    processes at most as long as a gang waits for earlier occupants. Standby processes whose steps are in
    ``promoted_steps`` do not count.
    """
    if any(standby.node in nodes and standby.step not in promoted_steps for standby in exclusive_standbys):
        return NEVER
    patience = RELEASE_GRACES * state.job.limits.step_grace
    ending = (
        orphan
        for orphan in state.orphan_steps.values()
        if orphan.node in nodes and is_exclusive(state, orphan.incarnation.replica)
    )
    return max((orphan.since + patience for orphan in ending if state.nodes[orphan.node].excluded is None), default=0.0)


def is_exclusive(state: State, id: ReplicaId) -> bool:
    """Return whether this is a standby process with resources of its own: as many as a member of its role has."""
    return role_of(id) == STANDBY_ROLE and not shares_node(state.job, id)


def standby_processes(state: State) -> list[Replica]:
    """Return the current standby processes of all roles, in natural order of their names."""
    standbys = [standby for standby in state.replicas.values() if standby.role == STANDBY_ROLE and standby.is_current]
    return sorted(standbys, key=lambda standby: natural_sort_key(standby.id))


def _blocks_gang(state: State, orphan: OrphanStep, gang_id: ReplicaId, nodes: set[NodeName]) -> bool:
    """Return whether a gang waits for the end of this orphan step."""
    node = state.nodes.get(orphan.node)
    if node is None or node.excluded is not None:
        return False
    of_a_role = not is_support(orphan.incarnation.replica)
    return gang_of(orphan.incarnation.replica) == gang_id or (of_a_role and orphan.node in nodes)


def donors(state: State, occupancy: Occupancy) -> list[Replica]:
    """Return the rollouts that could be preempted.

    These are all working rollouts of each role that has more working rollouts than its minimum.
    """
    spareable: list[Replica] = []
    for role in (role for role in state.job.roles if role.traits.may_be_displaced and role.ranks == 1):
        at_work = [
            rollout
            for rollout in state.workers
            if rollout.role == role.name
            and rollout.status is Status.JOINED
            and rollout.node is not None
            and rollout in occupancy.get(rollout.node, ())
        ]
        if len(at_work) > max(1, role.min_replicas):
            spareable += at_work
    return spareable


def ready_standbys_by_node(
    state: State, standbys: Iterable[Replica], usable: set[NodeName]
) -> dict[NodeName, list[Replica]]:
    """Return the standby processes on ``usable`` nodes that can be promoted now, by node."""
    ready: dict[NodeName, list[Replica]] = {}
    for standby in standbys:
        is_ready = standby.status is Status.JOINED and standby.phase == STANDBY and standby.step is not None
        if is_ready and standby.node in usable and standby.allocation == state.nodes[standby.node].allocation:
            ready.setdefault(standby.node, []).append(standby)
    return ready
