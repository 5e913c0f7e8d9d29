"""Carry out planned and journaled actions: the only caller of the cluster's verbs that change something.

Every action here was recorded as an intent and fsynced. Its result comes back as a ``Done`` event or, where nobody
knows (``Unanswered``), not at all: the next poll of the cluster then settles it by its tag. What an action needs beyond
the cluster is done here too: write launch files, send requests to steps and agents, and handle their answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from ...core.run_dir import RunDir
from ...transport import messages as msg
from ...transport.control.endpoints import Send
from ..cluster.base import Cluster, Refused, Step, Unanswered
from ..model import events as ev
from ..model.actions import Drain, Launch, Outside, Perform, Release, Request, Shrink, StopStep, Undrain
from ..model.events import Done, Event
from ..model.state import State
from ..storage.lease import LeaseLost
from .launch import job_dir_of, write_launch

_log = logging.getLogger("rrl.manager")

AGAIN = 5.0
"""s before a stop or a release that nobody answered is asked for again: both are repeatable"""
SELDOM = 60.0
"""s that this pause doubles up to"""
STEP_MARGIN = 3.0
"""s beyond a step's own grace before the cluster is asked to end it"""


class Executor:
    """``record`` takes the resulting events, ``prepare`` writes a launch file, ``tell`` asks a step to stop and returns
    once it has ended (False: it did not), ``inject`` has a fault performed and tells what became of it, ``check``
    raises LeaseLost, ``adopt`` tells a shadow what it becomes (Refused: there is none to tell)."""

    def __init__(
        self,
        cluster: Cluster,
        record: Callable[[Event], None],
        prepare: Callable[[Launch], Step],
        tell: Callable[[StopStep, float], Awaitable[bool]],
        inject: Callable[[Perform], Awaitable[None]],
        check: Callable[[], Awaitable[None]],
        adopt: Callable[[Launch], Awaitable[None]],
    ) -> None:
        self._cluster = cluster
        self._record = record
        self._prepare = prepare
        self._tell = tell
        self._inject = inject
        self._check = check
        self._adopt = adopt
        self._running: dict[str, asyncio.Task[None]] = {}

    @property
    def busy(self) -> frozenset[str]:
        """Tags of the actions that are being carried out."""
        return frozenset(self._running)

    def start(self, action: Outside) -> None:
        """Carry out one journaled action in the background; the same one is not started twice at a time."""
        if action.tag in self._running:
            return
        task = asyncio.create_task(self._settled(action), name=action.tag)
        self._running[action.tag] = task
        task.add_done_callback(lambda _: self._running.pop(action.tag, None))

    async def close(self) -> None:
        """Stop carrying out; what was begun is settled by the next manager."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _settled(self, action: Outside) -> None:
        pause = AGAIN
        while True:
            try:
                while not await self._may_act():
                    await asyncio.sleep(AGAIN)
                await self._carry_out(action)
                return
            except LeaseLost:
                return
            except Refused as error:
                self._record(Done(action.tag, False, str(error), reason=error.reason))
                return
            except Unanswered:
                pass
            except Exception:  # whatever a cluster can come up with must not leave an intent open for ever
                _log.exception("action %s of %s failed unexpectedly", type(action).__name__, action.tag)
            if isinstance(action, Request | Launch | Perform):
                return  # settled by its tag, or not worth a second try: asking twice could give two
            await asyncio.sleep(pause)
            pause = min(2 * pause, SELDOM)  # whoever is away is not called back by asking more often

    async def _may_act(self) -> bool:
        """False while the run directory is away: nobody can tell then. Raises LeaseLost."""
        try:
            await self._check()
        except OSError:
            return False
        return True

    async def _carry_out(self, action: Outside) -> None:
        if isinstance(action, Request):
            await self._cluster.request(action.ask)
            self._record(Done(action.tag, True))
        elif isinstance(action, Release):
            await self._cluster.release(action.allocation)
            self._record(Done(action.tag, True))
        elif isinstance(action, Launch) and action.shadow is not None:
            await self._adopt(action)  # settled when it is heard as what it became
        elif isinstance(action, Launch):
            try:
                step = await asyncio.to_thread(self._prepare, action)
            except OSError as error:  # the run directory: nothing was handed to the cluster
                raise Refused(f"the run directory cannot be written: {error}") from error
            await self._cluster.launch(step)  # settled by the step's own Wanted, or by the cluster's listing
        elif isinstance(action, StopStep):
            if not await self._tell(action, action.grace + STEP_MARGIN):
                await self._cluster.stop(action.step, action.grace)
            self._record(Done(action.tag, True))
        elif isinstance(action, Perform):
            await self._inject(action)
        else:
            await self._mark(action)
            self._record(Done(action.tag, True))

    async def _mark(self, action: Drain | Undrain | Shrink) -> None:
        if isinstance(action, Drain):
            await self._cluster.drain(action.node, action.reason)
        elif isinstance(action, Undrain):
            await self._cluster.undrain(action.node, action.reason)
        else:
            await self._cluster.shrink(action.allocation, action.nodes)


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
            _log.error("an action failed: %s", task.exception())


async def _within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
