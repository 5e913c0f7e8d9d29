"""A whole site in virtual time around the real manager: a cluster, agents, workers, and the messages between them.

What lives here outlives the manager. It can be killed at any record, in the middle of whatever it was doing: nothing
that it does afterwards reaches the site. Files are real.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from rrl.manager import executor, lease, runtime
from rrl.manager.cluster import (
    AllocationSeen,
    AllocationState,
    Ask,
    NodeSeen,
    NodeState,
    Observed,
    Refused,
    Step,
    Unanswered,
)  # fmt: skip
from rrl.manager.events import Stamped
from rrl.manager.journal import Journal
from rrl.manager.lease import Lease
from rrl.manager.state import State
from rrl.spec.faults import Fault, FaultKind
from rrl.spec.jobview import JobView
from rrl.spec.launch import ExitRecord, read_launch
from rrl.spec.rundir import RunDir, write_atomically
from rrl.spec.words import AGENT, Life, NodeName, Outcome, ReplicaId, Version, index_of, role_of
from rrl.tests.manager import virtual
from rrl.transport import messages as msg
from rrl.transport.control import Address, Incoming
from rrl.transport.keys import RunKeys

WIRE = 0.01
"""s that a message takes"""
_PHASE = {"trainer": "train", "rollout": "generate", "reward": "score"}


class Killed(BaseException):
    """kill -9 of the manager, where it stands."""


class Site:
    """``crash_at``: when this trainer step is committed, the node of rollout/1 dies; ``cancel_at``: somebody cancels
    the run. ``kill_at``: the manager dies
    over the run's so-manieth record, ``before`` it is written or just after it was made durable."""

    def __init__(self, run: RunDir, job: JobView, nodes: int, crash_at: int = -1, cancel_at: int = -1) -> None:
        self.run, self.job, self.crash_at, self.cancel_at = run, job, crash_at, cancel_at
        self.free = [NodeName(f"n{i}") for i in range(1, nodes + 1)]
        self.allocations: dict[str, tuple[NodeName, ...]] = {}
        self.granted: list[str] = []
        self.launched: list[str] = []
        self.started: list[str] = []
        """of the launched, those that ran: on a dead node nothing does"""
        self.dead_nodes: set[NodeName] = set()
        self.actors: dict[str, Actor] = {}
        """by step tag: everything that runs"""
        self.committed = 0
        self.kill_at, self.before = -1, False
        self.kill_every = 0
        """each manager dies over its so-manieth record"""
        self.records: list[Stamped] = []
        """of all managers"""
        self.lose_answers = False
        """what is asked is done, and nobody hears of it"""
        self.deaf = 0
        """so many asks are neither done nor answered"""
        self.full_after: int | None = None
        """number of the record after which the disk is full, for so many flushes:"""
        self.full_flushes = 6
        self.done_after = 15.0
        """s that a command works before it is done; each further replica of its role so much longer again"""
        self.blink = False
        """every second look misses allocations and steps, or cannot be read"""
        self.looks = 0
        self.meanwhile: Callable[[], None] = lambda: None
        """what happens while there is no manager"""
        self.gap = 1.0
        """s before the next manager is started"""
        self.managers = 0
        self.journals: list[Journal] = []
        """open ones"""
        self.listener: FakeListener | None = None
        self.now: Mortal = Mortal()
        """the manager of now"""
        self._written = 0
        self._tasks: set[asyncio.Task[Any]] = set()

    # ── managers come and go ─────────────────────────────────────────────────────────────────────────────────────────
    async def manage(self, patience: float = 3000.0) -> Outcome:
        """Managers, one after the other, until one says that the run has ended."""
        driver = asyncio.current_task()
        async with asyncio.timeout(patience):
            while True:
                self.managers += 1
                self.now, self._written = Mortal(), 0
                manager = runtime.Manager(self.run, FakeCluster(self, self.now), self.job, str(self.run.job_toml), "x")
                work = asyncio.create_task(manager.run())
                died = asyncio.create_task(self.now.died.wait())
                await asyncio.wait([work, died], return_when=asyncio.FIRST_COMPLETED)
                if not self.now.dead:
                    died.cancel()
                    outcome = work.result()
                    assert outcome is not None
                    return outcome
                self.listener = None
                rest = [task for task in asyncio.all_tasks() if task is not driver and task not in self._tasks]
                for task in rest:
                    task.cancel()
                await asyncio.gather(*rest, return_exceptions=True)
                for journal in list(self.journals):
                    journal.close()
                await asyncio.sleep(self.gap)
                self.meanwhile()

    def record(self, journal: Journal, stamped: Stamped) -> None:
        """Called by the journal for each record; the manager may die of it."""
        self._written += 1
        fatal = len(self.records) + 1 == self.kill_at or self._written == self.kill_every
        if fatal and self.before:
            self.kill_at = -1
            self.now.die()
        Journal.append(journal, stamped)
        self.records.append(stamped)
        if fatal:
            Journal.flush(journal)
            self.now.die()

    # ── the cluster ──────────────────────────────────────────────────────────────────────────────────────────────────
    def request(self, ask: Ask) -> None:
        assert ask.tag not in self.granted, f"{ask.tag} was requested twice"
        nodes = [node for node in self.free if node not in ask.exclude and node not in self.dead_nodes][: ask.count]
        if len(nodes) < ask.count:
            raise Refused("not enough nodes")
        self.free = [node for node in self.free if node not in nodes]
        self.allocations[ask.tag] = tuple(nodes)
        self.granted.append(ask.tag)

    def release(self, tag: str) -> None:
        for node in self.allocations.pop(tag, ()):
            self.free.append(node)
            for actor in [actor for actor in self.actors.values() if actor.node == node]:
                actor.vanish()

    def launch(self, step: Step) -> None:
        assert step.tag not in self.launched, f"{step.tag} was launched twice"
        self.launched.append(step.tag)
        if step.node not in self.allocations.get(step.allocation, ()):
            raise Refused(f"{step.node} is not in {step.allocation}")
        if step.node not in self.dead_nodes:
            self.started.append(step.tag)
            self.actors[step.tag] = Actor(self, step.tag, read_launch(step.launch_file).life, step.node)

    def observe(self) -> Observed:
        self.looks += 1
        if self.blink and self.looks % 2:
            return Observed({}, {}, {}) if self.looks % 4 == 1 else Observed(None, None, None, "timed out")
        seen = {tag: AllocationSeen(AllocationState.RUNNING, "7", nodes) for tag, nodes in self.allocations.items()}
        nodes = {node: NodeSeen(NodeState.UP) for held in self.allocations.values() for node in held}
        return Observed(nodes, seen, {tag: actor.node for tag, actor in self.actors.items()})

    # ── what happens by itself ───────────────────────────────────────────────────────────────────────────────────────
    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def working(self) -> dict[ReplicaId, list[Actor]]:
        """Living workers by replica, agents left out."""
        found: dict[ReplicaId, list[Actor]] = {}
        for actor in self.actors.values():
            if actor.working and role_of(actor.life.replica) != AGENT:
                found.setdefault(actor.life.replica, []).append(actor)
        return found

    def all_work(self) -> bool:
        return len(self.working()) == sum(role.replicas for role in self.job.roles)

    def commit(self) -> None:
        self.committed += 1
        if self.committed == self.crash_at:
            self.crash(self.working()[ReplicaId("rollout/1")][-1].node)
        if self.committed == self.cancel_at:
            letter = msgspec.json.encode({"command": "cancel", "by": "ada"})
            write_atomically(self.run.mailbox / "letter.json", letter)

    def crash(self, node: NodeName) -> None:
        self.dead_nodes.add(node)
        for actor in [actor for actor in self.actors.values() if actor.node == node]:
            actor.vanish()

    async def to_rest(self) -> None:
        """A while after the run has ended, so that whoever is still about has heard of it."""
        await asyncio.sleep(100.0)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Mortal:
    """One manager's life: whatever it holds of the world is let go when it dies."""

    def __init__(self) -> None:
        self.dead = False
        self.died = asyncio.Event()

    def die(self) -> None:
        self.dead = True
        self.died.set()
        raise Killed


