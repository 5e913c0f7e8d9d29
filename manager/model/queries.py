"""Functions that answer questions about the state: gangs, promotions, findings, readers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ...cluster.traits import traits_of
from ...core.run_spec import RoleSpec, RunSpec
from ...core.types import (
    GUEST_ROLE,
    STANDBY_ROLE,
    TRAINER,
    Finding,
    Flag,
    Incarnation,
    NodeName,
    RaisedException,
    ReplicaId,
    Verdict,
    gang_of,
    index_of,
    is_support,
    is_trainer,
    member_id,
    natural_sort_key,
    role_of,
)
from ...health.readers.base import ACCELERATOR_READERS, READERS
from .actions import Request
from .state import Replica, State, Status


def gang(state: State, member: ReplicaId) -> list[Replica]:
    """Return all members of a member's gang in order of rank; a gang of one rank has only this member."""
    return list(members(state, member))


def members(state: State, member: ReplicaId) -> Iterator[Replica]:
    """Yield the members of :func:`gang`, for a caller that may not need all of them."""
    gang_id = gang_of(member)
    ranks = 1 if is_support(member) else state.job.role(role_of(gang_id)).ranks
    return (state.replica(member_id(gang_id, rank)) for rank in range(ranks))


def to_launch(members: list[Replica]) -> list[Replica]:
    """Return the members of a gang that have to be launched to make the gang complete.

    These are all members or, if an earlier launch of the gang was interrupted, the members that were not launched. The
    list is empty if the gang works, is retired or has completed.
    """
    statuses = {member.status for member in members}
    if Status.RETIRED in statuses or Status.WANTED not in statuses:
        return []
    if any(member.is_current for member in members):
        newest = max(member.incarnation_number for member in members)
        return [member for member in members if member.status is Status.WANTED and member.incarnation_number < newest]
    return members


def all_joined(members: list[Replica]) -> bool:
    """Return whether all members have joined."""
    return all(member.status is Status.JOINED for member in members)


def has_worked(state: State, role: str) -> bool:
    """Return whether a replica of the role has completed, or has done a unit of work since the run began or resumed."""
    return role in state.worked


def substitutes(job: RunSpec, role: str) -> frozenset[str]:
    """Return the roles that can do the work of a role: for a role that generates all that do, else the role alone."""
    if role != GUEST_ROLE and job.role(role).kind != "rollout":
        return frozenset({role})
    return frozenset({GUEST_ROLE, *(other.name for other in job.kind("rollout"))})


def substitute_replicas(state: State, role: str) -> list[Replica]:
    """Return the replicas of the role and of its :func:`substitutes`; guests only on nodes of the trainer."""
    roles = substitutes(state.job, role)
    found = [replica for replica in state.workers if replica.role in roles]
    if GUEST_ROLE in roles and state.guests:
        nodes = trainer_nodes(state)
        found += [guest for guest in state.guests if guest.node in nodes]
    return found


def trainer_nodes(state: State) -> set[NodeName]:
    """Return the nodes that members of the trainer are on or return to."""
    places = (place_of(member) for member in state.workers if is_trainer(member.id))
    return {node for node in places if node is not None}


def guests_are_essential(state: State) -> bool:
    """Return whether nothing else generates: no rollout is left that the run has not given up."""
    if not state.job.guests_on_node:
        return False
    pools = {role.name for role in state.job.kind("rollout")}
    return not any(one.role in pools and one.status is not Status.RETIRED for one in state.workers)


def is_judged(state: State, replica: Replica) -> bool:
    """Return whether failed starts of the replica can end the run: one of the job's roles, or an essential guest."""
    return not is_support(replica.id) or (replica.role == GUEST_ROLE and guests_are_essential(state))


def judged_replicas(state: State) -> list[Replica]:
    """Return all replicas that :func:`is_judged` holds for."""
    return [*state.workers, *(guest for guest in state.guests if is_judged(state, guest))]


def restart_budget(state: State, replica: Replica) -> int:
    """Return how many failures of the replica within the window are each answered by a restart.

    A node goes on without a guest after its second failure, unless nothing else generates.
    """
    spared = replica.role == GUEST_ROLE and not guests_are_essential(state)
    return 1 if spared else state.job.recovery.per_replica


def others_may_work(state: State, role: str) -> bool:
    """Return whether another rollout pool has worked or may still work, so that the run can go on without this one."""
    others = substitutes(state.job, role) - {role}
    return any(m.role in others and (m.ever_worked or m.status is not Status.RETIRED) for m in state.workers)


def failed_first_starts(state: State, replica: Replica) -> int:
    """Return how many first starts of the replica failed: the greater of two counts.

    * Starts that failed before the replica joined for the first time; 0 once it has joined.
    * Starts in a row that ended with the same exception; 0 once a replica of its role has worked.
    """
    unjoined = 0 if replica.ever_joined else replica.failed_starts
    return max(unjoined, 0 if has_worked(state, replica.role) else replica.exception_starts)


