"""job.toml: what a person writes. Every default is named here and in the modules of its tables, with its unit, and its
source where a number has one.

Unknown keys are errors (``extra="forbid"``); :mod:`rrl.config.job.load` turns them into one line with the nearest valid
key.
"""

from __future__ import annotations

import re
import string
from typing import Annotated, Any, Literal

import msgspec
from pydantic import AfterValidator, Field, model_validator

from ...core import run_spec
from ...core.faults import MANAGER
from ...core.types import AGENT, STANDBY_ROLE
from ...core.units import Duration, Size
from .base import OptionalTime, SbatchOptions, Strings, Table, Time, mistake
from .faults import FaultsTable
from .roles import RESERVED_GROUPS, CommandRole, Role, Roles
from .site import ClusterTable, ContainerTable, EnvTable, ManagerTable, Network
from .validation import check

_LIMITS = run_spec.Limits()
_RECOVERY = run_spec.Recovery()
_HEALTH = run_spec.HealthSpec()


def _format_string(text: str) -> str:
    try:
        list(string.Formatter().parse(text))
    except ValueError as error:
        raise ValueError(f"{text!r} is no format string: {error}; write {{{{ for a brace itself") from None
    return text


def _phase_names(phases: dict[str, PhaseTable]) -> dict[str, PhaseTable]:
    for name in phases:
        if not name.isprintable() or not 0 < len(name) <= 60:
            raise ValueError(f"{name!r} is no name of a phase; use up to 60 printable characters")
    return phases


def _role_names(commands: dict[str, CommandRole]) -> dict[str, CommandRole]:
    reserved = (*Roles.model_fields, AGENT, STANDBY_ROLE, MANAGER, *RESERVED_GROUPS)
    for name in commands:
        if name in reserved:
            raise ValueError(f"{name!r} is a name of rrl's own; take another one for a role of yours")
        if not re.fullmatch(r"[a-z]{1,30}", name):
            raise ValueError(f"{name!r} is no name of a role; use up to 30 lower case letters")
    return commands


class RunTable(Table):
    """What this run is."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,30}$")]
    """a letter, then up to 30 lower case letters, digits and dashes: it is part of job names"""
    steps: Annotated[int, Field(ge=1)] | None = None
    """optimizer steps after which the run is complete; without a [task] it is complete when its [commands.*] are"""
    seed: int = 0
    """of the initial weights, the task's items and the sampling; 0 or more for a reasoning-gym dataset"""


class TokenizerTable(Table):
    """A vocabulary of single pieces, for tasks that are small enough to name them all."""

    pieces: Annotated[str, Field(min_length=1)] | Strings
    """the vocabulary after <pad> and <eos>: each character of a string, or a list of strings"""
    join: str = ""
    """put between pieces when tokens become text"""
    ignore: str = ""
    """characters of a prompt that are dropped"""


class ModelTable(Table):
    """The policy: a causal language model as Hugging Face writes it (``path``), or else a small Qwen3-architecture one,
    built locally with random weights. Nothing is downloaded."""

    path: Annotated[str, Field(min_length=1)] | None = None
    """folder with config.json, *.safetensors and the tokenizer's files, the same on every node; a relative one starts
    at the folder of job.toml"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """of what trainer and rollouts compute with; the optimizer's own copy stays float32"""
    chat: bool = False
    """prompts are put into the tokenizer's chat template, as what a user said"""
    hidden_size: Annotated[int, Field(ge=1)] = 64
    """width of the residual stream"""
    intermediate_size: Annotated[int, Field(ge=1)] = 192
    """width of each layer's MLP"""
    layers: Annotated[int, Field(ge=1)] = 2
    """transformer layers"""
    heads: Annotated[int, Field(ge=1)] = 4
    """attention heads"""
    kv_heads: Annotated[int, Field(ge=1)] = 4
    """divides heads (grouped-query attention)"""
    head_dim: Annotated[int, Field(ge=2, multiple_of=2)] = 16
    """width of a head; even: rotary embeddings turn pairs"""
    max_length: Annotated[int, Field(ge=2)] | None = None
    """tokens of prompt and answer together; default: 64, or what config.json of ``path`` says"""
    initializer_range: Annotated[float, Field(gt=0)] = 0.05
    """standard deviation of the initial weights (docs/sources.md, the task)"""
    tokenizer: TokenizerTable | None = None
    """of a model that is built here, which needs one; one in ``path`` has its own"""


