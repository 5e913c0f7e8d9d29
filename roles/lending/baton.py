"""The baton of a slot of a node: whoever holds it may have tensors on the slot's GPUs.

The baton is an abstract Unix address. It is held by being bound, so at most one process holds it, and the kernel frees
it when its holder ends. The name depends on the run's secret, both ends check each other's user, and both authenticate.
Python closes sockets at exec. A child that was forked without exec would keep the baton for ever, so it closes the
socket itself.

The leader (the member of the trainer with the lowest rank on the node) holds the baton from its start on. A guest that
sleeps stays connected to it: its connection begins with :class:`Sleeping`. To lend, the leader frees the address and
sends :class:`Yours` to one guest, which binds the address; a guest never binds without it. To take the baton back, the
leader connects to the address and sends :class:`Back`. The guest's engine goes to sleep, the guest sends
:class:`Asleep`, frees the address, and connects to the leader again. If the guest does not free it in time, the leader
kills the guest. The end of the leader's connection means the same to a guest as ``Back``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct

from ...core.processes import Process, processes, read_process, sweep, with_marks
from ...core.types import GUEST_ROLE, Incarnation, NodeName
from ...transport.streams.connection import Connection, TransportError, authenticate
from ...transport.streams.framing import derive_key, receive_message, send_message
from ...transport.streams.unix import UnixConnection, UnixListener, dial_unix, secret_name
from ...transport.weights.protocol import Acceptor

_log = logging.getLogger("rrl.lending")

_RETRY_S = 0.005
"""Seconds between two attempts of a leader to bind the address."""
_RECONNECT_S = 0.05
"""Seconds between two attempts of a guest to reach a leader. While the trainer restarts there is none."""
_BUILDING_INTERVAL_S = 0.1
"""Seconds between two messages of a guest that it still builds its engine."""
_LAST_WORDS_S = 0.2
"""Seconds for which a leader that holds the address again waits for the end of the guest's connection, and so for its
``Asleep``. A guest sends it before it frees the address."""
_KILL_RETRY_S = 0.1
"""Seconds until the next attempt to kill a holder, if it is not known, or is the trainer's previous incarnation."""
_KILL_TIMEOUT_S = 2.0
"""Seconds for which a leader waits for the end of the processes that it kills."""
T = TypeVar("T")


class Sleeping(Struct, frozen=True, tag=True):
    """Guest to leader: the guest sleeps, and uses no memory for weights and cache."""

    incarnation: Incarnation
    built: bool
    """Whether the guest has an engine. The first wake of a guest builds it, for up to a minute."""


class Yours(Struct, frozen=True, tag=True):
    """Leader to guest: the address is free; bind it."""

    leader: Incarnation


class Back(Struct, frozen=True, tag=True):
    """Leader to the holder: give the baton back."""


class Building(Struct, frozen=True, tag=True):
    """Holder to leader, repeatedly: the engine is being built, which cannot be interrupted."""


class Asleep(Struct, frozen=True, tag=True):
    """Holder to leader: the engine sleeps, and the address will be free at once."""

    wake_s: float | None
    """Seconds from ``Yours`` until the guest could generate; None if it was asked back before."""


class Taken(Struct, frozen=True):
    """What happened when a leader took the baton."""

    held: bool
    """False only if the leader was asked to stop before it held the baton."""
    clean: bool
    """Whether the memory is known to be free: nobody else has had the baton, or the guest reported that it sleeps.
    Otherwise the memory of an ended process may be freed only after some seconds."""
    killed: bool
    """Whether a guest was killed because it did not give the baton back in time."""
    wait_s: float
    wake_s: float | None
    """Seconds for which the guest woke (:attr:`Asleep.wake_s`); None if it did not say."""


def baton_name(run: str, node: NodeName, slot: int, secret: bytes) -> str:
    """Return the address of a slot."""
    return secret_name(run, f"baton {node} {slot}", secret)


