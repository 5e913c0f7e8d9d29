"""The names and tensors of a model in the format of its Hugging Face files, for a trainer of one's own.

From transformers 5 on, the modules of a Mixture of Experts hold the experts of a layer in one tensor, while the files
have a tensor for each expert. ``save_pretrained`` converts the whole state dict. Here each parameter is converted by
itself, so that the model need not be in one memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...core.shares import checked_share, owners


def hf_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return, for each parameter of a model, the names of the tensors that the model's Hugging Face files have of it.

    The keys are the names in the state dict; a tied parameter has only its first name. The model may be sharded (FSDP2,
    DTensor), but must not be inside a wrapper such as DDP's. Models that are not of transformers keep their names.

    Raises:
        ValueError: A tensor of the files is made from several parameters.
    """
    return {name: names for name, (names, _) in _conversions(model).items()}


def hf_tensors(model: nn.Module, part: int = 0, of: int = 1) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of part ``part`` of ``of`` parts of a model, by their names in the model's Hugging Face files.

    The parts have about the same size and whole parameters. If the model is sharded, each parameter is gathered by
    itself, on its device: all ranks must iterate to the end, but a rank need not keep more than its part::

        mine = {name: tensor.cpu() for name, tensor in rrl.hf_tensors(model, me.rank, me.world)}
        me.publish_shard(number, rrl.pack(mine), part=me.rank, of=me.world)

    Raises:
        ValueError: As :func:`hf_names`, or there is no such part.
    """
    checked_share((part, of))
    conversions, weights = _conversions(model), _weights(model)
    part_of = owners({name: tensor.nbytes for name, tensor in weights.items()}, of)
    for name, tensor in weights.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if part_of[name] == part:
            names, changes = conversions[name]
            yield from _in_files(model, {name: whole}).items() if changes else [(names[0], whole)]


def _conversions(model: nn.Module) -> dict[str, tuple[tuple[str, ...], bool]]:
    """Return, for each parameter, its names in the files, and whether its values change, not only its name."""
    meta = {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in _weights(model).items()}
    converted = _in_files(model, meta)
    renamed = {id(tensor): name for name, tensor in converted.items()}
    conversions = {
        name: ((renamed[id(tensor)],), False)
        if id(tensor) in renamed
        else (tuple(_in_files(model, {name: tensor})), True)
        for name, tensor in meta.items()
    }
    if odd := converted.keys() ^ {each for names, _ in conversions.values() for each in names}:
        raise ValueError(
            f"{min(odd)}: transformers makes this tensor from several parameters of {type(model).__name__}; gather the"
            " state dict, and convert it with transformers.core_model_loading.revert_weight_conversion"
        )
    return conversions


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the state dict, each under its first name."""
    first: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    return {name: each.detach() for name, each in state.items() if first.setdefault(id(each), name) == name}


def _in_files(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of the model as ``save_pretrained`` writes them. Unchanged tensors are the same objects."""
    if not hasattr(model, "save_pretrained"):
        return dict(tensors)
    from transformers.core_model_loading import revert_weight_conversion  # imported here: it takes seconds

    converted: dict[str, Tensor] = revert_weight_conversion(model, dict(tensors))
    return converted
