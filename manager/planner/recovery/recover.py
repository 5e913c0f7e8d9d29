"""From finding to rung: what to give up believing in, and how to get it back.

Everything decided here is a :class:`Fence` (a life is no longer believed), an :class:`Exclude` (a node is no longer
used), a :class:`RestartAll` (no role's life is believed) or a :class:`Finish` (the ladder's last rung). Placement and
supply then do the rest. Which repair it is stands in ``ladder``; here is who failed, and how far down it has come.

A gang is repaired as one. Of its members one is taken to have failed, and pays for it; that it is no longer believed is
why the others are not either, which is decided from the state alone: a manager may die between any two records.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from ....core.types import AGENT, Life, NodeName, Outcome, ReplicaId, gang_of
from ...model.actions import Decision, Fence, Finish, RestartAll, Rung, Why
from ...model.queries import finding_about
from ...model.reduce_commands import REQUEUE
from ...model.state import Replica, State, Status
from ..capacity.nodes import Rooms
from .failure_class import against_software, all_given_up, never_joined, not_there, nowhere, rejected
from .ladder import HELPER, HELPERS, POLICIES, Case, can_spare, depth, often, whole_spent
from .node_exclusion import condemn, in_words

_Members = Sequence[Replica]


def recover(state: State, rooms: Rooms, now: float) -> list[Decision]:
    """Decisions for everything that failed. ``now``: manager's time (s), for the restart budgets' window."""
    if (mistake := not_there(state, rooms) or nowhere(state)) is not None:
        return [mistake]
    excludes = condemn(state, rooms)
    condemned = {exclude.node for exclude in excludes}
    decisions: list[Decision] = [*excludes, *_in_the_way(state, rooms, now)]
    spared: set[ReplicaId] = set()
    for members in (*rooms.gangs, *([one] for one in state.replicas.values() if one.role in HELPERS)):
        decided = _asked(state, members, now) or _others(state, members, now)
        if not decided and (decision := _failed(state, rooms, members, condemned, spared, now)) is not None:
            decided = [decision]
        decisions += decided
        for one in decided:
            if isinstance(one, Fence) and one.rung is Rung.SPARE and one.to is not None and one.charged:
                rooms.promise(state.replica(one.life.replica), one.to)
        if any(isinstance(one, Finish | RestartAll) for one in decided):
            break
        if any(isinstance(one, Fence) and one.rung is Rung.DEGRADED for one in decided):
            spared.add(gang_of(members[0].id))
    return decisions


# ── not for a failure of its own ─────────────────────────────────────────────────────────────────────────────────────
def _asked(state: State, members: _Members, now: float) -> list[Decision]:
    """A person wants it to restart, all of it; also one that was gone on without, and one that pauses."""
    if (by := state.restarts.get(gang_of(members[0].id))) is None:
        return []
    why = Why((f"asked by {by}",), Rung.IN_PLACE, "joins again", now + state.job.limits.join)
    return [Fence(one.life, Rung.IN_PLACE, why, charged=False) for one in members]


def _others(state: State, members: _Members, now: float) -> list[Decision]:
    """The members of a gang whose newest life one of them has left: none of them goes on alone. Each keeps its node;
    who shared that of the failed one goes with it."""
    if len(members) == 1:
        return []
    newest = max(one.incarnation for one in members)
    left = [one for one in members
            if one.incarnation == newest and one.status in (Status.WANTED, Status.RETIRED)]  # fmt: skip
    if not left:
        return []
    retired = next((one for one in left if one.status is Status.RETIRED), None)
    first = retired or min(left, key=lambda one: one.since)
    said = first.failures[-1].why if first.failures and first.failures[-1].at == first.since else "it is fenced"
    evidence = (f"its gang restarts: {first.life}: {said}",)
    if retired is not None:
        why = Why((f"its gang is gone on without: {first.life}",), Rung.DEGRADED, f"{first.role} goes on without it")
        rest = [one for one in members if one.believed or one.status is Status.WANTED]
        return [Fence(one.life, Rung.DEGRADED, why, charged=False) for one in rest]
    fences: list[Decision] = []
    for one in (one for one in members if one.believed):
        moves = one.node == first.node and first.prefer != first.node
        rung = Rung.SPARE if moves else Rung.IN_PLACE
        why = Why(evidence, rung, "joins again with its gang", now + state.job.limits.join)
        fences.append(Fence(one.life, rung, why, first.prefer if moves else None, charged=False))
    return fences


def _in_the_way(state: State, rooms: Rooms, now: float) -> list[Decision]:
    """Rollouts on whose nodes a shadow is to become a member: they move, and are made up for."""
    found: dict[Life, Decision] = {}
    for role in state.job.roles:
        members = (one for gang in rooms.gangs for one in gang if one.role == role.name) if role.standbys else ()
        for member in members:
            for rollout in rooms.in_the_way(member) if member.status is Status.WANTED else ():
                evidence = (f"{member.id} is wanted on {rollout.node}, where a shadow waits to become it",)
                within = state.job.limits.allocation + state.job.limits.join
                why = Why(evidence, Rung.STANDBY, f"{rollout.id} joins again on another node", now + within)
                found[rollout.life] = Fence(rollout.life, Rung.STANDBY, why, charged=False)
    return list(found.values())


# ── for its own ──────────────────────────────────────────────────────────────────────────────────────────────────────
def _failed(
    state: State, rooms: Rooms, members: _Members, condemned: set[NodeName], spared: set[ReplicaId], now: float
) -> Decision | None:
    """What is decided about the gang for the sake of the member that failed. While a node's exclusion is undecided,
    nothing is: that comes first."""
    failing = [(one, evidence) for one in members if one.believed and (evidence := _lost(state, one))]
    if condemned and any(one.node in condemned for one in members if one.believed):
        return None
    if failing:
        member, evidence = min(failing, key=lambda pair: _blame(state, pair[0]))
        return _choose(Case(state, rooms, now, member, spared), members, evidence)
    for member in members:
        if member.status is Status.WANTED and member.failures:
            decision = _unlaunched(Case(state, rooms, now, member, spared))
            if decision is not None:
                return decision
    return None


def _blame(state: State, member: Replica) -> tuple[bool, float]:
    """Of several that fail, the first is to blame: the others go down with it. A node that is gone comes before all."""
    finding = finding_about(state, member.life)
    node = state.nodes.get(member.node) if member.node is not None else None
    gone = node is None or node.excluded is not None
    return not gone, finding.since if finding is not None else 0.0


def _lost(state: State, replica: Replica) -> tuple[str, ...]:
    """Why this life cannot go on, in the words of the evidence; empty when it can."""
    finding = finding_about(state, replica.life)
    if finding is not None:
        return in_words(finding)
    if replica.node is None:
        return ()
    node = state.nodes.get(replica.node)
    if node is None:
        return (f"{replica.node} is no longer part of an allocation of ours",)
    if node.excluded is not None:
        return (f"{replica.node} is excluded: {node.excluded}",)
    return ()


def _unlaunched(case: Case) -> Decision | None:
    """It waits for its next launch; the cluster has refused too many, or too many came to nothing."""
    newest = case.failed.failures[-1]
    if mistake := never_joined(case.state, case.failed, (newest.why,), newest.detector):
        return _never(case, mistake)
    if case.recent > case.state.job.recovery.per_replica:
        return _down(case, ("its launches were refused", _spent(case)), Rung.DEGRADED)
    return None


def _choose(case: Case, members: _Members, evidence: tuple[str, ...]) -> Decision:
    """The first rung of the ladder that fits: from the top, unless the evidence speaks for more."""
    state, failed = case.state, case.failed
    finding = finding_about(state, failed.life)
    if mistake := never_joined(state, failed, evidence, finding.detector if finding is not None else ""):
        return _never(case, mistake)
    if case.recent >= state.job.recovery.per_replica:
        return _down(case, (*evidence, _spent(case)), Rung.DEGRADED)
    if state.job.recovery.policy == "role" and (found := against_software(state, members, failed, case.now)):
        return _down(case, (*evidence, *found), Rung.WHOLE)
    return _down(case, evidence, Rung.IN_PLACE)


def _down(case: Case, evidence: tuple[str, ...], least: Rung) -> Decision:
    """The first rung of its policy that fits, from ``least`` on."""
    state, failed = case.state, case.failed
    case = msgspec.structs.replace(case, least=least)
    steps = HELPER if failed.role in HELPERS else POLICIES[state.job.recovery.policy]
    step = next(step for step in steps if depth(step.rung) >= depth(least) and step.fits(case))
    to = step.to(case)
    expects = step.expects.format(member=failed.id, role=failed.role, node=failed.node, to=to)
    why = Why(evidence, step.rung, expects, case.now + step.within(state))
    if step.rung is Rung.WHOLE:
        return RestartAll(why, tuple(_everybody(case, why)))
    if step.rung is Rung.GIVE_UP:
        tried = whole_spent(state, failed, case.now) if state.wholes else ""
        evidence = (*evidence, *((tried,) if tried else ()), f"rrl logs {state.run} --failed shows its last lines")
        return Finish(Outcome.FAILED, msgspec.structs.replace(why, evidence=evidence))
    return Fence(failed.life, step.rung, why, to)


def _everybody(case: Case, why: Why) -> Iterator[Fence]:
    """Nobody but the failed one is charged, and all keep their places, but for one that fails too often on its node.
    Agents stay where the nodes do: they are not the run's software. Who has done its work, or was gone on without,
    stays so. No shadow is taken over: what it has built may be what is wrong, and there is a new one after the next
    commit."""
    requeue = case.state.job.recovery.policy == REQUEUE
    for one in case.state.replicas.values():
        if not one.believed or (one.role == AGENT and not requeue):
            continue
        failed = one.id == case.failed.id
        moves = requeue or one.role in HELPERS or (failed and often(case))
        yield Fence(one.life, Rung.WHOLE, why, None if moves else one.node, charged=failed)


def _spent(case: Case) -> str:
    return f"{case.recent} restarts of {case.failed.id} within {case.state.job.recovery.window:g} s"


def _never(case: Case, mistake: tuple[str, ...]) -> Decision:
    """It fails wherever it starts: the run goes on without it if it can, and if others of its role do better."""
    state, failed = case.state, case.failed
    if can_spare(state, failed, case.spared) and not all_given_up(state, failed, case.spared):
        within = case.now + state.job.recovery.window
        why = Why(mistake, Rung.DEGRADED, f"{failed.role} goes on with one replica less", within)
        return Fence(failed.life, Rung.DEGRADED, why)
    return rejected(mistake)
