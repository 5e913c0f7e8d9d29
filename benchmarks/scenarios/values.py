"""Parses durations of a scenario file, which each seed may draw."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from random import Random
from typing import Annotated, Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace
from pydantic import BaseModel, BeforeValidator, PlainValidator

from rrl.core.units import seconds

_EXAMPLES = {
    "uniform": '{uniform = ["10s", "30s"]}',
    "lognormal": '{lognormal = ["60s", 0.3]}',
    "pareto": '{pareto = ["60s", 1.5, "30min"]}',
    "mixed": '{mixed = [[0.9, "60s"], [0.1, "10min"]]}',
    "draw": '{draw = "NAME"}',
}
_MAX_SIGMA = 2.0
"""Largest sigma of a lognormal draw, with which one draw in 40 is more than 50 times the median."""


Table = TypeVar("Table", bound=BaseModel)


class Drawn(Struct, frozen=True):
    """A duration (s) that a seed draws."""

    kind: str
    """``fixed``, ``uniform``, ``lognormal``, ``pareto``, ``mixed``, or ``draw``, which stands for a duration of
    ``[draws]``."""
    a: float = 0.0
    """The fixed duration; for uniform and pareto the least duration, for lognormal the median."""
    b: float = 0.0
    """The greatest duration for uniform, sigma for lognormal, and the exponent for pareto."""
    most: float = math.inf
    """The greatest duration for pareto, to which longer draws are cut."""
    parts: tuple[tuple[float, Drawn], ...] = ()
    """Weights and durations for mixed."""
    name: str = ""

    def draw(self, random: Random) -> float:
        """Draw one duration. Raises an error for the kind ``draw``, which :func:`with_draws` must replace before."""
        match self.kind:
            case "uniform":
                return random.uniform(self.a, self.b)
            case "lognormal":
                return random.lognormvariate(math.log(self.a), self.b)
            case "pareto":
                return min(self.most, self.a * random.paretovariate(self.b))
            case "mixed":
                weights = [weight for weight, _ in self.parts]
                (part,) = random.choices([part for _, part in self.parts], weights)
                return part.draw(random)
            case "draw":
                raise AssertionError(f"[draws] {self.name} was not replaced")
        return self.a

    @property
    def least(self) -> float:
        """Return the least possible duration, or the median for lognormal, because its only lower bound is 0."""
        return min((part.least for _, part in self.parts), default=self.a)

    @property
    def greatest(self) -> float:
        """Return the greatest possible duration, or the median or least duration of a draw without an upper bound."""
        if self.kind == "mixed":
            return max(part.greatest for _, part in self.parts)
        bound = self.b if self.kind == "uniform" else self.most if self.kind == "pareto" else self.a
        return bound if bound < math.inf or self.kind != "pareto" else self.a


def fixed(length: float) -> Drawn:
    return Drawn("fixed", length)


# ── draws that several places share ──────────────────────────────────────────────────────────────────────────────────
def draws_in(value: object, place: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield (path of keys, NAME) for each ``{draw = "NAME"}`` in a table, a list or a duration."""
    if isinstance(value, Drawn):
        if value.kind == "draw":
            yield place, value.name
        for _, part in value.parts:
            yield from draws_in(part, place)
    elif isinstance(value, BaseModel):
        for name, field in type(value).model_fields.items():
            yield from draws_in(getattr(value, name), (*place, field.alias or name))
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from draws_in(each, (*place, key))
    elif isinstance(value, tuple):
        for index, each in enumerate(value):
            yield from draws_in(each, (*place, index))


def with_draws(table: Table, value_of: Callable[[str], Drawn]) -> Table:
    """Return the table with ``value_of(NAME)`` in place of each ``{draw = "NAME"}``."""
    changed = {}
    for name in type(table).model_fields:
        value = getattr(table, name)
        if next(draws_in(value), None) is not None:
            changed[name] = _replaced(value, value_of)
    return table.model_copy(update=changed) if changed else table


