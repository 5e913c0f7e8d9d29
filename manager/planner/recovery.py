"""From finding to rung: what to give up believing in, and how to get it back.

Everything decided here is a :class:`Fence` (a life is no longer believed), an :class:`Exclude` (a node is no longer
used) or a :class:`Finish` (the ladder's last rung). Placement and supply then do the rest.
"""

from __future__ import annotations

from rrl.manager.actions import Decision, Exclude, Fence, Finish, Rung, Why
from rrl.manager.planner.mistakes import all_given_up, never_joined, not_there, nowhere, rejected, unfit_nodes
from rrl.manager.planner.rooms import Rooms
from rrl.manager.state import Replica, State, Status, finding_about, node_finding, workers
from rrl.spec.words import AGENT, Finding, NodeName, Outcome, ReplicaId

_Spared = set[ReplicaId]
"""those that the decisions made so far go on without"""


def recover(state: State, rooms: Rooms, now: float) -> list[Decision]:
    """Decisions for everything that failed. ``now``: manager's time (s), for the restart budgets' window."""
    if (mistake := not_there(state, rooms) or nowhere(state)) is not None:
        return [mistake]
    decisions: list[Decision] = []
    condemned: set[NodeName] = set()
    window = state.job.recovery.window
    unfit, spared = unfit_nodes(state), _Spared()
    for name, node in state.nodes.items():
        finding = node_finding(state, name)
        evidence = _evidence(finding) if finding else (f"probe: {unfit[name]}",) if name in unfit else ()
        if evidence and node.excluded is None:
            decisions.append(Exclude(name, Why(evidence, expects="no further placement on this node")))
            condemned.add(name)
    for replica in state.replicas.values():
        decision: Decision | None = None
        if replica.believed and replica.node not in condemned and (evidence := _lost(state, replica)):
            decision = _choose(state, rooms, replica, evidence, spared, now)
        elif replica.status is Status.WANTED and replica.failures:
            decision = _unlaunched(state, replica, len(replica.recent(window, now)), spared, now)
        if decision is None:
            continue
        decisions.append(decision)
        if isinstance(decision, Finish):
            break
        if isinstance(decision, Fence) and decision.rung is Rung.DEGRADED:
            spared.add(replica.id)
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


def _unlaunched(state: State, replica: Replica, recent: int, spared: _Spared, now: float) -> Decision | None:
    """It waits for its next launch; the cluster has refused too many, or too many came to nothing."""
    if mistake := never_joined(state, replica, (replica.failures[-1].why,)):
        return _never(state, replica, mistake, spared)
    if recent > state.job.recovery.per_replica:
        return _last_rungs(state, replica, ("its launches were refused",), spared, now)
    return None


def _choose(
    state: State, rooms: Rooms, replica: Replica, evidence: tuple[str, ...], spared: _Spared, now: float
) -> Decision:
    """The first rung of the ladder that fits."""
    recent = replica.recent(state.job.recovery.window, now)
    if mistake := never_joined(state, replica, evidence):
        return _never(state, replica, mistake, spared)
    if len(recent) >= state.job.recovery.per_replica:
        return _last_rungs(state, replica, evidence, spared, now)
    node_is_good = rooms.good(replica.node)
    here = sum(start.node == replica.node for start in recent)
    in_place = here < state.job.recovery.per_node and not _last_start_is_elsewhere(state, rooms, replica)
    if node_is_good and (in_place or replica.role == AGENT):
        rung, expects = Rung.IN_PLACE, f"joins again on {replica.node}"
    elif replica.role == AGENT:  # an agent belongs to its node and goes with it
        return Fence(replica.life, Rung.DEGRADED, Why(evidence, Rung.DEGRADED, "its node is out of use"))
    elif rooms.vacant_for(replica):
        rung, expects = Rung.SPARE, "joins again on a spare node"
    elif node_is_good and not rooms.would_help(replica):
        rung, expects = Rung.IN_PLACE, f"joins again on {replica.node}: it is not the node"
    else:
        rung, expects = Rung.REPLACEMENT, "joins again once a replacement node is there"
    return Fence(replica.life, rung, Why(evidence, rung, expects, now + state.job.limits.join))


def _last_start_is_elsewhere(state: State, rooms: Rooms, replica: Replica) -> bool:
    """One more start, and what never joined is given up: not without a try on another node, where there is one."""
    return (
        replica.role != AGENT
        and not replica.ever_joined
        and replica.unstarted + 2 >= state.job.recovery.first_start
        and rooms.vacant_for(replica)
    )


def _last_rungs(
    state: State, replica: Replica, evidence: tuple[str, ...], spared: _Spared, now: float
) -> Decision:
    """The restart budget is spent: go on without it if the role can, else end the run."""
    recent = replica.recent(state.job.recovery.window, now)
    spent = f"{len(recent)} restarts of {replica.id} within {state.job.recovery.window:g} s"
    if replica.role == AGENT or _can_spare(state, replica, spared):
        why = Why((*evidence, spent), Rung.DEGRADED, f"{replica.role} goes on with one replica less")
        return Fence(replica.life, Rung.DEGRADED, why)
    return Finish(Outcome.FAILED, Why((*evidence, spent), Rung.GIVE_UP, "everything is given back"))


def _never(state: State, replica: Replica, mistake: tuple[str, ...], spared: _Spared) -> Decision:
    """It fails wherever it starts: the run goes on without it if it can, and if others of its role do better."""
    if _can_spare(state, replica, spared) and not all_given_up(state, replica, spared):
        why = Why(mistake, Rung.DEGRADED, f"{replica.role} goes on with one replica less")
        return Fence(replica.life, Rung.DEGRADED, why)
    return rejected(mistake)


def _can_spare(state: State, replica: Replica, spared: _Spared) -> bool:
    """The role stays at or above its ``min_replicas`` without this replica."""
    role = state.job.role(replica.role)
    others = [r for r in workers(state) if r.role == replica.role and r.id != replica.id and r.id not in spared]
    return sum(r.status is not Status.RETIRED for r in others) >= role.min_replicas


def _evidence(finding: Finding) -> tuple[str, ...]:
    return tuple(f"{finding.detector}: {one.source}: {one.text}" for one in finding.evidence)

