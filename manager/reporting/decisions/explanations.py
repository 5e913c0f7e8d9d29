"""The manager's decisions in order, each explained, and losses of the manager: a fold of the run's events. Pure.

An explanation has the evidence of a decision, the findings at that time, the rung of the repair ladder, what the lower
rungs would have needed, the expected effect with its deadline, and whether this effect occurred (``expectations``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from msgspec import Struct, field

from ....core.run_spec import RunSpec
from ....core.text import plural, span
from ....core.types import Finding, Incarnation, NodeName, ReplicaId, Verdict, gang_of, replica_id, role_of
from ...model import events as ev
from ...model.actions import (
    Action,
    Drain,
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
    Shrink,
    StopStep,
    Undrain,
    Why,
    WithdrawGuests,
)
from .expectations import Arrival, Expectations, Result


class Takeover(Struct, frozen=True):
    """The loss of a manager, which the first record of the next one shows: an entry among the decisions."""

    lost: int
    """Epoch of the lost manager."""
    why: Why


class Explanation(Struct):
    """One decision of the manager, or its loss, with everything that is known about it. Times are the manager's (s)."""

    seq: int
    """Number of the record in the journal."""
    at: float
    step: int
    """Training step that was in progress, or the last step; 0 in a run without training."""
    action: Action | Takeover
    node: NodeName = NodeName("")
    """Node that the decision is about. For a decision about a process, the node on which this process was launched.
    Empty if the decision is not about a single node or process, or if the process was never launched."""
    findings: tuple[Finding, ...] = ()
    """FAIL findings at the time of the decision about the process or node that failed; empty if nothing had failed."""
    result: Result = field(default_factory=Result)
    """Whether the expected effect has occurred."""
    pool_size: int = 0
    """For a resize: number of replicas of the pool before it."""

    def concerns(self, name: str) -> bool:
        """Return whether the decision is about a role, a replica, an incarnation, or a node of this name."""
        return name in self._names()

    def _names(self) -> Iterable[str]:
        yield self.node
        action = self.action
        for incarnation in incarnations_of(action):
            replica = incarnation.replica
            yield from (role_of(replica), gang_of(replica), replica, str(incarnation))
        if isinstance(action, Shrink):
            yield from action.nodes
        if isinstance(action, Fence):
            yield action.target_node or ""
        if isinstance(action, InjectFault):
            yield action.fault.target
        if isinstance(action, Resize):
            yield from (action.pool, *action.start, *action.stop)


class PoolSizes:
    """The number of replicas of each role of a run, followed from decision to decision."""

    def __init__(self) -> None:
        self._replicas: dict[str, set[ReplicaId]] = {}

    def begin(self, job: RunSpec) -> None:
        """Begin with the replicas of a job that is started or resumed."""
        self._replicas = {role.name: {replica_id(role.name, n) for n in range(role.replicas)} for role in job.roles}

    def apply(self, action: Action) -> int:
        """Apply a decision, and return the number of replicas that the pool had before it; 0 if it is no resize."""
        if not isinstance(action, Resize):
            return 0
        before = self._replicas.get(action.pool, set())
        self._replicas[action.pool] = (before - set(action.stop)) | set(action.start)
        return len(before)


def incarnations_of(action: Action | Takeover) -> tuple[Incarnation, ...]:
    """Return the incarnations that a decision is about; for a restart of the whole run, all that it fences."""
    if isinstance(action, Launch):
        return (action.incarnation,) if action.standby is None else (action.incarnation, action.standby)
    if isinstance(action, Fence | StopStep):
        return (action.incarnation,)
    if isinstance(action, RestartAll):
        return tuple(fence.incarnation for fence in action.fences)
    return (action.incarnation,) if isinstance(action, InjectFault) and action.incarnation is not None else ()


def explain(events: Iterable[ev.Stamped]) -> list[Explanation]:
    """Return the explanation of every decision, in order."""
    explainer = _Explainer()
    for stamped in events:
        explainer.apply(stamped)
    return explainer.finished()


