"""A virtual cluster and its processes, as the manager's planner sees them: it takes actions and returns events.

After every event the planner is called, as in the runtime, and its plan is checked:
- the plan depends only on the state;
- after its decisions are folded into the state, planning again soon gives an empty plan;
- its actions carry evidence;
- the plan was not due earlier than the planner had announced.

Use :class:`World` for tests of decisions. It runs only the pure core, ``fold`` and ``plan``. Health detectors,
messages, executor, journal and lease are left out: instead of them, the test or the world records events, and time
advances only from event to event. So runs of many hours are cheap, and after the death of a manager the next one begins
with a fold of the recorded events.

For tests of what happens between a decision and its effect use :class:`.site.Site`, which runs the real manager. World
and Site have separate cluster models, because their interfaces differ. World's cluster takes planned actions and
answers by events. Site's cluster implements the cluster backend, and the manager under test makes events of its results
and polls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from heapq import heappop, heappush
from typing import TypeVar

from msgspec.structs import replace

from rrl.cluster.base import AllocationRequest, AllocationState, AllocationStatus, RejectReason
from rrl.core.launch import ExitReason
from rrl.core.phases import ASLEEP, STANDBY
from rrl.core.run_spec import RunSpec
from rrl.core.types import (
    AGENT,
    GUEST_ROLE,
    STANDBY_ROLE,
    Cause,
    Evidence,
    Finding,
    Incarnation,
    NodeName,
    Outcome,
    RaisedException,
    Remedy,
    ReplicaId,
    Verdict,
    Version,
    is_support,
    rank_of,
    role_of,
)
from rrl.health.detection.detectors.liveness import exit_flags
from rrl.manager.model import events as ev
from rrl.manager.model.actions import (
    Action,
    ExternalAction,
    Fence,
    Finish,
    InjectFault,
    Launch,
    Release,
    Request,
    Resize,
    Rung,
    StopStep,
)
from rrl.manager.model.reducer import fold
from rrl.manager.model.state import NEVER_APPEARED, State, Status
from rrl.manager.planner import plan
from rrl.tests.support.manager.jobs import RUN

A = TypeVar("A", bound=Action)

_ROUNDS = 12
"""Number of plans in a row that are not empty, after which the test fails because the planner does not settle."""
GRACE_S = 30.0
"""Seconds between the announcement of a preemption and the end of the allocation."""
_SUPPORT_PHASE = {STANDBY_ROLE: STANDBY, GUEST_ROLE: ASLEEP}


class _Died(BaseException):
    """Raised in the manager when it fails, before its next record."""


class World:
    """A virtual cluster of ``nodes`` nodes (``n1``, ``n2``, ...), from which allocations are granted."""

    def __init__(self, job: RunSpec, nodes: int | None = None) -> None:
        self.now = 1000.0
        self.events: list[ev.Stamped] = []
        self.actions: list[Action] = []
        self.over = False
        self.refuse = ""
        """Message with which every request is rejected."""
        self.refuse_reason: RejectReason | None = None
        """Why every request is rejected."""
        self.closed: dict[str, str] = {}
        """Node groups whose requests wait in the queue, with Slurm's reason."""
        self.hopeless: dict[str, str] = {}
        """Node groups whose requests can never be met, with Slurm's reason."""
        self.broken: dict[str, str] = {}
        """Roles whose processes end before they join, with the reason."""
        self.broken_incarnations: dict[ReplicaId, str] = {}
        """Replicas and agents whose processes end before they join, with the reason."""
        self.broken_nodes: dict[NodeName, str] = {}
        """Nodes on which every process ends before it joins, with the reason."""
        self.raises: dict[str, RaisedException] = {}
        """Roles whose processes end after they joined and before their first work, with the exception."""
        self.raises_on: dict[NodeName, RaisedException] = {}
        """Nodes on which every process ends after it joined and before its first work, with the exception."""
        self.slow_to_join = 0.7
        """Seconds from the start of a role's first process until the role joins. Processes of broken roles end
        sooner."""
        self.unfit: dict[NodeName, str] = {}
        """Nodes whose probe fails, each with the message of the probe."""
        self.refuse_launch: set[NodeName] = set()
        """Nodes on which the cluster rejects every launch."""
        self.refuse_release = 0
        """Number of releases of an allocation that the cluster refuses from now on, before it accepts the next one."""
        self.refuse_stop = 0
        """Number of stops of a step that the cluster refuses from now on, before it accepts the next one."""
        self.unanswered = False
        """True if requests get no answer until :meth:`land` grants them."""
        self.slow_to_stop = 0.2
        """Seconds that a stopped step takes to end; inf if it never ends."""
        self.dead: set[NodeName] = set()
        self.requests: dict[str, AllocationRequest] = {}
        self.steps: dict[str, tuple[Incarnation, NodeName]] = {}
        """Running steps."""
        self._free = [NodeName(f"n{i}") for i in range(1, (job.nodes if nodes is None else nodes) + 1)]
        self.held: dict[str, tuple[NodeName, ...]] = {}
        self.unresponsive: set[NodeName] = set()
        """Nodes whose standby processes never answer a promotion."""
        self.die_before = 0
        """The manager fails before it records the decision or intent with this number, and the next manager takes over.
        Numbers begin with 1; 0 means that the manager does not fail."""
        self.planned = 0
        """Number of decisions and intents that were planned so far."""
        self.refused_for_now: dict[str, bool] = {}
        """Requests that were rejected, and whether they may be made again under the same tag."""
        self._tags: set[str] = set()
        self._incarnations: set[Incarnation] = set()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._wake = float("inf")
        self._state: State | None = None
        self.record(ev.RunStarted(RUN, job))
        self.record(ev.ManagerStarted("login", 1))

    # ── actions of a test ───────────────────────────────────────────────────────────────────────────────────────────
    @property
    def state(self) -> State:
        """Return the state after all events so far."""
        assert self._state is not None
        return self._state

    def play(self, until: Callable[[], bool] = lambda: False, timeout_s: float = 3600.0) -> World:
        """Let events happen until ``until()`` is true, no event is left, or ``timeout_s`` seconds have passed."""
        end = self.now + timeout_s
        self._turn()
        while not until() and not self.over:
            at = min(self._due[0][0] if self._due else float("inf"), self._wake)
            if at > end:
                break
            if at > self.now and self._due and self._due[0][0] == at and at < self._wake:
                assert not plan(self.state, at).actions, "a plan was due before the announced time"
            self.now = max(self.now, at)
            while self._due and self._due[0][0] <= self.now:
                heappop(self._due)[2]()
            self._turn()
        return self

    def wait(self, seconds: float) -> World:
        """Let exactly this many seconds pass."""
        end = self.now + seconds
        self.play(timeout_s=seconds)
        self.now = end
        self._turn()
        return self

    def steady(self) -> World:
        """Play until every replica works."""
        self.play(self.works)
        assert self.works(), {r.id: r.status for r in self.state.workers}
        return self.play(timeout_s=1.0)

    def works(self) -> bool:
        at_work = (r for r in self.state.workers if r.status is not Status.COMPLETED)
        return all(r.status is Status.JOINED and r.step in self.steps for r in at_work)

    def incarnations(self) -> dict[ReplicaId, int]:
        return {replica.id: replica.incarnation_number for replica in self.state.workers}

    def node_of(self, replica: ReplicaId) -> NodeName:
        node = self.state.replica(replica).node
        assert node is not None
        return node

    def commit(self, step: int) -> None:
        self.happen(
            ev.StepCommitted(self.state.replica(ReplicaId("trainer/0")).incarnation, step, {"reward": step / 10})
        )

    def cancel(self) -> None:
        self.happen(ev.CommandReceived("cancel", "me", "c1"))

    def kill(self, replica: ReplicaId) -> None:
        """Kill the replica's process; its step's exit record is reported after that."""
        record = self.state.replica(replica)
        if record.step in self.steps:
            assert record.step is not None
            self._end(record.step, 9)
            self._turn()

    def freeze(self, replica: ReplicaId) -> None:
        """Let the replica hang: its step keeps running, and a detector reports it."""
        record = self.state.replica(replica)
        if record.status is Status.JOINED:
            self.happen(found(record.incarnation, "no_progress", self.now))

    def lose_node(self, node: NodeName) -> None:
        """Lose every heartbeat from the node, so that the detectors report the node."""
        self.dead.add(node)
        self.steps = {tag: step for tag, step in self.steps.items() if step[1] != node}
        self._later(self.state.job.limits.silence, lambda: self.record(lost(node, self.now)))

    def drop(self, tag: str, state: AllocationState | None = None) -> None:
        """Let the cluster end an allocation without a request of the manager."""
        nodes = self._give_back(tag)
        status = None if state is None else AllocationStatus(state, "7", nodes, "CANCELLED by 1000")
        self.happen(ev.AllocationChanged(tag, status))

    def land(self) -> None:
        """Grant the requests that got no answer, and answer the next ones."""
        self.unanswered = False
        for tag, ask in self.requests.items():
            if tag in self.state.intents:
                self._grant(ask)

    def arrive(self, count: int) -> None:
        """Add free nodes, which queued requests get first."""
        begin = 1000 + len(self._free)
        self._free += [NodeName(f"n{i}") for i in range(begin, begin + count)]
        for tag, ask in self.requests.items():
            if tag in self.state.allocations and not self.held.get(tag):
                self._grant(ask)

    def open(self, group: str) -> None:
        """Let the queue grant the requests of this node group."""
        self.closed.pop(group)
        self.arrive(0)

    def finish(self, replica: ReplicaId) -> None:
        """Make the replica's process exit with code 0."""
        record = self.state.replica(replica)
        assert record.step in self.steps
        self._end(record.step, 0)
        self._turn()

    def vanish(self, replica: ReplicaId) -> None:
        """Remove the replica's process without recording an event."""
        record = self.state.replica(replica)
        assert record.step is not None
        del self.steps[record.step]

    def ready_standbys(self) -> dict[NodeName, int]:
        """Return the number of ready standby processes by node."""
        return Counter(
            replica.node
            for replica in self.state.replicas.values()
            if replica.role == STANDBY_ROLE
            and replica.status is Status.JOINED
            and replica.step in self.steps
            and replica.node
        )

    def warmed(self) -> World:
        """Commit a training step and wait until the standby processes are ready."""
        self.commit(self.state.step + 1)
        return self.wait(10.0)

    def decided(self, kind: type[A]) -> list[A]:
        return [action for action in self.actions if isinstance(action, kind)]

    # ── the manager's turn ───────────────────────────────────────────────────────────────────────────────────────────
    def record(self, event: ev.Event) -> None:
        stamped = ev.Stamped(len(self.events) + 1, self.now, 1, event)
        self.events.append(stamped)
        self._state = fold(self._state, stamped)

    def happen(self, event: ev.Event) -> None:
        self.record(event)
        self._turn()

    def _turn(self) -> None:
        todo: list[ExternalAction] = []
        try:
            self._plan(todo)
        except _Died:
            self._succeeded(todo)
            return
        for action in todo:
            self._carry_out(action)

    def _plan(self, todo: list[ExternalAction]) -> None:
        planned_before: set[tuple[object, ...]] = set()
        for _ in range(_ROUNDS):
            planned = plan(self.state, self.now)
            assert planned == plan(self.state, self.now), "one state gave two different plans"
            self._wake = planned.wake_at
            if not planned.actions:
                break
            for action in planned.actions:
                assert action.why.evidence, f"no evidence: {action}"
                assert all(action.why.evidence), f"empty evidence: {action}"
                key: tuple[object, ...] = (action.tag, action.why.rung if isinstance(action, Fence) else None)
                if isinstance(action, Resize):
                    key = (action.tag, action.start, action.stop)
                assert key not in planned_before, f"planned twice in a row: {action}"
                planned_before.add(key)
                self.planned += 1
                if self.planned == self.die_before:
                    raise _Died
                self.actions.append(action)
                if isinstance(action, ExternalAction):
                    self.record(ev.Intended(action))
                    todo.append(action)
                else:
                    self.record(ev.Decided(action))
        else:
            raise AssertionError(f"the plan does not settle: {planned.actions}")
        assert planned.wake_at > self.now, "the next planning time is in the past"
        self.over = planned.over

    def _succeeded(self, undone: list[ExternalAction]) -> None:
        """Let the next manager take over from the journal.

        It repeats the open actions that are safe to repeat, such as promotions. The other open actions were not carried
        out.
        """
        self._state = None
        for stamped in self.events:
            self._state = fold(self._state, stamped)
        self.record(ev.ManagerStarted("login", 2))
        for action in undone:
            if isinstance(action, StopStep | Release) or (isinstance(action, Launch) and action.standby is not None):
                self._carry_out(action)
            elif isinstance(action, InjectFault):
                self.record(ev.FaultInjected(action.fault.id, None, False, unknown=True))
            else:
                missed = ev.IntentSettled(action.tag, False, NEVER_APPEARED, True, RejectReason.NEVER_APPEARED)
                self._later(self.state.job.limits.quiet, lambda missed=missed: self.record(missed))  # type: ignore[misc]
        self._turn()

    # ── the world's answers ──────────────────────────────────────────────────────────────────────────────────────────
    def _carry_out(self, action: ExternalAction) -> None:
        if isinstance(action, Request):
            self._request(action.request)
        elif isinstance(action, Launch):
            self._launch(action)
        elif isinstance(action, StopStep):
            if self.slow_to_stop < float("inf"):
                self._later(self.slow_to_stop, lambda: self._stop(action))
        elif isinstance(action, Release):
            self._release(action)
        elif isinstance(action, InjectFault):
            self._later(0.1, lambda: self._perform(action))
        else:
            self._later(0.1, lambda: self.record(ev.IntentSettled(action.tag, True)))

    def _request(self, request: AllocationRequest) -> None:
        again = self.refused_for_now.pop(request.tag, False)
        assert again or request.tag not in self.requests, "a tag was requested twice"
        self.requests[request.tag] = request
        if self.refuse:
            self.refused_for_now[request.tag] = self.refuse_reason is RejectReason.REFUSED_FOR_NOW
            refusal = ev.IntentSettled(request.tag, False, self.refuse, reason=self.refuse_reason)
            self._later(0.1, lambda: self.record(refusal))
        elif not self.unanswered:
            components = (request, *request.further_components)
            fits = sum(component.count for component in components) <= len(self._free)
            gang = "" if fits and not any(self._awaits(component) for component in components) else "Resources"
            for component in components:
                assert component is request or component.tag not in self.requests, "a tag was requested twice"
                self.requests[component.tag] = component
                self._grant(component, gang if request.further_components else "")

    def _awaits(self, request: AllocationRequest) -> str:
        return self.hopeless.get(request.node_group) or self.closed.get(request.node_group) or ""

    def _grant(self, request: AllocationRequest, detail: str = "") -> None:
        detail = self._awaits(request) or detail
        free = [node for node in self._free if node not in request.exclude and node not in self.dead and not detail]
        nodes = tuple(free[: request.count]) if len(free) >= request.count else ()
        self._free = [node for node in self._free if node not in nodes]
        self.held[request.tag] = nodes
        state = AllocationState.RUNNING if nodes else AllocationState.PENDING
        reason = "" if nodes else detail or "Resources"
        status = AllocationStatus(
            state, "7", nodes, reason, unsatisfiable_reason=self.hopeless.get(request.node_group, "")
        )
        self._later(0.1, lambda: self.record(ev.IntentSettled(request.tag, True)))  # no change if already settled
        self._later(1.0, lambda: self.record(ev.AllocationChanged(request.tag, status)))
        if nodes:
            self._later(1.0 + request.walltime, lambda: self._expire(request.tag))

    def _expire(self, tag: str) -> None:
        """End an allocation whose walltime is over."""
        if self.held.get(tag):
            nodes = self._give_back(tag)
            self.record(ev.AllocationChanged(tag, AllocationStatus(AllocationState.ENDED, "7", nodes, "TIMEOUT")))

    def _release(self, action: Release) -> None:
        if self.refuse_release:
            self.refuse_release -= 1
            self._later(0.1, lambda: self.record(ev.IntentSettled(action.tag, False, "denied")))
            return
        self._later(0.1, lambda: self.record(ev.IntentSettled(action.tag, True)))
        self._later(0.5, lambda: self._gone(action.allocation))

    def _launch(self, action: Launch) -> None:
        assert action.node in self.held[action.allocation], f"{action.node} is not in {action.allocation}"
        assert action.incarnation not in self._incarnations, f"{action.incarnation} is launched twice"
        self._incarnations.add(action.incarnation)
        if action.standby is not None:
            self._promote(action)
            return
        assert action.step not in self._tags, "a step was launched twice"
        self._tags.add(action.step)
        if action.node in self.refuse_launch:
            self._later(0.1, lambda: self.record(ev.IntentSettled(action.step, False, "no such node")))
        elif action.node not in self.dead:
            self.steps[action.step] = (action.incarnation, action.node)
            self._later(0.3, lambda: self._hello(action))

    def _promote(self, action: Launch) -> None:
        """Let the standby process continue as the new incarnation, in its own step."""
        if action.node in self.dead or action.node in self.unresponsive:
            self._later(self.state.job.recovery.promote, lambda: self._lose_request(action))
        elif action.step not in self.steps:
            self._later(0.1, lambda: self.record(ev.IntentSettled(action.step, False, "the step has already ended")))
        else:
            assert self.steps[action.step] == (action.standby, action.node), "another incarnation's step"
            self.steps[action.step] = (action.incarnation, action.node)
            self._later(0.2, lambda: self._join(action))

    def _lose_request(self, action: Launch) -> None:
        if (
            self.state.is_current(action.incarnation)
            and self.state.replica(action.incarnation.replica).status is Status.LAUNCHING
        ):
            self.record(found(action.incarnation, "not_adopted", self.now))

    def _hello(self, action: Launch) -> None:
        incarnation, node = action.incarnation, action.node
        if action.step not in self.steps:
            return
        if not self.state.is_current(incarnation) or self.state.finish is not None:  # fenced, or the run ends: it exits
            self._end(action.step, 0)
            return
        self.record(ev.Admitted(incarnation, action.step, node, 100))
        why = self.broken_incarnations.get(incarnation.replica) or self.broken.get(role_of(incarnation.replica))
        if role_of(incarnation.replica) == AGENT and why is None:
            self.record(ev.AgentJoined(incarnation, node, node, 100, self.unfit.get(node, "")))
            return
        if role_of(incarnation.replica) != AGENT:
            why = why or self.broken_nodes.get(node)
        if why is None:
            self._later(self.slow_to_join, lambda: self._join(action))
        else:
            self._later(0.7, lambda: self._break(action, why))

    def _break(self, action: Launch, why: str) -> None:
        if action.step in self.steps:
            del self.steps[action.step]
            reason, detail = _exit(why)
            code = {ExitReason.NOT_STARTED: None, ExitReason.INVALID_CONFIG: 2}.get(reason, 1)
            current = self.state.is_current(action.incarnation)
            self.record(ev.StepEnded(action.incarnation, action.step, code, None, reason, detail=detail))
            if current:
                self.record(found(action.incarnation, "exit_record", self.now, proof=True, text=why, reason=reason))

    def _join(self, action: Launch) -> None:
        incarnation, node = action.incarnation, action.node
        if action.step not in self.steps or not self.state.is_current(incarnation):
            return
        self.record(ev.Joined(incarnation, node, node, 101))
        traits = self.state.job.traits_of(incarnation.replica)
        if traits.has_weights and rank_of(incarnation.replica) == 0:
            self.record(ev.VersionAvailable(incarnation, Version(self.state.step, 1)))
        phase = "generate" if traits.leases_turns else "train" if traits.trains else "serve"
        self.record(ev.PhaseEntered(incarnation, _SUPPORT_PHASE.get(role_of(incarnation.replica), phase)))
        if (exception := self.raises.get(role_of(incarnation.replica)) or self.raises_on.get(node)) is not None:
            self._later(0.5, lambda: self._end(action.step, 1, exception) if action.step in self.steps else None)

    def _stop(self, action: StopStep) -> None:
        if self.refuse_stop:
            self.refuse_stop -= 1
            self.record(ev.IntentSettled(action.tag, False, "denied"))
            return
        orphans = self.state.orphan_steps.get(action.step)
        if orphans is not None and orphans.node in self.dead:
            return  # a dead node does not answer
        if action.step in self.steps:
            self._end(action.step, 0)
        self.record(ev.IntentSettled(action.tag, True))

    def _end(self, step: str, code: int, exception: RaisedException | None = None) -> None:
        incarnation, _ = self.steps.pop(step)
        current = self.state.is_current(incarnation)
        self.record(ev.StepEnded(incarnation, step, code, None, ExitReason.EXITED, exception=exception))
        if current and code:
            self.record(found(incarnation, "exit_record", self.now, proof=True, exception=exception))

    def _perform(self, action: InjectFault) -> None:
        target = self.state.replica(ReplicaId(action.fault.target))
        self.record(ev.FaultInjected(action.fault.id, target.incarnation, True))
        if target.step in self.steps:
            assert target.step is not None
            self._end(target.step, 9)

    def _gone(self, tag: str) -> None:
        self._give_back(tag)
        self.record(ev.AllocationChanged(tag, None))

    def _give_back(self, tag: str) -> tuple[NodeName, ...]:
        nodes = self.held.pop(tag, ())
        self._free += [node for node in nodes if node not in self.dead]
        self.steps = {step: running for step, running in self.steps.items() if running[1] not in nodes}
        return nodes

    def _later(self, after: float, do: Callable[[], None]) -> None:
        self._count += 1
        heappush(self._due, (self.now + after, self._count, do))


