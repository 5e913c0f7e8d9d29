"""Measures what a poll costs with Slurm's commands and with pyslurm: CPU time, latency, and slurmctld's CPU time.

A poll (called look in options and figures) reads the jobs and steps of a user and five nodes by name, as a manager
does. Both readers take turns, in blocks of polls, on a lab with a real slurmctld. Without a pyslurm that matches this
Slurm (docs/sites.md), only the commands are measured. Figures:

- ``commands_cpu_ms``, ``pyslurm_cpu_ms``: CPU time of a poll in this process and its children.
- ``commands_ms``, ``pyslurm_ms``: median latency of a poll.
- ``commands_slurmctld_ms``, ``pyslurm_slurmctld_ms``: CPU time of slurmctld for a poll.
- ``loop_gap_s``: longest time that the event loop was blocked while pyslurm polled a stopped slurmctld (bar: 0.5 s).

The last line is one JSON object (benchmarks/_provenance.py), with ranges over the blocks.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import statistics
import sys
import time
from collections.abc import Sequence

from msgspec import Struct, to_builtins

from rrl.benchmarks._load import cpu_seconds
from rrl.benchmarks._provenance import last_line
from rrl.benchmarks._requirements import check_requirements
from rrl.benchmarks._table import print_table
from rrl.cluster.slurm.commands import SlurmLimits
from rrl.cluster.slurm.readers.base import SlurmReader
from rrl.cluster.slurm.readers.child_process import ChildFailed, PyslurmChild
from rrl.cluster.slurm.readers.command_reader import CommandReader
from rrl.cluster.slurm.readers.pyslurm_reader import PyslurmReader
from rrl.core.types import NodeName
from rrl.tests.support.slurm.lab import SlurmLab
from rrl.tests.support.slurm_readers.pyslurm_pair import mismatch

BLOCKS = 10
LOOKS = 50
"""Number of polls in a block. The kernel counts CPU time in ticks of 10 ms, so the time of one poll is the sum of the
blocks divided by the number of polls."""
STOPPED_S = 60.0
NODES = tuple(NodeName(f"n{number}") for number in range(1, 6))
BAR_LOOP_GAP_S = 0.5


class Block(Struct):
    """Samples of consecutive polls by one reader."""

    reader: str
    cpu_s: float
    """CPU time (s) of this process and its children."""
    slurmctld_s: float
    """CPU time (s) of slurmctld."""
    looks_s: list[float]
    """Latency (s) of each poll."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=BLOCKS, help="Number of blocks of polls by each reader.")
    parser.add_argument("--foreign-jobs", type=int, default=0, help="Number of other users' jobs (as root only).")
    parser.add_argument("--stopped", type=float, default=STOPPED_S, help="Seconds for which slurmctld is stopped.")
    options = parser.parse_args()
    check_requirements("slurm_reads")
    names = ["commands"] if (reason := mismatch()) else ["commands", "pyslurm"]
    if reason:
        print(f"the figures of pyslurm are left out: {reason}", file=sys.stderr)
    with SlurmLab.start(nodes=len(NODES)) as lab:
        os.environ.update(lab.environment())
        for _ in range(options.foreign_jobs):
            lab.run_as_user(["sbatch", "--hold", "--wrap=true", "--output=/dev/null"])
        job = lab.slurm(
            "sbatch", "--parsable", "-N5", "-n5", "--mem=500", "--output=/dev/null", "--wrap=srun sleep 9000"
        )
        lab.wait_for(lambda: f"{job.strip()}.0" in lab.slurm("squeue", "-h", "-s", "-o", "%i"), "the step does not run")
        blocks, gap_s = asyncio.run(measure(lab, names, options.blocks, options.stopped))
    figures = figures_of(blocks, gap_s)
    rows = [
        (reader, *(f"{figures[f'{reader}_{what}']:.2f}" for what in ("cpu_ms", "ms", "slurmctld_ms")))
        for reader in names
    ]
    print_table(("reader", "CPU of a look [ms]", "latency [ms]", "CPU of slurmctld [ms]"), rows)
    if gap_s is not None:
        print(f"largest gap of the event loop: {gap_s:.3f} s ({'under' if gap_s < BAR_LOOP_GAP_S else 'OVER'} 0.5)")
    print(last_line("slurm_reads", figures, by_block(blocks), {"blocks": to_builtins(blocks)}))


