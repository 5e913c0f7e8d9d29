"""Measures what an agent costs its node: CPU and memory of a real agent and all its readers, beside eight GPUs.

The GPUs are those of a stand-in driver, which is read once per second. With ``--native``, the agent reads the GPUs of
this machine with its own driver. Bars: 1 % of one core, and 80 MiB (PSS: pages that several processes share are counted
once). The cost is measured for ``--seconds`` (60) after ``--settle`` (20), in which processes start, the first readings
are made and past log entries are searched. This program takes the place of the agent's manager, and is not counted.
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

from rrl.benchmarks._requirements import check_requirements
from rrl.benchmarks._table import print_table
from rrl.health.readers.samples import READERS
from rrl.tests.support.listening_manager import Lab, lab
from rrl.tests.support.nvml.driver import FakeDriver
from rrl.transport.messages import AgentHeartbeat

GPUS = 8
MAX_CORES, MAX_PSS_MIB = 0.01, 80.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
MEMORY_SAMPLES = 6
"""Number of times that the memory is measured; the highest value counts."""


async def _measure(
    lab_run: Lab, seconds: float, settle: float, native: bool
) -> tuple[float, float, list[tuple[str, str, str, str]]]:
    """Return the cores and the PSS (MiB) that the agent uses, and a table row for each of its processes."""
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
        agent = lab_run.start(launch, "agent.main", patch)
        await manager.wait_for(AgentHeartbeat)
        await asyncio.sleep(settle)
        before, began = _ticks(agent.pid), asyncio.get_running_loop().time()
        highest: dict[int, float] = {}
        for _ in range(MEMORY_SAMPLES):
            await asyncio.sleep(seconds / MEMORY_SAMPLES)
            now = {pid: _pss(pid) for pid in _process_tree(agent.pid)}
            highest = now if sum(now.values()) > sum(highest.values()) else highest
        spent = _ticks(agent.pid) - before
        passed = asyncio.get_running_loop().time() - began
        cores = spent.total() / TICKS_PER_S / passed
        shares = ((pid, f"{ticks / TICKS_PER_S / passed:.2%}") for pid, ticks in spent.items())
        rows = [(str(pid), share, f"{highest.get(pid, 0.0):.1f}", _command_text(pid)) for pid, share in shares]
        return cores, sum(highest.values(), 0.0), rows


def _driver_path() -> dict[str, str]:
    """Return the variables by which the loader finds the driver's library, where it is not in a standard folder."""
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
    """Return the CPU time (ticks) of a process and of each descendant, with that of children which they have reaped."""
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
        cores, pss, rows = asyncio.run(_measure(lab_run, given.seconds, given.settle, given.native))
    print_table(("pid", "core", "PSS MiB", "process"), rows)
    print(
        f"bars: {MAX_CORES:.0%} of a core, {MAX_PSS_MIB:g} MiB: "
        f"{'under' if cores < MAX_CORES and pss < MAX_PSS_MIB else 'OVER'}"
    )
    print(json.dumps({"cpu_fraction": round(cores, 5), "pss_mib": round(pss, 1)}))


if __name__ == "__main__":
    main()
