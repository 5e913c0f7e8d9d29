"""Check the rules between the keys of ``[roles.trainer]``; each mistake is reported at the key to change."""

from __future__ import annotations

from pydantic_core import PydanticCustomError

from ..import_paths import LOSSES
from .base import mistake
from .roles import TrainerRole


def check_trainer(trainer: TrainerRole) -> None:
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
