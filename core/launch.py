"""What the manager hands to the first process of a step, and what that process leaves behind.

Both are files in the run directory, so that they survive the death of either side. The launch file (0600) carries the
environment: nothing of it goes through a command line or through Slurm.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import msgspec
from msgspec import Struct

from .types import Incarnation, NodeName, role_of, standby_role_of

HEARTBEAT_INTERVAL_ENV = "RRL_HEARTBEAT_INTERVAL"
"""s between two beats of a worker, a step or an agent, in the launch file's environment"""
LAUNCH_ENV = "RRL_LAUNCH"
"""Environment variable of every process of a step: the path of its launch file. Sweeps find our processes by it."""


class ExitReason(StrEnum):
    """Why a step ended. The values are also what people read (:func:`exit_text`)."""

    EXITED = "exited"
    """the command ended by itself, whatever its exit code"""
    SIGNALED = "signalled"
    """a signal that rrl did not send ended the command"""
    STOPPED = "stopped on request"
    """the step was asked to end: by the manager, or by a SIGTERM, whoever sent it"""
    NOT_ADMITTED = "not admitted"
    """the manager refused the step, maybe as the second one under its tag, or no manager answered"""
    FENCED = "fenced"
    """the incarnation is no longer current"""
    LAUNCHER_DIED = "launcher died"
    """the parent of the first process (slurmstepd) is gone"""
    NOT_STARTED = "not started"
    """the command could not be started at all: proof that it is not there"""
    GPUS_OCCUPIED = "no room on its GPUs"
    """other processes hold memory of its GPUs: the command may start elsewhere, or later"""
    LOST = "vanished"
    """the first process is gone and left no exit record"""


def exit_text(reason: ExitReason, detail: str = "") -> str:
    """Return what people read about the end of a step; nothing is decided by it."""
    return f"{reason.value}: {detail}" if detail else reason.value


class Launch(Struct, frozen=True):
    """One member to start."""

    tag: str
    """unique for ever: ``<run>.<role>-<index>.<incarnation>``; also the step's name in Slurm"""
    run_dir: str
    incarnation: Incarnation
    node: NodeName
    """where the manager wants it; the step says where it really runs"""
    argv: tuple[str, ...]
    env: dict[str, str]
    """complete: nothing is inherited but what is listed here"""
    cwd: str
    grace: float
    """s between SIGTERM and SIGKILL of the role's process group"""
    dies_with_launcher: bool
    """true where the parent (slurmstepd) must not be outlived; false where roles outlive the manager (local)"""
    standby: bool = False
    """the life is a shadow's: the command waits in :func:`rrl.join` until it is told which life it becomes"""
    watch: str = "api"
    """``api``: the command joins by itself; ``activity``: its first process speaks for it"""
    setup: str = ""
    """bash (:mod:`rrl.core.role_environment`) that sets up the node for the command; empty: there is nothing to set
    up"""
    network: str = ""
    """interface or CIDR to listen on; empty: chosen on the node"""
    gpus: int = 0
    """that it was given"""
    in_image: bool = False
    """the first process itself runs in a container: what the image sets in the environment reaches the command"""
    probe: tuple[str, ...] = ()
    """an agent's: command behind ``setup`` by which the node shows that roles can run here; empty: it need not"""
    probe_timeout: float = 60.0
    """s that it may take"""
    readers: tuple[str, ...] = ()
    """an agent's: readers of node health that run beside it"""
    admission_timeout: float = 0.0
    """s that their first round may take before it says that its node is there; 0: it does not wait for them"""

    @property
    def role(self) -> str:
        """The role that it is one of, or can become one of where it is kept warm."""
        return standby_role_of(self.incarnation.replica) if self.standby else role_of(self.incarnation.replica)


class ExitRecord(Struct, frozen=True):
    """How a step ended; written once, atomically, by its first process."""

    tag: str
    incarnation: Incarnation
    node: NodeName
    code: int | None
    """exit code, or None when a signal ended it"""
    signal: int | None
    reason: ExitReason
    at: float
    """wall clock of the node, for display only"""
    last_line: str = ""
    """the last line that the command wrote, where it ended by itself and not well"""
    detail: str = ""
    """more about ``reason``, for people"""


def tag_of(run: str, incarnation: Incarnation) -> str:
    return f"{run}.{incarnation.replica.replace('/', '-')}.{incarnation.number}"


def read_launch(path: Path) -> Launch:
    return msgspec.json.decode(path.read_bytes(), type=Launch)


def read_exit(path: Path) -> ExitRecord | None:
    """The record, or None when there is none (yet), or none that can be read: one bad file must not end its reader."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=ExitRecord)
    except (OSError, ValueError):  # ValueError: no JSON, no record, no text
        return None
