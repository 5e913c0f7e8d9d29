"""The repair ladder as data: its rungs, from the cheapest repair to the end of the run.

Each rung consists of what it needs, the result that is expected, and the time limit for this result. A policy is a
tuple of rungs. ``recover`` takes the first rung whose needs are met, beginning with the rung that the evidence
suggests. The decision also records what the rungs before the taken one lacked, and ``rrl explain`` shows this.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from ....core.text import plural
from ....core.types import GUEST_ROLE, SUPPORT_ROLES, NodeName, ReplicaId, gang_of
from ...model.actions import LowerRungs, Rung
from ...model.queries import gang, guests_are_essential, reached_step, restart_budget, substitute_replicas
from ...model.reduce_replicas import MAX_RESTART_BACKOFF_S
from ...model.state import Replica, State, Status
from ..capacity.nodes import NodeInventory
from ..deadlines import SHUTDOWN_GRACES
from .repeated_end import starts_with_same_exception


class FailureCase(Struct, frozen=True):
    """A member that failed or cannot be launched, and the least severe rung that may repair it."""

    state: State
    inventory: NodeInventory
    now: float
    failed: Replica
    dropped: set[ReplicaId]
    """Gangs that this plan retires already."""
    first_rung: Rung = Rung.IN_PLACE
    """Least severe rung that may be taken, according to the evidence."""

    @property
    def recent_failures(self) -> int:
        """Return the number of the failed member's failures within the recovery window."""
        return len(self.failed.recent_failures(self.state.job.recovery.window, self.now))

    @property
    def budget(self) -> int:
        """Return how many failures of the failed member within the window are each answered by a restart."""
        return restart_budget(self.state, self.failed)


class Need(Struct, frozen=True):
    """A condition that a rung needs."""

    is_met: Callable[[FailureCase], bool]
    text: Callable[[FailureCase], str]
    """Noun phrase for users about what is missing if the condition is not met."""


class RungSpec(Struct, frozen=True):
    """A rung of a policy: what it needs, what it should achieve, and by when."""

    rung: Rung
    needs: tuple[Need, ...]
    expects: str
    """Expected result as text. It may contain ``{member}``, ``{role}`` and ``{node}`` of the failed member, and
    ``{to}``, the target node of the rung."""
    time_limit: Callable[[State], float]
    """Time (s) for the expected result. If the result has not occurred by then, this counts as another failure, and the
    ladder is entered again."""
    target_node: Callable[[FailureCase], NodeName | None] = lambda case: None
    """Node on which the member is launched next. If it is None, the rung ``IN_PLACE`` keeps the member's own node, and
    with any other rung the placement chooses a node."""

    def fits(self, case: FailureCase) -> bool:
        """Return whether all needs of the rung are met."""
        return all(need.is_met(case) for need in self.needs)


def severity(rung: Rung) -> int:
    """Return the severity of a rung.

    The severity is 0 for every repair of a single replica. Which of these repairs is tried first depends on their order
    in the policy.
    """
    return {Rung.DEGRADED: 1, Rung.FULL_RESTART: 2, Rung.GIVE_UP: 3}.get(rung, 0)


# ── what a rung needs ────────────────────────────────────────────────────────────────────────────────────────────────
def _node_text(case: FailureCase) -> str:
    return f"{case.failed.node} in use" if case.failed.node else f"a node on which {case.failed.id} ran"


def _few_failures_text(case: FailureCase) -> str:
    limit, member = case.state.job.recovery.per_node, case.failed
    return f"fewer than {limit} failures of {member.id} on {member.node} within {_window_text(case)}"


def budget_needed(case: FailureCase) -> str:
    """Return what would have allowed another restart of the failed member alone, as a noun phrase."""
    return f"fewer than {case.budget} restarts of {case.failed.id} within {_window_text(case)}"


def _window_text(case: FailureCase) -> str:
    return f"{case.state.job.recovery.window:g} s"


