"""The repair ladder as data: rungs from the cheapest repair down to the end of the run.

Each rung says when it fits, what it should achieve and within which time. A policy is a tuple of rungs. ``recover``
takes the first rung that fits, beginning with the rung that the evidence suggests.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from ....core.types import AGENT, STANDBY_ROLE, NodeName, ReplicaId, gang_of
from ...model.actions import Rung
from ...model.queries import workers
from ...model.reduce_replicas import MAX_RESTART_BACKOFF_S
from ...model.state import Replica, State, Status
from ..capacity.nodes import NodeInventory
from ..deadlines import SHUTDOWN_GRACES
from .repeated_end import starts_with_same_exception

SUPPORT_ROLES = (AGENT, STANDBY_ROLE)
"""Roles whose processes belong to a node and end when the node leaves the run. No replica depends on them."""


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


class RungSpec(Struct, frozen=True):
    """A rung of a policy: when it fits, what it should achieve, and by when."""

    rung: Rung
    fits: Callable[[FailureCase], bool]
    expects: str
    """Expected result, with ``{member}``, ``{role}`` and ``{node}`` of the failed member and its target
    node ``{to}``."""
    time_limit: Callable[[State], float]
    """Time (s) for the expected result. If it is missing then, this counts as another failure, and the ladder is
    entered again."""
    target_node: Callable[[FailureCase], NodeName | None] = lambda case: None
    """Node on which the member is launched next; None for its own node or any node that fits."""


def severity(rung: Rung) -> int:
    """Return the severity of a rung.

    The severity is 0 for every repair of a single replica; the order in the policy decides among such repairs.
    """
    return {Rung.DEGRADED: 1, Rung.FULL_RESTART: 2, Rung.GIVE_UP: 3}.get(rung, 0)


# ── when a rung fits ─────────────────────────────────────────────────────────────────────────────────────────────────
def _always(case: FailureCase) -> bool:
    return True


def _is_transient(case: FailureCase) -> bool:
    """Return whether a restart on the same node is likely to help.

    The node must be usable, and the member must not have failed there too often. The last try of a member is on another
    node if possible.
    """
    return (
        case.inventory.is_usable(case.failed.node) and not fails_often_here(case) and not _last_try_on_other_node(case)
    )


def _transient_with_standby(case: FailureCase) -> bool:
    return _is_transient(case) and bool(case.inventory.ready_standbys(case.failed.node, case.failed.role))


def _spare_has_standby(case: FailureCase) -> bool:
    return case.inventory.spare_with_standby(case.failed) is not None


def _donor_exists(case: FailureCase) -> bool:
    return case.inventory.donor_for(case.failed) is not None


def _spare_exists(case: FailureCase) -> bool:
    return case.inventory.can_place(case.failed)


def _node_not_at_fault(case: FailureCase) -> bool:
    return case.inventory.is_usable(case.failed.node) and not case.inventory.new_node_helps(case.failed)


def _node_usable(case: FailureCase) -> bool:
    return case.inventory.is_usable(case.failed.node)


def _role_can_degrade(case: FailureCase) -> bool:
    return can_degrade(case.state, case.failed, case.dropped)


def _full_restart_helps(case: FailureCase) -> bool:
    """Return whether a checkpoint exists, and the run may still be restarted from it."""
    return (
        bool(case.state.job.steps)
        and case.failed.is_current
        and not full_restarts_exhausted(case.state, case.failed, case.now)
    )


def _budget_left(case: FailureCase) -> bool:
    return case.first_rung is Rung.IN_PLACE


def _last_try_on_other_node(case: FailureCase) -> bool:
    """Return whether the next start is the member's last try, and another node could host it.

    A member has a last try if it has never joined, or if the same exception has ended its previous starts.
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
    """Return whether the role keeps its ``min_replicas`` (counted in gangs) without this replica."""
    without = {gang_of(failed.id), *dropped}
    members = [member for member in workers(state) if member.role == failed.role and gang_of(member.id) not in without]
    retired = {gang_of(member.id) for member in members if member.status is Status.RETIRED}
    return len({gang_of(member.id) for member in members} - retired) >= state.job.role(failed.role).min_replicas


