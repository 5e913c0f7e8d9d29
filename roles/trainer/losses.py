"""GRPO's loss, and log-probabilities and entropies of given tokens, as functions of tensors.

GRPO: DeepSeekMath, arXiv:2402.03300; token-mean loss as in DAPO, arXiv:2503.14476; dual clip: Ye et al.,
arXiv:1912.09729. ``B`` is the number of trajectories, ``T`` the length of the longest answer in tokens.

With a vocabulary of 49,000 to 152,000 tokens, the logits of a batch are its largest tensor. With torch's functions, the
backward pass would need four more float32 tensors of this size: the scaled logits, their log-softmax, its exponential,
and the product of the last two. Here the logits are instead processed in pieces that are computed twice, and the
gradient overwrites the logits (measured for SmolLM2's vocabulary in tests/unit/roles/trainer/test_likelihood.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...core.run_spec import TrainerSettings
from ..models.policy import log_probs
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


_LOGITS_PER_PIECE = 2**21
"""Number of logits in a piece: 8 MiB in float32, of which a few copies exist at once. The batch of a small model is one
piece."""


def likelihood(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies of tokens.

    The backward pass overwrites ``logits`` with their gradient, so the caller must not use them afterwards.

    Args:
        logits: [B, T, vocabulary], any floating dtype.
        tokens: [B, T].
        temperature: Temperature of the distribution.

    Returns:
        The log-probability of each token as :func:`rrl.roles.models.policy.log_probs` defines it, and the entropy
            (nats) of its distribution; both [B, T], float32 and differentiable.
    """
    result: tuple[Tensor, Tensor] = _Likelihood.apply(logits, tokens, temperature)  # type: ignore[no-untyped-call]
    return result


class _Likelihood(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        chosen = torch.empty(tokens.shape, device=logits.device)
        entropy = torch.empty(tokens.shape, device=logits.device)
        flat = chosen.flatten(), entropy.flatten()
        for rows_slice, piece in _pieces(logits):
            log_probabilities = log_probs(piece, temperature)
            flat[0][rows_slice] = log_probabilities.gather(1, tokens.flatten()[rows_slice, None])[:, 0]
            flat[1][rows_slice] = -(log_probabilities.exp() * log_probabilities).sum(-1)
        ctx.save_for_backward(logits, tokens, entropy)
        ctx.temperature = temperature
        return chosen, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_chosen: Tensor, of_entropy: Tensor) -> tuple[Tensor, None, None]:
        """Compute the gradient of the logits.

        With p the probabilities and H the entropy: d log p[c] / dz = onehot(c) - p, and dH / dz = -p (log p + H).
        """
        logits, tokens, entropy = ctx.saved_tensors
        for rows_slice, piece in _pieces(logits):
            log_probabilities = log_probs(piece, ctx.temperature)
            by_chosen, by_entropy = of_chosen.flatten()[rows_slice, None], of_entropy.flatten()[rows_slice, None]
            share = log_probabilities.exp()
            slope = (
                log_probabilities.add_(entropy.flatten()[rows_slice, None])
                .mul_(by_entropy)
                .add_(by_chosen)
                .mul_(share)
                .neg_()
            )
            slope.scatter_add_(1, tokens.flatten()[rows_slice, None], by_chosen)
            piece.copy_(slope.div_(ctx.temperature))
        return logits.detach(), None, None


def _pieces(logits: Tensor) -> list[tuple[slice, Tensor]]:
    """Return (slice of the rows, their logits as a view [n, vocabulary]) for each piece."""
    rows = logits.detach().view(-1, logits.shape[-1])
    size = max(1, _LOGITS_PER_PIECE // logits.shape[-1])
    return [(slice(start, start + size), rows[start : start + size]) for start in range(0, len(rows), size)]
