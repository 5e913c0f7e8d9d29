"""Inject requested faults: through the agent of the target's node, the role itself, the cluster, or this manager.

Each fault ends in one ``FaultInjected`` event that says whether it was performed; one that lasts gets a second event at
its end. A fault is tried once; if the manager died in between, its result is recorded as unknown.

``disk_full`` writes a file that fills the run directory's file system (blocking). Because others use that file system
too, it is done only where little room is left; whoever comes after a killed manager, the next manager or an agent that
misses it, removes the file.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import msgspec

from ...core.faults import FAULT_TRAITS, MANAGER, Fault, FaultKind, TargetKind
from ...core.run_dir import RunDir
from ...core.types import AGENT, Incarnation, replica_id, role_of
from ...transport import messages as msg
from ...transport.control.endpoints import Send
from ..cluster.base import Cluster, Refused, Unanswered
from ..model import events as ev
from ..model.actions import InjectFault
from ..model.state import State
from . import fault_injection

ANSWER_TIMEOUT_S = 20.0
"""s for an agent to say that it performed a fault, and for a role that can at once"""
ANSWER_DELAY_S = 2.0
"""s that the answer may come after its target's end: it takes another way than the news of that"""


def injected_event(
    action: InjectFault, ok: bool, detail: str, *, ended: bool = False, unknown: bool = False
) -> ev.FaultInjected:
    fault = action.fault
    return ev.FaultInjected(
        fault.id, action.incarnation, ok, detail, fault.kind, fault.target, action.node, ended=ended, unknown=unknown
    )


def interrupted_event(action: InjectFault, epoch: int) -> ev.FaultInjected:
    """What the next manager tells of an intent whose manager died over it."""
    if action.fault.target == MANAGER:
        return injected_event(action, True, f"the manager before epoch {epoch} is gone")
    return injected_event(action, False, "its manager died over it; it is not tried again", unknown=True)


