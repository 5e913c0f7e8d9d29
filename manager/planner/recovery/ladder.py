"""The repair ladder as data: rungs from the cheapest repair down to the end of the run, each with when it fits, what is
expected of it and within which time. A policy is a tuple of rungs; one planner reads them all (``recover``) and takes
the first that fits, not above the one that the evidence has come down to.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from ....core.types import AGENT, SHADOW, NodeName, ReplicaId, gang_of
from ...model.actions import Rung
from ...model.queries import workers
from ...model.reduce_replicas import LONGEST_PAUSE
from ...model.state import Replica, State, Status
from ..capacity.nodes import Rooms
from ..deadlines import GRACES

HELPERS = (AGENT, SHADOW)
"""They belong to their node and go with it; nothing of the run depends on one of them."""


class Case(Struct, frozen=True):
    """A member that failed, or that nobody can launch, and how far down the ladder the evidence has come."""

    state: State
    rooms: Rooms
    now: float
    failed: Replica
    spared: set[ReplicaId]
    """gangs that the decisions made so far go on without"""
    least: Rung = Rung.IN_PLACE

    @property
    def recent(self) -> int:
        """Its failures within the window."""
        return len(self.failed.recent(self.state.job.recovery.window, self.now))


class Step(Struct, frozen=True):
    rung: Rung
    fits: Callable[[Case], bool]
    expects: str
    """``{member}``, ``{role}``, ``{node}``: the failed one's; ``{to}``: where it goes"""
    within: Callable[[State], float]
    """s; what has not come about by then is a failure of its own, and the ladder is entered again"""
    to: Callable[[Case], NodeName | None] = lambda case: None
    """the node that it is sent to; in place its own, and elsewhere whichever has room, need no saying"""


def depth(rung: Rung) -> int:
    """How far down: all repairs of one replica are on one level, and what fits best comes first in its policy."""
    return {Rung.DEGRADED: 1, Rung.WHOLE: 2, Rung.GIVE_UP: 3}.get(rung, 0)


# ── when a rung fits ─────────────────────────────────────────────────────────────────────────────────────────────────
def _always(case: Case) -> bool:
    return True


def _clean(case: Case) -> bool:
    """A software fault on a good node that has not failed it too often."""
    return case.rooms.good(case.failed.node) and not often(case) and not _last_start_is_elsewhere(case)


def _clean_and_warm(case: Case) -> bool:
    return _clean(case) and bool(case.rooms.ready(case.failed.node, case.failed.role))


def _warm_spare(case: Case) -> bool:
    return case.rooms.warm_spare_for(case.failed) is not None


def _standby(case: Case) -> bool:
    return case.rooms.standby_for(case.failed) is not None


def _spare(case: Case) -> bool:
    return case.rooms.vacant_for(case.failed)


def _not_the_node(case: Case) -> bool:
    return case.rooms.good(case.failed.node) and not case.rooms.would_help(case.failed)


def _good_node(case: Case) -> bool:
    return case.rooms.good(case.failed.node)


def _can_be_spared(case: Case) -> bool:
    return can_spare(case.state, case.failed, case.spared)


def _whole_helps(case: Case) -> bool:
    """There is a checkpoint to go on from, and it is not known already that it does not help."""
    return bool(case.state.job.steps) and case.failed.believed and not whole_spent(case.state, case.failed, case.now)


def _budget_left(case: Case) -> bool:
    return case.least is Rung.IN_PLACE


def _last_start_is_elsewhere(case: Case) -> bool:
    """One more start, and what never joined is given up: not without a try on another node, where there is one."""
    unstarted = case.failed.unstarted + 2 >= case.state.job.recovery.first_start
    return not case.failed.ever_joined and unstarted and case.rooms.vacant_for(case.failed)


def often(case: Case) -> bool:
    """Its node has failed it too often."""
    here = sum(start.node == case.failed.node for start in case.failed.recent(_window(case.state), case.now))
    return here >= case.state.job.recovery.per_node


