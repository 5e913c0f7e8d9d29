"""A real Slurm cluster of several nodes on this machine, for tests, demonstrations and benchmarks.

Every node is a real slurmd (``slurmd -N nX``, a port each) beside an own slurmctld and munged; all of it lies in one
folder and ends with it. Started by root, the daemons are root's and jobs are submitted by a plain user without any
operator right (:attr:`SlurmLab.user`); started by anybody else, everything runs as that user.

    python -m rrl.tests.lab.slurm install
    python -m rrl.tests.lab.slurm start --dir /tmp/lab --nodes 5
    python -m rrl.tests.lab.slurm crash n3 --dir /tmp/lab
    python -m rrl.tests.lab.slurm stop --dir /tmp/lab
"""

from __future__ import annotations

import contextlib
import os
import pwd
import random
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import jinja2
import msgspec

from rrl.tests.lab import slurm_processes as processes
from rrl.tests.lab.plain_user import call_as, plain_user, popen_as
from rrl.tests.lab.slurm_processes import MARK, Process
from rrl.transport.address import NETWORK_ENV

_PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "munged")
_PREFIX = "rrl-lab-"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PORTS = range(20_000, 32_000)
"""below Linux's ephemeral range, so that no outgoing connection takes one of them"""
_DEADLINE = 30.0


class Settings(msgspec.Struct, frozen=True):
    """What a later process must know of a running lab; kept in ``lab.json``."""

    nodes: int
    cpus: int
    memory: int
    gpus: int
    port: int
    user: str
    inactive_limit: int = 0
    keeper: tuple[int, str] | None = None
    """pid and start time of the process whose end makes this lab abandoned; None: it stays until it is stopped"""


def missing() -> list[str]:
    """Programs of Slurm and munge that are not installed here."""
    return [name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None]


