"""Determine whether the expected effect of each decision has occurred: a join, a grant, an answer of the cluster. Pure.

A decision describes its expected effect in a text (``Why.expects``). Which event counts as this effect follows from the
kind of the action, never from the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any

from msgspec import Struct

from ....cluster.base import AllocationState
from ....core.types import Incarnation, NodeName, Outcome, ReplicaId, gang_of, is_support
from ...model import events as ev
from ...model.actions import (
    Action,
    Exclude,
    Fence,
    Finish,
    InjectFault,
    Launch,
    Readmit,
    Release,
    Request,
    Resize,
    RestartAll,
    Rung,
    StopStep,
)

_ONE_BY_ONE = "role"
"""Value of ``recovery.policy`` that restarts single replicas if possible. Only with this value, a restart of the whole
run is expected to lead to a committed step, too (:mod:`rrl.manager.planner.recovery.ladder`)."""
_ENDED_BADLY = (Outcome.FAILED, Outcome.REJECTED)


class Arrival(StrEnum):
    """The state of an expected effect."""

    OPEN = "awaited"
    CAME = "came"
    MISSED = "did not come"
    HOLDS = "holds so far"
    """The effect is expected to last and has lasted so far: a node is not used, or the run continues without a
    replica."""
    OVER = "no longer awaited"
    """The effect was possible at best, and nothing waits for it any more: a pool did not get all nodes to grow."""


class Result(Struct):
    """The result of an expectation."""

    arrival: Arrival = Arrival.OPEN
    at: float | None = None
    """Manager's time (s) at which the effect occurred, or was certain not to occur; None while neither is known."""
    text: str = ""
    """Description of what happened; empty while the effect is awaited or holds."""

    def settle(self, arrival: Arrival, at: float, text: str) -> None:
        """Set the result, unless it has been set."""
        if self.arrival is Arrival.OPEN:
            self.arrival, self.at, self.text = arrival, at, text


class _WholeRestart(Struct):
    """A restart of the whole run whose replicas have not all joined again."""

    result: Result
    missing: set[ReplicaId]
    needs_commit: bool


class _Growth(Struct):
    """A resize whose started replicas have not all joined."""

    result: Result
    missing: set[ReplicaId]


