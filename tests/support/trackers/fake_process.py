"""A stand-in for the process of a tracker, which writes a line at each start and then behaves as FAKE_TRACKER says."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path


def main() -> int:
    run, tracker, mode = Path(sys.argv[1]), sys.argv[2], sys.argv[4]
    with (run / "starts").open("a") as file:
        file.write(f"{tracker} {mode} {sorted(os.environ)}\n")
    if os.environ["FAKE_TRACKER"] == "fail":
        return 1
    if os.environ["FAKE_TRACKER"] == "hang":
        hang()
    if os.environ["FAKE_TRACKER"] == "ignore SIGTERM":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (run / "ready").touch()
    time.sleep(1000)
    return 0


def hang() -> None:
    """Hang in a call of a tracker until the deadline of the real process ends this process."""
    from rrl.manager.tracking import main as tracking

    tracking.POLL_S = 0.01
    deadline = tracking.Deadline()
    deadline.timeout_s = 0.05
    with deadline:
        time.sleep(1000)


if __name__ == "__main__":
    sys.exit(main())
