"""The local cluster: virtual nodes on this machine. A node is only a name; a step is a process in its own session.

All state of the cluster is in ``run_dir/cluster``, where the next manager finds it after a kill -9 of its predecessor.
``<tag>.json`` is an allocation. ``steps/<tag>.json`` is a step, written before its launch and again after it.
``down/<node>`` marks a node that is down. The process id is in the file of a step only after the second write. Without
it, the step's first process is found by its environment, which names the launch file.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from ..core.faults import Fault, FaultKind
from ..core.launch import LAUNCH_ENV, read_launch
from ..core.processes import AGENT_MODULE, STEP_MODULE, Process, open_pidfd, processes, read_process, send_signal, sweep
from ..core.run_dir import OwnPath, RunDir, write_atomically
from ..core.run_spec import RunSpec
from ..core.types import NodeName
from .base import (
    STOP_MARGIN_S,
    AllocationNotRunning,
    AllocationRequest,
    AllocationState,
    AllocationStatus,
    Cluster,
    ClusterSnapshot,
    NodeState,
    NodeStatus,
    NotStarted,
    Refused,
    Step,
    Unanswered,
)

RELEASE_GRACE_S = 5.0
"""Seconds that the steps of a released allocation have to end before they are killed. Normally the manager has stopped
them before the release."""
SWEEP_TIMEOUT_S = 10.0
"""Seconds for processes to end after SIGKILL. A process that takes longer hangs in the kernel and may never end."""
_INHERITED_ENV = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH")
"""Variables that the first process of a step inherits from the manager. The role's own environment is in the launch
file."""


_Record = TypeVar("_Record", bound=Struct)


class _Allocation(Struct, frozen=True):
    nodes: tuple[NodeName, ...]


class _StepRecord(Struct, frozen=True):
    allocation: str
    node: NodeName
    launch_file: str
    pid: int = 0
    """Process id of the step's first process; 0 before its launch."""
    started: int = 0
    """Start time of the step's first process in clock ticks since boot, by which a reused pid is recognised; 0 before
    its launch."""


def down_mark(run_dir: RunDir, node: NodeName) -> Path:
    """Return the path of the file that marks a virtual node as down while the file exists.

    Nothing is launched on a node that is down. An empty file is in force until it is removed. A file that is not empty
    contains the wall-clock time (s) at which the node is up again.
    """
    return run_dir.cluster / "down" / node


def open_cluster(run: RunDir, spec: RunSpec, own_tag: str) -> Cluster:
    """Return the local cluster of a run (:class:`rrl.cluster.traits.ClusterTraits`)."""
    return LocalCluster(run, python=spec.env.python or sys.executable)


