"""The preparation of calls: the same in the endpoint's process and in one of its own, whose death costs one call."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrl.core.run_spec import ModelSpec
from rrl.roles.endpoint import preparation_processes
from rrl.roles.endpoint.calls.call import Policy, rolling_hashes
from rrl.roles.endpoint.calls.chat_body import parse_chat, parse_completion
from rrl.roles.endpoint.calls.errors import ApiError
from rrl.roles.endpoint.forms import FORMS
from rrl.roles.endpoint.preparation_processes import PreparationProcesses
from rrl.roles.endpoint.turns.preparation import Preparation, Work
from rrl.roles.models.chat import open_chat
from rrl.roles.models.conversation import Message
from rrl.roles.models.tokenizer import EOS
from rrl.roles.trajectories.episodes.requests import Turn
from rrl.tests.support.examples import examples
from rrl.tests.support.roles.endpoint.served import CHAT
from rrl.tests.support.roles.endpoint.tool_folders import make

POLICY = Policy(1.0, max_length=50)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
USER = [{"role": "user", "content": "what is 12?"}]


def work(wire: str = "chat", answered: Turn | None = None, finds_context: bool = True, **body: Any) -> Work:
    given = json.dumps({"model": "any", **body}).encode()
    return Work(FORMS[wire].parse, given, finds_context=finds_context, answered=answered)


def outcome(prepared: Any) -> Any:
    """Return what a preparation returns, or the error that it raises."""
    try:
        return prepared()
    except ApiError as error:
        return error.status, error.body


@pytest.fixture
def folder(tmp_path: Path) -> ModelSpec:
    return ModelSpec(str(make(tmp_path)), chat=True)


@pytest.fixture
def processes(folder: ModelSpec) -> Iterator[PreparationProcesses]:
    made = PreparationProcesses(folder, Policy(1.0, max_length=8192))
    yield made
    made.close()


def test_process_prepares_a_call_as_the_endpoint_itself_does(
    folder: ModelSpec, processes: PreparationProcesses
) -> None:
    here = Preparation(open_chat(folder), Policy(1.0, max_length=8192))
    call, first = here.prepare(work(messages=USER, tools=[TOOL]))
    assert first is not None
    sampled = here.chat_of(call).tokenizer.encode("12<|im_end|>")
    answered = Turn(2**40, None, 0, first.given, sampled, True, first.conversation, 1, "a/1/0", '{"calls":true}')
    talk = [*USER, {"role": "assistant", "content": "12"}, {"role": "user", "content": "sure?"}]
    works = [
        work(messages=USER),
        work(messages=talk, answered=answered, tools=[TOOL]),
        work(messages=USER, finds_context=False),
        work(wire="completions", prompt=[1, 2, 3], max_tokens=10**30),
        work(wire="completions", prompt="text"),
        work(messages=[{}]),
        work(messages=USER, temperature=2),
        work(messages=[{"role": "critic", "content": "no"}]),
        work(messages=[{"role": "user", "content": "a" * 10_000}]),
        work(wire="completions", prompt=[10**400]),
        Work(parse_chat, b"[" * 100_000, True),
    ]

    async def all_of_them() -> list[Any]:
        return [
            result if not isinstance(result, ApiError) else (result.status, result.body)
            for result in await asyncio.gather(*map(processes.prepare, works), return_exceptions=True)
        ]

    results = asyncio.run(all_of_them())
    assert results == [outcome(lambda one=one: here.prepare(one)) for one in works]
    _, continued = results[1]
    assert continued.tokens == continued.given
    assert (continued.parent, continued.offset) == (answered.id, len(answered.given + answered.sampled))
    assert len(results[2][0].hashes) == len(USER)
    assert [result[0] for result in results[5:]] == [400] * 6


async def test_process_that_has_parsed_a_call_gets_its_body_once(processes: PreparationProcesses) -> None:
    parsed = work(messages=USER, finds_context=False)
    call, _ = await processes.prepare(parsed)
    (idle,) = processes._idle
    sent: list[Work] = []

    class Pipe:
        recv = idle.pipe.recv

        def send(self, given: Work, send: Any = idle.pipe.send) -> None:
            sent.append(given)
            send(given)

    idle.pipe = Pipe()  # type: ignore[assignment]
    again, context = await processes.prepare(msgspec.structs.replace(parsed, finds_context=True))
    assert [given.body for given in sent] == [b""]
    assert (again.digest, context) == (call.digest, (await processes.prepare(work(messages=USER)))[1])


def test_context_of_an_answer_that_the_chat_does_not_read_may_be_left_out() -> None:
    assert not CHAT.reads_context
    asked, sampled = [Message("user", "7")], CHAT.tokenizer.encode("12")
    talk = [{"role": "user", "content": "7"}, {"role": "assistant", "content": "12"}, {"role": "user", "content": "8"}]
    given = CHAT.prompt(asked)
    whole = Turn(2**40, None, 0, given, sampled, True, rolling_hashes(asked)[-1], 1, "a/1/0")
    short = msgspec.structs.replace(whole, given=(), sampled=sampled[-1:])
    left_out = len(given + sampled) - 1
    for answered, dropped in ((whole, 0), (short, left_out)):
        asked_for = msgspec.structs.replace(work(messages=talk), answered=answered, left_out=dropped)
        _, context = Preparation(CHAT, Policy(1.0, max_length=20)).prepare(asked_for)
        assert context is not None
        assert (context.parent, context.offset) == (whole.id, left_out + 1)
        assert context.given == (EOS, *CHAT.tokenizer.encode("?8="))
        status, error = outcome(lambda sent=asked_for: Preparation(CHAT, Policy(1.0, max_length=8)).prepare(sent))
        assert (status, error["error"]["code"]) == (400, "context_length_exceeded")
        assert f"the request has {left_out + 1 + len(context.given)}," in error["error"]["message"]


async def test_death_of_a_process_fails_its_call_and_no_other_one(
    processes: PreparationProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = preparation_processes._Process.ask
    started: list[Any] = []

    def ask_and_kill(process: Any, given: Work) -> Any:
        started.append(process)
        if b"kill" in given.body:
            process.process.kill()
        return ask(process, given)

    monkeypatch.setattr(preparation_processes._Process, "ask", ask_and_kill)

    good, bad = (work(messages=[{"role": "user", "content": text}]) for text in ("12", "kill"))
    assert (await processes.prepare(good))[1] is not None
    with pytest.raises(ApiError, match="could not be encoded within") as raised:
        await processes.prepare(bad)
    assert (raised.value.status, raised.value.body["error"]["code"]) == (413, "request_too_large")
    assert (await processes.prepare(good))[1] is not None

    assert started[0] is started[1] is not started[2]


async def test_process_that_has_died_while_it_was_idle_is_replaced(processes: PreparationProcesses) -> None:
    await processes.prepare(work(messages=USER))
    (idle,) = processes._idle
    idle.end()
    assert (await processes.prepare(work(messages=USER)))[1] is not None


async def test_call_that_is_prepared_during_a_stop_is_not_refused(
    processes: PreparationProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client repeats a call whose connection breaks. A refusal would be a failure of the agent."""
    ask, asked = preparation_processes._Process.ask, asyncio.Event()

    loop = asyncio.get_running_loop()

    def ask_slowly(process: Any, given: Work) -> Any:
        loop.call_soon_threadsafe(asked.set)
        process.pipe.recv()  # until the process ends
        return ask(process, given)

    monkeypatch.setattr(preparation_processes._Process, "ask", ask_slowly)
    call = asyncio.ensure_future(processes.prepare(work(messages=USER)))
    await asked.wait()
    processes.close()
    done, _ = await asyncio.wait([call], timeout=0.5)
    assert not done
    call.cancel()


