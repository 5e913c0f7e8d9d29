"""GRPO's loss as a function of tensors.

GRPO: DeepSeekMath, arXiv:2402.03300; token-mean loss as in DAPO, arXiv:2503.14476; dual clip: Ye et al.,
arXiv:1912.09729. ``B`` is the number of trajectories.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.run_spec import TrainerSettings
from .loss_function import LossSum, LossTokens

_MAX_LOG_RATIO = 20.0
"""Bound (nats) of the difference of two log-probabilities, as in verl. If the exponential of a difference overflowed,
its gradient would be nan, even where the loss is clipped."""


def group_advantages(rewards: Tensor, groups: Tensor, floor: float) -> Tensor:
    """Return the advantage of each trajectory over its group: ``(R - mean) / (std + floor)``, [B].

    ``std`` is the unbiased estimate. The only trajectory of a group gets 0. The floor limits the advantages in a group
    with nearly equal rewards. Without this limit, training may undo its progress: in a measurement with a floor of
    1e-4, the mean reward fell again after it had reached 0.8; with 0.1 it did not (docs/sources.md, the task).

    Args:
        rewards: [B] float.
        groups: [B] int, equal for trajectories of one prompt, in any order and number.
        floor: Added to the standard deviation.
    """
    _, index, counts = torch.unique(groups, return_inverse=True, return_counts=True)
    zeros = torch.zeros(len(counts), dtype=rewards.dtype)
    mean = zeros.index_add(0, index, rewards) / counts
    centred = rewards - mean[index]
    variance = zeros.index_add(0, index, centred.square()) / (counts - 1).clamp(min=1)
    advantages: Tensor = centred / (variance.sqrt()[index] + floor)
    return advantages


def grpo(tokens: LossTokens, settings: TrainerSettings) -> LossSum:
    """Return the clipped policy-gradient loss, whose divisor is the number of trained tokens, and its statistics.

    The loss includes an entropy bonus and, with a reference policy, the divergence from it.

    Args:
        tokens: The tokens.
        settings: ``clip`` limits the importance ratio's distance from 1, and ``dual_clip`` the ratio of a token with a
            negative advantage: else such a token that the sampler thought 8 nats less likely has the weight of 2,981
            others. ``entropy`` is the factor of the entropy bonus, and ``kl`` that of the divergence
            pi_ref / pi - log(pi_ref / pi) - 1, the unbiased estimator of KL(pi, pi_ref) that is never negative
            (DeepSeekMath, equation 4; "k3").

    Returns:
        The loss, and statistics that show whether the importance ratio has an effect:

        - ``drift``: the mean absolute difference between the two log-probabilities of a token.
        - ``clipped``: the share of the tokens whose importance ratio is outside of 1 ± ``clip``.
        - ``dual_clipped``: the share of the tokens whose importance ratio ``dual_clip`` limits.
        - ``ratio_max``: the largest importance ratio; 0 without tokens.
        - ``kl``: the mean estimate (nats) of the divergence; only with a reference policy.
    """
    mask = tokens.mask.to(tokens.logprobs.dtype)
    # A masked position may contain any value, even inf: it must become 0 before exp, not after.
    difference = _bounded(tokens.logprobs - tokens.sampler_logprobs, mask)
    ratio = difference.exp()
    falls = tokens.advantages < 0
    clip, dual_clip = settings.clip, settings.dual_clip
    limited = torch.where(falls, ratio.clamp(1 - clip, dual_clip), ratio.clamp(max=1 + clip))
    loss = -((limited * tokens.advantages + settings.entropy * tokens.entropy) * mask).sum()
    extra = {}
    if tokens.reference_logprobs is not None:
        log_ratio = _bounded(tokens.reference_logprobs - tokens.logprobs, mask)
        divergence = (log_ratio.exp() - log_ratio - 1).sum()
        loss = loss + settings.kl * divergence
        extra = {"kl": divergence}
    with torch.no_grad():
        outside, above = (ratio - 1).abs() > clip, falls & (ratio > dual_clip)
        means = {"drift": difference.abs().sum(), "clipped": outside.sum(), "dual_clipped": above.sum(), **extra}
        largest = (ratio * mask).max() if len(mask) else mask.sum()
    return LossSum(loss, "tokens", means, {"ratio_max": largest})


def _bounded(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Return the differences of log-probabilities, bounded, and 0 at masked positions."""
    return torch.where(mask > 0, log_ratio, 0.0).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
