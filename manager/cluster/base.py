"""The cluster seam: a few verbs and what can be observed. ``local`` and ``slurm`` are its two implementations.

Every ask carries the tag that it is found again by. There is no return value to trust: ``Refused`` = certainly not
done; ``Unanswered`` = nobody knows, the next :meth:`Cluster.observe` settles it by tag. No third outcome.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from ...core.faults import Fault
from ...core.run_spec import Resources
from ...core.types import NodeName


class RejectReason(StrEnum):
    """Why something that was asked of the cluster was certainly not done."""

    REFUSED = "refused"
    """the cluster said no"""
    ALLOCATION_NOT_RUNNING = "allocation_not_running"
    """the cluster does not list the allocation as running"""
    NEVER_APPEARED = "never_appeared"
    """the cluster never listed it"""
    NOT_STARTED = "not_started"
    """the command could not be started at all: proof that it is not there"""
    EXITED_AT_ONCE = "exited_at_once"
    """the first process of the step ended before it reported anything"""


class Refused(Exception):
    """Certainly not done. The text says what the cluster said, for people; ``reason`` is what decisions go by."""

    reason = RejectReason.REFUSED


class AllocationNotRunning(Refused):
    """Certainly not done, because the cluster does not list the allocation as running now. That is not a failure of
    what was to be started, nor of its node: the next looks at the cluster tell what has become of the allocation."""

    reason = RejectReason.ALLOCATION_NOT_RUNNING


class NotStarted(Refused):
    """A step whose first process, or whose command, is not there or cannot be started at all."""

    reason = RejectReason.NOT_STARTED

    def __init__(self, text: str) -> None:
        super().__init__(f"not started: {text}")


class ExitedAtOnce(Refused):
    """A step whose first process ended before it reported anything."""

    reason = RejectReason.EXITED_AT_ONCE

    def __init__(self, text: str) -> None:
        super().__init__(f"its step ended as soon as it began: {text}")


class Unanswered(Exception):
    """Nobody knows whether it was done: a timeout, a lost connection, an answer that cannot be read."""


class AllocationRequest(Struct, frozen=True):
    """Nodes wanted: ``count`` of one shape under one tag."""

    tag: str
    count: int
    node: Resources
    walltime: float
    exclude: tuple[NodeName, ...] = ()
    sbatch: dict[str, str] = {}
    """further sbatch options, name without dashes"""
    comment: str = ""
    node_group: str = "pool"
    """of the job's parts (:class:`rrl.core.run_spec.Part`), the one that these nodes are for"""
    may_reuse_own_nodes: bool = False
    """nodes that we hold now may serve it, too, once they are free: an allocation of ours comes to its end"""
    further_components: tuple[AllocationRequest, ...] = ()
    """further components of the same heterogeneous job, each under a tag of its own; its first one is this ask"""


class Step(Struct, frozen=True):
    """One member to launch on one node of an allocation. What it runs is in its launch file."""

    tag: str
    allocation: str
    """tag of the allocation"""
    node: NodeName
    resources: Resources
    launch_file: Path
    log_file: Path
    overlap: bool = False
    """only for agents: share the node's resources instead of taking some"""
    agent: bool = False
    """run the node agent (:mod:`rrl.roles.agent.main`) rather than the step launcher
    (:mod:`rrl.roles.launcher.step`)"""
    container: tuple[str, ...] = ()
    """further options of srun (pyxis)"""
    python: str = ""
    """runs the first process, in that container; empty: the cluster's own does"""


class NodeState(StrEnum):
    UP = "up"
    DRAINING = "draining"
    DOWN = "down"
    UNKNOWN = "unknown"


class AllocationState(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    SUSPENDED = "suspended"
    """its nodes are ours, and everything on them stands still until the cluster lets it go on"""
    ENDING = "ending"
    """it comes to its end, for a reason that is not known yet: nothing can be started in it any more"""
    ENDED = "ended"


class NodeStatus(Struct, frozen=True):
    state: NodeState
    detail: str = ""
    """the cluster's own words: state with flags, reason"""
    reason: str = ""
    """the reason that whoever drained it gave: equal to that of a drain of ours where the drain is ours"""


class AllocationStatus(Struct, frozen=True):
    state: AllocationState
    job: str
    """the cluster's id: a Slurm job id"""
    nodes: tuple[NodeName, ...] = ()
    detail: str = ""
    """pending reason, end state"""
    unsatisfiable_reason: str = ""
    """while it pends: the reason why it never starts by itself, in the cluster's word; empty while it may"""
    time_left_s: float | None = None
    """s until the cluster takes it back, as of this look; None: it does not say"""
    reclaimed: bool = False
    """it takes it back before the time that was agreed, or has: it is preempted; or its time was over"""
    cancelled: bool = False
    """it ended because somebody cancelled it"""


class ClusterSnapshot(Struct, frozen=True):
    """One look at the cluster. A part that could not be read is None: unknown, which is neither healthy nor gone.

    An allocation or step that is absent from a part that *was* read is not (or no longer) listed by the cluster.
    """

    nodes: dict[NodeName, NodeStatus] | None
    allocations: dict[str, AllocationStatus] | None
    """by tag"""
    steps: dict[str, NodeName] | None
    """tag of each listed step of this run, and its node"""
    unknown: str = ""
    """why a part is None"""
    launchers_ended: frozenset[str] = frozenset()
    """tags of launches whose command had ended before this look began, and said neither that they were done nor that
    they were refused: without that command nothing starts their step any more, so that one which is not listed never
    will be"""


class Cluster(Protocol):
    """All methods raise only Refused or Unanswered, and return within a deadline of their own."""

    async def request(self, request: AllocationRequest) -> None:
        """Ask for nodes; they appear in :meth:`observe` under ``ask.tag``."""

    async def release(self, tag: str) -> None:
        """Give an allocation back with everything that runs in it. Releasing what is gone is done."""

    async def launch(self, step: Step) -> None:
        """Start a step. Returns once it was handed over; that it runs is known from its own ``Wanted``. NotHeld where
        its allocation does not run (any more)."""

    async def release_launcher(self, tag: str) -> None:
        """The step's first process has spoken to us: whatever only carried the launch can go (srun is killed -9)."""

    async def stop(self, tag: str, grace: float) -> None:
        """End a step: SIGTERM, ``grace`` s, SIGKILL. Stopping what is gone is done."""

    async def drain(self, node: NodeName, reason: str) -> None:
        """Drain the node, so that the cluster places no new job there. ``reason`` begins with ``rrl:``.

        Raises Refused where that is not permitted, or where somebody else has drained the node."""

    async def undrain(self, node: NodeName, reason: str) -> None:
        """Take back a drain with exactly this reason; one with another reason is not ours: Refused. None: done."""

    async def shrink(self, tag: str, nodes: tuple[NodeName, ...]) -> None:
        """Give single nodes of a running allocation back. Refused where that would hurt the others."""

    async def inject_fault(self, fault: Fault) -> str:
        """Perform a fault that is about a node or the cluster itself, and end it after ``fault.seconds``; says what was
        done. Refused where it is not ours to do: on Slurm anywhere but on a test cluster."""

    async def observe(self) -> ClusterSnapshot:
        """Nodes, allocations and steps of this run as the cluster tells them now. Raises nothing."""

    async def close(self) -> None:
        """Let go of local resources (child processes that only carried launches). Leaves steps running."""
