"""Read Slurm by its commands, which exist in every version, and parse what they print."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence

from ....core.command_runner import CommandResult
from ....core.types import NodeName
from ...base import NodeStatus, Refused, Unanswered
from .. import parsing as text
from ..commands import SlurmLimits, execute, failure, lacks_node, update_refused
from .base import NotPermitted, SlurmConfig

NO_RIGHTS = re.compile(r"Invalid user id|Access/permission denied", re.IGNORECASE)
"""Reply of slurmctld to a change that this user may not make."""

RunCommand = Callable[[tuple[str, ...]], Awaitable[CommandResult]]


class CommandReader:
    """The reader that runs Slurm's commands (:class:`.base.SlurmReader`).

    ``read`` and ``write`` run a command and return its result; both raise Unanswered if the command does not end in
    time.
    """

    def __init__(self, read: RunCommand, write: RunCommand) -> None:
        self._read, self._write = read, write

    @classmethod
    def with_limits(cls, limits: SlurmLimits) -> CommandReader:
        """Return a reader that runs commands with the timeouts of ``limits``."""
        return cls(
            lambda argv: execute(argv, limits.read_timeout_s), lambda argv: execute(argv, limits.write_timeout_s)
        )

    async def jobs(self) -> list[text.Job]:
        """Return all jobs of this user that slurmctld still knows."""
        ended = await self._output(("squeue", "--me", "-h", "-t", "all", "-o", text.JOBS_FORMAT))
        return text.parsed("squeue", text.read_jobs, ended.out)

    async def steps(self) -> list[text.StepLine]:
        """Return the numbered steps of this user's jobs."""
        ended = await self._output(("squeue", "--me", "-h", "-s", "-o", text.STEPS_FORMAT))
        return text.parsed("squeue -s", text.read_steps, ended.out)

    async def nodes(self, names: Sequence[NodeName] | None) -> dict[NodeName, NodeStatus]:
        """Return the states of these nodes, or of all nodes."""
        named = () if names is None else (",".join(names),)
        ended = await self._read(("scontrol", "show", "node", "-o", *named))
        if ended.code and not lacks_node(ended):
            raise failure("scontrol", ended)
        return text.parsed("scontrol", text.read_nodes, ended.out)

    async def node(self, name: NodeName) -> text.NodeInfo:
        """Return the administrative state of a node."""
        ended = await self._read(("scontrol", "show", "node", "-o", name))
        if lacks_node(ended):
            raise Refused(f"{name} is not known to Slurm")
        infos = text.parsed("scontrol", text.read_node_infos, ended.out)
        if name not in infos:
            raise failure("scontrol", ended)
        return infos[name]

    async def node_infos(self) -> dict[NodeName, text.NodeInfo]:
        """Return all nodes of the cluster, with those of hidden partitions."""
        ended = await self._output(("scontrol", "-a", "show", "node", "-o"))
        return text.parsed("scontrol", text.read_node_infos, ended.out)

    async def config(self) -> SlurmConfig:
        """Return the settings of slurmctld."""
        ended = await self._output(("scontrol", "show", "config"))
        values = text.parsed("scontrol", text.read_config, ended.out)
        return SlurmConfig(values.get("SLURM_VERSION", ""), int(values["InactiveLimit"].split()[0]))

    async def drain(self, name: NodeName, reason: str) -> None:
        """Drain a node."""
        await self._update(name, "State=DRAIN", f"Reason={reason}")

    async def undrain(self, name: NodeName) -> None:
        """Remove a node's drain."""
        await self._update(name, "State=UNDRAIN")

    async def close(self) -> None:
        """Do nothing: each command has ended when its method returns."""

    async def _output(self, argv: tuple[str, ...]) -> CommandResult:
        ended = await self._read(argv)
        if ended.code:
            raise failure(argv[0], ended)
        return ended

    async def _update(self, node: NodeName, *changes: str) -> None:
        ended = await self._write(("scontrol", "update", f"NodeName={node}", *changes))
        if not ended.code:
            return
        reply = one_line(ended)
        if NO_RIGHTS.search(ended.err):
            raise NotPermitted(reply)
        if update_refused(ended):
            raise Refused(f"scontrol: {reply}")
        raise Unanswered(f"scontrol: {reply}")


def one_line(ended: CommandResult) -> str:
    """Return the stderr of a failed command in one line, or the command's exit code if stderr is empty."""
    return " / ".join(line for line in ended.err.splitlines() if line.strip()) or f"exit code {ended.code}"
