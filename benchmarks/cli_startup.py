"""Measures the wait for ``rrl --version``, ``rrl status`` of finished and live runs, ``rrl --help``, and completion.

``rrl status`` shows a finished run and a live run, each once with 5 and once with 1,024 replicas. During the
measurement, this program appends to the journal of the live run (:mod:`_live_run`). Bar: each takes less than 0.2 s. A
command is measured as a whole process, from its start to its end. The completion is measured as a bash that completes
one line. The result is the median of ten. The commands take turns, so that a burst of load on the machine affects all
of them alike. This program writes the journals of all runs. Prints a table, and one JSON object as its last line
(benchmarks/_provenance.py).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from rrl.benchmarks._live_run import live_run
from rrl.benchmarks._provenance import last_line
from rrl.benchmarks._requirements import check_requirements
from rrl.benchmarks._table import print_table
from rrl.cli.common.completion import script
from rrl.core.types import Outcome
from rrl.tests.support.cli.story import REPLICAS, at_work, completed
from rrl.tests.support.runs import RRL

ROUNDS = 10
MAX_MEDIAN_S = 0.2
MANY = 1024
"""Replicas of the large runs."""
FINISHED, FINISHED_MANY, LIVE, LIVE_MANY = "small-7", "large-7", "small-live-7", "large-live-7"
COMPLETION = (
    script("bash")
    + f"\nCOMP_WORDS=({RRL} restart {FINISHED} roll) COMP_CWORD=3; _rrl_completion {RRL}; test ${{#COMPREPLY[@]}} = 2"
)
"""The bash commands that complete ``rrl restart small-7 roll``; the completion must offer two rollouts."""
COMMANDS = {
    "version_s": [RRL, "--version"],
    "status_s": [RRL, "status", FINISHED],
    "status_live_s": [RRL, "status", LIVE],
    f"status_{MANY}_s": [RRL, "status", FINISHED_MANY],
    f"status_live_{MANY}_s": [RRL, "status", LIVE_MANY],
    "help_s": [RRL, "--help"],
    "completion_s": ["bash", "-c", COMPLETION],
}
LABELS = {
    "version_s": "rrl --version",
    "status_s": f"rrl status, finished, {len(REPLICAS)} replicas",
    "status_live_s": f"rrl status, live, {len(REPLICAS)} replicas",
    f"status_{MANY}_s": f"rrl status, finished, {MANY:,} replicas",
    f"status_live_{MANY}_s": f"rrl status, live, {MANY:,} replicas",
    "help_s": "rrl --help",
    "completion_s": "completion in bash",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"how often to run each command ({ROUNDS})")
    rounds = parser.parse_args().rounds
    check_requirements("cli_startup")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        completed(FINISHED).written(root)
        at_work(FINISHED_MANY, MANY).ends(Outcome.COMPLETED, "all steps are done").written(root)
        environment = os.environ | {"RRL_RUNS_DIR": folder}
        taken: dict[str, list[float]] = {name: [] for name in COMMANDS}
        with live_run(root, LIVE, len(REPLICAS)), live_run(root, LIVE_MANY, MANY):
            for _ in range(rounds):
                for name, arguments in COMMANDS.items():
                    taken[name].append(_time_command(arguments, environment))
    medians = {name: statistics.median(times) for name, times in taken.items()}
    rows = [
        (
            LABELS[name],
            f"{medians[name]:.3f}",
            f"{min(times):.3f}",
            f"{max(times):.3f}",
            f"{'under' if medians[name] < MAX_MEDIAN_S else 'OVER'} {MAX_MEDIAN_S} s",
        )
        for name, times in taken.items()
    ]
    print_table(("command", "median s", "min", "max", "bar"), rows)
    figures = {name: round(value, 4) for name, value in medians.items()}
    print(last_line("cli_startup", figures, taken))


def _time_command(arguments: list[str], environment: dict[str, str]) -> float:
    began = time.perf_counter()
    subprocess.run(arguments, env=environment, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
