"""A guest without an engine: it holds the baton of a node while the trainer lends, and gives it back when asked."""

from __future__ import annotations

import threading
import time

from rrl.core.types import Incarnation, NodeName, guest_id
from rrl.roles.lending.baton import GuestBaton
from rrl.transport.keys import RunKeys

_POLL_S = 0.002


class Guest:
    """A guest in a thread of this process. ``turns`` counts how often it had the GPUs."""

    def __init__(self, run: str, node: NodeName, keys: RunKeys, number: int = 1) -> None:
        self.incarnation = Incarnation(guest_id(node), number)
        self.turns = 0
        self.awake = threading.Event()
        self._ended = threading.Event()
        self._baton = GuestBaton(run, node, 0, keys.secret, self.incarnation)
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()
        self._baton.close()

    def _live(self) -> None:
        while self._baton.wait_until_ours(self._ended.is_set, _POLL_S):
            self.turns += 1
            self._baton.ready()
            self.awake.set()
            while not (self._baton.back_requested or self._ended.is_set()):
                time.sleep(_POLL_S)
            self.awake.clear()
            if not self._ended.is_set():
                self._baton.give_back()
