"""GRPO's loss, and log-probabilities and entropies of given tokens, as functions of tensors.

GRPO: DeepSeekMath, arXiv:2402.03300; token-mean loss as in DAPO, arXiv:2503.14476. ``B`` is the number of trajectories,
``T`` the longest answer in tokens.

A vocabulary of 49,000 to 152,000 makes the logits of a batch the largest tensor there is. With torch's own functions,
temperature, log-softmax, its exponent and their product would each be another float32 tensor of that size, kept for the
backward pass. Here logits are processed in pieces that are computed twice instead, and the gradient replaces the
logits: measured for SmolLM2's vocabulary in tests/unit/roles/trainer/test_likelihood.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..models.policy import log_probs


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


_LOGITS_PER_PIECE = 2**21
"""logits at a time: 8 MiB in float32, of which a handful are alive at once; a small model's batch is one piece"""


def likelihood(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """``logits`` [B, T, vocabulary], any floating dtype, of which nobody else may use the memory: the backward pass
    writes the gradient there. ``tokens`` [B, T].

    Returns, both [B, T], float32 and differentiable, the log-probability of each token as
    :func:`rrl.roles.models.policy.log_probs` gives it, and the entropy (nats) of the distribution that it comes
    from."""
    given: tuple[Tensor, Tensor] = _Likelihood.apply(logits, tokens, temperature)  # type: ignore[no-untyped-call]
    return given


class _Likelihood(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        chosen = torch.empty(tokens.shape, device=logits.device)
        entropy = torch.empty(tokens.shape, device=logits.device)
        flat = chosen.flatten(), entropy.flatten()
        for place, piece in _pieces(logits):
            every = log_probs(piece, temperature)
            flat[0][place] = every.gather(1, tokens.flatten()[place, None])[:, 0]
            flat[1][place] = -(every.exp() * every).sum(-1)
        ctx.save_for_backward(logits, tokens, entropy)
        ctx.temperature = temperature
        return chosen, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_chosen: Tensor, of_entropy: Tensor) -> tuple[Tensor, None, None]:
        """With p the probabilities, H the entropy: d log p[c] / dz = onehot(c) - p, and dH / dz = -p (log p + H)."""
        logits, tokens, entropy = ctx.saved_tensors
        for place, piece in _pieces(logits):
            every = log_probs(piece, ctx.temperature)
            by_chosen, by_entropy = of_chosen.flatten()[place, None], of_entropy.flatten()[place, None]
            share = every.exp()
            slope = every.add_(entropy.flatten()[place, None]).mul_(by_entropy).add_(by_chosen).mul_(share).neg_()
            slope.scatter_add_(1, tokens.flatten()[place, None], by_chosen)
            piece.copy_(slope.div_(ctx.temperature))
        return logits.detach(), None, None


def _pieces(logits: Tensor) -> list[tuple[slice, Tensor]]:
    """Views of some rows at a time, [n, vocabulary] each, and where they stand among all."""
    rows = logits.detach().view(-1, logits.shape[-1])
    size = max(1, _LOGITS_PER_PIECE // logits.shape[-1])
    return [(slice(start, start + size), rows[start : start + size]) for start in range(0, len(rows), size)]
