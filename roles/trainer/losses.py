"""The losses of rrl, as functions of tensors.

rrl has one old log-probability of a token, the sampler's, and one optimizer step for each batch. So clipping and masks
act on the same importance ratio r = pi / sampler.

- GRPO: DeepSeekMath, arXiv:2402.03300; its clipping from above: DAPO, arXiv:2503.14476; dual clip: Ye et al.,
  arXiv:1912.09729.
- CISPO: MiniMax-M1, arXiv:2506.13585.
- GSPO: arXiv:2507.18071.

docs/losses.md has the formulas. tests/unit/roles/trainer/test_losses.py compares each loss with those of TRL.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from msgspec import Struct
from torch import Tensor

from ...core.run_spec import TrainerSettings
from .loss_function import LossSum, LossTokens

_MAX_LOG_RATIO = 20.0
"""Bound (nats) of the difference of two log-probabilities, as in verl. If the exponential of a difference overflowed,
its gradient would be nan, even where the loss is clipped."""


def group_advantages(rewards: Tensor, groups: Tensor, floor: float, *, by_std: bool = True) -> Tensor:
    """Return the advantage of each trajectory over its group: ``(R - mean) / (std + floor)``, [B].

    ``std`` is the unbiased estimate. The only trajectory of a group gets 0. The floor limits the advantages in a group
    with nearly equal rewards. Without this limit, training may undo its progress: in a measurement with a floor of
    1e-4, the mean reward fell again after it had reached 0.8; with 0.1 it did not (docs/sources.md, the task).

    Args:
        rewards: [B] float.
        groups: [B] int, equal for trajectories of one prompt, in any order and number.
        floor: Added to the standard deviation.
        by_std: False for ``R - mean`` (Dr. GRPO, arXiv:2503.20783).
    """
    _, index, counts = torch.unique(groups, return_inverse=True, return_counts=True)
    zeros = torch.zeros(len(counts), dtype=rewards.dtype)
    mean = zeros.index_add(0, index, rewards) / counts
    centred: Tensor = rewards - mean[index]
    if not by_std:
        return centred
    variance = zeros.index_add(0, index, centred.square()) / (counts - 1).clamp(min=1)
    advantages: Tensor = centred / (variance.sqrt()[index] + floor)
    return advantages


def grpo(tokens: LossTokens, settings: TrainerSettings) -> LossSum:
    """Return the clipped policy-gradient loss.

    ``dual_clip`` limits the ratio of a token with a negative advantage: else such a token that the sampler thought
    8 nats less likely has the weight of 2,981 others.
    """
    trained = _trained(tokens, settings)
    ratio = trained.log_ratio.exp()
    falls, rises = tokens.advantages < 0, tokens.advantages > 0
    low, high = _bounds(settings.clip, settings.clip_high)
    limited = torch.where(falls, ratio.clamp(low, settings.dual_clip), ratio.clamp(max=high))
    clipped = {
        "clipped_low": falls & (ratio < low),
        "clipped_high": rises & (ratio > high),
        "dual_clipped": falls & (ratio > settings.dual_clip),
    }
    return _summed(tokens, settings, trained, limited * tokens.advantages, clipped)


def cispo(tokens: LossTokens, settings: TrainerSettings) -> LossSum:
    """Return the policy gradient weighted by the bounded importance ratio, in which every token keeps a gradient."""
    trained = _trained(tokens, settings)
    ratio = trained.log_ratio.detach().exp()
    weight = ratio.clamp(max=settings.cispo_max)
    objective = weight * tokens.advantages * torch.where(trained.kept, tokens.logprobs, 0.0)
    return _summed(tokens, settings, trained, objective, {"clipped_high": ratio > settings.cispo_max})


def gspo(tokens: LossTokens, settings: TrainerSettings) -> LossSum:
    """Return the loss in which all tokens of a sequence have its ratio, the geometric mean of their ratios, clipped.

    Written for each token, as the paper's GSPO-token: the value of a token is that of its sequence, and its gradient is
    that of its own log-probability.
    """
    trained = _trained(tokens, settings)
    sequence = _sequence_means(trained.log_ratio.detach(), trained.kept, tokens.starts).exp()
    ratio = sequence * (trained.log_ratio - trained.log_ratio.detach()).exp()
    falls, rises = tokens.advantages < 0, tokens.advantages > 0
    low, high = _bounds(settings.gspo_clip, settings.gspo_clip_high)
    limited = torch.where(falls, ratio.clamp(min=low), ratio.clamp(max=high))
    clipped = {"clipped_low": falls & (sequence < low), "clipped_high": rises & (sequence > high)}
    return _summed(tokens, settings, trained, limited * tokens.advantages, clipped)


@torch.no_grad()
def statistics_of(result: LossSum, tokens: LossTokens) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return ``means`` and ``maxima`` of a loss's result, with the statistics that a step has with any loss.

    A statistic of the loss replaces one with the same name.

    ``sampler_kl`` is the estimate r - 1 - log r of the divergence of the trained policy from the sampler, whose tokens
    these are (k3, http://joschu.net/blog/kl-approx.html). It is never negative, unlike the mean of -log r.
    """
    log_ratio = _bounded(tokens.logprobs - tokens.sampler_logprobs, tokens.mask)
    ratio = log_ratio.exp()
    means = {
        "entropy": torch.where(tokens.mask, tokens.entropy, 0.0).sum(),
        "drift": log_ratio.abs().sum(),
        "ratio_mean": torch.where(tokens.mask, ratio, 0.0).sum(),
        "sampler_kl": (ratio - 1 - log_ratio).sum(),
    }
    if tokens.reference_logprobs is not None:
        means["kl"] = _divergence(tokens, tokens.mask).sum()
    maxima = {"ratio_max": torch.where(tokens.mask, ratio, 0.0).max() if len(ratio) else ratio.sum()}
    return (
        {**{name: value for name, value in means.items() if name not in result.maxima}, **result.means},
        {**{name: value for name, value in maxima.items() if name not in result.means}, **result.maxima},
    )


