"""A program run with a deadline: asked to end before it is made to. Imported only where one is run: it costs memory."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence

from rrl.health.readers.lifeline import dies_with

TERM_WITHIN = 3.0
"""s from SIGTERM to SIGKILL: a client of DCGM that is killed at once may leave its server waiting for it"""


class TimedOut(Exception):
    """It did not end within its time; it was ended, or it hangs in the kernel and was left."""


def output(argv: Sequence[str], within: float) -> str:
    """What it wrote to stdout and stderr, whatever its exit code. Raises OSError and TimedOut."""
    me = os.getpid()
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        preexec_fn=lambda: dies_with(me, signal.SIGTERM),  # safe: a reader's process has one thread
    )  # fmt: skip
    try:
        written, _ = process.communicate(timeout=within)
        return written.decode(errors="replace")
    except subprocess.TimeoutExpired:
        raise TimedOut(f"{os.path.basename(argv[0])} did not answer within {within:g} s") from None
    finally:
        if process.poll() is None:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    for number, within in ((signal.SIGTERM, TERM_WITHIN), (signal.SIGKILL, 1.0)):
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=within)
            return
    if process.stdout is not None:
        process.stdout.close()
