"""Turn messages into events: the sender is checked against the current incarnations, and only changes are recorded.

Nothing is decided here. A heartbeat only refreshes what the watch knows of its sender: no event, no write. For a step
that left no exit record, the output of its launcher and of its first process is attached to the event.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from ...core.launch import ExitReason, ExitRecord, read_exit, tag_of
from ...core.run_dir import RunDir
from ...core.text import absent, escaped, last_lines_of
from ...core.types import AGENT, SHADOW, Life, ReplicaId, replica_id, role_of, stands_for
from ...health.detection.watch import Watch
from ...transport import messages as msg
from ...transport.control.endpoints import Incoming, Send
from ..cluster.base import NotStarted, RejectReason
from ..model import events as ev
from ..model.events import Done, Event
from ..model.queries import became, named_by, whose
from ..model.state import NEVER_APPEARED, State, Status
from .admission import GpusTaken, memory_locks
from .finding_gate import Findings, is_agent_of
from .standby_promotion import Adoptions

_log = logging.getLogger("rrl.manager")


def words_of(run: RunDir, tag: str) -> str:
    """The last lines of the step's own output, which is its first process's and slurmstepd's (that it ran out of
    memory, that an interpreter is not there); else of its srun. Empty if nothing was said."""
    log = run.log_file(f"{tag}.step")
    said = (last_lines_of(log.with_name(f"{log.name}{ending}")) for ending in (".0", "", ".srun"))
    return next(filter(None, said), "")


def explained(run: RunDir, event: Event) -> Event:
    """A step that never appeared, with the reason if there is one on disk."""
    if not isinstance(event, Done) or event.ok or event.reason is not RejectReason.NEVER_APPEARED:
        return event
    words = words_of(run, event.tag)
    if not words:
        return event
    if absent(words):
        return Done(event.tag, False, str(NotStarted(words)), event.unheard, RejectReason.NOT_STARTED)
    return replace(event, detail=f"{NEVER_APPEARED}: {words}")


MAX_NOTE = 300
"""characters of a replica's note that are kept: two lines of a wide terminal"""
READ_BY = 1.0
"""s that the next message waits for the run directory; shared storage answers within some 10 ms, or hangs"""


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
        self.findings = Findings(state, record, now)
        self.answered: Callable[[msg.Probed | msg.Stacks], None] = lambda answer: None
        """takes what suspects and their agents answer"""
        self._gpus = GpusTaken()
        self.adoptions = Adoptions(run, state, send, self._gpus)
        self._voices: dict[Life, tuple[bytes, ...]] = {}
        """life → the connections that its process greeted on: the newest, and the one before, of which something may
        still be on its way"""
        self._left: set[Life] = set()
        """lives whose process said Goodbye: its command may go on with another one"""
        self._looking: set[asyncio.Task[None]] = set()
        """for what the gone left"""

    async def hear(self, incoming: Incoming) -> None:
        message = incoming.message
        if isinstance(message, msg.Wanted):
            await self._wanted(incoming, message)
        elif isinstance(message, msg.StepExit):
            self._step_exit(message)
        elif isinstance(message, msg.Injected):
            self._injected(message)
        elif isinstance(message, msg.Gone):
            await self._gone(message)
        elif not self._state().believed(message.life):
            await self._unbelieved(incoming, message)
        elif isinstance(message, msg.AgentHello | msg.AgentBeat) and not is_agent_of(message.life, message.node):
            _log.warning("ignored a message from %s: it is not the agent of %s", message.life, message.node)
        elif isinstance(message, msg.Hello | msg.AgentHello):
            await self._greeting(incoming, message)
        elif incoming.peer in self._voices.get(message.life, ()):
            self._about_living(message)
            if isinstance(message, msg.Goodbye) and self._may_go(message.life):
                grace = self._state().job.limits.step_grace
                await self._send(incoming.peer, msg.Stop(message.life, grace, "its work is done"), None)
        elif isinstance(message, msg.Found):
            _log.warning("ignored a finding from %s: no Hello came on its connection", message.life)

    async def _unbelieved(self, incoming: Incoming, message: Any) -> None:
        if self._state().verdict is not None:
            newest = self._state().replica(message.life.replica).life == message.life
            if newest and isinstance(message, msg.Committed):  # a resumed run goes on from there
                self._committed(message)
            return  # the run is ending: its step was asked to stop, and lets it finish what is in hand
        if became(self._state(), message.life) is not None:
            if isinstance(message, msg.Hello):  # it has not heard what it is
                self.adoptions.heard(incoming.peer, message)
                await self.adoptions.tell(message.life)
            return
        self.workers.pop(message.life, None)
        self._voices.pop(message.life, None)
        why = f"{message.life} is no longer believed"
        await self._send(incoming.peer, msg.Fenced(message.life, why), None)

    async def fence(self, life: Life, why: str) -> None:
        """Have a life that is no longer believed end at once: its worker, and in case that one hangs its first process;
        if that one is not heard either, its node's agent. A command that does not use the worker API gets its grace."""
        self.adoptions.forget(named_by(self._state(), life))
        worker = self.workers.pop(life, None)
        if worker is not None:
            await self._send(worker, msg.Fenced(life, why), None)
        state = self._state()
        held = state.replica(life.replica)
        if held.life != life or held.step is None or not speaks_for_itself(state, life):
            return
        agent = state.replica(replica_id(AGENT, held.node or "")).step or ""
        if (peer := self.steps.get(held.step) or self.steps.get(agent)) is not None:
            await self._send(peer, msg.Fenced(life, why, held.step), None)

    # ── steps ──────────────────────────────────────────────────────────────────────────────────────────────────────
    async def _wanted(self, incoming: Incoming, message: msg.Wanted) -> None:
        """Admission: launched processes ask whether they are wanted; that makes a launch exactly once.

        Who was admitted before and asks again (of a new manager) is told to leave in order when the run is ending."""
        state = self._state()
        life = whose(state, message.life, message.tag)
        replica = state.replica(life.replica)
        held = state.lingering.get(message.tag)
        first = replica.first if replica.step == message.tag else None
        if first is not None and (first.node, first.pid) != (message.node, message.pid):
            why = f"{message.tag} is process {first.pid} on {first.node}, not {message.pid} on {message.node}"
            _log.warning("%s: the second process is not admitted", why)
            await self._send(incoming.peer, msg.Admitted(message.tag, False, why, another=True), incoming.ask)
            return
        if state.verdict is not None and (held is not None or (replica.step == message.tag and replica.pid)):
            self.steps[message.tag] = incoming.peer
            await self._send(incoming.peer, msg.Admitted(message.tag, True), incoming.ask)
            grace = state.job.limits.step_grace
            await self._send(incoming.peer, msg.Stop(life, grace, "the run is ending", message.tag), None)
            return
        ok = state.believed(life) and replica.step == message.tag and state.verdict is None
        why = "" if ok else f"{life} is not wanted (newest is {replica.life}, {replica.status})"
        if ok and first is None and message.node != replica.node:  # room there is taken by others, or not ours
            ok, why = False, f"{message.tag} runs on {message.node}, and was launched on {replica.node}"
            _log.warning("%s: the process is not admitted", why)
            self._record(ev.Done(message.tag, False, why, reason=RejectReason.REFUSED))
        if ok:
            self.steps[message.tag] = incoming.peer
            self._on_wanted(message.tag)
            if first is None:
                self._record(ev.Admitted(life, message.tag, message.node, message.pid))
        await self._send(incoming.peer, msg.Admitted(message.tag, ok, why), incoming.ask)

    def _injected(self, message: msg.Injected) -> None:
        fault = message.fault
        if fault.id not in self._state().faults:
            return  # nobody was told to
        life = message.life or self._state().replica(ReplicaId(fault.target)).life
        life = next((one.life for one in self._state().replicas.values() if one.shadow == life), life)
        self._record(ev.FaultInjected(
            fault.id, life, message.ok, message.detail, fault.kind, fault.target, message.node, message.ended
        ))  # fmt: skip

    def _step_exit(self, message: msg.StepExit) -> None:
        self.steps.pop(message.tag, None)
        life = whose(self._state(), message.life, message.tag)
        self._ended(ev.StepEnded(
            life, message.tag, message.code, message.signal, message.reason, message.said, message.detail
        ))  # fmt: skip

    async def _gone(self, message: msg.Gone) -> None:
        """Where the run directory hangs nobody waits for it: what is found there in the end counts then."""
        looking = asyncio.create_task(self._look_for(message))
        self._looking.add(looking)
        looking.add_done_callback(self._looking.discard)
        if (await asyncio.wait((looking,), timeout=READ_BY))[0]:
            looking.result()

    async def _look_for(self, message: msg.Gone) -> None:
        record = await asyncio.to_thread(read_exit, self._run.exit_file(message.tag))
        if record is None:
            words = await asyncio.to_thread(words_of, self._run, message.tag)
            life = whose(self._state(), message.life, message.tag)
            self._watch.gone(life, self._now())
            detail = f"reported by the agent of {message.node}{': ' if words else ''}{words}"
            self._ended(ev.StepEnded(life, message.tag, None, None, ExitReason.LOST, detail=detail))
        else:
            self._recorded(record)

    def _recorded(self, record: ExitRecord) -> None:
        life = whose(self._state(), record.life, record.tag)
        self._ended(ev.StepEnded(
            life, record.tag, record.code, record.signal, record.reason, record.said, record.detail
        ))  # fmt: skip

    def _ended(self, event: ev.StepEnded) -> None:
        """An end counts once, and only of the step that the life is known by."""
        state = self._state()
        current = state.believed(event.life) and state.replica(event.life.replica).step == event.step
        if current or event.step in state.lingering:
            self._watch.step_ended(
                event.life, event.code, event.signal, event.reason, self._now(), event.said, event.detail
            )
            self._record(event)
            if self._state().replica(event.life.replica).status is Status.COMPLETED:
                self._watch.forget(event.life)  # it has done its work: nobody is to wonder why it ended

    def ended_before(self, life: Life) -> None:
        """Its end was recorded under an earlier manager: the detectors must see it again."""
        record = read_exit(self._run.exit_file(tag_of(self._run.id, named_by(self._state(), life))))
        if record is None:
            self._watch.step_ended(life, None, None, ExitReason.LOST, self._now())
        else:
            self._watch.step_ended(
                life, record.code, record.signal, record.reason, self._now(), record.said, record.detail
            )

    async def exit_records(self) -> None:
        """Ends that nobody told us of: read from the run directory (after a manager's start, and at slow intervals)."""
        state = self._state()
        living = [replica.step for replica in state.replicas.values() if replica.believed and replica.step]
        paths = [self._run.exit_file(tag) for tag in (*living, *state.lingering)]
        for record in await asyncio.to_thread(lambda: [read_exit(path) for path in paths]):
            if record is not None:
                self._recorded(record)

    # ── workers and agents ─────────────────────────────────────────────────────────────────────────────────────────
    async def _greeting(self, incoming: Incoming, message: msg.Hello | msg.AgentHello) -> None:
        """A life is one process, that of the step which was launched or adopted as it, and the first that said so: of
        two, both would be believed in turn."""
        life = message.life
        known = self._state().replica(life.replica)
        if known.step is not None and known.step != message.tag:
            told = f"{life} is the step {known.step}, not {message.tag}"
            _log.warning("%s: the second process is fenced", told)
            await self._send(incoming.peer, msg.Fenced(life, told, message.tag), None)
            return
        joined = known.status is Status.JOINED and known.pid is not None and life not in self._left
        if joined and (known.host, known.pid) != (message.host, message.pid):
            told = f"{life} is process {known.pid} on {known.host}, not {message.pid} on {message.host}"
            _log.warning("%s: the second process is fenced", told)
            await self._send(incoming.peer, msg.Fenced(life, told), None)
            return
        self._left.discard(life)
        self._voices[life] = (incoming.peer, *self._voices.get(life, ())[:1])
        if isinstance(message, msg.Hello):
            await self._hello(incoming, message)
        else:
            self._about_living(message)

    async def _hello(self, incoming: Incoming, message: msg.Hello) -> None:
        life, state, now = message.life, self._state(), self._now()
        replica = state.replica(life.replica)
        shadow = role_of(life.replica) == SHADOW
        if shadow:  # no worker yet: who lives and who holds what is nothing to it
            self.adoptions.heard(incoming.peer, message)
        else:
            self.workers[life] = incoming.peer
            self.adoptions.forget(replica.shadow)
        its_own = not (shadow and state.job.role(stands_for(life.replica)).beside)
        if its_own and (finding := self._gpus.claim(message, state, now)) is not None:
            self._record(ev.FindingChanged(finding))  # it is fenced for that; until then it is not welcome
            return
        self._watch.joined(life, message.node, message.phase, now)
        told = (message.listens, message.serves, message.pid, message.node)
        if replica.status is not Status.JOINED or told != (
            replica.listens, replica.serves, replica.pid, replica.node
        ):  # fmt: skip
            self._record(ev.Joined(life, message.node, message.host, message.pid, message.listens, message.serves))
        if message.phase != replica.phase:
            self._record(ev.PhaseEntered(life, message.phase))
        if message.holds is not None and message.holds != replica.holds:
            self._record(ev.VersionHeld(life, message.holds))
        await self._send(incoming.peer, self._welcome(life), None)

    def _committed(self, message: msg.Committed) -> None:
        """Record a commit once: a trainer that reconnects may report what an earlier manager has recorded."""
        if message.step > self._state().step:
            self._record(ev.StepCommitted(message.life, message.step, message.metrics))

    def _may_go(self, life: Life) -> bool:
        """Nothing of the run waits for it: a role of the user's own that is done when it says so."""
        role = next((role for role in self._state().job.roles if role.name == role_of(life.replica)), None)
        return role is not None and not role.service

    def _about_living(self, message: Any) -> None:
        life, now, watch = message.life, self._now(), self._watch
        if isinstance(message, msg.Beat):
            watch.heard(life, message.phase, message.done, message.waits_for, now)
            self._phase(message)
            if (note := escaped(message.note[:MAX_NOTE])) != self._state().replica(life.replica).note:
                self._record(ev.Noted(life, note))
        elif isinstance(message, msg.Entered):
            watch.entered(life, message.phase, message.done, message.waits_for, now)
            self._phase(message)
        elif isinstance(message, msg.FirstWork):
            self._record(ev.FirstWorkDone(life))
        elif isinstance(message, msg.Holds):
            self._record(ev.VersionHeld(life, message.version))
        elif isinstance(message, msg.Committed):
            self._committed(message)
        elif isinstance(message, msg.Goodbye):
            self._left.add(life)
            watch.goodbye(life, now)
        elif isinstance(message, msg.AgentHello):
            watch.agent_heard(message.node, life, now, message.boot)
            finding = memory_locks(message, self._state().job.weights, now)
            self.findings.greeted(message, *((finding,) if finding is not None else ()))
            joined = ev.AgentJoined(life, message.node, message.host, message.pid, message.probe, message.keeps)
            self._record(joined)
        elif isinstance(message, msg.Found):
            self.findings.found(message)
        elif isinstance(message, msg.Probed | msg.Stacks):
            self.answered(message)
        elif isinstance(message, msg.AgentBeat):
            watch.agent_heard(message.node, life, now)
            loads = {load.tag: load for load in message.loads}
            for resident in watch.on(message.node):  # not everybody: a thousand agents say so each second
                replica = self._state().replica(resident.replica)
                if replica.status is Status.STARTING and replica.step in message.alive:
                    watch.step_alive(replica.life, now)
                if (load := loads.get(replica.step or "")) is not None and role_of(resident.replica) != SHADOW:
                    watch.load(replica.life, load.cpu, load.gpu, now, load.tensor)

    def _phase(self, message: msg.Beat | msg.Entered) -> None:
        if self._state().replica(message.life.replica).phase != message.phase:
            self._record(ev.PhaseEntered(message.life, message.phase, message.waits_for))


def speaks_for_itself(state: State, life: Life) -> bool:
    """It uses the worker API, so that it hears for itself that it must leave."""
    name = role_of(life.replica)
    return name == SHADOW or any(role.name == name and role.watch == "api" for role in state.job.roles)
