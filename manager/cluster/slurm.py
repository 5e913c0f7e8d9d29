"""Slurm through its commands: one held allocation (form ``pool``), one step per member, everything found by its tag.

Measured on 22.05 (docs/architecture.md):

- A pool held by a batch script ends, healthy nodes and all, when the node of that script was cut off and comes back;
  one made by ``salloc --no-shell`` goes on. So salloc is used wherever InactiveLimit lets it live.
- A step whose srun was killed stays listed, and keeps its resources, 2.3 s longer when it ends (slurmstepd tries to
  tell its srun): a replacement on the same node needs room for one more, or waits for so long.
- Steps stay listed on nodes that Slurm has taken from their job: they are not counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Sequence

import msgspec

from rrl.manager.cluster import (
    AllocationSeen,
    AllocationState,
    Ask,
    NodeSeen,
    Observed,
    Refused,
    Step,
    Unanswered,
)  # fmt: skip
from rrl.manager.cluster import slurm_commands as commands
from rrl.manager.cluster import slurm_text as text
from rrl.manager.cluster.slurm_commands import Budget, Ended, SlurmLimits
from rrl.manager.cluster.slurm_srun import Sruns
from rrl.slurm_templates.render import allocation_options, allocation_script
from rrl.spec.words import NodeName

STOP_MARGIN = 2.0
"""s beyond the grace: a step that was told to stop kills its own group at the end of it and writes its exit record"""
_QUEUED = ("Granted job allocation", "Pending job allocation")
"""what salloc says once slurmctld has its job"""


class SlurmCluster:
    """Allocations and steps whose tags start with ``<run_id>.``.

    ``python`` runs the first process of a step, ``prefix``: instead of ``python -P -m <module>`` (for tests).
    ``hold``: ``salloc`` or ``sbatch`` instead of asking Slurm which of them is safe.
    """

    def __init__(
        self, run_id: str, python: str, limits: SlurmLimits = SlurmLimits(), *, prefix: Sequence[str] | None = None,
        hold: str | None = None,
    ) -> None:  # fmt: skip
        self._prefix = f"{run_id}."
        self._limits = limits
        self._hold = hold
        self._budget = Budget(limits.reads_per_minute)
        self._sruns = Sruns(python, limits, prefix)
        self._jobs: dict[str, list[text.Job]] = {}
        """by tag, as last read"""
        self._once_ours: set[NodeName] = set()
        """nodes of our allocations, lost ones too: what became of them is worth knowing"""
        self._looking = asyncio.Lock()
        self._last = Observed(None, None, None, "not looked yet")
        self._last_at = float("-inf")
        self._changes = 0
        self._changes_seen = -1

    # ── allocations ─────────────────────────────────────────────────────────────────────────────────────────────────
    async def request(self, ask: Ask) -> None:
        """Hold nodes. Returns once Slurm has the job, which may be pending for long."""
        try:
            options = allocation_options(
                tag=ask.tag, comment=f"{ask.comment} {ask.tag}".strip(), nodes=ask.count, node=ask.node,
                walltime=ask.walltime, exclude=ask.exclude, extra=ask.sbatch,
            )  # fmt: skip
        except ValueError as error:
            raise Refused(str(error)) from error
        if self._hold is None:
            self._hold = await self._probe()
        self._changes += 1
        if self._hold == "salloc":
            await self._salloc(options)
        else:
            await self._write(("sbatch", "--parsable"), allocation_script(options))

    async def release(self, tag: str) -> None:
        await self._read_jobs()
        ids = [job.id for job in self._jobs.get(tag, []) if job.state is not AllocationState.ENDED]
        if ids:
            await self._cancel(*ids)
        for job in self._jobs.get(tag, []):
            self._once_ours.difference_update(job.nodes)

    async def _probe(self) -> str:
        ended = await self._read(("scontrol", "show", "config"))
        try:
            return "salloc" if text.inactive_limit(ended.out) == 0 else "sbatch"
        except text.Unreadable as error:
            raise Unanswered(str(error)) from error

    async def _salloc(self, options: Sequence[str]) -> None:
        """Queue the job, and leave it: a salloc that is killed -9 while it waits loses nothing, one that gets SIGTERM
        (from a scancel of the manager's job) takes its job with it."""
        argv = ("salloc", "--no-shell", *options)
        try:
            process = await asyncio.create_subprocess_exec(
                *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE, env=commands.environment(os.environ), start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise Refused(f"salloc cannot be started: {error}") from error
        said: list[str] = []
        try:
            async with asyncio.timeout(self._limits.write):
                assert process.stderr is not None
                async for line in process.stderr:
                    said.append(line.decode(errors="replace"))
                    if any(word in said[-1] for word in _QUEUED):
                        return
                await process.wait()
        except TimeoutError:
            raise Unanswered(f"salloc: no answer within {self._limits.write:g} s") from None
        finally:
            if process.returncode is None:
                commands.end(process)
                await process.wait()
        raise commands.failure("salloc", Ended(process.returncode or 0, "", "".join(said)))

    # ── steps ───────────────────────────────────────────────────────────────────────────────────────────────────────
    async def launch(self, step: Step) -> None:
        """Returns once the step runs, or after ``limits.launch`` s; an srun that says no by then is Refused."""
        if step.tag in self._sruns:
            raise Refused(f"{step.tag} is being launched already")
        job = await self._running_job(step.allocation)
        self._changes += 1
        await self._sruns.start(job, step)

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

    # ── looking ─────────────────────────────────────────────────────────────────────────────────────────────────────
    async def observe(self) -> Observed:
        """As the Protocol says. At most three commands; nodes are those that our allocations have or had."""
        async with self._looking:
            fresh = self._changes == self._changes_seen and time.monotonic() - self._last_at < self._limits.interval
            if fresh:
                return self._last
            if not self._budget.take(3):
                return Observed(None, None, None, f"budget of {self._limits.reads_per_minute} reads a minute is spent")
            self._changes_seen = self._changes
            self._last = await self._look()
            self._last_at = time.monotonic()
            return self._last

    async def _look(self) -> Observed:
        try:
            await self._read_jobs(budgeted=True)
        except (Refused, Unanswered) as error:
            return Observed(None, None, None, str(error))
        allocations = {tag: self._allocation(jobs) for tag, jobs in self._jobs.items()}
        for seen in allocations.values():
            self._once_ours.update(seen.nodes)
        held = {job.id: job.nodes for jobs in self._jobs.values() for job in jobs}
        found = Observed(None, allocations, None)
        for part in await asyncio.gather(self._look_at_steps(held), self._look_at_nodes(), return_exceptions=True):
            if isinstance(part, Refused | Unanswered):
                found = msgspec.structs.replace(found, unknown=f"{found.unknown} {part}".strip())
            elif isinstance(part, BaseException):
                raise part
            else:
                found = msgspec.structs.replace(found, **part)
        return found

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
        order = (AllocationState.RUNNING, AllocationState.PENDING, AllocationState.ENDED)
        first, *others = sorted(jobs, key=lambda job: (order.index(job.state), int(job.id)))
        alive = [job.id for job in others if job.state is not AllocationState.ENDED]
        detail = first.detail + (f"; also job {', '.join(alive)}" if alive else "")
        return AllocationSeen(first.state, first.id, first.nodes, detail)

    async def _read_jobs(self, budgeted: bool = False) -> None:
        ended = await self._read(("squeue", "--me", "-h", "-t", "all", "-o", text.JOBS_FORMAT), budgeted)
        try:
            jobs = text.read_jobs(ended.out)
        except text.Unreadable as error:
            raise Unanswered(f"squeue: {error}") from error
        self._jobs = {}
        for job in jobs:
            if tag := self._tag(job):
                self._jobs.setdefault(tag, []).append(job)

    def _tag(self, job: text.Job) -> str | None:
        """The tag of an allocation of this run: the last word of its comment, or the name where a site has changed the
        comment. The manager's own job has a comment of ours that ends otherwise."""
        last = job.comment.rpartition(" ")[2]
        if last.startswith(self._prefix):
            return last
        return job.name if job.name.startswith(self._prefix) and not job.comment.startswith("rrl ") else None

    async def _read_steps(self, budgeted: bool = False) -> list[text.StepLine]:
        ended = await self._read(("squeue", "--me", "-h", "-s", "-o", text.STEPS_FORMAT), budgeted)
        try:
            return text.read_steps(ended.out)
        except text.Unreadable as error:
            raise Unanswered(f"squeue -s: {error}") from error

    async def _find_step(self, tag: str) -> text.StepLine | None:
        return next((line for line in await self._read_steps() if line.name == tag), None)

    async def _running_job(self, tag: str) -> str:
        """The id of an allocation's job, as last seen; looked up if it was not seen running."""
        for attempt in range(2):
            for job in self._jobs.get(tag, []):
                if job.state is AllocationState.RUNNING:
                    return job.id
            if attempt == 0:
                await self._read_jobs()
        raise Refused(f"allocation {tag} is not running")

    # ── commands ────────────────────────────────────────────────────────────────────────────────────────────────────
    async def _read(self, argv: tuple[str, ...], budgeted: bool = False, unless: str | None = None) -> Ended:
        if not budgeted:
            self._budget.take(1, credit=True)
        ended = await commands.execute(argv, self._limits.read)
        if ended.code and not (unless and unless in ended.out):
            raise commands.failure(argv[0], ended)
        return ended

    async def _write(self, argv: tuple[str, ...], given: str = "") -> None:
        self._changes += 1
        ended = await commands.execute(argv, self._limits.write, given)
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
