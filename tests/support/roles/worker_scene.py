"""Runs workers of the worker API, each in a thread or process, with a stand-in for the manager and a real store."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager

import msgspec

from rrl.config.job.resolve import resolve
from rrl.config.job.schema import Job
from rrl.core.launch import LAUNCH_ENV, Launch
from rrl.core.run_dir import write_atomically
from rrl.core.types import Incarnation, rank_of
from rrl.roles.trajectories.episodes.requests import StoreRequest as Request
from rrl.roles.trajectories.server import Server
from rrl.roles.trajectories.store import Store
from rrl.roles.worker.api import Worker
from rrl.tests.support.listening_manager import TIMEOUT_S, Lab
from rrl.tests.support.listening_manager import Manager as FirstManager
from rrl.tests.support.roles.trajectories import crew
from rrl.transport.control.endpoints import Listener
from rrl.transport.messages import FirstWorkDone, Goodbye, Hello, Peer, Peers, Stop, ToManager, Welcome

HEARTBEAT_S = 0.02
STORE = crew.incarnation_of("trajectories/0")
JOB = resolve(
    Job.model_validate(
        {
            "run": {"name": "test", "steps": 1},
            "task": {"function": "task_of_test_worker:make"},
            "model": {"tokenizer": {"pieces": "0123456789"}},
            "roles": {"rollout": {"replicas": 2}},
            "transport": {"weights": "tcp", "chunk": "1MiB", "chunk_deadline": "30s"},
            "sampling": {"staleness": "unlimited"},
            "commands": {"judge": {"command": ["true"], "options": {"until": 3}}},
        }
    ),
    "python",
)


class Manager(FirstManager):
    """Welcomes every worker once ``welcoming`` is set, and sends all workers the addresses of store and workers."""

    world = 1
    """Number of ranks of each replica."""

    def __init__(self, listener: Listener) -> None:
        super().__init__(listener)
        self.welcoming = asyncio.Event()
        self.welcoming.set()
        self.current = Peers(listener.epoch, 1, {})

    async def serve(self) -> None:
        while True:
            incoming = await self.listener.receive()
            self.received.append(incoming.message)
            self.peers[incoming.message.incarnation] = incoming.peer
            if isinstance(incoming.message, Hello):
                await self.welcoming.wait()
                await self._welcome(incoming.peer, incoming.message)

    async def _welcome(self, peer: bytes, hello: Hello) -> None:
        known = self.current.peers.get(hello.incarnation.replica)
        if known is not None and known.incarnation.number > hello.incarnation.number:
            return  # an older incarnation that connects again, for example after a SIGCONT
        addresses = hello.weight_address, hello.rendezvous_address
        self._add(Peer(hello.incarnation, hello.listen_address, True, *addresses))
        rank = rank_of(hello.incarnation.replica)
        await self.listener.send(peer, Welcome(hello.incarnation, self.current, rank, self.world))
        for other in self.peers:
            if other != hello.incarnation and other.replica in self.current.peers:
                await self.send(other, self.current)

    def store_is(self, endpoint: str, epoch: int = STORE.number) -> None:
        self._add(Peer(crew.incarnation_of(STORE.replica, epoch), endpoint, joined=True))

    def _add(self, peer: Peer) -> None:
        known = self.current.peers.get(peer.incarnation.replica)
        if known is not None and known.incarnation.number > peer.incarnation.number:
            return  # a process that was stopped for more than 5 s connects again
        peers = {**self.current.peers, peer.incarnation.replica: peer}
        self.current = Peers(self.listener.epoch, self.current.seq + 1, peers)

    async def stop(self, incarnation: Incarnation) -> None:
        await self.send(incarnation, Stop(incarnation, 5.0, "the test is over"))

    async def dismiss(self, role: Role, incarnation: Incarnation) -> None:
        """Stop a role once it has said goodbye, and wait until it has ended."""
        await self.wait_for(Goodbye)
        await self.stop(incarnation)
        await role.end()


class Role:
    """Runs ``play`` in a thread; ``end`` raises the exception of ``play``."""

    def __init__(self, play: Callable[[], object]) -> None:
        self._ended: Future[None] = Future()
        threading.Thread(target=self._main, args=(play,), daemon=True).start()

    def _main(self, play: Callable[[], object]) -> None:
        try:
            play()
        except BaseException as error:
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)

    @property
    def ended(self) -> bool:
        return self._ended.done()

    async def end(self) -> None:
        await asyncio.wait_for(asyncio.wrap_future(self._ended), TIMEOUT_S)


class Scene:
    """A run directory with its managers, stores and workers."""

    def __init__(self, at: Lab) -> None:
        self.at = at
        self.manager_type = Manager
        write_atomically(at.run.run_spec, msgspec.json.encode(JOB))

    def launch(self, incarnation: Incarnation) -> Launch:
        return self.at.launch(replica=incarnation.replica, number=incarnation.number)

    def worker(self, incarnation: Incarnation) -> Worker:
        return Worker(self.launch(incarnation), self.at.run, self.at.keys)

    def start(self, me: Worker, play: Callable[[], object] = lambda: None) -> Role:
        def main() -> None:
            with me:
                play()

        return Role(main)

    @asynccontextmanager
    async def manager(self, epoch: int = 1) -> AsyncIterator[Manager]:
        listener = await Listener.open(self.at.keys, ToManager, epoch=epoch)
        manager = self.manager_type(listener)
        write_atomically(self.at.run.manager, msgspec.json.encode(listener.address))
        serving = asyncio.create_task(manager.serve())
        try:
            yield manager
        finally:
            serving.cancel()
            await listener.close()

    @asynccontextmanager
    async def serve(self, store: Store, epoch: int = STORE.number) -> AsyncIterator[str]:
        """Serve ``store`` until the block ends; provide its endpoint."""
        listener = await Listener.open(self.at.keys, Request, epoch=epoch)
        server = Server(store, listener)
        running = asyncio.create_task(server.run())
        try:
            yield listener.endpoint
        finally:
            server.stop()
            await running
            await listener.close()

    @asynccontextmanager
    async def manager_and(self, store: Store) -> AsyncIterator[Manager]:
        """Serve ``store`` beside a manager that names it."""
        async with self.serve(store) as endpoint, self.manager() as manager:
            manager.store_is(endpoint)
            yield manager

    def open_store(self) -> Store:
        return crew.open_store(self.at.run.store)


@contextlib.asynccontextmanager
async def role_process(
    scene: Scene, manager: Manager, code: str
) -> AsyncIterator[tuple[Launch, asyncio.subprocess.Process]]:
    """Start a role that runs ``code``, provide it once it works, and end it afterwards."""
    launch = scene.launch(crew.REWARD)
    env = {
        "PATH": "/usr/bin:/bin",
        "RRL_HEARTBEAT_INTERVAL": "0.05",
        LAUNCH_ENV: str(scene.at.run.launch_file(launch.tag)),
    }
    argv = [sys.executable, "-P", "-c", code]
    child = await asyncio.create_subprocess_exec(*argv, env=env, stderr=asyncio.subprocess.PIPE)
    try:
        await manager.wait_for(FirstWorkDone)
        yield launch, child
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()
