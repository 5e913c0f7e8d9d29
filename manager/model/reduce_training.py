"""Reduce the events that change which replicas work into the effective training time of the state. Pure."""

from __future__ import annotations

from collections import Counter

from msgspec.structs import replace

from ...core.phases import phase
from ...core.types import Incarnation, ReplicaId, is_support, role_of
from . import events as ev
from .actions import Fence, Finish, RestartAll
from .figures.training_time import effective_share, with_commit, with_work
from .queries import current_owner, first_symptom_at
from .state import Replica, State, Status


def on_work_changed(before: State, state: State, at: float, event: ev.Event) -> State:
    """Return the state with its training time after an event, which led from ``before`` to ``state``."""
    match event:
        case ev.PhaseEntered() | ev.Joined():
            return _after_report(before, state, at, event.incarnation.replica)
        case ev.StepCommitted():
            return _after_commit(before, state, at, event)
        case ev.StepEnded():
            return _after_report(before, state, at, current_owner(before, event.incarnation, event.step).replica)
        case ev.Decided(Fence() as fence):
            since = _symptom_at(before, fence.incarnation, at) if fence.charged else at
            return _after_report(before, state, since, fence.incarnation.replica)
        case ev.Decided(RestartAll() as restart):
            charged = (fence.incarnation for fence in restart.fences if fence.charged)
            return _recounted(state, min((_symptom_at(before, failed, at) for failed in charged), default=at))
        case ev.Decided(Finish()) | ev.Resumed():
            return _recounted(state, at)
    return state


def works(state: State, replica: Replica) -> bool:
    """Return whether a replica is in a phase that counts as effective training time."""
    joined = replica.status is Status.JOINED and replica.step is not None
    return joined and phase(replica.phase).useful and state.finish is None and not is_support(replica.id)


def _after_report(before: State, state: State, at: float, id: ReplicaId) -> State:
    """Update the number of working members of a role, if this replica has begun or stopped working by ``at``.

    The other replicas are not counted again, because a run has many events of this kind.
    """
    change = works(state, state.replica(id)) - works(before, before.replica(id))
    if not change:
        return state
    at_work, role = state.training_time.at_work, role_of(id)
    return _with_work(state, {**at_work, role: at_work.get(role, 0) + change}, at)


def _after_commit(before: State, state: State, at: float, event: ev.StepCommitted) -> State:
    if event.completes_commit:
        state = replace(state, training_time=with_commit(state.training_time, state.step, at))
    return state if before.step else _with_work(state, state.training_time.at_work, at)


def _recounted(state: State, since: float) -> State:
    """Count all replicas that work since that time."""
    at_work = Counter(replica.role for replica in state.replicas.values() if works(state, replica))
    return _with_work(state, dict(at_work), since)


def _symptom_at(state: State, incarnation: Incarnation, at: float) -> float:
    """Return the time from which a failed replica counts as down: its first symptom."""
    symptom_at = first_symptom_at(state.findings.values(), incarnation, state.replica(incarnation.replica).node)
    return at if symptom_at is None else symptom_at


def _with_work(state: State, at_work: dict[str, int], since: float) -> State:
    share = effective_share(state.job, at_work, committed=state.step > 0)
    return replace(state, training_time=with_work(state.training_time, at_work, share, since))
