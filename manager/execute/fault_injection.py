"""Inject requested and planned faults through the node's agent, the role itself, the cluster, or this manager.

Each fault is recorded as one ``FaultInjected`` event, which says whether the fault was injected. A fault with a
duration gets a second event at its end. A fault is tried only once. If the manager dies before the result is known, the
next manager records the result as unknown.

``disk_full`` writes a file that fills the run directory's file system (blocking). The fault is refused if more than
:data:`MAX_FILL_BYTES` are free, because other people use that file system, too. If the manager is killed, the file is
removed by the next manager, or by an agent that has lost the connection to its manager.
"""

from __future__ import annotations

import asyncio
import os
import signal

import msgspec

from ...cluster.base import Cluster, Refused, Unanswered
from ...core.faults import FAULT_TRAITS, MANAGER, Fault, FaultKind, TargetKind
from ...core.run_dir import RunDir
from ...core.types import AGENT, replica_id, role_of
from ...transport import messages as msg
from ..context import RunContext
from ..model import events as ev
from ..model.actions import InjectFault

ANSWER_TIMEOUT_S = 20.0
"""Seconds within which an agent confirms a fault, or a role confirms a fault that it can inject immediately."""
ANSWER_DELAY_S = 2.0
"""Seconds by which a confirmation may arrive after the report that the fault's target has ended: the two messages use
different connections."""


def injected_event(
    action: InjectFault, ok: bool, detail: str, *, ended: bool = False, unknown: bool = False
) -> ev.FaultInjected:
    """Return the event that records the result of a fault; with ``ended``, the event that records its end."""
    fault = action.fault
    return ev.FaultInjected(
        fault.id, action.incarnation, ok, detail, fault.kind, fault.target, action.node, ended=ended, unknown=unknown
    )


def interrupted_event(action: InjectFault, epoch: int) -> ev.FaultInjected:
    """Return the event that the next manager records for a fault whose manager died before recording a result."""
    if action.fault.target == MANAGER:
        return injected_event(action, True, f"the manager before epoch {epoch} was killed")
    return injected_event(
        action, False, "the manager died before it recorded a result; the fault is not tried again", unknown=True
    )


