"""What carrying out an action takes beyond the cluster: launch files, words to steps and agents, and their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rrl.manager import events as ev
from rrl.manager.actions import Launch, StopStep
from rrl.manager.cluster import Cluster, Step
from rrl.manager.hearing import Send
from rrl.manager.launching import job_dir_of, write_launch
from rrl.manager.saying import say
from rrl.manager.state import State
from rrl.spec.rundir import RunDir
from rrl.transport import messages as msg


class Deeds:
    """``state`` gives the newest state, ``steps`` where each step's first process can be told something."""

    def __init__(
        self,
        run: RunDir,
        cluster: Cluster,
        source: str,
        state: Callable[[], State],
        send: Send,
        steps: dict[str, bytes],
    ) -> None:
        self._run, self._cluster, self._source, self._state, self._send = run, cluster, source, state, send
        self._steps = steps
        self._ended: dict[str, asyncio.Event] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def notice(self, event: ev.Event) -> None:
        """An event was recorded: somebody may be waiting for it."""
        if isinstance(event, ev.StepEnded) and event.step in self._ended:
            self._ended[event.step].set()

    def prepare(self, action: Launch) -> Step:
        """The launch file is written when it returns (blocking). Raises OSError."""
        return write_launch(self._run, self._state(), action, job_dir_of(self._source))

    def step_spoke(self, tag: str) -> None:
        """What only carried the launch of this step can go."""
        task = asyncio.create_task(self._cluster.joined(tag))
        self._tasks.add(task)
        task.add_done_callback(self._over)

    async def tell_step(self, action: StopStep, patience: float) -> bool:
        """Ask the step's first process itself to leave; True once it has ended."""
        peer = self._steps.get(action.step)
        if peer is None:
            return False
        ended = self._ended.setdefault(action.step, asyncio.Event())
        why = "; ".join(action.why.evidence)
        await self._send(peer, msg.Stop(action.life, action.grace, why, action.step), None)
        try:
            return await _within(ended, patience)
        finally:
            self._ended.pop(action.step, None)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            say(str(task.exception()))


async def _within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
