"""Measures what an agent costs its node: CPU and memory of a real agent and all its readers, beside eight GPUs.

The GPUs are those of a stand-in driver, which is read once per second. Its calls take almost no time, because it
answers from memory, where a real driver would query the GPU. So the figures leave out the time in the driver;
docs/health.md gives the time in a real driver. With ``--native``, the agent reads the GPUs of this machine with this
machine's driver, and the time in the driver counts. ``driver_calls`` in the JSON object names the driver. Bars: 1 % of
one core, and 80 MiB (PSS: pages that several processes share are counted once).

The cost is measured for ``--seconds`` (60). Before the measurement, ``--settle`` (20) seconds pass, in which processes
start, make their first readings and search past log entries. The range of the CPU time is taken over six equal parts of
the measured time. This program replaces the agent's manager, and is not counted. Prints a table, and one JSON
object as its last line (benchmarks/_provenance.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from collections import Counter
from pathlib import Path

import msgspec
from msgspec import Struct

from rrl.benchmarks._provenance import provenance, raw_samples, spread
from rrl.benchmarks._requirements import check_requirements
from rrl.benchmarks._table import print_table
from rrl.health.readers.base import READERS
from rrl.tests.support.listening_manager import Lab, lab
from rrl.tests.support.nvml.driver import FakeDriver
from rrl.transport.messages import AgentHeartbeat

GPUS = 8
MAX_CORES, MAX_PSS_MIB = 0.01, 80.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PARTS = 6
"""Number of parts of the measured time. The reported CPU time is that of all parts. The reported memory is the highest
value at the end of a part."""
STAND_IN_CALLS, REAL_CALLS = "free (stand-in driver)", "counted (driver of this machine)"
"""Texts in the output: whether the figures contain the time of the GPU driver's calls."""


class Sample(Struct, frozen=True):
    """CPU time and memory of the agent and its readers in one part of the measured time."""

    seconds: float
    """Duration of the part (s)."""
    cpu_s: float
    pss_mib: dict[int, float]
    """PSS (MiB) of each process, by pid, at the end of the part."""

    @property
    def cores(self) -> float:
        return self.cpu_s / self.seconds


async def _measure(
    lab_run: Lab, seconds: float, settle: float, native: bool
) -> tuple[list[Sample], list[tuple[str, str, str, str]]]:
    """Return the samples, and a table row for each process of the agent."""
    patch = f"import os; os.environ.update({_driver_path()!r})"
    if not native:
        driver = FakeDriver(lab_run.run.path).gpus(GPUS)
        driver.set(None, "utilization", 90).set(None, "temperature", 60)
        patch = f"import os; os.environ.update({driver.env()!r})"
    async with lab_run.manager() as manager:
        role = lab_run.launch("sleep", "100000")
        lab_run.start(role)
        launch = lab_run.launch(replica="agent/local1")
        launch = msgspec.structs.replace(launch, readers=READERS, admission_timeout=20.0)
        lab_run.run.launch_file(launch.tag).write_bytes(msgspec.json.encode(launch))
        agent = lab_run.start(launch, "node_agent.main", patch)
        await manager.wait_for(AgentHeartbeat)
        await asyncio.sleep(settle)
        clock = asyncio.get_running_loop().time
        first = last = _ticks(agent.pid)
        began = since = clock()
        samples = []
        for _ in range(PARTS):
            await asyncio.sleep(seconds / PARTS)
            memory = {pid: _pss(pid) for pid in _process_tree(agent.pid)}
            ticks, now = _ticks(agent.pid), clock()
            samples.append(Sample(now - since, (ticks - last).total() / TICKS_PER_S, memory))
            last, since = ticks, now
        highest = max(samples, key=_total_mib).pss_mib
        shares = ((pid, f"{spent / TICKS_PER_S / (since - began):.2%}") for pid, spent in (last - first).items())
        rows = [(str(pid), share, f"{highest.get(pid, 0.0):.1f}", _command_text(pid)) for pid, share in shares]
        return samples, rows


def _total_mib(sample: Sample) -> float:
    return sum(sample.pss_mib.values())


def _driver_path() -> dict[str, str]:
    """Return environment variables with which the loader finds a driver's library outside of standard folders."""
    return {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "RRL_FAKE_NVML") if name in os.environ}


def _process_tree(root: int) -> list[int]:
    """Return the pids of a process and of all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def _ticks(root: int) -> Counter[int]:
    """Return the CPU time (ticks) of a process and of each descendant, including their reaped children."""
    used: Counter[int] = Counter()
    for pid in _process_tree(root):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        used[pid] = sum(map(int, fields[11:15]))
    return used


def _pss(pid: int) -> float:
    """Return the PSS of a process in MiB."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:")), 0.0)


def _command_text(pid: int) -> str:
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        return " ".join((Path(f"/proc/{pid}/comm").read_text().strip(), *arguments[1:4]))[:60]
    except OSError:
        return "?"


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--seconds", type=float, default=60.0)
    options.add_argument("--settle", type=float, default=20.0)
    options.add_argument("--native", action="store_true")
    given = options.parse_args()
    check_requirements("agent_cost")
    with tempfile.TemporaryDirectory() as folder, lab(Path(folder)) as lab_run:
        samples, rows = asyncio.run(_measure(lab_run, given.seconds, given.settle, given.native))
    cores = sum(sample.cpu_s for sample in samples) / sum(sample.seconds for sample in samples)
    pss = max(map(_total_mib, samples))
    calls = REAL_CALLS if given.native else STAND_IN_CALLS
    print_table(("pid", "core", "PSS MiB", "process"), rows)
    print(f"calls of the GPU driver: {calls}")
    print(
        f"bars: {MAX_CORES:.0%} of a core, {MAX_PSS_MIB:g} MiB: "
        f"{'under' if cores < MAX_CORES and pss < MAX_PSS_MIB else 'OVER'}"
    )
    raw = raw_samples("agent_cost", [msgspec.to_builtins(sample, str_keys=True) for sample in samples])
    print(
        json.dumps(
            {
                "cpu_fraction": round(cores, 5),
                "pss_mib": round(pss, 1),
                "driver_calls": calls,
                "cpu_fraction_of_parts": spread([sample.cores for sample in samples]),
                "pss_mib_of_parts": spread([_total_mib(sample) for sample in samples]),
                **provenance(),
                "raw": str(raw),
            }
        )
    )


if __name__ == "__main__":
    main()
