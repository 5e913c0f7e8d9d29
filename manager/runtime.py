"""Run one manager: receive messages, detect failures, reduce events to the state, plan, and execute.

All I/O of the manager is wired up in this module. Every turn of the loop has the same order. Messages and polls become
events. ``detect`` turns missing heartbeats and missing progress into findings, and changed findings become events.
``plan`` decides from the state only. External actions are carried out only after decisions and intents are journaled
and fsynced.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable

import msgspec

from ..cluster.base import Cluster, Refused, Unanswered
from ..core.launch import ExitReason
from ..core.run_dir import RunDir, write_atomically
from ..core.run_spec import RunSpec
from ..core.types import TRAINER, Incarnation, NodeName, Outcome
from ..health.detection.detect import Detection
from ..health.detection.detectors.liveness import missing_heartbeats
from ..health.detection.detectors.node_liveness import silent_nodes
from ..health.detection.health_monitor import HealthMonitor
from ..transport import messages as msg
from ..transport.control.endpoints import Listener
from ..transport.control.sockets import MANAGER_BOUNDS
from ..transport.keys import RunKeys
from .context import RunContext
from .execute import fault_injection
from .execute.checkpoint_exports import CheckpointExports
from .execute.executor import Executor, StepControl
from .execute.fault_injection import FaultInjector, interrupted_event
from .intake.cluster_poller import FAST_POLL_S, ClusterPoller
from .intake.finding_gate import BaselineRecorder, from_agent, restore_monitor
from .intake.message_handler import MessageHandler
from .intake.user_commands import acknowledge, pending_commands, to_events
from .model import events as ev
from .model.actions import (
    Drain,
    Exclude,
    ExternalAction,
    Fence,
    InjectFault,
    Launch,
    Readmit,
    Release,
    Request,
    Resize,
    RestartAll,
    Shrink,
    StopStep,
    Undrain,
    Why,
)
from .model.figures import token_ages
from .model.pools import ended_by
from .model.reducer import fold
from .model.state import State
from .peer_directory import DirectoryAnnouncer
from .planner import plan
from .planner.shutdown import final_reason
from .reporting.metrics import TokenCounter
from .reporting.observers import EttrEstimator, EventObservers
from .reporting.summary import write_summary
from .storage import resume_request
from .storage.journal import Journal
from .storage.lease import Lease, LeaseLost
from .storage.space_reserve import write_from_reserve

_log = logging.getLogger("rrl.manager")

COMMAND_POLL_S = 0.5
"""Seconds between two checks of the mailbox for user commands."""
FLUSH_INTERVAL_S = 0.5
"""Maximum seconds for which an event stays unwritten if no action waits for it."""


class Manager:
    """The manager of one run during one epoch."""

    def __init__(self, run: RunDir, cluster: Cluster, spec: RunSpec, source: str, host: str) -> None:
        self._run_dir, self._cluster, self._spec, self._source, self._host = run, cluster, spec, source, host
        self._monitor = HealthMonitor()
        self._detection = Detection(self._monitor)
        self._tokens = TokenCounter(self._monitor)
        self._wake = asyncio.Event()
        self.leave_reason: str | None = None
        """Reason why this manager leaves before the run's end; None while it stays."""
        self.begun = asyncio.Event()
        """Set once this manager holds the lease and has restored the run."""
        self._state: State | None = None
        self._epoch_began, self._wall = time.monotonic(), time.time()
        self._last_turn_at = self._wall
        """Manager's time (s) of the last turn of the loop, from which a stall of this process is detected."""
        self._flushed_at, self._cancelled_early = 0.0, ""
        self._background_tasks: list[asyncio.Task[None]] = []
        self._intended_actions: list[ExternalAction] = []
        """Actions whose intents are recorded but not yet known to be durable."""

    # ── one epoch ──────────────────────────────────────────────────────────────────────────────────────────────────
    async def run(self, job: str = "") -> Outcome | None:
        """Claim the run, restore its state, and manage it to its end.

        Returns the outcome; None if this manager left before the run's end. Raises LeaseHeld, JournalError, OSError.
        """
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self._cluster.close)
            # An earlier manager may have died while an injected fault filled the disk.
            await asyncio.to_thread(fault_injection.remove_disk_filler, self._run_dir)
            self._lease = await Lease.acquire(self._run_dir, self._spec.limits.lease, job)
            stack.push_async_callback(self._release_lease)
            await self._open(stack, job)
            self.begun.set()
            _log.info("manager %d of %s works, from step %d on", self._lease.epoch, self._run_dir.id, self.state.step)
            return await self._manage()

    async def _open(self, stack: contextlib.AsyncExitStack, job: str) -> None:
        """Open the journal, listener, executor and background loops, and restore the run.

        Everything is closed by ``stack``.
        """
        run = self._run_dir
        self._journal = Journal(run, self._lease.epoch)
        stack.callback(self._close_journal)
        last = self._journal.state.at if self._journal.state is not None else 0.0
        self._wall, self._epoch_began = max(time.time(), last), time.monotonic()  # the manager's time never goes back
        self._observers = EventObservers(run, self._spec, self._lease, self._journal, self.now, self._tokens.total)
        stack.push_async_callback(self._observers.close)
        self._ettr = EttrEstimator(run, self.record)
        self._listener = await Listener.open(
            RunKeys.load(run.keys), msg.ToManager, epoch=self._lease.epoch, host=self._host, bounds=MANAGER_BOUNDS
        )
        stack.push_async_callback(self._listener.close)
        context = RunContext(
            run, self._monitor, state=lambda: self.state, record=self.record, send=self._listener.send, now=self.now
        )
        self._announcer = DirectoryAnnouncer(context, self._listener.send_all, self._wake.set)
        self._step_control = control = StepControl(context, self._cluster, self._source)
        self._message_handler = MessageHandler(context, self._announcer.welcome, control.on_step_admitted)
        stack.push_async_callback(self._message_handler.close)
        self._fault_injector = FaultInjector(context, self._cluster)
        self._executor = Executor(
            context,
            self._cluster,
            control,
            self._fault_injector.inject,
            self._lease.check_in_thread,
            self._message_handler.standby_promoter.promote,
        )
        stack.push_async_callback(self._executor.close)
        self._exports = CheckpointExports(context, self._wake.set)
        stack.push_async_callback(self._exports.close)
        self._poller = ClusterPoller(context, self._cluster, lambda: self._executor.busy)
        self._state = self._journal.state  # record() may be called from here on, as all its recipients exist
        if self._state is None:
            self.record(ev.RunStarted(run.id, self._spec))
        self.record(ev.ManagerStarted(socket.gethostname(), os.getpid(), job))
        if self._cancelled_early:
            self.cancel(self._cancelled_early)
        await self._apply_resume_request()
        await self._restore()
        write_atomically(run.manager, msgspec.json.encode(self._listener.address))
        self._last_turn_at = self.now()
        self._monitor.restart(self._last_turn_at)  # before, no replica could be heard
        stack.push_async_callback(self._message_handler.stop_reading_exit_records)
        loops = (
            self._receive_loop(),
            _retry_forever(lambda: self._poller.run(self._after_poll)),
            self._renew_lease_loop(),
            _retry_forever(self._commands_loop),
            _retry_forever(self._ettr.run),
        )
        self._background_tasks = [asyncio.create_task(loop) for loop in loops]
        stack.push_async_callback(_cancel_all, self._background_tasks)

    def leave(self, why: str) -> None:
        """Leave without ending the run: its replicas keep running, and the next manager restores them."""
        self.leave_reason = why
        self._wake.set()

    def cancel(self, by: str) -> None:
        """Record a cancel command of the user ``by``, at once or as soon as this manager has opened the run."""
        if self._state is None:
            self._cancelled_early = by
        else:
            self.record(ev.CommandReceived("cancel", by, f"signal-{self._lease.epoch}"))

    @property
    def state(self) -> State:
        """Return the newest state. Only valid once the journal is open and its first event recorded."""
        assert self._state is not None
        return self._state

    def now(self) -> float:
        """Return the manager's time (s): the wall clock at the manager's start, advanced by the monotonic clock."""
        return self._wall + time.monotonic() - self._epoch_began

    def record(self, event: ev.Event) -> None:
        """Append the event to the journal (durable at the next flush), apply it to the state, and wake the loop."""
        seq = self._state.seq + 1 if self._state is not None else 1
        stamped = ev.Stamped(seq, self.now(), self._lease.epoch, event)
        _log.debug("event %d: %s", seq, type(event).__name__)
        self._journal.append(stamped)
        before, self._state = self._state, fold(self._state, stamped)
        self._observers.on_event(before, self._state, stamped)
        self._step_control.on_event(event)
        self._fault_injector.on_event(event)
        self._exports.on_event(event)
        if isinstance(event, ev.IntentSettled | ev.Admitted) or self._stopped_by_others(event):
            self._poller.poll_soon()
        elif isinstance(event, ev.FirstWorkDone) and event.incarnation.replica == TRAINER:
            self.record(ev.TokensCounted(self._tokens.total(), trainer_down=False))
        self._wake.set()

    def _stopped_by_others(self, event: ev.Event) -> bool:
        """Return whether a step that is still wanted was stopped by something other than the manager (preemption)."""
        if not isinstance(event, ev.StepEnded) or event.reason is not ExitReason.STOPPED:
            return False
        return self.state.is_current(event.incarnation)

    # ── one turn ───────────────────────────────────────────────────────────────────────────────────────────────────
    async def _manage(self) -> Outcome | None:
        """Run the loop until the run is over or this manager leaves."""
        while self.leave_reason is None:
            for task in self._background_tasks:
                if task.done():
                    task.result()
            self._wake.clear()
            await self._lease.ensure_current()  # a manager with a successor must neither decide nor send anything
            self._detect_own_stall()
            self._poller.check_suspensions()
            next_detection = self._detect()
            wake, over = await self._act()
            if over and self._exports.is_settled():
                return await self._finish()
            await self._announcer.announce()
            delay = max(0.0, min(next_detection, wake) - self.now())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(delay, FLUSH_INTERVAL_S)):
                    await self._wake.wait()
            if time.monotonic() - self._flushed_at >= FLUSH_INTERVAL_S:
                await self._flush()
        self._message_handler.clock_recorder.record()
        self.record(ev.ManagerStopped(self.leave_reason))
        await self._flush()
        return None

    def _detect_own_stall(self) -> None:
        """Restart the monitor's deadlines if this manager was stalled, and clear nodes that the run no longer uses.

        After a stall, heartbeats that seem to be missing may have arrived without being received yet.
        """
        now = self.now()
        if now - self._last_turn_at > self.state.job.limits.silence / 2:
            self._monitor.restart(now)
        self._last_turn_at = now
        monitored = {name for name, node in self.state.nodes.items() if node.allocation}
        # Findings about a released node are kept until the incarnations that ran there are fenced: these findings
        # explain the failures and date the beginning of their downtime.
        monitored |= {replica.node for replica in self.state.workers if replica.is_current and replica.node is not None}
        for node in {*self._monitor.nodes, *self._message_handler.finding_gate.nodes} - monitored:
            self._clear_node(node)

    def _drop_node(self, node: NodeName) -> None:
        """Remove the node and its replicas from the health monitor."""
        for incarnation in self._monitor.incarnations_on(node):
            self._tokens.retire(incarnation)
        self._monitor.remove_node(node)

    def _clear_node(self, node: NodeName) -> None:
        """Remove the node from the health monitor, and the findings reported about it."""
        self._drop_node(node)
        self._message_handler.finding_gate.forget(node)

    def _was_responsive(self, node: NodeName) -> bool:
        """Return whether no detector of the manager reports this node as silent or down.

        The agent of an excluded node is stopped, so a node that was responsive is silent after its exclusion. This
        silence is no evidence that the node is down.
        """
        return all(finding.node != node or from_agent(finding) for finding in self.state.findings.values())

    def _detect(self) -> float:
        """Pass the findings of the detectors through the pipeline, and record changed findings.

        Return the time (s) of the next necessary check. :mod:`rrl.health.detection.pipeline` lists the stages.
        """
        limits, now = self.state.job.limits, self.now()
        findings, next_check = self._detection.detect(limits, now)
        self._baseline_recorder.record_if_due(now)
        stacks, next_investigation = self._message_handler.hang_investigator.investigate(findings)
        token_age = token_ages.token_age_finding(self.state.token_ages, self.state.job.sampling)
        if token_age is not None:
            findings = [*findings, token_age]
        silent = missing_heartbeats(findings, self._monitor, limits, now)
        absent = silent_nodes(findings, self._monitor, limits, now)
        next_publication = self._message_handler.finding_gate.on_detected(findings, silent, absent, stacks)
        return min(next_check, next_investigation, next_publication)

    async def _act(self) -> tuple[float, bool]:
        """Plan until no action is due, journal the actions, and start them.

        Return the next planning time (s) and whether the run is over.
        """
        while True:
            planned = plan(self.state, self.now())
            if not planned.actions:
                break
            for action in planned.actions:
                if isinstance(action, ExternalAction):
                    self.record(ev.Intended(action))
                    self._intended_actions.append(action)
                    self._update_monitor(action)
                else:
                    ended = ended_by(self.state, action) if isinstance(action, Resize) else []
                    self.record(ev.Decided(action))
                    for incarnation in ended:
                        await self._fence(incarnation, action.why)
                    if isinstance(action, Readmit):
                        self._clear_node(action.node)
                    elif isinstance(action, Exclude) and self._was_responsive(action.node):
                        self._drop_node(action.node)
                    for fence in action.fences if isinstance(action, RestartAll) else (action,):
                        if isinstance(fence, Fence):
                            await self._fence(fence.incarnation, fence.why)
        # No action starts without a durable intent: if the flush fails, the actions wait for the next turn.
        if self._intended_actions and await self._flush():
            durable, self._intended_actions = self._intended_actions, []
            for action in durable:
                self._executor.start(action)
        return planned.wake_at, planned.over

    def _update_monitor(self, action: ExternalAction) -> None:
        """Inform the health monitor of an intended launch or stop."""
        if isinstance(action, Launch):
            timeout_s = self.state.job.recovery.promote
            self._monitor.on_launched(action.incarnation, action.node, self.now(), action.standby, timeout_s)
        elif isinstance(action, StopStep):
            self._monitor.on_stop_requested(action.incarnation, self.now())

    async def _fence(self, incarnation: Incarnation, why: Why) -> None:
        """Remove a fenced incarnation from the monitor and notify its processes."""
        self._tokens.retire(incarnation)
        self._monitor.remove(incarnation)
        if incarnation.replica == TRAINER:
            self.record(ev.TokensCounted(self._tokens.total(), trainer_down=True))
        await self._message_handler.fence(incarnation, "; ".join(why.evidence))

    async def _flush(self) -> bool:
        """Make all recorded events durable.

        Return False if the run directory cannot be written. In this case the caller must not carry out any action.
        """
        self._flushed_at = time.monotonic()
        try:
            if self.state.finish is None:
                await asyncio.to_thread(self._journal.flush)
            else:  # a full disk must not keep a run from ending
                await asyncio.to_thread(write_from_reserve, self._run_dir, self._journal.flush)
            if self._journal.full:
                await asyncio.to_thread(self._journal.rotate, self.state)
        except OSError as error:
            _log.error("the journal cannot be written, so no action is taken: %s", error)
            self._lease.write_errno = error.errno or errno.EIO
            return False
        self._lease.write_errno = 0
        return True

    # ── input ──────────────────────────────────────────────────────────────────────────────────────────────────────
    async def _receive_loop(self) -> None:
        """Handle messages one at a time; a message that cannot be handled is logged and skipped."""
        while True:
            incoming = await self._listener.receive()
            await self._lease.ensure_current()
            try:
                await self._message_handler.handle(incoming)
            except (OSError, ValueError, KeyError) as error:  # one message must not end the manager
                _log.warning("cannot handle a %s message: %r", type(incoming.message).__name__, error)

    def _after_poll(self) -> None:
        self._message_handler.start_reading_exit_records()
        self._wake.set()

    async def _renew_lease_loop(self) -> None:
        """Renew the epoch lease periodically; give up the run if its directory was removed."""
        await self._lease.renew_until_removed()
        await self._abandon()

    async def _abandon(self) -> None:
        """Release all allocations and leave: without its run directory the run cannot be managed.

        If an allocation cannot be released, the agents end the steps in it.
        """
        for tag in reversed(list(self.state.allocations)):  # the first component last, since the others end with it
            try:
                await self._cluster.release(tag)
            except (Refused, Unanswered) as error:
                _log.warning("cannot release allocation %s: %s", tag, error)
        self.leave("its run directory was removed")

    async def _commands_loop(self) -> None:
        """Record user commands from the mailbox, and acknowledge each one once it is durable."""
        while True:
            for command in await asyncio.to_thread(pending_commands, self._run_dir):
                if command.id not in self.state.handled_commands:
                    for event in to_events(command, self.state):
                        self.record(event)
                if await self._flush():
                    await asyncio.to_thread(acknowledge, self._run_dir, command)
            await asyncio.sleep(COMMAND_POLL_S)

    async def _apply_resume_request(self) -> None:
        """Resume the run if it has ended and a user requested that it continues.

        No process of the run is left at this point, so it is safe to replace the run's files. A request that no longer
        applies is discarded.
        """
        request = await asyncio.to_thread(resume_request.claim, self._run_dir)
        if request is None:
            return
        # If the request is recorded already, an earlier manager died before it installed the files.
        if request.id not in self.state.handled_commands:
            if self.state.outcome is None or request.ended != self.state.ended:
                why = "the run is already running, or has ended again since the request"
                _log.warning("ignored resume request by %s: %s", request.by, why)
                await asyncio.to_thread(resume_request.discard, self._run_dir)
                return
            self.record(ev.Resumed(request.by, request.id, request.job))
            await asyncio.to_thread(self._journal.flush)
        self._run_dir.summary.unlink(missing_ok=True)
        await asyncio.to_thread(resume_request.install, self._run_dir)

    # ── restore ────────────────────────────────────────────────────────────────────────────────────────────────────
    async def _restore(self) -> None:
        """Restore the health monitor from the state, and continue to settle open intents.

        All deadlines of the replicas start again once this manager listens.
        """
        restore_monitor(self._monitor, self.state, self.now())
        self._baseline_recorder = BaselineRecorder(self._monitor, self.state.baselines, self.record)
        for replica in self.state.replicas.values():
            if replica.is_current and replica.node is not None and replica.step is None:
                # The end of the step is recorded, but no decision has followed from it yet.
                self._message_handler.restore_step_end(replica.incarnation)
        await self._message_handler.read_exit_records()
        self._message_handler.finding_gate.restore()
        for intent in list(self.state.intents.values()):
            if isinstance(intent.action, StopStep | Release | Drain | Undrain | Shrink):
                self._executor.start(intent.action)
            elif isinstance(intent.action, InjectFault):
                self.record(interrupted_event(intent.action, self.state.epoch))
            elif isinstance(intent.action, Request):
                self._poller.poll_soon()

    # ── end ────────────────────────────────────────────────────────────────────────────────────────────────────────
    async def _finish(self) -> Outcome:
        """Write the last record and the summary; remove the manager's addresses and the reserved disk space."""
        verdict, run = self.state.finish, self._run_dir
        assert verdict is not None
        if self.state.outcome is None:
            self._message_handler.clock_recorder.record()
            await self._flush()
            await self._ettr.estimate()
            self.record(ev.RunEnded(verdict.outcome, final_reason(self.state)))
        while not await self._flush():
            await asyncio.sleep(FLUSH_INTERVAL_S)
        await asyncio.to_thread(write_from_reserve, run, lambda: self._journal.rotate(self.state))
        await asyncio.to_thread(write_from_reserve, run, lambda: write_summary(run))
        for path in (run.manager, run.space_reserve):
            path.unlink(missing_ok=True)
        return verdict.outcome

    def _close_journal(self) -> None:
        try:
            self._journal.close()
        except OSError as error:
            _log.error("the newest journal records cannot be written: %s", error)

    async def _release_lease(self) -> None:
        """Release the lease, unless a successor holds it already."""
        with contextlib.suppress(LeaseLost, OSError):  # a successor took over, or storage fails: the lease expires
            await self._lease.check_in_thread()
            await asyncio.to_thread(self._lease.release)


async def _cancel_all(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _retry_forever(loop: Callable[[], Awaitable[None]]) -> None:
    """Run ``loop`` repeatedly: errors of storage or of the cluster are logged, and the loop restarts after a pause."""
    while True:
        try:
            await loop()
        except (OSError, ValueError, KeyError, msgspec.MsgspecError):
            _log.exception("a periodic task of the manager failed; trying again in %g s", FAST_POLL_S)
        await asyncio.sleep(FAST_POLL_S)
