"""Where a conversation's messages of the system and of developers are shown to the model.

Agents send such messages at any place. The leading ones become one message; a model without a system's message gets
their text in the first user's message. A later one stays at its place if the model's format shows it there. Otherwise
its text is added to the tool's result or the user's message beside it: to the one before it if there is one since the
last answer, so that a result of a tool is not followed by a user's turn. No text moves across an answer, so that what
the model has seen stays the beginning of what it sees next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from .conversation import ASSISTANT, DEVELOPER, SYSTEM, USER, Message, SystemPlaces, ToolCall

SYSTEM_ROLES = (SYSTEM, DEVELOPER)
"""The roles of instructions."""
_MARK = "1000000"
_ASKED, _ANSWERED = Message(USER, "1000001"), Message(ASSISTANT, "1000002")
_CALLED = Message(ASSISTANT, "", tool_calls=(ToolCall("call_1", "look_up", '{"word": "heat"}'),))
_PLACES: tuple[tuple[tuple[Message, ...], tuple[Message, ...]], ...] = (
    ((_ASKED,), ()),
    ((_ASKED, _ANSWERED), (_ASKED,)),
    ((_ASKED, _CALLED, Message("tool", "1000003", "look_up", tool_call_id="call_1")), ()),
)
"""The messages before and after each later place at which a system's message is tried."""


def find_places(roles: Iterable[str], show: Callable[[Sequence[Message]], str]) -> SystemPlaces:
    """Return the places at which a format shows messages of ``roles``.

    ``show`` returns the text of a conversation, or raises an exception.
    """

    def shown(role: str, before: Sequence[Message], after: Sequence[Message]) -> bool:
        try:
            show([*before, *after])
        except Exception:  # the format refuses this conversation anyway
            return True
        try:
            shows = show([*before, Message(role, _MARK), *after])
        except Exception:  # a template may raise any
            return False
        return _MARK in shows and all(shows.find(message.content) < shows.find(_MARK) for message in before)

    first = frozenset(role for role in roles if shown(role, (), (_ASKED,)))
    return SystemPlaces(first, frozenset(role for role in first if all(shown(role, *place) for place in _PLACES)))


def place_system(messages: Sequence[Message], places: SystemPlaces, begins: bool = True) -> list[Message]:
    """Return messages with those of the system and of developers where a format shows them.

    Args:
        messages: A conversation, or its part after an answer.
        places: The places at which the format shows such messages.
        begins: True if ``messages`` begin the conversation.
    """
    leading = next((at for at, each in enumerate(messages) if each.role not in SYSTEM_ROLES), len(messages))
    leading *= begins
    made: list[Message] = []
    text = ""
    """Text for the next message, which is not an answer."""
    if leading:
        joined = Message(messages[0].role, "\n\n".join(each.content for each in messages[:leading] if each.content))
        given = messages[0] if leading == 1 else joined
        if (role := _shown_role(given.role, places.first)) is not None:
            made.append(msgspec.structs.replace(given, role=role))
        else:
            text = joined.content
    for message in messages[leading:]:
        if message.role not in SYSTEM_ROLES:
            if text and message.role == ASSISTANT:
                made.append(Message(USER, text))
            elif text:
                message = _joined(Message(message.role, text), message, message)
            made.append(message)
            text = ""
        elif (role := _shown_role(message.role, places.later)) is not None:
            made.append(msgspec.structs.replace(message, role=role))
        elif made and made[-1].role not in (ASSISTANT, *SYSTEM_ROLES) and message.content:
            made[-1] = _joined(made[-1], message, made[-1])
        elif message.content:
            text += "\n\n" * bool(text) + message.content
    return [*made, Message(USER, text)] if text else made


def _shown_role(role: str, shown: frozenset[str]) -> str | None:
    """Return the role as which a format shows a message: a developer's may be the system's; None if it does not."""
    return role if role in shown else SYSTEM if SYSTEM in shown else None


def _joined(first: Message, second: Message, into: Message) -> Message:
    """Return the message ``into`` with the text of two messages, of which it is one."""
    parts = (first.parts or (first.content,), second.parts or (second.content,))
    texts = (*parts[0][:-1], f"{parts[0][-1]}\n\n{parts[1][0]}", *parts[1][1:]) if into.parts else ()
    content = "\n\n".join(message.content for message in (first, second) if message.content)
    return msgspec.structs.replace(into, content=content, parts=texts)
