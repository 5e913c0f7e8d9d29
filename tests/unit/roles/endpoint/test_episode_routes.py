"""Episodes of agents outside of the run are opened, ended and rewarded over HTTP, with the real store."""

from __future__ import annotations

import http.client
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from rrl.roles.endpoint import episode_routes
from rrl.roles.endpoint.application import Endpoint, ServedRun
from rrl.roles.endpoint.calls.call import Policy
from rrl.roles.endpoint.episode_routes import EpisodeRoutes
from rrl.roles.endpoint.http_server import EndpointServer
from rrl.roles.endpoint.key import decode_key, run_key
from rrl.roles.models.tokenizer import EOS
from rrl.roles.trajectories.episodes.rules import EpisodeSettings
from rrl.tests.support.roles.endpoint.served import CHAT, DEADLINE_S, RUN, SECRET, USER
from rrl.tests.support.roles.endpoint.store_turns import StoreInProcess
from rrl.tests.support.roles.trajectories.agents import AGENTS, evaluated, open_agents_store, sample
from rrl.tests.support.roles.trajectories.crew import lease

RUN_KEY = run_key(RUN, SECRET)


@pytest.fixture
def opened(outside: Outside) -> Any:
    return outside.open()


class Outside:
    """An endpoint for agents outside of the run, with a real store."""

    def __init__(
        self,
        folder: Path,
        item_text: Callable[[int, bool], str] = lambda item, _: f"item {item}",
        not_evaluated: str = "",
        **store: Any,
    ) -> None:
        self.store = open_agents_store(folder, episodes=EpisodeSettings(retries=0), max_new_tokens=8, **store)
        self.served = StoreInProcess(self.store, AGENTS)
        routes = EpisodeRoutes(self.served, RUN, SECRET, item_text, not_evaluated)
        run = ServedRun(RUN, SECRET, Policy(1.0), max_new=8, max_length=60)
        self.server = EndpointServer(Endpoint(run, CHAT, self.served, routes=routes.routes()).application)
        self.server.start()

    def post(self, path: str, key: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        host = self.server.base_url.removeprefix("http://").partition("/")[0]
        connection = http.client.HTTPConnection(host, timeout=DEADLINE_S)
        content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        connection.request("POST", path, content, {"authorization": f"Bearer {key}", **headers})
        reply = connection.getresponse()
        status, replied = reply.status, json.loads(reply.read())
        connection.close()
        return status, replied

    def open(self, body: Any = None, **headers: str) -> Any:
        status, opened = self.post("/rrl/v1/episodes", RUN_KEY, body, **headers)
        assert status == 200, opened
        return opened

    def answer(self, opened: Any) -> None:
        """Request one answer in an opened episode, and sample it as a rollout does."""
        client = openai.OpenAI(base_url=opened["base_url"], api_key=opened["api_key"], timeout=DEADLINE_S)
        stream = client.chat.completions.create(model="any", messages=USER, stream=True)
        with self.served.lock:
            (item,) = lease(self.store)
            sample(self.store, item.trajectory, (2, EOS))
            self.store.flush()
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "stop"

    def end(self, opened: Any, how: str, body: Any) -> int:
        return self.post(f"/rrl/v1/episodes/{how}", opened["api_key"], body)[0]


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Outside]:
    made = Outside(tmp_path)
    yield made
    made.server.stop()
    made.store.close()


def test_an_episode_is_opened_played_and_finished_with_a_reward(outside: Outside, opened: Any) -> None:
    key = decode_key(opened["api_key"], RUN, SECRET)
    assert key is not None
    assert (opened["episode"], opened["attempt"]) == (key.episode, key.attempt)
    assert opened["item"].startswith("item ")
    assert opened["base_url"] == outside.server.base_url
    outside.answer(opened)
    assert outside.end(opened, "finish", {"reward": 0.5}) == 200
    assert outside.end(opened, "finish", {"reward": 0.5}) == 200, "a repeated request was refused"
    client = openai.OpenAI(base_url=opened["base_url"], api_key=opened["api_key"], timeout=DEADLINE_S)
    with pytest.raises(openai.PermissionDeniedError):
        client.chat.completions.create(model="any", messages=USER)


