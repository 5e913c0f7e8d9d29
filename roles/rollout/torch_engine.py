"""An engine in plain torch: batched sampling with a key-value cache, a log-probability and a version per token.

A trajectory that another life began is not special: its prefix is read like a longer prompt. That is also how running
trajectories survive new weights: their prefix is read again under them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from ...core.types import Life, Version
from ..models.policy import load_weights, log_probs
from ..trajectories.types import Item, Segment
from .engine import Grown, Sampling


def seed_of(run_seed: int, life: Life) -> int:
    """A seed for this life alone: a replacement that sampled what the dead one did would add nothing."""
    digest = hashlib.sha256(f"{run_seed} {life}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


class TorchEngine:
    """``model`` is any transformers causal language model, on the device that is to compute; a token of ``ends`` ends a
    trajectory; ``seed`` is this life's. At most ``lease`` trajectories grow at once, and there is room once all are
    complete. A step is a segment of each."""

    def __init__(
        self, model: nn.Module, *, ends: frozenset[int], seed: int, sampling: Sampling | None = None, lease: int = 64
    ) -> None:
        self._model = model.eval().requires_grad_(False)
        self._ends = ends
        self._device = next(model.parameters()).device
        self._end_tokens = torch.tensor(sorted(ends), device=self._device)
        self._sampling = sampling or Sampling()
        self._lease = lease
        self._chance = torch.Generator(self._device).manual_seed(seed)
        self._version: Version | None = None
        self._rows: list[_Row] = []
        self._flight: _Flight | None = None
        self._nowhere_to_grow: list[int] = []

    @property
    def room(self) -> int:
        """See :class:`rrl.roles.rollout.engine.Engine`."""
        return 0 if self.busy else self._lease

    @property
    def busy(self) -> bool:
        """See :class:`rrl.roles.rollout.engine.Engine`."""
        return bool(self._rows or self._nowhere_to_grow)

    def add(self, items: Sequence[Item]) -> None:
        """See :class:`rrl.roles.rollout.engine.Engine`. Those that run already are read again with the new ones."""
        for row in map(_Row, items):
            if row.ended(self._ends):
                self._nowhere_to_grow.append(row.trajectory)
            else:
                self._rows.append(row)
                self._flight = None

    def step(self) -> Grown:
        """See :class:`rrl.roles.rollout.engine.Engine`."""
        if self._version is None:
            raise RuntimeError("no weights were loaded yet")
        finished, self._nowhere_to_grow = self._nowhere_to_grow, []
        if finished or not self._rows:
            return [], finished
        if self._flight is None:
            self._flight = _Flight(self._rows, self._version, self._device)
        segments = self._grow(self._flight, self._rows)
        finished = [row.trajectory for row in self._rows if row.ended(self._ends)]
        self._keep([place for place, row in enumerate(self._rows) if not row.ended(self._ends)])
        return segments, finished

    def rest(self) -> Grown:
        """See :class:`rrl.roles.rollout.engine.Engine`: every step hands over all that it made."""
        return [], []

    def drop(self, trajectories: Iterable[int]) -> None:
        """See :class:`rrl.roles.rollout.engine.Engine`."""
        gone = set(trajectories)
        self._nowhere_to_grow = [trajectory for trajectory in self._nowhere_to_grow if trajectory not in gone]
        self._keep([place for place, row in enumerate(self._rows) if row.trajectory not in gone])

    def _keep(self, places: Sequence[int]) -> None:
        if len(places) == len(self._rows):
            return
        self._rows = [self._rows[place] for place in places]
        if self._flight is not None:
            self._flight.keep(places)
        if not self._rows:
            self._flight = None

    def _grow(self, flight: _Flight, rows: Sequence[_Row]) -> list[Segment]:
        tokens, logprobs = self._decode(flight, torch.tensor([row.left for row in rows], device=self._device))
        return [
            row.grow(these, theirs, flight.version, self._ends)
            for row, these, theirs in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True)
        ]

    @torch.inference_mode()
    def _decode(self, flight: _Flight, left: Tensor) -> tuple[Tensor, Tensor]:
        """The next tokens of every row and their log-probabilities, both [B, n]; a row that ends early is filled up."""
        sampling, tokens, logprobs = self._sampling, [], []
        done = torch.zeros(len(left), dtype=torch.bool, device=self._device)
        for count in range(1, sampling.segment_tokens + 1):
            every = log_probs(flight.read(self._model), sampling.temperature)
            if sampling.greedy:
                chosen = every.argmax(-1)
            else:
                chosen = torch.multinomial(every.exp(), 1, generator=self._chance)[:, 0]
            tokens.append(chosen)
            logprobs.append(every.gather(1, chosen[:, None])[:, 0])
            flight.unread = chosen[:, None]
            done |= torch.isin(chosen, self._end_tokens) | (left <= count)
            if done.all():
                break
        return torch.stack(tokens, 1), torch.stack(logprobs, 1)

    def load(self, version: Version, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """See :class:`rrl.roles.rollout.engine.Engine`."""
        try:
            load_weights(self._model, tensors)
        except ValueError as error:
            raise ValueError(f"{version}: {error}") from None
        self._version = version
        self._flight = None  # what was read under the old weights is read again

    @torch.inference_mode()
    def probe(self) -> None:
        """See :class:`rrl.roles.rollout.engine.Engine`."""
        logits = self._model(input_ids=torch.tensor([[0]], device=self._device), use_cache=False).logits
        if not bool(torch.isfinite(logits).all()):
            raise RuntimeError(f"the model with weights {self._version} does not give finite logits")

    def close(self) -> None:
        """See :class:`rrl.roles.rollout.engine.Engine`."""
        self._version = None
        self._flight = None


class _Row:
    """One trajectory that the engine is generating: its tokens so far, and how many may follow."""

    def __init__(self, item: Item) -> None:
        grown = [token for segment in item.so_far for token in segment.tokens]
        self.trajectory = item.trajectory
        self.tokens = [*item.prompt, *grown]
        self.offset = len(grown)
        self.left = item.max_new

    def ended(self, ends: frozenset[int]) -> bool:
        return self.left <= 0 or (self.offset > 0 and self.tokens[-1] in ends)

    def grow(self, tokens: list[int], logprobs: list[float], version: Version, ends: frozenset[int]) -> Segment:
        """Take what belongs to this row: up to its end of sequence, or to what it may still grow."""
        end = next((place + 1 for place, token in enumerate(tokens) if token in ends), len(tokens))
        end = min(end, self.left)
        segment = Segment(self.trajectory, self.offset, tuple(tokens[:end]), tuple(logprobs[:end]), version)
        self.tokens += tokens[:end]
        self.offset += end
        self.left -= end
        return segment


class _Flight:
    """A batch on its way: what the model has read of it (the cache) and what it is to read next.

    Rows of different length are padded on the left. Equal prefixes, as in a GRPO group, are read once.
    """

    def __init__(self, rows: Sequence[_Row], version: Version, device: torch.device) -> None:
        self.version = version
        unique: dict[tuple[int, ...], int] = {}
        places = [unique.setdefault(tuple(row.tokens), len(unique)) for row in rows]
        longest = max(len(prefix) for prefix in unique)
        padded = [[0] * (longest - len(prefix)) + list(prefix) for prefix in unique]
        self.unread = torch.tensor(padded, device=device)
        """[B, n], of unique prefixes at first"""
        self._spread: Tensor | None = torch.tensor(places, device=device)
        """which prefix each row has; None once the cache has a row for each row"""
        self._seen: Tensor | None = None
        """[B, tokens read and unread], 0 for padding; None when nothing is padded"""
        if any(len(prefix) < longest for prefix in unique):
            padding = torch.tensor([[longest - len(prefix)] for prefix in unique], device=device)
            self._seen = (torch.arange(longest, device=device)[None, :] >= padding).long()
        self._cache = DynamicCache()

    def read(self, model: nn.Module) -> Tensor:
        """Logits of the token after what is unread: [B, vocabulary]."""
        more: dict[str, Any] = {}
        if self._seen is not None:
            grown = self._cache.get_seq_length() + self.unread.shape[1] - self._seen.shape[1]
            self._seen = torch.nn.functional.pad(self._seen, (0, grown), value=1)
            position = (self._seen.cumsum(1) - 1).clamp(min=0)
            more = {"attention_mask": self._seen, "position_ids": position[:, -self.unread.shape[1] :]}
        output = model(input_ids=self.unread, past_key_values=self._cache, use_cache=True, logits_to_keep=1, **more)
        logits: Tensor = output.logits[:, -1]
        if self._spread is not None:
            logits = logits[self._spread]
            self._select(self._spread)
            self._spread = None
        return logits

    def keep(self, places: Sequence[int]) -> None:
        """Drop all rows but these."""
        if places:
            index = torch.tensor(places, device=self.unread.device)
            self.unread = self.unread[index]
            self._select(index)

    def _select(self, index: Tensor) -> None:
        self._cache.batch_select_indices(index)
        if self._seen is not None:
            self._seen = self._seen[index]
