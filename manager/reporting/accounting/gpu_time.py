"""The GPU time that a run reserved, and what the replicas used it for. Pure.

*Reserved* is the time of all GPUs on the nodes that the cluster had granted. A member of a replica uses its GPUs
*usefully* while it is in a phase that counts as training and waits for nothing. Useful time of a trainer whose work was
discarded is *redone*. All other reserved time is *idle*: members that start, load or wait, nodes of replicas that are
down, standby processes and spare nodes. In a job whose trainers and rollouts use no GPUs, nodes are counted instead.

The journal does not record which tokens of a failed rollout were lost, so *redone* is the time of trainers only.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec import Struct

from ....cluster.base import AllocationRequest, AllocationState
from ....core.phases import LEND
from ....core.run_spec import RunSpec
from ....core.types import is_trainer, role_of
from ...model import events as ev
from ...model.actions import Request
from .committed_steps import CommittedSteps
from .lanes import USEFUL, Lane

_GRANTED = (AllocationState.RUNNING, AllocationState.SUSPENDED)


class GpuHours(Struct, frozen=True):
    """GPU-hours, or node-hours if ``unit`` is ``node``; ``useful``, ``redone`` and ``idle`` add up to ``reserved``."""

    unit: str
    useful: float
    redone: float
    idle: float
    reserved: float


def _member_weights(job: RunSpec) -> tuple[str, dict[str, float]]:
    """Return (unit, weights): the unit of the weights, and for each role the weight of one member.

    The weight of a member is its number of GPUs (unit ``gpu``). In a job whose trainers and rollouts use no GPU, it is
    the member's share of the replica's nodes (unit ``node``).
    """
    roles = [role for role in job.roles if role.traits.has_weights]
    if any(role.per_member.gpus for role in roles):
        return "gpu", {role.name: float(role.per_member.gpus) for role in roles}
    return "node", {role.name: role.nodes / role.ranks for role in roles}


class TrainerHours(Struct, frozen=True):
    """GPU-hours of the trainer's members since they were first launched, in the unit of :class:`GpuHours`."""

    train: float
    """Useful, and not lent."""
    lent: float
    """Lent to guests."""
    idle: float


class ReservedTime:
    """Counts the time of the nodes that a run holds, weighted by their GPUs, or by 1 in a job without GPUs."""

    def __init__(self, job: RunSpec) -> None:
        self.unit, self.weights = _member_weights(job)
        self._seconds = 0.0
        self._node_weights: dict[str, int] = {}
        """Weight of a node of each requested allocation, by tag."""
        self._held: dict[str, tuple[int, float]] = {}
        """Weight of the nodes of each granted allocation, and the time (s) since which they count."""

    def on_intended(self, event: ev.Intended) -> None:
        """Record the weight of the nodes of a requested allocation."""
        if isinstance(event.action, Request):
            request = event.action.request
            for component in (request, *request.further_components):
                self._node_weights[component.tag] = self._weight(component)

    def _weight(self, request: AllocationRequest) -> int:
        return request.node.gpus if self.unit == "gpu" else 1

    def on_allocation(self, event: ev.AllocationChanged, at: float) -> None:
        """Count the previous nodes of an allocation until ``at`` (s), and its present nodes from then on."""
        weight, since = self._held.pop(event.tag, (0, at))
        self._seconds += weight * (at - since)
        if event.status is not None and event.status.state in _GRANTED:
            self._held[event.tag] = self._node_weights.get(event.tag, 0) * len(event.status.nodes), at

    def until(self, now: float) -> float:
        """Return the reserved GPU seconds up to ``now`` (s)."""
        return self._seconds + sum(weight * (now - since) for weight, since in self._held.values())


def gpu_hours(reserved: ReservedTime, lanes: Collection[Lane], steps: CommittedSteps, now: float) -> GpuHours:
    """Return what the reserved GPU time was used for, up to ``now`` (s)."""
    weights = {lane.replica: reserved.weights.get(role_of(lane.replica), 0.0) for lane in lanes}
    spent = [(lane, lane.seconds(now)) for lane in lanes if weights[lane.replica]]
    useful = sum(
        weights[lane.replica] * seconds
        for lane, by_activity in spent
        for activity, seconds in by_activity.items()
        if activity.use in USEFUL
    )
    weight = sum(weight for replica, weight in weights.items() if is_trainer(replica))
    discarded_s = sum(one.until - one.since for step in steps.steps for one in step.discarded)
    redone = min(useful, weight * (discarded_s + steps.discarded_since_last_commit_s))
    total = max(reserved.until(now), useful)
    hours = [round(seconds / 3600, 4) for seconds in (useful - redone, redone, total - useful, total)]
    return GpuHours(reserved.unit, *hours)


def trainer_hours(reserved: ReservedTime, lanes: Collection[Lane], now: float) -> TrainerHours:
    """Return what the trainer's members did with their GPUs, up to ``now`` (s)."""
    train = lent = total = 0.0
    for lane in lanes:
        weight = reserved.weights.get(role_of(lane.replica), 0.0) / 3600 if is_trainer(lane.replica) else 0.0
        for activity, seconds in lane.seconds(now).items():
            total += weight * seconds
            lent += weight * seconds if activity.phase == LEND else 0.0
            train += weight * seconds if activity.phase != LEND and activity.use in USEFUL else 0.0
    return TrainerHours(round(train, 4), round(lent, 4), round(total - train - lent, 4))
