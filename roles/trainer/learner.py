"""The learner: a model, its optimizer, and one GRPO step over a batch of trajectories. It knows no run and no socket.

Everything that the next step depends on is in :meth:`Learner.state`; restored from it, a learner goes on bit for bit
as if nothing had happened (docs/sources.md, torch: leaving one piece out breaks that at once).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import numpy
import torch
from msgspec import Struct
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from rrl.roles.model import log_probs
from rrl.roles.trainer.grpo import group_advantages, grpo_loss
from rrl.roles.trajectories.types import Batch, Trajectory

Example = tuple[Sequence[int], Sequence[int]]
"""Prompt and answer as tokens, for the supervised warm start."""

_BETAS = (0.9, 0.95)
_IGNORED = -100
"""cross_entropy's default label of positions that do not count"""


class LearnerSettings(Struct, frozen=True):
    """Numbers of ``[roles.trainer]`` (defaults and reasons: :class:`rrl.spec.job.TrainerRole`)."""

    learning_rate: float
    final_learning_rate: float
    clip: float
    entropy: float
    advantage_floor: float
    gradient_clip: float
    warm_start_steps: int
    warm_start_batch: int
    warm_start_learning_rate: float


class Learner:
    """``steps`` is the length of the run, over which the learning rate falls; ``temperature`` is the rollouts'."""

    def __init__(self, model: nn.Module, settings: LearnerSettings, *, steps: int, temperature: float) -> None:
        self.model = model
        self.number = 0
        """the last step done; 0 before the first"""
        self._settings = settings
        self._steps = steps
        self._temperature = temperature
        self._optimizer = self._fresh_optimizer(settings.learning_rate)

    def _fresh_optimizer(self, learning_rate: float) -> torch.optim.Optimizer:
        parameters = self.model.parameters()
        return torch.optim.AdamW(parameters, lr=learning_rate, betas=_BETAS, weight_decay=0.0, fused=True)

    def warm_start(self, batches: Iterable[Sequence[Example]]) -> float:
        """One supervised step on the answers of each batch, before the first policy update; the last loss (nats).

        Its optimizer is thrown away: moments of another loss would only mislead the policy gradient.
        """
        optimizer = self._fresh_optimizer(self._settings.warm_start_learning_rate)
        loss = 0.0
        for batch in batches:
            tokens, answers, first = _pad(batch)
            logits = _logits(self.model, tokens, first)
            labels = tokens[:, first:].masked_fill(~answers, _IGNORED)
            value = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            self._update(optimizer, value)
            loss = value.item()
        return loss

    def step(self, batch: Batch) -> dict[str, float]:
        """Learn from the batch of step ``number + 1``; metrics for people, all finite.

        Raises ValueError for any other step's batch, RuntimeError when a gradient is not finite (then nothing of this
        learner may be committed).
        """
        if batch.number != self.number + 1:
            raise ValueError(f"batch {batch.number} is not the one after step {self.number}")
        trajectories = batch.trajectories
        tokens, mask, first = _pad([(each.prompt, each.tokens) for each in trajectories])
        old = _place([each.logprobs for each in trajectories], mask)
        rewards = torch.tensor([each.training for each in trajectories], dtype=torch.float32)
        groups = torch.tensor([each.group for each in trajectories])
        advantages = group_advantages(rewards, groups, self._settings.advantage_floor)

        every = log_probs(_logits(self.model, tokens, first), self._temperature)  # [B, T, vocabulary]
        chosen = every.gather(2, tokens[:, first:, None])[..., 0]
        entropy = -(every.exp() * every).sum(-1)
        settings = self._settings
        loss, stats = grpo_loss(chosen, old, advantages, mask, settings.clip, entropy, settings.entropy)
        for group in self._optimizer.param_groups:
            group["lr"] = settings.learning_rate * self._share_of_learning_rate(batch.number)
        self._update(self._optimizer, loss)
        self.number = batch.number
        return {"loss": loss.item(), **stats, **_describe(batch)}

    def _share_of_learning_rate(self, number: int) -> float:
        """Falls linearly from 1 at step 1. A function of the step alone: there is no scheduler whose state to save."""
        return max(self._settings.final_learning_rate, 1 - (number - 1) / self._steps)

    def _update(self, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        limit = self._settings.gradient_clip
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit, error_if_nonfinite=True)
        optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        """The model's tensors by name, live: pack them before the next step."""
        return dict(self.model.state_dict())

    def state(self) -> dict[str, Any]:
        """All that the next step depends on, live: write it before the next step."""
        numpy_state = numpy.random.get_state(legacy=False)
        words = torch.from_numpy(numpy_state["state"]["key"].astype(numpy.int64))
        return {
            "number": self.number,
            "model": self.weights(),
            "optimizer": self._optimizer.state_dict(),
            "torch_rng": torch.get_rng_state(),
            "python_rng": random.getstate(),
            "numpy_rng": {
                "key": words,
                "pos": int(numpy_state["state"]["pos"]),
                "has_gauss": int(numpy_state["has_gauss"]),
                "gauss": float(numpy_state["gauss"]),
            },
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Become the learner that :meth:`state` described. Raises when it is of another model."""
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["torch_rng"])
        random.setstate(state["python_rng"])
        saved = state["numpy_rng"]
        key = saved["key"].numpy().astype(numpy.uint32)
        numpy.random.set_state(("MT19937", key, saved["pos"], saved["has_gauss"], saved["gauss"]))
        self.number = state["number"]


def _pad(pairs: Sequence[Example]) -> tuple[Tensor, Tensor, int]:
    """Prompts with their answers as one rectangle, padded on the right.

    Returns tokens [B, L], the mask of answer tokens [B, L - first], and ``first``, the length of the shortest prompt:
    nothing before it needs logits. Padding holds token 0; attention is causal, so nothing real ever sees it.
    """
    rows = [torch.tensor([*prompt, *answer]) for prompt, answer in pairs]
    tokens = pad_sequence(rows, batch_first=True)
    start = torch.tensor([len(prompt) for prompt, _ in pairs])[:, None]
    end = torch.tensor([len(row) for row in rows])[:, None]
    first = int(start.min())
    position = torch.arange(first, tokens.shape[1])[None, :]
    return tokens, (position >= start) & (position < end), first


def _place(rows: Sequence[Sequence[float]], mask: Tensor) -> Tensor:
    """Values per answer token, put where the mask says; row by row, zeros elsewhere. [B, T] float."""
    flat = torch.tensor([value for row in rows for value in row], dtype=torch.float32)
    return torch.zeros(mask.shape).masked_scatter_(mask, flat)


def _logits(model: nn.Module, tokens: Tensor, first: int) -> Tensor:
    """Logits of the tokens from ``first`` on, each from what stands before it: [B, L - first, vocabulary]."""
    output = model(input_ids=tokens[:, :-1], use_cache=False, logits_to_keep=tokens.shape[1] - first)
    logits: Tensor = output.logits
    return logits


def _describe(batch: Batch) -> dict[str, float]:
    """What the batch itself tells. ``staleness``: weight versions between sampling and training, mean over tokens."""
    trajectories: Sequence[Trajectory] = batch.trajectories
    lags = [batch.number - 1 - version.step for each in trajectories for version in each.versions]
    return {
        "reward": sum(each.reward for each in trajectories) / len(trajectories),
        "training_reward": sum(each.training for each in trajectories) / len(trajectories),
        "tokens": float(len(lags)),
        "staleness": sum(lags) / len(lags),
    }
