"""Choose how many replicas the elastic rollout pool has, from the balance of generation and training. Pure.

The pool grows at once to the number with which the trainer would not wait for rollouts, as far as its bounds, its
budget and the cluster allow. It shrinks by one replica at a time. A number that a user sets replaces this rule. Every
change is one :class:`Resize`, so that the next manager continues from it.
"""

from __future__ import annotations

from math import ceil

from ....core.run_spec import RoleSpec, RunSpec
from ....core.text import plural
from ....core.types import ReplicaId, gang_of, index_of, replica_id
from ...model.actions import Resize, Why
from ...model.figures.balance import STEPS, Balance, balance
from ...model.pools import affordable, elastic_role, pool_state
from ...model.queries import all_joined
from ...model.state import Replica, State, Status
from ..deadlines import NEVER, shutdown_at
from .allocation_requests import is_rejected, rejections, retry_at
from .nodes import NodeInventory
from .placement import Assignment

STARTS_TO_PAY_BACK = 3
"""A pool does not grow if less than this many times ``limits.join`` is left of the run."""
MIN_WAIT = 0.02
"""Share of its time that the trainer must have waited before the pool grows. Below it nothing is to be gained."""
MARGIN = 0.1
"""Share of a replica's pace that may be missing. Otherwise noise alone would bring one replica more."""


def resize(state: State, inventory: NodeInventory, assigned: Assignment, now: float) -> tuple[list[Resize], float]:
    """Return the change of the elastic pool that is due, and the next wake (manager's time, s)."""
    if (role := elastic_role(state.job)) is None:
        return [], NEVER
    late_at = shutdown_at(state) - STARTS_TO_PAY_BACK * state.job.limits.join
    wake = late_at if late_at > now else NEVER
    if not inventory.may_start or not state.launched:
        return [], wake
    pool, gangs = pool_state(state, role.name), [gang for gang in inventory.gangs if gang[0].role == role.name]
    figures, others = balance(state.balance), _others(state, role, assigned)
    step = state.balance[-1].step if state.balance else 0
    wanted, evidence = len(gangs), ""
    if pool.held is not None:
        wanted, evidence = pool.held, f"a user wants {plural(pool.held, 'replica')}"
    elif figures is not None and not _is_repaired(state) and step > pool.resized_step:
        wanted, evidence = _by_rule(state.job, role, figures, others, len(gangs))
        wanted = wanted if wanted >= len(gangs) or state.step >= pool.resized_step + STEPS else len(gangs)
        wanted = max(wanted, len(gangs) - 1)
    lacking = {gang_of(replica.id) for replica in assigned.lacking if replica.role == role.name}
    late = pool.held is None and bool(others) and not _pays_back(state, figures, now)
    if late and lacking and wanted >= len(gangs):
        wanted, evidence = len(gangs) - len(lacking), "the rest of the run is too short for another start"
    least = max(role.replicas, int(not others))
    if wanted < least:
        wanted, evidence = least, f"at least {plural(least, 'replica')}"
    if wanted < len(gangs):
        stop = sorted(gangs, key=lambda gang: _stop_order(state, gang))[: len(gangs) - wanted]
        return [_resize(role, gangs, (), tuple(gang[0].id for gang in stop), evidence)], wake
    recent = rejections(state, state.job.node_group_of(role.name), now)
    again_at = recent[-1].at + state.job.recovery.window if is_rejected(state, recent, now) else retry_at(recent)
    failing = any(member.status is Status.RETIRED for gang in gangs for member in gang)
    if wanted == len(gangs) or again_at > now or failing or late or (others and state.step <= pool.resized_step):
        return [], min(wake, again_at if again_at > now else NEVER)
    limit = affordable(state, role, now)[0] // role.nodes
    if _awaits_answer(state, role.name):
        limit = min(limit, 1)
    taken = {gang[0].id for gang in gangs}
    free = [id for index in range(role.max_replicas or 0) if (id := replica_id(role.name, index)) not in taken]
    start = free[: min(limit, wanted - len(gangs))]
    if not start:
        return [], wake
    if len(gangs) + len(start) < wanted:
        evidence = f"{evidence}, {len(gangs) + len(start)} allowed by its budget and the cluster"
    return [_resize(role, gangs, tuple(start), (), evidence)], wake


