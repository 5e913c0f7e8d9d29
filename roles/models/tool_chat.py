"""Encode conversations in which the model is offered tools, with the library ``renderers``.

The library knows the formats of some families of models: it renders their conversations, continues a sampled answer
without encoding it again, and reads the calls in an answer. The name of a model's folder does not show the family of
the model. Therefore the chat template of the folder is tested: the model belongs to a family if the family's renderer
and the template write the same tokens for some conversations.

For a model of no known family, ``[model] tool_parser`` must name a parser of the library, which reads the calls. The
chat template of the folder then renders the conversations.
"""

from __future__ import annotations

import logging
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import msgspec

from ...config.model_folder import TextTooLong
from .conversation import (
    ASSISTANT,
    MAX_ARGUMENTS_DEPTH,
    AnswerContent,
    Message,
    SystemPlaces,
    TemplateTokenizer,
    ToolCall,
    ToolFormat,
    ToolsUnsupported,
    as_template_messages,
    is_deeper,
)
from .system_messages import find_places, place_system
from .template_chat import TemplateChat, template_places

try:
    import renderers
    from renderers import base as library
    from renderers import parsers
except ImportError as error:
    raise ToolsUnsupported(f"offering tools requires the packages of rrl's extra endpoint: {error}") from None

_log = logging.getLogger("rrl.endpoint")

_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks up a word.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
_PROBE_CALL = Message(ASSISTANT, "", tool_calls=(ToolCall("call_1", "look_up", '{"word": "heat"}'),))
_PROBES = (
    (Message("system", "Be brief."), Message("user", "What is heat?")),
    (Message("user", "What is heat?"), _PROBE_CALL, Message("tool", "energy", "look_up", tool_call_id="call_1")),
    (Message("user", "a"), Message(ASSISTANT, "b"), Message("user", "c")),
)
"""Conversations that a family's renderer and the folder's template must encode alike."""
_NEEDED_TOKENS = {"gpt-oss": "<|channel|>"}
"""Token that a model's vocabulary must have, by family. Without this token, the family's renderer is not tried. The
renderer of gpt-oss has such a token, because this renderer downloads a vocabulary when it is opened."""
_FIRST_TAG = 0x110000
"""Token id of the first tag that a :class:`_TextTokenizer` knows. It is the first number above all code points, because
the token id of a character is its code point."""
_REASONING_END = "</think>"
"""Tag that ends the reasoning of an answer. Text in the reasoning is never a tool call."""


def open_tool_format(tokenizer: TemplateTokenizer, parser: str | None) -> ToolFormat:
    """Return the format in which a model is offered tools.

    Args:
        tokenizer: Tokenizer of the model's folder.
        parser: Name of a parser of the library ``renderers`` that reads what the folder's template writes; None for the
            parser of the model's family.

    Raises:
        ToolsUnsupported: Tools cannot be offered to this model.
    """
    places = template_places(tokenizer)
    if parser is not None:
        asked = as_template_messages([Message("user", "a")], tokenizer.takes_parts)
        shown = tokenizer.render(asked, answer_begins=True, tools=[_PROBE_TOOL])
        if _PROBE_TOOL["function"]["name"] not in shown:  # type: ignore[index]
            raise ToolsUnsupported(
                "[model] tool_parser: the chat template of the folder does not show tools to the"
                " model; add a chat_template.jinja that does, or remove the key"
            )
        return partial(ParsedChat, tokenizer, parser, places)
    for name in _candidates(tokenizer):
        if (renderer := _family_renderer(name, tokenizer, places)) is not None:
            _log.info("tools are offered in the format of the model family %s", name)
            return partial(FamilyChat, tokenizer, renderer, _family_places(tokenizer, renderer, places))
    names = ", ".join(sorted(parsers.TOOL_PARSERS))
    raise ToolsUnsupported(
        f"no parser for tool calls is known for the chat template of this model; set [model]"
        f" tool_parser ({names}), or call without tools"
    )


def _candidates(tokenizer: TemplateTokenizer) -> Iterator[str]:
    """Yield the names of the families whose renderers are tried; see :data:`_NEEDED_TOKENS`."""
    for name in dict.fromkeys(library.MODEL_RENDERER_MAP.values()):
        needed = _NEEDED_TOKENS.get(name)
        if needed is None or tokenizer.token_id(needed) is not None:
            yield name


