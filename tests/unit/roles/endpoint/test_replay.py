"""Attempts that are replayed, and calls that are repeated, with the real store."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from rrl.core.types import Incarnation
from rrl.roles.endpoint.application import Endpoint, ServedRun
from rrl.roles.endpoint.calls.call import Policy
from rrl.roles.endpoint.http_server import EndpointServer
from rrl.roles.endpoint.key import EpisodeKey, encode_key
from rrl.roles.models.tokenizer import EOS
from rrl.roles.trajectories.episodes.requests import EpisodeItem, GetEpisode
from rrl.roles.trajectories.server import answer
from rrl.roles.trajectories.store import Store
from rrl.roles.trajectories.types import Done
from rrl.tests.support.roles.endpoint.served import CHAT, DEADLINE_S, RUN, SECRET
from rrl.tests.support.roles.endpoint.store_turns import StoreInProcess
from rrl.tests.support.roles.trajectories.agents import AGENTS, CREW, OTHER_AGENTS, episodes, open_agents_store
from rrl.tests.support.roles.trajectories.crew import ROLLOUT, lease, segment

encode = CHAT.tokenizer.encode


@pytest.fixture
def item(run: Run) -> EpisodeItem:
    return run.lease()


class Rollout:
    """A thread that answers every turn of the store with the next digit."""

    def __init__(self, served: StoreInProcess) -> None:
        self._served = served
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.sampled = 0
        """Number of answers so far."""
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(0.005):
            with self._served.lock:
                for item in lease(self._served.store):
                    tokens = (*encode(str(self.sampled % 10)), EOS)
                    self.sampled += 1
                    grown = self._served.store.append(
                        ROLLOUT, [segment(item.trajectory, 0, tokens)], (item.trajectory,)
                    )
                    assert isinstance(grown, Done), grown
                self._served.store.flush()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()


class Run:
    """A store with a rollout, and with an endpoint for each of two replicas of the role ``agents``."""

    def __init__(self, folder: Path) -> None:
        self.store: Store = open_agents_store(folder, max_new_tokens=8)
        self.served = StoreInProcess(self.store, AGENTS)
        self.rollout = Rollout(self.served)
        self.replica = AGENTS
        """The replica of the role ``agents`` that works at present."""
        self._servers: list[EndpointServer] = []
        self.endpoint = self.serve(AGENTS)

    def serve(self, who: Incarnation) -> EndpointServer:
        turns = StoreInProcess(self.store, who)
        turns.lock = self.served.lock
        run = ServedRun(RUN, SECRET, Policy(1.0), max_new=8, max_length=60)
        server = EndpointServer(Endpoint(run, CHAT, turns).application)
        server.start()
        self._servers.append(server)
        return server

    def lease(self, who: Incarnation = AGENTS) -> EpisodeItem:
        with self.served.lock:
            return episodes(self.store, 1, who)[0]

    def turns(self, item: EpisodeItem) -> Any:
        with self.served.lock:
            return answer(self.store, GetEpisode(self.replica, item.episode))

    def ask(self, item: EpisodeItem, messages: list[Any], server: EndpointServer | None = None, **more: Any) -> Any:
        key = encode_key(EpisodeKey(RUN, item.episode, item.attempt), SECRET)
        client = openai.OpenAI(base_url=(server or self.endpoint).base_url, api_key=key, timeout=DEADLINE_S)
        return client.chat.completions.create(model="any", messages=messages, **more)

    def die(self) -> tuple[EpisodeItem, EndpointServer]:
        """End the first replica of ``agents``, and let the second one begin the next attempt at the same episode."""
        with self.served.lock:
            self.store.update_membership([member for member in CREW if member != AGENTS])
        self.replica = OTHER_AGENTS
        server = self.serve(OTHER_AGENTS)
        return self.lease(OTHER_AGENTS), server

    def close(self) -> None:
        for server in self._servers:
            server.stop()
        self.rollout.stop()
        self.store.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.close()


def play(ask: Callable[[list[Any]], Any], second: str) -> list[str]:
    """Make two calls, as an agent whose second call depends on the answer to the first."""
    messages: list[Any] = [{"role": "user", "content": "7"}]
    first = ask(messages).choices[0].message
    messages += [first, {"role": "user", "content": second}]
    return [first.content, ask(messages).choices[0].message.content]


def test_attempt_of_a_dead_process_is_replayed_without_sampling_again(run: Run, item: EpisodeItem) -> None:
    answers = play(lambda messages: run.ask(item, messages), "<")
    turns = run.turns(item).turns
    again, server = run.die()
    assert (again.episode, again.attempt) == (item.episode, item.attempt + 1)
    assert play(lambda messages: run.ask(again, messages, server), "<") == answers
    assert [turn.id for turn in run.turns(again).turns] == [turn.id for turn in turns]
    assert run.rollout.sampled == 2


def test_replay_samples_from_the_first_call_that_differs(run: Run, item: EpisodeItem) -> None:
    first, _ = play(lambda messages: run.ask(item, messages), "<")
    again, server = run.die()
    replayed, new = play(lambda messages: run.ask(again, messages, server), ">")
    assert (replayed, new) == (first, "2")
    one, two = run.turns(again).turns
    assert (two.parent, two.offset, run.rollout.sampled) == (one.id, len(encode("?7=0")) + 1, 3)


def test_recorded_turns_may_be_replayed_in_any_order(run: Run, item: EpisodeItem) -> None:
    calls: list[list[Any]] = [[{"role": "user", "content": text}] for text in ("12", "13")]
    answers = [run.ask(item, messages).choices[0].message.content for messages in calls]
    assert run.turns(item).turns[1].parent is not None, "the second call must be a branch of the first for this test"
    again, server = run.die()
    for messages, recorded in reversed([*zip(calls, answers, strict=True)]):
        assert run.ask(again, messages, server).choices[0].message.content == recorded
    assert run.rollout.sampled == 2


def test_equal_calls_of_a_replay_get_the_recorded_answers_in_order(run: Run, item: EpisodeItem) -> None:
    messages: list[Any] = [{"role": "user", "content": "7"}]
    answers = [run.ask(item, messages).choices[0].message.content for _ in range(3)]
    again, server = run.die()
    assert [run.ask(again, messages, server).choices[0].message.content for _ in range(4)] == [*answers, "3"]


def test_recorded_answer_with_several_choices_and_a_stop_text_is_replayed_unchanged(
    run: Run, item: EpisodeItem
) -> None:
    messages: list[Any] = [{"role": "user", "content": "7"}]
    answers = [choice.message.content for choice in run.ask(item, messages, n=3, stop=["1"]).choices]
    assert sorted(answers) == ["", "0", "2"]
    again, server = run.die()
    replayed = run.ask(again, messages, server, n=3, stop=["1"])
    assert [choice.message.content for choice in replayed.choices] == answers
    assert run.rollout.sampled == 3


def test_a_key_of_the_attempt_whose_process_died_is_refused(run: Run, item: EpisodeItem) -> None:
    run.ask(item, [{"role": "user", "content": "7"}])
    _, server = run.die()
    with pytest.raises(openai.PermissionDeniedError):
        run.ask(item, [{"role": "user", "content": "7"}], server)


# ── streams that continue at a relay's position ─────────────────────────────────────────────────────────────────────
def test_stream_of_a_relay_continues_after_the_position_that_the_relay_has(run: Run, item: EpisodeItem) -> None:
    messages: list[Any] = [{"role": "user", "content": "7"}]
    for number in (1, 2):  # equal calls, so that only the position tells which of them continues
        whole = raw_stream(run, item, messages, {"x-rrl-relay": "1"})
        positions = [line.split() for line in whole if line.startswith(": rrl")]
        assert [position[2] for position in positions] == [str(number)] * len(positions)
        assert positions[-1][3] == "2."
    headers = {"x-rrl-relay": "1", "x-stainless-retry-count": "1", "x-rrl-call": "1"}
    for sent, expected in (("0", "0"), ("1", ""), ("2.", "")):
        rest = raw_stream(run, item, messages, headers | {"x-rrl-sent": sent})
        assert rest[-1] == "data: [DONE]"
        data = [line for line in rest if line.startswith("data: {")]
        assert ('"content":"0"' in "".join(data)) == (expected == "0")
        assert ('"finish_reason":"stop"' in "".join(data)) == (sent != "2.")
        assert all('"role"' not in line for line in data) == (sent != "0")
    assert run.rollout.sampled == 2


@pytest.mark.parametrize("sent", ["x", "1,1", "-1", "9" * 30, "²"])
def test_invalid_position_of_a_relay_restarts_the_stream_from_the_beginning(
    run: Run, sent: str, item: EpisodeItem
) -> None:
    messages: list[Any] = [{"role": "user", "content": "7"}]
    raw_stream(run, item, messages, {"x-rrl-relay": "1"})
    headers = {"x-rrl-relay": "1", "x-rrl-call": "1", "x-rrl-sent": sent}
    assert '"role":"assistant"' in "".join(raw_stream(run, item, messages, headers))
    assert run.rollout.sampled == 1


def raw_stream(run: Run, item: EpisodeItem, messages: list[Any], headers: dict[str, str]) -> list[str]:
    """Return the lines of a stream, without empty lines and lines that only keep the stream alive."""
    key = encode_key(EpisodeKey(RUN, item.episode, item.attempt), SECRET)
    host = run.endpoint.base_url.removeprefix("http://").partition("/")[0]
    connection = http.client.HTTPConnection(host, timeout=DEADLINE_S)
    body = json.dumps({"model": "any", "messages": messages, "stream": True})
    connection.request("POST", "/v1/chat/completions", body, {"authorization": f"Bearer {key}", **headers})
    reply = connection.getresponse()
    assert reply.status == 200
    lines = reply.read().decode().splitlines()
    connection.close()
    return [line for line in lines if line and line != ": waiting"]
