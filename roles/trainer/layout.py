"""Where the tensors of one member lie in a host buffer: one flat piece of memory, filled in each step at the speed of a
memcpy, from which files and snapshots are made while the next step runs."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping

import msgspec
import torch
from msgspec import Struct
from torch import Tensor
from torch.distributed.tensor import DTensor

warnings.filterwarnings("ignore", message="The given buffer is not writable")  # nobody writes to what is read
_ALIGNED = 64
"""bytes: a cache line, and more than any dtype needs"""


class _Place(Struct, frozen=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def of(self, buffer: memoryview) -> Tensor:
        """A view of its part of the buffer; its storage is that part alone, as torch.save writes whole storages."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        count = torch.Size(self.shape).numel()
        if count == 0:
            return torch.empty(self.shape, dtype=dtype)
        return torch.frombuffer(buffer, dtype=dtype, count=count, offset=self.offset).view(self.shape)


class Layout:
    """Of :meth:`rrl.roles.trainer.learner.Learner.tensors`: of a sharded tensor, this member's shard."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        places, offset = [], 0
        for name, tensor in tensors.items():
            local = shard_of(tensor)
            places.append(_Place(name, str(local.dtype).removeprefix("torch."), tuple(local.shape), offset))
            offset += -(-local.numel() * local.element_size() // _ALIGNED) * _ALIGNED
        self._places = tuple(places)
        self.nbytes = offset
        self.digest = hashlib.sha256(msgspec.msgpack.encode(self._places)).hexdigest()
        """two buffers with the same one hold the same tensors at the same places"""

    def fill(self, buffer: memoryview, tensors: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for place in self._places:
                place.of(buffer).copy_(shard_of(tensors[place.name]))

    def load(self, buffer: memoryview, tensors: Mapping[str, Tensor]) -> None:
        """The other way round."""
        with torch.no_grad():
            for name, held in self.views(buffer).items():
                shard_of(tensors[name]).copy_(held)

    def views(self, buffer: memoryview) -> dict[str, Tensor]:
        """What lies there, by name, without copying."""
        return {place.name: place.of(buffer) for place in self._places}


def shard_of(tensor: Tensor) -> Tensor:
    """This member's part of it."""
    with torch.no_grad():
        local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local
