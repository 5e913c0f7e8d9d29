"""Find the processes of a run on a node, end exactly those, and raise the limit on open files.

Every process of a step carries two marks in its environment and hands them down to what it starts: its launch file, and
the first process that started it. A process is named by its pid *and* its start time, and is signalled through a pidfd
that was opened before the start time was compared, so that a reused pid is never hit. Only processes of our own user
are considered. Shared by the agent and the step (roles) and by the local cluster (manager).
"""

from __future__ import annotations

import os
import resource
import select
import signal
import time
from collections.abc import Callable, Iterable, Iterator

from msgspec import Struct

from .launch import LAUNCH_ENV

STEP_ENV = "RRL_STEP"
"""Mark of what a step's first process started: ``<pid>.<start time>`` of that first process."""
STEP_MODULE = "rrl.roles.launcher.step"
AGENT_MODULE = "rrl.roles.agent.main"
_EXEC_TIMEOUT_S = 0.05
"""s; within execve a process shows neither environment nor words (seen: Popen returns before they are there)"""
_SCAN_TIMEOUT_S = 2.0
"""s; a look takes some ms, but never ends where processes are born faster than we read them"""
_KTHREADD = 2
"""parent of kernel threads, which never have either"""


class Process(Struct, frozen=True):
    """One living process. ``launch`` and ``step`` are empty where the process carries no such mark."""

    pid: int
    started: int
    """clock ticks after boot (proc(5), field 22)"""
    parent: int
    group: int
    launch: str = ""
    """path of its launch file"""
    step: str = ""
    """name of the first process that started it"""
    module: str = ""
    """:data:`STEP_MODULE` or :data:`AGENT_MODULE` for a first process"""

    @property
    def name(self) -> str:
        """Unique while the node is up; what :data:`STEP_ENV` holds."""
        return f"{self.pid}.{self.started}"


def read_process(pid: int) -> Process | None:
    """The living process ``pid`` without its marks; None when it is gone or only a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(b")") + 2 :].split()  # the command's name may hold blanks and brackets
    if fields[0] in b"ZX":
        return None
    return Process(pid, started=int(fields[19]), parent=int(fields[1]), group=int(fields[2]))


def with_marks(process: Process) -> Process:
    """The same process with the marks that it carries; without any when it may not be read, or is gone."""
    deadline = time.monotonic() + _EXEC_TIMEOUT_S
    try:
        while True:
            with open(f"/proc/{process.pid}/environ", "rb") as file:
                environ = file.read()
            with open(f"/proc/{process.pid}/cmdline", "rb") as file:
                arguments = file.read()
            if environ or arguments or process.parent in (0, _KTHREADD):
                break
            if read_process(process.pid) is None or time.monotonic() > deadline:  # it was not beginning but ending
                return process
            os.sched_yield()
    except OSError:  # gone, or not dumpable (it changed its user)
        return process
    module, given = _first_process([os.fsdecode(argument) for argument in arguments.split(b"\0")])
    return Process(
        process.pid, process.started, process.parent, process.group,
        launch=_variable(environ, LAUNCH_ENV) or given, step=_variable(environ, STEP_ENV), module=module,
    )  # fmt: skip


def pids() -> Iterator[int]:
    """Pids of our own user, this process excepted. In rising order, and with those born meanwhile."""
    me, user = os.getpid(), os.geteuid()
    deadline = time.monotonic() + _SCAN_TIMEOUT_S
    with os.scandir("/proc") as entries:
        for entry in entries:
            if time.monotonic() > deadline:
                return
            if entry.name.isdigit() and (pid := int(entry.name)) != me:
                try:
                    if entry.stat().st_uid == user:
                        yield pid
                except (FileNotFoundError, ProcessLookupError):
                    continue


def processes(steps: str) -> list[Process]:
    """All living processes whose launch file lies in the folder ``steps``, this one excepted. Reads all of /proc."""
    candidates = (with_marks(process) for pid in pids() if (process := read_process(pid)) is not None)
    return [process for process in candidates if belongs_to_run(process, steps)]


def belongs_to_run(process: Process, steps: str) -> bool:
    return process.launch.startswith(steps.rstrip("/") + "/")


def descendants(pid: int) -> list[Process]:
    """All living processes of our user below ``pid``, nearest first, with their marks."""
    children: dict[int, list[Process]] = {}
    for other in pids():
        if (process := read_process(other)) is not None:
            children.setdefault(process.parent, []).append(process)
    below: list[Process] = []
    edge = [pid]
    while edge:
        edge_processes = [child for parent in edge for child in children.pop(parent, ())]
        below += edge_processes
        edge = [process.pid for process in edge_processes]
    return [with_marks(process) for process in below]


def open_pidfd(process: Process) -> int | None:
    """A pidfd of exactly this process (the caller closes it), or None when it is gone. Readable once it has ended."""
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
    """Signal exactly this process; False when it is gone. Raises PermissionError."""
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


def kill_and_wait(victims: Iterable[Process], timeout: float) -> list[Process]:
    """SIGKILL, and wait until they have ended, ``within`` s at most. Returns those that are still there."""
    fds: dict[int, Process] = {}
    refused: list[Process] = []
    poll = select.poll()
    try:
        for victim in victims:
            fd = open_pidfd(victim)
            if fd is None:
                continue
            fds[fd] = victim
            try:
                signal.pidfd_send_signal(fd, signal.SIGKILL)
                poll.register(fd, select.POLLIN)
            except ProcessLookupError:
                os.close(fd)
                del fds[fd]
            except PermissionError:
                refused.append(fds.pop(fd))
                os.close(fd)
        deadline = time.monotonic() + timeout
        while fds and (left := deadline - time.monotonic()) > 0:
            for fd, _ in poll.poll(left * 1000):
                poll.unregister(fd)
                os.close(fd)
                del fds[fd]
        return [*refused, *fds.values()]
    finally:
        for fd in fds:
            os.close(fd)


def sweep(find: Callable[[], Iterable[Process]], timeout: float) -> tuple[list[Process], list[Process]]:
    """End what ``find`` finds, again and again until it finds nothing (a victim may fork while we look).

    Returns those that were found, and those that are still there after ``within`` s.
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
    """``python [-options] -m rrl.roles.launcher.step FILE`` → module and file. A srun with those words at its end is
    none."""
    for place, argument in enumerate(argv[1:], 1):
        if (
            argument == "-m"
            and len(rest := argv[place + 1 : place + 3]) == 2
            and rest[0] in (STEP_MODULE, AGENT_MODULE)
        ):
            return rest[0], rest[1]
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


MAX_NOFILE = 1_048_576
"""Most open files that are asked for: Linux's fs.nr_open. Where containers allow 2**30, programs that go through all
descriptors at their start take minutes, and children inherit the limit."""


def raise_nofile() -> None:
    """The soft limit, usually 1024, goes up to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = MAX_NOFILE if hard == resource.RLIM_INFINITY else min(hard, MAX_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, enough), hard))
