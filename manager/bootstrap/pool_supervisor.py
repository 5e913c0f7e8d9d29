"""Keep one manager running on a pool's first node: ``python -P -m rrl.manager.bootstrap.pool_supervisor RUN_DIR``.

The batch script of a pool runs this program if the job asks for the manager in the pool ([manager] where = "pool").
This program holds the nodes and restarts a manager that dies. It ends with the run, and the pool ends with this
program. It also ends once ``MAX_FUTILE_STARTS`` managers in a row have ended before they began the run, for example in
a broken environment. If the pool's first node fails, this program is lost too, and no manager starts by itself. The
roles on the other nodes keep running, and a user has to run ``rrl manage RUN`` on the login node.
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
"""Seconds before a manager that died is restarted. Doubles with each manager that ran for less than
``STABLE_AFTER_S``."""
MAX_RESTART_DELAY_S = 60.0
"""Upper limit of the restart delay in seconds."""
STABLE_AFTER_S = 60.0
"""Seconds after which a manager's start counts as successful, so the restart delay is ``RESTART_DELAY_S`` again."""
MAX_FUTILE_STARTS = 5
"""Number of managers in a row that must fail before the nodes are released. A manager counts only if certainly no role
ran on the nodes when it ended, because the run directory was removed or no manager had begun the run. The delays
between the managers add up to 15 s, so that a short disturbance does not release the nodes."""
LOGGER = "rrl.pool_supervisor"
"""Logger name of this process. Its log lines go to the same file as the output of the managers that it starts."""
_log = logging.getLogger(LOGGER)
MANAGER_PROGRAM = (
    "import sys; from pathlib import Path; from rrl.core.run_dir import RunDir; "
    "from rrl.manager.bootstrap.start import run_manager; run_manager(RunDir(Path(sys.argv[1])))"
)
"""Python program that runs one manager; its argument is the run directory."""


def main() -> int:
    """Run managers until the run has ended; return the exit code."""
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
            _log.error("%d managers in a row ended before the run began; the pool's nodes are released", futile)
            return 1
        pause = RESTART_DELAY_S if time.monotonic() - began > STABLE_AFTER_S else pause
        _log.warning("the manager exited with code %d before the run ended; the next one starts in %g s", code, pause)
        time.sleep(pause)
        pause = min(2 * pause, MAX_RESTART_DELAY_S)
    return 0


def _surely_ended(run: RunDir) -> bool:
    """Return whether the run has certainly ended.

    Returns False if the storage is unavailable or the journal cannot be read: roles may be running, so the nodes must
    not be released.
    """
    try:
        return run_ended(run)
    except (JournalError, OSError) as error:
        _log.warning("%s", error)
        return False


def _nothing_runs(run: RunDir) -> bool:
    """Return whether certainly no role runs on the nodes: the run was removed, or no manager has begun it.

    Returns False if the journal cannot be read, because roles may be running.
    """
    try:
        return run.removed() or awaits_manager(run, Follower(run).state())
    except (JournalError, OSError):
        return False


def awaits_manager(run: RunDir, state: State | None) -> bool:
    """Return whether the run waits for a manager, either to begin it or to carry out a request to resume it.

    ``state`` is the state of the run's journal; None if there is no journal. Raises OSError.
    """
    return state is None or (state.outcome is not None and read_pending(run) is not None)


def run_ended(run: RunDir) -> bool:
    """Return whether the journal records the run's end and no request to resume it is pending.

    Raises:
        JournalError, OSError: the journal or the request cannot be read.
    """
    state = Follower(run).state()
    return state is not None and state.outcome is not None and read_pending(run) is None


if __name__ == "__main__":
    sys.exit(main())
