"""Carry out planned and journaled actions. Only this module calls the methods that change something in the cluster.

The intent of every action is journaled and fsynced first. The result of the action is recorded as an ``IntentSettled``
event. If the result is unknown (``Unanswered``), nothing is recorded, and the next poll of the cluster settles the
intent by its tag. This module also writes launch files, sends requests to steps and agents, and handles their answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from ...cluster.base import Cluster, Refused, RejectReason, Step, Unanswered
from ...transport import messages as msg
from ..context import RunContext
from ..model import events as ev
from ..model.actions import Drain, ExternalAction, InjectFault, Launch, Release, Request, Shrink, StopStep, Undrain
from ..model.events import IntentSettled
from ..storage.lease import LeaseLost
from .launch import job_dir_of, outdated_parts, write_launch

_log = logging.getLogger("rrl.manager")

RETRY_INTERVAL_S = 5.0
"""Seconds before an unanswered stop, release, drain, undrain or shrink is tried again. Repeating these actions does no
harm."""
MAX_RETRY_INTERVAL_S = 60.0
"""Upper limit of the retry interval (s), which doubles with each attempt."""
STEP_MARGIN_S = 3.0
"""Seconds between the end of a step's grace and the request to the cluster to end the step."""


MAX_NAMED_VARIABLES = 5
"""Maximum number of variables that the message about an outdated standby process names."""


class StandbyOutdated(Refused):
    """A standby process is not promoted, because a new step would have another environment or command.

    The rejection counts neither against the replica nor against its node: the replica is launched in a new step.
    """

    reason = RejectReason.STANDBY_OUTDATED


class Executor:
    """Runs each external action as a background task.

    Args:
        context: the run; the resulting events are recorded there.
        cluster: where allocations are requested and steps launched.
        steps: prepares launches, and requests that steps stop.
        inject_fault: injects a fault and records the result.
        check_lease: raises LeaseLost if another manager has taken over.
        promote: promotes a standby process; raises Refused if it cannot.
    """

    def __init__(
        self,
        context: RunContext,
        cluster: Cluster,
        steps: StepControl,
        inject_fault: Callable[[InjectFault], Awaitable[None]],
        check_lease: Callable[[], Awaitable[None]],
        promote: Callable[[Launch], Awaitable[None]],
    ) -> None:
        self._context, self._cluster, self._steps = context, cluster, steps
        self._inject_fault = inject_fault
        self._check_lease = check_lease
        self._promote = promote
        self._running: dict[str, asyncio.Task[None]] = {}

    @property
    def busy(self) -> frozenset[str]:
        """Return the tags of the actions that are being carried out."""
        return frozenset(self._running)

    def start(self, action: ExternalAction) -> None:
        """Carry out a journaled action in the background. An action that is being carried out is not started again."""
        if action.tag in self._running:
            return
        task = asyncio.create_task(self._run_until_settled(action), name=action.tag)
        self._running[action.tag] = task
        task.add_done_callback(lambda _: self._running.pop(action.tag, None))

    async def close(self) -> None:
        """Cancel all running actions. The next manager settles their intents."""
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
                self._context.record(IntentSettled(action.tag, False, str(error), reason=error.reason))
                return
            except Unanswered:
                pass
            except Exception:  # an unexpected error must not leave an intent open forever
                _log.exception(
                    "the action %s with the tag %s failed because of an error in rrl", type(action).__name__, action.tag
                )
            if isinstance(action, Request | Launch | InjectFault):
                return  # not tried again, since a second attempt could have a second effect
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_RETRY_INTERVAL_S)  # more frequent attempts would only load a cluster that hangs

    async def _may_act(self) -> bool:
        """Return whether this manager still holds the lease; False while the run directory cannot be read.

        Raises:
            LeaseLost: a successor has taken over.
        """
        try:
            await self._check_lease()
        except OSError:
            return False
        return True

    async def _carry_out(self, action: ExternalAction) -> None:
        if isinstance(action, Request):
            await self._cluster.request(action.request)
            self._context.record(IntentSettled(action.tag, True))
        elif isinstance(action, Release):
            await self._cluster.release(action.allocation)
            self._context.record(IntentSettled(action.tag, True))
        elif isinstance(action, Launch) and action.standby is not None:
            await self._steps.check_standby(action)
            await self._promote(action)  # the intent is settled by the process's Hello
        elif isinstance(action, Launch):
            try:
                step = await asyncio.to_thread(self._steps.prepare_launch, action)
            except OSError as error:  # the cluster has received no request
                raise Refused(f"the run directory cannot be written: {error}") from error
            await self._cluster.launch(step)  # an AdmissionRequest or a poll settles the intent
        elif isinstance(action, StopStep):
            if not await self._steps.request_stop(action, action.grace + STEP_MARGIN_S):
                await self._cluster.stop(action.step, action.grace)
            self._context.record(IntentSettled(action.tag, True))
        elif isinstance(action, InjectFault):
            await self._inject_fault(action)
        else:
            await self._change_node(action)
            self._context.record(IntentSettled(action.tag, True))

    async def _change_node(self, action: Drain | Undrain | Shrink) -> None:
        if isinstance(action, Drain):
            await self._cluster.drain(action.node, action.reason)
        elif isinstance(action, Undrain):
            await self._cluster.undrain(action.node, action.reason)
        else:
            await self._cluster.shrink(action.allocation, action.nodes)


