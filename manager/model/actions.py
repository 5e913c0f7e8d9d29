"""What the manager can do to the world, each with its reason. The executor journals each as an intent first."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from ...core.faults import Fault
from ...core.types import Cause, Incarnation, NodeName, Outcome
from ..cluster.base import AllocationRequest


class Rung(StrEnum):
    """The repair ladder of docs/architecture.md; the first rung that fits the evidence is taken."""

    IN_PLACE = "restart in place"
    SPARE = "spare node"
    DONOR = "warm standby"
    """a rollout's node, whose shadow becomes the member; the rollout is made up for in the background"""
    REPLACEMENT = "replacement allocation"
    DEGRADED = "go on degraded"
    FULL_RESTART = "restart the whole run from its checkpoint"
    GIVE_UP = "release everything"


class Why(Struct, frozen=True):
    """Why an action is taken: the evidence it was made from, the rung, and what is expected of it by when."""

    evidence: tuple[str, ...]
    rung: Rung | None = None
    expects: str = ""
    deadline: float | None = None


class Request(Struct, frozen=True, tag=True):
    """Ask the cluster for nodes."""

    request: AllocationRequest
    why: Why

    @property
    def tag(self) -> str:
        return self.request.tag


class Release(Struct, frozen=True, tag=True):
    """Give an allocation back."""

    allocation: str
    why: Why

    @property
    def tag(self) -> str:
        return f"{self.allocation}!release"


class Launch(Struct, frozen=True, tag=True):
    """Start one life of a replica (or of an agent) on a node."""

    incarnation: Incarnation
    step: str
    """tag of the step"""
    allocation: str
    node: NodeName
    why: Why
    standby: Incarnation | None = None
    """nothing is started: this shadow, whose step it is, becomes the life"""

    @property
    def tag(self) -> str:
        return self.step


class StopStep(Struct, frozen=True, tag=True):
    """End a step, whoever lives in it."""

    step: str
    incarnation: Incarnation
    grace: float
    why: Why

    @property
    def tag(self) -> str:
        return f"{self.step}!stop"


class InjectFault(Struct, frozen=True, tag=True):
    """Have a planned or ordered fault performed. ``step``, ``node`` and ``life`` are what its target is at this moment;
    empty where the fault is not about such a thing."""

    fault: Fault
    step: str
    node: NodeName
    why: Why
    incarnation: Incarnation | None = None

    @property
    def tag(self) -> str:
        return f"fault:{self.fault.id}"


class Drain(Struct, frozen=True, tag=True):
    """Have the cluster give the node to nobody any more. ``reason`` begins with ``rrl:<run>:``, by which we know it."""

    node: NodeName
    reason: str
    why: Why

    @property
    def tag(self) -> str:
        return f"{self.node}!drain"


class Undrain(Struct, frozen=True, tag=True):
    """Take back a drain of this run's own: one with exactly this reason, and no other."""

    node: NodeName
    reason: str
    why: Why

    @property
    def tag(self) -> str:
        return f"{self.node}!undrain"


class Shrink(Struct, frozen=True, tag=True):
    """Give single nodes of a running allocation back, where the cluster can do that without hurting the others."""

    allocation: str
    nodes: tuple[NodeName, ...]
    why: Why

    @property
    def tag(self) -> str:
        return f"{self.allocation}!shrink:{','.join(self.nodes)}"


class Fence(Struct, frozen=True, tag=True):
    """From now on a life is not believed. Decided and done in one: no intent, the event itself is the deed.

    ``to``: where its replica is wanted next. ``charged``: it counts as a failure of the replica, on its budget; not
    where it moves for another reason, restarts because a member of its gang failed, or was asked to by a person."""

    incarnation: Incarnation
    rung: Rung
    why: Why
    target_node: NodeName | None = None
    charged: bool = True

    @property
    def tag(self) -> str:
        return f"{self.incarnation}!fence"


class Exclude(Struct, frozen=True, tag=True):
    """A node is no longer used by this run: for a time if there is no proof, and until somebody says so if a person
    asked for it (``by``)."""

    node: NodeName
    why: Why
    cause: Cause | None = None
    """that was found"""
    proof: bool = False
    by: str = ""

    @property
    def tag(self) -> str:
        return f"{self.node}!exclude"


class Finish(Struct, frozen=True, tag=True):
    """The run is over, or is to be ended: ``outcome`` is decided here and does not change afterwards."""

    outcome: Outcome
    why: Why

    @property
    def tag(self) -> str:
        return "finish"


class Readmit(Struct, frozen=True, tag=True):
    """An excluded node may be used again."""

    node: NodeName
    why: Why

    @property
    def tag(self) -> str:
        return f"{self.node}!readmit"


class RestartAll(Struct, frozen=True, tag=True):
    """Every role's life is fenced and wanted again, and the whole run goes on from its last checkpoint: in place, or by
    policy ``requeue`` on nodes asked for anew."""

    why: Why
    fences: tuple[Fence, ...] = ()
    """every life that is given up, and where it is wanted next"""

    @property
    def failed(self) -> Incarnation | None:
        """Whose failure led to it, and on whose budget it counts."""
        return next((fence.incarnation for fence in self.fences if fence.charged), None)

    @property
    def tag(self) -> str:
        return "restart-all"


ExternalAction = Request | Release | Launch | StopStep | InjectFault | Drain | Undrain | Shrink
"""Actions with a side effect outside: intent first, then the deed, then its result."""

Decision = Fence | Exclude | Readmit | RestartAll | Finish
"""Actions that only change what is believed: the journal record is the deed."""

Action = ExternalAction | Decision
