"""Read Slurm and the file system for ``rrl doctor``.

The host itself is read by :mod:`.node_probe.host`, a compute node by :mod:`.node_visit`. The
readers run concurrently, each with a deadline. They change nothing, except that they create and remove one small file
in the folder of all runs.
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

from ...api.preflight.job_folder import runs_root_doubts
from ...cluster.slurm.commands import SlurmLimits, environment, reports_no_cluster
from ...cluster.slurm.limits import read_limits
from ...cluster.slurm.readers.command_reader import CommandReader
from ...cluster.slurm.readers.selection import choose_reader
from ...core.command_runner import CommandResult, run
from ...core.run_dir import runs_root
from ...manager.bootstrap import manager_job
from . import slurm_output as text
from .facts import Accounts, CgroupConf, Config, DoctorOptions, Facts, Nodes, Partitions, Reader, Slurm, Storage, Trials
from .node_probe.host import ReadError, Unavailable, UnavailableCause, filesystem, read_host, run_readers

SLURM_TIMEOUT_S = 10.0
"""Time limit (s) of a Slurm command, equal to the default of Slurm's MessageTimeout."""
_SLURM_FACTS_TIMEOUT_S = 3 * SLURM_TIMEOUT_S + 2
"""Time limit (s) of all readers of Slurm together: a first round of 20 s at most, and a second one of 11 s."""
_HOST_FACTS_TIMEOUT_S = 5.0
"""Time limit (s) of the readers of this host."""
MAX_PARTITIONS = 8
"""Maximum number of partitions that are tried for the manager's job."""
TRUE_SCRIPT = "#!/bin/sh\ntrue\n"
_NO_ANSWER_PATTERN = re.compile(
    r"timed out|contact slurm|Zero Bytes|Connection (refused|reset)|connect failure|(send|receive) failure|munge|"
    r"Protocol authentication",
    re.IGNORECASE,
)
"""Pattern of error messages that mean that slurmctld did not answer. Any other error counts as a refusal.

For example "Unspecified error", which a site's submit filter returns, is a refusal.
"""
_SMALL_JOB_OPTIONS = ("--cpus-per-task=1", "--mem=256M", "--time=10", "--no-requeue")
_MANAGER_JOB_OPTIONS = (
    "--no-requeue",
    "--nodes=1",
    "--ntasks=1",
    f"--cpus-per-task={manager_job.CPUS}",
    f"--mem={manager_job.MEM_GB}G",
    "--time=10",
)
"""The options with which :mod:`rrl.manager.bootstrap.manager_job` submits the manager's job."""


def read_facts(wanted: DoctorOptions) -> Facts:
    """Collect all facts except those that need a job on a node.

    Takes about 0.5 s if Slurm answers quickly or is not installed, at most 34 s.
    """
    results = run_readers(
        {
            "host": lambda: read_host(_HOST_FACTS_TIMEOUT_S),
            "storage": lambda: read_storage(runs_root()),
            "slurm": lambda: read_slurm(wanted),
        },
        _SLURM_FACTS_TIMEOUT_S + 2,
    )
    slurm: Slurm | Unavailable | str = results["slurm"]
    if isinstance(slurm, Unavailable):
        slurm = Slurm(**dict.fromkeys(Slurm.__struct_fields__, slurm))
    cluster, why = (None, slurm) if isinstance(slurm, str) else (slurm, "")
    return Facts(getpass.getuser(), os.geteuid(), wanted, results["host"], results["storage"], cluster, None, why)


# ── Slurm ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def run_slurm(*argv: str, stdin: str = "", timeout_s: float = SLURM_TIMEOUT_S) -> CommandResult:
    """Run a Slurm command, and return its result.

    The environment of the command lacks the variables that Slurm sets in a job, and the variables that change the
    defaults of Slurm's commands.

    Raises OSError if the command cannot be started, and TimeoutError if it takes longer than ``timeout_s``.
    """
    return run(argv, timeout_s, env=environment(os.environ), stdin_text=stdin)


def read_slurm(wanted: DoctorOptions) -> Slurm | str:
    """Return what Slurm reports, or a text that says why there is no cluster here."""
    if absent := [name for name in ("sbatch", "scontrol") if shutil.which(name) is None]:
        return f"no {' and no '.join(absent)} on PATH"
    user = getpass.getuser()
    first = run_readers(
        {
            "config": _config,
            "partitions": lambda: text.read_partitions(_output_of("scontrol", "show", "partition", "-o")),
            "nodes": lambda: text.read_nodes(_output_of("scontrol", "show", "node", "-o")),
            "accounts": lambda: _accounts(user),
            "limits": lambda: asyncio.run(read_limits(msgspec.structs.asdict(wanted))),
        },
        2 * SLURM_TIMEOUT_S,
    )
    if isinstance(first["config"], Unavailable) and first["config"].cause is UnavailableCause.NO_CLUSTER:
        return "Slurm's commands are installed here, but no cluster is configured"
    second = run_readers(
        {
            "trials": lambda: _trials(wanted, first["partitions"], first["nodes"]),
            "cgroups": lambda: _cgroups(first["config"]),
            "reader": lambda: asyncio.run(_reader()),
        },
        SLURM_TIMEOUT_S + 1,
    )
    return Slurm(**first, **second)


def _output_of(*argv: str) -> str:
    ended = run_slurm(*argv)
    if ended.code:
        cause = UnavailableCause.NO_CLUSTER if reports_no_cluster(ended.message) else UnavailableCause.OTHER
        raise ReadError(f"{argv[0]}: {ended.message or f'exit code {ended.code}'}", cause)
    return ended.out


