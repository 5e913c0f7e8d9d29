"""Reject a job that would fail on every node, because of its job spec or of the site's configuration.

The run then ends early. Examples are a missing command, a role that never joins, and nodes that cannot import the
modules that the job needs.
"""

from __future__ import annotations

from collections.abc import Iterable

from ....core.types import GUEST_ROLE, Flag, NodeName, Outcome, ReplicaId, gang_of, is_support
from ...model.actions import Finish, Rung, Why, every_lower
from ...model.queries import finding_about, has_worked, is_judged, judged_replicas, others_may_work, substitute_replicas
from ...model.state import Replica, State, Status
from ..capacity.node_fitness import MAX_NAMED_NODES, unfit_nodes
from ..capacity.nodes import NodeInventory

TRIES_TO_PROVE = 2
"""Number of failed starts that prove a command missing, each on another node if possible."""


def command_missing(state: State, inventory: NodeInventory) -> Finish | None:
    """Return the decision to reject a run whose nodes lack a role's command; None if this is not proved.

    It is proved by :data:`TRIES_TO_PROVE` failed starts, if no replica of the role has ever joined. A rollout pool is
    retired instead while another one may work.
    """
    judged = judged_replicas(state)
    for role in (*(role.name for role in state.job.roles), GUEST_ROLE):
        replicas = [replica for replica in judged if replica.role == role]
        if any(replica.ever_joined for replica in replicas) or others_may_work(state, role):
            continue
        tries = [attempt for replica in replicas for attempt in _not_started_tries(state, replica)]
        nodes = {node for _, node in tries}
        if len(nodes) >= TRIES_TO_PROVE or (
            len(tries) >= TRIES_TO_PROVE and not _other_node_may_work(state, inventory, replicas, nodes)
        ):
            text, _ = tries[-1]
            return rejected((f"{role}: {text} on {_node_list(node for _, node in tries)}",))
    return None


def _other_node_may_work(state: State, inventory: NodeInventory, replicas: list[Replica], tried: set[NodeName]) -> bool:
    """Return whether the missing command may exist on a node that has not been tried.

    This is so if one of ``replicas`` is starting on a node that is not in ``tried``, or if another node has capacity
    for a replica that did not find the command.
    """
    starting = [
        replica for replica in replicas if replica.is_current and finding_about(state, replica.incarnation) is None
    ]
    if any(replica.node not in tried for replica in starting):
        return True
    if any(is_support(replica.id) for replica in replicas):
        return False
    return any(inventory.can_place(replica) for replica in replicas if _not_started_tries(state, replica))


def never_joined(state: State, replica: Replica, evidence: tuple[str, ...], detector: str) -> tuple[str, ...]:
    """Return why no incarnation of this replica ever joined, after too many failed starts.

    ``evidence`` and ``detector`` describe the replica's newest failure. The result is empty if the replica may still
    join.
    """
    failing = replica.is_current and finding_about(state, replica.incarnation) is not None
    failed = replica.failed_starts + failing
    if not is_judged(state, replica) or replica.ever_joined or failed < state.job.recovery.first_start:
        return ()
    if detector == "never_joined":
        within = f"within {state.job.limits.join:g} s"
        return (f"{replica.id} did not join {within} in {failed} starts: does its command call rrl.join()?", *evidence)
    return (*evidence, f"{failed} starts of {replica.id} failed, and it has never joined")


def invalid_config(state: State) -> Finish | None:
    """Return the decision to reject a run in which a role found the job's configuration invalid.

    The first such report suffices, since every start of the role reads the same configuration. If a replica of the role
    has worked, the configuration is valid, and the failure is repaired like any other. So is the failure of a rollout
    pool while another one may work. A changed input file ends the run in any case.
    """
    for replica in judged_replicas(state):
        finding = finding_about(state, replica.incarnation) if replica.is_current else None
        if finding is not None and Flag.INPUT_CHANGED in finding.flags:
            lower = every_lower("the input file as it was")
            why = Why((finding.evidence[0].text,), Rung.GIVE_UP, "everything is released", lower=lower)
            return Finish(Outcome.FAILED, why)
        invalid = finding is not None and Flag.INVALID_CONFIG in finding.flags
        if finding is None or not invalid or has_worked(state, replica.role):
            continue
        if not others_may_work(state, replica.role):
            return rejected((f"{replica.id}: {finding.evidence[0].text}",))
    return None


def no_fit_node(state: State) -> Finish | None:
    """Return the decision to reject a run if its nodes cannot run its roles, and none of these roles has ever joined.

    The run is rejected if it, or one of its node groups, has no fit node. At least two nodes must have proved unfit.
    One unfit node suffices if the run has no fit node and expects no further nodes.
    """
    unfit = unfit_nodes(state)
    if not unfit:
        return None
    expected = any(allocation.pending for allocation in state.allocations.values())
    used = {name: node for name, node in state.nodes.items() if node.allocation and node.excluded is None}
    all_roles = [role for node_group in state.job.node_groups for role in node_group.roles]
    for roles, node_group in [
        (all_roles, None),
        *(
            (node_group.roles, node_group.name)
            for node_group in state.job.node_groups
            if not (node_group.dedicated and others_may_work(state, node_group.name))
        ),
    ]:
        nodes = [name for name, node in state.nodes.items() if node_group is None or node.node_group == node_group]
        bad = [name for name in nodes if name in unfit]
        enough = len(bad) >= TRIES_TO_PROVE or (bool(bad) and node_group is None and not expected)
        any_fit = any(name in used and name not in unfit for name in nodes)
        if (
            enough
            and not any_fit
            and not any(replica.ever_joined for replica in state.workers if replica.role in roles)
        ):
            return rejected((f"{unfit[bad[-1]]} on {_node_list(bad)}",))
    return None


def rejected(why: tuple[str, ...]) -> Finish:
    """Return the decision to end a run that the job spec or the site's configuration makes impossible."""
    advice, lower = "correct the job spec or the site's set-up, and resubmit", every_lower("a start that can succeed")
    return Finish(Outcome.REJECTED, Why(why, Rung.GIVE_UP, advice, lower=lower))


def role_exhausted(state: State, replica: Replica, dropped: set[ReplicaId]) -> bool:
    """Return whether all other replicas of the role, or of all rollout pools, are retired and none has ever joined.

    ``dropped`` are gangs that this plan has retired already.
    """
    without = {gang_of(replica.id), *dropped}
    replicas = substitute_replicas(state, replica.role)
    others = [other for other in replicas if gang_of(other.id) not in without]
    given_up = [other for other in replicas if gang_of(other.id) in dropped]
    tried = [other for other in others if other.status is not Status.RETIRED]
    return not tried and not any(other.ever_joined for other in (*others, *given_up))


def _not_started_tries(state: State, replica: Replica) -> list[tuple[str, NodeName]]:
    """Return (reported text, node) of each start of this replica that did not find the command."""
    tries = [(failure.not_started, failure.node) for failure in replica.failures if failure.not_started is not None]
    finding = finding_about(state, replica.incarnation) if replica.is_current else None
    if finding is not None and replica.node is not None and Flag.NOT_STARTED in finding.flags:
        tries.append((finding.evidence[0].text, replica.node))
    return tries


def _node_list(nodes: Iterable[NodeName]) -> str:
    """Return the nodes' names as text, the first few named and the others counted."""
    names = list(dict.fromkeys(nodes))
    return ", ".join(names[:MAX_NAMED_NODES]) + (
        f" and {len(names) - MAX_NAMED_NODES} more" if len(names) > MAX_NAMED_NODES else ""
    )
