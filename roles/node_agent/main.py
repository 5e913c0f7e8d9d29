"""The node agent, ``python -m rrl.roles.node_agent.main FILE``: one process per node, which outlives the roles on it.

The agent sends heartbeats with the running steps and their loads, and reports steps whose first process vanished
without an exit record. It kills processes that ended steps left behind, and performs injected faults. It holds the
memory of trainer snapshots (:mod:`rrl.roles.snapshots`), and monitors the node's health
(:mod:`rrl.roles.node_agent.node_monitor`). It does not start roles. The agent handles only steps whose launch files
name its own run and node, because several virtual nodes may share one machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
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
from ...core.run_dir import OwnPath
from ...core.text import exit_invalid_config
from ...core.types import AGENT, DEFAULT_LOG_LEVEL, GpuUse, Incarnation, role_of
from ...transport.address import NoAddress
from ...transport.messages import AgentHeartbeat, AgentHello, DumpStacks, Fenced, Inject, Load, StepVanished
from ..launcher.environment import ADDRESS_ENV, boot_id, node_environment, raise_limits, see_all_gpus, slurm_gpus
from ..launcher.first_process import StepSupervisor, log_failure
from ..launcher.process_group import Census
from ..snapshots.server import SnapshotServer
from .admission import node_monitor, probe, resource_limits, run_admission_checks
from .fault_injection import Injector, resume_process
from .load_sampler import StepLoadSampler, gpu_use
from .stack_dumps import dump_stacks

if TYPE_CHECKING:
    from .node_monitor import NodeMonitor

_log = logging.getLogger("rrl.agent")

HEARTBEAT_INTERVAL_S = 1.0
"""Seconds between two heartbeats and /proc scans, unless the environment sets another interval."""
RECHECK_DELAY_S = 0.2
"""Seconds before a missing exit record is looked for again, because shared storage may show it late."""
SWEEP_TIMEOUT_S = 10.0
"""Seconds to wait for processes to end after SIGKILL; the next /proc scan tries again."""
RUN_OVER_GRACE_S = 30.0
"""Seconds for which an agent without a manager waits after the run's end. It then ends the remaining steps and
exits."""
MAX_HEARTBEATS_WITHOUT_MANAGER = 2
"""Number of heartbeat intervals without a manager after which the agent removes the disk filler. A manager writes the
disk filler to fill the disk (an injected fault), and may have ended before the removal."""


def main() -> int:
    """Run the agent of the launch file in ``sys.argv``; return the exit code of this process."""
    if len(sys.argv) != 2:
        exit_invalid_config("usage: python -m rrl.roles.node_agent.main FILE.launch")
    raise_limits()
    see_all_gpus()
    launch_file = os.path.abspath(sys.argv[1])
    launch = read_launch(OwnPath(launch_file))
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
                    failure = await probe(supervisor)  # before the readers start: the probe kills all descendants
                    await run_admission_checks(supervisor, monitor)
                    await _run_agent(supervisor, _Agent(supervisor, snapshot_server, monitor, failure))
                finally:
                    snapshot_server.close()
        await supervisor.finish(0, None, supervisor.stop_reason or ExitReason.STOPPED, supervisor.stop_detail)


async def _run_agent(supervisor: StepSupervisor, agent: _Agent) -> None:
    tasks = [asyncio.create_task(agent.heartbeat_loop()), asyncio.create_task(agent.poll_loop())]
    for task in tasks:
        task.add_done_callback(lambda _: supervisor.wakeup.set())
    await supervisor.wait_for(lambda: any(task.done() for task in tasks))
    agent.stop_watching()
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
        self._supervisor, self._snapshot_server = supervisor, snapshot_server
        self._monitor, self._probe_failure = monitor, probe_failure
        self._heartbeat_interval = float(
            supervisor.launch.env.get(HEARTBEAT_INTERVAL_ENV)
            or os.environ.get(HEARTBEAT_INTERVAL_ENV)
            or HEARTBEAT_INTERVAL_S
        )
        self._census = Census(supervisor.steps)
        self._launches: dict[str, Launch | None] = {}
        """Launches by the path of their launch files. The value is None for a launch of another node, and for a file
        that is not a launch file."""
        self._running_steps: dict[str, Process] = {}
        """First processes of the running steps on this node, by launch file."""
        self._vanished: dict[str, StepVanished] = {}
        self._ending: set[str] = set()
        self._pidfds: set[int] = set()
        self._tasks: set[asyncio.Task[object]] = set()
        self._device = os.stat(supervisor.run.path).st_dev
        self._injector = Injector(supervisor, self._read_launch)
        self._load_sampler = StepLoadSampler(self._role_tag)
        self._unsent_loads: tuple[Load, ...] = ()
        """The newest loads, if no heartbeat has reported them yet."""
        self._unsent_gpu_use: GpuUse | None = None
        self._own_gpus = tuple(filter(None, slurm_gpus().split(",")))
        supervisor.on_connect, supervisor.on_message = self._hello, self._on_message

    async def heartbeat_loop(self) -> None:
        """Send the Hello, then heartbeats while connected; start the monitor's reports after the Hello."""
        dialer, launch = self._supervisor.dialer, self._supervisor.launch
        for message in self._hello():
            await dialer.send(message)
        if self._monitor is not None:
            self._monitor.start_reporting()
        while True:
            if dialer.connected:
                alive = sorted(filter(None, map(self._tag, self._running_steps)))
                loads, self._unsent_loads = self._unsent_loads, ()
                use, self._unsent_gpu_use = self._unsent_gpu_use, None
                await dialer.send(AgentHeartbeat(launch.incarnation, launch.node, tuple(alive), loads, use))
            await asyncio.sleep(self._heartbeat_interval)

    async def poll_loop(self) -> None:
        """Scan /proc for new steps once per heartbeat interval; pidfds report the ends of steps at once.

        Also stop the agent when the run is over. Without a manager, also remove the disk filler, a file by which a
        manager fills the disk as an injected fault.
        """
        loop = asyncio.get_running_loop()
        over_since: float | None = None
        heartbeats_without_manager = 0
        while True:
            await self._poll()
            heartbeats_without_manager = 0 if self._supervisor.dialer.connected else heartbeats_without_manager + 1
            # no new manager can start while the disk is full
            if heartbeats_without_manager > MAX_HEARTBEATS_WITHOUT_MANAGER:
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

    # ── scans ──────────────────────────────────────────────────────────────────────────────────────────────────────
    async def _poll(self) -> None:
        run_processes = self._census.scan()
        for path in {process.launch for process in run_processes} - self._launches.keys():
            await asyncio.to_thread(self._read_launch, path)
        for process in run_processes:
            if self._launches.get(process.launch) is None:
                continue
            if process.module == STEP_MODULE and process.launch not in self._running_steps:
                self._track(process)
            elif _is_orphan(process):
                self._on_step_gone(process.launch)
        now = asyncio.get_running_loop().time()
        if self._load_sampler.is_due(now):
            monitor = self._monitor
            gpus, tensor = (monitor.gpus(), monitor.tensor_active()) if monitor is not None else (None, {})
            self._unsent_loads = self._load_sampler.sample(run_processes, gpus, now, tensor)
            self._unsent_gpu_use = gpu_use(gpus, self._own_gpus)
            if monitor is not None:
                for path, launch in self._launches.items():
                    if launch is not None and (step_gpus := self._load_sampler.last_gpus(path)):
                        monitor.set_tenant(step_gpus, launch.role, str(launch.incarnation))

    def _track(self, process: Process) -> None:
        fd = open_pidfd(process)
        if fd is None:
            self._on_step_gone(process.launch)
            return

        def ended() -> None:
            self._forget(fd)
            del self._running_steps[process.launch]
            self._on_step_gone(process.launch)

        self._running_steps[process.launch] = process
        self._pidfds.add(fd)
        asyncio.get_running_loop().add_reader(fd, ended)
        # an earlier agent's pause helper may have left the step stopped
        self._start(asyncio.to_thread(resume_process, process.launch))

    def _forget(self, fd: int) -> None:
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)
        self._pidfds.discard(fd)

    def stop_watching(self) -> None:
        """Let no end of a step start more work, because the loop and its threads end."""
        for fd in list(self._pidfds):
            self._forget(fd)

    def _on_step_gone(self, path: str) -> None:
        """Handle the end of a step's first process: kill its orphans, and report the step if it has no exit record."""
        launch = self._launches.get(path)
        if launch is not None and path not in self._ending:
            self._ending.add(path)
            self._start(self._on_end(path, launch))

    async def _on_end(self, path: str, launch: Launch) -> None:
        try:
            await asyncio.gather(
                self._sweep({path}, _is_orphan), self._witness(launch), self._classify_exit(path, launch)
            )
        finally:
            self._ending.discard(path)

    async def _witness(self, launch: Launch) -> None:
        exit_file = self._supervisor.run.exit_file(launch.tag)
        if launch.tag in self._vanished or await asyncio.to_thread(read_exit, exit_file) is not None:
            return
        await asyncio.sleep(RECHECK_DELAY_S)
        if await asyncio.to_thread(read_exit, exit_file) is None:
            self._vanished[launch.tag] = StepVanished(launch.incarnation, launch.tag, launch.node)
            await self._supervisor.dialer.send(self._vanished[launch.tag])

    async def _classify_exit(self, path: str, launch: Launch) -> None:
        """Inform the GPU checks whether rrl ended a step on purpose.

        GPU errors near a requested end are a consequence of the end; errors near any other end may be its cause.
        """
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
        """Return the launch in a file, or None if it is not a launch of this node.

        The result is cached, except for a file that cannot be read.
        """
        try:
            launch = read_launch(OwnPath(path))
        except OSError:
            return None
        except msgspec.DecodeError:
            launch = None
        on_this_node = launch is not None and launch.node == self._supervisor.launch.node
        self._launches[path] = launch if on_this_node else None
        return self._launches[path]

    def _tag(self, path: str) -> str | None:
        launch = self._launches[path]
        return launch.tag if launch else None

    def _role_tag(self, path: str) -> str | None:
        launch = self._launches.get(path)
        return launch.tag if launch and role_of(launch.incarnation.replica) != AGENT else None

    # ── messages ───────────────────────────────────────────────────────────────────────────────────────────────────
    def _hello(self) -> Sequence[Any]:
        launch = self._supervisor.launch
        findings = self._monitor.findings if self._monitor is not None else ()
        hello = AgentHello(
            launch.incarnation,
            launch.tag,
            launch.node,
            socket.gethostname(),
            os.getpid(),
            boot_id(),
            self._probe_failure,
            *resource_limits(),
            snapshot_address=self._snapshot_server.address,
            findings=findings,
            now=time.monotonic(),
        )
        return [hello, *self._vanished.values()]

    def _on_message(self, message: Any) -> None:
        match message:
            case Inject():
                self._start(self._injector.inject(message))
            case DumpStacks():
                self._start(self._dump_stacks(message))
            case Fenced():
                self._snapshot_server.fence(message.incarnation)
                self._start(self._end_incarnation(message.incarnation, message.tag))

    async def _dump_stacks(self, request: DumpStacks) -> None:
        path = os.path.join(self._supervisor.steps, f"{request.tag}.launch")
        await self._supervisor.dialer.send(await dump_stacks(path, self._supervisor.launch.incarnation, request))

    # ── sweeping ───────────────────────────────────────────────────────────────────────────────────────────────────
    async def _sweep(self, paths: Collection[str], matches: Callable[[Process], bool]) -> None:
        """Kill each process that ``matches`` accepts and that belongs to a step with a launch file in ``paths``."""

        def find() -> list[Process]:
            return [
                process for process in processes(self._supervisor.steps) if process.launch in paths and matches(process)
            ]

        swept, left = await asyncio.to_thread(sweep, find, SWEEP_TIMEOUT_S)
        if swept and self._monitor is not None:
            self._monitor.on_our_kill()
        if left:
            _log.error(
                "these processes did not end within %g s of SIGKILL, and may hang in the kernel: %s",
                SWEEP_TIMEOUT_S,
                [process.pid for process in left],
            )

    async def _end_incarnation(self, incarnation: Incarnation, tag: str) -> None:
        """Kill the step of a fenced incarnation, because the step itself may not receive the Fenced message.

        The launch file of a promoted standby names another incarnation. The step of a promoted standby is therefore
        found by ``tag``.
        """
        paths = [
            path
            for path, launch in self._launches.items()
            if launch and (launch.incarnation == incarnation or launch.tag == tag)
        ]
        await self._sweep(paths, _is_not_agent)

    def _run_is_over(self) -> bool:
        run = self._supervisor.run
        try:
            return run.summary.exists() or _removed(run.path, self._device)
        except OSError:  # unreachable storage does not mean that the run is over
            return False

    async def _terminate_remaining(self) -> None:
        """End the remaining steps after the run's end: send SIGTERM, wait for their grace, then kill what is left."""
        for process in self._running_steps.values():
            send_signal(process, SIGTERM)
        grace = max((launch.grace for path in self._running_steps if (launch := self._launches[path])), default=0.0)
        deadline = asyncio.get_running_loop().time() + grace + 1.0
        while self._running_steps and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(RECHECK_DELAY_S)

        # The agent's own launch file also marks its readers. They must not be killed, because they may be inside a
        # driver.
        own = self._supervisor.launch_file
        await self._sweep([path for path, launch in self._launches.items() if launch and path != own], _is_not_agent)

    def _start(self, work: Coroutine[Any, Any, object]) -> None:
        """Do ``work`` in the background, and log its exception."""
        task = asyncio.create_task(work)  # a task, not a gathering future: cancelled at the end, it is no failure
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(log_failure)


def _removed(folder: Path, device: int) -> bool:
    """Return whether a folder was removed and not just unmounted.

    ``device`` is the device number (st_dev) of the folder's file system. If that file system was unmounted, the nearest
    existing parent of the folder is on another device.
    """
    if folder.exists():
        return False
    ancestor = next(parent for parent in folder.parents if parent.exists())
    return os.stat(ancestor).st_dev == device


def _listen_host(launch: Launch) -> str:
    """Return the address at which other nodes reach this node.

    Return an empty text if the configured network gives the node no address; the node probe then reports the reason.
    """
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
    """Return whether a process belongs to a step whose first process has ended.

    A wrapper that will exec a first process has no mark of a step yet, so the wrapper is not an orphan.
    """
    if not process.step:
        return False
    pid, _, started = process.step.partition(".")
    first_process = read_process(int(pid))
    return first_process is None or str(first_process.started) != started


if __name__ == "__main__":
    sys.exit(main())
