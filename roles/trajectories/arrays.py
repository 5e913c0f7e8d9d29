"""The arrays of a part: what a trainer reads instead of tuples, without a Python object for each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
from msgspec import Struct
from numpy.typing import NDArray

from . import partition
from .types import NOT_SAMPLED, PackedPart, PackedTrajectory, Share

_TOKEN_BYTES = 4


class Sequences(Struct, frozen=True, eq=False, kw_only=True):
    """Values of sequences, with one entry for each. A sequence is a prompt and its answer.

    In a job with agents it is a sample of an episode, and several sequences may have the same id and rewards.
    """

    ids: NDArray[numpy.int64]
    groups: NDArray[numpy.int64]
    rewards: NDArray[numpy.float32]
    """The rewards that are reported."""
    training: NDArray[numpy.float32]
    """The rewards that the trainer learns from."""
    prompt_lengths: NDArray[numpy.int64]
    """Number of tokens of each prompt."""
    lengths: NDArray[numpy.int64]
    """Number of tokens of each sequence, with its prompt."""
    trained: NDArray[numpy.int64]
    """Number of tokens of each sequence that are trained."""
    truncated: NDArray[numpy.bool_]
    """True for each sequence with an answer that the limit on its length cut."""
    agents: NDArray[numpy.str_]
    """The agent of each sequence, as :attr:`.types.Trajectory.agent`."""


class Arrays(Sequences, frozen=True, eq=False, kw_only=True):
    """The sequences of a share of a part, or of the whole part, one after the other.

    Sequence i has the tokens from ``starts[i]`` to ``starts[i + 1]``: its prompt, then its answer. The arrays belong to
    the caller, who may write into them.
    """

    starts: NDArray[numpy.int64]
    """The first token of each sequence, and the number of all tokens."""
    tokens: NDArray[numpy.int32]
    logprobs: NDArray[numpy.float32]
    """Log-probability of each token under the policy that sampled it; 0 for a token that was not sampled."""
    versions: NDArray[numpy.int32]
    """Training step of the weights that sampled each token; -1 for a token that was not sampled."""
    loss_mask: NDArray[numpy.bool_]
    """True for each token that is trained in this sequence."""
    extras: dict[str, NDArray[numpy.uint8]]
    """Extras ``per_token`` by name: the bytes of each token, as [tokens, bytes]. Zeros for a token that was given."""
    sequence_extras: dict[str, list[bytes]]
    """Extras ``per_trajectory`` by name: the bytes of each sequence; empty for one that has none."""
    whole: Sequences
    """The values of all sequences of the part, also of those in the shares of other ranks."""
    shares: list[list[int]]
    """The sequences of each rank, as indices of ``whole``."""
    rank: int
    """The rank of this share among ``shares``."""

    def micro_batches(self, max_tokens: int) -> list[range]:
        """Divide this share into micro-batches of at most ``max_tokens`` tokens; a longer sequence is alone.

        All ranks get the same number of micro-batches, without exchanging anything. Those that a rank lacks are empty:
        the rank must take part in the collectives of the others with a micro-batch that trains nothing.

        Returns:
            Sequences of this share: a micro-batch has the tokens from ``starts[each.start]`` to ``starts[each.stop]``.
        """
        return partition.micro_batches(self.whole.lengths.tolist(), self.shares, self.rank, max_tokens)


def arrays_of(part: PackedPart, share: Share | None) -> Arrays:
    """Return the arrays of a part, of which this process has received ``share``; None stands for the whole part."""
    divided = [list(range(len(part.trajectories)))] if share is None else partition.shares_of(part, share)
    rank = 0 if share is None else share.rank
    whole, mine = _sequences(part.trajectories), numpy.array(divided[rank], numpy.int64)
    share_of_part = [part.trajectories[index] for index in divided[rank]]
    of_share: dict[str, Any] = {name: getattr(whole, name)[mine] for name in Sequences.__struct_fields__}
    prompts = dict(zip(part.groups, part.prompts, strict=True))
    tokens, logprobs = bytearray(), bytearray()
    steps: list[tuple[int, int]] = []
    trained: list[tuple[int, bool]] = []
    for one in share_of_part:
        tokens += one.prompt or prompts[one.group]
        tokens += one.tokens
        logprobs += bytes(_TOKEN_BYTES * one.prompt_length)
        logprobs += one.logprobs
        steps += (one.prompt_length, NOT_SAMPLED[0]), *((count, step) for count, step, _ in one.runs)
        trained.append((one.prompt_length, False))
        at = 0
        for start, count in one.masked:
            trained += (start - at, True), (count, False)
            at = start + count
        trained.append((one.length - at, True))
    starts = numpy.append(0, numpy.cumsum(of_share["lengths"]))
    extras, sequence_extras = _extras(share_of_part, starts)
    return Arrays(
        **of_share,
        starts=starts,
        tokens=numpy.frombuffer(tokens, numpy.int32),
        logprobs=numpy.frombuffer(logprobs, numpy.float32),
        versions=_repeated(steps, numpy.int32),
        loss_mask=_repeated(trained, numpy.bool_),
        extras=extras,
        sequence_extras=sequence_extras,
        whole=whole,
        shares=divided,
        rank=rank,
    )


def _extras(
    trajectories: Sequence[PackedTrajectory], starts: NDArray[numpy.int64]
) -> tuple[dict[str, NDArray[numpy.uint8]], dict[str, list[bytes]]]:
    """Return the extras of tokens and those of sequences, by name."""
    of_tokens: dict[str, NDArray[numpy.uint8]] = {}
    of_sequences: dict[str, list[bytes]] = {}
    for index, one in enumerate(trajectories):
        for name, width, data in one.extras:
            if width:
                if name not in of_tokens:
                    of_tokens[name] = numpy.zeros((starts[-1], width), numpy.uint8)
                sampled = of_tokens[name][starts[index] + one.prompt_length : starts[index + 1]]
                sampled[:] = numpy.frombuffer(data, numpy.uint8).reshape(sampled.shape)
            else:
                of_sequences.setdefault(name, [b""] * len(trajectories))[index] = data
    return of_tokens, of_sequences


def _sequences(trajectories: Sequence[PackedTrajectory]) -> Sequences:
    lengths = [one.length for one in trajectories]
    masked = [sum(count for _, count in one.masked) for one in trajectories]
    prompt_lengths = numpy.array([one.prompt_length for one in trajectories], numpy.int64)
    return Sequences(
        ids=numpy.array([one.id for one in trajectories], numpy.int64),
        groups=numpy.array([one.group for one in trajectories], numpy.int64),
        rewards=numpy.array([one.reward for one in trajectories], numpy.float32),
        training=numpy.array([one.training for one in trajectories], numpy.float32),
        prompt_lengths=prompt_lengths,
        lengths=prompt_lengths + lengths,
        trained=numpy.array(lengths, numpy.int64) - masked,
        truncated=numpy.array([one.truncated for one in trajectories], numpy.bool_),
        agents=numpy.array([one.agent for one in trajectories], numpy.str_),
    )


def _repeated(runs: Sequence[tuple[int, Any]], dtype: Any) -> NDArray[Any]:
    """Return the value of each run as often as the run says; ``runs`` has (count, value) pairs."""
    counts = numpy.array([count for count, _ in runs], numpy.int64)
    return numpy.repeat(numpy.array([value for _, value in runs], dtype), counts)
