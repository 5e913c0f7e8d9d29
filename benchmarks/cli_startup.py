"""Measures how long a user waits for ``rrl --version``, ``rrl status`` of a finished run, and ``rrl --help``.

Bar: version and status take less than 0.4 s. A command is measured as a whole process, from its start to its end. The
result is the median of ten. The commands take turns, so that a burst of load on the machine affects all of them alike.
This program creates the finished run, by writing its journal.
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

from rrl.benchmarks._requirements import check_requirements
from rrl.benchmarks._table import print_table
from rrl.tests.support.cli.story import completed

ROUNDS = 10
MAX_MEDIAN_S = 0.4
COMMANDS = {"version_s": ["--version"], "status_s": ["status"], "help_s": ["--help"]}


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    check_requirements("cli_startup")
    with tempfile.TemporaryDirectory() as root:
        completed().written(Path(root))
        environment = os.environ | {"RRL_RUNS_DIR": root}
        taken: dict[str, list[float]] = {name: [] for name in COMMANDS}
        for _ in range(ROUNDS):
            for name, arguments in COMMANDS.items():
                taken[name].append(_time_command(arguments, environment))
    medians = {name: statistics.median(times) for name, times in taken.items()}
    rows = [
        (f"rrl {' '.join(COMMANDS[name])}", f"{medians[name]:.3f}", f"{min(times):.3f}", f"{max(times):.3f}",
         "under" if medians[name] < MAX_MEDIAN_S else "OVER")
        for name, times in taken.items()
    ]  # fmt: skip
    print_table(("command", "median s", "min", "max", f"bar {MAX_MEDIAN_S} s"), rows)
    print(json.dumps({name: round(value, 4) for name, value in medians.items()}))


def _time_command(arguments: list[str], environment: dict[str, str]) -> float:
    entry = Path(sys.executable).with_name("rrl")
    began = time.perf_counter()
    subprocess.run([str(entry), *arguments], env=environment, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
