"""Measures whether a run withstands 10,000 malformed frames and 200 half-open connections on every port.

The run is light (real manager, store, agents and weight transport, no models), on this machine's local cluster, and is
repeated with each weight transport. The results are the growth of memory and descriptors of each process during the
attack, and whether a part of the run was affected: restarted, reported in a finding, or stopped. A smaller attack
before fills the memory pools of the libraries. A period of 100 steps without an attack shows how much the processes
grow by themselves. Prints a table, and one JSON object as its last line.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rrl.benchmarks._requirements import check_requirements
from rrl.benchmarks._table import print_table
from rrl.core.types import Verdict
from rrl.manager.model import events as ev
from rrl.tests.support.runs import TestRun, current_incarnations, light_job, submit_here
from rrl.tests.support.security.assault import Cost, assault, targets
from rrl.tests.support.security.attacks import Footprint

FRAMES_PER_PORT = 10_000
HALF_OPEN_PER_PORT = 200
WARMUP_FRAMES = 1_000
STEPS = 1_000_000
"""Number of steps of the job, which the run never reaches, because it is cancelled after the attack."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("frames", nargs="?", type=int, default=FRAMES_PER_PORT, help="frames for each port (10,000)")
    frames = parser.parse_args().frames
    check_requirements("hostile_ports")
    kinds = ["tcp"] + ["ucx"] * (importlib.util.find_spec("ucxx") is not None)
    rows: list[list[str]] = []
    results = [_attack(kind, frames, rows) for kind in kinds]
    print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; "
        f"{frames} frames and {HALF_OPEN_PER_PORT} half-open a port"
    )
    header = ("pipe, process", "ports", "MiB before", "most", "after", "growth", "alone", "fds before", "most", "after")
    print_table(header, rows)
    for kind, result in zip(kinds, results, strict=True):
        print(f"{kind}: {result['steps_per_s_before']:.1f} steps/s before, {result['steps_per_s_during']:.1f} during")
    print(json.dumps({
        "frames": min(result["said"] for result in results), "half_open": HALF_OPEN_PER_PORT,
        "ports": sum(result["ports"] for result in results),
        "memory_growth_max": round(max(result["memory"] for result in results), 4),
        "fds_growth_max": max(result["descriptors"] for result in results),
        "run_affected": any(result["affected"] for result in results),
    }))  # fmt: skip


def _attack(kind: str, frames: int, rows: list[list[str]]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="rrl-bench-") as folder:
        toml = light_job("local", STEPS).replace('weights = "tcp"', f'weights = "{kind}"')
        run = submit_here(Path(folder), toml)
        try:
            before = current_incarnations(run.wait_steps(20))
            victims = targets(run)
            assault(run, victims, WARMUP_FRAMES, HALF_OPEN_PER_PORT)
            first, began = [Footprint.of(victim.pid) for victim in victims], time.monotonic()
            step = run.state().step
            run.wait(lambda state: state.step >= step + 100)
            quiet_steps_per_s = (run.state().step - step) / (time.monotonic() - began)
            since = zip(victims, first, strict=True)
            own_growth = [Footprint.of(victim.pid).memory / then.memory - 1 for victim, then in since]
            step, began = run.state().step, time.monotonic()
            costs = assault(run, victims, frames, HALF_OPEN_PER_PORT)
            during = (run.state().step - step) / (time.monotonic() - began)
            step = run.state().step
            run.wait(lambda state: state.step >= step + 10)
            affected = current_incarnations(run.state()) != before or bool(_suspicions(run))
            for suspicion in _suspicions(run):
                print(f"{kind}: {suspicion}", file=sys.stderr)
        finally:
            with run.call("cancel", run.run.id) as process:
                process.wait()
        run.wait_gone()
    rows += [[f"{kind}, {cost.target.name}", *_row(cost, grown)] for cost, grown in zip(costs, own_growth, strict=True)]
    return {
        "ports": sum(len(victim.ports) for victim in victims), "affected": affected,
        "said": min(cost.frames for cost in costs),
        "memory": max(cost.memory_growth for cost in costs),
        "descriptors": max(cost.descriptors_growth for cost in costs),
        "steps_per_s_before": quiet_steps_per_s, "steps_per_s_during": during,
    }  # fmt: skip


def _row(cost: Cost, own_growth: float) -> list[str]:
    sizes = [f"{each.memory / 2**20:.1f}" for each in (cost.before, cost.worst, cost.after)]
    counts = [str(each.descriptors) for each in (cost.before, cost.worst, cost.after)]
    return [str(len(cost.target.ports)), *sizes, f"{cost.memory_growth:+.1%}", f"{own_growth:+.1%}", *counts]


def _suspicions(run: TestRun) -> list[str]:
    """Return all findings other than OK about processes and nodes of the run."""
    events = [stamped.event for stamped in run.events()]
    return [
        str(event.finding) for event in events
        if isinstance(event, ev.FindingChanged) and event.finding.verdict is not Verdict.OK
    ]  # fmt: skip


if __name__ == "__main__":
    main()
