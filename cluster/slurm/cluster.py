"""The Slurm cluster: allocations hold nodes, each incarnation runs in a job step, and both are found by their tags.

An allocation is a job, or one component of a heterogeneous job. Each component carries its own tag, has its own job id,
and can be given back alone once it runs. But the end of the first component ends all components.

Measured on 22.05 (docs/architecture/clusters.md):

- The allocation of a batch script ends, with all its healthy nodes, when the script's node is cut off and comes back.
  An allocation made by ``salloc --no-shell`` continues. So rrl uses salloc if nodes are free and InactiveLimit permits
  it.
- A step whose srun was killed stays listed, and keeps its resources, for 2.3 s after its end, because slurmstepd tries
  to report to the srun. A replacement on the same node needs resources for one more step, or waits 2.3 s.
- After Slurm has taken a node from a job, Slurm still lists the job's steps on that node. rrl ignores these steps.
- A heterogeneous job of ``salloc --no-shell A : B`` continues if the first node of its first component is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import time
from collections.abc import Sequence

import msgspec

from ...core.command_runner import CommandResult
from ...core.faults import Fault
from ...core.run_dir import RunDir
from ...core.run_spec import RunSpec
from ...core.types import NodeName
from ...slurm_templates.render import allocation_script
from ..base import (
    STOP_MARGIN_S,
    AllocationNotRunning,
    AllocationRequest,
    AllocationState,
    AllocationStatus,
    Cluster,
    ClusterSnapshot,
    NodeStatus,
    Refused,
    Step,
    Unanswered,
)
from . import commands
from . import parsing as text
from .commands import MANAGER, Budget, SlurmLimits
from .lab_faults import inject_fault
from .nodes import SlurmNodes
from .readers.command_reader import CommandReader
from .readers.selection import ReaderSetting, SelectedReader
from .requests import request_options
from .steps import Sruns

_PENDING_JOB_LINE = re.compile(r"Pending job allocation (\d+)")
"""Line that salloc prints for a job that has to wait, with the job's id."""
_TOO_FEW_NODES = "Requested node configuration is not available"
"""Slurm's message if too few nodes exist besides the excluded nodes."""


def open_cluster(run: RunDir, spec: RunSpec, own_tag: str) -> Cluster:
    """Return the Slurm cluster of a run (:class:`rrl.cluster.traits.ClusterTraits`)."""
    return SlurmCluster(run.id, spec.env.python or sys.executable, own_tag=own_tag, reader=spec.manager.reader)


