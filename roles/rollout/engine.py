"""The interface of the engines with which a rollout samples.

:mod:`.torch_engine` and :mod:`.vllm.engine` implement it; a further engine would be another module beside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from msgspec import Struct
from torch import Tensor

from ...core.types import Version
from ..trajectories.types import Item, Segment

StepOutput = tuple[list[Segment], list[int]]
"""New segments, and the trajectories that these segments complete. The segments of one trajectory are in their
order."""


class Sampling(Struct, frozen=True):
    """The settings of sampling.

    Recorded log-probabilities belong to the distribution that was sampled from, including the temperature.
    """

    temperature: float = 1.0
    segment_tokens: int = 64
    """Number of new tokens after which a trajectory's segment is returned."""
    greedy: bool = False
    """True to take the most likely token (for evaluation). The recorded log-probabilities are those of the policy in
    both cases."""


class Engine(Protocol):
    """A model that extends many trajectories together, step by step; used by one thread.

    :class:`Sampling` is given at construction. If :meth:`step`, :meth:`load` or :meth:`probe` raises an exception, the
    engine is unusable: the process ends, and the next incarnation continues from the segments that were returned. Only
    a ValueError of ``load`` leaves the engine usable.
    """

    @property
    def free_slots(self) -> int:
        """Number of further trajectories that the engine would accept now."""

    @property
    def has_work(self) -> bool:
        """True if :meth:`step` has anything to generate or to return."""

    def add(self, items: Sequence[Item]) -> None:
        """Begin to extend these trajectories too, each after its prompt and its segments so far.

        A trajectory is complete with an end-of-sequence token or after ``max_new`` tokens. Each trajectory is reported
        finished exactly once: with its last segment, or without a segment if it could not be extended.
        """

    def step(self) -> StepOutput:
        """Extend each trajectory by a token or a segment, and return the segments that are due; often there are none.

        Raises:
            RuntimeError: No weights were loaded before.
        """

    def flush(self) -> StepOutput:
        """Return all tokens that were generated and not returned yet, because the process is about to end."""

    def abort(self, trajectories: Iterable[int]) -> None:
        """Stop extending these trajectories, because they are no longer leased to this rollout.

        They are not reported finished. Trajectories that the engine does not have are ignored.
        """

    def load(self, version: Version, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load a complete set of weights by their Hugging Face names.

        Running trajectories continue: their next tokens are sampled with the new version, and the key-value cache of
        their earlier tokens is computed again with the new version. The given tensors are copied: they may be views of
        memory that is freed afterwards.

        Raises:
            ValueError: Names or shapes do not fit the model; nothing is loaded then.
        """

    def probe(self) -> None:
        """Generate one token.

        Raises:
            RuntimeError: The result is invalid, for example not finite.
        """

    def close(self) -> None:
        """Free the engine's resources. No method may be called afterwards."""
