"""Exchange plain values between the members of a gang, as msgpack of a known type and never as pickle.

torch's object collectives (``all_gather_object``, ``broadcast_object_list`` …) unpickle received data, and gloo does
not authenticate its connections. So any process that reaches a port of gloo could run code in every member. Decoding
msgpack runs no code: a forged value can only be wrong, which fails the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist

MAX_VALUE_BYTES = 64 * 2**20
"""Maximum size of one member's value in bytes. The largest values are the positions of the tensors in a checkpoint:
about 150 bytes per tensor and member, and a model of 100 layers has some thousands of tensors."""
_RANK0 = 0

T = TypeVar("T")


def gather(group: dist.ProcessGroup | None, mine: T, kind: Any) -> list[T]:
    """Return the value of each member of ``group``, by rank, or ``[mine]`` without a group. All members must call it.

    ``kind`` is the type of the values; msgspec must be able to decode it.

    Raises:
        RuntimeError: Another member is gone, or a value is too large or of another type.
    """
    if group is None:
        return [mine]
    world = dist.get_world_size(group)
    encoded = _encoded(mine)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([encoded.numel()]), group=group)
    longest = _checked(max(int(size) for size in sizes))
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: encoded.numel()] = encoded
    received = [torch.empty(longest, dtype=torch.uint8) for _ in range(world)]
    dist.all_gather(received, padded, group=group)
    return [_decoded(data[: int(size)], kind) for data, size in zip(received, sizes, strict=True)]


def broadcast_from_rank0(group: dist.ProcessGroup | None, rank: int, do: Callable[[], T], kind: Any) -> T:
    """Call ``do`` on rank 0 only, and return its result in all members. All members must call this function.

    ``kind`` and the exceptions are as in :func:`gather`.
    """
    if group is None:
        return do()
    encoded = _encoded(do()) if rank == _RANK0 else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([encoded.numel()])
    dist.broadcast(size, group=group, group_src=_RANK0)
    data = encoded if rank == _RANK0 else torch.empty(_checked(int(size)), dtype=torch.uint8)
    dist.broadcast(data, group=group, group_src=_RANK0)
    value: T = _decoded(data, kind)
    return value


def _encoded(value: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(msgspec.msgpack.encode(value)), dtype=torch.uint8)


def _decoded(data: torch.Tensor, kind: Any) -> Any:
    try:
        return msgspec.msgpack.decode(data.contiguous().numpy().data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RuntimeError(f"another member of the gang sent an unexpected value: {error}") from None


def _checked(nbytes: int) -> int:
    if not 0 < nbytes <= MAX_VALUE_BYTES:
        raise RuntimeError(
            f"a member of the gang announced a value of {nbytes} bytes; at most {MAX_VALUE_BYTES} are allowed"
        )
    return nbytes