async def measure(
    lab: SlurmLab, names: Sequence[str], count: int, stopped_s: float
) -> tuple[list[Block], float | None]:
    """Let the readers poll in turn, and return their blocks.

    The second value is the largest gap (s) of the event loop with pyslurm; None if pyslurm is not measured.
    """
    limits, child = SlurmLimits(), PyslurmChild()
    readers: dict[str, SlurmReader] = {
        "commands": CommandReader.with_limits(limits),
        "pyslurm": PyslurmReader(child, limits),
    }
    for name in names:
        await look(readers[name])  # the process of pyslurm starts
    blocks = []
    for number in range(len(names) * count):
        name = names[number % len(names)]
        began, controller = own_cpu_s(child.pid), cpu_seconds([lab.controller()])
        looks = []
        for _ in range(LOOKS):
            at = time.perf_counter()
            await look(readers[name])
            looks.append(time.perf_counter() - at)
        blocks.append(Block(name, own_cpu_s(child.pid) - began, cpu_seconds([lab.controller()]) - controller, looks))
    gap_s = await largest_gap(lab, readers["pyslurm"], stopped_s) if "pyslurm" in names else None
    await readers["pyslurm"].close()
    return blocks, gap_s


async def look(reader: SlurmReader) -> None:
    """Read from Slurm what a poll of the manager reads."""
    await reader.jobs()
    await asyncio.gather(reader.steps(), reader.nodes(NODES))


def own_cpu_s(child: int | None) -> float:
    """Return the CPU time (s) of this process, of the commands that it has run, and of the process of pyslurm."""
    commands = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + commands.ru_utime + commands.ru_stime + cpu_seconds([child] if child else [])


async def largest_gap(lab: SlurmLab, reader: SlurmReader, stopped_s: float) -> float:
    """Return the longest time between two turns of the event loop while a stopped slurmctld is polled."""

    async def ask() -> None:
        while True:
            try:
                await look(reader)
            except ChildFailed:
                continue

    largest = 0.0
    with lab.controller_stopped():
        asking, last = asyncio.create_task(ask()), time.monotonic()
        end = last + stopped_s
        while last < end:
            await asyncio.sleep(0.005)
            now = time.monotonic()
            largest, last = max(largest, now - last), now
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    return largest


def figures_of(blocks: list[Block], gap_s: float | None) -> dict[str, float]:
    """Return the figures of the last line; those of a reader that was not measured are left out."""
    readers = dict.fromkeys(block.reader for block in blocks)
    figures = {key: value for reader in readers for key, value in summarize(blocks, reader).items()}
    return figures if gap_s is None else {**figures, "loop_gap_s": round(gap_s, 4)}


def by_block(blocks: list[Block]) -> dict[str, list[float]]:
    """Return for each figure its values, one for each block of its reader."""
    samples: dict[str, list[float]] = {}
    for block in blocks:
        for name, value in summarize([block], block.reader).items():
            samples.setdefault(name, []).append(value)
    return samples


def summarize(blocks: list[Block], reader: str) -> dict[str, float]:
    """Return the figures of a reader in ms."""
    own = [block for block in blocks if block.reader == reader]
    looks = [seconds for block in own for seconds in block.looks_s]
    return {
        f"{reader}_cpu_ms": round(1000 * sum(block.cpu_s for block in own) / len(looks), 3),
        f"{reader}_ms": round(1000 * statistics.median(looks), 3),
        f"{reader}_slurmctld_ms": round(1000 * sum(block.slurmctld_s for block in own) / len(looks), 3),
    }


if __name__ == "__main__":
    main()
