"""The endpoint reports which answers agents have not used, as OpenAI's real client leaves them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from threading import Event
from typing import Any

import openai
import pytest

from rrl.roles.models.tokenizer import EOS
from rrl.tests.support.listening_manager import wait_until
from rrl.tests.support.roles.endpoint.served import CHAT, USER, Scene

SHORT_S = 0.3
"""Time limit of an agent for an answer that does not come."""


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.server.stop()


def idle(scene: Scene) -> bool:
    """Return whether the endpoint has noticed the ends of all connections, and has reported what it reports."""
    return not scene.endpoint.waiting and not scene.endpoint._reports


def encode(text: str) -> tuple[int, ...]:
    return CHAT.tokenizer.encode(text)


@pytest.mark.parametrize("stream", [False, True])
def test_answer_of_which_the_agent_got_nothing_is_reported(scene: Scene, stream: bool) -> None:
    chat = scene.client(timeout=SHORT_S, max_retries=0).chat.completions
    if stream:
        reply = chat.create(model="any", messages=USER, stream=True)
        turn = scene.wait_opened(1)
        reply.close()
    else:
        with pytest.raises(openai.APITimeoutError):  # KEEP_ALIVE_S is longer, so that nothing arrives
            chat.create(model="any", messages=USER)
        turn = scene.wait_opened(1)
    wait_until(lambda: (turn.id, False, False) in scene.turns.marked)
    scene.turns.sample(turn.id, *encode("1"), EOS, finished=True)
    wait_until(lambda: idle(scene))
    assert scene.turns.marked == [(turn.id, False, False)]


def test_answer_is_undelivered_until_its_end_was_written(scene: Scene) -> None:
    reply = scene.create(stream=True)
    turn = scene.wait_opened(1)
    scene.turns.sample(turn.id, *encode("1"))
    assert next(reply).choices[0].delta.content == "1"
    reply.close()
    wait_until(lambda: idle(scene))
    assert scene.turns.marked == [(turn.id, False, False)]


def test_answer_to_a_call_that_is_made_again_is_reported_once(scene: Scene) -> None:
    scene.answers("1")
    for _ in range(3):
        scene.create()
    wait_until(lambda: idle(scene))
    assert scene.turns.marked == [(turn.id, True, True) for turn in scene.opened[:2]]


def test_several_answers_at_the_same_time_are_all_used(scene: Scene) -> None:
    async def ask() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=scene.server.base_url, api_key=scene.key()) as client:
            calls = [
                asyncio.ensure_future(client.chat.completions.create(model="any", messages=USER)) for _ in range(3)
            ]
            await asyncio.to_thread(scene.wait_opened, 3)
            for turn in scene.opened:
                scene.turns.sample(turn.id, *encode("1"), EOS, finished=True)
            return await asyncio.gather(*calls)

    assert len(asyncio.run(ask())) == 3
    scene.answers("1")
    scene.create([{"role": "user", "content": "8"}], n=4)
    wait_until(lambda: idle(scene))
    assert scene.turns.marked == []


def test_answer_that_a_repeated_call_gets_is_not_reported_after_it(scene: Scene) -> None:
    """A first connection ends while the client's second try is served, and after it."""
    body: dict[str, Any] = {"model": "any", "messages": USER}
    streams = [
        scene.client().chat.completions.create(
            **body, stream=True, extra_headers={"x-stainless-retry-count": str(retry)}
        )
        for retry in range(2)
    ]
    turn = scene.wait_opened(1)
    scene.turns.sample(turn.id, *encode("1"), EOS, finished=True)
    assert "".join(part.choices[0].delta.content for part in streams[1]) == "1"
    streams[0].close()
    wait_until(lambda: idle(scene))
    assert (len(scene.opened), scene.turns.marked) == (1, [])


def test_connection_that_ends_while_a_repeated_call_opens_the_turn_reports_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = scene.create(stream=True)
    turn = scene.wait_opened(1)
    open_turn, ended = scene.turns.open_turn, Event()

    async def slow(*arguments: Any) -> int:
        number = await open_turn(*arguments)
        first.close()
        ended.set()
        await asyncio.to_thread(wait_until, lambda: not scene.endpoint.waiting)
        return number

    monkeypatch.setattr(scene.turns, "open_turn", slow)
    second = scene.create(stream=True, extra_headers={"x-stainless-retry-count": "1"})
    assert ended.is_set()
    scene.turns.sample(turn.id, *encode("1"), EOS, finished=True)
    assert "".join(part.choices[0].delta.content for part in second) == "1"
    wait_until(lambda: idle(scene))
    assert (len(scene.opened), scene.turns.marked) == (1, [])
