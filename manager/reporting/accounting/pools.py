"""What each rollout pool of a run has used and generated. Pure.

The node hours of a further pool are those of its own nodes, from their grant to their end, without the time for which
the cluster suspended them. Rollouts of other pools share nodes with other roles, or use spares: for them counts the
time since they joined, times the part of a node that they need.
"""

from __future__ import annotations

from collections import defaultdict

from msgspec import Struct

from ....cluster.base import AllocationState
from ....core.run_spec import RoleSpec, RunSpec
from ....core.types import Incarnation, role_of
from ...model import events as ev
from ...model.actions import Request, Resize


class PoolUse(Struct, frozen=True):
    """What a rollout pool has used and generated in the whole run. Extras count for the pool of their role."""

    pool: str
    tokens: int
    """Generated tokens, also those of rollouts that were replaced or stopped."""
    node_hours: float
    tokens_per_node_hour: float | None
    """None without node hours."""
    tokens_per_second: float | None
    """Tokens per second of a replica at work; None if none has worked."""
    budget_node_hours: float | None
    """Node hours that the pool may use; None if its number of replicas is fixed."""


class PoolAccount:
    """Collects what the rollout pools of a run have used, from its first event on."""

    def __init__(self, job: RunSpec) -> None:
        self._job = job
        self._pools: dict[str, RoleSpec] = {}
        self._resized = False
        self._newest: dict[tuple[Incarnation, int], tuple[int, int]] = {}
        """Tokens and lifetime (ns) of each process of a rollout, as of its newest clock reading."""
        self._groups: dict[str, str] = {}
        """Node group of each requested allocation, by tag."""
        self._running: dict[str, tuple[int, float]] = {}
        """Nodes of each running allocation of a further pool, and the time (s) since which they count."""
        self._node_s: dict[str, float] = defaultdict(float)
        """Node seconds of each further pool, until the newest change of its allocations."""
        self._begin(job)

    def _begin(self, job: RunSpec) -> None:
        self._job = job
        self._pools |= {role.name: role for role in job.kind("rollout")}

    def apply(self, event: ev.Event, at: float) -> None:
        """Apply an event at the manager's time ``at`` (s)."""
        match event:
            case ev.ClocksRecorded():
                for incarnation, clock in event.readings:
                    if role_of(incarnation.replica) in self._pools:
                        reading = clock.done, sum(time.ns for time in clock.times)
                        held = self._newest.get((incarnation, clock.began), (0, 0))
                        self._newest[incarnation, clock.began] = max(held, reading, key=lambda one: one[1])
            case ev.Intended(action=Request(request=request)):
                for component in (request, *request.further_components):
                    self._groups[component.tag] = component.node_group
            case ev.AllocationChanged():
                self._on_allocation(event, at)
            case ev.Decided(action=Resize()):
                self._resized = True
            case ev.Resumed():
                self._begin(event.job)

    def _on_allocation(self, event: ev.AllocationChanged, at: float) -> None:
        group = self._groups.get(event.tag, "")
        if group not in self._pools:
            return
        nodes, since = self._running.pop(event.tag, (0, at))
        self._node_s[group] += nodes * (at - since)
        if event.status is not None and event.status.state is AllocationState.RUNNING:
            self._running[event.tag] = len(event.status.nodes), at

    def uses(self, now: float) -> list[PoolUse]:
        """Return the use of each pool up to ``now`` (s); nothing if there was one pool, of a fixed number."""
        if len(self._pools) < 2 and not self._resized:
            return []
        tokens: dict[str, int] = defaultdict(int)
        process_s: dict[str, float] = defaultdict(float)
        for (incarnation, _), (done, ns) in self._newest.items():
            tokens[role_of(incarnation.replica)] += done
            process_s[role_of(incarnation.replica)] += ns / 1e9
        node_s = dict(self._node_s)
        for tag, (nodes, since) in self._running.items():
            node_s[self._groups[tag]] = node_s.get(self._groups[tag], 0.0) + nodes * (now - since)
        uses = []
        for name, role in self._pools.items():
            hours = node_s.get(name, process_s[name] * self._part_of_node(role)) / 3600
            worked_s = process_s[name] / role.ranks
            uses.append(
                PoolUse(
                    name,
                    tokens[name],
                    round(hours, 4),
                    round(tokens[name] / hours, 1) if hours else None,
                    round(tokens[name] / worked_s, 3) if worked_s else None,
                    round(role.node_seconds / 3600, 4) if role.is_elastic else None,
                )
            )
        return uses

    def _part_of_node(self, role: RoleSpec) -> float:
        """Return how many nodes a member of a role needs: its nodes, or the share of the scarcest resource of one."""
        if role.exclusive or role.name not in {one.name for one in self._job.roles}:
            return role.nodes / role.ranks
        needs, has = role.per_member, self._job.node_group_of(role.name).node
        pairs = ((needs.cpus, has.cpus), (needs.gpus, has.gpus), (needs.mem, has.mem))
        return max(needed / available for needed, available in pairs if available)
