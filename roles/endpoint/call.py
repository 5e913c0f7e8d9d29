"""The body of a request to the endpoint as a checked value, and the errors that the endpoint answers with.

The policy that is trained must be the policy that sampled, so a request may not change how the model samples. A key
that would is refused by name; a value that says what happens anyway is accepted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from ..models.chat import Message

MAX_CHOICES = 128
"""Greatest number of answers to one request, as OpenAI's."""
_DIGEST_CHARS = 32
"""Hexadecimal digits of the digest of a body (128 bits)."""


class ApiError(Exception):
    """A request that is answered with an error.

    Args:
        status: HTTP status.
        message: What is wrong, and what would be right.
        kind: OpenAI's type of the error.
        code: OpenAI's code of the error, which programs compare.
        param: Key of the body that is wrong.
    """

    def __init__(
        self, status: int, message: str, kind: str = "invalid_request_error", code: str | None = None,
        param: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Call(Struct, frozen=True):
    """A request for answers."""

    digest: str
    """Digest of the body: a repeated request has the same."""
    model: str
    messages: tuple[Message, ...] | None
    """The conversation; None for a plain prompt."""
    prompt: str | tuple[int, ...] = ""
    """The plain prompt, as text or tokens."""
    choices: int = 1
    max_new: int | None = None
    """Greatest number of tokens to sample; None: the job's."""
    stream: bool = False
    include_usage: bool = False
    """True if a stream ends with the numbers of tokens."""
    logprobs: bool = False
    return_token_ids: bool = False


_IGNORED = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "parallel_tool_calls",
})  # fmt: skip
"""Keys of OpenAI's that do not concern the answer."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1,), "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,), "top_k": (0, -1),
    "min_p": (0,), "logit_bias": ({},), "stop": ([],), "stop_token_ids": ([],), "tools": ([],),
    "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "top_logprobs": (0,), "best_of": (1,),
    "echo": (False,), "suffix": ("",), "seed": (),
}  # fmt: skip
"""Keys that would change how the model samples, and their values that change nothing."""
_EMPTY_MESSAGE_KEYS = frozenset({"refusal", "tool_calls", "function_call", "audio", "annotations", "reasoning"})
"""Keys of an answer's message, which a client may send back without a value."""


def parse_chat(body: bytes, temperature: float) -> Call:
    """Return the request in the body of ``/v1/chat/completions``.

    Args:
        body: The body.
        temperature: Temperature of the job.

    Raises:
        ApiError: The request cannot be served.
    """
    given = _table(body)
    messages = given.pop("messages", None)
    if not isinstance(messages, list) or not messages:
        raise _wrong("messages", 'must be a list of messages: [{"role": "user", "content": "..."}]')
    max_new = _count(given, "max_completion_tokens", None)
    older_name = _count(given, "max_tokens", None)
    call = Call(
        digest=_digest(body),
        messages=tuple(_message(message, index) for index, message in enumerate(messages)),
        logprobs=_flag(given, "logprobs"),
        max_new=older_name if max_new is None else max_new,
        **_common(given),
    )
    _check_sampling(given, temperature)
    return call


def parse_completion(body: bytes, temperature: float) -> Call:
    """Return the request in the body of ``/v1/completions``; arguments and errors as of :func:`parse_chat`."""
    given = _table(body)
    prompt = given.pop("prompt", None)
    if isinstance(prompt, list) and prompt and all(type(token) is int and token >= 0 for token in prompt):
        prompt = tuple(prompt)
    elif not isinstance(prompt, str) or not prompt:
        raise _wrong("prompt", "must be one text, or one list of token ids")
    logprobs = given.pop("logprobs", None)
    if logprobs not in (None, 0):
        raise _wrong("logprobs", "only the sampled token's log-probability is known; write 0")
    call = Call(
        digest=_digest(body),
        messages=None,
        prompt=prompt,
        logprobs=logprobs is not None,
        max_new=_count(given, "max_tokens", None),
        **_common(given),
    )
    _check_sampling(given, temperature)
    return call


def _table(body: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ApiError(400, "the body must be a JSON object") from None


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()[:_DIGEST_CHARS]


def _common(given: dict[str, Any]) -> dict[str, Any]:
    """Remove the keys that both kinds of requests have, and return them as arguments of :class:`Call`."""
    model, options = given.pop("model", None), given.pop("stream_options", None) or {}
    if not isinstance(model, str):
        raise _wrong("model", "must be a text; every name means the model that is trained")
    if not isinstance(options, dict):
        raise _wrong("stream_options", "must be an object")
    choices = _count(given, "n", 1)
    if choices is not None and choices > MAX_CHOICES:
        raise _wrong("n", f"must be at most {MAX_CHOICES}")
    return {
        "model": model,
        "choices": choices,
        "stream": _flag(given, "stream"),
        "include_usage": options.get("include_usage") is True,
        "return_token_ids": _flag(given, "return_token_ids"),
    }


def _message(given: Any, index: int) -> Message:
    where = f"messages[{index}]"
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise _wrong(where, 'must have a role and a content: {"role": "user", "content": "..."}')
    for key, value in given.items():
        if key in ("role", "content") or (key == "name" and isinstance(value, str)):
            continue
        if key not in _EMPTY_MESSAGE_KEYS or value not in (None, []):
            raise _wrong(f"{where}.{key}", "is not supported; a message has role, content and name")
    return Message(given["role"], _content(given.get("content"), where), given.get("name", ""))


def _content(content: Any, where: str) -> str:
    """Return the text of a message: a text, or a list of pieces of text."""
    pieces = content if isinstance(content, list) else [] if content is None else [content]
    texts = [
        piece.get("text") if isinstance(piece, dict) and piece.get("type") == "text" else piece for piece in pieces
    ]
    if not all(isinstance(text, str) for text in texts):
        raise _wrong(f"{where}.content", 'must be a text, or a list of {"type": "text", "text": "..."}')
    return "".join(map(str, texts))


def _check_sampling(given: Mapping[str, Any], temperature: float) -> None:
    """Check the remaining keys of a body: none may change how the model samples."""
    for key, value in given.items():
        if value is None or key in _IGNORED:
            continue
        if key == "temperature":
            if value != temperature or isinstance(value, bool):
                raise _foreign(key, value, f"[sampling] temperature of the job is {temperature:g}; remove the key")
        elif key not in _NEUTRAL:
            raise _foreign(key, value, "this endpoint does not have this key; remove it")
        elif not any(value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
                     for neutral in _NEUTRAL[key]):  # fmt: skip
            raise _foreign(key, value, "it would make another policy than the one that is trained; remove the key")


def _count(given: dict[str, Any], key: str, default: int | None) -> int | None:
    value = given.pop(key, None)
    if value is None:
        return default
    if type(value) is not int or value < 1:
        raise _wrong(key, "must be a whole number, 1 or more")
    return value


def _flag(given: dict[str, Any], key: str) -> bool:
    value = given.pop(key, None)
    if value is not None and not isinstance(value, bool):
        raise _wrong(key, "must be true or false")
    return value is True


def _wrong(key: str, problem: str) -> ApiError:
    return ApiError(400, f"{key}: {problem}", code="invalid_value", param=key)


def _foreign(key: str, value: Any, problem: str) -> ApiError:
    shown = json.dumps(value)[:40]
    return ApiError(400, f"{key} = {shown} is not supported: {problem}", code="unsupported_value", param=key)
