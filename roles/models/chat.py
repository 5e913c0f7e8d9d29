"""Conversations as tokens: the chat template of a model's folder, or the pieces of ``[model.tokenizer] chat``.

A conversation is encoded as a whole only where nothing of it was sampled. What follows a sampled answer is encoded by
itself, so that the answer's own tokens remain (:mod:`rrl.roles.endpoint.turn_context`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from ...core.run_spec import ModelSpec
from .tokenizer import Tokenizer, open_tokenizer

ASSISTANT = "assistant"
"""Role of the messages that the model answers with."""
CONTENT = "{content}"
"""Place of a message's text in a piece of ``[model.tokenizer] chat``."""


class Message(Struct, frozen=True, omit_defaults=True):
    """A message of a conversation."""

    role: str
    content: str
    name: str = ""


class UnknownRole(ValueError):
    """``[model.tokenizer] chat`` has no piece for the role of a message."""


class Chat(Protocol):
    """Converts conversations to tokens."""

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

    def continuation(self, messages: Sequence[Message], answered: int) -> tuple[int, ...] | None:
        """Return the tokens between the end of an answer's text and the beginning of the next answer.

        The first of them is the token that ends the answer.

        Args:
            messages: A conversation.
            answered: Number of its messages up to the answer, which is the last of them.

        Returns:
            The tokens; None if the template writes the beginning of the conversation differently because of what
                follows.

        Raises:
            ValueError: The messages cannot be encoded.
        """
        ...


def open_chat(model: ModelSpec) -> Chat:
    """Open tokenizer and chat template of a model.

    Raises:
        ValueError: The tokenizer is unusable, or there is no chat template.
    """
    if model.path is None:
        if model.tokenizer is None or model.tokenizer.chat is None:
            raise ValueError("[model.tokenizer] needs `chat`: a piece of text for the messages of each role")
        return PieceChat(open_tokenizer(model), model.tokenizer.chat)
    from .hf_tokenizer import FolderTokenizer  # imported here: a built model does not need tokenizers

    tokenizer = open_tokenizer(model)
    assert isinstance(tokenizer, FolderTokenizer)
    return TemplateChat(tokenizer)


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

    def continuation(self, messages: Sequence[Message], answered: int) -> tuple[int, ...] | None:
        """See :class:`Chat`."""
        return (*self._answer_ends, *self.prompt(messages[answered:]))

    def _encode(self, message: Message) -> tuple[int, ...]:
        if message.role == ASSISTANT:
            return (*self._answer_begins, *self.tokenizer.encode(message.content), *self._answer_ends)
        if (piece := self._pieces.get(message.role)) is None:
            raise UnknownRole(f"[model.tokenizer] chat has no piece for role {message.role!r}; it has"
                              f" {', '.join(self._pieces)}")  # fmt: skip
        return self.tokenizer.encode(piece.replace(CONTENT, message.content))


class TemplateTokenizer(Tokenizer, Protocol):
    """The tokenizer of a folder that has a chat template."""

    def render(self, messages: Sequence[Mapping[str, str]], *, answer_begins: bool) -> str:
        """Return a conversation as text, at whose end the model's answer begins if ``answer_begins``.

        Raises:
            ValueError: The folder has no chat template, or the template refuses the conversation.
        """
        ...


class TemplateChat:
    """The chat template of a model's folder.

    Args:
        tokenizer: Tokenizer of the folder.

    Raises:
        ValueError: The folder has no chat template, or the template refuses a question and its answer.
    """

    def __init__(self, tokenizer: TemplateTokenizer) -> None:
        self.tokenizer: Tokenizer = tokenizer
        self._render = tokenizer.render
        self._answer_ends = self._find_end()

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """See :class:`Chat`."""
        return self.tokenizer.encode(self._render(_plain(messages), answer_begins=True))

    def continuation(self, messages: Sequence[Message], answered: int) -> tuple[int, ...] | None:
        """See :class:`Chat`."""
        if self._answer_ends is None:
            return None
        before = self._render(_plain(messages[:answered]), answer_begins=False)
        whole = self._render(_plain(messages), answer_begins=True)
        if not whole.startswith(before):
            return None
        tokens = self.tokenizer.encode(self._answer_ends + whole.removeprefix(before))
        ends = bool(tokens) and tokens[0] in self.tokenizer.stop_tokens
        return tokens if ends else (self.tokenizer.eos, *tokens)

    def _find_end(self) -> str | None:
        """Return what the template writes after the text of an answer; None if it rewrites what precedes the answer."""
        asked, answer = Message("user", "a"), Message(ASSISTANT, "b")
        before = self._render(_plain([asked]), answer_begins=True)
        whole = self._render(_plain([asked, answer]), answer_begins=False)
        start = before + answer.content
        return whole.removeprefix(start) if whole.startswith(start) else None


def _plain(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Return messages as chat templates expect them."""
    return [
        {"role": message.role, "content": message.content} | ({"name": message.name} if message.name else {})
        for message in messages
    ]
