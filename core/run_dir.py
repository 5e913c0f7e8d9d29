"""Where things lie in a run directory. Every path of a run is named here and nowhere else.

The run directory lies on storage that the login node, the manager and every node see; it is 0700 and owned by the
run's user. Nothing of a run lies elsewhere, but for sockets and shared memory whose names carry the run id.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

RUNS_ENV = "RRL_RUNS_DIR"
HISTORY_ENV = "RRL_HISTORY"
"""the site's folder for the history across runs and users, for jobs that name none (``[health] history``)"""


def runs_root() -> Path:
    """The folder of all runs: ``$RRL_RUNS_DIR``, else ``~/rrl-runs``."""
    given = os.environ.get(RUNS_ENV)
    return Path(given).expanduser().absolute() if given else Path.home() / "rrl-runs"


class RunDir:
    """Paths of one run; makes nothing by itself but for :meth:`create`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.id = path.name
        self.job_toml = path / "job.toml"
        """a copy of what the user wrote"""
        self.resolved = path / "resolved.json"
        """the job spec with every default filled in"""
        self.run_spec = path / "run_spec.json"
        """what the manager's core needs of it (:class:`rrl.core.run_spec.JobView`)"""
        self.keys = path / "keys.json"
        """CURVE and HMAC material, 0600"""
        self.passed_env = path / "passed.json"
        """variables of the submitting shell that roles get, 0600: they may be secrets"""
        self.journal = path / "journal"
        self.epochs = path / "epochs"
        """one file per manager epoch, created O_EXCL: who made it is that epoch's manager"""
        self.manager = path / "manager.json"
        """where the current manager listens (:class:`rrl.transport.control.endpoints.Address`), replaced atomically"""
        self.log_collector = path / "logs.json"
        """where it takes lines of logs, likewise; a socket of its own"""
        self.mailbox = path / "mailbox"
        """user commands, one file each"""
        self.resume = path / "resume"
        """the order that the run, which has ended, goes on: all that is needed for it, in one folder"""
        self.resume_claimed = path / "resuming"
        """the same, once a manager has taken it"""
        self.steps = path / "steps"
        """``<tag>.launch`` (what to start) and ``<tag>.exit`` (how it ended)"""
        self.hardware = path / "hardware"
        """``<node>.json``: what its agent has seen there, for the next one; made by whoever writes first"""
        self.logs = path / "logs"
        self.stacks = path / "stacks"
        """``<life>-<epoch>.<n>.txt``, 0600: what the processes of a suspect and of its gang were doing"""
        self.store = path / "trajectories"
        self.checkpoints = path / "checkpoints"
        self.summary = path / "summary.json"
        self.metrics = path / "metrics"
        """``host:port`` where the current manager serves metrics, while it does"""
        self.submit = path / "submit"
        """submitit's folder"""
        self.disk_filler = path / "disk_filler"
        """fills the file system while that fault lasts"""
        self.cluster = path / "cluster"
        """the local cluster's records"""
        self.hf_model = path / "hf-model"
        """config.json of a model that is built here, for engines that want a folder"""

    def create(self) -> None:
        """Make the folders. Raises FileExistsError when the run exists already."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.mkdir(mode=0o700)
        for folder in (self.journal, self.epochs, self.mailbox, self.steps, self.logs, self.store,
                       self.checkpoints, self.submit, self.cluster):  # fmt: skip
            folder.mkdir(mode=0o700)

    def removed(self) -> bool:
        """Somebody removed it; storage that is away would take the folder of all runs along."""
        return not self.path.exists() and self.path.parent.is_dir()

    def launch_file(self, tag: str) -> Path:
        return self.steps / f"{tag}.launch"

    def exit_file(self, tag: str) -> Path:
        return self.steps / f"{tag}.exit"

    def hardware_file(self, node: str) -> Path:
        return self.hardware / f"{node}.json"

    def log_file(self, tag: str) -> Path:
        return self.logs / f"{tag}.log"


def write_atomically(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Replace ``path`` by ``data``: a reader sees the old bytes or the new ones. Durable when it returns.

    Raises OSError (no space, over quota); then the old bytes are still there, and nothing else is."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with open(fd, "wb") as file:  # unlike os.write it goes on after a short write
            file.write(data)
            file.flush()
            os.fsync(fd)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
