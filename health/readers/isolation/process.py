"""Start a child process that ends with its parent and inherits no descriptors, and run a program with a deadline.

The module also describes how a process ended, or where it is blocked. It is imported only where a process is started,
because the import costs memory.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Collection, Sequence

from ....core.command_runner import run

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def set_parent_death_signal(parent: int, number: signal.Signals) -> None:
    """Have the kernel send signal ``number`` to this process when the thread that started this process ends.

    Exit at once if the parent has already ended.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def close_inherited_fds(keep: Collection[int]) -> None:
    """Close all inherited descriptors except stdout, stderr and ``keep``, and make stdin empty.

    A connection counts as closed only when all processes have closed it. If this process kept inherited descriptors,
    their connections would remain open until it ends.
    """
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    start = 3
    for fd in sorted(keep):
        os.closerange(start, fd)
        start = fd + 1
    os.closerange(start, os.sysconf("SC_OPEN_MAX"))


def describe_blocked_call(pid: int) -> str:
    """Return where a process in uninterruptible sleep is blocked; empty for any other process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
        if text[text.rindex(b")") + 2 :][:1] != b"D":
            return ""
        with open(f"/proc/{pid}/wchan") as file:
            call = file.read()
    except (OSError, ValueError):
        return ""
    return f", in the kernel (state D{', ' + call if call not in ('', '0') else ''})"


def describe_exit(status: int) -> str:
    """Return how a process ended; ``status`` is the status that waitpid returned."""
    code = os.waitstatus_to_exitcode(status)
    return f"with code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"


TERM_TIMEOUT_S = 3.0
"""Seconds from SIGTERM to SIGKILL. SIGKILL is not sent at once, because DCGM's server may wait for a client that was
killed in this way."""


def output(argv: Sequence[str], timeout_s: float) -> str:
    """Run a program and return its stdout and stderr, whatever its exit code.

    Raises:
        OSError: The program cannot be started, or has not ended after ``timeout_s`` s.
    """
    me = os.getpid()

    def end_with_reader() -> None:
        set_parent_death_signal(me, signal.SIGTERM)

    # preexec_fn is allowed here, because the process of a reader has one thread
    ended = run(argv, timeout_s, term_grace_s=TERM_TIMEOUT_S, preexec_fn=end_with_reader)
    return ended.out + ended.err
