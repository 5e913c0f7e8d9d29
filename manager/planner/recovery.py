"""From finding to rung: what to give up believing in, and how to get it back.

Everything decided here is a :class:`Fence` (a life is no longer believed), an :class:`Exclude` (a node is no longer
used) or a :class:`Finish` (the ladder's last rung). Placement and supply then do the rest.
"""

from __future__ import annotations

from rrl.manager.actions import Decision, Exclude, Fence, Finish, Rung, Why
from rrl.manager.planner.placement import failing_nodes, usable_nodes, vacant_for, would_help
from rrl.manager.state import Replica, State, Status, finding_about, node_finding, workers
from rrl.spec.words import AGENT, Finding, NodeName, Outcome


def recover(state: State, now: float) -> list[Decision]:
    """Decisions for everything that failed. ``now``: manager's time (s), for the restart budgets' window."""
    decisions: list[Decision] = []
    condemned: set[NodeName] = set()
    window = state.job.recovery.window
    failing = failing_nodes(state, now)
    for name, node in state.nodes.items():
        finding = node_finding(state, name)
        if finding is not None and node.excluded is None:
            decisions.append(Exclude(name, Why(_evidence(finding), expects="no further placement on this node")))
            condemned.add(name)
    for replica in state.replicas.values():
        if replica.believed and replica.node not in condemned and (evidence := _lost(state, replica)):
            decision = _choose(state, replica, evidence, failing, now)
        elif replica.status is Status.WANTED and len(replica.recent(window, now)) > state.job.recovery.per_replica:
            decision = _last_rungs(state, replica, ("its launches were refused",), now)
        else:
            continue
        decisions.append(decision)
        if isinstance(decision, Finish):
            break
    return decisions


def _lost(state: State, replica: Replica) -> tuple[str, ...]:
    """Why this life cannot go on, in the words of the evidence; empty when it can."""
    finding = finding_about(state, replica.life)
    if finding is not None:
        return _evidence(finding)
    if replica.node is None:
        return ()
    node = state.nodes.get(replica.node)
    if node is None:
        return (f"{replica.node} is no longer part of an allocation of ours",)
    if node.excluded is not None:
        return (f"{replica.node} is excluded: {node.excluded}",)
    return ()


def _choose(
    state: State, replica: Replica, evidence: tuple[str, ...], failing: set[NodeName], now: float
) -> Decision:
    """The first rung of the ladder that fits. ``failing``: nodes that have failed somebody too often."""
    recent = replica.recent(state.job.recovery.window, now)
    if len(recent) >= state.job.recovery.per_replica:
        return _last_rungs(state, replica, evidence, now)
    node_is_good = replica.node is not None and any(node == replica.node for node, _ in usable_nodes(state))
    here = sum(start.node == replica.node for start in recent)
    if node_is_good and (here < state.job.recovery.per_node or replica.role == AGENT):
        rung, expects = Rung.IN_PLACE, f"joins again on {replica.node}"
    elif replica.role == AGENT:  # an agent belongs to its node and goes with it
        return Fence(replica.life, Rung.DEGRADED, Why(evidence, Rung.DEGRADED, "its node is out of use"))
    elif vacant_for(state, replica, replica.node, now):
        rung, expects = Rung.SPARE, "joins again on a spare node"
    elif node_is_good and not would_help(state, replica, failing, now):
        rung, expects = Rung.IN_PLACE, f"joins again on {replica.node}: it is not the node"
    else:
        rung, expects = Rung.REPLACEMENT, "joins again once a replacement node is there"
    return Fence(replica.life, rung, Why(evidence, rung, expects, now + state.job.limits.join))


def _last_rungs(state: State, replica: Replica, evidence: tuple[str, ...], now: float) -> Decision:
    """The restart budget is spent: go on without it if the role can, else end the run."""
    recent = replica.recent(state.job.recovery.window, now)
    spent = f"{len(recent)} restarts of {replica.id} within {state.job.recovery.window:g} s"
    if replica.role == AGENT or _can_spare(state, replica):
        why = Why((*evidence, spent), Rung.DEGRADED, f"{replica.role} goes on with one replica less")
        return Fence(replica.life, Rung.DEGRADED, why)
    return Finish(Outcome.FAILED, Why((*evidence, spent), Rung.GIVE_UP, "everything is given back"))


def _can_spare(state: State, replica: Replica) -> bool:
    """The role stays at or above its ``min_replicas`` without this replica."""
    role = state.job.role(replica.role)
    others = [r for r in workers(state) if r.role == replica.role and r.id != replica.id]
    return sum(r.status is not Status.RETIRED for r in others) >= role.min_replicas


def _evidence(finding: Finding) -> tuple[str, ...]:
    return tuple(f"{finding.detector}: {one.source}: {one.text}" for one in finding.evidence)

