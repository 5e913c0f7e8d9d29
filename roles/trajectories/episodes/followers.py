"""The open requests for further tokens of turns, which are evaluated only when their turn has changed.

Agents wait for tokens most of the time, so nearly every running call has such a request open. They are stored apart
from requests for work or batches, which are evaluated in every round of the server.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count
from math import inf

from msgspec import Struct

from ....transport.control.endpoints import Incoming
from ..types import NotReady
from .requests import Follow, StoreAnswer
from .rules import Episodes

_Key = tuple[bytes, int]
"""Peer and id of a request: a peer that repeats a waiting request receives one answer."""


class _Waiting(Struct, frozen=True):
    """An open request, and the time (s) until which it waits."""

    incoming: Incoming
    turn: int
    until: float


class TurnFollowers:
    """The open ``Follow`` requests at a store. ``now`` is the time of the server's loop in seconds.

    Args:
        episodes: The rules that answer the requests.
        changed: The turns that have changed. This class clears the set whenever it evaluates requests.
    """

    def __init__(self, episodes: Episodes, changed: set[int]) -> None:
        self._episodes = episodes
        self._changed = changed
        self._waiting: dict[_Key, _Waiting] = {}
        self._by_turn: dict[int, set[_Key]] = {}
        self._due: list[tuple[float, _Key]] = []
        """(loop time in seconds at which the wait ends, request) of all requests. Entries of answered or repeated
        requests are skipped."""
        self._arrived: set[_Key] = set()
        self._evaluate_all = False
        self._unnumbered = count(-1, -1)

    def add(self, incoming: Incoming, now: float) -> None:
        """Add a request, which replaces an earlier one with the same id."""
        request: Follow = incoming.message
        number = next(self._unnumbered) if incoming.request_id is None else incoming.request_id
        key = incoming.peer, number
        self._remove(key)
        self._waiting[key] = _Waiting(incoming, request.turn, now + request.wait)
        self._by_turn.setdefault(request.turn, set()).add(key)
        heappush(self._due, (now + request.wait, key))
        self._arrived.add(key)

    def membership_changed(self) -> None:
        """Evaluate every request again in the next round, because its sender may have become current or fenced."""
        self._evaluate_all = True

    @property
    def due(self) -> float:
        """Loop time (s) at which the first wait is over; inf without requests."""
        while self._due and not self._is_due(*self._due[0]):
            heappop(self._due)
        return self._due[0][0] if self._due else inf

    def _is_due(self, until: float, key: _Key) -> bool:
        return key in self._waiting and self._waiting[key].until == until

    def answers(self, now: float) -> Iterator[tuple[Incoming, StoreAnswer]]:
        """Yield the answers that can be given now, and remove their requests."""
        keys = set(self._waiting) if self._evaluate_all else self._arrived
        for turn in self._changed & self._by_turn.keys():
            keys |= self._by_turn[turn]
        while self.due <= now:
            keys.add(heappop(self._due)[1])
        self._arrived, self._evaluate_all = set(), False
        self._changed.clear()
        for key in sorted(keys):
            waiting = self._waiting[key]
            answer = self._episodes.answer(waiting.incoming.message)
            if answer != NotReady() or waiting.until <= now:
                self._remove(key)
                yield waiting.incoming, answer

    def _remove(self, key: _Key) -> None:
        if (waiting := self._waiting.pop(key, None)) is not None:
            followers = self._by_turn[waiting.turn]
            followers.discard(key)
            if not followers:
                del self._by_turn[waiting.turn]
