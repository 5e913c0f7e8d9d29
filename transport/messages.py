"""The conversation of agents, steps and workers with the manager: one tagged union each way, versioned.

Upwards it is one-way: a beat is not answered. What a worker must know is pushed when it changes and carried again in
``Welcome``. Whoever loses the manager says Hello again to the next one, and a Hello carries everything that the next
manager needs to know: nothing sent before is counted on.
"""

from __future__ import annotations

from msgspec import Struct

from ..core.faults import Fault
from ..core.launch import ExitReason
from ..core.types import Finding, Incarnation, NodeName, ProbeResult, ReplicaId, Version

PROTOCOL_VERSION = 2
"""Version of this conversation; what a peer of another version says is dropped and counted."""


# ── upwards ────────────────────────────────────────────────────────────────────────────────────────────────────────
class AdmissionRequest(Struct, frozen=True, tag=True):
    """First word of every step, asked before it starts its command: am I (still) wanted? Answered ``Admitted``."""

    incarnation: Incarnation
    tag: str
    node: NodeName
    pid: int


class Hello(Struct, frozen=True, tag=True):
    """A worker joins, or joins again after losing the manager. Answered ``Welcome`` or ``Fenced``."""

    incarnation: Incarnation
    tag: str
    node: NodeName
    host: str
    pid: int
    phase: str
    listen_address: str | None = None
    """``tcp://host:port`` of a service that this replica offers (the trajectory store)"""
    weight_address: str | None = None
    """``<pipe>://host:port`` where its weight versions can be pulled"""
    weight_version: Version | None = None
    gpus: tuple[str, ...] = ()


class Heartbeat(Struct, frozen=True, tag=True):
    """I live. ``done`` counts units of work in this life (tokens, samples, steps), for progress detectors."""

    incarnation: Incarnation
    phase: str
    done: int
    waits_for: ReplicaId | None = None
    note: str = ""
    """what `rrl status` shows beside the replica, for people only; empty: nothing"""


class PhaseEntered(Struct, frozen=True, tag=True):
    """The phase changed."""

    incarnation: Incarnation
    phase: str
    done: int
    waits_for: ReplicaId | None = None


class FirstWorkDone(Struct, frozen=True, tag=True):
    """The first unit of work of this life is done (a rollout's first token after it joined)."""

    incarnation: Incarnation


class VersionAvailable(Struct, frozen=True, tag=True):
    """A complete, verified weight version is here and is served."""

    incarnation: Incarnation
    version: Version


class Committed(Struct, frozen=True, tag=True):
    """The trainer's step counts: the store has recorded it. ``metrics`` are for people (``reward``, ``loss``, ...)."""

    incarnation: Incarnation
    step: int
    metrics: dict[str, float]


class StepExit(Struct, frozen=True, tag=True):
    """From the step's first process: the exit record, told at once (the file is the durable copy)."""

    incarnation: Incarnation
    tag: str
    code: int | None
    signal: int | None
    reason: ExitReason
    last_line: str = ""
    """the last line that the command wrote, where it ended by itself and not well"""
    detail: str = ""
    """more about ``reason``, for people"""


class AgentHello(Struct, frozen=True, tag=True):
    incarnation: Incarnation
    tag: str
    node: NodeName
    host: str
    pid: int
    boot: str
    """boot id of the node: tells a reboot from a network cut"""
    probe: str = ""
    """what the node cannot do that roles need ([env] probe, the network to listen on); empty: it can"""
    memlock: int = -1
    """bytes that a role here may lock into memory, which RDMA does with all it registers; -1: no limit"""
    nofile: int = -1
    """files that it may have open; -1: no limit"""
    rdma: tuple[str, ...] = ()
    """names of the node's RDMA devices"""
    snapshot_address: str = ""
    """``tcp://host:port`` where its snapshots can be put and fetched"""
    findings: tuple[Finding, ...] = ()
    """what its checks find on the node just now, but what is OK; times as in ``Found``"""
    now: float = 0.0
    """the node's clock, as in ``Found``"""


class Load(Struct, frozen=True):
    """What the processes of one step took since the last beat that told loads."""

    tag: str
    cpu: float
    """cores"""
    gpu: float | None = None
    """share of the time in which a kernel ran on the busiest of its GPUs, 0 to 1; None: nobody can say"""
    tensor: float | None = None
    """share in which tensor cores worked, of the GPU where they did most; None: nobody can say"""


class AgentHeartbeat(Struct, frozen=True, tag=True):
    incarnation: Incarnation
    node: NodeName
    alive: tuple[str, ...] = ()
    """tags of the steps whose first process lives on this node"""
    loads: tuple[Load, ...] = ()
    """of those steps, each few beats; empty: not looked at since the last beat that told any"""


