"""Rewards, as a function of the user returns them: any real number, also a scalar of numpy or torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from ...core.text import shortened

Reward = float | dict[str, float]
"""The reward of an episode for all its agents, or rewards by name: an agent's name is the ``model`` of its calls."""
ANY_AGENT = "*"
"""The name that stands for all agents whose names have no reward of their own."""
_MAX_NAMES, _MAX_NAME_CHARS = 64, 200
_LARGEST = 2.0**127
"""Largest reward of an agent: the trainer computes with 32 bits, and its square must be finite in 64 bits."""
NAMED_REWARDS = f"1 to {_MAX_NAMES} finite numbers by the names of agents"
REWARD = f"a finite number, or a dict of {NAMED_REWARDS}"
TWO_NUMBERS = "two finite numbers: the reward to report, and the reward to train on"


class Scored(NamedTuple):
    """The rewards of an answer."""

    reward: float
    """The reward that is reported."""
    training: float
    """The reward that is trained on."""
    parts: dict[str, float]
    """The reported rewards of which ``reward`` is the weighted sum, by name (``[task.rewards]``); empty for others."""


class InvalidReward(ValueError):
    """A function of the user returned no rewards. ``function`` is this function, whose definition is to be named."""

    def __init__(self, text: str, function: Callable[..., Any]) -> None:
        super().__init__(text)
        self.function = function


def finite_number(value: Any) -> float | None:
    """Return a number as a float; None if the value is not a finite real number (text is none)."""
    try:
        scalar = value.item() if hasattr(value, "item") else value  # a complex number of numpy has __float__
        number = float(scalar) if hasattr(scalar, "__float__") else math.nan
    except BaseException:  # the value's methods may raise anything
        return None
    return number if math.isfinite(number) else None


def finite_reward(value: Any) -> Reward | None:
    """Return a number, or a dict of numbers by the names of agents, as floats; None if it is not :data:`REWARD`."""
    rewards: dict[str, float] = {}
    for name, number in value.items() if isinstance(value, dict) else [("", value)]:
        reward = finite_number(number)
        if reward is None or abs(reward) > _LARGEST:
            return None
        if not isinstance(name, str) or len(name) > _MAX_NAME_CHARS or not name.isprintable():
            return None
        rewards[name] = reward
    if not isinstance(value, dict):
        return rewards[""]
    return rewards if 0 < len(rewards) <= _MAX_NAMES else None


def two_rewards(
    returned: Any, call: str, function: Callable[..., Any], expected: str = TWO_NUMBERS
) -> tuple[float, float]:
    """Return the reward that is reported, and the reward that is trained on.

    Args:
        returned: What ``function`` returned.
        call: The call as text, for the error message.
        function: The function of the user.
        expected: What the function should return, for the error message.

    Raises:
        InvalidReward: ``returned`` does not consist of two finite numbers.
    """
    try:
        reward, training = map(finite_number, returned)
    except (TypeError, ValueError):
        reward = training = None
    if reward is None or training is None:
        raise InvalidReward(f"{call} returned {shortened(returned)}; return {expected}", function)
    return reward, training