class FaultInjector:
    """``step_peers`` and ``worker_peer`` say where agents and workers can be told something; ``record`` takes what was done."""

    def __init__(
        self,
        run: RunDir,
        cluster: Cluster,
        state: Callable[[], State],
        record: Callable[[ev.Event], None],
        send: Send,
        step_peers: dict[str, bytes],
        worker_peer: Callable[[Incarnation], bytes | None],
    ) -> None:
        self._run, self._cluster, self._state, self._record, self._send = run, cluster, state, record, send
        self._step_peers, self._worker_peer = step_peers, worker_peer
        self._pending: dict[str, tuple[InjectFault, asyncio.Event]] = {}
        """by fault: it was answered, or its target is gone"""
        self._exit_codes: dict[str, int] = {}
        """by step: with which a target ended meanwhile"""

    def on_event(self, event: ev.Event) -> None:
        """An event was recorded: somebody may be waiting for it."""
        for fault, (action, settled) in self._pending.items():
            if isinstance(event, ev.StepEnded) and event.step == action.step and event.code is not None:
                self._exit_codes[action.step] = event.code
            if isinstance(event, ev.FaultInjected) and event.fault == fault:
                settled.set()
            elif action.incarnation is not None and not self._state().is_current(action.incarnation):
                asyncio.get_running_loop().call_later(ANSWER_DELAY_S, settled.set)

    async def inject(self, action: InjectFault) -> None:
        """Returns once it is told what was done, and, of what this manager or the cluster holds, that it is over."""
        fault = action.fault
        try:
            if fault.target == MANAGER:
                os.kill(os.getpid(), signal.SIGKILL)  # its intent is durable: the next manager tells
            elif fault.kind is FaultKind.DISK_FULL:
                await self._fill_disk(action)
            elif FAULT_TRAITS[fault.kind].target_kind is not TargetKind.REPLICA:
                await self._on_cluster(action)
            elif FAULT_TRAITS[fault.kind].by_signals:
                await self._by_agent(action)
            else:
                await self._by_role(action)
        except Refused as error:
            self._record(injected_event(action, False, f"refused: {error}"))
        except Unanswered as error:
            self._record(injected_event(action, False, str(error) or "the cluster did not answer", unknown=True))

    async def _on_cluster(self, action: InjectFault) -> None:
        fault: Fault = action.fault
        if action.node:
            fault = msgspec.structs.replace(fault, target=action.node)
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._record(injected_event(action, True, await self._cluster.inject_fault(fault)))
        if fault.seconds:  # some clusters tell of an outage when it is over
            await asyncio.sleep(began + fault.seconds - loop.time())
            self._record(injected_event(action, True, f"{fault.seconds:g} s are over", ended=True))

    async def _fill_disk(self, action: InjectFault) -> None:
        try:
            self._record(injected_event(action, True, await asyncio.to_thread(fault_injection.fill_disk, self._run)))
            await asyncio.sleep(action.fault.seconds)
        finally:
            removed = fault_injection.remove_disk_filler(self._run)
        if removed:
            self._record(injected_event(action, True, "the room is given back", ended=True))

    async def _by_agent(self, action: InjectFault) -> None:
        agent = self._state().replica(replica_id(AGENT, action.node))
        peer = self._step_peers.get(agent.step or "")
        if peer is None:
            raise Refused(f"the agent of {action.node} is not connected")
        await self._send_and_wait(action, peer, ANSWER_TIMEOUT_S)
        if action.fault.kind is FaultKind.OUT_OF_MEMORY and action.incarnation is not None:
            worker = self._worker_peer(action.incarnation)  # who lives on what it has needs more now, too
            if worker is not None:
                await self._send(worker, msg.Inject(action.fault, action.step), None)

    async def _by_role(self, action: InjectFault) -> None:
        """Most strike at the role's next call of the worker API, however long that takes."""
        assert action.incarnation is not None
        peer = self._worker_peer(action.incarnation)
        if peer is None or self._state().job.role(role_of(action.incarnation.replica)).watch != "api":
            raise Refused(f"{action.incarnation} cannot be told: {action.fault.kind} needs the worker API")
        await self._send_and_wait(action, peer, ANSWER_TIMEOUT_S if action.fault.kind is FaultKind.EXIT else None)

    async def _send_and_wait(self, action: InjectFault, peer: bytes, timeout_s: float | None) -> None:
        settled = asyncio.Event()
        self._pending[action.fault.id] = action, settled
        try:
            await self._send(peer, msg.Inject(action.fault, action.step), None)
            async with asyncio.timeout(timeout_s):
                await settled.wait()
        except TimeoutError:
            raise Unanswered(f"nobody said within {timeout_s:g} s that it was performed") from None
        finally:
            del self._pending[action.fault.id]
        if action.tag not in self._state().intents:
            return
        code = self._exit_codes.pop(action.step, None)
        if action.fault.kind is FaultKind.EXIT and code == action.fault.amount:  # its answer was lost with it
            self._record(injected_event(action, True, f"its step ended with exit code {code}"))
        else:  # its target ended first: perhaps of it, perhaps not
            raise Unanswered(f"{action.incarnation} was gone before anybody said that it was performed")


MAX_FILL_BYTES = 2**30
"""bytes: where more is free, filling the file system would take minutes and room that others count on"""
_BLOCK_SIZES = (2**20, 2**12, 1)
"""bytes written at once, smaller and smaller as the last of the room goes"""


def fill_disk(run: RunDir) -> str:
    """Take all the room; says how much. Raises Refused when there is too much of it."""
    try:
        file_system = os.statvfs(run.path)
        free = file_system.f_bavail * file_system.f_frsize
        if free > MAX_FILL_BYTES:
            raise Refused(
                f"{free / 2**30:.1f} GiB are free on the file system of {run.path}, and no more than"
                f" {MAX_FILL_BYTES / 2**30:g} GiB are ever filled: others need them too"
            )
        fd = os.open(run.disk_filler, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    except OSError as error:
        raise Refused(str(error)) from error
    written = 0
    try:
        for block in _BLOCK_SIZES:
            written += _write(fd, block, MAX_FILL_BYTES - written)
        os.fsync(fd)
    except OSError:  # it is as full as it gets
        pass
    finally:
        os.close(fd)
    return f"{run.disk_filler} takes {written / 2**20:.1f} MiB: nothing is left"


def remove_disk_filler(run: RunDir) -> bool:
    """Remove the file; True when there was one."""
    try:
        run.disk_filler.unlink()
    except FileNotFoundError:
        return False
    return True


def _write(fd: int, block: int, max_bytes: int) -> int:
    """Blocks until none fits, or so many bytes are written."""
    data, written = b"\1" * block, 0
    while written + block <= max_bytes:
        try:
            written += os.write(fd, data)
        except OSError:  # ENOSPC, EDQUOT
            break
    return written
