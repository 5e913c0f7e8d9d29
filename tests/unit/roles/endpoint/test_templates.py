"""Agents get the prompt that the model's chat template makes of all of their messages, as at vLLM, or an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from rrl.core.run_spec import ModelSpec
from rrl.roles.models.chat import open_chat
from rrl.roles.models.hf_tokenizer import FolderTokenizer
from rrl.tests.support.roles.endpoint.served import Scene
from rrl.tests.support.roles.endpoint.tool_folders import END, PLAIN_TEMPLATE, TOOLS_TEMPLATE, make

REPOSITORY = Path(__file__).parents[4]
SMOLLM2 = (REPOSITORY / "examples" / "smollm2" / "chat_template.jinja").read_text()
PARTS_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- for part in message.content %}{{ part.text | trim }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
DEVELOPER_TEMPLATE = PLAIN_TEMPLATE.replace(
    "message.role +", "('rules' if message.role == 'developer' else message.role) +"
)
LATEST_TEMPLATE = PLAIN_TEMPLATE.replace("in messages", "in messages[-2:]")
FIRST_SYSTEM_TEMPLATE = PLAIN_TEMPLATE.replace(
    "    {{- '<|im", "    {%- if message.role != 'system' or loop.first %}{{- '<|im", 1
).replace("<|im_end|>\\n' }}", "<|im_end|>\\n' }}{% endif %}", 1)
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}
CALL = '<tool_call>\n{"name": "Add", "arguments": {"a": 12}}\n</tool_call>'

FIRST_TOOLS_TEMPLATE = TOOLS_TEMPLATE.replace("(message.role == 'system' and not loop.first)", "false")
HOISTING_TEMPLATE = """\
{%- for message in messages if message.role == 'system' %}
    {{- '<|im_start|>system\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
""" + PLAIN_TEMPLATE.replace("in messages", "in messages if message.role != 'system'")
REFUSING_TEMPLATE = PLAIN_TEMPLATE.replace(
    "    {{- '<|im", "    {%- if message.role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{- '<|im", 1
)


def message(role: str, content: Any, **more: Any) -> Any:
    return {"role": role, "content": content, **more}


HELLO = message("user", "hello")


class TemplateScene(Scene):
    """An endpoint of a model with a chat template, whose answers are always the same."""

    def __init__(self, folder: Path) -> None:
        super().__init__(open_chat(ModelSpec(str(folder), chat=True)), max_new=200, max_length=8000)
        self.answers("fine")

    def answers(self, *texts: str, end: int | None = None) -> None:
        super().answers(*texts, end=self.chat.tokenizer.encode(END)[0])

    def prompt(self, *messages: Any, **more: Any) -> str:
        """Return the text of the context in which a conversation is answered."""
        self.create([*messages], **more)
        tokenizer = self.chat.tokenizer
        assert isinstance(tokenizer, FolderTokenizer)
        return tokenizer.decode_all(self.paths().context(self.opened[-1].id))

    def dropped(self, *messages: Any, **more: Any) -> str:
        """Return the name of the message that the endpoint refuses."""
        with pytest.raises(openai.BadRequestError, match="chat template drops this message") as raised:
            self.create([*messages], **more)
        return str(raised.value.param)


Open = Callable[[str], TemplateScene]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    scenes: list[TemplateScene] = []

    def open_scene(template: str) -> TemplateScene:
        scenes.append(TemplateScene(make(tmp_path / str(len(scenes)), template)))
        return scenes[-1]

    yield open_scene
    for scene in scenes:
        scene.server.stop()


# ── roles ────────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("template", "tools"),
    [
        (TOOLS_TEMPLATE, False),
        (TOOLS_TEMPLATE, True),
        (PLAIN_TEMPLATE, False),
        (SMOLLM2, False),
        (PARTS_TEMPLATE, False),
    ],
)
def test_developer_is_the_system_of_a_template_without_developers(opened: Open, template: str, tools: bool) -> None:
    scene, more = opened(template), {"tools": [TOOL]} if tools else {}
    prompt = scene.prompt(message("developer", "Be brief."), HELLO, **more)
    assert "Be brief." in prompt
    assert prompt == scene.prompt(message("system", "Be brief."), HELLO, **more)
    both = message("system", "Be kind."), message("developer", "Be brief."), HELLO
    assert scene.prompt(*both, **more) == scene.prompt(message("system", "Be kind.\n\nBe brief."), HELLO, **more)


def test_developer_of_a_template_with_developers_is_kept(opened: Open) -> None:
    prompt = opened(DEVELOPER_TEMPLATE).prompt(message("developer", "Be brief."), HELLO)
    assert "<|im_start|>rules\nBe brief." in prompt


def test_message_that_the_template_drops_is_refused_by_its_place(opened: Open) -> None:
    scene = opened(TOOLS_TEMPLATE)
    for _ in range(2):
        assert scene.dropped(HELLO, message("critic", "No."), HELLO) == "messages[1]"
        assert scene.dropped(message("critic", "hello"), HELLO) == "messages[0]", "an equal message hides the drop"
        assert scene.dropped(HELLO, message("critic", "No."), tools=[TOOL]) == "messages[1]"
    assert "No." in opened(PLAIN_TEMPLATE).prompt(HELLO, message("critic", "No."))
    assert scene.opened == []


def test_message_that_the_template_drops_only_at_its_place_is_refused(opened: Open) -> None:
    latest = opened(LATEST_TEMPLATE)
    latest.prompt(HELLO, HELLO)
    assert latest.dropped(HELLO, HELLO, HELLO) == "messages[0]"


@pytest.mark.parametrize(
    ("template", "later"),
    [
        (TOOLS_TEMPLATE, "<|im_start|>user\nhello<|im_end|>\n<|im_start|>system\nNow.<|im_end|>\n"),
        (FIRST_SYSTEM_TEMPLATE, "<|im_start|>user\nhello\n\nNow.<|im_end|>\n"),
        (HOISTING_TEMPLATE, "<|im_start|>user\nhello\n\nNow.<|im_end|>\n"),
    ],
)
def test_later_system_message_stays_at_its_place_or_joins_its_neighbour(
    opened: Open, template: str, later: str
) -> None:
    scene = opened(template)
    for role in ("system", "developer"):
        prompt = scene.prompt(message("system", "Be kind."), HELLO, message(role, "Now."))
        assert prompt == f"<|im_start|>system\nBe kind.<|im_end|>\n{later}<|im_start|>assistant\n"


def test_first_user_message_takes_the_system_text_of_a_template_without_system(opened: Open) -> None:
    scene = opened(REFUSING_TEMPLATE)
    prompt = scene.prompt(message("system", "Be kind."), message("developer", "Be brief."), HELLO)
    assert prompt == "<|im_start|>user\nBe kind.\n\nBe brief.\n\nhello<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("template", [TOOLS_TEMPLATE, FIRST_TOOLS_TEMPLATE])
def test_system_messages_within_a_conversation_keep_what_was_sampled(opened: Open, template: str) -> None:
    scene = opened(template)
    scene.answers(CALL, "fine")
    messages = [message("system", "Be kind."), HELLO]
    call = scene.create(messages, tools=[TOOL]).choices[0].message
    messages += [call, message("tool", "12", tool_call_id=call.tool_calls[0].id), message("system", "Hurry.")]
    messages += [scene.create(messages, tools=[TOOL]).choices[0].message, message("system", "Rest."), HELLO]
    scene.create(messages, tools=[TOOL])
    first, second, third = scene.opened
    assert (second.parent, third.parent) == (first.id, second.id)
    paths = scene.paths()
    assert (second.offset, third.offset) == (len(paths.path(first.id)), len(paths.path(second.id)))
    tokenizer = scene.chat.tokenizer
    assert isinstance(tokenizer, FolderTokenizer)
    text = tokenizer.decode_all(paths.context(second.id)[second.offset :])
    assert "Hurry." in text
    assert text.count("user") == 1, "a system's message begins no turn of the user"


def test_messages_without_content_and_answers_with_tool_calls_may_be_dropped(opened: Open) -> None:
    template = TOOLS_TEMPLATE.replace("{{- message.content }}", "{{- '' if message.tool_calls else message.content }}")
    scene = opened(template)
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    result = message("tool", "12", tool_call_id="a")
    scene.prompt(message("critic", ""), HELLO, message("assistant", "I add.", tool_calls=[call]), result)


# ── pieces of text ───────────────────────────────────────────────────────────────────────────────────────────────────
def text_parts(*texts: str) -> list[Any]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize("template", [TOOLS_TEMPLATE, PLAIN_TEMPLATE, SMOLLM2])
def test_pieces_are_joined_by_line_ends_for_a_template_of_texts(opened: Open, template: str) -> None:
    scene = opened(template)
    prompt = scene.prompt(message("user", text_parts("one", "two")))
    assert "user\none\ntwo<" in prompt
    assert prompt == scene.prompt(message("user", "one\ntwo"))
    assert scene.prompt(message("user", text_parts("one"))) == scene.prompt(message("user", "one"))


def test_template_of_pieces_joins_them_itself(opened: Open) -> None:
    scene = opened(PARTS_TEMPLATE)
    assert "user\nonetwo<" in scene.prompt(message("user", text_parts("one ", "two")))
    assert "user\none<" in scene.prompt(message("user", "one"))
    tokenizer = scene.chat.tokenizer
    assert isinstance(tokenizer, FolderTokenizer)
    assert "user\none<" in tokenizer.decode_all(tokenizer.prompt("one")), "the prompt of a task is dropped"


# ── what OpenAI's helpers send back ──────────────────────────────────────────────────────────────────────────────────
class Add(BaseModel):
    """Adds."""

    a: int


def test_second_turn_of_the_helpers_parse_and_stream_continues_the_first(opened: Open) -> None:
    scene = opened(TOOLS_TEMPLATE)
    scene.answers("fine", CALL)
    chat = scene.client().chat.completions
    tools = [openai.pydantic_function_tool(Add)]
    for more in ({}, {"tools": tools}):
        for streamed in (False, True):
            messages: list[Any] = [message("user", f"{len(scene.opened)}")]
            for _ in range(2):
                if streamed:
                    with chat.stream(model="any", messages=messages, **more) as stream:
                        reply = stream.get_final_completion()
                else:
                    reply = chat.parse(model="any", messages=messages, **more)
                answer = reply.choices[0].message
                results = [message("tool", "12", tool_call_id=call.id) for call in answer.tool_calls or []] or [HELLO]
                messages += [answer, *results]
            first, second = scene.opened[-2:]
            assert second.parent == first.id
            assert second.offset == len(scene.paths().path(first.id))


@pytest.mark.parametrize("empty", [None, "", [], {}])
def test_key_without_a_value_is_ignored_and_with_a_value_refused(opened: Open, empty: Any) -> None:
    scene = opened(PLAIN_TEMPLATE)
    assert scene.prompt(message("user", "a", of_tomorrow=empty)) == scene.prompt(message("user", "a"))
    with pytest.raises(openai.BadRequestError) as raised:
        scene.create([message("user", "a", of_tomorrow=[0])])
    assert raised.value.param == "messages[0].of_tomorrow"