class StepControl:
    """Prepares launches of this run's steps, and requests that steps stop.

    Args:
        context: the run, its newest state and the connections of its steps.
        cluster: where the steps run.
        source: path of the job spec.
    """

    def __init__(self, context: RunContext, cluster: Cluster, source: str) -> None:
        self._context, self._cluster, self._source = context, cluster, source
        self._ended: dict[str, asyncio.Event] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def on_event(self, event: ev.Event) -> None:
        """Handle a recorded event: if a step has ended, wake the task that waits for the end of that step."""
        if isinstance(event, ev.StepEnded) and event.step in self._ended:
            self._ended[event.step].set()

    def prepare_launch(self, action: Launch) -> Step:
        """Write the launch file and return the step to launch. Blocks on storage. Raises OSError or Refused."""
        return write_launch(self._context.run_dir, self._context.state(), action, job_dir_of(self._source))

    async def check_standby(self, action: Launch) -> None:
        """Check that the standby process has the environment that a new step of the incarnation would have.

        If a file of the run directory cannot be read, the check passes, because a new step would need the same file.

        Raises:
            StandbyOutdated: the environment, command, folder, setup or network has changed since the process was
                started.
        """
        run, state = self._context.run_dir, self._context.state()
        try:
            changed = await asyncio.to_thread(outdated_parts, run, state, action, job_dir_of(self._source))
        except (OSError, ValueError) as error:
            _log.warning("cannot compare the environment of %s with that of a new step: %s", action.standby, error)
            return
        if changed:
            shown = f"{', '.join(changed[:MAX_NAMED_VARIABLES])}{', ...' if len(changed) > MAX_NAMED_VARIABLES else ''}"
            text = f"{action.standby} is not used, because it was started with other values of {shown}"
            _log.info("%s; %s starts in a new process", text, action.incarnation)
            raise StandbyOutdated(text)

    def on_step_admitted(self, tag: str) -> None:
        """Release the resources that were only needed to launch this step (on Slurm: kill its ``srun``)."""
        task = asyncio.create_task(self._cluster.release_launcher(tag))
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    async def request_stop(self, action: StopStep, timeout_s: float) -> bool:
        """Ask the step's first process to stop; return whether the step has ended within ``timeout_s`` seconds."""
        peer = self._context.connections.steps.get(action.step)
        if peer is None:
            return False
        ended = self._ended.setdefault(action.step, asyncio.Event())
        why = "; ".join(action.why.evidence)
        await self._context.send(peer, msg.Stop(action.incarnation, action.grace, why, action.step), None)
        try:
            return await _wait_for(ended, timeout_s)
        finally:
            self._ended.pop(action.step, None)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("the command that launched a step (such as srun) cannot be ended: %s", task.exception())


async def _wait_for(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
