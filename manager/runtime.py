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
from ..core.run_spec import JobView
from ..core.types import SHADOW, TRAINER, Life, NodeName, Outcome, rank_of, role_of
from ..health.detection.detect import detect
from ..health.detection.detectors.liveness import unheard
from ..health.detection.detectors.node_liveness import absent
from ..health.detection.watch import Watch
from ..transport import messages as msg
from ..transport.control.endpoints import Listener
from ..transport.control.sockets import TO_MANAGER
from ..transport.keys import RunKeys
from .cluster.base import Cluster, Refused, Unanswered
from .execute import fault_injection
from .execute.executor import Deeds, Executor
from .execute.fault_injection import Performer, abandoned
from .intake.cluster_poller import HUNGRY, Eye
from .intake.finding_gate import Lessons, inherit, of_agent
from .intake.hang_investigation import Suspicion
from .intake.message_handler import Ear, explained
from .intake.user_commands import events_of, letters, taken
from .model import events as ev
from .model import token_ages
from .model.actions import (  # fmt: skip
    Drain,
    Exclude,
    Fence,
    Launch,
    Outside,
    Perform,
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
from .planner.peer_directory import Wiring, wire
from .planner.shutdown import said_at_the_end
from .reporting.log_collector import LogCollector
from .reporting.metrics import Tokens
from .reporting.observers import Onlookers
from .reporting.summary import write_summary
from .storage import resume_request
from .storage.journal import Journal
from .storage.lease import Lease, LeaseLost

_log = logging.getLogger("rrl.manager")

REMOVED = 10
"""tries to renew the lease, two leases in all, that find no run directory: then it was removed for good"""
ANNOUNCE = 0.05
"""s between two announcements of who lives and who holds which weights: each goes to everybody, whole"""
HOLDS = 0.008
"""s for each worker, where nothing is new but which version a receiver holds: an announcement to 1,024 of them is
172 MB in all, and each new version would be worth a thousand"""
MAILBOX = 0.5
"""s between two looks into the mailbox"""
FLUSH = 0.5
"""s that an event which nothing waits for may stay unwritten"""


class Manager:
    """One epoch of one run. :meth:`run` returns how the run ended, or None when this manager left before it did."""

    def __init__(self, run: RunDir, cluster: Cluster, view: JobView, source: str, host: str) -> None:
        self._run_dir, self._cluster, self._view, self._source, self._host = run, cluster, view, source, host
        self._watch = Watch()
        self._tokens = Tokens(self._watch)
        self._wake = asyncio.Event()
        self._eye = Eye(
            cluster, self._watch, lambda: self.state, lambda event: self.record(explained(run, event)), self.now,
            lambda: self._executor.busy, self._looked,
        )  # fmt: skip
        self._wired: Wiring | None = None
        self._sent = 0
        self._announced = 0.0
        self._again: asyncio.TimerHandle | None = None
        """for the next announcement, where it is too early for it"""
        self.leaving: str | None = None
        """why this manager leaves before the run's end"""
        self._state: State | None = None
        self._epoch_began = time.monotonic()
        self._wall = time.time()
        self._turned = self._wall
        """when the loop last turned"""
        self._flushed = 0.0
        self._cancelled_early = ""
        self._senses: list[asyncio.Task[None]] = []
        self._reading: asyncio.Task[None] | None = None
        """of exit records"""
        self._todo: list[Outside] = []
        """intended, not yet known to be durable"""

    # ── one life of a manager ──────────────────────────────────────────────────────────────────────────────────────
    async def run(self, job: str = "") -> Outcome | None:
        """Claim the run, adopt what lives, and manage it to its end. Raises LeaseHeld, JournalError, OSError."""
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self._cluster.close)
            await asyncio.to_thread(fault_injection.give_back, self._run_dir)  # of a manager that died over a full disk
            self._lease = await Lease.acquire(self._run_dir, self._view.limits.lease, job)
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
        self._turned = self.now()
        self._onlookers = Onlookers(run, self._view, self._lease, self._journal, self.now, self._tokens.total)
        stack.push_async_callback(self._onlookers.close)
        self._listener = await Listener.open(
            RunKeys.load(run.keys), msg.Up, epoch=self._lease.epoch, host=self._host, bounds=TO_MANAGER
        )
        stack.push_async_callback(self._listener.close)
        self._logs = await LogCollector.open(
            run, RunKeys.load(run.keys), self._lease.epoch, self._host, lambda: self._state
        )
        stack.push_async_callback(self._logs.close)
        steps: dict[str, bytes] = {}
        deeds = Deeds(run, self._cluster, self._source, lambda: self.state, self._listener.send, steps)
        self._deeds = deeds
        self._ear = Ear(
            run, self._watch, lambda: self.state, self.record, self._listener.send, self.now, self._welcome,
            deeds.step_spoke, steps,
        )  # fmt: skip
        self._suspicion = Suspicion(
            run, self._watch, lambda: self.state, self.record, self._listener.send, self.now, self._ear.workers, steps
        )
        self._ear.answered = self._suspicion.heard
        stack.push_async_callback(self._suspicion.close)
        self._performer = Performer(
            run, self._cluster, lambda: self.state, self.record, self._listener.send, steps, self._ear.workers.get
        )
        self._executor = Executor(
            self._cluster,
            self.record,
            deeds.prepare,
            deeds.tell_step,
            self._performer.perform,
            self._lease.checked,
            self._ear.adoptions.adopt,
        )
        stack.push_async_callback(self._executor.close)
        if self._state is None:
            self.record(ev.RunStarted(run.id, self._view))
        self.record(ev.ManagerStarted(socket.gethostname(), os.getpid(), job))
        if self._cancelled_early:
            self.cancel(self._cancelled_early)
        await self._resume()
        await self._adopt()
        write_atomically(run.manager, msgspec.json.encode(self._listener.address))
        stack.push_async_callback(self._stop_reading)
        senses = (self._hear(), _again(self._eye.watch), self._renew(), _again(self._mailbox))
        self._senses = [asyncio.create_task(sense) for sense in senses]
        stack.push_async_callback(_cancelled, self._senses)

    def leave(self, why: str) -> None:
        """Go without ending the run: its roles go on, the next manager adopts them."""
        self.leaving = why
        self._wake.set()

    def cancel(self, by: str) -> None:
        """End the run in order. Before this manager has begun, it is remembered until it has."""
        if self._state is None:
            self._cancelled_early = by
        else:
            self.record(ev.Commanded("cancel", by, f"signal-{self._lease.epoch}"))

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
        self._onlookers.notice(before, self._state, stamped)
        self._deeds.notice(event)
        self._performer.notice(event)
        self._logs.notice(event)
        if isinstance(event, ev.Done | ev.Admitted) or self._stopped_by_others(event):
            self._eye.soon()
        elif isinstance(event, ev.FirstWorkDone) and event.life.replica == TRAINER:
            self.record(ev.TokensSeen(self._tokens.total(), away=False))
        self._wake.set()

    def _stopped_by_others(self, event: ev.Event) -> bool:
        """Return whether a step that the manager wants was asked to end by somebody else, as before a preemption."""
        if not isinstance(event, ev.StepEnded) or event.reason is not ExitReason.STOPPED:
            return False
        return self.state.believed(event.life)

    # ── the turn ───────────────────────────────────────────────────────────────────────────────────────────────────
    async def _manage(self) -> Outcome | None:
        while self.leaving is None:
            for task in self._senses:
                if task.done():
                    task.result()
            self._wake.clear()
            await self._lease.heed()  # nothing is decided, and nobody told anything, by one that was succeeded
            self._notice_own_pause()
            self._eye.consider()
            look_again = self._detect()
            wake, over = await self._act()
            if over:
                return await self._finish()
            await self._announce()
            delay = max(0.0, min(look_again, wake) - self.now())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(delay, FLUSH)):
                    await self._wake.wait()
            if time.monotonic() - self._flushed >= FLUSH:
                await self._flush()
        self.record(ev.ManagerStopped(self.leaving))
        await self._flush()
        return None

    def _notice_own_pause(self) -> None:
        """A manager that was itself frozen cannot tell the world's silence from its own: everything counts anew."""
        now = self.now()
        if now - self._turned > self.state.job.limits.silence / 2:
            self._watch.restart(now)
        self._turned = now
        kept = {name for name, node in self.state.nodes.items() if node.allocation}
        # What was found on a node that has left stands until the lives that were there are fenced: from it they are
        # judged, and the time of their outage is counted.
        kept |= {one.node for one in workers(self.state) if one.believed and one.node is not None}
        for node in {*self._watch.nodes, *self._ear.findings.nodes} - kept:
            self._is_over(node)

    def _forget_node(self, node: NodeName) -> None:
        """What was heard and not heard of it counts no more."""
        for life in self._watch.on(node):
            self._tokens.ends(life)
        self._watch.forget_node(node)

    def _is_over(self, node: NodeName) -> None:
        """It has left, or begins anew: nor does what was found on it count."""
        self._forget_node(node)
        self._ear.findings.forget(node)

    def _heard(self, node: NodeName) -> bool:
        """It was not found to be silent or down. One that is left for another reason, be it a broken GPU, falls silent
        because it is left."""
        return all(finding.node != node or of_agent(finding) for finding in self.state.findings.values())

    def _detect(self) -> float:
        """Findings that changed become events. Returns when to look again."""
        limits, now = self.state.job.limits, self.now()
        detected, again = detect(self._watch, limits, now)
        self._lessons.consider(now)
        findings, suspected = self._suspicion.consider(detected)
        if (old := token_ages.finding(self.state.token_ages, self.state.job.staleness)) is not None:
            findings = [*findings, old]
        silent, gone = unheard(findings, self._watch, limits, now), absent(findings, self._watch, limits, now)
        return min(again, suspected, self._ear.findings.detected(findings, silent, gone))

    async def _act(self) -> tuple[float, bool]:
        """Plan to the fixpoint, journal, then do. Returns the plan's wake and whether the run is over."""
        while True:
            planned = plan(self.state, self.now())
            if not planned.actions:
                break
            for action in planned.actions:
                if isinstance(action, Outside):
                    self.record(ev.Intended(action))
                    self._todo.append(action)
                    self._tell_watch(action)
                else:
                    self.record(ev.Decided(action))
                    if isinstance(action, Readmit):
                        self._is_over(action.node)
                    elif isinstance(action, Exclude) and self._heard(action.node):
                        self._forget_node(action.node)
                    fences = action.fences if isinstance(action, RestartAll) else (action,)
                    for fence in (one for one in fences if isinstance(one, Fence)):
                        await self._fence(fence)
        if self._todo and await self._flush():  # else they wait for the next turn: no deed without a durable intent
            todo, self._todo = self._todo, []
            for action in todo:
                self._executor.start(action)
        return planned.wake, planned.over

    def _tell_watch(self, action: Outside) -> None:
        if isinstance(action, Launch):
            within = self.state.job.recovery.adopt
            self._watch.launched(action.life, action.node, self.now(), action.shadow, within)
        elif isinstance(action, StopStep):
            self._watch.leaving(action.life, self.now())

    async def _fence(self, action: Fence) -> None:
        self._tokens.ends(action.life)
        self._watch.forget(action.life)
        if action.life.replica == TRAINER:
            self.record(ev.TokensSeen(self._tokens.total(), away=True))
        await self._ear.fence(action.life, "; ".join(action.why.evidence))

    async def _announce(self) -> None:
        """Push the wiring to every worker when it changed, but not more often than it is worth: it is sent whole."""
        wiring = wire(self.state)
        if wiring == self._wired:
            return
        urgent = self._wired is None or wiring.urgent != self._wired.urgent
        pause = ANNOUNCE if urgent else max(ANNOUNCE, HOLDS * len(self._ear.workers))
        if self._again is not None:
            self._again.cancel()
        if (early := self._announced + pause - time.monotonic()) > 0:
            self._again = asyncio.get_running_loop().call_later(early, self._wake.set)
            return
        self._wired, self._announced = wiring, time.monotonic()
        self._sent += 1
        told = [peer for life, peer in self._ear.workers.items() if self.state.believed(life)]
        await self._listener.send_all(told, wiring.message(self.state.epoch, self._sent))

    def _welcome(self, life: Life) -> msg.Welcome:
        role = role_of(life.replica)
        rank, world = (0, 1) if role == SHADOW else (rank_of(life.replica), self.state.job.role(role).ranks)
        peers = wire(self.state).message(self.state.epoch, self._sent)
        return msg.Welcome(life, peers, rank, world, self.state.step)

    async def _flush(self) -> bool:
        """Make everything recorded durable. False when the run directory cannot be written: then nothing is done."""
        self._flushed = time.monotonic()
        try:
            await asyncio.to_thread(self._journal.flush)
            if self._journal.full:
                await asyncio.to_thread(self._journal.rotate, self.state)
        except OSError as error:
            _log.error("the journal cannot be written, so no action is taken: %s", error)
            return False
        return True

    # ── senses ─────────────────────────────────────────────────────────────────────────────────────────────────────
    async def _hear(self) -> None:
        while True:
            incoming = await self._listener.receive()
            await self._lease.heed()
            try:
                await self._ear.hear(incoming)
            except (OSError, ValueError, KeyError) as error:  # one message must not end the manager
                _log.warning("cannot handle a %s message: %r", type(incoming.message).__name__, error)

    def _looked(self) -> None:
        """Ends are read beside everything else: storage that hangs keeps nobody from being heard."""
        read = self._reading
        if read is None or read.done():
            self._reading = asyncio.create_task(self._ear.exit_records())
            if read is not None:
                read.result()
        self._wake.set()

    async def _renew(self) -> None:
        period, removed = self._view.limits.lease / 5, 0
        while removed < REMOVED:
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

    async def _mailbox(self) -> None:
        while True:
            for letter in await asyncio.to_thread(letters, self._run_dir):
                if letter.id not in self.state.commands:
                    for event in events_of(letter, self.state):
                        self.record(event)
                if await self._flush():
                    await asyncio.to_thread(taken, self._run_dir, letter)
            await asyncio.sleep(MAILBOX)

    async def _resume(self) -> None:
        """The run may have ended, and a person have ordered that it goes on. Nothing of it lives that could see its
        files change."""
        order = await asyncio.to_thread(resume_request.take, self._run_dir)
        if order is None:
            return
        if order.id not in self.state.commands:  # else a predecessor recorded it, and came no further
            if self.state.outcome is None or order.ended != self.state.ended:
                why = "the run is already running, or has ended again since the request"
                _log.warning("ignored resume request by %s: %s", order.by, why)
                await asyncio.to_thread(resume_request.drop, self._run_dir)
                return
            self.record(ev.Resumed(order.by, order.id, order.job))
            await asyncio.to_thread(self._journal.flush)
        self._run_dir.summary.unlink(missing_ok=True)
        await asyncio.to_thread(resume_request.place, self._run_dir)

    # ── the beginning ──────────────────────────────────────────────────────────────────────────────────────────────
    async def _adopt(self) -> None:
        """Everything believed is believed to live, with full grace from now; open intents go on being settled."""
        inherit(self._watch, self.state, self.now())
        self._lessons = Lessons(self._watch, self.state.lessons, self.record)
        for replica in self.state.replicas.values():
            if replica.believed and replica.node is not None and replica.step is None:
                self._ear.ended_before(replica.life)  # its end is recorded, and nothing was concluded from it yet
        await self._ear.exit_records()
        self._ear.findings.adopt()
        for intent in list(self.state.intents.values()):
            if isinstance(intent.action, StopStep | Release | Drain | Undrain | Shrink):
                self._executor.start(intent.action)
            elif isinstance(intent.action, Perform):
                self.record(abandoned(intent.action, self.state.epoch))
            elif isinstance(intent.action, Request):
                self._eye.soon()

    # ── the end ────────────────────────────────────────────────────────────────────────────────────────────────────
    async def _finish(self) -> Outcome:
        """Everything is given back: the last record, the summary, and no address to be found at any more."""
        verdict = self.state.verdict
        assert verdict is not None
        if self.state.outcome is None:
            self.record(ev.RunEnded(verdict.outcome, said_at_the_end(self.state)))
        while not await self._flush():
            await asyncio.sleep(FLUSH)
        await asyncio.to_thread(self._journal.rotate, self.state)
        await asyncio.to_thread(write_summary, self._run_dir)
        for address in (self._run_dir.manager, self._run_dir.collector):
            address.unlink(missing_ok=True)
        return verdict.outcome

    async def _stop_reading(self) -> None:
        if self._reading is not None:
            await _cancelled([self._reading])

    def _close_journal(self) -> None:
        try:
            self._journal.close()
        except OSError as error:
            _log.error("the newest journal records cannot be written: %s", error)

    async def _release_lease(self) -> None:
        with contextlib.suppress(LeaseLost, OSError):  # a successor took over, or storage is away: it is waited out
            await self._lease.checked()
            await asyncio.to_thread(self._lease.release)


async def _cancelled(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _again(sense: Callable[[], Awaitable[None]]) -> None:
    """Storage or a cluster that misbehaves must not end the manager: log it, and go on after a moment."""
    while True:
        try:
            await sense()
        except (OSError, ValueError, KeyError, msgspec.MsgspecError):
            _log.exception("a periodic task of the manager failed; trying again in %g s", HUNGRY)
        await asyncio.sleep(HUNGRY)
