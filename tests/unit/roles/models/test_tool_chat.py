from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrl.core.run_spec import ModelSpec, TokenizerSpec
from rrl.roles.models.chat import open_chat
from rrl.roles.models.conversation import Chat, Message, ModelChat, ToolCall, ToolsUnsupported
from rrl.roles.models.tool_chat import FamilyChat, ParsedChat
from rrl.tests.support.roles.endpoint.tool_folders import END, PLAIN_TEMPLATE, make

TOOLS = json.dumps([{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}])
ASKED = Message("user", "what is 12?")
CALLED = Message("assistant", "", tool_calls=(ToolCall("call_1", "add", '{"a": 12}'),))
RESULT = Message("tool", "it is 12", tool_call_id="call_1")
CALL_TEXT = '<tool_call>\n{"name": "add", "arguments": {"a": 12}}\n</tool_call>'


def opened(folder: Path, parser: Literal["qwen3"] | None = None) -> ModelChat:
    return open_chat(ModelSpec(str(folder), chat=True, tool_parser=parser))


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return opened(make(tmp_path_factory.mktemp("family"))).with_tools(TOOLS)


@pytest.fixture(scope="module")
def parsed(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    """Return the chat of a model whose vocabulary has no tokens for tags."""
    return opened(make(tmp_path_factory.mktemp("parsed"), tags=False), "qwen3").with_tools(TOOLS)


@pytest.fixture(params=["family", "parsed"])
def chat(request: pytest.FixtureRequest) -> Chat:
    made: Chat = request.getfixturevalue(request.param)
    return made


def drifting(chat: Chat, text: str) -> tuple[int, ...]:
    """Return tokens of a text as a model may sample them.

    Each ``12`` is two tokens, ``1`` and ``2``. The last token is the end of the answer.
    """
    pieces = [chat.tokenizer.encode(piece) for piece in text.split("12")]
    one_by_one = chat.tokenizer.encode("1") + chat.tokenizer.encode("2")
    tokens = pieces[0] + tuple(token for piece in pieces[1:] for token in (*one_by_one, *piece))
    return (*tokens, *chat.tokenizer.encode(END))


def test_tool_family_is_recognised_by_its_template_or_needs_the_name_of_a_parser(family: Chat, parsed: Chat) -> None:
    assert isinstance(family, FamilyChat)
    assert isinstance(parsed, ParsedChat)
    conversation = [Message("system", "Be brief."), ASKED, CALLED, RESULT]
    written = family.tokenizer.decode(family.prompt(conversation)), parsed.tokenizer.decode(parsed.prompt(conversation))
    assert written[0] == written[1]


def test_tool_calls_in_an_answer_are_parsed_from_its_tokens(chat: Chat) -> None:
    context = chat.prompt([ASKED])
    read = chat.read(context, drifting(chat, CALL_TEXT))
    assert (read.content, read.calls) == ("", (("add", '{"a":12}'),))
    read = chat.read(context, drifting(chat, f"I look.\n{CALL_TEXT}\n{CALL_TEXT}"))
    assert (read.content.strip(), len(read.calls)) == ("I look.", 2)
    assert chat.read(context, drifting(chat, "12")).content == "12"


def test_unusable_tool_call_stays_text(chat: Chat) -> None:
    for text in (
        '<tool_call>\n{"name": "add", "arguments": [1]}\n</tool_call>',
        "<tool_call>\nadd(12)\n</tool_call>",
        '<tool_call>\n{"arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": 3, "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "add", "argu',
        f"{CALL_TEXT}<tool_call>",
    ):
        read = chat.read(chat.prompt([ASKED]), drifting(chat, text))
        assert (read.content, read.calls) == (text, ())


def test_reasoning_is_separated_and_tool_calls_within_it_are_ignored(family: Chat, parsed: Chat) -> None:
    text = f"<think>\nor {CALL_TEXT}?\n</think>\n\n{CALL_TEXT}"
    read = family.read(family.prompt([ASKED]), drifting(family, text))
    assert (read.content, read.reasoning.startswith("or"), len(read.calls)) == ("", True, 1)
    read = parsed.read(parsed.prompt([ASKED]), drifting(parsed, text))
    assert (read.content.endswith("</think>\n\n"), len(read.calls)) == (True, 1)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 265)), st.booleans())
