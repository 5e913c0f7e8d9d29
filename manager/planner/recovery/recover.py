"""Decide how to repair each failure: what to fence or exclude, and when to restart or end the run.

A decision is a :class:`Fence`, an :class:`Exclude`, a :class:`RestartAll` or a :class:`Finish`. Placement and
allocations act on the state that results from it. ``ladder`` defines the repairs. This module finds what failed, and
the rung from which to look for a repair.

A gang is repaired as a whole. One member counts as the failed member and is charged for the failure. When it is fenced,
the other members are fenced, too. These fences follow from the state alone: if a manager dies after it has journaled
only some of them, the next manager decides the other ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from ....core.types import AGENT, SUPPORT_ROLES, NodeName, Outcome, ReplicaId, gang_of, role_of
from ...model.actions import (
    Decision,
    Fence,
    Finish,
    LowerRungs,
    Resize,
    RestartAll,
    Rung,
    Why,
    WithdrawGuests,
    every_lower,
)
from ...model.queries import finding_about, guests_are_essential, place_of
from ...model.state import Replica, State, Status
from ..capacity.guests import CROWDED_TO_WITHDRAW, crowded_again
from ..capacity.nodes import NodeInventory
from .ladder import (
    FailureCase,
    budget_needed,
    can_degrade,
    fails_often_here,
    full_restarts_exhausted,
    ladder_of,
    lower_rungs,
    remaining_gangs,
    severity,
)
from .node_exclusion import DeferredExclusion, exclusions, limit_exclusions
from .rejection import command_missing, invalid_config, never_joined, no_fit_node, rejected, role_exhausted
from .repeated_end import failed_by_code, repeated_clean_exit, repeated_exception, unrepairable
from .software_fault import suggests_software_fault

_Members = Sequence[Replica]


def recover(state: State, inventory: NodeInventory, now: float) -> tuple[list[Decision], list[DeferredExclusion]]:
    """Return the decisions for everything that failed, and the exclusions that the circuit breaker holds back.

    ``now`` is the manager's time (s).
    """
    mistake: Decision | None
    mistake = invalid_config(state) or unrepairable(state) or command_missing(state, inventory) or no_fit_node(state)
    mistake = mistake or _withdraw_guests(state, now)
    if mistake is not None:
        return [mistake], []
    excludes, deferred = limit_exclusions(state, exclusions(state, inventory), now)
    held_back = {one.exclude.node for one in deferred}
    excluded_nodes = {exclude.node for exclude in excludes} | (held_back - inventory.barred)
    decisions: list[Decision] = [*excludes, *_vacate_for_promotion(state, inventory, now)]
    dropped: set[ReplicaId] = set()
    for members in (
        *inventory.gangs,
        *([replica] for replica in state.replicas.values() if replica.role in SUPPORT_ROLES),
    ):
        decided = _user_restart(state, members, now) or _fence_rest_of_gang(state, members, now)
        if not decided:
            if (decision := _repair_gang(state, inventory, members, excluded_nodes, dropped, now)) is None:
                continue
            decided = [decision]
        decisions += decided
        for decision in decided:
            if (
                isinstance(decision, Fence)
                and decision.rung is Rung.STANDBY
                and decision.target_node is not None
                and decision.charged
            ):
                inventory.reserve(state.replica(decision.incarnation.replica), decision.target_node)
        if any(isinstance(decision, Finish | RestartAll) for decision in decided):
            break
        if any(isinstance(decision, Fence) and decision.rung is Rung.DEGRADED for decision in decided):
            dropped.add(gang_of(members[0].id))
    return decisions, deferred


def _withdraw_guests(state: State, now: float) -> Decision | None:
    """Return the decision to go on without guests because they leave the trainer too little memory; else None.

    A run in which nothing else generates ends.
    """
    if (finding := crowded_again(state, now)) is None:
        return None
    times = f"{CROWDED_TO_WITHDRAW} times within {state.job.recovery.window:g} s"
    evidence = (
        f"{finding.incarnation}: {finding.exception}",
        f"the trainer found too little memory on its GPUs {times} while it shared them with guests",
    )
    needed = "guests that leave more memory: lower gpu_memory_utilization in [roles.rollout.vllm]"
    if guests_are_essential(state):
        return failed_by_code(state, (*evidence, "nothing else generates"), "its traceback", needed)
    return WithdrawGuests(Why(evidence, Rung.DEGRADED, lower=every_lower(needed)))


# ── restarts and moves without a failure of the member ───────────────────────────────────────────────────────────────
def _user_restart(state: State, members: _Members, now: float) -> list[Decision]:
    """Return the fences for a gang that a user wants to restart, including retired members and members in back-off."""
    if (by := state.requested_restarts.get(gang_of(members[0].id))) is None:
        return []
    why = Why((f"restart requested by {by}",), Rung.IN_PLACE, "joins again", now + state.job.limits.join)
    return [Fence(member.incarnation, Rung.IN_PLACE, why, charged=False) for member in members]


def _fence_rest_of_gang(state: State, members: _Members, now: float) -> list[Decision]:
    """Return the fences of the other members of a gang if one member no longer runs the gang's newest incarnation.

    Each member keeps its node, unless it shared a node that the failed member leaves.
    """
    if len(members) == 1:
        return []
    newest = max(member.incarnation_number for member in members)
    departed = [
        member
        for member in members
        if member.incarnation_number == newest and member.status in (Status.WANTED, Status.RETIRED)
    ]
    if not departed:
        return []
    retired = next((member for member in departed if member.status is Status.RETIRED), None)
    first = retired or min(departed, key=lambda member: member.since)
    reason = first.failures[-1].why if first.failures and first.failures[-1].at == first.since else "it was stopped"
    whole = gang_of(first.id)
    evidence = (f"{whole} restarts as a whole: {first.incarnation}: {reason}",)
    together = every_lower(f"{first.incarnation} to stay: the processes of {whole} start and end together")
    if retired is not None:
        evidence = (f"{whole} is given up as a whole, with {first.incarnation}",)
        why = Why(evidence, Rung.DEGRADED, f"{first.role} continues without it", lower=together)
        rest = [member for member in members if member.is_current or member.status is Status.WANTED]
        return [Fence(member.incarnation, Rung.DEGRADED, why, charged=False) for member in rest]
    fences: list[Decision] = []
    for member in (member for member in members if member.is_current):
        moves = member.node == first.node and first.preferred_node != first.node
        rung = Rung.SPARE if moves else Rung.IN_PLACE
        deadline = now + state.job.limits.join
        why = Why(
            evidence, rung, f"joins again with the other processes of {whole}", deadline, together if moves else ()
        )
        fences.append(Fence(member.incarnation, rung, why, first.preferred_node if moves else None, charged=False))
    return fences


def _vacate_for_promotion(state: State, inventory: NodeInventory, now: float) -> list[Decision]:
    """Return the decisions by which rollouts leave nodes that are needed for the promotion of a standby process.

    As many of them as there are extras leave the run. The others are launched again on other nodes.
    """
    stop: list[ReplicaId] = []
    fences: dict[ReplicaId, Decision] = {}
    evidence: list[str] = []
    roles = {role.name for role in state.job.roles if role.warm}
    gangs = (members for members in inventory.gangs if members[0].role in roles)
    for member, leaving in (pair for members in gangs for pair in inventory.rollouts_to_displace(members)):
        for rollout in leaving:
            if rollout.id in stop or rollout.id in fences:
                continue
            node = place_of(rollout)
            needed = f"{member.id} is wanted on {node}, where a standby process can be promoted to it"
            if len(stop) < len(inventory.extras):
                stop.append(rollout.id)
                evidence.append(needed)
                continue
            time_limit = state.job.limits.allocation + state.job.limits.join
            expects = f"{rollout.id} joins again on another node"
            lower = (LowerRungs((Rung.IN_PLACE,), f"{node} not to be needed for {member.id}"),)
            why = Why((needed,), Rung.STANDBY, expects, now + time_limit, lower)
            fences[rollout.id] = Fence(rollout.incarnation, Rung.STANDBY, why, charged=False)
    if not stop:
        return list(fences.values())
    why = Why(
        tuple(dict.fromkeys(evidence)), expects=f"{len(inventory.extras) - len(stop)} rollouts are left on spares"
    )
    return [Resize(role_of(stop[0]), (), tuple(stop), why), *fences.values()]


# ── repairs of a failed member ───────────────────────────────────────────────────────────────────────────────────────
def _repair_gang(
    state: State,
    inventory: NodeInventory,
    members: _Members,
    excluded_nodes: set[NodeName],
    dropped: set[ReplicaId],
    now: float,
) -> Decision | None:
    """Return the decision about a gang if one of its members has failed; None if no member has failed.

    Also return None while a current member is on one of ``excluded_nodes``, because such a node is excluded first.
    ``excluded_nodes`` are the nodes that this plan excludes, and the nodes whose exclusion the circuit breaker holds
    back, except barred nodes. A member that failed on a barred node need not wait for the exclusion of the node,
    because it is launched on another node anyway.
    """
    failing = [
        (member, evidence) for member in members if member.is_current and (evidence := _failure_evidence(state, member))
    ]
    if excluded_nodes and any(member.node in excluded_nodes for member in members if member.is_current):
        return None
    if failing:
        member, evidence = min(failing, key=lambda pair: _failure_order(state, pair[0]))
        return _choose_rung(FailureCase(state, inventory, now, member, dropped), members, evidence)
    for member in members:
        if member.status is Status.WANTED and member.failures:
            decision = _launches_exhausted(FailureCase(state, inventory, now, member, dropped))
            if decision is not None:
                return decision
    return None


def _failure_order(state: State, member: Replica) -> tuple[bool, float]:
    """Return the key by which the failed member is chosen: lost nodes first, then the earliest finding.

    The first failure is taken for the cause: the other members usually fail because of it.
    """
    finding = finding_about(state, member.incarnation)
    node = state.nodes.get(member.node) if member.node is not None else None
    node_lost = node is None or node.excluded is not None
    return not node_lost, finding.since if finding is not None else 0.0


def _failure_evidence(state: State, replica: Replica) -> tuple[str, ...]:
    """Return why the current incarnation cannot continue; empty if it can continue.

    If a finding is about the replica, the result contains only the texts of its evidence, which users read as the
    cause.
    """
    finding = finding_about(state, replica.incarnation)
    if finding is not None:
        return tuple(evidence.text for evidence in finding.evidence)
    if replica.node is None:
        return ()
    node = state.nodes.get(replica.node)
    if node is None:
        return (f"{replica.node} is no longer in an allocation of this run",)
    if node.excluded is not None:
        return (f"{replica.node} is excluded: {node.excluded}",)
    return ()


def _launches_exhausted(case: FailureCase) -> Decision | None:
    """Return the decision about a member if its launches failed or were refused too often; else None."""
    newest = case.failed.failures[-1]
    if mistake := never_joined(case.state, case.failed, (newest.why,), newest.detector):
        return _reject_or_degrade(case, mistake)
    if newest.refused and case.recent_failures > case.budget:
        return _first_rung_from(case, (*_refused_text(case), _budget_text(case)), Rung.DEGRADED, budget_needed(case))
    return None


def _refused_text(case: FailureCase) -> tuple[str, ...]:
    """Return how many of a member's recent launches were refused, and the reason of the newest refusal."""
    recent = case.failed.recent_failures(case.state.job.recovery.window, case.now)
    refused = sum(failure.refused for failure in recent)
    text = f"refused launches: {refused} of its {len(recent)} recent failures"
    return tuple(filter(None, ("its launches were refused" if refused == len(recent) else text, recent[-1].why)))


