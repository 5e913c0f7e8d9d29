"""How a batch comes to the members of a gang: the first one asks the store for it, once, and sends each its share.

A share has the tokens of a member's own trajectories, and of all others what the step as a whole depends on
(:func:`rrl.roles.trajectories.packed.share`). It is sent as it came from the store, 8 bytes a token, one member's at a
time: nowhere is there more than the batch and one share of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import msgspec
import torch
import torch.distributed as dist

import rrl
from rrl.roles.trainer.gang import Gang
from rrl.roles.trajectories.packed import share, unpacked
from rrl.roles.trajectories.types import Batch, PackedBatch

_FIRST = 0
_decoder = msgspec.msgpack.Decoder(PackedBatch)


def batches(me: rrl.Worker, gang: Gang, after: int) -> Iterator[Batch]:
    """As ``me.batches()``, the same ones for all members, each with its share. All must call it.

    They end together: when one of them is asked to stop, which another may hear a step later."""
    if gang.world == 1:
        yield from me.batches(after=after)
        return
    for number in range(after + 1, me.job["run"]["steps"] + 1):
        batch = _next(me, gang, number)
        if batch is None:
            return
        yield batch
        me.progress(1)


def _next(me: rrl.Worker, gang: Gang, number: int) -> Batch | None:
    """The others wait for the first member, however long the store is away."""
    first = gang.rank == _FIRST
    whole = me.packed_batch(number) if first else None
    with nullcontext() if first else me.phase("wait_data", waits_for=me.launch.life.gang.replica):
        if not gang.all(whole is not None if first else not me.stopping.is_set()):
            return None
        return unpacked(_receive(gang) if whole is None else _send(gang, whole))


def _send(gang: Gang, whole: PackedBatch) -> PackedBatch:
    """Returns the sender's own share."""
    for rank in range(gang.world):
        if rank != _FIRST:
            data = bytearray()
            msgspec.msgpack.Encoder().encode_into(share(whole, rank, gang.world), data)
            dist.send(torch.tensor([len(data)]), dst=rank, group=gang.talk)
            dist.send(torch.frombuffer(data, dtype=torch.uint8), dst=rank, group=gang.talk)
    return share(whole, _FIRST, gang.world)


def _receive(gang: Gang) -> PackedBatch:
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, src=_FIRST, group=gang.talk)
    data = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(data, src=_FIRST, group=gang.talk)
    return _decoder.decode(data.numpy().data)
