"""What happened, never what to do: one tagged union, the records of the journal.

Every record is a :class:`Stamped` event. New fields have defaults; unknown fields are ignored; an unknown tag is
reported by the journal and nothing is decided from a journal that cannot be read.
"""

from __future__ import annotations

from msgspec import Struct

from ...core.faults import Fault, FaultKind
from ...core.launch import ExitReason
from ...core.run_spec import RunSpec
from ...core.types import Finding, Incarnation, NodeName, Outcome, ReplicaId, Version
from ...health.detection.baselines import RoleBaseline
from ..cluster.base import AllocationStatus, NodeStatus, RejectReason
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
    """Slurm job of the manager itself, if it runs in one"""


class ManagerStopped(Struct, frozen=True, tag=True):
    """The manager leaves in order."""

    why: str


class Intended(Struct, frozen=True, tag=True):
    """An action with an effect outside is about to be tried."""

    action: ExternalAction


class IntentSettled(Struct, frozen=True, tag=True):
    """An intent is settled: ``ok``, or certainly not done (``detail`` says what the cluster said)."""

    tag: str
    ok: bool
    detail: str = ""
    undelivered: bool = False
    """not done because it never reached the cluster, as far as anybody can tell: its manager died, or the network"""
    reason: RejectReason | None = None
    """why it was not done; None where it was"""


class Decided(Struct, frozen=True, tag=True):
    """The planner decided something that changes only what is believed."""

    action: Decision


class AllocationChanged(Struct, frozen=True, tag=True):
    """The cluster tells an allocation of ours differently than before; None = no longer listed."""

    tag: str
    status: AllocationStatus | None


class NodeChanged(Struct, frozen=True, tag=True):
    node: NodeName
    status: NodeStatus


class AgentJoined(Struct, frozen=True, tag=True):
    incarnation: Incarnation
    node: NodeName
    host: str
    pid: int
    probe_error: str = ""
    """what its node cannot do that the job's roles need (``[env] probe``), in its own words; empty: it can"""
    snapshot_address: str = ""
    """where the snapshots that it keeps can be put and fetched, ``tcp://host:port``"""


class Admitted(Struct, frozen=True, tag=True):
    """The step's first process really runs: its launch is settled. ``node`` is where it says that it is."""

    incarnation: Incarnation
    step: str
    node: NodeName
    pid: int


class Joined(Struct, frozen=True, tag=True):
    """A worker said Hello in this life."""

    incarnation: Incarnation
    node: NodeName
    host: str
    pid: int
    listen_address: str | None = None
    weight_address: str | None = None


class StepEnded(Struct, frozen=True, tag=True):
    """The first process of a step is gone, by its own exit record or by a witness."""

    incarnation: Incarnation
    step: str
    code: int | None
    signal: int | None
    reason: ExitReason
    last_line: str = ""
    detail: str = ""
    """more about ``reason``, for people"""


class PhaseEntered(Struct, frozen=True, tag=True):
    incarnation: Incarnation
    phase: str
    waits_for: ReplicaId | None = None


class NoteChanged(Struct, frozen=True, tag=True):
    """What a replica wants people to know of it has changed; empty: nothing any more."""

    incarnation: Incarnation
    note: str


class FirstWorkDone(Struct, frozen=True, tag=True):
    """The first unit of work in this life: a replacement generates again."""

    incarnation: Incarnation


class VersionAvailable(Struct, frozen=True, tag=True):
    """A life holds a complete, verified weight version."""

    incarnation: Incarnation
    version: Version


class StepCommitted(Struct, frozen=True, tag=True):
    """The store recorded the commit of a trainer step."""

    incarnation: Incarnation
    step: int
    metrics: dict[str, float] = {}


class FindingChanged(Struct, frozen=True, tag=True):
    """A detector concludes something else than before; OK clears the finding of the same key."""

    finding: Finding


class FaultInjected(Struct, frozen=True, tag=True):
    """The truth about an injected fault, so that detection can be scored and reports tell injected from real.

    What lasts has two: when it began, and when it was over (``ended``)."""

    fault: str
    incarnation: Incarnation | None
    """that was hit; None: none was, or not one"""
    ok: bool
    """it was performed"""
    detail: str = ""
    """what was done, or why not, in the words of whoever did it"""
    kind: FaultKind | None = None
    target: str = ""
    node: NodeName = NodeName("")
    ended: bool = False
    unknown: bool = False
    """nobody knows whether it was performed; it is not tried again"""


class CommandReceived(Struct, frozen=True, tag=True):
    """A person asked for something: ``cancel``, ``restart``, ``drain`` or ``undrain``."""

    command: str
    by: str
    id: str
    """of the mailbox file: a command is taken once"""
    target: str = ""
    """the replica that is to restart, or the node"""
    keep_allocations: bool = False
    """``cancel``: the allocations are not given back"""
    reason: str = ""
    """``drain``: in the person's own words"""


class FaultRequested(Struct, frozen=True, tag=True):
    """A person ordered a fault. A :class:`FaultInjected` tells what came of it, also of one that is refused."""

    fault: Fault
    by: str
    id: str
    """of the mailbox file, as in :class:`Commanded`"""


class Resumed(Struct, frozen=True, tag=True):
    """A person had a run that has ended go on from its last commit, under the same id, with this job."""

    by: str
    id: str
    """of the mailbox file"""
    job: RunSpec


class TokensCounted(Struct, frozen=True, tag=True):
    """What rollouts have generated so far, all lives together, as told by their beats. Recorded when the trainer is
    fenced and when it works again: so many tokens were made while it was away. Totals of one epoch can be compared."""

    total: int
    trainer_down: bool
    """the trainer goes; else it is back"""


class StacksCollected(Struct, frozen=True, tag=True):
    """What the processes of a suspect and of its gang were doing, while it was suspected."""

    incarnation: Incarnation
    """the suspect"""
    groups: tuple[str, ...] = ()
    """a line for each group of equal stacks, outliers first; or why there are none"""
    outliers: tuple[Incarnation, ...] = ()
    file: str = ""
    """with all of them, relative to the run directory; empty: none could be kept"""


class BaselinesLearned(Struct, frozen=True, tag=True):
    """What is usual of each role, all of it, where it is noticeably another than recorded before: the next manager
    would have to learn it anew, and take a hang for a slow step meanwhile."""

    baselines: dict[str, RoleBaseline]
    """by role"""


class RunEnded(Struct, frozen=True, tag=True):
    """Last record: everything is given back."""

    outcome: Outcome
    why: str


Event = (
    RunStarted | ManagerStarted | ManagerStopped | Intended | IntentSettled | Decided | AllocationChanged | NodeChanged
    | AgentJoined | Admitted | Joined | StepEnded | PhaseEntered | NoteChanged | FirstWorkDone | VersionAvailable | StepCommitted
    | FindingChanged | FaultInjected | CommandReceived | FaultRequested | Resumed | TokensCounted | StacksCollected | BaselinesLearned | RunEnded
)  # fmt: skip


class Stamped(Struct, frozen=True):
    """``seq`` counts from 1 without gaps; ``at`` is the manager's wall clock (s), never decreasing within a journal."""

    seq: int
    at: float
    epoch: int
    event: Event
