"""Calls that want an answer of a schema, or a tool call, through OpenAI's real client."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from rrl.core.run_spec import ModelSpec
from rrl.roles.endpoint.calls.call import MAX_TOOLS, Policy
from rrl.roles.models.chat import open_chat
from rrl.tests.support.roles.endpoint import tool_folders
from rrl.tests.support.roles.endpoint.served import Scene

_USER: list[Any] = [{"role": "user", "content": "how long?"}]
_SCHEMA = {
    "type": "object",
    "properties": {"length": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["length"],
    "additionalProperties": False,
}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "length", "strict": True, "schema": _SCHEMA}}
_ENCODED = json.dumps(_SCHEMA, separators=(",", ":"))
_XML_CALLS = tool_folders.TOOLS_TEMPLATE.replace(
    """            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
""",
    """            {{- '<tool_call>\\n<function=' + call.function.name + '>\\n</function>\\n</tool_call>' }}
""",
)


def _tool(name: str = "measure") -> Any:
    return {"type": "function", "function": {"name": name, "parameters": _SCHEMA}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_folders.make(tmp_path_factory.mktemp("model"))


def _served(folder: Path, *, parser: Any = None, **policy: Any) -> Iterator[Scene]:
    chat = open_chat(ModelSpec(str(folder), chat=True, tool_parser=parser))
    made = Scene(chat, max_new=200, max_length=8000, policy=Policy(1.0, **policy))
    made.answers('{"length":3}')
    yield made
    made.server.stop()


@pytest.fixture
def scene(folder: Path) -> Iterator[Scene]:
    yield from _served(folder)


@pytest.fixture
def enforcing(folder: Path) -> Iterator[Scene]:
    yield from _served(folder, constraints="enforce")


def _context(scene: Scene, number: int) -> str:
    tokenizer: Any = scene.chat.tokenizer
    return str(tokenizer.decode_all(scene.paths().context(scene.opened[number].id)))


# ── ask ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_the_prompt_has_the_schema_and_the_answer_is_trained(scene: Scene) -> None:
    reply = scene.create(_USER, response_format=_FORMAT).choices[0].message
    asked = f"Answer with nothing but JSON that conforms to this JSON schema: {_ENCODED}"
    assert _context(scene, 0) == (
        f"<|im_start|>system\n{asked}<|im_end|>\n<|im_start|>user\nhow long?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert scene.opened[0].sampling is None
    scene.create([*_USER, reply, {"role": "user", "content": "and now?"}], response_format=_FORMAT)
    assert scene.opened[1].parent == scene.opened[0].id
    assert scene.opened[1].offset == len(scene.paths().path(scene.opened[0].id)), "the conversation was encoded anew"
    assert _context(scene, 1).count(asked) == 1


def test_another_constraint_within_a_conversation_is_a_branch(scene: Scene) -> None:
    system = {"role": "system", "content": "Be brief."}
    reply = scene.create([system, *_USER], response_format=_FORMAT).choices[0].message
    later = [system, *_USER, reply, {"role": "user", "content": "and now?"}]
    scene.create(later, response_format={"type": "json_object"})
    scene.create(later)
    begins = [_context(scene, number).partition("<|im_end|>")[0] for number in range(3)]
    assert begins == [
        f"<|im_start|>system\nBe brief.\n\nAnswer with nothing but JSON that conforms to this JSON schema: {_ENCODED}",
        "<|im_start|>system\nBe brief.\n\nAnswer with nothing but a JSON object.",
        "<|im_start|>system\nBe brief.",
    ]
    first = scene.opened[0]
    for turn in scene.opened[1:]:
        assert turn.offset < len(first.given), "an answer to another constraint was continued"


@pytest.mark.parametrize(
    ("choice", "sentence"),
    [
        ("required", "Call a tool."),
        ({"type": "function", "function": {"name": "weigh"}}, "Call the tool weigh."),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "weigh"}}]},
            },
            "Call no other tools than these: weigh.",
        ),
    ],
)
def test_the_prompt_demands_a_tool_call_in_the_system_part(scene: Scene, choice: Any, sentence: str) -> None:
    scene.answers('<tool_call>\n{"name": "weigh", "arguments": {"length": 1}}\n</tool_call>')
    tools = [_tool(), _tool("weigh")]
    reply = scene.create(_USER, tools=tools, tool_choice=choice).choices[0]
    assert reply.finish_reason == "tool_calls"
    assert sentence in _context(scene, 0).partition("<|im_end|>")[0]
    assert scene.opened[0].sampling is None


def test_a_large_call_is_asked_the_same_in_a_process(scene: Scene) -> None:
    long = [{"role": "user", "content": "a" * 5000}] * 4
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        scene.create(long, response_format=_FORMAT)
    tools = [_tool(f"measure_{number}") for number in range(MAX_TOOLS)]
    with pytest.raises(openai.BadRequestError, match="maximum context length"):  # and no other error
        scene.create(_USER, tools=tools, tool_choice="required")
    with pytest.raises(openai.BadRequestError, match="tools: 2049 tools are too many; at most 2048"):
        scene.create(_USER, tools=[*tools, _tool()])


# ── enforce ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def _samples(scene: Scene, number: int) -> str:
    """Return the text of an answer that the mask of a turn allows, of its first tokens where there is a choice."""
    import torch

    from rrl.roles.rollout.foreign_sampling import Masks

    sampling = scene.opened[number].sampling
    assert sampling is not None
    assert sampling.constraint is not None
    tokenizer: Any = scene.chat.tokenizer
    mask = Masks(tokenizer).begin(sampling.constraint, ())
    assert mask is not None, sampling.constraint
    made: list[int] = []
    while not made or made[-1] not in tokenizer.stop_tokens:
        made.append(int(mask.allowed(tokenizer.size, torch.device("cpu")).nonzero()[-1]))
        mask.take(made[-1])
    return str(tokenizer.decode_all(made[:-1]))


def test_an_enforced_answer_is_masked_and_also_asked_for(enforcing: Scene) -> None:
    pytest.importorskip("llguidance")
    enforcing.create(_USER, response_format=_FORMAT, temperature=1.0)
    enforcing.create(_USER)
    assert list(json.loads(_samples(enforcing, 0))) == ["length"]
    assert f"JSON schema: {_ENCODED}" in _context(enforcing, 0)
    assert enforcing.opened[1].sampling is None


@pytest.mark.parametrize("parser", [None, "qwen3"])
def test_an_enforced_tool_call_has_the_form_in_which_the_model_calls_tools(folder: Path, parser: str | None) -> None:
    pytest.importorskip("llguidance")
    for scene in _served(folder, parser=parser, constraints="enforce", foreign="context"):
        choice = {"type": "function", "function": {"name": "weigh"}}
        scene.create(_USER, tools=[_tool(), _tool("weigh")], tool_choice=choice, temperature=0.5)
        text = _samples(scene, 0)
        assert text.startswith('<tool_call>\n{"name": "weigh", "arguments": {')
        read = scene.chat.with_tools(json.dumps([_tool()])).read((), scene.chat.tokenizer.encode(text))
        ((name, arguments),) = read.calls
        assert (name, list(json.loads(arguments))) == ("weigh", ["length"])
        sampling = scene.opened[0].sampling
        assert sampling is not None
        assert sampling.temperature == 0.5


def test_an_answer_of_a_schema_may_also_call_a_tool(enforcing: Scene) -> None:
    pytest.importorskip("llguidance")
    enforcing.create(_USER, tools=[_tool()], response_format=_FORMAT)
    enforcing.create(_USER, tools=[_tool()], response_format=_FORMAT, tool_choice="none")
    assert _samples(enforcing, 0).startswith("<tool_call>")
    assert list(json.loads(_samples(enforcing, 1))) == ["length"]


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"not": {"type": "string"}}, "not"),
        ({"type": "string", "format": "colour"}, "colour"),
        ({"$ref": "#/$defs/missing"}, "missing"),
        ({"type": "string", "pattern": "("}, "regex"),
        ({"enum": ["a" * 2**17]}, "at most 131072"),
    ],
)
def test_a_schema_that_no_engine_can_enforce_is_refused_in_one_line(
    enforcing: Scene, schema: Any, problem: str
) -> None:
    pytest.importorskip("llguidance")
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match=problem) as raised:
        enforcing.create(_USER, response_format=wanted)
    assert raised.value.param == "response_format"
    assert "\n" not in raised.value.message
    assert enforcing.opened == []


def test_a_tool_call_of_an_unknown_form_cannot_be_enforced(tmp_path: Path) -> None:
    assert _XML_CALLS != tool_folders.TOOLS_TEMPLATE
    folder = tool_folders.make(tmp_path, _XML_CALLS)
    for scene in _served(folder, parser="qwen3.5", constraints="enforce"):
        with pytest.raises(openai.BadRequestError, match=r'tool_choice: no mask.*constraints = "ask"') as raised:
            scene.create(_USER, tools=[_tool()], tool_choice="required")
        assert raised.value.param == "tool_choice"
        scene.create(_USER, tools=[_tool()])


# ── refuse, and other sampling ───────────────────────────────────────────────────────────────────────────────────────
def test_a_job_may_refuse_constraints(folder: Path) -> None:
    for scene in _served(folder, constraints="refuse"):
        for key, value in (("response_format", _FORMAT), ("tool_choice", "required")):
            with pytest.raises(openai.BadRequestError, match=r'constraints = "ask"') as raised:
                scene.create(_USER, **{"tools": [_tool()], key: value})
            assert raised.value.param == key
        scene.create(_USER, tools=[_tool()], tool_choice="auto", response_format={"type": "text"})


def test_a_job_may_override_the_sampling_of_its_agents(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rrl.endpoint")
    for scene in _served(folder, foreign="override"):
        scene.create(_USER, temperature=0.3, top_p=0.9)
        scene.create(_USER, temperature=0.4)
        assert [turn.sampling for turn in scene.opened] == [None, None]
        with pytest.raises(openai.BadRequestError):
            scene.create(_USER, temperature="hot")
        with pytest.raises(openai.BadRequestError):
            scene.create(_USER, logit_bias={"1": 5})
    lines = [record.getMessage() for record in caplog.records if "as the job says" in record.getMessage()]
    assert sum("a call of 'any' asks for temperature" in line for line in lines) == 1