def starts_ended_by(exception: RaisedException, replica: Replica) -> int:
    """Return how many incarnations of the replica in a row were ended by this exception before their first work.

    The exception is the same if it has the same type and was raised at the same place.
    """
    last = replica.last_exception
    return replica.exception_starts if last is not None and last.fingerprint == exception.fingerprint else 0


def returned_early(state: State, replica: Replica, finding: Finding | None, at: float) -> bool:
    """Return whether the replica's program returned with exit code 0 within ``recovery.window`` of its join.

    A later return is repaired like any other failure, since few such restarts occur.

    Args:
        state: The state.
        replica: The replica, whose newest incarnation is still current.
        finding: The finding about that incarnation, if there is one.
        at: Manager's time (s) of the end.
    """
    if finding is None or Flag.CLEAN_EXIT not in finding.flags:
        return False
    return replica.status is not Status.JOINED or at - replica.since < state.job.recovery.window


def is_crowded(state: State, replica: Replica, finding: Finding | None) -> bool:
    """Return whether a trainer that failed with this finding found too little memory on GPUs that it shares."""
    exception = None if finding is None else finding.exception
    shared = is_trainer(replica.id) and any(guest.is_current for guest in state.guests)
    return shared and exception is not None and exception.out_of_gpu_memory


def owner_of(state: State, step: str) -> Replica | None:
    """Return the replica whose newest incarnation runs in ``step``; after a promotion this is the promoted member."""
    return next((replica for replica in state.replicas.values() if replica.step == step), None)


def is_batch_role(job: RunSpec, role: str) -> bool:
    """Return whether the role is a user's command that has completed when it exits with code 0."""
    return any(view.name == role and view.kind == "command" and not view.service for view in job.roles)


def progress(state: State) -> tuple[int, int]:
    """Return (done, total) of the run: training steps, or commands if there is no trainer."""
    if state.job.steps:
        return state.step, state.job.steps
    working = [members for members in state.gangs if is_batch_role(state.job, members[0].role)]
    return sum(all_completed(members) for members in working), len(working)


def all_completed(members: list[Replica]) -> bool:
    """Return whether all members have completed."""
    return all(member.status is Status.COMPLETED for member in members)


def open_requests(state: State) -> dict[str, str]:
    """Return {tag of an allocation: tag of its request} for all requests that have no result yet.

    All components of a heterogeneous job belong to the request of its first component.
    """
    return {
        request.tag: tag
        for tag, intent in state.intents.items()
        if isinstance(intent.action, Request)
        for request in (intent.action.request, *intent.action.request.further_components)
    }


def finding_about(state: State, incarnation: Incarnation) -> Finding | None:
    """Return the most severe FAIL finding about an incarnation (:func:`most_severe`); None if there is none."""
    findings = state.findings_about.get(incarnation)
    return None if findings is None else most_severe(findings)


def reached_step(state: State) -> int:
    """Return the newest training step that the trainer has finished, as far as the manager knows.

    This is the newest committed step or, if a commit covers several steps, a later step whose weights the trainer has
    published. After a restart of the trainer the result may be an earlier step.
    """
    published = state.replica(TRAINER).weight_version if state.job.trainer.checkpoint_every > 1 else None
    return max(state.step, published.step if published is not None else 0)


def has_trained(state: State, trainer: Replica) -> bool:
    """Return whether the newest incarnation of a trainer has finished a training step; ``trainer`` is rank 0."""
    return trainer.commits > 0 or (state.job.trainer.checkpoint_every > 1 and trainer.advanced)


def extras_role(job: RunSpec) -> RoleSpec | None:
    """Return the role whose further replicas, the extras, generate on spare nodes; None if spares stay idle.

    With ``recovery.policy = "job"`` they do, since the failure of an extra would restart every role.
    """
    if job.form != "pool" or not job.spares or "rollout" not in job.tags.spare or job.recovery.policy != "role":
        return None
    pool = job.node_groups[0]
    return next((role for role in job.kind("rollout") if role.name in pool.roles and role.ranks == 1), None)


def extra_rollouts(state: State) -> list[Replica]:
    """Return the extras that have a node, in natural order: the last rollouts, beyond the number that the job asks for.

    Which ones these are changes when another rollout loses its node: an extra then counts in its place.
    """
    if (role := extras_role(state.job)) is None:
        return []
    placed = [rollout for rollout in state.workers if rollout.role == role.name and place_of(rollout) is not None]
    if len(placed) <= role.replicas:
        return []
    return sorted(placed, key=lambda rollout: natural_sort_key(rollout.id))[role.replicas :]


def are_extras(state: State, rollouts: Iterable[Replica]) -> bool:
    """Return whether all these replicas are extras that have a node; True if there are none."""
    rollouts, role = list(rollouts), extras_role(state.job)
    # fast, since hundreds of nodes may be lost at once: a rollout that is preceded by enough others has a high number
    if not all(role and one.role == role.name and int(index_of(one.id)) >= role.replicas for one in rollouts):
        return False
    return not rollouts or {one.id for one in rollouts} <= {one.id for one in extra_rollouts(state)}


