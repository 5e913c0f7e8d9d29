"""``python -m rrl.roles.agent.pause_helper PID.START SHARE SECONDS [MARK]``: stops a process and continues it, for a
time.

A process of its own, so that it can hold its own agent too, and so that the target runs again whatever happens to the
agent: when the agent ends, the target is continued. What lasts without end has 0 seconds. With ``MARK`` it is the
target's process group that is held, and the file says by whom, for the case that this process is killed over it
(:func:`rrl.roles.agent.fault_injection.let_go`). Says one line before it stops anything and one once the target runs
again.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from signal import SIGCONT, SIGSTOP, Signals

from ...core.faults import ANSWER_SENDING_S
from ...core.processes import Process, open_pidfd, read_process
from ..launcher.process_group import kill_group

PERIOD_S = 0.1
"""s from one stop to the next of what is slowed: far below every beat, so that it looks slow and not dead"""


def main() -> int:
    name, share, seconds = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
    mark = Path(sys.argv[4]) if len(sys.argv) > 4 else None
    parent = os.getppid()
    target = read_process(int(name.partition(".")[0]))
    fd = open_pidfd(target) if target is not None and target.name == name else None
    if target is None or fd is None:
        sys.stderr.write(f"pid {name.partition('.')[0]} was gone\n")  # the agent reports it as the reason
        return 1
    watched = [fd]
    if target.pid != parent:  # who is held itself cannot be watched over it
        watched.append(os.pidfd_open(parent))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with _mark_file(mark):
        _print_line(f"SIGSTOP to {_describe(target, mark)}" + (f", {share:g} of the time left to it" if share else ""))
        if mark is None:
            time.sleep(ANSWER_SENDING_S)  # the agent passes this on before it is stopped
        try:
            _pause_until(
                target, mark is not None, share, time.monotonic() + seconds if seconds else float("inf"), watched
            )
        finally:
            alive = _signal(target, mark is not None, SIGCONT)
    with contextlib.suppress(OSError):  # the agent may be gone
        _print_line("SIGCONT: it runs again" if alive else "it has ended")
    return 0


def _pause_until(target: Process, group: bool, share: float, until: float, watched: list[int]) -> None:
    """Until it is time, or the target or whoever ordered this is gone."""
    poll = select.poll()
    for fd in watched:
        poll.register(fd, select.POLLIN)
    while (left := until - time.monotonic()) > 0:
        if not _signal(target, group, SIGSTOP):
            return
        stopped = min(left, (1 - share) * PERIOD_S) if share else left
        if poll.poll(None if stopped == float("inf") else stopped * 1000):
            return
        if share:
            _signal(target, group, SIGCONT)
            if poll.poll(share * PERIOD_S * 1000):
                return


def _signal(target: Process, group: bool, number: Signals) -> bool:
    now = read_process(target.pid)
    if now is None or now.started != target.started:
        return False
    if group:
        return kill_group(target.pid, number)
    try:
        os.kill(target.pid, number)
    except ProcessLookupError:
        return False
    return True


@contextlib.contextmanager
def _mark_file(mark: Path | None) -> Iterator[None]:
    if mark is None:
        yield
        return
    me = read_process(os.getpid())
    assert me is not None
    mark.write_text(me.name)
    try:
        yield
    finally:
        mark.unlink(missing_ok=True)


def _describe(target: Process, mark: Path | None) -> str:
    return f"pid {target.pid}" if mark is None else f"process group {target.pid}"


def _print_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")  # the agent reads these lines and reports them
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
