"""The background thread of a worker, which exchanges all messages while the role's code computes, perhaps for minutes.

One asyncio loop in one daemon thread runs the connection to the manager, the requests to the trajectory store, the
weight transfers and the heartbeats. The worker API uses the thread through blocking calls
(:meth:`ManagerConnection.call`) and a few attributes.

A standby process has only the connection to the manager and the heartbeats. When it is promoted, it takes over the new
incarnation, sends a Hello as this incarnation with the tag of its own step, and opens the other connections. Its
process and its connection to the manager remain; no heartbeat is skipped.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from functools import partial
from math import inf
from typing import Any, TypeVar

import msgspec

from ...core.launch import Launch
from ...core.phases import STANDBY
from ...core.run_dir import RunDir
from ...core.run_spec import RoleTraits, TransportSpec
from ...core.types import Incarnation, NodeName, ReplicaId, Version, WeightTraffic, is_trainer, member_id
from ...transport import messages as msg
from ...transport.control.endpoints import Address, Dialer
from ...transport.keys import RunKeys
from ...transport.streams.connection import TransportError
from ...transport.weights.base import WeightTransport
from ...transport.weights.deltas import Deltas
from ...transport.weights.manifest import Manifest
from ...transport.weights.pull import AdaptiveTimeout, PullFailed, WeightSource, pull, select_sources
from ...transport.weights.select import open_transport
from ...transport.weights.store import StoredVersion, WeightStore
from ..launcher.environment import ADDRESS_ENV
from ..launcher.gpus import assigned_gpus_with_timeout
from ..launcher.process_group import select_gpus
from ..trajectories.client import Refused, TrajectoryClient, store_address
from ..trajectories.types import FollowVersions, GetMetrics, NewestVersion, StepMetrics
from .commit_reports import CommitReports
from .main_thread import ProbeResponder, SelfFaults
from .status.work_status import WorkStatus

_log = logging.getLogger("rrl.worker")

FENCED_EXIT = 81
"""Exit code of a worker that was fenced."""
PHASE_REPORT_DELAY_S = 0.25
"""Seconds that a phase must last before it is reported in its own message; heartbeats may report shorter phases."""
WELCOME_TIMEOUT_S = 600.0
"""Seconds for a manager to welcome a worker: longer than Slurm takes to requeue a manager (120 s)."""
STOPPING_STORE_TIMEOUT_S = 0.5
"""Seconds for which a role still waits for the store after its stop was requested."""
MAX_DROPPED_VERSIONS = 2
"""Number of pulls in a row that are dropped for a newer version before the publisher becomes the first source."""
REFUSED_PAUSE_S = 1.0
"""Seconds before this process requests the weight versions again after the store refused its incarnation."""
STANDBY_POLL_S = 0.5
"""Seconds between two checks of a waiting standby for a stop by SIGTERM; a message of the manager needs no check."""
OFFER_POLL_S = 0.05
"""Seconds between two requests for a manifest that another member of the gang does not offer yet. The request itself
waits too (:data:`rrl.transport.weights.protocol.UNKNOWN_VERSION_TIMEOUT_S`)."""
CLOCK_REPORT_INTERVAL_S = 5.0
"""Minimum time (s) between two heartbeats that also report the clock."""

T = TypeVar("T")


class Superseded(PullFailed):
    """A pull is dropped because its source failed and a newer version is available."""


class WeightSources:
    """Which weight version a rollout pulls next, and from where. Used by one asyncio loop only.

    The manager's ``Peers`` has the addresses of all processes that serve weights (the relay chains are derived from
    this list), and no fenced incarnation. The store names the newest version and the processes that serve it.
    """

    def __init__(self) -> None:
        self._addresses: dict[Incarnation, str] = {}
        self._newest: NewestVersion | None = None

    def on_peers(self, peers: msg.Peers) -> None:
        """Record the manager's newest ``Peers``; the caller drops outdated messages."""
        self._addresses = {one.incarnation: one.weight_address for one in peers.peers.values() if one.weight_address}

    def on_newest_version(self, newest: NewestVersion | None) -> None:
        """Record the store's answer. None, which a store returns after a restart, changes nothing."""
        self._newest = newest or self._newest

    @property
    def newest(self) -> Version | None:
        """The newest version that a process serves whose address is known; None if there is none."""
        newest = self._newest
        served = newest is not None and any(not self._addresses.keys().isdisjoint(one) for _, one in newest.sources)
        return newest.version if newest is not None and served else None

    def sources(self) -> tuple[WeightSource, ...]:
        """Return every process that serves weights, with its versions if it has reported the newest version."""
        groups = () if self._newest is None else self._newest.sources
        held = {source: versions for versions, sources in groups for source in sources}
        return tuple(WeightSource(one, address, held.get(one, ())) for one, address in self._addresses.items())


