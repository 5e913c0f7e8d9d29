"""The tables of job.toml, with the default of every key, its unit, and its source if the number has a source.

Unknown keys are errors (``extra="forbid"``); :mod:`rrl.config.job.load` reports each in one line with the nearest valid
key. :mod:`.roles`, :mod:`.site` and :mod:`.faults` declare the other tables.
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ...core import run_spec, task_spec
from ...core.faults import MANAGER
from ...core.phases import PHASES
from ...core.run_spec import DeltaSetting, WeightsSetting
from ...core.types import SUPPORT_ROLES
from ..import_paths import TRACKERS
from ..prompt_file import SUFFIXES
from .base import Duration, Function, OptionalSize, OptionalTime, SbatchOptions, Size, Strings, Table, Time, mistake
from .faults import FaultsTable
from .roles import RESERVED_GROUPS, CommandRole, Role, Roles, RolloutPool, RolloutRole
from .site import ClusterTable, ContainerTable, EnvTable, ManagerTable, Network, NotifyTable

OWN_SCORE_SHORTEST_S = 1800.0
"""Lower bound (s) of the deadline of ``score`` if the user's code scores and ``[phases.score]`` sets no bound. The code
may call a judge over the network, and seem hung while the judge limits its rate (up to 14 min were observed)."""
ACT_MARGIN_S = 300.0
"""Time (s) that is added to the timeout of an attempt: the sum is the lower bound of the deadline of ``act``, unless
``[phases.act]`` sets another bound. The end of an attempt at its timeout counts as progress, unless the agents' code
blocks the process."""
_LIMITS = run_spec.Limits()
_RECOVERY = run_spec.Recovery()
_HEALTH = run_spec.HealthSpec()
_MODEL = run_spec.ModelSpec()
_TASK = task_spec.TaskSpec()
_SAMPLING = run_spec.SamplingSpec()
_TAGS = run_spec.TagsSpec()
_SAMPLES = run_spec.SamplesSpec()
_TRACK = run_spec.TrackSpec()
_TRANSPORT = run_spec.TransportSpec()
_MAX_PORT = 65535
_R = TypeVar("_R", bound=Role)


def _format_string(text: str) -> str:
    try:
        list(string.Formatter().parse(text))
    except ValueError as error:
        raise ValueError(f"{text!r} is not a valid format string: {error}; write {{{{ for a literal brace") from None
    return text


def _rows_file(name: str) -> str:
    if not name.endswith(SUFFIXES):
        raise ValueError(f"{name!r} is not the name of a file that rrl reads; it must end with {' or '.join(SUFFIXES)}")
    return name


def _chat_pieces(pieces: dict[str, str]) -> dict[str, str]:
    for role, piece in pieces.items():
        if piece.count("{content}") != 1:
            raise ValueError(
                f'the template of {role!r} is {piece!r}; it must contain {{content}} once, for example "{{content}}="'
            )
    return pieces


def _phase_names(phases: dict[str, PhaseTable]) -> dict[str, PhaseTable]:
    for name in phases:
        if not name.isprintable() or not 0 < len(name) <= 60:
            raise ValueError(f"{name!r} is not a valid phase name; use up to 60 printable characters")
    return phases


def _extra_names(extras: dict[str, ExtraTable]) -> dict[str, ExtraTable]:
    for name in extras:
        if not re.fullmatch(r"[a-z][a-z0-9_]{0,29}", name):
            text = "is not a valid name of an extra; use a letter, then up to 29 lower-case letters, digits and _"
            raise ValueError(f"{name!r} {text}")
    return extras


def _reward_names(rewards: dict[str, RewardTable]) -> dict[str, RewardTable]:
    for name in rewards:
        if not re.fullmatch(r"[a-z][a-z0-9_]{0,29}", name):
            text = "is not a valid name of a reward; use a letter, then up to 29 lower-case letters, digits and _"
            raise ValueError(f"{name!r} {text}")
    return rewards


def _role_names(roles: dict[str, _R]) -> dict[str, _R]:
    reserved = (*Roles.model_fields, *SUPPORT_ROLES, MANAGER, *RESERVED_GROUPS)
    for name in roles:
        if name in reserved:
            raise ValueError(f"{name!r} is reserved by rrl; choose another name for your role")
        if not re.fullmatch(r"[a-z][a-z0-9]{0,29}", name):
            text = "is not a valid role name; use a letter, then up to 29 lower-case letters and digits"
            raise ValueError(f"{name!r} {text}")
    return roles


def _without_own_tag(tag: str) -> Callable[[Any], Any]:
    def check(tags: Any) -> Any:
        if isinstance(tags, list) and tag in tags:
            raise ValueError(f'"{tag}" has no effect: every node has the tag of its own role; remove it')
        return tags

    return check


def _port_in_range(address: str) -> str:
    port = address.rpartition(":")[2]
    if port and int(port) > _MAX_PORT:
        raise ValueError(f"{address!r} has no valid port; use one from 1 to {_MAX_PORT}, or 0 for any free one")
    return address


class RunTable(Table):
    """The name, length and seed of the run."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,30}$")]
    """A letter, then up to 30 lower-case letters, digits and dashes; part of the names of Slurm jobs."""
    steps: Annotated[int, Field(ge=1)] | None = None
    """Optimizer steps after which the run is complete. A run without [task] is complete when all its [commands.*] are
    complete."""
    seed: int = 0
    """Seed of the initial weights, the task's items and the sampling; at least 0 for a reasoning-gym dataset."""


