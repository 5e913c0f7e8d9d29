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

from ...core.types import Incarnation, Version
from ..models.policy import load_weights, log_probs
from ..trajectories.types import Item, Segment
from .engine import Sampling, StepOutput


def seed_of(run_seed: int, incarnation: Incarnation) -> int:
    """A seed for this life alone: a replacement that sampled what the dead one did would add nothing."""
    digest = hashlib.sha256(f"{run_seed} {incarnation}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


class TorchEngine:
    """``model`` is any transformers causal language model, on the device that is to compute; a token of ``ends`` ends a
    trajectory; ``seed`` is this life's. At most ``lease`` trajectories grow at once, and there is room once all are
    complete. A step is a segment of each."""

    def __init__(
        self,
        model: nn.Module,
        *,
        stop_tokens: frozenset[int],
        seed: int,
        sampling: Sampling | None = None,
        lease: int = 64,
    ) -> None:
        self._model = model.eval().requires_grad_(False)
        self._stop_tokens = stop_tokens
        self._device = next(model.parameters()).device
        self._stop_token_tensor = torch.tensor(sorted(stop_tokens), device=self._device)
        self._sampling = sampling or Sampling()
        self._lease = lease
        self._generator = torch.Generator(self._device).manual_seed(seed)
        self._version: Version | None = None
        self._rows: list[_Row] = []
        self._batch: _RowBatch | None = None
        self._already_complete: list[int] = []

    @property
    def free_slots(self) -> int:
        """See :class:`rrl.roles.rollout.engine.Engine`."""
        return 0 if self.has_work else self._lease

    @property
    def has_work(self) -> bool:
        """See :class:`rrl.roles.rollout.engine.Engine`."""
        return bool(self._rows or self._already_complete)

    def add(self, items: Sequence[Item]) -> None:
        """See :class:`rrl.roles.rollout.engine.Engine`. Those that run already are read again with the new ones."""
        for row in map(_Row, items):
            if row.is_complete(self._stop_tokens):
                self._already_complete.append(row.trajectory)
            else:
                self._rows.append(row)
                self._batch = None

    def step(self) -> StepOutput:
        """See :class:`rrl.roles.rollout.engine.Engine`."""
        if self._version is None:
            raise RuntimeError("no weights were loaded yet")
        finished, self._already_complete = self._already_complete, []
        if finished or not self._rows:
            return [], finished
        if self._batch is None:
            self._batch = _RowBatch(self._rows, self._version, self._device)
        segments = self._generate(self._batch, self._rows)
        finished = [row.trajectory for row in self._rows if row.is_complete(self._stop_tokens)]
        self._keep_rows([place for place, row in enumerate(self._rows) if not row.is_complete(self._stop_tokens)])
        return segments, finished

    def flush(self) -> StepOutput:
        """See :class:`rrl.roles.rollout.engine.Engine`: every step hands over all that it made."""
        return [], []

    def abort(self, trajectories: Iterable[int]) -> None:
        """See :class:`rrl.roles.rollout.engine.Engine`."""
        gone = set(trajectories)
        self._already_complete = [trajectory for trajectory in self._already_complete if trajectory not in gone]
        self._keep_rows([place for place, row in enumerate(self._rows) if row.trajectory not in gone])

    def _keep_rows(self, places: Sequence[int]) -> None:
        if len(places) == len(self._rows):
            return
        self._rows = [self._rows[place] for place in places]
        if self._batch is not None:
            self._batch.keep(places)
        if not self._rows:
            self._batch = None

    def _generate(self, batch: _RowBatch, rows: Sequence[_Row]) -> list[Segment]:
        tokens, logprobs = self._decode(batch, torch.tensor([row.left for row in rows], device=self._device))
        return [
            row.append(these, theirs, batch.version, self._stop_tokens)
            for row, these, theirs in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True)
        ]

    @torch.inference_mode()
    def _decode(self, batch: _RowBatch, left: Tensor) -> tuple[Tensor, Tensor]:
        """The next tokens of every row and their log-probabilities, both [B, n]; a row that ends early is filled up."""
        sampling, tokens, logprobs = self._sampling, [], []
        done = torch.zeros(len(left), dtype=torch.bool, device=self._device)
        for count in range(1, sampling.segment_tokens + 1):
            every = log_probs(batch.read(self._model), sampling.temperature)
            if sampling.greedy:
                chosen = every.argmax(-1)
            else:
                chosen = torch.multinomial(every.exp(), 1, generator=self._generator)[:, 0]
            tokens.append(chosen)
            logprobs.append(every.gather(1, chosen[:, None])[:, 0])
            batch.unread = chosen[:, None]
            done |= torch.isin(chosen, self._stop_token_tensor) | (left <= count)
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
        self._batch = None  # what was read under the old weights is read again

    @torch.inference_mode()
    def probe(self) -> None:
        """See :class:`rrl.roles.rollout.engine.Engine`."""
        logits = self._model(input_ids=torch.tensor([[0]], device=self._device), use_cache=False).logits
        if not bool(torch.isfinite(logits).all()):
            raise RuntimeError(f"the model with weights {self._version} does not give finite logits")

    def close(self) -> None:
        """See :class:`rrl.roles.rollout.engine.Engine`."""
        self._version = None
        self._batch = None


