"""Read the safetensors files of a Hugging Face folder directly into a model's tensors.

The files are mapped, not read whole, and each process reads only its own part of a sharded tensor. So no member of a
gang has a complete copy of the model.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...config.model_folder import INDEX, WEIGHTS, read_json, weight_files
from .tensors import first_row

_MAX_NAMES_SHOWN = 4
"""Maximum number of tensor names in a message."""


def copy_into(
    tensors: Mapping[str, Tensor], folder: Path, *, tied: Collection[str] = (), ignored: Sequence[str] = ()
) -> None:
    """Fill ``tensors`` by name from the folder; values are converted to the dtype of the tensor.

    Args:
        tensors: The tensors to fill.
        folder: The Hugging Face folder.
        tied: Further names of tied tensors. If the files lack the name in ``tensors``, they may have the tensor under
            one of these names.
        ignored: Patterns of names that are ignored.

    Raises:
        ValueError: The folder lacks a tensor, has an unexpected tensor, or has a tensor of another shape; the message
            names it.
    """
    files = _files(folder)
    missing = sorted(tensors.keys() - files.keys())
    alternatives = sorted(files.keys() & set(tied)) if missing else []
    source = {name: name for name in tensors if name in files}
    if len(missing) == len(alternatives) == 1:  # the files have this tied tensor under another name
        source[missing[0]], missing = alternatives[0], []
    extra = sorted(
        name
        for name in files.keys() - tensors.keys() - set(tied)
        if not any(re.search(pattern, name) for pattern in ignored)
    )
    if missing or extra:
        problem = (
            f"lacks {missing[:_MAX_NAMES_SHOWN]}"
            if missing
            else f"has {extra[:_MAX_NAMES_SHOWN]}, which the model of config.json does not have"
        )
        raise ValueError(
            f"[model] path: {folder} {problem}; rrl supports only checkpoints whose tensors have the same"
            " names as in transformers' model"
        )
    by_file: dict[Path, list[str]] = {}
    for name, stored in source.items():
        by_file.setdefault(files[stored], []).append(name)
    for path, names in by_file.items():
        with safe_open(path, framework="pt") as file, torch.no_grad():
            for name in names:
                _fill(tensors[name], file.get_slice(source[name]), f"{path}: {source[name]}")


def _fill(tensor: Tensor, stored: Any, location: str) -> None:
    """Fill a tensor, or this process's shard of it, with slices of ``stored``; only these slices are read."""
    if (shape_in_file := tuple(stored.get_shape())) != tuple(tensor.shape):
        raise ValueError(
            f"[model] path: {location} has the shape {shape_in_file}, but config.json requires {tuple(tensor.shape)}"
        )
    if not isinstance(tensor, DTensor):
        tensor.copy_(stored[...])
        return
    local = tensor.to_local()
    if local.numel():
        local.copy_(stored[first_row(tensor) : first_row(tensor) + len(local)])


def _files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor."""
    index = read_json(folder / INDEX).get("weight_map")
    try:
        if isinstance(index, dict):
            return {str(name): folder / str(file) for name, file in index.items()}
        file_by_name: dict[str, Path] = {}
        for path in weight_files(folder):
            with safe_open(path, framework="pt") as file:
                file_by_name.update(dict.fromkeys(file.keys(), path))
    except (OSError, SafetensorError) as error:
        raise ValueError(f"[model] path: {folder}: {error}") from None
    if not file_by_name:
        raise ValueError(f"[model] path: {folder} contains no {WEIGHTS}")
    return file_by_name