class SlurmLab:
    """A running cluster; a context manager that stops it.

    ``cpus``, ``memory`` (MiB) and ``gpus`` are what each node claims to have, whatever this machine has.
    """

    def __init__(self, path: Path, settings: Settings) -> None:
        self.dir = path
        self.settings = settings
        self.user = settings.user
        self.conf = path / "slurm.conf"
        self.home = path / "home"
        """the plain user's home; everything that a run writes belongs under it"""
        self.nodes = tuple(f"n{i}" for i in range(1, settings.nodes + 1))

    @classmethod
    def start(
        cls, path: Path | None = None, *, nodes: int = 5, cpus: int = 8, memory: int = 8000, gpus: int = 0,
        inactive_limit: int = 0, stays: bool = False,
    ) -> SlurmLab:  # fmt: skip
        """Start a lab and wait until every node is idle; what a crashed lab left in ``path`` is ended first.

        Without ``path`` a short temporary folder is made. ``stays``: the lab outlives the calling process.
        Raises RuntimeError with the reason when Slurm is missing or does not come up.
        """
        if absent := missing():
            raise RuntimeError(f"not installed: {', '.join(absent)}; run: python -m rrl.tests.lab.slurm install")
        _sweep_abandoned()
        if path is not None and (path / "lab.json").exists():
            cls.load(path).stop()
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp")) if path is None else path.absolute()
        path.mkdir(exist_ok=True)
        keeper = None if stays else (os.getpid(), _start_time(os.getpid()))
        port = _free_ports(nodes + 1)
        lab = cls(path, Settings(nodes, cpus, memory, gpus, port, plain_user(), inactive_limit, keeper))
        try:
            lab._write()
            lab._start_daemons()
        except BaseException:
            lab.stop()
            raise
        return lab

    @classmethod
    def load(cls, path: Path) -> SlurmLab:
        """A lab that another process started. Raises FileNotFoundError when there is none."""
        return cls(path.absolute(), msgspec.json.decode((path / "lab.json").read_bytes(), type=Settings))

    def __enter__(self) -> SlurmLab:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # ── coming up ───────────────────────────────────────────────────────────────────────────────────────────────────
    def _write(self) -> None:
        os.chmod(self.dir, 0o755)  # munged and the plain user must be able to enter
        for name in ("munge", "state", "spool", "run", "log", "dev", "home"):
            (self.dir / name).mkdir(mode=0o755)
        (self.dir / "lab.json").write_bytes(msgspec.json.encode(self.settings))
        account = pwd.getpwnam(self.user)
        os.chown(self.home, account.pw_uid, account.pw_gid)
        os.chmod(self.home, 0o700)
        key = os.open(self.dir / "munge/key", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(key, secrets.token_bytes(128))
        os.close(key)
        count, first = self.settings.nodes, self.settings.port + 1
        text = jinja2.Template(
            Path(__file__).with_name("slurm.conf.j2").read_text(), undefined=jinja2.StrictUndefined
        ).render(
            **msgspec.structs.asdict(self.settings), dir=self.dir, host=socket.gethostname().partition(".")[0],
            daemons=pwd.getpwuid(os.geteuid()).pw_name, names=f"n[1-{count}]" if count > 1 else "n1",
            node_ports=f"[{first}-{first + count - 1}]" if count > 1 else first,
        )  # fmt: skip
        self.conf.write_text(text)
        if self.settings.gpus:
            lines = [f"Name=gpu File={device}" for device in self._gpu_devices()]
            (self.dir / "gres.conf").write_text("\n".join(["AutoDetect=off", *lines, ""]))

    def _gpu_devices(self) -> list[str]:
        """Slurm wants a character device per GPU: root makes copies of /dev/null, others take devices that exist."""
        if os.geteuid() != 0:
            return ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"][: self.settings.gpus]
        names = [f"{self.dir}/dev/gpu{i}" for i in range(self.settings.gpus)]
        for name in names:
            os.mknod(name, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        return names

    def _start_daemons(self) -> None:
        munge = self.dir / "munge"
        self._daemon(
            "munged", f"--key-file={munge}/key", f"--socket={munge}/socket", f"--pid-file={munge}/pid",
            f"--log-file={munge}/log", f"--seed-file={munge}/seed",
        )  # fmt: skip
        self._daemon("slurmctld", "-c")
        for node in self.nodes:
            self._daemon("slurmd", "-N", node)
        self.wait_states(dict.fromkeys(self.nodes, "idle"))

    def _daemon(self, *argv: str) -> None:
        done = subprocess.run(
            argv, env=self._env(), cwd=self.dir, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=_DEADLINE,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{' '.join(argv)} failed ({done.returncode}): {done.stderr.strip()}")

    def _env(self) -> dict[str, str]:
        return {"PATH": _PATH, "LC_ALL": "C.UTF-8", "SLURM_CONF": str(self.conf), MARK: str(self.dir)}

    # ── asking ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def slurm(self, *argv: str) -> str:
        """A Slurm command with the daemons' rights; its standard output. Raises CalledProcessError."""
        return subprocess.run(
            argv, env=self._env(), cwd=self.dir, check=True, capture_output=True, text=True, timeout=_DEADLINE
        ).stdout  # fmt: skip

    def states(self) -> dict[str, str]:
        """Slurm's short state of each node, flags included (``idle``, ``mix``, ``down*``)."""
        lines = self.slurm("sinfo", "-h", "-N", "-p", "main", "-o", "%N %t").splitlines()
        return dict(line.split() for line in lines)

    def wait_states(self, wanted: Mapping[str, str], within: float = _DEADLINE) -> None:
        """Wait until Slurm shows each node in its wanted state. Raises RuntimeError with what it shows instead."""
        deadline = time.monotonic() + within
        seen: dict[str, str] | str = {}
        while time.monotonic() < deadline:
            try:
                seen = states = self.states()
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                seen = str(error)
            else:
                if all(states.get(node) == state for node, state in wanted.items()):
                    return
            time.sleep(0.05)
        raise RuntimeError(f"nodes did not become {dict(wanted)} within {within:.0f} s: {seen}; see {self.dir}/log")

    def processes(self) -> dict[int, Process]:
        """Every process of this cluster: daemons, jobs, and commands that talk to it."""
        return processes.of_lab(self.dir)

    def jobs(self) -> list[str]:
        """``<id> <name> <state>`` of every job that is pending, running or completing."""
        return self.slurm("squeue", "-h", "-o", "%i %j %T").splitlines()

    def clear(self, within: float = _DEADLINE) -> None:
        """Cancel every job, start what crashed, wait until every node is idle: a test leaves nothing to the next."""
        if ids := [job.split()[0] for job in self.jobs()]:
            self.slurm("scancel", *ids)
        for node in self.nodes:
            if not processes.of_node(self.dir, node):
                self._daemon("slurmd", "-N", node)
        self.wait_states(dict.fromkeys(self.nodes, "idle"), within)

    # ── harm ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def crash(self, node: str) -> None:
        """The node is gone at once: slurmd, slurmstepds and all their tasks are killed."""
        processes.kill_all(lambda: processes.of_node(self.dir, node))

    def up(self, node: str) -> None:
        """Start the slurmd of a node that crashed; returns at once."""
        self._daemon("slurmd", "-N", node)

    def kill_stepd(self, step: str) -> list[int]:
        """SIGKILL the slurmstepds of ``<job>.<step>`` and nothing else; the pids that were hit."""
        pids = processes.stepd(self.dir, step)
        processes.send(pids, signal.SIGKILL)
        return pids

    def controller(self) -> int:
        """The pid of slurmctld."""
        return int((self.dir / "run/slurmctld.pid").read_text())

    @contextlib.contextmanager
    def deaf_controller(self) -> Iterator[None]:
        """slurmctld takes connections and answers none (SIGSTOP)."""
        pid = self.controller()
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def stop(self) -> None:
        """Kill everything of this cluster and remove its folder. Raises TimeoutError if something cannot be killed."""
        processes.kill_all(self.processes)
        shutil.rmtree(self.dir)

    # ── the plain user ──────────────────────────────────────────────────────────────────────────────────────────────
    def user_env(self) -> dict[str, str]:
        """The environment of the plain user's login shell, so to say."""
        account = {"HOME": str(self.home), "USER": self.user, "LOGNAME": self.user}
        return self._env() | account | {NETWORK_ENV: "127.0.0.0/8"}  # every node is this machine

    def run_as_user(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None,
        timeout: float = 120.0, check: bool = True,
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """Run a command as the plain user, in its home, with ``env`` on top of its own environment."""
        process = self.popen_as_user(argv, env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise
        done = subprocess.CompletedProcess(list(argv), process.returncode, out, err)
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(argv)} ended with {done.returncode}\n{out}\n{err}")
        return done

    def popen_as_user(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None,
        stdin: int | IO[Any] | None = subprocess.DEVNULL, stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
    ) -> subprocess.Popen[str]:  # fmt: skip
        """As :meth:`run_as_user`, without waiting; in a session of its own."""
        return popen_as(
            self.user, argv, self.user_env() | dict(env or {}), cwd or self.home, stdin, stdout, stderr
        )  # fmt: skip

    def call_as_user(self, function: Callable[[], None], within: float = 120.0) -> None:
        """Run ``function`` as the plain user in a forked child. Raises AssertionError with the child's traceback."""
        call_as(self.user, function, self.user_env(), self.home, within)


def _free_ports(count: int) -> int:
    """The first of ``count`` neighbouring ports that nobody listens on. Random, so that labs started at once differ."""
    for _ in range(200):
        first = random.randrange(_PORTS.start, _PORTS.stop - count)
        with contextlib.ExitStack() as held:
            try:
                for port in range(first, first + count):
                    probe = held.enter_context(socket.socket())
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(("", port))
            except OSError:
                continue
            return first
    raise RuntimeError(f"no {count} free neighbouring ports in {_PORTS}")


def _start_time(pid: int) -> str:
    """Field 22 of /proc/<pid>/stat: tells a process from another one that got its pid later. '' when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _sweep_abandoned() -> None:
    """Stop the temporary labs of this user whose keeper was killed before it could."""
    for path in Path("/tmp").glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            if path.stat().st_uid == os.geteuid() and not path.is_symlink():
                lab = SlurmLab.load(path)
                if (keeper := lab.settings.keeper) and _start_time(keeper[0]) != keeper[1]:
                    lab.stop()


if __name__ == "__main__":
    from rrl.tests.lab.slurm_cli import main

    sys.exit(main())
