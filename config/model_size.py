"""Count the weights of a model without torch, so that a login node can compare its size with a machine."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from ..core.run_spec import ModelSpec
from .model_folder import CONFIG, language_config, read_header, read_json, weight_files

_SPECIAL_TOKENS = 2
"""Tokens of ``[model.tokenizer]`` besides its pieces: padding and end of sequence."""


def weight_count(model: ModelSpec) -> int:
    """Return the number of weights of ``[model]``, from its shape or from the files of its folder.

    Returns 0 for a folder that does not exist, or whose files of weights cannot be read.
    """
    if model.path is not None:
        return sum(math.prod(shape) for shape in _stored_shapes(Path(model.path)).values())
    width, attention = model.hidden_size, model.heads * model.head_dim
    vocabulary = _SPECIAL_TOKENS + (len(model.tokenizer.pieces) if model.tokenizer is not None else 0)
    layer = (
        2 * width * attention  # queries and output
        + 2 * width * model.kv_heads * model.head_dim  # keys and values
        + 3 * width * model.intermediate_size  # gate, up and down of the MLP
        + 2 * model.head_dim  # norms of queries and keys
        + 2 * width  # norms before attention and MLP
    )
    return 2 * vocabulary * width + width + model.layers * layer  # input and output embedding, the last norm


class Shape(Struct, frozen=True):
    """The sizes of a decoder that its activations depend on."""

    layers: int
    width: int
    """Size of a hidden state."""
    intermediate: int
    """Size of the hidden states inside of an MLP."""
    queries: int
    """Number of heads times their size."""
    keys: int
    """Number of heads of keys times their size."""
    vocabulary: int
    tied: bool
    """Whether the output head shares the weights of the embedding."""
    normed_heads: bool
    """Whether queries and keys are normed, as in Qwen3."""


def shape_of(model: ModelSpec) -> Shape | None:
    """Return the sizes of ``[model]``; None if its folder does not exist, or does not name them as Llama does."""
    if model.path is None:
        vocabulary = _SPECIAL_TOKENS + (len(model.tokenizer.pieces) if model.tokenizer is not None else 0)
        queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
        return Shape(model.layers, model.hidden_size, model.intermediate_size, queries, keys, vocabulary, False, True)
    try:
        config = read_json(Path(model.path) / CONFIG)
        table = language_config(config)
        width, heads = int(table["hidden_size"]), int(table["num_attention_heads"])
        head = int(table.get("head_dim") or width // heads)
        return Shape(
            layers=int(table["num_hidden_layers"]),
            width=width,
            intermediate=int(table["intermediate_size"]),
            queries=heads * head,
            keys=int(table.get("num_key_value_heads") or heads) * head,
            vocabulary=int(table["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", table.get("tie_word_embeddings", False))),
            normed_heads=any(name.endswith("q_norm.weight") for name in _stored_shapes(Path(model.path))),
        )
    except (KeyError, TypeError, ValueError):
        return None


def adapted_shapes(folder: Path, targets: Sequence[str] = ()) -> dict[str, tuple[int, int]]:
    """Return the shapes of the weights that adapters change, by the names of their modules; as the headers show them.

    Weights of the layers with two dimensions are taken for linear modules. ``targets`` are those of
    :class:`rrl.core.run_spec.LoraSpec`. Empty if the headers cannot be read.
    """
    matrices = {
        name.removesuffix(".weight"): (shape[0], shape[1])
        for name, shape in _stored_shapes(folder).items()
        if name.endswith(".weight") and len(shape) == 2 and re.search(r"\.\d+\.", name)
    }
    if not targets:
        return matrices
    chosen = [name for name in matrices if any(f".{name}".endswith(f".{target}") for target in targets)]
    return {name: matrices[name] for name in chosen}


def _stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in a folder's files of weights; empty if these cannot be read."""
    try:
        headers = [read_header(path) for path in weight_files(folder)]
        return {name: tuple(one["shape"]) for header in headers for name, one in header.items()}
    except (KeyError, TypeError, ValueError):
        return {}
