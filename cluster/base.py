"""Define the interface between the manager and a cluster, which ``local`` and ``slurm`` implement.

Every request carries a tag, by which its result is found later. A call that returns was accepted by the cluster. A call
that raises ``Refused`` was certainly not carried out. After ``Unanswered`` the outcome is unknown, and a later
:meth:`Cluster.observe` settles the request by its tag.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from ..core.faults import Fault
from ..core.types import NodeName, Resources

STOP_MARGIN_S = 2.0
"""Seconds between the end of the grace and SIGKILL (:meth:`Cluster.stop`). A step that received SIGTERM kills its own
process group at the end of the grace and then writes the exit record. SIGKILL during this write would lose the
record."""


class RejectReason(StrEnum):
    """The reason why a request to the cluster was certainly not carried out."""

    REFUSED = "refused"
    """The cluster rejected the request, and would reject it again."""
    REFUSED_FOR_NOW = "refused_for_now"
    """The cluster rejected the request, but other jobs, an administrator or time may lift the reason."""
    ALLOCATION_NOT_RUNNING = "allocation_not_running"
    """The cluster does not list the allocation as running."""
    NEVER_APPEARED = "never_appeared"
    """The cluster never listed the allocation or step."""
    NOT_STARTED = "not_started"
    """The command could not be started at all, because it does not exist on the node or is not executable."""
    EXITED_AT_ONCE = "exited_at_once"
    """The first process of the step ended before it reported anything."""
    STANDBY_OUTDATED = "standby_outdated"
    """The standby process to be promoted has another environment or command than a new step would have."""
    GPUS_UNREPORTED = "gpus_unreported"
    """Another incarnation on the node of the standby process to be promoted has not reported which GPUs it uses."""


class Refused(Exception):
    """A request that was certainly not carried out.

    The text quotes the cluster and is meant for people; decisions use ``reason``.
    """

    reason = RejectReason.REFUSED


class RefusedForNow(Refused):
    """A request that the cluster rejected for a reason that other jobs, an administrator or time may lift."""

    reason = RejectReason.REFUSED_FOR_NOW


class AllocationNotRunning(Refused):
    """A request that was not carried out because the cluster does not list its allocation as running.

    The refusal counts neither against the replica to be launched nor against its node: the next polls show what
    happened to the allocation.
    """

    reason = RejectReason.ALLOCATION_NOT_RUNNING


class NotStarted(Refused):
    """A step whose first process, or whose command, does not exist or cannot be started."""

    reason = RejectReason.NOT_STARTED

    def __init__(self, text: str) -> None:
        super().__init__(f"not started: {text}")


class ExitedAtOnce(Refused):
    """A step whose first process ended before it reported anything."""

    reason = RejectReason.EXITED_AT_ONCE

    def __init__(self, text: str) -> None:
        super().__init__(f"its step ended as soon as it began: {text}")


class Unanswered(Exception):
    """A request that may or may not have been carried out: a timeout, a lost connection, an unreadable reply."""


class AllocationRequest(Struct, frozen=True):
    """A request for ``count`` nodes with the same resources, under one tag."""

    tag: str
    count: int
    node: Resources
    walltime: float
    """Seconds for which the nodes are requested."""
    exclude: tuple[NodeName, ...] = ()
    sbatch: dict[str, str] = {}
    """Further sbatch options: the value of each option, by the option's name without dashes."""
    comment: str = ""
    node_group: str = "pool"
    """Name of the node group (:class:`rrl.core.run_spec.NodeGroup`) that these nodes are for."""
    may_reuse_own_nodes: bool = False
    """True if nodes that this run holds now may be granted again for this request, because their allocation is about to
    end."""
    further_components: tuple[AllocationRequest, ...] = ()
    """Further components of the same heterogeneous job, each with its own tag. This request is the first component."""


class Step(Struct, frozen=True):
    """A step to launch on one node of an allocation. Its launch file says what it runs."""

    tag: str
    allocation: str
    """Tag of the allocation."""
    node: NodeName
    resources: Resources
    launch_file: Path
    log_file: Path
    overlap: bool = False
    """Whether the step shares the node's resources with other steps instead of getting resources of its own. It is set
    for agents, for standby processes and guests beside other steps, and for steps without GPUs in a job that has lost a
    node."""
    agent: bool = False
    """Whether to run the node agent (:mod:`rrl.roles.node_agent.main`) instead of the step launcher
    (:mod:`rrl.roles.launcher.step`)."""
    container: tuple[str, ...] = ()
    """Further options of srun, which start the step in a container (pyxis); empty if it runs without a container."""
    python: str = ""
    """Python interpreter that runs the first process in the container; if empty, the cluster's default interpreter."""


