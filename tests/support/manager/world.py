"""A cluster and its processes in virtual time, as the manager's planner meets them: actions in, events out.

It plans after every event as the runtime does, and holds every plan against what a plan must be: made from the state
alone, at its fixpoint once folded in, with evidence, and not due before it says so. Time stands still while nothing
happens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from heapq import heappop, heappush
from typing import TypeVar

from rrl.core.launch import ExitReason
from rrl.core.phases import STANDBY
from rrl.core.run_spec import JobView
from rrl.core.types import (  # fmt: skip
    AGENT,
    SHADOW,
    Cause,
    Evidence,
    Finding,
    Flag,
    Life,
    NodeName,
    Outcome,
    Remedy,
    ReplicaId,
    Verdict,
    Version,
    rank_of,
    role_of,
    stands_for,
)
from rrl.manager.cluster.base import AllocationSeen, AllocationState, Ask, RejectReason
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Action, Fence, Finish, Launch, Outside, Perform, Release, Request, Rung, StopStep
from rrl.manager.model.queries import workers
from rrl.manager.model.reducer import fold
from rrl.manager.model.state import NEVER_APPEARED, State, Status
from rrl.manager.planner import plan
from rrl.tests.support.manager.jobs import RUN

A = TypeVar("A", bound=Action)

_ROUNDS = 12
"""plans in a row before it counts as a planner that never comes to rest"""
_FIRST_PHASE = {"rollout": "generate", "trainer": "train", SHADOW: STANDBY}


class _Died(BaseException):
    """The manager, before its next record."""


class World:
    """``nodes``: how many there are in the cluster, ``n1``, ``n2``, ...; the pool is taken from them."""

    def __init__(self, job: JobView, nodes: int | None = None) -> None:
        self.now = 1000.0
        self.events: list[ev.Stamped] = []
        self.actions: list[Action] = []
        self.over = False
        self.refuse = ""
        """what every request is refused with"""
        self.closed: dict[str, str] = {}
        """parts whose requests wait in the queue, and Slurm's reason"""
        self.hopeless: dict[str, str] = {}
        """parts whose requests wait for ever, and Slurm's reason"""
        self.broken: dict[str, str] = {}
        """roles whose process ends before it joins, and why"""
        self.broken_lives: dict[ReplicaId, str] = {}
        """the same for single replicas, and for agents"""
        self.broken_nodes: dict[NodeName, str] = {}
        """the same for every role on a node"""
        self.slow_to_join = 0.7
        """s that a role takes to join once its first process runs; what is broken ends sooner"""
        self.unfit: dict[NodeName, str] = {}
        """nodes whose probe fails, and what it says"""
        self.refuse_launch: set[NodeName] = set()
        """nodes on which the cluster refuses every launch"""
        self.refuse_release = 0
        """so many give-backs are refused"""
        self.refuse_stop = 0
        """so many ends of steps are refused"""
        self.unanswered = False
        """a request is neither done nor refused until ``land``"""
        self.slow_to_stop = 0.2
        """s that a step takes to end when it is asked to; inf: it never does"""
        self.dead: set[NodeName] = set()
        self.asks: dict[str, Ask] = {}
        self.steps: dict[str, tuple[Life, NodeName]] = {}
        """what runs"""
        self._free = [NodeName(f"n{i}") for i in range(1, (job.nodes if nodes is None else nodes) + 1)]
        self.held: dict[str, tuple[NodeName, ...]] = {}
        self.mute: set[NodeName] = set()
        """nodes whose shadows are told what they become, and are never heard of again"""
        self.die_before = 0
        """number of the decision or intent, from 1, before whose record the manager dies; the next one takes over"""
        self.planned = 0
        """decisions and intents recorded"""
        self._tags: set[str] = set()
        self._lives: set[Life] = set()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._wake = float("inf")
        self._state: State | None = None
        self.record(ev.RunStarted(RUN, job))
        self.record(ev.ManagerStarted("login", 1))

    # ── what a test does ─────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def state(self) -> State:
        assert self._state is not None
        return self._state

    def play(self, until: Callable[[], bool] = lambda: False, at_most: float = 3600.0) -> World:
        """Let things happen until ``until()``, or until nothing more is going to, or ``at_most`` s have passed."""
        end = self.now + at_most
        self._turn()
        while not until() and not self.over:
            at = min(self._due[0][0] if self._due else float("inf"), self._wake)
            if at > end:
                break
            if at > self.now and self._due and self._due[0][0] == at and at < self._wake:
                assert not plan(self.state, at).actions, "due before the wake that was named"
            self.now = max(self.now, at)
            while self._due and self._due[0][0] <= self.now:
                heappop(self._due)[2]()
            self._turn()
        return self

    def wait(self, seconds: float) -> World:
        """Let exactly so much time pass."""
        end = self.now + seconds
        self.play(at_most=seconds)
        self.now = end
        self._turn()
        return self

    def steady(self) -> World:
        """Until every replica works."""
        self.play(self.works)
        assert self.works(), {r.id: r.status for r in workers(self.state)}
        return self.play(at_most=1.0)

    def works(self) -> bool:
        at_work = (r for r in workers(self.state) if r.status is not Status.COMPLETED)
        return all(r.status is Status.JOINED and r.step in self.steps for r in at_work)

    def incarnations(self) -> dict[ReplicaId, int]:
        return {replica.id: replica.incarnation for replica in workers(self.state)}

    def node_of(self, replica: ReplicaId) -> NodeName:
        node = self.state.replica(replica).node
        assert node is not None
        return node

    def commit(self, step: int) -> None:
        self.happen(ev.StepCommitted(self.state.replica(ReplicaId("trainer/0")).life, step, {"reward": step / 10}))

    def cancel(self) -> None:
        self.happen(ev.Commanded("cancel", "me", "c1"))

    def kill(self, replica: ReplicaId) -> None:
        """SIGKILL of its process; the step's exit record follows."""
        held = self.state.replica(replica)
        if held.step in self.steps:
            assert held.step is not None
            self._end(held.step, 9)
            self._turn()

    def freeze(self, replica: ReplicaId) -> None:
        """It hangs: the detector says so, its step goes on."""
        held = self.state.replica(replica)
        if held.status is Status.JOINED:
            self.happen(found(held.life, "no_progress", self.now))

    def lose_node(self, node: NodeName) -> None:
        """Everything on it is silent from now on, and the detectors say so."""
        self.dead.add(node)
        self.steps = {tag: step for tag, step in self.steps.items() if step[1] != node}
        self._later(self.state.job.limits.silence, lambda: self.record(lost(node, self.now)))

    def drop(self, tag: str, state: AllocationState | None = None) -> None:
        """The cluster ends an allocation of its own accord."""
        nodes = self._give_back(tag)
        seen = None if state is None else AllocationSeen(state, "7", nodes, "CANCELLED by 1000")
        self.happen(ev.AllocationChanged(tag, seen))

    def land(self) -> None:
        """The requests that nobody answered turn out to have been heard."""
        self.unanswered = False
        for tag, ask in self.asks.items():
            if tag in self.state.intents:
                self._grant(ask)

    def arrive(self, count: int) -> None:
        """So many nodes become free, and whoever waits in the queue gets them."""
        begin = 1000 + len(self._free)
        self._free += [NodeName(f"n{i}") for i in range(begin, begin + count)]
        for tag, ask in self.asks.items():
            if tag in self.state.allocations and not self.held.get(tag):
                self._grant(ask)

    def open(self, part: str) -> None:
        """The queue comes to the requests of this part."""
        self.closed.pop(part)
        self.arrive(0)

    def finish(self, replica: ReplicaId) -> None:
        """Its process is done: it exits with code 0."""
        held = self.state.replica(replica)
        assert held.step in self.steps
        self._end(held.step, 0)
        self._turn()

    def vanish(self, replica: ReplicaId) -> None:
        """Its process is gone, and nobody has noticed yet."""
        held = self.state.replica(replica)
        assert held.step is not None
        del self.steps[held.step]

    def shadows(self) -> dict[NodeName, int]:
        """Nodes on which shadows are ready, and how many."""
        return Counter(
            one.node for one in self.state.replicas.values()
            if one.role == SHADOW and one.status is Status.JOINED and one.step in self.steps and one.node
        )  # fmt: skip

    def engines(self) -> list[NodeName]:
        """Nodes on which a rollout is kept ready, once for each."""
        ready = (one for one in self.state.replicas.values() if _holds(one.life) and one.status is Status.JOINED)
        return sorted(one.node for one in ready if one.step in self.steps and one.node)

    def warmed(self) -> World:
        """The trainer has committed a step, and its shadows are ready."""
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
        todo: list[Outside] = []
        try:
            self._plan(todo)
        except _Died:
            self._succeeded(todo)
            return
        for action in todo:
            self._carry_out(action)

    def _plan(self, todo: list[Outside]) -> None:
        planned_before: set[tuple[str, Rung | None]] = set()
        for _ in range(_ROUNDS):
            planned = plan(self.state, self.now)
            assert planned == plan(self.state, self.now), "two plans from one state"
            self._wake = planned.wake
            if not planned.actions:
                break
            for action in planned.actions:
                assert action.why.evidence, f"no evidence: {action}"
                assert all(action.why.evidence), f"empty evidence: {action}"
                deed = (action.tag, action.why.rung if isinstance(action, Fence) else None)
                assert deed not in planned_before, f"planned twice in a row: {action}"
                planned_before.add(deed)
                self.planned += 1
                if self.planned == self.die_before:
                    raise _Died
                self.actions.append(action)
                if isinstance(action, Outside):
                    self.record(ev.Intended(action))
                    todo.append(action)
                else:
                    self.record(ev.Decided(action))
        else:
            raise AssertionError(f"the plan does not come to rest: {planned.actions}")
        assert planned.wake > self.now, "it asks to be woken in the past"
        self.over = planned.over

    def _succeeded(self, undone: list[Outside]) -> None:
        """The next manager folds what is written; of what was meant to be done it does what can be done twice, tells
        shadows again what they become, and finds no trace of the rest."""
        self._state = None
        for stamped in self.events:
            self._state = fold(self._state, stamped)
        self.record(ev.ManagerStarted("login", 2))
        for action in undone:
            if isinstance(action, StopStep | Release) or (isinstance(action, Launch) and action.shadow is not None):
                self._carry_out(action)
            elif isinstance(action, Perform):
                self.record(ev.FaultInjected(action.fault.id, None, False, unknown=True))
            else:
                missed = ev.Done(action.tag, False, NEVER_APPEARED, True, RejectReason.NEVER_APPEARED)
                self._later(self.state.job.limits.quiet, lambda missed=missed: self.record(missed))  # type: ignore[misc]
        self._turn()

    # ── the world's answers ──────────────────────────────────────────────────────────────────────────────────────────
    def _carry_out(self, action: Outside) -> None:
        if isinstance(action, Request):
            self._request(action.ask)
        elif isinstance(action, Launch):
            self._launch(action)
        elif isinstance(action, StopStep):
            if self.slow_to_stop < float("inf"):
                self._later(self.slow_to_stop, lambda: self._stop(action))
        elif isinstance(action, Release):
            self._release(action)
        elif isinstance(action, Perform):
            self._later(0.1, lambda: self._perform(action))
        else:
            self._later(0.1, lambda: self.record(ev.Done(action.tag, True)))

    def _request(self, ask: Ask) -> None:
        assert ask.tag not in self.asks, "one tag, two requests"
        self.asks[ask.tag] = ask
        if self.refuse:
            self._later(0.1, lambda: self.record(ev.Done(ask.tag, False, self.refuse)))
        elif not self.unanswered:
            components = (ask, *ask.more)
            whole = sum(one.count for one in components) <= len(self._free)
            gang = "" if whole and not any(self._awaits(one) for one in components) else "Resources"
            for one in components:
                assert one is ask or one.tag not in self.asks, "one tag, two requests"
                self.asks[one.tag] = one
                self._grant(one, gang if ask.more else "")

    def _awaits(self, ask: Ask) -> str:
        return self.hopeless.get(ask.part) or self.closed.get(ask.part) or ""

    def _grant(self, ask: Ask, said: str = "") -> None:
        said = self._awaits(ask) or said
        free = [node for node in self._free if node not in ask.exclude and node not in self.dead and not said]
        nodes = tuple(free[: ask.count]) if len(free) >= ask.count else ()
        self._free = [node for node in self._free if node not in nodes]
        self.held[ask.tag] = nodes
        state = AllocationState.RUNNING if nodes else AllocationState.PENDING
        reason = "" if nodes else said or "Resources"
        seen = AllocationSeen(state, "7", nodes, reason, hopeless=self.hopeless.get(ask.part, ""))
        self._later(0.1, lambda: self.record(ev.Done(ask.tag, True)))  # of one that is known already: changes nothing
        self._later(1.0, lambda: self.record(ev.AllocationChanged(ask.tag, seen)))
        if nodes:
            self._later(1.0 + ask.walltime, lambda: self._expire(ask.tag))

    def _expire(self, tag: str) -> None:
        """Its walltime is over."""
        if self.held.get(tag):
            nodes = self._give_back(tag)
            self.record(ev.AllocationChanged(tag, AllocationSeen(AllocationState.ENDED, "7", nodes, "TIMEOUT")))

    def _release(self, action: Release) -> None:
        if self.refuse_release:
            self.refuse_release -= 1
            self._later(0.1, lambda: self.record(ev.Done(action.tag, False, "denied")))
            return
        self._later(0.1, lambda: self.record(ev.Done(action.tag, True)))
        self._later(0.5, lambda: self._gone(action.allocation))

    def _launch(self, action: Launch) -> None:
        assert action.node in self.held[action.allocation], f"{action.node} is not in {action.allocation}"
        assert action.life not in self._lives, f"{action.life} is launched twice"
        self._lives.add(action.life)
        self._finds_room(action)
        if action.shadow is not None:
            self._become(action)
            return
        assert action.step not in self._tags, "one step, two launches"
        self._tags.add(action.step)
        if action.node in self.refuse_launch:
            self._later(0.1, lambda: self.record(ev.Done(action.step, False, "no such node")))
        elif action.node not in self.dead:
            self.steps[action.step] = (action.life, action.node)
            self._later(0.3, lambda: self._speak(action))

    def _finds_room(self, action: Launch) -> None:
        """A rollout that is kept warm holds room: it finds it free, and nobody else is started in it."""
        there = [life for life, node in self.steps.values() if node == action.node]
        held = [life for life in there if _holds(life)]
        if _holds(action.life):
            assert all(role_of(life.replica) in (AGENT, SHADOW) for life in there), f"{action.life} has no room"
        elif role_of(action.life.replica) not in (AGENT, SHADOW) and self.slow_to_stop < 10.0:
            over = action.shadow is not None and _holds(action.shadow)
            assert over or not held, f"{held} hold the room of {action.life}"

    def _become(self, action: Launch) -> None:
        """The shadow goes on as the life, in its own step."""
        if action.node in self.dead or action.node in self.mute:
            self._later(self.state.job.recovery.adopt, lambda: self._unheard(action))
        elif action.step not in self.steps:
            self._later(0.1, lambda: self.record(ev.Done(action.step, False, "there is nobody to tell")))
        else:
            assert self.steps[action.step] == (action.shadow, action.node), "another life's step"
            self.steps[action.step] = (action.life, action.node)
            self._later(0.2, lambda: self._join(action))

    def _unheard(self, action: Launch) -> None:
        if self.state.believed(action.life) and self.state.replica(action.life.replica).status is Status.LAUNCHING:
            self.record(found(action.life, "not_adopted", self.now))

    def _speak(self, action: Launch) -> None:
        life, node = action.life, action.node
        if action.step not in self.steps:
            return
        if not self.state.believed(life) or self.state.verdict is not None:  # not wanted any more: it leaves
            self._end(action.step, 0)
            return
        self.record(ev.Admitted(life, action.step, node, 100))
        why = self.broken_lives.get(life.replica) or self.broken.get(role_of(life.replica))
        if role_of(life.replica) == AGENT and why is None:
            self.record(ev.AgentJoined(life, node, node, 100, self.unfit.get(node, "")))
            return
        if role_of(life.replica) != AGENT:
            why = why or self.broken_nodes.get(node)
        if why is None:
            self._later(self.slow_to_join, lambda: self._join(action))
        else:
            self._later(0.7, lambda: self._break(action, why))

    def _break(self, action: Launch, why: str) -> None:
        if action.step in self.steps:
            del self.steps[action.step]
            reason, detail = _exit(why)
            code = None if reason is ExitReason.NOT_STARTED else 1
            believed = self.state.believed(action.life)
            self.record(ev.StepEnded(action.life, action.step, code, None, reason, detail=detail))
            if believed:
                self.record(found(action.life, "exit_record", self.now, proof=True, text=why, reason=reason))

    def _join(self, action: Launch) -> None:
        life, node = action.life, action.node
        if action.step not in self.steps or not self.state.believed(life):
            return
        self.record(ev.Joined(life, node, node, 101))
        if role_of(life.replica) in ("rollout", "trainer") and rank_of(life.replica) == 0:
            self.record(ev.VersionHeld(life, Version(self.state.step, 1)))
        self.record(ev.PhaseEntered(life, _FIRST_PHASE.get(role_of(life.replica), "serve")))

    def _stop(self, action: StopStep) -> None:
        if self.refuse_stop:
            self.refuse_stop -= 1
            self.record(ev.Done(action.tag, False, "denied"))
            return
        lingering = self.state.lingering.get(action.step)
        if lingering is not None and lingering.node in self.dead:
            return  # nobody answers from there
        if action.step in self.steps:
            self._end(action.step, 0)
        self.record(ev.Done(action.tag, True))

    def _end(self, step: str, code: int) -> None:
        life, _ = self.steps.pop(step)
        believed = self.state.believed(life)
        self.record(ev.StepEnded(life, step, code, None, ExitReason.EXITED))
        if believed and code:
            self.record(found(life, "exit_record", self.now, proof=True))

    def _perform(self, action: Perform) -> None:
        target = self.state.replica(ReplicaId(action.fault.target))
        self.record(ev.FaultInjected(action.fault.id, target.life, True))
        if target.step in self.steps:
            assert target.step is not None
            self._end(target.step, 9)

    def _gone(self, tag: str) -> None:
        self._give_back(tag)
        self.record(ev.AllocationChanged(tag, None))

    def _give_back(self, tag: str) -> tuple[NodeName, ...]:
        nodes = self.held.pop(tag, ())
        self._free += [node for node in nodes if node not in self.dead]
        self.steps = {step: held for step, held in self.steps.items() if held[1] not in nodes}
        return nodes

    def _later(self, after: float, do: Callable[[], None]) -> None:
        self._count += 1
        heappush(self._due, (self.now + after, self._count, do))