def _min_replicas_text(case: FailureCase) -> str:
    least = case.state.job.role(case.failed.role).min_replicas
    return f"{plural(least, 'other replica')} of {case.failed.role}" if least else "a role that can shrink"


def _standby_text(case: FailureCase) -> str:
    """Return what promotion needs, with the reason why the standby processes on the member's node are not ready."""
    role, node = case.failed.role, case.failed.node
    there = [one for one in case.inventory.standby_processes if one.node == node]
    states = (
        ", ".join(_standby_state(one, case.now) for one in there) or "there was none: they start after its first step"
    )
    return f"a ready standby process of {role} on {node} ({states})"


def _standby_state(standby: Replica, now: float) -> str:
    """Return what a standby process has been doing, and for how long, for people."""
    if standby.is_current:
        doing = "ready" if standby.status is Status.JOINED else "starting"
        return f"{standby.id} has been {standby.phase or doing} for {now - standby.since:.0f} s"
    last = standby.failures[-1] if standby.failures else None
    return f"{standby.id} does not run" + (f": {last.why}, {now - last.at:.0f} s ago" if last else "")


_NODE_USABLE = Need(lambda case: case.inventory.is_usable(case.failed.node), _node_text)
_NODE_NOT_BARRED = Need(
    lambda case: not case.inventory.is_usable(case.failed.node) or case.failed.node not in case.inventory.barred,
    lambda case: f"messages from {case.failed.node}, and no proof of its failure",
)
_FEW_FAILURES_HERE = Need(lambda case: not fails_often_here(case), _few_failures_text)
_FURTHER_TRY = Need(
    lambda case: not _last_try_on_other_node(case),
    lambda case: "two remaining starts, since the last start is made on another node",
)
_TRANSIENT = (_NODE_USABLE, _NODE_NOT_BARRED, _FEW_FAILURES_HERE, _FURTHER_TRY)
"""Needs of a restart on the same node. If they are met, this restart is likely to help."""
_STANDBY_HERE = Need(
    lambda case: bool(case.inventory.ready_standbys(case.failed.node, case.failed.role)), _standby_text
)
_STANDBY_ELSEWHERE = Need(
    lambda case: case.inventory.node_to_take(case.failed) is not None,
    lambda case: f"a spare, or a node that rollouts can leave, with a ready standby process of {case.failed.role}",
)
_FREE_NODE = Need(
    lambda case: case.inventory.can_place(case.failed), lambda case: f"another free node that can host {case.failed.id}"
)
_NODE_NOT_AT_FAULT = Need(
    lambda case: not case.inventory.new_node_helps(case.failed),
    lambda case: f"failures of {case.failed.id} on other nodes, too",
)
_ENOUGH_REPLICAS = Need(lambda case: can_degrade(case.state, case.failed, case.dropped), _min_replicas_text)
_CHECKPOINTS = Need(lambda case: bool(case.state.job.steps), lambda case: "training steps, from which it can continue")
_STARTED = Need(lambda case: case.failed.is_current, lambda case: f"a start of {case.failed.id} that is not refused")
_FULL_RESTART_LEFT = Need(
    lambda case: not full_restarts_exhausted(case.state, case.failed, case.now),
    lambda case: f"another restart to be allowed ({full_restarts_exhausted(case.state, case.failed, case.now)})",
)
_BUDGET_LEFT = Need(lambda case: case.first_rung is Rung.IN_PLACE, budget_needed)
_GUEST_SPARED = Need(
    lambda case: not case.inventory.is_usable(case.failed.node) or can_degrade(case.state, case.failed, case.dropped),
    lambda case: "another guest",
)


