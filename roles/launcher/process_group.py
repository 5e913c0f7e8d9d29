"""Start the role's command in a process group of its own, and list the run's processes on a node.

A standby process imports packages and builds its model beside working roles. Therefore the session of the standby
process gets a low priority (the autogroup of sched(7)), which an unprivileged user may lower and restore. It uses GPUs
only after its promotion.

The policy SCHED_IDLE is not an alternative, for two reasons:

- A process can leave this policy only with CAP_SYS_NICE, or with an RLIMIT_NICE that few sites give.
- A process with this policy never becomes ready beside roles that use every core.

If each step has its own CPU cgroup, the priority has no effect, because the kernel then divides the cores among the
cgroups.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path

import msgspec

from ...core.launch import LAUNCH_ENV
from ...core.processes import STEP_ENV, Process, belongs_to_run, descendants, pids, read_process, sweep, with_marks
from .environment import GPUS_ENV, VISIBLE_DEVICES_VARIABLES

_log = logging.getLogger("rrl.launcher")

_PR_SET_PDEATHSIG = 1
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)
_YOUNG_PROCESS_S = 30.0
"""Age in seconds up to which a process is read again at each census, because it may still exec the first process of a
step."""
_CENSUSES_PER_FULL_SCAN = 10
"""Number of censuses after which all processes are read again, because a pid may have been reused."""


def adopt_orphans() -> None:
    """Make this process the parent of orphaned descendants (PR_SET_CHILD_SUBREAPER).

    :func:`end_descendants` then finds them even if they started a new session and cleared their environment.
    """
    if _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


class ProcessGroup:
    """A command in a new session, whose process group id is its pid. The kernel kills the command if this process ends.

    Must be started on the main thread, because PR_SET_PDEATHSIG refers to the thread that forked.
    """

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self.pid = popen.pid
        self._popen = popen
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = loop.create_future()
        """A future that is done when the command has ended. The command stays a zombie until :meth:`reap`, so that its
        group id is not reused."""
        self._pidfd = os.pidfd_open(popen.pid)
        loop.add_reader(self._pidfd, self._on_end)
        loop.add_signal_handler(signal.SIGCHLD, _reap_orphans, self.pid)

    @classmethod
    def start(
        cls, argv: Sequence[str], env: Mapping[str, str], cwd: str, out: int, pass_fds: Sequence[int] = ()
    ) -> ProcessGroup:
        """Start a command with empty stdin.

        Args:
            argv: the command.
            env: its complete environment.
            cwd: its working directory.
            out: descriptor for its stdout and stderr.
            pass_fds: further descriptors that the command inherits, with the same numbers.

        Raises:
            OSError: the command cannot be started.
        """
        return cls(
            subprocess.Popen(
                argv,
                env=env,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                pass_fds=pass_fds,
                # preexec_fn is safe here: it only calls prctl, and the only other threads are those of libzmq
                preexec_fn=_set_parent_death_signal(os.getpid()),
            )
        )

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Signal the whole group, which may be empty. Do not call this after :meth:`reap`."""
        kill_group(self.pid, number)

    def reap(self) -> tuple[int | None, int | None]:
        """Return (exit code, None) or (None, signal number). Call this only after ``ended`` is done."""
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)
        status = self._popen.wait()
        return (status, None) if status >= 0 else (None, -status)

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.ended.set_result(None)


def kill_group(group: int, number: signal.Signals = signal.SIGKILL) -> bool:
    """Signal a process group; return False if it does not exist. Raises PermissionError if the kernel forbids it."""
    try:
        os.killpg(group, number)
        return True
    except ProcessLookupError:
        return False


def end_descendants(me: Process, within: float) -> list[Process]:
    """Kill every process that this process ``me`` has started, in any session.

    Must be called after the command itself is reaped. Descendants are found both by their parent
    (:func:`adopt_orphans`) and by the mark in their environment, because each of these two ways misses some.

    Returns:
        The processes that did not end within ``within`` seconds.
    """

    def find() -> list[Process]:
        _reap_orphans(keep=0)
        below = {process.pid: process for process in descendants(me.pid)}
        for pid in pids():
            if pid not in below and (process := read_process(pid)) is not None and with_marks(process).step == me.name:
                below[pid] = process
        return list(below.values())

    return sweep(find, within)[1]


