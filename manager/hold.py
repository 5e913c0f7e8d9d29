"""``python -P -m rrl.manager.hold RUN_DIR``: what the batch script of a pool runs where the manager lives in the pool.

It holds the nodes, and keeps one manager: should that die, another one goes on. It ends with the run, and the pool with
it. When the pool's first node is lost this is lost, too, and no manager comes by itself any more: the roles on the
other nodes go on, and ``rrl manage RUN`` on the login node takes over.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from rrl.manager.journal import Follower, JournalError
from rrl.manager.resuming import pending
from rrl.spec.rundir import RunDir

PAUSE = 1.0
"""s before a manager that died is followed by another one; doubles with each that lived shorter than ``SETTLED``"""
LONGEST = 60.0
SETTLED = 60.0
"""s"""
GONE = 5
"""times in a row that a manager ended and there was no run directory: somebody removed it for good"""
MANAGE = "import sys; from pathlib import Path; from rrl.spec.rundir import RunDir; " \
          "from rrl.manager.submit import run_here; run_here(RunDir(Path(sys.argv[1])))"  # fmt: skip
"""a program whose argument is the run directory: one manager"""


def main() -> int:
    run = RunDir(Path(sys.argv[1]))
    pause, gone = PAUSE, 0
    while not _surely_ended(run) and gone < GONE:
        began = time.monotonic()
        code = subprocess.call([sys.executable, "-P", "-c", MANAGE, str(run.path)])
        if _surely_ended(run):
            break
        gone = gone + 1 if run.removed() else 0
        pause = PAUSE if time.monotonic() - began > SETTLED else pause
        print(f"rrl: the manager ended with {code} before the run did; another one follows in {pause:g} s", flush=True)
        time.sleep(pause)
        pause = min(2 * pause, LONGEST)
    return 0


def _surely_ended(run: RunDir) -> bool:
    """Storage that is away, or a journal that cannot be read, is no reason to give the nodes back: the roles live."""
    try:
        return ended(run)
    except (JournalError, OSError) as error:
        print(f"rrl: {error}", flush=True)
        return False


def ended(run: RunDir) -> bool:
    """The journal has the run's end, and nobody has ordered that it goes on. Raises JournalError or OSError where that
    cannot be read."""
    state = Follower(run).state()
    return state is not None and state.outcome is not None and pending(run) is None


if __name__ == "__main__":
    sys.exit(main())
