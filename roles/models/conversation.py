"""Conversations with the model: messages, calls of tools, and the interfaces that convert them to tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from ...core.run_spec import ModelSpec
from .tokenizer import Tokenizer

ASSISTANT = "assistant"
"""Role of the messages that the model writes."""
DEVELOPER, SYSTEM, USER = "developer", "system", "user"
"""Role of instructions in OpenAI's newer API, role of instructions in most chat templates, and role of requests."""
MAX_ARGUMENTS_DEPTH = 112
"""Maximum number of objects and lists inside each other in the arguments of a call. Deeper ones are shown as text."""


class ToolCall(Struct, frozen=True):
    """A call of a tool in an answer of the model."""

    id: str
    name: str
    arguments: str
    """JSON object of the arguments."""


class Message(Struct, frozen=True, omit_defaults=True):
    """A message of a conversation."""

    role: str
    content: str
    name: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    """Id of the tool call whose result this message contains."""
    reasoning: str = ""
    """Reasoning that precedes the content of an answer; empty if the model's family does not separate the two."""
    parts: tuple[str, ...] = ()
    """The pieces of the content, if there are several; ``content`` joins them by line ends, as vLLM does."""


class SystemPlaces(Struct, frozen=True):
    """The roles, of :data:`SYSTEM` and :data:`DEVELOPER`, that a format shows (:mod:`.system_messages`)."""

    first: frozenset[str] = frozenset()
    """The roles that it shows at the beginning of a conversation."""
    later: frozenset[str] = frozenset()
    """The roles that it also shows at each later place."""


class AnswerContent(Struct, frozen=True):
    """The content of a model's answer: text, tool calls and reasoning."""

    content: str
    calls: tuple[tuple[str, str], ...] = ()
    """Name and arguments (JSON object) of each call of a tool."""
    reasoning: str = ""


class ToolsUnsupported(ValueError):
    """Tools cannot be offered to the model; the text says why, and what would be right."""


class Chat(Protocol):
    """Converts conversations to tokens, and sampled tokens to the content of an answer."""

    reads_context: bool
    """False if neither :meth:`extend` nor :meth:`read` looks at the context, and if :meth:`extend` only adds tokens to
    context and answer, which depend on the last sampled token and the messages."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the tokens of a conversation, at whose end the model's answer begins.

        Raises:
            ValueError: The conversation cannot be encoded.
        """
        ...

    def extend(
        self, context: tuple[int, ...], sampled: tuple[int, ...], messages: Sequence[Message], answered: int
    ) -> tuple[int, ...] | None:
        """Return the tokens of a conversation whose beginning was converted to tokens before.

        Args:
            context: Tokens before an answer.
            sampled: Tokens of the answer.
            messages: A conversation.
            answered: Number of the conversation's messages up to and including the answer.

        Returns:
            The tokens, at whose end the next answer begins; None if the template changes the beginning of the
            conversation because of the messages after the answer.

        Raises:
            ValueError: The messages cannot be encoded.
        """
        ...

    def read(self, context: tuple[int, ...], sampled: tuple[int, ...]) -> AnswerContent:
        """Return the content of an answer that was sampled after ``context``."""
        ...


class ModelChat(Chat, Protocol):
    """The chat of a model that may be offered tools."""

    model: ModelSpec
    """The model for which this chat was opened."""

    def with_tools(self, tools: str) -> Chat:
        """Return the chat for conversations in which the model is offered tools. The first call may take seconds.

        Args:
            tools: OpenAI's list of tools as JSON.

        Raises:
            ToolsUnsupported: Tools cannot be offered to this model.
        """
        ...


class TemplateTokenizer(Tokenizer, Protocol):
    """The tokenizer of a folder that has a chat template."""

    has_developer: bool
    """True if the template has messages of the role :data:`DEVELOPER`."""
    shows_apart: bool
    """True if the template is known to show each message alike whatever the messages are that are neither it nor the
    first one."""
    takes_parts: bool
    """True if the template joins the pieces of a content itself."""

    def render(self, messages: Sequence[Mapping[str, Any]], *, answer_begins: bool, tools: Sequence[Any] = ()) -> str:
        """Return a conversation as text, at whose end the model's answer begins if ``answer_begins``.

        Raises:
            ValueError: The folder has no chat template, or the template refuses the conversation.
        """
        ...

    def token_id(self, text: str) -> int | None:
        """Return the id of the token with this text; None if there is none."""
        ...

    def decode_all(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, including the text of special tokens."""
        ...


ToolFormat = Callable[[list[Any]], Chat]
"""The format in which a model is offered tools and calls them: returns the chat with these tools (OpenAI's list)."""


def as_template_messages(messages: Sequence[Message], takes_parts: bool) -> list[dict[str, Any]]:
    """Return messages as a chat template expects them (:attr:`TemplateTokenizer.takes_parts`)."""
    return [_as_template_message(message, takes_parts) for message in messages]


def _as_template_message(message: Message, takes_parts: bool) -> dict[str, Any]:
    """Return a message with tool arguments as objects, and without empty keys."""
    made: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.parts and takes_parts:
        made["content"] = [{"type": "text", "text": text} for text in message.parts]
    if message.name:
        made["name"] = message.name
    if message.tool_calls:
        made["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _arguments(call)}}
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        made["tool_call_id"] = message.tool_call_id
    if message.reasoning:
        made["reasoning_content"] = message.reasoning
    return made


def _arguments(call: ToolCall) -> Any:
    try:
        return msgspec.json.decode(call.arguments)
    except (msgspec.DecodeError, RecursionError):
        return call.arguments


def ended(sampled: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Return whether an answer ends with a stop token of the model."""
    return bool(sampled) and sampled[-1] in tokenizer.stop_tokens


def is_deeper(value: Any, most: int) -> bool:
    """Return whether a value of JSON has more than ``most`` objects and lists inside each other."""
    level = [value]
    for _ in range(most + 1):
        level = [each for each in level if isinstance(each, dict | list)]
        if not level:
            return False
        level = [inside for each in level for inside in (each.values() if isinstance(each, dict) else each)]
    return True
