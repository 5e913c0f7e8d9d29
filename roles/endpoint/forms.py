"""The forms in which agents send requests and get answers: one row for each API.

A form is translated at the rim only: its body becomes a :class:`.calls.call.Call`, and its writer turns sampled answers
into bytes. Everything between is the same for all forms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from .calls.call import Call, Policy
from .calls.chat_body import parse_chat, parse_completion
from .calls.errors import ApiError
from .calls.messages_body import parse_messages
from .calls.responses_body import parse_responses
from .replies.chat_reply import ChatWriter
from .replies.messages_reply import MessagesWriter, messages_error
from .replies.responses_reply import ResponsesWriter
from .replies.writer import Writer

OVERLOADED = 529
"""Anthropic's status for a request that must be repeated later."""


class Form(Struct, frozen=True):
    """An API in which agents ask for answers."""

    path: str
    """Path of its requests after ``/v1``."""
    parse: Callable[[bytes, Policy], Call]
    """Translates a body. Raises ApiError."""
    writer: type[Writer]
    error: Callable[[ApiError], dict[str, Any]] = lambda error: error.body
    """Returns the body of an error."""
    overloaded: int = 503
    """Status with which the client repeats the request later."""
    last: tuple[bytes, ...] = (b"data: [DONE]",)
    """Beginnings of the event that is the last one of a stream."""
    failed: bytes = b"data: {%(members)s}\n\n"
    """Event of an error in a stream without any other event, around the members of the error's object."""
    names_earlier: bool = False
    """True if a request may name an earlier response instead of its conversation."""
    alive: tuple[bytes, ...] = ()
    """Beginnings of the event that says only that the stream is alive."""


FORMS: Mapping[str, Form] = {
    "chat": Form("/chat/completions", parse_chat, ChatWriter),
    "completions": Form("/completions", parse_completion, ChatWriter),
    "responses": Form(
        "/responses",
        parse_responses,
        ResponsesWriter,
        last=(b"event: response.completed", b"event: response.incomplete"),
        failed=b'event: response.failed\ndata: {"type": "response.failed", "sequence_number": 0, %(members)s,'
        b' "response": {"id": "", "object": "response", "status": "failed", "output": [], %(members)s}}\n\n',
        names_earlier=True,
        alive=(b"event: response.in_progress",),
    ),
    "messages": Form(
        "/messages",
        parse_messages,
        MessagesWriter,
        messages_error,
        OVERLOADED,
        last=(b"event: message_stop",),
        failed=b"event: error\ndata: {%(members)s}\n\n",
        alive=(b"event: ping",),
    ),
}
"""The forms by the names that :attr:`.calls.call.Call.wire` has."""


def form_at(path: str) -> Form | None:
    """Return the form whose requests have this path or one below it, with or without ``/v1``; None if no form has."""
    rest = f"{path.removeprefix('/v1')}/"
    return next((form for form in FORMS.values() if rest.startswith(f"{form.path}/")), None)


def error_reply(path: str, error: ApiError) -> tuple[int, dict[str, Any]]:
    """Return status and body of an error in the form of the requests at a path; in OpenAI's form at any other path."""
    form = form_at(path)
    if form is None:
        return error.status, error.body
    return form.overloaded if error.status == 503 else error.status, form.error(error)