def _exit(text: str) -> tuple[ExitReason, str]:
    """Return reason and detail of an exit from the text "REASON: DETAIL"; any other text is the detail of EXITED."""
    reason, _, detail = text.partition(": ")
    return (ExitReason(reason), detail) if reason in set(ExitReason) else (ExitReason.EXITED, text)


def found(
    incarnation: Incarnation,
    detector: str,
    at: float,
    proof: bool = False,
    text: str = "",
    reason: ExitReason | None = None,
    exception: RaisedException | None = None,
    code: int | None = 1,
) -> ev.FindingChanged:
    evidence = (Evidence("step", text or f"{incarnation} failed", at),)
    flags = exit_flags(reason, code) if reason is not None else ()
    return ev.FindingChanged(
        Finding(
            detector,
            Verdict.FAIL,
            Cause.PROCESS,
            Remedy.RESTART,
            at,
            evidence,
            incarnation,
            proof=proof,
            flags=flags,
            exception=exception,
        )
    )


def lost(node: NodeName, at: float) -> ev.FindingChanged:
    evidence = (Evidence("manager", f"agent of {node} is silent", at),)
    return ev.FindingChanged(Finding("node_lost", Verdict.FAIL, Cause.NODE, Remedy.EXCLUDE, at, evidence, node=node))


