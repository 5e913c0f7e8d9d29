"""``python -P -m rrl.manager.bootstrap.pool_supervisor RUN_DIR``: what the batch script of a pool runs where the
manager lives in the pool.

It holds the nodes, and keeps one manager: should that die, another one goes on. It ends with the run, and the pool with
it; and once ``MAX_FUTILE_STARTS`` managers in a row have ended before they began the run, as with a broken environment.
When the pool's first node is lost this is lost, too, and no manager comes by itself any more: the roles on the other
nodes go on, and ``rrl manage RUN`` on the login node takes over.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from pathlib import Path

from ...core.log_lines import start_logging
from ...core.run_dir import RunDir
from ..model.state import State
from ..storage.journal import Follower, JournalError
from ..storage.resume_request import read_pending

RESTART_DELAY_S = 1.0
"""s before a manager that died is followed by another one; doubles with each that lived shorter than ``STABLE_AFTER_S``"""
MAX_RESTART_DELAY_S = 60.0
STABLE_AFTER_S = 60.0
"""s"""
MAX_FUTILE_STARTS = 5
"""managers in a row that ended with nothing to hold the nodes for: somebody removed the run directory, or none of them
could begin the run. With the pauses between them they take 15 s, so that no single moment decides"""
LOGGER = "rrl.pool_supervisor"
"""names the lines of this process, which share a file with the output of its managers"""
_log = logging.getLogger(LOGGER)
MANAGER_PROGRAM = "import sys; from pathlib import Path; from rrl.core.run_dir import RunDir; " \
          "from rrl.manager.bootstrap.start import run_manager; run_manager(RunDir(Path(sys.argv[1])))"  # fmt: skip
"""a program whose argument is the run directory: one manager"""


def main() -> int:
    start_logging()
    run = RunDir(Path(sys.argv[1]))
    pause, futile = RESTART_DELAY_S, 0
    while not _surely_ended(run):
        began = time.monotonic()
        code = subprocess.call([sys.executable, "-P", "-c", MANAGER_PROGRAM, str(run.path)])
        if _surely_ended(run):
            break
        futile = futile + 1 if _nothing_runs(run) else 0
        if futile >= MAX_FUTILE_STARTS:
            _log.error("%d managers in a row ended before the run began; its nodes are given back", futile)
            return 1
        pause = RESTART_DELAY_S if time.monotonic() - began > STABLE_AFTER_S else pause
        _log.warning("the manager ended with %d before the run did; another one follows in %g s", code, pause)
        time.sleep(pause)
        pause = min(2 * pause, MAX_RESTART_DELAY_S)
    return 0


def _surely_ended(run: RunDir) -> bool:
    """Storage that is away, or a journal that cannot be read, is no reason to give the nodes back: the roles live."""
    try:
        return run_ended(run)
    except (JournalError, OSError) as error:
        _log.warning("%s", error)
        return False


def _nothing_runs(run: RunDir) -> bool:
    """Whether certainly no role runs on the nodes: the run was removed, or no manager has begun it. A journal that
    cannot be read may be that of a run whose roles live."""
    try:
        return run.removed() or awaits_manager(run, Follower(run).state())
    except (JournalError, OSError):
        return False


def awaits_manager(run: RunDir, state: State | None) -> bool:
    """Whether no manager has begun the run yet, or has taken the order that it goes on (``state``: of its journal).
    Raises OSError."""
    return state is None or (state.outcome is not None and read_pending(run) is not None)


def run_ended(run: RunDir) -> bool:
    """The journal has the run's end, and nobody has ordered that it goes on. Raises JournalError or OSError where that
    cannot be read."""
    state = Follower(run).state()
    return state is not None and state.outcome is not None and read_pending(run) is None


if __name__ == "__main__":
    sys.exit(main())
