"""What the agent costs a node that is to compute: CPU and memory of a real agent with all readers, their processes
counted too, beside eight GPUs of a stand-in driver that is read once a second.

Bars: 1 % of one core, 80 MiB (PSS: pages that several processes share are counted once). ``--seconds`` (60) is measured
after ``--settle`` (20), in which processes start, a first round is read and the past is looked through. ``--native``
leaves the driver of this machine as it is: its own GPUs are read. The manager that the agent talks to is this program,
and is not counted.
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

from rrl.benchmarks._requirements import begin
from rrl.benchmarks._table import print_table
from rrl.health.readers.samples import READERS
from rrl.tests.support.listening_manager import Lab, lab
from rrl.tests.support.nvml.driver import FakeDriver
from rrl.transport.messages import AgentBeat

GPUS = 8
CPU_BAR, PSS_BAR = 0.01, 80.0
HZ = os.sysconf("SC_CLK_TCK")
SAMPLES = 6
"""of memory, over the time that is measured: the highest counts"""


async def _measure(
    at: Lab, seconds: float, settle: float, native: bool
) -> tuple[float, float, list[tuple[str, str, str, str]]]:
    """Cores, PSS in MiB, and rows: what each process takes."""
    patch = ""
    if not native:
        driver = FakeDriver(at.run.path).gpus(GPUS)
        driver.set(None, "utilization", 90).set(None, "temperature", 60)
        patch = f"import os; os.environ.update({driver.env()!r})"
    async with at.manager() as manager:
        role = at.launch("sleep", "100000")
        at.start(role)
        launch = at.launch(replica="agent/local1")
        launch = msgspec.structs.replace(launch, readers=READERS, admission=20.0)
        at.run.launch_file(launch.tag).write_bytes(msgspec.json.encode(launch))
        agent = at.start(launch, "agent", patch)
        await manager.hears(AgentBeat)
        await asyncio.sleep(settle)
        before, began = _ticks(agent.pid), asyncio.get_running_loop().time()
        most: dict[int, float] = {}
        for _ in range(SAMPLES):
            await asyncio.sleep(seconds / SAMPLES)
            now = {pid: _pss(pid) for pid in _family(agent.pid)}
            most = now if sum(now.values()) > sum(most.values()) else most
        spent = _ticks(agent.pid) - before
        passed = asyncio.get_running_loop().time() - began
        cores = spent.total() / HZ / passed
        shares = ((pid, f"{ticks / HZ / passed:.2%}") for pid, ticks in spent.items())
        rows = [(str(pid), share, f"{most.get(pid, 0.0):.1f}", _words(pid)) for pid, share in shares]
        return cores, sum(most.values(), 0.0), rows


def _family(root: int) -> list[int]:
    """A process and all below it."""
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
    """CPU time of each, with that of children that it has buried."""
    used: Counter[int] = Counter()
    for pid in _family(root):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        used[pid] = sum(map(int, fields[11:15]))
    return used


def _pss(pid: int) -> float:
    """MiB."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:")), 0.0)


def _words(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        return " ".join((Path(f"/proc/{pid}/comm").read_text().strip(), *words[1:4]))[:60]
    except OSError:
        return "?"


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--seconds", type=float, default=60.0)
    options.add_argument("--settle", type=float, default=20.0)
    options.add_argument("--native", action="store_true")
    given = options.parse_args()
    begin("agent_cost")
    with tempfile.TemporaryDirectory() as folder, lab(Path(folder)) as at:
        cores, pss, rows = asyncio.run(_measure(at, given.seconds, given.settle, given.native))
    print_table(("pid", "core", "PSS MiB", "process"), rows)
    print(f"bars: {CPU_BAR:.0%} of a core, {PSS_BAR:g} MiB: {'under' if cores < CPU_BAR and pss < PSS_BAR else 'OVER'}")
    print(json.dumps({"cpu_fraction": round(cores, 5), "pss_mib": round(pss, 1)}))


if __name__ == "__main__":
    main()