class Actor:
    """A step: its first process and its worker in one, or an agent."""

    def __init__(self, site: Site, tag: str, life: Life, node: NodeName) -> None:
        self.site, self.tag, self.life, self.node = site, tag, life, node
        self.peer = tag.encode()
        self.working = False
        self.done = 0
        self._held: int | None = None
        self._ended: msg.StepExit | None = None
        self._known: FakeListener | None = None
        self._admitted = False
        self._task = site.spawn(self._live())

    @property
    def role(self) -> str:
        return role_of(self.life.replica)

    async def _live(self) -> None:
        await asyncio.sleep(0.3)
        while True:
            listener = self.site.listener
            if listener is not None and listener is not self._known:  # a new manager: nothing said before counts
                self._known = listener
                self._say(self._ended or msg.Wanted(self.life, self.tag, self.node, 1))
                if self.working:
                    self._greet()
            elif self.working:
                self._beat()
            await asyncio.sleep(self.site.job.limits.beat)

    def hear(self, message: Any) -> None:
        if self._ended is not None:
            return
        if isinstance(message, msg.Admitted):
            if not message.ok:
                self._end("unwanted")
            elif not self._admitted:
                self._admitted = True
                self.site.spawn(self._work())
        elif isinstance(message, msg.Fenced):
            self._end("unwanted")
        elif isinstance(message, msg.Stop):
            self._end("asked")
        elif isinstance(message, msg.Inject):
            assert message.fault.kind is FaultKind.KILL
            target = self.site.actors.get(message.tag)
            if target is not None:
                target.die()
            self._say(msg.Injected(message.fault, target is not None))

    async def _work(self) -> None:
        await asyncio.sleep(0.7)
        if self._ended is not None or self.tag not in self.site.actors:
            return
        self.working = True
        self._greet()
        if self.role == "trainer":
            await self._train()
        elif any(role.name == self.role and role.kind == "command" for role in self.site.job.roles):
            await asyncio.sleep(self.site.done_after * (1 + int(index_of(self.life.replica))))
            self._say(msg.Goodbye(self.life))
            self._end("exited")

    async def _train(self) -> None:
        """A step every two seconds, while there is everybody that it takes."""
        while self.tag in self.site.actors and self.site.committed < self.site.job.steps:
            await asyncio.sleep(2.0)
            if self.tag in self.site.actors and self.site.all_work():
                self.site.commit()
                self._say(msg.Committed(self.life, self.site.committed, {"reward": 0.5}))

    def _greet(self) -> None:
        if self.role == AGENT:
            self._say(msg.AgentHello(self.life, self.tag, self.node, self.node, 2, "boot"))
            return
        holds = Version(0, 1) if self.role in ("trainer", "rollout") else None
        committed = self.site.committed if self.role == "trainer" else None
        phase = _PHASE.get(self.role, "serve")
        self._say(msg.Hello(self.life, self.tag, self.node, self.node, 2, phase, None, None, holds, committed))

    def _beat(self) -> None:
        self.done += 1
        if self.role == AGENT:
            self._say(msg.AgentBeat(self.life, self.node))
        else:
            self._say(msg.Beat(self.life, _PHASE.get(self.role, "serve"), self.done))

    def die(self) -> None:
        """SIGKILL of the worker: the first process leaves the record."""
        self._end("signalled")

    def _end(self, why: str) -> None:
        if self._ended is not None:
            return
        signal = 9 if why == "signalled" else None
        code = None if signal else 0
        record = ExitRecord(self.tag, self.life, self.node, code, signal, why, 0.0)
        write_atomically(self.site.run.exit_file(self.tag), msgspec.json.encode(record))
        self._ended = msg.StepExit(self.life, self.tag, code, signal, why)
        self._say(self._ended)
        self.vanish()

    def vanish(self) -> None:
        self.working = False
        self.site.actors.pop(self.tag, None)
        self._task.cancel()

    def _say(self, message: Any) -> None:
        listener = self.site.listener
        if listener is not None and listener is self._known:
            asyncio.get_running_loop().call_later(WIRE, listener.take, Incoming(self.peer, None, message))


