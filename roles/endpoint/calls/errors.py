"""The errors that the endpoint answers with, as OpenAI's clients expect them."""

from __future__ import annotations

import json
from typing import Any

_MAX_CHARS = 1000
"""Maximum number of characters of a message, and of the name of a key, both of which may repeat parts of a body."""


class ApiError(Exception):
    """A request that is answered with an error.

    Args:
        status: HTTP status.
        message: What is wrong, and what would be right.
        type: OpenAI's type of the error.
        code: OpenAI's code of the error, which programs compare.
        param: Key of the body that is wrong.
        retry_after: Seconds after which OpenAI's clients repeat the request; None if they may choose the time.
    """

    def __init__(
        self,
        status: int,
        message: str,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        message, param = message[:_MAX_CHARS], param and param[:_MAX_CHARS]
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": type, "param": param, "code": code}}
        self.headers = {} if retry_after is None else {"retry-after": f"{retry_after:g}"}


def wrong(key: str, problem: str) -> ApiError:
    """Return the error for a key of the body whose value is invalid."""
    return ApiError(400, f"{key}: {problem}", code="invalid_value", param=key)


def unsupported(key: str, value: Any, problem: str) -> ApiError:
    """Return the error for a value that is valid in OpenAI's API, but not supported here."""
    shown = json.dumps(value)[:40]
    return ApiError(400, f"{key} = {shown} is not supported: {problem}", code="unsupported_value", param=key)
