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
from ..model.actions import Drain, ExternalAction, InjectFault, Launch, Release, Request, Shrink, StopStep, Undrain
from ..model.events import Event, IntentSettled
from ..model.state import State
from ..storage.lease import LeaseLost
from .launch import job_dir_of, write_launch

_log = logging.getLogger("rrl.manager")

RETRY_INTERVAL_S = 5.0
"""s before a stop or a release that nobody answered is asked for again: both are repeatable"""
MAX_RETRY_INTERVAL_S = 60.0
"""s that this pause doubles up to"""
STEP_MARGIN_S = 3.0
"""s beyond a step's own grace before the cluster is asked to end it"""


class Executor:
    """``record`` takes the resulting events, ``prepare_launch`` writes a launch file, ``request_stop`` asks a step to stop and returns
    once it has ended (False: it did not), ``inject_fault`` has a fault performed and tells what became of it, ``check_lease``
    raises LeaseLost, ``promote`` tells a shadow what it becomes (Refused: there is none to tell)."""

    def __init__(
        self,
        cluster: Cluster,
        record: Callable[[Event], None],
        prepare_launch: Callable[[Launch], Step],
        request_stop: Callable[[StopStep, float], Awaitable[bool]],
        inject_fault: Callable[[InjectFault], Awaitable[None]],
        check_lease: Callable[[], Awaitable[None]],
        promote: Callable[[Launch], Awaitable[None]],
    ) -> None:
        self._cluster = cluster
        self._record = record
        self._prepare_launch = prepare_launch
        self._request_stop = request_stop
        self._inject_fault = inject_fault
        self._check_lease = check_lease
        self._promote = promote
        self._running: dict[str, asyncio.Task[None]] = {}

    @property
    def busy(self) -> frozenset[str]:
        """Tags of the actions that are being carried out."""
        return frozenset(self._running)

    def start(self, action: ExternalAction) -> None:
        """Carry out one journaled action in the background; the same one is not started twice at a time."""
        if action.tag in self._running:
            return
        task = asyncio.create_task(self._run_until_settled(action), name=action.tag)
        self._running[action.tag] = task
        task.add_done_callback(lambda _: self._running.pop(action.tag, None))

    async def close(self) -> None:
        """Stop carrying out; what was begun is settled by the next manager."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_until_settled(self, action: ExternalAction) -> None:
        pause = RETRY_INTERVAL_S
        while True:
            try:
                while not await self._may_act():
                    await asyncio.sleep(RETRY_INTERVAL_S)
                await self._carry_out(action)
                return
            except LeaseLost:
                return
            except Refused as error:
                self._record(IntentSettled(action.tag, False, str(error), reason=error.reason))
                return
            except Unanswered:
                pass
            except Exception:  # whatever a cluster can come up with must not leave an intent open for ever
                _log.exception("action %s of %s failed unexpectedly", type(action).__name__, action.tag)
            if isinstance(action, Request | Launch | InjectFault):
                return  # settled by its tag, or not worth a second try: asking twice could give two
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_RETRY_INTERVAL_S)  # whoever is away is not called back by asking more often

    async def _may_act(self) -> bool:
        """False while the run directory is away: nobody can tell then. Raises LeaseLost."""
        try:
            await self._check_lease()
        except OSError:
            return False
        return True

    async def _carry_out(self, action: ExternalAction) -> None:
        if isinstance(action, Request):
            await self._cluster.request(action.request)
            self._record(IntentSettled(action.tag, True))
        elif isinstance(action, Release):
            await self._cluster.release(action.allocation)
            self._record(IntentSettled(action.tag, True))
        elif isinstance(action, Launch) and action.standby is not None:
            await self._promote(action)  # settled when it is heard as what it became
        elif isinstance(action, Launch):
            try:
                step = await asyncio.to_thread(self._prepare_launch, action)
            except OSError as error:  # the run directory: nothing was handed to the cluster
                raise Refused(f"the run directory cannot be written: {error}") from error
            await self._cluster.launch(step)  # settled by the step's own Wanted, or by the cluster's listing
        elif isinstance(action, StopStep):
            if not await self._request_stop(action, action.grace + STEP_MARGIN_S):
                await self._cluster.stop(action.step, action.grace)
            self._record(IntentSettled(action.tag, True))
        elif isinstance(action, InjectFault):
            await self._inject_fault(action)
        else:
            await self._change_node(action)
            self._record(IntentSettled(action.tag, True))

    async def _change_node(self, action: Drain | Undrain | Shrink) -> None:
        if isinstance(action, Drain):
            await self._cluster.drain(action.node, action.reason)
        elif isinstance(action, Undrain):
            await self._cluster.undrain(action.node, action.reason)
        else:
            await self._cluster.shrink(action.allocation, action.nodes)


class StepControl:
    """``state`` gives the newest state, ``step_peers`` where each step's first process can be told something."""

    def __init__(
        self,
        run: RunDir,
        cluster: Cluster,
        source: str,
        state: Callable[[], State],
        send: Send,
        step_peers: dict[str, bytes],
    ) -> None:
        self._run, self._cluster, self._source, self._state, self._send = run, cluster, source, state, send
        self._step_peers = step_peers
        self._ended: dict[str, asyncio.Event] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def on_event(self, event: ev.Event) -> None:
        """An event was recorded: somebody may be waiting for it."""
        if isinstance(event, ev.StepEnded) and event.step in self._ended:
            self._ended[event.step].set()

    def prepare_launch(self, action: Launch) -> Step:
        """The launch file is written when it returns (blocking). Raises OSError."""
        return write_launch(self._run, self._state(), action, job_dir_of(self._source))

    def on_step_admitted(self, tag: str) -> None:
        """What only carried the launch of this step can go."""
        task = asyncio.create_task(self._cluster.release_launcher(tag))
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    async def request_stop(self, action: StopStep, timeout_s: float) -> bool:
        """Ask the step's first process itself to leave; True once it has ended."""
        peer = self._step_peers.get(action.step)
        if peer is None:
            return False
        ended = self._ended.setdefault(action.step, asyncio.Event())
        why = "; ".join(action.why.evidence)
        await self._send(peer, msg.Stop(action.incarnation, action.grace, why, action.step), None)
        try:
            return await _wait_for(ended, timeout_s)
        finally:
            self._ended.pop(action.step, None)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("an action failed: %s", task.exception())


async def _wait_for(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