def can_spare(state: State, failed: Replica, spared: set[ReplicaId]) -> bool:
    """The role stays at or above its ``min_replicas`` without this replica: whole gangs are counted, never members."""
    without = {gang_of(failed.id), *spared}
    members = [one for one in workers(state) if one.role == failed.role and gang_of(one.id) not in without]
    retired = {gang_of(one.id) for one in members if one.status is Status.RETIRED}
    return len({gang_of(one.id) for one in members} - retired) >= state.job.role(failed.role).min_replicas


def whole_spent(state: State, failed: Replica, now: float) -> str:
    """Why the run as a whole is not restarted (again); empty where it may be."""
    recovery, whole = state.job.recovery, gang_of(failed.id)
    recent = [at for at in state.wholes if now < at + recovery.window]
    if len(recent) >= recovery.whole:
        return f"{len(recent)} restarts of the whole run within {recovery.window:g} s" if recent else "whole = 0"
    theirs = [start for one in workers(state) if gang_of(one.id) == whole for start in one.failures]
    if any(start.at in recent[-1:] and start.step == state.step for start in theirs):
        return f"it failed again after a restart of the whole run, and no step was committed since step {state.step}"
    return ""


# ── by when ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def _window(state: State) -> float:
    return state.job.recovery.window


def _join(state: State) -> float:
    return state.job.limits.join


def _adopt(state: State) -> float:
    """What it takes over from must have ended before: its memory is needed."""
    return state.job.limits.step_grace + state.job.recovery.adopt


def _requeue(state: State) -> float:
    """The queue takes as long as it takes; the run's walltime is the only bound."""
    return max(0.0, state.ends - state.at)


def _allocation_and_join(state: State) -> float:
    return state.job.limits.allocation + state.job.limits.join


def _pause_and_join(state: State) -> float:
    return LONGEST_PAUSE + state.job.limits.join


def _the_end(state: State) -> float:
    return GRACES * state.job.limits.step_grace


# ── where ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _to_warm_spare(case: Case) -> NodeName | None:
    spot = case.rooms.warm_spare_for(case.failed)
    return None if spot is None else spot.node


def _to_standby(case: Case) -> NodeName | None:
    rollout = case.rooms.standby_for(case.failed)
    return None if rollout is None else rollout.node


# ── the policies ─────────────────────────────────────────────────────────────────────────────────────────────────────
_GIVE_UP = Step(Rung.GIVE_UP, _always, "the trainer commits what is in hand, everything is given back", _the_end)

HELPER: tuple[Step, ...] = (
    Step(Rung.IN_PLACE, lambda case: _good_node(case) and _budget_left(case), "joins again on {node}", _join),
    Step(Rung.DEGRADED, _always, "{node} does without it", _window),
)
"""Of agents and shadows, whatever the policy."""

POLICIES: dict[str, tuple[Step, ...]] = {
    "role": (
        Step(Rung.IN_PLACE, _clean_and_warm, "its shadow on {node} goes on as {member}", _adopt),
        Step(Rung.IN_PLACE, _clean, "joins again on {node}", _join),
        Step(Rung.SPARE, _warm_spare, "the shadow on the spare {to} goes on as {member}", _adopt, _to_warm_spare),
        Step(Rung.STANDBY, _standby, "the shadow on {to} goes on as {member}; its rollout moves", _adopt, _to_standby),
        Step(Rung.SPARE, _spare, "joins again on a spare node", _join),
        Step(Rung.IN_PLACE, _not_the_node, "joins again on {node}: it is not the node", _join),
        Step(Rung.REPLACEMENT, _always, "joins again once a replacement node is there", _allocation_and_join),
        Step(Rung.DEGRADED, _can_be_spared, "{role} goes on with one replica less", _window),
        Step(Rung.WHOLE, _whole_helps, "every role joins again, and a step is committed", _pause_and_join),
        _GIVE_UP,
    ),
    "job": (
        Step(Rung.WHOLE, _budget_left, "every role joins again, on its own node where that is good", _join),
        _GIVE_UP,
    ),
    "requeue": (
        Step(Rung.WHOLE, _budget_left, "nodes, when the queue comes to it, and every role on them", _requeue),
        _GIVE_UP,
    ),
}  # fmt: skip
"""``role``: the smallest repair that fits. ``job``, ``requeue``: any failure of a role restarts all of them, in place
or on new nodes (the planner's other half, ``reduce_commands``, does what the policy says)."""
