"""Runs a gang of real trainer processes with a real store of recorded trajectories and real snapshot servers.

The manager is a substitute: it welcomes members, sends them the peer directory, and fences all members when one has
died. The processes are forked from a process that has imported torch, so that an incarnation starts in one second
instead of six.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import random
from collections.abc import AsyncIterator, Iterator
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import msgspec

from rrl.config.job.resolve import resolve
from rrl.config.job.schema import Job
from rrl.core.run_dir import write_atomically
from rrl.core.run_spec import RunSpec
from rrl.core.types import Incarnation, NodeName, ReplicaId, Version, member_id, rank_of
from rrl.roles.snapshots.server import SnapshotServer
from rrl.roles.trajectories.server import Server
from rrl.roles.trajectories.store import Store
from rrl.roles.trajectories.types import CommittedState, Prompt, Score, Segment, StepRequest
from rrl.tests.support.listening_manager import Lab
from rrl.tests.support.roles import folders
from rrl.tests.support.roles.trainer import mortal
from rrl.tests.support.roles.trainer.guests import Guest
from rrl.tests.support.roles.trajectories import crew
from rrl.transport.control.endpoints import Listener
from rrl.transport.messages import Fenced, Goodbye, Hello, Peer, Peers, Stop, ToManager, VersionAvailable, Welcome

END_TIMEOUT_S = 120.0
"""Deadline (s) for the end of an incarnation. No test depends on the time that it takes."""
GANG = ReplicaId("trainer/0")
VOCABULARY = 13
_GROUP, _PER_BATCH, _MAX_NEW = 3, 3, 3
_RATES = {"learning_rate": 1e-3, "entropy": 0.02, "warm_start_learning_rate": 3e-3}
"""The rates of any model; with the default rates of a model in a folder, two steps would move no weight in bfloat16."""
_STORE = crew.incarnation_of("trajectories/0")
_ROLLOUT, _REWARD = crew.incarnation_of("rollout/0"), crew.incarnation_of("reward/0")


@contextlib.contextmanager
def nursery() -> Iterator[ForkServerContext]:
    """Provide the server from which trainer processes are forked; end it afterwards."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([mortal.__name__, folders.__name__])
    try:
        yield context
    finally:
        forkserver._forkserver._stop()  # type: ignore[attr-defined]  # without this, it runs as long as pytest


def recorded(folder: Path, steps: int, uncommitted: int, *, stream: bool = False) -> Store:
    """Return a store with all trajectories that ``steps`` steps train on; every call returns equal trajectories.

    With ``stream`` each part has one group, because a part that exceeds ``max_part_bytes`` (1) has only one.
    """
    dice = random.Random(7)
    cut: dict[str, Any] = {"max_part_bytes": 1} if stream else {}
    store = Store(
        folder,
        group_size=_GROUP,
        groups_per_batch=_PER_BATCH,
        max_ahead_batches=steps,
        max_new_tokens=_MAX_NEW,
        next_prompt=lambda i: Prompt(i, tuple(2 + (i + place) % 10 for place in range(1 + i % 2))),
        keep_uncommitted=uncommitted,
        **cut,
    )
    store.update_membership({_ROLLOUT, _REWARD})
    ids = [item.trajectory for item in crew.lease(store, _ROLLOUT, steps * _PER_BATCH * _GROUP)]
    segments = []
    for one in ids:
        tokens = tuple(dice.randrange(1, VOCABULARY) for _ in range(dice.randint(1, _MAX_NEW)))
        segments.append(Segment(one, 0, tokens, tuple(-3 * dice.random() for _ in tokens), Version(0, 1)))
    store.append(_ROLLOUT, segments, ids)
    store.post_scores(_REWARD, [Score(one, dice.random(), dice.random()) for one in ids])
    store.flush()
    return store


