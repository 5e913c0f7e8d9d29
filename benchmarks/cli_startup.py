"""Measures the wait for ``rrl --version``, ``rrl status`` of a finished run, ``rrl --help``, and completion.

Bar: version and status take less than 0.4 s, a completion in bash less than 0.2 s. A command is measured as a whole
process, from its start to its end; the process of the completion is a bash that completes one line. The result is the
median of ten. The commands take turns, so that a burst of load on the machine affects all of them alike. This program
creates the finished run, by writing its journal.
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
from rrl.cli.completion.candidates import script
from rrl.tests.support.cli.story import completed

ROUNDS = 10
MAX_MEDIAN_S = 0.4
MAX_COMPLETION_S = 0.2
RRL = Path(sys.executable).with_name("rrl")
RUN = "small-7"
COMPLETION = (
    f"{script('bash')}COMP_WORDS=({RRL} restart {RUN} roll) COMP_CWORD=3; _rrl {RRL}; test ${{#COMPREPLY[@]}} = 2"
)
"""What bash does when the user types ``rrl restart small-7 roll`` and the tab key: two rollouts are offered."""
COMMANDS = {
    "version_s": [str(RRL), "--version"],
    "status_s": [str(RRL), "status"],
    "help_s": [str(RRL), "--help"],
    "completion_s": ["bash", "-c", COMPLETION],
}
LABELS = {"completion_s": "completion in bash"}


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    check_requirements("cli_startup")
    with tempfile.TemporaryDirectory() as root:
        completed(RUN).written(Path(root))
        environment = os.environ | {"RRL_RUNS_DIR": root}
        taken: dict[str, list[float]] = {name: [] for name in COMMANDS}
        for _ in range(ROUNDS):
            for name, arguments in COMMANDS.items():
                taken[name].append(_time_command(arguments, environment))
    medians = {name: statistics.median(times) for name, times in taken.items()}
    bars = {name: MAX_COMPLETION_S if name == "completion_s" else MAX_MEDIAN_S for name in COMMANDS}
    rows = [
        (LABELS.get(name) or f"rrl {COMMANDS[name][1]}", f"{medians[name]:.3f}", f"{min(times):.3f}",
         f"{max(times):.3f}", f"{'under' if medians[name] < bars[name] else 'OVER'} {bars[name]} s")
        for name, times in taken.items()
    ]  # fmt: skip
    print_table(("command", "median s", "min", "max", "bar"), rows)
    print(json.dumps({name: round(value, 4) for name, value in medians.items()}))


def _time_command(arguments: list[str], environment: dict[str, str]) -> float:
    began = time.perf_counter()
    subprocess.run(arguments, env=environment, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
