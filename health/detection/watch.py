"""The last thing seen of each replica and each node: what the detectors look at.

Volatile, and rebuilt by listening: silence is not in the journal; a new manager counts it anew. Plain values: health
knows neither messages nor the cluster seam. ``now`` is always the manager's clock (s) at receipt; other hosts' times
never get here. Lives that the manager did not launch or welcome are ignored, and so is an older life of any replica.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from ...core.launch import ExitReason
from ...core.run_spec import Limits
from ...core.types import AGENT, SHADOW, Life, NodeName, ProbeResult, ReplicaId, gang_of, role_of
from .baselines import Lesson, Paces, Usual
from .records import (  # fmt: skip
    BEATS_MISSED,
    FLAP_WINDOW,
    FLAPS,
    NodeSighting,
    ReplicaSighting,
    RoleSighting,
    StepEnd,
    loops,
)

__all__ = ["BEATS_MISSED", "FLAPS", "FLAP_WINDOW", "NodeSighting", "ReplicaSighting", "StepEnd", "Watch"]

STARTING = "starting"
"""what a worker says before its first phase; how long that took says nothing of the next start, on another node"""

_NOT_WANTED = frozenset({ExitReason.NOT_ADMITTED, ExitReason.FENCED})
"""ends of steps that were not, or are no longer, the one that counts"""


class Watch:
    """Everything seen, by replica and by node. Whoever hears something tells it here; detectors only read."""

    def __init__(self) -> None:
        self.replicas: dict[ReplicaId, ReplicaSighting] = {}
        self.nodes: dict[NodeName, NodeSighting] = {}
        self.touched: set[NodeName] = set()
        """nodes where anything was seen since the last ``detect``, which empties it"""
        self.asks: dict[NodeName, float] = {}
        """when somebody there is to be asked for work (``probing.to_probe``); kept by ``detect``"""
        self.memo: object = None
        """``detect`` remembers here what it concluded; nobody else reads it"""
        self._limits = Limits()
        self._usual = Usual()
        self._paces = Paces()
        self._roles: dict[str, RoleSighting] = {}
        self._forgotten: dict[ReplicaId, int] = {}
        self._gangs: set[ReplicaId] = set()
        """of more than one member"""
        self._suspended: set[ReplicaId] = set()
        """gangs of which a member is on a suspended node"""

    def heed(self, limits: Limits) -> None:
        """Judge phases as this job has them. ``detect`` calls it; what was heard before stays as it was kept."""
        self._limits = limits
        for seen in self.replicas.values():
            if seen.phase is not None:
                seen.declared = limits.phase(seen.phase)

    # ── for the next manager ─────────────────────────────────────────────────────────────────────────────────────────
    def lessons(self) -> dict[str, Lesson]:
        """What was learned of the roles, whoever of them lives."""
        took = self._usual.took()
        learned = {
            name: Lesson(took.get(name, {}), role.tensor_seen, role.answers, role.slowest_load)
            for name, role in self._roles.items()
        }
        return {name: lesson for name, lesson in learned.items() if lesson != Lesson()}

    def remember(self, lessons: Mapping[str, Lesson]) -> None:
        """What an earlier watch had learned; before anything is heard."""
        for name, lesson in lessons.items():
            role = self._roles.setdefault(name, RoleSighting())
            role.tensor_seen, role.answers, role.slowest_load = lesson.tensor_seen, lesson.answers, lesson.slowest_load
            for phase, took in lesson.phases.items():
                self._usual.remember(name, phase, took)

    # ── told by the manager ──────────────────────────────────────────────────────────────────────────────────────────
    def launched(self, life: Life, node: NodeName, now: float, shadow: Life | None = None, within: float = 0.0) -> None:
        """It was started, or is believed to run since before this manager. Its join deadline counts from here.

        ``shadow``: nothing was started: this one, which stood by on the node, was told to become the life, and is to be
        heard as that ``within`` so many s."""
        if shadow is not None:
            self.forget(shadow)
        if (seen := self._sighting(life, node, now)) is not None and shadow is not None:
            seen.shadow, seen.within = shadow, within

    def adopted(self, life: Life, passed: Collection[str]) -> None:
        """It was launched under an earlier manager, and has been through these phases: they are no first ones. One that
        progresses shows by its count whether it was."""
        if seen := self._known(life):
            seen.passed.update(name for name in passed if not self._limits.phase(name).progresses)
            if seen.role.tensor_seen and any(self._limits.phase(name).computes for name in seen.passed):
                seen.activity.tensor_seen = True

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
            self._paces.forget(seen.life, seen.life.gang)

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
        self._paces.restart()
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
            seen.probes.beats += 1
            if seen.waits_for is not None and waits_for is None:
                self._unblocked(seen, now)
            self._keep_pace(seen, done, now)
            self._advance(seen, done, now)
            if seen.phase != phase:
                self._begin(seen, phase, now)
            elif seen.waits_for is None and waits_for is not None and seen.declared.waits_for is None:
                seen.whole = False  # what another replica takes of its time is not usual
            _blocked(seen, waits_for, now)

    def entered(self, life: Life, phase: str, done: int, waits_for: ReplicaId | None, now: float) -> None:
        """A phase begins: a new pass, even of the phase that it was in."""
        if seen := self._known(life):
            self._heard(seen, "entered", now)
            self._advance(seen, done, now)
            self._begin(seen, phase, now)
            _blocked(seen, waits_for, now)

    # ── heard of replicas ────────────────────────────────────────────────────────────────────────────────────────────
    def load(self, life: Life, cpu: float, gpu: float | None, now: float, tensor: float | None = None) -> None:
        """What its node's agent saw it take: cores, and the shares of the time in which a kernel ran and in which
        tensor cores worked (None: nobody can say)."""
        if seen := self._known(life):
            # beyond a first pass its own tensor cores must have been seen: some nodes' say nothing, and read 0
            seen.activity.add(cpu, gpu, now, tensor, must_show=seen.role.tensor_seen and seen.first_pass)
            seen.role.tensor_seen = seen.role.tensor_seen or seen.activity.tensor_seen
            if seen.activity.dark_since is None and seen.probes.last_asked < seen.clock:
                seen.probes.rest()  # it moved since it was asked, and works

    def asked(self, life: Life, now: float) -> None:
        """A probe was sent to it (``probing.to_probe``)."""
        if seen := self._known(life):
            seen.probes.ask(now)
            seen.role.tries += not seen.role.answers and loops(seen)

    def answered(self, life: Life, result: ProbeResult, detail: str, now: float) -> None:
        """Take the answer to a probe; ``detail`` is for people."""
        if seen := self._known(life):
            if result is ProbeResult.WORKS and seen.probes.asked_at is not None and loops(seen):
                self._vouch(seen)
            seen.probes.answer(result, detail, now)

    def step_ended(
        self, life: Life, code: int | None, signal: int | None, reason: ExitReason, now: float, said: str = "",
        detail: str = "",
    ) -> None:  # fmt: skip
        """Take the exit record of a step; the first one counts. The record of a step that was not admitted, or was
        fenced, is ignored: it may be the second step of its tag, and says nothing about the first."""
        if (seen := self._known(life)) and seen.exit is None and reason not in _NOT_WANTED:
            seen.exit = StepEnd(code, signal, reason, now, said, detail)

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
            self._paces.forget(old.life, old.life.gang)
        home = self._node(node)
        seen = ReplicaSighting(life, home, launched_at=now, last_heard=now, done_changed_at=now)
        seen.held_up = gang_of(life.replica) in self._suspended
        seen.role = self._roles.setdefault(role_of(life.replica), seen.role)
        self.replicas[life.replica] = seen
        self._gang_up(seen)
        if seen.is_agent:
            home.agent, home.former_agent = seen, None
        else:
            home.residents[life] = seen
        return seen

    def _vouch(self, seen: ReplicaSighting) -> None:
        """Its role answers while it waits."""
        if not seen.role.answers:
            seen.role.answers = True
            self.touched.update(one.node for one in self.replicas.values() if one.role is seen.role)

    def _loaded(self, role: RoleSighting, longest: float) -> None:
        if role.slowest_load != longest:
            role.slowest_load = longest
            self.touched.update(one.node for one in self.replicas.values() if one.role is role)

    def _gang_up(self, seen: ReplicaSighting) -> None:
        gang = gang_of(seen.life.replica)
        if gang != seen.life.replica:
            self._gangs.add(gang)
            if (first := self.replicas.get(gang)) is not None and not first.ganged:
                first.ganged = True
                self.touched.add(first.node)
        seen.ganged = gang in self._gangs

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
                seen.activity.rest()
                seen.probes.rest()
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

    def _keep_pace(self, seen: ReplicaSighting, done: int, now: float) -> None:
        """Of who makes tokens. An idle one waits for something, a tool perhaps: that time is not its own."""
        if not (seen.declared.progresses and seen.declared.computes):
            return
        rise = 0 if seen.done is None else max(0, done - seen.done)
        working = seen.waits_for is None and seen.activity.idle_since is None and not seen.first_pass
        role = role_of(seen.life.replica)
        self._touch(self._paces.add(role, seen.life, seen.pace, rise, working, now))

    def _touch(self, lives: list[Life]) -> None:
        self.touched.update(self.replicas[life.replica].node for life in lives if life.replica in self.replicas)

    def _advance(self, seen: ReplicaSighting, done: int, now: float) -> None:
        """``done`` as told: a rise restarts the clock. What is told first after a silence is only where it stands."""
        before, seen.done = seen.done, done if seen.done is None else max(done, seen.done)
        if before is None:
            seen.worked_before = done > 0
        if before is None or done <= before:
            return
        if seen.phase is not None and seen.declared.progresses:
            self._took(seen, now)
            seen.whole = True
            seen.passed.add(seen.phase)
            self._measure(seen)
        seen.done_changed_at = now
        seen.beats = 0
        if seen.activity.dark_since is None:  # else: how can it?
            seen.probes.rest()

    def _begin(self, seen: ReplicaSighting, phase: str, now: float) -> None:
        if seen.phase is not None and not seen.declared.progresses:
            self._took(seen, now)
            seen.passed.add(seen.phase)
            if seen.declared.own_work:
                seen.role.loaded_since = max(seen.role.loaded_since, seen.phase_since)
        seen.whole = seen.phase is not None  # of the first phase heard of, the beginning was not seen
        seen.phase, seen.phase_since, seen.beats = phase, now, 0
        seen.declared = self._limits.phase(phase)
        seen.probes.rest()
        seen.probes.mute = False  # a role may get its handler later than its first question
        seen.pace.at = None
        self._measure(seen)

    def _measure(self, seen: ReplicaSighting) -> None:
        measure = self._usual.of(role_of(seen.life.replica), seen.phase or "")
        seen.usual, seen.slowest = measure.median, measure.longest

    def _unblocked(self, seen: ReplicaSighting, now: float) -> None:
        """It goes on after another replica, mostly the store, kept it: that time was not its own. A phase that waits
        by itself goes on waiting: between two questions to the store nobody is asked for a moment."""
        if seen.declared.waits_for is None:
            seen.phase_since, seen.beats, seen.whole = now, 0, False
            seen.probes.rest()

    def _took(self, seen: ReplicaSighting, now: float) -> None:
        """Remember how long this took: a pass of a phase, or where progress counts the gap between two rises."""
        assert seen.phase is not None
        if seen.phase == STARTING or not seen.whole or seen.first_pass:  # a first pass compiles and warms up: not usual
            return
        since = seen.clock if seen.declared.progresses else seen.phase_since
        self._usual.add(role_of(seen.life.replica), seen.phase, now - since)
        if seen.declared.own_work:
            self._loaded(seen.role, self._usual.of(role_of(seen.life.replica), seen.phase).longest)
        if seen.declared.computes and not seen.declared.progresses:
            rose = seen.done_changed_at > seen.phase_since
            worked = (seen.done_changed_at if rose else now) - seen.phase_since
            self._touch(self._paces.passed(seen.life.gang, seen.life, seen.pace, worked, now))


def _anew(seen: ReplicaSighting, now: float) -> None:
    """As if launched now, for all that is known of it."""
    seen.status, seen.joined_at, seen.last_source = "launched", None, "restart"
    _rested(seen, now)


def _rested(seen: ReplicaSighting, now: float) -> None:
    """Its time begins now: silence and standing still from before are not judged; proof stays."""
    seen.launched_at = seen.last_heard = seen.phase_since = seen.done_changed_at = now
    seen.beats, seen.whole = 0, False
    seen.blocked_since = None if seen.waits_for is None else now
    seen.activity.rest()
    seen.probes.rest()
    seen.pace.work, seen.pace.seconds, seen.pace.at, seen.pace.slow = 0, 0.0, None, 0
    if seen.goodbye_at is not None:
        seen.goodbye_at = now


def _blocked(seen: ReplicaSighting, by: ReplicaId | None, now: float) -> None:
    if by is None:
        seen.blocked_since = None
    elif seen.waits_for is None or seen.blocked_since is None:
        seen.blocked_since = now
    seen.waits_for = by
