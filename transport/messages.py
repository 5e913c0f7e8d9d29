"""The messages between the manager and the agents, launchers and workers: one tagged union per direction, versioned.

A message to the manager has a reply only if its class describes one; a heartbeat has no reply. When information for the
workers changes, the manager pushes the new information to them; ``Welcome`` repeats it. A worker that loses the manager
sends ``Hello`` to the next manager. A ``Hello`` contains everything that the next manager needs to know about the
worker.
"""

from __future__ import annotations

from msgspec import Struct

from ..core.faults import Fault
from ..core.launch import ExitRecord
from ..core.phases import ClockReading
from ..core.types import (
    DataReport,
    Finding,
    GpuUse,
    Incarnation,
    NodeName,
    ProbeResult,
    ReplicaId,
    Version,
    WeightTraffic,
)

PROTOCOL_VERSION = 6
"""Version of this protocol; messages of a peer with another version are dropped and counted."""


# ── to the manager ─────────────────────────────────────────────────────────────────────────────────────────────────
class AdmissionRequest(Struct, frozen=True, tag=True):
    """Sent by every step to ask whether it may (still) start its command. The reply is ``Admitted``."""

    incarnation: Incarnation
    tag: str
    node: NodeName
    pid: int


class Hello(Struct, frozen=True, tag=True):
    """Sent by a worker that joins, or joins again after losing the manager. The reply is ``Welcome`` or ``Fenced``."""

    incarnation: Incarnation
    tag: str
    node: NodeName
    host: str
    pid: int
    phase: str
    listen_address: str | None = None
    """``tcp://host:port`` of the service that this replica offers (the trajectory store); None if it offers no
    service."""
    rendezvous_address: str | None = None
    """``tcp://host:port`` of torch's store at which the members of this gang meet; only from its rank 0."""
    weight_address: str | None = None
    """``<transport>://host:port`` at which the replica's weight versions can be pulled; None if it serves no
    weights."""
    weight_version: Version | None = None
    gpus: tuple[str, ...] = ()


class Heartbeat(Struct, frozen=True, tag=True, omit_defaults=True):
    """Sent by a worker periodically. ``done`` counts units of work of this incarnation (tokens, samples, steps)."""

    incarnation: Incarnation
    phase: str
    done: int
    waits_for: ReplicaId | None = None
    note: str = ""
    """Text that `rrl status` shows beside the replica, for people only."""
    data: DataReport = DataReport()
    """In the store's heartbeat: what it knows about the data that the trainer needs next."""
    weights: Version | None = None
    """In the heartbeat of a process that gets weights: its newest complete version."""
    traffic: WeightTraffic = WeightTraffic()
    """In the heartbeat of a process that has weights: what it has received of all versions."""


class ClockReport(Struct, frozen=True, tag=True):
    """A worker's clock reading, for people; sent after some heartbeats, before each commit, and when it leaves.

    It is not part of the heartbeat, so that heartbeats stay small and no detector depends on the reading.
    """

    incarnation: Incarnation
    clock: ClockReading


class PhaseEntered(Struct, frozen=True, tag=True):
    """Sent by a worker when its phase has changed."""

    incarnation: Incarnation
    phase: str
    done: int
    waits_for: ReplicaId | None = None


class FirstWorkDone(Struct, frozen=True, tag=True):
    """Sent by a worker after the first unit of work of its incarnation (a rollout's first token after it joined).

    After a failure, the replica now works again. This message and the next four are events of the run's journal, too.
    """

    incarnation: Incarnation


class VersionAvailable(Struct, frozen=True, tag=True):
    """Sent by a worker that has a complete, verified weight version and serves it.

    A trainer sends it for each version, another worker only for its first one; heartbeats report the later ones.
    """

    incarnation: Incarnation
    version: Version


class StepCommitted(Struct, frozen=True, tag=True):
    """Sent by the trainer after the trajectory store has recorded the commit of a training step.

    ``metrics`` are for people (``reward``, ``loss``, ...).
    """

    incarnation: Incarnation
    step: int
    metrics: dict[str, float] = {}
    commit: int = 0
    """Newest training step of the commit that contains ``step``, to which the checkpoint belongs; 0 or ``step`` if
    ``step`` is the newest."""

    @property
    def completes_commit(self) -> bool:
        """True for the newest step of its commit. The time of its event is the time of the whole commit."""
        return self.step >= self.commit


