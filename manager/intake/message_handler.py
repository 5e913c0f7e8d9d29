"""Turn messages into events: check that the sender is a current incarnation, and record only changes.

The handler decides nothing. A heartbeat only updates the health monitor; it causes no event and no write. If a step
left no exit record, the event about its end contains the last output of its srun or first process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from enum import IntEnum
from typing import Any

from msgspec.structs import replace

from ...cluster.base import NotStarted, RejectReason
from ...core.launch import ExitReason, ExitRecord, read_exit, tag_of
from ...core.phases import STOPPING
from ...core.run_dir import RunDir
from ...core.text import escaped, last_lines_of, shows_missing_command
from ...core.types import (
    AGENT,
    GUEST_ROLE,
    STANDBY_ROLE,
    STORE,
    Incarnation,
    ReplicaId,
    is_trainer,
    replica_id,
    role_of,
)
from ...transport import messages as msg
from ...transport.control.endpoints import Incoming
from ..context import RunContext
from ..model import events as ev
from ..model.events import Event, IntentSettled
from ..model.queries import current_owner, promoted_to, step_alias
from ..model.state import NEVER_APPEARED, State, Status
from .admission import GpuRegistry, check_memlock
from .finding_gate import FindingGate, is_agent_of
from .hang_investigation import HangInvestigator
from .interval_recorders import ClockRecorder, GpuUseRecorder, WeightsRecorder
from .standby_promotion import StandbyPromoter

_log = logging.getLogger("rrl.manager")


def last_output(run: RunDir, tag: str) -> str:
    """Return the last lines of a step's output, or '' if there is no output.

    The output comes from the step's first process and from slurmstepd (which reports, for example, a missing
    interpreter or exceeded memory). If neither printed anything, the lines of the step's ``srun`` are returned.
    """
    log = run.log_file(f"{tag}.step")
    outputs = (last_lines_of(log.with_name(f"{log.name}{ending}")) for ending in (".0", "", ".srun"))
    return next(filter(None, outputs), "")


def with_reason(run: RunDir, event: Event) -> Event:
    """Return the event. If the event says that a step never appeared, add the last lines of the step's output to it."""
    if not isinstance(event, IntentSettled) or event.ok or event.reason is not RejectReason.NEVER_APPEARED:
        return event
    output = last_output(run, event.tag)
    if not output:
        return event
    if shows_missing_command(output):
        return IntentSettled(event.tag, False, str(NotStarted(output)), event.undelivered, RejectReason.NOT_STARTED)
    return replace(event, detail=f"{NEVER_APPEARED}: {output}")


OUTSIDE_SHOWN_AFTER_S = 30.0
"""Seconds for which the run waits for somebody outside before this is recorded, and the minimum time between records of
waits for different episodes. Shorter waits are normal in every step."""
MAX_NOTE_CHARS = 300
"""Maximum number of characters kept of a replica's note: two lines of a wide terminal."""
EXIT_RECORD_READ_TIMEOUT_S = 1.0
"""Seconds for which the handler waits for an exit record in the run directory. Shared storage answers within about 10
ms, or hangs."""