class _Row:
    """One trajectory that the engine is generating: its tokens so far, and how many may follow."""

    def __init__(self, item: Item) -> None:
        grown = [token for segment in item.so_far for token in segment.tokens]
        self.trajectory = item.trajectory
        self.tokens = [*item.prompt, *grown]
        self.offset = len(grown)
        self.left = item.max_new

    def is_complete(self, stop_tokens: frozenset[int]) -> bool:
        return self.left <= 0 or (self.offset > 0 and self.tokens[-1] in stop_tokens)

    def append(
        self, tokens: list[int], logprobs: list[float], version: Version, stop_tokens: frozenset[int]
    ) -> Segment:
        """Take what belongs to this row: up to its end of sequence, or to what it may still grow."""
        end = next((place + 1 for place, token in enumerate(tokens) if token in stop_tokens), len(tokens))
        end = min(end, self.left)
        segment = Segment(self.trajectory, self.offset, tuple(tokens[:end]), tuple(logprobs[:end]), version)
        self.tokens += tokens[:end]
        self.offset += end
        self.left -= end
        return segment


class _RowBatch:
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
        self._prefix_of_row: Tensor | None = torch.tensor(places, device=device)
        """which prefix each row has; None once the cache has a row for each row"""
        self._attention_mask: Tensor | None = None
        """[B, tokens read and unread], 0 for padding; None when nothing is padded"""
        if any(len(prefix) < longest for prefix in unique):
            padding = torch.tensor([[longest - len(prefix)] for prefix in unique], device=device)
            self._attention_mask = (torch.arange(longest, device=device)[None, :] >= padding).long()
        self._cache = DynamicCache()

    def read(self, model: nn.Module) -> Tensor:
        """Logits of the token after what is unread: [B, vocabulary]."""
        more: dict[str, Any] = {}
        if self._attention_mask is not None:
            grown = self._cache.get_seq_length() + self.unread.shape[1] - self._attention_mask.shape[1]
            self._attention_mask = torch.nn.functional.pad(self._attention_mask, (0, grown), value=1)
            position = (self._attention_mask.cumsum(1) - 1).clamp(min=0)
            more = {"attention_mask": self._attention_mask, "position_ids": position[:, -self.unread.shape[1] :]}
        output = model(input_ids=self.unread, past_key_values=self._cache, use_cache=True, logits_to_keep=1, **more)
        logits: Tensor = output.logits[:, -1]
        if self._prefix_of_row is not None:
            logits = logits[self._prefix_of_row]
            self._select(self._prefix_of_row)
            self._prefix_of_row = None
        return logits

    def keep(self, places: Sequence[int]) -> None:
        """Drop all rows but these."""
        if places:
            index = torch.tensor(places, device=self.unread.device)
            self.unread = self.unread[index]
            self._select(index)

    def _select(self, index: Tensor) -> None:
        self._cache.batch_select_indices(index)
        if self._attention_mask is not None:
            self._attention_mask = self._attention_mask[index]