def _family_renderer(name: str, tokenizer: TemplateTokenizer, places: SystemPlaces) -> Any:
    """Return the renderer of a family if it writes what the folder's template writes; otherwise None."""
    given = _LibraryTokenizer(tokenizer)
    template = TemplateChat(tokenizer, places, tools=[_PROBE_TOOL])
    config = renderers.config_from_name(name)
    thinking = [{"enable_thinking": value} for value in (True, False) if "enable_thinking" in type(config).model_fields]
    for changes in ({}, *thinking):
        try:
            renderer = renderers.create_renderer(given, type(config)(**changes))
            if all(
                FamilyChat(tokenizer, renderer, places, [_PROBE_TOOL]).prompt(probe) == template.prompt(probe)
                for probe in _PROBES
            ):
                return renderer
        except Exception:  # the model is of another family: tokens are missing, or a conversation is refused
            _log.debug("tools are not in the format of the model family %s", name, exc_info=True)
    return None


def _family_places(tokenizer: TemplateTokenizer, renderer: Any, given: SystemPlaces) -> SystemPlaces:
    """Return the places, of those of the template, at which a renderer shows messages of the system, too."""
    chat = FamilyChat(tokenizer, renderer, SystemPlaces(given.first, given.first), [_PROBE_TOOL])

    def show(messages: Sequence[Message]) -> str:
        answered = 1 + max((at for at, each in enumerate(messages) if each.role == ASSISTANT), default=-1)
        tokens = chat.prompt(messages)
        if answered:
            sampled = tokenizer.encode(messages[answered - 1].content or "1")
            tokens = chat.extend(chat.prompt(messages[: answered - 1]), sampled, messages, answered) or tokens
        return tokenizer.decode_all(tokens)

    found = find_places(given.first, show)
    return SystemPlaces(found.first, found.later & given.later)


class FamilyChat:
    """The chat, with tools, of a model whose family the library knows.

    Args:
        tokenizer: Tokenizer of the model's folder.
        renderer: The library's renderer of the family.
        places: The places at which the renderer shows messages of the system and of developers.
        tools: OpenAI's list of tools.
    """

    reads_context = True

    def __init__(self, tokenizer: TemplateTokenizer, renderer: Any, places: SystemPlaces, tools: Sequence[Any]) -> None:
        self.tokenizer = tokenizer
        self._renderer, self._places, self._tools = renderer, places, list(tools)

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the tokens of a conversation, at whose end the model's answer begins."""
        given = as_template_messages(place_system(messages, self._places), self.tokenizer.takes_parts)
        try:
            return tuple(self._renderer.render_ids(given, tools=self._tools, add_generation_prompt=True))
        except TextTooLong:
            raise
        except Exception as error:  # the library raises many kinds
            raise ValueError(f"the conversation cannot be encoded with tools: {error}") from None

    def extend(
        self, context: tuple[int, ...], sampled: tuple[int, ...], messages: Sequence[Message], answered: int
    ) -> tuple[int, ...] | None:
        """Return the tokens of a conversation that continues after an answer (:meth:`.conversation.Chat.extend`)."""
        placed = place_system(messages[answered:], self._places, begins=False)
        added = as_template_messages(placed, self.tokenizer.takes_parts)
        try:
            bridged = self._renderer.bridge_to_next_turn(list(context), list(sampled), added, tools=self._tools)
        except TextTooLong:
            raise
        except Exception as error:  # as above
            raise ValueError(f"the messages cannot be encoded with tools: {error}") from None
        path = (*context, *sampled)
        return _continued(path, self.prompt(messages), self.tokenizer) if bridged is None else tuple(bridged.token_ids)

    def read(self, context: tuple[int, ...], sampled: tuple[int, ...]) -> AnswerContent:
        """Return the content of an answer that was sampled after ``context``."""
        try:
            parsed = self._renderer.parse_response(list(sampled), tools=self._tools, prompt_ids=list(context))
            calls = _usable(parsed.tool_calls)
        except Exception:  # a model may write anything, and a parser may raise any exception
            calls = None
        if calls is None:
            return AnswerContent(self.tokenizer.decode(sampled))
        return AnswerContent(parsed.content or "", calls, parsed.reasoning_content or "")


def _continued(path: tuple[int, ...], whole: tuple[int, ...], tokenizer: TemplateTokenizer) -> tuple[int, ...] | None:
    """Return a conversation with the tokens of ``path`` for the same text at the beginning of ``whole``.

    The library continues no path with a user's message, since a family may then show earlier answers in another way.
    Return None if it does.
    """
    shared = next((at for at, pair in enumerate(zip(path, whole, strict=False)) if pair[0] != pair[1]), len(path))
    before, rest = tokenizer.decode_all(path[shared:]), whole[shared:]
    end = bisect_left(range(len(rest)), len(before), key=lambda count: len(tokenizer.decode_all(rest[:count])))
    return (*path, *rest[end:]) if tokenizer.decode_all(rest[:end]) == before else None