class NodeState(StrEnum):
    """The usability of a node, as the cluster reports it."""

    UP = "up"
    LEAVING = "leaving"
    """Its processes run on, but the cluster will reboot it or switch it off as soon as it is idle."""
    DRAINING = "draining"
    DOWN = "down"
    UNKNOWN = "unknown"


class AllocationState(StrEnum):
    """The stage of an allocation's life cycle, as the cluster reports it."""

    REFUSED = "refused"
    """The cluster refused the request for now. It is made again, and waits like a pending one until then."""
    PENDING = "pending"
    RUNNING = "running"
    SUSPENDED = "suspended"
    """The run holds the nodes, but no process on them executes until the cluster resumes the allocation."""
    ENDING = "ending"
    """The allocation is ending for a reason that is not known yet; nothing can be started in it."""
    ENDED = "ended"


class NodeStatus(Struct, frozen=True):
    """State of one node as the cluster reports it."""

    state: NodeState
    detail: str = ""
    """State with flags, and the reason, in the cluster's own text."""
    reason: str = ""
    """Reason text of the node's drain; empty if no reason is recorded. If it equals the reason that this run gives for
    its drains, this run drained the node."""


class AllocationStatus(Struct, frozen=True):
    """State of one allocation as the cluster reports it."""

    state: AllocationState
    job: str
    """The cluster's id of the allocation (a Slurm job id)."""
    nodes: tuple[NodeName, ...] = ()
    detail: str = ""
    """Pending reason or end state, in the cluster's own text."""
    unsatisfiable_reason: str = ""
    """Why a pending allocation can never start by itself, in the cluster's own text; empty if it may start."""
    time_left_s: float | None = None
    """Seconds until the cluster ends the allocation, as of this poll; None if the cluster reports no time."""
    reclaimed: bool = False
    """True if the cluster is ending or has ended the allocation by preemption or at its time limit."""
    cancelled: bool = False
    """True if the allocation ended because a user or administrator cancelled it."""


class ClusterSnapshot(Struct, frozen=True):
    """The result of one poll of the cluster.

    A part is None if it could not be read; nothing may be concluded from such a part. If an allocation or step is
    absent from a part that *was* read, the cluster does not list it.
    """

    nodes: dict[NodeName, NodeStatus] | None
    allocations: dict[str, AllocationStatus] | None
    """Status of each listed allocation, by tag; None if the allocations could not be read."""
    steps: dict[str, NodeName] | None
    """Node of each listed step of this run, by tag; None if the steps could not be read."""
    unknown: str = ""
    """Why parts are None; empty if all parts were read."""
    launchers_ended: frozenset[str] = frozenset()
    """Tags of launches whose srun failed before this poll began and before their step connected. If the cluster does
    not list such a step, the step will never appear."""


class Cluster(Protocol):
    """The operations of a cluster that the manager uses.

    All methods raise only Refused or Unanswered, and each returns within its own deadline.
    """

    async def request(self, request: AllocationRequest) -> None:
        """Request nodes, which :meth:`observe` then lists under ``request.tag``."""

    async def release(self, tag: str) -> None:
        """Give an allocation back and end everything that runs in it. Does nothing if the allocation has ended."""

    async def launch(self, step: Step) -> None:
        """Start a step, and return once the cluster has accepted it.

        Only the ``AdmissionRequest`` message of the step itself shows that it runs.

        Raises:
            AllocationNotRunning: the allocation of the step is not running.
        """

    async def release_launcher(self, tag: str) -> None:
        """Release the resources that were only needed to launch a step that has connected (on Slurm: kill its srun)."""

    async def stop(self, tag: str, grace: float) -> None:
        """End a step: SIGTERM, then SIGKILL after ``grace`` seconds. Does nothing if the step has ended."""

    async def drain(self, node: NodeName, reason: str) -> None:
        """Drain the node, so that the cluster places no new job there. ``reason`` begins with ``rrl:``.

        Raises:
            Refused: draining is not permitted, or somebody else has drained the node.
        """

    async def undrain(self, node: NodeName, reason: str) -> None:
        """Remove the drain of a node if the drain has this ``reason``. Does nothing if the node is not drained.

        Raises:
            Refused: the drain has another reason, so this run did not set it.
        """

    async def shrink(self, tag: str, nodes: tuple[NodeName, ...]) -> None:
        """Give single nodes of a running allocation back.

        Raises:
            Refused: the release would affect the other nodes of the allocation.
        """

    async def inject_fault(self, fault: Fault) -> str:
        """Inject a fault into a node or the cluster, end it after ``fault.seconds``, and return what was done as text.

        Raises:
            Refused: this cluster does not permit fault injection (Slurm only on a test cluster).
        """

    async def observe(self) -> ClusterSnapshot:
        """Return the nodes, allocations and steps of this run as the cluster reports them now. Never raises."""

    async def close(self) -> None:
        """Release local resources, such as child processes that launch steps. The steps keep running."""
