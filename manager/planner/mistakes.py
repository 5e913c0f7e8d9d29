"""What is no node's fault but the job's own, or the site's set-up: it would fail on every node, so the run ends early.

A command that is not there, a role that never joins, nodes that cannot import what the job needs.
"""

from __future__ import annotations

from collections.abc import Iterable

from rrl.manager.actions import Finish, Rung, Why
from rrl.manager.planner.rooms import Rooms, asked_first, never_started
from rrl.manager.state import Replica, State, Status, finding_about, workers
from rrl.spec.words import AGENT, SHADOW, Flag, NodeName, Outcome, ReplicaId, gang_of, replica_id

PROVED = 2
"""Tries after which a command that cannot be started is proved not to be there: on so many nodes, or on the only one
that there is to try it on."""
SHOWN = 4
"""nodes named in a reason; the others are counted"""


def not_there(state: State, rooms: Rooms) -> Finish | None:
    """A role's command could not be started, twice, no replica of the role has ever joined, and it is not the node."""
    for role in state.job.roles:
        replicas = [replica for replica in workers(state) if replica.role == role.name]
        if any(replica.ever_joined for replica in replicas):
            continue
        tries = [attempt for replica in replicas for attempt in _tries(state, replica)]
        nodes = {node for _, node in tries}
        if len(nodes) >= PROVED or (len(tries) >= PROVED and not _untried(state, rooms, replicas, nodes)):
            said, _ = tries[-1]
            return rejected((f"{role.name}: {said} on {_few(node for _, node in tries)}",))
    return None


def _untried(state: State, rooms: Rooms, replicas: list[Replica], tried: set[NodeName]) -> bool:
    """Another node may yet find the command: one on which a replica of the role is starting, or that has room."""
    starting = [one for one in replicas if one.believed and finding_about(state, one.life) is None]
    if any(one.node not in tried for one in starting):
        return True
    return any(rooms.vacant_for(one) for one in replicas if _tries(state, one))


def never_joined(state: State, replica: Replica, evidence: tuple[str, ...], detector: str) -> tuple[str, ...]:
    """Return why no incarnation of this replica ever joined, after too many failed starts; empty where there is another
    reason, or it may yet join. ``evidence`` and ``detector`` are those of its newest failure."""
    failing = replica.believed and finding_about(state, replica.life) is not None
    failed = replica.unstarted + failing
    if replica.role in (AGENT, SHADOW) or replica.ever_joined or failed < state.job.recovery.first_start:
        return ()
    if detector == "never_joined":
        within = f"within {state.job.limits.join:g} s"
        return (f"{replica.id} never joined {within}, {failed} times: is rrl.join() called?", *evidence)
    return (*evidence, f"{failed} starts of {replica.id} failed, and none has ever joined")


def unfit_nodes(state: State) -> dict[NodeName, str]:
    """Nodes on which no role can run, and why: in the probe's words, or those of an agent that never started."""
    found: dict[NodeName, str] = {}
    for name, node in state.nodes.items():
        if node.probe:
            found[name] = node.probe
        elif asked_first(state, node) and never_started(state, name):
            failures = state.replica(replica_id(AGENT, name)).failures
            found[name] = failures[-1].why if failures else "its agent never started"
    return found


def nowhere(state: State) -> Finish | None:
    """No node can do what the roles need: of the whole run, or of a part of which two were tried; and nobody has ever
    worked there."""
    unfit = unfit_nodes(state)
    if not unfit:
        return None
    expected = any(allocation.pending for allocation in state.allocations.values())
    used = {name: node for name, node in state.nodes.items() if node.allocation and node.excluded is None}
    every = [role for part in state.job.parts for role in part.roles]
    for roles, part in [(every, None), *((part.roles, part.name) for part in state.job.parts)]:
        nodes = [name for name, node in state.nodes.items() if part is None or node.part == part]
        bad = [name for name in nodes if name in unfit]
        enough = len(bad) >= PROVED or (bool(bad) and part is None and not expected)
        open_ = any(name in used and name not in unfit for name in nodes)
        if enough and not open_ and not any(one.ever_joined for one in workers(state) if one.role in roles):
            return rejected((f"{unfit[bad[-1]]} on {_few(bad)}",))
    return None


def rejected(why: tuple[str, ...]) -> Finish:
    return Finish(Outcome.REJECTED, Why(why, Rung.GIVE_UP, "correct the job spec or the site's set-up, submit again"))


def all_given_up(state: State, replica: Replica, spared: set[ReplicaId]) -> bool:
    """No replica of its role has ever joined, and none but this one is still tried. ``spared``: given up just now."""
    without = {gang_of(replica.id), *spared}
    others = [other for other in workers(state) if other.role == replica.role and gang_of(other.id) not in without]
    given_up = [other for other in workers(state) if other.role == replica.role and gang_of(other.id) in spared]
    tried = [other for other in others if other.status is not Status.RETIRED]
    return not tried and not any(other.ever_joined for other in (*others, *given_up))


def _tries(state: State, replica: Replica) -> list[tuple[str, NodeName]]:
    """Starts of this replica that found no command: what was said, and where."""
    tries = [(start.not_started, start.node) for start in replica.failures if start.not_started is not None]
    finding = finding_about(state, replica.life) if replica.believed else None
    if finding is not None and replica.node is not None and Flag.NOT_STARTED in finding.flags:
        tries.append((finding.evidence[0].text, replica.node))
    return tries


def _few(nodes: Iterable[NodeName]) -> str:
    names = list(dict.fromkeys(nodes))
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