class Evaluated(Struct, frozen=True, tag=True):
    """Sent by the trajectory store after an evaluation, repeatedly until ``Peers.evaluated`` shows its receipt."""

    incarnation: Incarnation
    step: int
    """Training step whose weights were evaluated."""
    metrics: dict[str, float]


MAX_LOGGED_NAMES, MAX_LOGGED_NAME_CHARS = 64, 100
"""Maximum number of names in one report of logged values, and maximum number of characters of a name. They limit the
run's journal, in which each report is an event. A worker refuses values beyond the limits, and the manager cuts off
what exceeds the limits in a report."""


class ValuesLogged(Struct, frozen=True, tag=True):
    """Sent by a worker whose role has logged values that belong to no training step: the newest value of each name."""

    incarnation: Incarnation
    values: dict[str, float]


class AgentHello(Struct, frozen=True, tag=True):
    """Sent by an agent that joins, or joins again after losing the manager.

    The reply is ``Fenced`` if the agent must exit; otherwise there is no reply.
    """

    incarnation: Incarnation
    tag: str
    node: NodeName
    host: str
    pid: int
    boot: str
    """Boot id of the node, which distinguishes a reboot from a network failure."""
    probe: str = ""
    """Text about the needs of roles that the node does not meet ([env] probe, the network to listen on); empty if it
    meets them all."""
    memlock: int = -1
    """Bytes that a role on this node may lock into memory, as RDMA does with registered memory; -1 if unlimited."""
    nofile: int = -1
    """Number of files that a role on this node may have open; -1 if unlimited."""
    rdma: tuple[str, ...] = ()
    """Names of the node's RDMA devices."""
    snapshot_address: str = ""
    """``tcp://host:port`` at which the agent stores and returns snapshots."""
    findings: tuple[Finding, ...] = ()
    """Current findings of the node's checks, except those with verdict OK. Their times are according to the node's
    clock."""
    now: float = 0.0
    """Time (s) of this message according to the node's clock, with which the manager converts the times of
    ``findings``."""


class Load(Struct, frozen=True):
    """The load of the processes of one step since the last heartbeat that reported loads."""

    tag: str
    cpu: float
    """CPU time that the processes used per second, in cores."""
    gpu: float | None = None
    """Share of the time (0 to 1) in which a kernel ran on the busiest GPU of the step; None if unknown."""
    tensor: float | None = None
    """Share of the time (0 to 1) in which tensor cores worked, on the GPU where they worked most; None if unknown."""
    stopped: bool = False
    """Whether a process of the step was stopped (state T or t in /proc) when the load was measured: by SIGSTOP, a
    debugger or a profiler."""


class AgentHeartbeat(Struct, frozen=True, tag=True):
    """Sent by an agent periodically."""

    incarnation: Incarnation
    node: NodeName
    alive: tuple[str, ...] = ()
    """Tags of the steps whose first process runs on this node."""
    loads: tuple[Load, ...] = ()
    """Loads of the steps in ``alive``. Only some heartbeats contain loads."""
    gpu_use: GpuUse | None = None
    """Use of the node's GPUs. None if the heartbeat contains no loads, the GPUs cannot be read, or the node has
    none."""


class StepVanished(Struct, frozen=True, tag=True):
    """Sent by an agent, as a witness, when the first process of a step is gone and left no exit record."""

    incarnation: Incarnation
    tag: str
    node: NodeName


class FindingReport(Struct, frozen=True, tag=True):
    """Sent by an agent when the result of a node check has changed; the verdict OK clears the check's finding.

    The times in the finding, and ``now``, are according to the node's clock. The manager converts the times in the
    finding to its own clock, on which ``now`` is the time of receipt.
    """

    finding: Finding
    incarnation: Incarnation
    """The incarnation of the agent."""
    node: NodeName
    now: float


class ProbeReply(Struct, frozen=True, tag=True):
    """The reply of a worker to ``Probe``."""

    incarnation: Incarnation
    id: int
    result: ProbeResult
    detail: str = ""
    """Text about what the probe handler did, or why it failed."""


class Stacks(Struct, frozen=True, tag=True):
    """The reply of an agent to ``DumpStacks``. ``dumps`` maps each process id to the output of py-spy."""

    incarnation: Incarnation
    """The incarnation of the agent."""
    target: Incarnation
    id: int
    dumps: dict[int, str] = {}
    error: str = ""
    """Reason why ``dumps`` is empty; an empty text if ``dumps`` is not empty."""


