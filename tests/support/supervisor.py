"""Ends Slurm labs and local runs together with the process that started them, even if it is killed.

Labs and runs detach from the process that starts them, as in production. If a test or benchmark is killed, it cannot
end them itself. So each process that starts labs or runs has one supervisor, a child process in a session of its own.
The supervisor receives through a pipe what the process has started. It waits for the end of the process by a pidfd, so
that it also notices SIGKILL, and then ends the labs and runs that are left.

A benchmark or a pytest session that gets SIGTERM also unwinds (:func:`exit_on_sigterm`), which removes its temporary
folders and network namespaces.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec

from rrl.core.launch import LAUNCH_ENV
from rrl.tests.support.slurm.processes import Process, kill_all, running_processes

SIGTERM_EXIT_CODE = 128 + signal.SIGTERM
"""Exit code that a shell reports for a process that ended by SIGTERM."""
_LAB, _RUNS = "lab", "runs"
_READ_BYTES = 65_536
_supervisors: dict[int, subprocess.Popen[bytes]] = {}
"""Supervisors by the pid of the process that started them. A forked child inherits its parent's entry, but must start a
supervisor of its own."""


def end_lab_with_caller(path: Path) -> None:
    """Stop the lab in ``path`` when the calling process has ended, if the lab still runs then."""
    _register(_LAB, path)


def end_runs_with_caller(runs: Path) -> None:
    """Kill all processes of runs in the folder ``runs`` when the calling process has ended."""
    _register(_RUNS, runs)


@contextlib.contextmanager
def temporary_runs_folder(prefix: str = "rrl-bench-") -> Iterator[Path]:
    """Provide a temporary folder, and end the processes of all runs in it before it is removed.

    Otherwise the processes would still write into the folder while it is removed.
    """
    with tempfile.TemporaryDirectory(prefix=prefix) as folder:
        try:
            yield Path(folder)
        finally:
            kill_all(partial(_processes_in, folder))


def exit_on_sigterm(leave: Callable[[], NoReturn] = lambda: sys.exit(SIGTERM_EXIT_CODE)) -> None:
    """Make SIGTERM call ``leave`` in the main thread; ``leave`` raises an exception, so that context managers clean up.

    A forked child inherits the handler. There, it ends the process by the signal, because a child must not run its
    parent's context managers.
    """
    owner = os.getpid()

    def handle(number: int, _: object) -> None:
        if os.getpid() != owner:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        signal.signal(number, signal.SIG_IGN)  # a second SIGTERM must not interrupt the cleanup
        leave()

    signal.signal(signal.SIGTERM, handle)


def _register(kind: str, path: Path) -> None:
    pid = os.getpid()
    if pid not in _supervisors:
        _supervisors.clear()
        _supervisors[pid] = subprocess.Popen(
            [sys.executable, "-m", __name__, str(pid)],
            start_new_session=True,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    pipe = _supervisors[pid].stdin
    assert pipe is not None
    with contextlib.suppress(BrokenPipeError):  # it was killed; the next lab's start ends abandoned labs
        pipe.write(f"{kind} {path}\n".encode())


def main(pid: int) -> None:
    """Read the labs and runs from standard input, and end them when the process ``pid`` has ended."""
    lines = _lines_until_end(pid).decode().splitlines()
    for kind, _, path in (line.partition(" ") for line in dict.fromkeys(lines)):
        with contextlib.suppress(OSError, RuntimeError, subprocess.SubprocessError, msgspec.DecodeError):
            if kind == _LAB:
                _stop_lab(Path(path), pid)
            else:
                kill_all(partial(_processes_in, path))


def _lines_until_end(pid: int) -> bytes:
    """Return all bytes that the process wrote before its end."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return b"".join(iter(lambda: os.read(0, _READ_BYTES), b""))
    read, waiting = b"", [0, process]
    while process in waiting:
        ready, _, _ = select.select(waiting, [], [])
        if 0 in ready:
            chunk = os.read(0, _READ_BYTES)
            read += chunk
            if not chunk:
                waiting.remove(0)
        elif process in ready:  # the end of the process counts only when no line is left to read
            waiting.remove(process)
    return read


def _stop_lab(path: Path, owner: int) -> None:
    from rrl.tests.support.slurm.lab import SlurmLab  # it imports this module

    lab = SlurmLab.load(path)
    if lab.settings.owner is not None and lab.settings.owner[0] == owner:  # not a later lab in this folder
        lab.stop()


def _processes_in(runs: str) -> dict[int, Process]:
    """Return the processes of all runs in the folder, found by the run's mark in their environment or arguments."""

    def belongs(process: Process) -> bool:
        words = (process.environ.get(LAUNCH_ENV, ""), *process.command.split())
        return any(word.startswith(f"{runs}/") for word in words)

    return {pid: process for pid, process in running_processes().items() if pid != os.getpid() and belongs(process)}


if __name__ == "__main__":
    main(int(sys.argv[1]))
