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
from ...transport.weights.base import Pipe
from ...transport.weights.pull import Pace, PullFailed, pull, sources
from ...transport.weights.select import open_pipe
from ...transport.weights.store import Held, WeightStore
from ..launcher.environment import ADDRESS_ENV
from ..launcher.gpus import held_gpus_within
from ..launcher.process_group import keep_gpus
from ..trajectories.client import Refused, TrajectoryClient, store_address
from ..trajectories.types import NewestVersion
from ..trajectories.versions import is_publisher
from .commit_reports import CommitReports
from .main_thread import OwnFaults, Probes
from .weight_sources import WeightSources

_log = logging.getLogger("rrl.worker")

FENCED_EXIT = 81
"""Exit code of a worker that learned that it is no longer believed."""
TOLD_AFTER = 0.25
"""s that a phase must last before it is told by itself; shorter ones are only seen by the next beat"""
WELCOME_BY = 600.0
"""s for a manager to welcome a worker: longer than Slurm takes to requeue a manager (120 s)"""
LAST_ANSWER = 0.5
"""s that a role which was asked to leave still waits for the store"""
DROPPED = 2
"""half-received versions in a row after which the publisher itself is asked for the next one"""
REFUSED_PAUSE_S = 1.0
"""s before this process follows the weight versions again after the store refused it: the manager fences a life that is
not current, or tells the store of it"""
LOOK = 0.5
"""s between two looks of a shadow's main thread whether SIGTERM came: what wakes it otherwise comes at once"""
STORE = ReplicaId("trajectories/0")

T = TypeVar("T")


class Stopping(Exception):
    """This role was asked to leave: :class:`rrl.Worker` takes it as the end of its ``with`` block."""


