"""A loss of a user: REINFORCE with an importance ratio; each answer counts the same, however long it is."""

from __future__ import annotations

import torch

import rrl
from rrl.core.run_spec import TrainerSettings


def loss(tokens: rrl.LossTokens, settings: TrainerSettings) -> rrl.LossSum:
    mask = tokens.mask.float()
    ratio = torch.where(tokens.mask, tokens.logprobs - tokens.sampler_logprobs, 0.0).exp()
    answer = torch.searchsorted(tokens.starts, torch.arange(len(mask)), right=True) - 1
    lengths = torch.zeros(len(tokens.starts)).index_add(0, answer, mask).clamp(min=1)
    total = -(ratio * tokens.advantages * mask / lengths[answer]).sum()
    surprise = -torch.where(tokens.mask, tokens.logprobs, 0.0).sum()
    return rrl.LossSum(total, "sequences", {"surprise": surprise}, {"longest": lengths.max()})
