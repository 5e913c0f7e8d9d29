"""Finds the processes of one lab on this machine, and the node of each.

No process is found by a broad name. A process belongs to a lab in each of these cases: its environment contains the
lab's mark (daemons, and processes of :meth:`rrl.tests.support.slurm.lab.SlurmLab.run_as_user`); it runs in one of the
lab's jobs; it is a Slurm command for the lab; it has a socket in the lab's spool folder (slurmstepd); or one of its
ancestors belongs to the lab.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from msgspec import Struct

MARK = "RRL_LAB"
"""Environment variable whose value is the lab's folder."""

DELAYER = "rrl.tests.support.slurm.delayed_link"
_COMMANDS = {"srun", "sbatch", "salloc", "scancel", "squeue", "sinfo", "scontrol", "sattach"}
_EXIT_TIMEOUT_S = 10.0


class Process(Struct, frozen=True):
    pid: int
    parent: int
    comm: str
    command: str
    environ: dict[str, str]


def running_processes() -> dict[int, Process]:
    """Return every running process, without zombies, that this user may inspect."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (process := running_process(int(entry))):
            found[process.pid] = process
    return found


def running_process(pid: int) -> Process | None:
    """Return the process with this pid; None if it has ended, is a zombie, or belongs to another user."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        comm, _, rest = stat.partition("(")[2].rpartition(")")
        state, parent = rest.split()[:2]
        if state in "ZX":
            return None
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        pairs = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except (OSError, ValueError):  # the process has ended, or this user may not inspect it
        return None
    return Process(pid, int(parent), comm, command, dict(p.split("=", 1) for p in pairs if "=" in p))


def of_lab(lab: Path) -> dict[int, Process]:
    """Return all processes of the lab, without the caller and its ancestors."""
    everybody = running_processes()
    conf = str(lab / "slurm.conf")
    spool = {pid for pids in _step_sockets(lab, everybody).values() for pid in pids}

    def belongs(process: Process) -> bool:
        environ = process.environ
        if environ.get(MARK) == str(lab) or environ.get("RRL_LAUNCH", "").startswith(f"{lab}/"):
            return True
        inside = "SLURM_JOB_ID" in environ or process.comm in _COMMANDS
        return process.pid in spool or (environ.get("SLURM_CONF") == conf and inside)

    return _without_caller(_families(everybody, belongs), everybody)


def of_node(lab: Path, node: str) -> dict[int, Process]:
    """Return the processes of one node: its slurmd, its slurmstepds and all processes that they started."""
    everybody = of_lab(lab)
    sockets = _step_sockets(lab, everybody)
    stepds = {pid for (name, _), pids in sockets.items() if name == node for pid in pids}

    def belongs(process: Process) -> bool:
        if process.comm == "slurmd":
            return process.command.split()[-2:] == ["-N", node]
        return process.pid in stepds or node in (process.environ.get("SLURMD_NODENAME"), _launched_on(process))

    return _families(everybody, belongs)


def _launched_on(process: Process) -> str | None:
    """Return the node in a role's launch file. The environment of a role does not contain Slurm's variables."""
    try:
        launch = json.loads(Path(process.environ["RRL_LAUNCH"]).read_bytes())
    except (KeyError, OSError, ValueError):
        return None
    return str(launch.get("node"))


def delaying(lab: Path, link: str) -> dict[int, Process]:
    """Return the processes that delay the link's frames, by pid."""
    return {pid: one for pid, one in of_lab(lab).items() if {DELAYER, link} <= set(one.command.split())}


def stepd(lab: Path, step: str) -> list[int]:
    """Return the pids of the slurmstepds of ``<job>.<step>`` on all nodes."""
    return sorted(
        pid for (_, name), pids in _step_sockets(lab, running_processes()).items() if name == step for pid in pids
    )


def _step_sockets(lab: Path, everybody: dict[int, Process]) -> dict[tuple[str, str], set[int]]:
    """Return the processes that have a slurmstepd's socket open, by the socket's (node, step).

    The path of the socket is ``spool/<node>/<node>_<job>.<step>``. A slurmstepd overwrites its environment with its
    title, so only its socket shows to which step it belongs.
    """
    inodes: dict[str, dict[str, tuple[str, str]]] = {}
    """Socket inodes by network namespace, because nodes may have their own namespaces."""
    holders: dict[tuple[str, str], set[int]] = {}
    for process in everybody.values():
        if process.comm == "slurmstepd":
            space = _link(f"/proc/{process.pid}/ns/net")
            if space not in inodes:
                inodes[space] = _spool_sockets(lab, process.pid)
            for inode in _open_files(process.pid):
                if inode in inodes[space]:
                    holders.setdefault(inodes[space][inode], set()).add(process.pid)
    return holders


def _spool_sockets(lab: Path, pid: int) -> dict[str, tuple[str, str]]:
    """Return (node, step) of each socket in the lab's spool folder, by inode; ``pid`` names the network namespace."""
    try:
        lines = Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]
    except OSError:
        return {}
    found = {}
    for fields in (line.split() for line in lines):
        if len(fields) > 7 and fields[7].startswith(f"{lab}/spool/"):
            path = Path(fields[7])
            found[f"socket:[{fields[6]}]"] = (path.parent.name, path.name.removeprefix(f"{path.parent.name}_"))
    return found


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _open_files(pid: int) -> list[str]:
    try:
        return [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        return []


def _families(everybody: dict[int, Process], belongs: Callable[[Process], bool]) -> dict[int, Process]:
    """Return the processes for which ``belongs`` is true, and all their descendants."""
    family: dict[int, bool] = {}

    def member(pid: int) -> bool:
        if pid not in family:
            process = everybody.get(pid)
            family[pid] = False  # a cycle is possible, if a pid is reused during the read
            family[pid] = process is not None and (belongs(process) or member(process.parent))
        return family[pid]

    return {pid: process for pid, process in everybody.items() if member(pid)}


def _without_caller(family: dict[int, Process], everybody: dict[int, Process]) -> dict[int, Process]:
    pid, ancestors = os.getpid(), set()
    while pid in everybody and pid not in ancestors:
        ancestors.add(pid)
        pid = everybody[pid].parent
    return {pid: process for pid, process in family.items() if pid not in ancestors}


def send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def kill_all(find: Callable[[], dict[int, Process]]) -> None:
    """Kill all processes that ``find`` returns, until it returns none.

    All of them are first stopped by SIGSTOP, so that no process can react to the end of another one. Raises
    TimeoutError with the processes that remain.
    """
    deadline = time.monotonic() + _EXIT_TIMEOUT_S
    while left := find():
        if time.monotonic() > deadline:
            raise TimeoutError(f"cannot be killed: {[process.command for process in left.values()]}")
        send(left, signal.SIGSTOP)
        send(left, signal.SIGKILL)
        time.sleep(0.05)
