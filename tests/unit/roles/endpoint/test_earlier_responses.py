"""Conversations are put in place of the ids of responses, and forgotten in the order of their last use."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rrl.roles.endpoint.calls.earlier_responses import EarlierResponses
from rrl.roles.endpoint.key import EpisodeKey

KEY = EpisodeKey("run", 0, 1)
ANSWER: list[Any] = [
    {"type": "reasoning", "id": "rs_1f", "content": []},
    {"type": "function_call", "id": "fc_1f_0", "call_id": "call_1f_0"},
]


def ask(earlier: EarlierResponses, given: Any, previous: str | None, response: str) -> Any:
    """Return the input after the conversation was put before it, and keep it under ``response``."""
    body, asked = earlier.whole(KEY, json.dumps({"input": given, "previous_response_id": previous}).encode())
    assert asked is not None
    earlier.keep(KEY, response, ANSWER, asked)
    return json.loads(body)["input"]


def test_a_chain_is_put_together_and_its_size_is_that_of_its_own_items() -> None:
    earlier = EarlierResponses()
    users = [{"role": "user", "content": text} for text in ("go", "on")]
    assert ask(earlier, "go", None, "one") == "go"
    size = earlier.size
    assert ask(earlier, [users[1]], "one", "two") == [users[0], *ANSWER, users[1]]
    assert ask(earlier, [], "two", "three") == [users[0], *ANSWER, users[1], *ANSWER]
    assert earlier.size < 3 * size
    ask(earlier, "go", None, "one")
    assert earlier.size < 3 * size, "an answer that was repeated counts twice"


def test_what_was_used_least_recently_is_forgotten_first() -> None:
    earlier = EarlierResponses(max_bytes=1000)
    ask(earlier, "x" * 300, None, "first")
    ask(earlier, "y" * 300, None, "other")
    ask(earlier, "on", "first", "second")
    ask(earlier, "z" * 100, None, "third")
    assert earlier.size <= 1000
    body = json.dumps({"input": "on", "previous_response_id": "other"}).encode()
    assert earlier.whole(KEY, body) == (body, None)
    assert len(ask(earlier, "on", "second", "fourth")) == 7


def test_items_stand_for_the_references_to_them_once() -> None:
    earlier = EarlierResponses()
    ask(earlier, "go", None, "resp_1f")
    named = [{"type": "item_reference", "id": name} for name in ("rs_1f", "fc_1f_0", "fc_1f_0", "fc_2f_0", "", "rs_1")]
    user = {"role": "user", "content": 'no "item_reference"'}
    assert ask(earlier, [user, *named, 7], None, "resp_2f") == [user, *ANSWER, *named[2:], 7]


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"previous_response_id": 1, "input": "on"}'),
        *(b'{"previous_response_id": "one", "input": 1}', b'{"previous_response_id": "one"}', b'{"input": {}}'),
    ],
)
def test_what_cannot_be_read_is_left_to_the_parser(body: bytes) -> None:
    earlier = EarlierResponses()
    ask(earlier, "go", None, "one")
    assert earlier.whole(KEY, body) == (body, None)