class FakeListener:
    def __init__(self, site: Site, epoch: int) -> None:
        self._site, self._mortal = site, site.now
        self._queue: asyncio.Queue[Incoming] = asyncio.Queue()
        self.address = Address(epoch, f"tcp://nowhere:{epoch}")
        site.listener = self

    def take(self, incoming: Incoming) -> None:
        self._queue.put_nowait(incoming)

    async def receive(self) -> Incoming:
        return await self._queue.get()

    async def send(self, peer: bytes, message: Any, ask: int | None = None) -> None:
        if not self._mortal.dead:
            asyncio.get_running_loop().call_later(WIRE, self._deliver, peer.decode(), message)

    def _deliver(self, tag: str, message: Any) -> None:
        actor = self._site.actors.get(tag)
        if actor is not None:
            actor.hear(message)

    async def close(self) -> None:
        if self._site.listener is self:
            self._site.listener = None


class FakeCluster:
    """The manager's end of the cluster: its commands take a while, and their answers can be lost with the manager."""

    def __init__(self, site: Site, mortal: Mortal) -> None:
        self._site, self._mortal = site, mortal

    async def _on_the_way(self) -> None:
        await asyncio.sleep(0.2)
        if self._mortal.dead:
            await asyncio.Event().wait()

    async def _back(self) -> None:
        await self._on_the_way()
        if self._site.lose_answers:
            raise Unanswered("timed out")

    async def _there(self) -> None:
        await self._on_the_way()
        if self._site.deaf:
            self._site.deaf -= 1
            raise Unanswered("timed out")

    async def request(self, ask: Ask) -> None:
        await self._there()
        self._site.request(ask)
        await self._back()

    async def release(self, tag: str) -> None:
        await self._on_the_way()
        self._site.release(tag)
        await self._on_the_way()

    async def launch(self, step: Step) -> None:
        await self._there()
        self._site.launch(step)
        await self._back()

    async def joined(self, tag: str) -> None:
        pass

    async def stop(self, tag: str, grace: float) -> None:
        await self._on_the_way()
        actor = self._site.actors.get(tag)
        if actor is not None:
            actor.hear(msg.Stop(actor.life, grace, "stopped"))
        await self._on_the_way()

    async def drain(self, node: NodeName, reason: str) -> None:
        raise Refused("not here")

    async def undrain(self, node: NodeName, reason: str) -> None:
        raise Refused("not here")

    async def shrink(self, tag: str, nodes: tuple[NodeName, ...]) -> None:
        raise Refused("not here")

    async def harm(self, fault: Fault) -> str:
        raise Refused("not here")

    async def observe(self) -> Observed:
        await self._on_the_way()
        return self._site.observe()

    async def close(self) -> None:
        pass


