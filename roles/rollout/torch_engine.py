"""An engine in plain torch: batched sampling with a key-value cache, a log-probability and a version per token.

A trajectory that another incarnation began needs no special treatment: its prefix is read like a longer prompt. In the
same way, running trajectories continue with new weights: their prefixes are read again with the new weights.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

import rrl

from ...core.types import Incarnation, Version
from ..launcher.end_report import Diverged
from ..models.hf_tokenizer import FolderTokenizer
from ..models.policy import load_weights, log_probs, materialise
from ..models.tensors import assigned_device
from ..models.tokenizer import Tokenizer
from ..trajectories.types import Item, PathDigest, Segment
from .engine import IN_USE_TEXT, Engine, Sampling, StepOutput, sampling_of
from .foreign_sampling import GREEDY, Mask, Masks, next_token

_log = logging.getLogger("rrl.rollout")

GUEST_SEGMENT_TOKENS = 16
"""Maximum number of tokens of a segment, and so of a step, in a guest: it hands the GPUs back between two steps."""


def prepare(me: rrl.Worker, model: nn.Module, tokenizer: Tokenizer) -> Callable[[], Engine]:
    """Return the function that builds the engine as :mod:`.engine` describes it."""
    if not me.launch.guest:
        assigned_device(me.launch)  # a missing GPU is found before the rollout joins
    sampling = sampling_of(me)
    if me.launch.guest:
        sampling = replace(sampling, segment_tokens=min(sampling.segment_tokens, GUEST_SEGMENT_TOKENS))

    def build() -> Engine:
        materialise(model, assigned_device(me.launch))
        seed = seed_of(me.job.seed, me.launch.incarnation)
        return TorchEngine(
            model,
            stop_tokens=tokenizer.stop_tokens,
            seed=seed,
            sampling=sampling,
            lease=me.rollout.lease,
            masks=Masks(tokenizer) if isinstance(tokenizer, FolderTokenizer) else None,
        )

    return build


def seed_of(run_seed: int, incarnation: Incarnation) -> int:
    """Return a seed for this incarnation only.

    If a replacement sampled the same tokens as its predecessor, these tokens would add nothing.
    """
    digest = hashlib.sha256(f"{run_seed} {incarnation}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


class TorchEngine:
    """Engine in plain torch; a step generates one segment of each trajectory.

    Args:
        model: Any transformers causal language model, on the device to compute on.
        stop_tokens: Tokens that end a trajectory.
        seed: Seed of this incarnation.
        sampling: How to sample.
        lease: Maximum number of trajectories that run at the same time. New trajectories are accepted only when all
            running trajectories are complete.
        masks: Makes the masks of constrained trajectories; without it they end at once.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        stop_tokens: frozenset[int],
        seed: int,
        sampling: Sampling | None = None,
        lease: int = 64,
        masks: Masks | None = None,
    ) -> None:
        self._model = model.eval().requires_grad_(False)
        self._stop_tokens = stop_tokens
        self._device = next(model.parameters()).device
        self._stop_token_tensor = torch.tensor(sorted(stop_tokens), device=self._device)
        self._sampling = sampling or Sampling()
        self._lease, self._masks = lease, masks
        self._generator = torch.Generator(self._device).manual_seed(seed)
        self._version: Version | None = None
        self._rows: list[_Row] = []
        self._batch: _RowBatch | None = None
        self._already_complete: list[int] = []
        self._asleep: list[tuple[torch.UntypedStorage, int]] = []
        """The storages of the parameters and their sizes in bytes while the engine sleeps."""
        self._has_slept = False

    @property
    def free_slots(self) -> int:
        """Number of further trajectories that the engine would accept now."""
        return 0 if self.has_work else self._lease

    @property
    def has_work(self) -> bool:
        """True if :meth:`step` has anything to generate or to return."""
        return bool(self._rows or self._already_complete)

    def add(self, items: Sequence[Item]) -> None:
        """Begin to extend these trajectories too. The model then reads the prefixes of all trajectories again."""
        for row in map(_Row, items):
            if row.is_complete(self._stop_tokens) or not self._masked(row):
                self._already_complete.append(row.trajectory)
            else:
                self._rows.append(row)
                self._batch = None

    def _masked(self, row: _Row) -> bool:
        """Give a row the mask of its constraint, if it has one. Returns False if there can be no such mask."""
        if row.sampling is None or row.sampling.constraint is None:
            return True
        row.mask = None if self._masks is None else self._masks.begin(row.sampling.constraint, row.sampled)
        return row.mask is not None

    def step(self) -> StepOutput:
        """Generate one segment of each trajectory (:meth:`.engine.Engine.step`)."""
        if self._version is None:
            raise RuntimeError("no weights have been loaded yet")
        finished, self._already_complete = self._already_complete, []
        if finished or not self._rows:
            return [], finished
        if self._batch is None:
            self._batch = _RowBatch(self._rows, self._version, self._device)
        segments = self._generate(self._batch, self._rows)
        finished = [row.trajectory for row in self._rows if row.is_complete(self._stop_tokens)]
        self._keep_rows([index for index, row in enumerate(self._rows) if not row.is_complete(self._stop_tokens)])
        return segments, finished

    def flush(self) -> StepOutput:
        """Return nothing, because every step returns everything that it generated."""
        return [], []

    def abort(self, trajectories: Iterable[int]) -> None:
        """Stop extending these trajectories (:meth:`.engine.Engine.abort`)."""
        aborted = set(trajectories)
        self._already_complete = [trajectory for trajectory in self._already_complete if trajectory not in aborted]
        self._keep_rows([index for index, row in enumerate(self._rows) if row.trajectory not in aborted])

    def _keep_rows(self, rows: Sequence[int]) -> None:
        if len(rows) == len(self._rows):
            return
        self._rows = [self._rows[index] for index in rows]
        if self._batch is not None:
            self._batch.keep(rows)
        if not self._rows:
            self._batch = None

    def _generate(self, batch: _RowBatch, rows: Sequence[_Row]) -> list[Segment]:
        tokens, logprobs = self._decode(batch, rows)
        return [
            row.append(row_tokens, row_logprobs, batch.version, self._stop_tokens)
            for row, row_tokens, row_logprobs in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True)
        ]

    @torch.inference_mode()
    def _decode(self, batch: _RowBatch, rows: Sequence[_Row]) -> tuple[Tensor, Tensor]:
        """Return the next tokens of every row and their log-probabilities, both [B, n].

        A row that ends early is filled up with further tokens, which the caller cuts off.
        """
        sampling = self._sampling
        tokens: list[Tensor] = []
        logprobs: list[Tensor] = []
        remaining = torch.tensor([row.remaining for row in rows], device=self._device)
        greedy = [index for index, row in enumerate(rows) if row.sampling == GREEDY]
        foreign = [(index, row, row.sampling) for index, row in enumerate(rows) if row.sampling not in (None, GREEDY)]
        trained = len(rows) - len(greedy) - len(foreign)
        done = torch.zeros(len(remaining), dtype=torch.bool, device=self._device)
        for count in range(1, sampling.segment_tokens + 1):
            logits = self._checked(batch.read(self._model))
            log_probabilities = log_probs(logits, sampling.temperature)
            if sampling.greedy or not trained:  # an evaluation must not advance the generator of trained answers
                chosen = log_probabilities.argmax(-1)
            else:
                chosen = torch.multinomial(log_probabilities.exp(), 1, generator=self._generator)[:, 0]
            chosen_logprobs = log_probabilities.gather(1, chosen[:, None])[:, 0]
            if greedy:
                of_model = log_probs(logits[greedy], 1.0)
                chosen_logprobs[greedy], chosen[greedy] = of_model.max(-1)
            for index, row, how in foreign:
                sampled = [*row.sampled, *(int(step[index]) for step in tokens)]
                allowed = None if row.mask is None else row.mask.allowed(logits.shape[-1], self._device)
                token, logprob = next_token(
                    logits[index], how, sampling.temperature, row.prompt, sampled, self._generator, allowed
                )
                if row.mask is not None:
                    row.mask.take(token)
                chosen[index], chosen_logprobs[index] = token, logprob
            tokens.append(chosen)
            logprobs.append(chosen_logprobs)
            batch.unread = chosen[:, None]
            done |= torch.isin(chosen, self._stop_token_tensor) | (remaining <= count)
            if done.all():
                break
        return torch.stack(tokens, 1), torch.stack(logprobs, 1)

    def load(self, version: Version, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load a complete set of weights (:meth:`.engine.Engine.load`)."""
        try:
            load_weights(self._model, tensors)
        except ValueError as error:
            raise ValueError(f"{version}: {error}") from None
        self._version = version
        self._batch = None  # prefixes that were read with the old weights are read again

    @torch.inference_mode()
    def probe(self) -> None:
        """Run the model on one token, and check that the logits are finite."""
        self._checked(self._model(input_ids=torch.tensor([[0]], device=self._device), use_cache=False).logits)

    def _checked(self, logits: Tensor) -> Tensor:
        """Return the logits. Raises Diverged if they are not finite; torch would fail with advice about sampling."""
        if not bool(torch.isfinite(logits).all()):
            raise Diverged(self._version, "NaN or infinite logits")
        return logits

    def sleep(self) -> None:
        """Free the storages of the parameters and the cache (:meth:`.engine.Engine.sleep`); small buffers stay."""
        self._rows, self._already_complete, self._batch, self._version = [], [], None, None
        storages = {storage._cdata: storage for each in self._model.parameters() if (storage := each.untyped_storage())}
        self._asleep = [(storage, storage.nbytes()) for storage in storages.values()]
        for storage, _ in self._asleep:
            storage.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            if not self._has_slept:
                free, total = torch.cuda.mem_get_info(self._device)
                _log.info(IN_USE_TEXT, (total - free) / 2**30)
        self._has_slept = True

    def wake(self) -> None:
        """Allocate the storages of the parameters again (:meth:`.engine.Engine.wake`)."""
        for storage, nbytes in self._asleep:
            storage.resize_(nbytes)
        self._asleep = []

    def close(self) -> None:
        """Free the engine's resources."""
        self._version = None
        self._batch = None


class _Row:
    """A trajectory that the engine generates: its tokens so far, and how many may follow."""

    def __init__(self, item: Item) -> None:
        generated = [token for segment in item.so_far for token in segment.tokens]
        self.trajectory = item.trajectory
        self.tokens = [*item.prompt, *generated]
        self.prompt = item.prompt
        self.sampling = item.sampling
        self.mask: Mask | None = None
        """The mask of a constrained trajectory, after :attr:`sampled`."""
        self.offset = len(generated)
        self.remaining = item.max_new
        self._path = PathDigest()
        self._path.add(self.tokens)

    @property
    def sampled(self) -> list[int]:
        """The tokens after the prompt."""
        return self.tokens[len(self.prompt) :]

    def is_complete(self, stop_tokens: frozenset[int]) -> bool:
        """Return whether the trajectory has ended."""
        return self.remaining <= 0 or (self.offset > 0 and self.tokens[-1] in stop_tokens)

    def append(
        self, tokens: list[int], logprobs: list[float], version: Version, stop_tokens: frozenset[int]
    ) -> Segment:
        """Append tokens up to the end of sequence or the maximum length, and return them as a segment."""
        end = next((index + 1 for index, token in enumerate(tokens) if token in stop_tokens), len(tokens))
        end = min(end, self.remaining)
        self._path.add(tokens[:end])
        segment = Segment(
            self.trajectory, self.offset, tuple(tokens[:end]), tuple(logprobs[:end]), version, self._path.value()
        )
        self.tokens += tokens[:end]
        self.offset += end
        self.remaining -= end
        return segment


class _RowBatch:
    """A running batch: the tokens that the model has read (in the cache), and the tokens that it reads next.

    Rows of different length are padded on the left. Equal prefixes, as in a GRPO group, are read once.
    """

    def __init__(self, rows: Sequence[_Row], version: Version, device: torch.device) -> None:
        self.version = version
        unique: dict[tuple[int, ...], int] = {}
        prefix_of_row = [unique.setdefault(tuple(row.tokens), len(unique)) for row in rows]
        longest = max(len(prefix) for prefix in unique)
        padded = [[0] * (longest - len(prefix)) + list(prefix) for prefix in unique]
        self.unread = torch.tensor(padded, device=device)
        """Tokens to read next, [B, n]; at first the unique prefixes."""
        self._prefix_of_row: Tensor | None = torch.tensor(prefix_of_row, device=device)
        """Index of the prefix of each row; None once the cache has an entry for each row."""
        self._attention_mask: Tensor | None = None
        """Mask [B, tokens read and unread], 0 for padding; None without padding."""
        if any(len(prefix) < longest for prefix in unique):
            padding = torch.tensor([[longest - len(prefix)] for prefix in unique], device=device)
            self._attention_mask = (torch.arange(longest, device=device)[None, :] >= padding).long()
        self._cache = DynamicCache()

    def read(self, model: nn.Module) -> Tensor:
        """Read the unread tokens, and return the logits of the token after them: [B, vocabulary]."""
        extra: dict[str, Any] = {}
        if self._attention_mask is not None:
            generated = self._cache.get_seq_length() + self.unread.shape[1] - self._attention_mask.shape[1]
            self._attention_mask = torch.nn.functional.pad(self._attention_mask, (0, generated), value=1)
            position = (self._attention_mask.cumsum(1) - 1).clamp(min=0)
            extra = {"attention_mask": self._attention_mask, "position_ids": position[:, -self.unread.shape[1] :]}
        output = model(input_ids=self.unread, past_key_values=self._cache, use_cache=True, logits_to_keep=1, **extra)
        logits: Tensor = output.logits[:, -1]
        if self._prefix_of_row is not None:
            logits = logits[self._prefix_of_row]
            self._select(self._prefix_of_row)
            self._prefix_of_row = None
        return logits

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows (trajectories) of the batch, also in the KV cache."""
        if rows:
            index = torch.tensor(rows, device=self.unread.device)
            self.unread = self.unread[index]
            self._select(index)

    def _select(self, index: Tensor) -> None:
        self._cache.batch_select_indices(index)
        if self._attention_mask is not None:
            self._attention_mask = self._attention_mask[index]
