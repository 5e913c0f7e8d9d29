"""The actors of a scenario: nodes with their agents, and gangs whose members follow the rhythm of their role."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from random import Random

from rrl.benchmarks.scenarios.format import RhythmPhase, RoleTable
from rrl.benchmarks.scenarios.rhythms import COMPILING, IDLE, IN_COLLECTIVE, WAITING, Loads, loads_of
from rrl.benchmarks.scenarios.values import fixed
from rrl.core.phases import WAIT_DATA
from rrl.core.types import AGENT, Incarnation, NodeName, ReplicaId, member_id, rank_of, replica_id
from rrl.health.detection.records import StackSample

STORE = ReplicaId("trajectories/0")
STARTING = RhythmPhase(phase="starting", lasts=fixed(1.0))
STORE_PHASES = frozenset({"generate", "wait_work", "wait_data", "score"})
"""Phases that stop while the store makes no progress. Heartbeats then report that the replica waits for the store."""
REQUESTING = frozenset({"generate", "score", "act"})
"""Phases in which a replica sends the store requests that it can serve."""
COLLECTIVE = frozenset({"train", "checkpoint", "publish"})
_MAX_PROBE_ANSWER_S = 2.0
"""Longest time that a healthy worker takes to answer a probe."""


@dataclass(slots=True, eq=False)
class Node:
    name: NodeName
    agent: Incarnation
    boot: str
    dead_at: float | None = None
    agent_until: float = inf
    """Time (s) until which the node's agent runs."""
    agent_frozen: float = 0.0
    """Time (s) until which the node's agent is frozen."""
    cut: float = 0.0
    """Time (s) until which no message from the node reaches the manager."""
    suspended: float = 0.0
    """Time (s) until which the node is suspended."""
    state: str = "up"
    detail: str = ""
    state_until: float = inf
    excluded: bool = False
    introduced: bool = False
    """Whether the node's agent has sent a Hello to the current manager."""

    def is_running(self, now: float) -> bool:
        return self.dead_at is None and now >= self.suspended

    def agent_is_running(self, now: float) -> bool:
        return self.is_running(now) and now < self.agent_until and now >= self.agent_frozen

    def agent_returns(self) -> None:
        """Replace the agent by a new incarnation, which the manager has launched."""
        self.agent = Incarnation(self.agent.replica, self.agent.number + 1)
        self.agent_until, self.agent_frozen, self.introduced = inf, 0.0, False


def node_named(name: str, seed: int) -> Node:
    return Node(NodeName(name), Incarnation(replica_id(AGENT, name), 1), f"boot-{seed}-{name}")


@dataclass(slots=True, eq=False)
class Member:
    """One process of a replica."""

    incarnation: Incarnation
    node: Node
    gpus: int
    """Number of the process's GPUs."""
    probed: bool = True
    """Whether the process answers probes for work."""
    gpu_indices: tuple[int, ...] = ()
    """Indices of the process's GPUs, which are known from its launch on."""
    ended: bool = False
    welcomed: bool = False
    """Whether this incarnation has sent a Hello to the current manager."""
    greeted: bool = False
    """Whether this incarnation has sent its first Hello."""
    stuck: float = 0.0
    """Time (s) until which the work of the process makes no progress."""
    stuck_how: str = ""
    """The way in which the actor is stuck: ``hang``, ``wedge``, ``quiet`` or ``freeze``."""
    false_progress_until: float = 0.0
    """Time (s) until which the progress counter increases although the process does not work."""
    loads: Loads | None = None
    """Load while the process is stuck or reports false progress; None means the load of an idle process."""
    slow: float = 1.0
    slow_until: float = 0.0
    muted_until: float = 0.0
    late_by: Callable[[], float] | None = None
    late_until: float = 0.0
    answers_after: Callable[[], float] | None = None
    answers_until: float = 0.0
    answer: str = "no"
    sent_goodbye: bool = False
    """Whether the process has sent a Goodbye."""
    end: tuple[str, int | None, int | None, str] | None = None
    """How the actor ended: ``exit`` or ``vanish``, exit code, signal, last line of output; None while it runs."""
    outbox: deque[tuple[float, str, tuple[object, ...]]] = field(default_factory=deque)
    """Messages in transit: due time, method of the judge, arguments."""

    def runs(self, now: float) -> bool:
        """Return whether the process can run: neither the process nor its node has ended or is stopped."""
        return not self.ended and not self.is_frozen(now) and self.node.is_running(now)

    def is_frozen(self, now: float) -> bool:
        """Return whether the process is stopped by a signal or a debugger."""
        return self.stuck_how == "freeze" and now < self.stuck

    def works(self, now: float) -> bool:
        return self.runs(now) and now >= self.stuck and now >= self.false_progress_until and not self.sent_goodbye

    def speed(self, now: float) -> float:
        return self.slow if now < self.slow_until else 1.0

    def reply(self, now: float, random: Random, work: bool) -> tuple[float, bool] | None:
        """Return the time (s) of the answer to a request that arrives now, and its success; None if there is no answer.

        With ``work`` the request is a probe for work, which a dead engine cannot answer. Otherwise it is a liveness
        request, which a stuck main thread cannot answer.
        """
        if not self.runs(now):
            return None
        soon = now + random.uniform(0.0, _MAX_PROBE_ANSWER_S)
        stuck = self.stuck_how if now < self.stuck else "wedge" if now < self.false_progress_until else ""
        if (work and not self.probed) or (not work and stuck == "wedge"):
            return soon, True
        if stuck in ("hang", "wedge"):
            return (soon, False) if self.answer == "fails" and work else None
        late = self.answers_after() if self.answers_after is not None and now < self.answers_until else 0.0
        return soon + min(late, max(0.0, self.answers_until - now)), True  # the delay is over then