def full_restarts_exhausted(state: State, failed: Replica, now: float) -> str:
    """Return why the whole run is not restarted again; empty if it may be."""
    recovery, gang_id = state.job.recovery, gang_of(failed.id)
    recent = [at for at in state.full_restarts if now < at + recovery.window]
    if len(recent) >= recovery.full_restarts:
        return (
            f"{len(recent)} restarts of the whole run within {recovery.window:g} s" if recent else "full_restarts = 0"
        )
    failures = [failure for member in workers(state) if gang_of(member.id) == gang_id for failure in member.failures]
    if any(failure.at in recent[-1:] and failure.step == state.step for failure in failures):
        return f"it failed again after a restart of the whole run, and no step was committed since step {state.step}"
    return ""


# ── time limits ──────────────────────────────────────────────────────────────────────────────────────────────────────
def _window(state: State) -> float:
    return state.job.recovery.window


def _join(state: State) -> float:
    return state.job.limits.join


def _promotion_time(state: State) -> float:
    """Return the time (s) for a promotion, which begins once the replaced process has ended and released its memory."""
    return state.job.limits.step_grace + state.job.recovery.promote


def _requeue(state: State) -> float:
    """Return the time (s) for a restart on new nodes: the run's walltime, since the wait in the queue is unlimited."""
    return max(0.0, state.ends_at - state.at)


def _allocation_and_join(state: State) -> float:
    return state.job.limits.allocation + state.job.limits.join


def _pause_and_join(state: State) -> float:
    return MAX_RESTART_BACKOFF_S + state.job.limits.join


def _shutdown_time(state: State) -> float:
    return SHUTDOWN_GRACES * state.job.limits.step_grace


# ── target nodes ─────────────────────────────────────────────────────────────────────────────────────────────────────
def _spare_with_standby(case: FailureCase) -> NodeName | None:
    candidate = case.inventory.spare_with_standby(case.failed)
    return None if candidate is None else candidate.node


def _donor_node(case: FailureCase) -> NodeName | None:
    rollout = case.inventory.donor_for(case.failed)
    return None if rollout is None else rollout.node


# ── policies ─────────────────────────────────────────────────────────────────────────────────────────────────────────
_GIVE_UP = RungSpec(Rung.GIVE_UP, _always, "the trainer commits its step and everything is released", _shutdown_time)

SUPPORT_LADDER: tuple[RungSpec, ...] = (
    RungSpec(Rung.IN_PLACE, lambda case: _node_usable(case) and _budget_left(case), "joins again on {node}", _join),
    RungSpec(Rung.DEGRADED, _always, "{node} continues without it", _window),
)
"""Rungs for agents and standby processes, whatever the policy."""

POLICIES: dict[str, tuple[RungSpec, ...]] = {
    "role": (
        RungSpec(
            Rung.IN_PLACE,
            _transient_with_standby,
            "its standby process on {node} is promoted to {member}",
            _promotion_time,
        ),
        RungSpec(Rung.IN_PLACE, _is_transient, "joins again on {node}", _join),
        RungSpec(
            Rung.SPARE,
            _spare_has_standby,
            "the standby process on the spare node {to} is promoted to {member}",
            _promotion_time,
            _spare_with_standby,
        ),
        RungSpec(
            Rung.DONOR,
            _donor_exists,
            "the standby process on {to} is promoted to {member}; its rollout moves",
            _promotion_time,
            _donor_node,
        ),
        RungSpec(Rung.SPARE, _spare_exists, "joins again on a spare node", _join),
        RungSpec(Rung.IN_PLACE, _node_not_at_fault, "joins again on {node}: the node is not the cause", _join),
        RungSpec(Rung.REPLACEMENT, _always, "joins again once a replacement node is available", _allocation_and_join),
        RungSpec(Rung.DEGRADED, _role_can_degrade, "{role} continues with one replica fewer", _window),
        RungSpec(
            Rung.FULL_RESTART, _full_restart_helps, "every role joins again, and a step is committed", _pause_and_join
        ),
        _GIVE_UP,
    ),
    "job": (
        RungSpec(Rung.FULL_RESTART, _budget_left, "every role joins again, on its own node if that is good", _join),
        _GIVE_UP,
    ),
    "requeue": (
        RungSpec(
            Rung.FULL_RESTART, _budget_left, "nodes as soon as the queue grants them, and every role on them", _requeue
        ),
        _GIVE_UP,
    ),
}
"""Rungs by ``recovery.policy``.

``role`` takes the smallest repair that fits. A failure of any role restarts all roles: with ``job`` on their nodes,
with ``requeue`` on new nodes (``reduce_commands`` releases the old nodes)."""
