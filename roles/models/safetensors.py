"""Weights out of the safetensors of a Hugging Face folder, straight into a model's tensors: of a sharded one each
process reads its own part alone, from files that are mapped and not read whole, so that no member of a gang ever has a
copy of the model for itself.
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
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ...config.model_folder import INDEX, WEIGHTS, read_json

_SINGLE = "model.safetensors"
_MAX_NAMES_SHOWN = 4
"""names in a message"""


def copy_into(
    tensors: Mapping[str, Tensor], folder: Path, *, tied: Collection[str] = (), ignored: Sequence[str] = ()
) -> None:  # fmt: skip
    """Fill ``tensors`` (by name; converted to their dtype) from the folder. ``also``: names that may be there too, of
    tensors that are tied to one of them; where the files have only such a one, it is taken. ``ignored``: patterns of
    names that count for nothing.

    Raises ValueError, naming them, when the folder lacks a tensor, has one that no tensor here is for, or one of
    another shape."""
    where = _files(folder)
    missing = sorted(tensors.keys() - where.keys())
    instead = sorted(where.keys() & set(tied)) if missing else []
    source = {name: name for name in tensors if name in where}
    if len(missing) == len(instead) == 1:  # a tied one, under its other name
        source[missing[0]], missing = instead[0], []
    extra = sorted(
        name for name in where.keys() - tensors.keys() - set(tied) if not any(re.search(each, name) for each in ignored)
    )
    if missing or extra:
        what = (
            f"lacks {missing[:_MAX_NAMES_SHOWN]}"
            if missing
            else f"has {extra[:_MAX_NAMES_SHOWN]}, and the model of config.json not"
        )
        raise ValueError(f"[model] path: {folder} {what}: its tensors are named otherwise than the model's, and such"
                         " architectures are not supported")  # fmt: skip
    by_file: dict[Path, list[str]] = {}
    for name, stored in source.items():
        by_file.setdefault(where[stored], []).append(name)
    for path, names in by_file.items():
        with safe_open(path, framework="pt") as file, torch.no_grad():
            for name in names:
                _fill(tensors[name], file.get_slice(source[name]), f"{path}: {source[name]}")


def _fill(tensor: Tensor, stored: Any, location: str) -> None:
    """``stored`` gives parts of a tensor as they are asked for."""
    if (there := tuple(stored.get_shape())) != tuple(tensor.shape):
        raise ValueError(f"[model] path: {location} is {there}, and by config.json {tuple(tensor.shape)}")
    if not isinstance(tensor, DTensor):
        tensor.copy_(stored[...])
        return
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local = tensor.to_local()
    if local.numel():
        local.copy_(stored[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))])


def _files(folder: Path) -> dict[str, Path]:
    """Which file has which tensor. What an index does not name is not read: other formats may lie beside it."""
    index = read_json(folder / INDEX).get("weight_map")
    try:
        if isinstance(index, dict):
            return {str(name): folder / str(file) for name, file in index.items()}
        single = folder / _SINGLE
        paths = [single] if single.exists() else sorted(folder.glob(WEIGHTS))
        found: dict[str, Path] = {}
        for path in paths:
            with safe_open(path, framework="pt") as file:
                found.update(dict.fromkeys(file.keys(), path))
    except (OSError, SafetensorError) as error:
        raise ValueError(f"[model] path: {folder}: {error}") from None
    if not found:
        raise ValueError(f"[model] path: {folder} has no {WEIGHTS}")
    return found
