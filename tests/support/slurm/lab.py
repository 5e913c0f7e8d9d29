"""A real Slurm cluster of several nodes on this machine, for tests, demonstrations and benchmarks.

Every node is a real slurmd (``slurmd -N nX``, with a port of its own). The lab has its own slurmctld and munged, and
all of its files are in one folder. If root starts the lab, the daemons belong to root, and jobs are submitted by a
plain user without operator rights (:attr:`SlurmLab.user`). If another user starts the lab, daemons and jobs run as this
user.

In a lab of root, each node can have a network of its own, which can be cut and delayed (``isolated``). With
``accounting``, slurmdbd runs and limits are enforced. ``root`` selects another version of Slurm.

    python -m rrl.tests.support.slurm.lab install
    python -m rrl.tests.support.slurm.lab start --dir /tmp/lab --nodes 5
    python -m rrl.tests.support.slurm.lab crash n3 --dir /tmp/lab
    python -m rrl.tests.support.slurm.lab stop --dir /tmp/lab
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from rrl.tests.support.plain_user import cache_folders, call_as, plain_user, popen_as
from rrl.tests.support.slurm import accounting as accounting_of
from rrl.tests.support.slurm import fault_service, files, netns, processes
from rrl.tests.support.slurm.files import Settings, search_path
from rrl.tests.support.slurm.processes import MARK, Process
from rrl.tests.support.slurm.root import programs_of
from rrl.tests.support.supervisor import end_lab_with_caller
from rrl.transport.address import NETWORK_ENV

ROOT_ENV = "RRL_SLURM_ROOT"
"""Environment variable with the folder of the Slurm version that labs run by default. If it is unset, they run the
installed version."""
_PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "munged")
_PREFIX = "rrl-lab-"
_PORTS = range(20_000, 32_000)
"""Ports below Linux's ephemeral range, so that no outgoing connection uses one of them."""
_DEADLINE_S = 120.0
"""Deadline (s) of a wait. It is generous, because Slurm takes many times as long on a busy machine."""
_POLL_S = 0.2
"""Seconds between two queries to Slurm. Each query starts a command, which takes about 20 ms of CPU."""
COMPLETING_TIMEOUT_S = 200.0
"""Time (s) within which Slurm must complete jobs that have ended. If a slurmd has not answered a request to end a job
in time, slurmctld repeats it after 55 s (measured on 22.05), and the job stays COMPLETING until then. On a busy machine
several requests may get no answer."""


def missing(root: str | None = None, accounting: bool = False) -> list[str]:
    """Return the programs that a lab needs and that ``root`` (default: $RRL_SLURM_ROOT) and this machine lack."""
    path = search_path(root or os.environ.get(ROOT_ENV))
    absent = [name for name in _PROGRAMS if shutil.which(name, path=path) is None]
    return absent + (accounting_of.missing(path) if accounting else [])