def known_names(explanations: Iterable[Explanation]) -> tuple[list[str], list[str]]:
    """Return the replicas and the nodes that the decisions are about, in the order of their first decisions."""
    replicas: dict[ReplicaId, None] = {}
    nodes: dict[NodeName, None] = {}
    for explanation in explanations:
        replicas.update(dict.fromkeys(gang_of(one.replica) for one in incarnations_of(explanation.action)))
        if explanation.node:
            nodes[explanation.node] = None
    return list(replicas), list(nodes)


class _Explainer:
    """Collects explanations, event by event."""

    def __init__(self) -> None:
        self._explanations: list[Explanation] = []
        self._expectations = Expectations()
        self._nodes: dict[Incarnation, NodeName] = {}
        """Node on which each incarnation was launched."""
        self._standing: dict[str, Finding] = {}
        """FAIL findings that have not cleared, by key."""
        self._committed = self._steps = 0
        """Newest committed training step, and the number of steps of the job."""
        self._sizes = PoolSizes()
        self._previous: ev.Stamped | None = None
        """The record before the one that is applied."""

    def apply(self, stamped: ev.Stamped) -> None:
        """Add the explanation of a decision, or what an event shows about earlier decisions."""
        handler = _HANDLERS.get(type(stamped.event))  # most events of a long run have no handler
        if handler is not None:
            handler(self, stamped, stamped.event)
        self._expectations.apply(stamped)
        self._previous = stamped

    def finished(self) -> list[Explanation]:
        """Return all explanations; an expectation without a result is open."""
        self._expectations.close()
        return self._explanations

    def _on_started(self, stamped: ev.Stamped, event: ev.RunStarted | ev.Resumed) -> None:
        self._steps = event.job.steps
        self._sizes.begin(event.job)

    def _on_manager_started(self, stamped: ev.Stamped, event: ev.ManagerStarted) -> None:
        last = self._previous
        if last is None or isinstance(last.event, ev.RunStarted | ev.ManagerStopped | ev.RunEnded):
            return
        evidence = f"it recorded nothing more, and no end, for {span(stamped.at - last.at)}"
        takeover = Takeover(last.epoch, Why((evidence,), expects="another manager takes over"))
        result = Result(Arrival.CAME, stamped.at, f"manager {stamped.epoch} on {event.host}")
        step = min(self._committed + 1, self._steps)
        self._explanations.append(Explanation(stamped.seq, last.at, step, takeover, result=result))

    def _on_committed(self, stamped: ev.Stamped, event: ev.StepCommitted) -> None:
        self._committed = max(self._committed, event.step)

    def _on_decision(self, stamped: ev.Stamped, event: ev.Decided | ev.Intended) -> None:
        action = event.action
        if isinstance(action, Launch):
            self._nodes[action.incarnation] = action.node
        step = min(self._committed + 1, self._steps)
        explanation = Explanation(stamped.seq, stamped.at, step, action, self._node_of(action))
        explanation.findings = self._findings(action, explanation.node)
        explanation.pool_size = self._sizes.apply(action)
        self._explanations.append(explanation)
        self._expectations.begin(explanation.result, action, stamped.at)
        stopped = action.stop if isinstance(action, Resize) else ()
        ended = incarnations_of(action) if isinstance(action, Fence | RestartAll) else ()
        if stopped or ended:
            self._standing = {
                key: one
                for key, one in self._standing.items()
                if one.incarnation not in ended
                and (one.incarnation is None or one.incarnation.gang.replica not in stopped)
            }

    def _node_of(self, action: Action) -> NodeName:
        if isinstance(action, Launch | Exclude | Readmit | Drain | Undrain | InjectFault):
            return action.node
        if isinstance(action, Fence | StopStep):
            return self._nodes.get(action.incarnation, NodeName(""))
        if isinstance(action, RestartAll) and action.failed is not None:
            return self._nodes.get(action.failed, NodeName(""))
        return NodeName("")

    def _findings(self, action: Action, node: NodeName) -> tuple[Finding, ...]:
        """Return the FAIL findings about the process or node that failed; empty if the action answers no failure."""
        if isinstance(action, Fence) and action.charged:
            about: Incarnation | None = action.incarnation
        elif isinstance(action, RestartAll):
            about = action.failed
        elif isinstance(action, Exclude):
            about = None
        else:
            return ()
        standing = self._standing.values()
        return tuple(one for one in standing if (about is not None and one.incarnation == about) or one.node == node)

    def _on_finding(self, stamped: ev.Stamped, event: ev.FindingChanged) -> None:
        finding = event.finding
        if finding.verdict is Verdict.FAIL:
            self._standing[finding.key] = finding
        else:
            self._standing.pop(finding.key, None)


