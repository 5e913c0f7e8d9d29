"""Conversations as tokens: the chat template of a model's folder, or the pieces of ``[model.tokenizer] chat``.

A conversation is encoded as a whole only where nothing of it was sampled. What follows a sampled answer is encoded by
itself, so that the answer's own tokens remain (:mod:`rrl.roles.endpoint.turns.turn_context`).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from ...core.run_spec import ModelSpec
from .tokenizer import Tokenizer, open_tokenizer

ASSISTANT = "assistant"
"""Role of the messages that the model answers with."""
CONTENT = "{content}"
"""Place of a message's text in a piece of ``[model.tokenizer] chat``."""


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
    """Id of the call whose result the message is."""
    reasoning: str = ""
    """Reasoning that precedes the content of an answer, where the model's family keeps them apart."""


class AnswerContent(Struct, frozen=True):
    """What an answer of the model says."""

    content: str
    calls: tuple[tuple[str, str], ...] = ()
    """Name and arguments (JSON object) of each call of a tool."""
    reasoning: str = ""


class UnknownRole(ValueError):
    """``[model.tokenizer] chat`` has no piece for the role of a message."""


class ToolsUnsupported(ValueError):
    """Tools cannot be offered to the model; the text says why, and what would be right."""


class Chat(Protocol):
    """Converts conversations to tokens, and sampled tokens to what they say."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""
        ...

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the tokens of a conversation, at whose end the model's answer begins.

        Raises:
            ValueError: The conversation cannot be encoded.
        """
        ...

    def extend(
        self, context: tuple[int, ...], sampled: tuple[int, ...], messages: Sequence[Message], answered: int
    ) -> tuple[int, ...] | None:
        """Return the tokens of a conversation of which the beginning has tokens already.

        Args:
            context: Tokens before an answer.
            sampled: Tokens of the answer.
            messages: A conversation.
            answered: Number of its messages up to the answer, which is the last of them.

        Returns:
            The tokens, at whose end the next answer begins; None if the template writes the beginning of the
                conversation differently because of what follows.

        Raises:
            ValueError: The messages cannot be encoded.
        """
        ...

    def read(self, context: tuple[int, ...], sampled: tuple[int, ...]) -> AnswerContent:
        """Return what an answer says that was sampled after ``context``."""
        ...


class ModelChat(Chat, Protocol):
    """The chat of a model, in which it may be offered tools."""

    def with_tools(self, tools: str) -> Chat:
        """Return the same for conversations in which the model is offered tools. The first call may take seconds.

        Args:
            tools: OpenAI's list of tools as JSON.

        Raises:
            ToolsUnsupported: Tools cannot be offered to this model.
        """
        ...


def open_chat(model: ModelSpec) -> ModelChat:
    """Open tokenizer and chat template of a model.

    Raises:
        ValueError: The tokenizer is unusable, there is no chat template, or ``[model] tool_parser`` cannot be used.
    """
    if model.path is None:
        if model.tokenizer is None or model.tokenizer.chat is None:
            raise ValueError("[model.tokenizer] needs `chat`: a piece of text for the messages of each role")
        return PieceChat(open_tokenizer(model), model.tokenizer.chat)
    from .hf_tokenizer import FolderTokenizer  # imported here: a built model does not need tokenizers

    tokenizer = open_tokenizer(model)
    assert isinstance(tokenizer, FolderTokenizer)
    chat = TemplateChat(tokenizer, tool_parser=model.tool_parser)
    if model.tool_parser is not None:
        chat.open_tools()
    return chat


class PieceChat:
    """The pieces of ``[model.tokenizer] chat``.

    A message is the piece of its role with its text in place of ``{content}``. An answer of the model begins where the
    text of the assistant's piece begins, and ends with the end of sequence, which the rest of the piece follows.

    Args:
        tokenizer: The tokenizer.
        pieces: For each role the piece, which contains ``{content}`` once. Without a piece for the assistant, an
            answer has nothing around it.
    """

    def __init__(self, tokenizer: Tokenizer, pieces: Mapping[str, str]) -> None:
        self.tokenizer = tokenizer
        self._pieces = {ASSISTANT: CONTENT, **pieces}
        before, _, after = self._pieces[ASSISTANT].partition(CONTENT)
        self._answer_begins = tokenizer.encode(before)
        self._answer_ends = (tokenizer.eos, *tokenizer.encode(after))

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """See :class:`Chat`."""
        tokens = [token for message in messages for token in self._encode(message)]
        return (*tokens, *self._answer_begins)

    def extend(
        self, context: tuple[int, ...], sampled: tuple[int, ...], messages: Sequence[Message], answered: int
    ) -> tuple[int, ...] | None:
        """See :class:`Chat`."""
        end = self._answer_ends[1:] if _ended(sampled, self.tokenizer) else self._answer_ends
        return (*context, *sampled, *end, *self.prompt(messages[answered:]))

    def read(self, context: tuple[int, ...], sampled: tuple[int, ...]) -> AnswerContent:
        """See :class:`Chat`."""
        return AnswerContent(self.tokenizer.decode(sampled))

    def with_tools(self, tools: str) -> Chat:
        """See :class:`Chat`."""
        raise ToolsUnsupported("a model that rrl builds cannot be offered tools; remove the key")

    def _encode(self, message: Message) -> tuple[int, ...]:
        if message.role == ASSISTANT:
            return (*self._answer_begins, *self.tokenizer.encode(message.content), *self._answer_ends)
        if (piece := self._pieces.get(message.role)) is None:
            raise UnknownRole(f"[model.tokenizer] chat has no piece for role {message.role!r}; it has"
                              f" {', '.join(self._pieces)}")  # fmt: skip
        return self.tokenizer.encode(piece.replace(CONTENT, message.content))