class TokenizerTable(Table):
    """A vocabulary that the job lists itself, for tasks that need only a few tokens."""

    pieces: Annotated[str, Field(min_length=1)] | Strings
    """The tokens after <pad> and <eos>: each character of a string, or a list of strings."""
    join: str = ""
    """Separator between two tokens when tokens are converted to text."""
    ignore: str = ""
    """Characters of a prompt that are dropped."""
    chat: Annotated[dict[str, str], AfterValidator(_chat_pieces)] | None = None
    """Text for the messages of each role, in which {content} stands for the message: ``{ user = "{content}=" }``. Only
    for agents. Each message of the model ends with the end of sequence."""


class ModelTable(Table):
    """The policy, a causal language model: a Hugging Face folder (``path``), or a small model that rrl builds.

    A model that rrl builds has the Qwen3 architecture and random weights. Nothing is downloaded.
    """

    path: Annotated[str, Field(min_length=1)] | None = None
    """Folder with config.json, *.safetensors and the tokenizer's files, the same on every node; a relative path starts
    at the folder of job.toml. If trainer and rollout are programs of your own, only the tokenizer must fit; with vLLM
    rollouts and a trainer of your own, the model may be any that vLLM loads."""
    dtype: Literal["float32", "bfloat16"] = _MODEL.dtype
    """Type in which trainer and rollouts compute; the optimizer's own copy stays float32."""
    chat: bool = _MODEL.chat
    """Insert prompts into the tokenizer's chat template, as a user's message."""
    hidden_size: Annotated[int, Field(ge=1)] = _MODEL.hidden_size
    """Width of the residual stream."""
    intermediate_size: Annotated[int, Field(ge=1)] = _MODEL.intermediate_size
    """Width of each layer's MLP."""
    layers: Annotated[int, Field(ge=1)] = _MODEL.layers
    """Transformer layers."""
    heads: Annotated[int, Field(ge=1)] = _MODEL.heads
    """Attention heads."""
    kv_heads: Annotated[int, Field(ge=1)] = _MODEL.kv_heads
    """Key and value heads; must divide heads (grouped-query attention)."""
    head_dim: Annotated[int, Field(ge=2, multiple_of=2)] = _MODEL.head_dim
    """Width of a head; even, since rotary embeddings rotate pairs."""
    max_length: Annotated[int, Field(ge=2)] | None = None
    """Tokens of prompt and answer together; default: 64, or the limit in config.json of ``path``."""
    initializer_range: Annotated[float, Field(gt=0)] = _MODEL.initializer_range
    """Standard deviation of the initial weights (docs/sources.md, the task)."""
    tokenizer: TokenizerTable | None = None
    """Tokenizer of a model that rrl builds, which needs one; a model in ``path`` has its own."""
    tool_parser: Literal["qwen3", "qwen3.5", "glm", "deepseek-v3"] | None = None
    """How the model writes tool calls, if the endpoint does not recognise this from the chat template
    (docs/agents.md)."""


