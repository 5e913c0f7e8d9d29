"""Stop texts, and calls whose sampling settings differ from the job's, through OpenAI's real client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import openai
import pytest

from rrl.roles.endpoint.calls.call import Policy
from rrl.roles.trajectories.types import Sampling
from rrl.tests.support.roles.endpoint.served import CHAT, USER, Scene

encode = CHAT.tokenizer.encode


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene(policy=Policy(1.0, "context"), max_new=8, max_length=40)
    yield made
    made.server.stop()


def test_answer_ends_before_a_stop_text_and_its_turn_with_the_completing_token(scene: Scene) -> None:
    scene.answers("45>=67")
    choice = scene.create(stop=["=6", "9"], extra_body={"return_token_ids": True}).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("45>", "stop")
    turn = scene.turns.turns[scene.opened[0].id]
    assert turn.sampled == tuple(choice.token_ids) == encode("45>=6")
    assert turn.finished


def test_next_call_continues_after_the_tokens_of_an_answer_cut_at_a_stop_text(scene: Scene) -> None:
    scene.answers("45>=67", "8")
    message = scene.create(stop="=").choices[0].message
    scene.create([*USER, message, {"role": "user", "content": "<"}], stop="=")
    first, second = scene.opened
    assert (second.parent, second.offset) == (first.id, len(encode("?7=") + encode("45>=")))
    assert second.given == (1, *encode("?<="))
    assert scene.turns.turns[first.id].options == '{"stop":["="]}'


def test_stream_ends_at_a_stop_text_and_sends_no_part_of_it(scene: Scene) -> None:
    stream = scene.create(stream=True, stop="<>")
    turn = scene.wait_opened(1)
    texts: list[str] = []
    for piece in ("4<", "5<", ">6"):
        scene.turns.sample(turn.id, *encode(piece))
        if piece != ">6":
            texts.append(next(stream).choices[0].delta.content)
    rest = list(stream)
    assert texts == ["4", "<5"]
    assert "".join(chunk.choices[0].delta.content for chunk in rest) == ""
    assert rest[-1].choices[0].finish_reason == "stop"
    assert scene.turns.turns[turn.id].sampled == encode("4<5<>")


def test_incomplete_stop_text_is_sent_at_the_end_of_the_stream(scene: Scene) -> None:
    scene.answers("45<")
    stream = scene.create(stream=True, stop="<>")
    assert "".join(chunk.choices[0].delta.content for chunk in stream) == "45<"


def test_stop_text_ends_a_completion(scene: Scene) -> None:
    scene.answers("45>=67")
    reply = scene.client().completions.create(model="any", prompt="7=", stop=">")
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == ("45", "stop")


# ── foreign calls ────────────────────────────────────────────────────────────────────────────────────────────────────
def test_foreign_call_uses_its_own_sampling_settings_if_the_job_allows_it(scene: Scene) -> None:
    scene.answers("1")
    scene.create(temperature=0, top_p=0.5, seed=7, presence_penalty=1, extra_body={"top_k": 3, "min_p": 0.1})
    scene.create(temperature=1.0, top_p=1)
    assert [turn.sampling for turn in scene.opened] == [
        Sampling(temperature=0, top_p=0.5, top_k=3, min_p=0.1, presence_penalty=1, seed=7),
        None,
    ]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_k", 0.5),
        ("seed", 2**64),
        ("min_p", 2),
        ("logit_bias", {"1": 5}),
        ("guided_json", {}),
        ("presence_penalty", True),
    ],
)
def test_foreign_call_with_settings_that_no_engine_supports_is_refused_by_name(
    scene: Scene, key: str, value: Any
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        scene.create(extra_body={key: value})
    assert raised.value.param == key
    assert scene.opened == []


def test_options_of_a_turn_are_decoded_as_encoded() -> None:
    from rrl.roles.endpoint.turns.shown_answer import AnswerFormat

    for form in (AnswerFormat(), AnswerFormat(("=", "x")), AnswerFormat(calls=True)):
        assert AnswerFormat.decode(form.encode()) == form
    assert msgspec.json.decode(AnswerFormat(("=",), True).encode()) == {"stop": ["="], "calls": True}