def lower_rungs(
    policy: tuple[RungSpec, ...], taken: RungSpec, case: FailureCase, skipped: str
) -> tuple[LowerRungs, ...]:
    """Return what the rungs of a policy before the taken one would have needed.

    Args:
        policy: All rungs.
        taken: The rung that fits.
        case: The failure.
        skipped: What the rungs that were not considered would have needed, as a noun phrase. They were not considered
            because the evidence called for a more severe rung.
    """
    before = policy[: policy.index(taken)]
    unsuited = tuple(dict.fromkeys(spec.rung for spec in before if severity(spec.rung) < severity(case.first_rung)))
    lower = [LowerRungs(unsuited, skipped)] if unsuited else []
    tried = [spec for spec in before if spec.rung not in unsuited and not _promotes_without_standbys(spec, case)]
    lacking = [(spec.rung, [need for need in spec.needs if not need.is_met(case)]) for spec in tried]
    for rung, missing in lacking:
        # Of two rungs of the same kind, only the one that lacked less is recorded.
        if not any(other == rung and set(fewer) < set(missing) for other, fewer in lacking):
            lower.append(LowerRungs((rung,), " and ".join(need.text(case) for need in missing)))
    return tuple(lower)


def _promotes_without_standbys(spec: RungSpec, case: FailureCase) -> bool:
    """Return whether the rung promotes a standby process, although the job keeps none for the failed member's role."""
    promotes = any(need in (_STANDBY_HERE, _STANDBY_ELSEWHERE) for need in spec.needs)
    return promotes and not case.state.job.role(case.failed.role).warm


def _last_try_on_other_node(case: FailureCase) -> bool:
    """Return whether the next start is the member's last one, and another node could host it.

    The number of starts is limited to ``recovery.first_start`` in two cases: the member has never joined, or the same
    exception has ended each start.
    """
    unjoined = 0 if case.failed.ever_joined else case.failed.failed_starts + 1
    failed_starts = max(unjoined, starts_with_same_exception(case.state, case.failed))
    return failed_starts + 1 >= case.state.job.recovery.first_start and case.inventory.can_place(case.failed)


def fails_often_here(case: FailureCase) -> bool:
    """Return whether the member has failed too often on its node."""
    failures_here = sum(
        failure.node == case.failed.node for failure in case.failed.recent_failures(_window(case.state), case.now)
    )
    return failures_here >= case.state.job.recovery.per_node


def can_degrade(state: State, failed: Replica, dropped: set[ReplicaId]) -> bool:
    """Return whether the role keeps its ``min_replicas`` (counted in gangs) without this replica.

    Of the rollouts of all pools and the guests, one gang must remain.
    """
    role = None if failed.role == GUEST_ROLE else state.job.role(failed.role)
    remaining = remaining_gangs(state, failed, dropped)
    enough = role is None or sum(name == failed.role for name in remaining.values()) >= role.min_replicas
    return enough and (bool(remaining) or (role is not None and role.kind != "rollout"))


def remaining_gangs(state: State, failed: Replica, dropped: set[ReplicaId]) -> dict[ReplicaId, str]:
    """Return the other gangs of the role, and of its substitutes, that may still work, each with its role.

    These are the gangs that are neither retired nor in ``dropped``.
    """
    members = substitute_replicas(state, failed.role)
    gone = {gang_of(failed.id), *dropped, *(gang_of(one.id) for one in members if one.status is Status.RETIRED)}
    return {gang_of(member.id): member.role for member in members if gang_of(member.id) not in gone}


def full_restarts_exhausted(state: State, failed: Replica, now: float) -> str:
    """Return why the whole run is not restarted again; empty if it may be restarted."""
    recovery = state.job.recovery
    recent = [at for at in state.full_restarts if now < at + recovery.window]
    if len(recent) >= recovery.full_restarts:
        return (
            f"{len(recent)} restarts of the whole run within {recovery.window:g} s" if recent else "full_restarts = 0"
        )
    failures = [failure for member in gang(state, failed.id) for failure in member.failures]
    reached = reached_step(state)
    if any(failure.at in recent[-1:] and failure.step == reached for failure in failures):
        return f"it failed again after a restart of the whole run, and no step was finished since step {reached}"
    return ""


# ── time limits ──────────────────────────────────────────────────────────────────────────────────────────────────────
def _window(state: State) -> float:
    return state.job.recovery.window


