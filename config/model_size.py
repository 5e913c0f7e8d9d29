"""Count the weights of a model without torch, so that a login node can compare its size with a machine."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
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
    return {name: matrices[name] for name in targeted(matrices, targets)}


def targeted(names: Iterable[str], targets: Sequence[str]) -> list[str]:
    """Return those of the names of modules that ``targets`` name by their ends; all if there are no targets."""
    return [name for name in names if not targets or any(f".{name}".endswith(f".{target}") for target in targets)]


def wrong_target(names: Collection[str], targets: Sequence[str]) -> str:
    """Return why a target is wrong, if it matches none of the names of linear modules; else an empty text."""
    for target in targets:
        if not targeted(names, (target,)):
            there = ", ".join(sorted({name.rpartition(".")[2] for name in names})) or "none"
            return f"{target!r} is no linear module of the model that can be adapted; there are: {there}"
    return ""


def wrong_rank(shapes: Mapping[str, tuple[int, int]], rank: int) -> str:
    """Return why adapters of ``rank`` are wrong, if a side of a weight is shorter; else an empty text."""
    name, shape = min(shapes.items(), key=lambda one: min(one[1]), default=("", (rank, rank)))
    if rank <= min(shape):
        return ""
    rows, columns = shape
    return f"{rank} is larger than a side of {name} ({rows} x {columns} weights); lower it to {min(shape)} or less"


def _stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in a folder's files of weights; empty if these cannot be read."""
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        for path in weight_files(folder):
            stat = path.stat()
            shapes |= _shapes_in(path, stat.st_size, stat.st_mtime_ns)
    except (OSError, KeyError, TypeError, ValueError):
        return {}
    return shapes


@lru_cache(maxsize=1024)  # a check of a job asks for the same files a dozen times, and a large model has hundreds
def _shapes_in(path: Path, size: int, mtime_ns: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in a file, which is read again if its size or modification time has changed."""
    return {name: tuple(one["shape"]) for name, one in read_header(path).items()}
