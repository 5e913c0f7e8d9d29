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
from ...cluster.base import AllocationRequest
from ...cluster.slurm import site
from ...cluster.slurm.commands import NoCluster, SlurmLimits
from ...cluster.slurm.readers.command_reader import CommandReader
from ...cluster.slurm.readers.selection import choose_reader
from ...cluster.slurm.requests import Partition, batch_script, eligible
from ...core.command_runner import CommandResult
from ...core.run_dir import runs_root
from ...core.types import Resources
from ...manager.bootstrap import manager_job
from .facts import Config, DoctorOptions, Facts, Reader, Slurm, Storage, Trials
from .node_probe.host import Unavailable, filesystem, read_host, run_readers

SLURM_TIMEOUT_S = 10.0
"""Time limit (s) of a Slurm command, equal to the default of Slurm's MessageTimeout."""
_SLURM_FACTS_TIMEOUT_S = 3 * SLURM_TIMEOUT_S + 2
"""Time limit (s) of all readers of Slurm together: a first round of 20 s at most, and a second one of 11 s."""
_HOST_FACTS_TIMEOUT_S = 5.0
"""Time limit (s) of the readers of this host."""
MAX_PARTITIONS = 8
"""Maximum number of partitions that are tried for the manager's job."""
TRUE_SCRIPT = "#!/bin/sh\ntrue\n"
_SMALL_NODE = Resources(cpus=1, mem=256 * 2**20)
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
def read_slurm(wanted: DoctorOptions) -> Slurm | str:
    """Return what Slurm reports, or a text that says why there is no cluster here."""
    if absent := [name for name in ("sbatch", "scontrol") if shutil.which(name) is None]:
        return f"no {' and no '.join(absent)} on PATH"
    first = run_readers(
        {
            "config": _config,
            "partitions": lambda: asyncio.run(site.query_partitions()),
            "accounts": lambda: asyncio.run(site.query_accounts()),
            "limits": lambda: asyncio.run(site.read_limits(wanted.given())),
        },
        2 * SLURM_TIMEOUT_S,
    )
    if first["config"] is None:
        return "Slurm's commands are installed here, but no cluster is configured"
    second = run_readers(
        {
            "trials": lambda: _trials(wanted, first["partitions"]),
            "cgroups": lambda: _cgroups(first["config"]),
            "reader": lambda: asyncio.run(_reader()),
        },
        SLURM_TIMEOUT_S + 1,
    )
    return Slurm(**first, **second)


def _config() -> Config | None:
    """Return Slurm's configuration; None if no cluster is configured here. Raises Refused or Unanswered."""
    began = time.monotonic()
    try:
        values = asyncio.run(site.query_config())
    except NoCluster:
        return None
    return Config(values, seconds=time.monotonic() - began)


def _cgroups(config: Config | Unavailable) -> Config:
    """Return Slurm's cgroup settings, from ``scontrol show config`` or else from this host's cgroup.conf.

    ``scontrol`` prints the settings only if Slurm uses its cgroup plugins. Raises OSError if the file cannot be read.
    """
    values = {} if isinstance(config, Unavailable) else config.values
    if isinstance(config, Config) and "ConstrainDevices" in values:
        return config
    file = Path(values.get("SLURM_CONF") or "/etc/slurm/slurm.conf").with_name("cgroup.conf")
    return Config(read_pairs(file.read_text()), str(file))


def read_pairs(text: str) -> dict[str, str]:
    """Parse one of Slurm's configuration files, such as cgroup.conf: ``Name=value`` lines, with comments."""
    return dict(re.findall(r"^\s*(\w+)\s*=\s*([^\s#]*)", text, re.MULTILINE))


async def _reader() -> Reader:
    """Return the reader of Slurm (pyslurm or commands) that a manager would choose.

    Raises TimeoutError, Refused or Unanswered if Slurm cannot be read.
    """
    limits = SlurmLimits()
    async with asyncio.timeout(SLURM_TIMEOUT_S):  # choose_reader ends its child process if it is cancelled
        choice = await choose_reader("auto", CommandReader.with_limits(limits), limits)
    await choice.reader.close()
    return Reader(choice.reason, choice.rejected)


def _trials(wanted: DoctorOptions, partitions: Sequence[Partition] | Unavailable) -> Trials:
    """Have Slurm test the smallest job of each form of a run, and the manager's job.

    The manager's job is tested in one partition after another, until one accepts it.
    """
    known = [] if isinstance(partitions, Unavailable) else [one for one in partitions if one.up]
    chosen = eligible(known, wanted.given())
    usable = chosen[0].fitting(_SMALL_NODE, usable=True) if chosen else 2
    first = wanted.partition or (chosen[0].name if chosen else "")
    node = AllocationRequest("doctor", 1, _SMALL_NODE, walltime=600.0, sbatch=wanted.given())
    requests = {
        "pool": msgspec.structs.replace(node, count=min(2, max(1, usable))),
        "replica": node,
        "hetjob": msgspec.structs.replace(node, further_components=(node,)),
    }
    readers: dict[str, Callable[[], object]] = {
        form: partial(try_job, batch_script(request)) for form, request in requests.items()
    }
    readers["manager"] = lambda: _manager(wanted, [first, *(one.name for one in known if one.name != first)])
    results = run_readers(readers, SLURM_TIMEOUT_S)
    manager = results.pop("manager")
    return Trials(results, {first: manager} if isinstance(manager, Unavailable) else manager)


def _manager(wanted: DoctorOptions, candidates: Sequence[str]) -> dict[str, CommandResult | Unavailable]:
    tried: dict[str, CommandResult | Unavailable] = {}
    for partition in candidates[:MAX_PARTITIONS]:
        options = (*_MANAGER_JOB_OPTIONS, *wanted.arguments(partition=partition or wanted.partition))
        tried |= run_readers({partition: partial(try_job, TRUE_SCRIPT, *options)}, SLURM_TIMEOUT_S)
        if isinstance(answer := tried[partition], CommandResult) and answer.code == 0:
            break
    return tried


def try_job(script: str, *options: str) -> CommandResult:
    """Return the result of ``sbatch --test-only``. Raises Refused or Unanswered if Slurm does not answer."""
    return asyncio.run(site.try_job(script, *options, timeout_s=SLURM_TIMEOUT_S / 2))


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
