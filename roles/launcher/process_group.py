"""Start the role's command in a process group of its own, and count the run's processes on a node.

:mod:`rrl.core.processes` recognises and ends processes; this module adds what the step and the agent need. A warm
standby imports and builds beside roles that work: its session gets a low priority (the autogroup of sched(7)), which
its owner may set and take back, and it takes its GPUs only when it is promoted. SCHED_IDLE is no alternative: leaving
it needs CAP_SYS_NICE or an RLIMIT_NICE that few sites give, and a process under it never becomes ready beside roles
that use every core. Where each step has a CPU cgroup of its own, that cgroup shares the cores, and the priority changes
nothing.
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
"""s; a process of this age or less is read again at each census: a wrapper may yet exec into a first process"""
_CENSUSES_PER_FULL_SCAN = 10
"""censuses; then the old strangers are read again too, for a pid that was reused between two censuses"""


def adopt_orphans() -> None:
    """Whatever leaves its session below us becomes our child, not init's: :func:`end_descendants` then finds it even if
    it has wiped its environment."""
    if _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


class ProcessGroup:
    """A command in a new session, and so a process group whose id is its pid. It dies with us, even by SIGKILL.

    Start it on the main thread: PR_SET_PDEATHSIG watches the thread that forked.
    """

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self.pid = popen.pid
        self._popen = popen
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = loop.create_future()
        """Done as soon as the command has ended. It stays a zombie until :meth:`reap`: its group id stays ours."""
        self._pidfd = os.pidfd_open(popen.pid)
        loop.add_reader(self._pidfd, self._on_end)
        loop.add_signal_handler(signal.SIGCHLD, _reap_orphans, self.pid)

    @classmethod
    def start(
        cls, argv: Sequence[str], env: Mapping[str, str], cwd: str, out: int, pass_fds: Sequence[int] = ()
    ) -> ProcessGroup:
        """Stdout and stderr go to the descriptor ``out``, stdin is empty, the descriptors ``keep`` are inherited under
        their numbers. Raises OSError when it cannot be started."""
        return cls(subprocess.Popen(
            argv, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
            pass_fds=pass_fds,
            preexec_fn=_set_parent_death_signal(os.getpid()),  # safe: one prctl, and the only other threads are libzmq's
        ))  # fmt: skip

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Signal the whole group; it may be empty. Never after :meth:`reap`."""
        kill_group(self.pid, number)

    def reap(self) -> tuple[int | None, int | None]:
        """Exit code or signal. Only after ``ended``."""
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)
        status = self._popen.wait()
        return (status, None) if status >= 0 else (None, -status)

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.ended.set_result(None)


def kill_group(group: int, number: signal.Signals = signal.SIGKILL) -> bool:
    """Signal a process group. False when there is none (left). Raises PermissionError."""
    try:
        os.killpg(group, number)
        return True
    except ProcessLookupError:
        return False


def end_descendants(me: Process, within: float) -> list[Process]:
    """End everything that process ``me`` (this one) has started, in whatever session; the command itself is reaped.

    Returns what could not be ended within ``within`` s. There are two ways to find them, for each has its gap:
    children that were handed back to us (:func:`adopt_orphans`), and the mark.
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
    """The living processes of one run on this machine, taken again and again at little cost.

    Strangers, other users' processes among them, are by far the most: once they are old they are remembered, and not
    looked at. Of ours that are old it is looked only whether they live.
    """

    def __init__(self, steps: str) -> None:
        self._steps, self._me, self._user = steps, os.getpid(), os.geteuid()
        self._strangers: set[int] = set()
        self._old_own: dict[int, Process] = {}
        """old ones"""
        self._count = 0

    def scan(self) -> list[Process]:
        old = (time.clock_gettime(time.CLOCK_BOOTTIME) - _YOUNG_PROCESS_S) * os.sysconf("SC_CLK_TCK")
        full = not self._count % _CENSUSES_PER_FULL_SCAN
        self._count += 1
        known, before = (set[int](), dict[int, Process]()) if full else (self._strangers, self._old_own)
        strangers, self._old_own = set[int](), {}
        found: list[Process] = []
        for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
            if pid in known:
                strangers.add(pid)
            elif pid != self._me and (process := self._process(pid, before.get(pid))) is not None:
                if belongs_to_run(process, self._steps):
                    found.append(process)
                    if process.started < old:
                        self._old_own[pid] = process
                elif process.started < old:
                    strangers.add(pid)
        self._strangers = strangers
        return found

    def _process(self, pid: int, before: Process | None) -> Process | None:
        """With its marks, if it is ours to read; None when it is gone. ``before``: as it was read last."""
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
    """The environment of a role's command. The marks come first; SPT_NOENV keeps setproctitle (vLLM uses it) from
    writing titles over the environment that sweeps read."""
    ours = {LAUNCH_ENV: launch_file, STEP_ENV: me.name, "SPT_NOENV": "1"}
    return ours | dict(env) | ours


def _set_parent_death_signal(parent: int) -> Callable[[], None]:
    def in_child() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return in_child


def _reap_orphans(keep: int) -> None:
    """Take leave of zombies that were handed to us, but not of the command: its pid must stay its own."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid == keep:
            return
        os.waitpid(ended.si_pid, 0)


NICE = 10
"""what nice(1) adds; a tenth of a core beside a busy loop, 1.6 % with 19 (measured)"""
_DEFAULT_NICE = 0
_RETRY_INTERVAL_S = 0.03
"""s after which the kernel, which takes ten such changes a second from all of a machine's users, is asked again"""
_RETRY_TIMEOUT_S = 1.0


def lower_priority(leader: int) -> None:
    """The session that this process leads runs when others leave it room, until it steps up."""
    _autogroup(leader, NICE)


def allow_inspection() -> None:
    """Let processes of our own user read the memory of this one (prctl(2), PR_SET_PTRACER), as py-spy does.

    Where Yama's ptrace_scope is 1, as on Ubuntu, only ancestors could, and the agent is none. Where there is no Yama
    this does nothing.
    """
    _LIBC.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)


def restore_priority() -> None:
    """This process's session is as any other again."""
    _autogroup(os.getpid(), _DEFAULT_NICE)


def _autogroup(pid: int, nice: int) -> None:
    until = time.monotonic() + _RETRY_TIMEOUT_S
    while True:
        try:
            Path(f"/proc/{pid}/autogroup").write_text(str(nice))
            return
        except OSError as error:
            if error.errno != errno.EAGAIN:  # a kernel without, or a process that has ended
                return
            if time.monotonic() > until:
                _log.warning("cannot set the session of process %d to nice %d", pid, nice)
                return
            time.sleep(_RETRY_INTERVAL_S)


def select_gpus(
    chosen: tuple[str, ...], current: tuple[str, ...], environ: MutableMapping[str, str] = os.environ
) -> tuple[str, ...]:
    """A trainer's shadow sees all GPUs of its node; ``chosen`` of them, as :func:`rrl.roles.launcher.gpus.held_gpus`
    names them, are what it works with from now on. Nothing of this process may have touched a GPU before. A rollout's
    has its own from its start, works with them already, and keeps them. Returns what it holds now."""
    if not chosen or chosen == current:
        return current
    given = environ.get(GPUS_ENV, "").split(",")
    if not set(chosen) <= set(given):  # UUIDs, which CUDA takes as they are
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(chosen)
        return chosen
    places = [given.index(name) for name in chosen]
    for name in (GPUS_ENV, *VISIBLE_DEVICES_VARIABLES):
        listed = environ.get(name, "").split(",")
        if len(listed) == len(given):
            environ[name] = ",".join(listed[place] for place in places)
    return chosen