def _join(state: State) -> float:
    return state.job.limits.join


def _promotion_time(state: State) -> float:
    """Return the time limit (s) of a promotion.

    It includes the time in which the replaced process releases its memory.
    """
    return state.job.limits.step_grace + state.job.recovery.promote


def _allocation_and_join(state: State) -> float:
    return state.job.limits.allocation + state.job.limits.join


def _pause_and_join(state: State) -> float:
    return MAX_RESTART_BACKOFF_S + state.job.limits.join


def _shutdown_time(state: State) -> float:
    return SHUTDOWN_GRACES * state.job.limits.step_grace


# ── target nodes ─────────────────────────────────────────────────────────────────────────────────────────────────────
def _node_to_take(case: FailureCase) -> NodeName | None:
    taken = case.inventory.node_to_take(case.failed)
    return None if taken is None else taken[0]


# ── policies ─────────────────────────────────────────────────────────────────────────────────────────────────────────
_GIVE_UP = RungSpec(Rung.GIVE_UP, (), "the trainer commits its step and everything is released", _shutdown_time)
_RESTART_ALL = RungSpec(
    Rung.FULL_RESTART,
    (_CHECKPOINTS, _STARTED, _FULL_RESTART_LEFT),
    "every role joins again, and a step is committed",
    _pause_and_join,
)

SUPPORT_LADDER: tuple[RungSpec, ...] = (
    RungSpec(Rung.IN_PLACE, (_NODE_USABLE, _BUDGET_LEFT), "joins again on {node}", _join),
    RungSpec(Rung.DEGRADED, (), "{node} continues without it", _window),
)
"""Rungs for agents, standby processes and guests, whatever the policy."""

POLICIES: dict[str, tuple[RungSpec, ...]] = {
    "role": (
        RungSpec(
            Rung.IN_PLACE,
            (*_TRANSIENT, _STANDBY_HERE),
            "its standby process on {node} is promoted to {member}",
            _promotion_time,
        ),
        RungSpec(Rung.IN_PLACE, _TRANSIENT, "joins again on {node}", _join),
        RungSpec(
            Rung.STANDBY,
            (_STANDBY_ELSEWHERE,),
            "the standby process on {to} is promoted to {member}",
            _promotion_time,
            _node_to_take,
        ),
        RungSpec(Rung.SPARE, (_FREE_NODE,), "joins again on a spare node", _join),
        RungSpec(
            Rung.IN_PLACE,
            (_NODE_USABLE, _NODE_NOT_BARRED, _NODE_NOT_AT_FAULT),
            "joins again on {node}: the node is not the cause",
            _join,
        ),
        RungSpec(Rung.REPLACEMENT, (), "joins again once a replacement node is available", _allocation_and_join),
        RungSpec(Rung.DEGRADED, (_ENOUGH_REPLICAS,), "{role} continues with one replica fewer", _window),
        _RESTART_ALL,
        _GIVE_UP,
    ),
    "job": (
        RungSpec(Rung.FULL_RESTART, (_BUDGET_LEFT,), "every role joins again, on its own node if it is usable", _join),
        _GIVE_UP,
    ),
}
"""Rungs by ``recovery.policy``.

``role`` takes the smallest repair that fits. With ``job``, a failure of any role restarts all roles on their nodes."""

_ESSENTIAL_GUESTS: tuple[RungSpec, ...] = (
    SUPPORT_LADDER[0],
    RungSpec(Rung.DEGRADED, (_GUEST_SPARED,), "{node} continues without it", _window),
    _RESTART_ALL,
    _GIVE_UP,
)
"""Rungs for guests while nothing else generates."""


def ladder_of(state: State, failed: Replica) -> tuple[RungSpec, ...]:
    """Return the rungs for a failed member."""
    if failed.role not in SUPPORT_ROLES:
        return POLICIES[state.job.recovery.policy]
    return _ESSENTIAL_GUESTS if failed.role == GUEST_ROLE and guests_are_essential(state) else SUPPORT_LADDER