@dataclass(slots=True, eq=False)
class Gang:
    """One replica; its members are in the same phase and proceed together."""

    id: ReplicaId
    role: str
    table: RoleTable
    members: list[Member]
    random: Random
    incarnation: int = 1
    joins_at: float = inf
    joined: bool = False
    launch_at: float = inf
    """Time (s) at which the gang's next incarnation is launched; inf if no launch is planned."""
    round: list[RhythmPhase] = field(default_factory=list)
    """Phases of this round that have not begun."""
    rhythm_phase: RhythmPhase = STARTING
    entered_at: float = 0.0
    remaining: float = 0.0
    data_arrives_in: float = 0.0
    """Seconds that other replicas must work until the data arrives for which a replica in ``wait_data`` waits. They
    count even while this replica is stuck."""
    compiles_until: float = 0.0
    work: float = 0.0
    reported_progress: int = 0
    """Part of ``work`` that the progress counter shows."""
    lump_at: float = 0.0
    passed: set[str] = field(default_factory=set)
    rounds_ended: int = 0
    """Number of rounds of the rhythm that the replica has ended; a restart begins the interrupted round again."""
    in_rhythm: bool = False
    """Whether the current phase belongs to the rhythm, rather than to the phases before the first round."""
    ended_in_round: dict[str, int] = field(default_factory=dict)
    """For each phase of the rhythm, the number of the last round in which the replica ended or skipped the phase."""
    held: bool = False
    """Whether the replica has worked through the phase, and waits for other replicas or a queue to end it."""
    stretched: dict[str, tuple[float, Loads | None]] = field(default_factory=dict)
    """For each stretched phase, the duration (s) and load of its next pass."""
    stretch_loads: Loads | None = None
    launched_at: float = 0.0
    start_takes: list[tuple[float, Callable[[int], None]]] = field(default_factory=list)
    """For each of the next starts: its duration (s), and a function that is called with the number of the
    incarnation."""
    waits: bool = False
    """Whether the replica stops or is slower because it waits for another role."""
    promoted_from: list[Incarnation] = field(default_factory=list)
    """The standby processes that become the members of the next incarnation; empty if it is launched."""
    restarts: list[tuple[float, NodeName]] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        return self.joined and not any(member.ended for member in self.members)

    def productive(self, now: float) -> bool:
        """Return whether the replica now produces the work for which other roles wait."""
        return self.alive and all(member.works(now) and now >= member.node.cut for member in self.members)

    def join(self, first: RhythmPhase, lasts: float, now: float) -> None:
        """Begin an incarnation with the phase ``first`` of ``lasts`` s; the phases before the first round follow."""
        self.joined, self.rhythm_phase, self.entered_at, self.remaining = True, first, now, lasts
        self.round, self.passed, self.in_rhythm, self.held = list(self.table.once or ()), set(), False, False
        self.work, self.reported_progress = 0.0, 0

    @property
    def round_number(self) -> int:
        """Return the number (from 1) of the current round, or of the next round if no round has begun."""
        return self.rounds_ended + 1

    def _end_phase(self) -> None:
        if self.in_rhythm:
            self.ended_in_round[self.rhythm_phase.phase] = self.round_number
            self.rounds_ended += not self.round

    def next_phase(self, now: float) -> None:
        self._end_phase()
        while True:
            if not self.round:
                self.round, self.in_rhythm = list(self.table.rhythm), True
            self.rhythm_phase = self.round.pop(0)
            if not self.in_rhythm or self.round_number % self.rhythm_phase.every_rounds == 0:
                break
            self._end_phase()
        self.entered_at, self.stretch_loads = now, None
        self.remaining, self.compiles_until = self.rhythm_phase.lasts.draw(self.random), 0.0
        if self.rhythm_phase.phase not in self.passed:
            self.passed.add(self.rhythm_phase.phase)
            extra = self.rhythm_phase.first.draw(self.random)
            self.remaining, self.compiles_until = self.remaining + extra, now + extra
        if self.rhythm_phase.phase in self.stretched:
            self.remaining, self.stretch_loads = self.stretched.pop(self.rhythm_phase.phase)
        self.lump_at = now + self.rhythm_phase.every.draw(self.random)

    def stretch(self, phase: str, lasts: float, loads: Loads | None) -> None:
        if self.joined and self.rhythm_phase.phase == phase:
            self.remaining, self.stretch_loads = lasts, loads
        else:
            self.stretched[phase] = (lasts, loads)

    def advance(self, now: float, dt: float, share: float) -> None:
        """Advance by ``dt`` s.

        ``share`` limits the speed. It is the share of working replicas in the role that this replica waits for.
        """
        speed = share * min(member.speed(now) for member in self.members)
        self.waits = share < 1.0
        if self.rhythm_phase.rate is not None and now >= self.compiles_until:
            self.work += self.rhythm_phase.rate * speed * dt
            if now >= self.lump_at:
                self.reported_progress = int(self.work)
                self.lump_at = now + self.rhythm_phase.every.draw(self.random)
        self.remaining -= dt * speed

    def stacks(self, now: float) -> StackSample | None:
        """Return the stacks of all members, which change while a member works; None while an agent does not answer.

        Members that wait for a stuck member in a collective do not move either.
        """
        if not all(member.node.agent_is_running(now) and now >= member.node.cut for member in self.members):
            return None
        stuck = [now < member.stuck for member in self.members]
        moves = not all(stuck) and not (any(stuck) and self.rhythm_phase.phase in COLLECTIVE)
        text = f"at {now:g} s" if moves else f"{self.rhythm_phase.phase} since {self.entered_at:g} s"
        return StackSample(text, text, all(stuck) or not any(stuck))

    def is_stuck_taking_data(self, now: float) -> bool:
        """Return whether the replica is in ``wait_data`` but takes no data, because one of its processes is stuck."""
        in_phase = self.alive and self.rhythm_phase.phase == WAIT_DATA
        return in_phase and any(now < member.stuck and member.stuck_how != "quiet" for member in self.members)

    def data_arrive(self, seconds: float, now: float) -> None:
        """Let other replicas work for ``seconds`` for the data that this replica waits for."""
        if self.is_stuck_taking_data(now):
            self.data_arrives_in -= seconds
        else:
            self.data_arrives_in = self.remaining

    def loads(self, member: Member, now: float) -> Loads:
        if not member.runs(now):
            return (member.loads or IDLE) if member.is_frozen(now) else IDLE
        if now < member.stuck or now < member.false_progress_until:
            return member.loads or IDLE
        if not self.joined:
            return COMPILING
        if (
            any(now < other.stuck or not other.runs(now) for other in self.members)
            and self.rhythm_phase.phase in COLLECTIVE
        ):
            return IN_COLLECTIVE
        if self.held:
            return WAITING if self.rhythm_phase.rate is not None else loads_of(self.rhythm_phase, WAITING)
        if self.stretch_loads is not None:
            return self.stretch_loads
        if now < self.compiles_until:
            return COMPILING
        return (
            WAITING
            if self.waits and self.rhythm_phase.rate is None and self.role != "trajectories"
            else loads_of(self.rhythm_phase)
        )

    def reported_waits_for(self, member: Member, store_stands: bool) -> ReplicaId | None:
        if rank_of(member.incarnation.replica) and self.rhythm_phase.phase.startswith("wait"):
            return self.id
        phase = self.rhythm_phase
        if phase.phase in STORE_PHASES and self.role != "trajectories":
            return STORE if store_stands or phase.reports_waits_for else None
        if not phase.reports_waits_for or not self.waits_for_role:
            return None
        return replica_id(self.waits_for_role, 0)

    @property
    def counts_work(self) -> bool:
        """Return whether the replica works in its current phase on something that it counts."""
        return self.rhythm_phase.rate is not None and self.role not in ("trainer", "trajectories")

    @property
    def waits_for_role(self) -> str:
        """Return the role that the current phase waits for; if ``until`` has several roles, the first one."""
        return self.rhythm_phase.waits or next(iter(self.rhythm_phase.until), "")


def members_of(gang: ReplicaId, incarnation: int, nodes: list[Node], gpus: int, probed: bool) -> list[Member]:
    return [
        Member(Incarnation(member_id(gang, rank), incarnation), node, gpus, probed) for rank, node in enumerate(nodes)
    ]