class TaskFileTable(Table):
    """One of several prompt files."""

    path: Annotated[str, AfterValidator(_rows_file)]
    """The file, as ``file`` of [task]."""
    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,29}$")]
    """A letter, then up to 29 lower-case letters, digits, - and _: the name of this source of prompts, by which rewards
    and evaluations are reported."""
    weight: Annotated[float, Field(ge=0)] = 1.0
    """Share of the prompts that come from this file, relative to the weights of the others; 0 for none of them. An
    evaluation has as many prompts of each file instead."""


class RewardTable(Table):
    """One of several rewards of an answer."""

    function: Function
    """``module:function``, as ``reward`` of [task]."""
    weight: float = 1.0
    """Factor of this reward in the sum."""


class TaskTable(Table):
    """The source of prompts and rewards: a reasoning-gym dataset, the rows of a file, or a function of yours."""

    dataset: str | None = None
    """Name of a reasoning-gym dataset."""
    args: dict[str, Any] = {}
    """Arguments of the dataset, or of the function, which gets ``seed`` too."""
    function: Function | None = None
    """``module:function``, importable from the folder of job.toml; returns an object with prompt, score and answer."""
    file: Annotated[str, AfterValidator(_rows_file)] | None = None
    """File with a prompt in each row, as JSON lines (``.jsonl``) or parquet (``.parquet``, which needs the extra
    ``parquet``), the same on every node; a relative path starts at the folder of job.toml. Its rows are shuffled by the
    seed, differently in each pass. It must not change during the run: a change ends the run."""
    files: tuple[TaskFileTable, ...] = Field((), strict=False)
    """Several such files, each a table [[task.files]]; their rows are mixed by their weights."""
    prompt: Annotated[str, AfterValidator(_format_string)] = _TASK.prompt
    """A format string over the fields of a dataset's item, or over the columns of the file: ``"{prompt}"``."""
    answer_column: Annotated[str, Field(min_length=1)] = _TASK.answer_column
    """Column of the file with the right answer. Without ``reward``, an answer that equals it gets the reward 1."""
    reward: Function | None = None
    """``module:function`` that scores the answers to the file's prompts: ``function(answer, row)`` gets the text, and
    all columns of the row by name. It returns the reward, or the reward to report and the reward to train on."""
    rewards: Annotated[dict[str, RewardTable], AfterValidator(_reward_names)] = {}
    """Several such functions, each a table [task.rewards.NAME]. The reward is the sum of their rewards times their
    weights; each is a metric, too."""
    size: Annotated[int, Field(ge=1)] = _TASK.size
    """Items in the dataset (reasoning-gym creates them lazily)."""
    partial_credit: Annotated[float, Field(ge=0, lt=1)] = _TASK.partial_credit
    """A wrong answer of the right length gets this value times its share of right tokens as additional training reward.
    The reported reward does not change."""

    @model_validator(mode="after")
    def _one_source(self) -> TaskTable:
        if [self.dataset, self.function, self.file, self.files or None].count(None) != 3:
            raise ValueError(
                'must have exactly one of: dataset = "<reasoning-gym name>", file = "prompts.jsonl",'
                ' function = "module:function", [[task.files]]'
            )
        return self


class EvalTable(Table):
    """Evaluations: the rollouts answer held-out prompts with the weights of one step (docs/evaluation.md).

    The weights before the first step, of every Nth step and of the last step are evaluated. During an evaluation the
    trainer waits for its next batch, but never for agents outside of the run.
    """

    every: Annotated[int, Field(ge=1)]
    """Evaluate after every N training steps, before the first step and after the last step."""
    count: Annotated[int, Field(ge=1, le=100_000)] = task_spec.EvalSpec(1).count
    """Number of prompts of an evaluation: the first items of its task; with files, at most as many as they have rows,
    and as many of each file as it has."""
    samples: Annotated[int, Field(ge=1, le=1024)] = task_spec.EvalSpec(1).samples
    """Answers to each prompt; with agents, episodes of each item."""
    temperature: Annotated[float, Field(ge=0)] = task_spec.EvalSpec(1).temperature
    """Temperature of the answers; 0 takes the most likely tokens."""
    task: TaskTable | None = None
    """The prompts, with the keys of [task]. Default: the dataset of [task], with items that no step trains on. The rows
    of files come in the order of their files."""