class TaskTable(Table):
    """Where prompts and rewards come from: a reasoning-gym dataset, or a function of yours."""

    dataset: str | None = None
    """name of a reasoning-gym dataset"""
    args: dict[str, Any] = {}
    """arguments of the dataset, or of the function, which is called with ``seed`` too"""
    function: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    """``module:function``, importable from the folder of job.toml; returns an object with prompt, score and answer"""
    prompt: Annotated[str, AfterValidator(_format_string)] = "{question}"
    """a format string over the fields of a dataset's item"""
    size: Annotated[int, Field(ge=1)] = 200_000
    """items in the dataset (reasoning-gym makes them lazily)"""
    partial_credit: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """the training reward (never the reported one) adds this share of right tokens to a wrong answer of right length"""

    @model_validator(mode="after")
    def _one_source(self) -> TaskTable:
        if (self.dataset is None) == (self.function is None):
            raise ValueError('needs exactly one of: dataset = "<reasoning-gym name>", function = "module:function"')
        return self


class SamplingTable(Table):
    """How rollouts sample, and how much of it makes a step."""

    prompts_per_step: Annotated[int, Field(ge=1)] = 16
    """groups in the batch of one optimizer step"""
    group_size: Annotated[int, Field(ge=2)] = 16
    """trajectories of one prompt: a GRPO group"""
    max_new_tokens: Annotated[int, Field(ge=1)] = 5
    """tokens of an answer, its end included"""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """of the sampling, and of the log-probabilities in the loss"""
    ahead: Annotated[int, Field(ge=0)] = 1
    """batches that rollouts may work ahead of the trainer; its tokens are then up to about ahead + 2 steps old,
    where a step takes longer than the 0.1 s in which new weights reach the rollouts"""
    staleness: Annotated[int, Field(ge=0)] | Literal["unlimited"] = 4
    """weight versions (N) that a token may be older than the newest one when it is trained on. Rollouts wait for newer
    weights rather than begin what would be too old, so they work at most so many batches ahead, whatever ``ahead``
    says. The trainer must publish at least once in N + 1 steps, else the run stands still and says so. The default is
    AReaL's for code (8 for mathematics). Without a limit a trainer whose weights no longer reach the rollouts trains
    on, and ruins the policy"""
    late: Literal["wait", "drop"] = "wait"
    """what a step does about a group that no later step may train, because its tokens would be too old. ``wait``: the
    step waits for it. ``drop``: the group is dropped, and with it mostly long answers; what is trained is then shorter
    than what was asked for (docs/architecture.md, trajectories, 10)"""


class LimitsTable(Table):
    """Deadlines."""  # what each means stands under the field of the same name in rrl.core.run_spec.Limits

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
                raise mistake(
                    ("limits", name),
                    f'"{value:g}s" is less than three beats of "{self.heartbeat:g}s"; raise it to "{3 * self.heartbeat:g}s"',
                )
        return self


class PhaseTable(Table):
    """How long a phase may last before it counts as hung, and phases of your own program. A role is restarted that
    stays in a phase, without progress, for ``adaptive`` times its usual duration, but never sooner than ``shortest``
    and at the latest after ``longest``, which also holds until three durations are known; the first time,
    ``first_pass`` is added. In a phase of your own that has no table, it is only warned of."""

    shortest: OptionalTime = None
    """however short the phase usually is"""
    longest: OptionalTime = None
    """however long the phase usually is; a phase of your own needs it"""
    progresses: bool | None = None
    """true: each ``me.progress()`` starts the clock anew, and what is usual is the time between two of them; for a
    phase of your own, which needs it"""
    waits_for: str | None = None
    """the role that is waited for in it, which is blamed in its place; for a phase of your own"""


