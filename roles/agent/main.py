"""``python -m rrl.roles.agent.main FILE``: the small process on each node that outlives the roles there.

It tells that the node lives and which steps live on it and what they take, is the witness when a step's first process
vanishes without an exit record, ends what a dead step left behind, performs injected faults, owns the memory that
trainers' snapshots lie in (:mod:`rrl.roles.snapshots`), and looks after the node (:mod:`rrl.roles.agent.node_monitor`).
It starts no role. It sees only the steps of its own run and node (the launch file names both), also where several
virtual nodes share one machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from signal import SIGTERM
from typing import TYPE_CHECKING, Any

import msgspec

from ...core.launch import BEAT_ENV, ExitReason, Launch, read_exit, read_launch
from ...core.log_lines import LOG_LEVEL_ENV, start_logging
from ...core.processes import AGENT_MODULE, STEP_MODULE, Process, look, open_pidfd, processes, send, sweep
from ...core.run_spec import DEFAULT_LOG_LEVEL
from ...core.text import refuse
from ...core.types import AGENT, Life, role_of
from ...transport.address import NoAddress
from ...transport.messages import AgentBeat, AgentHello, Fenced, Gone, Inject, Load, TakeStacks
from ..launcher.environment import ADDRESS_ENV, boot_id, on_this_node, raise_limits, see_all_gpus
from ..launcher.first_process import FirstProcess, log_failure
from ..launcher.process_group import Census
from ..snapshots.server import Keeper
from .admission import admit, limits, looked_after, probe
from .fault_injection import Injector, let_go
from .load_sampler import StepLoads
from .stack_dumps import take

if TYPE_CHECKING:
    from .node_monitor import NodeHealth

_log = logging.getLogger("rrl.agent")

BEAT = 1.0
RECHECK = 0.2
"""s after which the exit record of a vanished step is looked for again: shared storage may show it late"""
SWEEP_WITHIN = 10.0
"""s for processes to end on SIGKILL; the next beat tries again"""
RUN_OVER_FOR = 30.0
"""s that the run must have been over, without a manager, before the agent ends what is left here and leaves"""
ALONE = 2
"""beats without a manager; then one that had filled the disk no longer gives the room back"""


def main() -> int:
    if len(sys.argv) != 2:
        refuse("usage: python -m rrl.roles.agent.main FILE.launch")
    raise_limits()
    see_all_gpus()
    launch_file = os.path.abspath(sys.argv[1])
    launch = read_launch(Path(launch_file))
    os.environ.setdefault(LOG_LEVEL_ENV, launch.env.get(LOG_LEVEL_ENV, DEFAULT_LOG_LEVEL))  # the readers inherit it
    start_logging()
    asyncio.run(_live(launch, launch_file))
    return 0


async def _live(launch: Launch, launch_file: str) -> None:
    first = FirstProcess(launch, launch_file)
    async with first.running():
        if await first.admission():
            keeper = Keeper(first.run.id, first.node, first.keys, _host(launch))
            await asyncio.to_thread(keeper.start)
            async with looked_after(first) as health:
                try:
                    probed = await probe(first)  # it ends whatever it finds below us: no reader may be there yet
                    await admit(first, health)
                    await _work(first, _Agent(first, keeper, health, probed))
                finally:
                    keeper.close()
        await first.finish(0, None, first.reason or ExitReason.STOPPED, first.detail)


async def _work(first: FirstProcess, agent: _Agent) -> None:
    tasks = [asyncio.create_task(agent.beats()), asyncio.create_task(agent.watch())]
    for task in tasks:
        task.add_done_callback(lambda _: first.news.set())
    await first.until(lambda: any(task.done() for task in tasks))
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            await first.finish(1, None, ExitReason.EXITED, repr(result))
            raise result


class _Agent:
    def __init__(self, first: FirstProcess, keeper: Keeper, health: NodeHealth | None, probed: str) -> None:
        self._first, self._keeper, self._health, self._probed = first, keeper, health, probed
        self._beat = float(first.launch.env.get(BEAT_ENV) or os.environ.get(BEAT_ENV) or BEAT)
        self._census = Census(first.steps)
        self._launches: dict[str, Launch | None] = {}
        """by path; None: of another node, or not a launch file"""
        self._alive: dict[str, Process] = {}
        """first processes of steps here, by launch file"""
        self._gone: dict[str, Gone] = {}
        self._losing: set[str] = set()
        self._running: set[asyncio.Future[Any]] = set()
        self._device = os.stat(first.run.path).st_dev
        self._injector = Injector(first, self._read_launch)
        self._steps = StepLoads(self._tag_of_a_role)
        self._loads: tuple[Load, ...] = ()
        """not told yet"""
        first.greet, first.hear = self._hello, self._hear

    async def beats(self) -> None:
        dialer, launch = self._first.dialer, self._first.launch
        for message in self._hello():
            await dialer.send(message)
        if self._health is not None:
            self._health.watch()
        while True:
            if dialer.connected:
                alive = sorted(filter(None, map(self._tag, self._alive)))
                loads, self._loads = self._loads, ()
                await dialer.send(AgentBeat(launch.life, launch.node, tuple(alive), loads))
            await asyncio.sleep(self._beat)

    async def watch(self) -> None:
        """One look at /proc a beat, for what is new; an end is told by its pidfd at once."""
        loop = asyncio.get_running_loop()
        over_since: float | None = None
        alone = 0
        while True:
            await self._look()
            alone = 0 if self._first.dialer.connected else alone + 1
            if alone > ALONE:  # whoever filled the disk is gone, and its successor could not even begin
                await asyncio.to_thread(_remove, self._first.run.ballast)
            if self._first.dialer.connected or not await asyncio.to_thread(self._run_is_over):
                over_since = None
            elif over_since is None:
                over_since = loop.time()
            elif loop.time() - over_since > RUN_OVER_FOR:
                await self._end_the_rest()
                self._first.leave(ExitReason.STOPPED, 0.0)
                return
            await asyncio.sleep(self._beat)

    # ── seeing ─────────────────────────────────────────────────────────────────────────────────────────────────────
    async def _look(self) -> None:
        found = self._census.take()
        for path in {process.launch for process in found} - self._launches.keys():
            await asyncio.to_thread(self._read_launch, path)
        for process in found:
            if self._launches.get(process.launch) is None:
                continue
            if process.module == STEP_MODULE and process.launch not in self._alive:
                self._follow(process)
            elif _is_orphan(process):
                self._lose(process.launch)
        now = asyncio.get_running_loop().time()
        if self._steps.due(now):
            health = self._health
            gpus, tensor = (health.gpus(), health.tensor_active()) if health is not None else (None, {})
            self._loads = self._steps.take(found, gpus, now, tensor)
            if health is not None:
                for path, launch in self._launches.items():
                    if launch is not None and (held := self._steps.had(path)):
                        health.occupied(held, launch.role, str(launch.life))

    def _follow(self, process: Process) -> None:
        fd = open_pidfd(process)
        if fd is None:
            self._lose(process.launch)
            return
        loop = asyncio.get_running_loop()

        def ended() -> None:
            loop.remove_reader(fd)
            os.close(fd)
            del self._alive[process.launch]
            self._lose(process.launch)

        self._alive[process.launch] = process
        loop.add_reader(fd, ended)
        self._keep(asyncio.ensure_future(asyncio.to_thread(let_go, process.launch)))  # of a holder before our time

    def _lose(self, path: str) -> None:
        """The first process is no more: end what it left, and be the witness if it could not say so itself."""
        launch = self._launches.get(path)
        if launch is not None and path not in self._losing:
            self._losing.add(path)
            lost = asyncio.gather(self._sweep({path}, _is_orphan), self._witness(launch), self._explain(path, launch))
            lost.add_done_callback(lambda _: self._losing.discard(path))
            self._keep(lost)

    async def _witness(self, launch: Launch) -> None:
        exit_file = self._first.run.exit_file(launch.tag)
        if launch.tag in self._gone or await asyncio.to_thread(read_exit, exit_file) is not None:
            return
        await asyncio.sleep(RECHECK)
        if await asyncio.to_thread(read_exit, exit_file) is None:
            self._gone[launch.tag] = Gone(launch.life, launch.tag, launch.node)
            await self._first.dialer.send(self._gone[launch.tag])

    async def _explain(self, path: str, launch: Launch) -> None:
        """To those who judge the GPUs: what they say around an end that we or a person wanted is that end's doing; what
        they say around another one may be its cause."""
        if self._health is None or launch.life == self._first.launch.life:
            return
        await asyncio.sleep(RECHECK)
        record = await asyncio.to_thread(read_exit, self._first.run.exit_file(launch.tag))
        if record is not None and (record.code == 0 or record.reason not in (ExitReason.EXITED, ExitReason.SIGNALED)):
            self._health.killed()
        else:
            self._health.role_died(self._steps.had(path))
        self._steps.forget(path)

    def _read_launch(self, path: str) -> Launch | None:
        """The launch of a step on this node. Remembered, also that it is not one; but not that it cannot be read."""
        try:
            launch = read_launch(Path(path))
        except OSError:
            return None
        except msgspec.DecodeError:
            launch = None
        here = launch is not None and launch.node == self._first.launch.node
        self._launches[path] = launch if here else None
        return self._launches[path]

    def _tag(self, path: str) -> str | None:
        launch = self._launches[path]
        return launch.tag if launch else None

    def _tag_of_a_role(self, path: str) -> str | None:
        launch = self._launches.get(path)
        return launch.tag if launch and role_of(launch.life.replica) != AGENT else None

    # ── speaking ───────────────────────────────────────────────────────────────────────────────────────────────────
    def _hello(self) -> Sequence[Any]:
        launch = self._first.launch
        findings = self._health.findings if self._health is not None else ()
        me = AgentHello(
            launch.life, launch.tag, launch.node, socket.gethostname(), os.getpid(), boot_id(), self._probed, *limits(),
            keeps=self._keeper.address, findings=findings, now=time.monotonic(),
        )  # fmt: skip
        return [me, *self._gone.values()]

    def _hear(self, message: Any) -> None:
        match message:
            case Inject():
                self._keep(asyncio.create_task(self._injector.inject(message)))
            case TakeStacks():
                self._keep(asyncio.create_task(self._stacks(message)))
            case Fenced():
                self._keeper.fence(message.life)
                self._keep(asyncio.create_task(self._end_life(message.life, message.tag)))

    async def _stacks(self, order: TakeStacks) -> None:
        path = os.path.join(self._first.steps, f"{order.tag}.launch")
        await self._first.dialer.send(await take(path, self._first.launch.life, order))

    # ── sweeping ───────────────────────────────────────────────────────────────────────────────────────────────────
    async def _sweep(self, paths: Collection[str], which: Callable[[Process], bool]) -> None:
        """End those processes of the steps at ``paths`` that are ``which``."""

        def find() -> list[Process]:
            return [process for process in processes(self._first.steps) if process.launch in paths and which(process)]

        swept, left = await asyncio.to_thread(sweep, find, SWEEP_WITHIN)
        if swept and self._health is not None:
            self._health.killed()
        if left:
            _log.error("processes do not end on SIGKILL: %s", [process.pid for process in left])

    async def _end_life(self, life: Life, tag: str) -> None:
        """Another life on this node is no longer believed, and perhaps does not hear it. One that a shadow became is
        found by its step's tag."""
        theirs = [path for path, one in self._launches.items() if one and (one.life == life or one.tag == tag)]
        await self._sweep(theirs, _any)

    def _run_is_over(self) -> bool:
        run = self._first.run
        try:
            return run.summary.exists() or _removed(run.path, self._device)
        except OSError:  # storage that is away says nothing
            return False

    async def _end_the_rest(self) -> None:
        """The run is over and nobody came to stop these steps: ask them, then make sure."""
        for process in self._alive.values():
            send(process, SIGTERM)
        grace = max((launch.grace for path in self._alive if (launch := self._launches[path])), default=0.0)
        deadline = asyncio.get_running_loop().time() + grace + 1.0
        while self._alive and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(RECHECK)

        mine = self._first.launch_file  # the readers', which are asked to end: none is killed that holds a driver
        await self._sweep([path for path, launch in self._launches.items() if launch and path != mine], _any)

    def _keep(self, task: asyncio.Future[Any]) -> None:
        """Tasks that nobody waits for are held until they end; what went wrong in them is logged."""
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(log_failure)


def _removed(folder: Path, device: int) -> bool:
    """Somebody removed it: where its storage is away instead, the file system below is another one."""
    if folder.exists():
        return False
    left = next(above for above in folder.parents if above.exists())
    return os.stat(left).st_dev == device


def _host(launch: Launch) -> str:
    """Where other nodes reach this one; empty where they do not (then roles cannot listen here either, and say so)."""
    try:
        return on_this_node(launch)[ADDRESS_ENV]
    except NoAddress:
        return ""


def _remove(ballast: Path) -> None:
    with contextlib.suppress(OSError):
        ballast.unlink(missing_ok=True)


def _any(process: Process) -> bool:
    return process.module != AGENT_MODULE


def _is_orphan(process: Process) -> bool:
    """What a first process started, and that one has ended. A wrapper on the way to a first process carries no mark."""
    if not process.step:
        return False
    pid, _, started = process.step.partition(".")
    first = look(int(pid))
    return first is None or str(first.started) != started


if __name__ == "__main__":
    sys.exit(main())