class ExtraTable(Table):
    """Bytes that a rollout makes with its tokens and a trainer of your own reads; rrl does not read them.

    Examples are the experts that a router chose, and an image (docs/bring-your-own.md). An extra has exactly one of
    these keys.
    """

    per_token: OptionalSize = None
    """Bytes of each sampled token: ``"384B"`` for 8 experts in each of 48 layers."""
    per_trajectory: OptionalSize = None
    """Maximum size in a trajectory; a rollout may also leave it out."""

    @model_validator(mode="after")
    def _one_kind(self) -> ExtraTable:
        if (self.per_token is None) == (self.per_trajectory is None):
            raise ValueError('must have exactly one of: per_token = "384B", per_trajectory = "1MiB"')
        return self


class SamplingTable(Table):
    """How rollouts sample, and how many samples make a training step."""

    prompts_per_step: Annotated[int, Field(ge=1)] = _SAMPLING.prompts_per_step
    """Groups in the batch of one optimizer step."""
    group_size: Annotated[int, Field(ge=1)] = _SAMPLING.group_size
    """Trajectories of one prompt: a GRPO group. The only trajectory of a group has no advantage."""
    max_new_tokens: Annotated[int, Field(ge=1)] = _SAMPLING.max_new_tokens
    """Tokens of an answer, its end included."""
    temperature: Annotated[float, Field(gt=0)] = _SAMPLING.temperature
    """Temperature of the sampling, and of the log-probabilities in the loss."""
    ahead: Annotated[int, Field(ge=0)] = _SAMPLING.ahead
    """Batches that rollouts may work ahead of the trainer. The trained tokens are then up to about ahead + 2 steps old,
    if a step takes longer than the 0.1 s in which new weights reach the rollouts. In a job whose number of
    rollouts varies (further pools, or spares that generate), rollouts that together lease more than a batch may work
    ahead as many batches as they lease, at most ``staleness``. Has no effect if ``staleness`` is 0."""
    staleness: Annotated[int, Field(ge=0)] | Literal["unlimited"] = run_spec.DEFAULT_STALENESS
    """Greatest age N, in training steps, of a token that is trained on. Step n starts from the weights of step n - 1; a
    token that was sampled with the weights of step v then has the age n - 1 - v. Rollouts wait for newer weights rather
    than begin work that would become too old, so they work at most N batches ahead, whatever ``ahead`` is. The trainer
    must publish at least once in N + 1 steps, else the run stalls and reports why. The default is AReaL's for code (8
    for mathematics). Without a limit, a trainer whose weights no longer reach the rollouts continues to train and ruins
    the policy."""
    late: Literal["wait", "drop"] = _SAMPLING.late
    """What a step does with a group that no later step may train, because its tokens would be too old. ``wait``: the
    step waits for it. ``drop``: the group is dropped, which affects mostly long answers; the trained answers are then
    shorter than the sampled ones (docs/architecture/trajectories.md, rule 10)."""
    stream: bool = _SAMPLING.stream
    """Train a step's groups as they are finished, part by part, instead of waiting for the whole batch; the result of
    the step is the same (docs/stream.md). A trainer of your own must iterate ``me.parts()`` to train in parts."""
    window: Annotated[int, Field(ge=1)] = _SAMPLING.window
    """Number of batches whose prompts are sorted together by expected length, so that the answers of a step have
    similar lengths; 1 keeps the order of the task. Each prompt is still trained once, but batches of similar length
    form a different curriculum (docs/stream.md)."""
    refill: bool = _SAMPLING.refill
    """Drop a complete group whose answers all have the same training reward, because it has no gradient, and sample
    another one in its place (DAPO's dynamic sampling). The reported reward includes dropped groups."""
    refill_limit: Annotated[float, Field(gt=0)] = _SAMPLING.refill_limit
    """Number of groups, as a multiple of prompts_per_step, that may be dropped in this way since the newest step; after
    them groups are trained as they are, so that a run whose prompts are all solved goes on."""
    extras: Annotated[dict[str, ExtraTable], AfterValidator(_extra_names)] = {}
    extras_limit: Annotated[Size, Field(ge=1)] = _SAMPLING.extras_limit
    """Maximum size of the extras of a step. A job whose extras can exceed it is refused, because the store holds them
    in its memory for several steps (``rrl check`` says how many) and writes them to the shared storage. The default
    suffices for the routing of 512 answers of 4,096 tokens in 48 layers."""