class FaultInjector:
    """Injects one run's faults.

    Args:
        context: the run, its newest state and the connections of its processes.
        cluster: injects faults of nodes and of the cluster itself.
    """

    def __init__(self, context: RunContext, cluster: Cluster) -> None:
        self._context, self._cluster = context, cluster
        self._pending: dict[str, tuple[InjectFault, asyncio.Event]] = {}
        """Action and asyncio event, by fault id. The asyncio event is set once the fault is confirmed or its target has
        ended."""
        self._exit_codes: dict[str, int] = {}
        """Exit code of each target that ended before its fault was confirmed, by the tag of the target's step."""

    def on_event(self, event: ev.Event) -> None:
        """Handle a recorded event.

        An injection that waits continues once its fault is confirmed, or once the fault's target is no longer current.
        """
        for fault, (action, settled) in self._pending.items():
            if isinstance(event, ev.StepEnded) and event.step == action.step and event.code is not None:
                self._exit_codes[action.step] = event.code
            if isinstance(event, ev.FaultInjected) and event.fault == fault:
                settled.set()
            elif action.incarnation is not None and not self._context.state().is_current(action.incarnation):
                asyncio.get_running_loop().call_later(ANSWER_DELAY_S, settled.set)

    async def inject(self, action: InjectFault) -> None:
        """Inject the fault and record the result.

        Returns once the result is known. If this manager or the cluster injects the fault, returns once the fault has
        ended.
        """
        fault = action.fault
        try:
            if fault.target == MANAGER:
                os.kill(os.getpid(), signal.SIGKILL)  # the intent is durable: the next manager records the result
            elif fault.kind is FaultKind.DISK_FULL:
                await self._fill_disk(action)
            elif FAULT_TRAITS[fault.kind].target_kind is not TargetKind.REPLICA:
                await self._on_cluster(action)
            elif FAULT_TRAITS[fault.kind].by_signals:
                await self._by_agent(action)
            else:
                await self._by_role(action)
        except Refused as error:
            self._context.record(injected_event(action, False, f"refused: {error}"))
        except Unanswered as error:
            detail = str(error) or "the cluster did not answer"
            self._context.record(injected_event(action, False, detail, unknown=True))

    async def _on_cluster(self, action: InjectFault) -> None:
        fault: Fault = action.fault
        if action.node:
            fault = msgspec.structs.replace(fault, target=action.node)
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._context.record(injected_event(action, True, await self._cluster.inject_fault(fault)))
        if fault.seconds:  # ``seconds`` count from ``began``: some clusters confirm an outage only at its end
            await asyncio.sleep(began + fault.seconds - loop.time())
            self._context.record(injected_event(action, True, f"ended after {fault.seconds:g} s", ended=True))

    async def _fill_disk(self, action: InjectFault) -> None:
        try:
            detail = await asyncio.to_thread(fill_disk, self._context.run_dir)
            self._context.record(injected_event(action, True, detail))
            await asyncio.sleep(action.fault.seconds)
        finally:
            removed = remove_disk_filler(self._context.run_dir)
        if removed:
            self._context.record(injected_event(action, True, "the disk space is free again", ended=True))

    async def _by_agent(self, action: InjectFault) -> None:
        agent = self._context.state().replica(replica_id(AGENT, action.node))
        peer = self._context.connections.steps.get(agent.step or "")
        if peer is None:
            raise Refused(f"the agent of {action.node} is not connected")
        await self._send_and_wait(action, peer, ANSWER_TIMEOUT_S)
        if action.fault.kind is FaultKind.OUT_OF_MEMORY and action.incarnation is not None:
            # The agent has limited the worker's memory. This message makes the worker allocate more than the limit.
            worker = self._context.connections.workers.get(action.incarnation)
            if worker is not None:
                await self._context.send(worker, msg.Inject(action.fault, action.step), None)

    async def _by_role(self, action: InjectFault) -> None:
        """Ask the role to inject the fault; most faults take effect at the role's next call of the worker API."""
        assert action.incarnation is not None
        peer = self._context.connections.workers.get(action.incarnation)
        if peer is None or self._context.state().job.role(role_of(action.incarnation.replica)).watch != "api":
            raise Refused(
                f"{action.incarnation} is not connected through the worker API, which {action.fault.kind} needs"
            )
        await self._send_and_wait(action, peer, ANSWER_TIMEOUT_S if action.fault.kind is FaultKind.EXIT else None)

    async def _send_and_wait(self, action: InjectFault, peer: bytes, timeout_s: float | None) -> None:
        settled = asyncio.Event()
        self._pending[action.fault.id] = action, settled
        try:
            await self._context.send(peer, msg.Inject(action.fault, action.step), None)
            async with asyncio.timeout(timeout_s):
                await settled.wait()
        except TimeoutError:
            raise Unanswered(f"no confirmation within {timeout_s:g} s that the fault was injected") from None
        finally:
            del self._pending[action.fault.id]
        if action.tag not in self._context.state().intents:
            return
        code = self._exit_codes.pop(action.step, None)
        if action.fault.kind is FaultKind.EXIT and code == action.fault.amount:  # it exited before it confirmed
            self._context.record(injected_event(action, True, f"its step ended with exit code {code}"))
        else:  # the target ended first, perhaps because of the fault
            raise Unanswered(f"{action.incarnation} ended before it confirmed that the fault was injected")


MAX_FILL_BYTES = 2**30
"""Maximum free space (bytes) of a file system that rrl fills. If more is free, the fault is refused, because filling it
would take minutes, and because other users need the space."""
_BLOCK_SIZES = (2**20, 2**12, 1)
"""Sizes in bytes of the blocks that are written. The next size is used once a block no longer fits."""


def fill_disk(run: RunDir) -> str:
    """Write a file that uses up the free space of the run directory's file system; return its size as text. Blocks.

    Raises:
        Refused: more than ``MAX_FILL_BYTES`` are free, or the file cannot be created.
    """
    try:
        file_system = os.statvfs(run.path)
        free = file_system.f_bavail * file_system.f_frsize
        if free > MAX_FILL_BYTES:
            raise Refused(
                f"cannot fill the file system of {run.path}: {free / 2**30:.1f} GiB are free, and rrl fills at most"
                f" {MAX_FILL_BYTES / 2**30:g} GiB, because others use this file system too"
            )
        fd = os.open(run.disk_filler, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    except OSError as error:
        raise Refused(str(error)) from error
    written = 0
    try:
        for block in _BLOCK_SIZES:
            written += _write(fd, block, MAX_FILL_BYTES - written)
        os.fsync(fd)
    except OSError:  # the disk is full, which is the purpose
        pass
    finally:
        os.close(fd)
    return f"{run.disk_filler} takes {written / 2**20:.1f} MiB; no space is left"


def remove_disk_filler(run: RunDir) -> bool:
    """Remove the file that fills the disk; return whether there was such a file."""
    try:
        run.disk_filler.unlink()
    except FileNotFoundError:
        return False
    return True


def _write(fd: int, block: int, max_bytes: int) -> int:
    """Write blocks until none fits or ``max_bytes`` are written; return the bytes written."""
    data, written = b"\1" * block, 0
    while written + block <= max_bytes:
        try:
            written += os.write(fd, data)
        except OSError:  # ENOSPC, EDQUOT
            break
    return written
