"""Decide which nodes are excluded, which get no new replicas, and when a circuit breaker holds exclusions back.

A node is excluded for what is found on the node itself: hardware, silence, fabric, storage. What software of a user or
of the run did there is reported and has no effect on the node. A WARN makes a node a suspect: its replicas stay, and no
new one is placed there while there is a better node.

Many nodes that fail together point to the network, the site or the manager itself, and replacing them all would be
worse than waiting for a person: at most max(1, 20 %) are excluded within ten minutes (docs/sources.md, guard rails).
While the cluster has lost much of what the run holds, findings on the rest count for little. A pool of five nodes or
more may lose two: 20 % of it is less than one node, a second lost node would stop the run for minutes until Slurm gives
it up, and the majority that still reports proves that the manager receives and the network carries. Of four nodes two
are a tie, which proves nothing; there, and in smaller pools, the limit is one.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from ....core.types import AGENT, SHADOW, Cause, Finding, NodeName, Remedy, role_of
from ...cluster.base import NodeState
from ...model.actions import Decision, Exclude, Why
from ...model.queries import gravest, workers
from ...model.state import Replica, State, Status
from ..capacity.nodes import Rooms, condemns, unfit_nodes
from ..deadlines import NEVER


def condemn(state: State, rooms: Rooms) -> list[Exclude]:
    excludes: list[Exclude] = []
    unfit, slow = unfit_nodes(state), dict(_left_to_spares(state, rooms))
    for name, node in state.nodes.items():
        if node.excluded is not None:
            continue
        if (finding := _against(state, name)) is not None:
            excludes.append(_exclude(name, in_words(finding), finding.cause, finding.proof))
        elif name in unfit:
            excludes.append(_exclude(name, (f"probe: {unfit[name]}",), Cause.SOFTWARE))
        elif name in slow:  # it works, if slowly: nobody's to drain
            excludes.append(_exclude(name, in_words(slow[name]), None))
    return excludes


def in_words(finding: Finding) -> tuple[str, ...]:
    """Its evidence, for who reads why something was done."""
    return tuple(f"{finding.detector}: {one.source}: {one.text}" for one in finding.evidence)


def _against(state: State, node: NodeName) -> Finding | None:
    """What condemns it; proof first."""
    return gravest(one for one in state.findings.values() if one.node == node and condemns(one))


def _left_to_spares(state: State, rooms: Rooms) -> Iterator[tuple[NodeName, Finding]]:
    """The node of a replica that stays slower than its peers, where the job wants to leave such and a spare is there:
    one, and only while everybody else works, so that nobody else is in need of the spare."""
    if state.job.health.stragglers != "exclude" or not all(_works(state, one) for one in workers(state)):
        return
    for finding in state.findings.values():
        life = finding.life
        if life is None or finding.remedy is not Remedy.EXCLUDE or role_of(life.replica) in (AGENT, SHADOW):
            continue
        replica = state.replica(life.replica)
        if state.believed(life) and replica.node is not None and rooms.vacant_for(replica):
            yield replica.node, finding
            return


def _works(state: State, replica: Replica) -> bool:
    """Or is not missed."""
    if replica.status in (Status.RETIRED, Status.COMPLETED):
        return True
    node = state.nodes.get(replica.node) if replica.node is not None else None
    return replica.status is Status.JOINED and node is not None and node.excluded is None


def _exclude(node: NodeName, evidence: tuple[str, ...], cause: Cause | None, proof: bool = False) -> Exclude:
    return Exclude(node, Why(evidence, expects="no further placement on this node"), cause, proof)


MINORITY = 2
"""Nodes that a pool of more than twice as many may always lose within the recovery window, see above."""
OUTAGE = 0.25
"""share of the run's nodes, more than one, that are down: then only what is down is left (docs/sources.md, guard rails:
none while more than 25 % of the cluster is). Slurm tells us of our own nodes only."""


class HeldBack(Struct, frozen=True):
    """An exclusion that the breaker does not let go ahead."""

    exclude: Exclude
    why: str
    until: float
    """manager's time (s) at which it is looked at again; inf: when the cluster reports something else of its nodes"""


def exclusions_allowed(share: float, nodes: int) -> int:
    """Number of a run's ``nodes`` that may be excluded within the recovery window; ``share``: ``recovery.breaker``."""
    return max(1, int(share * nodes), MINORITY if nodes > 2 * MINORITY else 0)


def brake(state: State, decisions: list[Decision], now: float) -> tuple[list[Decision], list[HeldBack]]:
    """Return the decisions that may be carried out now, and the exclusions that the circuit breaker holds back.

    ``now``: s of the manager's clock. An exclusion is held back while too many nodes were excluded within the recovery
    window, or while the cluster itself has lost too many of the run's nodes."""
    recovery = state.job.recovery
    allowed = exclusions_allowed(recovery.breaker, len(state.nodes))
    found = (node for node in state.nodes.values() if node.excluded is not None and not node.asked_by)
    ends = sorted(node.excluded_at + recovery.window for node in found)
    recent = [end for end in ends if end > now]
    excluded = len(recent)
    passed: list[Decision] = []
    held: list[HeldBack] = []
    down = _down(state)
    outage = len(down) > max(1, OUTAGE * len(state.nodes))
    for decision in decisions:
        if isinstance(decision, Exclude):
            if outage and decision.node not in down:
                why = f"{len(down)} of {len(state.nodes)} nodes are down: only those are left"
                held.append(HeldBack(decision, why, NEVER))
                continue
            if excluded >= allowed:
                share = f"{excluded} of {len(state.nodes)} nodes"
                why = f"{share} excluded within {recovery.window:g} s, and no more may be"
                held.append(HeldBack(decision, why, recent[0] if recent else now + recovery.window))
                continue
            excluded += 1
        passed.append(decision)
    return passed, held


def held_back(state: State, now: float) -> list[HeldBack]:
    """The exclusions that a manager would decide at ``now`` (manager's time, s) if the breaker let it: for people."""
    return brake(state, list(condemn(state, Rooms(state, now))), now)[1]


def _down(state: State) -> set[NodeName]:
    return {name for name, one in state.nodes.items() if one.seen is not None and one.seen.state is NodeState.DOWN}