class Census:
    """Lists the live processes of one run on this machine, repeatedly and at little cost.

    A process is *old* if it was started more than :data:`_YOUNG_PROCESS_S` before a census. Most processes do not
    belong to the run. The pids of the old ones are stored, and these processes are not read again. The environment of
    an old process of the run is not read again either, unless its start time shows that the pid was reused. Every
    :data:`_CENSUSES_PER_FULL_SCAN` censuses, all processes are read again.
    """

    def __init__(self, steps: str) -> None:
        self._steps, self._me, self._user = steps, os.getpid(), os.geteuid()
        self._foreign: set[int] = set()
        """Pids of the old processes (see the class) that do not belong to the run."""
        self._old_own: dict[int, Process] = {}
        """The old processes (see the class) of the run, by pid."""
        self._count = 0

    def scan(self) -> list[Process]:
        """Return the processes of the run, with the marks in their environments (:mod:`rrl.core.processes`)."""
        old = (time.clock_gettime(time.CLOCK_BOOTTIME) - _YOUNG_PROCESS_S) * os.sysconf("SC_CLK_TCK")
        full = not self._count % _CENSUSES_PER_FULL_SCAN
        self._count += 1
        known, before = (set[int](), dict[int, Process]()) if full else (self._foreign, self._old_own)
        foreign, self._old_own = set[int](), {}
        own: list[Process] = []
        for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
            if pid in known:
                foreign.add(pid)
            elif pid != self._me and (process := self._process(pid, before.get(pid))) is not None:
                if belongs_to_run(process, self._steps):
                    own.append(process)
                    if process.started < old:
                        self._old_own[pid] = process
                elif process.started < old:
                    foreign.add(pid)
        self._foreign = foreign
        return own

    def _process(self, pid: int, before: Process | None) -> Process | None:
        """Return a process, with the marks in its environment if this user may read it; None if the process has ended.

        ``before`` is the process as an earlier census read it.
        """
        process = read_process(pid)
        if process is None:
            return None
        if before is not None and before.started == process.started:
            return msgspec.structs.replace(process, launch=before.launch, step=before.step, module=before.module)
        try:
            return with_marks(process) if os.stat(f"/proc/{pid}").st_uid == self._user else process
        except OSError:
            return None


def command_env(env: Mapping[str, str], launch_file: str, me: Process) -> dict[str, str]:
    """Return ``env`` with the marks, the variables by which rrl recognises the processes of a step.

    The marks are the first variables of the result. SPT_NOENV is added because setproctitle (which vLLM uses) would
    otherwise overwrite the environment in the process's memory, from which the marks are read.
    """
    marks = {LAUNCH_ENV: launch_file, STEP_ENV: me.name, "SPT_NOENV": "1"}
    return marks | dict(env) | marks


def _set_parent_death_signal(parent: int) -> Callable[[], None]:
    def in_child() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0)
        if os.getppid() != parent:  # the parent died before the line above
            os._exit(1)

    return in_child


def _reap_orphans(keep: int) -> None:
    """Reap the zombies among this process's children except the process ``keep``, whose pid must not be reused yet."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid == keep:
            return
        os.waitpid(ended.si_pid, 0)


NICE = 10
"""Nice value of a standby's session, the default of nice(1). Beside a busy loop the session gets 10 % of a core; with
the value 19 it would get 1.6 % (measured)."""
_DEFAULT_NICE = 0
_RETRY_INTERVAL_S = 0.03
"""Seconds between two tries to change the priority. A try may fail, because the kernel accepts only ten changes per
second from all users together."""
_RETRY_TIMEOUT_S = 1.0
"""Seconds for which a change of the priority is tried."""


def lower_priority(leader: int) -> None:
    """Lower the priority of the session that process ``leader`` leads, until :func:`restore_priority` is called."""
    _autogroup(leader, NICE)


def allow_inspection() -> None:
    """Let this user's processes, such as py-spy, read the memory of this process (prctl(2), PR_SET_PTRACER).

    With Yama's ptrace_scope at 1, as on Ubuntu, only ancestors may read the memory, and the agent is not an ancestor.
    Without Yama the call has no effect.
    """
    _LIBC.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)


def restore_priority() -> None:
    """Give the session that this process leads the default priority again."""
    _autogroup(os.getpid(), _DEFAULT_NICE)


def _autogroup(pid: int, nice: int) -> None:
    until = time.monotonic() + _RETRY_TIMEOUT_S
    while True:
        try:
            Path(f"/proc/{pid}/autogroup").write_text(str(nice))
            return
        except OSError as error:
            if error.errno != errno.EAGAIN:  # the kernel has no autogroups, or the process has ended
                return
            if time.monotonic() > until:
                _log.warning("cannot set the session of process %d to nice %d: %s", pid, nice, error.strerror)
                return
            time.sleep(_RETRY_INTERVAL_S)


def select_gpus(
    chosen: tuple[str, ...], current: tuple[str, ...], environ: MutableMapping[str, str] = os.environ
) -> tuple[str, ...]:
    """Restrict a promoted standby to its GPUs, by changing ``environ``.

    A standby sees all GPUs of its node, and must not have used any of them before.

    Args:
        chosen: the GPUs of the promotion, named as by :func:`rrl.roles.launcher.gpus.assigned_gpus`; empty if the
            process keeps its GPUs.
        current: the GPUs that the process has.
        environ: the environment to change.

    Returns:
        The GPUs that the process has now.
    """
    if not chosen or chosen == current:
        return current
    numbers = environ.get(GPUS_ENV, "").split(",")
    if not set(chosen) <= set(numbers):  # the names are UUIDs, which CUDA accepts as well
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(chosen)
        return chosen
    positions = [numbers.index(name) for name in chosen]
    for name in (GPUS_ENV, *VISIBLE_DEVICES_VARIABLES):
        listed = environ.get(name, "").split(",")
        if len(listed) == len(numbers):
            environ[name] = ",".join(listed[position] for position in positions)
    return chosen
