"""The open ``FollowVersions`` requests at the store: one of each trainer and rollout, nearly all of the time.

They are kept apart from the requests that wait for work or batches: those are judged anew in every round of the store,
these only when the newest version or the membership changed, or when their wait is over.
"""

from __future__ import annotations

import math

from msgspec import Struct

from ...core.types import Life
from ...transport.control.endpoints import Incoming
from ...transport.messages import Holder
from .store import Store
from .types import Answer, Denied, FollowVersions, NewestVersion, NotYet


def report_and_look(store: Store, request: FollowVersions) -> NewestVersion | NotYet | Denied:
    """Report what the asker serves, and return the newest version that is known then."""
    holder = Holder(request.life, request.serves or "", request.holds if request.serves else None)
    return store.report_version(holder) or store.newest_version or NotYet()


class _Waiting(Struct):
    incoming: Incoming
    until: float


class Followers:
    """The requests that wait at ``store``. ``now`` is the time of the server's loop, in seconds."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: dict[Life, _Waiting] = {}
        self._arrived: set[Life] = set()
        self._told: NewestVersion | None = None
        """the newest version when all requests were judged last"""
        self._judge_all = False

    def add(self, incoming: Incoming, now: float) -> None:
        """Take in a request. An earlier one of the same life is dropped: its asker waits for this one."""
        life = incoming.message.life
        self._waiting[life] = _Waiting(incoming, now + incoming.message.wait)
        self._arrived.add(life)

    def membership_changed(self) -> None:
        """Judge every request anew: a life that was unknown may be current by now, another one fenced."""
        self._judge_all = True

    @property
    def due(self) -> float:
        """When the first wait is over; inf: nobody waits."""
        return min((waiting.until for waiting in self._waiting.values()), default=math.inf)

    def answers(self, now: float) -> list[tuple[Incoming, Answer]]:
        """Return the answers that can be given now; their requests do not wait any more."""
        for life in self._arrived:
            report_and_look(self._store, self._waiting[life].incoming.message)
        changed = self._store.newest_version is not self._told
        self._told = self._store.newest_version
        lives = list(self._waiting) if changed or self._judge_all or self.due <= now else list(self._arrived)
        self._judge_all = False
        self._arrived.clear()
        answers: list[tuple[Incoming, Answer]] = []
        for life in lives:
            waiting = self._waiting[life]
            answer = report_and_look(self._store, waiting.incoming.message)
            known = waiting.incoming.message.known
            is_news = isinstance(answer, Denied) or (isinstance(answer, NewestVersion) and answer.version != known)
            if is_news or waiting.until <= now:
                answers.append((waiting.incoming, answer))
                del self._waiting[life]
        return answers
