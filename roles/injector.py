"""What the agent of a node does when it is told to inject a fault: into a step there, or into itself."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from signal import SIGKILL, SIGSTOP, Signals

from rrl.roles.faults import HELD, PERFORM, TOLD, NotPerformed, find_target, lasts, let_go
from rrl.roles.first import FirstProcess
from rrl.spec.faults import Fault, FaultKind
from rrl.spec.launch import LAUNCH_ENV, Launch
from rrl.spec.processes import Process
from rrl.transport.messages import Inject, Injected


class Injector:
    """``launch_of``: the launch in a file if it is of this run and node, else None (blocking)."""

    def __init__(self, first: FirstProcess, launch_of: Callable[[str], Launch | None]) -> None:
        self._first, self._launch_of = first, launch_of

    async def inject(self, order: Inject) -> None:
        """On a step of this node, or on this agent itself. Returns once it is over, of what lasts."""
        fault, first = order.fault, self._first
        path = f"{first.steps}/{first.run.launch_file(order.tag).name}"
        launch: Launch | None = None
        try:
            launch = await asyncio.to_thread(self._launch_of, path)
            if launch is None:
                raise NotPerformed(f"{order.tag} is not a step of this run on {first.launch.node}")
            if launch.tag == first.launch.tag:
                await self._here(fault, launch)
                return
            target = await asyncio.to_thread(find_target, path)
            if lasts(fault):
                await self._hold(fault, launch, target.command, path)
                return
            if fault.kind not in PERFORM:
                raise NotPerformed(f"an agent cannot perform {fault.kind}")
            detail = await asyncio.to_thread(PERFORM[fault.kind], target)
            await self._answer(fault, launch, True, detail)
        except (NotPerformed, OSError) as error:
            await self._answer(fault, launch, False, str(error))

    async def _here(self, fault: Fault, launch: Launch) -> None:
        """The answer goes first: afterwards nobody could give it."""
        fatal: dict[FaultKind, Signals] = {FaultKind.KILL: SIGKILL, FaultKind.FREEZE: SIGSTOP}
        if lasts(fault):
            await self._hold(fault, launch, self._first.me, None)
        elif fault.kind in fatal:
            await self._answer(fault, launch, True, f"{fatal[fault.kind].name} to pid {os.getpid()}")
            await asyncio.sleep(TOLD)
            os.kill(os.getpid(), fatal[fault.kind])
        else:
            raise NotPerformed(f"an agent cannot have {fault.kind}")

    async def _hold(self, fault: Fault, launch: Launch, process: Process, path: str | None) -> None:
        """By a process of its own: it lets go whatever happens to us. Waits until it has."""
        mark = [] if path is None else [path + HELD]
        holder = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "rrl.roles.hold", process.name, str(fault.amount), str(fault.seconds), *mark,
            env=os.environ | {LAUNCH_ENV: self._first.launch_file}, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert holder.stdout is not None
        began = (await holder.stdout.readline()).decode().strip()
        if began:
            await self._answer(fault, launch, True, began)
        ended, said = await holder.communicate()
        if path is not None:
            await asyncio.to_thread(let_go, path)
        if not began:
            raise NotPerformed(said.decode(errors="replace").strip() or "its holder ended without a word")
        await self._answer(fault, launch, True, ended.decode().strip() or "its holder was killed", ended=True)

    async def _answer(self, fault: Fault, launch: Launch | None, ok: bool, detail: str, ended: bool = False) -> None:
        life = None if launch is None else launch.life
        await self._first.dialer.send(Injected(fault, ok, detail, life, self._first.launch.node, ended))