class LimitsTable(Table):
    """Deadlines and intervals."""  # the fields of the same names in rrl.core.run_spec.Limits describe them

    heartbeat: Time = _LIMITS.heartbeat
    silence: Time = _LIMITS.silence
    join: Time = _LIMITS.join
    step_grace: Duration = _LIMITS.step_grace
    allocation: Time = _LIMITS.allocation
    quiet: Duration = _LIMITS.quiet
    poll: Time = _LIMITS.poll
    rotate: Time = _LIMITS.rotate
    lease: Time = _LIMITS.lease
    adaptive: Annotated[float, Field(ge=1)] = _LIMITS.adaptive
    first_pass: Duration = _LIMITS.first_pass
    suspect: Time = _LIMITS.suspect
    probe: Time = _LIMITS.probe
    idle: Time = _LIMITS.idle

    @model_validator(mode="after")
    def _silence_covers_heartbeats(self) -> LimitsTable:
        for name, value in (("silence", self.silence), ("lease", self.lease)):
            if value < 3 * self.heartbeat:
                message = f'"{value:g}s" is less than three heartbeats of "{self.heartbeat:g}s"; raise it to'
                raise mistake(("limits", name), f'{message} "{3 * self.heartbeat:g}s"')
        return self


class PhaseTable(Table):
    """How long a phase may last before it counts as hung; also declares phases of your own program.

    A role is restarted if it stays in a phase without progress for ``adaptive`` times the usual duration of the phase,
    but not before ``shortest`` and at the latest after ``longest``. Until three durations are known, the longest pass
    so far counts as usual. Before the first pass has ended, the deadline is ``longest``, or a quarter of it if the role
    is idle (docs/detection.md); ``first_pass`` is added in the first pass. A phase of your own without a table only
    causes a warning. If your own code scores the answers ([task] function, or [roles.reward] command), ``shortest`` of
    ``score`` is 30 min by default.
    """

    shortest: OptionalTime = None
    """Lower bound of the deadline; for a phase of your own without this key, ``longest``."""
    longest: OptionalTime = None
    """Upper bound of the deadline; required for a phase of your own."""
    progresses: bool | None = None
    """true: each ``me.progress()`` restarts the deadline, and the usual duration is the time between two calls.
    Required for a phase of your own, and only allowed there."""
    waits_for: str | None = None
    """Role for which the phase waits, and to which a stall is attributed. Only for a phase of your own."""


class RecoveryTable(Table):
    """Budgets of the repair ladder."""  # the fields of the same names in rrl.core.run_spec.Recovery describe them

    window: Time = _RECOVERY.window
    per_node: Annotated[int, Field(ge=0)] = _RECOVERY.per_node
    per_replica: Annotated[int, Field(ge=0)] = _RECOVERY.per_replica
    backoff: Duration = _RECOVERY.backoff
    first_start: Annotated[int, Field(ge=1)] = _RECOVERY.first_start
    breaker: Annotated[float, Field(gt=0, le=1)] = _RECOVERY.breaker
    policy: Literal["role", "job"] = "role"
    promote: Time = _RECOVERY.promote
    full_restarts: Annotated[int, Field(ge=0)] = _RECOVERY.full_restarts
    drain: bool = _RECOVERY.drain
    exclusion: Time = _RECOVERY.exclusion


class HealthTable(Table):
    """How the nodes are monitored, and what happens on findings of detectors and checks.

    The thresholds of the checks are set by the site (docs/health.md).
    """

    observe_only: bool = _HEALTH.observe_only
    checks: dict[str, Literal["act", "observe", "off"]] = {}
    admission: bool = _HEALTH.admission
    stragglers: Literal["report", "exclude"] = "report"
    history: str = _HEALTH.history
    metrics: Annotated[
        str, Field(pattern=r"^$|^[^:\s]+:\d{1,5}$|^\[[0-9a-fA-F:]+\]:\d{1,5}$"), AfterValidator(_port_in_range)
    ] = _HEALTH.metrics


