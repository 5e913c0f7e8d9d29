"""The events of a run, which are the records of its journal: a tagged union of facts that have occurred.

Every record is a :class:`Stamped` event. Messages that the manager records as they are have no class of their own here.
New fields have defaults, and unknown fields are ignored. An unknown tag is an error of the journal, and no decision is
made from a journal that cannot be read.
"""

from __future__ import annotations

from msgspec import Struct

from ...cluster.base import AllocationStatus, NodeStatus, RejectReason
from ...core.faults import Fault, FaultKind
from ...core.launch import ExitReason
from ...core.phases import ClockReading
from ...core.run_spec import RunSpec
from ...core.types import (
    Finding,
    GpuUse,
    Incarnation,
    NodeName,
    Outcome,
    OutsideWait,
    RaisedException,
    ReplicaId,
    Version,
    WeightTraffic,
)
from ...health.detection.baselines import RoleBaseline
from ...transport.messages import Evaluated as Evaluated
from ...transport.messages import FirstWorkDone as FirstWorkDone
from ...transport.messages import StepCommitted as StepCommitted
from ...transport.messages import ValuesLogged as ValuesLogged
from ...transport.messages import VersionAvailable as VersionAvailable
from .actions import Decision, ExternalAction


class RunStarted(Struct, frozen=True, tag=True):
    """First record of a run."""

    run: str
    job: RunSpec


class ManagerStarted(Struct, frozen=True, tag=True):
    """First record of every manager epoch."""

    host: str
    pid: int
    job: str = ""
    """Id of the Slurm job that the manager runs in; empty if it runs outside of Slurm."""


class ManagerStopped(Struct, frozen=True, tag=True):
    """The manager stops in an orderly way."""

    why: str


class Intended(Struct, frozen=True, tag=True):
    """An external action is about to be carried out."""

    action: ExternalAction


class IntentSettled(Struct, frozen=True, tag=True):
    """An intent has a result: done (``ok``), or certainly not done (``detail`` is the cluster's explanation)."""

    tag: str
    ok: bool
    detail: str = ""
    undelivered: bool = False
    """True if the request probably never reached the cluster, because the manager or the network failed."""
    reason: RejectReason | None = None
    """Why the action was not done; None if it was done."""


class Decided(Struct, frozen=True, tag=True):
    """The planner made a decision that only changes the state."""

    action: Decision


class AllocationChanged(Struct, frozen=True, tag=True):
    """The cluster reports a changed status of an allocation.

    ``status`` is None if the cluster no longer lists the allocation.
    """

    tag: str
    status: AllocationStatus | None


class NodeChanged(Struct, frozen=True, tag=True):
    """The cluster reports a changed status of a node of this run."""

    node: NodeName
    status: NodeStatus


class ClusterUnknown(Struct, frozen=True, tag=True):
    """Polls of the cluster have begun to fail, in whole or in part, or the cluster answers again."""

    why: str
    """Why the state of the cluster is unknown; empty if it is known again."""
    since: float
    """Manager's time (s) of the first poll with this result."""


class AgentJoined(Struct, frozen=True, tag=True):
    """The agent of a node has connected."""

    incarnation: Incarnation
    node: NodeName
    host: str
    pid: int
    probe_error: str = ""
    """What ``[env] probe`` found missing on the node, as text; empty if nothing is missing."""
    snapshot_address: str = ""
    """Address of the agent's snapshot server, ``tcp://host:port``."""


class Admitted(Struct, frozen=True, tag=True):
    """The first process of a step runs and was admitted, so its launch is settled.

    ``node`` is the node that the process reported.
    """

    incarnation: Incarnation
    step: str
    node: NodeName
    pid: int


class Joined(Struct, frozen=True, tag=True):
    """The worker of an incarnation has connected."""

    incarnation: Incarnation
    node: NodeName
    host: str
    pid: int
    listen_address: str | None = None
    weight_address: str | None = None
    rendezvous_address: str | None = None


class StepEnded(Struct, frozen=True, tag=True):
    """The first process of a step has ended, according to its exit record or a witness (a process that observed it)."""

    incarnation: Incarnation
    step: str
    code: int | None
    signal: int | None
    reason: ExitReason
    last_line: str = ""
    detail: str = ""
    """Explanation of ``reason`` for people."""
    exception: RaisedException | None = None
    """Exception that ended the command, if the command reported one."""


class PhaseEntered(Struct, frozen=True, tag=True):
    """A replica has entered a phase."""

    incarnation: Incarnation
    phase: str
    waits_for: ReplicaId | None = None


class NoteChanged(Struct, frozen=True, tag=True):
    """The note of a replica, which is a message for users, has changed. An empty note removes the earlier note."""

    incarnation: Incarnation
    note: str


class OutsideWaitChanged(Struct, frozen=True, tag=True):
    """The store reports for whom outside of the run the whole run waits; None if it waits for nobody outside."""

    incarnation: Incarnation
    wait: OutsideWait | None = None


class FindingChanged(Struct, frozen=True, tag=True):
    """A finding has appeared or changed; verdict OK or UNKNOWN clears the finding of the same key."""

    finding: Finding


