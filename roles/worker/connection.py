"""The thread behind a worker: everything that a role says and hears, so that its own code may compute for minutes.

One asyncio loop in one daemon thread: the dialer to the manager, the conversation with the trajectory store, the weight
plane, the beats. What the worker API needs of it are blocking calls (:meth:`Link.call`) and a few plain attributes.

A shadow has the dialer and the beats only, a rollout's an open pipe besides. Told what it becomes, it takes that life
for good, says Hello as such under the tag of its own step, and opens the rest: one process, one connection, and no beat
is left out.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from math import inf
from typing import Any, TypeVar

import msgspec

from ...core.launch import Launch
from ...core.phases import STANDBY
from ...core.run_dir import RunDir
from ...core.types import NodeName, ReplicaId, Version
from ...transport import messages as msg
from ...transport.control.endpoints import Address, Dialer
from ...transport.keys import RunKeys
from ...transport.weights.base import WeightTransport
from ...transport.weights.pull import AdaptiveTimeout, PullFailed, pull, select_sources
from ...transport.weights.select import open_transport
from ...transport.weights.store import StoredVersion, WeightStore
from ..launcher.environment import ADDRESS_ENV
from ..launcher.gpus import assigned_gpus_with_timeout
from ..launcher.process_group import select_gpus
from ..trajectories.client import Refused, TrajectoryClient, store_address
from ..trajectories.types import NewestVersion
from ..trajectories.versions import is_publisher
from .commit_reports import CommitReports
from .main_thread import ProbeResponder, SelfFaults
from .weight_sources import WeightSources

_log = logging.getLogger("rrl.worker")

FENCED_EXIT = 81
"""Exit code of a worker that learned that it is no longer believed."""
PHASE_REPORT_DELAY_S = 0.25
"""s that a phase must last before it is told by itself; shorter ones are only seen by the next beat"""
WELCOME_TIMEOUT_S = 600.0
"""s for a manager to welcome a worker: longer than Slurm takes to requeue a manager (120 s)"""
STOPPING_STORE_TIMEOUT_S = 0.5
"""s that a role which was asked to leave still waits for the store"""
MAX_DROPPED_VERSIONS = 2
"""half-received versions in a row after which the publisher itself is asked for the next one"""
REFUSED_PAUSE_S = 1.0
"""s before this process follows the weight versions again after the store refused it: the manager fences a life that is
not current, or tells the store of it"""
STANDBY_POLL_S = 0.5
"""s between two looks of a shadow's main thread whether SIGTERM came: what wakes it otherwise comes at once"""
STORE_REPLICA = ReplicaId("trajectories/0")

T = TypeVar("T")


class Stopping(Exception):
    """This role was asked to leave: :class:`rrl.Worker` takes it as the end of its ``with`` block."""


