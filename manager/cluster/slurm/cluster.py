"""Slurm through its commands: held allocations, one step per member, everything found by its tag.

An allocation is a job, or a component of a heterogeneous one. Each component carries its own tag, has an id of its own
and can be given back by itself once it runs; but the end of the first one is that of all.

Measured on 22.05 (docs/architecture.md):

- A pool held by a batch script ends, healthy nodes and all, when the node of that script was cut off and comes back;
  one made by ``salloc --no-shell`` goes on. So salloc holds nodes that are free, where InactiveLimit lets it live.
- A step whose srun was killed stays listed, and keeps its resources, 2.3 s longer when it ends (slurmstepd tries to
  tell its srun): a replacement on the same node needs room for one more, or waits for so long.
- Steps stay listed on nodes that Slurm has taken from their job: they are not counted.
- ``salloc --no-shell A : B`` works as with one job: the loss of the first component's first node ends nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Sequence

import msgspec

from ....core.faults import Fault
from ....core.types import NodeName
from ....slurm_templates.render import allocation_script
from ..base import (  # fmt: skip
    AllocationNotRunning,
    AllocationRequest,
    AllocationState,
    AllocationStatus,
    ClusterSnapshot,
    NodeStatus,
    Refused,
    Step,
    Unanswered,
)
from . import commands
from . import parsing as text
from .commands import MANAGER, Budget, CommandResult, SlurmLimits
from .lab_faults import inject_fault
from .nodes import SlurmNodes
from .requests import request_options
from .steps import Sruns

STOP_MARGIN_S = 2.0
"""s beyond the grace: a step that was told to stop kills its own group at the end of it and writes its exit record"""
_WAITED = re.compile(r"Pending job allocation (\d+)")
_TOO_FEW = "Requested node configuration is not available"
"""what Slurm says where all nodes that there are, but for the excluded ones, are too few"""
_NOT_NOW = "Unable to allocate resources: "
"""what salloc says of a job that could not start at once; sbatch then says whether it ever can"""


class SlurmCluster:
    """Allocations and steps whose tags start with ``<run_id>.``.

    ``python`` runs the first process of a step, ``prefix``: instead of ``python -P -m <module>`` (for tests).
    ``allocate_with``: ``salloc`` or ``sbatch`` instead of asking Slurm which of them is safe. ``own_tag``: tag of the allocation
    that we run in ourselves, which need not be asked for.
    """

    def __init__(
        self, run_id: str, python: str, limits: SlurmLimits = SlurmLimits(), *, prefix: Sequence[str] | None = None,
        allocate_with: str | None = None, own_tag: str = "",
    ) -> None:  # fmt: skip
        self._prefix = f"{run_id}."
        self._limits = limits
        self._allocate_with = allocate_with
        self._own_tag = own_tag
        self._released_tags: set[str] = set()
        """tags that we were told to give back"""
        self._own_released = False
        """we were told to give back the allocation that we run in: it ends with us"""
        self._budget = Budget(limits.reads_per_minute)
        self._sruns = Sruns(python, limits, prefix)
        self._nodes = SlurmNodes(lambda argv: self._read(argv, unless="not found"), self._execute_change)
        self._shrink_damage = ""
        """what a shrunk allocation cost: none is shrunk again"""
        self._jobs: dict[str, list[text.Job]] = {}
        """by tag, as last read"""
        self._failed_sallocs: set[str] = set()
        """jobs of sallocs that found no free nodes: their end is not that of what sbatch then asks for"""
        self._known_nodes: set[NodeName] = set()
        """nodes of our allocations, lost ones too: what became of them is worth knowing"""
        self._poll_lock = asyncio.Lock()
        self._last_snapshot = ClusterSnapshot(None, None, None, "not looked yet")
        self._polled_at = float("-inf")
        self._changes = 0
        self._changes_at_poll = -1

    # ── allocations ─────────────────────────────────────────────────────────────────────────────────────────────────
    async def request(self, request: AllocationRequest) -> None:
        """Hold nodes. Returns once Slurm has the job, which may be pending for long.

        Nodes that are free are held by ``salloc --no-shell`` where that is safe, others are waited for by a batch
        job."""
        if request.tag == self._own_tag:
            return
        try:
            await self._allocate(self._avoiding_own_nodes(request))
        except Refused as error:
            if not request.may_reuse_own_nodes or _TOO_FEW not in str(error):
                raise
            options = {**request.sbatch, "exclusive": ""}  # Slurm itself keeps it from our nodes until they are free
            await self._allocate(msgspec.structs.replace(request, sbatch=options))

    async def _allocate(self, request: AllocationRequest) -> None:
        try:
            components = [request_options(one) for one in (request, *request.further_components)]
        except ValueError as error:
            raise Refused(str(error)) from error
        if self._allocate_with is None:
            self._allocate_with = await self._choose_command()
        self._changes += 1
        if self._allocate_with == "sbatch" or not await self._salloc(components):
            await self._write(("sbatch", "--parsable"), allocation_script(*components))

    def _avoiding_own_nodes(self, request: AllocationRequest) -> AllocationRequest:
        """Not on nodes that we hold already: a node is in one allocation of ours, or its agents, roles and what becomes
        of it could not be told apart. Slurm itself would put two small jobs on one node."""
        occupying_states = (AllocationState.RUNNING, AllocationState.SUSPENDED)
        own_nodes = {
            node for jobs in self._jobs.values() for job in jobs if job.state in occupying_states for node in job.nodes
        }
        more = tuple(self._avoiding_own_nodes(one) for one in request.further_components)
        return msgspec.structs.replace(
            request, exclude=tuple(sorted(own_nodes.union(request.exclude))), further_components=more
        )

    async def release(self, tag: str) -> None:
        """What has not begun goes with the whole of its heterogeneous job: Slurm gives no part of it back (measured),
        nor would it start without. The first component waits for the others, as its end ends them: Refused while
        one of them is not given back too, Unanswered if that takes longer than ``limits.write`` s."""
        self._released_tags.add(tag)
        if tag == self._own_tag:  # to cancel it now would end the manager before it has written down the run's end
            self._own_released = True
            self._changes += 1
            return
        deadline, pause = time.monotonic() + self._limits.write_timeout_s, 0.1
        while True:
            await self._read_jobs()
            alive = [job for job in self._jobs.get(tag, []) if job.state is not AllocationState.ENDED]
            others = self._would_end_with(alive)
            if not others:
                break
            if not_released := [other for other in others if other not in self._released_tags]:
                raise Refused(f"{tag} is the first component of its job: {', '.join(not_released)} would end with it")
            if time.monotonic() + pause > deadline:
                raise Unanswered(f"{', '.join(others)} would end with {tag}, and did not end before it")
            await asyncio.sleep(pause)
            pause = min(2 * pause, 2.0)
        if alive:
            await self._cancel(*{job.leader if job.leader and self._is_pending(job) else job.id for job in alive})
        for job in self._jobs.get(tag, []):
            self._known_nodes.difference_update(set(job.nodes) - self._nodes.drained)

    def _would_end_with(self, jobs: Sequence[text.Job]) -> list[str]:
        """Tags of living allocations that would end if these jobs were cancelled."""
        first = {job.leader for job in jobs if job.leader == job.id and not self._is_pending(job)}
        return sorted(
            tag for tag, component_jobs in self._jobs.items() for job in component_jobs
            if job.leader in first and job.id != job.leader and job.state is not AllocationState.ENDED
        )  # fmt: skip

    def _is_failed_salloc(self, job: text.Job) -> bool:
        return job.state is AllocationState.ENDED and (job.leader or job.id) in self._failed_sallocs

    @staticmethod
    def _is_pending(job: text.Job) -> bool:
        return job.state is AllocationState.PENDING

    async def _choose_command(self) -> str:
        ended = await self._read(("scontrol", "show", "config"))
        try:
            return "salloc" if text.inactive_limit(ended.out) == 0 else "sbatch"
        except text.Unreadable as error:
            raise Unanswered(str(error)) from error

    async def _salloc(self, components: Sequence[Sequence[str]]) -> bool:
        """Hold nodes that are free now; False when they are not, and nothing is queued.

        A salloc that waits cannot be left: slurmctld ends the job some seconds after its start when it does not reach
        its salloc (measured: "Killing interactive JobId"), and a SIGTERM (from a scancel of the manager's job) to a
        salloc that waits takes the job along. Once the nodes are granted it has ended by itself."""
        first, *more = components
        timeout_s = self._limits.immediate_timeout_het_s if more else self._limits.immediate_timeout_s
        argv = ("salloc", "--no-shell", f"--immediate={timeout_s}", *first,
                *(option for component in more for option in (":", *component)))  # fmt: skip
        ended = await commands.execute(argv, timeout_s + self._limits.write_timeout_s)
        if not ended.code:
            return True
        if waited := _WAITED.search(ended.err):  # it has taken its job from the queue, unless that was not answered
            self._failed_sallocs.add(waited[1])
            await self._cancel(waited[1])
            return False
        if _NOT_NOW in ended.err and not commands.unanswered(ended.err):
            return False
        raise commands.failure("salloc", ended)

    # ── steps ───────────────────────────────────────────────────────────────────────────────────────────────────────
    async def launch(self, step: Step) -> None:
        """Returns once the step runs, or after ``limits.launch`` s; an srun that says no by then is Refused."""
        if step.tag in self._sruns:
            raise Refused(f"{step.tag} is being launched already")
        job = await self._running_job(step.allocation)
        self._changes += 1
        await self._sruns.start(job.target, step)

    async def release_launcher(self, tag: str) -> None:
        await self._sruns.on_step_joined(tag)

    async def stop(self, tag: str, grace: float) -> None:
        step = await self._find_step(tag)
        if step is None and tag in self._sruns:  # it still waits for resources, or is just being served
            await self._sruns.kill(tag)
            step = await self._find_step(tag)
        if step is None:
            return
        if grace > 0:
            with contextlib.suppress(Unanswered):  # it may have been heard, and SIGKILL follows
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
        await self._nodes.drain(node, reason)
        self._known_nodes.add(node)

    async def undrain(self, node: NodeName, reason: str) -> None:
        await self._nodes.undrain(node, reason)

    async def shrink(self, tag: str, nodes: tuple[NodeName, ...]) -> None:
        """Refused, too, once somebody else's steps were gone after it, in whatever job."""
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
            raise Unanswered(f"{tag} still has {', '.join(after.nodes)}")
        still = {step.name for step in await self._read_steps()}
        gone = [step.name for step in before if set(step.nodes) & set(after.nodes) and step.name not in still]
        if gone:
            self._shrink_damage = f"{', '.join(gone)} ended when {tag} was shrunk"

    # ── looking ─────────────────────────────────────────────────────────────────────────────────────────────────────
    async def inject_fault(self, fault: Fault) -> str:
        return await inject_fault(fault)

    async def observe(self) -> ClusterSnapshot:
        """As the Protocol says. At most three commands; nodes are those that our allocations have or had."""
        async with self._poll_lock:
            fresh = (
                self._changes == self._changes_at_poll
                and time.monotonic() - self._polled_at < self._limits.min_poll_interval_s
            )
            if fresh:
                return self._last_snapshot
            if not self._budget.spend(3):
                return ClusterSnapshot(
                    None, None, None, f"budget of {self._budget.per_minute:g} reads a minute is spent"
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
        """By tag, as last read; what salloc tried in vain is not there."""
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
        argv = ("scontrol", "show", "node", "-o", ",".join(sorted(self._known_nodes)))
        ended = await self._read(argv, budgeted=True, unless="not found")
        try:
            return {"nodes": text.read_nodes(ended.out)}
        except text.Unreadable as error:
            raise Unanswered(f"scontrol: {error}") from error

    def _allocation(self, jobs: list[text.Job]) -> AllocationStatus:
        """What a tag has: the job that is alive; should a lost answer have made two, the second is named."""
        order = (
            AllocationState.RUNNING, AllocationState.SUSPENDED, AllocationState.PENDING, AllocationState.ENDED
        )  # fmt: skip
        first, *others = sorted(jobs, key=lambda job: (order.index(job.state), int(job.id)))
        alive = [job.id for job in others if job.state is not AllocationState.ENDED]
        detail = first.detail + (f"; also job {', '.join(alive)}" if alive else "")
        state = AllocationState.ENDING if first.end is text.JobEnd.COMPLETING else first.state
        reclaimed = first.reclaimed or first.end is text.JobEnd.RECLAIMED
        cancelled = first.end is text.JobEnd.CANCELLED
        return AllocationStatus(
            state, first.id, first.nodes, detail, first.unsatisfiable_reason, first.time_left_s, reclaimed, cancelled
        )

    async def _read_jobs(self, budgeted: bool = False) -> None:
        ended = await self._read(("squeue", "--me", "-h", "-t", "all", "-o", text.JOBS_FORMAT), budgeted)
        try:
            jobs = text.read_jobs(ended.out)
        except text.Unreadable as error:
            raise Unanswered(f"squeue: {error}") from error
        self._budget.share(len(text.managed_runs(jobs)))
        self._jobs = {}
        for job in jobs:
            if tag := self._tag(job):
                self._jobs.setdefault(tag, []).append(job)

    def _tag(self, job: text.Job) -> str | None:
        """The tag of an allocation of this run: the last word of its comment, or the name where a site has changed the
        comment. The manager's own jobs are none."""
        own = job.name == f"{self._prefix}{MANAGER}"
        last = job.comment.rpartition(" ")[2]
        tag = last if last.startswith(self._prefix) else "" if job.comment.startswith("rrl ") else job.name
        return tag if tag.startswith(self._prefix) and not own else None

    async def _read_steps(self, budgeted: bool = False) -> list[text.StepLine]:
        ended = await self._read(("squeue", "--me", "-h", "-s", "-o", text.STEPS_FORMAT), budgeted)
        try:
            return text.read_steps(ended.out)
        except text.Unreadable as error:
            raise Unanswered(f"squeue -s: {error}") from error

    async def _find_step(self, tag: str) -> text.StepLine | None:
        return next((line for line in await self._read_steps() if line.name == tag), None)

    async def _running_job(self, tag: str) -> text.Job:
        """An allocation's job, as last seen; looked up if it was not seen running."""
        for attempt in range(2):
            for job in self._jobs.get(tag, []):
                if job.state is AllocationState.RUNNING:
                    return job
            if attempt == 0:
                await self._read_jobs()
        raise AllocationNotRunning(f"allocation {tag} is not running")

    # ── commands ────────────────────────────────────────────────────────────────────────────────────────────────────
    async def _read(self, argv: tuple[str, ...], budgeted: bool = False, unless: str | None = None) -> CommandResult:
        if not budgeted:
            self._budget.spend(1, credit=True)
        ended = await commands.execute(argv, self._limits.read_timeout_s)
        if ended.code and not (unless and unless in ended.out):
            raise commands.failure(argv[0], ended)
        return ended

    async def _execute_change(self, argv: tuple[str, ...], stdin_text: str = "") -> CommandResult:
        self._changes += 1
        return await commands.execute(argv, self._limits.write_timeout_s, stdin_text)

    async def _write(self, argv: tuple[str, ...], stdin_text: str = "") -> None:
        ended = await self._execute_change(argv, stdin_text)
        if ended.code:
            raise commands.failure(argv[0], ended)

    async def _cancel(self, *argv: str) -> None:
        """scancel; what is gone already is done."""
        try:
            await self._write(("scancel", *argv))
        except Refused as error:
            if not any(phrase in str(error) for phrase in ("Invalid job id", "already completing or completed")):
                raise

    async def close(self) -> None:
        await self._sruns.close()