class SlurmCluster:
    """The allocations and steps of one run: those whose tags start with ``<run_id>.``.

    Args:
        run_id: the run's id.
        python: the interpreter that runs the first process of each step.
        limits: deadlines and budgets of Slurm's commands.
        prefix: the command that replaces ``python -P -m <module>`` in front of the launch file (for tests).
        allocate_with: ``salloc`` or ``sbatch``; if None, chosen according to Slurm's configuration.
        own_tag: tag of the allocation that the manager itself runs in, which must not be requested again.
        reader: how Slurm is read (``[cluster] reader``).
    """

    def __init__(
        self,
        run_id: str,
        python: str,
        limits: SlurmLimits = SlurmLimits(),
        *,
        prefix: Sequence[str] | None = None,
        allocate_with: str | None = None,
        own_tag: str = "",
        reader: ReaderSetting = "commands",
    ) -> None:
        self._prefix = f"{run_id}."
        self._limits = limits
        self._allocate_with = allocate_with
        self._own_tag = own_tag
        self._released_tags: set[str] = set()
        """Tags that the manager has released."""
        self._own_released = False
        """True if the manager has released the allocation that it runs in, which ends together with the manager."""
        self._budget = Budget(limits.reads_per_minute)
        self._sruns = Sruns(python, limits, prefix)
        self._reader = SelectedReader(reader, CommandReader.with_limits(limits), limits)
        self._nodes = SlurmNodes(self._reader, self._execute_change)
        self._shrink_damage = ""
        """Steps that ended when an allocation was shrunk, as text; if not empty, no allocation is shrunk again."""
        self._jobs: dict[str, list[text.Job]] = {}
        """Jobs by tag, as of the last read of the queue."""
        self._failed_sallocs: set[str] = set()
        """Ids of the jobs of sallocs that found no free nodes. These jobs are ignored, since sbatch then submits
        another job under the same tag."""
        self._known_nodes: set[NodeName] = set()
        """Nodes that are or were in an allocation of the run. All of these nodes are polled."""
        self._poll_lock = asyncio.Lock()
        self._last_snapshot = ClusterSnapshot(None, None, None, "the cluster has not been polled yet")
        self._polled_at = float("-inf")
        self._changes = 0
        self._changes_at_poll = -1

    # ── allocations ─────────────────────────────────────────────────────────────────────────────────────────────────
    async def request(self, request: AllocationRequest) -> None:
        """Allocate nodes, and return once Slurm has accepted the job, which may be pending for a long time.

        If nodes are free and salloc is safe on this cluster, ``salloc --no-shell`` allocates them. Otherwise a batch
        job waits for nodes.
        """
        if request.tag == self._own_tag:
            return
        try:
            await self._allocate(self._avoiding_own_nodes(request))
        except Refused as error:
            if not request.may_reuse_own_nodes or _TOO_FEW_NODES not in str(error):
                raise
            options = {**request.sbatch, "exclusive": ""}  # Slurm then waits until our nodes are free
            await self._allocate(msgspec.structs.replace(request, sbatch=options))

    async def _allocate(self, request: AllocationRequest) -> None:
        try:
            components = [request_options(component) for component in (request, *request.further_components)]
        except ValueError as error:
            raise Refused(str(error)) from error
        if self._allocate_with is None:
            self._allocate_with = await self._choose_command()
        self._changes += 1
        if self._allocate_with == "sbatch" or not await self._salloc(components):
            await self._write(("sbatch", "--parsable"), allocation_script(*components))

    def _avoiding_own_nodes(self, request: AllocationRequest) -> AllocationRequest:
        """Return the request, changed so that it also excludes the nodes that the run already holds.

        Slurm might place two small jobs on one node. If a node belonged to two allocations of the run, its agents and
        steps could not be assigned to one of them.
        """
        occupying_states = (AllocationState.RUNNING, AllocationState.SUSPENDED)
        own_nodes = {
            node for jobs in self._jobs.values() for job in jobs if job.state in occupying_states for node in job.nodes
        }
        excluded = tuple(sorted(own_nodes.union(request.exclude)))
        further = tuple(self._avoiding_own_nodes(component) for component in request.further_components)
        return msgspec.structs.replace(request, exclude=excluded, further_components=further)

    async def release(self, tag: str) -> None:
        """Give an allocation back by cancelling its job.

        A pending component is cancelled together with its whole heterogeneous job: Slurm cannot cancel a part of a
        pending job (measured), and the other components would not start without it. The release of the first component
        of a running job waits until the other components have ended, because the end of the first component would end
        them, too.

        Raises:
            Refused: another component of the job, which the manager has not released, would end too.
            Unanswered: the other components have not ended within ``limits.write_timeout_s`` seconds.
        """
        self._released_tags.add(tag)
        if tag == self._own_tag:  # cancelling this job now would end the manager before its last records
            self._own_released = True
            self._changes += 1
            return
        deadline, pause = time.monotonic() + self._limits.write_timeout_s, 0.1
        while True:
            await self._read_jobs()
            unfinished = [job for job in self._jobs.get(tag, []) if job.state is not AllocationState.ENDED]
            others = self._would_end_with(unfinished)
            if not others:
                break
            if not_released := [other for other in others if other not in self._released_tags]:
                raise Refused(
                    f"cannot release {tag}, the first component of its job: {', '.join(not_released)} would end with it"
                )
            if time.monotonic() + pause > deadline:
                raise Unanswered(f"{tag} cannot be released before {', '.join(others)}, which have not ended yet")
            await asyncio.sleep(pause)
            pause = min(2 * pause, 2.0)
        if unfinished:
            await self._cancel(*{job.leader if job.leader and self._is_pending(job) else job.id for job in unfinished})
        for job in self._jobs.get(tag, []):
            self._known_nodes.difference_update(set(job.nodes) - self._nodes.drains)

    def _would_end_with(self, jobs: Sequence[text.Job]) -> list[str]:
        """Return the tags of unfinished allocations that would end if these jobs were cancelled."""
        first = {job.leader for job in jobs if job.leader == job.id and not self._is_pending(job)}
        return sorted(
            tag
            for tag, component_jobs in self._jobs.items()
            for job in component_jobs
            if job.leader in first and job.id != job.leader and job.state is not AllocationState.ENDED
        )

    def _is_failed_salloc(self, job: text.Job) -> bool:
        return job.state is AllocationState.ENDED and (job.leader or job.id) in self._failed_sallocs

    @staticmethod
    def _is_pending(job: text.Job) -> bool:
        return job.state is AllocationState.PENDING

    async def _choose_command(self) -> str:
        self._budget.spend(1, credit=True)
        return "salloc" if (await self._reader.config()).inactive_limit_s == 0 else "sbatch"

    async def _salloc(self, components: Sequence[Sequence[str]]) -> bool:
        """Allocate nodes that are free now; return False if there are none, and leave nothing in the queue.

        A waiting salloc must not remain, for two reasons. slurmctld ends a job some seconds after its start if
        slurmctld cannot reach the salloc (measured: "Killing interactive JobId"). And a scancel of the manager's job
        sends SIGTERM to a waiting salloc, which then cancels the job that it waits for. Once the nodes are granted,
        salloc ends by itself.
        """
        first, *more = components
        timeout_s = self._limits.immediate_timeout_het_s if more else self._limits.immediate_timeout_s
        argv = (
            "salloc",
            "--no-shell",
            f"--immediate={timeout_s}",
            *first,
            *(option for component in more for option in (":", *component)),
        )
        ended = await commands.execute(argv, timeout_s + self._limits.write_timeout_s)
        if not ended.code:
            return True
        if pending := _PENDING_JOB_LINE.search(ended.err):  # Slurm may not have answered salloc's cancellation
            self._failed_sallocs.add(pending[1])
            await self._cancel(pending[1])
            return False
        if commands.lacks_free_nodes(ended):
            return False
        raise commands.failure("salloc", ended)

    # ── steps ───────────────────────────────────────────────────────────────────────────────────────────────────────
    async def launch(self, step: Step) -> None:
        """Start a step with srun.

        Returns once the step runs, or after ``limits.launch_watch_s`` seconds.

        Raises:
            Refused: srun reported an error within this time.
        """
        if step.tag in self._sruns:
            raise Refused(f"{step.tag} is already being launched")
        job = await self._running_job(step.allocation)
        self._changes += 1
        await self._sruns.start(job.target, step)

    async def release_launcher(self, tag: str) -> None:
        """Kill the step's srun as soon as slurmstepd no longer needs it."""
        await self._sruns.on_step_joined(tag)

    async def stop(self, tag: str, grace: float) -> None:
        """Signal the step with scancel; kill its srun first if the step has not started."""
        step = await self._find_step(tag)
        if step is None and tag in self._sruns:  # srun still waits for resources, or Slurm has just granted them
            await self._sruns.kill(tag)
            step = await self._find_step(tag)
        if step is None:
            return
        if grace > 0:
            with contextlib.suppress(Unanswered):  # SIGTERM may have been delivered, and SIGKILL follows in any case
                await self._cancel("--signal=TERM", step.id)
            if await self._wait_for_end(tag, grace + STOP_MARGIN_S):
                return
        await self._cancel(step.id)

    async def _wait_for_end(self, tag: str, timeout_s: float) -> bool:
        deadline, pause = time.monotonic() + timeout_s, 0.1
        while (left := deadline - time.monotonic()) > 0:
            await asyncio.sleep(min(pause, left))
            pause = min(2 * pause, 2.0)
            if await self._find_step(tag) is None:
                return True
        return False

    # ── single nodes ────────────────────────────────────────────────────────────────────────────────────────────────
    async def drain(self, node: NodeName, reason: str) -> None:
        """Drain a node, and poll it from now on even if it leaves the run's allocations."""
        self._budget.spend(2, credit=True)
        try:
            await self._nodes.drain(node, reason)
        finally:
            self._changes += 1
            self._known_nodes |= self._nodes.drains

    async def undrain(self, node: NodeName, reason: str) -> None:
        """Remove this run's drain of a node."""
        self._budget.spend(2, credit=True)
        try:
            await self._nodes.undrain(node, reason)
        finally:
            self._changes += 1

    async def shrink(self, tag: str, nodes: tuple[NodeName, ...]) -> None:
        """Give single nodes of a running allocation back.

        Raises:
            Refused: Slurm cannot shrink this job, or an earlier shrink of any allocation ended steps on the remaining
                nodes.
        """
        await self._read_jobs()
        job = await self._running_job(tag)
        if not set(nodes) & set(job.nodes):
            return
        if self._shrink_damage:
            raise Refused(self._shrink_damage)
        before = await self._read_steps()
        await self._nodes.shrink(job, nodes)
        await self._read_jobs()
        if set(nodes) & set((after := await self._running_job(tag)).nodes):
            raise Unanswered(
                f"Slurm accepted the release of {', '.join(nodes)}, but {tag} still has the nodes"
                f" {', '.join(after.nodes)}"
            )
        listed = {step.name for step in await self._read_steps()}
        lost = [step.name for step in before if set(step.nodes) & set(after.nodes) and step.name not in listed]
        if lost:
            names = ", ".join(lost)
            self._shrink_damage = f"no allocation is shrunk again, since steps ended when {tag} was shrunk: {names}"

    # ── polling ─────────────────────────────────────────────────────────────────────────────────────────────────────
    async def inject_fault(self, fault: Fault) -> str:
        """Have a test cluster inject the fault. Raises Refused on any other cluster."""
        return await inject_fault(fault)

    async def observe(self) -> ClusterSnapshot:
        """Poll Slurm with at most three reads.

        A poll within ``limits.min_poll_interval_s`` seconds of the previous poll returns the same snapshot, unless this
        process has issued a changing command since then. The snapshot contains all nodes that the run's allocations
        have or had.
        """
        async with self._poll_lock:
            fresh = (
                self._changes == self._changes_at_poll
                and time.monotonic() - self._polled_at < self._limits.min_poll_interval_s
            )
            if fresh:
                return self._last_snapshot
            if not self._budget.spend(3):
                return ClusterSnapshot(
                    None, None, None, f"the budget of {self._budget.per_minute:g} Slurm queries per minute is used up"
                )
            self._changes_at_poll = self._changes
            self._last_snapshot = await self._poll()
            self._polled_at = time.monotonic()
            return self._last_snapshot

    async def _poll(self) -> ClusterSnapshot:
        launchers_ended = self._sruns.failed
        try:
            await self._read_jobs(budgeted=True)
        except (Refused, Unanswered) as error:
            return ClusterSnapshot(None, None, None, str(error))
        for status in self._allocations().values():
            self._known_nodes.update(status.nodes)
        job_nodes = {job.id: job.nodes for jobs in self._jobs.values() for job in jobs}
        snapshot = ClusterSnapshot(None, None, None)
        for result in await asyncio.gather(self._poll_steps(job_nodes), self._poll_nodes(), return_exceptions=True):
            if isinstance(result, Refused | Unanswered):
                snapshot = msgspec.structs.replace(snapshot, unknown=f"{snapshot.unknown} {result}".strip())
            elif isinstance(result, BaseException):
                raise result
            else:
                snapshot = msgspec.structs.replace(snapshot, **result)
        return msgspec.structs.replace(snapshot, allocations=self._allocations(), launchers_ended=launchers_ended)

    def _allocations(self) -> dict[str, AllocationStatus]:
        """Return the status of each allocation, by tag, from the last read of the queue, without failed sallocs."""
        allocations = {}
        for tag, jobs in self._jobs.items():
            if counted := [job for job in jobs if not self._is_failed_salloc(job)]:
                allocations[tag] = self._allocation(counted)
        if self._own_released and (own := allocations.get(self._own_tag)):
            ended = msgspec.structs.replace(own, state=AllocationState.ENDED, detail="ends with its manager")
            allocations[self._own_tag] = ended
        return allocations

    async def _poll_steps(self, job_nodes: dict[str, tuple[NodeName, ...]]) -> dict[str, dict[str, NodeName]]:
        steps = {}
        for row in await self._read_steps(budgeted=True):
            if row.name.startswith(self._prefix) and row.nodes and row.nodes[0] in job_nodes.get(row.job, row.nodes):
                steps[row.name] = row.nodes[0]
        return {"steps": steps}

    async def _poll_nodes(self) -> dict[str, dict[NodeName, NodeStatus]]:
        if not self._known_nodes:
            return {"nodes": {}}
        return {"nodes": await self._reader.nodes(sorted(self._known_nodes))}

    def _allocation(self, jobs: list[text.Job]) -> AllocationStatus:
        """Return the status of an allocation from the jobs that carry its tag.

        An unfinished job takes precedence over a job that has ended. If a request was submitted twice after a lost
        answer, ``detail`` names the second unfinished job.
        """
        order = (AllocationState.RUNNING, AllocationState.SUSPENDED, AllocationState.PENDING, AllocationState.ENDED)
        first, *others = sorted(jobs, key=lambda job: (order.index(job.state), int(job.id)))
        unfinished = [job.id for job in others if job.state is not AllocationState.ENDED]
        detail = first.detail + (f"; also job {', '.join(unfinished)}" if unfinished else "")
        state = AllocationState.ENDING if first.end is text.JobEnd.COMPLETING else first.state
        reclaimed = first.reclaimed or first.end is text.JobEnd.RECLAIMED
        cancelled = first.end is text.JobEnd.CANCELLED
        return AllocationStatus(
            state, first.id, first.nodes, detail, first.unsatisfiable_reason, first.time_left_s, reclaimed, cancelled
        )

    async def _read_jobs(self, budgeted: bool = False) -> None:
        if not budgeted:
            self._budget.spend(1, credit=True)
        jobs = await self._reader.jobs()
        self._budget.share(len(text.managed_runs(jobs)))
        self._jobs = {}
        for job in jobs:
            if tag := self._tag(job):
                self._jobs.setdefault(tag, []).append(job)

    def _tag(self, job: text.Job) -> str | None:
        """Return the tag of an allocation of this run, or None for any other job.

        The tag is the last word of the job's comment. If the site has changed the comment, the tag is the job's name.
        The jobs that run managers have no tag.
        """
        own = job.name == f"{self._prefix}{MANAGER}"
        last = job.comment.rpartition(" ")[2]
        tag = last if last.startswith(self._prefix) else "" if job.comment.startswith("rrl ") else job.name
        return tag if tag.startswith(self._prefix) and not own else None

    async def _read_steps(self, budgeted: bool = False) -> list[text.StepLine]:
        if not budgeted:
            self._budget.spend(1, credit=True)
        return await self._reader.steps()

    async def _find_step(self, tag: str) -> text.StepLine | None:
        return next((line for line in await self._read_steps() if line.name == tag), None)

    async def _running_job(self, tag: str) -> text.Job:
        """Return the running job of an allocation; if the last read of the queue shows no such job, read it again."""
        for attempt in range(2):
            for job in self._jobs.get(tag, []):
                if job.state is AllocationState.RUNNING:
                    return job
            if attempt == 0:
                await self._read_jobs()
        raise AllocationNotRunning(f"allocation {tag} is not running")

    # ── commands ────────────────────────────────────────────────────────────────────────────────────────────────────
    async def _execute_change(self, argv: tuple[str, ...], stdin_text: str = "") -> CommandResult:
        self._changes += 1
        return await commands.execute(argv, self._limits.write_timeout_s, stdin_text)

    async def _write(self, argv: tuple[str, ...], stdin_text: str = "") -> None:
        ended = await self._execute_change(argv, stdin_text)
        if ended.code:
            raise commands.failure(argv[0], ended)

    async def _cancel(self, *argv: str) -> None:
        """Run scancel. A job or step that has already ended is not an error."""
        try:
            await self._write(("scancel", *argv))
        except Refused as error:
            if not any(phrase in str(error) for phrase in ("Invalid job id", "already completing or completed")):
                raise

    async def close(self) -> None:
        """Kill the sruns that are still running, and end the reader's process. The steps keep running."""
        await self._sruns.close()
        await self._reader.close()
