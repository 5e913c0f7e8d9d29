"""What a child process does first, so that it ends with its parent and inherits no descriptors."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Collection

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def set_parent_death_signal(parent: int, number: signal.Signals) -> None:
    """Have the kernel send signal ``number`` to this process when the thread that started this process ends.

    Exit at once if the parent has already ended.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def end_soon_after(*numbers: signal.Signals) -> None:
    """Have the kernel end this process some seconds after one of these signals, even during a call that hangs.

    No handler of Python runs during such a call. The handler is the C function ``alarm``, which gets the number of the
    signal as its seconds: 3 after SIGQUIT, 15 after SIGTERM.
    """
    for number in numbers:
        _LIBC.signal(int(number), ctypes.cast(_LIBC.alarm, ctypes.c_void_p))


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
