"""How likely the trained policy finds given tokens, and how undecided it is: from logits, a piece at a time.

A vocabulary of 49,000 to 152,000 makes the logits of a batch the largest tensor there is. Written with torch's own
functions, temperature, log-softmax, its exponent and their product would each be another one of that size, in float32,
kept for the backward pass. Here the pieces are computed twice instead, and the gradient takes the place of the logits:
measured for SmolLM2's vocabulary in tests/roles/trainer/test_likelihood.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rrl.roles.model import log_probs

_PIECE = 2**21
"""logits at a time: 8 MiB in float32, of which a handful are alive at once; a small model's batch is one piece"""


def likelihood(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """``logits`` [B, T, vocabulary], any floating dtype, of which nobody else may use the memory: the backward pass
    writes the gradient there. ``tokens`` [B, T].

    Returns, both [B, T], float32 and differentiable, the log-probability of each token as
    :func:`rrl.roles.model.log_probs` gives it, and the entropy (nats) of the distribution that it comes from."""
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
    size = max(1, _PIECE // logits.shape[-1])
    return [(slice(start, start + size), rows[start : start + size]) for start in range(0, len(rows), size)]
