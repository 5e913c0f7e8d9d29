"""Sample foreign turns, whose sampling differs from the job's, in plain torch and with the same rules as vLLM."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..models.policy import log_probs
from ..trajectories.types import Sampling

GREEDY = Sampling(temperature=0.0)
"""Sampling that takes the most likely token, and records the log-probability of the model at temperature 1."""
_SEEDS = 2**31
"""Number of possible seeds of a token: vLLM also passes seeds to numpy, which accepts 32 bits."""


def seed_at(seed: int, position: int) -> int:
    """Return the seed with which sampling begins after ``position`` sampled tokens.

    The seed depends on the position, so that an answer that moves to another rollout does not repeat random numbers.
    """
    return (seed + position) % _SEEDS


def next_token(
    logits: Tensor,
    sampling: Sampling,
    temperature: float,
    prompt: Sequence[int],
    sampled: Sequence[int],
    generator: torch.Generator,
    allowed: Tensor | None = None,
) -> tuple[int, float]:
    """Sample the next token of a turn.

    Args:
        logits: Logits of the next token: [vocabulary].
        sampling: The settings that differ from the job's.
        temperature: Temperature of the job.
        prompt: Tokens before the answer.
        sampled: Tokens of the answer so far.
        generator: Generator of the engine, for a turn without a seed.
        allowed: Which tokens the constraint of the turn allows: [vocabulary]; None for all.

    Returns:
        The token and its log-probability. The log-probability is that of the distribution from which the token was
        sampled or, at temperature 0, of the model's distribution after penalties.
    """
    temperature = temperature if sampling.temperature is None else sampling.temperature
    logits = logits if allowed is None else logits.masked_fill(~allowed, -torch.inf)
    penalised = _penalised(logits.float(), sampling, prompt, sampled)
    if temperature == 0:
        logprobs = log_probs(penalised, 1.0)
        token = int(logprobs.argmax())
        return token, float(logprobs[token])
    logprobs = _truncated(log_probs(penalised, temperature), sampling)
    if sampling.seed is not None:
        generator = torch.Generator(logits.device).manual_seed(seed_at(sampling.seed, len(sampled)))
    token = int(torch.multinomial(logprobs.exp(), 1, generator=generator))
    return token, float(logprobs[token])


def _penalised(logits: Tensor, sampling: Sampling, prompt: Sequence[int], sampled: Sequence[int]) -> Tensor:
    """Return the logits after the penalties; only the penalty on repetition also counts the tokens of the prompt."""
    vocabulary = logits.shape[-1]
    counts = torch.bincount(torch.tensor(sampled, dtype=torch.long, device=logits.device), minlength=vocabulary)
    if (penalty := sampling.repetition_penalty) is not None:
        known = torch.tensor(sorted({*prompt, *sampled}), dtype=torch.long, device=logits.device)
        logits = logits.clone()
        logits[known] = torch.where(logits[known] > 0, logits[known] / penalty, logits[known] * penalty)
    return logits - (sampling.frequency_penalty or 0.0) * counts - (sampling.presence_penalty or 0.0) * (counts > 0)


def _truncated(logprobs: Tensor, sampling: Sampling) -> Tensor:
    """Return the log-probabilities after min_p, top_k and top_p have removed tokens, and the rest was normalised."""
    kept = torch.ones_like(logprobs, dtype=torch.bool)
    if sampling.min_p:
        kept &= logprobs >= logprobs.max() + torch.log(torch.tensor(sampling.min_p))
    if sampling.top_k is not None and 0 < sampling.top_k < len(logprobs):
        kept &= logprobs >= logprobs.masked_fill(~kept, -torch.inf).topk(sampling.top_k).values[-1]
    if sampling.top_p is not None and sampling.top_p < 1:
        ordered, order = torch.log_softmax(logprobs.masked_fill(~kept, -torch.inf), -1).sort(descending=True)
        before = ordered.exp().cumsum(-1) - ordered.exp()
        kept &= torch.zeros_like(kept).scatter(0, order, before < sampling.top_p)
    return torch.log_softmax(logprobs.masked_fill(~kept, -torch.inf), -1)