class ManagerConnection:
    """Made and started by :func:`rrl.join`. Attributes are written by the loop's thread and read by the worker's."""

    def __init__(self, launch: Launch, run: RunDir, keys: RunKeys, heartbeat: float, transport: dict[str, Any]) -> None:
        self.launch, self.run, self.keys = launch, run, keys
        """``launch.incarnation`` is who speaks: a shadow's, until it becomes a member"""
        self.rank, self.world = 0, 1
        """as the manager's Welcome said"""
        self.peers: msg.Peers | None = None
        self.stopping = threading.Event()
        self.node = NodeName(os.environ.get("SLURMD_NODENAME") or launch.node)
        self.host = os.environ.get(ADDRESS_ENV, "127.0.0.1")
        """where this process listens, as its first process chose it"""
        self.weights = WeightStore()
        self.faults = SelfFaults(launch, self.node, self.send, lambda after, do: self._loop.call_later(after, do))
        self.probes = ProbeResponder(self.send)
        self._heartbeat_interval, self._transport_settings = heartbeat, transport
        self._phase: tuple[str, ReplicaId | None] = (STANDBY if launch.standby else "starting", None)
        """phase and whom it waits for: one value, so that no beat tells a mixture"""
        self.blocked_on: ReplicaId | None = None
        """whatever the phase: whom this process waits for beside it"""
        self.note = ""
        """shown beside this replica in `rrl status`; empty: nothing"""
        self._done = 0
        self._store_calls = 0
        """threads that wait for the store: a trainer's may be two, as it commits beside its work"""
        self._store_calls_lock = threading.Lock()
        self._reported_phase = ""
        self._first_work_done = False
        self._listen_address: str | None = None
        self._weight_address: str | None = None
        self._peers_callbacks: list[Callable[[msg.Peers], None]] = []
        self._welcomed = threading.Event()
        self._standby_over = threading.Event()
        """a shadow need not wait any more: it became something, is to leave, or has failed"""
        self._new_version = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name="rrl-connection", daemon=True)
        self._failure: BaseException | None = None
        self._weight_sources = WeightSources()
        self._sources_changed = asyncio.Event()
        """the manager or the store told something of versions or holders"""
        self._served_version_changed = asyncio.Event()
        """another version, or the first one, is served here"""

    # ── for the worker's thread ────────────────────────────────────────────────────────────────────────────────────
    def start(self) -> None:
        """Returns once the manager has said Welcome; in a shadow: as what it became. Raises Stopping where a shadow is
        asked to leave before, TimeoutError, or whatever kept the link from starting."""
        self._thread.start()
        while self.launch.standby and not self._standby_over.wait(STANDBY_POLL_S) and not self.stopping.is_set():
            pass
        if self.launch.standby and self._failure is None:
            raise Stopping
        if not self._welcomed.wait(WELCOME_TIMEOUT_S):
            raise TimeoutError(f"no manager of {self.run.id} said welcome within {WELCOME_TIMEOUT_S:g} s")
        if self._failure is not None:
            raise self._failure

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it in the loop and wait for its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def call_store(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """As :meth:`call`; meanwhile beats say that it is the store that is waited for.

        Raises Stopping when this role was asked to leave and the store, which may have left before, does not answer."""
        with self._store_calls_lock:
            self._store_calls += 1
        pending = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            while True:
                stopping = self.stopping.is_set()
                try:
                    return pending.result(STOPPING_STORE_TIMEOUT_S)
                except TimeoutError:
                    if pending.done():  # its own, or it came at this very moment
                        return pending.result()
                    self.faults.trigger()
                    self.probes.answer()
                    if stopping:
                        pending.cancel()
                        raise Stopping from None
        finally:
            with self._store_calls_lock:
                self._store_calls -= 1

    def call_soon(self, callback: Callable[..., None], *args: Any) -> None:
        self._loop.call_soon_threadsafe(callback, *args)

    def set_phase(self, phase: str, waits_for: ReplicaId | None = None) -> None:
        self._phase = (phase, waits_for)
        self.call_soon(self._schedule_phase_report, phase)

    @property
    def phase(self) -> tuple[str, ReplicaId | None]:
        return self._phase

    @property
    def done(self) -> int:
        """Units of work told as progress in this life."""
        return self._done

    def progress(self, units: int) -> None:
        self.faults.trigger(working=True)
        self.probes.answer()
        self._done += units
        if not self._first_work_done and units > 0:
            self._first_work_done = True
            self.send(msg.FirstWorkDone(self.launch.incarnation))

    def send(self, message: Any) -> None:
        """Tell the manager, without waiting."""
        asyncio.run_coroutine_threadsafe(self._dialer.send(message), self._loop)

    def announce(self, listens: str) -> None:
        """From now on this replica offers a service at ``listens``."""
        self._listen_address = listens
        self.call_soon(self._resend_hello)

    def on_commit(self, step: int, metrics: dict[str, float]) -> None:
        self.call_soon(self._commits.on_commit, step, metrics)

    def on_commit_found(self, step: int) -> None:
        """The store knows of this step; the manager may not."""
        self.call_soon(self._commits.on_found, step)

    def announce_version(self, version: Version) -> None:
        """Tell manager and store that ``version`` is complete and served here."""
        self._new_version.set()
        self.call_soon(self._served_version_changed.set)
        self.call_soon(self._send_if_connected, msg.VersionAvailable(self.launch.incarnation, version))

    def wait_version(self, timeout: float) -> StoredVersion | None:
        """The newest complete version; waits up to ``timeout`` s for the first one."""
        if self.weights.current() is None:
            self._new_version.wait(timeout)
        return self.weights.current()

    def on_peers(self, callback: Callable[[msg.Peers], None]) -> None:
        """``callback`` is called in the link's thread at every change, and now if peers are known."""
        self._peers_callbacks.append(callback)
        self.call_soon(self._call_back, callback)

    def close(self) -> None:
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(timeout=10)
            self.call_soon(self._loop.stop)
            self._thread.join(timeout=10)

    @property
    def store(self) -> TrajectoryClient:
        assert self._store is not None, "a shadow has no business with the store"
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
        self._store: TrajectoryClient | None = None
        self._tasks: list[asyncio.Task[Any]] = []
        self._dialer = Dialer(self.keys, msg.FromManager, self._find_manager, lambda: [self._hello()])
        self._commits = CommitReports(
            self._report_commit, lambda: self._dialer.connected, lambda after: self.store.metrics(after)
        )
        await self._open_weight_transport()
        if not self.launch.standby:
            self._open_store()
        self._spawn(self._dialer.run(), self._receive_loop(), self._heartbeat_loop(), self._commits.run())

    async def _open_weight_transport(self) -> None:
        """Weights of others come in by it, and ours go out. A rollout's shadow opens it in advance, and pulls nothing;
        the trainer's, which has no GPU yet that a fabric's libraries may touch, once it has become something."""
        role, standby = self.launch.role, self.launch.standby
        if role not in (("rollout",) if standby else ("trainer", "rollout")):
            return
        if self._weight_transport is None:
            trusted = self._transport_settings.get("trusted_network", False)  # a run of an older rrl says nothing of it
            self._weight_transport = open_transport(
                self._transport_settings["weights"], self.keys.secret, host=self.host, trusted_network=trusted
            )
            self._weight_address = await self._weight_transport.serve(self.weights, self.host)
        if not standby:
            self._spawn(self._exchange_versions())  # its first step comes when the store's client is open
        if role == "rollout" and not standby:
            self._spawn(self._follow_weights(self._weight_transport))

    def _open_store(self) -> None:
        # How long a store may be away is the manager's to judge: whoever gives up by itself is one more loss.
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
        """From here on every message is that life's, the Hello that it begins with included. Told again: nothing."""
        if not self.launch.standby or (promotion.standby, promotion.tag) != (self.launch.incarnation, self.launch.tag):
            return
        _log.info("%s becomes %s", self.launch.incarnation, promotion.incarnation)
        self.launch = msgspec.structs.replace(self.launch, incarnation=promotion.incarnation, standby=False)
        self.faults.launch = self.launch
        self._gpus = select_gpus(promotion.gpus, self._gpus)
        self._phase = ("starting", None)
        self.peers = None  # what it heard as a shadow may be hours old: the Welcome says what is true
        self._weight_sources = WeightSources()
        self._open_store()
        if self._dialer.connected:  # else it is the first word on the next connection
            await self._dialer.send(self._hello())
        self._spawn(self._open_weight_transport_late())
        self._standby_over.set()

    async def _open_weight_transport_late(self) -> None:
        """Beside the Welcome, for which a fabric that takes its time is no reason to wait."""
        await self._open_weight_transport()
        self._resend_hello()

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._weight_transport is not None:
            await self._weight_transport.close()
        if self._store is not None:
            await self._store.close()
        await self._dialer.close()

    def _hello(self) -> msg.Hello:
        held = self.weights.current()
        self._reported_phase = self._phase[0]
        self._commits.on_hello()
        return msg.Hello(
            incarnation=self.launch.incarnation,
            tag=self.launch.tag,
            node=self.node,
            host=socket.gethostname(),
            pid=os.getpid(),
            phase=self._phase[0],
            listen_address=self._listen_address,
            weight_address=self._weight_address,
            weight_version=held.manifest.version if held else None,
            gpus=self._gpus,
        )

    def _find_manager(self) -> Address | None:
        return Address.read(self.run.manager)

    def _find_store(self) -> Address | None:
        return store_address(self.peers)

    def _weights_step(self) -> int | None:
        """The step of the weights here."""
        held = self.weights.current()
        return held.manifest.version.step if held else None

    async def _receive_loop(self) -> None:
        while True:
            message = await self._dialer.next_push()
            if isinstance(message, msg.Welcome):
                self._update_peers(message.peers)
                if (
                    message.incarnation == self.launch.incarnation and not self.launch.standby
                ):  # one to the shadow may come late
                    self.rank, self.world = message.rank, message.world
                    self._commits.on_welcome(message.step)
                    self._welcomed.set()
            elif isinstance(message, msg.Promote):
                await self._promote(message)
            elif isinstance(message, msg.Peers):
                self._update_peers(message)
            elif isinstance(message, msg.Fenced):
                _log.warning("%s is fenced: %s", self.launch.incarnation, message.reason)
                os._exit(FENCED_EXIT)  # whatever the worker's own thread is in the middle of must not go on
            elif isinstance(message, msg.Stop):
                self.stopping.set()
                self._standby_over.set()
            elif isinstance(message, msg.Inject):
                self.faults.request(message)
            elif isinstance(message, msg.Probe):
                self.probes.on_request(message, self.launch.incarnation)

    def _call_back(self, callback: Callable[[msg.Peers], None]) -> None:
        if self.peers is not None:  # the newest by now: to hear of older ones last would unsay who has come since
            callback(self.peers)

    def _update_peers(self, peers: msg.Peers) -> None:
        known = self.peers
        if known is not None and (peers.epoch, peers.seq) < (known.epoch, known.seq):
            return
        moved = store_address(peers) != store_address(known)
        self.peers = peers
        self._weight_sources.on_peers(peers)
        self._sources_changed.set()
        if moved and self._store is not None:
            self._store.refresh_address()
        for callback in self._peers_callbacks:
            callback(peers)

    async def _heartbeat_loop(self) -> None:
        """Only while somebody hears them: beats that are kept and heard all at once look as if no phase had lasted."""
        while True:
            phase, waits_for = self._phase
            if self._dialer.connected:
                blocked_by = STORE_REPLICA if self._store_calls else self.blocked_on or waits_for
                await self._dialer.send(
                    msg.Heartbeat(self.launch.incarnation, phase, self._done, blocked_by, self.note)
                )
                self._reported_phase = phase
            await asyncio.sleep(self._heartbeat_interval)

    def _report_commit(self, step: int, metrics: dict[str, float]) -> None:
        self._loop.create_task(self._dialer.send(msg.Committed(self.launch.incarnation, step, metrics)))

    def _resend_hello(self) -> None:
        self._send_if_connected(self._hello())

    def _send_if_connected(self, message: Any) -> None:
        """For what the Hello of the next connection says as well: kept for it, old news would follow the new."""
        if self._dialer.connected:
            self._loop.create_task(self._dialer.send(message))

    def _schedule_phase_report(self, phase: str) -> None:
        self._loop.call_later(PHASE_REPORT_DELAY_S, self._report_phase, phase)

    def _report_phase(self, phase: str) -> None:
        now, waits_for = self._phase
        if phase == now and phase != self._reported_phase:
            self._reported_phase = phase
            self._send_if_connected(msg.PhaseEntered(self.launch.incarnation, phase, self._done, waits_for))

    async def _exchange_versions(self) -> None:
        """Tell the store which version is served here, and hear from it which one is the newest and who serves it, as
        long as this process lives: the manager, which tells both as well, may be frozen or dead.

        One request is open nearly all of the time. It is replaced when another version is served here, and the dialer
        sends it again to a store that restarted."""
        known: Version | None = None
        while True:
            self._served_version_changed.clear()
            held = self.weights.current()
            version = held.manifest.version if held is not None else None
            if is_publisher(self.launch.incarnation):
                if version is None:  # it has nothing to tell, and nothing to ask
                    await self._served_version_changed.wait()
                    continue
                known = version
            try:
                newest = await self._unless_served_version_changes(
                    self.store.follow_versions(self._weight_address, version, known)
                )
            except Refused:
                await asyncio.sleep(REFUSED_PAUSE_S)
                continue
            if newest is not None:
                known = newest.version
                self._weight_sources.on_newest_version(newest)
                self._sources_changed.set()

    async def _unless_served_version_changes(
        self, follow: Coroutine[Any, Any, NewestVersion | None]
    ) -> NewestVersion | None:
        """Return what ``follow`` does, or give it up and return None when another version is served here."""
        following = asyncio.create_task(follow)
        changing = asyncio.create_task(self._served_version_changed.wait())
        try:
            await asyncio.wait((following, changing), return_when=asyncio.FIRST_COMPLETED)
            return following.result() if following.done() else None
        finally:
            following.cancel()
            changing.cancel()

    async def _follow_weights(self, transport: WeightTransport) -> None:
        """Pull every newest version, one after another; skip those that are superseded meanwhile.

        What is being received is gone on with though a newer version is out, as long as its source gives: whoever is
        slow gets every few versions one, not a piece of each. When its source is gone it is dropped for the newer one,
        or, when nobody has all of it any more, for the older one that others have. Whoever had to drop several in a row
        asks the publisher, which keeps a version while it is read."""
        pace, dropped = AdaptiveTimeout(), 0
        while True:
            self._sources_changed.clear()
            newest = self._weight_sources.newest
            held = self.weights.current()
            if newest is None or (held is not None and held.manifest.version >= newest):
                await self._sources_changed.wait()
                continue
            try:
                chunk_timeout = self._transport_settings["chunk_deadline"]
                current_sources = partial(self._sources, newest, dropped >= MAX_DROPPED_VERSIONS)
                await pull(
                    self.weights, newest, current_sources, transport, chunk_timeout=chunk_timeout, adaptive_timeout=pace
                )
            except _Superseded:
                dropped += 1
                continue
            except PullFailed as error:
                _log.warning("cannot pull weights %s: %s", newest, error)
                continue
            dropped = 0
            self.announce_version(newest)

    def _sources(self, version: Version, direct: bool) -> tuple[msg.WeightSource, ...]:
        """Return whom to ask now. Called again only once a source has failed."""
        if self._weight_sources.newest != version:
            raise _Superseded(f"{version} is superseded")
        chain = self._transport_settings["chain"]
        return select_sources(self.launch.incarnation.replica, self._weight_sources.sources(), version, chain, direct)


class _Superseded(PullFailed):
    """A newer version is out, or the last one who had this one is dead; and our source of it is gone: go for the
    newest one that somebody has."""


def _die_on_error(task: asyncio.Task[Any]) -> None:
    """A link without one of its tasks is deaf or dumb: better to die and be replaced."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.critical("the connection to the manager failed, this process ends: %r", error)
        os._exit(1)