class MessageHandler:
    """Handles all messages that one manager receives.

    ``welcome`` returns the reply to a Hello; ``on_step_admitted`` is called with the tag of each admitted step.
    """

    def __init__(
        self,
        context: RunContext,
        welcome: Callable[[Incarnation], msg.Welcome],
        on_step_admitted: Callable[[str], None],
    ) -> None:
        self._context, self._welcome, self._on_step_admitted = context, welcome, on_step_admitted
        self._peers = context.connections
        self._gpus = GpuRegistry()
        self.finding_gate = FindingGate(context)
        self.hang_investigator = HangInvestigator(context)
        self.standby_promoter = StandbyPromoter(context, self._gpus)
        self._connections: dict[Incarnation, tuple[bytes, ...]] = {}
        """The last two connections on which each incarnation's process sent its Hello, newest first. Messages that were
        sent on the older connection may still arrive."""
        self.clock_recorder = ClockRecorder(context)
        self._gpu_use_recorder = GpuUseRecorder(context)
        self._weights_recorder = WeightsRecorder(context)
        self._outside_recorded_at = 0.0
        """Manager's time (s) of the newest record of a wait for somebody outside of the run."""
        self._exit_record_task: asyncio.Task[None] | None = None
        self._exit_lookups: set[asyncio.Task[None]] = set()
        """Running tasks that read the exit records of vanished steps."""

    async def handle(self, incoming: Incoming) -> None:
        """Pass one message to its handler, if its sender is one of those who may send this kind of message."""
        message, state = incoming.message, self._context.state()
        senders, handler = HANDLERS[type(message)]
        if senders is not Senders.ANY and not state.is_current(message.incarnation):
            if state.finish is None:
                return await self._from_fenced(incoming, message)
            newest = state.replica(message.incarnation.replica).incarnation == message.incarnation
            if not (newest and senders is Senders.REGISTERED_OR_ENDING):
                return  # the run is ending: the step was requested to stop, and may finish its current work
        elif senders >= Senders.REGISTERED and incoming.peer not in self._connections.get(message.incarnation, ()):
            if isinstance(message, msg.FindingReport):
                _log.warning(
                    "ignored a finding from %s: the process has not registered on this connection", message.incarnation
                )
            return
        if (handling := handler(self, incoming, message)) is not None:
            await handling

    async def close(self) -> None:
        """Stop the investigation of hangs."""
        await self.hang_investigator.close()

    async def _from_fenced(self, incoming: Incoming, message: Any) -> None:
        """Answer a message of an incarnation that is not current.

        The sender is a standby process that is being promoted, or a fenced incarnation.
        """
        if promoted_to(self._context.state(), message.incarnation) is not None:
            if isinstance(message, msg.Hello):  # the standby process did not receive its Promote message
                self.standby_promoter.on_standby_hello(incoming.peer, message)
                await self.standby_promoter.send_promotion(message.incarnation)
                await self.standby_promoter.send_postponed()
            return
        self._peers.workers.pop(message.incarnation, None)
        self._connections.pop(message.incarnation, None)
        why = f"{message.incarnation} is no longer current (fenced)"
        await self._context.send(incoming.peer, msg.Fenced(message.incarnation, why), None)

    async def fence(self, incarnation: Incarnation, why: str) -> None:
        """Notify the processes of a fenced incarnation that they must end at once.

        The worker is notified. The first process of its step is notified, too, because the worker may hang. If the
        first process is not connected, the node's agent is notified instead. A command that does not use the worker API
        is not notified: it runs until its step is stopped, and the stop allows it a grace.
        """
        self.standby_promoter.forget(step_alias(self._context.state(), incarnation))
        worker = self._peers.workers.pop(incarnation, None)
        if worker is not None:
            await self._context.send(worker, msg.Fenced(incarnation, why), None)
        state = self._context.state()
        replica = state.replica(incarnation.replica)
        step, node = (replica.step, replica.node) if replica.incarnation == incarnation else (None, None)
        if incarnation.replica not in state.replicas:  # its pool has given the replica itself up
            orphans = ((tag, one.node) for tag, one in state.orphan_steps.items() if one.incarnation == incarnation)
            step, node = next(orphans, (None, None))
        if step is None or not uses_worker_api(state, incarnation):
            return
        agent = state.replica(replica_id(AGENT, node or "")).step or ""
        if (peer := self._peers.steps.get(step) or self._peers.steps.get(agent)) is not None:
            await self._context.send(peer, msg.Fenced(incarnation, why, step), None)

    # ── steps ──────────────────────────────────────────────────────────────────────────────────────────────────────
    async def _admission_request(self, incoming: Incoming, message: msg.AdmissionRequest) -> None:
        """Answer whether a launched process may start its command, so that each launch starts exactly one command.

        A process that an earlier manager admitted may ask again while the run is ending. Such a process is admitted,
        and then requested to stop with a grace.
        """
        state = self._context.state()
        incarnation = current_owner(state, message.incarnation, message.tag)
        replica = state.replica(incarnation.replica)
        orphan = state.orphan_steps.get(message.tag)
        first = replica.admitted_process if replica.step == message.tag else None
        if first is not None and (first.node, first.pid) != (message.node, message.pid):
            why = f"{message.tag} is process {first.pid} on {first.node}, not {message.pid} on {message.node}"
            _log.warning("%s: the second process is not admitted", why)
            await self._context.send(
                incoming.peer, msg.Admitted(message.tag, False, why, duplicate=True), incoming.request_id
            )
            return
        if state.finish is not None and (orphan is not None or (replica.step == message.tag and replica.pid)):
            self._peers.steps[message.tag] = incoming.peer
            await self._context.send(incoming.peer, msg.Admitted(message.tag, True), incoming.request_id)
            grace = state.job.limits.step_grace
            await self._context.send(
                incoming.peer, msg.Stop(incarnation, grace, "the run is ending", message.tag), None
            )
            return
        ok = state.is_current(incarnation) and replica.step == message.tag and state.finish is None
        why = (
            ""
            if ok
            else f"{incarnation} is not expected: the newest incarnation is {replica.incarnation} ({replica.status})"
        )
        # A node other than the planned one may be in use by other replicas, or not belong to the run.
        if ok and first is None and message.node != replica.node:
            ok, why = False, f"{message.tag} runs on {message.node}, and was launched on {replica.node}"
            _log.warning("%s: the process is not admitted", why)
            self._context.record(ev.IntentSettled(message.tag, False, why, reason=RejectReason.REFUSED))
        if ok:
            self._peers.steps[message.tag] = incoming.peer
            self._on_step_admitted(message.tag)
            if first is None:
                self._context.record(ev.Admitted(incarnation, message.tag, message.node, message.pid))
        await self._context.send(incoming.peer, msg.Admitted(message.tag, ok, why), incoming.request_id)

    def _injected(self, _: Incoming, message: msg.Injected) -> None:
        """Record the report of an injected fault, if this run requested that fault."""
        fault = message.fault
        if fault.id not in self._context.state().triggered_faults:
            return  # this run did not request this fault
        incarnation = message.incarnation or self._context.state().replica(ReplicaId(fault.target)).incarnation
        incarnation = next(
            (
                replica.incarnation
                for replica in self._context.state().replicas.values()
                if replica.promoted_from == incarnation
            ),
            incarnation,
        )
        self._context.record(
            ev.FaultInjected(
                fault.id, incarnation, message.ok, message.detail, fault.kind, fault.target, message.node, message.ended
            )
        )

    def _step_exit(self, _: Incoming, message: ExitRecord) -> None:
        self._peers.steps.pop(message.tag, None)
        self._on_exit_record(message)

    async def _step_vanished(self, _: Incoming, message: msg.StepVanished) -> None:
        """Look for the exit record of a step that vanished, for at most EXIT_RECORD_READ_TIMEOUT_S seconds.

        If the run directory hangs, the lookup continues in the background, and its result is handled when it arrives.
        """
        lookup = asyncio.create_task(self._find_exit_record(message))
        self._exit_lookups.add(lookup)
        lookup.add_done_callback(self._exit_lookups.discard)
        if (await asyncio.wait((lookup,), timeout=EXIT_RECORD_READ_TIMEOUT_S))[0]:
            lookup.result()

    async def _find_exit_record(self, message: msg.StepVanished) -> None:
        record = await asyncio.to_thread(read_exit, self._context.run_dir.exit_file(message.tag))
        if record is None:
            output = await asyncio.to_thread(last_output, self._context.run_dir, message.tag)
            incarnation = current_owner(self._context.state(), message.incarnation, message.tag)
            self._context.monitor.on_step_gone(incarnation, self._context.now())
            detail = f"reported by the agent of {message.node}{': ' if output else ''}{output}"
            self._record_end(ev.StepEnded(incarnation, message.tag, None, None, ExitReason.LOST, detail=detail))
        else:
            self._on_exit_record(record)

    def _on_exit_record(self, record: ExitRecord) -> None:
        incarnation = current_owner(self._context.state(), record.incarnation, record.tag)
        self._record_end(_step_ended(incarnation, record))

    def _record_end(self, event: ev.StepEnded) -> None:
        """Record the end of a step once, and only if it is the step of the current incarnation or an orphan step."""
        state = self._context.state()
        current = state.is_current(event.incarnation) and state.replica(event.incarnation.replica).step == event.step
        if current or event.step in state.orphan_steps:
            self._report_end(event)
            self._context.record(event)
            if self._context.state().replica(event.incarnation.replica).status is Status.COMPLETED:
                self._context.monitor.remove(event.incarnation)  # the replica has completed: the end is no failure

    def restore_step_end(self, incarnation: Incarnation) -> None:
        """Report to the health monitor that the incarnation's step has ended, as an earlier manager has recorded."""
        tag = tag_of(self._context.run_dir.id, step_alias(self._context.state(), incarnation))
        record = read_exit(self._context.run_dir.exit_file(tag))
        lost = ev.StepEnded(incarnation, tag, None, None, ExitReason.LOST)
        self._report_end(lost if record is None else _step_ended(incarnation, record))

    def _report_end(self, event: ev.StepEnded) -> None:
        """Report the end of a step to the health monitor."""
        self._context.monitor.on_step_ended(
            event.incarnation,
            event.code,
            event.signal,
            event.reason,
            self._context.now(),
            event.last_line,
            event.detail,
            event.exception,
        )

    def start_reading_exit_records(self) -> None:
        """Read exit records in a task of their own, so that hung storage does not delay messages.

        Do nothing while the previous task is still running. If the previous task failed, raise its error.
        """
        previous = self._exit_record_task
        if previous is None or previous.done():
            self._exit_record_task = asyncio.create_task(self.read_exit_records())
            if previous is not None:
                previous.result()

    async def stop_reading_exit_records(self) -> None:
        """Cancel the reading of exit records that is running."""
        if self._exit_record_task is not None:
            self._exit_record_task.cancel()
            await asyncio.gather(self._exit_record_task, return_exceptions=True)

    async def read_exit_records(self) -> None:
        """Record the ends of steps that have an exit record in the run directory, but that no message has reported.

        Called at a manager's start and after polls.
        """
        state = self._context.state()
        current = [replica.step for replica in state.replicas.values() if replica.is_current and replica.step]
        paths = [self._context.run_dir.exit_file(tag) for tag in (*current, *state.orphan_steps)]
        for record in await asyncio.to_thread(lambda: [read_exit(path) for path in paths]):
            if record is not None:
                self._on_exit_record(record)

    # ── workers and agents ─────────────────────────────────────────────────────────────────────────────────────────
    async def _register(self, incoming: Incoming, message: msg.Hello | msg.AgentHello) -> bool:
        """Register the process that sent a Hello; fence it and return False if another process is this incarnation.

        An incarnation is exactly one process: the first that sends a Hello from the step that was launched as, or
        promoted to, this incarnation. All other processes are fenced.
        """
        incarnation = message.incarnation
        known = self._context.state().replica(incarnation.replica)
        if known.step is not None and known.step != message.tag:
            conflict = f"{incarnation} runs in step {known.step}, not in {message.tag}"
            _log.warning("%s: process %d on %s is fenced", conflict, message.pid, message.host)
            await self._context.send(incoming.peer, msg.Fenced(incarnation, conflict, message.tag), None)
            return False
        # after its Goodbye, the command may continue and start another worker process
        joined = known.status is Status.JOINED and known.pid is not None and known.phase != STOPPING
        if joined and (known.host, known.pid) != (message.host, message.pid):
            conflict = f"{incarnation} is process {known.pid} on {known.host}, not {message.pid} on {message.host}"
            _log.warning("%s: process %d on %s is fenced", conflict, message.pid, message.host)
            await self._context.send(incoming.peer, msg.Fenced(incarnation, conflict), None)
            return False
        self._connections[incarnation] = (incoming.peer, *self._connections.get(incarnation, ())[:1])
        return True

    async def _hello(self, incoming: Incoming, message: msg.Hello) -> None:
        """Record that a worker or standby process has joined, unless another incarnation uses one of its GPUs."""
        if not await self._register(incoming, message):
            return
        incarnation, state, now = message.incarnation, self._context.state(), self._context.now()
        replica = state.replica(incarnation.replica)
        standby = role_of(incarnation.replica) == STANDBY_ROLE
        if standby:  # a standby process is not a worker yet, so it needs no peer directory
            self.standby_promoter.on_standby_hello(incoming.peer, message)
        else:
            self._peers.workers[incarnation] = incoming.peer
            self.standby_promoter.forget(replica.promoted_from)
        if not standby and (finding := self._gpus.claim(message, state, now)) is not None:
            self._context.record(
                ev.FindingChanged(finding)
            )  # the planner will fence the process for this finding, so it gets no Welcome
            return
        if not standby:
            await self.standby_promoter.send_postponed()
        self._context.monitor.on_hello(incarnation, message.node, message.phase, now)
        addresses = (message.listen_address, message.weight_address, message.rendezvous_address)
        if replica.status is not Status.JOINED or (*addresses, message.pid, message.node) != (
            replica.listen_address,
            replica.weight_address,
            replica.rendezvous_address,
            replica.pid,
            replica.node,
        ):
            self._context.record(ev.Joined(incarnation, message.node, message.host, message.pid, *addresses))
        self._update_phase(incarnation, message.phase)
        held = replica.weight_version
        if message.weight_version not in (None, held) and (held is None or is_trainer(incarnation.replica)):
            self._context.record(ev.VersionAvailable(incarnation, message.weight_version))
        await self._context.send(incoming.peer, self._welcome(incarnation), None)

    def _committed(self, _: Incoming, message: msg.StepCommitted) -> None:
        """Record a commit once: a trainer that reconnects may report a commit that an earlier manager has recorded."""
        if message.step > self._context.state().step:
            self._context.record(message)
            if message.completes_commit:
                self.clock_recorder.on_commit()

    def _record_outside_wait(self, store: Incarnation, now: float) -> None:
        """Record for whom outside of the run the whole run has waited for some time, and when this ends."""
        run, known = self._context.monitor.run, self._context.state().replica(store.replica).outside
        wait = run.outside if run.outside is not None and now - run.outside_since >= OUTSIDE_SHOWN_AFTER_S else None
        if (wait and (wait.kind, wait.episode)) == (known and (known.kind, known.episode)):
            return
        if wait is None or known is None or now - self._outside_recorded_at >= OUTSIDE_SHOWN_AFTER_S:
            self._outside_recorded_at = now
            self._context.record(ev.OutsideWaitChanged(store, wait))

    def _may_exit(self, incarnation: Incarnation) -> bool:
        """Return whether the incarnation may exit after its Goodbye, because its role is a user's command."""
        role = next(
            (role for role in self._context.state().job.roles if role.name == role_of(incarnation.replica)), None
        )
        return role is not None and not role.service

    def _heartbeat(self, _: Incoming, message: msg.Heartbeat) -> None:
        incarnation, now = message.incarnation, self._context.now()
        self._context.monitor.on_heartbeat(
            incarnation, message.phase, message.done, message.waits_for, now, message.data
        )
        self._update_phase(incarnation, message.phase, message.waits_for)
        note = escaped(message.note[:MAX_NOTE_CHARS])
        if note != self._context.state().replica(incarnation.replica).note:
            self._context.record(ev.NoteChanged(incarnation, note))
        if message.weights is not None:
            self._weights_recorder.on_report(incarnation, message.weights, message.traffic)
        if incarnation.replica == STORE:
            self._record_outside_wait(incarnation, now)

    def _phase_entered(self, _: Incoming, message: msg.PhaseEntered) -> None:
        self._context.monitor.on_phase(
            message.incarnation, message.phase, message.done, message.waits_for, self._context.now()
        )
        self._update_phase(message.incarnation, message.phase, message.waits_for)

    def _first_work_done(self, _: Incoming, message: msg.FirstWorkDone) -> None:
        self._context.record(message)

    def _version_available(self, _: Incoming, message: msg.VersionAvailable) -> None:
        self._context.record(message)

    def _evaluated(self, _: Incoming, message: msg.Evaluated) -> None:
        if message.step > self._context.state().evaluated:
            self._context.record(message)

    def _values_logged(self, _: Incoming, message: msg.ValuesLogged) -> None:
        names = list(message.values)[: msg.MAX_LOGGED_NAMES]
        values = {escaped(name[: msg.MAX_LOGGED_NAME_CHARS]): message.values[name] for name in names}
        self._context.record(msg.ValuesLogged(message.incarnation, values))

    def _finding_report(self, _: Incoming, message: msg.FindingReport) -> None:
        self.finding_gate.on_report(message)

    def _investigation_reply(self, _: Incoming, message: msg.ProbeReply | msg.Stacks) -> None:
        self.hang_investigator.on_reply(message)

    def _clock_report(self, _: Incoming, message: msg.ClockReport) -> None:
        self.clock_recorder.on_report(message.incarnation, message.clock)

    async def _goodbye(self, incoming: Incoming, message: msg.Goodbye) -> None:
        incarnation = message.incarnation
        self._context.monitor.on_goodbye(incarnation, self._context.now())
        self._update_phase(incarnation, STOPPING)
        if self._may_exit(incarnation):
            grace = self._context.state().job.limits.step_grace
            await self._context.send(incoming.peer, msg.Stop(incarnation, grace, "its work is done"), None)

    async def _agent_hello(self, incoming: Incoming, message: msg.AgentHello) -> None:
        if not _is_from_agent(message) or not await self._register(incoming, message):
            return
        incarnation, now = message.incarnation, self._context.now()
        self._context.monitor.on_agent_message(message.node, incarnation, now, message.boot)
        finding = check_memlock(message, self._context.state().job.transport.weights, now)
        self.finding_gate.on_agent_hello(message, *((finding,) if finding is not None else ()))
        joined = ev.AgentJoined(
            incarnation, message.node, message.host, message.pid, message.probe, message.snapshot_address
        )
        self._context.record(joined)

    def _agent_heartbeat(self, _: Incoming, message: msg.AgentHeartbeat) -> None:
        if not _is_from_agent(message):
            return
        now, monitor = self._context.now(), self._context.monitor
        monitor.on_agent_message(message.node, message.incarnation, now)
        if message.gpu_use is not None:
            self._gpu_use_recorder.on_report(message.node, message.gpu_use)
        loads = {load.tag: load for load in message.loads}
        # Only the replicas of this node are visited: a thousand agents send this message every second.
        for resident in monitor.incarnations_on(message.node):
            replica = self._context.state().replica(resident.replica)
            if replica.status is Status.STARTING and replica.step in message.alive:
                monitor.on_step_alive(replica.incarnation, now)
            if (load := loads.get(replica.step or "")) is not None and role_of(resident.replica) != STANDBY_ROLE:
                monitor.on_load(replica.incarnation, load.cpu, load.gpu, now, load.tensor, load.stopped)

    def _update_phase(self, incarnation: Incarnation, phase: str, waits_for: ReplicaId | None = None) -> None:
        """Record the phase if it changed."""
        if self._context.state().replica(incarnation.replica).phase != phase:
            self._context.record(ev.PhaseEntered(incarnation, phase, waits_for))