class Link:
    """Made and started by :func:`rrl.join`. Attributes are written by the loop's thread and read by the worker's."""

    def __init__(self, launch: Launch, run: RunDir, keys: RunKeys, beat: float, transport: dict[str, Any]) -> None:
        self.launch, self.run, self.keys = launch, run, keys
        """``launch.life`` is who speaks: a shadow's, until it becomes a member"""
        self.rank, self.world = 0, 1
        """as the manager's Welcome said"""
        self.peers: msg.Peers | None = None
        self.stopping = threading.Event()
        self.node = NodeName(os.environ.get("SLURMD_NODENAME") or launch.node)
        self.host = os.environ.get(ADDRESS_ENV, "127.0.0.1")
        """where this process listens, as its first process chose it"""
        self.weights = WeightStore()
        self.faults = OwnFaults(launch, self.node, self.say, lambda after, do: self._loop.call_later(after, do))
        self.probes = Probes(self.say)
        self._beat, self._transport = beat, transport
        self._now: tuple[str, ReplicaId | None] = (STANDBY if launch.standby else "starting", None)
        """phase and whom it waits for: one value, so that no beat tells a mixture"""
        self.held_up_by: ReplicaId | None = None
        """whatever the phase: whom this process waits for beside it"""
        self.note = ""
        """shown beside this replica in `rrl status`; empty: nothing"""
        self._done = 0
        self._asking = 0
        """threads that wait for the store: a trainer's may be two, as it commits beside its work"""
        self._counting = threading.Lock()
        self._told = ""
        self._worked = False
        self._listens: str | None = None
        self._serves: str | None = None
        self._on_peers: list[Callable[[msg.Peers], None]] = []
        self._welcomed = threading.Event()
        self._woken = threading.Event()
        """a shadow need not wait any more: it became something, is to leave, or has failed"""
        self._new_version = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name="rrl-link", daemon=True)
        self._failure: BaseException | None = None
        self._weight_sources = WeightSources()
        self._sources_changed = asyncio.Event()
        """the manager or the store told something of versions or holders"""
        self._held_changed = asyncio.Event()
        """another version, or the first one, is served here"""

    # ── for the worker's thread ────────────────────────────────────────────────────────────────────────────────────
    def start(self) -> None:
        """Returns once the manager has said Welcome; in a shadow: as what it became. Raises Stopping where a shadow is
        asked to leave before, TimeoutError, or whatever kept the link from starting."""
        self._thread.start()
        while self.launch.standby and not self._woken.wait(LOOK) and not self.stopping.is_set():
            pass
        if self.launch.standby and self._failure is None:
            raise Stopping
        if not self._welcomed.wait(WELCOME_BY):
            raise TimeoutError(f"no manager of {self.run.id} said welcome within {WELCOME_BY:g} s")
        if self._failure is not None:
            raise self._failure

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it in the loop and wait for its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def ask_store(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """As :meth:`call`; meanwhile beats say that it is the store that is waited for.

        Raises Stopping when this role was asked to leave and the store, which may have left before, does not answer."""
        with self._counting:
            self._asking += 1
        asked = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            while True:
                stopping = self.stopping.is_set()
                try:
                    return asked.result(LAST_ANSWER)
                except TimeoutError:
                    if asked.done():  # its own, or it came at this very moment
                        return asked.result()
                    self.faults.strike()
                    self.probes.answer()
                    if stopping:
                        asked.cancel()
                        raise Stopping from None
        finally:
            with self._counting:
                self._asking -= 1

    def soon(self, what: Callable[..., None], *args: Any) -> None:
        self._loop.call_soon_threadsafe(what, *args)

    def enter(self, phase: str, waits_for: ReplicaId | None = None) -> None:
        self._now = (phase, waits_for)
        self.soon(self._tell_later, phase)

    @property
    def phase(self) -> tuple[str, ReplicaId | None]:
        return self._now

    @property
    def done(self) -> int:
        """Units of work told as progress in this life."""
        return self._done

    def progress(self, units: int) -> None:
        self.faults.strike(working=True)
        self.probes.answer()
        self._done += units
        if not self._worked and units > 0:
            self._worked = True
            self.say(msg.FirstWork(self.launch.life))

    def say(self, message: Any) -> None:
        """Tell the manager, without waiting."""
        asyncio.run_coroutine_threadsafe(self._dialer.send(message), self._loop)

    def announce(self, listens: str) -> None:
        """From now on this replica offers a service at ``listens``."""
        self._listens = listens
        self.soon(self._tell_anew)

    def committed(self, step: int, metrics: dict[str, float]) -> None:
        self.soon(self._commits.on_commit, step, metrics)

    def found_committed(self, step: int) -> None:
        """The store knows of this step; the manager may not."""
        self.soon(self._commits.on_found, step)

    def holds(self, version: Version) -> None:
        """Tell manager and store that ``version`` is complete and served here."""
        self._new_version.set()
        self.soon(self._held_changed.set)
        self.soon(self._say_now, msg.Holds(self.launch.life, version))

    def wait_version(self, timeout: float) -> Held | None:
        """The newest complete version; waits up to ``timeout`` s for the first one."""
        if self.weights.current() is None:
            self._new_version.wait(timeout)
        return self.weights.current()

    def on_peers(self, callback: Callable[[msg.Peers], None]) -> None:
        """``callback`` is called in the link's thread at every change, and now if peers are known."""
        self._on_peers.append(callback)
        self.soon(self._call_back, callback)

    def close(self) -> None:
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(timeout=10)
            self.soon(self._loop.stop)
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
            self._woken.set()
            return
        self._loop.run_forever()

    async def _open(self) -> None:
        self._gpus = await held_gpus_within()
        self._pipe: Pipe | None = None
        self._store: TrajectoryClient | None = None
        self._tasks: list[asyncio.Task[Any]] = []
        self._dialer = Dialer(self.keys, msg.Down, self._find_manager, lambda: [self._hello()])
        self._commits = CommitReports(
            self._report_commit, lambda: self._dialer.connected, lambda after: self.store.metrics(after)
        )
        await self._open_pipe()
        if not self.launch.standby:
            self._open_store()
        self._spawn(self._dialer.run(), self._listen(), self._beats(), self._commits.run())

    async def _open_pipe(self) -> None:
        """Weights of others come in by it, and ours go out. A rollout's shadow opens it in advance, and pulls nothing;
        the trainer's, which has no GPU yet that a fabric's libraries may touch, once it has become something."""
        role, standby = self.launch.role, self.launch.standby
        if role not in (("rollout",) if standby else ("trainer", "rollout")):
            return
        if self._pipe is None:
            trusted = self._transport.get("trusted_network", False)  # a run of an older rrl says nothing of it
            self._pipe = open_pipe(
                self._transport["weights"], self.keys.secret, host=self.host, trusted_network=trusted
            )
            self._serves = await self._pipe.serve(self.weights, self.host)
        if not standby:
            self._spawn(self._exchange_versions())  # its first step comes when the store's client is open
        if role == "rollout" and not standby:
            self._spawn(self._follow(self._pipe))

    def _open_store(self) -> None:
        # How long a store may be away is the manager's to judge: whoever gives up by itself is one more loss.
        self._store = TrajectoryClient(
            self.keys, self.launch.life, self._find_store, patience=inf, weights=self._weights_of
        )
        self._spawn(self._store.run())

    def _spawn(self, *coroutines: Coroutine[Any, Any, None]) -> None:
        for coroutine in coroutines:
            task = self._loop.create_task(coroutine)
            task.add_done_callback(_loud)
            self._tasks.append(task)

    async def _become(self, told: msg.Become) -> None:
        """From here on every message is that life's, the Hello that it begins with included. Told again: nothing."""
        if not self.launch.standby or (told.shadow, told.tag) != (self.launch.life, self.launch.tag):
            return
        _log.info("%s becomes %s", self.launch.life, told.life)
        self.launch = msgspec.structs.replace(self.launch, life=told.life, standby=False)
        self.faults.launch = self.launch
        self._gpus = keep_gpus(told.gpus, self._gpus)
        self._now = ("starting", None)
        self.peers = None  # what it heard as a shadow may be hours old: the Welcome says what is true
        self._weight_sources = WeightSources()
        self._open_store()
        if self._dialer.connected:  # else it is the first word on the next connection
            await self._dialer.send(self._hello())
        self._spawn(self._open_pipe_late())
        self._woken.set()

    async def _open_pipe_late(self) -> None:
        """Beside the Welcome, for which a fabric that takes its time is no reason to wait."""
        await self._open_pipe()
        self._tell_anew()

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._pipe is not None:
            await self._pipe.close()
        if self._store is not None:
            await self._store.close()
        await self._dialer.close()

    def _hello(self) -> msg.Hello:
        held = self.weights.current()
        self._told = self._now[0]
        self._commits.on_hello()
        return msg.Hello(
            life=self.launch.life,
            tag=self.launch.tag,
            node=self.node,
            host=socket.gethostname(),
            pid=os.getpid(),
            phase=self._now[0],
            listens=self._listens,
            serves=self._serves,
            holds=held.manifest.version if held else None,
            gpus=self._gpus,
        )

    def _find_manager(self) -> Address | None:
        return Address.read(self.run.manager)

    def _find_store(self) -> Address | None:
        return store_address(self.peers)

    def _weights_of(self) -> int | None:
        """The step of the weights here."""
        held = self.weights.current()
        return held.manifest.version.step if held else None

    async def _listen(self) -> None:
        while True:
            message = await self._dialer.pushed()
            if isinstance(message, msg.Welcome):
                self._hear_peers(message.peers)
                if message.life == self.launch.life and not self.launch.standby:  # one to the shadow may come late
                    self.rank, self.world = message.rank, message.world
                    self._commits.on_welcome(message.step)
                    self._welcomed.set()
            elif isinstance(message, msg.Become):
                await self._become(message)
            elif isinstance(message, msg.Peers):
                self._hear_peers(message)
            elif isinstance(message, msg.Fenced):
                _log.warning("%s is fenced: %s", self.launch.life, message.why)
                os._exit(FENCED_EXIT)  # whatever the worker's own thread is in the middle of must not go on
            elif isinstance(message, msg.Stop):
                self.stopping.set()
                self._woken.set()
            elif isinstance(message, msg.Inject):
                self.faults.order(message)
            elif isinstance(message, msg.Probe):
                self.probes.asked(message, self.launch.life)

    def _call_back(self, callback: Callable[[msg.Peers], None]) -> None:
        if self.peers is not None:  # the newest by now: to hear of older ones last would unsay who has come since
            callback(self.peers)

    def _hear_peers(self, peers: msg.Peers) -> None:
        known = self.peers
        if known is not None and (peers.epoch, peers.seq) < (known.epoch, known.seq):
            return
        moved = store_address(peers) != store_address(known)
        self.peers = peers
        self._weight_sources.on_peers(peers)
        self._sources_changed.set()
        if moved and self._store is not None:
            self._store.look()
        for callback in self._on_peers:
            callback(peers)

    async def _beats(self) -> None:
        """Only while somebody hears them: beats that are kept and heard all at once look as if no phase had lasted."""
        while True:
            phase, waits_for = self._now
            if self._dialer.connected:
                blocked_by = STORE if self._asking else self.held_up_by or waits_for
                await self._dialer.send(msg.Beat(self.launch.life, phase, self._done, blocked_by, self.note))
                self._told = phase
            await asyncio.sleep(self._beat)

    def _report_commit(self, step: int, metrics: dict[str, float]) -> None:
        self._loop.create_task(self._dialer.send(msg.Committed(self.launch.life, step, metrics)))

    def _tell_anew(self) -> None:
        self._say_now(self._hello())

    def _say_now(self, message: Any) -> None:
        """For what the Hello of the next connection says as well: kept for it, old news would follow the new."""
        if self._dialer.connected:
            self._loop.create_task(self._dialer.send(message))

    def _tell_later(self, phase: str) -> None:
        self._loop.call_later(TOLD_AFTER, self._tell, phase)

    def _tell(self, phase: str) -> None:
        now, waits_for = self._now
        if phase == now and phase != self._told:
            self._told = phase
            self._say_now(msg.Entered(self.launch.life, phase, self._done, waits_for))

    async def _exchange_versions(self) -> None:
        """Tell the store which version is served here, and hear from it which one is the newest and who serves it, as
        long as this process lives: the manager, which tells both as well, may be frozen or dead.

        One request is open nearly all of the time. It is replaced when another version is served here, and the dialer
        sends it again to a store that restarted."""
        known: Version | None = None
        while True:
            self._held_changed.clear()
            held = self.weights.current()
            holds = held.manifest.version if held is not None else None
            if is_publisher(self.launch.life):
                if holds is None:  # it has nothing to tell, and nothing to ask
                    await self._held_changed.wait()
                    continue
                known = holds
            try:
                news = await self._unless_held_changes(self.store.follow_versions(self._serves, holds, known))
            except Refused:
                await asyncio.sleep(REFUSED_PAUSE_S)
                continue
            if news is not None:
                known = news.version
                self._weight_sources.on_news(news)
                self._sources_changed.set()

    async def _unless_held_changes(self, follow: Coroutine[Any, Any, NewestVersion | None]) -> NewestVersion | None:
        """Return what ``follow`` does, or give it up and return None when another version is served here."""
        following = asyncio.create_task(follow)
        changing = asyncio.create_task(self._held_changed.wait())
        try:
            await asyncio.wait((following, changing), return_when=asyncio.FIRST_COMPLETED)
            return following.result() if following.done() else None
        finally:
            following.cancel()
            changing.cancel()

    async def _follow(self, pipe: Pipe) -> None:
        """Pull every newest version, one after another; skip those that are superseded meanwhile.

        What is being received is gone on with though a newer version is out, as long as its source gives: whoever is
        slow gets every few versions one, not a piece of each. When its source is gone it is dropped for the newer one,
        or, when nobody has all of it any more, for the older one that others have. Whoever had to drop several in a row
        asks the publisher, which keeps a version while it is read."""
        pace, dropped = Pace(), 0
        while True:
            self._sources_changed.clear()
            newest = self._weight_sources.newest
            held = self.weights.current()
            if newest is None or (held is not None and held.manifest.version >= newest):
                await self._sources_changed.wait()
                continue
            try:
                by = self._transport["chunk_deadline"]
                ask = partial(self._sources, newest, dropped >= DROPPED)
                await pull(self.weights, newest, ask, pipe, chunk_by=by, pace=pace)
            except _Outdated:
                dropped += 1
                continue
            except PullFailed as error:
                _log.warning("cannot pull weights %s: %s", newest, error)
                continue
            dropped = 0
            self.holds(newest)

    def _sources(self, version: Version, direct: bool) -> tuple[msg.Holder, ...]:
        """Return whom to ask now. Called again only once a source has failed."""
        if self._weight_sources.newest != version:
            raise _Outdated(f"{version} is superseded")
        chain = self._transport["chain"]
        return sources(self.launch.life.replica, self._weight_sources.holders(), version, chain, direct)


class _Outdated(PullFailed):
    """A newer version is out, or the last one who had this one is dead; and our source of it is gone: go for the
    newest one that somebody has."""


def _loud(task: asyncio.Task[Any]) -> None:
    """A link without one of its tasks is deaf or dumb: better to die and be replaced."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.critical("the connection to the manager failed, this process ends: %r", error)
        os._exit(1)
