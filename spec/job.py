"""job.toml: what a person writes. Every default is named here, with its unit, and its source where a number has one.

Unknown keys are errors (``extra="forbid"``); :mod:`rrl.spec.load` turns them into one line with the nearest valid key.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import string
from typing import Annotated, Any, Literal

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from rrl.spec import jobview
from rrl.spec.faults import Fault, FaultKind
from rrl.spec.phases import PHASES
from rrl.spec.units import DURATION, Duration, Size, duration_text

_L = jobview.Limits()
_R = jobview.Recovery()


class _Table(BaseModel):
    """A table of job.toml. Strict: "10" is no number and true is no 1; the line under a field is its description."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def _mistake(at: tuple[str | int, ...], what: str) -> PydanticCustomError:
    """An error of several fields, to be shown at the key ``at`` (from the root of job.toml)."""
    return PydanticCustomError("mistake", "{what}", {"at": at, "what": what})


def _format_string(text: str) -> str:
    try:
        list(string.Formatter().parse(text))
    except ValueError as error:
        raise ValueError(f"{text!r} is no format string: {error}; write {{{{ for a brace itself") from None
    return text


def _environment(env: dict[str, str]) -> dict[str, str]:
    for name in env:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"{name!r} is no name of an environment variable; use letters, digits and underscores")
    return env


def _sbatch_options(options: dict[str, str | int | bool]) -> dict[str, str | int | bool]:
    for name, value in options.items():
        if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
            raise ValueError(f"{name!r} is no sbatch option; write its long name without dashes in front")
        if isinstance(value, str) and not value.isprintable():
            raise ValueError(f"the value of {name} must be printable and on one line")
    return options


def _phase_names(phases: dict[str, PhaseTable]) -> dict[str, PhaseTable]:
    for name in phases:
        if not name.isprintable() or not 0 < len(name) <= 60:
            raise ValueError(f"{name!r} is no name of a phase; use up to 60 printable characters")
    return phases


_Strings = Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
"""A list of strings; TOML has lists where Python has tuples, hence not strict itself."""
_Time = Annotated[Duration, Field(gt=0)]
_TimeIfAny = Annotated[float | None, DURATION, Field(gt=0)]
_Count = Annotated[int, Field(ge=1, le=4096)]


class RunTable(_Table):
    """What this run is."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,30}$")]
    """a letter, then up to 30 lower case letters, digits and dashes: it is part of job names"""
    steps: Annotated[int, Field(ge=1)]
    """optimizer steps after which the run is complete"""
    seed: int = 0
    """of the initial weights, the task's items and the sampling; 0 or more for a reasoning-gym dataset"""


class NodeTable(_Table):
    """What rrl takes of each node of the pool."""

    cpus: Annotated[int, Field(ge=1)] = 4
    """cores"""
    gpus: Annotated[int, Field(ge=0)] = 0
    """GPUs"""
    mem: Annotated[Size, Field(gt=0)] = 4 * 2**30
    """memory"""


class ClusterTable(_Table):
    """Where the run gets its nodes from."""

    kind: Literal["local", "slurm"] = "local"
    """virtual nodes on this machine, or the Slurm cluster that this login node belongs to"""
    form: Literal["pool"] = "pool"
    """one allocation over all nodes plus spares (docs/architecture.md)"""
    spares: Annotated[int, Field(ge=0, le=4096)] = 1
    """nodes held ready beyond what the roles need"""
    node: NodeTable = NodeTable()
    walltime: _Time = 86400.0
    """of the pool's allocation"""


class TokenizerTable(_Table):
    """A vocabulary of single pieces, for tasks that are small enough to name them all."""

    pieces: Annotated[str, Field(min_length=1)] | _Strings
    """the vocabulary after <pad> and <eos>: each character of a string, or a list of strings"""
    join: str = ""
    """put between pieces when tokens become text"""
    ignore: str = ""
    """characters of a prompt that are dropped"""


class ModelTable(_Table):
    """A small Qwen3-architecture model, built locally with random weights; nothing is downloaded."""

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
    max_length: Annotated[int, Field(ge=2)] = 64
    """tokens of prompt and answer together"""
    initializer_range: Annotated[float, Field(gt=0)] = 0.05
    """standard deviation of the initial weights (docs/sources.md, the task)"""
    tokenizer: TokenizerTable


class TaskTable(_Table):
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


class SamplingTable(_Table):
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
    """batches that rollouts may work ahead of the trainer; its tokens are then up to about ahead + 2 steps old"""


