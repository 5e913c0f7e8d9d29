"""Masks of constrained turns for an engine in torch, by the library ``llguidance``, which vLLM uses too.

What is sampled under a mask is never trained (:attr:`..trajectories.types.Sampling.constraint`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..models.tokenizer import Tokenizer

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
        tokenizer: The tokenizer of the model.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._opened: Any = None
        """llguidance's tokenizer; it takes up to a second to open, so only the first constrained turn opens it."""

    def begin(self, grammar: str, sampled: Sequence[int]) -> Mask | None:
        """Return the mask after the tokens that were sampled already; None if the grammar cannot be compiled."""
        try:
            import llguidance

            self._opened = self._opened or _open(self._tokenizer)
        except (ImportError, ValueError) as error:
            _log.warning("turns with a constraint end at once, because llguidance cannot be used: %s", error)
            return None
        matcher = llguidance.LLMatcher(self._opened, grammar, log_level=0)
        if matcher.is_error():
            _log.warning("a turn ends at once, because its constraint cannot be compiled: %.300s", matcher.get_error())
            return None
        mask = Mask(matcher, self._tokenizer.stop_tokens)
        for token in sampled:
            mask.take(token)
        return mask


def _open(tokenizer: Tokenizer) -> Any:
    """Return llguidance's form of a tokenizer."""
    from llguidance import LLTokenizer, TokenizerWrapper

    ends = sorted(tokenizer.stop_tokens)
    document = getattr(tokenizer, "document", None)
    if document is not None:  # of a Hugging Face folder
        return LLTokenizer(document, n_vocab=tokenizer.size, eos_token=ends)
    return LLTokenizer(TokenizerWrapper(_Pieces(tokenizer)), eos_token=ends)


class _Pieces:
    """A tokenizer in which each token has a text of its own, as llguidance wraps it."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        texts = [tokenizer.decode([token]) for token in range(tokenizer.size)]
        self.special_token_ids = [token for token, text in enumerate(texts) if not text]
        self.tokens = [text.encode() or b"\xff<%d>" % token for token, text in enumerate(texts)]
        self.eos_token_id = tokenizer.eos

    def __call__(self, text: bytes | str) -> list[int]:
        return list(self._tokenizer.encode(text.decode() if isinstance(text, bytes) else text))
