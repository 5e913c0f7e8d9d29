"""Writes the files of a lab's folder before its daemons start: settings, keys and configuration."""

from __future__ import annotations

import os
import pwd
import secrets
import socket
import stat
from pathlib import Path

import jinja2
import msgspec

from rrl.tests.support.slurm.netns import Network
from rrl.tests.support.slurm.root import programs_of, version_of

_CGROUP_CONF_SINCE = (23, 11)
"""Version from which slurmd reads cgroup.conf with any plugin, and requires cgroups that this machine lacks."""
_SHORT, _LONG = (2, 6), (4, 10)
"""Two pairs (MessageTimeout, SlurmdTimeout) in s. A dead node is down after about 10 s with the first pair, and after
about 18 s with the second one."""
_LONG_SINCE = (24, 0)
"""Version from which on ``_LONG`` is used, because its slurmctld let one of ten sruns wait for more than 2 s on a busy
machine."""
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a running lab that a later process needs; stored in ``lab.json``."""

    nodes: int
    cpus: int
    memory: int
    gpus: int
    port: int
    user: str
    inactive_limit: int = 0
    slurmd_timeout: int = 0
    """Seconds after which slurmctld sets a node down that does not answer, and ends its jobs; 0 means the smallest
    value that this version supports."""
    root: str | None = None
    """Folder of another version of Slurm (:mod:`rrl.tests.support.slurm.root`); None means the installed version."""
    network: Network | None = None
    """Network of nodes that have their own namespaces; None if all nodes use this machine's network."""
    accounting: bool = False
    preempting: int = 0
    """Grace (s) of jobs in the partitions ``low`` and ``lowest`` when ``main`` takes their nodes; with 0 only ``main``
    exists."""
    requeue_delay: int | None = None
    """Seconds for which slurmctld holds a requeued job; None means the default of this version (before 25.11 it cannot
    be set)."""
    owner: tuple[int, str] | None = None
    """Pid and start time of the process after whose end the lab counts as abandoned; None if the lab runs until it is
    stopped."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"n{i}" for i in range(1, self.nodes + 1))

    @property
    def accounting_port(self) -> int:
        """Return slurmdbd's port: the next port after the ports of slurmctld and the nodes."""
        return self.port + self.nodes + 1


def search_path(root: str | None) -> str:
    """Return PATH with the programs of another version first."""
    return f"{programs_of(Path(root))}:{_PATH}" if root else _PATH


def version(settings: Settings) -> tuple[int, int]:
    """Return the version of a lab's Slurm, such as (24, 11)."""
    year, month = version_of(Path(settings.root) if settings.root else None).split(".")
    return int(year), int(month)


def write(path: Path, settings: Settings) -> None:
    """Write the files of a lab into an empty folder."""
    os.chmod(path, 0o755)  # munged and the plain user must be able to enter the folder
    for name in ("munge", "state", "spool", "run", "log", "dev", "home"):
        (path / name).mkdir(mode=0o755)
    (path / "lab.json").write_bytes(msgspec.json.encode(settings))
    account = pwd.getpwnam(settings.user)
    os.chown(path / "home", account.pw_uid, account.pw_gid)
    os.chmod(path / "home", 0o700)
    key = os.open(path / "munge/key", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    os.write(key, secrets.token_bytes(128))
    os.close(key)
    _write_configuration(path, settings)


def _write_configuration(path: Path, settings: Settings) -> None:
    on_this_machine = socket.gethostname().partition(".")[0]
    root = Path(settings.root) if settings.root else None
    message_timeout, slurmd_timeout = _SHORT if version(settings) < _LONG_SINCE else _LONG
    text = jinja2.Template(
        Path(__file__).with_name("slurm.conf.j2").read_text(), undefined=jinja2.StrictUndefined
    ).render(
        settings=settings,
        dir=path,
        host=on_this_machine,
        timeouts=(message_timeout, settings.slurmd_timeout or slurmd_timeout),
        daemons=pwd.getpwuid(os.geteuid()).pw_name,
        controller=settings.network.controller if settings.network else "127.0.0.1",
        plugins=next(root.glob("usr/lib/*/slurm-wlm")) if root else None,
        nodes=_node_lines(settings, on_this_machine),
    )
    (path / "slurm.conf").write_text(text)
    if version(settings) >= _CGROUP_CONF_SINCE:
        (path / "cgroup.conf").write_text("CgroupPlugin=disabled\n")
    if settings.gpus:
        lines = [f"Name=gpu File={device}" for device in _gpu_devices(path, settings.gpus)]
        (path / "gres.conf").write_text("\n".join(["AutoDetect=off", *lines, ""]))


def _node_lines(settings: Settings, on_this_machine: str) -> list[str]:
    """Return the node lines of slurm.conf: a port for each node on this machine, or an address on the lab's network."""
    network, first, count = settings.network, settings.port + 1, settings.nodes
    if network is None:
        names, ports = (f"n[1-{count}]", f"[{first}-{first + count - 1}]") if count > 1 else ("n1", str(first))
        return [f"NodeName={names} NodeHostname={on_this_machine} NodeAddr=127.0.0.1 Port={ports}"]
    return [f"NodeName={n} NodeHostname={n} NodeAddr={network.address(n)} Port={first}" for n in settings.names]


def _gpu_devices(path: Path, count: int) -> list[str]:
    """Return one character device per GPU, as Slurm requires.

    They are copies of /dev/null if root starts the lab, else existing devices.
    """
    if os.geteuid() != 0:
        return ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"][:count]
    names = [f"{path}/dev/gpu{i}" for i in range(count)]
    for name in names:
        os.mknod(name, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    return names
