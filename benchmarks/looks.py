"""Measures the cost of ``rrl status``, ``rrl explain`` and ``rrl top``, and the bytes that ``--live`` sends.

- ``status_s``, ``explain_s``: median time of a whole process for a run of 10,000 steps, whose journal this program
  writes (bars: 0.2 s and 1 s).
- ``live_idle_Bps``: bytes/s that ``rrl status --live`` sends while five processes of a run are at rest (bar: 2 kB/s).
- ``live_busy_Bps``: the same while a run with five replicas commits steps (bar: 5 kB/s).
- ``top_64_replicas_cpu``, ``top_20_runs_cpu``: share of a core that ``rrl top`` takes at rest, for the screen of a run
  with 64 replicas and for the table of 20 runs.

``rrl status --live`` writes to a pseudo-terminal of 200 columns and 60 lines, for real runs on the local cluster. The
bytes of its first drawing do not count. The last line is one JSON object (benchmarks/_provenance.py). The range of
``live_*_Bps`` is taken over tenths of the measurement.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rrl.benchmarks._long_run import LONG_RUN, write_long_run
from rrl.benchmarks._provenance import last_line
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
TENTHS = 10
"""Number of equal parts of a measurement, whose rates give the range."""
REPLICAS = 5
STEPS = 100_000
"""Steps of the job: more than the run commits during the measurement."""
BARS = {"status_s": 0.2, "live_idle_Bps": 2000.0, "live_busy_Bps": 5000.0, "explain_s": 1.0}
FIGURES: dict[str, Callable[[Sequence[float]], float]] = {
    "status_s": statistics.median, "live_idle_Bps": statistics.fmean, "live_busy_Bps": statistics.fmean,
    "explain_s": statistics.median, "top_64_replicas_cpu": statistics.fmean, "top_20_runs_cpu": statistics.fmean,
}  # fmt: skip
"""The figures of the last line, each with how it is computed from its samples."""
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
    samples = time_commands()
    samples["live_idle_Bps"], _ = measure_live(RESTING_JOB, seconds)
    # trajectories, reward, trainer and two rollouts
    samples["live_busy_Bps"], steps = measure_live(light_job("local", STEPS), seconds)
    samples["top_64_replicas_cpu"] = [top_cost(64, 1, opened=True)]
    samples["top_20_runs_cpu"] = [top_cost(REPLICAS, 20, opened=False)]
    figures = {name: round(average(samples[name]), 4) for name, average in FIGURES.items()}
    rows = [
        (name, f"{figures[name]:.3f}" if name.endswith("_s") else f"{figures[name]:.0f}",
         f"{'under' if figures[name] < bar else 'OVER'} {bar:g}")
        for name, bar in BARS.items()
    ]  # fmt: skip
    print_table(("figure", "measured", "bar"), rows)
    print(f"{steps / seconds:.1f} steps per second passed while live_busy_Bps was measured")
    for name in ("top_64_replicas_cpu", "top_20_runs_cpu"):
        print(f"{name}: {100 * figures[name]:.1f} % of a core")
    print(last_line("looks", figures, samples))


def time_commands() -> dict[str, list[float]]:
    """Run the commands in turn for a run of 10,000 steps; return by figure the seconds of each call."""
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
    return taken


def measure_live(toml: str, seconds: float) -> tuple[list[float], int]:
    """Return the rate (bytes/s) of the live view in each tenth of the measurement, and the number of commits."""
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
                steps, rates = run.state().step, []
                for _ in range(TENTHS):
                    before, began = terminal.sent, time.monotonic()
                    time.sleep(seconds / TENTHS)
                    rates.append((terminal.sent - before) / (time.monotonic() - began))
                passed = run.state().step - steps
                if not any(rates):
                    sys.exit("rrl status --live sent nothing: it does not follow the run")
                return rates, passed
        finally:
            cancel(run)


def cancel(run: TestRun) -> None:
    """Cancel the run, and wait until none of its processes is left."""
    run.call("cancel", run.run.id).wait()
    run.wait_gone(60.0)


if __name__ == "__main__":
    main()