class _Role(_Table):
    """What every role has; its own table adds to it, and may change a default."""

    replicas: _Count = 1
    """how many of them; each is watched, fenced and replaced for itself"""
    min_replicas: Annotated[int, Field(ge=0)] | None = None
    """below this the run cannot go on; default: all for a trainer or a service, 1 for rollouts"""
    cpus: Annotated[int, Field(ge=1)] = 1
    """cores of each replica"""
    gpus: Annotated[int, Field(ge=0)] = 0
    """GPUs of each replica"""
    mem: Size = 2**30
    """memory of each replica"""
    exclusive: bool = False
    """take a node of its own"""
    env: Annotated[dict[str, str], AfterValidator(_environment)] = {}
    """environment variables of its processes; of your shell only PATH, HOME and the like are passed on"""
    command: _Strings | None = None
    """your own program, using rrl.join(); replaces the built-in one"""


class TrainerRole(_Role):
    """GRPO. A program of your own (``command``) reads what it likes of these settings as ``me.settings``."""

    exclusive: bool = True
    """take a node of its own"""
    threads: Annotated[int, Field(ge=1)] = 1
    """of torch"""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    """of AdamW, at the first step"""
    final_learning_rate: Annotated[float, Field(ge=0)] = 0.1
    """share of learning_rate at the last step; falls linearly"""
    clip: Annotated[float, Field(gt=0)] = 0.2
    """of the importance ratio (GRPO, DAPO)"""
    entropy: Annotated[float, Field(ge=0)] = 0.02
    """weight of the entropy bonus"""
    advantage_floor: Annotated[float, Field(gt=0)] = 0.1
    """added to the group's standard deviation before dividing (measured: 1e-4 falls back after reaching 0.8)"""
    gradient_clip: Annotated[float, Field(gt=0)] = 1.0
    """largest norm of the gradient"""
    warm_start_steps: Annotated[int, Field(ge=0)] = 0
    """supervised steps on the task's answers before the first policy update"""
    warm_start_batch: Annotated[int, Field(ge=1)] = 64
    """examples of a supervised step"""
    warm_start_learning_rate: Annotated[float, Field(gt=0)] = 3e-3
    """of the supervised steps"""
    keep_checkpoints: Annotated[int, Field(ge=2)] = 2
    """committed checkpoints that stay on the disk"""


class RolloutRole(_Role):
    """Samples answers under the newest weights that it holds."""

    exclusive: bool = True
    """take a node of its own"""
    engine: Literal["torch"] = "torch"
    """what generates"""
    threads: Annotated[int, Field(ge=1)] = 1
    """of torch"""
    lease: Annotated[int, Field(ge=1)] = 64
    """trajectories leased at a time"""
    segment_tokens: Annotated[int, Field(ge=1)] = 64
    """tokens after which a running trajectory's segment is made durable"""


class TrajectoriesRole(_Role):
    """The store: owns prompts and tokens, leases them, binds batches, keeps the one commit record."""

    replicas: Literal[1] = 1
    """there is one store"""


class RewardRole(_Role):
    """Scores complete trajectories by the task."""

    lease: Annotated[int, Field(ge=1)] = 256
    """trajectories leased at a time"""


class Roles(_Table):
    trainer: TrainerRole = TrainerRole()
    rollout: RolloutRole = RolloutRole()
    trajectories: TrajectoriesRole = TrajectoriesRole()
    reward: RewardRole = RewardRole()

    def named(self) -> dict[str, _Role]:
        return {
            "trajectories": self.trajectories,
            "reward": self.reward,
            "trainer": self.trainer,
            "rollout": self.rollout,
        }


class LimitsTable(_Table):
    """Deadlines."""  # what each means stands under the field of the same name in rrl.spec.jobview.Limits

    beat: _Time = _L.beat
    silence: _Time = _L.silence
    join: _Time = _L.join
    step_grace: Duration = _L.step_grace
    allocation: _Time = _L.allocation
    quiet: Duration = _L.quiet
    poll: _Time = _L.poll
    lease: _Time = _L.lease
    adaptive: Annotated[float, Field(ge=1)] = _L.adaptive
    first_pass: Duration = _L.first_pass

    @model_validator(mode="after")
    def _silence_holds_beats(self) -> LimitsTable:
        for name, value in (("silence", self.silence), ("lease", self.lease)):
            if value < 3 * self.beat:
                raise _mistake(
                    ("limits", name),
                    f'"{value:g}s" is less than three beats of "{self.beat:g}s"; raise it to "{3 * self.beat:g}s"',
                )
        return self


