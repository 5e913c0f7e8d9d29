"""Define every path in a run directory, and how its files are opened. No other module defines such paths.

The run directory is on storage that the login node, the manager and every node share. It has mode 0700 and belongs to
the run's user. Nothing of a run is stored elsewhere, except sockets and shared memory whose names contain the run id.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path, PosixPath
from typing import TYPE_CHECKING, NamedTuple

from .ownership import ROOT, user_name
from .types import OperationFailed

RUNS_ENV = "RRL_RUNS_DIR"
HISTORY_ENV = "RRL_HISTORY"
"""Environment variable: the site's folder for the history across runs and users, for jobs without ``[health]
history``."""
STORAGE_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of full storage (no space, over quota), where the removal of a file frees space."""
_LINK = "is a link, which rrl does not follow"


class Untrusted(OSError):
    """Another user may have made a file of a run. ``strerror`` says why it is not read."""

    def __str__(self) -> str:
        return f"{self.filename} {self.strerror}"


class OwnPath(PosixPath):
    """A path in a run directory. Reading it follows no link, waits for no FIFO, and needs a file of this user or root.

    Paths that are made from it are of this class too.
    """

    if not TYPE_CHECKING:  # its types are those of Path.open

        def open(self, mode="r", *arguments, **options):
            """Open the file. Raises Untrusted if it is to be read, and another user may have made it."""
            return open(self, mode, *arguments, **options, opener=_trusted_fd if mode in ("r", "rb") else None)


def full_storage_error(error: BaseException) -> OSError | None:
    """Return the error of full storage behind ``error``; None if there is none.

    Libraries hide it: torch's archive writer raises "unexpected pos 704 vs 598" while it handles the error, and
    torch.distributed.checkpoint keeps the errors of the ranks in ``failures``.
    """
    behind, examined = [error], set[int]()
    while behind:
        one = behind.pop()
        if isinstance(one, OSError) and one.errno in STORAGE_FULL_ERRNOS:
            return one
        if id(one) not in examined:
            examined.add(id(one))
            failures = getattr(one, "failures", None)
            ranks = [failure[0] for failure in failures.values()] if isinstance(failures, dict) else []
            behind += [found for found in (one.__cause__, one.__context__, *ranks) if found is not None]
    return None


class Attempt(NamedTuple):
    """An attempt to write a checkpoint, as the name of the checkpoint's folder describes it."""

    step: int
    incarnation: int
    """Number of the trainer's incarnation."""
    number: int
    """Number of earlier attempts of this incarnation at the step."""

    @property
    def folder(self) -> str:
        """Return the name of the checkpoint's folder."""
        return f"step-{self.step}.{self.incarnation}.{self.number}"


def attempt_of(folder: str) -> Attempt | None:
    """Return the attempt that a folder's name describes (:attr:`Attempt.folder`); None for any other name."""
    match = re.fullmatch(r"step-(\d+)\.(\d+)\.(\d+)", folder, re.ASCII)
    return Attempt(int(match[1]), int(match[2]), int(match[3])) if match else None


def runs_root() -> Path:
    """Return the folder of all runs: ``$RRL_RUNS_DIR``, else ``~/rrl-runs``."""
    given = os.environ.get(RUNS_ENV)
    return Path(given).expanduser().absolute() if given else Path.home() / "rrl-runs"


