"""Compares the log-probabilities that a run's rollouts recorded with those that torch computes.

For each token of the store's log, torch uses the checkpoint of the version that the log names. The run must have
kept all its checkpoints.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from rrl.core.run_dir import RunDir
from rrl.core.types import Version
from rrl.roles.checkpoints.stored_tensors import WEIGHTS_PREFIX
from rrl.roles.trainer.checkpoint import read_tensors
from rrl.roles.trajectories.durable.log import read_frames
from rrl.roles.trajectories.durable.records import (
    GroupCreated,
    SegmentsAppended,
    StepCommitted,
    decode,
    unpack,
    unpack_tokens,
)
from rrl.roles.trajectories.types import Segment

_AT_ONCE = 16
"""Number of sequences in one forward pass. SmolLM2's logits of 16 sequences take 0.2 GB."""


class Grew(NamedTuple):
    """The tokens that one version added to one trajectory, with all tokens before them."""

    before: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    incarnation: int
    """Number of the trainer incarnation that published the version."""

    def on(self, segment: Segment) -> Grew:
        """Append a segment of this version, so that one forward pass computes all tokens of the version."""
        assert segment.version.incarnation == self.incarnation
        return self._replace(tokens=self.tokens + segment.tokens, logprobs=self.logprobs + segment.logprobs)


class Recorded:
    """All tokens of a finished run, by the step of their version, and the checkpoint of each step."""

    def __init__(self, run: RunDir) -> None:
        self.grew: dict[int, list[Grew]] = defaultdict(list)
        self._checkpoints: dict[int, dict[str, Any]] = {}
        self._run = run
        prompts: dict[int, tuple[int, ...]] = {}
        grew: dict[int, dict[Version, Grew]] = defaultdict(dict)
        for payload in read_frames(max(run.store.glob("log.*"), key=lambda path: int(path.suffix[1:]))):
            match decode(payload):
                case GroupCreated(first=first, size=size, prompt=prompt):
                    prompts |= dict.fromkeys(range(first, first + size), unpack_tokens(prompt))
                case SegmentsAppended(segments=pieces):
                    for segment in map(unpack, pieces):
                        so_far, version = grew[segment.trajectory], segment.version
                        newest = next(reversed(so_far.values()), Grew(prompts[segment.trajectory], (), (), 0))
                        before = (*newest.before, *newest.tokens)
                        assert segment.offset == len(before) - len(prompts[segment.trajectory])
                        if version not in so_far:
                            so_far[version] = Grew(before, (), (), version.incarnation)
                        assert version == next(reversed(so_far)), "tokens of an older version follow newer ones"
                        so_far[version] = so_far[version].on(segment)
                case StepCommitted(number=number, manifest=manifest):
                    self._checkpoints[number] = manifest
        for so_far in grew.values():
            for version, each in so_far.items():
                self.grew[version.step].append(each)

    @property
    def incarnations(self) -> set[int]:
        """Return the numbers of the trainer incarnations whose weights generated tokens."""
        return {each.incarnation for several in self.grew.values() for each in several}

    def tokens(self, step: int) -> int:
        return sum(len(each.tokens) for each in self.grew[step])

    def load(self, step: int, model: nn.Module) -> None:
        """Load the checkpoint of ``step`` into the model."""
        state = {f"{WEIGHTS_PREFIX}{name}": parameter for name, parameter in model.named_parameters()}
        manifest = self._checkpoints[step]
        read_tensors(state, self._run.path / manifest["folder"], manifest["files"])

    def worst(self, step: int, model: nn.Module, temperature: float) -> float:
        """Return the largest difference (nats) between the version's recorded log-probabilities and the model's."""
        several = self.grew[step]
        parts = (several[start : start + _AT_ONCE] for start in range(0, len(several), _AT_ONCE))
        return max(off for part in parts for off in _differences(part, model, temperature))


@torch.no_grad()
def _differences(several: list[Grew], model: nn.Module, temperature: float) -> Iterator[float]:
    rows = [torch.tensor([*each.before, *each.tokens]) for each in several]
    logits = model(input_ids=pad_sequence(rows, batch_first=True), use_cache=False).logits  # causal: padding is unseen
    for row, each, found in zip(rows, several, logits, strict=True):
        start = len(each.before)
        every = torch.log_softmax(found[start - 1 : len(row) - 1] / temperature, -1)
        chosen: Tensor = every.gather(1, row[start:, None])[:, 0]
        yield (chosen - torch.tensor(each.logprobs)).abs().max().item()
