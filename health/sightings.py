"""The last thing seen of each replica and each node: what the detectors look at.

Volatile, and rebuilt by listening: silence is not in the journal (HOUSE.md, decision 1). Plain values only: health
knows neither messages nor the cluster seam. ``now`` is always the manager's clock (s) at receipt; other hosts' times
never get here. Lives that the manager did not launch or welcome are ignored, and so is an older life of any replica.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from msgspec import Struct

from rrl.spec.jobview import Limits
from rrl.spec.phases import Phase
from rrl.spec.words import AGENT, SHADOW, Life, NodeName, ReplicaId, gang_of, role_of

STARTING = "starting"
"""what a worker says before its first phase; how long that took says nothing of the next start, on another node"""
BEATS_MISSED = 4
"""beats without a word after which the cluster surely tells a job as suspended, if it is: at once (measured)"""
FLAPS = 4
"""Times that the cluster must cease to call a node up within ``FLAP_WINDOW`` before it counts as one that flaps: what a
restart of slurmd or of slurmctld does to it once or twice is not that."""
FLAP_WINDOW = 600.0
"""s, as ``recovery.window`` is by default"""
_UNNAMED = Phase("")
_WINDOW = 32
"""durations remembered per role and phase"""
_ENOUGH = 3
"""durations before one speaks of usual (docs/sources.md, guard rails: three in a row)"""


class StepEnd(Struct, frozen=True):
    """How the step of a life ended; ``at`` is when the manager learned it."""

    code: int | None
    signal: int | None
    why: str
    at: float
    said: str = ""
    """its command's last line"""


@dataclass(slots=True, eq=False)
class ReplicaSighting:
    """One life of one replica (an agent is one too), as last seen."""

    life: Life
    home: NodeSighting = field(repr=False)
    launched_at: float
    """or when this manager began to listen, if that is later"""
    last_heard: float
    last_source: str = "launch"
    status: Literal["launched", "joined"] = "launched"
    joined_at: float | None = None
    shadow: Life | None = None
    """it has not been launched, but was told to become this life, and has not been heard as such since"""
    within: float = 0.0
    """s for that"""
    phase: str | None = None
    declared: Phase = _UNNAMED
    """what the job says of ``phase``"""
    phase_since: float = 0.0
    """or since when it is not blocked by another replica any more, if that is later"""
    done: int | None = None
    done_changed_at: float = 0.0
    """when ``done`` last rose"""
    waits_for: ReplicaId | None = None
    beats: int = 0
    """beats heard since ``clock``: so many observations say that it stands still"""
    usual: float | None = None
    """robust usual duration of this phase (s), frozen when ``clock`` started: a running deadline never moves"""
    passed: set[str] = field(default_factory=set)
    """phases that this life has been through once: their first-pass grace is spent"""
    whole: bool = False
    """the beginning of what ``clock`` measures was seen, so that its duration means something"""
    exit: StepEnd | None = None
    gone_witnessed_at: float | None = None
    alive_at: float | None = None
    """when its node's agent last said that its step lives"""
    goodbye_at: float | None = None
    """it said Goodbye: its silence is expected; its end is not, for nobody asked for it"""
    leaving_at: float | None = None
    """it was asked to stop: from then on its end and its silence are expected"""
    held_up: bool = False
    """a member of its gang is suspended: none of them can go on"""

    @property
    def node(self) -> NodeName:
        return self.home.node

    @property
    def is_agent(self) -> bool:
        return role_of(self.life.replica) == AGENT

    @property
    def ended(self) -> bool:
        return self.exit is not None or self.gone_witnessed_at is not None

    @property
    def left_at(self) -> float | None:
        """Since when nothing need be heard of it."""
        return min((at for at in (self.goodbye_at, self.leaving_at) if at is not None), default=None)

    @property
    def clock(self) -> float:
        """Since when nothing has moved: the phase began, ``done`` last rose, or another replica last blocked it."""
        return max(self.phase_since, self.done_changed_at)

    @property
    def first_pass(self) -> bool:
        return self.phase not in self.passed


