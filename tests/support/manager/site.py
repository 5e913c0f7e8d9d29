"""Simulates the site of a real manager in virtual time: a cluster, agents, workers, and the messages between them.

The site outlasts the manager. The manager can be killed at any record, in the middle of an operation. Nothing that it
does after the kill reaches the site. Files are real.

Use :class:`Site` for tests of what happens between decisions and their effects, such as late or repeated messages, lost
answers of the cluster, polls, hung or full storage, and the kill of a manager at any record. For tests of decisions
alone use :class:`.world.World`, which runs only ``fold`` and ``plan``; its module says why the two are separate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import msgspec
import pytest

from rrl.cluster.base import (
    AllocationNotRunning,
    AllocationRequest,
    AllocationState,
    AllocationStatus,
    ClusterSnapshot,
    NodeState,
    NodeStatus,
    Refused,
    Step,
    Unanswered,
)
from rrl.core.faults import Fault, FaultKind
from rrl.core.launch import ExitReason, ExitRecord, read_launch
from rrl.core.phases import STANDBY, ClockReading, PhaseTime
from rrl.core.run_dir import RunDir, write_atomically
from rrl.core.run_spec import RunSpec
from rrl.core.types import (
    AGENT,
    STANDBY_ROLE,
    Finding,
    Incarnation,
    NodeName,
    Outcome,
    ReplicaId,
    Version,
    index_of,
    rank_of,
    role_of,
)
from rrl.manager import runtime
from rrl.manager.execute import executor
from rrl.manager.model.events import Stamped
from rrl.manager.model.reduce_commands import members_of
from rrl.manager.model.state import State
from rrl.manager.storage import lease, resume_request
from rrl.manager.storage.journal import Follower, Journal
from rrl.manager.storage.lease import Lease
from rrl.manager.storage.resume_request import ResumeRequest
from rrl.tests.support.manager import virtual
from rrl.transport import messages as msg
from rrl.transport.control.endpoints import Address, Incoming
from rrl.transport.keys import RunKeys

WIRE = 0.01
"""Latency of a message (s)."""
_PHASE = {"trainer": "train", "rollout": "generate", "reward": "score", STANDBY_ROLE: STANDBY}


class Killed(BaseException):
    """Raised in the manager when it is killed, as if by SIGKILL."""


class Site:
    """A virtual site.

    ``crash_at``: training step at whose commit the node of rollout/1 fails. ``cancel_at``: step at which the run is
    cancelled. ``kill_at``: number of the record at which the manager is killed, either ``before`` it is written or just
    after it was made durable.
    """

    def __init__(self, run: RunDir, job: RunSpec, nodes: int, crash_at: int = -1, cancel_at: int = -1) -> None:
        self.run, self.job, self.crash_at, self.cancel_at = run, job, crash_at, cancel_at
        self.free = [NodeName(f"n{i}") for i in range(1, nodes + 1)]
        self.allocations: dict[str, tuple[NodeName, ...]] = {}
        self.granted: list[str] = []
        self.max_nodes_held = 0
        """Largest number of nodes that were allocated at the same time."""
        self.cancelled: dict[str, tuple[NodeName, ...]] = {}
        """Allocations that were cancelled from outside and that the cluster still lists."""
        self.launched: list[str] = []
        self.started: list[str] = []
        """Launched steps that ran. A step that is launched on a dead node does not run."""
        self.promotions: list[str] = []
        """Standby process and new incarnation of every promotion, as text."""
        self.shared_gpus: list[str] = []
        """Pairs of working processes that used one GPU at the same time, as text."""
        self.doubled: list[str] = []
        """Tags that were requested or launched twice. They are collected, because the executor would survive an
        exception."""
        self.worked: set[Incarnation] = set()
        """Incarnations of roles that worked, whether a manager received a report of it or not."""
        self.lifetimes_ns: dict[Incarnation, int] = {}
        """Lifetime that each incarnation of a role last reported, whether a manager received the report or not."""
        self.dead_nodes: set[NodeName] = set()
        self.still_listed: dict[str, NodeName] = {}
        """Steps of dead nodes. As Slurm does, the cluster lists them until their allocation loses the node."""
        self.cut_off: set[NodeName] = set()
        """Nodes whose processes run, although no message from or to them arrives."""
        self.is_silent = False
        """True if the cluster answers no poll."""
        self.actors: dict[str, Actor] = {}
        """Everything that runs on the site, by step tag."""
        self.committed = 0
        self.evaluations_confirmed = -1
        self.kill_at, self.before = -1, False
        self.kill_every = 0
        """Number of its own records after which each manager is killed."""
        self.records: list[Stamped] = []
        """Records of all managers."""
        self.lose_answers = False
        """True if cluster commands are carried out but their answers are lost."""
        self.deaf = 0
        """Number of the next cluster commands that are neither carried out nor answered."""
        self.full_after: int | None = None
        """Number of the record after which the disk is full, for ``full_flushes`` flushes."""
        self.full_flushes = 6
        self.done_after = 15.0
        """Seconds that a command of replica 0 works before it exits. A command of replica n works n + 1 times as
        long."""
        self.blink = False
        """True if every second poll misses allocations and steps, or fails."""
        self.polls = 0
        self.at_step: dict[int, Callable[[Site], None]] = {}
        """Callbacks by training step; each is called when its step is committed."""
        self.drained: dict[NodeName, str] = {}
        """Drained nodes, with the reason."""
        self.shrunk: list[NodeName] = []
        """Nodes that were released singly, while the rest of their allocation remained."""
        self.clock_jump = 0.0
        """Seconds by which the host's clock is wrong. Tests change this number during the run."""
        self.ill: dict[NodeName, tuple[Finding, ...]] = {}
        """Findings that agents report on their nodes."""
        self.meanwhile: Callable[[], None] = lambda: None
        """Callback between two managers."""
        self.gap = 1.0
        """Seconds before the next manager is started."""
        self.managers = 0
        self.journals: list[Journal] = []
        """Open journals."""
        self.listener: FakeListener | None = None
        self.now: Mortal = Mortal()
        """The current manager's connection to the site."""
        self._written = 0
        self._tasks: set[asyncio.Task[Any]] = set()

    # ── managers ─────────────────────────────────────────────────────────────────────────────────────────────────────
    async def manage(self, patience: float = 3000.0) -> Outcome:
        """Run managers one after the other until a manager reports that the run has ended."""
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
        """Append a record to the journal; kill the manager if this is the record of ``kill_at`` or ``kill_every``."""
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
    def request(self, request: AllocationRequest) -> None:
        if request.tag in self.granted:
            self.doubled.append(request.tag)
        kept_back = {*request.exclude, *self.dead_nodes, *self.drained}
        nodes = [node for node in self.free if node not in kept_back][: request.count]
        if len(nodes) < request.count:
            raise Refused("not enough nodes")
        self.free = [node for node in self.free if node not in nodes]
        self.allocations[request.tag] = tuple(nodes)
        self.granted.append(request.tag)
        self.max_nodes_held = max(self.max_nodes_held, sum(len(nodes) for nodes in self.allocations.values()))

    def cancel_everything(self, listed: bool) -> None:
        """Cancel every job of the run from outside: the steps stop, and the nodes are the next ones to be granted.

        With ``listed`` the cluster still lists the jobs, as cancelled. Otherwise it no longer lists them.
        """
        for actor in list(self.actors.values()):
            actor.ends(ExitReason.STOPPED)
        if listed:
            self.cancelled |= self.allocations
        self.free = [*(node for nodes in self.allocations.values() for node in nodes), *self.free]
        self.allocations = {}

    def release(self, tag: str) -> None:
        for node in self.allocations.pop(tag, ()):
            self.free.append(node)
            for actor in [actor for actor in self.actors.values() if actor.node == node]:
                actor.vanish()

    def shrink(self, tag: str, nodes: tuple[NodeName, ...]) -> None:
        given_back = [node for node in self.allocations.get(tag, ()) if node in nodes]
        self.allocations[tag] = tuple(node for node in self.allocations[tag] if node not in nodes)
        self.free += given_back
        self.shrunk += given_back
        for actor in [actor for actor in self.actors.values() if actor.node in given_back]:
            actor.vanish()

    def launch(self, step: Step) -> None:
        if step.tag in self.launched:
            self.doubled.append(step.tag)
        self.launched.append(step.tag)
        if step.node not in self.allocations.get(step.allocation, ()):
            raise AllocationNotRunning(f"{step.node} is not in {step.allocation}")
        if step.node not in self.dead_nodes:
            self.started.append(step.tag)
            launch = read_launch(step.launch_file)
            gpus = () if step.agent else self._gpus_for(step.node, launch.gpus, shared=step.overlap)
            self.actors[step.tag] = Actor(self, step.tag, launch.incarnation, step.node, gpus)

    def _gpus_for(self, node: NodeName, count: int, shared: bool) -> tuple[str, ...]:
        """Return the GPUs of a new step: all GPUs of the node if its process shares the node, else the first free GPUs.

        As in Slurm, the GPUs of a process that shares the node do not count as taken, even after its promotion.
        """
        every = tuple(f"{node}-gpu{index}" for index in range(self.job.node_groups[0].node.gpus))
        if shared:
            return every
        taken = {gpu for actor in self.actors.values() if not actor.shares_node for gpu in actor.gpus}
        return tuple(gpu for gpu in every if gpu not in taken)[:count]

    def observe(self) -> ClusterSnapshot:
        self.polls += 1
        if self.is_silent:
            return ClusterSnapshot(None, None, None, "timed out")
        if self.blink and self.polls % 2:
            return (
                ClusterSnapshot({}, {}, {}) if self.polls % 4 == 1 else ClusterSnapshot(None, None, None, "timed out")
            )
        statuses = {
            tag: AllocationStatus(AllocationState.RUNNING, "7", nodes) for tag, nodes in self.allocations.items()
        }
        for tag, ended in self.cancelled.items():
            statuses[tag] = AllocationStatus(AllocationState.ENDED, "7", ended, "CANCELLED", cancelled=True)
        nodes = {node: self._node(node) for members in self.allocations.values() for node in members}
        steps = {tag: actor.node for tag, actor in self.actors.items()}
        return ClusterSnapshot(
            nodes, statuses, steps | {tag: node for tag, node in self.still_listed.items() if node in nodes}
        )

    def _node(self, node: NodeName) -> NodeStatus:
        reason = self.drained.get(node)
        return (
            NodeStatus(NodeState.UP) if reason is None else NodeStatus(NodeState.DRAINING, f"drained: {reason}", reason)
        )

    # ── events of the site ───────────────────────────────────────────────────────────────────────────────────────────
    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def working(self) -> dict[ReplicaId, list[Actor]]:
        """Return the working actors by replica, without agents and standby processes."""
        working: dict[ReplicaId, list[Actor]] = {}
        for actor in self.actors.values():
            if actor.working and actor.role not in (AGENT, STANDBY_ROLE):
                working.setdefault(actor.incarnation.replica, []).append(actor)
        return working

    def all_work(self) -> bool:
        return set(members_of(self.job)) <= self.working().keys()

    def commit(self) -> None:
        self.committed += 1
        if self.committed == self.crash_at:
            self.crash(self.working()[ReplicaId("rollout/1")][-1].node)
        if self.committed == self.cancel_at:
            self.send_command("cancel")
        if (happens := self.at_step.get(self.committed)) is not None:
            happens(self)

    def send_command(self, command: str, **more: Any) -> None:
        """Write a user command into the mailbox."""
        file_name = {"command": command, "by": "ada", **more}
        write_atomically(self.run.mailbox / f"{command}.json", msgspec.json.encode(file_name))

    def resume(self, job: RunSpec) -> None:
        """Resume the ended run with this job."""
        self.job = job
        state = Follower(self.run).state()
        assert state is not None
        assert state.ended is not None
        resume_request.write_request(
            self.run, ResumeRequest("ada", "resume", job, "job.toml", state.ended), lambda _: None
        )

    def when(self, condition: Callable[[], bool], then: Callable[[], None]) -> None:
        """Call the function ``then`` as soon as the condition holds."""

        async def wait() -> None:
            while not condition():
                await asyncio.sleep(0.5)
            then()

        self.spawn(wait())

    def idle_node(self) -> NodeName:
        """Return a node of the run on which no role works."""
        busy = {actor.node for actor in self.actors.values() if actor.role not in (AGENT, STANDBY_ROLE)}
        return next(node for nodes in self.allocations.values() for node in nodes if node not in busy)

    def finds(self, *findings: Finding) -> None:
        """Let the agents report these findings from now on."""
        for finding in findings:
            assert finding.node is not None
            self.ill[finding.node] = (*self.ill.get(finding.node, ()), finding)
            for actor in [
                actor for actor in self.actors.values() if actor.node == finding.node and actor.role == AGENT
            ]:
                actor.finds(finding)

    def crash(self, node: NodeName, listed: bool = False) -> None:
        """End all processes on the node. With ``listed`` the cluster still lists the node's steps."""
        self.dead_nodes.add(node)
        for actor in [actor for actor in self.actors.values() if actor.node == node]:
            if listed:
                self.still_listed[actor.tag] = node
            actor.vanish()

    async def to_rest(self) -> None:
        """Wait until all actors have learned that the run has ended, and stop them."""
        await asyncio.sleep(100.0)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Mortal:
    """The connection of a manager to the site, which is cut when the manager is killed."""

    def __init__(self) -> None:
        self.dead = False
        self.died = asyncio.Event()

    def die(self) -> None:
        self.dead = True
        self.died.set()
        raise Killed


