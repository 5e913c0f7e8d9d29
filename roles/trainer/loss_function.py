"""The interface of losses: what the trainer's loss gets, what it returns, and how ``[roles.trainer] loss`` names it.

``loss`` is a row of :data:`rrl.config.import_paths.LOSSES`, or ``module:function`` beside job.toml. The function is
``loss(tokens, settings)``, with a :class:`LossTokens` and the ``[roles.trainer]`` table, and returns a
:class:`LossSum`. :func:`.losses.grpo` and its neighbours are examples.

A step consists of many calls: for each micro-batch of each part of the batch, in each member of the trainer. How many
tokens and sequences the step has is known only after the last call. So a call returns sums and names their divisor. The
trainer adds up the sums of all calls, and divides.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from msgspec import Struct
from torch import Tensor

from ...config.import_paths import LOSS_ARGUMENTS, LOSSES
from ...core.run_spec import TrainerSettings
from ..models.tasks import TaskError, import_row

OWN_METRICS = frozenset(
    {"loss", "reward", "training_reward", "tokens", "trained_share", "staleness", "grad_norm", "learning_rate"}
)
"""Metrics that a step has with any loss, and that no statistic of a loss may replace."""


class LossTokens(Struct, frozen=True):
    """The answer tokens of some sequences, one sequence after the other: N positions of S sequences.

    Positions that are not trained may be in the tensors too. Their values may be anything, also infinite. All tensors
    are on the trainer's device, and float32 where nothing else is said.
    """

    logprobs: Tensor
    """[N], differentiable: log-probabilities of the tokens under the policy that is trained."""
    sampler_logprobs: Tensor
    """[N]: log-probabilities recorded when the tokens were sampled, with weights of any age."""
    advantages: Tensor
    """[N]: the advantage of the token's sequence over its group."""
    mask: Tensor
    """[N] bool: True for tokens that are trained."""
    entropy: Tensor
    """[N], differentiable: entropy (nats) of the trained policy at each position."""
    reference_logprobs: Tensor | None
    """[N]: log-probabilities under the initial policy; None if ``[roles.trainer] kl`` is 0."""
    starts: Tensor
    """[S] int64, ascending: the position at which each sequence begins. In a job with agents, each sample of an episode
    is a sequence."""
    limit: int
    """Largest number of trained tokens that a sequence of this job can have."""


class LossSum(Struct, frozen=True):
    """What a loss returns for some sequences."""

    loss: Tensor
    """Scalar, differentiable: the sum to minimise, over the trained tokens of all sequences. 0 without such tokens."""
    divisor: Literal["tokens", "sequences"] | float
    """By what the sum over all calls of a step is divided: the number of the step's trained tokens, the number of its
    sequences, or this constant. The same in every call."""
    means: Mapping[str, Tensor] = {}
    """Statistics for people: sums over the trained tokens, which are divided by the number of the step's trained
    tokens, whatever ``divisor`` is. Scalars, in all calls under the same names."""
    maxima: Mapping[str, Tensor] = {}
    """Further statistics, of which a step has the largest value. Scalars."""


Loss = Callable[[LossTokens, TrainerSettings], LossSum]


def load_loss(name: str, folder: Path) -> Loss:
    """Return the loss that ``[roles.trainer] loss`` names (:func:`..models.tasks.import_row`)."""
    functions = {loss: row.function for loss, row in LOSSES.items()}
    return import_row(name, functions, folder, "loss", "roles.trainer", LOSS_ARGUMENTS)


def checked(returned: Any, divisor: str | float | None) -> LossSum:
    """Return what a loss returned.

    Args:
        returned: The loss's result.
        divisor: The divisor that earlier calls of the step returned; None at the first call.

    Raises:
        TaskError: It is not what :class:`LossSum` describes.
    """
    if not isinstance(returned, LossSum):
        raise _wrong(f"the loss returned {type(returned).__name__}; return rrl.LossSum(loss, divisor)")
    loss = returned.loss
    if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
        what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        without = " without a gradient" if isinstance(loss, Tensor) and not loss.requires_grad else ""
        raise _wrong(f"LossSum.loss is {what}{without}; it must be a scalar tensor computed from tokens.logprobs")
    constant = isinstance(returned.divisor, int | float) and 0 < returned.divisor < math.inf
    if returned.divisor not in ("tokens", "sequences") and not constant:
        right = '"tokens", "sequences" or a finite number above 0'
        raise _wrong(f"LossSum.divisor is {returned.divisor!r}; it must be {right}")
    if divisor is not None and divisor != returned.divisor:
        raise _wrong(f"LossSum.divisor is {returned.divisor!r} after {divisor!r}; it must be the same in every call")
    for name, value in {**returned.means, **returned.maxima}.items():
        if name in OWN_METRICS or (name in returned.means and name in returned.maxima):
            raise _wrong(f"the loss's statistic {json.dumps(name)} is there twice; use another name")
        if not isinstance(value, Tensor) or value.dim():
            raise _wrong(f"the loss's statistic {json.dumps(name)} must be a scalar tensor")
    return returned


def scalars(values: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the values of scalar tensors, read from their device in one transfer."""
    if not values:
        return {}
    return dict(zip(values, torch.stack([value.detach().float() for value in values.values()]).tolist(), strict=True))


def _wrong(problem: str) -> TaskError:
    return TaskError("loss", problem, table="roles.trainer")