class FaultInjected(Struct, frozen=True, tag=True):
    """The result of a fault injection. Reports use it to mark injected failures and to measure their detection.

    A fault that lasts for some time has two of these events: one when it starts, and one when it ends (``ended``).
    """

    fault: str
    incarnation: Incarnation | None
    """Incarnation that the fault hit; None if it hit no incarnation, or several."""
    ok: bool
    """True if the fault was injected."""
    detail: str = ""
    """What was done, or why nothing was done, as reported by the component that injects the fault."""
    kind: FaultKind | None = None
    target: str = ""
    node: NodeName = NodeName("")
    ended: bool = False
    unknown: bool = False
    """True if it is not known whether the fault was injected; it is not tried again."""


class CommandReceived(Struct, frozen=True, tag=True):
    """A user has requested ``cancel``, ``restart``, ``drain``, ``undrain`` or ``resize``."""

    command: str
    by: str
    id: str
    """Id of the mailbox file, by which a command is handled only once."""
    target: str = ""
    """Replica to restart, node to drain or undrain, or rollout pool to resize."""
    keep_allocations: bool = False
    """True if ``cancel`` must not release the allocations."""
    reason: str = ""
    """Reason that the user gave for a ``drain``."""
    replicas: int | None = None
    """Number of replicas that a ``resize`` sets; None if the planner chooses it again."""


class FaultRequested(Struct, frozen=True, tag=True):
    """A user has requested a fault. Its result, or its rejection, is recorded as :class:`FaultInjected`."""

    fault: Fault
    by: str
    id: str
    """Id of the mailbox file, as in :class:`CommandReceived`."""


class Resumed(Struct, frozen=True, tag=True):
    """A user has resumed an ended run from its last commit, under the same id, with this job."""

    by: str
    id: str
    """Id of the mailbox file."""
    job: RunSpec


class TokensCounted(Struct, frozen=True, tag=True):
    """Number of tokens that all incarnations of the rollouts have generated so far, from their heartbeats.

    Recorded when the trainer is fenced and when it works again: the difference is the number of tokens generated while
    the trainer was down. Only totals of the same epoch can be compared.
    """

    total: int
    trainer_down: bool
    """True if the trainer is being fenced, False if it works again."""


class StacksCollected(Struct, frozen=True, tag=True):
    """Stacks of the processes of a suspect and of its gang, collected while it was suspected of a hang."""

    incarnation: Incarnation
    """Suspected incarnation."""
    groups: tuple[str, ...] = ()
    """One line for each group of equal stacks, outliers first; or a line that says why there are no stacks."""
    outliers: tuple[Incarnation, ...] = ()
    file: str = ""
    """File with all stacks, relative to the run directory; empty if none could be stored."""


class BaselinesLearned(Struct, frozen=True, tag=True):
    """The learned baselines of all roles, recorded when they differ noticeably from the previously recorded baselines.

    Without the record, the next manager would have no baselines and could mistake a slow step for a hang.
    """

    baselines: dict[str, RoleBaseline]
    """Baselines by role."""


class ClocksRecorded(Struct, frozen=True, tag=True):
    """The newest clock readings of processes: seconds since each process joined, by phase and idle cause.

    Recorded with some commits and otherwise once a minute. Contains the processes that reported since the previous
    record.
    """

    readings: tuple[tuple[Incarnation, ClockReading], ...]


class WeightsRecorded(Struct, frozen=True, tag=True):
    """The weight versions that rollouts hold now, for people only.

    Contains the rollouts whose version has changed since the previous record.
    """

    versions: tuple[tuple[Incarnation, Version], ...]
    traffic: tuple[WeightTraffic, ...] = ()
    """What each of them has received of all its versions, in the order of ``versions``; empty in earlier journals."""


class GpuUseRecorded(Struct, frozen=True, tag=True):
    """The use of the nodes' GPUs, for people only.

    Contains the nodes whose agents reported since the previous record.
    """

    nodes: dict[NodeName, GpuUse]


class EttrEstimated(Struct, frozen=True, tag=True):
    """The effective training time ratio as of the newest commit, recorded at intervals and at the end of the run.

    It is computed from all earlier events of the run; the record shows it to those who know only the state.
    """

    ettr: float


class RunEnded(Struct, frozen=True, tag=True):
    """Last record of a run: everything is released."""

    outcome: Outcome
    why: str


Event = (
    RunStarted
    | ManagerStarted
    | ManagerStopped
    | Intended
    | IntentSettled
    | Decided
    | AllocationChanged
    | NodeChanged
    | ClusterUnknown
    | AgentJoined
    | Admitted
    | Joined
    | StepEnded
    | PhaseEntered
    | NoteChanged
    | OutsideWaitChanged
    | FirstWorkDone
    | VersionAvailable
    | StepCommitted
    | FindingChanged
    | FaultInjected
    | CommandReceived
    | FaultRequested
    | Resumed
    | TokensCounted
    | StacksCollected
    | BaselinesLearned
    | ClocksRecorded
    | Evaluated
    | ValuesLogged
    | WeightsRecorded
    | GpuUseRecorded
    | EttrEstimated
    | RunEnded
)


class Stamped(Struct, frozen=True):
    """An event with its place in the journal.

    ``seq`` counts from 1 without gaps; ``at`` is the manager's wall clock (s) and never decreases within a journal.
    """

    seq: int
    at: float
    epoch: int
    event: Event
