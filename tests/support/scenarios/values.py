"""Values of a scenario file that are more than a number: durations that a seed draws, and where they come from."""

from __future__ import annotations

import math
from random import Random
from typing import Annotated, Any

from msgspec import Struct
from pydantic import BeforeValidator, PlainValidator

from rrl.core.units import seconds


class Drawn(Struct, frozen=True):
    """A duration (s): fixed, uniform between two, or lognormal with its median and the spread of its logarithm."""

    kind: str
    a: float
    b: float = 0.0

    def draw(self, random: Random) -> float:
        if self.kind == "uniform":
            return random.uniform(self.a, self.b)
        if self.kind == "lognormal":
            return random.lognormvariate(math.log(self.a), self.b)
        return self.a


def fixed(length: float) -> Drawn:
    return Drawn("fixed", length)


def _drawn(value: object) -> object:
    if isinstance(value, Drawn):
        return value
    if isinstance(value, str):
        return fixed(_seconds(value))
    if isinstance(value, dict) and len(value) == 1:
        kind, two = next(iter(value.items()))
        if kind == "uniform" and _pair(two):
            low, high = _seconds(two[0]), _seconds(two[1])
            if low > high:
                raise ValueError(f'the first of uniform is the smaller one, not "{two[0]}"')
            return Drawn("uniform", low, high)
        if kind == "lognormal" and _pair(two):
            median, spread = _seconds(two[0]), two[1]
            if median > 0 and isinstance(spread, int | float) and 0 <= spread <= 2:
                return Drawn("lognormal", median, float(spread))
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise ValueError(_unit(value))
    raise ValueError('must be a duration: "90s", {uniform = ["10s", "30s"]} or {lognormal = ["60s", 0.3]}')


def _pair(two: Any) -> bool:
    return isinstance(two, list) and len(two) == 2


def _seconds(text: object) -> float:
    if text == "never":
        return math.inf
    if not isinstance(text, str):
        raise ValueError(_unit(text) if isinstance(text, int | float) else 'must be a duration, as in "90s"')
    return seconds(text)


def _unit(number: object) -> str:
    return f'a duration needs a unit; write for example "{number}s"'


def _lasting(value: object) -> object:
    return _seconds(value)


Length = Annotated[Drawn, PlainValidator(_drawn)]
"""A duration that each seed draws anew; ``"never"`` and "for ever" are ``inf``."""
Lasting = Annotated[float, BeforeValidator(_lasting)]
"""s; ``"never"``: inf"""