class PhaseTable(_Table):
    """How long a phase may last before it counts as hung, and phases of your own program. A role is restarted that
    stays in a phase, without progress, for ``adaptive`` times its usual duration, but never sooner than ``shortest``
    and at the latest after ``longest``, which also holds until three durations are known; the first time,
    ``first_pass`` is added. In a phase of your own that has no table, it is only warned of."""

    shortest: _TimeIfAny = None
    """however short the phase usually is"""
    longest: _TimeIfAny = None
    """however long the phase usually is; a phase of your own needs it"""
    progresses: bool | None = None
    """true: each ``me.progress()`` starts the clock anew, and what is usual is the time between two of them; for a
    phase of your own, which needs it"""
    waits_for: str | None = None
    """the role that is waited for in it, which is blamed in its place; for a phase of your own"""


class RecoveryTable(_Table):
    """Budgets of the repair ladder."""  # what each means stands under its field in rrl.spec.jobview.Recovery

    window: _Time = _R.window
    per_node: Annotated[int, Field(ge=0)] = _R.per_node
    per_replica: Annotated[int, Field(ge=0)] = _R.per_replica
    backoff: Duration = _R.backoff
    breaker: Annotated[float, Field(gt=0, le=1)] = _R.breaker


class FaultTable(_Table):
    """One planned fault of the run's own making, for demonstrations and tests."""

    kind: Annotated[FaultKind, Field(strict=False)]
    """kill: SIGKILL to the role's process group; freeze: SIGSTOP to it; kill_step: SIGKILL to what holds the step"""
    target: Annotated[str, Field(pattern=r"^[a-z]+/[0-9]{1,5}$")]
    """a replica, as in "rollout/0\""""
    at_step: Annotated[int, Field(ge=0)]
    """performed once the trainer has committed this step"""


class TransportTable(_Table):
    """How weights travel."""

    weights: Literal["auto", "ucx", "tcp"] = "auto"
    """auto: ucx where ucxx is installed, else tcp"""
    chunk: Annotated[Size, Field(gt=0)] = 8 * 2**20
    """what is asked for, verified and, if need be, fetched again at a time"""
    chunk_deadline: _Time = 5.0
    """UCX does not notice a hung peer (measured): each chunk has a deadline of its own"""


