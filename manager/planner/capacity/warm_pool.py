"""What is kept warm, and what that may cost: shadows that wait for their moment, rollouts that can be taken away, and
how long a gang waits for the memory of those who had its nodes before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ....core.phases import STANDBY
from ....core.run_spec import RoleView
from ....core.types import AGENT, SHADOW, NodeName, ReplicaId, gang_of, natural, role_of, stands_for
from ...model.queries import workers
from ...model.state import Lingering, Replica, State, Status
from ..deadlines import NEVER

Taken = dict[NodeName, list[Replica]]
"""who takes room on which node"""
ENDING_GRACES = 4
"""A gang waits for what still ends so many times ``limits.step_grace``, then goes on without (SIGTERM, the grace and
SIGKILL take one; a cluster that is slow to pass them on, two or three)."""


def take(taken: Taken, node: NodeName, member: Replica) -> None:
    """Whoever prefers this node has its room there already."""
    there = taken.setdefault(node, [])
    if all(one.id != member.id for one in there):
        there.append(member)


def patient(role: RoleView) -> bool:
    """Its members are launched only when nothing of their earlier lives, or of those that they drove away, still takes
    memory; and these are ended without grace."""
    return (role.warm and role.beside) or role.ranks > 1


def still_ending(state: State, members: Sequence[Replica], homes: Iterable[NodeName]) -> float:
    """Manager's time (s) until which a gang waits for what still ends: its own earlier lives, wherever they may answer,
    and whoever had its nodes before, for the sake of their memory."""
    if not patient(state.job.role(members[0].role)):
        return 0.0
    whole, nodes = gang_of(members[0].id), set(homes)
    patience = ENDING_GRACES * state.job.limits.step_grace
    return max((one.since + patience for one in state.lingering.values() if _concerns(state, one, whole, nodes)),
               default=0.0)  # fmt: skip


def engines_gone(state: State, engines: Sequence[Replica], nodes: set[NodeName], but: set[str]) -> float:
    """Manager's time (s) until which whoever goes to these nodes waits for the ``engines`` there, whose room it needs:
    inf while one of them is not asked to end, and then no longer than a gang waits. ``but``: steps that are taken
    over."""
    if any(one.node in nodes and one.step not in but for one in engines):
        return NEVER
    patience = ENDING_GRACES * state.job.limits.step_grace
    ending = (one for one in state.lingering.values() if one.node in nodes and holds_room(state, one.life.replica))
    return max((one.since + patience for one in ending if state.nodes[one.node].excluded is None), default=0.0)


def holds_room(state: State, id: ReplicaId) -> bool:
    """It is a shadow that holds all that one of its role takes of a node."""
    return role_of(id) == SHADOW and not state.job.role(stands_for(id)).beside


def shadows_of(state: State) -> list[Replica]:
    """Those that are believed, whatever they stand for, in the order of their names."""
    found = [one for one in state.replicas.values() if one.role == SHADOW and one.believed]
    return sorted(found, key=lambda one: natural(one.id))


def _concerns(state: State, one: Lingering, whole: ReplicaId, nodes: set[NodeName]) -> bool:
    node = state.nodes.get(one.node)
    if node is None or node.excluded is not None:
        return False
    of_a_role = role_of(one.life.replica) not in (AGENT, SHADOW)
    return gang_of(one.life.replica) == whole or (of_a_role and one.node in nodes)


def spareable(state: State, taken: Taken) -> list[Replica]:
    """Rollouts that generate, each of which could be taken away: enough others remain."""
    found: list[Replica] = []
    for role in state.job.kind("rollout"):
        at_work = [one for one in workers(state) if one.role == role.name and one.status is Status.JOINED
                   and one.node is not None and one in taken.get(one.node, ())]  # fmt: skip
        if role.ranks == 1 and len(at_work) > max(1, role.min_replicas):
            found += at_work
    return found


def ready_shadows(state: State, shadows: Iterable[Replica], good: set[NodeName]) -> dict[NodeName, list[Replica]]:
    """Of them those that can become a member at once, by node. ``good``: usable nodes."""
    found: dict[NodeName, list[Replica]] = {}
    for one in shadows:
        waits = one.status is Status.JOINED and one.phase == STANDBY and one.step is not None
        if waits and one.node in good and one.allocation == state.nodes[one.node].allocation:
            found.setdefault(one.node, []).append(one)
    return found
