"""Single nodes of Slurm: drained with our reason, taken back if that reason still stands, given back from a job.

Measured on 22.05, 24.11 and 26.05 (docs/architecture.md):

- Root, SlurmUser and users with AdminLevel Administrator may drain. To all others, Operators too, slurmctld says
  "Invalid user id" whatever else is wrong, and logs a security violation: after the first no it is not asked again.
- ``State=RESUME`` also ends somebody's DOWN; ``State=UNDRAIN`` takes back the drain alone. 24.11 keeps the reason after
  either: only together with the state does it say something.
- A node that is drained and then lost has its reason prolonged by 24.11 and 26.05 (" : Not responding").
- ``scontrol update JobId=J NodeList=<the rest>`` gives nodes of an own job back within 2 s: their tasks are killed,
  those on the others go on, and steps can be started there. 22.05 does it once for each job (without accounting). No
  version gives the node of a batch script back, or one of a heterogeneous job's first component; of another component
  that is left with one node Slurm would end that, too, as soon as any node of the job fails.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence

from ClusterShell.NodeSet import NodeSet

from ....core.drains import RUN_PREFIX, DrainOwner, drain_owner
from ....core.types import NodeName
from ..base import Refused, Unanswered
from . import parsing as text
from .commands import CommandResult, unanswered

NOT_RESPONDING_SUFFIX = " : Not responding"
"""what slurmctld appends to the reason of a node that it loses"""
_NO_RIGHTS = re.compile(r"Invalid user id|Access/permission denied", re.IGNORECASE)
_NO_RESIZE = re.compile(
    r"Unexpected message received for job|no longer pending execution|Job update not available right now|"
    r"resizing not supported|Invalid node name specified for job|not supported on this system",
    re.IGNORECASE,
)
"""slurmctld answered that it does not shrink this job, or not by this node"""

RunCommand = Callable[[tuple[str, ...]], Awaitable[CommandResult]]


class SlurmNodes:
    """``read`` and ``write`` run a command and return how it ended; both raise Unanswered when it does not."""

    def __init__(self, read: RunCommand, write: RunCommand) -> None:
        self._read, self._write = read, write
        self._no_rights = ""
        """slurmctld's words, once it has said no"""
        self.drained: set[NodeName] = set()
        """by us: what becomes of them is worth knowing, whosever they are by then"""

    async def drain(self, node: NodeName, reason: str) -> None:
        if drain_owner(reason) is DrainOwner.OTHER:
            raise ValueError(f"the reason of a drain by rrl begins with {RUN_PREFIX}: {reason!r}")
        before = await self._read_node(node)
        if before.draining and _without_suffix(before.reason) == reason:
            self.drained.add(node)
            return
        if before.set_aside:
            raise Refused(f"{node} is {before.description}: somebody else's matter")
        if self._no_rights:
            raise Refused(self._no_rights)
        await self._update(node, "State=DRAIN", f"Reason={reason}")
        after = await self._read_node(node)
        if after.draining and _without_suffix(after.reason) != reason:
            raise Refused(f"{node} is {after.description}: somebody else's by now")
        if not after.draining:
            raise Unanswered(f"{node} is {after.description} after it was drained")
        self.drained.add(node)

    async def undrain(self, node: NodeName, reason: str) -> None:
        before = await self._read_node(node)
        if before.draining:
            if _without_suffix(before.reason) != reason:
                raise Refused(f"{node} is {before.description}: not our drain")
            await self._update(node, "State=UNDRAIN")
            if (after := await self._read_node(node)).draining and _without_suffix(after.reason) == reason:
                raise Unanswered(f"{node} is {after.description} after its drain was taken back")
        self.drained.discard(node)

    async def shrink(self, job: text.Job, nodes: Sequence[NodeName]) -> None:
        """Ask for it; the caller sees to it that it was done. Raises Refused where it would hurt the others."""
        rest = [node for node in job.nodes if node not in nodes]
        if not rest:
            raise Refused(f"nothing of job {job.id} would be left: it is to be given back whole")
        if job.leader == job.id:
            raise Refused("Slurm gives no single node of a heterogeneous job's first component back")
        if job.leader and len(rest) == 1:
            raise Refused("a component with one node ends with the next node that its heterogeneous job loses")
        ended = await self._write(("scontrol", "update", f"JobId={job.id}", f"NodeList={NodeSet(','.join(rest))}"))
        if ended.code:
            reply = _one_line(ended)
            if _NO_RESIZE.search(ended.err) or _NO_RIGHTS.search(ended.err):
                raise Refused(f"Slurm does not shrink job {job.id}: {reply}")
            raise Unanswered(f"scontrol: {reply}")

    async def _read_node(self, node: NodeName) -> text.NodeInfo:
        ended = await self._read(("scontrol", "show", "node", "-o", node))
        if "not found" in ended.out:
            raise Refused(f"{node} is not known to Slurm")
        try:
            return text.read_node_info(ended.out)
        except text.Unreadable as error:
            raise Unanswered(f"scontrol: {error}") from error

    async def _update(self, node: NodeName, *changes: str) -> None:
        ended = await self._write(("scontrol", "update", f"NodeName={node}", *changes))
        if not ended.code:
            return
        reply = _one_line(ended)
        if _NO_RIGHTS.search(ended.err):
            self._no_rights = f"we may not drain nodes here: {reply}"
            raise Refused(self._no_rights)
        if "slurm_update error" in ended.err and not unanswered(ended.err):
            raise Refused(f"scontrol: {reply}")
        raise Unanswered(f"scontrol: {reply}")


def _without_suffix(reason: str) -> str:
    return reason.removesuffix(NOT_RESPONDING_SUFFIX)


def _one_line(ended: CommandResult) -> str:
    return " / ".join(line for line in ended.err.splitlines() if line.strip()) or f"exit code {ended.code}"