class Actor:
    """A step: its first process and its worker as one object, or an agent.

    ``incarnation`` is the incarnation of the worker, which a promotion changes. The first process always reports
    ``launched``, the incarnation of its launch.
    """

    def __init__(self, site: Site, tag: str, incarnation: Incarnation, node: NodeName, gpus: tuple[str, ...]) -> None:
        self.site, self.tag, self.incarnation, self.node = site, tag, incarnation, node
        self.launched = incarnation
        self.gpus = gpus
        """The GPUs that the process uses; for a standby process that shares its node, the GPUs that it can see."""
        self.shares_node = role_of(incarnation.replica) == STANDBY_ROLE
        self.peer = tag.encode()
        self.working = False
        self.done = 0
        self._began_ns = 0
        self._held: int | None = None
        self._ended: ExitRecord | None = None
        self._known: FakeListener | None = None
        self._admitted = False
        self._task = site.spawn(self._live())

    @property
    def role(self) -> str:
        return role_of(self.incarnation.replica)

    async def _live(self) -> None:
        await asyncio.sleep(0.3)
        while True:
            listener = self.site.listener
            if listener is not None and listener is not self._known:  # a new manager, without earlier reports
                self._known = listener
                self._send(self._ended or msg.AdmissionRequest(self.launched, self.tag, self.node, 1))
                if self.working:
                    self._greet()
            elif self.working:
                self._heartbeat()
                self._report_evaluation()
            await asyncio.sleep(self.site.job.limits.heartbeat)

    def receive(self, message: Any) -> None:
        if self._ended is not None:
            return
        if isinstance(message, msg.Admitted):
            if not message.ok:
                self._end(ExitReason.NOT_ADMITTED)
            elif not self._admitted:
                self._admitted = True
                self.site.spawn(self._work())
        elif isinstance(message, msg.Promote):
            if self.role == STANDBY_ROLE and (message.standby, message.tag) == (self.incarnation, self.tag):
                self.incarnation = message.incarnation
                self.gpus = message.gpus
                self._works()
                self.site.promotions.append(f"{message.standby} {message.incarnation}")
                self._greet()
                if self.role == "trainer" and rank_of(self.incarnation.replica) == 0:
                    self.site.spawn(self._train())
        elif isinstance(message, msg.Welcome):
            self._confirm_evaluations(message.peers)
            if self.role == "trainer" and rank_of(self.incarnation.replica) == 0:
                loop = asyncio.get_running_loop()
                for step in range(
                    message.step + 1, self.site.committed + 1
                ):  # the event loop does not keep the order of callbacks with equal times
                    loop.call_later(step * 1e-6, self._send, msg.StepCommitted(self.incarnation, step, {"reward": 0.5}))
        elif isinstance(message, msg.Peers):
            self._confirm_evaluations(message)
        elif isinstance(message, msg.Fenced):
            if message.incarnation == self.incarnation:  # agents receive the fences of other incarnations, too
                self._end(ExitReason.NOT_ADMITTED)
        elif isinstance(message, msg.Stop):
            self._end(ExitReason.STOPPED)
        elif isinstance(message, msg.Inject):
            assert message.fault.kind is FaultKind.KILL
            target = self.site.actors.get(message.tag)
            if target is not None:
                target.die()
            self._send(msg.Injected(message.fault, target is not None))

    async def _work(self) -> None:
        await asyncio.sleep(0.7)
        if self._ended is not None or self.tag not in self.site.actors:
            return
        self.working = True
        self._works()
        self._greet()
        if self.role == "trainer":
            if rank_of(self.incarnation.replica) == 0:
                await self._train()
        elif any(role.name == self.role and role.kind == "command" for role in self.site.job.roles):
            await asyncio.sleep(self.site.done_after * (1 + int(index_of(self.incarnation.replica))))
            self._send(msg.Goodbye(self.incarnation))
            self._end(ExitReason.EXITED)

    def _confirm_evaluations(self, peers: msg.Peers) -> None:
        self.site.evaluations_confirmed = max(self.site.evaluations_confirmed, peers.evaluated)

    def _report_evaluation(self) -> None:
        """Report the first unconfirmed evaluation once its step is committed, as the store does."""
        step = self.site.evaluations_confirmed + 1
        if self.role == "trajectories" and self.site.job.eval is not None and step <= self.site.committed:
            self._send(msg.Evaluated(self.incarnation, step, {"reward": 0.5}))

    def _works(self) -> None:
        if self.role not in (AGENT, STANDBY_ROLE):
            self.site.worked.add(self.incarnation)
            self._check_gpus()
            self._began_ns = int(virtual.Clock.monotonic() * 1e9)

    def _check_gpus(self) -> None:
        """Record every other working process that uses one of this process's GPUs."""
        for other in self.site.actors.values():
            if other is not self and other.working and other.role not in (AGENT, STANDBY_ROLE):
                self.site.shared_gpus += [
                    f"{gpu}: {other.incarnation} and {self.incarnation}" for gpu in other.gpus if gpu in self.gpus
                ]

    async def _train(self) -> None:
        """Commit a step every two seconds while all replicas work."""
        while self.tag in self.site.actors and self.site.committed < self.site.job.steps:
            await asyncio.sleep(2.0)
            if self.tag in self.site.actors and self.site.all_work():
                self.site.commit()
                self._send(msg.StepCommitted(self.incarnation, self.site.committed, {"reward": 0.5}))

    def _greet(self) -> None:
        if self.role == AGENT:
            ill, now = self.site.ill.get(self.node, ()), virtual.Clock.monotonic()
            self._send(
                msg.AgentHello(self.incarnation, self.tag, self.node, self.node, 2, "boot", findings=ill, now=now)
            )
            return
        holds = Version(0, 1) if self.role in ("trainer", "rollout") else None
        phase = _PHASE.get(self.role, "serve")
        self._send(
            msg.Hello(self.incarnation, self.tag, self.node, self.node, 2, phase, weight_version=holds, gpus=self.gpus)
        )

    def finds(self, finding: Finding) -> None:
        if self.working:
            self._send(msg.FindingReport(finding, self.incarnation, self.node, virtual.Clock.monotonic()))

    def _heartbeat(self) -> None:
        self.done += 1
        if self.role == AGENT:
            self._send(msg.AgentHeartbeat(self.incarnation, self.node))
        else:
            phase = _PHASE.get(self.role, "serve")
            self._send(msg.Heartbeat(self.incarnation, phase, self.done))
            if self.role != STANDBY_ROLE:
                lifetime_ns = int(virtual.Clock.monotonic() * 1e9) - self._began_ns
                self.site.lifetimes_ns[self.incarnation] = lifetime_ns
                clock = ClockReading(self._began_ns, self.done, (PhaseTime(phase, "", lifetime_ns),))
                self._send(msg.ClockReport(self.incarnation, clock))
            if self.done == 1 and self.role != STANDBY_ROLE:
                self._send(msg.FirstWorkDone(self.incarnation))

    def die(self) -> None:
        """Kill the worker; the first process writes the exit record."""
        self.ends(ExitReason.SIGNALED)

    def ends(self, reason: ExitReason) -> None:
        """End the process: the first process writes the exit record and reports it to the manager, if there is one."""
        self._end(reason)

    def _end(self, reason: ExitReason) -> None:
        if self._ended is not None:
            return
        signal = 9 if reason is ExitReason.SIGNALED else None
        code = None if signal else 0
        self._ended = ExitRecord(self.tag, self.launched, self.node, code, signal, reason, 0.0)
        write_atomically(self.site.run.exit_file(self.tag), msgspec.json.encode(self._ended))
        self._send(self._ended)
        self.vanish()

    def vanish(self) -> None:
        self.working = False
        self.site.actors.pop(self.tag, None)
        self._task.cancel()

    def _send(self, message: Any) -> None:
        listener = self.site.listener
        if listener is not None and listener is self._known and self.node not in self.site.cut_off:
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

    async def send(self, peer: bytes, message: Any, request: int | None = None) -> None:
        if not self._mortal.dead:
            asyncio.get_running_loop().call_later(WIRE, self._deliver, peer.decode(), message)

    async def send_all(self, peers: Iterable[bytes], message: Any) -> None:
        for peer in peers:
            await self.send(peer, message)

    def _deliver(self, tag: str, message: Any) -> None:
        actor = self._site.actors.get(tag)
        if actor is not None and actor.node not in self._site.cut_off:
            actor.receive(message)

    async def close(self) -> None:
        if self._site.listener is self:
            self._site.listener = None