class RecoveryTable(Table):
    """Budgets of the repair ladder."""  # what each means stands under its field in rrl.core.run_spec.Recovery

    window: Time = _RECOVERY.window
    per_node: Annotated[int, Field(ge=0)] = _RECOVERY.per_node
    per_replica: Annotated[int, Field(ge=0)] = _RECOVERY.per_replica
    backoff: Duration = _RECOVERY.backoff
    first_start: Annotated[int, Field(ge=1)] = _RECOVERY.first_start
    breaker: Annotated[float, Field(gt=0, le=1)] = _RECOVERY.breaker
    policy: Literal["role", "job", "requeue"] = "role"
    promote: Time = _RECOVERY.promote
    full_restarts: Annotated[int, Field(ge=0)] = _RECOVERY.full_restarts
    drain: bool = _RECOVERY.drain
    exclusion: Time = _RECOVERY.exclusion
    failure_rate: Annotated[float, Field(ge=0, lt=1)] = _RECOVERY.failure_rate


class HealthTable(Table):
    """How the nodes are looked after: what is done for what detectors and checks find. Their thresholds are the site's
    (docs/health.md)."""

    observe_only: bool = _HEALTH.observe_only
    checks: dict[str, Literal["act", "observe", "off"]] = {}
    admission: bool = _HEALTH.admission
    stragglers: Literal["report", "exclude"] = "report"
    history: str = _HEALTH.history
    metrics: Annotated[str, Field(pattern=r"^$|^[^:\s]+:\d{1,5}$|^\[[0-9a-fA-F:]+\]:\d{1,5}$")] = _HEALTH.metrics


class TransportTable(Table):
    """How weights travel."""

    weights: Literal["auto", "ucx", "tcp", "nixl"] = "auto"
    """auto: tcp, or ucx on nodes with an active RDMA port and a UCX that has modules for it (docs/rdma.md); nixl:
    NVIDIA's NIXL, whose wheel carries the RDMA modules. By their names ucx and nixl need such a port, or else
    trusted_network"""
    trusted_network: bool = False
    """ucx and nixl may use TCP: everybody who reaches the network, or this run's machines, can then read and write the
    memory of trainer and rollouts (docs/sites.md)"""
    chunk: Annotated[Size, Field(ge=64 * 2**10, le=2**30)] = 8 * 2**20
    """what is asked for, verified and, if need be, fetched again at a time"""
    network: Network = ""
    """where to listen: name of an interface ("ib0") or network ("10.4.0.0/16"); empty: chosen on each node"""
    chunk_deadline: Time = 5.0
    """UCX does not notice a hung peer (measured): each chunk has a deadline of its own, at most this long"""
    chain: Annotated[int, Field(ge=1)] = 8
    """receivers of a new version that stand one behind the other, each serving the next what it already has: the
    trainer sends each version once for each of at most two chains"""


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
    roles: Roles = Roles()
    commands: Annotated[dict[str, CommandRole], AfterValidator(_role_names)] = {}
    limits: LimitsTable = LimitsTable()
    phases: Annotated[dict[str, PhaseTable], AfterValidator(_phase_names)] = {}
    recovery: RecoveryTable = RecoveryTable()
    health: HealthTable = HealthTable()
    transport: TransportTable = TransportTable()
    faults: FaultsTable = FaultsTable()

    @model_validator(mode="after")
    def _check_consistency(self) -> Job:
        check(self)
        return self

    def every_role(self) -> dict[str, Role]:
        """The roles that this job has, in the order in which they are placed: the built-in ones if there is a task."""
        return {**(self.roles.named() if self.task is not None else {}), **self.commands}

    def table_of(self, role: str) -> tuple[str, str]:
        """Where job.toml has that role."""
        return ("commands" if role in self.commands else "roles", role)

    def merged_limits(self) -> run_spec.Limits:
        """Deadlines and phases as the manager reads them."""
        phases = {name: phase.model_dump() for name, phase in self.phases.items()}
        for name, role in self.commands.items():
            if role.watch == "activity":  # its launcher says that it is in a phase of the role's own name
                phases[name] = {"shortest": role.quiet, "longest": role.quiet, "progresses": True}
        return msgspec.convert(self.limits.model_dump() | {"phases": phases}, run_spec.Limits)
