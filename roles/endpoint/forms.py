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
from .replies.chat_reply import ChatWriter
from .replies.writer import Writer


class Form(Struct, frozen=True):
    """An API in which agents ask for answers."""

    path: str
    """Path of its requests after ``/v1``."""
    parse: Callable[[bytes, Policy], Call]
    """Translates a body. Raises ApiError."""
    writer: type[Writer]
    error: Callable[[ApiError], dict[str, Any]] = lambda error: error.body
    """Returns the body of an error."""


FORMS: Mapping[str, Form] = {
    "chat": Form("/chat/completions", parse_chat, ChatWriter),
    "completions": Form("/completions", parse_completion, ChatWriter),
}
"""The forms by the names that :attr:`.calls.call.Call.wire` has."""


def form_at(path: str) -> Form | None:
    """Return the form whose requests have this path, with or without ``/v1``; None if no form has it."""
    return next((form for form in FORMS.values() if path.removeprefix("/v1") == form.path), None)


def error_body(path: str, error: ApiError) -> dict[str, Any]:
    """Return the body of an error in the form of the requests at a path; in OpenAI's form at any other path."""
    form = form_at(path)
    return error.body if form is None else form.error(error)