async def test_process_that_takes_too_long_is_ended(
    processes: PreparationProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation_processes, "TIMEOUT_S", 0.0)

    with pytest.raises(ApiError, match="could not be encoded"):
        await processes.prepare(work(messages=USER))
    monkeypatch.undo()
    assert (await processes.prepare(work(messages=USER)))[1] is not None


# ── any body ─────────────────────────────────────────────────────────────────────────────────────────────────────────
NUMBERS = st.integers() | st.sampled_from([10**400, -(10**400), 2**63, 1e308, 0, True])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
)
KEYS = st.sampled_from(
    [
        "messages",
        "prompt",
        "model",
        "n",
        "max_tokens",
        "max_completion_tokens",
        "stop",
        "tools",
        "tool_choice",
        "stream",
        "stream_options",
        "logprobs",
        "return_token_ids",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "user",
        "presence_penalty",
        "repetition_penalty",
        "logit_bias",
        "response_format",
    ]
)
MESSAGE_KEYS = st.sampled_from(["role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "refusal", "x"])
MESSAGES = st.lists(st.dictionaries(MESSAGE_KEYS, VALUES | st.sampled_from(["user", "assistant"])), max_size=3)


@examples(300, 20_000)
@given(st.booleans(), st.booleans(), st.dictionaries(KEYS, VALUES), MESSAGES | VALUES, NUMBERS | VALUES, st.booleans())
def test_any_body_is_prepared_or_refused_as_a_mistake_of_the_agent(
    chat: bool, foreign: bool, body: dict[str, Any], messages: Any, number: Any, valid: bool
) -> None:
    """Most examples are valid up to one or few keys."""
    if valid:
        body |= {"model": "m", "messages": [{"role": "user", "content": "1"}], "prompt": "1"}
    else:
        body |= {"messages": messages}
    policy = Policy(1.0, "context" if foreign else "refuse", max_length=50)
    preparation = Preparation(CHAT, policy)
    for changed in (body, body | {"temperature": number}, body | {"top_k": number}, body | {"n": number}):
        given_body = Work(parse_chat if chat else parse_completion, json.dumps(changed).encode(), True)
        result = outcome(lambda given_body=given_body: preparation.prepare(given_body))
        if isinstance(result[0], int):
            assert result[0] == 400
            assert len(json.dumps(result[1])) < 20_000


def test_long_names_in_a_body_are_not_repeated_in_the_error_and_the_answer() -> None:
    preparation, long = Preparation(CHAT, POLICY), "x" * 100_000
    for body in (
        {"messages": [{"role": long, "content": "1"}]},
        {"messages": [{"role": "user", "content": "1", long: 1}]},
        {"messages": USER, long: 1},
        {"messages": USER, "model": long},
        {"messages": [{"role": "user", "content": long}]},
    ):
        status, error = outcome(lambda body=body: preparation.prepare(work(**body)))
        assert status == 400
        assert len(json.dumps(error)) < 5000


def test_prompt_that_leaves_no_token_for_an_answer_is_refused() -> None:
    preparation = Preparation(CHAT, POLICY)
    for given_work, param in (
        (work(messages=[{"role": "user", "content": "1"}] * 51), "messages"),
        (work(wire="completions", prompt=[EOS] * 50), "prompt"),
    ):
        status, body = outcome(lambda given_work=given_work: preparation.prepare(given_work))
        assert (status, body["error"]["code"], body["error"]["param"]) == (400, "context_length_exceeded", param)
    assert preparation.prepare(work(wire="completions", prompt=[EOS] * 49))[1] is not None
