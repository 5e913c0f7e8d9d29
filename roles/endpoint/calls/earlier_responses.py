"""The responses that a later request may name by their ids, or by those of their items, instead of sending them again.

Only the process that has answered knows them. So after its restart no id is found; agents of the run begin again then.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
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


class _Kept(Struct, frozen=True):
    asked: Asked
    output: dict[str, bytes]
    """The items of the response by their ids."""

    @property
    def size(self) -> int:
        return len(self.asked.items) + sum(map(len, self.output.values()))


class _Item(Struct):
    id: str = ""
    type: str = ""


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
        self._kept: OrderedDict[tuple[EpisodeKey, str], _Kept] = OrderedDict()
        self._max_bytes, self.size = max_bytes, 0

    def whole(self, key: EpisodeKey, body: bytes) -> tuple[bytes, Asked | None]:
        """Return a body with its whole conversation, and what :meth:`keep` needs; None if nothing is to be kept.

        A body that names no response of this attempt, or cannot be read, is returned as it is: its parser refuses it.
        """
        try:
            given = msgspec.json.decode(body, type=_Body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return body, None
        previous, sent = given.previous_response_id or "", _items(bytes(given.input))
        if sent is None or (earlier := self._conversation(key, previous)) is None:
            return body, None
        own = self._resolved(key, sent) if b'"item_reference"' in sent else sent
        if earlier or own is not sent:
            fields = msgspec.json.decode(body, type=dict[str, Raw])
            fields.pop("previous_response_id", None)
            fields["input"] = Raw(b"[%s]" % b",".join(filter(None, (*earlier, own))))
            body = msgspec.json.encode(fields)
        return body, None if given.store is False else Asked(previous, own)

    def keep(self, key: EpisodeKey, response: str, output: Sequence[dict[str, Any]], asked: Asked) -> None:
        """Keep the items of a request and of its complete response."""
        self._forget((key, response))
        items = {item["id"]: msgspec.json.encode(item) for item in output}
        self._kept[key, response] = kept = _Kept(asked, items)
        self.size += kept.size
        while self.size > self._max_bytes:
            self._forget(next(iter(self._kept)))

    def _conversation(self, key: EpisodeKey, response: str) -> list[bytes] | None:
        """Return the items up to a response; None if one of its requests is not kept."""
        pieces: list[bytes] = []
        while response:
            if (kept := self._kept.get((key, response))) is None:
                return None
            self._kept.move_to_end((key, response))
            pieces += b",".join(kept.output.values()), kept.asked.items
            response = kept.asked.previous
        return pieces[::-1]

    def _resolved(self, key: EpisodeKey, items: bytes) -> bytes:
        """Return items in which the known ones stand for the references to them. Only the first reference counts."""
        resolved, known = [], set()
        for raw in msgspec.json.decode(b"[%s]" % items, type=list[Raw]):
            with suppress(msgspec.MsgspecError):
                item = msgspec.json.decode(raw, type=_Item)
                if item.type == "item_reference" and item.id not in known:
                    known.add(item.id)
                    raw = Raw(self._item(key, item.id) or raw)
            resolved.append(bytes(raw))
        return b",".join(resolved)

    def _item(self, key: EpisodeKey, name: str) -> bytes | None:
        """Return the item of a response with this id; None if it is not known."""
        _, _, rest = name.partition("_")
        kept = self._kept.get((key, f"resp_{rest.partition('_')[0]}"))
        return None if kept is None else kept.output.get(name)

    def _forget(self, name: tuple[EpisodeKey, str]) -> None:
        if (kept := self._kept.pop(name, None)) is not None:
            self.size -= kept.size


def _items(given: bytes) -> bytes | None:
    """Return the items of an input, divided by commas; None if it is neither a text nor a list."""
    if given.startswith(b'"'):
        return b'{"role":"user","content":%s}' % given
    return given[1:-1].strip() if given.startswith(b"[") else None
