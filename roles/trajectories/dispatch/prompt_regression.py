"""Regression of the logarithm of an answer's length on the tokens of its prompt.

The features are the prompt's tokens and pairs of neighbouring tokens, hashed to :data:`FEATURES` weights, and the
logarithm of the prompt's length. The weights are learned with AdaGrad, one group at a time. Only Python's own floats
are used, in a fixed order, so that equal observations give equal bits.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from itertools import pairwise

from msgspec import Struct

FEATURES = 4_096
"""Number of hashed features. A record of all weights has 72 KiB."""
_BITS = 12
_PROMPT_TOKENS = 1_024
"""Maximum number of tokens of a prompt that are hashed: half from its start, half from its end. The maximum bounds the
time of a decision."""
_RATE = 0.15
"""AdaGrad's learning rate."""
_PASSES = 2
"""Number of updates of the weights with each group."""
_FIRST_SQUARE = 1e-2
"""Initial sum of squared gradients, so that the first steps are finite."""
_TYPICAL_LOG_LENGTH = 4.0
"""Value that is subtracted from the logarithm of the prompt's length, so that the weight of the length is nearly
independent of the bias."""


class RegressionState(Struct, array_like=True):
    """The features that were learned (uint16), their weights and sums of squared gradients (float64).

    All are in the machine's byte order. Two features follow the :data:`FEATURES` hashed ones: the logarithm of the
    prompt's length, and the bias.
    """

    features: bytes
    weights: bytes
    squares: bytes


def hashed_features(prompt: Sequence[int]) -> list[int]:
    """Return the indices of a prompt's features, each once, in ascending order."""
    if len(prompt) > _PROMPT_TOKENS:
        prompt = (*prompt[: _PROMPT_TOKENS // 2], *prompt[-_PROMPT_TOKENS // 2 :])
    shift = 32 - _BITS
    found = {((token + 1) * 0x9E3779B1 & 0xFFFFFFFF) >> shift for token in prompt}
    for first, second in pairwise(prompt):
        found.add((((first + 1) * 0x85EBCA6B ^ (second + 1) * 0xC2B2AE35) * 0x9E3779B1 & 0xFFFFFFFF) >> shift)
    return sorted(found)


class PromptRegression:
    """Predicts the mean logarithm of the lengths of a prompt's answers, and learns from each group."""

    def __init__(self, state: RegressionState | None = None) -> None:
        self._weights = array("d", [0.0] * (FEATURES + 2))
        self._squares = array("d", [_FIRST_SQUARE] * (FEATURES + 2))
        if state:
            learned = zip(array("H", state.features), array("d", state.weights), array("d", state.squares), strict=True)
            for feature, weight, square in learned:
                self._weights[feature], self._squares[feature] = weight, square

    def state(self) -> RegressionState:
        """Return what was learned."""
        pairs = enumerate(zip(self._weights, self._squares, strict=True))
        # a tiny gradient changes the weight, but not the square
        learned = [feature for feature, (weight, square) in pairs if weight or square != _FIRST_SQUARE]
        weights = array("d", [self._weights[feature] for feature in learned])
        squares = array("d", [self._squares[feature] for feature in learned])
        return RegressionState(array("H", learned).tobytes(), weights.tobytes(), squares.tobytes())

    def predict(self, prompt: Sequence[int]) -> float:
        """Return the expected logarithm of the length of an answer to a prompt."""
        features = hashed_features(prompt)
        return self._predict(features, 1 / math.sqrt(len(features) + 1), _log_length(prompt))

    def learn(self, prompt: Sequence[int], log_length: float) -> None:
        """Learn the mean logarithm of a group's lengths."""
        features = hashed_features(prompt)
        scale, length = 1 / math.sqrt(len(features) + 1), _log_length(prompt)
        weights, squares = self._weights, self._squares
        if squares[FEATURES + 1] == _FIRST_SQUARE:
            weights[FEATURES + 1] = log_length  # AdaGrad would need dozens of groups to reach this bias
            squares[FEATURES + 1] = 1.0
        for _ in range(_PASSES):
            error = self._predict(features, scale, length) - log_length
            gradient = error * scale
            for feature in features:
                squares[feature] += gradient * gradient
                weights[feature] -= _RATE * gradient / math.sqrt(squares[feature])
            for feature, gradient in ((FEATURES, error * length), (FEATURES + 1, error)):
                squares[feature] += gradient * gradient
                weights[feature] -= _RATE * gradient / math.sqrt(squares[feature])

    def _predict(self, features: list[int], scale: float, length: float) -> float:
        weights = self._weights
        hashed = sum([weights[feature] for feature in features])
        return weights[FEATURES + 1] + weights[FEATURES] * length + hashed * scale


def _log_length(prompt: Sequence[int]) -> float:
    return math.log(max(1, len(prompt))) - _TYPICAL_LOG_LENGTH
