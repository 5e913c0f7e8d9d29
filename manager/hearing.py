"""From messages to events: who says what is checked against who is believed, and only what changed becomes an event.

Nothing here decides. A beat only refreshes a sighting: no event, no disk.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from rrl.health.sightings import Watch
from rrl.manager import events as ev
from rrl.manager.state import State, Status
from rrl.spec.launch import ExitRecord, read_exit, tag_of
from rrl.spec.rundir import RunDir
from rrl.spec.words import Life, ReplicaId
from rrl.transport import messages as msg
from rrl.transport.control import Incoming

Send = Callable[[bytes, Any, int | None], Awaitable[None]]


class Ear:
    """Hears for one manager. ``state`` gives the newest state, ``record`` takes events, ``send`` answers."""

    def __init__(
        self,
        run: RunDir,
        watch: Watch,
        state: Callable[[], State],
        record: Callable[[ev.Event], None],
        send: Send,
        now: Callable[[], float],
        welcome: Callable[[Life], msg.Welcome],
        on_wanted: Callable[[str], None],
        steps: dict[str, bytes],
    ) -> None:
        self._run, self._watch, self._state, self._record, self._send = run, watch, state, record, send
        self._now, self._welcome, self._on_wanted = now, welcome, on_wanted
        self.steps = steps
        """tag of a step → where its first process (or agent) can be told something"""
        self.workers: dict[Life, bytes] = {}
        """life → where its worker can be told something"""

    async def hear(self, incoming: Incoming) -> None:
        message = incoming.message
        if isinstance(message, msg.Wanted):
            await self._wanted(incoming, message)
        elif isinstance(message, msg.StepExit):
            self._step_exit(message)
        elif isinstance(message, msg.Injected):
            target = self._state().replica(ReplicaId(message.fault.target)).life
            self._record(ev.FaultInjected(message.fault.id, target, message.ok, message.detail))
        elif isinstance(message, msg.Found):
            self._record(ev.FindingChanged(message.finding))
        elif isinstance(message, msg.Gone):
            self._gone(message)
        elif not self._state().believed(message.life):
            if self._state().verdict is not None:
                return  # the run is ending: its step was asked to stop, and lets it finish what is in hand
            self.workers.pop(message.life, None)
            why = f"{message.life} is no longer believed"
            await self._send(incoming.peer, msg.Fenced(message.life, why), None)
        elif isinstance(message, msg.Hello):
            await self._hello(incoming, message)
        else:
            self._about_living(message)

    # ── steps ──────────────────────────────────────────────────────────────────────────────────────────────────────
    async def _wanted(self, incoming: Incoming, message: msg.Wanted) -> None:
        """Admission: launched processes ask whether they are wanted; that makes a launch exactly once.

        Who was admitted before and asks again (of a new manager) is told to leave in order when the run is ending."""
        state = self._state()
        replica = state.replica(message.life.replica)
        held = state.lingering.get(message.tag)
        if state.verdict is not None and (held is not None or (replica.step == message.tag and replica.pid)):
            self.steps[message.tag] = incoming.peer
            await self._send(incoming.peer, msg.Admitted(message.tag, True), incoming.ask)
            grace = state.job.limits.step_grace
            await self._send(incoming.peer, msg.Stop(message.life, grace, "the run is ending"), None)
            return
        ok = state.believed(message.life) and replica.step == message.tag and state.verdict is None
        why = "" if ok else f"{message.life} is not wanted (newest is {replica.life}, {replica.status})"
        if ok:
            self.steps[message.tag] = incoming.peer
            self._on_wanted(message.tag)
            if replica.status is Status.LAUNCHING:
                self._record(ev.Admitted(message.life, message.tag, message.node, message.pid))
        await self._send(incoming.peer, msg.Admitted(message.tag, ok, why), incoming.ask)

    def _step_exit(self, message: msg.StepExit) -> None:
        self.steps.pop(message.tag, None)
        self._ended(ev.StepEnded(message.life, message.tag, message.code, message.signal, message.why))

    def _gone(self, message: msg.Gone) -> None:
        record = read_exit(self._run.exit_file(message.tag))
        if record is None:
            self._watch.gone(message.life, self._now())
            self._ended(ev.StepEnded(message.life, message.tag, None, None, f"vanished (agent of {message.node})"))
        else:
            self._recorded(record)

    def _recorded(self, record: ExitRecord) -> None:
        self._ended(ev.StepEnded(record.life, record.tag, record.code, record.signal, record.why))

    def _ended(self, event: ev.StepEnded) -> None:
        """An end counts once, and only of the step that the life is known by."""
        state = self._state()
        current = state.believed(event.life) and state.replica(event.life.replica).step == event.step
        if current or event.step in state.lingering:
            self._watch.step_ended(event.life, event.code, event.signal, event.why, self._now())
            self._record(event)

    def ended_before(self, life: Life) -> None:
        """Its end was recorded under an earlier manager: the detectors must see it again."""
        record = read_exit(self._run.exit_file(tag_of(self._run.id, life)))
        code, signal, why = (record.code, record.signal, record.why) if record else (None, None, "vanished")
        self._watch.step_ended(life, code, signal, why, self._now())

    def exit_records(self) -> None:
        """Ends that nobody told us of: read from the run directory (after a manager's start, and at slow intervals)."""
        state = self._state()
        living = [replica.step for replica in state.replicas.values() if replica.believed and replica.step]
        for tag in (*living, *state.lingering):
            if (record := read_exit(self._run.exit_file(tag))) is not None:
                self._recorded(record)

    # ── workers and agents ─────────────────────────────────────────────────────────────────────────────────────────
    async def _hello(self, incoming: Incoming, message: msg.Hello) -> None:
        life, state, now = message.life, self._state(), self._now()
        replica = state.replica(life.replica)
        self.workers[life] = incoming.peer
        self._watch.joined(life, message.node, message.phase, now)
        told = (message.listens, message.serves, message.pid, message.node)
        if replica.status is not Status.JOINED or told != (
            replica.listens, replica.serves, replica.pid, replica.node
        ):  # fmt: skip
            self._record(
                ev.Joined(life, message.node, message.host, message.pid, message.listens, message.serves)
            )
        if message.phase != replica.phase:
            self._record(ev.PhaseEntered(life, message.phase))
        if message.holds is not None and message.holds != replica.holds:
            self._record(ev.VersionHeld(life, message.holds))
        if message.committed is not None and message.committed > state.step:
            self._record(ev.StepCommitted(life, message.committed))
        await self._send(incoming.peer, self._welcome(life), None)

    def _about_living(self, message: Any) -> None:
        life, now, watch = message.life, self._now(), self._watch
        if isinstance(message, msg.Beat):
            watch.heard(life, message.phase, message.done, message.waits_for, now)
            self._phase(message)
        elif isinstance(message, msg.Entered):
            watch.entered(life, message.phase, message.done, message.waits_for, now)
            self._phase(message)
        elif isinstance(message, msg.FirstWork):
            self._record(ev.FirstWorkDone(life))
        elif isinstance(message, msg.Holds):
            self._record(ev.VersionHeld(life, message.version))
        elif isinstance(message, msg.Committed):
            self._record(ev.StepCommitted(life, message.step, message.metrics))
        elif isinstance(message, msg.Goodbye):
            watch.goodbye(life, now)
        elif isinstance(message, msg.AgentHello):
            watch.agent_heard(message.node, life, now, message.boot)
            self._record(ev.AgentJoined(life, message.node, message.host, message.pid))
        elif isinstance(message, msg.AgentBeat):
            watch.agent_heard(message.node, life, now)
            for replica in self._state().replicas.values():
                if replica.status is Status.STARTING and replica.step in message.alive:
                    watch.step_alive(replica.life, now)

    def _phase(self, message: msg.Beat | msg.Entered) -> None:
        if self._state().replica(message.life.replica).phase != message.phase:
            self._record(ev.PhaseEntered(message.life, message.phase, message.waits_for))
