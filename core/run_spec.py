"""The run spec: the settings of a job as plain values, which the manager and the roles read.

``job.toml`` is read once, by pydantic (:mod:`rrl.config.job.schema`), at submission. Afterwards only the run spec is
used. The journal contains it, so that ``rrl status`` needs neither pydantic nor ``job.toml``.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec
from msgspec import Struct

from .faults import Fault
from .phases import PHASES, Phase, PhaseSpec
from .phases import phase as declared_phase
from .role_environment import EnvSpec
from .task_spec import EvalSpec, TaskSpec
from .types import DEFAULT_LOG_LEVEL, GUEST_ROLE, TRAINER, LogLevel, ReplicaId, Resources, role_of

WeightTransportName = Literal["ucx", "tcp", "nixl"]
"""The weight transports. Each one is implemented in the module of that name in ``rrl.transport.weights``."""
WeightsSetting = Literal["auto", WeightTransportName]
"""Values of ``[transport] weights``. With ``auto`` each machine selects its transport."""
DeltaSetting = Literal["auto"] | bool
"""Values of ``[transport] delta``. With ``auto`` each receiver learns whether deltas are faster than whole chunks."""
INTEROPERABLE_TRANSPORTS: frozenset[WeightTransportName] = frozenset({"tcp", "ucx"})
"""Transports that can pull from each other. Any other transport can pull only from addresses of its own kind."""


RoleKind = Literal["trainer", "rollout", "trajectories", "reward", "agents", "endpoint", "command"]
"""What a role does in the run; ``command`` is a program of the user. Several roles may have the same kind, but a run
has one trainer and one store, whose ids are fixed (:data:`rrl.core.types.TRAINER`, :data:`rrl.core.types.STORE`)."""


class RoleTraits(Struct, frozen=True):
    """What rrl may expect of the roles of a kind."""

    phases: tuple[str, ...] = ()
    """The phases of rrl that its program reports."""
    trains: bool = False
    """True if it trains the weights, publishes their versions and commits the steps."""
    gets_weights: bool = False
    """True if its replicas receive each published version of the weights."""
    leases_turns: bool = False
    """True if it leases trajectories and turns and generates their tokens, which are its units of work."""
    may_be_displaced: bool = False
    """True if a replica may have to leave its node to a standby process of the trainer."""
    may_shrink: bool = False
    """True if the run goes on with a single replica of it, unless the job sets ``min_replicas``."""
    answers_probes: bool = False
    """True if rrl's own program of it answers probes."""
    runs_model_code: bool = False
    """True if it runs programs of the user, and in them often code that the model writes."""

    @property
    def has_weights(self) -> bool:
        """Return whether its replicas hold the weights on GPUs, and can work only once they have loaded them."""
        return self.trains or self.gets_weights


ROLE_TRAITS: dict[RoleKind, RoleTraits] = {
    "trainer": RoleTraits(("starting", "wait_data", "lend", "train", "checkpoint", "publish", "between"), trains=True),
    "rollout": RoleTraits(
        ("starting", "wait_weights", "loading_weights", "wait_work", "generate", "between"),
        gets_weights=True,
        leases_turns=True,
        may_be_displaced=True,
        may_shrink=True,
        answers_probes=True,
    ),
    "trajectories": RoleTraits(("starting", "serve"), answers_probes=True),
    "reward": RoleTraits(("starting", "wait_work", "score"), answers_probes=True, runs_model_code=True),
    "agents": RoleTraits(
        ("starting", "wait_work", "act", "wait_turn"), may_shrink=True, answers_probes=True, runs_model_code=True
    ),
    "endpoint": RoleTraits(("starting", "wait_work", "wait_turn"), may_shrink=True, answers_probes=True),
    "command": RoleTraits(("starting", "between")),
}


NO_TRAITS = RoleTraits()
"""The traits of agents and standby processes."""
GUEST_TRAITS = msgspec.structs.replace(
    ROLE_TRAITS["rollout"], phases=(*ROLE_TRAITS["rollout"].phases, "asleep"), may_be_displaced=False, may_shrink=False
)
"""The traits of guests."""