class Senders(IntEnum):
    """Who may send a message."""

    ANY = 0
    """Any process. The message is about a step or a fault; its handler finds out to which incarnation that belongs."""
    CURRENT = 1
    """The current incarnation, on any connection."""
    REGISTERED = 2
    """The process that is the current incarnation: it has sent its Hello on this connection."""
    REGISTERED_OR_ENDING = 3
    """As REGISTERED; while the run is ending, also the newest incarnation, although it is not current any more."""


HANDLERS: Mapping[type, tuple[Senders, Callable[[MessageHandler, Incoming, Any], Awaitable[None] | None]]] = {
    msg.AdmissionRequest: (Senders.ANY, MessageHandler._admission_request),
    ExitRecord: (Senders.ANY, MessageHandler._step_exit),
    msg.StepVanished: (Senders.ANY, MessageHandler._step_vanished),
    msg.Injected: (Senders.ANY, MessageHandler._injected),
    msg.Hello: (Senders.CURRENT, MessageHandler._hello),
    msg.AgentHello: (Senders.CURRENT, MessageHandler._agent_hello),
    msg.AgentHeartbeat: (Senders.REGISTERED, MessageHandler._agent_heartbeat),
    msg.Heartbeat: (Senders.REGISTERED, MessageHandler._heartbeat),
    msg.PhaseEntered: (Senders.REGISTERED, MessageHandler._phase_entered),
    msg.FirstWorkDone: (Senders.REGISTERED, MessageHandler._first_work_done),
    msg.VersionAvailable: (Senders.REGISTERED, MessageHandler._version_available),
    msg.Evaluated: (Senders.REGISTERED, MessageHandler._evaluated),
    msg.ValuesLogged: (Senders.REGISTERED, MessageHandler._values_logged),
    msg.FindingReport: (Senders.REGISTERED, MessageHandler._finding_report),
    msg.ProbeReply: (Senders.REGISTERED, MessageHandler._investigation_reply),
    msg.Stacks: (Senders.REGISTERED, MessageHandler._investigation_reply),
    msg.Goodbye: (Senders.REGISTERED, MessageHandler._goodbye),
    # a resumed run continues from the last commit, and counts the last reading of each clock
    msg.StepCommitted: (Senders.REGISTERED_OR_ENDING, MessageHandler._committed),
    msg.ClockReport: (Senders.REGISTERED_OR_ENDING, MessageHandler._clock_report),
}
"""Senders and handler of each message."""


def _is_from_agent(message: msg.AgentHello | msg.AgentHeartbeat) -> bool:
    """Return whether the sender is the agent of the node in the message; log a warning if it is not."""
    if is_agent_of(message.incarnation, message.node):
        return True
    _log.warning("ignored a message from %s: it is not the agent of %s", message.incarnation, message.node)
    return False


def uses_worker_api(state: State, incarnation: Incarnation) -> bool:
    """Return whether the incarnation uses the worker API, so that a request to end can be sent to its worker."""
    name = role_of(incarnation.replica)
    return name in (STANDBY_ROLE, GUEST_ROLE) or any(
        role.name == name and role.watch == "api" for role in state.job.roles
    )


def _step_ended(incarnation: Incarnation, record: ExitRecord) -> ev.StepEnded:
    """Return the event for the end of this incarnation's step."""
    return ev.StepEnded(
        incarnation,
        record.tag,
        record.code,
        record.signal,
        record.reason,
        record.last_line,
        record.detail,
        record.exception,
    )
