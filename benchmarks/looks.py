"""Measures the cost of ``rrl status``, ``rrl explain`` and ``rrl top``, and the bytes that ``--live`` sends.

``status_s`` and ``explain_s`` are medians of whole processes for a run of 10,000 steps, whose journal this program
writes (bars: 0.2 s and 1 s). The bytes are those that ``rrl status --live`` sends to a pseudo-terminal of 200 columns
and 60 lines after its first drawing, for real runs on the local cluster. ``live_idle_Bps`` is measured while five
processes of a run are at rest (bar: 2 kB/s), ``live_busy_Bps`` while a run with five replicas commits steps (bar: 5
kB/s). ``top_64_replicas_cpu`` and ``top_20_runs_cpu`` are the shares of a core that ``rrl top`` takes at rest, for the
screen of a run with 64 replicas and for the table of 20 runs. Prints one JSON object as its last line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rrl.benchmarks._long_run import LONG_RUN, write_long_run
from rrl.benchmarks._requirements import check_requirements
from rrl.benchmarks._table import print_table
from rrl.benchmarks._top_cost import top_cost
from rrl.manager.model.queries import workers
from rrl.manager.model.state import Status
from rrl.tests.support.cli.terminal import Terminal
from rrl.tests.support.cli.waiting import eventually
from rrl.tests.support.runs import RRL, TestRun, light_job, submit_here
from rrl.tests.support.supervisor import temporary_runs_folder

ROUNDS = 10
COLUMNS, ROWS = 200, 60
LIVE_S = 60.0
"""Seconds over which the bytes of the live view are counted."""
REPLICAS = 5
STEPS = 100_000
"""Steps of the job: more than the run commits during the measurement."""
BARS = {"status_s": 0.2, "live_idle_Bps": 2000.0, "live_busy_Bps": 5000.0, "explain_s": 1.0}
RESTING_JOB = f"""
[run]
name = "resting"
[cluster]
kind = "local"
node = {{ cpus = 2, mem = "1GiB" }}
[commands.rest]
replicas = {REPLICAS}
command = ["sleep", "86400"]
mem = "64MiB"
watch = "activity"
quiet = "24h"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=LIVE_S, help="Seconds of the measurement of each live view.")
    seconds = parser.parse_args().seconds
    check_requirements("looks")
    figures = time_commands()
    figures["live_idle_Bps"], _ = measure_live(RESTING_JOB, seconds)
    # trajectories, reward, trainer and two rollouts
    figures["live_busy_Bps"], steps = measure_live(light_job("local", STEPS), seconds)
    shares = {
        "top_64_replicas_cpu": top_cost(64, 1, opened=True),
        "top_20_runs_cpu": top_cost(REPLICAS, 20, opened=False),
    }
    rows = [
        (name, f"{figures[name]:.3f}" if name.endswith("_s") else f"{figures[name]:.0f}",
         f"{'under' if figures[name] < bar else 'OVER'} {bar:g}")
        for name, bar in BARS.items()
    ]  # fmt: skip
    print_table(("figure", "measured", "bar"), rows)
    print(f"{steps / seconds:.1f} steps per second passed while live_busy_Bps was measured")
    for name, share in shares.items():
        print(f"{name}: {100 * share:.1f} % of a core")
    print(json.dumps({name: round(value, 4) for name, value in (figures | shares).items()}))


def time_commands() -> dict[str, float]:
    """Return the median seconds of the commands, which take turns, for a run of 10,000 steps."""
    taken: dict[str, list[float]] = {"status_s": [], "explain_s": []}
    with tempfile.TemporaryDirectory() as root:
        write_long_run(Path(root))
        environment = os.environ | {"RRL_RUNS_DIR": root}
        for _ in range(ROUNDS):
            for name, times in taken.items():
                began = time.perf_counter()
                argv = [RRL, name.removesuffix("_s"), LONG_RUN]
                subprocess.run(argv, env=environment, stdout=subprocess.DEVNULL, check=True)
                times.append(time.perf_counter() - began)
    return {name: statistics.median(times) for name, times in taken.items()}


def measure_live(toml: str, seconds: float) -> tuple[float, int]:
    """Return the bytes per second of the live view of a run of this job, and the number of steps in that time."""
    with temporary_runs_folder() as folder:
        run = submit_here(Path(folder), toml)
        try:
            run.wait(lambda state: all(one.status is Status.JOINED for one in workers(state)))
            if run.state().job.steps:
                run.wait_steps(3)
            with Terminal(
                [RRL, "status", run.run.id, "--live"], {"RRL_RUNS_DIR": str(run.run.path.parent)}, COLUMNS, ROWS
            ) as terminal:
                eventually(lambda: "q stops watching" in "".join(terminal.lines))
                steps, before, began = run.state().step, terminal.sent, time.monotonic()
                time.sleep(seconds)
                sent, took = terminal.sent - before, time.monotonic() - began
                passed = run.state().step - steps
                if sent == 0:
                    sys.exit("rrl status --live sent nothing: it does not follow the run")
                return sent / took, passed
        finally:
            cancel(run)


def cancel(run: TestRun) -> None:
    """Cancel the run, and wait until none of its processes is left."""
    run.call("cancel", run.run.id).wait()
    run.wait_gone(60.0)


if __name__ == "__main__":
    main()
