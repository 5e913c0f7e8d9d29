"""Encode conversations as tokens, by the chat template of a model's folder or by ``[model.tokenizer] chat``.

A conversation is encoded as a whole only if none of it was sampled. The part after a sampled answer is encoded by
itself, so that the answer's own tokens remain (:mod:`rrl.roles.endpoint.turns.turn_context`).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from ...config.model_folder import max_length
from ...core.run_spec import ModelSpec
from .conversation import (
    ASSISTANT,
    AnswerContent,
    Chat,
    Message,
    ModelChat,
    SystemPlaces,
    TemplateTokenizer,
    ToolFormat,
    ToolsUnsupported,
    ended,
)
from .system_messages import SYSTEM_ROLES, place_system
from .template_chat import TemplateChat, template_places
from .tokenizer import Tokenizer, open_tokenizer

CONTENT = "{content}"
"""Placeholder of a message's text in a value of ``[model.tokenizer] chat``."""


class UnknownRole(ValueError):
    """``[model.tokenizer] chat`` has no piece for the role of a message."""


def open_chat(model: ModelSpec) -> ModelChat:
    """Open tokenizer and chat template of a model.

    Raises:
        ValueError: The tokenizer is unusable, there is no chat template, or ``[model] tool_parser`` cannot be used.
    """
    if model.path is None:
        if model.tokenizer is None or model.tokenizer.chat is None:
            raise ValueError("[model.tokenizer] needs `chat`: a piece of text for the messages of each role")
        return PieceChat(open_tokenizer(model), model)
    from .hf_tokenizer import FolderTokenizer  # imported here: only the model of a folder needs the package tokenizers

    tokenizer = open_tokenizer(model)
    assert isinstance(tokenizer, FolderTokenizer)
    with suppress(ValueError):  # the folder does not say how long a text may be
        tokenizer.limit_text(max_length(model.path, model.max_length))
    chat = FolderChat(tokenizer, model)
    if model.tool_parser is not None:
        chat.open_tools()
    return chat


class PieceChat:
    """The chat that ``[model.tokenizer] chat`` defines by one piece of text for each role.

    A message is encoded as its role's piece, in which the text of the message replaces ``{content}``. A sampled answer
    takes the place of ``{content}`` in the assistant's piece. The end of sequence follows the answer, before the rest
    of the piece.

    Args:
        tokenizer: The tokenizer.
        model: The model, with the piece of each role, which contains ``{content}`` once. If the assistant has no piece,
            an answer is encoded as it is.
    """

    def __init__(self, tokenizer: Tokenizer, model: ModelSpec) -> None:
        assert model.tokenizer is not None
        self.tokenizer, self.model = tokenizer, model
        self._pieces = {ASSISTANT: CONTENT, **(model.tokenizer.chat or {})}
        shown = frozenset(SYSTEM_ROLES) & self._pieces.keys()
        self._places = SystemPlaces(shown, shown)
        before, _, after = self._pieces[ASSISTANT].partition(CONTENT)
        self._answer_begins = tokenizer.encode(before)
        self._answer_ends = (tokenizer.eos, *tokenizer.encode(after))

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the tokens of a conversation, at whose end the model's answer begins."""
        return self._encode_all(messages)

    def extend(
        self, context: tuple[int, ...], sampled: tuple[int, ...], messages: Sequence[Message], answered: int
    ) -> tuple[int, ...] | None:
        """Return the tokens of a conversation that continues after an answer (:meth:`.conversation.Chat.extend`)."""
        end = self._answer_ends[1:] if ended(sampled, self.tokenizer) else self._answer_ends
        return (*context, *sampled, *end, *self._encode_all(messages[answered:], begins=False))

    def read(self, context: tuple[int, ...], sampled: tuple[int, ...]) -> AnswerContent:
        """Return the content of an answer that was sampled after ``context``."""
        return AnswerContent(self.tokenizer.decode(sampled))

    def with_tools(self, tools: str) -> Chat:
        """Raise ToolsUnsupported, because a model that rrl builds cannot be offered tools."""
        raise ToolsUnsupported("a model that rrl builds cannot be offered tools; remove the key")

    def _encode_all(self, messages: Sequence[Message], begins: bool = True) -> tuple[int, ...]:
        placed = place_system(messages, self._places, begins)
        return (*(token for message in placed for token in self._encode(message)), *self._answer_begins)

    def _encode(self, message: Message) -> tuple[int, ...]:
        if message.role == ASSISTANT:
            return (*self._answer_begins, *self.tokenizer.encode(message.content), *self._answer_ends)
        piece = self._pieces.get(message.role)
        if piece is None:
            raise UnknownRole(
                f"[model.tokenizer] chat has no piece for role {message.role!r}; it has {', '.join(self._pieces)}"
            )
        return self.tokenizer.encode(piece.replace(CONTENT, message.content))


class FolderChat:
    """The chat of a model's folder.

    Args:
        tokenizer: Tokenizer of the folder.
        model: The model, with the name of the parser of tool calls; None for the parser of the model's family.

    Raises:
        ValueError: The folder has no chat template, or the template cannot render a user's message and an answer to it.
    """

    def __init__(self, tokenizer: TemplateTokenizer, model: ModelSpec) -> None:
        self.tokenizer, self.model = tokenizer, model
        self._tool_format: ToolFormat | None = None
        self._opening = threading.Lock()
        template = TemplateChat(tokenizer, template_places(tokenizer))
        self.prompt = template.prompt
        self.extend = template.extend
        self.read = template.read

    def with_tools(self, tools: str) -> Chat:
        """Return the chat for conversations with tools (:meth:`.conversation.ModelChat.with_tools`)."""
        return self.open_tools()(msgspec.json.decode(tools))

    def open_tools(self) -> ToolFormat:
        """Return the format of tools; the first call of this method finds it, and later calls return the same one.

        Raises:
            ToolsUnsupported: Tools cannot be offered to this model.
        """
        from .tool_chat import open_tool_format  # imported here: the module imports renderers, and few jobs have tools

        with self._opening:
            if self._tool_format is None:
                self._tool_format = open_tool_format(self.tokenizer, self.model.tool_parser)
            return self._tool_format
