"""Questions about the state that more than one part of the manager asks. Pure.

Gangs and their members, steps that began as a standby's, the gravest finding, and which readers a node has.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...core.run_spec import RunSpec
from ...core.types import (
    AGENT,
    STANDBY_ROLE,
    Finding,
    Incarnation,
    NodeName,
    ReplicaId,
    Verdict,
    gang_of,
    member_id,
    role_of,
)
from ...health.readers.samples import READERS
from .actions import Request
from .state import Replica, State, Status


def workers(state: State) -> list[Replica]:
    """Members of the job's roles; agents and shadows left out."""
    return [replica for replica in state.replicas.values() if replica.role not in (AGENT, STANDBY_ROLE)]


def gang(state: State, member: ReplicaId) -> list[Replica]:
    """All members of its gang by rank; of a replica that is none, itself."""
    whole = gang_of(member)
    ranks = state.job.role(role_of(whole)).ranks
    return [state.replica(member_id(whole, rank)) for rank in range(ranks)]


def gangs(state: State) -> list[list[Replica]]:
    """The replicas in the order of the job spec, each as its members by rank."""
    found: dict[ReplicaId, list[Replica]] = {}
    for member in workers(state):
        found.setdefault(gang_of(member.id), []).append(member)
    return list(found.values())


def to_launch(members: list[Replica]) -> list[Replica]:
    """Of a gang those that are to be launched so that it is whole: all of them, or the others of a launch that was
    broken off. None where it works, was gone on without, or is done."""
    if any(one.status is Status.RETIRED for one in members) or all(one.status is not Status.WANTED for one in members):
        return []
    if any(one.is_current for one in members):
        newest = max(one.incarnation_number for one in members)
        return [one for one in members if one.status is Status.WANTED and one.incarnation_number < newest]
    return members


def all_joined(members: list[Replica]) -> bool:
    """All of them have joined."""
    return all(one.status is Status.JOINED for one in members)


def owner_of(state: State, step: str) -> Replica | None:
    """Whose newest life a step carries: of a shadow's that was adopted, the member that it became."""
    return next((replica for replica in state.replicas.values() if replica.step == step), None)


def is_batch_role(job: RunSpec, role: str) -> bool:
    """This role's replicas are done when they exit with code 0: it is the user's own, and no service."""
    return any(view.name == role and view.kind == "command" and not view.service for view in job.roles)


def progress(state: State) -> tuple[int, int]:
    """How much of the run is done, and of how much: trainer steps, or commands where there is no trainer."""
    if state.job.steps:
        return state.step, state.job.steps
    working = [members for members in gangs(state) if is_batch_role(state.job, members[0].role)]
    return sum(all_completed(members) for members in working), len(working)


def all_completed(members: list[Replica]) -> bool:
    """A gang's work is: that of all its members."""
    return all(one.status is Status.COMPLETED for one in members)


def open_requests(state: State) -> dict[str, str]:
    """Tag of each allocation whose request nobody has answered yet, and of that request: of a heterogeneous job its
    first component's."""
    return {
        request.tag: tag
        for tag, intent in state.intents.items()
        if isinstance(intent.action, Request)
        for request in (intent.action.request, *intent.action.request.further_components)
    }


def finding_about(state: State, incarnation: Incarnation) -> Finding | None:
    """The FAIL finding about a life, if there is one; proofs first."""
    return most_severe(finding for finding in state.findings.values() if finding.incarnation == incarnation)


def node_finding(state: State, node: NodeName) -> Finding | None:
    """The same about a node."""
    return most_severe(finding for finding in state.findings.values() if finding.node == node)


def most_severe(findings: Iterable[Finding]) -> Finding | None:
    """The one FAIL to go by: proofs first, then the oldest."""
    failing = (finding for finding in findings if finding.verdict is Verdict.FAIL)
    return min(failing, key=lambda finding: (not finding.proof, finding.since), default=None)


def promoted_to(state: State, standby: Incarnation) -> Replica | None:
    """The believed member that this shadow became, or is about to become."""
    if role_of(standby.replica) != STANDBY_ROLE:
        return None
    return next((one for one in state.replicas.values() if one.promoted_from == standby and one.is_current), None)


def current_owner(state: State, incarnation: Incarnation, tag: str) -> Incarnation:
    """A step that began as a shadow's goes on to speak of itself as that: it is the member's that it became."""
    if role_of(incarnation.replica) != STANDBY_ROLE or state.is_current(incarnation):
        return incarnation
    if (owner := owner_of(state, tag)) is not None:
        return owner.incarnation
    orphan = state.orphan_steps.get(tag)
    return incarnation if orphan is None else orphan.incarnation


def step_alias(state: State, incarnation: Incarnation) -> Incarnation:
    """Under which name the step of a life speaks of itself, and its files are called: the shadow's that it was."""
    replica = state.replica(incarnation.replica)
    return (
        replica.promoted_from
        if replica.incarnation == incarnation and replica.promoted_from is not None
        else incarnation
    )


def readers_for(job: RunSpec, gpus: int) -> tuple[str, ...]:
    """Names of the readers beside the agent of a node with so many GPUs.

    Virtual nodes of the local cluster are one machine, and there is no other to go to: what would condemn all of them
    is not looked for, nor by several agents at once. Where roles there have GPUs, how these do is worth knowing."""
    if job.cluster != "local":
        return READERS
    return ("nvml",) if gpus else ()


def requires_admission(job: RunSpec, gpus: int) -> bool:
    """No role is placed on such a node before its agent has said what it finds there."""
    return job.health.admission and bool(readers_for(job, gpus))
