"""Conversion of batches and parts from their packed form, as the store sends them, to what a trainer reads.

A rank that requests its share receives the tokens of this share only. For all other trajectories it receives the values
that the whole step depends on: groups, scores, lengths, and the versions that sampled the tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, NoReturn, cast

from msgspec import Struct

from ...core.types import Version
from .durable.records import unpack_tokens
from .types import PackedPart, PackedTrajectory, Share, Trajectory

if TYPE_CHECKING:
    from .arrays import Arrays


class NotLocal(Sequence[Any]):
    """A sequence of known length whose values only another rank has; to read one raises LookupError."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> NoReturn:
        raise LookupError("another rank has the tokens of this trajectory; a rank can read only those of its share")


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


class Received(Sequence[Trajectory]):
    """The trajectories of a part of which this process has received ``share``; decoded when they are first read."""

    def __init__(self, packed: PackedPart, share: Share | None) -> None:
        self._packed, self._share = packed, share

    @cached_property
    def _decoded(self) -> tuple[Trajectory, ...]:
        part = self._packed
        prompts = dict(zip(part.groups, map(unpack_tokens, part.prompts), strict=True))
        return tuple(_decode_trajectory(trajectory, prompts[trajectory.group]) for trajectory in part.trajectories)

    def __len__(self) -> int:
        return len(self._packed.trajectories)

    def __getitem__(self, index: Any) -> Any:
        return self._decoded[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._decoded == tuple(other)

    def __hash__(self) -> int:
        return hash(self._packed)

    def arrays(self) -> Arrays:
        """Return the trajectories as arrays."""
        from .arrays import arrays_of  # imported here: numpy takes 0.1 s

        return arrays_of(self._packed, self._share)


class Part(Struct, frozen=True, dict=True):
    """Some or all of the complete groups that are bound to training step ``number``; its parts are numbered from 0.

    A part never changes. ``digest`` identifies its content and all parts before it.
    """

    number: int
    groups: tuple[int, ...]
    digest: str
    """Digest of this part and all parts before it. A commit of the step names the digest of the last part."""
    trajectories: Sequence[Trajectory]
    """They are decoded when they are first read. An unpacked token takes about 90 bytes of memory."""
    index: int = 0
    last: bool = True
    """True for the part that completes the step."""
    stale: int = 0
    """Number of groups that the run had dropped as too old before this part was bound."""
    max_age: int = 0
    """Age, in training steps, of the oldest token of this part and of all groups that the run bound before it."""
    unscored: int = 0
    """Number of groups that the run had dropped before this part was bound, because an answer could not be scored."""

    @cached_property
    def arrays(self) -> Arrays:
        """The trajectories as arrays (about 13 bytes per token), made when they are first read.

        Raises:
            ValueError: The part was not received from the store.
        """
        if not isinstance(self.trajectories, Received):
            raise ValueError("only a part that me.batches() or me.parts() has yielded has arrays")
        return self.trajectories.arrays()


Batch = Part
"""A whole batch is the only part of its step."""


def decode(part: PackedPart, share: Share | None = None) -> Part:
    """Return a part for reading, of which this process has received ``share``; None stands for the whole part."""
    return Part(
        part.number,
        part.groups,
        part.digest,
        Received(part, share),
        part.index,
        part.last,
        part.stale,
        part.max_age,
        part.unscored,
    )


def _decode_trajectory(packed: PackedTrajectory, prompt: tuple[int, ...]) -> Trajectory:
    is_local = bool(packed.tokens) or not packed.length
    versions = _Versions(packed)
    prompt = unpack_tokens(packed.prompt) or prompt
    return Trajectory(
        id=packed.id,
        group=packed.group,
        prompt=prompt if prompt or not packed.prompt_length else cast(Any, NotLocal(packed.prompt_length)),
        tokens=unpack_tokens(packed.tokens) if is_local else cast(Any, NotLocal(packed.length)),
        logprobs=tuple(array("f", packed.logprobs)) if is_local else cast(Any, NotLocal(packed.length)),
        versions=tuple(versions) if is_local else cast(Any, versions),
        reward=packed.reward,
        training=packed.training,
        masked=packed.masked,
        extras={name: data for name, _, data in packed.extras},
        truncated=packed.truncated,
        agent=packed.agent,
    )