def _resize(
    role: RoleSpec, gangs: list[list[Replica]], start: tuple[ReplicaId, ...], stop: tuple[ReplicaId, ...], evidence: str
) -> Resize:
    expects = plural(len(gangs) + len(start) - len(stop), "replica")
    return Resize(role.name, start, stop, Why((f"{evidence}, {len(gangs)} before",), expects=expects))


def _by_rule(job: RunSpec, role: RoleSpec, figures: Balance, others: dict[str, int], count: int) -> tuple[int, str]:
    """Return the number of replicas with which the trainer would not wait, and the evidence for it."""
    if (pace := figures.pace(role.name)) <= 0:
        return count, ""
    supply = sum(figures.pace(pool) * number for pool, number in others.items())
    by_pace = ceil((figures.need - supply) / pace - MARGIN)
    sampling = job.sampling
    steps = (sampling.ahead if sampling.staleness is None else sampling.staleness) + 1
    places = steps * sampling.prompts_per_step * sampling.group_size
    taken = sum(job.rollouts[pool].lease * number for pool, number in others.items() if pool in job.rollouts)
    lease = job.rollouts[role.name].lease if role.name in job.rollouts else 1
    wanted = max(role.replicas, min(by_pace, ceil((places - taken) / lease), role.max_replicas or 0))
    if wanted > count and figures.waited < MIN_WAIT:
        return count, ""
    return wanted, (
        f"the trainer waited {figures.waited:.0%} of the last {figures.steps} steps; it could train"
        f" {figures.need:,.0f} tokens/s, the other rollouts generate {supply:,.0f}, a replica of {role.name}"
        f" {pace:,.0f}: {wanted} wanted"
    )


def _others(state: State, role: RoleSpec, assigned: Assignment) -> dict[str, int]:
    """Return how many replicas of each other rollout pool work, or will as soon as they have started again."""
    lacking = {replica.id for replica in assigned.lacking}
    numbers: dict[str, int] = {}
    for other in (other.name for other in state.job.kind("rollout") if other.name != role.name):
        for gang in state.gangs:
            if gang[0].role == other and not any(m.status is Status.RETIRED or m.id in lacking for m in gang):
                numbers[other] = numbers.get(other, 0) + 1
    return numbers


def _is_repaired(state: State) -> bool:
    """Return whether the trainer, the store or a reward replica is being repaired, so that the figures are not usual.

    A failing rollout is none of these: in a large run there is always one.
    """
    kinds = {role.name for kind in ("trainer", "trajectories", "reward") for role in state.job.kind(kind)}
    return not all(all_joined(gang) for gang in state.gangs if gang[0].role in kinds)


def _pays_back(state: State, figures: Balance | None, now: float) -> bool:
    """Return whether enough of the run is left for a start of another replica."""
    left = shutdown_at(state) - now
    if figures is not None:
        left = min(left, (state.job.steps - state.step) * figures.step_s)
    return left >= STARTS_TO_PAY_BACK * state.job.limits.join


def _awaits_answer(state: State, group: str) -> bool:
    """Return whether the newest answer of the cluster was a rejection, so that one request finds out if it still is."""
    rejected = max((one.at for one in state.rejected_requests if one.node_group == group), default=None)
    if rejected is None:
        return False
    accepted = (a for a in state.allocations.values() if a.request.node_group == group and a.status is not None)
    return not any(a.requested_at > rejected and not a.refused for a in accepted)


def _stop_order(state: State, gang: list[Replica]) -> tuple[bool, float, int]:
    """Return the key by which replicas are stopped: without a node first, then the allocation that ends first."""
    allocation = state.allocations.get(gang[0].allocation or "") if gang[0].is_current else None
    ends_at = 0.0 if allocation is None else allocation.ends_at
    return allocation is not None, ends_at, -int(index_of(gang[0].id))
