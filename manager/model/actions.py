"""The planner's actions, each with its reason: external actions have effects outside of the manager, decisions do not.

The executor journals each external action as an intent before it carries it out. A ``tag`` names an action uniquely, so
that its result can be found later (an idempotency key).
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from ...cluster.base import AllocationRequest
from ...core.faults import Fault
from ...core.types import Cause, Incarnation, NodeName, Outcome, ReplicaId


class Rung(StrEnum):
    """A rung of the repair ladder (docs/architecture/recovery.md). The planner takes the first that fits."""

    IN_PLACE = "restart in place"
    SPARE = "spare node"
    STANDBY = "warm standby"
    """Promote a standby process on another node: a spare, or a node that rollouts leave for it."""
    REPLACEMENT = "replacement allocation"
    DEGRADED = "go on degraded"
    FULL_RESTART = "restart the whole run from its checkpoint"
    GIVE_UP = "release everything"


class LowerRungs(Struct, frozen=True):
    """Rungs before the one that was taken, and what they would have needed. ``rrl explain`` shows this."""

    rungs: tuple[Rung, ...]
    """The rungs; empty if ``needed`` holds for every rung before the one that was taken."""
    needed: str
    """What was missing, as a noun phrase."""


class Why(Struct, frozen=True):
    """The reason for an action: evidence, rung, and expected result with its deadline (manager's time, s)."""

    evidence: tuple[str, ...]
    rung: Rung | None = None
    expects: str = ""
    deadline: float | None = None
    lower: tuple[LowerRungs, ...] = ()
    """What the rungs before ``rung`` would have needed; empty if there are none, or in journals of an older rrl."""


def every_lower(needed: str) -> tuple[LowerRungs, ...]:
    """Return the record for the case that all rungs before the taken one lack the same thing."""
    return (LowerRungs((), needed),)


class Request(Struct, frozen=True, tag=True):
    """Request nodes from the cluster."""

    request: AllocationRequest
    why: Why

    @property
    def tag(self) -> str:
        """Return the tag of the allocation request."""
        return self.request.tag


class Release(Struct, frozen=True, tag=True):
    """Release an allocation."""

    allocation: str
    why: Why

    @property
    def tag(self) -> str:
        """Return the tag of this release."""
        return f"{self.allocation}!release"


class Launch(Struct, frozen=True, tag=True):
    """Start an incarnation (of a role, an agent or a standby process) on a node."""

    incarnation: Incarnation
    step: str
    """Tag of the step."""
    allocation: str
    node: NodeName
    why: Why
    standby: Incarnation | None = None
    """Standby process that is promoted to this incarnation and keeps its step; None if a new step is started."""

    @property
    def tag(self) -> str:
        """Return the tag of the step."""
        return self.step


class StopStep(Struct, frozen=True, tag=True):
    """Stop a step, whether its incarnation is current or not."""

    step: str
    incarnation: Incarnation
    grace: float
    why: Why

    @property
    def tag(self) -> str:
        """Return the tag of this stop."""
        return f"{self.step}!stop"


def fault_tag(fault: str) -> str:
    """Return the tag of the injection of the fault with this id."""
    return f"fault:{fault}"


class InjectFault(Struct, frozen=True, tag=True):
    """Inject a planned or requested fault.

    ``step``, ``node`` and ``incarnation`` identify the target at the time of this action; a field is empty if the fault
    has no target of that kind.
    """

    fault: Fault
    step: str
    node: NodeName
    why: Why
    incarnation: Incarnation | None = None

    @property
    def tag(self) -> str:
        """Return the tag of this injection."""
        return fault_tag(self.fault.id)


class Drain(Struct, frozen=True, tag=True):
    """Drain a node, so that the cluster starts no new job there.

    ``reason`` begins with ``rrl:<run>:``, which marks the drains of this run.
    """

    node: NodeName
    reason: str
    why: Why

    @property
    def tag(self) -> str:
        """Return the tag of this drain."""
        return f"{self.node}!drain"


class Undrain(Struct, frozen=True, tag=True):
    """Remove this run's drain of a node; a drain with any other reason is kept."""

    node: NodeName
    reason: str
    why: Why

    @property
    def tag(self) -> str:
        """Return the tag of this undrain."""
        return f"{self.node}!undrain"


class Shrink(Struct, frozen=True, tag=True):
    """Release single nodes of a running allocation, if this does not affect its other nodes."""

    allocation: str
    nodes: tuple[NodeName, ...]
    why: Why

    @property
    def tag(self) -> str:
        """Return the tag of this release of single nodes."""
        return f"{self.allocation}!shrink:{','.join(self.nodes)}"


class Fence(Struct, frozen=True, tag=True):
    """End an incarnation permanently: from then on nothing from it is accepted.

    This action only changes the recorded state, so it takes effect when its event is journaled. ``target_node`` is
    where the replica is launched next. ``charged`` says whether the fence counts against the replica's budget. It is
    False for a move without a failure, for a restart after the failure of another gang member, and for a restart that a
    user requested.
    """

    incarnation: Incarnation
    rung: Rung
    why: Why
    target_node: NodeName | None = None
    charged: bool = True

    @property
    def tag(self) -> str:
        """Return the tag of this fence."""
        return f"{self.incarnation}!fence"


class Resize(Struct, frozen=True, tag=True):
    """Change which replicas a rollout pool has.

    The ids in ``start`` are launched as soon as they have nodes. The ids in ``stop`` are fenced without a charge, and
    the run no longer has them. This action only changes the recorded state.
    """

    pool: str
    """Name of the role."""
    start: tuple[ReplicaId, ...]
    stop: tuple[ReplicaId, ...]
    why: Why

    @property
    def tag(self) -> str:
        """Return the tag of this decision."""
        return f"{self.pool}!resize"


class WithdrawGuests(Struct, frozen=True, tag=True):
    """Go on without guests until a user resumes the run. This action only changes the recorded state."""

    why: Why

    @property
    def tag(self) -> str:
        """Return the tag of this decision."""
        return "guests!withdraw"


class Exclude(Struct, frozen=True, tag=True):
    """Stop using a node in this run.

    An exclusion without proof ends after a while (see ``node_lifecycle``). If a user requested the exclusion (``by``),
    it lasts until a user undrains the node.
    """

    node: NodeName
    why: Why
    cause: Cause | None = None
    """Cause of the finding that excludes the node; None if there is no finding."""
    proof: bool = False
    by: str = ""

    @property
    def tag(self) -> str:
        """Return the tag of this exclusion."""
        return f"{self.node}!exclude"


class Finish(Struct, frozen=True, tag=True):
    """End the run: this decision fixes its outcome, and the shutdown begins."""

    outcome: Outcome
    why: Why

    @property
    def tag(self) -> str:
        """Return the tag of this decision."""
        return "finish"


class Readmit(Struct, frozen=True, tag=True):
    """Use an excluded node again."""

    node: NodeName
    why: Why

    @property
    def tag(self) -> str:
        """Return the tag of this readmission."""
        return f"{self.node}!readmit"


class RestartAll(Struct, frozen=True, tag=True):
    """Fence every role and restart the whole run from its last checkpoint. The roles keep their nodes."""

    why: Why
    fences: tuple[Fence, ...] = ()
    """One fence for each incarnation that ends. The fence names the node of the replica's next launch."""

    @property
    def failed(self) -> Incarnation | None:
        """Return the incarnation whose failure led to the restart and counts against the budget of its replica."""
        return next((fence.incarnation for fence in self.fences if fence.charged), None)

    @property
    def tag(self) -> str:
        """Return the tag of this decision."""
        return "restart-all"


ExternalAction = Request | Release | Launch | StopStep | InjectFault | Drain | Undrain | Shrink
"""Actions with an effect outside of the manager: the intent is journaled, then the action is carried out, then its
result is journaled."""

Decision = Fence | Exclude | Readmit | Resize | WithdrawGuests | RestartAll | Finish
"""Actions that only change the state; they take effect when their event is journaled."""

Action = ExternalAction | Decision
