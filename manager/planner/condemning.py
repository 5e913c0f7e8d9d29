"""Which nodes are no longer used, and which ones get nobody new.

A node is condemned for what is found on the node itself: its hardware, its silence, its fabric, its storage. What a
user's or the run's software did there says nothing of the node: it is told, and nothing is done to the node. A WARN
makes it a suspect: who is there stays, and nobody new goes there while there is a better one.
"""

from __future__ import annotations

from collections.abc import Iterator

from rrl.manager.actions import Exclude, Why
from rrl.manager.planner.condemned import condemns
from rrl.manager.planner.mistakes import unfit_nodes
from rrl.manager.planner.rooms import Rooms
from rrl.manager.state import Replica, State, Status, gravest, workers
from rrl.spec.words import AGENT, SHADOW, Cause, Finding, NodeName, Remedy, role_of


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
