"""Probes: a suspected role is asked for a bit of real work, and its own thread has to do it.

The link's thread takes the question; the answer is the role's: its handler runs in the thread that registered it, at
that thread's next call of the worker API. An engine that is stuck keeps the thread, so that no answer comes, while the
beats of the link's thread go on and prove nothing.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from rrl.spec.words import Life, ProbeResult
from rrl.transport.messages import Probe, Probed

Handler = Callable[[], object]
"""Does some work and may say in a few words what it did. What it raises is told as the reason why it could not."""
_TOLD = 300
"""characters of an answer"""


class Probes:
    """Of one worker. ``tell`` says something to the manager."""

    def __init__(self, tell: Callable[[Probed], None]) -> None:
        self._tell = tell
        self._handler: Handler | None = None
        self._thread = 0
        self._asked: deque[Probe] = deque(maxlen=1)
        """the newest, not answered yet: put by the link's thread, taken by the role's"""

    def on_probe(self, handler: Handler) -> None:
        """``handler`` answers from now on, in this thread."""
        self._thread = threading.get_ident()
        self._handler = handler

    def asked(self, probe: Probe, life: Life) -> None:
        """In the link's thread. ``life``: whose this process is."""
        if probe.life != life:
            return
        if self._handler is None:
            self._tell(Probed(life, probe.id, ProbeResult.NO_HANDLER))
        else:
            self._asked.append(probe)

    def answer(self) -> None:
        """At each call of the API: if there is a question, and this is the thread that can answer it. Raises nothing:
        what becomes of a role whose probe fails is the manager's to decide."""
        if not self._asked or self._handler is None or threading.get_ident() != self._thread:
            return
        probe = self._asked.popleft()  # first: the handler may itself call the API
        try:
            said = self._handler()
        except Exception as error:
            self._tell(Probed(probe.life, probe.id, ProbeResult.FAILED, f"{type(error).__name__}: {error}"[:_TOLD]))
        else:
            self._tell(Probed(probe.life, probe.id, ProbeResult.WORKS, str(said or "")[:_TOLD]))
