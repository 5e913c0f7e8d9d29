"""Asks Slurm and the file system. Each reader has a deadline and runs beside the others; all I/O of ``rrl doctor`` that
is not about this host (:mod:`rrl.roles.node_probe.host`) or about a node (:mod:`rrl.cli.doctor.node_visit`) is here.
Nothing is changed but for one small file, made and removed in the folder of all runs.
"""

from __future__ import annotations

import asyncio
import errno
import getpass
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from ...core.run_dir import runs_root
from ...manager.bootstrap import manager_job
from ...manager.cluster.slurm.commands import NO_CLUSTER, environment
from ...manager.cluster.slurm.limits import look
from ...roles.node_probe.host import Ended, ReadError, Unread, UnreadCause, ask, command, filesystem, read_host
from . import slurm_output as text
from .facts import Accounts, CgroupConf, Config, Facts, Nodes, Partitions, Slurm, Storage, Trials, Wanted  # fmt: skip

WITHIN = 10.0
"""s for a command of Slurm's: as long as its own MessageTimeout is by default"""
_ALL = 3 * WITHIN + 2
"""s for Slurm's readers together: two rounds of commands"""
_HOST = 5.0
"""s for this host's readers"""
MOST_PARTITIONS = 8
"""that are tried for the manager's job"""
TRUE = "#!/bin/sh\ntrue\n"
_UNHEARD = re.compile(
    r"timed out|contact slurm|Zero Bytes|Connection (refused|reset)|connect failure|(send|receive) failure|munge|"
    r"Protocol authentication",
    re.IGNORECASE,
)
"""It was not slurmctld that said no. ("Unspecified error" is what a site's submit filter gives, and is a no.)"""
_SMALL = ("--cpus-per-task=1", "--mem=256M", "--time=10", "--no-requeue")
_MANAGER = (
    "--no-requeue", "--nodes=1", "--ntasks=1", f"--cpus-per-task={manager_job.CPUS}", f"--mem={manager_job.MEM_GB}G",
    "--time=10",
)  # fmt: skip
"""as :mod:`rrl.manager.bootstrap.manager_job` asks for it"""


def read_facts(wanted: Wanted) -> Facts:
    """Everything but for the visit of a node. Takes half a second where Slurm is quick or not there, 34 s at most."""
    told = ask(
        {
            "host": lambda: read_host(_HOST),
            "storage": lambda: read_storage(runs_root()),
            "slurm": lambda: read_slurm(wanted),
        },
        _ALL + 2,
    )
    slurm: Slurm | Unread | str = told["slurm"]
    if isinstance(slurm, Unread):
        slurm = Slurm(**dict.fromkeys(Slurm.__struct_fields__, slurm))
    there, why = (None, slurm) if isinstance(slurm, str) else (slurm, "")
    return Facts(getpass.getuser(), os.geteuid(), wanted, told["host"], told["storage"], there, None, why)


# ── Slurm ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def slurm(*argv: str, given: str = "", within: float = WITHIN) -> Ended:
    """A command of Slurm's, told nothing by a job or by habits that we are in. Raises OSError, TimeoutError."""
    return command(argv, within, environment(os.environ), given)


def read_slurm(wanted: Wanted) -> Slurm | str:
    """A text says why there is no cluster here."""
    if absent := [name for name in ("sbatch", "scontrol") if shutil.which(name) is None]:
        return f"no {' and no '.join(absent)} on PATH"
    user = getpass.getuser()
    first = ask(
        {
            "config": _config,
            "partitions": lambda: text.read_partitions(_said("scontrol", "show", "partition", "-o")),
            "nodes": lambda: text.read_nodes(_said("scontrol", "show", "node", "-o")),
            "accounts": lambda: _accounts(user),
            "limits": lambda: asyncio.run(look(msgspec.structs.asdict(wanted))),
        },
        2 * WITHIN,
    )
    if isinstance(first["config"], Unread) and first["config"].cause is UnreadCause.NO_CLUSTER:
        return "Slurm's commands are installed here, and no cluster is configured"
    second = ask(
        {
            "trials": lambda: _trials(wanted, first["partitions"], first["nodes"]),
            "cgroups": lambda: _cgroups(first["config"]),
        },
        WITHIN + 1,
    )
    return Slurm(**first, **second)


def _said(*argv: str) -> str:
    ended = slurm(*argv)
    if ended.code:
        cause = UnreadCause.NO_CLUSTER if NO_CLUSTER in ended.said else UnreadCause.OTHER
        raise ReadError(f"{argv[0]}: {ended.said or f'exit code {ended.code}'}", cause)
    return ended.out