class StepVanished(Struct, frozen=True, tag=True):
    """From the agent, as a witness: the first process of this step is no more and left no exit record."""

    incarnation: Incarnation
    tag: str
    node: NodeName


class FindingReport(Struct, frozen=True, tag=True):
    """From an agent: a check of its node concludes something else than before; OK clears it. Times in the finding are
    of the node's clock, as is ``now``: the manager counts back from its own receipt."""

    finding: Finding
    incarnation: Incarnation
    """the agent's"""
    node: NodeName
    now: float


class ProbeReply(Struct, frozen=True, tag=True):
    """From a worker: the answer to ``Probe``."""

    incarnation: Incarnation
    id: int
    result: ProbeResult
    detail: str = ""
    """what was done for it, or why it failed; for people"""


class Stacks(Struct, frozen=True, tag=True):
    """From an agent: the answer to ``TakeStacks``. ``dumps``: process id → py-spy's dump of it."""

    incarnation: Incarnation
    """the agent's"""
    target: Incarnation
    id: int
    dumps: dict[int, str] = {}
    error: str = ""
    """why there are none"""


class Injected(Struct, frozen=True, tag=True):
    """From the agent, or from the role that did it to itself: the fault was performed (or not, and why)."""

    fault: Fault
    ok: bool
    detail: str = ""
    incarnation: Incarnation | None = None
    """whose; None: no such life was found"""
    node: NodeName = NodeName("")
    ended: bool = False
    """it was performed before, and is over now"""


class Goodbye(Struct, frozen=True, tag=True):
    """A worker leaves of its own accord, its work done."""

    incarnation: Incarnation


ToManager = (
    AdmissionRequest | Hello | Heartbeat | PhaseEntered | FirstWorkDone | VersionAvailable | Committed | StepExit
    | AgentHello | AgentHeartbeat | StepVanished | FindingReport | ProbeReply | Stacks | Injected | Goodbye
)  # fmt: skip


# ── downwards ──────────────────────────────────────────────────────────────────────────────────────────────────────
class WeightSource(Struct, frozen=True):
    """Who serves weights, and where they can be pulled."""

    incarnation: Incarnation
    address: str
    version: Version | None = None
    """its newest complete version; it may hold one more, and be receiving the newest"""


class Peer(Struct, frozen=True):
    incarnation: Incarnation
    listen_address: str | None = None
    joined: bool = False


class Peers(Struct, frozen=True, tag=True):
    """Who is believed, and who serves weights: the publisher first, then the receivers in the order of their names.
    ``seq`` orders within a manager epoch."""

    epoch: int
    seq: int
    peers: dict[ReplicaId, Peer]
    newest: Version | None = None
    weight_sources: tuple[WeightSource, ...] = ()
    snapshot_servers: dict[NodeName, str] = {}
    """where snapshots can be kept, by node: those of the trainer and of its standbys"""


class Admitted(Struct, frozen=True, tag=True):
    tag: str
    ok: bool
    reason: str = ""
    duplicate: bool = False
    """another process lives under this tag: leave no record, it would be taken for that one's"""


class Welcome(Struct, frozen=True, tag=True):
    """The only place that ranks come from. The rendezvous of a gang is where its first member listens (``Peers``)."""

    incarnation: Incarnation
    peers: Peers
    rank: int = 0
    world: int = 1
    step: int = 0
    """newest committed step that this manager knows of: the trainer reports those that follow"""


class Promote(Struct, frozen=True, tag=True):
    """To a shadow: from now on you are this life. Say Hello as such, under the tag of the step that you are."""

    standby: Incarnation
    incarnation: Incarnation
    tag: str
    gpus: tuple[str, ...] = ()
    """those of the node's that are its own from now on, as its Hello named them; empty: all that it has"""


class Fenced(Struct, frozen=True, tag=True):
    """You are not believed: stop working and leave."""

    incarnation: Incarnation
    reason: str
    tag: str = ""
    """of its step, which may have begun as a shadow's: told to the step's first process, or to the node's agent"""


class Stop(Struct, frozen=True, tag=True):
    """Finish what is in hand within ``grace`` s, then leave."""

    incarnation: Incarnation
    grace: float
    reason: str
    tag: str = ""
    """as in ``Fenced``"""


class Inject(Struct, frozen=True, tag=True):
    """To the agent on the target's node, or to the role itself: perform this fault on the step ``tag``."""

    fault: Fault
    tag: str


class Probe(Struct, frozen=True, tag=True):
    """To a worker that is suspected: do a bit of your work, and say so (``Probed``)."""

    incarnation: Incarnation
    id: int


class DumpStacks(Struct, frozen=True, tag=True):
    """To the agent on its node: what are the processes of this step doing? Answered ``Stacks``."""

    target: Incarnation
    tag: str
    id: int


FromManager = Peers | Admitted | Welcome | Promote | Fenced | Stop | Inject | Probe | DumpStacks
