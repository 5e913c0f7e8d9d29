"""The responses that a later request may name by their id, instead of sending their conversation again.

Only the process that has answered knows them. So after its restart no id is found; agents of the run begin again then.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Raw, Struct

from ..key import EpisodeKey

MAX_BYTES = 2**26
"""Maximum size of all items that are kept (bytes); those that were used least recently are forgotten."""


class Asked(Struct, frozen=True):
    """What is kept of a request for the later ones."""

    previous: str
    """Id of the response that it continues; empty if it has its whole conversation."""
    items: bytes
    """Its own items, as JSON, divided by commas."""


class _Body(Struct):
    input: Raw = Raw(b"null")
    previous_response_id: str | None = None
    store: bool | None = None


class EarlierResponses:
    """Keeps conversations, and puts them before the input of the requests that continue them.

    Args:
        max_bytes: Maximum size of all items that are kept (bytes).
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._kept: OrderedDict[tuple[EpisodeKey, str], Asked] = OrderedDict()
        self._max_bytes, self.size = max_bytes, 0

    def whole(self, key: EpisodeKey, body: bytes) -> tuple[bytes, Asked | None]:
        """Return a body with its whole conversation, and what :meth:`keep` needs; None if nothing is to be kept.

        A body that names no response of this attempt, or cannot be read, is returned as it is: its parser refuses it.
        """
        try:
            given = msgspec.json.decode(body, type=_Body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return body, None
        previous, own = given.previous_response_id or "", _items(bytes(given.input))
        if previous:
            if own is None or (earlier := self._conversation(key, previous)) is None:
                return body, None
            fields = msgspec.json.decode(body, type=dict[str, Raw])
            del fields["previous_response_id"]
            fields["input"] = Raw(b"[%s]" % b",".join(filter(None, (*earlier, own))))
            body = msgspec.json.encode(fields)
        return body, None if own is None or given.store is False else Asked(previous, own)

    def keep(self, key: EpisodeKey, response: str, output: Sequence[dict[str, Any]], asked: Asked) -> None:
        """Keep the items of a request and of its complete response."""
        answered = msgspec.json.encode(output)[1:-1]
        self._forget((key, response))
        self._kept[key, response] = kept = Asked(asked.previous, b",".join(filter(None, (asked.items, answered))))
        self.size += len(kept.items)
        while self.size > self._max_bytes:
            self._forget(next(iter(self._kept)))

    def _conversation(self, key: EpisodeKey, response: str) -> list[bytes] | None:
        """Return the items up to a response; None if one of its requests is not kept."""
        pieces: list[bytes] = []
        while response:
            if (kept := self._kept.get((key, response))) is None:
                return None
            self._kept.move_to_end((key, response))
            pieces.append(kept.items)
            response = kept.previous
        return pieces[::-1]

    def _forget(self, name: tuple[EpisodeKey, str]) -> None:
        if (kept := self._kept.pop(name, None)) is not None:
            self.size -= len(kept.items)


def _items(given: bytes) -> bytes | None:
    """Return the items of an input, divided by commas; None if it is neither a text nor a list."""
    if given.startswith(b'"'):
        return b'{"role":"user","content":%s}' % given
    return given[1:-1].strip() if given.startswith(b"[") else None
