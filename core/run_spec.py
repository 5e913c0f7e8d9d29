"""What the manager's core needs of a job spec, as plain values.

``job.toml`` is read once, by pydantic (:mod:`rrl.config.job.schema`), at submission. From then on the run carries this
view: it is part of the journal, so that ``rrl status`` needs neither pydantic nor the file.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct

from .faults import Fault
from .phases import PHASES, Phase
from .phases import phase as declared_phase


class Resources(Struct, frozen=True):
    """What one member takes of one node."""

    cpus: int = 1
    gpus: int = 0
    mem: int = 0
    """bytes; 0 = the cluster's default"""


class RoleSpec(Struct, frozen=True):
    """One role. ``exclusive`` replicas take a node of their own; the others share what is left."""

    name: str
    kind: str
    """``trainer``, ``rollout``, ``trajectories``, ``reward`` or ``command`` (a role of the user's own)"""
    replicas: int
    min_replicas: int
    per_member: Resources
    exclusive: bool
    argv: tuple[str, ...]
    env: dict[str, str] = {}
    launcher: str = "direct"
    """``direct``, ``apptainer`` or ``pyxis``"""
    image: str = ""
    """of the container, where the launcher makes one"""
    watch: str = "api"
    """``api``: it joins by :func:`rrl.join`; ``activity``: its launcher watches CPU, GPU and output in its stead"""
    service: bool = True
    """it is to run as long as the others do; else its exit with code 0 completes it"""
    ranks: int = 1
    """members of each replica: a gang of so many processes that live and die together, each a step of its own"""
    per_node: int = 1
    """members that share a node"""
    warm: bool = False
    """nodes keep shadows of it: its command, started and waiting in :func:`rrl.join` until it is needed"""
    donor_rollouts: int = 0
    """nodes of rollouts that keep a shadow too, and can be taken over"""

    @property
    def standby_shares_node(self) -> bool:
        """Its shadows wait beside whoever works on a node and take nothing of it before they are needed: the trainer's.
        Those of other roles hold all that one of the role takes, GPUs too, and wait on spare nodes only."""
        return self.kind == "trainer"

    @property
    def nodes(self) -> int:
        """That each replica needs, where it takes whole nodes."""
        return -(-self.ranks // self.per_node)

    @property
    def members_on_node(self) -> Resources:
        """What its members on one node take together."""
        n = min(self.ranks, self.per_node)
        return Resources(self.per_member.cpus * n, self.per_member.gpus * n, self.per_member.mem * n)

    def replicas_fitting(self, node: Resources) -> int:
        """Replicas of one process that an empty node carries."""
        if self.exclusive:
            return 1
        pairs = ((node.cpus, self.per_member.cpus), (node.gpus, self.per_member.gpus), (node.mem, self.per_member.mem))
        return min((self.replicas, *(has // takes for has, takes in pairs if takes)))


class EnvSpec(Struct, frozen=True):
    """What is set up on a node before anything of a role runs there."""

    setup: tuple[str, ...] = ()
    """lines of bash"""
    modules: tuple[str, ...] = ()
    venv: str = ""
    conda: str = ""
    passed: tuple[str, ...] = ()
    """names, or patterns with ``*``, of variables that roles get from the submitting shell"""
    probe: tuple[str, ...] = ()
    """Python modules whose import each node must manage before a role is placed there"""
    python: str = ""
    """the interpreter on the nodes that has rrl"""
    probe_python: str = "python"
    """the one that the probe's modules are for: [env] python, or that of the venv or conda environment"""


class ContainerSpec(Struct, frozen=True):
    mounts: tuple[str, ...] = ()
    """``source:target[:ro]``, besides the run directory and the job's folder"""
    python: str = "python3"
    """in the image, with rrl installed"""


LogLevel = Literal["debug", "info", "warning", "error"]
DEFAULT_LOG_LEVEL: LogLevel = "info"


class ManagerSpec(Struct, frozen=True):
    where: str = "job"
    """``job``: a small Slurm job of its own; ``pool``: on the pool's first node"""
    sbatch: dict[str, str] = {}
    walltime: float = 0.0
    """of its own job (s), which the next manager's follows; 0: the run's, and a margin"""
    log_level: LogLevel = DEFAULT_LOG_LEVEL
    """of the manager's own messages, and those of agents, launchers and workers"""


class NodeGroup(Struct, frozen=True):
    """Nodes of one shape that carry some of the roles: the whole pool, or in the other forms one role's nodes."""

    name: str
    """``pool``, the name of a role, or ``shared`` (the roles that share nodes)"""
    roles: tuple[str, ...]
    nodes: int
    node: Resources
    walltime: float = 86400.0
    """of its allocations (s)"""
    sbatch: dict[str, str] = {}
    """further sbatch options, name without dashes; an empty value is a flag"""
    separate_jobs: bool = False
    """each node is a Slurm job of its own (form ``replica``)"""
    min_nodes: int = 0
    """nodes without which the run does not start"""


class PhaseSpec(Struct, frozen=True):
    """What the job says of one phase; None: as it is declared in :mod:`rrl.core.phases`, or neutral."""

    shortest: float | None = None
    longest: float | None = None
    progresses: bool | None = None
    waits_for: str | None = None


class Limits(Struct, frozen=True):
    """Deadlines and budgets, all in seconds unless said."""

    heartbeat: float = 1.0
    """between two beats of a worker or agent"""
    silence: float = 10.0
    """a replica or agent not heard for so long is lost; two independent witnesses condemn a node"""
    join: float = 120.0
    """from launch to Hello; RobustRL 1.4 needs about 80 s for scheduling and container"""
    step_grace: float = 5.0
    """between asking a step to stop and killing it"""
    allocation: float = 900.0
    """from a request for replacement nodes to these; then the next rung. The first pool waits as long as it takes"""
    quiet: float = 60.0
    """an intent without an answer stays open for so long: a timed-out sbatch can land later (measured)"""
    poll: float = 30.0
    """between two reads of the cluster (sites ask for 60 to 120 s per squeue); liveness does not hang on it"""
    rotate: float = 600.0
    """so long before an allocation's own end a successor is asked for, where the run goes on after it"""
    lease: float = 10.0
    """a manager's lease that does not change for so long is free"""
    adaptive: float = 5.0
    """no-progress deadline = so many times the usual duration of the phase (NVRx: 5), within the phase's bounds"""
    first_pass: float = 1800.0
    """grace added to the first pass of a phase in a life (compilation, warm-up; NVRx gives a start 1 h)"""
    suspect: float = 60.0
    """s without a token after which a rollout that generates is suspected and asked for one (RobustRL 1.2: 60 s); the
    usual gap of its role raises it (``adaptive``)"""
    probe: float = 30.0
    """s that a suspect has to answer; RobustRL does not say its own"""
    idle: float = 60.0
    """s without any work of CPU or GPU after which who must compute is suspected"""
    stragglers: str = "report"
    """what to do about who stays slow: ``HealthView.stragglers``"""
    phases: dict[str, PhaseSpec] = {}
    """by name: bounds that the job moves, and phases of its own"""

    def phase(self, name: str) -> Phase:
        """The phase as this job has it."""
        declared = declared_phase(name)
        if (overrides := self.phases.get(name)) is None:
            return declared
        given = {trait: value for trait, value in msgspec.structs.asdict(overrides).items() if value is not None}
        return msgspec.structs.replace(declared, **given)

    def is_known_phase(self, name: str) -> bool:
        """Somebody said how long this phase may last."""
        return name in PHASES or name in self.phases


class Recovery(Struct, frozen=True):
    """Budgets of the repair ladder."""

    window: float = 600.0
    """sliding window (s) in which restarts are counted"""
    per_node: int = 2
    """restarts in place of one replica on one node within the window; then it moves"""
    per_replica: int = 10
    """restarts of one replica within the window; then the run goes on without it for a window, or ends"""
    backoff: float = 1.0
    """pause (s) before the second restart within the window; doubles with each further one, up to 60 s"""
    first_start: int = 3
    """failed starts of a replica of which no life ever joined; then it is the job's mistake, not a node's"""
    breaker: float = 0.2
    """at most max(1, this share) of the nodes are excluded within the window, of five nodes or more at least two
    (docs/sources.md, guard rails)"""
    policy: str = "role"
    """``role``: only what failed comes back; ``job``: everything restarts in place from the last checkpoint (as
    RobustRL configured ByteRobust); ``requeue``: all nodes are given back and asked for anew (plain Slurm)"""
    promote: float = 10.0
    """s within which a shadow that was told to take part must be heard as what it became; then the next candidate"""
    full_restarts: int = 2
    """restarts of the whole run within the window, then it ends; 0: never, only budgets decide"""
    drain: bool = True
    """drain nodes on which we found a hardware fault, where Slurm lets us; else their drain is only asked for"""
    exclusion: float = 3600.0
    """s after which a node that was condemned without proof may be used again; doubles each time"""
    failure_rate: float = 0.0
    """probability that a node fails on a day (Meta's RSC-1: 0.0065), for standbys = "auto"; 0: not known"""


class HealthSpec(Struct, frozen=True):
    """How the nodes of a run are looked after (``[health]``)."""

    observe_only: bool = False
    """nothing is done for what a detector finds, but proof that a process or node is gone: it is told as WARN"""
    checks: dict[str, str] = {}
    """by detector or check: ``act``, ``observe`` (told as WARN, nothing is done) or ``off``"""
    admission: bool = True
    """a node is checked before the first role starts there; one that fails is not used"""
    stragglers: str = "report"
    """``report``, or ``exclude``: the node of a replica that stays slow is left for a spare, if there is one"""
    history: str = ""
    """folder that this run's findings are appended to, for the administrators' report; empty: none"""
    metrics: str = ""
    """``host:port`` where the manager serves Prometheus metrics; port 0: any free one; empty: it does not"""


class RunSpec(Struct, frozen=True):
    name: str
    steps: int
    """optimizer steps after which the run is complete; 0: it has no trainer, and is complete when its commands are"""
    cluster: str
    """``local`` or ``slurm``"""
    roles: tuple[RoleSpec, ...]
    node_groups: tuple[NodeGroup, ...]
    walltime: float = 86400.0
    """s from the first nodes to the end of the run; a part with a shorter one is asked for anew before its end"""
    spares: int = 0
    form: str = "pool"
    """``pool``, ``replica`` or ``hetjob`` (docs/architecture.md)"""
    start_within: float = 3600.0
    """s after which nodes that have come are given back, where others that the run cannot start without have not"""
    env: EnvSpec = EnvSpec()
    container: ContainerSpec = ContainerSpec()
    network: str = ""
    """name of an interface, or a CIDR, that everybody listens on; empty: chosen on each node"""
    weights: str = "auto"
    """how weights travel: ``auto``, ``ucx``, ``tcp`` or ``nixl``"""
    staleness: int | None = None
    """weight versions that a token may be old when it is trained on; None: no limit"""
    manager: ManagerSpec = ManagerSpec()
    limits: Limits = Limits()
    recovery: Recovery = Recovery()
    health: HealthSpec = HealthSpec()
    faults: tuple[Fault, ...] = ()
    """planned by the job itself"""
    faults_allowed: bool = False
    """``rrl inject`` may add others"""

    def role(self, name: str) -> RoleSpec:
        return next(role for role in self.roles if role.name == name)

    def kind(self, kind: str) -> tuple[RoleSpec, ...]:
        return tuple(role for role in self.roles if role.kind == kind)

    def node_group(self, name: str) -> NodeGroup:
        return next(part for part in self.node_groups if part.name == name)

    def node_group_of(self, role: str) -> NodeGroup:
        """The nodes that carry this role."""
        return next(part for part in self.node_groups if role in part.roles)

    @property
    def nodes(self) -> int:
        """Nodes of the whole run, spares included."""
        return sum(part.nodes for part in self.node_groups)


def pool_nodes(roles: tuple[RoleSpec, ...], node: Resources) -> int:
    """Nodes that the roles need: one for each exclusive replica, and as many as hold the others (first fit)."""
    exclusive = sum(role.replicas * role.nodes for role in roles if role.exclusive)
    shared: list[list[int]] = []
    for role in roles:
        if role.exclusive:
            continue
        for _ in range(role.replicas):
            members = [0] * len(shared)  # of this gang, on each node
            for _ in range(role.ranks):
                want = (role.per_member.cpus, role.per_member.gpus, role.per_member.mem)
                fitting = (
                    at for at, free in enumerate(shared)
                    if members[at] < role.per_node and all(f >= w for f, w in zip(free, want, strict=True))
                )  # fmt: skip
                target = next(fitting, len(shared))
                if target == len(shared):
                    shared.append([node.cpus, node.gpus, node.mem])
                    members.append(0)
                shared[target] = [f - w for f, w in zip(shared[target], want, strict=True)]
                members[target] += 1
    return exclusive + len(shared)
