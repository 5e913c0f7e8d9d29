"""GRPO as pure functions of tensors (DeepSeekMath, arXiv:2402.03300; token-mean loss as in DAPO, arXiv:2503.14476).

``B`` trajectories, ``T`` the longest answer in tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def group_advantages(rewards: Tensor, groups: Tensor, floor: float) -> Tensor:
    """How much better each trajectory did than its group: ``(R - mean) / (std + floor)``.

    ``rewards`` [B] float; ``groups`` [B] int, equal for trajectories of one prompt, in any order and of any size;
    returns [B]. ``std`` is the unbiased one; a group of one has nothing to compare with: 0. The floor keeps a group
    in which all did nearly alike from shouting (docs/sources.md, the task: 0.1 is stable where 1e-4 fell back).
    """
    _, index, counts = torch.unique(groups, return_inverse=True, return_counts=True)
    zeros = torch.zeros(len(counts), dtype=rewards.dtype)
    mean = zeros.index_add(0, index, rewards) / counts
    centred = rewards - mean[index]
    variance = zeros.index_add(0, index, centred.square()) / (counts - 1).clamp(min=1)
    advantages: Tensor = centred / (variance.sqrt()[index] + floor)
    return advantages


def grpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip: float,
    entropy: Tensor,
    entropy_coef: float,
    tokens: float | None = None,
    reference: Tensor | None = None,
    kl_coef: float = 0.0,
) -> tuple[Tensor, dict[str, float]]:
    """The clipped policy-gradient loss with an entropy bonus and, if asked for, the divergence from a reference policy,
    averaged over answer tokens.

    ``logprobs`` [B, T]: of the sampled tokens under the policy being trained, differentiable; ``old_logprobs``
    [B, T]: as recorded by whoever sampled them, however old its weights; ``advantages`` [B]; ``mask`` [B, T]: 1 for
    answer tokens, 0 for padding; ``entropy`` [B, T]: of the trained policy at each position, differentiable.
    ``tokens``: the answer tokens of the whole batch, where this is a part of it; the sums over the parts are then the
    loss, gradient and statistics of the whole. ``reference`` [B, T]: log-probabilities of the same tokens under the
    reference, to which ``kl_coef`` ties the policy: of pi_ref / pi - log(pi_ref / pi) - 1, the unbiased estimator of
    KL(pi, pi_ref) that is never negative (DeepSeekMath, equation 4; "k3").

    Returns the scalar loss, and for people: ``drift``, the mean absolute difference of the two log-probabilities,
    and ``clipped``, the share of tokens whose importance ratio left 1 ± ``clip``. A reward curve alone does not show
    that the ratio is used (docs/sources.md, the task: lag 2 learns without it too); these two do. With a reference also
    ``kl``, the mean estimate (nats).
    """
    mask = mask.to(logprobs.dtype)
    tokens = mask.sum().item() if tokens is None else tokens
    # A masked position may hold anything, inf too: it must become 0 before exp, not after.
    difference = torch.where(mask > 0, logprobs - old_logprobs, 0.0)
    ratio = difference.exp()
    gain = advantages[:, None]
    surrogate = torch.minimum(ratio * gain, ratio.clamp(1 - clip, 1 + clip) * gain)
    loss = -((surrogate + entropy_coef * entropy) * mask).sum() / tokens
    extra = {}
    if reference is not None:
        behind = torch.where(mask > 0, reference - logprobs, 0.0)
        divergence = (behind.exp() - behind - 1).sum() / tokens
        loss = loss + kl_coef * divergence
        extra = {"kl": divergence.item()}
    with torch.no_grad():
        outside = ((ratio - 1).abs() > clip).to(mask.dtype)
        stats = {
            "drift": ((difference.abs() * mask).sum() / tokens).item(),
            "clipped": ((outside * mask).sum() / tokens).item(),
            **extra,
        }
    return loss, stats