def place_of(replica: Replica) -> NodeName | None:
    """Return the node that a replica is on or, while it waits for its launch, the node to which it returns."""
    if replica.is_current:
        return replica.node
    return replica.preferred_node if replica.status is Status.WANTED else None


def weights_lag_steps(state: State) -> tuple[int, int] | None:
    """Return by how many steps the newest and the oldest weights of the rollouts are behind the trainer.

    The trainer's step is the newest step that it has committed or published. Returns None if no rollout has weights.
    """
    held = {
        replica.id: replica.weight_version.step
        for replica in state.workers
        if replica.is_current and replica.weight_version is not None
    }
    trainer = max(state.step, held.get(TRAINER, 0))
    lags = [max(0, trainer - step) for id, step in held.items() if state.job.traits_of(id).gets_weights]
    return (min(lags), max(lags)) if lags else None


def received_weights(replicas: Iterable[Replica]) -> tuple[float | None, int]:
    """Return how much the current replicas have received of the size of their newest weight versions, and fallbacks.

    The share of the size is a number from 0 to a little more than 1; None if no replica has received a version after
    its first one. The fallbacks are those of all versions.
    """
    current = [replica for replica in replicas if replica.is_current]
    newest = [one.traffic.since(one.traffic_before) for one in current if one.traffic_before.nbytes]
    nbytes = sum(one.nbytes for one in newest)
    share = sum(one.received for one in newest) / nbytes if nbytes else None
    return share, sum(one.traffic.fallbacks for one in current)


def node_finding(state: State, node: NodeName) -> Finding | None:
    """Return the most severe FAIL finding about a node (:func:`most_severe`); None if there is none."""
    findings = state.findings_about.get(node)
    return None if findings is None else most_severe(findings)


def most_severe(findings: Iterable[Finding]) -> Finding | None:
    """Return the oldest FAIL finding with proof, else the oldest FAIL finding; None if there is no FAIL finding."""
    failing = (finding for finding in findings if finding.verdict is Verdict.FAIL)
    return min(failing, key=lambda finding: (not finding.proof, finding.since), default=None)


def promoted_to(state: State, standby: Incarnation) -> Replica | None:
    """Return the current member to which a standby process was or is being promoted; None if there is none."""
    if role_of(standby.replica) != STANDBY_ROLE:
        return None
    members = (
        replica for replica in state.replicas.values() if replica.promoted_from == standby and replica.is_current
    )
    return next(members, None)


def current_owner(state: State, incarnation: Incarnation, tag: str) -> Incarnation:
    """Return the incarnation that a message belongs to, from the incarnation that it names and the tag of its step.

    A promoted standby process may still send messages as ``standby/<node>``. The member is found by the tag of the
    step.
    """
    if role_of(incarnation.replica) != STANDBY_ROLE or state.is_current(incarnation):
        return incarnation
    if (orphan := state.orphan_steps.get(tag)) is not None:
        return orphan.incarnation
    owner = owner_of(state, tag)
    return incarnation if owner is None else owner.incarnation


def step_alias(state: State, incarnation: Incarnation) -> Incarnation:
    """Return the incarnation whose name is used in the messages and file names of the step of ``incarnation``.

    After a promotion this is the incarnation of the standby process.
    """
    replica = state.replica(incarnation.replica)
    if replica.incarnation == incarnation and replica.promoted_from is not None:
        return replica.promoted_from
    return incarnation


def readers_for(job: RunSpec, gpus: int) -> tuple[str, ...]:
    """Return the names of the readers that the agent of a node with this many GPUs runs.

    All virtual nodes are the same machine, so a finding about the machine would exclude all of
    them. Their agents therefore read only the GPUs, if the node has any.
    """
    if not traits_of(job.cluster).roles_run_here:
        return READERS
    return tuple(ACCELERATOR_READERS) if gpus else ()


def requires_admission(job: RunSpec, gpus: int) -> bool:
    """Return whether the agent of a node with this many GPUs must report its checks before roles are placed there."""
    return job.health.admission and bool(readers_for(job, gpus))


def first_symptom_at(
    findings: Iterable[Finding], incarnation: Incarnation | None, node: NodeName | None
) -> float | None:
    """Return when a failure showed its first symptom: the earliest ``since`` (s) of the FAIL findings about it.

    Args:
        findings: Findings that stand at the time of the failure.
        incarnation: Incarnation that failed; None for the failure of a whole node.
        node: Node of the incarnation, or the node that failed; None if it is unknown.

    Returns:
        The time from the findings about the incarnation itself. Findings about its node count only if there are no
        findings about the incarnation, since it may have worked for a long time on a node with findings. None if no
        such finding has a time.
    """
    failing = [finding for finding in findings if finding.verdict is Verdict.FAIL]
    own = [finding for finding in failing if incarnation is not None and finding.incarnation == incarnation]
    of_node = [finding for finding in failing if node and finding.node == node]
    return min((finding.since for finding in own or of_node if finding.since > 0), default=None)
