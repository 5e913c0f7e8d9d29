"""Measures the cost of ``rrl status``, ``rrl explain`` and ``rrl top``.

- ``status_s``, ``explain_s``: median time of a whole process for a run of 10,000 steps, whose journal this program
  writes (bars: 0.2 s and 1 s).
- ``top_64_replicas_cpu``, ``top_20_runs_cpu``: share of a core that ``rrl top`` takes at rest, for the screen of a run
  with 64 replicas and for the table of 20 runs.

The last line is one JSON object (benchmarks/_provenance.py).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rrl.benchmarks._long_run import LONG_RUN, write_long_run
from rrl.benchmarks._provenance import last_line
from rrl.benchmarks._requirements import check_requirements
from rrl.benchmarks._table import print_table
from rrl.benchmarks._top_cost import top_cost
from rrl.tests.support.runs import RRL

ROUNDS = 10
REPLICAS = 5
BARS = {"status_s": 0.2, "explain_s": 1.0}
FIGURES: dict[str, Callable[[Sequence[float]], float]] = {
    "status_s": statistics.median,
    "explain_s": statistics.median,
    "top_64_replicas_cpu": statistics.fmean,
    "top_20_runs_cpu": statistics.fmean,
}
"""The figures of the last line, each with how it is computed from its samples."""


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    check_requirements("looks")
    samples = time_commands()
    samples["top_64_replicas_cpu"] = [top_cost(64, 1, opened=True)]
    samples["top_20_runs_cpu"] = [top_cost(REPLICAS, 20, opened=False)]
    figures = {name: round(average(samples[name]), 4) for name, average in FIGURES.items()}
    rows = [
        (name, f"{figures[name]:.3f}", f"{'under' if figures[name] < bar else 'OVER'} {bar:g}")
        for name, bar in BARS.items()
    ]
    print_table(("figure", "measured", "bar"), rows)
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


if __name__ == "__main__":
    main()