class TransportTable(Table):
    """How weights are transferred."""

    weights: WeightsSetting = _TRANSPORT.weights
    """Weight transport. auto: tcp, or ucx on nodes with an active RDMA port and a UCX that has modules for it
    (docs/rdma.md); nixl: NVIDIA's NIXL, whose wheel contains the RDMA modules. If set explicitly, ucx and nixl need
    such a port, or else trusted_network."""
    trusted_network: bool = _TRANSPORT.trusted_network
    """Let ucx and nixl use TCP: every user who can reach the network, or this run's machines, can then read and write
    the memory of trainer and rollouts (docs/sites.md)."""
    chunk: Annotated[Size, Field(ge=64 * 2**10, le=2**30)] = _TRANSPORT.chunk
    """Size of a chunk, the unit in which weights are requested, verified and, if necessary, fetched again."""
    network: Network = _TRANSPORT.network
    """Network to listen on: name of an interface ("ib0") or network ("10.4.0.0/16"); if empty, each node chooses."""
    chunk_deadline: Time = _TRANSPORT.chunk_deadline
    """Maximum deadline for one chunk. UCX does not notice a hung peer (measured), so each chunk has its own
    deadline."""
    chain: Annotated[int, Field(ge=1)] = _TRANSPORT.chain
    """Number of receivers of a new version in one chain. Each receiver passes its chunks to the next receiver; the
    trainer sends each version once to each of at most two chains."""
    delta: DeltaSetting = _TRANSPORT.delta
    """Whether a receiver gets only the changed values of a chunk, if it has an earlier version. auto: where this is
    faster, which each receiver learns. Few values change in a training step if they are sent in bfloat16."""


class TrackTable(Table):
    """The experiment trackers that get each committed step of the run (docs/tracking.md)."""

    to: Annotated[tuple[Literal[tuple(TRACKERS)], ...], Field(strict=False)] = _TRACK.to  # type: ignore[valid-type]
    """Trackers, each of which needs the extra of its name where the manager runs. Their keys and addresses come from
    variables in [env] passed: "WANDB_API_KEY", "MLFLOW_TRACKING_URI"."""
    project: str = _TRACK.project
    """Project of wandb, or experiment of MLflow; default: the name of the run ([run] name)."""
    timeout: Time = _TRACK.timeout
    """Time without an answer after which a tracker counts as hung, and its process is replaced. The run never waits for
    it."""
    samples_every: Annotated[int, Field(ge=0)] = _TRACK.samples_every
    """Steps between two tables of samples that are sent to the trackers; 0 for none."""


class SamplesTable(Table):
    """The answers of each step that are kept for ``rrl samples`` (docs/samples.md)."""

    per_step: Annotated[int, Field(ge=0, le=4096)] = _SAMPLES.per_step
    """Trajectories kept of each committed step: the best, the worst, and others at random; 0 for none."""
    limit: Annotated[Size, Field(ge=2**20)] = _SAMPLES.limit
    """Maximum size of all that is kept. Beyond it, older steps are thinned out."""


class TagsTable(Table):
    """What nodes may do besides their own work (docs/pools.md)."""

    spare: Annotated[tuple[Literal["rollout", "train"], ...], Field(strict=False)] | None = None
    """Work of spare nodes. "rollout": they generate until another role needs them; "train": they keep standby processes
    of the trainer, which takes such a node at once. Default: both, but only "train" on the local cluster, whose nodes
    share a machine, and in forms without spares."""
    rollout: Annotated[
        tuple[Literal["train"], ...], Field(strict=False), BeforeValidator(_without_own_tag("rollout"))
    ] = ("train",)
    """Further work of the nodes of [roles.rollout]. "train": they keep standby processes of the trainer, if it has
    fewer spares than nodes; the trainer takes such a node if no spare is left."""
    trainer: Annotated[
        tuple[Literal["rollout"], ...], Field(strict=False), BeforeValidator(_without_own_tag("train"))
    ] = _TAGS.trainer
    """Further work of the trainer's nodes. "rollout": they generate while the trainer waits for data (docs/tags.md)."""
    handback: Time = _TAGS.handback
    """Time within which a rollout on a node of the trainer must give the GPUs back; it is killed after this time."""