def _choose_rung(case: FailureCase, members: _Members, evidence: tuple[str, ...]) -> Decision:
    """Return the decision for a failed member: the first rung that fits.

    The search begins with the least severe rung that the evidence permits. If every start of the member
    fails in the same way, there is no search: the member is retired, or the run ends.
    """
    state, failed = case.state, case.failed
    finding = finding_about(state, failed.incarnation)
    if repeated := repeated_exception(state, failed):
        return _fail_or_degrade(case, repeated, "its traceback", "starts that do not end with the same exception")
    if repeated := repeated_clean_exit(state, failed):
        return _fail_or_degrade(case, repeated, "its last lines", "a program that does not return early at each start")
    if mistake := never_joined(state, failed, evidence, finding.detector if finding is not None else ""):
        return _reject_or_degrade(case, mistake)
    if case.recent_failures >= case.budget:
        return _first_rung_from(case, (*evidence, _budget_text(case)), Rung.DEGRADED, budget_needed(case))
    if state.job.recovery.policy == "role" and (
        software_evidence := suggests_software_fault(state, members, failed, case.now)
    ):
        needed = f"a failure that a restart of {gang_of(failed.id)} alone may cure"
        return _first_rung_from(case, (*evidence, *software_evidence), Rung.FULL_RESTART, needed)
    return _first_rung_from(case, evidence, Rung.IN_PLACE, "")


