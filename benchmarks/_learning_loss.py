"""Gradients of the losses: against those of TRL's own code, and of a token far off from its sampler.

TRL's are in tests/data/trl_losses.json, which ``make test-trainers`` compares with the installed TRL.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch

from rrl.config.import_paths import LOSSES
from rrl.core.run_spec import TrainerSettings
from rrl.roles.trainer.loss_function import LossTokens, load_loss
from rrl.tests.support.roles.trainer import trl_losses

NATS = (0.1, 0.2, 0.5, 1.0, 1.09, 2.0, 4.0, 8.0)
"""By how much the sampler's log-probability of one token is too low; 1.09 is just below the dual clip."""
TOKENS = 800


def measure(_: Path) -> tuple[dict[str, float], dict[str, list[float]]]:
    errors = [
        trl_losses.error(trl_losses.ours(case)[1], trl_losses.recorded(name)[1])
        for name, case in trl_losses.CASES.items()
    ]
    shares = [outlier_share(loss, nats) for loss in LOSSES for nats in NATS]
    return (
        {"loss_grad_error_vs_trl": max(errors), "outlier_share": max(shares)},
        {"loss_grad_error_vs_trl": errors, "outlier_share": shares},
    )


def outlier_share(loss: str, nats: float) -> float:
    """Return the largest share of the gradient that a token has, with the defaults of the loss and A = -1."""
    defaults = msgspec.structs.replace(TrainerSettings(), loss=loss, normalise=LOSSES[loss].normalise)
    logprobs = torch.full((TOKENS,), -1.0, requires_grad=True)
    sampler = torch.full((TOKENS,), -1.0)
    sampler[TOKENS // 2] -= nats
    starts = torch.tensor([0, TOKENS // 2])
    always = torch.ones(TOKENS, dtype=torch.bool)
    tokens = LossTokens(
        logprobs, sampler, torch.full((TOKENS,), -1.0), always, torch.zeros(TOKENS), None, starts, TOKENS
    )
    (gradient,) = torch.autograd.grad(load_loss(loss, Path())(tokens, defaults).loss, logprobs)
    return float(gradient.abs().max() / gradient.abs().sum())
