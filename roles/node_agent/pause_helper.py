"""Stop a process for a limited time: ``python -m rrl.roles.node_agent.pause_helper PID.START SHARE SECONDS [MARK]``.

SHARE is the share of the time in which the target still runs (0 stops it completely). SECONDS is the duration of the
pause; 0 means forever. With MARK, the target's whole process group is stopped. The file MARK then names this helper
process, so that an agent can continue the target if the helper is killed
(:func:`rrl.roles.node_agent.fault_injection.resume_process`).

The helper is a separate process, so that it can also stop the agent that started it. When this agent ends, the helper
continues the target. The helper prints one line before it stops the target, and one line when the target runs again.
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
"""Seconds between two stops of a slowed target: far below every heartbeat interval, so that the target looks slow, not
dead."""


def main() -> int:
    """Pause the target as the arguments say; return the exit code, which is 1 if the target had already ended."""
    name, share, seconds = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
    mark = Path(sys.argv[4]) if len(sys.argv) > 4 else None
    parent = os.getppid()
    target = read_process(int(name.partition(".")[0]))
    fd = open_pidfd(target) if target is not None and target.name == name else None
    if target is None or fd is None:
        sys.stderr.write(f"process {name.partition('.')[0]} has ended\n")  # the agent reports this line as the reason
        return 1
    watched = [fd]
    if target.pid != parent:  # the parent is the agent; an agent that is the target is watched already
        watched.append(os.pidfd_open(parent))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with _mark_file(mark):
        _print_line(
            f"SIGSTOP to {_describe(target, mark)}"
            + (f"; the target runs {100 * share:g} % of the time" if share else "")
        )
        if mark is None:
            time.sleep(ANSWER_SENDING_S)  # the agent is the target, and must report the line before it is stopped
        try:
            _pause_until(
                target, mark is not None, share, time.monotonic() + seconds if seconds else float("inf"), watched
            )
        finally:
            alive = _signal(target, mark is not None, SIGCONT)
    with contextlib.suppress(OSError):  # the agent may be gone
        _print_line("SIGCONT: the target runs again" if alive else "the target has ended")
    return 0


def _pause_until(target: Process, group: bool, share: float, until: float, watched: list[int]) -> None:
    """Keep the target stopped, except for ``share`` of the time, until ``until`` (s, time.monotonic).

    With ``share`` = 0 the target is stopped throughout, else SIGSTOP and SIGCONT alternate with the period
    ``PERIOD_S``. With ``group``, the signals go to the target's process group. Return early when a process in
    ``watched`` (pidfds) ends or the target cannot be signalled. The caller continues the target afterwards.
    """
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
    helper = read_process(os.getpid())
    assert helper is not None
    mark.write_text(helper.name)
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
