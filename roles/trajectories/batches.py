"""A batch between the store and who learns from it: packed on its way, plain tuples where it is read.

In a gang each member reads its share alone. Of the other trajectories it knows what the whole step depends on: groups,
scores, lengths, and the versions that sampled them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from typing import Any, NoReturn, cast

import msgspec

from ...core.types import Version
from .records import unpack_tokens
from .types import Batch, PackedBatch, PackedTrajectory, Trajectory


class NotLocal(Sequence[Any]):
    """So many values that another member of the gang has."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> NoReturn:
        raise LookupError("another member of the gang has the tokens of this trajectory")


class _Versions(Sequence[Version]):
    """One for each token, and no memory for each."""

    def __init__(self, packed: PackedTrajectory) -> None:
        self._packed = packed

    def __len__(self) -> int:
        return self._packed.length

    def __iter__(self) -> Iterator[Version]:
        return chain.from_iterable(
            repeat(Version(step, incarnation), count) for count, step, incarnation in self._packed.runs
        )

    def __getitem__(self, index: Any) -> Any:
        return tuple(self)[index]


def decode(batch: PackedBatch) -> Batch:
    """For reading: some 90 bytes for each token that is here."""
    prompts = {group: unpack_tokens(prompt) for group, prompt in zip(batch.groups, batch.prompts, strict=True)}
    trajectories = tuple(_decode_trajectory(each, prompts[each.group]) for each in batch.trajectories)
    return Batch(batch.number, batch.groups, batch.digest, trajectories, batch.stale, batch.max_age)


def _decode_trajectory(packed: PackedTrajectory, prompt: tuple[int, ...]) -> Trajectory:
    here = bool(packed.tokens) or not packed.length
    versions = _Versions(packed)
    return Trajectory(
        id=packed.id,
        group=packed.group,
        prompt=prompt,
        tokens=unpack_tokens(packed.tokens) if here else cast(Any, NotLocal(packed.length)),
        logprobs=tuple(array("f", packed.logprobs)) if here else cast(Any, NotLocal(packed.length)),
        versions=tuple(versions) if here else cast(Any, versions),
        reward=packed.reward,
        training=packed.training,
    )


def shard_for(batch: PackedBatch, rank: int, world: int) -> PackedBatch:
    """What member ``rank`` of ``world`` needs: the tokens of ``trajectories[rank::world]``, and of the first one, which
    takes the place of an example where a member has one less than the others."""
    included = {0, *range(rank, len(batch.trajectories), world)}
    trajectories = tuple(
        each if place in included else msgspec.structs.replace(each, tokens=b"", logprobs=b"")
        for place, each in enumerate(batch.trajectories)
    )
    return msgspec.structs.replace(batch, trajectories=trajectories)