class Stage:
    """A run of ``steps`` training steps in ``path`` by a gang of ``world`` members, each on a node of its own.

    Args:
        snapshots: Whether each member's node and one further node have a snapshot server.
        model: Table ``[model]`` of job.toml, instead of the small model that is built.
        gpus: Number of this machine's GPUs that each member uses; with 0, members compute on the CPU.
        stream: Whether a step comes in three parts.
        lends: Whether the trainer lends before each step (:mod:`.guests`); with ``stream`` only.
        trainer: Further keys of ``[roles.trainer]``.
    """

    def __init__(
        self,
        path: Path,
        processes: ForkServerContext,
        *,
        world: int,
        steps: int,
        snapshots: bool = False,
        uncommitted: int = 1,
        model: dict[str, Any] | None = None,
        gpus: int = 0,
        stream: bool = False,
        lends: bool = False,
        **trainer: Any,
    ) -> None:
        self.lab = Lab(path)
        self.world, self.steps, self._gpus = world, steps, gpus
        self._processes = processes
        settings = {**_RATES, "ranks": world, "snapshots": snapshots, "uncommitted": uncommitted, **trainer}
        self.job = _job(steps, model or _BUILT, settings, stream, lends)
        self._stream, self._lends = stream, lends
        if lends:
            (self.lab.run.path / mortal.LENDS).mkdir()
        write_atomically(self.lab.run.run_spec, msgspec.json.encode(self.job))
        self._uncommitted = uncommitted
        self._nodes = [NodeName(f"n{index}") for index in range(world + 1)] if snapshots else []
        self._snapshot_servers: dict[NodeName, SnapshotServer] = {}
        self._peers: dict[ReplicaId, Peer] = {}
        self._seq = 0
        self.incarnation = 0
        self.guests: list[Guest] = []
        """The guests of the members' nodes, if the trainer lends."""
        self._lines: dict[Incarnation, bytes] = {}
        self.versions: list[Version] = []
        """The weight versions that the trainer reported to the manager, in order."""

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Stage]:
        run, keys = self.lab.run, self.lab.keys
        for node in self._nodes:
            self.agent_starts(node)
        self.store = recorded(run.store, self.steps, self._uncommitted, stream=self._stream)
        self._listener = await Listener.open(keys, ToManager, epoch=1)
        write_atomically(run.manager, msgspec.json.encode(self._listener.address))
        served = await Listener.open(keys, StepRequest, epoch=_STORE.number)
        self._peers[_STORE.replica] = Peer(_STORE, served.endpoint, joined=True)
        server = Server(self.store, served)
        self._start_guests()
        tasks = [asyncio.create_task(server.run()), asyncio.create_task(self._manage())]
        try:
            yield self
        finally:
            server.stop()
            await tasks[0]
            tasks[1].cancel()
            for listener in (served, self._listener):
                await listener.close()
            for node in list(self._snapshot_servers):
                self.agent_dies(node)
            for guest in self.guests:
                guest.end()
            self.store.close()

    def _start_guests(self) -> None:
        nodes = [NodeName(f"n{rank}") for rank in range(self.world)] if self._lends else []
        for node in nodes:
            guest = Guest(self.lab.run.id, node, self.lab.keys)
            self._peers[guest.incarnation.replica] = Peer(guest.incarnation, joined=True)
            self.guests.append(guest)

    def agent_starts(self, node: NodeName) -> None:
        server = self._snapshot_servers[node] = SnapshotServer(self.lab.run.id, node, self.lab.keys, "127.0.0.1")
        server.start()

    def agent_dies(self, node: NodeName) -> None:
        """Stop the node's snapshot server; its snapshots are lost."""
        self._snapshot_servers.pop(node).close()

    @property
    def committed(self) -> int | None:
        state = self.store.committed(Incarnation(GANG, self.incarnation))
        assert isinstance(state, CommittedState)
        return state.number

    async def live(self, moment: str = "", step: int = 0, rank: int = 0, world: int | None = None) -> list[int | None]:
        """Run one incarnation of the gang to its end, and return the members' exit codes (negative for a signal).

        Args:
            moment: Point of the training step at which member ``rank`` kills itself; if empty, no member dies.
            step: Number of that training step.
            world: Number of members from now on; None keeps the number.
        """
        self.incarnation += 1
        self.world = world or self.world
        members = [Incarnation(member_id(GANG, each), self.incarnation) for each in range(self.world)]
        for replica in [each for each in self._peers if each.startswith(GANG)]:
            del self._peers[replica]
        started = [
            self._start(incarnation, moment, step, bool(moment) and each == rank)
            for each, incarnation in enumerate(members)
        ]
        try:
            await self._until_one_ends(started)
            if any(process.exitcode not in (None, 0) for process in started):
                for incarnation in members:
                    await self._send(incarnation, Fenced(incarnation, "its gang restarts"))
            await asyncio.wait_for(asyncio.gather(*(asyncio.to_thread(each.join) for each in started)), END_TIMEOUT_S)
        finally:
            for process in started:
                process.kill()
        return [process.exitcode for process in started]

    def _start(self, incarnation: Incarnation, moment: str, step: int, dies: bool) -> ForkServerProcess:
        node = f"n{rank_of(incarnation.replica)}"
        launch = self.lab.launch(replica=incarnation.replica, number=incarnation.number, node=node)
        launch = msgspec.structs.replace(launch, gpus=self._gpus)
        write_atomically(self.lab.run.launch_file(launch.tag), msgspec.json.encode(launch))
        file, log = str(self.lab.run.launch_file(launch.tag)), str(self._log(incarnation))
        words = file, log, moment, step, dies, incarnation.number
        process = self._processes.Process(target=mortal.play, args=words, daemon=True)
        process.start()
        return process

    async def _until_one_ends(self, started: list[ForkServerProcess]) -> None:
        """Wait until a member has failed, or all have ended with exit code 0."""
        async with asyncio.timeout(END_TIMEOUT_S):
            while any(each.is_alive() for each in started) and all(each.exitcode in (None, 0) for each in started):
                await asyncio.sleep(0.02)

    async def _manage(self) -> None:
        while True:
            incoming = await self._listener.receive()
            match incoming.message:
                case Hello(incarnation=incarnation, rendezvous_address=store):
                    self._lines[incarnation] = incoming.peer
                    self._peers[incarnation.replica] = Peer(incarnation, joined=True, rendezvous_address=store)
                    self.store.update_membership(peer.incarnation for peer in self._peers.values())
                    welcome = Welcome(
                        incarnation, self._snapshot_servers_message(), rank_of(incarnation.replica), self.world
                    )
                    await self._listener.send(incoming.peer, welcome)
                    for each in [each for each in self._lines if each.number == self.incarnation]:
                        await self._send(each, self._snapshot_servers_message())
                case VersionAvailable(version=version):
                    self.versions.append(version)
                case Goodbye(incarnation):
                    await self._send(incarnation, Stop(incarnation, 5.0, "it is done"))

    def _snapshot_servers_message(self) -> Peers:
        self._seq += 1
        servers = {node: server.address for node, server in self._snapshot_servers.items()}
        return Peers(1, self._seq, dict(self._peers), snapshot_servers=servers)

    async def _send(self, incarnation: Incarnation, message: Any) -> None:
        if incarnation in self._lines:
            await self._listener.send(self._lines[incarnation], message)

    def _log(self, incarnation: Incarnation) -> Path:
        return self.lab.run.logs / f"{incarnation.replica.replace('/', '-')}.{incarnation.number}.log"

    def log(self, incarnation: int, rank: int = 0) -> str:
        return self._log(Incarnation(member_id(GANG, rank), incarnation)).read_text()

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(self.lab.run.logs.iterdir()))


_BUILT = {"hidden_size": 32, "intermediate_size": 64, "tokenizer": {"pieces": "0123456789="}}


def _job(steps: int, model: dict[str, Any], trainer: dict[str, Any], stream: bool, lends: bool) -> RunSpec:
    job = Job.model_validate(
        {
            "run": {"name": "test", "steps": steps, "seed": 3},
            "model": model,
            "sampling": {"stream": stream},
            "task": {"function": f"{__name__}:Doubles"},
            "roles": {"trainer": {"warm_start_steps": 0} | trainer},
            "transport": {"weights": "tcp"},
            "tags": {"trainer": ["rollout"]} if lends else {},
        }
    )
    return resolve(job, "python")


class Doubles:
    """A task for a warm start: the answer to a digit is its double."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def prompt(self, i: int) -> str:
        return f"{(i + self._seed) % 5}="

    def answer(self, i: int) -> str:
        return f"{2 * ((i + self._seed) % 5)}"

    def score(self, i: int, answer: str) -> tuple[float, float]:
        raise AssertionError("a warm start scores nothing")