@dataclass(slots=True, eq=False)
class NodeSighting:
    """One node: who lives there, when anything there was last heard, and what the cluster says of it."""

    node: NodeName
    agent: ReplicaSighting | None = None
    former_agent: ReplicaSighting | None = field(default=None, repr=False)
    """forgotten since anything here was last heard, like ``departed``"""
    boot: str = ""
    last_heard: float | None = None
    """of anything on it, agent or replica"""
    residents: dict[Life, ReplicaSighting] = field(default_factory=dict, repr=False)
    departed: dict[Life, ReplicaSighting] = field(default_factory=dict, repr=False)
    """replaced or forgotten since anything here was last heard. Without them a lost node would look well as soon as its
    replicas are started elsewhere"""
    state: str | None = None
    """the cluster's last word; None = it has not spoken yet"""
    detail: str = ""
    """its words when it first said so"""
    since: float = 0.0
    observations: int = 0
    """readings in a row that said so"""
    down_said: tuple[float, str] | None = None
    """since when, and with which words, it was last called down"""
    suspended_at: float | None = None
    """the cluster said that everything on it is suspended, and nothing was heard of it since"""
    looked_at: float | None = None
    """when the cluster was last asked what becomes of it, and answered; None: it never has"""
    called_up: bool = False
    """by the newest reading"""
    flaps: deque[float] = field(default_factory=lambda: deque(maxlen=FLAPS), repr=False)
    """when the cluster last ceased to call it up"""

    def asked(self, limits: Limits) -> bool:
        """The cluster has said, since everything here fell silent, what becomes of its job."""
        since = self.last_heard if self.last_heard is not None else self.agent.last_heard if self.agent else 0.0
        return self.looked_at is not None and self.looked_at >= since + BEATS_MISSED * limits.beat


