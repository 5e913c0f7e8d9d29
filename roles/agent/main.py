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

from ...core.launch import HEARTBEAT_INTERVAL_ENV, ExitReason, Launch, read_exit, read_launch
from ...core.log_lines import LOG_LEVEL_ENV, start_logging
from ...core.processes import (
    AGENT_MODULE,
    STEP_MODULE,
    Process,
    open_pidfd,
    processes,
    read_process,
    send_signal,
    sweep,
)
from ...core.run_spec import DEFAULT_LOG_LEVEL
from ...core.text import exit_invalid_config
from ...core.types import AGENT, Incarnation, role_of
from ...transport.address import NoAddress
from ...transport.messages import AgentHeartbeat, AgentHello, DumpStacks, Fenced, Inject, Load, StepVanished
from ..launcher.environment import ADDRESS_ENV, boot_id, node_environment, raise_limits, see_all_gpus
from ..launcher.first_process import StepSupervisor, log_failure
from ..launcher.process_group import Census
from ..snapshots.server import SnapshotServer
from .admission import node_monitor, probe, resource_limits, run_admission_checks
from .fault_injection import Injector, resume_process
from .load_sampler import StepLoadSampler
from .stack_dumps import dump_stacks

if TYPE_CHECKING:
    from .node_monitor import NodeMonitor

_log = logging.getLogger("rrl.agent")

HEARTBEAT_INTERVAL_S = 1.0
RECHECK_DELAY_S = 0.2
"""s after which the exit record of a vanished step is looked for again: shared storage may show it late"""
SWEEP_TIMEOUT_S = 10.0
"""s for processes to end on SIGKILL; the next beat tries again"""
RUN_OVER_GRACE_S = 30.0
"""s that the run must have been over, without a manager, before the agent ends what is left here and leaves"""
MAX_HEARTBEATS_WITHOUT_MANAGER = 2
"""beats without a manager; then one that had filled the disk no longer gives the room back"""


def main() -> int:
    if len(sys.argv) != 2:
        exit_invalid_config("usage: python -m rrl.roles.agent.main FILE.launch")
    raise_limits()
    see_all_gpus()
    launch_file = os.path.abspath(sys.argv[1])
    launch = read_launch(Path(launch_file))
    os.environ.setdefault(LOG_LEVEL_ENV, launch.env.get(LOG_LEVEL_ENV, DEFAULT_LOG_LEVEL))  # the readers inherit it
    start_logging()
    asyncio.run(_run(launch, launch_file))
    return 0


async def _run(launch: Launch, launch_file: str) -> None:
    supervisor = StepSupervisor(launch, launch_file)
    async with supervisor.running():
        if await supervisor.request_admission():
            snapshot_server = SnapshotServer(supervisor.run.id, supervisor.node, supervisor.keys, _listen_host(launch))
            await asyncio.to_thread(snapshot_server.start)
            async with node_monitor(supervisor) as monitor:
                try:
                    probed = await probe(supervisor)  # it ends whatever it finds below us: no reader may be there yet
                    await run_admission_checks(supervisor, monitor)
                    await _run_agent(supervisor, _Agent(supervisor, snapshot_server, monitor, probed))
                finally:
                    snapshot_server.close()
        await supervisor.finish(0, None, supervisor.stop_reason or ExitReason.STOPPED, supervisor.stop_detail)


async def _run_agent(supervisor: StepSupervisor, agent: _Agent) -> None:
    tasks = [asyncio.create_task(agent.heartbeat_loop()), asyncio.create_task(agent.poll_loop())]
    for task in tasks:
        task.add_done_callback(lambda _: supervisor.wakeup.set())
    await supervisor.wait_for(lambda: any(task.done() for task in tasks))
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            await supervisor.finish(1, None, ExitReason.EXITED, repr(result))
            raise result