class _Trained(Struct, frozen=True):
    """The trained tokens of a call."""

    log_ratio: Tensor
    """[N], differentiable: log r, bounded; 0 for tokens that are not kept."""
    kept: Tensor
    """[N] bool: True for trained tokens within ``ratio_mask``."""


def _trained(tokens: LossTokens, settings: TrainerSettings) -> _Trained:
    # A masked position may contain any value, even inf: it must become 0 before exp, not after.
    log_ratio = _bounded(tokens.logprobs - tokens.sampler_logprobs, tokens.mask)
    if settings.ratio_mask is None:
        return _Trained(log_ratio, tokens.mask)
    with torch.no_grad():
        judged = log_ratio
        if settings.ratio_mask_by == "sequence":
            judged = _sequence_means(log_ratio, tokens.mask, tokens.starts)
        low, high = settings.ratio_mask
        kept = tokens.mask & (judged.exp() >= low) & (judged.exp() <= high)
    return _Trained(torch.where(kept, log_ratio, 0.0), kept)


def _bounds(clip: float, clip_high: float | None) -> tuple[float, float]:
    return 1 - clip, 1 + (clip if clip_high is None else clip_high)


def _summed(
    tokens: LossTokens, settings: TrainerSettings, trained: _Trained, objective: Tensor, clipped: Mapping[str, Tensor]
) -> LossSum:
    """Return the loss of an objective [N], with entropy bonus and divergence, normalised as ``normalise`` says.

    ``clipped`` are statistics: [N] bool.
    """
    objective = objective + settings.entropy * tokens.entropy
    if tokens.reference_logprobs is not None:
        objective = objective - settings.kl * _divergence(tokens, trained.kept)
    terms = torch.where(trained.kept, objective, 0.0)
    with torch.no_grad():
        means = {name: (trained.kept & which).sum() for name, which in clipped.items()}
        means["masked"] = (tokens.mask & ~trained.kept).sum()
    if settings.normalise == "token":
        return LossSum(-terms.sum(), "tokens", means)
    if settings.normalise == "sequence":
        return LossSum(-(terms / _trained_counts(tokens.mask, tokens.starts)).sum(), "sequences", means)
    return LossSum(-terms.sum() / tokens.limit, "sequences", means)


def _divergence(tokens: LossTokens, kept: Tensor) -> Tensor:
    """Return pi_ref / pi - log(pi_ref / pi) - 1 of each token, 0 where it is not ``kept``.

    It is the unbiased estimate of KL(pi, pi_ref) that is never negative (DeepSeekMath, equation 4; "k3").
    """
    assert tokens.reference_logprobs is not None
    log_ratio = _bounded(tokens.reference_logprobs - tokens.logprobs, kept)
    return log_ratio.exp() - log_ratio - 1


def _bounded(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Return the differences of log-probabilities, bounded, and 0 at masked positions."""
    return torch.where(mask, log_ratio, 0.0).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def _sequence_means(values: Tensor, mask: Tensor, starts: Tensor) -> Tensor:
    """Return for each token the mean of ``values`` over the tokens of its sequence in ``mask``; 0 if there is none."""
    return _sequence_sums(torch.where(mask, values, 0.0), starts) / _trained_counts(mask, starts)


def _trained_counts(mask: Tensor, starts: Tensor) -> Tensor:
    """Return for each token the number of tokens of its sequence in ``mask``, at least 1."""
    return _sequence_sums(mask.float(), starts).clamp(min=1)


def _sequence_sums(values: Tensor, starts: Tensor) -> Tensor:
    """Return for each token the sum over its sequence. Unlike index_add, the same bits each time on a GPU, too."""
    lengths = torch.diff(starts, append=starts.new_tensor([len(values)]))
    sums = torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)
    return sums.repeat_interleave(lengths, output_size=len(values))