class TemplateTokenizer(Tokenizer, Protocol):
    """The tokenizer of a folder that has a chat template."""

    def render(self, messages: Sequence[Mapping[str, Any]], *, answer_begins: bool, tools: Sequence[Any] = ()) -> str:
        """Return a conversation as text, at whose end the model's answer begins if ``answer_begins``.

        Raises:
            ValueError: The folder has no chat template, or the template refuses the conversation.
        """
        ...

    def token_id(self, text: str) -> int | None:
        """Return the id of the token with a text; None if there is none."""
        ...

    def decode_all(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, with that of special tokens."""
        ...


class ToolFormat(Protocol):
    """How a model is offered tools, and how it calls them."""

    def bind(self, tools: str) -> Chat:
        """Return the chat in which the model is offered these tools (OpenAI's list as JSON)."""
        ...


class TemplateChat:
    """The chat template of a model's folder.

    Args:
        tokenizer: Tokenizer of the folder.
        tools: Tools that the template shows to the model: OpenAI's list, decoded.
        tool_parser: Name of the parser of tool calls; None: that of the model's family.

    Raises:
        ValueError: The folder has no chat template, or the template refuses a question and its answer.
    """

    def __init__(
        self, tokenizer: TemplateTokenizer, *, tools: Sequence[Any] = (), tool_parser: str | None = None
    ) -> None:
        self.tokenizer: Tokenizer = tokenizer
        self._folder_tokenizer = tokenizer
        self._tools = tools
        self._tool_parser = tool_parser
        self._tool_format: ToolFormat | None = None
        self._opening = threading.Lock()
        self._answer_ends = self._find_end()

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """See :class:`Chat`."""
        return self.tokenizer.encode(self._render(messages, answer_begins=True))

    def extend(
        self, context: tuple[int, ...], sampled: tuple[int, ...], messages: Sequence[Message], answered: int
    ) -> tuple[int, ...] | None:
        """See :class:`Chat`."""
        if self._answer_ends is None:
            return None
        before = self._render(messages[:answered], answer_begins=False)
        whole = self._render(messages, answer_begins=True)
        if not whole.startswith(before):
            return None
        rest = self.tokenizer.encode(self._answer_ends + whole.removeprefix(before))
        ends = bool(rest) and rest[0] in self.tokenizer.stop_tokens
        if _ended(sampled, self.tokenizer):
            return (*context, *sampled, *(rest[1:] if ends else rest))
        return (*context, *sampled, *(rest if ends else (self.tokenizer.eos, *rest)))

    def read(self, context: tuple[int, ...], sampled: tuple[int, ...]) -> AnswerContent:
        """See :class:`Chat`."""
        return AnswerContent(self.tokenizer.decode(sampled))

    def with_tools(self, tools: str) -> Chat:
        """See :class:`Chat`."""
        return self.open_tools().bind(tools)

    def open_tools(self) -> ToolFormat:
        """Return the format of tools, which is found once.

        Raises:
            ToolsUnsupported: Tools cannot be offered to this model.
        """
        from .tool_chat import open_tool_format  # imported here: most jobs have no tools, and it imports renderers

        with self._opening:
            if self._tool_format is None:
                self._tool_format = open_tool_format(self._folder_tokenizer, self._tool_parser)
            return self._tool_format

    def _render(self, messages: Sequence[Message], *, answer_begins: bool) -> str:
        given = [as_template_message(message) for message in messages]
        return self._folder_tokenizer.render(given, answer_begins=answer_begins, tools=self._tools)

    def _find_end(self) -> str | None:
        """Return what the template writes after the text of an answer; None if it rewrites what precedes the answer."""
        asked, answer = Message("user", "a"), Message(ASSISTANT, "b")
        before = self._render([asked], answer_begins=True)
        whole = self._render([asked, answer], answer_begins=False)
        start = before + answer.content
        return whole.removeprefix(start) if whole.startswith(start) else None


def as_template_message(message: Message) -> dict[str, Any]:
    """Return a message as chat templates expect it: arguments of tools are objects, and keys without a value absent."""
    made: dict[str, Any] = {"role": message.role, "content": message.content}
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
    except msgspec.DecodeError:
        return call.arguments


def _ended(sampled: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Return whether the model ended an answer itself."""
    return bool(sampled) and sampled[-1] in tokenizer.stop_tokens
