"""A request for answers, in the one form into which the requests of every API are translated."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any

import msgspec
from msgspec import Struct

from ...models.conversation import ASSISTANT, MAX_ARGUMENTS_DEPTH, Message, is_deeper
from ...trajectories.types import Sampling
from .errors import ApiError, wrong

MAX_CHOICES = 128
"""Maximum number of answers to one request, as in OpenAI's API."""
MAX_TOOLS = 2048
"""Maximum number of tools of a request: more than a client with many MCP servers has."""
MAX_STOPS = 16
"""Maximum number of stop texts. It is limited, because each stop text is searched for after every token. OpenAI allows
4, vLLM any number."""
_MAX_STOP_CHARS = 1000
"""Maximum number of characters of a stop text."""
_MAX_MODEL_CHARS = 1000
"""Maximum number of characters of a model's name. It is limited, because every event of a stream contains it."""
_MAX_DEPTH = MAX_ARGUMENTS_DEPTH + 16
"""Maximum number of objects and lists inside each other in a body, far from Python's limit. A client may send back all
arguments that the model gave a tool."""
_HASH_CHARS = 32
"""Hexadecimal digits of a hash (128 bits): two conversations of an episode never have the same hash by chance."""


class Policy(Struct, frozen=True):
    """The settings of the job that decide how a call may be sampled."""

    temperature: float
    foreign: str = "refuse"
    """Treatment of calls that would sample in another way: ``context`` serves them as turns that are not trained,
    ``override`` samples them as the job says, and ``refuse`` refuses them."""
    constraints: str = "ask"
    """Treatment of calls that constrain their answer (:class:`rrl.config.job.roles.EndpointRole`)."""
    untrained: tuple[str, ...] = ()
    """Patterns of model names whose calls are served and not trained."""
    max_length: float = math.inf
    """Maximum number of tokens of context and answer together."""


class ToolName(Struct, frozen=True):
    """A tool that the agent calls in another way than the model."""

    name: str
    """Its name for the model."""
    own: str
    """Its name for the agent."""
    namespace: str = ""
    """The agent's namespace of the tool; empty if it is in none."""
    custom: bool = False
    """True if the agent's tool takes a text, which is the argument ``input`` for the model."""


class Call(Struct, frozen=True):
    """A request for answers."""

    wire: str
    """Name of the API's form (:data:`..forms.FORMS`)."""
    model: str
    """Name of the model: the name of the agent within its episode."""
    messages: tuple[Message, ...] | None
    """The conversation; None for a plain prompt."""
    prompt: str | tuple[int, ...] = ""
    """The plain prompt, as text or tokens."""
    choices: int = 1
    max_new: int | None = None
    """Maximum number of tokens to sample, where 0 means 1; None if the job's limit applies."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer, and are not part of it."""
    tools: str = ""
    """OpenAI's list of tools as JSON; empty if there is none."""
    tool_names: tuple[ToolName, ...] = ()
    """The tools that the agent calls in another way than the model."""
    may_call: bool = False
    """True if the agent gets the tool calls in an answer as ``tool_calls``; False if it gets them as text."""
    constraint: str = ""
    """What the answer is asked or made to be (:meth:`.constraint.Constraint.encode`); empty if it may be anything."""
    sampling: Sampling | None = None
    """The sampling of a call that is not trained; None for any other call."""
    overridden: tuple[str, ...] = ()
    """Keys with which the call asked for other sampling, and which the job overrides."""
    ignored: tuple[str, ...] = ()
    """What the request has, and the answer does not: keys and kinds of tools, for the log."""
    stream: bool = False
    include_usage: bool = False
    """True if a stream must end with the numbers of tokens of the request and its answers."""
    logprobs: bool = False
    return_token_ids: bool = False
    hashes: tuple[str, ...] = ()
    """Hash of the conversation up to each message; set by :func:`identified`."""
    digest: str = ""
    """Digest of the meaning: a repeated call has the same digest; set by :func:`identified`."""

    @property
    def conversation(self) -> str:
        """Hash of the whole conversation; empty for a plain prompt."""
        return self.hashes[-1] if self.hashes else ""


def identified(call: Call) -> Call:
    """Return a call with its hashes and its digest.

    The digest covers what determines the answer, and not how the client gets it. Clients repeat a call with other
    metadata, ids and headers, and with another ``stream``.
    """
    hashes = rolling_hashes(call.messages or (), call.tools + call.constraint)
    prompt = hashes[-1] if hashes else call.prompt
    meaning = (
        call.wire,
        call.model,
        prompt,
        call.tools,
        call.may_call,
        call.constraint,
        call.stop,
        call.max_new,
        call.choices,
        call.sampling,
    )
    return msgspec.structs.replace(call, hashes=hashes, digest=_hash(msgspec.json.encode(meaning)))


def is_untrained(call: Call, policy: Policy) -> bool:
    """Return whether the name of its model or its limit says that a call is only served, and not trained."""
    probe = call.max_new is not None and call.max_new <= 1
    return probe or any(fnmatchcase(call.model, pattern) for pattern in policy.untrained)