def _config() -> Config:
    began = time.monotonic()
    values = text.read_config(_said("scontrol", "show", "config"))
    return Config(values, time.monotonic() - began)


def _accounts(user: str) -> Accounts:
    def show(*what: str) -> str:
        return _said("sacctmgr", "-n", "-P", "show", *what)

    return text.read_accounts(
        show("user", "where", f"name={user}", "format=AdminLevel,DefaultAccount"),
        show("assoc", "where", f"user={user}", "format=Account"),
    )


def _cgroups(config: Config | Unread) -> CgroupConf:
    """Slurm itself shows it where its cgroup plugins are in use; else the file, where this host has one."""
    values = {} if isinstance(config, Unread) else config.values
    if "ConstrainDevices" in values:
        return CgroupConf(values, "scontrol show config")
    folder = Path(values.get("SLURM_CONF") or "/etc/slurm/slurm.conf").parent
    return CgroupConf(text.read_pairs((folder / "cgroup.conf").read_text()), str(folder / "cgroup.conf"))


def would_take(options: Sequence[str], script: str) -> Ended | Unread:
    """``sbatch --test-only``: would Slurm take this job? Nothing is submitted."""
    try:
        ended = slurm("sbatch", "--test-only", *options, given=script, within=WITHIN / 2)
    except OSError as error:  # TimeoutError is one
        return Unread(str(error))
    return Unread(f"sbatch: {ended.said}") if ended.code and _UNHEARD.search(ended.err) else ended


def _trials(wanted: Wanted, partitions: Partitions | Unread, nodes: Nodes | Unread) -> Trials:
    """The smallest job of each form, and the manager's in the first partition that takes it."""
    known = [] if isinstance(partitions, Unread) else [one for one in partitions.partitions if one.up]
    chosen = wanted.partition or next((one.name for one in known if one.default), "")
    usable = 2 if isinstance(nodes, Unread) or not chosen else len(nodes.usable(chosen))
    each = (*_SMALL, "--ntasks-per-node=1", *wanted.options())
    component = f"#SBATCH {' '.join((*each, '--nodes=1'))}\n"
    forms: dict[str, Callable[[], object]] = {
        "pool": partial(would_take, (*each, "--no-kill", f"--nodes={min(2, max(1, usable))}"), TRUE),
        "replica": partial(would_take, (*each, "--nodes=1"), TRUE),
        "hetjob": partial(would_take, (), f"#!/bin/sh\n{component}#SBATCH hetjob\n{component}true\n"),
        "manager": lambda: _manager(wanted, [chosen, *(one.name for one in known if one.name != chosen)]),
    }
    told = ask(forms, WITHIN)
    manager = told.pop("manager")
    return Trials(told, {chosen: manager} if isinstance(manager, Unread) else manager)


def _manager(wanted: Wanted, candidates: Sequence[str]) -> dict[str, Ended | Unread]:
    tried: dict[str, Ended | Unread] = {}
    for partition in candidates[:MOST_PARTITIONS]:
        options = wanted.options(partition=partition) if partition else wanted.options()
        answer = would_take((*_MANAGER, *options), TRUE)
        tried[partition] = answer
        if isinstance(answer, Ended) and answer.code == 0:
            break
    return tried


# ── the folder of all runs ─────────────────────────────────────────────────────────────────────────────────────────
def read_storage(root: Path) -> Storage:
    """Raises OSError where not even its file system can be asked."""
    at = root
    while not at.is_dir() and at != at.parent:
        at = at.parent
    held = os.statvfs(at)
    free, inodes = held.f_bavail * held.f_frsize, held.f_favail if held.f_files else -1
    exclusive, fsync, trouble = False, 0.0, ""
    try:
        exclusive, fsync = _try(at / f".rrl-doctor-{secrets.token_hex(4)}")
    except OSError as error:
        trouble = error.strerror or str(error)
    return Storage(str(root), str(at), filesystem(at), free, inodes, exclusive, fsync, trouble)


def _try(path: Path) -> tuple[bool, float]:
    """Make a file as the journal does, and remove it: is a second maker refused, and how long (s) does fsync take?"""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        began = time.monotonic()
        os.write(fd, b"rrl doctor\n")
        os.fsync(fd)
        took = time.monotonic() - began
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except OSError as error:
            return error.errno == errno.EEXIST, took
        return False, took
    finally:
        os.close(fd)
        os.unlink(path)
