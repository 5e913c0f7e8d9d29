"""What a rollout needs of an engine. ``torch_engine`` is one; others live in a file beside it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from msgspec import Struct
from torch import Tensor

from rrl.roles.trajectories.types import Item, Segment
from rrl.spec.words import Version

Grown = tuple[list[Segment], list[int]]
"""What some trajectories grew by, and which of them are complete with it."""


class Sampling(Struct, frozen=True):
    """How to sample. Recorded log-probabilities are those of the distribution sampled from, temperature included."""

    temperature: float = 1.0
    segment_tokens: int = 64
    """tokens a trajectory grows by before its segment is handed over"""
    greedy: bool = False
    """take the likeliest token (evaluation; recorded log-probabilities are still the policy's)"""


class Engine(Protocol):
    """One model, one thread: nothing is called while another call runs, except between two results of ``generate``."""

    def generate(self, items: Sequence[Item], sampling: Sampling) -> Iterator[Grown]:
        """Grow each item from where it stands (prompt and so_far) to its end, many at once.

        A trajectory is complete with its end-of-sequence token or after ``max_new`` tokens. Each is reported finished
        exactly once, with its last segment or without any when it had nowhere to grow.
        """

    def drop(self, trajectories: Iterable[int]) -> None:
        """Work no more on these, of those that ``generate`` is growing: they are somebody else's by now. They are not
        reported finished. Others are no error."""

    def load(self, version: Version, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take over a complete set of weights. Also between two results of ``generate``: the next segments are of the
        new version. The tensors may be views of memory that goes away afterwards: they are copied.

        Raises ValueError when names or shapes are not the model's; then nothing is loaded."""

    def probe(self) -> None:
        """One token of real work. Raises RuntimeError when the result cannot be right."""

    def close(self) -> None:
        """Free what the engine holds. Nothing may be called afterwards."""