class FakeCluster:
    """The cluster as the manager calls it. Commands take time, and their answers can be lost with the manager."""

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

    async def request(self, request: AllocationRequest) -> None:
        await self._there()
        self._site.request(request)
        await self._back()

    async def release(self, tag: str) -> None:
        await self._on_the_way()
        self._site.release(tag)
        await self._on_the_way()

    async def launch(self, step: Step) -> None:
        await self._there()
        self._site.launch(step)
        await self._back()

    async def release_launcher(self, tag: str) -> None:
        pass

    async def stop(self, tag: str, grace: float) -> None:
        await self._on_the_way()
        actor = self._site.actors.get(tag)
        if actor is not None:
            actor.receive(msg.Stop(actor.incarnation, grace, "stopped"))
        await self._on_the_way()

    async def drain(self, node: NodeName, reason: str) -> None:
        await self._there()
        self._site.drained[node] = reason
        await self._back()

    async def undrain(self, node: NodeName, reason: str) -> None:
        await self._there()
        if self._site.drained.get(node) == reason:
            del self._site.drained[node]
        await self._back()

    async def shrink(self, tag: str, nodes: tuple[NodeName, ...]) -> None:
        await self._there()
        self._site.shrink(tag, nodes)
        await self._back()

    async def inject_fault(self, fault: Fault) -> str:
        raise Refused("not here")

    async def observe(self) -> ClusterSnapshot:
        await self._on_the_way()
        return self._site.observe()

    async def close(self) -> None:
        pass


def prepare(site: Site, patch: pytest.MonkeyPatch) -> None:
    """Make the real manager run in this site, in virtual time."""
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
        async def open(keys: RunKeys, up: Any, *, epoch: int = 0, host: str = "", bounds: Any = None) -> FakeListener:
            return FakeListener(mortals, epoch)

    patch.setattr(runtime, "Journal", MortalJournal)
    patch.setattr(runtime, "Lease", MortalLease)
    patch.setattr(runtime, "Listener", Listening)

    class HostClock(virtual.Clock):
        @staticmethod
        def time() -> float:
            return virtual.Clock.time() + mortals.clock_jump

    patch.setattr(runtime, "time", HostClock)
    patch.setattr(lease, "time", virtual.Clock)
    assert not hasattr(executor, "time")