class Job(Table):
    """A whole job.toml."""

    run: RunTable
    cluster: ClusterTable = ClusterTable()
    slurm: SbatchOptions = {}
    """Any sbatch option, passed on as it is: ``partition = "gpu"``, ``account = "..."``; true stands for a flag."""
    manager: ManagerTable = ManagerTable()
    env: EnvTable = EnvTable()
    container: ContainerTable = ContainerTable()
    model: ModelTable | None = None
    task: TaskTable | None = None
    sampling: SamplingTable = SamplingTable()
    eval: EvalTable | None = None
    roles: Roles = Roles()
    rollouts: Annotated[dict[str, RolloutPool], AfterValidator(_role_names)] = {}
    tags: TagsTable = TagsTable()
    commands: Annotated[dict[str, CommandRole], AfterValidator(_role_names)] = {}
    limits: LimitsTable = LimitsTable()
    phases: Annotated[dict[str, PhaseTable], AfterValidator(_phase_names)] = {}
    recovery: RecoveryTable = RecoveryTable()
    health: HealthTable = HealthTable()
    track: TrackTable = TrackTable()
    samples: SamplesTable = SamplesTable()
    transport: TransportTable = TransportTable()
    notify: NotifyTable | None = None
    faults: FaultsTable = FaultsTable()

    def every_role(self) -> dict[str, Role]:
        """Return the roles of this job in the order of their placement; the built-in roles only if there is a task.

        Rollout pools have every key, also those that they take from [roles.rollout].
        """
        pools = {name: pool.over(self.roles.rollout) for name, pool in self.rollouts.items()}
        return {**(self.roles.named() if self.task is not None else {}), **pools, **self.commands}

    def rollout_roles(self) -> dict[str, RolloutRole]:
        """Return [roles.rollout] and the further rollout pools, with every key."""
        return {name: role for name, role in self.every_role().items() if isinstance(role, RolloutRole)}

    def without_secrets(self) -> Job:
        """Return the job as it may be shown: the target of its notifications is masked."""
        if self.notify is None:
            return self
        return self.model_copy(update={"notify": self.notify.without_secrets()})

    def table_of(self, role: str) -> tuple[str, str]:
        """Return the path of the table of a role in job.toml."""
        table = "commands" if role in self.commands else "rollouts" if role in self.rollouts else "roles"
        return (table, role)

    def merged_limits(self) -> run_spec.Limits:
        """Return the deadlines and phases of the job in the form that the manager reads."""
        phases = {name: phase.model_dump() for name, phase in self.phases.items()}
        if self._scores_by_own_code():
            score = phases.setdefault("score", {})
            if score.get("shortest") is None:
                score["shortest"] = min(OWN_SCORE_SHORTEST_S, score.get("longest") or OWN_SCORE_SHORTEST_S)
        if self.roles.agents is not None:  # an agent may show no progress for the whole of an attempt
            act = phases.setdefault("act", {})
            if act.get("shortest") is None:
                act["shortest"] = min(self.roles.agents.timeout + ACT_MARGIN_S, act.get("longest") or math.inf)
            if act.get("longest") is None:
                act["longest"] = max(PHASES["act"].longest, act["shortest"])
        for name, role in self.commands.items():
            if role.watch == "activity":  # the launcher of the role reports a phase with the name of the role
                phases[name] = {"shortest": role.quiet, "longest": role.quiet, "progresses": True}
        return msgspec.convert(self.limits.model_dump() | {"phases": phases}, run_spec.Limits)

    def _scores_by_own_code(self) -> bool:
        """Return whether code of the user scores the answers: a task function, or a reward role's own program."""
        tasks = (self.task, self.eval.task if self.eval is not None else None)
        own_task = any(task is not None and (task.function or task.reward or task.rewards) for task in tasks)
        return self.roles.reward.command is not None or own_task
