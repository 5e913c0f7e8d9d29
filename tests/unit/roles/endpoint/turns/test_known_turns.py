from __future__ import annotations

import asyncio

import msgspec
import pytest

from rrl.roles.endpoint.calls.call import rolling_hashes
from rrl.roles.endpoint.turns import known_turns
from rrl.roles.endpoint.turns.known_turns import KnownTurns
from rrl.roles.endpoint.turns.shown_answer import AnswerFormat
from rrl.roles.endpoint.turns.turn_context import answer_hashes
from rrl.roles.models.conversation import Chat, Message
from rrl.roles.trajectories.client import FencedAttempt
from rrl.roles.trajectories.episodes.requests import Turn
from rrl.tests.support.roles.endpoint.fake_turns import FakeTurns
from rrl.tests.support.roles.endpoint.served import CHAT

encode = CHAT.tokenizer.encode


def opened(turns: FakeTurns, request: str, text: str = "12", episode: int = 0, **more: object) -> int:
    """Open a turn, complete it, and return its number."""
    options = AnswerFormat(**more).encode()  # type: ignore[arg-type]
    attempt = turns.attempts.get(episode, 1)
    number = asyncio.run(turns.open_turn(episode, attempt, request, None, 0, (3,), 4, "h", options))
    turns.sample(number, *encode(text), finished=True)
    return number


def test_complete_turns_are_fetched_once_and_others_each_time() -> None:
    turns = FakeTurns()
    known = KnownTurns(turns, CHAT.tokenizer)
    first = opened(turns, "a/1/0")
    second = asyncio.run(turns.open_turn(0, 1, "b/1/0", None, 0, (3,), 4, ""))
    for _ in range(2):
        read = asyncio.run(known.read(0))
        assert [turn.id for turn in read.turns] == [first, second]
    assert {*turns.holding} == {first}
    turns.sample(second, *encode("1"), finished=True)
    assert [turn.finished for turn in asyncio.run(known.read(0)).turns] == [True, True]
    asyncio.run(known.read(0))
    assert {*turns.holding} == {first, second}


def test_turn_that_is_not_yet_cut_at_its_stop_text_is_not_cached() -> None:
    turns = FakeTurns()
    known = KnownTurns(turns, CHAT.tokenizer)
    kept = [opened(turns, f"{text}/1/0", text, stop=("=",)) for text in ("12", "3=", "45=6")]
    asyncio.run(known.read(0))
    asyncio.run(known.read(0))
    assert turns.holding == tuple(kept[:2])
    asyncio.run(turns.end_turn(kept[2], 3))
    assert asyncio.run(known.read(0)).turns[2].sampled == encode("45=")


def test_cached_turns_of_one_attempt_are_not_used_for_another() -> None:
    turns = FakeTurns()
    known = KnownTurns(turns, CHAT.tokenizer)
    old = opened(turns, "a/1/0")
    asyncio.run(known.read(0))
    turns.begin_attempt(0, 2)
    assert asyncio.run(known.read(0)).turns == ()
    new = opened(turns, "a/1/0")
    assert [turn.id for turn in asyncio.run(known.read(0)).turns] == [new] != [old]


def test_cache_of_turns_is_bounded_over_all_episodes() -> None:
    turns = FakeTurns()
    known = KnownTurns(turns, CHAT.tokenizer, max_weight=100)
    for episode in range(20):
        opened(turns, "a/1/0", episode=episode)
        asyncio.run(known.read(episode))
        assert 0 < known.weight <= 100
    asyncio.run(known.read(19))
    assert len(turns.holding) == 1
    asyncio.run(known.read(0))
    assert not turns.holding, "the episode that was read longest ago was not removed first"


def test_recorded_turns_are_returned_and_never_cached() -> None:
    turns = FakeTurns()
    known = KnownTurns(turns, CHAT.tokenizer)
    recorded = msgspec.structs.replace(turns.turns[opened(turns, "a/1/0", episode=9)], id=5)
    turns.recorded.append(recorded)
    for _ in range(2):
        read = asyncio.run(known.read(0))
        assert (read.turns, read.recorded, turns.holding) == ((), (recorded,), ())


def test_ended_episode_is_reported() -> None:
    class Over(FakeTurns):
        async def get_episode(self, episode: int, holding: object = (), call: str = "") -> object:  # type: ignore[override]
            raise FencedAttempt("over")

    with pytest.raises(FencedAttempt):
        asyncio.run(KnownTurns(Over(), CHAT.tokenizer).read(0))


def test_answer_is_shown_once_however_often_its_conversation_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation of ten turns, whose context is that of the plain computation at each of them."""
    shown: list[int] = []

    def counted(turn: Turn, context: tuple[int, ...], chat: Chat) -> tuple[str, ...]:
        shown.append(turn.id)
        return answer_hashes(turn, context, chat)

    monkeypatch.setattr(known_turns, "answer_hashes", counted)
    turns = FakeTurns()
    known, messages = KnownTurns(turns, CHAT.tokenizer), [Message("user", "1")]
    newest, path = None, CHAT.prompt(messages)
    for number in range(10):
        read = asyncio.run(known.read(0)).turns
        hashes = rolling_hashes(messages)
        answered = asyncio.run(known.newest_answer(0, hashes, read, CHAT))
        assert (None if answered is None else (answered.id, answered.given + answered.sampled)) == newest
        offset, parent = (0, None) if newest is None else (len(newest[1]), newest[0])
        made = asyncio.run(turns.open_turn(0, 1, f"{number}/1/0", parent, offset, path[offset:], 4, hashes[-1]))
        turns.sample(made, *encode("12"), finished=True)
        newest = made, path + encode("12")
        messages += [Message("assistant", "12"), Message("user", str(number))]
        path = CHAT.extend(path, encode("12"), messages, len(messages) - 1) or ()
    assert len(shown) == len(set(shown)) == 9
    asyncio.run(known.newest_answer(0, rolling_hashes(messages), read, CHAT))
    assert len(shown) == 9