def test_a_repeated_request_for_an_episode_gets_the_same_one(outside: Outside) -> None:
    first, again = (outside.open(**{"Idempotency-Key": "a"}) for _ in range(2))
    assert first == again
    assert outside.open(**{"Idempotency-Key": "b"})["episode"] != first["episode"]
    assert outside.open()["api_key"] != outside.open()["api_key"]


def test_item_whose_text_cannot_be_made_is_dropped_and_another_one_is_served(tmp_path: Path) -> None:
    def text(item: int, evaluation: bool) -> str:
        return sys.exit() if item == 0 else f"item {item}"

    outside = Outside(tmp_path, text)
    try:
        assert outside.open()["item"] == "item 10"
    finally:
        outside.server.stop()
    assert outside.store.audit().dropped == {"prompt(0) of [task] raised SystemExit()": 2}
    outside.store.close()


def test_opener_gets_an_episode_of_the_evaluation_only_on_request(tmp_path: Path) -> None:
    evaluations = evaluated("outside", samples=1, temperature=0.0)
    outside = Outside(
        tmp_path, lambda item, evaluation: f"{'held-out' if evaluation else 'item'} {item}", "", **evaluations
    )
    try:
        trained = outside.open(**{"Idempotency-Key": "a"})
        assert (trained["split"], trained["item"]) == ("train", "item 0")
        opened, again = (outside.open({"split": "eval"}, **{"Idempotency-Key": "a"}) for _ in range(2))
        assert (opened["split"], opened["item"]) == ("eval", "held-out 0")
        assert again == opened
        outside.answer(opened)
        assert outside.end(opened, "finish", {"later": True}) == 200
        assert outside.end(opened, "reward", {"reward": 1.0}) == 200
    finally:
        outside.server.stop()
        outside.store.close()


@pytest.mark.parametrize(
    ("split", "message"),
    [("test", 'must be "train" or "eval"'), (3, 'must be "train" or "eval"'), ("eval", 'cannot be "eval": no table')],
)
def test_split_that_the_job_does_not_have_is_refused(tmp_path: Path, split: object, message: str) -> None:
    outside = Outside(tmp_path, not_evaluated="no table")
    try:
        status, replied = outside.post("/rrl/v1/episodes", RUN_KEY, {"split": split})
        assert (status, replied["error"]["param"]) == (400, "split")
        assert message in replied["error"]["message"]
    finally:
        outside.server.stop()
        outside.store.close()


def test_reward_may_be_posted_after_the_end_of_the_episode(outside: Outside, opened: Any) -> None:
    outside.answer(opened)
    assert outside.end(opened, "finish", {"later": True}) == 200
    assert outside.end(opened, "reward", {"reward": 1}) == 200
    assert outside.end(opened, "reward", {"reward": 1}) == 200


def test_rewards_by_name_are_given_at_the_end_or_later(outside: Outside) -> None:
    first, second = outside.open(), outside.open()
    outside.answer(first)
    status, replied = outside.post("/rrl/v1/episodes/finish", first["api_key"], {"rewards": {"ayn": 1.0}})
    assert (status, replied["error"]["code"]) == (400, "refused")
    assert "['ayn'], the model name of no call that is trained, but not ['any']" in replied["error"]["message"]
    for _ in range(2):
        assert outside.end(first, "finish", {"rewards": {"any": 0.5}}) == 200
    assert outside.end(first, "finish", {"rewards": {"any": 0.25}}) == 400
    outside.answer(second)
    assert outside.end(second, "finish", {"later": True}) == 200
    assert outside.end(second, "reward", {"rewards": {"*": 1}}) == 200
    scores = [track.score for track in outside.store._state.trajectories.values() if track.score is not None]
    assert [score.agents for score in scores] == [{"any": 0.5}, {"any": 1.0}]


