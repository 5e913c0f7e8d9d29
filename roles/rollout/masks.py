"""Masks of constrained turns for an engine in torch, by the library ``llguidance``, which vLLM uses too.

What is sampled under a mask is never trained (:attr:`..trajectories.types.Sampling.constraint`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..models.hf_tokenizer import FolderTokenizer

_log = logging.getLogger("rrl.rollout")


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