class Job(_Table):
    """A whole job.toml."""

    run: RunTable
    cluster: ClusterTable = ClusterTable()
    slurm: Annotated[dict[str, str | int | bool], AfterValidator(_sbatch_options)] = {}
    """Any sbatch option, passed on as it is: ``partition = "gpu"``, ``account = "..."``; true stands for a flag."""
    model: ModelTable
    task: TaskTable
    sampling: SamplingTable = SamplingTable()
    roles: Roles = Roles()
    limits: LimitsTable = LimitsTable()
    phases: Annotated[dict[str, PhaseTable], AfterValidator(_phase_names)] = {}
    recovery: RecoveryTable = RecoveryTable()
    transport: TransportTable = TransportTable()
    faults: Annotated[tuple[FaultTable, ...], Field(strict=False)] = ()

    @model_validator(mode="after")
    def _fits(self) -> Job:
        self._model_fits()
        for name, phase in self.phases.items():
            self._phase_fits(name, phase)
        for name, role in self.roles.named().items():
            if role.min_replicas is not None and role.min_replicas > role.replicas:
                raise _mistake(
                    ("roles", name, "min_replicas"),
                    f"{role.min_replicas} is more than replicas = {role.replicas}; lower it or raise replicas",
                )
            for what in ("cpus", "gpus", "mem"):
                wanted, has = getattr(role, what), getattr(self.cluster.node, what)
                if wanted > has:
                    raise _mistake(
                        ("roles", name, what),
                        f"{_amount(what, wanted)} is more than a node has ([cluster.node] {what} ="
                        f" {_amount(what, has)}); lower it or raise the node's",
                    )
        for index, fault in enumerate(self.faults):
            name, _, replica = fault.target.partition("/")
            if name not in (roles := self.roles.named()):
                raise _mistake(("faults", index, "target"), f'no role "{name}"; there are {", ".join(roles)}')
            if int(replica) >= (count := roles[name].replicas):
                raise _mistake(
                    ("faults", index, "target"),
                    f'no replica "{fault.target}"; [roles.{name}] replicas = {count}, so the last one is'
                    f' "{name}/{count - 1}"',
                )
        return self

    def _model_fits(self) -> None:
        model = self.model
        if model.heads % model.kv_heads:
            raise _mistake(
                ("model", "kv_heads"), f"{model.kv_heads} does not divide heads = {model.heads}; take a divisor"
            )
        if self.sampling.max_new_tokens >= model.max_length:
            raise _mistake(
                ("sampling", "max_new_tokens"),
                f"{self.sampling.max_new_tokens} leaves no room for a prompt in [model] max_length ="
                f" {model.max_length}; lower it or raise max_length",
            )

    def _phase_fits(self, name: str, table: PhaseTable) -> None:
        """A mistyped name must not pass for a phase of the user's own, hence what only such a phase needs."""
        at, declared = ("phases", name), PHASES.get(name)
        if declared is None and (table.progresses is None or table.longest is None):
            near = difflib.get_close_matches(name, PHASES, 1)
            meant = f"did you mean {json.dumps(near[0])}? " if near else ""
            raise _mistake(at, f"is no phase of rrl's; {meant}a phase of your own needs progresses and longest")
        if declared is not None:
            for key in ("progresses", "waits_for"):
                if getattr(table, key) is not None:
                    raise _mistake((*at, key), "is fixed for a phase of rrl's; remove it, or name a phase of your own")
            if table.shortest is None and table.longest is None:
                raise _mistake(at, "says nothing; set shortest, longest or both")
            if declared.longest == math.inf and table.longest is not None:
                raise _mistake((*at, "longest"), "this phase may last for ever; remove it")
        if table.waits_for is not None and table.waits_for not in (roles := self.roles.named()):
            raise _mistake((*at, "waits_for"), f'no role "{table.waits_for}"; there are {", ".join(roles)}')
        if table.waits_for is not None and table.progresses:
            raise _mistake((*at, "progresses"), "must be false where waits_for is set: who waits makes no progress")
        merged = self._limits().phase(name)
        if merged.shortest > merged.longest:
            key = "shortest" if table.shortest is not None else "longest"
            raise _mistake(
                (*at, key),
                f'shortest = "{duration_text(merged.shortest)}" is more than longest ='
                f' "{duration_text(merged.longest)}"; set both',
            )

    def _limits(self) -> jobview.Limits:
        phases = {name: phase.model_dump() for name, phase in self.phases.items()}
        return msgspec.convert(self.limits.model_dump() | {"phases": phases}, jobview.Limits)

    def view(self, python: str) -> jobview.JobView:
        """The manager's view; ``python`` is the interpreter that runs the built-in roles."""
        roles = tuple(_role_view(name, role, python) for name, role in self.roles.named().items())
        return jobview.JobView(
            name=self.run.name,
            steps=self.run.steps,
            cluster=self.cluster.kind,
            roles=roles,
            nodes=jobview.pool_nodes(roles, _resources(self.cluster.node)) + self.cluster.spares,
            spares=self.cluster.spares,
            node=_resources(self.cluster.node),
            walltime=self.cluster.walltime,
            sbatch={key: "" if v is True else str(v) for key, v in self.slurm.items() if v is not False},
            limits=self._limits(),
            recovery=msgspec.convert(self.recovery.model_dump(), jobview.Recovery),
            faults=tuple(
                Fault(id=f"f{i}", kind=f.kind, target=f.target, at_step=f.at_step) for i, f in enumerate(self.faults)
            ),
        )


def _amount(what: str, value: int) -> str:
    return f'"{value / 2**20:g}MiB"' if what == "mem" else str(value)


_BUILT_IN = {
    "trainer": "rrl.roles.trainer.main",
    "rollout": "rrl.roles.rollout.main",
    "trajectories": "rrl.roles.trajectories.server",
    "reward": "rrl.roles.reward",
}


def _resources(node: NodeTable) -> jobview.Resources:
    return jobview.Resources(cpus=node.cpus, gpus=node.gpus, mem=node.mem)


def _role_view(name: str, role: _Role, python: str) -> jobview.RoleView:
    floor = 1 if name == "rollout" else role.replicas
    return jobview.RoleView(
        name=name,
        kind=name,
        replicas=role.replicas,
        min_replicas=floor if role.min_replicas is None else role.min_replicas,
        each=jobview.Resources(cpus=role.cpus, gpus=role.gpus, mem=role.mem),
        exclusive=role.exclusive,
        argv=role.command or (python, "-m", _BUILT_IN[name]),
        env=role.env,
    )
