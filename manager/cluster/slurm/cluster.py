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
    AllocationSeen,
    AllocationState,
    Ask,
    NodeSeen,
    NotHeld,
    Observed,
    Refused,
    Step,
    Unanswered,
)
from . import commands
from . import parsing as text
from .commands import MANAGER, Budget, Ended, SlurmLimits
from .lab_faults import harm
from .nodes import SlurmNodes
from .requests import request_options
from .steps import Sruns

STOP_MARGIN = 2.0
"""s beyond the grace: a step that was told to stop kills its own group at the end of it and writes its exit record"""
_WAITED = re.compile(r"Pending job allocation (\d+)")
_TOO_FEW = "Requested node configuration is not available"
"""what Slurm says where all nodes that there are, but for the excluded ones, are too few"""
_NOT_NOW = "Unable to allocate resources: "
"""what salloc says of a job that could not start at once; sbatch then says whether it ever can"""


class SlurmCluster:
    """Allocations and steps whose tags start with ``<run_id>.``.

    ``python`` runs the first process of a step, ``prefix``: instead of ``python -P -m <module>`` (for tests).
    ``hold``: ``salloc`` or ``sbatch`` instead of asking Slurm which of them is safe. ``within``: tag of the allocation
    that we run in ourselves, which need not be asked for.
    """

    def __init__(
        self, run_id: str, python: str, limits: SlurmLimits = SlurmLimits(), *, prefix: Sequence[str] | None = None,
        hold: str | None = None, within: str = "",
    ) -> None:  # fmt: skip
        self._prefix = f"{run_id}."
        self._limits = limits
        self._hold = hold
        self._within = within
        self._given_back: set[str] = set()
        """tags that we were told to give back"""
        self._leaving = False
        """we were told to give back the allocation that we run in: it ends with us"""
        self._budget = Budget(limits.reads_per_minute)
        self._sruns = Sruns(python, limits, prefix)
        self._nodes = SlurmNodes(lambda argv: self._read(argv, unless="not found"), self._changed)
        self._hurt = ""
        """what a shrunk allocation cost: none is shrunk again"""
        self._jobs: dict[str, list[text.Job]] = {}
        """by tag, as last read"""
        self._tried: set[str] = set()
        """jobs of sallocs that found no free nodes: their end is not that of what sbatch then asks for"""
        self._once_ours: set[NodeName] = set()
        """nodes of our allocations, lost ones too: what became of them is worth knowing"""
        self._looking = asyncio.Lock()
        self._last = Observed(None, None, None, "not looked yet")
        self._last_at = float("-inf")
        self._changes = 0
        self._changes_seen = -1

    # ── allocations ─────────────────────────────────────────────────────────────────────────────────────────────────
    async def request(self, ask: Ask) -> None:
        """Hold nodes. Returns once Slurm has the job, which may be pending for long.

        Nodes that are free are held by ``salloc --no-shell`` where that is safe, others are waited for by a batch
        job."""
        if ask.tag == self._within:
            return
        try:
            await self._request(self._beside(ask))
        except Refused as error:
            if not ask.again or _TOO_FEW not in str(error):
                raise
            alone = {**ask.sbatch, "exclusive": ""}  # Slurm itself keeps it from our nodes until they are free
            await self._request(msgspec.structs.replace(ask, sbatch=alone))

    async def _request(self, ask: Ask) -> None:
        try:
            components = [request_options(one) for one in (ask, *ask.more)]
        except ValueError as error:
            raise Refused(str(error)) from error
        if self._hold is None:
            self._hold = await self._probe()
        self._changes += 1
        if self._hold == "sbatch" or not await self._salloc(components):
            await self._write(("sbatch", "--parsable"), allocation_script(*components))

    def _beside(self, ask: Ask) -> Ask:
        """Not on nodes that we hold already: a node is in one allocation of ours, or its agents, roles and what becomes
        of it could not be told apart. Slurm itself would put two small jobs on one node."""
        ours = (AllocationState.RUNNING, AllocationState.SUSPENDED)
        held = {node for jobs in self._jobs.values() for job in jobs if job.state in ours for node in job.nodes}
        more = tuple(self._beside(one) for one in ask.more)
        return msgspec.structs.replace(ask, exclude=tuple(sorted(held.union(ask.exclude))), more=more)

    async def release(self, tag: str) -> None:
        """What has not begun goes with the whole of its heterogeneous job: Slurm gives no part of it back (measured),
        nor would it start without. The first component waits for the others, as its end ends them: Refused while
        one of them is not given back too, Unanswered if that takes longer than ``limits.write`` s."""
        self._given_back.add(tag)
        if tag == self._within:  # to cancel it now would end the manager before it has written down the run's end
            self._leaving = True
            self._changes += 1
            return
        deadline, pause = time.monotonic() + self._limits.write, 0.1
        while True:
            await self._read_jobs()
            alive = [job for job in self._jobs.get(tag, []) if job.state is not AllocationState.ENDED]
            others = self._ended_with(alive)
            if not others:
                break
            if kept := [other for other in others if other not in self._given_back]:
                raise Refused(f"{tag} is the first component of its job: {', '.join(kept)} would end with it")
            if time.monotonic() + pause > deadline:
                raise Unanswered(f"{', '.join(others)} would end with {tag}, and did not end before it")
            await asyncio.sleep(pause)
            pause = min(2 * pause, 2.0)
        if alive:
            await self._cancel(*{job.leader if job.leader and self._pends(job) else job.id for job in alive})
        for job in self._jobs.get(tag, []):
            self._once_ours.difference_update(set(job.nodes) - self._nodes.drained)

    def _ended_with(self, jobs: Sequence[text.Job]) -> list[str]:
        """Tags of living allocations that would end if these jobs were cancelled."""
        first = {job.leader for job in jobs if job.leader == job.id and not self._pends(job)}
        return sorted(
            tag for tag, those in self._jobs.items() for job in those
            if job.leader in first and job.id != job.leader and job.state is not AllocationState.ENDED
        )  # fmt: skip

    def _in_vain(self, job: text.Job) -> bool:
        return job.state is AllocationState.ENDED and (job.leader or job.id) in self._tried

    @staticmethod
    def _pends(job: text.Job) -> bool:
        return job.state is AllocationState.PENDING

    async def _probe(self) -> str:
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
        within = self._limits.at_once_het if more else self._limits.at_once
        argv = ("salloc", "--no-shell", f"--immediate={within}", *first,
                *(word for component in more for word in (":", *component)))  # fmt: skip
        ended = await commands.execute(argv, within + self._limits.write)
        if not ended.code:
            return True
        if waited := _WAITED.search(ended.err):  # it has taken its job from the queue, unless that was not answered
            self._tried.add(waited[1])
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

    async def joined(self, tag: str) -> None:
        await self._sruns.arrived(tag)

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
            if await self._ended_within(tag, grace + STOP_MARGIN):
                return
        await self._cancel(step.id)

    async def _ended_within(self, tag: str, within: float) -> bool:
        deadline, pause = time.monotonic() + within, 0.1
        while (left := deadline - time.monotonic()) > 0:
            await asyncio.sleep(min(pause, left))
            pause = min(2 * pause, 2.0)
            if await self._find_step(tag) is None:
                return True
        return False

    # ── single nodes ────────────────────────────────────────────────────────────────────────────────────────────────
    async def drain(self, node: NodeName, reason: str) -> None:
        await self._nodes.drain(node, reason)
        self._once_ours.add(node)

    async def undrain(self, node: NodeName, reason: str) -> None:
        await self._nodes.undrain(node, reason)

    async def shrink(self, tag: str, nodes: tuple[NodeName, ...]) -> None:
        """Refused, too, once somebody else's steps were gone after it, in whatever job."""
        await self._read_jobs()
        job = await self._running_job(tag)
        if not set(nodes) & set(job.nodes):
            return
        if self._hurt:
            raise Refused(self._hurt)
        before = await self._read_steps()
        await self._nodes.shrink(job, nodes)
        await self._read_jobs()
        if set(nodes) & set((after := await self._running_job(tag)).nodes):
            raise Unanswered(f"{tag} still has {', '.join(after.nodes)}")
        still = {step.name for step in await self._read_steps()}
        gone = [step.name for step in before if set(step.nodes) & set(after.nodes) and step.name not in still]
        if gone:
            self._hurt = f"{', '.join(gone)} ended when {tag} was shrunk"

    # ── looking ─────────────────────────────────────────────────────────────────────────────────────────────────────
    async def harm(self, fault: Fault) -> str:
        return await harm(fault)

    async def observe(self) -> Observed:
        """As the Protocol says. At most three commands; nodes are those that our allocations have or had."""
        async with self._looking:
            fresh = self._changes == self._changes_seen and time.monotonic() - self._last_at < self._limits.interval
            if fresh:
                return self._last
            if not self._budget.take(3):
                return Observed(None, None, None, f"budget of {self._budget.per_minute:g} reads a minute is spent")
            self._changes_seen = self._changes
            self._last = await self._look()
            self._last_at = time.monotonic()
            return self._last

    async def _look(self) -> Observed:
        launchers_ended = self._sruns.failed
        try:
            await self._read_jobs(budgeted=True)
        except (Refused, Unanswered) as error:
            return Observed(None, None, None, str(error))
        for seen in self._allocations().values():
            self._once_ours.update(seen.nodes)
        held = {job.id: job.nodes for jobs in self._jobs.values() for job in jobs}
        found = Observed(None, None, None)
        for part in await asyncio.gather(self._look_at_steps(held), self._look_at_nodes(), return_exceptions=True):
            if isinstance(part, Refused | Unanswered):
                found = msgspec.structs.replace(found, unknown=f"{found.unknown} {part}".strip())
            elif isinstance(part, BaseException):
                raise part
            else:
                found = msgspec.structs.replace(found, **part)
        return msgspec.structs.replace(found, allocations=self._allocations(), launchers_ended=launchers_ended)

    def _allocations(self) -> dict[str, AllocationSeen]:
        """By tag, as last read; what salloc tried in vain is not there."""
        allocations = {}
        for tag, jobs in self._jobs.items():
            if counted := [job for job in jobs if not self._in_vain(job)]:
                allocations[tag] = self._allocation(counted)
        if self._leaving and (own := allocations.get(self._within)):
            ended = msgspec.structs.replace(own, state=AllocationState.ENDED, detail="ends with its manager")
            allocations[self._within] = ended
        return allocations

    async def _look_at_steps(self, held: dict[str, tuple[NodeName, ...]]) -> dict[str, dict[str, NodeName]]:
        steps = {}
        for line in await self._read_steps(budgeted=True):
            if line.name.startswith(self._prefix) and line.nodes and line.nodes[0] in held.get(line.job, line.nodes):
                steps[line.name] = line.nodes[0]
        return {"steps": steps}

    async def _look_at_nodes(self) -> dict[str, dict[NodeName, NodeSeen]]:
        if not self._once_ours:
            return {"nodes": {}}
        argv = ("scontrol", "show", "node", "-o", ",".join(sorted(self._once_ours)))
        ended = await self._read(argv, budgeted=True, unless="not found")
        try:
            return {"nodes": text.read_nodes(ended.out)}
        except text.Unreadable as error:
            raise Unanswered(f"scontrol: {error}") from error

    def _allocation(self, jobs: list[text.Job]) -> AllocationSeen:
        """What a tag has: the job that is alive; should a lost answer have made two, the second is named."""
        order = (
            AllocationState.RUNNING, AllocationState.SUSPENDED, AllocationState.PENDING, AllocationState.ENDED
        )  # fmt: skip
        first, *others = sorted(jobs, key=lambda job: (order.index(job.state), int(job.id)))
        alive = [job.id for job in others if job.state is not AllocationState.ENDED]
        detail = first.detail + (f"; also job {', '.join(alive)}" if alive else "")
        state = AllocationState.ENDING if first.end is text.JobEnd.COMPLETING else first.state
        taken = first.taken or first.end is text.JobEnd.TAKEN_BACK
        cancelled = first.end is text.JobEnd.CANCELLED
        return AllocationSeen(state, first.id, first.nodes, detail, first.hopeless, first.left, taken, cancelled)

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
        raise NotHeld(f"allocation {tag} is not running")

    # ── commands ────────────────────────────────────────────────────────────────────────────────────────────────────
    async def _read(self, argv: tuple[str, ...], budgeted: bool = False, unless: str | None = None) -> Ended:
        if not budgeted:
            self._budget.take(1, credit=True)
        ended = await commands.execute(argv, self._limits.read)
        if ended.code and not (unless and unless in ended.out):
            raise commands.failure(argv[0], ended)
        return ended

    async def _changed(self, argv: tuple[str, ...], given: str = "") -> Ended:
        self._changes += 1
        return await commands.execute(argv, self._limits.write, given)

    async def _write(self, argv: tuple[str, ...], given: str = "") -> None:
        ended = await self._changed(argv, given)
        if ended.code:
            raise commands.failure(argv[0], ended)

    async def _cancel(self, *argv: str) -> None:
        """scancel; what is gone already is done."""
        try:
            await self._write(("scancel", *argv))
        except Refused as error:
            if not any(words in str(error) for words in ("Invalid job id", "already completing or completed")):
                raise

    async def close(self) -> None:
        await self._sruns.close()
