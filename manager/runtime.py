"""The manager's loop: hear, detect, fold, plan, execute. All I/O of the manager is wired up here and nowhere else.

Order of every turn: messages and looks become events; ``detect`` turns silence into findings; changed findings become
events; ``plan`` sees only the state; decisions and intents are journaled and fsynced; only then is anything done.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable

import msgspec

from ..core.launch import ExitReason
from ..core.run_dir import RunDir, write_atomically
from ..core.run_spec import RunSpec
from ..core.types import STANDBY_ROLE, TRAINER, Incarnation, NodeName, Outcome, rank_of, role_of
from ..health.detection.detect import detect
from ..health.detection.detectors.liveness import missing_heartbeats
from ..health.detection.detectors.node_liveness import silent_nodes
from ..health.detection.health_monitor import HealthMonitor
from ..transport import messages as msg
from ..transport.control.endpoints import Listener
from ..transport.control.sockets import MANAGER_BOUNDS
from ..transport.keys import RunKeys
from .cluster.base import Cluster, Refused, Unanswered
from .execute import fault_injection
from .execute.executor import Executor, StepControl
from .execute.fault_injection import FaultInjector, interrupted_event
from .intake.cluster_poller import FAST_POLL_S, ClusterPoller
from .intake.finding_gate import BaselineRecorder, from_agent, restore_monitor
from .intake.hang_investigation import HangInvestigator
from .intake.message_handler import MessageHandler, with_reason
from .intake.user_commands import acknowledge, pending_commands, to_events
from .model import events as ev
from .model import token_ages
from .model.actions import (  # fmt: skip
    Drain,
    Exclude,
    ExternalAction,
    Fence,
    InjectFault,
    Launch,
    Readmit,
    Release,
    Request,
    RestartAll,
    Shrink,
    StopStep,
    Undrain,
)
from .model.queries import workers
from .model.reducer import fold
from .model.state import State
from .planner import plan
from .planner.peer_directory import PeerDirectory, build_directory
from .planner.shutdown import final_reason
from .reporting.log_collector import LogCollector
from .reporting.metrics import TokenCounter
from .reporting.observers import EventObservers
from .reporting.summary import write_summary
from .storage import resume_request
from .storage.journal import Journal
from .storage.lease import Lease, LeaseLost

_log = logging.getLogger("rrl.manager")

MAX_RENEWALS_WITHOUT_RUN_DIR = 10
"""tries to renew the lease, two leases in all, that find no run directory: then it was removed for good"""
ANNOUNCE_INTERVAL_S = 0.05
"""s between two announcements of who lives and who holds which weights: each goes to everybody, whole"""
VERSION_ANNOUNCE_S_PER_WORKER = 0.008
"""s for each worker, where nothing is new but which version a receiver holds: an announcement to 1,024 of them is
172 MB in all, and each new version would be worth a thousand"""
COMMAND_POLL_S = 0.5
"""s between two looks into the mailbox"""
FLUSH_INTERVAL_S = 0.5
"""s that an event which nothing waits for may stay unwritten"""


class Manager:
    """One epoch of one run. :meth:`run` returns how the run ended, or None when this manager left before it did."""

    def __init__(self, run: RunDir, cluster: Cluster, spec: RunSpec, source: str, host: str) -> None:
        self._run_dir, self._cluster, self._spec, self._source, self._host = run, cluster, spec, source, host
        self._monitor = HealthMonitor()
        self._tokens = TokenCounter(self._monitor)
        self._wake = asyncio.Event()
        self._poller = ClusterPoller(
            cluster, self._monitor, lambda: self.state, lambda event: self.record(with_reason(run, event)), self.now,
            lambda: self._executor.busy, self._after_poll,
        )  # fmt: skip
        self._sent_directory: PeerDirectory | None = None
        self._directory_number = 0
        self._announced_at = 0.0
        self._announce_timer: asyncio.TimerHandle | None = None
        """for the next announcement, where it is too early for it"""
        self.leave_reason: str | None = None
        """why this manager leaves before the run's end"""
        self._state: State | None = None
        self._epoch_began = time.monotonic()
        self._wall = time.time()
        self._last_turn_at = self._wall
        """when the loop last turned"""
        self._flushed_at = 0.0
        self._cancelled_early = ""
        self._background_tasks: list[asyncio.Task[None]] = []
        self._exit_record_task: asyncio.Task[None] | None = None
        """of exit records"""
        self._intended_actions: list[ExternalAction] = []
        """intended, not yet known to be durable"""

    # ── one life of a manager ──────────────────────────────────────────────────────────────────────────────────────
    async def run(self, job: str = "") -> Outcome | None:
        """Claim the run, adopt what lives, and manage it to its end. Raises LeaseHeld, JournalError, OSError."""
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self._cluster.close)
            await asyncio.to_thread(
                fault_injection.remove_disk_filler, self._run_dir
            )  # of a manager that died over a full disk
            self._lease = await Lease.acquire(self._run_dir, self._spec.limits.lease, job)
            stack.push_async_callback(self._release_lease)
            await self._open(stack, job)
            return await self._manage()

    async def _open(self, stack: contextlib.AsyncExitStack, job: str) -> None:
        """Journal, listener, executor and senses, each closed in turn by ``stack``; then what lives is adopted."""
        run = self._run_dir
        self._journal = Journal(run, self._lease.epoch)
        stack.callback(self._close_journal)
        self._state = self._journal.state
        last = self._state.at if self._state is not None else 0.0
        self._wall, self._epoch_began = max(time.time(), last), time.monotonic()  # a manager's time never goes back
        self._last_turn_at = self.now()
        self._observers = EventObservers(run, self._spec, self._lease, self._journal, self.now, self._tokens.total)
        stack.push_async_callback(self._observers.close)
        self._listener = await Listener.open(
            RunKeys.load(run.keys), msg.ToManager, epoch=self._lease.epoch, host=self._host, bounds=MANAGER_BOUNDS
        )
        stack.push_async_callback(self._listener.close)
        self._log_collector = await LogCollector.open(
            run, RunKeys.load(run.keys), self._lease.epoch, self._host, lambda: self._state
        )
        stack.push_async_callback(self._log_collector.close)
        step_peers: dict[str, bytes] = {}
        step_control = StepControl(
            run, self._cluster, self._source, lambda: self.state, self._listener.send, step_peers
        )
        self._step_control = step_control
        self._message_handler = MessageHandler(
            run, self._monitor, lambda: self.state, self.record, self._listener.send, self.now, self._welcome,
            step_control.on_step_admitted, step_peers,
        )  # fmt: skip
        self._hang_investigator = HangInvestigator(
            run,
            self._monitor,
            lambda: self.state,
            self.record,
            self._listener.send,
            self.now,
            self._message_handler.worker_peers,
            step_peers,
        )
        self._message_handler.on_reply = self._hang_investigator.on_reply
        stack.push_async_callback(self._hang_investigator.close)
        self._fault_injector = FaultInjector(
            run,
            self._cluster,
            lambda: self.state,
            self.record,
            self._listener.send,
            step_peers,
            self._message_handler.worker_peers.get,
        )
        self._executor = Executor(
            self._cluster,
            self.record,
            step_control.prepare_launch,
            step_control.request_stop,
            self._fault_injector.inject,
            self._lease.check_in_thread,
            self._message_handler.standby_promoter.promote,
        )
        stack.push_async_callback(self._executor.close)
        if self._state is None:
            self.record(ev.RunStarted(run.id, self._spec))
        self.record(ev.ManagerStarted(socket.gethostname(), os.getpid(), job))
        if self._cancelled_early:
            self.cancel(self._cancelled_early)
        await self._apply_resume_request()
        await self._restore()
        write_atomically(run.manager, msgspec.json.encode(self._listener.address))
        stack.push_async_callback(self._cancel_exit_record_task)
        loops = (
            self._receive_loop(),
            _retry_forever(self._poller.run),
            self._renew_lease_loop(),
            _retry_forever(self._commands_loop),
        )
        self._background_tasks = [asyncio.create_task(loop) for loop in loops]
        stack.push_async_callback(_cancel_all, self._background_tasks)

    def leave(self, why: str) -> None:
        """Go without ending the run: its roles go on, the next manager adopts them."""
        self.leave_reason = why
        self._wake.set()

    def cancel(self, by: str) -> None:
        """End the run in order. Before this manager has begun, it is remembered until it has."""
        if self._state is None:
            self._cancelled_early = by
        else:
            self.record(ev.CommandReceived("cancel", by, f"signal-{self._lease.epoch}"))

    @property
    def state(self) -> State:
        assert self._state is not None
        return self._state

    def now(self) -> float:
        """Manager's time: wall clock at its start, going on monotonically."""
        return self._wall + time.monotonic() - self._epoch_began

    def record(self, event: ev.Event) -> None:
        """Journal (durable at the next flush), fold, and have the loop look at it."""
        seq = self._state.seq + 1 if self._state is not None else 1
        stamped = ev.Stamped(seq, self.now(), self._lease.epoch, event)
        _log.debug("event %d: %s", seq, type(event).__name__)
        self._journal.append(stamped)
        before, self._state = self._state, fold(self._state, stamped)
        self._observers.on_event(before, self._state, stamped)
        self._step_control.on_event(event)
        self._fault_injector.on_event(event)
        self._log_collector.on_event(event)
        if isinstance(event, ev.IntentSettled | ev.Admitted) or self._stopped_by_others(event):
            self._poller.poll_soon()
        elif isinstance(event, ev.FirstWorkDone) and event.incarnation.replica == TRAINER:
            self.record(ev.TokensCounted(self._tokens.total(), trainer_down=False))
        self._wake.set()

    def _stopped_by_others(self, event: ev.Event) -> bool:
        """Return whether a step that the manager wants was asked to end by somebody else, as before a preemption."""
        if not isinstance(event, ev.StepEnded) or event.reason is not ExitReason.STOPPED:
            return False
        return self.state.is_current(event.incarnation)

    # ── the turn ───────────────────────────────────────────────────────────────────────────────────────────────────
    async def _manage(self) -> Outcome | None:
        while self.leave_reason is None:
            for task in self._background_tasks:
                if task.done():
                    task.result()
            self._wake.clear()
            await (
                self._lease.ensure_current()
            )  # nothing is decided, and nobody told anything, by one that was succeeded
            self._detect_own_stall()
            self._poller.check_suspensions()
            next_detection = self._detect()
            wake, over = await self._act()
            if over:
                return await self._finish()
            await self._announce()
            delay = max(0.0, min(next_detection, wake) - self.now())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(delay, FLUSH_INTERVAL_S)):
                    await self._wake.wait()
            if time.monotonic() - self._flushed_at >= FLUSH_INTERVAL_S:
                await self._flush()
        self.record(ev.ManagerStopped(self.leave_reason))
        await self._flush()
        return None

    def _detect_own_stall(self) -> None:
        """A manager that was itself frozen cannot tell the world's silence from its own: everything counts anew."""
        now = self.now()
        if now - self._last_turn_at > self.state.job.limits.silence / 2:
            self._monitor.restart(now)
        self._last_turn_at = now
        monitored = {name for name, node in self.state.nodes.items() if node.allocation}
        # What was found on a node that has left stands until the lives that were there are fenced: from it they are
        # judged, and the time of their outage is counted.
        monitored |= {one.node for one in workers(self.state) if one.is_current and one.node is not None}
        for node in {*self._monitor.nodes, *self._message_handler.finding_gate.nodes} - monitored:
            self._clear_node(node)

    def _drop_node(self, node: NodeName) -> None:
        """What was heard and not heard of it counts no more."""
        for incarnation in self._monitor.incarnations_on(node):
            self._tokens.retire(incarnation)
        self._monitor.remove_node(node)

    def _clear_node(self, node: NodeName) -> None:
        """It has left, or begins anew: nor does what was found on it count."""
        self._drop_node(node)
        self._message_handler.finding_gate.forget(node)

    def _was_responsive(self, node: NodeName) -> bool:
        """It was not found to be silent or down. One that is left for another reason, be it a broken GPU, falls silent
        because it is left."""
        return all(finding.node != node or from_agent(finding) for finding in self.state.findings.values())

    def _detect(self) -> float:
        """Findings that changed become events. Returns when to look again."""
        limits, now = self.state.job.limits, self.now()
        detected, next_check = detect(self._monitor, limits, now)
        self._baseline_recorder.record_if_due(now)
        findings, suspected = self._hang_investigator.investigate(detected)
        if (token_age := token_ages.token_age_finding(self.state.token_ages, self.state.job.staleness)) is not None:
            findings = [*findings, token_age]
        silent, gone = (
            missing_heartbeats(findings, self._monitor, limits, now),
            silent_nodes(findings, self._monitor, limits, now),
        )
        return min(next_check, suspected, self._message_handler.finding_gate.on_detected(findings, silent, gone))

    async def _act(self) -> tuple[float, bool]:
        """Plan to the fixpoint, journal, then do. Returns the plan's wake and whether the run is over."""
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
                    self.record(ev.Decided(action))
                    if isinstance(action, Readmit):
                        self._clear_node(action.node)
                    elif isinstance(action, Exclude) and self._was_responsive(action.node):
                        self._drop_node(action.node)
                    fences = action.fences if isinstance(action, RestartAll) else (action,)
                    for fence in (one for one in fences if isinstance(one, Fence)):
                        await self._fence(fence)
        if (
            self._intended_actions and await self._flush()
        ):  # else they wait for the next turn: no deed without a durable intent
            todo, self._intended_actions = self._intended_actions, []
            for action in todo:
                self._executor.start(action)
        return planned.wake_at, planned.over

    def _update_monitor(self, action: ExternalAction) -> None:
        if isinstance(action, Launch):
            timeout_s = self.state.job.recovery.promote
            self._monitor.on_launched(action.incarnation, action.node, self.now(), action.standby, timeout_s)
        elif isinstance(action, StopStep):
            self._monitor.on_stop_requested(action.incarnation, self.now())

    async def _fence(self, action: Fence) -> None:
        self._tokens.retire(action.incarnation)
        self._monitor.remove(action.incarnation)
        if action.incarnation.replica == TRAINER:
            self.record(ev.TokensCounted(self._tokens.total(), trainer_down=True))
        await self._message_handler.fence(action.incarnation, "; ".join(action.why.evidence))

    async def _announce(self) -> None:
        """Push the wiring to every worker when it changed, but not more often than it is worth: it is sent whole."""
        directory = build_directory(self.state)
        if directory == self._sent_directory:
            return
        urgent = self._sent_directory is None or directory.without_versions != self._sent_directory.without_versions
        pause = (
            ANNOUNCE_INTERVAL_S
            if urgent
            else max(ANNOUNCE_INTERVAL_S, VERSION_ANNOUNCE_S_PER_WORKER * len(self._message_handler.worker_peers))
        )
        if self._announce_timer is not None:
            self._announce_timer.cancel()
        if (early := self._announced_at + pause - time.monotonic()) > 0:
            self._announce_timer = asyncio.get_running_loop().call_later(early, self._wake.set)
            return
        self._sent_directory, self._announced_at = directory, time.monotonic()
        self._directory_number += 1
        peers = [
            peer
            for incarnation, peer in self._message_handler.worker_peers.items()
            if self.state.is_current(incarnation)
        ]
        await self._listener.send_all(peers, directory.message(self.state.epoch, self._directory_number))

    def _welcome(self, incarnation: Incarnation) -> msg.Welcome:
        role = role_of(incarnation.replica)
        rank, world = (
            (0, 1) if role == STANDBY_ROLE else (rank_of(incarnation.replica), self.state.job.role(role).ranks)
        )
        peers = build_directory(self.state).message(self.state.epoch, self._directory_number)
        return msg.Welcome(incarnation, peers, rank, world, self.state.step)

    async def _flush(self) -> bool:
        """Make everything recorded durable. False when the run directory cannot be written: then nothing is done."""
        self._flushed_at = time.monotonic()
        try:
            await asyncio.to_thread(self._journal.flush)
            if self._journal.full:
                await asyncio.to_thread(self._journal.rotate, self.state)
        except OSError as error:
            _log.error("the journal cannot be written, so no action is taken: %s", error)
            return False
        return True

    # ── senses ─────────────────────────────────────────────────────────────────────────────────────────────────────
    async def _receive_loop(self) -> None:
        while True:
            incoming = await self._listener.receive()
            await self._lease.ensure_current()
            try:
                await self._message_handler.handle(incoming)
            except (OSError, ValueError, KeyError) as error:  # one message must not end the manager
                _log.warning("cannot handle a %s message: %r", type(incoming.message).__name__, error)

    def _after_poll(self) -> None:
        """Ends are read beside everything else: storage that hangs keeps nobody from being heard."""
        read = self._exit_record_task
        if read is None or read.done():
            self._exit_record_task = asyncio.create_task(self._message_handler.read_exit_records())
            if read is not None:
                read.result()
        self._wake.set()

    async def _renew_lease_loop(self) -> None:
        period, removed = self._spec.limits.lease / 5, 0
        while removed < MAX_RENEWALS_WITHOUT_RUN_DIR:
            await asyncio.sleep(period)
            try:
                await asyncio.to_thread(self._lease.renew)
                removed = 0
            except OSError as error:
                _log.warning("cannot renew the lease: %s", error)
                removed = removed + 1 if await asyncio.to_thread(self._run_dir.removed) else 0
        await self._abandon()

    async def _abandon(self) -> None:
        """Nobody can manage this run any more: nothing may be left of it. What no release reaches, its agents end."""
        for tag in reversed(self.state.allocations):  # of a heterogeneous job its first component ends all others
            try:
                await self._cluster.release(tag)
            except (Refused, Unanswered) as error:
                _log.warning("cannot release allocation %s: %s", tag, error)
        self.leave("its run directory was removed")

    async def _commands_loop(self) -> None:
        while True:
            for command in await asyncio.to_thread(pending_commands, self._run_dir):
                if command.id not in self.state.handled_commands:
                    for event in to_events(command, self.state):
                        self.record(event)
                if await self._flush():
                    await asyncio.to_thread(acknowledge, self._run_dir, command)
            await asyncio.sleep(COMMAND_POLL_S)

    async def _apply_resume_request(self) -> None:
        """The run may have ended, and a person have ordered that it goes on. Nothing of it lives that could see its
        files change."""
        request = await asyncio.to_thread(resume_request.claim, self._run_dir)
        if request is None:
            return
        if request.id not in self.state.handled_commands:  # else a predecessor recorded it, and came no further
            if self.state.outcome is None or request.ended != self.state.ended:
                why = "the run is already running, or has ended again since the request"
                _log.warning("ignored resume request by %s: %s", request.by, why)
                await asyncio.to_thread(resume_request.discard, self._run_dir)
                return
            self.record(ev.Resumed(request.by, request.id, request.job))
            await asyncio.to_thread(self._journal.flush)
        self._run_dir.summary.unlink(missing_ok=True)
        await asyncio.to_thread(resume_request.install, self._run_dir)

    # ── the beginning ──────────────────────────────────────────────────────────────────────────────────────────────
    async def _restore(self) -> None:
        """Everything believed is believed to live, with full grace from now; open intents go on being settled."""
        restore_monitor(self._monitor, self.state, self.now())
        self._baseline_recorder = BaselineRecorder(self._monitor, self.state.baselines, self.record)
        for replica in self.state.replicas.values():
            if replica.is_current and replica.node is not None and replica.step is None:
                self._message_handler.restore_step_end(
                    replica.incarnation
                )  # its end is recorded, and nothing was concluded from it yet
        await self._message_handler.read_exit_records()
        self._message_handler.finding_gate.restore()
        for intent in list(self.state.intents.values()):
            if isinstance(intent.action, StopStep | Release | Drain | Undrain | Shrink):
                self._executor.start(intent.action)
            elif isinstance(intent.action, InjectFault):
                self.record(interrupted_event(intent.action, self.state.epoch))
            elif isinstance(intent.action, Request):
                self._poller.poll_soon()

    # ── the end ────────────────────────────────────────────────────────────────────────────────────────────────────
    async def _finish(self) -> Outcome:
        """Everything is given back: the last record, the summary, and no address to be found at any more."""
        verdict = self.state.finish
        assert verdict is not None
        if self.state.outcome is None:
            self.record(ev.RunEnded(verdict.outcome, final_reason(self.state)))
        while not await self._flush():
            await asyncio.sleep(FLUSH_INTERVAL_S)
        await asyncio.to_thread(self._journal.rotate, self.state)
        await asyncio.to_thread(write_summary, self._run_dir)
        for address in (self._run_dir.manager, self._run_dir.log_collector):
            address.unlink(missing_ok=True)
        return verdict.outcome

    async def _cancel_exit_record_task(self) -> None:
        if self._exit_record_task is not None:
            await _cancel_all([self._exit_record_task])

    def _close_journal(self) -> None:
        try:
            self._journal.close()
        except OSError as error:
            _log.error("the newest journal records cannot be written: %s", error)

    async def _release_lease(self) -> None:
        with contextlib.suppress(LeaseLost, OSError):  # a successor took over, or storage is away: it is waited out
            await self._lease.check_in_thread()
            await asyncio.to_thread(self._lease.release)


async def _cancel_all(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _retry_forever(loop: Callable[[], Awaitable[None]]) -> None:
    """Storage or a cluster that misbehaves must not end the manager: log it, and go on after a moment."""
    while True:
        try:
            await loop()
        except (OSError, ValueError, KeyError, msgspec.MsgspecError):
            _log.exception("a periodic task of the manager failed; trying again in %g s", FAST_POLL_S)
        await asyncio.sleep(FAST_POLL_S)
