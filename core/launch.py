"""Files by which the manager and a step's processes communicate: run spec, launch file, end report, exit record.

The files are in the run directory, so that they survive the end of each process. The launch file (mode 0600) contains
the environment: no variable is passed on a command line or through Slurm. The command may leave an end report, which
the first process of the step copies into the exit record.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import msgspec
from msgspec import Struct

from .run_spec import RunSpec
from .types import GUEST_ROLE, TRAINER, Incarnation, NodeName, RaisedException, role_of

HEARTBEAT_INTERVAL_ENV = "RRL_HEARTBEAT_INTERVAL"
"""Environment variable in the launch file: seconds between two heartbeats of a worker, a launcher or an agent."""
LAUNCH_ENV = "RRL_LAUNCH"
"""Environment variable of every process of a step: the path of the launch file. rrl finds the processes of a run, or of
one step, by this variable."""


class ExitReason(StrEnum):
    """Why a step ended. Each value is also the text for people (:func:`exit_text`)."""

    EXITED = "exited"
    """The command ended by itself, with any exit code."""
    SIGNALED = "signalled"
    """A signal that rrl did not send ended the command."""
    STOPPED = "stopped on request"
    """The manager, or a SIGTERM from any sender, requested that the step ends."""
    NOT_ADMITTED = "not admitted"
    """The manager refused the step, for example because another step with its tag runs, or no manager replied."""
    FENCED = "fenced"
    """The incarnation is no longer current."""
    LAUNCHER_DIED = "launcher died"
    """The parent of the first process (slurmstepd) is gone."""
    NOT_STARTED = "not started"
    """The command could not be started at all, because it is missing or not executable."""
    INVALID_CONFIG = "invalid configuration"
    """A built-in role reported that the job's configuration is invalid, so that another start would fail too."""
    INPUT_CHANGED = "input changed"
    """A built-in role reported that an input file has changed (:mod:`rrl.config.input_files`)."""
    GPUS_OCCUPIED = "no room on its GPUs"
    """Other processes occupy memory of the step's GPUs. The command may be able to start on another node, or later."""
    LOST = "vanished"
    """The first process ended without an exit record."""


def exit_text(reason: ExitReason, detail: str = "") -> str:
    """Return the text for people about the end of a step."""
    return f"{reason.value}: {detail}" if detail else reason.value


class Launch(Struct, frozen=True):
    """The content of a launch file: one member to start."""

    tag: str
    """Unique name ``<run>.<role>-<index>.<incarnation>``, never reused; also the step's name in Slurm."""
    run_dir: str
    incarnation: Incarnation
    node: NodeName
    """The node that the manager chose. The step itself reports the node on which it runs."""
    argv: tuple[str, ...]
    env: dict[str, str]
    """The complete environment of the command, which inherits no other variable."""
    cwd: str
    grace: float
    """Seconds between SIGTERM and SIGKILL of the role's process group."""
    virtual_node: bool
    """True if the node is a virtual node of the manager's machine: the step outlives its parent, a manager, and listens
    on the loopback address. Any other step ends with its parent (slurmstepd)."""
    standby: bool = False
    """True for a standby process: the command waits at ``with rrl.join()`` until it is promoted to an incarnation of a
    role."""
    watch: str = "api"
    """``api``: the command joins through the worker API; ``activity``: its launcher joins and reports for it."""
    setup: str = ""
    """Bash (:mod:`rrl.core.role_environment`) that sets up the node for the command; empty if there is nothing to set
    up."""
    network: str = ""
    """Interface or CIDR to listen on; if it is empty, the step chooses an address of its node."""
    gpus: int = 0
    """Number of GPUs of the step."""
    in_image: bool = False
    """True if the first process itself runs in a container: the command then inherits the environment of the image."""
    probe: tuple[str, ...] = ()
    """Command that an agent runs after ``setup`` to find out whether roles can run on the node; empty if there is
    none."""
    probe_timeout: float = 60.0
    """Seconds that the probe may take."""
    readers: tuple[str, ...] = ()
    """Node health readers that an agent starts as child processes."""
    admission_timeout: float = 0.0
    """Seconds that an agent waits for the first round of its readers before it reports its node; with 0 it does not
    wait."""

    @property
    def role(self) -> str:
        """Return the role of the member; for a standby process, the role that it can be promoted to.

        A guest runs the program of ``[roles.rollout]`` with its settings.
        """
        if self.guest:
            return "rollout"
        return role_of(TRAINER if self.standby else self.incarnation.replica)

    @property
    def guest(self) -> bool:
        """Return whether the process is a rollout that generates only while the trainer lends it the GPUs of a node."""
        return role_of(self.incarnation.replica) == GUEST_ROLE


class InvalidConfig(Struct, frozen=True, tag=True):
    """End report of a built-in role that exits with :data:`INVALID_CONFIG_CODE`."""

    message: str
    input_changed: bool = False
    """True if the configuration was valid, but an input file has changed."""


class Raised(Struct, frozen=True, tag=True):
    """End report of a process that ends because of an uncaught exception."""

    exception: RaisedException


EndReport = InvalidConfig | Raised
"""Report of why a Python process ends, written by rrl's code in the process. A command that merely exits with
:data:`INVALID_CONFIG_CODE` leaves no end report."""
INVALID_CONFIG_CODE = 2
"""Exit code of a built-in role that found the job's configuration invalid."""


class ExitRecord(Struct, frozen=True, tag=True):
    """How a step ended; written once, atomically, by its first process, which then sends it to the manager, too."""

    tag: str
    incarnation: Incarnation
    node: NodeName
    code: int | None
    """Exit code, or None if a signal ended the command."""
    signal: int | None
    reason: ExitReason
    at: float
    """Wall clock of the node (s since the epoch), for display only."""
    last_line: str = ""
    """Last line that the command wrote, if it ended by itself with a failure."""
    detail: str = ""
    """Details of ``reason``, for people."""
    exception: RaisedException | None = None
    """Exception that ended the command, if the command reported one."""


def tag_of(run: str, incarnation: Incarnation) -> str:
    """Return the tag of a launch: ``<run>.<role>-<index>.<incarnation>``."""
    return f"{run}.{incarnation.replica.replace('/', '-')}.{incarnation.number}"


def read_launch(path: Path) -> Launch:
    """Read a launch file.

    Raises:
        OSError: The file cannot be read.
        msgspec.DecodeError: The file is not a launch file.
    """
    return msgspec.json.decode(path.read_bytes(), type=Launch)


def read_run_spec(path: Path) -> RunSpec:
    """Read the run spec of a run directory.

    Raises:
        OSError: The file cannot be read.
        msgspec.DecodeError: The file is not a run spec.
    """
    return msgspec.json.decode(path.read_bytes(), type=RunSpec)


def read_exit(path: Path) -> ExitRecord | None:
    """Return the exit record at ``path``, or None if it does not exist (yet) or is damaged.

    A damaged file counts as missing, because it must not end the process that reads it.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=ExitRecord)
    except (OSError, ValueError):  # ValueError: not JSON, not an exit record, or not UTF-8
        return None


def read_end_report(path: Path) -> EndReport | None:
    """Return the end report at ``path``, or None if the command left none or the file is damaged."""
    try:
        report: EndReport = msgspec.json.decode(path.read_bytes(), type=EndReport)
    except (OSError, ValueError):
        return None
    return report
