"""Count the weights of a model without torch, so that a login node can compare its size with a machine."""

from __future__ import annotations

import json
import math
from pathlib import Path

from ..core.run_spec import ModelSpec
from .model_folder import MAX_HEADER_BYTES, weight_files

_SPECIAL_TOKENS = 2
"""Tokens of ``[model.tokenizer]`` besides its pieces: padding and end of sequence."""


def weight_count(model: ModelSpec) -> int:
    """Return the number of weights of ``[model]``, from its shape or from the files of its folder.

    Returns 0 for a folder that does not exist, or whose files of weights cannot be read.
    """
    if model.path is not None:
        try:
            return sum(_in_file(path) for path in weight_files(Path(model.path)))
        except (OSError, ValueError):
            return 0
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


def _in_file(path: Path) -> int:
    """Return the number of elements of all tensors in a safetensors file, from its header."""
    with open(path, "rb") as file:
        header = json.loads(file.read(min(int.from_bytes(file.read(8), "little"), MAX_HEADER_BYTES)))
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