def test_any_sampled_tokens_are_parsed_without_an_exception(
    family: Chat, parsed: Chat, tokens: list[int], tags: bool
) -> None:
    chat = family if tags else parsed
    sampled = tuple(token for token in tokens if token < chat.tokenizer.size)
    chat.read(chat.prompt([ASKED]), sampled)


def test_a_result_of_a_tool_follows_the_very_tokens_of_the_call(family: Chat) -> None:
    context, sampled = family.prompt([ASKED]), drifting(family, CALL_TEXT)
    extended = family.extend(context, sampled, [ASKED, CALLED, RESULT], 2)
    assert extended is not None
    assert extended[: len(context + sampled)] == context + sampled
    assert family.tokenizer.encode(CALL_TEXT) != sampled[:-1], (
        "the sampled tokens are those of the encoded text, so that this test proves nothing"
    )
    whole = family.prompt([ASKED, CALLED, RESULT])
    assert extended[len(context + sampled) :] == whole[-len(extended[len(context + sampled) :]) :]


def test_truncated_answer_gets_its_end_before_the_next_message(family: Chat) -> None:
    context, sampled = family.prompt([ASKED]), drifting(family, "12")[:-1]
    answered = [ASKED, Message("assistant", "12"), Message("tool", "and?")]
    extended = family.extend(context, sampled, answered, 2)
    assert extended is not None
    assert extended[len(context) :][: len(sampled) + 1] == (*sampled, *family.tokenizer.encode(END))


@pytest.mark.parametrize("cut", [False, True])
def test_a_new_question_follows_the_very_tokens_of_the_answer(family: Chat, cut: bool) -> None:
    context, sampled = family.prompt([ASKED]), drifting(family, "it is 12")
    path = (*context, *(sampled[:-1] if cut else sampled))
    conversation = [ASKED, Message("assistant", "it is 12"), Message("user", "sure?")]
    extended = family.extend(context, path[len(context) :], conversation, 2)
    assert extended is not None
    assert extended[: len(path)] == path
    whole = family.prompt(conversation)
    assert family.tokenizer.decode_all(extended) == family.tokenizer.decode_all(whole)  # type: ignore[attr-defined]
    assert extended != whole, "the answer was sampled as it is encoded, so that this test proves nothing"


def test_reasoning_that_the_family_drops_at_a_new_question_keeps_no_tokens(family: Chat) -> None:
    sampled = drifting(family, "<think>\nbecause\n</think>\n\n12")
    conversation = [ASKED, Message("assistant", "12", reasoning="because"), Message("user", "sure?")]
    assert family.extend(family.prompt([ASKED]), sampled, conversation, 2) is None
    assert "because" not in family.tokenizer.decode(family.prompt(conversation))


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_model_without_a_tool_parser_is_refused_with_the_key_and_its_values(tmp_path: Path) -> None:
    with pytest.raises(ToolsUnsupported, match=r"tool_parser \(deepseek-v3, glm, qwen3, qwen3.5\)"):
        opened(make(tmp_path, PLAIN_TEMPLATE, tags=False)).with_tools(TOOLS)
    with pytest.raises(ToolsUnsupported, match="rrl builds"):
        open_chat(ModelSpec(tokenizer=TokenizerSpec(("1",), chat={"user": "{content}"}))).with_tools(TOOLS)


def test_parser_for_a_template_without_tools_is_a_mistake_of_the_job(tmp_path: Path) -> None:
    with pytest.raises(ToolsUnsupported, match="does not show tools"):
        opened(make(tmp_path, PLAIN_TEMPLATE), "qwen3")


def test_a_job_without_tools_does_not_import_the_library(tmp_path: Path) -> None:
    program = f"""
import sys
import rrl.roles.endpoint.main
from rrl.core.run_spec import ModelSpec
from rrl.roles.models.chat import open_chat
from rrl.roles.models.conversation import Message
open_chat(ModelSpec({str(make(tmp_path))!r}, chat=True)).prompt([Message("user", "a")])
sys.exit("renderers" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