def as_untrained(call: Call) -> Call:
    """Return a call as one whose answer is context; a trained call of otherwise the same meaning is another call."""
    digest = _hash(f"{call.digest} untrained".encode())
    return msgspec.structs.replace(call, sampling=call.sampling or Sampling(), digest=digest)


def rolling_hashes(messages: Sequence[Message], before: str = "") -> tuple[str, ...]:
    """Return, for each message, the hash of the conversation up to and including this message.

    Args:
        messages: The conversation.
        before: Text that is hashed before the messages, since the template shows it there: tools and constraint.
    """
    hashes: list[str] = []
    newest = _hash(before.encode()) if before else ""
    for message in messages:
        newest = next_hash(newest, message)
        hashes.append(newest)
    return tuple(hashes)


def next_hash(before: str, message: Message) -> str:
    """Return the hash of a conversation from the hash up to its last message, and this message."""
    if message.tool_calls:  # an agent may decode the arguments of a call, and encode them in another way
        calls = tuple(
            msgspec.structs.replace(call, arguments=canonical_json(call.arguments)) for call in message.tool_calls
        )
        content = message.content.strip() and message.content  # inspect-ai sends a line end where there was no content
        message = msgspec.structs.replace(message, tool_calls=calls, content=content)
    if message.name and message.role == ASSISTANT:  # semantic-kernel adds the name of the agent to what the model wrote
        message = msgspec.structs.replace(message, name="")
    return _hash(before.encode() + msgspec.json.encode(message))


def canonical_json(text: str) -> str:
    """Return JSON in a canonical form: equal objects give equal texts, however they were written.

    The arguments of a custom tool that are not one text are themselves the text for the client, and come back as one.
    """
    try:
        value = json.loads(text, parse_int=float)  # JavaScript writes 1.0 as 1
        match value:
            case {"input": str(inside)} if len(value) == 1:
                with suppress(ValueError):
                    value = json.loads(inside, parse_int=float)
        return json.dumps(value, sort_keys=True)
    except (ValueError, RecursionError):
        return text


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_HASH_CHARS]


# ── parts of a body that several APIs share ────────────────────────────────────────────────────────────────────────
def as_table(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a body. Raises ApiError."""
    try:
        given = msgspec.json.decode(body, type=dict[str, Any])
    except RecursionError:
        raise _too_deep() from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body must be a JSON object, in UTF-8 and not compressed: {error}") from None
    if is_deeper(given, _MAX_DEPTH):
        raise _too_deep()
    return given


def _too_deep() -> ApiError:
    problem = f"the body has more than {_MAX_DEPTH} objects and lists inside each other"
    return ApiError(400, problem, code="invalid_value")


def encoded_tools(tools: Sequence[Any]) -> str:
    """Return tools as JSON, for :attr:`Call.tools`. Raises ApiError."""
    if len(tools) > MAX_TOOLS:
        raise wrong("tools", f"{len(tools)} tools are too many; at most {MAX_TOOLS} can be offered in a request")
    return msgspec.json.encode(tools).decode() if tools else ""


def text_at(table: Mapping[str, Any], key: str, where: str) -> str:
    """Return the text that a table of a body, found at ``where``, has for a key. Raises ApiError."""
    if not isinstance(value := table.get(key), str):
        raise wrong(f"{where}.{key}", "must be a text")
    return value


def take_model(given: dict[str, Any]) -> str:
    """Remove the name of the model from a body, and return it. Raises ApiError."""
    model = given.pop("model", None)
    if not isinstance(model, str) or len(model) > _MAX_MODEL_CHARS:
        problem = f"must be a text of at most {_MAX_MODEL_CHARS} characters; every name means the model that is trained"
        raise wrong("model", problem)
    return model


def take_stop(given: dict[str, Any], key: str) -> tuple[str, ...]:
    """Remove the stop texts from a body, and return them. Raises ApiError."""
    stop = given.pop(key, None)
    texts = [] if stop is None else stop if isinstance(stop, list) else [stop]
    if len(texts) > MAX_STOPS or not all(isinstance(text, str) and 0 < len(text) <= _MAX_STOP_CHARS for text in texts):
        raise wrong(key, f"must be a text, or a list of at most {MAX_STOPS} texts of 1 to {_MAX_STOP_CHARS} characters")
    return tuple(texts)


def take_count(given: dict[str, Any], key: str, default: int | None, least: int = 1) -> int | None:
    """Remove a number from a body, and return it. Raises ApiError."""
    value = given.pop(key, None)
    if value is None:
        return default
    if type(value) is not int or value < least:
        raise wrong(key, f"must be a whole number, {least} or more")
    return value


def take_flag(given: dict[str, Any], key: str) -> bool:
    """Remove a truth value from a body, and return it. Raises ApiError."""
    value = given.pop(key, None)
    if value is not None and not isinstance(value, bool):
        raise wrong(key, "must be true or false")
    return value is True