class LocalCluster:
    """The virtual nodes ``local1``, ``local2`` … of one run.

    Args:
        run_dir: the run's directory, which contains the cluster's records.
        nodes: number of virtual nodes; if None, as many as are requested.
        python: the interpreter that runs the first process of each step.
    """

    def __init__(self, run_dir: RunDir, nodes: int | None = None, python: str = sys.executable) -> None:
        self._run = run_dir
        self._limit = nodes
        self._python = python
        self._steps = run_dir.cluster / "steps"
        self._children: dict[int, tuple[subprocess.Popen[bytes], asyncio.AbstractEventLoop]] = {}
        """Each child process with the event loop that watches the child's pidfd, by pidfd. A child is reaped when its
        pidfd becomes readable."""
        for folder in (self._steps, run_dir.cluster / "down"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    async def request(self, request: AllocationRequest) -> None:
        """Assign free nodes that are up; does nothing if the tag has nodes already."""
        if self._allocation_file(request.tag).exists():
            return
        used = {node for allocation in self._allocations().values() for node in allocation.nodes}
        unusable = used | set(request.exclude) | self._down()
        last = self._limit if self._limit is not None else len(unusable) + request.count
        free = [node for n in range(1, last + 1) if (node := NodeName(f"local{n}")) not in unusable]
        if len(free) < request.count:
            raise Refused(f"too few free nodes: {request.count} requested, {len(free)} of {last} are free and up")
        self._write(self._allocation_file(request.tag), _Allocation(tuple(free[: request.count])))

    async def release(self, tag: str) -> None:
        """Stop the steps of the allocation and remove its record."""
        steps = [step for step, launched in self._step_records().items() if launched.allocation == tag]
        ends = await asyncio.gather(*(self.stop(step, RELEASE_GRACE_S) for step in steps), return_exceptions=True)
        if failed := [end for end in ends if isinstance(end, BaseException)]:
            raise failed[0]
        self._remove_record(self._allocation_file(tag))

    async def launch(self, step: Step) -> None:
        """Record the step, start its first process, and record the process id."""
        allocation = self._allocations().get(step.allocation)
        if allocation is None or step.node not in allocation.nodes:
            raise AllocationNotRunning(f"{step.node} is not in allocation {step.allocation}")
        if step.node in self._down():
            raise Refused(f"{step.node} is down")
        record = self._step_file(step.tag)
        before = self._step_records().get(step.tag)
        if before is not None and (before.pid or self._first_process(before)):
            raise Refused(f"{step.tag} has already been launched")
        launched = _StepRecord(step.allocation, step.node, str(step.launch_file))
        self._write(record, launched)
        try:
            first = self._start(step)
        except OSError as error:
            record.unlink()
            raise NotStarted(f"cannot start {self._python}: {error.strerror}") from error
        if first is not None:
            self._write(record, msgspec.structs.replace(launched, pid=first.pid, started=first.started))

    async def release_launcher(self, tag: str) -> None:
        """Do nothing: a local launch needs no helper process."""

    async def stop(self, tag: str, grace: float) -> None:
        """Send SIGTERM to the step's first process, wait, then kill the processes of the step that remain."""
        launched = self._step_records().get(tag)
        if launched is None:
            return
        if (first := self._first_process(launched)) and grace > 0 and send_signal(first, signal.SIGTERM):
            await _wait_for_end(first, grace + STOP_MARGIN_S)

        def leftovers() -> list[Process]:
            return [process for process in processes(str(self._run.steps)) if process.launch == launched.launch_file]

        _, remaining = await asyncio.to_thread(sweep, leftovers, SWEEP_TIMEOUT_S)
        if remaining:
            raise Unanswered(f"{tag}: pid {remaining[0].pid} has not ended {SWEEP_TIMEOUT_S:g} s after SIGKILL")
        self._remove_record(self._step_file(tag))

    async def drain(self, node: NodeName, reason: str) -> None:
        """Raise Refused, because virtual nodes belong to this run only."""
        raise Refused("the local cluster cannot drain nodes: its virtual nodes belong to this run only")

    async def undrain(self, node: NodeName, reason: str) -> None:
        """Raise Refused, because virtual nodes belong to this run only."""
        raise Refused("the local cluster cannot undrain nodes: its virtual nodes belong to this run only")

    async def shrink(self, tag: str, nodes: tuple[NodeName, ...]) -> None:
        """Raise Refused, because virtual nodes belong to this run only."""
        raise Refused("the local cluster cannot give single nodes back: its virtual nodes belong to this run only")

    async def inject_fault(self, fault: Fault) -> str:
        """Inject a crash of a node.

        Other faults are refused: all virtual nodes share one network and one disk, and there is no slurmctld.
        """
        if fault.kind is not FaultKind.CRASH:
            raise Refused(f"the local cluster cannot inject {fault.kind}: its nodes share one network and disk")
        node = NodeName(fault.target)
        if node not in {name for allocation in self._allocations().values() for name in allocation.nodes}:
            raise Refused(f"{node} is in no allocation of this run")
        until = f"{time.time() + fault.seconds:.3f}" if fault.seconds else ""
        try:
            down_mark(self._run, node).write_text(until)  # the mark comes before the kill, to prevent new launches
        except OSError as error:
            raise Refused(str(error)) from error
        ended, remaining = await asyncio.to_thread(sweep, lambda: self._processes_on(node), SWEEP_TIMEOUT_S)
        if remaining:
            raise Unanswered(f"{node}: pid {remaining[0].pid} has not ended {SWEEP_TIMEOUT_S:g} s after SIGKILL")
        return f"{node} is marked down and {len(ended)} of its processes were killed"

    async def observe(self) -> ClusterSnapshot:
        """Return the recorded allocations and nodes, and the steps whose first process runs."""
        try:
            allocations = self._allocations()
            steps = {
                tag: launched.node for tag, launched in self._step_records().items() if self._first_process(launched)
            }
            down = self._down()
        except Refused as error:
            return ClusterSnapshot(None, None, None, unknown=str(error))
        names = {node for allocation in allocations.values() for node in allocation.nodes} | down
        names |= {NodeName(f"local{n}") for n in range(1, (self._limit or 0) + 1)}
        return ClusterSnapshot(
            nodes={
                node: NodeStatus(NodeState.DOWN, "marked down") if node in down else NodeStatus(NodeState.UP)
                for node in sorted(names)
            },
            allocations={
                tag: AllocationStatus(AllocationState.RUNNING, tag, allocation.nodes)
                for tag, allocation in allocations.items()
            },
            steps=steps,
        )

    async def close(self) -> None:
        """Release the pidfds of the child processes, which keep running."""
        for fd, (child, loop) in list(self._children.items()):
            loop.remove_reader(fd)
            os.close(fd)
            if child.poll() is None:
                child.returncode = 0  # the process keeps running on purpose: avoid the ResourceWarning
        self._children.clear()

    # ── records ────────────────────────────────────────────────────────────────────────────────────────────────────
    def _allocation_file(self, tag: str) -> Path:
        return self._run.cluster / f"{tag}.json"

    def _step_file(self, tag: str) -> Path:
        return self._steps / f"{tag}.json"

    def _write(self, path: Path, record: Struct) -> None:
        try:
            write_atomically(path, msgspec.json.encode(record))
        except OSError as error:
            raise Refused(f"{path}: {error}") from error

    def _remove_record(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise Unanswered(f"{path}: {error}") from error

    def _allocations(self) -> dict[str, _Allocation]:
        return _records(self._run.cluster, _Allocation)

    def _step_records(self) -> dict[str, _StepRecord]:
        return _records(self._steps, _StepRecord)

    def _down(self) -> set[NodeName]:
        try:
            return {NodeName(mark.name) for mark in (self._run.cluster / "down").iterdir() if _is_in_force(mark)}
        except (OSError, ValueError) as error:
            raise Refused(str(error)) from error

    # ── processes ──────────────────────────────────────────────────────────────────────────────────────────────────
    def _start(self, step: Step) -> Process | None:
        """Start the first process of a step and return it; return None if it has already ended."""
        module = AGENT_MODULE if step.agent else STEP_MODULE
        env = {LAUNCH_ENV: str(step.launch_file)}
        env |= {name: os.environ[name] for name in _INHERITED_ENV if name in os.environ}
        with open(os.open(step.log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as log:
            # -P: do not search the working directory for modules
            child = subprocess.Popen(
                [self._python, "-P", "-m", module, str(step.launch_file)],
                env=env,
                cwd=self._run.path,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        fd, loop = os.pidfd_open(child.pid), asyncio.get_running_loop()
        self._children[fd] = child, loop
        loop.add_reader(fd, self._reap, fd)
        return read_process(child.pid)

    def _reap(self, fd: int) -> None:
        child, loop = self._children.pop(fd)
        loop.remove_reader(fd)
        os.close(fd)
        child.wait()

    def _processes_on(self, node: NodeName) -> list[Process]:
        """Return all processes of the run on a virtual node."""
        return [process for process in processes(str(self._run.steps)) if _node_of(process.launch) == node]

    def _first_process(self, launched: _StepRecord) -> Process | None:
        """Return the first process of a step; None if it has ended."""
        if launched.pid:
            process = read_process(launched.pid)
            return process if process is not None and process.started == launched.started else None
        return next(
            (
                process
                for process in processes(str(self._run.steps))
                if process.launch == launched.launch_file and process.module
            ),
            None,
        )


def _is_in_force(mark: Path) -> bool:
    """Return whether the node is still marked as down, and remove a mark whose time has passed."""
    until = mark.read_text()
    if until and time.time() >= float(until):
        mark.unlink(missing_ok=True)
        return False
    return True


def _node_of(launch_file: str) -> NodeName | None:
    try:
        return read_launch(OwnPath(launch_file)).node
    except (OSError, msgspec.MsgspecError):
        return None


def _records(folder: Path, kind: type[_Record]) -> dict[str, _Record]:
    """Read all records of a folder, by tag.

    Raises:
        Refused: a record cannot be read, so the state of the cluster is not known completely.
    """
    try:
        return {
            path.stem: msgspec.json.decode(path.read_bytes(), type=kind)
            for path in sorted(folder.iterdir())
            if path.suffix == ".json" and path.name[0] != "."
        }
    except (OSError, msgspec.DecodeError) as error:
        raise Refused(f"{folder}: {error}") from error


async def _wait_for_end(process: Process, timeout_s: float) -> None:
    """Wait until the process has ended, for at most ``timeout_s`` seconds."""
    fd = open_pidfd(process)
    if fd is None:
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(fd, ended.set)
    try:
        async with asyncio.timeout(timeout_s):
            await ended.wait()
    except TimeoutError:
        pass
    finally:
        loop.remove_reader(fd)
        os.close(fd)