def _first_rung_from(case: FailureCase, evidence: tuple[str, ...], first_rung: Rung, skipped: str) -> Decision:
    """Return the decision for the first rung that fits and is at least as severe as ``first_rung``.

    ``skipped`` says what the less severe rungs of the policy would have needed.
    """
    state, failed = case.state, case.failed
    case = msgspec.structs.replace(case, first_rung=first_rung)
    policy = ladder_of(state, failed)
    repair = next(spec for spec in policy if severity(spec.rung) >= severity(first_rung) and spec.fits(case))
    target = repair.target_node(case)
    expects = repair.expects.format(member=failed.id, role=failed.role, node=failed.node, to=target)
    lower = lower_rungs(policy, repair, case, skipped)
    why = Why(evidence, repair.rung, expects, case.now + repair.time_limit(state), lower)
    if repair.rung is Rung.FULL_RESTART:
        return RestartAll(why, tuple(_fence_all(case, why)))
    if repair.rung is Rung.GIVE_UP:
        exhausted = full_restarts_exhausted(state, failed, case.now) if state.full_restarts else ""
        evidence = (
            *evidence,
            *((exhausted,) if exhausted else ()),
            f"rrl logs {state.run} --failed shows its last lines",
        )
        return Finish(Outcome.FAILED, msgspec.structs.replace(why, evidence=evidence))
    return Fence(failed.incarnation, repair.rung, why, target)