class _Agent:
    def __init__(
        self,
        supervisor: StepSupervisor,
        snapshot_server: SnapshotServer,
        monitor: NodeMonitor | None,
        probe_failure: str,
    ) -> None:
        self._supervisor, self._snapshot_server, self._monitor, self._probe_failure = (
            supervisor,
            snapshot_server,
            monitor,
            probe_failure,
        )
        self._heartbeat_interval = float(
            supervisor.launch.env.get(HEARTBEAT_INTERVAL_ENV)
            or os.environ.get(HEARTBEAT_INTERVAL_ENV)
            or HEARTBEAT_INTERVAL_S
        )
        self._census = Census(supervisor.steps)
        self._launches: dict[str, Launch | None] = {}
        """by path; None: of another node, or not a launch file"""
        self._running_steps: dict[str, Process] = {}
        """first processes of steps here, by launch file"""
        self._vanished: dict[str, StepVanished] = {}
        self._ending: set[str] = set()
        self._tasks: set[asyncio.Future[Any]] = set()
        self._device = os.stat(supervisor.run.path).st_dev
        self._injector = Injector(supervisor, self._read_launch)
        self._load_sampler = StepLoadSampler(self._role_tag)
        self._unsent_loads: tuple[Load, ...] = ()
        """not told yet"""
        supervisor.on_connect, supervisor.on_message = self._hello, self._on_message

    async def heartbeat_loop(self) -> None:
        dialer, launch = self._supervisor.dialer, self._supervisor.launch
        for message in self._hello():
            await dialer.send(message)
        if self._monitor is not None:
            self._monitor.start_reporting()
        while True:
            if dialer.connected:
                alive = sorted(filter(None, map(self._tag, self._running_steps)))
                loads, self._unsent_loads = self._unsent_loads, ()
                await dialer.send(AgentHeartbeat(launch.incarnation, launch.node, tuple(alive), loads))
            await asyncio.sleep(self._heartbeat_interval)

    async def poll_loop(self) -> None:
        """One look at /proc a beat, for what is new; an end is told by its pidfd at once."""
        loop = asyncio.get_running_loop()
        over_since: float | None = None
        heartbeats_without_manager = 0
        while True:
            await self._poll()
            heartbeats_without_manager = 0 if self._supervisor.dialer.connected else heartbeats_without_manager + 1
            if (
                heartbeats_without_manager > MAX_HEARTBEATS_WITHOUT_MANAGER
            ):  # whoever filled the disk is gone, and its successor could not even begin
                await asyncio.to_thread(_remove, self._supervisor.run.disk_filler)
            if self._supervisor.dialer.connected or not await asyncio.to_thread(self._run_is_over):
                over_since = None
            elif over_since is None:
                over_since = loop.time()
            elif loop.time() - over_since > RUN_OVER_GRACE_S:
                await self._terminate_remaining()
                self._supervisor.request_stop(ExitReason.STOPPED, 0.0)
                return
            await asyncio.sleep(self._heartbeat_interval)

    # ── seeing ─────────────────────────────────────────────────────────────────────────────────────────────────────
    async def _poll(self) -> None:
        found = self._census.scan()
        for path in {process.launch for process in found} - self._launches.keys():
            await asyncio.to_thread(self._read_launch, path)
        for process in found:
            if self._launches.get(process.launch) is None:
                continue
            if process.module == STEP_MODULE and process.launch not in self._running_steps:
                self._track(process)
            elif _is_orphan(process):
                self._on_step_gone(process.launch)
        now = asyncio.get_running_loop().time()
        if self._load_sampler.is_due(now):
            health = self._monitor
            gpus, tensor = (health.gpus(), health.tensor_active()) if health is not None else (None, {})
            self._unsent_loads = self._load_sampler.sample(found, gpus, now, tensor)
            if health is not None:
                for path, launch in self._launches.items():
                    if launch is not None and (held := self._load_sampler.last_gpus(path)):
                        health.set_tenant(held, launch.role, str(launch.incarnation))

    def _track(self, process: Process) -> None:
        fd = open_pidfd(process)
        if fd is None:
            self._on_step_gone(process.launch)
            return
        loop = asyncio.get_running_loop()

        def ended() -> None:
            loop.remove_reader(fd)
            os.close(fd)
            del self._running_steps[process.launch]
            self._on_step_gone(process.launch)

        self._running_steps[process.launch] = process
        loop.add_reader(fd, ended)
        self._add_task(
            asyncio.ensure_future(asyncio.to_thread(resume_process, process.launch))
        )  # of a holder before our time

    def _on_step_gone(self, path: str) -> None:
        """The first process is no more: end what it left, and be the witness if it could not say so itself."""
        launch = self._launches.get(path)
        if launch is not None and path not in self._ending:
            self._ending.add(path)
            lost = asyncio.gather(
                self._sweep({path}, _is_orphan), self._witness(launch), self._classify_exit(path, launch)
            )
            lost.add_done_callback(lambda _: self._ending.discard(path))
            self._add_task(lost)

    async def _witness(self, launch: Launch) -> None:
        exit_file = self._supervisor.run.exit_file(launch.tag)
        if launch.tag in self._vanished or await asyncio.to_thread(read_exit, exit_file) is not None:
            return
        await asyncio.sleep(RECHECK_DELAY_S)
        if await asyncio.to_thread(read_exit, exit_file) is None:
            self._vanished[launch.tag] = StepVanished(launch.incarnation, launch.tag, launch.node)
            await self._supervisor.dialer.send(self._vanished[launch.tag])

    async def _classify_exit(self, path: str, launch: Launch) -> None:
        """To those who judge the GPUs: what they say around an end that we or a person wanted is that end's doing; what
        they say around another one may be its cause."""
        if self._monitor is None or launch.incarnation == self._supervisor.launch.incarnation:
            return
        await asyncio.sleep(RECHECK_DELAY_S)
        record = await asyncio.to_thread(read_exit, self._supervisor.run.exit_file(launch.tag))
        if record is not None and (record.code == 0 or record.reason not in (ExitReason.EXITED, ExitReason.SIGNALED)):
            self._monitor.on_our_kill()
        else:
            self._monitor.on_role_death(self._load_sampler.last_gpus(path))
        self._load_sampler.forget(path)

    def _read_launch(self, path: str) -> Launch | None:
        """The launch of a step on this node. Remembered, also that it is not one; but not that it cannot be read."""
        try:
            launch = read_launch(Path(path))
        except OSError:
            return None
        except msgspec.DecodeError:
            launch = None
        here = launch is not None and launch.node == self._supervisor.launch.node
        self._launches[path] = launch if here else None
        return self._launches[path]

    def _tag(self, path: str) -> str | None:
        launch = self._launches[path]
        return launch.tag if launch else None

    def _role_tag(self, path: str) -> str | None:
        launch = self._launches.get(path)
        return launch.tag if launch and role_of(launch.incarnation.replica) != AGENT else None

    # ── speaking ───────────────────────────────────────────────────────────────────────────────────────────────────
    def _hello(self) -> Sequence[Any]:
        launch = self._supervisor.launch
        findings = self._monitor.findings if self._monitor is not None else ()
        me = AgentHello(
            launch.incarnation, launch.tag, launch.node, socket.gethostname(), os.getpid(), boot_id(), self._probe_failure, *resource_limits(),
            snapshot_address=self._snapshot_server.address, findings=findings, now=time.monotonic(),
        )  # fmt: skip
        return [me, *self._vanished.values()]

    def _on_message(self, message: Any) -> None:
        match message:
            case Inject():
                self._add_task(asyncio.create_task(self._injector.inject(message)))
            case DumpStacks():
                self._add_task(asyncio.create_task(self._dump_stacks(message)))
            case Fenced():
                self._snapshot_server.fence(message.incarnation)
                self._add_task(asyncio.create_task(self._end_incarnation(message.incarnation, message.tag)))

    async def _dump_stacks(self, request: DumpStacks) -> None:
        path = os.path.join(self._supervisor.steps, f"{request.tag}.launch")
        await self._supervisor.dialer.send(await dump_stacks(path, self._supervisor.launch.incarnation, request))

    # ── sweeping ───────────────────────────────────────────────────────────────────────────────────────────────────
    async def _sweep(self, paths: Collection[str], matches: Callable[[Process], bool]) -> None:
        """End those processes of the steps at ``paths`` that are ``which``."""

        def find() -> list[Process]:
            return [
                process for process in processes(self._supervisor.steps) if process.launch in paths and matches(process)
            ]

        swept, left = await asyncio.to_thread(sweep, find, SWEEP_TIMEOUT_S)
        if swept and self._monitor is not None:
            self._monitor.on_our_kill()
        if left:
            _log.error("processes do not end on SIGKILL: %s", [process.pid for process in left])

    async def _end_incarnation(self, incarnation: Incarnation, tag: str) -> None:
        """Another life on this node is no longer believed, and perhaps does not hear it. One that a shadow became is
        found by its step's tag."""
        theirs = [
            path for path, one in self._launches.items() if one and (one.incarnation == incarnation or one.tag == tag)
        ]
        await self._sweep(theirs, _is_not_agent)

    def _run_is_over(self) -> bool:
        run = self._supervisor.run
        try:
            return run.summary.exists() or _removed(run.path, self._device)
        except OSError:  # storage that is away says nothing
            return False

    async def _terminate_remaining(self) -> None:
        """The run is over and nobody came to stop these steps: ask them, then make sure."""
        for process in self._running_steps.values():
            send_signal(process, SIGTERM)
        grace = max((launch.grace for path in self._running_steps if (launch := self._launches[path])), default=0.0)
        deadline = asyncio.get_running_loop().time() + grace + 1.0
        while self._running_steps and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(RECHECK_DELAY_S)

        mine = self._supervisor.launch_file  # the readers', which are asked to end: none is killed that holds a driver
        await self._sweep([path for path, launch in self._launches.items() if launch and path != mine], _is_not_agent)

    def _add_task(self, task: asyncio.Future[Any]) -> None:
        """Tasks that nobody waits for are held until they end; what went wrong in them is logged."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(log_failure)


def _removed(folder: Path, device: int) -> bool:
    """Somebody removed it: where its storage is away instead, the file system below is another one."""
    if folder.exists():
        return False
    left = next(above for above in folder.parents if above.exists())
    return os.stat(left).st_dev == device


def _listen_host(launch: Launch) -> str:
    """Where other nodes reach this one; empty where they do not (then roles cannot listen here either, and say so)."""
    try:
        return node_environment(launch)[ADDRESS_ENV]
    except NoAddress:
        return ""


def _remove(disk_filler: Path) -> None:
    with contextlib.suppress(OSError):
        disk_filler.unlink(missing_ok=True)


def _is_not_agent(process: Process) -> bool:
    return process.module != AGENT_MODULE


def _is_orphan(process: Process) -> bool:
    """What a first process started, and that one has ended. A wrapper on the way to a first process carries no mark."""
    if not process.step:
        return False
    pid, _, started = process.step.partition(".")
    first = read_process(int(pid))
    return first is None or str(first.started) != started


if __name__ == "__main__":
    sys.exit(main())
