"""Render conversations with the chat template of a model's folder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .conversation import (
    ASSISTANT,
    SYSTEM,
    AnswerContent,
    Message,
    SystemPlaces,
    TemplateTokenizer,
    as_template_messages,
    ended,
)
from .system_messages import SYSTEM_ROLES, find_places, place_system
from .tokenizer import Tokenizer


def template_places(tokenizer: TemplateTokenizer) -> SystemPlaces:
    """Return the places at which a folder's template shows messages of the system and of developers."""

    def show(messages: Sequence[Message]) -> str:
        return tokenizer.render(as_template_messages(messages, tokenizer.takes_parts), answer_begins=True)

    return find_places(SYSTEM_ROLES if tokenizer.has_developer else (SYSTEM,), show)


class TemplateChat:
    """The chat template of a model's folder.

    Args:
        tokenizer: Tokenizer of the folder.
        places: What :func:`template_places` returns for this tokenizer.
        tools: Tools that the template shows to the model: OpenAI's list, decoded.

    Raises:
        ValueError: The folder has no chat template, or the template cannot render a user's message and an answer to it.
    """

    def __init__(self, tokenizer: TemplateTokenizer, places: SystemPlaces, *, tools: Sequence[Any] = ()) -> None:
        self.tokenizer: Tokenizer = tokenizer
        self._folder_tokenizer = tokenizer
        self._places, self._tools = places, tools
        self._answer_ends = self._find_end()

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the tokens of a conversation, at whose end the model's answer begins."""
        return self.tokenizer.encode(self._render(messages, answer_begins=True))

    def extend(
        self, context: tuple[int, ...], sampled: tuple[int, ...], messages: Sequence[Message], answered: int
    ) -> tuple[int, ...] | None:
        """Return the tokens of a conversation that continues after an answer (:meth:`.conversation.Chat.extend`)."""
        if self._answer_ends is None:
            return None
        before = self._render(messages[:answered], answer_begins=False)
        whole = self._render(messages, answer_begins=True)
        if not whole.startswith(before):
            return None
        rest = self.tokenizer.encode(self._answer_ends + whole.removeprefix(before))
        ends = bool(rest) and rest[0] in self.tokenizer.stop_tokens
        if ended(sampled, self.tokenizer):
            return (*context, *sampled, *(rest[1:] if ends else rest))
        return (*context, *sampled, *(rest if ends else (self.tokenizer.eos, *rest)))

    def read(self, context: tuple[int, ...], sampled: tuple[int, ...]) -> AnswerContent:
        """Return the content of an answer that was sampled after ``context``."""
        return AnswerContent(self.tokenizer.decode(sampled))

    def _render(self, messages: Sequence[Message], *, answer_begins: bool) -> str:
        tokenizer = self._folder_tokenizer
        given = as_template_messages(place_system(messages, self._places), tokenizer.takes_parts)
        return tokenizer.render(given, answer_begins=answer_begins, tools=self._tools)

    def _find_end(self) -> str | None:
        """Return the text that the template adds after an answer; None if the template also changes earlier text."""
        asked, answer = Message("user", "a"), Message(ASSISTANT, "b")
        before = self._render([asked], answer_begins=True)
        whole = self._render([asked, answer], answer_begins=False)
        start = before + answer.content
        return whole.removeprefix(start) if whole.startswith(start) else None
