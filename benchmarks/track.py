"""Measures whether trackers get each step once, whether a hanging tracker slows a run, and the time of ``rrl metrics``.

There are three parts:

- *once*: in a light run with TensorBoard, wandb (offline) and MLflow (files), the tracker processes are killed three
  times and the manager once, and the run is resumed once. ``missing`` is the number of steps that a tracker lacks.
  ``doubled`` is the number of further copies of steps that a tracker has. Both are summed over the three trackers
  (bars: 0 and 0).
- *hang*: light runs without a tracker are interleaved with runs that log to MLflow at a server that accepts connections
  and never answers. ``step_time_ratio`` is the median time of a step with the server divided by that without a tracker
  (bar: 1.02). ``step_time_error`` is the standard error of this ratio, computed from the ratios of the pairs of runs.
- *metrics*: ``metrics_s`` is the median time of ``rrl metrics`` as a whole process, for a run of 10,000 steps
  (bar: 1 s).

The last line is one JSON object (benchmarks/_provenance.py). It also has ranges of the figures: over the trackers,
over the pairs, and over the calls of ``rrl metrics``.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from rrl.benchmarks._long_run import LONG_RUN_STEPS, write_long_run
from rrl.benchmarks._provenance import last_line
from rrl.benchmarks._requirements import check_requirements
from rrl.manager.model import events as ev
from rrl.tests.support.runs import light_job, submit_here
from rrl.tests.support.supervisor import temporary_runs_folder
from rrl.tests.support.trackers.killed_run import TRACKERS, play, tracked_job
from rrl.tests.support.trackers.sent_steps import sent

PAIRS = 4
STEPS = 120
WARM_UP_STEPS = 20
"""Number of steps at the beginning of a run that are not measured, because roles and tracker process still start."""
ROUNDS = 5
FIGURES = {
    "once": ("steps", "missing", "doubled"),
    "hang": ("step_time_ratio", "step_time_error"),
    "metrics": ("metrics_s",),
}
"""For each part, the names of its figures in the last line that the benchmark prints."""
Samples = dict[str, list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", choices=tuple(FIGURES), action="append", help="Run only this part; may be repeated.")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="Number of pairs of runs, with and without hang.")
    options = parser.parse_args()
    check_requirements("track")
    figures: dict[str, float] = {}
    samples: Samples = {}
    further: Samples = {}
    values: tuple[float, ...]
    for part in options.part or FIGURES:
        if part == "once":
            values, sampled = once()
        elif part == "hang":
            values, sampled, further = hang(options.pairs)
        else:
            values, sampled = metrics()
        figures |= dict(zip(FIGURES[part], values, strict=True))
        samples |= sampled
        print(f"{part}: {figures}", file=sys.stderr, flush=True)
    print(last_line("track", figures, samples, further))


def once() -> tuple[tuple[int, int, int], Samples]:
    """Return (steps, missing, doubled), summed over the trackers, and the missing and doubled steps of each tracker."""
    with temporary_runs_folder() as folder:
        run = play(Path(folder), kills=3)
        steps, missing, doubled = run.state().step, [], []
        for tracker in TRACKERS:
            counts = Counter(step for step, _ in sent(run.run, tracker, "reward"))
            missing.append(sum(counts[step] == 0 for step in range(1, steps + 1)))
            doubled.append(sum(count - 1 for count in counts.values()))
    return (steps, sum(missing), sum(doubled)), {"missing": [*missing], "doubled": [*doubled]}


def hang(pairs: int) -> tuple[tuple[float, float], Samples, Samples]:
    """Return the ratio of step times with a hanging tracker to step times without a tracker, and its standard error.

    The ratio of each pair and all step times (s) come with them.
    """
    ratios: list[float] = []
    with_tracker: list[float] = []
    without: list[float] = []
    with silent_server() as port:
        os.environ["MLFLOW_TRACKING_URI"] = f"http://127.0.0.1:{port}"
        for _ in range(pairs):
            alone, beside = step_times(light_job("local", STEPS)), step_times(tracked_job(STEPS, ("mlflow",)))
            ratios.append(statistics.median(beside) / statistics.median(alone))
            without, with_tracker = [*without, *alone], [*with_tracker, *beside]
    ratio = statistics.median(with_tracker) / statistics.median(without)
    error = statistics.stdev(ratios) / pairs**0.5 if pairs > 1 else 0.0
    step_times_s = {"step_s_with_tracker": with_tracker, "step_s_without_tracker": without}
    return (round(ratio, 4), round(error, 4)), {"step_time_ratio": ratios}, step_times_s


def step_times(toml: str) -> list[float]:
    """Return the seconds between the commits of a run, as its manager recorded them."""
    with temporary_runs_folder() as folder:
        run = submit_here(Path(folder), toml)
        run.wait_end(600.0)
        run.wait_gone(60.0)
        commits = [one.at for one in run.events() if isinstance(one.event, ev.StepCommitted)]
    return [after - before for before, after in pairwise(commits[WARM_UP_STEPS:])]


@contextmanager
def silent_server() -> Iterator[int]:
    """Listen on a port of the loopback without ever answering; the kernel accepts the connections."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield server.getsockname()[1]


def metrics() -> tuple[tuple[float], Samples]:
    """Return the median seconds of ``rrl metrics`` as a whole process, and the seconds of each call."""
    with tempfile.TemporaryDirectory() as root:
        write_long_run(Path(root))
        argv = [str(Path(sys.executable).with_name("rrl")), "metrics"]
        taken = []
        for _ in range(ROUNDS):
            began = time.monotonic()
            done = subprocess.run(argv, env=os.environ | {"RRL_RUNS_DIR": root}, capture_output=True, check=True)
            taken.append(time.monotonic() - began)
            assert done.stdout.count(b"\n") == LONG_RUN_STEPS
    return (round(statistics.median(taken), 3),), {"metrics_s": taken}


if __name__ == "__main__":
    main()
