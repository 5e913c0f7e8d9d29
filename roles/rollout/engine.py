"""What a rollout needs of an engine. ``torch_engine`` and ``vllm.engine`` are two; others live beside them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from msgspec import Struct
from torch import Tensor

from ...core.types import Version
from ..trajectories.types import Item, Segment

StepOutput = tuple[list[Segment], list[int]]
"""What some trajectories grew by, and which of them are complete with it. The segments of one trajectory follow one
another in this order."""


class Sampling(Struct, frozen=True):
    """How to sample. Recorded log-probabilities are those of the distribution sampled from, temperature included."""

    temperature: float = 1.0
    segment_tokens: int = 64
    """tokens a trajectory grows by before its segment is handed over"""
    greedy: bool = False
    """take the likeliest token (evaluation; recorded log-probabilities are still the policy's)"""


class Engine(Protocol):
    """One model that grows trajectories, many at once, in steps. Used by one thread; :class:`Sampling` is given at
    construction. An exception of :meth:`step`, :meth:`load` or :meth:`probe`, ValueError of ``load`` excepted, is the
    engine's end: the process leaves with it, and the next life goes on from what was handed over."""

    @property
    def free_slots(self) -> int:
        """How many more trajectories it would take now."""

    @property
    def has_work(self) -> bool:
        """Whether there is something to grow, or to hand over: then :meth:`step` has something to do."""

    def add(self, items: Sequence[Item]) -> None:
        """Grow these too, each from where it stands (prompt and so_far) to its end, the sooner the better.

        A trajectory is complete with an end-of-sequence token or after ``max_new`` tokens. Each is reported finished
        exactly once, with its last segment or without any when it had nowhere to grow."""

    def step(self) -> StepOutput:
        """Advance a bit: a token of each, or a segment. Often there is nothing to hand over yet. Raises RuntimeError
        before the first :meth:`load`."""

    def flush(self) -> StepOutput:
        """What was made and not handed over yet: for whoever leaves now."""

    def abort(self, trajectories: Iterable[int]) -> None:
        """Work no more on these, of those that were added: they are somebody else's by now. They are not reported
        finished. Others are no error."""

    def load(self, version: Version, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take over a complete set of weights, under their Hugging Face names. Running trajectories go on: their next
        tokens are of the new version, and so is whatever was remembered of the tokens before (the key-value cache). The
        tensors may be views of memory that goes away afterwards: they are copied.

        Raises ValueError when names or shapes are not the model's; then nothing is loaded."""

    def probe(self) -> None:
        """One token of real work. Raises RuntimeError when the result cannot be right."""

    def close(self) -> None:
        """Free what the engine holds. Nothing may be called afterwards."""
