"""Calls that clients repeat without saying so, and endpoints that die, with the real store."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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
from rrl.roles.trajectories.episodes.requests import FinishEpisode, GetEpisode, LeasedEpisodes, OpenEpisode, Turn
from rrl.roles.trajectories.server import answer
from rrl.roles.trajectories.store import Store
from rrl.roles.trajectories.types import Done
from rrl.tests.support.listening_manager import wait_until
from rrl.tests.support.roles.endpoint.served import CHAT, DEADLINE_S, RUN, SECRET
from rrl.tests.support.roles.endpoint.store_turns import StoreInProcess
from rrl.tests.support.roles.trajectories.agents import CREW, open_agents_store
from rrl.tests.support.roles.trajectories.crew import ROLLOUT, incarnation_of, lease, segment

ASKED: list[Any] = [{"role": "user", "content": "7"}]
OTHER: list[Any] = [{"role": "user", "content": "8"}]
RETRIED = {"x-stainless-retry-count": "1"}


class Run:
    """A store, an episode of an agent outside of the run, and the endpoints that serve it; the test samples."""

    def __init__(self, folder: Path) -> None:
        self.store: Store = open_agents_store(folder, max_new_tokens=8)
        self._turns: dict[int, StoreInProcess] = {}
        self._servers: dict[int, EndpointServer] = {}
        self._incarnations = [1, 1]
        self._lock = threading.Lock()
        self.endpoint: dict[int, Endpoint] = {}
        self.restart(0, first=True)
        with self._lock:
            opened = answer(self.store, OpenEpisode(self.who(0), "a"))
        assert isinstance(opened, LeasedEpisodes)
        (self.item,) = opened.items

    def who(self, replica: int) -> Incarnation:
        return incarnation_of(f"endpoint/{replica}", self._incarnations[replica])

    def restart(self, replica: int, *, first: bool = False) -> None:
        """Start a replica of the endpoint, after the end of its earlier process unless this is the first."""
        if not first:
            self.endpoint[replica].close()  # a process that is killed reports nothing
            self._servers[replica].stop()
            self._incarnations[replica] += 1
        turns = StoreInProcess(self.store, self.who(replica))
        turns.lock = self._lock
        with self._lock:
            self.store.update_membership((*CREW, self.who(0), self.who(1)))
        run = ServedRun(RUN, SECRET, Policy(1.0), max_new=8, max_length=60)
        self.endpoint[replica] = Endpoint(run, CHAT, turns, outlived=True)
        self._servers[replica] = EndpointServer(self.endpoint[replica].application)
        self._servers[replica].start()

    def client(self, replica: int = 0) -> Any:
        key = encode_key(EpisodeKey(RUN, self.item.episode, self.item.attempt), SECRET)
        url = self._servers[replica].base_url
        return openai.OpenAI(base_url=url, api_key=key, timeout=DEADLINE_S, max_retries=0)

    def create(self, replica: int = 0, **more: Any) -> Any:
        return self.client(replica).chat.completions.create(**{"model": "any", "messages": ASKED, **more})

    def turns(self) -> tuple[Turn, ...]:
        with self._lock:
            shown: Any = answer(self.store, GetEpisode(self.who(0), self.item.episode))
        return shown.turns  # type: ignore[no-any-return]

    def wait_turns(self, count: int) -> list[int]:
        wait_until(lambda: len(self.turns()) >= count)
        return [turn.id for turn in self.turns()]

    def sample(self, turn: int, text: str) -> None:
        """Complete a turn with the tokens of a text."""
        with self._lock:
            lease(self.store)
            tokens = (*CHAT.tokenizer.encode(text), EOS)
            assert self.store.append(ROLLOUT, [segment(turn, 0, tokens)], (turn,)) == Done()
            self.store.flush()

    def delivers(self, answer_text: str, replica: int = 0, **more: Any) -> int:
        """Make a call that gets a whole answer of a new turn, and return the turn."""
        before = len(self.turns())
        stream = self.create(replica, stream=True, **more)
        turn = self.wait_turns(before + 1)[-1]
        self.sample(turn, answer_text)
        assert "".join(part.choices[0].delta.content for part in stream) == answer_text
        self.wait_idle(replica)
        return turn

    def wait_idle(self, replica: int = 0) -> None:
        endpoint = self.endpoint[replica]
        wait_until(lambda: not endpoint.waiting and not endpoint._reports)

    @contextmanager
    def broken(self, replica: int = 0, **more: Any) -> Iterator[int]:
        """Make a call whose connection breaks at the end of the block; yield its newest turn."""
        before = len(self.turns())
        stream = self.create(replica, stream=True, **more)
        yield self.wait_turns(before + more.get("n", 1))[-1]
        stream.close()
        self.wait_idle(replica)

    def torn(self, answer_text: str) -> int:
        """Make a call that gets a whole answer of a new turn, whose connection is then reset, and return the turn."""
        client = self.client()
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(client.chat.completions.with_raw_response.create, model="any", messages=ASKED)
            (turn,) = self.wait_turns(1)
            self.sample(turn, answer_text)
            connection = asked.result().http_response.extensions["network_stream"].get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        wait_until(lambda: self.undelivered() == (turn,))
        return turn

    def undelivered(self) -> tuple[int, ...]:
        """Return the undelivered answers to calls of the same meaning as the first one."""
        call = self.turns()[0].request.split("/")[0]
        with self._lock:
            shown: Any = answer(self.store, GetEpisode(self.who(0), self.item.episode, call=call))
        return shown.undelivered  # type: ignore[no-any-return]

    def untrained(self) -> int:
        with self._lock:
            assert answer(self.store, FinishEpisode(self.who(0), self.item.episode, 1, 1.0)) == Done()
            return int(self.store.audit().episodes["untrained_turns"])

    def close(self) -> None:
        for server in self._servers.values():
            server.stop()
        self.store.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.close()


def text(reply: Any) -> str:
    return str(reply.choices[0].message.content)


@pytest.mark.parametrize("headers", [{}, RETRIED])
def test_call_whose_connection_broke_gets_its_answer_as_stream_or_not(run: Run, headers: dict[str, str]) -> None:
    with run.broken() as turn:
        pass
    run.sample(turn, "12")
    parts = run.create(stream=True, extra_headers=headers)
    assert "".join(part.choices[0].delta.content for part in parts) == "12"
    with run.broken(messages=OTHER) as other:
        pass
    run.sample(other, "3")
    assert text(run.create(messages=OTHER, extra_headers=headers)) == "3"
    run.wait_idle()
    assert (len(run.turns()), run.untrained()) == (2, 0)


def test_broken_call_is_given_again_and_again_until_it_is_delivered_and_then_no_more(run: Run) -> None:
    for _ in range(3):
        stream = run.create(stream=True)
        wait_until(lambda: run.endpoint[0].waiting == 1)
        stream.close()
        run.wait_idle()
    (turn,) = run.wait_turns(1)
    run.sample(turn, "1")
    assert text(run.create()) == "1"
    run.wait_idle()
    with run.broken() as another:
        assert another != turn


def test_equal_calls_at_the_same_time_get_different_turns_also_of_broken_calls(run: Run) -> None:
    first, second = run.create(stream=True), run.create(stream=True)
    turns = run.wait_turns(2)
    for stream in (first, second):
        stream.close()
    run.wait_idle()
    for turn, answer_text in zip(turns, "12", strict=True):
        run.sample(turn, answer_text)

    async def ask() -> list[str]:
        client = run.client()
        calls = (asyncio.to_thread(client.chat.completions.create, model="any", messages=ASKED) for _ in range(2))
        return [text(reply) for reply in await asyncio.gather(*calls)]

    assert sorted(asyncio.run(ask())) == ["1", "2"]
    run.wait_idle()
    assert (len(run.turns()), run.untrained()) == (2, 0)


def test_call_with_several_answers_is_continued_as_a_whole(run: Run) -> None:
    with run.broken(n=2):
        pass
    for turn, answer_text in zip(run.wait_turns(2), "12", strict=True):
        run.sample(turn, answer_text)
    assert [choice.message.content for choice in run.create(n=2).choices] == ["1", "2"]
    assert len(run.turns()) == 2


def test_call_that_says_that_it_is_repeated_gets_an_undelivered_answer_before_a_newer_delivered_one(run: Run) -> None:
    broken = run.create(stream=True)
    (first,) = run.wait_turns(1)
    served = run.create(stream=True)
    _, second = run.wait_turns(2)
    run.sample(second, "2")
    assert "".join(part.choices[0].delta.content for part in served) == "2"
    broken.close()
    run.wait_idle()
    run.sample(first, "1")
    assert text(run.create(extra_headers=RETRIED)) == "1"


def test_answer_that_was_lost_and_not_asked_for_again_is_context(run: Run) -> None:
    with run.broken() as turn:
        pass
    run.sample(turn, "1")
    run.delivers("2", messages=OTHER)
    assert run.untrained() == 1


def test_answer_whose_connection_was_reset_is_context_if_nobody_requests_it(run: Run) -> None:
    run.torn("1")
    run.delivers("2", messages=OTHER)
    assert run.untrained() == 1


def test_answer_that_the_agent_has_continued_is_not_given_again_after_a_reset(run: Run) -> None:
    turn = run.torn("1")
    run.delivers("2", messages=[*ASKED, {"role": "assistant", "content": "1"}, *OTHER])
    assert run.turns()[1].parent == turn
    assert run.undelivered() == ()
    assert run.delivers("3") != turn
    assert run.untrained() == 0


# ── the endpoint dies ────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("deaths", [1, 2])
def test_answer_that_an_endpoint_had_not_delivered_at_its_death_is_given_once(run: Run, deaths: int) -> None:
    stream = run.create(stream=True)
    (turn,) = run.wait_turns(1)
    for _ in range(deaths):
        run.restart(0)
    with pytest.raises(openai.APIError):
        list(stream)
    run.sample(turn, "1")
    assert text(run.create()) == "1"
    run.wait_idle()
    with run.broken() as another:
        assert another != turn


def test_delivered_answer_is_not_given_again_by_the_next_endpoint(run: Run) -> None:
    turn = run.delivers("1")
    run.restart(0)
    assert run.delivers("2") != turn


def test_undelivered_answer_of_a_dead_endpoint_is_context_if_nobody_requests_it(run: Run) -> None:
    stream = run.create(stream=True)
    (lost,) = run.wait_turns(1)
    run.restart(0)
    stream.close()
    run.sample(lost, "1")
    run.delivers("2", messages=OTHER)
    assert run.untrained() == 1


def test_replica_takes_a_call_over_only_from_a_dead_one(run: Run) -> None:
    run.restart(1, first=True)
    stream = run.create(stream=True)
    (turn,) = run.wait_turns(1)
    run.delivers("2", 1, messages=OTHER)
    run.restart(0)
    stream.close()
    run.sample(turn, "1")
    assert text(run.create(1)) == "1"
    run.wait_idle(1)
    assert run.untrained() == 0


@pytest.mark.parametrize("dies", [False, True])
def test_equal_call_at_another_replica_does_not_say_that_the_first_was_answered(run: Run, dies: bool) -> None:
    run.restart(1, first=True)
    first = run.create(stream=True)
    run.wait_turns(1)
    second = run.create(1, stream=True)
    turns = run.wait_turns(2)
    wait_until(lambda: not run.endpoint[1]._reports)
    if dies:
        run.restart(0)
        first.close()
    else:
        run.endpoint[0].close()  # its report would come after the end of the episode
    for turn, answer_text in zip(turns, "12", strict=True):
        run.sample(turn, answer_text)
    assert "".join(part.choices[0].delta.content for part in second) == "2"
    run.wait_idle(1)
    if dies:
        assert text(run.create(1)) == "1"
        run.wait_idle(1)
    else:
        assert "".join(part.choices[0].delta.content for part in first) == "1"
    assert (len(run.turns()), run.untrained()) == (2, 0)
