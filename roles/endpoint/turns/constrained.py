"""What a constraint does to a turn: the model is asked for it in the conversation, and the engine may also mask.

A mask is a grammar in Lark's form, which llguidance reads in all engines. A grammar of tool calls is written from a
call that the model's own format renders, so there is no table of formats. All functions here are pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import cast

import msgspec

from ...models.conversation import ASSISTANT, Chat, Message, TemplateTokenizer, ToolCall
from ..calls.constraint import ANY_OBJECT, Constraint, asked

MAX_GRAMMAR_CHARS = 2**17
"""Maximum number of characters of a grammar, which the store's log has for each turn. It takes an engine 0.1 s to read
such a grammar."""
_JSON_OPTIONS = {"whitespace_pattern": r"[ \n]{0,16}", "coerce_one_of": True}
"""llguidance's options: a model whose next token may always be a space may never end, and ``oneOf`` is read as
``anyOf``."""
_ARGUMENTS = ('{"argument": "value"}', '{"argument":"value"}')
"""Arguments of the call that is rendered, as formats with arguments in JSON write them."""
_TAG = re.compile(r"(<[^<>\s]+>|\[[A-Z_]+\])")
"""What may be a token of its own: llguidance would accept its characters as well, which the format may not."""
_THOUGHT, _THOUGHT_ENDS = "<think>", "</think>"


class AskedChat:
    """The chat of a call that asks for a constraint.

    Args:
        chat: The chat, with the tools.
        constraint: The constraint.
        has_tools: True if the model is offered tools.
    """

    def __init__(self, chat: Chat, constraint: Constraint, *, has_tools: bool) -> None:
        self.tokenizer, self.read, self.reads_context = chat.tokenizer, chat.read, chat.reads_context
        self._chat, self._constraint, self._has_tools = chat, constraint, has_tools

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the tokens of a conversation, at whose end the model's answer begins."""
        return self._chat.prompt(self._asked(messages))

    def extend(
        self, context: tuple[int, ...], sampled: tuple[int, ...], messages: Sequence[Message], answered: int
    ) -> tuple[int, ...] | None:
        """Return the tokens of a conversation that continues after an answer (:meth:`...Chat.extend`)."""
        whole = self._asked(messages)
        return self._chat.extend(context, sampled, whole, answered + len(whole) - len(messages))

    def _asked(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        return asked(messages, self._constraint, has_tools=self._has_tools)


def grammar_of(constraint: Constraint, tools: str, chat: Chat) -> str:
    """Return the grammar that allows only answers of a constraint.

    Args:
        constraint: The constraint.
        tools: OpenAI's list of the tools that the answer may call, as JSON; empty if it may call none.
        chat: The chat, with the tools.

    Raises:
        ValueError: There is no such grammar; the text says why.
    """
    offered = [tool["function"] for tool in msgspec.json.decode(tools)] if tools else []
    allowed = [tool for tool in offered if tool["name"] in constraint.names or not constraint.names]
    if offered and not (constraint.must_call or constraint.schema):
        raise ValueError("allowed_tools can only be masked with mode required")
    answers = [_json(constraint.schema)] if constraint.schema and not constraint.must_call else []
    thought = ""
    if offered:
        begins, between, ends = _frame(chat, allowed[0]["name"])
        for tool in allowed:
            schema = msgspec.json.encode(tool.get("parameters") or msgspec.Raw(ANY_OBJECT.encode())).decode()
            parts = (begins, _text(tool["name"]), between, _json(schema), ends)
            answers.append(" ".join(filter(None, parts)))
        thought = _thought(cast(TemplateTokenizer, chat.tokenizer), chat)
    begin = "thought answer" if thought else "answer"
    grammar = "\n".join([f"start: {begin}", f"answer: {' | '.join(answers)}", thought])
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise ValueError(f"schema and tools take {len(grammar)} characters as a grammar, at most {MAX_GRAMMAR_CHARS}")
    return grammar


def compile_problem(grammar: str) -> str:
    """Return in one line why llguidance cannot read a grammar; empty if it can, or is not installed."""
    try:
        from llguidance import LLMatcher
    except ImportError:
        return ""
    problem = str(LLMatcher.validate_grammar(grammar))
    return " ".join(problem.partition("\n")[0].split()) or problem


def key_of(constraint: Constraint, wire: str) -> str:
    """Return the key of a request from which a constraint comes, for errors."""
    schema_keys = {"responses": "text.format", "messages": "output_config.format"}
    forces = constraint.must_call or constraint.names
    return "tool_choice" if forces else schema_keys.get(wire, "response_format")


def _json(schema: str) -> str:
    """Return the terms of JSON that conforms to a schema."""
    made = msgspec.json.decode(schema)
    return f"%json {msgspec.json.encode(made | {'x-guidance': _JSON_OPTIONS}).decode()}"


def _text(text: str) -> str:
    return msgspec.json.encode(text).decode()


def _frame(chat: Chat, name: str) -> tuple[str, str, str]:
    """Return what the format of a model writes before the name, between name and arguments, and at the end of a call.

    Raises:
        ValueError: The arguments are not in JSON, or the format cannot be read.
    """
    tokenizer = cast(TemplateTokenizer, chat.tokenizer)
    question, result = Message("user", "a"), Message("tool", "b", name, tool_call_id="call_1")
    call = Message(ASSISTANT, "", tool_calls=(ToolCall("call_1", name, _ARGUMENTS[0]),))
    begun = tokenizer.decode_all(chat.prompt([question]))
    if begun.rstrip().endswith(_THOUGHT):  # such a template leaves reasoning out of earlier answers
        begun = begun.rstrip().removesuffix(_THOUGHT)
    text = tokenizer.decode_all(chat.prompt([question, call, result])).removeprefix(begun)
    _, closed, after = text.partition(_THOUGHT_ENDS)
    text = after.lstrip("\n") if closed else text
    arguments = next((each for each in _ARGUMENTS if each in text), "\0")
    head, _, rest = text.partition(arguments)
    begins, _, between = head.partition(name)
    sampled = list(tokenizer.encode(rest))
    count = next((place for place, token in enumerate(sampled) if token in tokenizer.stop_tokens), len(sampled))
    ends = tokenizer.decode_all(sampled[:count])
    read = chat.read((), tokenizer.encode(f"{begins}{name}{between}{arguments}{ends}"))
    if count == len(sampled) or [each[0] for each in read.calls] != [name]:
        raise ValueError("no mask is known for the form in which this model calls tools")
    return _pieces(begins, tokenizer), _pieces(between, tokenizer), _pieces(ends, tokenizer)


def _pieces(text: str, tokenizer: TemplateTokenizer) -> str:
    """Return the terms of a text, in which a tag that is a token stands for this token."""
    pieces = [piece for piece in _TAG.split(text) if piece]
    tokens = [tokenizer.token_id(piece) if _TAG.fullmatch(piece) else None for piece in pieces]
    return " ".join(
        _text(piece) if token is None else f"<[{token}]>" for piece, token in zip(pieces, tokens, strict=True)
    )


def _thought(tokenizer: TemplateTokenizer, chat: Chat) -> str:
    """Return the rule of reasoning that the template has already begun; empty if an answer begins otherwise."""
    begun = tokenizer.decode_all(chat.prompt([Message("user", "a")])).rstrip().endswith(_THOUGHT)
    end = tokenizer.token_id(_THOUGHT_ENDS)
    return f"thought: /(?s:.*)/ <[{end}]> /\\n{{0,2}}/\n" if begun and end is not None else ""
