"""Measures the processor time of ``rrl top`` while no events occur in the runs that it shows."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

from rrl.tests.support.cli.story import BEGAN, at_work
from rrl.tests.support.cli.terminal import Terminal
from rrl.tests.support.cli.top import managed
from rrl.tests.support.cli.waiting import eventually

SETTLING_S = 3.0
"""Seconds before the measurement, in which ``rrl top`` reads and draws the runs for the first time."""
MEASURED_S = 15.0
"""Seconds of the measurement. A manager's lease must be valid for longer, because nothing renews it here."""
COLUMNS, ROWS = 200, 60
_PROGRAM = f"""
import sys, time
from rrl.api.runs import find_run
from rrl.api.watching.runs_watcher import RunsWatcher
from rrl.cli.run.top.top_app import TopApp
run = find_run(sys.argv[1]) if sys.argv[1:] else None
began = time.time() - {BEGAN + 600.0}
TopApp(RunsWatcher(run, lambda: time.time() - began), run).run()
"""
"""A program that runs ``rrl top``. Its wall clock starts ten minutes after the beginning of the runs and advances, so
that the displayed times change as usual."""


def top_cost(replicas: int, runs: int, *, opened: bool) -> float:
    """Return the share of a core that ``rrl top`` takes for ``runs`` runs with ``replicas`` replicas each.

    With ``opened``, ``rrl top`` shows the screen of one run, otherwise the table of all runs.
    """
    with tempfile.TemporaryDirectory() as root:
        for number in range(runs):
            managed(at_work(f"run-{number:02}", replicas).written(Path(root)))
        arguments = ["run-00"] if opened else []
        environment = {"RRL_RUNS_DIR": root, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        with Terminal([sys.executable, "-c", _PROGRAM, *arguments], environment, COLUMNS, ROWS) as terminal:
            shown = "Replicas" if opened else f"{runs} runs in"
            eventually(lambda: shown in "\n".join(terminal.lines))
            time.sleep(SETTLING_S)
            used, began = _processor_s(terminal.process.pid), time.monotonic()
            time.sleep(MEASURED_S)
            took = time.monotonic() - began
            return (_processor_s(terminal.process.pid) - used) / took


def _processor_s(pid: int) -> float:
    """Return the processor time (s) that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