class RunDir:
    """The paths of one run. Only :meth:`create` writes to the disk."""

    def __init__(self, path: Path) -> None:
        path = OwnPath(path)
        self.path = path
        self.id = path.name
        self.job_toml = path / "job.toml"
        """The job spec that the user wrote: a copy of the file, or several files and settings merged into one."""
        self.resolved = path / "resolved.json"
        """The job spec with every default filled in, for people and for ``rrl resume``."""
        self.run_spec = path / "run_spec.json"
        """The run spec (:class:`rrl.core.run_spec.RunSpec`), which the manager and the roles read."""
        self.keys = path / "keys.json"
        """CURVE and HMAC keys, mode 0600."""
        self.passed_env = path / "passed.json"
        """Variables of the submitting shell that roles get, mode 0600, since they may be secrets."""
        self.journal = path / "journal"
        self.epochs = path / "epochs"
        """One file per manager epoch, created with O_EXCL: its creator is the manager of that epoch."""
        self.manager = path / "manager.json"
        """Address of the current manager (:class:`rrl.transport.control.endpoints.Address`), replaced atomically."""
        """Address of the current manager's socket for log lines, replaced atomically."""
        self.mailbox = path / "mailbox"
        """User commands, one file each."""
        self.resume = path / "resume"
        """Request to resume a run that has ended: a folder with all files that the resume needs."""
        self.resume_claimed = path / "resuming"
        """The ``resume`` folder after a manager has claimed the request."""
        self.steps = path / "steps"
        """Files of steps: ``<tag>.launch`` (launch file), ``<tag>.end`` (end report, if the command left one) and
        ``<tag>.exit`` (exit record)."""
        self.hardware = path / "hardware"
        """``<node>.json``: the hardware that an agent observed on its node, for the next agent there. The first writer
        creates the folder."""
        self.logs = path / "logs"
        self.stacks = path / "stacks"
        """``<incarnation>-<epoch>.<n>.txt``, mode 0600: stacks of the processes of a replica that may hang, and of its
        gang."""
        self.store = path / "trajectories"
        self.audit = self.store / "audit.json"
        """The fate of every trajectory, which the store writes when it is stopped."""
        self.samples = path / "samples"
        """Some trajectories of each committed step (:mod:`.samples_file`). The first writer creates the folder."""
        self.checkpoints = path / "checkpoints"
        self.exports = path / "exports"
        """``step-<n>``: checkpoints that the run itself has exported (``[roles.trainer] export``)."""
        self.export_failure = path / "export.failed"
        """Why the run's newest export failed, in one line; the file exists only if it failed."""
        self.notifications = path / "notifications"
        """``<kind>-<n>.json``: the claim of each notification, written before it is sent. The first writer creates the
        folder."""
        self.summary = path / "summary.json"
        self.metrics = path / "metrics"
        """``host:port`` at which the current manager serves metrics; the file exists only while they are served."""
        self.endpoints = path / "endpoints"
        """``<replica>.json``: the address of each replica of the endpoint
        (:class:`rrl.roles.endpoint.addresses.EndpointAddress`). The first writer creates the folder."""
        self.metrics_failure = path / "metrics.failed"
        """Why the current manager serves no metrics, in one line; the file exists only if serving them has failed."""
        self.trackers = path / "trackers"
        """Files of each tracker: its own folder ``<tracker>``, its process's progress (``<tracker>.json``), lock
        (``.lock``) and output (``.log``). The first writer creates the folder."""
        self.submit = path / "submit"
        """Folder of submitit's own files."""
        self.controller_log = self.submit / "controller.log"
        """Output of the submitit processes that start a manager on this machine and watch it."""
        self.disk_filler = path / "disk_filler"
        """File that fills the file system while a ``disk_full`` fault lasts."""
        self.space_reserve = path / "space_reserve"
        """File that holds space for the end of a run on a full file system; removed at the run's end."""
        self.cluster = path / "cluster"
        """Records of the local cluster."""
        self.hf_model = path / "hf-model"
        """config.json of a model that rrl builds, for engines that expect a folder."""

    def create(self) -> None:
        """Create the run directory and the folders in it.

        Raises:
            FileExistsError: The run exists already.
        """
        self.path.parent.mkdir(0o755, parents=True, exist_ok=True)
        self.path.mkdir(mode=0o700)
        for folder in (
            self.journal,
            self.epochs,
            self.mailbox,
            self.steps,
            self.logs,
            self.store,
            self.checkpoints,
            self.submit,
            self.cluster,
        ):
            folder.mkdir(mode=0o700)

    def export_of(self, step: int) -> Path:
        """Return the folder into which the run exports the checkpoint of a step."""
        return self.exports / f"step-{step}"

    def removed(self) -> bool:
        """Return whether the run directory was deleted.

        Return False if the folder of all runs is missing too, since the storage is then unavailable.
        """
        return not self.path.exists() and self.path.parent.is_dir()

    def input_record(self, file: str) -> Path:
        """Return the path of the record of an input file (:mod:`rrl.config.input_files`).

        The first writer creates the folder.
        """
        return self.path / "inputs" / f"{hashlib.sha256(os.fsencode(file)).hexdigest()[:32]}.json"

    def launch_file(self, tag: str) -> Path:
        """Return the path of the launch file of a step."""
        return self.steps / f"{tag}.launch"

    def exit_file(self, tag: str) -> Path:
        """Return the path of the exit record of a step."""
        return self.steps / f"{tag}.exit"

    def end_report_file(self, tag: str) -> Path:
        """Return the path of the end report of a step's command."""
        return self.steps / f"{tag}.end"

    def hardware_file(self, node: str) -> Path:
        """Return the path of the hardware record of a node."""
        return self.hardware / f"{node}.json"

    def endpoint_file(self, replica: int) -> Path:
        """Return the path of the file with the address of an endpoint replica; ``replica`` is the replica's index."""
        return self.endpoints / f"{replica}.json"

    def log_file(self, tag: str) -> Path:
        """Return the path of the log of a step."""
        return self.logs / f"{tag}.log"


def _trusted_fd(path: str, flags: int) -> int:
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise Untrusted(errno.ELOOP, _LINK, path) if error.errno == errno.ELOOP else error from None
    about, trusted = os.fstat(fd), {os.geteuid(), ROOT}  # of the opened file: folders on the path may be exchanged
    if os.geteuid() == ROOT:  # root may look at the run of a user
        trusted.add(os.stat(os.path.dirname(path)).st_uid)
    regular = stat.S_ISREG(about.st_mode)
    if regular and about.st_uid in trusted:
        return fd
    os.close(fd)
    foreign = f"belongs to {user_name(about.st_uid)}, and is not read"
    raise Untrusted(errno.EPERM, foreign if regular else "is not a regular file", path)


def run_dir_problem(path: Path, *, change: bool = False) -> str:
    """Return why this user may not look at a run directory, as the end of a sentence; empty if the user may.

    With ``change``, return why the user may not change or manage it: root may look at runs of others, but no more.
    Raises OSError if there is no such directory.
    """
    about, me = path.lstat(), os.geteuid()
    if stat.S_ISLNK(about.st_mode):
        return _LINK
    if about.st_uid != me and (change or (me != ROOT and about.st_uid != ROOT)):
        owner = user_name(about.st_uid)
        return f"is a run of {owner}, and only {owner} can look at it or change it"
    if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"may be written by other users, so nothing in it is trusted: chmod go-w {path}"
    return ""


def sync(path: Path) -> None:
    """Fsync a file or a folder, which another process may have written. Raises OSError if this fails."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def errors_about(path: object) -> Iterator[None]:
    """Raise an OSError of the body as :class:`OperationFailed`, in one line about ``path``."""
    try:
        yield
    except OSError as error:
        raise OperationFailed(f"{path}: {error.strerror}") from None


def write_atomically(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Replace the content of ``path`` by ``data``, durably and atomically: a reader sees all old or all new bytes.

    Raises:
        OSError: The file could not be written (no space, over quota). The old content is unchanged and no temporary
            file remains.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with open(fd, "wb") as file:  # unlike os.write, it continues after a short write
            file.write(data)
            file.flush()
            os.fsync(fd)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
