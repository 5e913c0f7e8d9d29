"""The keys of a body that determine how an answer is sampled.

The policy that is trained must be the policy that sampled the answers. A call that asks for another policy is
*foreign*. It is refused with the name of the key or, if the job allows foreign calls, sampled as requested and never
trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ...trajectories.types import Sampling
from .errors import unsupported, wrong

_IGNORED = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "parallel_tool_calls",
})  # fmt: skip
"""Keys of OpenAI's API that do not affect the answer."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1,), "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,), "top_k": (0, -1),
    "min_p": (0,), "logit_bias": ({},), "stop_token_ids": ([],), "tools": ([],),
    "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "top_logprobs": (0,), "best_of": (1,),
    "echo": (False,), "suffix": ("",), "seed": (),
}  # fmt: skip
"""Keys that can change how the model samples, each with the values that change nothing."""
_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda value: 0 <= value <= 100, "must be a number from 0 to 100"),
    "top_p": (lambda value: 0 < value <= 1, "must be a number above 0 and at most 1"),
    "min_p": (lambda value: 0 <= value <= 1, "must be a number from 0 to 1"),
    "presence_penalty": (lambda value: -2 <= value <= 2, "must be a number from -2 to 2"),
    "frequency_penalty": (lambda value: -2 <= value <= 2, "must be a number from -2 to 2"),
    "repetition_penalty": (lambda value: 0 < value <= 100, "must be a number above 0 and at most 100"),
}
"""Keys of :class:`Sampling` that are numbers, and their valid values."""
_WHOLE = {
    "top_k": (lambda value: 1 <= value < 2**31, "must be a whole number, 1 or more"),
    "seed": (lambda value: -(2**63) <= value < 2**63, "must be a whole number of 64 bits"),
}
"""Keys of :class:`Sampling` that are whole numbers."""


def foreign_sampling(given: Mapping[str, Any], temperature: float, *, refused: bool) -> Sampling | None:
    """Return how a foreign call is sampled; None if the call is not foreign.

    Args:
        given: The keys of the body that are not read elsewhere.
        temperature: Temperature of the job.
        refused: True if foreign calls are refused.

    Raises:
        ApiError: A key is unknown or invalid, or the call is foreign and foreign calls are refused.
    """
    changes: dict[str, Any] = {}
    for key, value in given.items():
        if value is None or key in _IGNORED or _is_neutral(key, value, temperature):
            continue
        if key not in Sampling.__struct_fields__:
            known = key in _NEUTRAL
            problem = ("it would change the policy that samples the answer" if known
                       else "this endpoint does not support this key")  # fmt: skip
            raise unsupported(key, value, f"{problem}; remove the key")
        if refused and key == "temperature":
            raise unsupported(key, value, f"[sampling] temperature of the job is {temperature:g}; remove the key")
        if refused:
            problem = "it would change the policy that samples the answer; remove the key"
            raise unsupported(key, value, problem)
        changes[key] = _checked(key, value)
    return msgspec.convert(changes, Sampling) if changes else None


def _is_neutral(key: str, value: Any, temperature: float) -> bool:
    neutral = (temperature,) if key == "temperature" else _NEUTRAL.get(key, ())
    return any(value == same and isinstance(value, bool) == isinstance(same, bool) for same in neutral)


def _checked(key: str, value: Any) -> float:
    whole = key in _WHOLE
    allows, problem = _WHOLE[key] if whole else _RANGES[key]
    kinds = (int,) if whole else (int, float)
    if type(value) not in kinds or not math.isfinite(value) or not allows(value):
        raise wrong(key, problem)
    return value if whole else float(value)