class RoleSpec(Struct, frozen=True):
    """One role. Replicas of an ``exclusive`` role have nodes of their own; replicas of other roles share nodes."""

    name: str
    kind: RoleKind
    replicas: int
    min_replicas: int
    per_member: Resources
    exclusive: bool
    argv: tuple[str, ...]
    env: dict[str, str] = {}
    launcher: str = "direct"
    """``direct``, ``apptainer`` or ``pyxis``."""
    image: str = ""
    """Container image; empty with the launcher ``direct``."""
    watch: str = "api"
    """``api``: the command calls :func:`rrl.join`; ``activity``: its launcher watches its CPU, GPU and output
    instead."""
    service: bool = True
    """True if the role runs until the other roles are done; False if exit code 0 completes it."""
    ranks: int = 1
    """Number of members of each replica. Several members are a gang: each has a step, and all are launched and fenced
    together."""
    per_node: int = 1
    """Largest number of members of a replica that share a node."""
    warm: bool = False
    """True if nodes keep standby processes of the role, the trainer, which wait in :func:`rrl.join`."""
    max_replicas: int | None = None
    """Largest number of replicas of an elastic rollout pool, which begins with ``replicas``; None if the number is
    fixed."""
    node_seconds: float = 0.0
    """Node seconds that an elastic pool may use over the whole run, resumes included."""
    built_in: bool = False
    """True if the role runs rrl's own program; False if it runs a command of the job."""
    options: dict[str, Any] = {}
    """``[commands.NAME] options``: the user's values, which only the user's program reads."""

    @property
    def traits(self) -> RoleTraits:
        """Return the traits of the role's kind."""
        return ROLE_TRAITS[self.kind]

    @property
    def is_elastic(self) -> bool:
        """Return whether the planner chooses the number of replicas, from ``replicas`` to ``max_replicas``."""
        return self.max_replicas is not None

    @property
    def table(self) -> str:
        """Return the name of the role's table in job.toml."""
        table = "commands" if self.kind == "command" else "roles" if self.name == self.kind else "rollouts"
        return f"{table}.{self.name}"

    @property
    def awaited_as(self) -> str:
        """Return the name by which a phase names this role if it waits for it: the kind or, of a command, the name."""
        return self.name if self.kind == "command" else self.kind

    @property
    def nodes(self) -> int:
        """Return the number of nodes of each replica of an exclusive role."""
        return -(-self.ranks // self.per_node)

    @property
    def members_on_node(self) -> Resources:
        """Return the resources that the members of a replica on one node use together."""
        n = min(self.ranks, self.per_node)
        return Resources(self.per_member.cpus * n, self.per_member.gpus * n, self.per_member.mem * n)

    def replicas_fitting(self, node: Resources) -> int:
        """Return how many replicas of this role, with one process each, fit on an empty node."""
        if self.exclusive:
            return 1
        pairs = ((node.cpus, self.per_member.cpus), (node.gpus, self.per_member.gpus), (node.mem, self.per_member.mem))
        return min((available // needed for available, needed in pairs if needed), default=1)


class ContainerSpec(Struct, frozen=True):
    """The container of roles whose launcher is apptainer or pyxis."""

    mounts: tuple[str, ...] = ()
    """``source:target[:ro]``, in addition to the run directory and the job's folder."""
    python: str = "python3"
    """The interpreter in the image that has rrl installed."""


NotificationKind = Literal["failed", "degraded", "stalled", "completed", "drain"]


class ManagerSpec(Struct, frozen=True):
    """Where the manager runs, how it reads Slurm, and what rrl's processes log."""

    where: str = "job"
    """``job``: in a small Slurm job of its own; ``pool``: on the pool's first node."""
    sbatch: dict[str, str] = {}
    walltime: float = 0.0
    """Time limit (s) of the manager's own job, at which its successor starts; 0 stands for the walltime of the run plus
    a margin."""
    log_level: LogLevel = DEFAULT_LOG_LEVEL
    """Lowest level of messages of the manager, the agents, the launchers and the workers."""
    reader: Literal["auto", "commands", "pyslurm"] = "commands"
    """How the manager reads Slurm: ``[cluster] reader``. Runs that are older than this setting read by commands."""


class NodeGroup(Struct, frozen=True):
    """Nodes with the same resources that serve some roles: the whole pool, or in other forms the nodes of one role."""

    name: str
    """``pool``, the name of a role, or ``shared`` (the roles that share nodes)."""
    roles: tuple[str, ...]
    nodes: int
    node: Resources
    walltime: float = 86400.0
    """Time limit (s) of the group's allocations."""
    sbatch: dict[str, str] = {}
    """Further sbatch options, names without dashes; an empty value is a flag."""
    separate_jobs: bool = False
    """True if each node is a Slurm job of its own (form ``replica``)."""
    min_nodes: int = 0
    """Number of nodes without which the run does not start."""
    dedicated: bool = False
    """True if the nodes host nothing but the group's roles, and the run neither waits for them nor ends without them:
    the nodes of a further rollout pool."""


class Limits(Struct, frozen=True):
    """Deadlines and intervals, in seconds unless stated otherwise."""

    heartbeat: float = 1.0
    """Time (s) between two heartbeats of a worker or agent."""
    silence: float = 10.0
    """Time (s) without a heartbeat after which a replica counts as lost; an agent whose node still sends other messages
    counts as lost after twice as long. A node is excluded if its agent and its replicas are silent."""
    join: float = 120.0
    """Time (s) from the launch of a replica until it must have joined; RobustRL 1.4 needs about 80 s for scheduling and
    container."""
    step_grace: float = 5.0
    """Time (s) between the request that a step stops and its SIGKILL."""
    allocation: float = 900.0
    """Time (s) to wait for replacement nodes before the next rung of the repair ladder. The first allocation has no
    such limit while it is queued, but if the cluster refuses it for the moment (a full submit limit, a partition that
    is drained) it is requested again for this time."""
    quiet: float = 60.0
    """Time (s) for which an intent without a reply stays open, since an sbatch that timed out can take effect later
    (measured)."""
    poll: float = 30.0
    """Time (s) between two polls of the cluster (sites ask for 60 to 120 s between squeue calls). Failures of processes
    are detected without polls."""
    rotate: float = 600.0
    """Time (s) before the end of an allocation at which its successor is requested, if the run outlasts the
    allocation."""
    lease: float = 10.0
    """Time (s) without renewal after which a manager's lease is free."""
    adaptive: float = 5.0
    """The no-progress deadline as a multiple of the usual duration of the phase (NVRx: 5), within the phase's
    bounds."""
    first_pass: float = 1800.0
    """Time (s) added to the deadline of an incarnation's first pass of a phase (compilation, warm-up; NVRx allows 1 h
    for a start)."""
    suspect: float = 60.0
    """Time (s) without a token after which a generating rollout is suspected and probed (RobustRL 1.2: 60 s). If
    ``adaptive`` times the usual gap between tokens is longer, that time applies instead."""
    probe: float = 30.0
    """Time (s) within which a suspect must reply to a probe; RobustRL does not publish its value."""
    idle: float = 60.0
    """Time (s) without CPU or GPU work after which a replica in a computing phase is suspected."""
    stragglers: str = "report"
    """Reaction to stragglers: a copy of ``HealthSpec.stragglers``."""
    phases: dict[str, PhaseSpec] = {}
    """Bounds of phases that the job changes or adds, by name."""

    def phase(self, name: str) -> Phase:
        """Return a phase with the bounds that apply in this job."""
        declared = declared_phase(name)
        if (overrides := self.phases.get(name)) is None:
            return declared
        given = {trait: value for trait, value in msgspec.structs.asdict(overrides).items() if value is not None}
        if name not in PHASES and overrides.longest is not None:
            given.setdefault("shortest", overrides.longest)  # its only bound
        return msgspec.structs.replace(declared, **given)

    def is_known_phase(self, name: str) -> bool:
        """Return whether rrl or the job defines how long this phase may last."""
        return name in PHASES or name in self.phases


class Recovery(Struct, frozen=True):
    """Budgets of the repair ladder."""

    window: float = 600.0
    """Length (s) of the sliding window in which restarts are counted."""
    per_node: int = 2
    """Number of restarts of a replica on the same node within the window; the next failure moves the replica to another
    node."""
    per_replica: int = 10
    """Number of restarts of one replica within the window; after the next failure the run continues without the replica
    for one window, or ends."""
    backoff: float = 1.0
    """Time (s) before the second restart within the window; doubles with each further restart, up to 60 s."""
    first_start: int = 3
    """If a replica has never joined and this many starts have failed, the job spec counts as the cause, not a node.
    The run also fails if this number of consecutive starts end in the same way: with one exception before the
    role has done any work, or with exit code 0 within ``window`` of the replica's join. The role's code is then the
    cause."""
    breaker: float = 0.2
    """Share of the nodes that may be excluded within the window, but at least one node, and at least two if the run has
    five or more (docs/sources.md, guard rails)."""
    policy: str = "role"
    """``role``: only the failed replica restarts. ``job``: all roles restart in place from the last checkpoint (as
    RobustRL configured ByteRobust)."""
    promote: float = 10.0
    """Time (s) within which a standby process must join as the promoted incarnation. If it does not, the next
    candidate is promoted."""
    full_restarts: int = 2
    """Number of restarts of the whole run within the window; the next failure ends the run. With 0 the whole run is
    never restarted."""
    drain: bool = True
    """Drain nodes with a hardware fault if Slurm permits it; otherwise only request their drain."""
    exclusion: float = 3600.0
    """Time (s) after which a node that was excluded without proof may be used again; doubles with each exclusion."""


class HealthSpec(Struct, frozen=True):
    """How the nodes of a run are monitored (``[health]``)."""

    observe_only: bool = False
    """Report findings as WARN without consequences, except proof that a process or node is gone."""
    checks: dict[str, str] = {}
    """Mode by detector or check: ``act``, ``observe`` (report as WARN, without consequences) or ``off``."""
    admission: bool = True
    """Check a node before the first role starts on it, and do not use a node that fails."""
    stragglers: str = "report"
    """``report``, or ``exclude``: replace the node of a persistently slow replica by a spare, if there is one."""
    history: str = ""
    """Folder to which this run's findings are appended, for the administrators' report; empty for none."""
    metrics: str = ""
    """``host:port`` for Prometheus metrics of the manager; port 0 selects a free port; empty for no metrics."""


class TokenizerSpec(Struct, frozen=True):
    """The vocabulary of a model that rrl builds (:class:`rrl.config.job.schema.TokenizerTable`)."""

    pieces: tuple[str, ...]
    join: str = ""
    ignore: str = ""
    chat: dict[str, str] | None = None


class ModelSpec(Struct, frozen=True):
    """The policy (:class:`rrl.config.job.schema.ModelTable`).

    If ``path`` is set, the shape is read from the config.json of that folder, and the shape fields of this struct are
    ignored.
    """

    path: str | None = None
    """Absolute path of a Hugging Face folder; None if rrl builds the model."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    chat: bool = False
    hidden_size: int = 64
    intermediate_size: int = 192
    layers: int = 2
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 16
    max_length: int | None = None
    """Maximum tokens of prompt and answer; None if the nodes read the limit in config.json of ``path``."""
    initializer_range: float = 0.05
    tokenizer: TokenizerSpec | None = None
    """Tokenizer of a model that rrl builds; None if ``path`` is set, since that folder has its own tokenizer."""
    tool_parser: Literal["qwen3", "qwen3.5", "glm", "deepseek-v3"] | None = None
    """Format of the tool calls of the model in ``path``, as the library ``renderers`` names it; None if the chat
    template determines the format."""


DEFAULT_STALENESS = 4
"""Default of :attr:`SamplingSpec.staleness`, in training steps: AReaL's default for code tasks."""


MAX_SEGMENT_EXTRAS = 32 * 2**20
"""Maximum bytes of the extras of a segment, and of all segments of a request to the store. A message to the store has
at most 64 MiB (:data:`rrl.transport.control.sockets.STORE_BOUNDS`)."""


class ExtraSpec(Struct, frozen=True):
    """An extra of trajectories (:class:`rrl.config.job.schema.ExtraTable`): exactly one of the two has a value."""

    per_token: int | None = None
    """Bytes of each token."""
    per_trajectory: int | None = None
    """Maximum number of bytes of a trajectory."""


class SamplingSpec(Struct, frozen=True):
    """How rollouts sample, and how many samples make a step (:class:`rrl.config.job.schema.SamplingTable`)."""

    prompts_per_step: int = 16
    group_size: int = 16
    max_new_tokens: int = 5
    temperature: float = 1.0
    ahead: int = 1
    staleness: int | None = DEFAULT_STALENESS
    """Maximum age, in training steps, of a token that is trained on; None for no limit."""
    late: Literal["wait", "drop"] = "wait"
    stream: bool = False
    window: int = 1
    refill: bool = False
    refill_limit: float = 3.0
    extras: dict[str, ExtraSpec] = {}
    extras_limit: int = 2**30
    """Maximum number of bytes of the extras of a step."""


def batches_ahead(ahead: int, staleness: int | None, trajectories: int, places: int) -> int:
    """Return how many batches of ``trajectories`` trajectories rollouts may work ahead (``[sampling] ahead``).

    Rollouts that have places for more than one batch may work ahead as many batches as fill their places, but at most
    ``staleness``. Otherwise most of a large fleet would wait for work. Without a limit on staleness, ``ahead`` alone
    bounds the age of tokens and is not raised.
    """
    if staleness is None or places <= trajectories:
        return ahead
    return max(ahead, min(math.ceil(places / trajectories), staleness))


class TransportSpec(Struct, frozen=True):
    """How weights are transferred, and where processes listen (:class:`rrl.config.job.schema.TransportTable`)."""

    weights: WeightsSetting = "auto"
    trusted_network: bool = False
    chunk: int = 8 * 2**20
    network: str = ""
    """Name of an interface, or a CIDR, that all processes listen on; if empty, each process chooses on its node."""
    chunk_deadline: float = 5.0
    """Longest time (s) that a pull waits for a chunk before it uses another source."""
    chain: int = 8
    delta: DeltaSetting = "auto"


class LoraSpec(Struct, frozen=True):
    """Low-rank adapters that are trained instead of all weights (:class:`rrl.config.job.roles.LoraTable`)."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = ()
    """Names of the adapted linear modules; empty for all of them but the output head."""


class TrainerSettings(Struct, frozen=True):
    """The settings of the trainer's program (:class:`rrl.config.job.roles.TrainerRole`)."""

    loss: str = "grpo"
    threads: int = 1
    learning_rate: float = 1e-3
    final_learning_rate: float = 0.1
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    warmup: int = 0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 0.2
    clip_high: float | None = None
    dual_clip: float = 3.0
    cispo_max: float = 5.0
    gspo_clip: float = 0.05
    gspo_clip_high: float | None = None
    normalise: Literal["token", "sequence", "constant"] = "token"
    ratio_mask: tuple[float, float] | None = None
    """Bounds of the importance ratio outside of which tokens are not trained; None for none."""
    ratio_mask_by: Literal["token", "sequence"] = "token"
    truncated: Literal["train", "mask", "drop"] = "train"
    entropy: float = 0.02
    kl: float = 0.0
    micro_batch_tokens: int | None = None
    activation_checkpointing: bool = False
    offload_optimizer: bool = False
    lora: LoraSpec | None = None
    advantage_std: bool = True
    advantage_floor: float = 0.1
    gradient_clip: float = 1.0
    warm_start_steps: int = 0
    warm_start_batch: int = 64
    warm_start_learning_rate: float = 3e-3
    keep_checkpoints: int = 2
    export: Literal["end"] | int | None = None
    checkpoint_every: int = 1
    uncommitted: int = 1
    snapshots: bool = True

    def next_checkpoint_step(self, committed: int, steps: int) -> int:
        """Return the step of the first checkpoint after step ``committed``, in a run of ``steps`` steps."""
        return min(steps, committed - committed % self.checkpoint_every + self.checkpoint_every)


class RolloutSettings(Struct, frozen=True):
    """The settings of the rollouts' program (:class:`rrl.config.job.roles.RolloutRole`)."""

    engine: str = "torch"
    vllm: dict[str, Any] = {}
    threads: int = 1
    lease: int = 64
    segment_tokens: int = 64


class TagsSpec(Struct, frozen=True):
    """What nodes may do besides their own work (:class:`rrl.config.job.schema.TagsTable`)."""

    spare: tuple[Literal["rollout", "train"], ...] = ("train",)
    rollout: tuple[Literal["train"], ...] = ("train",)
    trainer: tuple[Literal["rollout"], ...] = ()
    handback: float = 5.0
    """Time (s) within which a guest must hand the GPUs back; it is killed after this time."""


class RewardSettings(Struct, frozen=True):
    """The settings of the reward role's program (:class:`rrl.config.job.roles.RewardRole`)."""

    lease: int = 256


class AgentsSettings(Struct, frozen=True):
    """The settings of the agents' program (:class:`rrl.config.job.roles.AgentsRole`); times are in seconds."""

    function: str | None = None
    command: tuple[str, ...] | None = None
    per: Literal["attempt", "replica"] = "attempt"
    concurrency: int = 16
    timeout: float = 1200.0
    reward_timeout: float | None = None
    retries: int = 2
    failed_reward: float | None = None
    on_death: Literal["replay", "again", "drop"] = "replay"


class EndpointSettings(Struct, frozen=True):
    """Settings of :class:`rrl.config.job.roles.EndpointRole`; times and retries apply without ``[roles.agents]``."""

    port: int = 0
    foreign: Literal["refuse", "context", "override"] = "refuse"
    constraints: Literal["ask", "enforce", "refuse"] = "ask"
    untrained: tuple[str, ...] = ("*haiku*",)
    timeout: float = 1200.0
    retries: int = 2
    reward_timeout: float | None = None


class TrackSpec(Struct, frozen=True):
    """The trackers to which a run's steps are sent (:class:`rrl.config.job.schema.TrackTable`)."""

    to: tuple[str, ...] = ()
    """Rows of :data:`rrl.config.import_paths.TRACKERS`."""
    project: str = ""
    timeout: float = 300.0
    """Time (s) without an answer after which a tracker counts as hung."""
    samples_every: int = 10
    """Number of steps between two tables of samples; 0 for no tables."""


class SamplesSpec(Struct, frozen=True):
    """The answers that are kept of each step (:class:`rrl.config.job.schema.SamplesTable`)."""

    per_step: int = 16
    limit: int = 2**30
    """Maximum number of bytes."""


class RunSpec(Struct, frozen=True):
    """A whole job with every default filled in.

    In a run without ``[task]`` the fields from ``model`` to ``reward`` have their defaults, and no role reads them.
    """

    name: str
    steps: int
    """Number of optimizer steps after which the run is complete; 0 in a run that is complete when its commands end."""
    cluster: str
    """``[cluster] kind`` (:data:`rrl.cluster.traits.CLUSTERS`)."""
    roles: tuple[RoleSpec, ...]
    node_groups: tuple[NodeGroup, ...]
    walltime: float = 86400.0
    """Longest time (s) from the first granted nodes to the end of the run; shorter allocations are renewed."""
    spares: int = 0
    form: str = "pool"
    """``pool``, ``replica`` or ``hetjob`` (docs/architecture/clusters.md)."""
    start_within: float = 3600.0
    """Form ``replica`` only: the run ends this time (s) after its first request if it has too few nodes to start."""
    env: EnvSpec = EnvSpec()
    container: ContainerSpec = ContainerSpec()
    seed: int = 0
    """Seed of the initial weights, the task's items and the sampling."""
    model: ModelSpec = ModelSpec()
    task: TaskSpec = TaskSpec()
    sampling: SamplingSpec = SamplingSpec()
    eval: EvalSpec | None = None
    trainer: TrainerSettings = TrainerSettings()
    rollouts: dict[str, RolloutSettings] = {}
    """Settings of each rollout pool, by the name of its role."""
    tags: TagsSpec = TagsSpec()
    reward: RewardSettings = RewardSettings()
    agents: AgentsSettings | None = None
    """The run's own agents; None if it has none. If ``endpoint`` is None too, trajectories are answers to prompts."""
    endpoint: EndpointSettings | None = None
    """The endpoint for agents outside of the run; None if they cannot take part."""
    transport: TransportSpec = TransportSpec()
    manager: ManagerSpec = ManagerSpec()
    limits: Limits = Limits()
    recovery: Recovery = Recovery()
    health: HealthSpec = HealthSpec()
    track: TrackSpec = TrackSpec()
    samples: SamplesSpec = SamplesSpec()
    notify: tuple[NotificationKind, ...] = ()
    """Kinds of notifications to send. Only job.toml has their target, which may be a secret."""
    faults: tuple[Fault, ...] = ()
    """Faults that the job itself plans."""
    faults_allowed: bool = False
    """True if ``rrl inject`` may add faults."""

    def role(self, name: str) -> RoleSpec:
        """Return the role of this name."""
        return next(role for role in self.roles if role.name == name)

    def kind(self, kind: RoleKind) -> tuple[RoleSpec, ...]:
        """Return the roles of this kind."""
        return tuple(role for role in self.roles if role.kind == kind)

    def most_replicas(self, role: RoleSpec) -> int:
        """Return the largest number of replicas that a role may have: elastic pools grow, and extras use the spares."""
        if role.max_replicas is not None:
            return role.max_replicas
        if "rollout" not in self.tags.spare or role.kind != "rollout" or self.form != "pool":
            return role.replicas
        group = self.node_group_of(role.name)
        return role.replicas + (0 if group.dedicated else self.spares * role.replicas_fitting(group.node))

    def traits_of(self, replica: ReplicaId) -> RoleTraits:
        """Return the traits of a replica's role; agents and standby processes have none."""
        name = role_of(replica)
        if name == GUEST_ROLE:
            return GUEST_TRAITS
        return next((role.traits for role in self.roles if role.name == name), NO_TRAITS)

    def node_group(self, name: str) -> NodeGroup:
        """Return the node group of this name."""
        return next(group for group in self.node_groups if group.name == name)

    def node_group_of(self, role: str) -> NodeGroup:
        """Return the node group whose nodes this role uses."""
        return next(group for group in self.node_groups if role in group.roles)

    @property
    def guests_on_node(self) -> int:
        """Return how many guests each node of the trainer has: together they use all of the trainer's GPUs there."""
        if "rollout" not in self.tags.trainer:
            return 0
        gpus = self.role("rollout").per_member.gpus
        return self.role(role_of(TRAINER)).members_on_node.gpus // gpus if gpus else 1

    @property
    def guests(self) -> int:
        """Return how many guests the run has when all of them exist."""
        return self.guests_on_node * self.role(role_of(TRAINER)).nodes if self.guests_on_node else 0

    @property
    def fleet_varies(self) -> bool:
        """Return whether the job has rollouts beyond those of ``[roles.rollout]``, for which ``ahead`` may rise."""
        rollouts = self.kind("rollout")
        more = any(self.most_replicas(role) > role.replicas for role in rollouts)
        return more or len(rollouts) > 1 or self.guests > 0

    @property
    def steps_in_store(self) -> int:
        """Return how many steps the store may hold the data of: unbound, uncommitted, and two committed ones."""
        sampling, ahead = self.sampling, self.sampling.ahead
        if self.fleet_varies:
            places = sum(self.most_replicas(r) * self.rollouts[r.name].lease for r in self.kind("rollout"))
            places += self.guests * self.rollouts["rollout"].lease if self.guests else 0
            trajectories = sampling.prompts_per_step * sampling.group_size
            ahead = batches_ahead(ahead, sampling.staleness, trajectories, places)
        return ahead + 1 + self.trainer.uncommitted + self.trainer.checkpoint_every + 2

    @property
    def nodes(self) -> int:
        """Return the number of nodes of the whole run, spares included."""
        return sum(group.nodes for group in self.node_groups)