def _holds(life: Life) -> bool:
    return role_of(life.replica) == SHADOW and stands_for(life.replica) == "rollout"


def _exit(text: str) -> tuple[ExitReason, str]:
    """Return what :func:`rrl.core.launch.exit_text` made this text of; any other text is a detail."""
    reason, _, detail = text.partition(": ")
    return (ExitReason(reason), detail) if reason in set(ExitReason) else (ExitReason.EXITED, text)


def found(
    life: Life, detector: str, at: float, proof: bool = False, text: str = "", reason: ExitReason | None = None
) -> ev.FindingChanged:
    evidence = (Evidence("step", text or f"{life} failed", at),)
    flags = (Flag.NOT_STARTED,) if reason is ExitReason.NOT_STARTED else ()
    return ev.FindingChanged(
        Finding(detector, Verdict.FAIL, Cause.PROCESS, Remedy.RESTART, at, evidence, life, proof=proof, flags=flags)
    )


def lost(node: NodeName, at: float) -> ev.FindingChanged:
    evidence = (Evidence("manager", f"agent of {node} is silent", at),)
    return ev.FindingChanged(Finding("node_lost", Verdict.FAIL, Cause.NODE, Remedy.EXCLUDE, at, evidence, node=node))


def requests(world: World) -> list[str]:
    return [action.tag for action in world.decided(Request)]


def rungs(world: World) -> list[Rung]:
    return [action.rung for action in world.decided(Fence) if role_of(action.life.replica) != AGENT]


def assert_nothing_is_left(world: World, outcome: Outcome) -> None:
    assert world.over
    assert (world.steps, world.held, world.state.allocations) == ({}, {}, {})
    assert [action.outcome for action in world.decided(Finish)] == [outcome]
