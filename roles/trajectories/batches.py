"""Conversion of batches and parts from their packed form, as the store sends them, to tuples that a trainer reads.

Each member of a gang receives the tokens of its own share only. For all other trajectories it receives the values that
the whole step depends on: groups, scores, lengths, and the versions that sampled the tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from typing import Any, NoReturn, cast

import msgspec

from ...core.types import Version
from .durable.records import unpack_tokens
from .types import PackedPart, PackedTrajectory, Part, Trajectory


class NotLocal(Sequence[Any]):
    """A sequence of known length whose values only another member of the gang has; to read one raises LookupError."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> NoReturn:
        raise LookupError(
            "another member of the gang has the tokens of this trajectory; a member can read only those of its share"
        )


class _Versions(Sequence[Version]):
    """The version of each token of a trajectory, computed on demand from ``PackedTrajectory.runs`` to save memory."""

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


def decode(part: PackedPart) -> Part:
    """Unpack a part for reading. An unpacked part takes about 90 bytes of memory per token."""
    prompts = {group: unpack_tokens(prompt) for group, prompt in zip(part.groups, part.prompts, strict=True)}
    return Part(
        part.number,
        part.groups,
        part.digest,
        tuple(_decode_trajectory(trajectory, prompts[trajectory.group]) for trajectory in part.trajectories),
        part.index,
        part.last,
        part.stale,
        part.max_age,
        part.unscored,
    )


def _decode_trajectory(packed: PackedTrajectory, prompt: tuple[int, ...]) -> Trajectory:
    is_local = bool(packed.tokens) or not packed.length
    versions = _Versions(packed)
    return Trajectory(
        id=packed.id,
        group=packed.group,
        prompt=unpack_tokens(packed.prompt) or prompt,
        tokens=unpack_tokens(packed.tokens) if is_local else cast(Any, NotLocal(packed.length)),
        logprobs=tuple(array("f", packed.logprobs)) if is_local else cast(Any, NotLocal(packed.length)),
        versions=tuple(versions) if is_local else cast(Any, versions),
        reward=packed.reward,
        training=packed.training,
        masked=packed.masked,
        extras={name: data for name, _, data in packed.extras},
    )


def shard_for(part: PackedPart, rank: int, world: int) -> PackedPart:
    """Return the part with the tokens that member ``rank`` of ``world`` needs.

    These are the tokens of ``trajectories[rank::world]``, and of the first trajectory, which serves as the padding
    example of a member that has one trajectory less than the others.
    """
    included = {0, *range(rank, len(part.trajectories), world)}
    trajectories = tuple(
        packed
        if index in included
        else msgspec.structs.replace(packed, tokens=b"", logprobs=b"", prompt=b"", extras=())
        for index, packed in enumerate(part.trajectories)
    )
    return msgspec.structs.replace(part, trajectories=trajectories)
