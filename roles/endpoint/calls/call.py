"""Parse and check the body of a request for answers."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import msgspec
from msgspec import Struct

from ...models.conversation import Message
from ...trajectories.types import Sampling
from .errors import ApiError, wrong
from .messages import parse_message, take_tools
from .sampling import foreign_sampling

MAX_CHOICES = 128
"""Maximum number of answers to one request, as in OpenAI's API."""
_MAX_STOPS = 16
"""Maximum number of stop texts. It is limited, because each stop text is searched for after every token. OpenAI allows
4, vLLM any number."""
_MAX_STOP_CHARS = 1000
"""Maximum number of characters of a stop text."""
_MAX_MODEL_CHARS = 1000
"""Maximum number of characters of a model's name. It is limited, because every event of a stream contains it."""
_DIGEST_CHARS = 32
"""Hexadecimal digits of the digest of a body (128 bits)."""


class Policy(Struct, frozen=True):
    """The settings of the job that decide how a call may be sampled."""

    temperature: float
    foreign: str = "refuse"
    """Treatment of calls that would sample in another way: ``context`` serves them as turns that are not trained, and
    ``refuse`` refuses them."""
    max_length: float = math.inf
    """Maximum number of tokens of context and answer together."""


class Call(Struct, frozen=True):
    """A request for answers."""

    digest: str
    """Digest of the body: a repeated request has the same digest."""
    model: str
    messages: tuple[Message, ...] | None
    """The conversation; None for a plain prompt."""
    prompt: str | tuple[int, ...] = ""
    """The plain prompt, as text or tokens."""
    choices: int = 1
    max_new: int | None = None
    """Maximum number of tokens to sample; None if the job's limit applies."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer, and are not part of it."""
    tools: str = ""
    """OpenAI's list of tools as JSON; empty if there is none."""
    may_call: bool = False
    """True if the agent gets the tool calls in an answer as ``tool_calls``; False if it gets them as text."""
    sampling: Sampling | None = None
    """The sampling of a foreign call; None if the call is not foreign."""
    stream: bool = False
    include_usage: bool = False
    """True if a stream must end with the numbers of tokens of the request and its answers."""
    logprobs: bool = False
    return_token_ids: bool = False


def parse_chat(body: bytes, policy: Policy) -> Call:
    """Return the request in the body of ``/v1/chat/completions``.

    Args:
        body: The body.
        policy: The job's settings of sampling.

    Raises:
        ApiError: The request cannot be served.
    """
    given = _table(body)
    messages = given.pop("messages", None)
    if not isinstance(messages, list) or not messages:
        raise wrong("messages", 'must be a list of messages: [{"role": "user", "content": "..."}]')
    max_new = _count(given, "max_completion_tokens", None)
    older_name = _count(given, "max_tokens", None)
    tools, may_call = take_tools(given)
    return Call(
        digest=body_digest(body),
        messages=tuple(parse_message(message, index) for index, message in enumerate(messages)),
        logprobs=_flag(given, "logprobs"),
        max_new=older_name if max_new is None else max_new,
        tools=tools,
        may_call=may_call,
        **_common(given, policy),
    )


def parse_completion(body: bytes, policy: Policy) -> Call:
    """Return the request in the body of ``/v1/completions``; arguments and errors are as for :func:`parse_chat`."""
    given = _table(body)
    prompt = given.pop("prompt", None)
    if isinstance(prompt, list) and prompt and all(type(token) is int and token >= 0 for token in prompt):
        prompt = tuple(prompt)
    elif not isinstance(prompt, str) or not prompt:
        raise wrong("prompt", "must be one text, or one list of token ids")
    logprobs = given.pop("logprobs", None)
    if logprobs not in (None, 0):
        raise wrong("logprobs", "only the sampled token's log-probability is known; write 0")
    return Call(
        digest=body_digest(body),
        messages=None,
        prompt=prompt,
        logprobs=logprobs is not None,
        max_new=_count(given, "max_tokens", None),
        **_common(given, policy),
    )


def _table(body: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ApiError(400, "the body must be a JSON object") from None


def body_digest(body: bytes) -> str:
    """Return the digest of a body, by which a repeated call is recognised."""
    return hashlib.sha256(body).hexdigest()[:_DIGEST_CHARS]


def _common(given: dict[str, Any], policy: Policy) -> dict[str, Any]:
    """Return the keys that both kinds of requests have, as arguments of :class:`Call`; refuse every other key."""
    model, options = given.pop("model", None), given.pop("stream_options", None) or {}
    if not isinstance(model, str) or len(model) > _MAX_MODEL_CHARS:
        problem = f"must be a text of at most {_MAX_MODEL_CHARS} characters; every name means the model that is trained"
        raise wrong("model", problem)
    if not isinstance(options, dict):
        raise wrong("stream_options", "must be an object")
    choices = _count(given, "n", 1)
    if choices is not None and choices > MAX_CHOICES:
        raise wrong("n", f"must be at most {MAX_CHOICES}")
    return {
        "model": model,
        "choices": choices,
        "stop": _stop(given),
        "stream": _flag(given, "stream"),
        "include_usage": options.get("include_usage") is True,
        "return_token_ids": _flag(given, "return_token_ids"),
        "sampling": foreign_sampling(given, policy.temperature, refused=policy.foreign == "refuse"),
    }


def _stop(given: dict[str, Any]) -> tuple[str, ...]:
    stop = given.pop("stop", None)
    texts = [] if stop is None else stop if isinstance(stop, list) else [stop]
    if len(texts) > _MAX_STOPS or not all(isinstance(text, str) and 0 < len(text) <= _MAX_STOP_CHARS for text in texts):
        raise wrong(
            "stop", f"must be a text, or a list of at most {_MAX_STOPS} texts of 1 to {_MAX_STOP_CHARS} characters"
        )
    return tuple(texts)


def _count(given: dict[str, Any], key: str, default: int | None) -> int | None:
    value = given.pop(key, None)
    if value is None:
        return default
    if type(value) is not int or value < 1:
        raise wrong(key, "must be a whole number, 1 or more")
    return value


def _flag(given: dict[str, Any], key: str) -> bool:
    value = given.pop(key, None)
    if value is not None and not isinstance(value, bool):
        raise wrong(key, "must be true or false")
    return value is True