class Expectations:
    """Follows the open expectations of a run, event by event."""

    def __init__(self) -> None:
        self._policy = _ONE_BY_ONE
        self._joins: dict[ReplicaId, list[tuple[Incarnation, Result]]] = {}
        """Open restarts, each with the incarnation that the restart ended, by the replica that should join again."""
        self._launches: dict[Incarnation, Result] = {}
        """Launches, by the incarnation that should join."""
        self._launch_tags: dict[str, Incarnation] = {}
        self._requests: dict[str, Result] = {}
        """Requests for nodes, by tag."""
        self._answers: dict[str, Result] = {}
        """Actions that are done once the cluster or a process confirms them, by tag."""
        self._stops: dict[str, Result] = {}
        """Stops, by the step that should end."""
        self._absences: dict[ReplicaId, list[Result]] = {}
        """Decisions to continue without a replica, by replica."""
        self._unused: dict[NodeName, list[Result]] = {}
        """Exclusions, by the excluded node, until the node is used again."""
        self._reused: dict[NodeName, Result] = {}
        """Readmissions, by the node whose agent should join."""
        self._restarts: list[_WholeRestart] = []
        self._growths: list[_Growth] = []
        self._faults: dict[str, tuple[InjectFault, Result]] = {}
        self._end: list[Result] = []
        """Decisions to end the run."""

    # ── decisions ───────────────────────────────────────────────────────────────────────────────────────────────────
    def begin(self, result: Result, action: Action, at: float) -> None:
        """Follow the expected effect of a decision; ``at`` is the manager's time (s) of the decision."""
        match action:
            case Fence():
                self._on_fence(result, action, at)
            case Resize():
                self._on_resize(result, action, at)
            case RestartAll():
                self._on_restart_all(result, action, at)
            case Finish():
                self._on_finish(result, action, at)
            case Exclude(node=node):
                if (reused := self._reused.pop(node, None)) is not None:
                    reused.settle(Arrival.MISSED, at, f"{node} was given up again")
                self._unused.setdefault(node, []).append(result)
            case Readmit(node=node):
                _settle_all(self._unused.pop(node, ()), Arrival.CAME, at, "until the node was used again")
                self._reused[node] = result
            case Launch():
                self._on_launch(result, action, at)
            case StopStep():
                self._stops[action.step] = self._answers[action.tag] = result
            case Request():
                self._requests[action.tag] = result
            case InjectFault():
                self._faults[action.fault.id] = action, result
            case Release():
                if (request := self._requests.pop(action.allocation, None)) is not None:
                    request.settle(Arrival.MISSED, at, "the request was given up")
                self._answers[action.tag] = result
            case _:
                self._answers[action.tag] = result
        if isinstance(action, Exclude | Fence | RestartAll):
            self._repaired(action, at)

    def _on_fence(self, result: Result, fence: Fence, at: float) -> None:
        incarnation = fence.incarnation
        self._did_not_join(incarnation, at)
        if fence.rung in (Rung.DEGRADED, Rung.GIVE_UP):
            self._absences.setdefault(incarnation.replica, []).append(result)
        else:
            self._joins.setdefault(incarnation.replica, []).append((incarnation, result))

    def _on_resize(self, result: Result, resize: Resize, at: float) -> None:
        """Follow the joins of the started replicas. Nothing is expected of the stopped replicas any more."""
        stopped, text = set(resize.stop), "it was stopped, since its pool became smaller"
        for id in [id for id in self._joins if gang_of(id) in stopped]:
            _settle_all((joined for _, joined in self._joins.pop(id)), Arrival.OVER, at, text)
        for launched in [one for one in self._launches if gang_of(one.replica) in stopped]:
            self._launches.pop(launched).settle(Arrival.OVER, at, text)
        for id in [id for id in self._absences if gang_of(id) in stopped]:
            _settle_all(self._absences.pop(id), Arrival.CAME, at, f"until the run no longer had {id}")
        for restart in self._restarts:
            restart.missing -= {id for id in restart.missing if gang_of(id) in stopped}
        self._complete_restarts(at)
        for growth in self._growths:
            if growth.missing and growth.missing <= stopped:
                growth.result.settle(Arrival.OVER, at, "the replicas that had not joined were stopped again")
            growth.missing -= stopped
        if resize.start:
            self._growths.append(_Growth(result, set(resize.start)))
        else:
            result.settle(Arrival.CAME, at, "done")

    def _did_not_join(self, incarnation: Incarnation, at: float) -> None:
        text = f"{incarnation} was stopped before it joined"
        for ended, result in self._joins.pop(incarnation.replica, ()):
            not_started = f"{incarnation.replica} was not started again before the next decision"
            result.settle(Arrival.MISSED, at, not_started if ended == incarnation else text)
        if (launch := self._launches.pop(incarnation, None)) is not None:
            launch.settle(Arrival.MISSED, at, text)

    def _on_restart_all(self, result: Result, action: RestartAll, at: float) -> None:
        self._end_restarts(at, "the whole run was restarted again")
        for fence in action.fences:
            self._did_not_join(fence.incarnation, at)
        replicas = {fence.incarnation.replica for fence in action.fences if not is_support(fence.incarnation.replica)}
        self._restarts.append(_WholeRestart(result, replicas, self._policy == _ONE_BY_ONE))

    def _end_restarts(self, at: float, text: str) -> None:
        _settle_all((restart.result for restart in self._restarts), Arrival.MISSED, at, text)
        self._restarts.clear()

    def _on_finish(self, result: Result, finish: Finish, at: float) -> None:
        text = f"the run ended first: {finish.outcome.value}"
        self._end.append(result)
        arrival = Arrival.MISSED if finish.outcome in _ENDED_BADLY else Arrival.CAME
        for absences in self._absences.values():
            _settle_all(absences, arrival, at, f"the run went on until it ended: {finish.outcome.value}")
        joins = (result for ended in self._joins.values() for _, result in ended)
        waiting = (*self._launches.values(), *self._requests.values(), *self._reused.values(), *joins)
        _settle_all(waiting, Arrival.MISSED, at, text)
        self._end_restarts(at, text)
        _settle_all((growth.result for growth in self._growths), Arrival.OVER, at, text)
        for open_results in (self._absences, self._launches, self._requests, self._reused, self._joins):
            open_results.clear()
        for action, fault in self._faults.values():
            if finish.outcome in _ENDED_BADLY:
                fault.settle(Arrival.CAME, at, "the run ended")
            else:
                fault.settle(Arrival.MISSED, at, _harmless(action))
        self._faults.clear()

    def _on_launch(self, result: Result, launch: Launch, at: float) -> None:
        replica = launch.incarnation.replica
        self._launches[launch.incarnation] = result
        self._launch_tags[launch.tag] = launch.incarnation
        _settle_all(self._absences.pop(replica, ()), Arrival.CAME, at, f"until {replica} was started again")
        _settle_all(self._unused.pop(launch.node, ()), Arrival.MISSED, at, f"{launch.incarnation} was started there")

    def _repaired(self, action: Exclude | Fence | RestartAll, at: float) -> None:
        """Settle the expectations about injected faults that this action repairs.

        An action repairs a fault if it excludes the fault's node, or fences the fault's incarnation because of a
        failure.
        """
        node = action.node if isinstance(action, Exclude) else None
        fences = action.fences if isinstance(action, RestartAll) else (action,) if isinstance(action, Fence) else ()
        ended = {fence.incarnation for fence in fences if fence.charged}
        for id, (fault, result) in list(self._faults.items()):
            if (node is not None and fault.node == node) or fault.incarnation in ended:
                repair = "the node was given up" if node is not None else "a repair was decided"
                result.settle(Arrival.CAME, at, repair)
                del self._faults[id]

    # ── events ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def apply(self, stamped: ev.Stamped) -> None:
        """Settle the expectations that an event fulfils or rules out."""
        handler = _HANDLERS.get(type(stamped.event))
        if handler is not None:
            handler(self, stamped.event, stamped.at)

    def close(self) -> None:
        """Set ``HOLDS`` as the result of the decisions that are still in force at the newest event.

        These are the exclusions of nodes and the decisions to continue without a replica.
        """
        for held in (*self._absences.values(), *self._unused.values()):
            for result in held:
                result.arrival = Arrival.HOLDS

    def _on_started(self, event: ev.RunStarted | ev.Resumed, at: float) -> None:
        self._policy = event.job.recovery.policy

    def _on_joined(self, event: ev.Joined | ev.AgentJoined, at: float) -> None:
        incarnation, text = event.incarnation, f"{event.incarnation} joined on {event.node}"
        ended = self._joins.pop(incarnation.replica, ())
        _settle_all((result for _, result in ended), Arrival.CAME, at, text)
        if (launch := self._launches.pop(incarnation, None)) is not None:
            launch.settle(Arrival.CAME, at, text)
        for restart in self._restarts:
            restart.missing.discard(incarnation.replica)
        self._complete_restarts(at)
        for growth in [one for one in self._growths if incarnation.replica in one.missing]:
            growth.missing.discard(incarnation.replica)
            if not growth.missing:
                growth.result.settle(Arrival.CAME, at, f"{incarnation.replica} has joined, as the last one")
        self._growths = [growth for growth in self._growths if growth.missing]
        if isinstance(event, ev.AgentJoined) and (reused := self._reused.pop(event.node, None)) is not None:
            reused.settle(Arrival.CAME, at, text)

    def _on_committed(self, event: ev.StepCommitted, at: float) -> None:
        if self._restarts:
            for restart in self._restarts:
                restart.needs_commit = restart.needs_commit and bool(restart.missing)
            self._complete_restarts(at)

    def _complete_restarts(self, at: float) -> None:
        for restart in [one for one in self._restarts if not one.missing and not one.needs_commit]:
            restart.result.settle(Arrival.CAME, at, "every role works again")
            self._restarts.remove(restart)

    def _on_settled(self, event: ev.IntentSettled, at: float) -> None:
        answered = self._answers.pop(event.tag, None)
        if event.ok:  # for a request or a launch, the effect is the later grant or join
            if answered is not None:
                answered.settle(Arrival.CAME, at, "done")
            return
        launched = self._launch_tags.pop(event.tag, None)
        refused = (
            answered,
            self._requests.pop(event.tag, None),
            self._launches.pop(launched, None) if launched is not None else None,
        )
        _settle_all((one for one in refused if one is not None), Arrival.MISSED, at, _refused(event))

    def _on_allocation(self, event: ev.AllocationChanged, at: float) -> None:
        status = event.status
        if status is None or status.state is not AllocationState.RUNNING:
            return
        if (request := self._requests.pop(event.tag, None)) is not None:
            nodes = ", ".join(status.nodes)
            request.settle(Arrival.CAME, at, f"granted: {nodes}")

    def _on_step_ended(self, event: ev.StepEnded, at: float) -> None:
        if (stop := self._stops.pop(event.step, None)) is not None:
            stop.settle(Arrival.CAME, at, "it has ended")

    def _on_fault(self, event: ev.FaultInjected, at: float) -> None:
        if event.fault not in self._faults:
            return
        action, result = self._faults[event.fault]
        if event.ended:
            result.settle(Arrival.MISSED, at, _harmless(action))
        elif not event.ok:
            result.settle(Arrival.MISSED, at, f"the fault was not injected: {event.detail or 'unknown'}")
        if result.arrival is not Arrival.OPEN:
            del self._faults[event.fault]

    def _on_run_ended(self, event: ev.RunEnded, at: float) -> None:
        _settle_all(self._end, Arrival.CAME, at, "everything is released")
        for unused in self._unused.values():
            _settle_all(unused, Arrival.CAME, at, "until the run ended")
        _settle_all((*self._answers.values(), *self._stops.values()), Arrival.CAME, at, "released with the run")
        for settled in (self._end, self._unused, self._answers, self._stops):
            settled.clear()


def _settle_all(results: Iterable[Result], arrival: Arrival, at: float, text: str) -> None:
    for result in results:
        result.settle(arrival, at, text)


def _refused(event: ev.IntentSettled) -> str:
    how = "the call did not reach the cluster" if event.undelivered else "refused"
    return f"{how}: {event.detail}" if event.detail else how


def _harmless(action: InjectFault) -> str:
    return f"the fault ended, and nothing had to be repaired ({action.fault.kind.value})"


_HANDLERS: dict[type, Callable[[Expectations, Any, float], None]] = {
    ev.RunStarted: Expectations._on_started,
    ev.Resumed: Expectations._on_started,
    ev.Joined: Expectations._on_joined,
    ev.AgentJoined: Expectations._on_joined,
    ev.StepCommitted: Expectations._on_committed,
    ev.IntentSettled: Expectations._on_settled,
    ev.AllocationChanged: Expectations._on_allocation,
    ev.StepEnded: Expectations._on_step_ended,
    ev.FaultInjected: Expectations._on_fault,
    ev.RunEnded: Expectations._on_run_ended,
}