class SlurmLab:
    """A running cluster, and a context manager that stops it.

    Each node claims to have ``cpus``, ``memory`` (MiB) and ``gpus``, independently of this machine.
    """

    def __init__(self, path: Path, settings: Settings) -> None:
        self.dir = path
        self.settings = settings
        self.user = settings.user
        self.network = settings.network
        self.root = Path(settings.root) if settings.root else None
        self.conf = path / "slurm.conf"
        self.user_home = path / "home"
        """Home of the plain user; all files of a run should be in it."""
        self.nodes = settings.names

    @classmethod
    def start(
        cls,
        path: Path | None = None,
        *,
        nodes: int = 5,
        cpus: int = 8,
        memory: int = 8000,
        gpus: int = 0,
        inactive_limit: int = 0,
        slurmd_timeout: int = 0,
        isolated: bool = False,
        accounting: bool = False,
        preempting: int = 0,
        requeue_delay: int | None = None,
        root: Path | None = None,
        stays: bool = False,
    ) -> SlurmLab:
        """End the remaining processes of a crashed lab in ``path``, start a lab, and wait until every node is idle.

        Args:
            path: Folder of the lab; None means a temporary folder with a short path.
            slurmd_timeout: Seconds after which a node that does not answer is down; 0 means as few as possible.
            isolated: Whether each node has its own network (root only).
            accounting: Whether slurmdbd runs, and associations, limits and QOS are enforced.
            preempting: Grace (s) of preempted jobs; with 0 there are no partitions with preemption.
            requeue_delay: Seconds for which a requeued job is held; None means the default of this version of Slurm.
            root: Folder of another version of Slurm (default: ``$RRL_SLURM_ROOT``).
            stays: Whether the lab outlives the calling process.

        Raises:
            RuntimeError: Something is missing or does not start; the text gives the reason.
        """
        version = str(root) if root else os.environ.get(ROOT_ENV) or None
        if absent := missing(version, accounting):
            how = "python -m rrl.tests.support.slurm.lab install" + (" --accounting" if accounting else "")
            raise RuntimeError(f"not installed: {', '.join(absent)}; run: {how}")
        if isolated and not netns.possible():
            raise RuntimeError("nodes with a network of their own need root, iproute2 and network namespaces")
        _sweep_abandoned()
        if path is not None and (path / "lab.json").exists():
            cls.load(path).stop()
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp")) if path is None else path.absolute()
        path.mkdir(exist_ok=True)
        holder = None if stays else (os.getpid(), _start_time(os.getpid()))
        port = _free_ports(nodes + 2)  # slurmctld, a slurmd each, slurmdbd
        network = netns.free_network(f"rl{port}") if isolated else None
        settings = Settings(
            nodes=nodes,
            cpus=cpus,
            memory=memory,
            gpus=gpus,
            port=port,
            user=plain_user(),
            owner=holder,
            root=version,
            inactive_limit=inactive_limit,
            slurmd_timeout=slurmd_timeout,
            network=network,
            accounting=accounting,
            preempting=preempting,
            requeue_delay=requeue_delay,
        )
        lab = cls(path, settings)
        try:
            files.write(path, settings)
            if holder is not None:
                end_lab_with_caller(path)
            lab._start_daemons()
        except BaseException:
            lab.stop()
            raise
        return lab

    @classmethod
    def load(cls, path: Path) -> SlurmLab:
        """Return a lab that another process started. Raises FileNotFoundError if there is none."""
        return cls(path.absolute(), msgspec.json.decode((path / "lab.json").read_bytes(), type=Settings))

    def __enter__(self) -> SlurmLab:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # ── start ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def _start_daemons(self) -> None:
        munge = self.dir / "munge"
        self.daemon(
            "munged",
            f"--key-file={munge}/key",
            f"--socket={munge}/socket",
            f"--pid-file={munge}/pid",
            f"--log-file={munge}/log",
            f"--seed-file={munge}/seed",
        )
        fault_service.serve(self)
        if self.network:
            netns.make(self.network, self.nodes)
        if self.settings.accounting:
            accounting_of.start(self)
        self.daemon("slurmctld", "-c")
        for node in self.nodes:
            self.up(node)
        self.wait_states(dict.fromkeys(self.nodes, "idle"))

    def daemon(self, *argv: str, env: Mapping[str, str] | None = None) -> None:
        """Run a command that starts a daemon and returns. Raises RuntimeError with the command's output."""
        done = subprocess.run(
            argv,
            env=self.environment() | dict(env or {}),
            cwd=self.dir,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(argv)} failed ({done.returncode}): {done.stderr.strip()}")

    def background(self, *argv: str, log: str, stdin: int = subprocess.DEVNULL) -> None:
        """Run a program that does not detach itself; ``log`` is its file in the lab's folder of logs."""
        with (self.dir / "log" / log).open("ab") as output:
            subprocess.run(
                ["setsid", "--fork", *argv],
                env=self.environment(),
                cwd=self.dir,
                check=True,
                stdin=stdin,
                stdout=output,
                stderr=output,
            )

    def environment(self) -> dict[str, str]:
        """Return the environment of all programs of this lab."""
        path = search_path(self.settings.root)
        own = {"PATH": path, "LC_ALL": "C.UTF-8", "SLURM_CONF": str(self.conf), MARK: str(self.dir)}
        return own | ({ROOT_ENV: self.settings.root} if self.settings.root else {})

    @property
    def version(self) -> tuple[int, int]:
        """Return the version of this lab's Slurm, such as (24, 11)."""
        return files.version(self.settings)

    # ── queries ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def slurm(self, *argv: str) -> str:
        """Run a Slurm command with the daemons' rights; return its standard output. Raises CalledProcessError."""
        return subprocess.run(
            argv, env=self.environment(), cwd=self.dir, check=True, capture_output=True, text=True, timeout=_DEADLINE_S
        ).stdout

    def states(self) -> dict[str, str]:
        """Return Slurm's short state of each node with its flags (``idle``, ``mix``, ``down*``)."""
        lines = self.slurm("sinfo", "-h", "-N", "-p", "main", "-o", "%N %t").splitlines()
        return dict(line.split() for line in lines)

    def wait_states(self, wanted: Mapping[str, str], timeout_s: float = _DEADLINE_S) -> None:
        """Wait until Slurm shows each node in its wanted state.

        Raises RuntimeError with the states that Slurm shows after the deadline.
        """
        deadline = time.monotonic() + timeout_s
        observed: dict[str, str] | str = {}
        while time.monotonic() < deadline:
            try:
                observed = states = self.states()
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                observed = str(error)
            else:
                if all(states.get(node) == state for node, state in wanted.items()):
                    return
            time.sleep(_POLL_S)
        raise RuntimeError(
            f"nodes did not become {dict(wanted)} within {timeout_s:.0f} s: {observed}; see {self.dir}/log"
        )

    def wait_job(self, job: str, wanted: str) -> None:
        """Wait until Slurm shows this state and reason of a job (``PENDING Resources``).

        Raises RuntimeError after the deadline.
        """
        argv = ("squeue", "-h", "-j", job, "-o", "%T %r")
        self.wait_for(lambda: self.slurm(*argv).strip() == wanted, f"job {job} is not {wanted}")

    def wait_for(self, condition: Callable[[], bool], failure_text: str) -> None:
        """Wait until the condition holds. Raises RuntimeError with ``failure_text`` after the deadline."""
        deadline = time.monotonic() + _DEADLINE_S
        while not condition():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{failure_text} within {_DEADLINE_S:.0f} s; see {self.dir}/log")
            time.sleep(_POLL_S)

    def processes(self) -> dict[int, Process]:
        """Return every process of this cluster: daemons, jobs, and commands that use it."""
        return processes.of_lab(self.dir)

    def jobs(self) -> list[str]:
        """Return ``<id> <name> <state>`` of every job that is pending, running or completing."""
        return self.slurm("squeue", "-h", "-o", "%i %j %T").splitlines()

    def wait_no_jobs(self) -> None:
        """Wait until no job is pending or running and Slurm has completed the last job.

        Raises RuntimeError if jobs are left.
        """
        for completing, timeout_s in ((True, _DEADLINE_S), (False, COMPLETING_TIMEOUT_S)):
            deadline = time.monotonic() + timeout_s
            while left := [job for job in self.jobs() if not (completing and job.endswith(" COMPLETING"))]:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"jobs are left after {timeout_s:.0f} s: {left}; see {self.dir}/log")
                time.sleep(_POLL_S)

    def clear(self, timeout_s: float = COMPLETING_TIMEOUT_S) -> None:
        """Cancel every job, start crashed daemons, and wait until every node is idle, so that tests start alike."""
        if ids := [job.split()[0] for job in self.jobs()]:
            self.slurm("scancel", *ids)
        for node in self.nodes:
            if not processes.of_node(self.dir, node):
                self.up(node)
        self.wait_states(dict.fromkeys(self.nodes, "idle"), timeout_s)

    # ── faults ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def crash(self, node: str) -> None:
        """Kill all processes of the node at once: slurmd, slurmstepds and all their tasks."""
        processes.kill_all(lambda: processes.of_node(self.dir, node))

    def up(self, node: str) -> None:
        """Start the slurmd of a node that crashed; do not wait until the node is up."""
        stepd = ("-d", str(programs_of(self.root) / "slurmstepd")) if self.root else ()
        argv = ("slurmd", *stepd, "-N", node)
        self.daemon(*(netns.inside(self.network, node, argv) if self.network else argv))

    def cut(self, node: str) -> None:
        """Take the link of an isolated node down: the node keeps running, but exchanges no messages."""
        netns.cut(self._isolated(), node)

    def heal(self, node: str) -> None:
        """Take the node's link up, without a delay."""
        self.delay(node, 0)
        netns.heal(self._isolated(), node)

    def delay(self, node: str, milliseconds: float) -> None:
        """Delay every packet to and from an isolated node; 0 ends the delay."""
        network = self._isolated()
        if processes.delaying(self.dir, network.link(node)):
            processes.kill_all(lambda: processes.delaying(self.dir, network.link(node)))
            netns.undivert(network, node)
        if milliseconds > 0:
            ends = netns.divert(network, node)
            self.background(sys.executable, "-m", processes.DELAYER, *ends, str(milliseconds), log="delays.log")

    def _isolated(self) -> netns.Network:
        if self.network is None:
            raise RuntimeError("the nodes of this lab have no network of their own")
        return self.network

    def kill_stepd(self, step: str) -> list[int]:
        """Send SIGKILL only to the slurmstepds of ``<job>.<step>``; return their pids."""
        pids = processes.stepd(self.dir, step)
        processes.send(pids, signal.SIGKILL)
        return pids

    def controller(self) -> int:
        """Return the pid of slurmctld."""
        return int((self.dir / "run/slurmctld.pid").read_text())

    @contextlib.contextmanager
    def controller_stopped(self) -> Iterator[None]:
        """Freeze slurmctld by SIGSTOP until the block ends; it accepts connections but does not answer."""
        pid = self.controller()
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    @contextlib.contextmanager
    def controller_down(self) -> Iterator[None]:
        """Stop slurmctld until the block ends, and start it again from its saved state.

        Jobs and steps continue.
        """
        pid = self.controller()
        os.kill(pid, signal.SIGTERM)
        self.wait_for(lambda: pid not in processes.running_processes(), f"slurmctld ({pid}) did not end")
        try:
            yield
        finally:
            self.daemon("slurmctld")
            self.wait_for(self._answers, "slurmctld does not answer")

    def _answers(self) -> bool:
        try:
            return bool(self.states())
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            return False

    def stop(self) -> None:
        """Kill all processes of this cluster and remove its folder.

        Raises TimeoutError if a process cannot be killed.
        """
        processes.kill_all(self.processes)
        if self.network:
            netns.remove(self.network)
        shutil.rmtree(self.dir)

    # ── the plain user ──────────────────────────────────────────────────────────────────────────────────────────────
    def user_env(self) -> dict[str, str]:
        """Return the environment of the plain user's login shell."""
        account = {"HOME": str(self.user_home), "USER": self.user, "LOGNAME": self.user} | cache_folders(self.user_home)
        network = self.network.cidr if self.network else "127.0.0.0/8"  # every node is this machine
        return (
            self.environment()
            | account
            | {NETWORK_ENV: network, fault_service.ENV: str(fault_service.socket_of(self.dir))}
        )

    def run_as_user(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout: float = 120.0,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as the plain user in the user's home; ``env`` is added to the user's environment."""
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
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: int | IO[Any] | None = subprocess.DEVNULL,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
    ) -> subprocess.Popen[str]:
        """Start a command as :meth:`run_as_user` does, but in a session of its own, and do not wait for its end."""
        return popen_as(
            self.user, argv, self.user_env() | dict(env or {}), cwd or self.user_home, stdin, stdout, stderr
        )

    def call_as_user(self, function: Callable[[], None], timeout_s: float = 120.0) -> None:
        """Run ``function`` as the plain user in a forked child. Raises AssertionError with the child's traceback."""
        call_as(self.user, function, self.user_env(), self.user_home, timeout_s)


def _free_ports(count: int) -> int:
    """Return the first of ``count`` consecutive ports without a listener.

    The choice is random, so that labs that start at the same time get different ports.
    """
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
    raise RuntimeError(f"no {count} free consecutive ports in {_PORTS}")


def _start_time(pid: int) -> str:
    """Return field 22 of /proc/<pid>/stat, or '' if the process has ended.

    The field distinguishes a process from a later process with its pid.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _sweep_abandoned() -> None:
    """Stop those temporary labs of this user whose creator was killed before it could stop them."""
    for path in Path("/tmp").glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            if path.stat().st_uid == os.geteuid() and not path.is_symlink():
                lab = SlurmLab.load(path)
                if (owner := lab.settings.owner) and _start_time(owner[0]) != owner[1]:
                    lab.stop()


if __name__ == "__main__":
    from rrl.tests.support.slurm.cli import main

    sys.exit(main())
