"""Measures the time from a kill of a rollout until its replacement generates, stage by stage: the median of five kills.

Runs the quickstart's real roles (torch, transformers, reasoning-gym) on this machine's local cluster. Planned faults of
the run kill rollouts by SIGKILL of their process group. The times are read from the journal. Prints a table, and one
JSON object as its last line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from rrl.benchmarks._requirements import check_requirements
from rrl.benchmarks._table import print_table
from rrl.core.run_dir import RUNS_ENV
from rrl.tests.support.supervisor import end_runs_with_caller, temporary_runs_folder

KILLS = 5
STEPS_BETWEEN_KILLS = 100
"""Steps between two kills, and after the last kill: a replacement generates after some 70 (idle machine, 2 cores)."""
STAGES = ("detect_s", "decide_s", "start_s", "weights_s", "first_work_s", "total_s")
QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart.toml"


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    check_requirements("rollout_recovery")
    with temporary_runs_folder() as folder:
        job = folder / "job.toml"
        job.write_text(_job())
        end_runs_with_caller(folder / "runs")
        env = {**os.environ, RUNS_ENV: f"{folder}/runs"}
        rrl = str(Path(sys.executable).parent / "rrl")
        out = subprocess.run([rrl, "submit", "--wait", "--json", str(job)], env=env, capture_output=True, text=True)
        if out.returncode:
            raise SystemExit(f"the run failed:\n{out.stdout}{out.stderr}")
        summary = next(folder.glob("runs/*/summary.json"))
        recoveries = [r for r in json.loads(summary.read_text())["recoveries"] if r["injected"]]
    complete = [r for r in recoveries if r["total_s"] is not None]
    if len(complete) < KILLS:
        raise SystemExit(f"only {len(complete)} of {KILLS} kills were recovered from before the run ended")
    medians = {stage: round(statistics.median(r[stage] for r in complete), 3) for stage in STAGES}
    rows = [[r["replica"], *(f"{r[stage]:.3f}" for stage in STAGES)] for r in complete]
    rows.append(["median", *(f"{medians[stage]:.3f}" for stage in STAGES)])
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; local cluster, torch engine")
    print_table(["killed", *STAGES], rows)
    print(json.dumps({"kills": len(complete), **medians}))


def _job() -> str:
    """Return the quickstart's job with other planned faults, which kill the rollouts in turn."""
    toml = QUICKSTART.read_text().partition("[[faults.planned]]")[0]
    steps = (KILLS + 2) * STEPS_BETWEEN_KILLS
    toml = toml.replace("steps = 300", f"steps = {steps}")
    assert f"steps = {steps}" in toml, "the quickstart's number of steps is not where this program expects it"
    faults = [
        f'[[faults.planned]]\nkind = "kill"\ntarget = "rollout/{i % 2}"\nat = "step={STEPS_BETWEEN_KILLS * (i + 1)}"\n'
        for i in range(KILLS)
    ]
    return toml + "\n".join(faults)


if __name__ == "__main__":
    main()