class Watch:
    """Everything seen, by replica and by node. Whoever hears something tells it here; detectors only read."""

    def __init__(self) -> None:
        self.replicas: dict[ReplicaId, ReplicaSighting] = {}
        self.nodes: dict[NodeName, NodeSighting] = {}
        self.touched: set[NodeName] = set()
        """nodes where anything was seen since the last ``detect``, which empties it"""
        self.memo: object = None
        """``guards.detect`` remembers here what it concluded; nobody else reads it"""
        self._limits = Limits()
        self._usual: dict[tuple[str, str], deque[float]] = {}
        self._forgotten: dict[ReplicaId, int] = {}
        self._suspended: set[ReplicaId] = set()
        """gangs of which a member is on a suspended node"""

    def heed(self, limits: Limits) -> None:
        """Judge phases as this job has them. ``guards.detect`` calls it; what was heard before stays as it was kept."""
        self._limits = limits
        for seen in self.replicas.values():
            if seen.phase is not None:
                seen.declared = limits.phase(seen.phase)

    # ── told by the manager ──────────────────────────────────────────────────────────────────────────────────────────
    def launched(
        self, life: Life, node: NodeName, now: float, shadow: Life | None = None, within: float = 0.0
    ) -> None:
        """It was started, or is believed to run since before this manager. Its join deadline counts from here.

        ``shadow``: nothing was started: this one, which stood by on the node, was told to become the life, and is to be
        heard as that ``within`` so many s."""
        if shadow is not None:
            self.forget(shadow)
        if (seen := self._sighting(life, node, now)) is not None and shadow is not None:
            seen.shadow, seen.within = shadow, within

    def postponed(self, life: Life, now: float) -> None:
        """Whoever was to start it is away: its join deadline counts from now, if nothing of it was heard yet."""
        if (seen := self._known(life)) and seen.status == "launched" and seen.shadow is None:
            seen.launched_at = now

    def leaving(self, life: Life, now: float) -> None:
        """The manager asks it to stop: its end is what the manager wants."""
        if (seen := self._known(life)) and seen.leaving_at is None:
            seen.leaving_at = now

    def goodbye(self, life: Life, now: float) -> None:
        """It said Goodbye. It need not be heard any more, but unless it is asked to stop, its end is a failure."""
        if (seen := self._known(life)) and seen.goodbye_at is None:
            seen.goodbye_at = now

    def forget(self, life: Life) -> None:
        """It is not believed any more; what it may still say is ignored."""
        replica = life.replica
        self._forgotten[replica] = max(life.incarnation, self._forgotten.get(replica, -1))
        seen = self.replicas.get(replica)
        if seen is not None and seen.life <= life:
            self._depart(seen)
            del self.replicas[replica]

    def forget_node(self, node: NodeName) -> None:
        """It was given back: nothing about it, nor about who was still there, is judged any more."""
        if (home := self.nodes.get(node)) is None:
            return
        for seen in [*home.residents.values(), *([home.agent] if home.agent else [])]:
            self.forget(seen.life)
        del self.nodes[node]
        self.touched.add(node)

    def restart(self, now: float) -> None:
        """A new manager, or one that was paused: everything counts anew from here, as if launched now.

        Proof stays (an exit record, a witnessed end), and so do usual durations; silence from before is not judged.
        """
        for seen in self.replicas.values():
            _anew(seen, now)
        for home in self.nodes.values():
            home.suspended_at = home.looked_at = None
            home.last_heard = home.state = home.down_said = None
            home.detail, home.since, home.observations = "", now, 0
            home.departed.clear()
            home.former_agent = None
            self.touched.add(home.node)

    # ── heard from replicas ──────────────────────────────────────────────────────────────────────────────────────────
    def joined(self, life: Life, node: NodeName, phase: str, now: float) -> None:
        """A Hello, first or repeated. It tells where the life really runs."""
        if (seen := self._sighting(life, node, now)) is None:
            return
        if seen.node != node and not seen.is_agent:
            seen.home.residents.pop(life, None)
            self.touched.add(seen.node)
            seen.home = self._node(node)
            seen.home.residents[life] = seen
        self._heard(seen, "hello", now)
        if seen.phase != phase:
            self._begin(seen, phase, now)

    def heard(self, life: Life, phase: str, done: int, waits_for: ReplicaId | None, now: float) -> None:
        """A beat. A phase that is news (its ``entered`` was lost) begins now."""
        if seen := self._known(life):
            self._heard(seen, "beat", now)
            seen.beats += 1
            if seen.waits_for is not None and waits_for is None:
                self._unblocked(seen, now)
            self._advance(seen, done, now)
            if seen.phase != phase:
                self._begin(seen, phase, now)
            elif seen.waits_for is None and waits_for is not None and seen.declared.waits_for is None:
                seen.whole = False  # what another replica takes of its time is not usual
            seen.waits_for = waits_for

    def entered(self, life: Life, phase: str, done: int, waits_for: ReplicaId | None, now: float) -> None:
        """A phase begins: a new pass, even of the phase that it was in."""
        if seen := self._known(life):
            self._heard(seen, "entered", now)
            self._advance(seen, done, now)
            self._begin(seen, phase, now)
            seen.waits_for = waits_for

    def step_ended(
        self, life: Life, code: int | None, signal: int | None, why: str, now: float, said: str = ""
    ) -> None:
        """Its exit record, told or read; the first one counts. ``unwanted: …`` is a step that was never admitted, maybe
        the second of its tag: it says nothing about the one that was, and if none was, none will join."""
        if (seen := self._known(life)) and seen.exit is None and not why.startswith("unwanted"):
            seen.exit = StepEnd(code, signal, why, now, said)

    def gone(self, life: Life, now: float) -> None:
        """The agent witnessed that its first process is no more, without an exit record."""
        if (seen := self._known(life)) and seen.gone_witnessed_at is None:
            seen.gone_witnessed_at = now

    def step_alive(self, life: Life, now: float) -> None:
        """The agent says that its first process lives. That is no Hello, but a slow start is not a lost one."""
        if seen := self._known(life):
            seen.alive_at = now

    # ── heard about nodes ────────────────────────────────────────────────────────────────────────────────────────────
    def agent_heard(self, node: NodeName, life: Life, now: float, boot: str = "") -> None:
        """A node's agent spoke: Hello (with its boot id) or beat."""
        if seen := self._sighting(life, node, now):
            self._heard(seen, "agent", now)
            seen.home.boot = boot or seen.home.boot

    def cluster_job(self, node: NodeName, suspended: bool, asked_at: float, now: float) -> None:
        """The cluster said whether the job that has this node is suspended; ``asked_at``: when it was asked. Deadlines
        of everything there rest meanwhile, and count anew from when it goes on."""
        home = self._node(node)
        home.looked_at = asked_at
        if not suspended:
            self._goes_on(home, now)
        elif home.suspended_at is None and (home.last_heard is None or home.last_heard < asked_at):
            home.suspended_at = asked_at
            self._hold_up(now)

    def unsure(self, limits: Limits, now: float) -> bool:
        """A node is silent, and the cluster was not asked since whether it is suspended: before it is condemned, it
        shall be."""
        return any(
            home.looked_at is not None and home.suspended_at is None and home.last_heard is not None
            and now - home.last_heard > limits.silence / 2 and not home.asked(limits)
            for home in self.nodes.values() if home.agent is not None
        )  # fmt: skip

    def cluster_node(self, node: NodeName, state: str, detail: str, now: float, alone: bool = True) -> None:
        """One reading of the cluster. ``unknown`` says neither healthy nor gone, but if it was called up before and not
        most others cease to be at once (``alone``), it counts as a flap, as ``down`` does."""
        home = self._node(node)
        if home.called_up and alone and state in ("down", "unknown"):
            home.flaps.append(now)
        home.called_up = state == "up" or (home.called_up and not alone)
        if state == "unknown":
            return
        if home.state != state:
            home.state, home.detail, home.since, home.observations = state, detail, now, 0
            if state == "down" and home.down_said is None:
                home.down_said = (now, detail)
        home.observations += 1
        if state != "down" and home.observations >= 2:  # docs/sources.md: two good readings to trust again
            home.down_said = None

    def workers(self) -> Iterator[ReplicaSighting]:
        """Every replica but the agents and the shadows, which nobody waits for."""
        return (seen for seen in self.replicas.values() if role_of(seen.life.replica) not in (AGENT, SHADOW))

    def on(self, node: NodeName) -> list[Life]:
        """Whoever was launched on this node or says that it is there, and is still believed; agents left out."""
        home = self.nodes.get(node)
        return [] if home is None else list(home.residents)

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def _node(self, node: NodeName) -> NodeSighting:
        self.touched.add(node)
        return self.nodes.setdefault(node, NodeSighting(node))

    def _known(self, life: Life) -> ReplicaSighting | None:
        seen = self.replicas.get(life.replica)
        if seen is None or seen.life != life:
            return None
        self.touched.add(seen.node)
        return seen

    def _sighting(self, life: Life, node: NodeName, now: float) -> ReplicaSighting | None:
        """The sighting of this life, made when it is newer than what is known; None when it is not believed."""
        old = self.replicas.get(life.replica)
        if old is not None and old.life == life:
            self.touched.add(old.node)
            return old
        if (old is not None and old.life > life) or life.incarnation <= self._forgotten.get(life.replica, -1):
            return None
        if old is not None:
            self._depart(old)
        home = self._node(node)
        seen = ReplicaSighting(life, home, launched_at=now, last_heard=now, done_changed_at=now)
        seen.held_up = gang_of(life.replica) in self._suspended
        self.replicas[life.replica] = seen
        if seen.is_agent:
            home.agent, home.former_agent = seen, None
        else:
            home.residents[life] = seen
        return seen

    def _goes_on(self, home: NodeSighting, now: float) -> None:
        """Nothing on it is suspended any more: everything there counts anew."""
        if home.suspended_at is None:
            return
        home.suspended_at, home.last_heard = None, None
        home.departed.clear()
        home.former_agent = None
        for seen in (*home.residents.values(), *([home.agent] if home.agent else [])):
            _rested(seen, now)
        self._hold_up(now)

    def _hold_up(self, now: float) -> None:
        """Who waits for a suspended member of its gang makes no progress, and cannot."""
        suspended = [home for home in self.nodes.values() if home.suspended_at is not None]
        self.touched.update(home.node for home in suspended)
        self._suspended = {gang_of(life.replica) for home in suspended for life in home.residents}
        for seen in self.replicas.values():
            held_up = gang_of(seen.life.replica) in self._suspended
            if seen.held_up and not held_up:
                seen.phase_since, seen.beats, seen.whole = now, 0, False
            if seen.held_up != held_up:
                seen.held_up = held_up
                self.touched.add(seen.node)

    def _depart(self, seen: ReplicaSighting) -> None:
        home = seen.home
        self.touched.add(home.node)
        if home.agent is seen:
            home.agent, home.former_agent = None, seen
        elif home.residents.pop(seen.life, None):
            home.departed[seen.life] = seen

    def _heard(self, seen: ReplicaSighting, source: str, now: float) -> None:
        self._goes_on(seen.home, now)  # who is suspended says nothing
        if seen.status == "launched":
            seen.status, seen.joined_at, seen.shadow = "joined", now, None
        seen.last_heard, seen.last_source = now, source
        home = seen.home
        home.last_heard, home.former_agent = now, None
        home.departed.clear()

    def _advance(self, seen: ReplicaSighting, done: int, now: float) -> None:
        """``done`` as told: a rise restarts the clock. What is told first after a silence is only where it stands."""
        before, seen.done = seen.done, done if seen.done is None else max(done, seen.done)
        if before is None or done <= before:
            return
        if seen.phase is not None and seen.declared.progresses:
            self._took(seen, now)
            seen.whole = True
            seen.passed.add(seen.phase)
            seen.usual = self._usual_of(seen)
        seen.done_changed_at = now
        seen.beats = 0

    def _begin(self, seen: ReplicaSighting, phase: str, now: float) -> None:
        if seen.phase is not None and not seen.declared.progresses:
            self._took(seen, now)
            seen.passed.add(seen.phase)
        seen.whole = seen.phase is not None  # of the first phase heard of, the beginning was not seen
        seen.phase, seen.phase_since, seen.beats = phase, now, 0
        seen.declared = self._limits.phase(phase)
        seen.usual = self._usual_of(seen)

    def _unblocked(self, seen: ReplicaSighting, now: float) -> None:
        """It goes on after another replica, mostly the store, kept it: that time was not its own. A phase that waits
        by itself goes on waiting: between two questions to the store nobody is asked for a moment."""
        if seen.declared.waits_for is None:
            seen.phase_since, seen.beats, seen.whole = now, 0, False

    def _took(self, seen: ReplicaSighting, now: float) -> None:
        """Remember how long this took: a pass of a phase, or where progress counts the gap between two rises."""
        assert seen.phase is not None
        if seen.phase == STARTING:
            return
        if seen.whole and not seen.first_pass:  # a first pass compiles and warms up: not usual
            since = seen.clock if seen.declared.progresses else seen.phase_since
            durations = self._usual.setdefault(_role_phase(seen), deque(maxlen=_WINDOW))
            durations.append(now - since)

    def _usual_of(self, seen: ReplicaSighting) -> float | None:
        """The median over all replicas of the role: a replacement inherits it, one outlier does not move it."""
        durations = self._usual.get(_role_phase(seen), ())
        return sorted(durations)[len(durations) // 2] if len(durations) >= _ENOUGH else None


def _anew(seen: ReplicaSighting, now: float) -> None:
    """As if launched now, for all that is known of it."""
    seen.status, seen.joined_at, seen.last_source = "launched", None, "restart"
    _rested(seen, now)


def _rested(seen: ReplicaSighting, now: float) -> None:
    """Its time begins now: silence and standing still from before are not judged; proof stays."""
    seen.launched_at = seen.last_heard = seen.phase_since = seen.done_changed_at = now
    seen.beats, seen.whole = 0, False
    if seen.goodbye_at is not None:
        seen.goodbye_at = now


def _role_phase(seen: ReplicaSighting) -> tuple[str, str]:
    return role_of(seen.life.replica), seen.phase or ""
