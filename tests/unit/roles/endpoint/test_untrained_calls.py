"""Calls that are served and never trained: by the name of their model, by their limit, or by a header."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest

from rrl.roles.endpoint.application import INLINE_BYTES
from rrl.roles.endpoint.calls.call import Policy
from rrl.roles.endpoint.forms import FORMS
from rrl.roles.trajectories.types import Sampling
from rrl.tests.support.roles.endpoint.served import DEADLINE_S, USER, Scene

NOT_TRAINED = {"x-rrl-train": "0"}


@pytest.fixture(params=["refuse", "context", "override"])
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    made = Scene(policy=Policy(1.0, request.param, untrained=("*haiku*", "judge")))
    made.answers("1")
    yield made
    made.server.stop()


def create(scene: Scene, model: str = "policy", **more: Any) -> Any:
    return scene.client().chat.completions.create(**{"model": model, "messages": USER, **more})


@pytest.mark.parametrize(
    "asked",
    [
        {"model": "claude-haiku-4-5"},
        {"model": "judge"},
        {"max_tokens": 0},
        {"max_completion_tokens": 1},
        {"extra_headers": NOT_TRAINED},
    ],
)
def test_untrained_call_is_served_as_requested_and_its_turn_is_context(scene: Scene, asked: dict[str, Any]) -> None:
    reply = create(scene, **asked)
    assert (reply.choices[0].message.content, reply.model) == ("1", asked.get("model", "policy"))
    create(scene, **asked, temperature=0.0)
    assert [turn.sampling for turn in scene.opened] == [Sampling(), Sampling(temperature=0.0)]
    assert all(scene.turns.max_new[turn.id] >= 1 for turn in scene.opened)


@pytest.mark.parametrize("model", ["Haiku", "judges", "policy"])
def test_any_other_call_is_trained(scene: Scene, model: str) -> None:
    create(scene, model, max_tokens=2, extra_headers={"x-rrl-train": "1"})
    assert scene.opened[0].sampling is None


def test_trained_and_untrained_calls_of_one_meaning_do_not_share_turns(scene: Scene) -> None:
    for headers in (NOT_TRAINED, {}, NOT_TRAINED):
        create(scene, extra_headers={"x-stainless-retry-count": "1", **headers})
    assert [turn.sampling for turn in scene.opened] == [Sampling(), None]


def test_large_untrained_call_is_context_too(scene: Scene) -> None:
    scene.server.stop()
    large = Scene(policy=Policy(1.0), max_length=2 * INLINE_BYTES)
    large.answers("1")
    try:
        create(large, messages=[{"role": "user", "content": "7" * INLINE_BYTES}], extra_headers=NOT_TRAINED, seed=1)
        assert large.opened[0].sampling == Sampling(seed=1)
    finally:
        large.server.stop()


@pytest.mark.parametrize("value", ["", "no", "2"])
def test_invalid_header_is_refused(scene: Scene, value: str) -> None:
    with pytest.raises(openai.BadRequestError, match="x-rrl-train: must be 0"):
        create(scene, extra_headers={"x-rrl-train": value})


def test_negative_limit_is_refused(scene: Scene) -> None:
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        create(scene, max_tokens=-1)


def test_invalid_call_of_an_untrained_model_keeps_its_error(scene: Scene) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature") as refused:
        create(scene, "judge", temperature="warm")
    assert json.loads(refused.value.response.content)["error"]["param"] == "temperature"


def test_each_name_of_a_model_is_logged_once(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "rrl.endpoint"):
        for model in ("planner", "coder", "planner", "policy"):
            create(scene, model)
    assert [record.args for record in caplog.records if "the model" in record.message] == [("planner",), ("coder",)]


LIMITED: dict[str, dict[str, Any]] = {
    "chat": {"messages": USER, "max_completion_tokens": 0},
    "completions": {"prompt": "7", "max_tokens": 0},
    "responses": {"input": "7", "max_output_tokens": 0},
    "messages": {"messages": USER, "max_tokens": 0},
}


@pytest.mark.parametrize("wire", FORMS)
def test_rules_hold_in_each_form(scene: Scene, wire: str) -> None:
    limited = LIMITED[wire]
    free = {key: value for key, value in limited.items() if not key.startswith("max_")}
    free |= {"max_tokens": 4} if wire == "messages" else {}
    for body, headers in (
        ({"model": "policy", **limited}, {}),
        ({"model": "policy", **free}, NOT_TRAINED),
        ({"model": "judge", **free}, {}),
        ({"model": "policy", **free}, {}),
    ):
        url, key = f"{scene.server.base_url}{FORMS[wire].path}", {"authorization": f"Bearer {scene.key()}"}
        answered = httpx2.post(url, json=body, headers=key | headers, timeout=DEADLINE_S).json()
        assert answered["model"] == body["model"]