class Injected(Struct, frozen=True, tag=True):
    """Sent by an agent or a role: whether a fault was injected and, if it was not, the reason (``detail``)."""

    fault: Fault
    ok: bool
    detail: str = ""
    incarnation: Incarnation | None = None
    """The incarnation into which the fault was injected; None if no incarnation was found."""
    node: NodeName = NodeName("")
    ended: bool = False
    """True if the fault was injected before and has now ended."""


class Goodbye(Struct, frozen=True, tag=True):
    """Sent by a worker that leaves because its work is done."""

    incarnation: Incarnation


ToManager = (
    AdmissionRequest
    | Hello
    | Heartbeat
    | ClockReport
    | PhaseEntered
    | FirstWorkDone
    | VersionAvailable
    | StepCommitted
    | Evaluated
    | ValuesLogged
    | ExitRecord
    | AgentHello
    | AgentHeartbeat
    | StepVanished
    | FindingReport
    | ProbeReply
    | Stacks
    | Injected
    | Goodbye
)


# ── from the manager ───────────────────────────────────────────────────────────────────────────────────────────────
class Peer(Struct, frozen=True):
    """A current incarnation, as other processes see it."""

    incarnation: Incarnation
    listen_address: str | None = None
    joined: bool = False
    weight_address: str | None = None
    """Address at which its weight versions can be pulled; None if it serves no weights. The trajectory store knows
    which versions it has."""
    rendezvous_address: str | None = None
    """Address at which the members of this gang meet; None for other members than rank 0."""


class Peers(Struct, frozen=True, tag=True):
    """The peer directory: the current incarnations. ``seq`` orders the ``Peers`` messages of one manager epoch."""

    epoch: int
    seq: int
    peers: dict[ReplicaId, Peer]
    snapshot_servers: dict[NodeName, str] = {}
    """Addresses of the snapshot servers on the nodes of the trainer and of its standby processes, by node."""
    evaluated: int = -1
    """Newest training step whose evaluation the manager has recorded; -1 if it has recorded none."""


class Admitted(Struct, frozen=True, tag=True):
    """Sent to a step: whether it may start its command."""

    tag: str
    ok: bool
    reason: str = ""
    duplicate: bool = False
    """True if another process runs with this tag. The receiver must then not write an exit record, because the record
    would be attributed to the other process."""


class Welcome(Struct, frozen=True, tag=True):
    """Sent to a worker that has joined. Ranks are assigned by this message only.

    The members of a gang meet at the address that its first member reports (see ``Peer``).
    """

    incarnation: Incarnation
    peers: Peers
    rank: int = 0
    world: int = 1
    step: int = 0
    """Newest committed step that this manager has recorded. The trainer reports only later steps."""


class Promote(Struct, frozen=True, tag=True):
    """Sent to a standby process, which becomes ``incarnation``.

    The reply is the ``Hello`` of that incarnation, with the tag of the step that the process runs in.
    """

    standby: Incarnation
    incarnation: Incarnation
    tag: str
    gpus: tuple[str, ...] = ()
    """GPUs of the node that the process must use, named as in its ``Hello``. Empty if it must use all GPUs that it
    has."""


class Fenced(Struct, frozen=True, tag=True):
    """Sent to an incarnation that is no longer current: it must stop working and exit."""

    incarnation: Incarnation
    reason: str
    tag: str = ""
    """Tag of the incarnation's step, which may have started as a standby process. Set only in messages to the step's
    launcher or to the node's agent."""


class Stop(Struct, frozen=True, tag=True):
    """Sent to a replica: it must finish the current work within ``grace`` s, then exit."""

    incarnation: Incarnation
    grace: float
    reason: str
    tag: str = ""
    """Tag of the incarnation's step. Set only in messages to the step's launcher or to the node's agent."""


class Inject(Struct, frozen=True, tag=True):
    """Sent to the agent on the target's node, or to the target: it must inject this fault into the step ``tag``."""

    fault: Fault
    tag: str


class Probe(Struct, frozen=True, tag=True):
    """Sent to a suspected worker: it must do a small unit of work and reply with ``ProbeReply``."""

    incarnation: Incarnation
    id: int


class DumpStacks(Struct, frozen=True, tag=True):
    """Sent to an agent: it must return the stacks of the processes of this step. The reply is ``Stacks``."""

    target: Incarnation
    tag: str
    id: int


FromManager = Peers | Admitted | Welcome | Promote | Fenced | Stop | Inject | Probe | DumpStacks