class ParsedChat:
    """The chat template of a folder with tools; tool calls are read from the text of an answer.

    Args:
        tokenizer: Tokenizer of the folder.
        parser: Name of the library's parser.
        places: What :func:`.template_chat.template_places` returns for this tokenizer.
        tools: OpenAI's list of tools, which the template shows.
    """

    reads_context = False

    def __init__(self, tokenizer: TemplateTokenizer, parser: str, places: SystemPlaces, tools: Sequence[Any]) -> None:
        chat = TemplateChat(tokenizer, places, tools=tools)
        self.tokenizer = tokenizer
        self.prompt = chat.prompt
        self.extend = chat.extend
        self._text = _TextTokenizer()
        self._parser = parsers.get_tool_parser(parser, self._text)

    def read(self, context: tuple[int, ...], sampled: tuple[int, ...]) -> AnswerContent:
        """Return the content of an answer that was sampled after ``context``."""
        stops = self.tokenizer.stop_tokens
        end = next((index for index, token in enumerate(sampled) if token in stops), len(sampled))
        reasoning, mark, rest = self.tokenizer.decode_all(sampled[:end]).rpartition(_REASONING_END)
        try:
            before, attempts = self._parser.extract(self._text.encode(rest))
            calls = _usable(attempts)
        except Exception:  # as above
            calls = None
        if not calls:
            return AnswerContent(self.tokenizer.decode(sampled))
        return AnswerContent(reasoning + mark + self._text.decode(before), calls)


def _usable(attempts: Sequence[Any]) -> tuple[tuple[str, str], ...] | None:
    """Return name and arguments of each call in an answer; None if any call is invalid.

    With None, the agent gets the answer as text, so that it sees what the model wrote.
    """
    if not all(
        attempt.name and isinstance(attempt.name, str) and isinstance(attempt.arguments, dict) for attempt in attempts
    ):
        return None
    for attempt in attempts:
        attempt.name.encode()  # half a character, which JSON can write, is an error, as in the arguments
        if is_deeper(attempt.arguments, MAX_ARGUMENTS_DEPTH):
            return None
    return tuple((attempt.name, msgspec.json.encode(attempt.arguments).decode()) for attempt in attempts)


class _TextTokenizer:
    """Encodes text for a parser of the library: one token per tag that the parser knows, one per other character.

    So the parser reads calls from the text of an answer, even if the model's vocabulary has no token for a tag.
    """

    unk_token_id = None

    def __init__(self) -> None:
        self._tags: list[str] = []

    def convert_tokens_to_ids(self, tag: str) -> int:
        """Return the token of a tag; the parser asks for all of its tags when it is created."""
        if tag not in self._tags:
            self._tags.append(tag)
        return _FIRST_TAG + self._tags.index(tag)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        pieces = re.split(f"({'|'.join(map(re.escape, self._tags))})", text)
        return [
            token
            for index, piece in enumerate(pieces)
            for token in ([self.convert_tokens_to_ids(piece)] if index % 2 else map(ord, piece))
        ]

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of tokens."""
        return "".join(self._tags[token - _FIRST_TAG] if token >= _FIRST_TAG else chr(token) for token in tokens)


class _LibraryTokenizer:
    """The tokenizer of a folder, with the methods that the library's renderers call.

    Args:
        tokenizer: Tokenizer of the folder.
    """

    name_or_path = ""
    unk_token_id = None
    all_special_tokens: tuple[str, ...] = ()

    def __init__(self, tokenizer: TemplateTokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos

    def encode(self, text: str, **_: Any) -> list[int]:
        """Return the tokens of a text, with nothing added."""
        return list(self._tokenizer.encode(text))

    def decode(self, tokens: int | Sequence[int], **_: Any) -> str:
        """Return the text of tokens, including the text of special tokens."""
        return self._tokenizer.decode_all([tokens] if isinstance(tokens, int) else tokens)

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Return the ids of tokens; None for a token that the vocabulary lacks."""
        if isinstance(tokens, str):
            return self._tokenizer.token_id(tokens)
        return [self._tokenizer.token_id(token) for token in tokens]
