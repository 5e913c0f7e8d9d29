"""The keys of a body that determine how an answer is sampled.

The policy that is trained must be the policy that sampled the answers. A call that asks for another policy is
*foreign*. It is refused with the name of the key or, if the job allows foreign calls, sampled as requested and never
trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ...trajectories.episodes.turn_rules import ACCEPTED
from ...trajectories.types import Sampling
from .call import Policy
from .errors import unsupported, wrong

_IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
    }
)
"""Keys of OpenAI's API that do not affect the answer."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "logit_bias": ({},),
    "stop_token_ids": ([],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "top_logprobs": (0,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "seed": (),
}
"""Keys that can change how the model samples, each with the values that change nothing."""


def foreign_sampling(given: Mapping[str, Any], policy: Policy) -> tuple[Sampling | None, tuple[str, ...]]:
    """Return how a foreign call is sampled, None if it is sampled as the job says; and the keys that this overrides.

    Args:
        given: The keys of the body that are not read elsewhere.
        policy: The job's settings of sampling.

    Raises:
        ApiError: A key is unknown or invalid, or the call is foreign and foreign calls are refused.
    """
    changes: dict[str, Any] = {}
    temperature, refused = policy.temperature, policy.foreign == "refuse"
    for key, value in given.items():
        if value is None or key in _IGNORED or _is_neutral(key, value, temperature):
            continue
        if key not in ACCEPTED:
            known = key in _NEUTRAL
            problem = (
                "it would change the policy that samples the answer"
                if known
                else "this endpoint does not support this key"
            )
            raise unsupported(key, value, f"{problem}; remove the key")
        if refused and key == "temperature":
            raise unsupported(key, value, f"[sampling] temperature of the job is {temperature:g}; remove the key")
        if refused:
            problem = "it would change the policy that samples the answer; remove the key"
            raise unsupported(key, value, problem)
        accepts, words = ACCEPTED[key]
        try:
            changes[key] = getattr(msgspec.convert({key: value}, Sampling), key)
        except msgspec.ValidationError:
            raise wrong(key, f"must be {words}") from None
        if not accepts(changes[key]):
            raise wrong(key, f"must be {words}")
    if policy.foreign == "override":
        return None, tuple(changes)
    return Sampling(**changes) if changes else None, ()


def take_sampling(given: dict[str, Any], policy: Policy) -> tuple[Sampling | None, tuple[str, ...]]:
    """Remove the keys that change how the model samples from a body whose other keys are ignored.

    Arguments otherwise, result and errors are those of :func:`foreign_sampling`.
    """
    return foreign_sampling({key: given.pop(key) for key in (*ACCEPTED, "logit_bias") if key in given}, policy)


def _is_neutral(key: str, value: Any, temperature: float) -> bool:
    neutral = (temperature,) if key == "temperature" else _NEUTRAL.get(key, ())
    return any(value == same and isinstance(value, bool) == isinstance(same, bool) for same in neutral)