class Stopping(Exception):
    """A stop of this role was requested. The ``with`` block of :class:`rrl.Worker` suppresses this exception."""


class ManagerConnection:
    """The worker's connection to the manager, the store and the weight sources.

    Public attributes are written by the connection's thread and read by the worker's threads.
    """

    def __init__(
        self, launch: Launch, run: RunDir, keys: RunKeys, heartbeat: float, transport: TransportSpec, traits: RoleTraits
    ) -> None:
        self.launch, self.run, self.keys = launch, run, keys
        """``launch.incarnation`` is the sender of every message; a promotion replaces it."""
        self.rank, self.world = 0, 1
        """Rank and number of ranks from the manager's Welcome."""
        self.peers: msg.Peers | None = None
        self.stopping = threading.Event()
        self.node = NodeName(os.environ.get("SLURMD_NODENAME") or launch.node)
        self.host = os.environ.get(ADDRESS_ENV, "127.0.0.1")
        """The address on which this process listens; the launcher of its step chose it."""
        self.weights = WeightStore()
        self.deltas = Deltas(transport.delta)
        self.faults = SelfFaults(launch, self.node, self.send, lambda after, do: self._loop.call_later(after, do))
        self.probes = ProbeResponder(self.send)
        self._heartbeat_interval, self._transport_settings = heartbeat, transport
        self._traits = traits
        self.status = WorkStatus(STANDBY if launch.standby else "starting")
        self._reported_phase, self._clock_sent_at = "", -inf
        self._listen_address: str | None = None
        self._rendezvous_address: str | None = None
        self._weight_address: str | None = None
        self._peers_callbacks: list[Callable[[msg.Peers], None]] = []
        self._welcomed, self._new_version = threading.Event(), threading.Event()
        self._standby_over = threading.Event()
        """Set when a standby stops waiting: it was promoted, it was asked to stop, or its connection failed."""
        self._loop = _open_loop(self)
        self._thread = threading.Thread(target=self._main, name="rrl-connection", daemon=True)
        self._failure: BaseException | None = None
        self._store: TrajectoryClient | None = None
        self._weight_sources = WeightSources()
        self._sources_changed = asyncio.Event()
        """Set when the manager reported addresses, or the store a version or its sources."""
        self._served_version_changed = asyncio.Event()
        """Set when this process starts to serve a version."""

    # ── for the worker's thread ────────────────────────────────────────────────────────────────────────────────────
    def start(self) -> None:
        """Start the thread and wait for the manager's Welcome. A standby waits for the Welcome after its promotion.

        Raises Stopping if a standby is stopped before its promotion, TimeoutError after :data:`WELCOME_TIMEOUT_S`, or
        the error with which the connection could not be started.
        """
        self._thread.start()
        while self.launch.standby and not self._standby_over.wait(STANDBY_POLL_S) and not self.stopping.is_set():
            pass
        if self.launch.standby and self._failure is None:
            raise Stopping
        if not self._welcomed.wait(WELCOME_TIMEOUT_S):
            raise TimeoutError(f"no manager answered in {WELCOME_TIMEOUT_S:g} s; see rrl status {self.run.id}")
        if self._failure is not None:
            raise self._failure

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the connection's loop and return its result."""
        return self.submit(coroutine).result()

    def call_store(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a store request like :meth:`call`, and wait for it as :meth:`await_store` does."""
        return self.await_store(self.submit(coroutine))

    def await_store(self, pending: Future[T]) -> T:
        """Return the result of a submitted store request; until then, heartbeats report a wait for the store.

        Raises Stopping if a stop was requested and the store, which may have stopped already, does not answer.
        """
        with self.status.store_call():
            return self.await_result(pending)

    def await_result(self, pending: Future[T]) -> T:
        """Return the result of a submitted request to another process, which may not answer.

        Raises Stopping if a stop was requested and there is no answer.
        """
        while True:
            stopping = self.stopping.is_set()
            try:
                return pending.result(STOPPING_STORE_TIMEOUT_S)
            except TimeoutError:
                if pending.done():  # the request itself timed out, or its result arrived at this moment
                    return pending.result()
                self.faults.trigger()
                self.probes.answer()
                if stopping:
                    pending.cancel()
                    raise Stopping from None

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine in the connection's loop, and return a future of its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call_soon(self, callback: Callable[..., None], *args: Any) -> None:
        """Call ``callback`` in the connection's thread, without waiting for it."""
        self._loop.call_soon_threadsafe(callback, *args)

    def set_phase(self, phase: str, waits_for: ReplicaId | None = None, idle_cause: str | None = None) -> None:
        """Enter a phase; the arguments have the meaning of the fields of :class:`CurrentPhase`."""
        self.status.enter(phase, waits_for, idle_cause)
        self.call_soon(self._schedule_phase_report, phase)

    def progress(self, units: int) -> None:
        """Add ``units`` of finished work, and report the first unit to the manager at once."""
        self.faults.trigger(working=True)
        self.probes.answer()
        self.count(units)

    def count(self, units: int) -> None:
        """Add ``units`` of finished work like :meth:`progress`, but in a thread that is not the role's."""
        if self.status.add_done(units):
            self.send(msg.FirstWorkDone(self.launch.incarnation))

    def send(self, message: Any) -> None:
        """Send a message to the manager without waiting."""
        asyncio.run_coroutine_threadsafe(self._dialer.send(message), self._loop)

    def announce(self, listens: str) -> None:
        """Report ``listens`` as the address of this replica's service."""
        self._listen_address = listens
        self.call_soon(self._resend_hello)

    def announce_rendezvous(self, address: str) -> None:
        """Report ``address`` as that of the store at which the members of this gang meet."""
        self._rendezvous_address = address
        self.call_soon(self._resend_hello)

    def on_commit(self, steps: Sequence[StepMetrics]) -> None:
        """Report the steps of a commit that this process has made."""
        self.call_soon(self._commits.on_commit, steps)

    def on_commit_found(self, step: int) -> None:
        """Report a step that the store lists as committed, because the manager may not have recorded it yet."""
        self.call_soon(self._commits.on_found, step)

    def announce_version(self, version: Version) -> None:
        """Report to the manager and the store that ``version`` is complete and served by this process."""
        first = not self._new_version.is_set()
        self._new_version.set()
        self.call_soon(self._served_version_changed.set)
        if first or self._traits.trains:  # the heartbeats report the later versions of a rollout
            self.call_soon(self._send_if_connected, msg.VersionAvailable(self.launch.incarnation, version))

    def wait_version(self, timeout: float) -> StoredVersion | None:
        """Return the newest complete version; wait up to ``timeout`` seconds for the first one."""
        if self.weights.current() is None:
            self._new_version.wait(timeout)
        return self.weights.current()

    def on_peers(self, callback: Callable[[msg.Peers], None]) -> None:
        """Call ``callback`` in the connection's thread with the current peer directory, if any, and every later one."""
        self._peers_callbacks.append(callback)
        self.call_soon(self._call_back, callback)

    def close(self) -> None:
        """Close all connections and end the thread."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(timeout=10)
            self.call_soon(self._loop.stop)
            self._thread.join(timeout=10)

    @property
    def store(self) -> TrajectoryClient:
        """The client of the trajectory store.

        Raises:
            RuntimeError: This process has not joined the run yet, or is a standby that is not promoted yet.
        """
        if self._store is None:
            raise RuntimeError("this process has not joined the run yet: use `me` inside `with rrl.join() as me:`")
        return self._store

    # ── in the loop's thread ───────────────────────────────────────────────────────────────────────────────────────
    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._open())
        except BaseException as error:
            self._failure = error
            self._welcomed.set()
            self._standby_over.set()
            return
        self._loop.run_forever()

    async def _open(self) -> None:
        self._gpus = await assigned_gpus_with_timeout()
        self._weight_transport: WeightTransport | None = None
        self._tasks: list[asyncio.Task[Any]] = []
        self._dialer = Dialer(self.keys, msg.FromManager, self._find_manager, lambda: [self._hello()])
        self._commits = CommitReports(self._report_commit, lambda: self._dialer.connected, self._commits_after)
        await self._open_weight_transport()
        if not self.launch.standby:
            self._open_store()
        self._spawn(self._dialer.run(), self._receive_loop(), self._heartbeat_loop(), self._commits.run())

    async def _open_weight_transport(self) -> None:
        """Open the transport that pulls weights from other replicas and serves this process's weights.

        A standby opens it after its promotion, because it has no GPUs until then.
        """
        if not self._traits.has_weights or self.launch.standby:
            return
        settings = self._transport_settings
        self._weight_transport = open_transport(
            settings.weights, self.keys.secret, host=self.host, trusted_network=settings.trusted_network
        )
        self._weight_address = await self._weight_transport.serve(self.weights, self.host)
        self._spawn(self._exchange_versions())  # before this task runs, the caller opens the store's client
        if self._traits.gets_weights:
            self._spawn(self._follow_weights(self._weight_transport))

    def _open_store(self) -> None:
        # No timeout: the manager decides about an unreachable store. A worker that gave up would be a second failure.
        self._store = TrajectoryClient(
            self.keys, self.launch.incarnation, self._find_store, timeout=inf, weights=self._weights_step
        )
        self._spawn(self._store.run())

    def _spawn(self, *coroutines: Coroutine[Any, Any, None]) -> None:
        for coroutine in coroutines:
            task = self._loop.create_task(coroutine)
            task.add_done_callback(_die_on_error)
            self._tasks.append(task)

    async def _promote(self, promotion: msg.Promote) -> None:
        """Take over the incarnation of ``promotion``, which later messages name; ignore a repeated promotion."""
        if not self.launch.standby or (promotion.standby, promotion.tag) != (self.launch.incarnation, self.launch.tag):
            return
        _log.info("%s is promoted to %s", self.launch.incarnation, promotion.incarnation)
        self.launch = msgspec.structs.replace(self.launch, incarnation=promotion.incarnation, standby=False)
        self.faults.launch = self.launch
        self._gpus = select_gpus(promotion.gpus, self._gpus)
        self.status.restart("starting")
        self.peers = None  # the standby's peer directory may be hours old; the Welcome brings the current one
        self._weight_sources = WeightSources()
        self._open_store()
        if self._dialer.connected:  # if not, the next connection starts with the Hello
            await self._dialer.send(self._hello())
        self._spawn(self._open_weight_transport_late())
        self._standby_over.set()

    async def _open_weight_transport_late(self) -> None:
        """Open the weight transport in a task of its own, so that a slow fabric does not delay the Welcome."""
        await self._open_weight_transport()
        self._resend_hello()

    async def _close(self) -> None:
        if self._dialer.connected and not self.launch.standby:
            await self._send_clock()  # the last report of the clock
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._weight_transport is not None:
            await self._weight_transport.close()
        if self._store is not None:
            await self._store.close()
        await self._dialer.close()

    def _hello(self) -> msg.Hello:
        self._reported_phase, _ = self.status.reported_phase()
        self._commits.on_hello()
        return msg.Hello(
            incarnation=self.launch.incarnation,
            tag=self.launch.tag,
            node=self.node,
            host=socket.gethostname(),
            pid=os.getpid(),
            phase=self._reported_phase,
            listen_address=self._listen_address,
            rendezvous_address=self._rendezvous_address,
            weight_address=self._weight_address,
            weight_version=self._held_version(),
            gpus=self._gpus,
        )

    def _find_manager(self) -> Address | None:
        return Address.read(self.run.manager)

    def _find_store(self) -> Address | None:
        return store_address(self.peers)

    def _held_versions(self) -> tuple[Version, ...]:
        """Return the complete weight versions that this process has to report, the newest first.

        The first member of a trainer's gang reports for all, as each member may have only a part of a version.
        """
        me = self.launch.incarnation
        return () if is_trainer(me.replica) and me != me.gang else self.weights.complete_versions()

    def _held_version(self) -> Version | None:
        """Return the newest complete weight version of this process, or None if it has none to report."""
        return next(iter(self._held_versions()), None)

    def _weights_step(self) -> int | None:
        """Return the training step of the newest complete weights of this process, or None if it has none."""
        version = self._held_version()
        return None if version is None else version.step

    async def _receive_loop(self) -> None:
        while True:
            message = await self._dialer.next_push()
            if isinstance(message, msg.Welcome):
                self._update_peers(message.peers)
                # a Welcome to the standby may arrive after its promotion
                if message.incarnation == self.launch.incarnation and not self.launch.standby:
                    self.rank, self.world = message.rank, message.world
                    self._commits.on_welcome(message.step)
                    self._welcomed.set()
            elif isinstance(message, msg.Promote):
                await self._promote(message)
            elif isinstance(message, msg.Peers):
                self._update_peers(message)
            elif isinstance(message, msg.Fenced):
                _log.warning("%s is fenced: %s; this process exits", self.launch.incarnation, message.reason)
                os._exit(FENCED_EXIT)  # the worker's own threads must not continue
            elif isinstance(message, msg.Stop):
                self.stopping.set()
                self._standby_over.set()
            elif isinstance(message, msg.Inject):
                self.faults.request(message)
            elif isinstance(message, msg.Probe):
                self.probes.on_request(message, self.launch.incarnation)

    def _call_back(self, callback: Callable[[msg.Peers], None]) -> None:
        if self.peers is not None:  # in this thread, so that no callback gets older peers after newer peers
            callback(self.peers)

    def _update_peers(self, peers: msg.Peers) -> None:
        known = self.peers
        if known is not None and (peers.epoch, peers.seq) < (known.epoch, known.seq):
            return
        store_moved = store_address(peers) != store_address(known)
        self.peers = peers
        self._weight_sources.on_peers(peers)
        self._sources_changed.set()
        if store_moved and self._store is not None:
            self._store.refresh_address()
        for callback in self._peers_callbacks:
            callback(peers)

    async def _heartbeat_loop(self) -> None:
        """Send heartbeats, but none while disconnected, because late heartbeats would give phases a wrong duration."""
        while True:
            if self._dialer.connected:
                weights = self._held_version() if self._traits.gets_weights else None
                traffic = self.deltas.traffic if weights is not None else WeightTraffic()
                heartbeat = self.status.heartbeat(self.launch.incarnation, weights, traffic)
                await self._dialer.send(heartbeat)
                self._reported_phase = heartbeat.phase
                if not self.launch.standby and self._loop.time() - self._clock_sent_at >= CLOCK_REPORT_INTERVAL_S:
                    await self._send_clock()
            await asyncio.sleep(self._heartbeat_interval)

    async def _send_clock(self) -> None:
        self._clock_sent_at = self._loop.time()
        await self._dialer.send(msg.ClockReport(self.launch.incarnation, self.status.read_clock()))
        if values := self.status.take_logged():
            await self._dialer.send(msg.ValuesLogged(self.launch.incarnation, values))

    def _report_commit(self, step: int, metrics: dict[str, float], commit: int) -> None:
        self._loop.create_task(self._send_commit(msg.StepCommitted(self.launch.incarnation, step, metrics, commit)))

    async def _send_commit(self, committed: msg.StepCommitted) -> None:
        if committed.completes_commit:  # the manager records the clock together with the commit
            await self._send_clock()
        await self._dialer.send(committed)

    def _resend_hello(self) -> None:
        self._send_if_connected(self._hello())

    def _send_if_connected(self, message: Any) -> None:
        """Send a message, or drop it if not connected, because the next connection's Hello has the same content."""
        if self._dialer.connected:
            self._loop.create_task(self._dialer.send(message))

    def _schedule_phase_report(self, phase: str) -> None:
        self._loop.call_later(PHASE_REPORT_DELAY_S, self._report_phase, phase)

    def _report_phase(self, phase: str) -> None:
        current, waits_for = self.status.reported_phase()
        if phase == current and phase != self._reported_phase:
            self._reported_phase = phase
            self._send_if_connected(msg.PhaseEntered(self.launch.incarnation, phase, self.status.done, waits_for))

    async def _commits_after(self, step: int) -> Sequence[StepMetrics]:
        """Return metrics of committed steps after ``step`` from the store, which need not be all of them."""
        return (await self.store.ask(GetMetrics, step)).commits

    async def _exchange_versions(self) -> None:
        """Report to the store which versions this process serves, and receive the newest version and its sources.

        One request to the store is open nearly all the time: it is replaced when this process serves another version,
        and repeated when the store restarts.
        """
        known: Version | None = None
        while True:
            self._served_version_changed.clear()
            versions = self._held_versions()
            if is_trainer(self.launch.incarnation.replica):
                if not versions:  # a publisher without a version has nothing to report or to request
                    await self._served_version_changed.wait()
                    continue
                known = versions[0]
            try:
                following = self.store.ask(FollowVersions, versions, known)
                newest = await _unless_set(self._served_version_changed, following)
            except Refused:
                await asyncio.sleep(REFUSED_PAUSE_S)
                continue
            if newest is not None:
                known = newest.version
                self._weight_sources.on_newest_version(newest)
                self._sources_changed.set()

    async def offered_manifest(self, rank: int, version: Version) -> Manifest:
        """Return the manifest of ``version`` that another member of this gang offers; wait until it offers one."""
        member = Incarnation(member_id(self.launch.incarnation.gang.replica, rank), self.launch.incarnation.number)
        while True:
            peer = self.peers.peers.get(member.replica) if self.peers is not None else None
            if self._weight_transport and peer and peer.incarnation == member and peer.weight_address:
                try:
                    return await self._weight_transport.manifest(
                        peer.weight_address, version, self._transport_settings.chunk_deadline, inf
                    )
                except TransportError as error:  # it has not begun to publish, or is about to be replaced
                    _log.debug("%s offers no manifest of %s: %s", member, version, error)
            await asyncio.sleep(OFFER_POLL_S)

    async def _follow_weights(self, transport: WeightTransport) -> None:
        """Pull the newest version again and again, skipping versions that are superseded before their pull starts.

        A pull continues while its source delivers, even if a newer version exists, so that a slow replica completes
        some versions instead of a part of each. If the source fails and a newer version exists, the pull is dropped and
        the newer one is pulled. After :data:`MAX_DROPPED_VERSIONS` drops in a row, the publisher is the first source.
        """
        pace, dropped = AdaptiveTimeout(), 0
        while True:
            self._sources_changed.clear()
            newest, held = self._weight_sources.newest, self._held_version()
            if newest is None or (held is not None and held >= newest):
                await self._sources_changed.wait()
                continue
            try:
                timeout_s = self._transport_settings.chunk_deadline
                sources = partial(self._sources, newest, dropped >= MAX_DROPPED_VERSIONS)
                await pull(
                    self.weights,
                    newest,
                    sources,
                    transport,
                    chunk_timeout=timeout_s,
                    adaptive_timeout=pace,
                    deltas=self.deltas,
                )
            except Superseded:
                dropped += 1
                continue
            except PullFailed as error:
                _log.warning("cannot pull weight version %s, trying again: %s", newest, error)
                continue
            dropped = 0
            self.announce_version(newest)

    def _sources(self, version: Version, direct: bool) -> tuple[WeightSource, ...]:
        """Return the sources of ``version``, the publisher first if ``direct``; called again when a source failed."""
        if self._weight_sources.newest != version:
            raise Superseded(f"{version} is superseded")
        me, chain = self.launch.incarnation.replica, self._transport_settings.chain
        return select_sources(me, self._weight_sources.sources(), version, chain, direct, self._held_version())


def _open_loop(owner: object) -> asyncio.AbstractEventLoop:
    """Return a new event loop, which is closed when ``owner`` is garbage-collected or Python exits.

    The loop is closed because a loop that is still open when Python exits may print a traceback after all other output
    of the process. The traceback would hide the line that says why the process ends. A loop that is running at that
    time is not closed.
    """
    loop = asyncio.new_event_loop()
    weakref.finalize(owner, _close_idle, loop)
    return loop


def _close_idle(loop: asyncio.AbstractEventLoop) -> None:
    if not loop.is_running():
        loop.close()


def _die_on_error(task: asyncio.Task[Any]) -> None:
    """End the process if ``task``, a task of the connection, has failed.

    Without this task the worker could not send or receive.
    """
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.critical("a task of the connection to the manager failed; this process exits: %r", error)
        os._exit(1)


async def _unless_set(event: asyncio.Event, request: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of ``request``; cancel it and return None if ``event`` is set first."""
    requesting, waiting = asyncio.create_task(request), asyncio.create_task(event.wait())
    try:
        await asyncio.wait((requesting, waiting), return_when=asyncio.FIRST_COMPLETED)
        return requesting.result() if requesting.done() else None
    finally:
        requesting.cancel()
        waiting.cancel()