def _replaced(value: Any, value_of: Callable[[str], Drawn]) -> Any:
    if isinstance(value, Drawn):
        if value.kind == "draw":
            return value_of(value.name)
        return replace(value, parts=tuple((weight, _replaced(part, value_of)) for weight, part in value.parts))
    if isinstance(value, BaseModel):
        return with_draws(value, value_of)
    if isinstance(value, dict):
        return {key: _replaced(each, value_of) for key, each in value.items()}
    return tuple(_replaced(each, value_of) for each in value) if isinstance(value, tuple) else value


# ── from the file ────────────────────────────────────────────────────────────────────────────────────────────────────
def _drawn(value: object) -> object:
    if isinstance(value, Drawn):
        return value
    if isinstance(value, str):
        return fixed(_seconds(value))
    if isinstance(value, dict) and len(value) == 1:
        ((kind, given),) = value.items()
        if kind not in _EXAMPLES:
            raise ValueError(f"there is no draw {kind}; there are {', '.join(_EXAMPLES.values())}")
        drawn = _mixed(given) if kind == "mixed" else _named(given) if kind == "draw" else _pair(kind, given)
        if drawn is None:
            raise ValueError(f"{kind} is written {_EXAMPLES[kind]}{_MEANING[kind]}")
        return drawn
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise ValueError(_unit(value))
    raise ValueError(f'must be a duration: "90s" or {" or ".join(_EXAMPLES.values())}')


_MEANING = {
    "uniform": ": least and greatest",
    "lognormal": f": median, and sigma from 0 to {_MAX_SIGMA:g}",
    "pareto": ": least, exponent (more than 0), and optionally greatest",
    "mixed": ": a weight above 0 and a duration for each kind of draw",
    "draw": ": the name of a duration in [draws]",
}


def _pair(kind: str, given: Any) -> Drawn | None:
    """Return a uniform, lognormal or pareto draw; None if ``given`` does not have its form."""
    if not isinstance(given, list) or len(given) not in ((2, 3) if kind == "pareto" else (2,)):
        return None
    first = _seconds(given[0])
    if first == math.inf:
        raise ValueError(f'"never" cannot be in {kind}; use mixed, as in {{mixed = [[0.9, "60s"], [0.1, "never"]]}}')
    if kind == "uniform":
        last = _seconds(given[1])
        if first > last:
            raise ValueError(f'the first value of uniform must be the smaller one, not "{given[0]}"')
        return Drawn(kind, first, last) if last < math.inf else None
    number = _number(given[1])
    if number is None or first <= 0:
        return None
    if kind == "lognormal":
        return Drawn(kind, first, number) if 0 <= number <= _MAX_SIGMA else None
    most = _seconds(given[2]) if len(given) == 3 else math.inf
    return Drawn(kind, first, number, most) if number > 0 and most >= first else None


def _mixed(given: Any) -> Drawn | None:
    if not isinstance(given, list) or not given or not all(isinstance(one, list) and len(one) == 2 for one in given):
        return None
    weights = [_number(weight) for weight, _ in given]
    if any(weight is None or not 0 < weight < math.inf for weight in weights):
        return None
    parts: list[Any] = [_drawn(duration) for _, duration in given]
    return Drawn("mixed", parts=tuple((weight or 0.0, part) for weight, part in zip(weights, parts, strict=True)))


def _named(given: Any) -> Drawn | None:
    return Drawn("draw", name=given) if isinstance(given, str) else None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _seconds(text: object) -> float:
    if text == "never":
        return math.inf
    if not isinstance(text, str):
        raise ValueError(_unit(text) if isinstance(text, int | float) else 'must be a duration, as in "90s"')
    return seconds(text)


def _unit(number: object) -> str:
    return f'a duration needs a unit; write for example "{number}s"'


def _lasting(value: object) -> object:
    if isinstance(value, dict):
        raise ValueError('must be the same for every seed: a duration as in "90s", not a draw')
    return _seconds(value)


Length = Annotated[Drawn, PlainValidator(_drawn)]
"""A duration (s) that each seed draws; ``"never"`` is inf."""
Lasting = Annotated[float, BeforeValidator(_lasting)]
"""A duration in s; ``"never"`` is inf."""