def _config() -> Config:
    began = time.monotonic()
    values = text.read_config(_output_of("scontrol", "show", "config"))
    return Config(values, time.monotonic() - began)


def _accounts(user: str) -> Accounts:
    def show(*arguments: str) -> str:
        return _output_of("sacctmgr", "-n", "-P", "show", *arguments)

    return text.read_accounts(
        show("user", "where", f"name={user}", "format=AdminLevel,DefaultAccount"),
        show("assoc", "where", f"user={user}", "format=Account"),
    )


def _cgroups(config: Config | Unavailable) -> CgroupConf:
    """Return Slurm's cgroup settings, from ``scontrol show config`` or else from this host's cgroup.conf.

    ``scontrol`` prints the settings only if Slurm uses its cgroup plugins. Raises OSError if the file cannot be read.
    """
    values = {} if isinstance(config, Unavailable) else config.values
    if "ConstrainDevices" in values:
        return CgroupConf(values, "scontrol show config")
    folder = Path(values.get("SLURM_CONF") or "/etc/slurm/slurm.conf").parent
    return CgroupConf(text.read_pairs((folder / "cgroup.conf").read_text()), str(folder / "cgroup.conf"))


async def _reader() -> Reader:
    """Return the reader of Slurm (pyslurm or commands) that a manager would choose.

    Raises TimeoutError, Refused or Unanswered if Slurm cannot be read.
    """
    limits = SlurmLimits()
    async with asyncio.timeout(SLURM_TIMEOUT_S):  # choose_reader ends its child process if it is cancelled
        choice = await choose_reader("auto", CommandReader.with_limits(limits), limits)
    await choice.reader.close()
    return Reader(choice.reason, choice.rejected)


def would_take(options: Sequence[str], script: str) -> CommandResult | Unavailable:
    """Return the result of ``sbatch --test-only`` for this job, or Unavailable if Slurm does not answer.

    The job is not submitted.
    """
    try:
        ended = run_slurm("sbatch", "--test-only", *options, stdin=script, timeout_s=SLURM_TIMEOUT_S / 2)
    except OSError as error:  # including TimeoutError
        return Unavailable(str(error))
    return Unavailable(f"sbatch: {ended.message}") if ended.code and _NO_ANSWER_PATTERN.search(ended.err) else ended


def _trials(wanted: DoctorOptions, partitions: Partitions | Unavailable, nodes: Nodes | Unavailable) -> Trials:
    """Have Slurm test the smallest job of each form of a run, and the manager's job.

    The manager's job is tested in one partition after another, until one accepts it.
    """
    known = [] if isinstance(partitions, Unavailable) else [one for one in partitions.partitions if one.up]
    chosen = wanted.partition or next((one.name for one in known if one.default), "")
    usable = 2 if isinstance(nodes, Unavailable) or not chosen else len(nodes.usable(chosen))
    options = (*_SMALL_JOB_OPTIONS, "--ntasks-per-node=1", *wanted.sbatch_options())
    component = f"#SBATCH {' '.join((*options, '--nodes=1'))}\n"
    forms: dict[str, Callable[[], object]] = {
        "pool": partial(would_take, (*options, "--no-kill", f"--nodes={min(2, max(1, usable))}"), TRUE_SCRIPT),
        "replica": partial(would_take, (*options, "--nodes=1"), TRUE_SCRIPT),
        "hetjob": partial(would_take, (), f"#!/bin/sh\n{component}#SBATCH hetjob\n{component}true\n"),
        "manager": lambda: _manager(wanted, [chosen, *(one.name for one in known if one.name != chosen)]),
    }
    results = run_readers(forms, SLURM_TIMEOUT_S)
    manager = results.pop("manager")
    return Trials(results, {chosen: manager} if isinstance(manager, Unavailable) else manager)


def _manager(wanted: DoctorOptions, candidates: Sequence[str]) -> dict[str, CommandResult | Unavailable]:
    tried: dict[str, CommandResult | Unavailable] = {}
    for partition in candidates[:MAX_PARTITIONS]:
        options = wanted.sbatch_options(partition=partition) if partition else wanted.sbatch_options()
        answer = would_take((*_MANAGER_JOB_OPTIONS, *options), TRUE_SCRIPT)
        tried[partition] = answer
        if isinstance(answer, CommandResult) and answer.code == 0:
            break
    return tried


# ── the folder of all runs ─────────────────────────────────────────────────────────────────────────────────────────
def read_storage(root: Path) -> Storage:
    """Return the state of the folder of all runs. Raises OSError if its file system cannot be queried."""
    existing = root
    while not existing.is_dir() and existing != existing.parent:
        existing = existing.parent
    stats = os.statvfs(existing)
    free, inodes = stats.f_bavail * stats.f_frsize, stats.f_favail if stats.f_files else -1
    exclusive, fsync, trouble = False, 0.0, ""
    try:
        exclusive, fsync = _probe_write(existing / f".rrl-doctor-{secrets.token_hex(4)}")
    except OSError as error:
        trouble = error.strerror or str(error)
    kind, doubts = filesystem(existing), runs_root_doubts()
    return Storage(str(root), str(existing), kind, free, inodes, exclusive, fsync, trouble, doubts)


def _probe_write(path: Path) -> tuple[bool, float]:
    """Create a file as the journal does, write and sync it, and remove it.

    Returns (whether the file could be created only once, duration of the write with fsync in s).
    """
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