def prepare(site: Site, patch: pytest.MonkeyPatch) -> None:
    """Have the real manager live in this site, in virtual time."""
    mortals = site

    class MortalJournal(Journal):
        def __init__(self, run: RunDir, epoch: int) -> None:
            super().__init__(run, epoch)
            mortals.journals.append(self)

        def append(self, stamped: Stamped) -> None:
            if not mortals.now.dead:
                mortals.record(self, stamped)

        def flush(self) -> None:
            full = mortals.full_after is not None and len(mortals.records) >= mortals.full_after
            if full and mortals.full_flushes:
                mortals.full_flushes -= 1
                raise OSError(28, "No space left on device")
            if not mortals.now.dead:
                super().flush()

        def rotate(self, state: State) -> None:
            if not mortals.now.dead:
                super().rotate(state)

        def close(self) -> None:
            mortals.journals.remove(self)
            super().close()

    class MortalLease(Lease):
        def renew(self) -> None:
            if not mortals.now.dead:
                super().renew()

        def release(self) -> None:
            if not mortals.now.dead:
                super().release()

    class Listening:
        @staticmethod
        async def open(
            keys: RunKeys, up: Any, *, epoch: int = 0, host: str = "", bounds: Any = None
        ) -> FakeListener:
            return FakeListener(mortals, epoch)

    class NoLogs:
        """Nothing here writes a log, and a real socket knows no virtual time."""

        @staticmethod
        async def open(*_: Any) -> NoLogs:
            return NoLogs()

        def notice(self, event: Any) -> None:
            pass

        async def close(self) -> None:
            pass

    patch.setattr(runtime, "LogCollector", NoLogs)
    patch.setattr(runtime, "Journal", MortalJournal)
    patch.setattr(runtime, "Lease", MortalLease)
    patch.setattr(runtime, "Listener", Listening)
    patch.setattr(runtime, "time", virtual.Clock)
    patch.setattr(lease, "time", virtual.Clock)
    assert not hasattr(executor, "time")
