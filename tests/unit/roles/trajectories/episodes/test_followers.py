"""Open requests for the tokens of turns are evaluated only after a change of their turn, and answered once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rrl.roles.trajectories.episodes.followers import TurnFollowers
from rrl.roles.trajectories.episodes.requests import EndTurn, EpisodeItem, EpisodeRequest, Follow, TurnTokens
from rrl.roles.trajectories.server import answer
from rrl.roles.trajectories.store import Store
from rrl.roles.trajectories.types import Denied, Done, NotReady
from rrl.tests.support.roles.trajectories.agents import (
    AGENTS,
    CREW,
    ask,
    episodes,
    fail,
    finish,
    is_over,
    open_agents_store,
    turn,
)
from rrl.tests.support.roles.trajectories.crew import ROLLOUT, lease, segment
from rrl.transport.control.endpoints import Incoming


class _Scene:
    """A store with open requests for the tokens of its turns, and a count of how often such requests were evaluated."""

    def __init__(self, folder: Path) -> None:
        self.store = open_agents_store(folder)
        self.evaluated = 0
        scene = self

        class CountedEpisodes:
            def answer(self, request: EpisodeRequest) -> Any:
                scene.evaluated += 1
                return scene.store.episodes.answer(request)

        self.followers = TurnFollowers(CountedEpisodes(), self.store.changed_turns)  # type: ignore[arg-type]
        self.now = 0.0
        self._ids = 0

    def follow(self, number: int, offset: int = 0, wait: float = 5.0, request_id: int | None = None) -> int:
        self._ids += 1
        identity = self._ids if request_id is None else request_id
        self.followers.add(Incoming(b"peer", identity, Follow(AGENTS, number, offset, wait)), self.now)
        return identity

    def answers(self) -> dict[int | None, object]:
        """Return the answers of a round, by the id of their request."""
        return {incoming.request_id: given for incoming, given in self.followers.answers(self.now)}


@pytest.fixture
def scene(tmp_path: Path) -> _Scene:
    return _Scene(tmp_path)


def _grow(store: Store, number: int, offset: int, tokens: tuple[int, ...], ends: bool = False) -> None:
    lease(store)
    assert store.append(ROLLOUT, [segment(number, offset, tokens)], (number,) if ends else ()) == Done()


def _opened(scene: _Scene) -> tuple[EpisodeItem, int, int]:
    (item,) = episodes(scene.store, 1)
    return item, ask(scene.store, item, "a"), ask(scene.store, item, "b")


def test_request_is_evaluated_only_on_arrival_and_when_its_turn_has_changed(scene: _Scene) -> None:
    _, first, second = _opened(scene)
    one, other = scene.follow(first), scene.follow(second)
    assert scene.answers() == {}
    assert scene.evaluated == 2
    for _ in range(10):
        assert scene.answers() == {}
    assert scene.evaluated == 2
    _grow(scene.store, second, 0, (5, 6))
    (identity, tokens), *rest = scene.answers().items()
    assert (identity, rest, scene.evaluated) == (other, [], 3)
    assert isinstance(tokens, TurnTokens)
    assert tokens.tokens == (5, 6)
    _grow(scene.store, first, 0, (7,))
    assert list(scene.answers()) == [one]
    assert scene.followers.due == float("inf")


def test_request_for_tokens_that_are_there_is_answered_at_once(scene: _Scene) -> None:
    item, *_ = _opened(scene)
    number = turn(scene.store, item, (9,), (5, 6))
    identity = scene.follow(number)
    given = scene.answers()[identity]
    assert isinstance(given, TurnTokens)
    assert given.finished


def test_request_without_new_tokens_is_answered_when_its_wait_ends(scene: _Scene) -> None:
    _, first, second = _opened(scene)
    late, early = scene.follow(first, wait=5.0), scene.follow(second, wait=2.0)
    assert scene.answers() == {}
    assert scene.followers.due == 2.0
    scene.now = 2.0
    assert scene.answers() == {early: NotReady()}
    assert scene.followers.due == 5.0
    scene.now = 9.0
    assert scene.answers() == {late: NotReady()}


def test_repeated_request_gets_one_answer(scene: _Scene) -> None:
    _, first, _ = _opened(scene)
    identity = scene.follow(first)
    scene.answers()
    scene.follow(first, request_id=identity)
    assert scene.answers() == {}
    _grow(scene.store, first, 0, (5,))
    assert list(scene.answers()) == [identity]
    assert scene.answers() == {}


@pytest.mark.parametrize("change", ["end", "fail", "finish", "drop", "die", "fence"])
def test_followers_are_notified_of_every_end_of_a_turn(scene: _Scene, change: str) -> None:
    store = scene.store
    item, first, _ = _opened(scene)
    done = turn(store, item, (9,), (4, 4))
    _grow(store, first, 0, (5, 6))
    identity = scene.follow(first, 2)
    scene.answers()
    if change == "end":
        answer(store, EndTurn(AGENTS, first, 2))
    elif change == "fail":
        fail(store, item)
    elif change == "finish":
        finish(store, item)
        assert done
    elif change == "drop":
        store.drop_uncommitted("the run is complete")
    else:
        store.update_membership([each for each in CREW if each != AGENTS])
        if change == "fence":
            scene.followers.membership_changed()
    given = scene.answers()[identity]
    if change == "end":
        assert isinstance(given, TurnTokens)
        assert given.finished
    elif change in ("die", "fence"):
        assert isinstance(given, Denied)
        assert given.fenced
    else:
        assert is_over(given)


def test_membership_change_evaluates_every_request_again(scene: _Scene) -> None:
    _, first, second = _opened(scene)
    both = {scene.follow(first), scene.follow(second)}
    scene.answers()
    scene.store.update_membership([each for each in CREW if each != AGENTS])
    scene.followers.membership_changed()
    assert scene.answers().keys() == both
