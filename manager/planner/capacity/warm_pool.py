"""Standby processes, the rollouts that can be displaced, and how long a launch waits for memory to be released."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ....core.phases import STANDBY
from ....core.run_spec import RoleSpec
from ....core.types import GUEST_ROLE, STANDBY_ROLE, NodeName, ReplicaId, gang_of, is_support, natural_sort_key, role_of
from ...model.queries import place_of
from ...model.state import OrphanStep, Replica, State, Status

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

    Earlier occupants are the role's own earlier incarnations and displaced rollouts; their steps are stopped without a
    grace.
    """
    return role.warm or role.ranks > 1


def release_deadline(state: State, members: Sequence[Replica], nodes_of_gang: Iterable[NodeName]) -> float:
    """Return the manager's time (s) until which a gang waits for steps that are still ending.

    A gang of :func:`waits_for_release` waits for its own earlier incarnations on all nodes that may still work, and for
    other roles' steps on its new nodes. Any other replica waits only for rollouts that have left its node to it. A
    replica with GPUs or nodes of its own also waits for guests on its nodes: a stopped guest holds GPUs for ever, and
    the cluster keeps nobody off them.
    """
    role, nodes = state.job.role(members[0].role), set(nodes_of_gang)
    gang_id = gang_of(members[0].id) if waits_for_release(role) else None
    patience = RELEASE_GRACES * state.job.limits.step_grace
    return max(
        (
            orphan.since + patience
            for orphan in state.orphan_steps.values()
            if _blocks_gang(state, orphan, role, gang_id, nodes)
        ),
        default=0.0,
    )


def has_left(state: State, orphan: OrphanStep) -> bool:
    """Return whether the orphan step is of a rollout that does not return to the step's node."""
    id = orphan.incarnation.replica
    if not state.job.traits_of(id).may_be_displaced:
        return False
    rollout = state.replicas.get(id)
    return rollout is None or place_of(rollout) != orphan.node


def standby_processes(state: State) -> list[Replica]:
    """Return the current standby processes, in natural order of their names."""
    standbys = [standby for standby in state.replicas.values() if standby.role == STANDBY_ROLE and standby.is_current]
    return sorted(standbys, key=lambda standby: natural_sort_key(standby.id))


def _blocks_gang(
    state: State, orphan: OrphanStep, role: RoleSpec, gang_id: ReplicaId | None, nodes: set[NodeName]
) -> bool:
    """Return whether replicas of a role wait for the end of this orphan step; ``gang_id`` as in release_deadline."""
    node = state.nodes.get(orphan.node)
    if node is None or node.excluded is not None:
        return False
    if role_of(orphan.incarnation.replica) == GUEST_ROLE:
        return orphan.node in nodes and (role.exclusive or role.per_member.gpus > 0)
    if gang_id is None:
        return orphan.node in nodes and has_left(state, orphan) and not role.traits.may_be_displaced
    of_a_role = not is_support(orphan.incarnation.replica)
    return gang_of(orphan.incarnation.replica) == gang_id or (of_a_role and orphan.node in nodes)


def displaceable(state: State) -> dict[ReplicaId, int]:
    """Return the working rollouts that could be displaced, each with how many of its role could be at the same time.

    These are all working rollouts of each role that has more working rollouts than its minimum.
    """
    found: dict[ReplicaId, int] = {}
    for role in (role for role in state.job.roles if role.traits.may_be_displaced and role.ranks == 1):
        at_work = [
            rollout
            for rollout in state.workers
            if rollout.role == role.name and rollout.status is Status.JOINED and rollout.node is not None
        ]
        if (most := len(at_work) - max(1, role.min_replicas)) > 0:
            found |= {rollout.id: most for rollout in at_work}
    return found


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
