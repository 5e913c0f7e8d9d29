"""The quickstart's model: a small Qwen3-architecture transformer, built here with random weights, nothing downloaded.

Trainer and rollouts build it from the same ``[model]`` table and seed, so that names and shapes agree; the values that
count come from a checkpoint or from the weight plane.
"""

from __future__ import annotations

from typing import cast

import torch
from msgspec import Struct
from torch import Tensor, nn
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM, Qwen3RotaryEmbedding


class ModelSpec(Struct, frozen=True):
    """The ``[model]`` table of job.toml (defaults and reasons: :class:`rrl.spec.job.ModelTable`)."""

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_length: int
    initializer_range: float


def build_model(spec: ModelSpec, vocabulary: int, seed: int) -> nn.Module:
    """A float32 model on the CPU with untied embeddings; the same seed gives the same weights, bit for bit.

    The global random state is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _model(spec, vocabulary)


def skeleton(spec: ModelSpec, vocabulary: int) -> nn.Module:
    """The same model without memory for its tensors: for whoever loads them (:func:`materialise`)."""
    with torch.device("meta"):
        return _model(spec, vocabulary)


def materialise(model: nn.Module, device: torch.device) -> None:
    """Give a :func:`skeleton` (sharded or not) its memory. Parameters hold anything until they are loaded.

    Rotary frequencies are buffers that no state dict carries: they would stay uninitialised, and nothing would say so
    (docs/sources.md, torch). They are computed again. Raises ValueError when there is another buffer like them.
    """
    model.to_empty(device=device)
    saved = model.state_dict().keys()
    missing = {name: buffer for name, buffer in model.named_buffers() if name not in saved}
    for place, module in model.named_modules():
        if isinstance(module, Qwen3RotaryEmbedding):
            for name, right in Qwen3RotaryEmbedding(module.config).named_buffers():
                missing.pop(f"{place}.{name}").copy_(right)
    if missing:
        raise ValueError(f"buffers that no checkpoint carries and nobody computes: {sorted(missing)}")


def _model(spec: ModelSpec, vocabulary: int) -> nn.Module:
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_length,
        initializer_range=spec.initializer_range,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return cast(nn.Module, Qwen3ForCausalLM(config).float().eval())


def log_probs(logits: Tensor, temperature: float) -> Tensor:
    """Log-probabilities of every token, ``[..., vocabulary]`` -> ``[..., vocabulary]``.

    Trainer and rollouts both call this: what one samples from is what the other differentiates.
    """
    return torch.log_softmax(logits.float() / temperature, dim=-1)