def test_a_failed_attempt_ends_the_episode_and_its_key(outside: Outside, opened: Any) -> None:
    outside.answer(opened)
    assert outside.end(opened, "fail", {"why": "the sandbox is gone"}) == 200
    assert outside.end(opened, "finish", {"reward": 1.0}) == 403


def test_missing_episode_is_answered_with_the_time_to_repeat_the_request(
    outside: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episode_routes, "OPEN_TIMEOUT_S", 0.3)
    while (reply := outside.post("/rrl/v1/episodes", RUN_KEY))[0] == 200:
        pass
    assert (reply[0], reply[1]["error"]["code"]) == (503, "no_episode")


@pytest.mark.parametrize(
    ("how", "body", "param"),
    [
        ("finish", {"reward": "1"}, "reward"),
        ("finish", {"reward": True}, "reward"),
        ("finish", {"later": 1}, "later"),
        ("finish", {"later": True, "reward": 1.0}, "later"),
        ("finish", {"rewards": 1.0}, "rewards"),
        ("finish", {"rewards": {}}, "rewards"),
        ("finish", {"rewards": {"any": True}}, "rewards"),
        ("finish", {"rewards": {"any": 1.0}, "reward": 1.0}, "rewards"),
        ("finish", {"rewards": {"any": 1.0}, "later": True}, "later"),
        ("reward", {"rewards": {f"name {place}": 1.0 for place in range(65)}}, "rewards"),
        ("reward", {}, "reward"),
        ("fail", {}, "why"),
        ("fail", {"why": 3}, "why"),
        ("finish", b"[1]", None),
        ("finish", b"\xff", None),
        ("reward", b'{"reward": 1e999}', None),
        ("reward", {"reward": 10**400}, "reward"),
        ("finish", {"reward": -(10**400)}, "reward"),
        ("finish", b'{"reward": 1' + bytes([48]) * 9000 + b"}", None),
    ],
)
def test_invalid_body_is_refused_with_the_name_of_its_key(
    outside: Outside, how: str, body: Any, param: str | None, opened: Any
) -> None:
    status, replied = outside.post(f"/rrl/v1/episodes/{how}", opened["api_key"], body)
    assert status == 400
    assert replied["error"]["param"] == param


def test_key_of_an_episode_and_key_of_the_run_are_not_interchangeable(outside: Outside, opened: Any) -> None:
    assert outside.post("/rrl/v1/episodes", opened["api_key"])[1]["error"]["code"] == "run_key_needed"
    refused = outside.post("/rrl/v1/episodes/finish", RUN_KEY, {"reward": 1.0})
    assert (refused[0], refused[1]["error"]["code"]) == (403, "episode_key_needed")
    body = {"model": "any", "messages": USER}
    assert outside.post("/v1/chat/completions", RUN_KEY, body)[1]["error"]["code"] == "episode_key_needed"
    assert outside.post("/rrl/v1/episodes", "sk-other")[0] == 401
    assert outside.post("/rrl/v1/episodes", run_key("other", SECRET))[0] == 401


def test_episode_without_an_answer_cannot_be_finished_and_goes_on(outside: Outside, opened: Any) -> None:
    for body in ({"reward": 1.0}, {}, {"later": True}):
        status, replied = outside.post("/rrl/v1/episodes/finish", opened["api_key"], body)
        assert (status, replied["error"]["code"]) == (409, "no_answer")
        assert "report that the attempt failed" in replied["error"]["message"]
    outside.answer(opened)
    assert outside.end(opened, "finish", {"reward": 1.0}) == 200
    assert outside.store.audit().dropped == {}


def test_large_body_is_refused(outside: Outside, opened: Any) -> None:
    assert outside.end(opened, "fail", {"why": "x" * 70_000}) == 413
    assert outside.end(opened, "fail", {"why": "x" * 50_000}) == 200