def requests(world: World) -> list[str]:
    return [action.tag for action in world.decided(Request)]


def rungs(world: World) -> list[Rung]:
    return [action.rung for action in world.decided(Fence) if role_of(action.incarnation.replica) != AGENT]


def assert_nothing_is_left(world: World, outcome: Outcome) -> None:
    assert world.over
    assert (world.steps, world.held, world.state.allocations) == ({}, {}, {})
    assert [action.outcome for action in world.decided(Finish)] == [outcome]


def fences(world: World) -> list[Fence]:
    """Return the fences of roles in the order of their decision."""
    return [fence for fence in world.decided(Fence) if not is_support(fence.incarnation.replica)]


def charged(world: World) -> list[tuple[str, Rung]]:
    return [(str(fence.incarnation), fence.rung) for fence in fences(world) if fence.charged]


def fail(world: World, replica: ReplicaId, detector: str = "exit_record") -> None:
    """Record a finding of failure, and let the planner decide before the next event."""
    world.happen(found(world.state.replica(replica).incarnation, detector, world.now))


def at_step(world: World, step: int) -> World:
    world.commit(step)
    return world


def with_status(world: World, tag: str, **changes: object) -> None:
    """Let the cluster report a changed status of the allocation, without any effect on its processes."""
    status = world.state.allocations[tag].status
    assert status is not None
    world.happen(ev.AllocationChanged(tag, replace(status, **changes)))


def preempt(world: World, tag: str) -> None:
    """Let Slurm reclaim the nodes: every step gets SIGTERM and exits, and the next poll shows the end."""
    nodes = world.held[tag]
    for step, (incarnation, node) in list(world.steps.items()):
        if node in nodes:
            del world.steps[step]
            world.happen(ev.StepEnded(incarnation, step, 0, None, ExitReason.STOPPED))
    with_status(world, tag, time_left_s=GRACE_S, reclaimed=True)
    world.play(timeout_s=GRACE_S)
    if tag in world.state.allocations:
        world.drop(tag, AllocationState.ENDED)