_HANDLERS: dict[type, Callable[[_Explainer, ev.Stamped, Any], None]] = {
    ev.RunStarted: _Explainer._on_started,
    ev.Resumed: _Explainer._on_started,
    ev.ManagerStarted: _Explainer._on_manager_started,
    ev.StepCommitted: _Explainer._on_committed,
    ev.Decided: _Explainer._on_decision,
    ev.Intended: _Explainer._on_decision,
    ev.FindingChanged: _Explainer._on_finding,
}


def is_repair(action: Action | Takeover) -> bool:
    """Return whether a decision is more than routine: False only for the launch and the stop of a step."""
    return not isinstance(action, Launch | StopStep)


# ── words ────────────────────────────────────────────────────────────────────────────────────────────────────────────
_WORDS: dict[type, str] = {
    Request: "request",
    Release: "release",
    Launch: "start",
    StopStep: "stop",
    InjectFault: "inject",
    Drain: "drain",
    Undrain: "undrain",
    Shrink: "release single nodes",
    Fence: "replace",
    Resize: "resize",
    WithdrawGuests: "go on without",
    Exclude: "stop using",
    Readmit: "use again",
    RestartAll: "restart the whole run",
    Finish: "end the run",
    Takeover: "take over from",
}
"""Description of each action, for users."""


def words_of(action: Action | Takeover) -> str:
    """Return what a decision does, for example ``stop using``, without what it is about (:func:`subject_of`)."""
    if isinstance(action, Launch) and action.standby is not None:
        return "promote"
    if isinstance(action, Fence) and action.rung is Rung.DEGRADED:
        return "go on without"
    if isinstance(action, Fence) and not action.charged:
        return "restart" if action.rung is Rung.IN_PLACE else "move"
    return _WORDS[type(action)]


def subject_of(explanation: Explanation) -> str:
    """Return what a decision is about: processes, nodes or a request, as text."""
    action, node = explanation.action, explanation.node
    match action:
        case Fence() | StopStep():
            return f"{action.incarnation} on {node}" if node else str(action.incarnation)
        case Launch(standby=None):
            return f"{action.incarnation} on {node}"
        case Launch():
            return f"{action.standby} to {action.incarnation} on {node}"
        case Request():
            count = sum(part.count for part in (action.request, *action.request.further_components))
            return f"{plural(count, 'node')} ({action.request.tag})"
        case Release():
            return action.allocation
        case InjectFault():
            place = action.incarnation or action.fault.target or node
            return f"{action.fault.kind.value}{f' into {place}' if place else ''}"
        case Shrink():
            return ", ".join(action.nodes)
        case RestartAll():
            return f"after the failure of {action.failed}" if action.failed is not None else ""
        case Finish():
            return f"as {action.outcome.value}"
        case Resize():
            before = explanation.pool_size
            return f"{action.pool} {before} -> {before + len(action.start) - len(action.stop)}"
        case Takeover():
            return f"manager {action.lost}"
        case WithdrawGuests():
            return "guests"
        case _:
            return node
