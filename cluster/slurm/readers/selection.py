"""Choose between Slurm's commands and pyslurm (``[cluster] reader``), and keep the choice until pyslurm fails.

``auto`` takes pyslurm if it is installed and was built for the version that slurmctld runs. ``pyslurm`` uses pyslurm,
if installed, for any version. With both settings, the commands take over after :data:`MAX_CHILD_FAILURES` failures of
the child process, for the rest of the manager's epoch.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import re
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, TypeVar

from msgspec import Struct

from ....core.types import NodeName
from ...base import NodeStatus
from ..commands import SlurmLimits
from ..parsing import Job, NodeInfo, StepLine
from .base import SlurmConfig, SlurmReader
from .child_process import ChildClosed, ChildFailed, PyslurmChild
from .pyslurm_reader import PyslurmReader

ReaderSetting = Literal["auto", "commands", "pyslurm"]
"""Values of ``[cluster] reader``."""
MAX_CHILD_FAILURES = 3
"""Number of failures of the child process after which a manager reads by commands only."""
LARGE_QUEUE_JOBS = 500
"""Number of jobs of all users above which squeue reads the jobs. slurmctld sends squeue only the jobs of this user, but
it sends pyslurm the jobs of all users. With 500 jobs of other users, each read costs about 1 ms of CPU with either
reader (docs/sites.md)."""

_log = logging.getLogger("rrl.manager")
T = TypeVar("T")


class Choice(Struct):
    """The chosen reader, and why it was chosen."""

    reader: SlurmReader
    reason: str
    """Text for people that names the chosen reader and says why it was chosen."""
    rejected: bool = False
    """True if pyslurm is installed, but does not fit this cluster."""


async def choose_reader(
    setting: ReaderSetting, by_commands: SlurmReader, limits: SlurmLimits, module: str = "pyslurm"
) -> Choice:
    """Return the reader for ``[cluster] reader = setting``. If it uses a child process, the process is running.

    Args:
        setting: the value of ``[cluster] reader``.
        by_commands: the reader that runs commands.
        limits: the deadlines of requests.
        module: the module that is used as pyslurm (for tests).

    Raises:
        Unanswered: Slurm's commands got no answer, so the versions cannot be compared.
        Refused: Slurm's commands cannot be run.
    """
    if setting == "commands":
        return Choice(by_commands, 'the commands: [cluster] reader = "commands"')
    if await asyncio.to_thread(importlib.util.find_spec, module) is None:
        return Choice(by_commands, f"the commands: {module} is not installed for {sys.executable}")
    child = PyslurmChild(module)
    by_pyslurm = PyslurmReader(child, limits)
    try:
        version = await child.version()
        if setting == "pyslurm":
            return Choice(by_pyslurm, f'pyslurm {version}: [cluster] reader = "pyslurm"')
        slurm = (await by_commands.config()).version
        if _release(version) == _release(slurm):
            return Choice(by_pyslurm, f"pyslurm {version}: it was built for Slurm {slurm}")
        reason = f"pyslurm {version} was not built for Slurm {slurm}"
    except ChildFailed as error:
        reason = f"pyslurm does not start: {error}"
    except BaseException:
        await by_pyslurm.close()
        raise
    await by_pyslurm.close()
    return Choice(by_commands, f"the commands: {reason}", rejected=True)


class SelectedReader:
    """The reader that ``[cluster] reader`` selects (:class:`.base.SlurmReader`). It is chosen at the first request."""

    def __init__(
        self, setting: ReaderSetting, by_commands: SlurmReader, limits: SlurmLimits, module: str = "pyslurm"
    ) -> None:
        self._setting, self._limits, self._module = setting, limits, module
        self._by_commands = by_commands
        self._chosen: SlurmReader | None = by_commands if setting == "commands" else None
        self._lock = asyncio.Lock()
        self._failures = 0
        self._jobs_by_commands = False

    async def jobs(self) -> list[Job]:
        """Return all jobs of this user.

        Once the queue has had more than :data:`LARGE_QUEUE_JOBS` jobs, squeue reads the jobs even if pyslurm was
        chosen.
        """
        if self._jobs_by_commands:
            return await self._by_commands.jobs()
        jobs = await self._use(lambda reader: reader.jobs())
        if isinstance(self._chosen, PyslurmReader) and self._chosen.queue_length > LARGE_QUEUE_JOBS:
            _log.info(
                "the queue has %d jobs, more than %d: they are read by squeue instead of pyslurm from now on",
                self._chosen.queue_length,
                LARGE_QUEUE_JOBS,
            )
            self._jobs_by_commands = True
        return jobs

    async def steps(self) -> list[StepLine]:
        """Return the numbered steps of this user's jobs."""
        return await self._use(lambda reader: reader.steps())

    async def nodes(self, names: Sequence[NodeName] | None) -> dict[NodeName, NodeStatus]:
        """Return the states of these nodes, or of all nodes."""
        return await self._use(lambda reader: reader.nodes(names))

    async def node(self, name: NodeName) -> NodeInfo:
        """Return the administrative state of a node."""
        return await self._use(lambda reader: reader.node(name))

    async def config(self) -> SlurmConfig:
        """Return the settings of slurmctld."""
        return await self._use(lambda reader: reader.config())

    async def drain(self, name: NodeName, reason: str) -> None:
        """Drain a node."""
        await self._use(lambda reader: reader.drain(name, reason))

    async def undrain(self, name: NodeName) -> None:
        """Remove a node's drain."""
        await self._use(lambda reader: reader.undrain(name))

    async def close(self) -> None:
        """End the child process, if there is one."""
        if self._chosen is not None:
            await self._chosen.close()

    async def _use(self, request: Callable[[SlurmReader], Awaitable[T]]) -> T:
        reader = await self._choose()
        try:
            return await request(reader)
        except ChildFailed as error:
            self._failures += 1
            _log.warning("%s (failure %d of %d)", error, self._failures, MAX_CHILD_FAILURES)
            if self._failures >= MAX_CHILD_FAILURES and self._chosen is not self._by_commands:
                _log.warning(
                    "pyslurm has failed %d times: Slurm is read by its commands (squeue, scontrol) from now on",
                    self._failures,
                )
                self._chosen = self._by_commands
                await reader.close()
            raise
        except ChildClosed:  # the commands have taken over while this request waited for its turn
            return await request(self._by_commands)

    async def _choose(self) -> SlurmReader:
        async with self._lock:
            if self._chosen is None:
                choice = await choose_reader(self._setting, self._by_commands, self._limits, self._module)
                _log.info("Slurm is read by %s", choice.reason)
                self._chosen = choice.reader
            return self._chosen


def _release(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version: (22, 5) for 22.05.8 and for 22.5.3."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
