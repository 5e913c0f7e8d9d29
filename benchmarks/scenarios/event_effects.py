"""Applies the events of a scenario to the actors, and records which replicas or nodes each event affected."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from math import inf

from rrl.benchmarks.scenarios import repairs
from rrl.benchmarks.scenarios.actors import Member, Node
from rrl.benchmarks.scenarios.event_kinds import HARDWARE, PROCESS_STATES, target_of
from rrl.benchmarks.scenarios.format import Event
from rrl.benchmarks.scenarios.hardware import Machines
from rrl.benchmarks.scenarios.rhythms import IDLE, Loads, loads_of
from rrl.benchmarks.scenarios.values import fixed
from rrl.benchmarks.scenarios.world import World
from rrl.core.types import NodeName


def shifted(at: float, shift: float) -> float:
    """Return the time shifted by the run's jitter; a time of 0 is not shifted."""
    return at + shift if at > 0 else 0.0


_NO_INCARNATION = -1


class ScenarioEvent:
    """One event of a scenario in one run."""

    def __init__(self, event: Event, index: int, shift: float, world: World, machines: Machines) -> None:
        self.event, self._world, self._machines = event, world, machines
        named = any(truth.of == (event.name or event.do) for truth in world.scenario.truth)
        sole = len(world.scenario.event) == 1 and any(truth.at is None for truth in world.scenario.truth)
        self._awaited = event.phase is not None or named or sole
        """Whether the event is an independent failure or pause. Otherwise it is a consequence of another failure, and
        its effect ends with the incarnation that it affects."""
        self.name = event.name or event.do
        random = world.chance(f"event {index}")
        at = event.at.draw(random)
        self._wait = at if event.after else inf
        """Seconds between this event and the event that it follows; inf if it follows none."""
        self.due = inf if event.after else shifted(at, shift)
        self._draw: Callable[[], float] = lambda: event.lasts.draw(random) if event.lasts is not None else inf
        self._random = random
        self.struck_at: float | None = None
        self.incarnations: dict[str, int] = {}
        """Number of each affected replica's incarnation when the event first took effect; 0 for nodes."""
        self.places: dict[str, str] = {}
        """Node of each affected replica when the event first took effect."""
        self._struck: set[str] = set()
        self._meant: dict[str, int] = {}
        """The incarnation of each replica that the event may affect. It is the incarnation that existed when the event
        was due. If the replica was being replaced at that time, it is the next incarnation for an independent event
        (``_awaited``), and none for another event."""

    def follows(self, other: ScenarioEvent) -> None:
        """Set the due time if this event follows ``other`` (key ``after``)."""
        if self.event.after == other.name and self.due == inf and other.struck_at is not None:
            self.due = other.struck_at + self._wait

    @property
    def never_struck(self) -> bool:
        """Return whether the event had no effect, although no repair had replaced its target."""
        return self.struck_at is None and not self._struck

    @property
    def done(self) -> bool:
        if target_of(self.event.do) != "process":
            return self.struck_at is not None
        return all(str(one.incarnation.replica) in self._struck for one in self._world.members(self.event.who))

    def strike_due(self) -> None:
        """Apply the event to each target that is due and was not affected yet."""
        world, event = self._world, self.event
        if world.now < self.due or self.done:
            return
        if target_of(event.do) == "manager":
            self._manager()
        elif event.do in HARDWARE:
            for node in world.nodes_of(event.who):
                self._machines.happen(event, node.name, world.now, self._draw(), self._times())
                self._strikes(node.name, 0)
        elif target_of(event.do) == "node":
            struck = [node for node in world.nodes_of(event.who) if self._in_phase(node)]
            for node in struck:
                self._to_node(node)
                self._strikes(node.name, 0)
        else:
            for member in world.members(event.who):
                self._to_member(member)

    def _times(self) -> list[float]:
        """Draw the time (s after the event's beginning) of each occurrence; the key ``times`` has their number."""
        gaps = (self.event.every.draw(self._random) for _ in range(self.event.times - 1))
        return list(accumulate(gaps, initial=0.0))

    def _in_phase(self, node: Node) -> bool:
        """Return whether a process on the node is in the phase that the event waits for."""
        wanted = self.event.phase
        return wanted is None or any(
            member.node is node and gang.joined and gang.rhythm_phase.phase == wanted
            for gang in self._world.gangs.values()
            for member in gang.members
        )

    def concerns(self, node: NodeName) -> bool:
        """Return whether the event changes the values that readers read on this node."""
        return self.event.do in HARDWARE and any(one.name == node for one in self._world.nodes_of(self.event.who))

    def _strikes(self, whom: str, incarnation: int) -> None:
        self._struck.add(whom)
        self.incarnations[whom] = incarnation
        self._begins()

    def _begins(self) -> None:
        if self.struck_at is not None:
            return
        self.struck_at = self._world.now
        for gang in self._world.gangs.values():
            for member in gang.members:
                self.incarnations.setdefault(str(member.incarnation.replica), member.incarnation.number)
                self.places[str(member.incarnation.replica)] = str(member.node.name)

    # ── manager and cluster ──────────────────────────────────────────────────────────────────────────────────────────
    def _manager(self) -> None:
        world, lasts = self._world, self._draw()
        self._begins()
        if self.event.do == "cluster_away":
            world.cluster_away = world.now + lasts
        elif self.event.do == "clock_jumps":
            forward, back = self.event.forward or fixed(0.0), self.event.back or fixed(0.0)
            world.wall_ahead += forward.draw(self._random) - back.draw(self._random)
        else:
            world.goes_deaf("restarted" if self.event.do == "manager_restart" else "paused", min(lasts, 3600.0))

    # ── nodes ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def _to_node(self, node: Node) -> None:
        world, event = self._world, self.event
        now, lasts = world.now, self._draw()
        if event.do == "node_dies":
            node.dead_at = now
            world.later(now + event.down_after, lambda: _mark_down(node, "Not responding"))
        elif event.do == "node_down":
            node.dead_at = now
            _mark_down(node, event.text or "Not responding")
        elif event.do == "agent_dies":
            node.agent_until = now
            repairs.agent_ends(world, node, event.back_after)
        elif event.do == "agent_freezes":
            node.agent_frozen = now + lasts
        elif event.do == "cut":
            node.cut = now + lasts
        elif event.do == "suspend":
            node.suspended = now + lasts
        elif event.do in ("drain", "unknown"):
            node.state = "draining" if event.do == "drain" else "unknown"
            node.state_until = now + lasts
        elif event.do == "flap":
            for each in self._times():
                at = now + each
                world.later(at, lambda: _set_state(node, "unknown"))
                world.later(at + world.scenario.limits.poll + 5.0, lambda: _set_state(node, "up"))

    # ── processes ────────────────────────────────────────────────────────────────────────────────────────────────────
    def _to_member(self, member: Member) -> None:
        world, event = self._world, self.event
        gang, now = world.gang(member.incarnation), world.now
        name = str(member.incarnation.replica)
        if name in self._struck:
            return
        starts = member.ended or (not gang.joined and gang.incarnation > 1)
        if starts and event.do != "start_takes" and name not in self._meant:
            if self._awaited and member.ended:
                return  # the event waits for the next incarnation
            self._meant[name] = gang.incarnation if self._awaited else _NO_INCARNATION
        if self._meant.setdefault(name, gang.incarnation) != gang.incarnation:
            self._struck.add(name)
            return
        if event.do == "start_takes":
            if gang.launch_at == inf and not gang.joined:  # it is starting
                gang.joins_at = max(now, gang.launched_at + self._draw())
                self._strikes(name, gang.incarnation)
            else:
                gang.start_takes.append((self._draw(), lambda incarnation: self._strikes(name, incarnation)))
                self._struck.add(name)
            return
        if event.do == "stretch":
            phase = event.phase or gang.rhythm_phase.phase
            loads = self._loads(loads_of(next((b for b in gang.table.rhythm if b.phase == phase), gang.rhythm_phase)))
            gang.stretch(phase, self._draw(), loads)
            self._strikes(name, gang.incarnation)
            return
        if not gang.joined or member.ended or (event.phase is not None and gang.rhythm_phase.phase != event.phase):
            return
        self._strikes(name, gang.incarnation)
        lasts = self._draw()
        if event.do in ("crash", "exit", "vanish"):
            code, signal = (event.code, None) if event.do == "exit" else (None, event.signal)
            world.ends(member, code, signal, event.last_line, vanishes=event.do == "vanish")
        elif event.do == "goodbye":
            world.send_goodbye(member)
        elif event.do == "restart":
            repairs.restart(world, gang)
        elif event.do in ("hang", "wedge", "freeze", "quiet"):
            member.stuck, member.stuck_how, member.answer = now + lasts, event.do, event.answer
            member.loads = self._loads(IDLE)._replace(state=event.process_state or PROCESS_STATES.get(event.do, "S")[0])
            if event.answers_after is not None:
                after = event.answers_after
                member.answers_after, member.answers_until = lambda: after.draw(self._random), now + lasts
        elif event.do == "false_progress":
            member.false_progress_until, member.loads = now + lasts, self._loads(IDLE)
        elif event.do == "waits_outside":
            world.waits_outside_until = now + lasts
        elif event.do == "slow":
            member.slow, member.slow_until = event.factor, now + lasts
        elif event.do == "disconnect":
            member.muted_until = now + lasts
        elif event.do == "late_heartbeats" and event.by is not None:
            by = event.by
            member.late_by, member.late_until = lambda: by.draw(self._random), now + lasts
        elif event.do == "busy" and event.answers_after is not None:
            after = event.answers_after
            member.answers_after, member.answers_until = lambda: after.draw(self._random), now + lasts

    def _loads(self, defaults: Loads) -> Loads:
        return defaults.with_given(self.event.cpu, self.event.gpu_use, self.event.tensor)


def _mark_down(node: Node, detail: str) -> None:
    node.state, node.detail = "down", detail


def _set_state(node: Node, state: str) -> None:
    if node.dead_at is None:
        node.state = state