def _fence_all(case: FailureCase, why: Why) -> Iterator[Fence]:
    """Yield the fences of a restart of the whole run.

    Only the failed member is charged. All replicas keep their nodes, except a failed member that fails too often on its
    node. The agents keep running. Completed and retired replicas are not fenced. Standby processes are fenced, since
    their state may be wrong. New standby processes start after the next commit.
    """
    for replica in case.state.replicas.values():
        if not replica.is_current or replica.role == AGENT:
            continue
        failed = replica.id == case.failed.id
        moves = replica.role in SUPPORT_ROLES or (failed and fails_often_here(case))
        yield Fence(replica.incarnation, Rung.FULL_RESTART, why, None if moves else replica.node, charged=failed)


def _budget_text(case: FailureCase) -> str:
    """Return the number of recent restarts as text."""
    return f"{case.recent_failures} restarts of {case.failed.id} within {case.state.job.recovery.window:g} s"


def _reject_or_degrade(case: FailureCase, mistake: tuple[str, ...]) -> Decision:
    """Retire a member that fails on every node, if its role can spare it; otherwise end the run.

    The run also ends if all other replicas of the role are retired and none of them has ever joined. ``mistake`` is the
    evidence (:func:`never_joined`).
    """
    state, failed = case.state, case.failed
    if can_degrade(state, failed, case.dropped) and not role_exhausted(state, failed, case.dropped):
        return _retire(case, mistake, f"a start of {failed.id} that joins")
    return rejected(mistake)


def _fail_or_degrade(case: FailureCase, evidence: tuple[str, ...], shown: str, needed: str) -> Decision:
    """Retire a member whose own code fails, if other replicas of its role may still work; otherwise end the run.

    ``shown`` is the text about the failure that users see; ``needed`` is what a restart would have needed.
    """
    state, failed = case.state, case.failed
    if can_degrade(state, failed, case.dropped) and remaining_gangs(state, failed, case.dropped):
        return _retire(case, evidence, needed)
    return failed_by_code(state, evidence, shown, needed)


def _retire(case: FailureCase, evidence: tuple[str, ...], needed: str) -> Fence:
    """Return the fence that retires the failed member, so that its role continues without it.

    ``needed`` is what a restart would have needed.
    """
    deadline = case.now + case.state.job.recovery.window
    expects = f"{case.failed.role} continues with one replica fewer"
    why = Why(evidence, Rung.DEGRADED, expects, deadline, every_lower(needed))
    return Fence(case.failed.incarnation, Rung.DEGRADED, why)
