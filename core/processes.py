"""Find and end the processes of a run on a node, and raise the limit on open files.

Every process of a step carries two marks in its environment, which its children inherit: the path of the launch file,
and the name of the step's first process. A process is identified by its pid *and* its start time. It is signalled
through a pidfd that was opened before the start time was compared, so a process with a reused pid is never signalled.
Only processes of the current user are considered.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from msgspec import Struct

from .launch import LAUNCH_ENV

STEP_ENV = "RRL_STEP"
"""Environment variable of the processes that a step's first process started: the name of the first process
(``<pid>.<start time>``)."""
MAX_NOFILE = 1_048_576
"""Highest limit on open files that rrl sets (Linux's default fs.nr_open). Some containers allow 2**30. Children inherit
the limit, and with 2**30 a program that closes all descriptors when it starts takes minutes."""
STEP_MODULE = "rrl.roles.launcher.step"
AGENT_MODULE = "rrl.roles.node_agent.main"
_EXEC_TIMEOUT_S = 0.05
"""Seconds to wait for a process within execve. Until execve has ended, /proc shows neither environment nor arguments of
the process (observed: Popen returns earlier)."""
_SCAN_TIMEOUT_S = 2.0
"""Seconds that one scan of /proc may take. A scan usually takes some ms, but would never end if processes started
faster than the scan reads them."""
_KTHREADD = 2
"""Pid of the parent of kernel threads, which have neither environment nor arguments."""


class Process(Struct, frozen=True):
    """One running process.

    ``launch`` and ``step`` are the values of rrl's variables in its environment (:data:`LAUNCH_ENV`, :data:`STEP_ENV`),
    each empty if the process does not have the variable.
    """

    pid: int
    started: int
    """Start time in clock ticks after boot (proc(5), field 22)."""
    parent: int
    group: int
    launch: str = ""
    """Path of the launch file."""
    step: str = ""
    """Name of the first process of the step."""
    module: str = ""
    """:data:`STEP_MODULE` or :data:`AGENT_MODULE` for the first process of a step, else empty."""

    @property
    def name(self) -> str:
        """Return the name of this process, ``<pid>.<start time>``, which is unique while the node is up."""
        return f"{self.pid}.{self.started}"


def stat_fields(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat (proc(5)) from the third (the state) on. Raises OSError if PID has ended."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        text = file.read()
    return text[text.rindex(b")") + 2 :].split()  # the command's name may contain spaces and parentheses


def command_name(pid: int) -> str:
    """Return the name of a process's command, at most 15 characters; empty if the process has ended."""
    try:
        with open(f"/proc/{pid}/comm", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def read_process(pid: int) -> Process | None:
    """Return the running process ``pid``, without the values from its environment; None if it is gone or a zombie."""
    try:
        fields = stat_fields(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None
    if fields[0] in b"ZX":
        return None
    return Process(pid, started=int(fields[19]), parent=int(fields[1]), group=int(fields[2]))


def with_marks(process: Process) -> Process:
    """Return the process with rrl's variables from its environment; unchanged if the environment cannot be read."""
    deadline = time.monotonic() + _EXEC_TIMEOUT_S
    try:
        while True:
            with open(f"/proc/{process.pid}/environ", "rb") as file:
                environ = file.read()
            with open(f"/proc/{process.pid}/cmdline", "rb") as file:
                arguments = file.read()
            if environ or arguments or process.parent in (0, _KTHREADD):
                break
            if read_process(process.pid) is None or time.monotonic() > deadline:  # process is exiting, not in execve
                return process
            os.sched_yield()
    except OSError:  # the process is gone, or not dumpable: it changed its user
        return process
    module, launch_argument = _first_process([os.fsdecode(argument) for argument in arguments.split(b"\0")])
    return Process(
        process.pid,
        process.started,
        process.parent,
        process.group,
        launch=_variable(environ, LAUNCH_ENV) or launch_argument,
        step=_variable(environ, STEP_ENV),
        module=module,
    )


def pids() -> Iterator[int]:
    """Yield the pids of the current user's processes, except this process, in rising order.

    Processes that start during the scan are included.
    """
    own_pid, user = os.getpid(), os.geteuid()
    deadline = time.monotonic() + _SCAN_TIMEOUT_S
    with os.scandir("/proc") as entries:
        for entry in entries:
            if time.monotonic() > deadline:
                return
            if entry.name.isdigit() and (pid := int(entry.name)) != own_pid:
                try:
                    if entry.stat().st_uid == user:
                        yield pid
                except (FileNotFoundError, ProcessLookupError):
                    continue


def processes(steps: str) -> list[Process]:
    """Scan /proc, and return all running processes whose launch file is in the folder ``steps``, except this one."""
    candidates = (with_marks(process) for pid in pids() if (process := read_process(pid)) is not None)
    return [process for process in candidates if belongs_to_run(process, steps)]


def belongs_to_run(process: Process, steps: str) -> bool:
    """Return whether the launch file of a process is in the folder ``steps``."""
    return process.launch.startswith(steps.rstrip("/") + "/")


def descendants(pid: int) -> list[Process]:
    """Return all running descendants of ``pid`` that belong to the current user, children before grandchildren."""
    children: dict[int, list[Process]] = {}
    for other in pids():
        if (process := read_process(other)) is not None:
            children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    parents = [pid]
    while parents:
        generation = [child for parent in parents for child in children.pop(parent, ())]
        found += generation
        parents = [process.pid for process in generation]
    return [with_marks(process) for process in found]


def open_pidfd(process: Process) -> int | None:
    """Return a pidfd of exactly this process, or None if it is gone.

    The caller must close the pidfd, which becomes readable when the process ends.
    """
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    now = read_process(process.pid)
    if now is not None and now.started == process.started:
        return fd
    os.close(fd)
    return None


def send_signal(process: Process, number: signal.Signals) -> bool:
    """Signal exactly this process. Return False if it is gone.

    Raises:
        PermissionError: The process belongs to another user.
    """
    fd = open_pidfd(process)
    if fd is None:
        return False
    try:
        signal.pidfd_send_signal(fd, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)


def kill_and_wait(victims: Iterable[Process], timeout: float) -> None:
    """Kill the processes, and wait at most ``timeout`` s for the ends of those that may be killed."""
    deadline, poll = time.monotonic() + timeout, select.poll()
    fds: list[int] = []
    try:
        fds.extend(fd for victim in victims if (fd := open_pidfd(victim)) is not None)
        waiting = 0
        for fd in fds:
            with suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
                poll.register(fd, select.POLLIN)
                waiting += 1
        while waiting and (left := deadline - time.monotonic()) > 0:
            for fd, _ in poll.poll(left * 1000):
                poll.unregister(fd)
                waiting -= 1
    finally:
        for fd in fds:
            os.close(fd)


def sweep(find: Callable[[], Iterable[Process]], timeout: float) -> tuple[list[Process], list[Process]]:
    """Kill the processes that ``find`` returns, and repeat until it returns none.

    One call of ``find`` is not enough, since a process may fork during the search.

    Returns:
        The processes that were found, and those that still exist after ``timeout`` s.
    """
    deadline = time.monotonic() + timeout
    swept: dict[str, Process] = {}
    while True:
        victims = list(find())
        swept.update((victim.name, victim) for victim in victims)
        left = deadline - time.monotonic()
        if not victims or left <= 0:
            return list(swept.values()), victims
        kill_and_wait(victims, left)


def _first_process(argv: list[str]) -> tuple[str, str]:
    """Return (module, launch file) if a command line starts a step's first process, else two empty texts.

    Such a command line has the form ``python [-options] -m rrl.roles.launcher.step FILE``, or names the agent's module.
    The command line of an srun that starts a step ends with the same words, but does not have this form.
    """
    for index, argument in enumerate(argv[1:], 1):
        following = argv[index + 1 : index + 3]
        if argument == "-m" and len(following) == 2 and following[0] in (STEP_MODULE, AGENT_MODULE):
            return following[0], following[1]
        if not argument.startswith("-"):
            break
    return "", ""


def _variable(environ: bytes, name: str) -> str:
    key = name.encode() + b"="
    start = 0 if environ.startswith(key) else environ.find(b"\0" + key) + 1
    if start == 0 and not environ.startswith(key):
        return ""
    end = environ.find(b"\0", start)
    return os.fsdecode(environ[start + len(key) : end if end >= 0 else None])


def raise_nofile() -> None:
    """Raise the soft limit on open files, usually 1024, to the hard limit, but at most to :data:`MAX_NOFILE`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = MAX_NOFILE if hard == resource.RLIM_INFINITY else min(hard, MAX_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, enough), hard))
