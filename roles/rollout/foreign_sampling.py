"""Sample foreign turns, whose sampling differs from the job's, in plain torch and with the same rules as vLLM.

The mask of a constrained turn is that of the library ``llguidance``, which vLLM uses too.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..models.hf_tokenizer import FolderTokenizer
from ..models.policy import log_probs
from ..trajectories.types import Sampling

_log = logging.getLogger("rrl.rollout")

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


# ── masks ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
class Mask:
    """The tokens that may follow in one turn.

    Args:
        matcher: llguidance's matcher of the turn's grammar, after the tokens so far.
        stop_tokens: Tokens that end a turn.
    """

    def __init__(self, matcher: Any, stop_tokens: frozenset[int]) -> None:
        self._matcher, self._stop_tokens = matcher, sorted(stop_tokens)

    def allowed(self, vocabulary: int, device: torch.device) -> Tensor:
        """Return which tokens may follow: [vocabulary]. Where the grammar is at its end, or lost, the turn must end."""
        allowed = torch.zeros(vocabulary, dtype=torch.bool)
        if not (self._matcher.is_stopped() or self._matcher.is_error()):
            bias = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)[:vocabulary]
            allowed[: len(bias)] = bias > 0
        if not allowed.any():
            allowed[self._stop_tokens] = True
        return allowed.to(device)

    def take(self, token: int) -> None:
        """Go on after a sampled token; one that ends the turn changes nothing."""
        if token not in self._stop_tokens and not self._matcher.is_stopped():
            self._matcher.consume_token(token)


class Masks:
    """Makes the masks of turns.

    Args:
        tokenizer: The tokenizer of the model's folder.
    """

    def __init__(self, tokenizer: FolderTokenizer) -> None:
        self._tokenizer = tokenizer
        self._opened: Any = None
        """llguidance's tokenizer; it takes up to a second to open, so only the first constrained turn opens it."""

    def begin(self, grammar: str, sampled: Sequence[int]) -> Mask | None:
        """Return the mask after the tokens that were sampled already; None if the grammar cannot be compiled."""
        tokenizer = self._tokenizer
        try:
            import llguidance

            ends = sorted(tokenizer.stop_tokens)
            self._opened = self._opened or llguidance.LLTokenizer(tokenizer.document, tokenizer.size, eos_token=ends)
        except (ImportError, ValueError) as error:
            _log.warning("turns with a constraint end at once, because llguidance cannot be used: %s", error)
            return None
        matcher = llguidance.LLMatcher(self._opened, grammar, log_level=0)
        if matcher.is_error():
            _log.warning("a turn ends at once, because its constraint cannot be compiled: %.300s", matcher.get_error())
            return None
        mask = Mask(matcher, tokenizer.stop_tokens)
        for token in sampled:
            mask.take(token)
        return mask
