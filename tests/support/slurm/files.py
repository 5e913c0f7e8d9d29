"""What a lab's folder holds before its daemons start: settings, keys, configuration."""

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
"""From then on slurmd reads cgroup.conf whatever the plugins are, and wants cgroups that are not here."""
_SHORT, _LONG = (2, 6), (4, 10)
"""MessageTimeout and SlurmdTimeout in s: a dead node is down after some 10 s and 18 s."""
_LONG_SINCE = (24, 0)
"""From then on slurmctld was seen to keep one of ten sruns waiting for more than 2 s on a busy machine."""
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What a later process must know of a running lab; kept in ``lab.json``."""

    nodes: int
    cpus: int
    memory: int
    gpus: int
    port: int
    user: str
    inactive_limit: int = 0
    slurmd_timeout: int = 0
    """s after which slurmctld takes a silent node from its jobs and sets it down; 0: as few as this version bears"""
    root: str | None = None
    """of another version of Slurm (:mod:`rrl.tests.support.slurm.root`); None: the installed one"""
    network: Network | None = None
    """of nodes with a network of their own; None: every node is this machine"""
    accounting: bool = False
    preempting: int = 0
    """s of grace that jobs of the partitions ``low`` and ``lowest`` have when ``main`` takes their nodes; 0: there is
    only ``main``"""
    owner: tuple[int, str] | None = None
    """pid and start time of the process whose end makes this lab abandoned; None: it stays until it is stopped"""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"n{i}" for i in range(1, self.nodes + 1))

    @property
    def accounting_port(self) -> int:
        """slurmdbd's: the one after slurmctld's and the nodes'."""
        return self.port + self.nodes + 1


def search_path(root: str | None) -> str:
    """PATH, with the programs of another version first."""
    return f"{programs_of(Path(root))}:{_PATH}" if root else _PATH


def version(settings: Settings) -> tuple[int, int]:
    """Of a lab's Slurm, such as (24, 11)."""
    year, month = version_of(Path(settings.root) if settings.root else None).split(".")
    return int(year), int(month)


def write(path: Path, settings: Settings) -> None:
    """Fill an empty folder."""
    os.chmod(path, 0o755)  # munged and the plain user must be able to enter
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
        settings=settings, dir=path, host=on_this_machine,
        timeouts=(message_timeout, settings.slurmd_timeout or slurmd_timeout),
        daemons=pwd.getpwuid(os.geteuid()).pw_name,
        controller=settings.network.controller if settings.network else "127.0.0.1",
        plugins=next(root.glob("usr/lib/*/slurm-wlm")) if root else None, nodes=_node_lines(settings, on_this_machine),
    )  # fmt: skip
    (path / "slurm.conf").write_text(text)
    if version(settings) >= _CGROUP_CONF_SINCE:
        (path / "cgroup.conf").write_text("CgroupPlugin=disabled\n")
    if settings.gpus:
        lines = [f"Name=gpu File={device}" for device in _gpu_devices(path, settings.gpus)]
        (path / "gres.conf").write_text("\n".join(["AutoDetect=off", *lines, ""]))


def _node_lines(settings: Settings, on_this_machine: str) -> list[str]:
    """A port each on this machine, or an address each on the lab's network."""
    network, first, count = settings.network, settings.port + 1, settings.nodes
    if network is None:
        names, ports = (f"n[1-{count}]", f"[{first}-{first + count - 1}]") if count > 1 else ("n1", str(first))
        return [f"NodeName={names} NodeHostname={on_this_machine} NodeAddr=127.0.0.1 Port={ports}"]
    return [f"NodeName={n} NodeHostname={n} NodeAddr={network.address(n)} Port={first}" for n in settings.names]


def _gpu_devices(path: Path, count: int) -> list[str]:
    """Slurm wants a character device per GPU: root makes copies of /dev/null, others take devices that exist."""
    if os.geteuid() != 0:
        return ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"][:count]
    names = [f"{path}/dev/gpu{i}" for i in range(count)]
    for name in names:
        os.mknod(name, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    return names
