"""Check the rules of the trainer: its losses, checkpoints and GPUs; each mistake is reported at the key to change."""

from __future__ import annotations

from pydantic_core import PydanticCustomError

from ..import_paths import LOSSES
from .base import mistake
from .roles import TrainerRole
from .schema import Job

MAX_GUEST_MEMORY = 0.9
"""Largest ``gpu_memory_utilization`` of vLLM on GPUs of the trainer, which keeps its CUDA context and communicators."""


def check_trainer(job: Job) -> None:
    """Check the rules between the tables of a job that concern the trainer. Each table must already be valid.

    Raises:
        PydanticCustomError: The first mistake, with the key at which it is reported.
    """
    _lending(job)
    _checkpoint_steps(job)
    _learning(job.roles.trainer)
    _lora(job)
    _one_gpu(job)


def _lora(job: Job) -> None:
    """Check that there is a trained model to adapt."""
    path = job.model.path if job.model is not None else None
    if job.roles.trainer.lora is not None and job.task is not None and path is None:
        raise mistake(
            ("roles", "trainer", "lora"),
            "adapts a trained model, but [model] has no path, so that the model is new; remove this table, or set path",
        )


def _learning(trainer: TrainerRole) -> None:
    """Check that the keys of the loss and of the schedule go together; a program of the user may read any key."""
    if trainer.command is not None:
        return

    def wrong(key: str, text: str) -> PydanticCustomError:
        return mistake(("roles", "trainer", key), text)

    def is_set(key: str) -> bool:
        return bool(getattr(trainer, key) != TrainerRole.model_fields[key].default)

    others = {key: loss for loss, row in LOSSES.items() for key in row.keys if trainer.loss in LOSSES}
    for key, loss in others.items():
        if loss != trainer.loss and is_set(key):
            raise wrong(key, f'is a key of loss = "{loss}", not of "{trainer.loss}"; remove this key, or change loss')
    for key, of, has_effect in (
        ("final_learning_rate", 'schedule = "constant"', trainer.schedule != "constant"),
        ("advantage_floor", "advantage_std = false", trainer.advantage_std),
        ("ratio_mask_by", "no ratio_mask", trainer.ratio_mask is not None),
    ):
        if is_set(key) and not has_effect:
            raise wrong(key, f"has no effect with {of}; remove this key")
    high = "clip" if trainer.clip_high is None else "clip_high"
    most = 1 + getattr(trainer, high)
    if trainer.dual_clip <= most:
        raise wrong(
            "dual_clip", f"{trainer.dual_clip:g} is not more than 1 + {high} = {most:g}; raise it, or lower {high}"
        )
    if trainer.ratio_mask is not None and trainer.ratio_mask[0] >= trainer.ratio_mask[1]:
        lowest, highest = trainer.ratio_mask
        raise wrong("ratio_mask", f"[{lowest:g}, {highest:g}] has no ratio in it; write the smaller bound first")


def _lending(job: Job) -> None:
    """Check that the trainer can lend its GPUs to rollouts, if the job asks for it."""
    at, trainer, rollout = ("tags", "trainer"), job.roles.trainer, job.roles.rollout
    if "rollout" not in job.tags.trainer:
        if "handback" in job.tags.model_fields_set:
            raise mistake(("tags", "handback"), 'has no effect without trainer = ["rollout"]; remove this key')
        return
    for name, role in (("trainer", trainer), ("rollout", rollout)):
        if role.command is not None:
            raise mistake(at, f"needs the built-in {name}, but [roles.{name}] has a command; remove one of the two")
    if job.recovery.policy != "role":
        raise mistake(at, f'"rollout" needs [recovery] policy = "role", not "{job.recovery.policy}"; remove this key')
    if not job.sampling.stream:
        raise mistake(at, '"rollout" needs [sampling] stream = true: only between two steps in parts is time to lend')
    gpus = trainer.gpus * trainer.ranks_per_node
    if bool(gpus) != bool(rollout.gpus) or (gpus and gpus % rollout.gpus):
        text = (
            f"{rollout.gpus} does not divide the {gpus} GPUs that the trainer has on a node"
            " ([roles.trainer] gpus x ranks_per_node), which its guests share; write a divisor"
        )
        raise mistake(("roles", "rollout", "gpus"), text)
    share = rollout.vllm.get("gpu_memory_utilization")
    if rollout.engine == "vllm" and isinstance(share, float) and share > MAX_GUEST_MEMORY:
        text = f"{share:g} leaves too little memory to what the trainer keeps while it lends its GPUs"
        raise mistake(
            ("roles", "rollout", "vllm", "gpu_memory_utilization"), f"{text}; lower it to {MAX_GUEST_MEMORY:g}"
        )


def _checkpoint_steps(job: Job) -> None:
    """Check that each exported or evaluated step has its own checkpoint."""
    steps, trainer = job.run.steps or 0, job.roles.trainer
    every = trainer.checkpoint_every
    evaluated = None if job.eval is None else job.eval.every
    for at, number in ((("roles", "trainer", "export"), trainer.export), (("eval", "every"), evaluated)):
        if isinstance(number, int) and number < steps and number % every:
            message = f"step {number} would have no checkpoint; write a multiple of checkpoint_every = {every}"
            raise mistake(at, f"{message} ([roles.trainer])")


def _one_gpu(job: Job) -> None:
    """Check that each rank of the built-in trainer has at most one GPU, since it leaves further GPUs idle."""
    trainer = job.roles.trainer
    if trainer.command is None and trainer.gpus > 1:
        raise mistake(
            ("roles", "trainer", "gpus"),
            "each rank of the built-in trainer computes on one GPU; write gpus = 1, and ranks ="
            f" {trainer.ranks * trainer.gpus} for as many GPUs",
        )
