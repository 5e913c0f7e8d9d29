"""Log-probabilities and entropies of tokens under a model, without the logits of all tokens in memory at once.

With a vocabulary of 152,000 tokens, the logits of 32,000 tokens have 10 GB in bfloat16, and the backward pass would
need several tensors of this size. So the output head of the model runs on pieces of rows, and again in the backward
pass.

All of it happens within the forward pass of the root module. FSDP2 gathers the head's weight before that pass, frees it
after the backward pass, and begins the backward pass when a gradient reaches what the root's forward returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ..models.policy import blocks, log_probs
from .packing import MicroBatch, use_packed_attention

_ROWS_PER_PIECE = 512
"""Number of rows in a piece of a large vocabulary, as in verl: 300 MB of float32 logits for 152,000 tokens. With fewer
rows, adding up the gradient of the head's weight would take longer than computing it."""
_LOGITS_PER_PIECE = 2**21
"""Number of logits in a piece of a small vocabulary."""

_Head = Callable[[Tensor], Tensor]
"""A function of hidden states [n, hidden size] that returns their logits [n, vocabulary]."""


def recompute_blocks(model: nn.Module) -> None:
    """Let the backward pass compute the activations of each layer again (activation checkpointing).

    Only the forward functions of the layers change. So names of tensors stay, and FSDP2, which acts before and after
    these functions, gathers the parameters of a layer for the second computation, too.
    """
    for block in blocks(model):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def likelihood(model: nn.Module, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies of the predicted tokens.

    Args:
        model: The model, sharded or not.
        batch: Several sequences only if :func:`.packing.use_packed_attention` is true of the model.
        temperature: Temperature of the distribution.

    Returns:
        The log-probability of each token as :func:`rrl.roles.models.policy.log_probs` defines it, and the entropy
            (nats) of its distribution; both [M], float32 and differentiable.
    """
    inputs: dict[str, Any] = {"input_ids": batch.tokens[None], "use_cache": False}
    if use_packed_attention(model):
        bounds, longest = batch.bounds, batch.longest
        inputs |= {"position_ids": batch.positions[None], "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
        inputs |= {"max_length_q": longest, "max_length_k": longest}
    usual = model.forward
    model.forward = partial(_forward, model, usual, batch, temperature)
    try:
        result: tuple[Tensor, Tensor] = model(**inputs)
    finally:
        model.forward = usual
    return result


def _forward(
    model: Any, usual: Callable[..., Any], batch: MicroBatch, temperature: float, **inputs: Any
) -> tuple[Tensor, Tensor]:
    """Compute what :func:`likelihood` returns, as the forward pass of ``model``, whose usual one is ``usual``."""
    prefix = model.base_model_prefix if isinstance(model, PreTrainedModel) else ""
    if prefix not in model._modules or model.get_decoder() is not model._modules[prefix]:  # only its logits are known
        logits = usual(**inputs).logits[0, batch.rows]
        return _in_pieces(lambda piece: piece, logits, batch.targets, temperature, logits.shape[-1], [])
    outputs = model.base_model(**inputs)
    hidden = outputs.last_hidden_state[0, batch.rows]
    head = partial(_head, model, prefix, type(outputs))
    others = (child for name, child in model.named_children() if name != prefix)
    parameters = {id(each): each for child in others for each in child.parameters() if each.requires_grad}
    return _in_pieces(
        head, hidden, batch.targets, temperature, model.config.get_text_config().vocab_size, [*parameters.values()]
    )


def _head(model: Any, prefix: str, outputs: type, hidden: Tensor) -> Tensor:
    """Return the logits of hidden states by the model's own code; ``outputs`` is the type of its transformer's outputs.

    The code scales or caps logits as the model's authors mean it. It runs on a shallow copy of the model, in which the
    transformer only returns the hidden states; other threads may read the model in the meantime.
    """
    copied = object.__new__(type(model))
    copied.__dict__.update(model.__dict__)
    computed = _Computed(model.base_model, outputs(last_hidden_state=hidden[None]))
    copied.__dict__["_modules"] = {**model._modules, prefix: computed}
    logits: Tensor = type(model).forward(copied, use_cache=False).logits[0]
    return logits


class _Computed:
    """A transformer that was called already; else it is what it was."""

    def __init__(self, model: nn.Module, outputs: Any) -> None:
        self._model, self._outputs = model, outputs

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self._outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _in_pieces(
    head: _Head, hidden: Tensor, targets: Tensor, temperature: float, vocabulary: int, parameters: list[nn.Parameter]
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies of ``targets``; ``parameters`` are those that ``head`` uses."""
    size = max(_ROWS_PER_PIECE, _LOGITS_PER_PIECE // vocabulary)
    result: tuple[Tensor, Tensor] = _Pieces.apply(head, hidden, targets, temperature, size, *parameters)  # type: ignore[no-untyped-call]
    return result


class _Pieces(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, head: _Head, hidden: Tensor, targets: Tensor, temperature: float, size: int, *parameters: nn.Parameter
    ) -> tuple[Tensor, Tensor]:
        chosen = torch.empty(len(hidden), device=hidden.device)
        entropy = torch.empty(len(hidden), device=hidden.device)
        for rows in _slices(len(hidden), size):
            log_probabilities = log_probs(head(hidden[rows]), temperature)
            chosen[rows] = log_probabilities.gather(1, targets[rows, None])[:, 0]
            entropy[rows] = -log_probabilities.exp().mul_(log_probabilities).sum(-1)
        ctx.save_for_backward(hidden, targets, entropy)
        ctx.head, ctx.temperature, ctx.size, ctx.parameters = head, temperature, size, parameters
        return chosen, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_chosen: Tensor, of_entropy: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of the hidden states and of the head's parameters.

        Those of the parameters are added up in float32: in bfloat16 the sum would no longer change after some hundred
        pieces.
        """
        hidden, targets, entropy = ctx.saved_tensors
        of_hidden = torch.empty_like(hidden)
        sums = [torch.zeros(each.shape, device=each.device) for each in ctx.parameters]
        for rows in _slices(len(hidden), ctx.size):
            piece = hidden[rows].detach().requires_grad_()
            with torch.enable_grad():
                logits = ctx.head(piece)
            slope = _slope(
                logits.detach(), targets[rows], entropy[rows], of_chosen[rows], of_entropy[rows], ctx.temperature
            )
            of_hidden[rows], *gradients = torch.autograd.grad(
                logits, (piece, *ctx.parameters), slope.to(logits.dtype), materialize_grads=True
            )
            for total, gradient in zip(sums, gradients, strict=True):
                total.add_(gradient)
        of_parameters = (total.to(each.dtype) for total, each in zip(sums, ctx.parameters, strict=True))
        return None, of_hidden, None, None, None, *of_parameters


def _slope(
    logits: Tensor, targets: Tensor, entropy: Tensor, of_chosen: Tensor, of_entropy: Tensor, temperature: float
) -> Tensor:
    """Return the gradient of the logits.

    With p the probabilities and H the entropy: d log p[c] / dz = onehot(c) - p, and dH / dz = -p (log p + H).
    """
    log_probabilities = log_probs(logits, temperature)
    share = log_probabilities.exp()
    slope = (
        log_probabilities.add_(entropy[:, None]).mul_(of_entropy[:, None]).add_(of_chosen[:, None]).mul_(share).neg_()
    )
    return slope.scatter_add_(1, targets[:, None], of_chosen[:, None]).div_(temperature)


def _slices(length: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, length, size))
