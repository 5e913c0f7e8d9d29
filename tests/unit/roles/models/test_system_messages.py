from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrl.roles.models.conversation import Message, SystemPlaces
from rrl.roles.models.system_messages import find_places, place_system

BOTH = frozenset({"system", "developer"})
SYSTEM = frozenset({"system"})
NONE: frozenset[str] = frozenset()


def messages(*texts: str) -> list[Message]:
    """Return messages from texts such as ``user a``."""
    return [Message(role, content) for role, _, content in (text.partition(" ") for text in texts)]


@pytest.mark.parametrize(
    ("places", "sent", "placed"),
    [
        (SystemPlaces(SYSTEM), ["system a", "developer b", "user c"], ["system a\n\nb", "user c"]),
        (SystemPlaces(BOTH), ["developer a", "user c"], ["developer a", "user c"]),
        (SystemPlaces(), ["system a", "user c"], ["user a\n\nc"]),
        (SystemPlaces(), ["system a"], ["user a"]),
        (SystemPlaces(), ["system a", "assistant b", "user c"], ["user a", "assistant b", "user c"]),
        (SystemPlaces(SYSTEM), ["user a", "system b"], ["user a\n\nb"]),
        (SystemPlaces(SYSTEM), ["user a", "system b", "developer c"], ["user a\n\nb\n\nc"]),
        (SystemPlaces(SYSTEM), ["user a", "tool b", "system c", "user d"], ["user a", "tool b\n\nc", "user d"]),
        (SystemPlaces(SYSTEM), ["assistant a", "system b", "user c"], ["assistant a", "user b\n\nc"]),
        (SystemPlaces(SYSTEM), ["user a", "assistant b", "system c"], ["user a", "assistant b", "user c"]),
        (SystemPlaces(SYSTEM, SYSTEM), ["user a", "developer b"], ["user a", "system b"]),
        (SystemPlaces(BOTH, BOTH), ["user a", "developer b"], ["user a", "developer b"]),
    ],
)  # fmt: skip
def test_system_messages_are_placed_where_the_format_shows_them(
    places: SystemPlaces, sent: list[str], placed: list[str]
) -> None:
    assert place_system(messages(*sent), places) == messages(*placed)


def test_pieces_of_the_neighbour_remain_pieces() -> None:
    asked = Message("user", "a\nb", parts=("a", "b"))
    after = place_system([asked, Message("system", "c")], SystemPlaces(SYSTEM))
    assert after == [Message("user", "a\nb\n\nc", parts=("a", "b\n\nc"))]
    before = place_system([Message("system", "c"), asked], SystemPlaces())
    assert before == [Message("user", "c\n\na\nb", parts=("c\n\na", "b"))]


roles = st.sampled_from(["system", "developer", "user", "tool", "assistant"])
conversations = st.lists(st.builds(Message, roles, st.text("ab", max_size=2)), max_size=8)


@given(conversations, conversations, st.sampled_from([NONE, SYSTEM, BOTH]), st.booleans())
def test_an_answer_separates_what_is_placed(
    before: list[Message], after: list[Message], first: frozenset[str], kept: bool
) -> None:
    places, answer = SystemPlaces(first, first if kept else NONE), Message("assistant", "x")
    whole = place_system([*before, answer, *after], places)
    assert whole == [*place_system([*before, answer], places), *place_system(after, places, begins=False)]


def test_places_are_found_by_what_a_format_shows() -> None:
    def plain(sent: Sequence[Message]) -> str:
        return " ".join(f"{each.role}:{each.content}" for each in sent)

    def leading(sent: Sequence[Message]) -> str:
        if any(each.role == "system" for each in sent[1:]):
            raise ValueError("the system's message must be the first")
        return plain(sent)

    def hoisting(sent: Sequence[Message]) -> str:
        return plain(sorted(sent, key=lambda each: each.role != "system"))

    def without_tools(sent: Sequence[Message]) -> str:
        if any(each.role == "tool" for each in sent):
            raise ValueError("no tools")
        return plain(sent)

    assert find_places(BOTH, plain) == SystemPlaces(BOTH, BOTH)
    assert find_places(["system"], leading) == find_places(["system"], hoisting) == SystemPlaces(SYSTEM)
    assert find_places(["system"], without_tools) == SystemPlaces(SYSTEM, SYSTEM)
    assert find_places(["system"], lambda sent: plain([each for each in sent if each.role == "user"])) == SystemPlaces()
