"""Starts the accounting of a lab, with its own MariaDB and slurmdbd, and sets accounts and limits."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rrl.tests.support.slurm.lab import SlurmLab

ACCOUNT = "lab"
"""Default account of the lab's user, and of the user that runs its daemons."""
PACKAGES = ("mariadb-server-core", "slurmdbd")
_PROGRAMS = ("mariadbd", "slurmdbd", "sacctmgr")
_SYSTEM_TABLES = Path("/usr/share/mysql/mysql_system_tables.sql")


def missing(path: str) -> list[str]:
    """Return the programs that accounting needs and that are not on ``path``."""
    return [name for name in _PROGRAMS if shutil.which(name, path=path) is None]


def start(lab: SlurmLab) -> None:
    """Start the database and slurmdbd, and give a default account to the users that submit jobs.

    The database starts first. Both start before slurmctld, because slurmctld ends if slurmdbd does not answer.
    """
    folder = lab.dir / "db"
    (folder / "data").mkdir(parents=True)
    os.chmod(folder, 0o700)  # the database accepts every user who may open its socket
    me = pwd.getpwuid(os.geteuid()).pw_name
    database = (
        "mariadbd",
        "--no-defaults",
        "--skip-grant-tables",
        "--skip-networking",
        f"--user={me}",
        f"--datadir={folder}/data",
        "--innodb-log-file-size=4M",
        "--innodb-buffer-pool-size=16M",
    )
    with _SYSTEM_TABLES.open() as tables:  # slurmdbd needs a system table for its stored procedures
        made = "create database mysql;\nuse mysql;\n" + tables.read()
    subprocess.run(
        [*database, "--bootstrap"], env=lab.environment(), input=made, text=True, check=True, capture_output=True
    )
    lab.background(*database, f"--socket={_socket(lab)}", f"--pid-file={folder}/pid", log="mariadbd.log")
    lab.wait_for(lambda: _listens(_socket(lab)), "MariaDB does not listen")
    conf = lab.dir / "slurmdbd.conf"
    conf.touch(mode=0o600)
    conf.write_text(
        f"AuthType=auth/munge\nAuthInfo=socket={lab.dir}/munge/socket\nDbdHost=localhost\nDbdAddr=127.0.0.1\n"
        f"DbdPort={lab.settings.accounting_port}\nSlurmUser={me}\nLogFile={lab.dir}/log/slurmdbd.log\n"
        f"PidFile={lab.dir}/run/slurmdbd.pid\nStorageType=accounting_storage/mysql\nStorageHost=localhost\n"
        f"StorageUser=lab\nStorageLoc=lab\n"
        + (f"PluginDir={next(lab.root.glob('usr/lib/*/slurm-wlm'))}\n" if lab.root else "")
    )
    # localhost means a socket, and only the environment can set its path (26.05 tries TLS first, which takes 5 s more)
    lab.daemon("slurmdbd", env={"MYSQL_UNIX_PORT": str(_socket(lab))})
    lab.wait_for(lambda: _listens(lab.settings.accounting_port), "slurmdbd does not listen")
    lab.slurm("sacctmgr", "-i", "add", "cluster", "rrllab")
    add_account(lab, ACCOUNT)


def add_account(lab: SlurmLab, name: str, *users: str) -> None:
    """Add an account under which ``users`` (default: the lab's user) may submit."""
    lab.slurm("sacctmgr", "-i", "add", "account", name, "cluster=rrllab")
    for user in users or (lab.user,):
        lab.slurm("sacctmgr", "-i", "add", "user", user, f"account={name}", "cluster=rrllab")


def add_qos(lab: SlurmLab, name: str, **limits: int) -> None:
    """Add a quality of service; users may use it only after a :func:`limit` with ``qos="+name"``."""
    lab.slurm("sacctmgr", "-i", "add", "qos", name, *(f"{key}={value}" for key, value in limits.items()))


def limit(lab: SlurmLab, account: str = ACCOUNT, **limits: int | str) -> None:
    """Set limits of the lab's user in an account: ``MaxJobs=1``, ``MaxSubmitJobs=2``; -1 removes a limit."""
    lab.slurm(
        "sacctmgr",
        "-i",
        "modify",
        "user",
        "where",
        f"name={lab.user}",
        f"account={account}",
        "cluster=rrllab",
        "set",
        *(f"{key}={value}" for key, value in limits.items()),
    )


def _socket(lab: SlurmLab) -> Path:
    return lab.dir / "db/socket"


def _listens(where: Path | int) -> bool:
    local = isinstance(where, Path)
    with socket.socket(socket.AF_UNIX if local else socket.AF_INET) as probe:
        return probe.connect_ex(str(where) if local else ("127.0.0.1", where)) == 0
