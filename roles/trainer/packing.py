"""Sequences of any lengths in one forward pass, without padding.

They are one row of tokens, and the attention does not look across the bounds of a sequence.
The attention is registered with transformers under the name ``ATTENTION``. transformers makes no mask for it, so no
tensor grows with the square of a length. It computes exactly causal attention over whole sequences. A model that needs
anything else (a sliding window, a recurrent layer, soft-capped scores) keeps the attention that transformers chose, and
gets one sequence in a pass.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

try:
    from torch.nn.attention.varlen import varlen_attn

    _HAS_VARLEN = {"window_size", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys()
except ImportError:  # torch < 2.10
    _HAS_VARLEN = False

ATTENTION = "rrl_packed"
_LARGEST_HEAD = 256
"""Largest size of a head in FlashAttention 2, which ``varlen_attn`` uses."""
_FORGETFUL = {"nemotron"}
"""Model types whose layers do not pass the bounds on to their attention."""
_CHANGES_OF_ATTENTION = ("sliding_window", "softcap", "s_aux", "position_bias")
"""Arguments with which transformers' models ask for anything else than causal attention over a whole sequence."""

Example = tuple[Sequence[int], Sequence[int]]
"""Prompt and answer as tokens. The prompt has at least one token."""


class MicroBatch(Struct, frozen=True):
    """Some sequences of a member, one after the other: N tokens of S sequences, of which M positions are predicted.

    The last token of a sequence predicts nothing and is left out. A sequence without trained tokens has one predicted
    position, whose mask is False, so that each sequence has a position and each pass a gradient.
    """

    tokens: Tensor
    """[N]."""
    positions: Tensor
    """[N]: position of each token in its sequence."""
    bounds: Tensor
    """[S + 1] int32, ascending from 0 to N: where the sequences begin and end."""
    longest: int
    """Number of tokens of the longest sequence."""
    rows: Tensor
    """[M]: index in ``tokens`` of the token after which each predicted token comes."""
    targets: Tensor
    """[M]: the predicted tokens."""
    mask: Tensor
    """[M] bool: True for trained tokens."""
    starts: Tensor
    """[S]: index in ``targets`` of each sequence's first predicted position."""
    indices: Sequence[int]
    """Indices of the sequences among those of all members. It is empty for a padding micro-batch, which only keeps the
    number of micro-batches equal in all members and has one sequence that is not trained."""


_PADDING: Example = (0,), (0,)
"""The sequence of a padding micro-batch; every vocabulary has the token 0."""


def pack(
    examples: Sequence[Example], trained: Sequence[Sequence[int]], indices: Sequence[int], device: torch.device
) -> MicroBatch:
    """Put sequences one after the other; without any, return a padding micro-batch.

    Args:
        examples: The sequences. Neighbours of equal length are computed together on a CPU.
        trained: For each sequence, the positions in its answer that are trained, ascending.
        indices: See :class:`MicroBatch`.
        device: Device of the tensors.
    """
    tokens: list[int] = []
    positions: list[int] = []
    bounds, rows, targets, mask, starts = [0], list[int](), list[int](), list[bool](), list[int]()
    for (prompt, answer), places in zip(examples or [_PADDING], trained if examples else [()], strict=True):
        read = max(1, len(prompt) + len(answer) - 1)
        begin = len(tokens)
        tokens += [*prompt, *answer][:read]
        positions += range(read)
        starts.append(len(rows))
        rows += [begin + len(prompt) + place - 1 for place in places] or [begin]
        targets += [answer[place] for place in places] or [0]
        mask += [True] * len(places) or [False]
        bounds.append(len(tokens))
    longest = max(after - before for before, after in itertools.pairwise(bounds))
    return MicroBatch(
        tokens=torch.tensor(tokens, device=device),
        positions=torch.tensor(positions, device=device),
        bounds=torch.tensor(bounds, dtype=torch.int32, device=device),
        longest=longest,
        rows=torch.tensor(rows, device=device),
        targets=torch.tensor(targets, device=device),
        mask=torch.tensor(mask, device=device),
        starts=torch.tensor(starts, device=device),
        indices=indices,
    )


def use_packed_attention(model: nn.Module) -> bool:
    """Let the model attend within sequences, and return whether it can; else the model stays as it is."""
    if not _packs(model):
        return False
    assert isinstance(model, PreTrainedModel)
    if model.config._attn_implementation != ATTENTION:
        model.set_attn_implementation(ATTENTION)
    return True


def _packs(model: nn.Module) -> bool:
    if not isinstance(model, PreTrainedModel) or model._is_stateful:
        return False
    if not (model._supports_attention_backend and model._supports_sdpa and model._can_set_attn_implementation()):
        return False
    config = model.config.get_text_config()
    if config.model_type in _FORGETFUL:
        return False
    other_layers = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    changes = ("sliding_window", "attn_logit_softcapping", "attention_chunk_size")
    return not other_layers and not any(getattr(config, name, None) for name in changes)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within each sequence, as transformers calls it (``AttentionInterface``).

    Args:
        module: The attention layer.
        query: [1, heads, N, size].
        key: [1, heads of keys, N, size].
        value: As ``key``; its size may differ.
        attention_mask: Always None, because transformers makes none for this attention.
        dropout: Share of the weights that is dropped.
        scaling: Factor of the scores.
        cu_seq_lens_q: :attr:`MicroBatch.bounds`, under transformers' name.
        max_length_q: :attr:`MicroBatch.longest`.
        others: Further arguments of transformers.

    Returns:
        [1, N, heads, size of the values], and no weights.
    """
    if asked := [name for name in _CHANGES_OF_ATTENTION if others.get(name) is not None]:
        raise ValueError(f"{type(module).__name__} needs {asked[0]}, which {ATTENTION} does not compute")
    if cu_seq_lens_q is None or not getattr(module, "is_causal", True):
        raise ValueError(f"{type(module).__name__} is not causal, or did not get the bounds of its sequences")
    q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))
    bounds, longest = cu_seq_lens_q, max_length_q
    if _varlen_computes(query, value) and not dropout:
        shared = q.shape[1] != k.shape[1]
        output = varlen_attn(
            q, k, v, bounds, bounds, longest, longest, scale=scaling, window_size=(-1, 0), enable_gqa=shared
        )
        assert isinstance(output, Tensor)
        return output[None], None
    lengths = [(length, len([*same])) for length, same in itertools.groupby(bounds.diff().tolist())]
    sizes = [length * count for length, count in lengths]
    outputs = []
    for (length, count), *three in zip(lengths, *(torch.split(each, sizes) for each in (q, k, v)), strict=True):
        same = [each.unflatten(0, (count, length)).transpose(1, 2) for each in three]
        outputs.append(sdpa_attention_forward(module, *same, None, dropout, scaling, is_causal=True)[0].flatten(0, 1))
    return torch.cat(outputs)[None], None


def _varlen_computes(query: Tensor, value: Tensor) -> bool:
    half = query.dtype in (torch.bfloat16, torch.float16)
    return _HAS_VARLEN and query.is_cuda and half and query.shape[-1] == value.shape[-1] <= _LARGEST_HEAD


AttentionInterface.register(ATTENTION, _attend)
