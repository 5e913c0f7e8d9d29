"""Gradients of rrl's losses and of TRL's own code on the same tokens.

``tests/data/trl_losses.json`` has what TRL computes; ``python -m rrl.tests.support.roles.trainer.trl_losses`` writes it
where TRL is installed (make setup-trainers).
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor

from rrl.core.run_spec import TrainerSettings
from rrl.roles.trainer.loss_function import Loss, LossTokens
from rrl.roles.trainer.losses import cispo, grpo, gspo

FIXTURE = Path(__file__).parents[3] / "data" / "trl_losses.json"
LENGTHS = (7, 1, 12, 4, 12, 3, 9, 5, 2, 10)
LIMIT = 16
"""Largest number of tokens of an answer."""
LARGEST_LOG_RATIO = 4.605
"""Ratios are from 0.01 to 100."""
CLIP, CLIP_HIGH, DUAL_CLIP, CISPO_MAX, KL = 0.2, 0.28, 3.0, 5.0, 0.05


class Case(Struct, frozen=True):
    """A loss of rrl, and the arguments with which TRL has the same one."""

    loss: Loss
    normalise: str
    loss_type: str
    level: str = "token"


CASES = {
    "grpo-sequence": Case(grpo, "sequence", "grpo"),
    "grpo-token": Case(grpo, "token", "dapo"),
    "grpo-constant": Case(grpo, "constant", "dr_grpo"),
    "cispo-token": Case(cispo, "token", "cispo"),
    "gspo-sequence": Case(gspo, "sequence", "grpo", "sequence"),
    "gspo-token": Case(gspo, "token", "dapo", "sequence"),
    "gspo-constant": Case(gspo, "constant", "dr_grpo", "sequence"),
}


class Answers(Struct, frozen=True):
    """Answers as padded rows, [B, T], and an advantage for each of them, [B]."""

    logprobs: Tensor
    sampler_logprobs: Tensor
    reference_logprobs: Tensor
    mask: Tensor
    """1 for trained tokens; answers have untrained tokens in their middle."""
    advantages: Tensor


def answers() -> Answers:
    """Return the answers of all cases, with advantages of both signs; the values are exact in float32."""
    dice = random.Random(41)
    rows: dict[str, list[list[float]]] = {name: [] for name in ("new", "old", "reference", "mask")}
    for length in LENGTHS:
        new = [-6 * dice.random() for _ in range(LIMIT)]
        rows["new"].append(new)
        rows["old"].append([value - dice.uniform(-1, 1) * LARGEST_LOG_RATIO for value in new])
        rows["reference"].append([value + dice.gauss(0, 0.5) for value in new])
        rows["mask"].append([float(at < length and (at == 0 or dice.random() < 0.9)) for at in range(LIMIT)])
    logprobs, sampler, reference, mask = (torch.tensor(values).double() for values in rows.values())
    return Answers(logprobs, sampler, reference, mask, torch.tensor([dice.gauss(0, 1) for _ in LENGTHS]).double())


def ours(case: Case, **changes: Any) -> tuple[float, Tensor]:
    """Return rrl's loss and its gradient by the log-probabilities, [B, T]."""
    given = answers()
    logprobs = given.logprobs.float().requires_grad_()
    rows, width = logprobs.shape
    tokens = LossTokens(
        logprobs.flatten(),
        given.sampler_logprobs.float().flatten(),
        given.advantages.float().repeat_interleave(width),
        given.mask.flatten().bool(),
        torch.zeros(rows * width),
        given.reference_logprobs.float().flatten(),
        torch.arange(rows) * width,
        LIMIT,
    )
    settings = TrainerSettings(
        clip=CLIP,
        clip_high=CLIP_HIGH,
        dual_clip=DUAL_CLIP,
        cispo_max=CISPO_MAX,
        gspo_clip=CLIP,
        gspo_clip_high=CLIP_HIGH,
        entropy=0.0,
        kl=KL,
        normalise=case.normalise,  # type: ignore[arg-type]
        **changes,
    )
    result = case.loss(tokens, settings)
    divisor = given.mask.sum().item() if result.divisor == "tokens" else len(given.mask)
    loss = result.loss / divisor
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.item(), gradient


def trls(case: Case) -> tuple[float, Tensor]:
    """Return TRL's loss and its gradient by the log-probabilities, [B, T], computed in float64."""
    from trl import GRPOTrainer  # type: ignore[import-not-found, unused-ignore]

    given = answers()
    logprobs = given.logprobs.clone().requires_grad_()
    entropies = torch.zeros_like(logprobs)
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, entropies, None),
        _metrics={"train": defaultdict(list)},
        _entropy_bonus_enabled=False,
        accelerator=SimpleNamespace(num_processes=1, gather=lambda each: each, reduce=lambda each, reduction: each),
        args=SimpleNamespace(
            # TRL's CISPO has no dual clip; its bound is epsilon_high
            delta=DUAL_CLIP if case.loss is grpo else None,
            steps_per_generation=1,
            use_bias_correction_kl=False,
        ),
        aux_loss_enabled=False,
        beta=KL,
        current_gradient_accumulation_steps=1,
        epsilon_high=CISPO_MAX if case.loss is cispo else CLIP_HIGH,
        epsilon_low=CLIP,
        importance_sampling_level=case.level,
        loss_type=case.loss_type,
        max_completion_length=LIMIT,
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=False,
        model=SimpleNamespace(training=True),
    )
    prompts = torch.zeros(len(LENGTHS), 1, dtype=torch.long)
    inputs = {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": torch.zeros(given.mask.shape, dtype=torch.long),
        "completion_mask": given.mask,
        "advantages": given.advantages,
        "old_per_token_logps": given.sampler_logprobs,
        "ref_per_token_logps": given.reference_logprobs,
        "num_items_in_batch": given.mask.sum(),
    }
    loss = GRPOTrainer._compute_loss(trainer, trainer.model, inputs)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.item(), gradient


def recorded(name: str) -> tuple[float, Tensor]:
    """Return what TRL computed for a case when the file was written."""
    found = json.loads(FIXTURE.read_text())["cases"][name]
    return found["loss"], torch.tensor(found["gradient"])


def error(one: Tensor, other: Tensor) -> float:
    """Return the largest difference of two gradients, relative to the largest component of ``other``."""
    return float((one.double() - other.double()).abs().max() / other.abs().max())


def main() -> None:
    cases = {}
    for name, case in CASES.items():
        loss, gradient = trls(case)
        cases[name] = {
            "loss": loss,
            "gradient": [[float(f"{value:.9g}") for value in row] for row in gradient.tolist()],
        }
        print(f"{name}: rrl's gradient differs by {error(ours(case)[1], gradient):.2g}")
    FIXTURE.write_text(json.dumps({"trl": metadata.version("trl"), "cases": cases}) + "\n")


if __name__ == "__main__":
    main()