class _Side:
    """What both sides share: a thread with an event loop, the address, and the key."""

    def __init__(self, run: str, node: NodeName, slot: int, secret: bytes) -> None:
        self._name = baton_name(run, node, slot, secret)
        self._key = derive_key(secret, f"baton {node} {slot}")
        self._acceptor = Acceptor(self._key, self._serve)
        self._listener: UnixListener | None = None
        os.register_at_fork(after_in_child=self._close_in_child)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rrl-baton", daemon=True)
        self._thread.start()

    async def _serve(self, connection: Connection) -> None:
        raise NotImplementedError

    def _bind(self) -> bool:
        """Take the address, and return whether this process holds it."""
        if self._listener is None:
            with contextlib.suppress(OSError):
                self._listener = UnixListener(self._name, self._acceptor.accept)
        return self._listener is not None

    def _unbind(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _close_in_child(self) -> None:
        if self._listener is not None:
            self._listener.close_socket()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def close(self) -> None:
        """Free the address if it is held, and end the thread."""
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        self._unbind()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class LeaderBaton(_Side):
    """The trainer's side. A leader with several batons takes them in as many threads, so that all guests hear it.

    Args:
        run: Name of the run.
        node: The node.
        slot: Number of the guest on the node.
        secret: The run's secret.
    """

    def __init__(self, run: str, node: NodeName, slot: int, secret: bytes) -> None:
        super().__init__(run, node, slot, secret)
        self._run_name = run
        self._sleeping: tuple[UnixConnection, Sleeping] | None = None
        """The guest that sleeps; if there are two, the newer incarnation."""
        self._lent: tuple[Incarnation, UnixConnection] | None = None
        self._holder: UnixConnection | None = None
        """The connection to another process that holds the address."""
        self._asleep: Asleep | None = None
        """What the holder reported since the baton was last lent."""
        self._building_at = 0.0
        """When the holder last reported that it builds its engine."""

    @property
    def guest(self) -> Incarnation | None:
        """The guest that is connected and sleeps, or None."""
        sleeping = self._sleeping
        return None if sleeping is None else sleeping[1].incarnation

    @property
    def guest_has_engine(self) -> bool:
        """Whether the guest has built its engine, so that it can generate within the time of a hand-over."""
        sleeping = self._sleeping
        return sleeping is not None and sleeping[1].built

    @property
    def lent_to(self) -> Incarnation | None:
        """The guest to which the baton is lent; None once the guest has ended, or the baton was taken."""
        lent = self._lent
        return None if lent is None or lent[1].broken else lent[0]

    def take(self, handback_s: float, stopping: Callable[[], bool]) -> Taken:
        """Block until this process holds the baton, or until ``stopping`` returns True.

        A guest that has not given it back after ``handback_s`` seconds, counted from the end of the build of its engine
        if it has none yet, is killed. The function ``stopping`` is called in another thread.
        """
        return self._run(self._take(handback_s, stopping))

    def lend(self, leader: Incarnation, accept: Callable[[Incarnation], bool]) -> Incarnation | None:
        """Give the baton to the guest that sleeps, and return the guest; None if there is none that ``accept`` accepts.

        With None this process still holds the baton.
        """
        return self._run(self._lend(leader, accept))

    async def _serve(self, connection: Connection) -> None:
        """Keep the connection of a guest that sleeps until it ends."""
        assert isinstance(connection, UnixConnection)
        message = await receive_message(connection, Sleeping | Back)
        other = self._sleeping
        if isinstance(message, Sleeping) and (other is None or other[1].incarnation < message.incarnation):
            self._sleeping = (connection, message)
        try:  # a leader of another incarnation waits for the end of this process
            self._asleep = await receive_message(connection, Asleep, None)
        finally:
            if self._sleeping is not None and self._sleeping[0] is connection:
                self._sleeping = None

    async def _lend(self, leader: Incarnation, accept: Callable[[Incarnation], bool]) -> Incarnation | None:
        assert self._listener is not None, "only the holder lends"
        if self._sleeping is None or not accept(self._sleeping[1].incarnation):
            return None
        (connection, message), self._sleeping = self._sleeping, None
        self._unbind()
        try:
            await send_message(connection, Yours(leader))
        except TransportError:  # the guest has just ended; nobody binds the address without having been told
            self._bind()
            return None
        self._lent, self._asleep = (message.incarnation, connection), None
        return message.incarnation

    async def _take(self, handback_s: float, stopping: Callable[[], bool]) -> Taken:
        began = self._loop.time()
        due = began + handback_s
        asking: asyncio.Task[None] | None = None
        clean, killed = self._lent is None, False
        while not (held := self._bind()) and not stopping():
            if asking is None or asking.done():
                clean, asking = False, asyncio.create_task(self._ask_back())
            if self._loop.time() > max(due, self._building_at + handback_s):
                ended = self._kill_holder()
                killed, due = killed or ended, self._loop.time() + (handback_s if ended else _KILL_RETRY_S)
            await asyncio.sleep(_RETRY_S)
        if asking is not None:
            await asyncio.wait([asking], timeout=_LAST_WORDS_S)
            asking.cancel()
        if held and self._lent is not None:
            self._lent[1].abort()
            self._lent = None
        clean = held and not killed and (clean or self._asleep is not None)
        wake_s = None if self._asleep is None else self._asleep.wake_s
        return Taken(held, clean, killed, self._loop.time() - began, wake_s)

    async def _ask_back(self) -> None:
        """Ask the holder for the baton, and read its answers until it ends the connection."""
        try:
            self._holder = connection = await dial_unix(self._name)
        except TransportError:  # the address was freed, or belongs to another user, whom rrl cannot end
            return
        try:
            await authenticate(connection, self._key, dialled=True)
            await send_message(connection, Back())
            while True:
                if isinstance(message := await receive_message(connection, Building | Asleep, None), Asleep):
                    self._asleep = message
                else:
                    self._building_at = self._loop.time()
        except TransportError:
            pass
        finally:
            self._holder = None
            connection.abort()

    def _kill_holder(self) -> bool:
        """Kill all processes of the guest that holds the address; return False if the holder is no guest of this run.

        The pid that the kernel names is that of the holder as long as its connection lasts, so the environment that
        was read before is the holder's.
        """
        if (holder := self._holder) is None or (process := read_process(holder.pid)) is None:
            return False
        path = Path(with_marks(process).launch)
        if not path.name.startswith(f"{self._run_name}.{GUEST_ROLE}-") or holder.broken:  # Launch.tag names the file
            return False
        _log.warning("%s did not give the GPUs back in time; killing it", path.stem)
        sweep(lambda: [each for each in processes(str(path.parent)) if _is_of(each, path)], _KILL_TIMEOUT_S)
        return True


class GuestBaton(_Side):
    """The guest's side: connects to the leader, and holds the baton from ``Yours`` until :meth:`give_back`.

    Args:
        run: Name of the run.
        node: The node.
        slot: Number of the guest on the node.
        secret: The run's secret.
        incarnation: The guest.
    """

    def __init__(self, run: str, node: NodeName, slot: int, secret: bytes, incarnation: Incarnation) -> None:
        super().__init__(run, node, slot, secret)
        self._incarnation = incarnation
        self._built = False
        self._ours_at = 0.0
        self._wake_s: float | None = None
        self._ours, self._back = threading.Event(), threading.Event()
        self._released = asyncio.Event()
        self._peers = set[Connection]()
        """The connections to leaders: the one that gave the baton, and those that ask for it."""
        self._following = asyncio.run_coroutine_threadsafe(self._follow(), self._loop)

    @property
    def back_requested(self) -> bool:
        """Whether, since this process holds the baton, a leader asked for it or the leader that gave it ended."""
        return self._back.is_set()

    def wait_until_ours(self, stopping: Callable[[], bool], poll_s: float = 0.05) -> bool:
        """Sleep until this process holds the baton; False if ``stopping``, called every ``poll_s`` s, returns True."""
        while not stopping():
            if self._ours.wait(poll_s):
                return True
            if self._following.done():
                self._following.result()
        return False

    def ready(self) -> None:
        """Report that the engine can generate. Until the first call the leader does not kill a guest that is awake."""
        self._built = True
        self._wake_s = self._loop.time() - self._ours_at

    def give_back(self) -> None:
        """Tell the leader that the engine sleeps, and free the address; to be called only while the baton is held."""
        self._run(self._release())

    async def _follow(self) -> None:
        while True:
            with contextlib.suppress(TransportError):
                connection = await dial_unix(self._name)
                try:
                    await authenticate(connection, self._key, dialled=True)
                    await send_message(connection, Sleeping(self._incarnation, self._built))
                    await receive_message(connection, Yours, None)
                    if self._bind():  # else a new leader was faster
                        await self._hold(connection)
                        continue
                finally:
                    connection.abort()
            await asyncio.sleep(_RECONNECT_S)

    async def _hold(self, leader: Connection) -> None:
        self._peers = {leader}
        self._released.clear()
        self._back.clear()
        self._ours_at, self._wake_s = self._loop.time(), None
        self._ours.set()
        with contextlib.suppress(TransportError):
            await receive_message(leader, Back, None)  # the leader sends nothing: this is its end
        self._back.set()
        await self._released.wait()

    async def _serve(self, connection: Connection) -> None:
        """Serve a leader that asks for the baton, until it is given back."""
        await receive_message(connection, Back)
        if self._listener is None:
            return
        self._peers.add(connection)
        self._back.set()
        while not self._released.is_set():
            if not self._built:
                await send_message(connection, Building())
            await asyncio.sleep(_BUILDING_INTERVAL_S)

    async def _release(self) -> None:
        for connection in list(self._peers):
            with contextlib.suppress(TransportError):
                await send_message(connection, Asleep(self._wake_s))
            connection.abort()
        self._ours.clear()
        self._unbind()
        self._released.set()


def _is_of(process: Process, launch_file: Path) -> bool:
    """Return whether a process belongs to a launch, and is not its first one, which reports how the command ended."""
    return process.launch == str(launch_file) and not process.module
