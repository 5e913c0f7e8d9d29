"""Requests of the manager that the role's main thread must handle: probes and self-inflicted faults.

A probe asks a suspected role for a small piece of real work. The connection's thread receives it; its handler runs in
the thread that registered it, at that thread's next call of the worker API. An engine that hangs holds that thread, so
that no answer comes, although heartbeats of the connection's thread continue and prove nothing.

Of the faults, an exit happens at once in the connection's thread. The others happen in the role's own thread at its
next call of the worker API, where a real fault would hit its code too; the acknowledgement is sent before.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable

from ...core.faults import ANSWER_SENDING_S, Fault, FaultKind
from ...core.launch import Launch
from ...core.types import Life, NodeName, ProbeResult
from ...transport.messages import Inject, Injected, Probe, Probed

NEEDED = 64 * 2**20
"""bytes: twice the most that malloc takes from what it holds (mallopt(3), M_MMAP_THRESHOLD), so that the kernel is
asked"""


class InjectedError(RuntimeError):
    """Raised on demand in the role's own code (``rrl inject``, ``[faults]``)."""


class OwnFaults:
    """``tell`` says something to the manager; ``soon(seconds, do)`` has the link's loop do it then."""

    def __init__(
        self, launch: Launch, node: NodeName, tell: Callable[[Injected], None],
        soon: Callable[[float, Callable[[], object]], object],
    ) -> None:  # fmt: skip
        self.launch, self._node, self._tell, self._soon = launch, node, tell, soon
        self._waiting: Fault | None = None

    def order(self, order: Inject) -> None:
        """In the link's thread."""
        fault = order.fault
        if order.tag != self.launch.tag:
            self._answer(fault, False, f"{order.tag} was meant; this is {self.launch.tag}")
        elif fault.kind is FaultKind.EXIT:
            self._answer(fault, True, f"it ends itself with exit code {fault.amount:g}")
            self._soon(ANSWER_SENDING_S, lambda: os._exit(int(fault.amount)))
        elif fault.kind not in (FaultKind.EXCEPTION, FaultKind.ENGINE_DEAD, FaultKind.OUT_OF_MEMORY):
            self._answer(fault, False, f"a role cannot do {fault.kind} to itself")
        elif self._waiting is not None:
            self._answer(fault, False, f"{self._waiting.kind} is still to strike")
        else:
            self._waiting = fault

    def strike(self, *, working: bool = False) -> None:
        """Perform a fault that waits for the role's own thread, which calls this at each call of the worker API.

        ``working``: the call reports finished work. Raises InjectedError or MemoryError, as the fault demands."""
        fault = self._waiting
        if fault is None or (fault.kind is FaultKind.ENGINE_DEAD and not working):
            return
        self._waiting = None
        if fault.kind is FaultKind.OUT_OF_MEMORY:  # the agent has limited us: it fails as any other would
            bytearray(NEEDED)
            return
        if fault.kind is FaultKind.EXCEPTION:
            self._answer(fault, True, "InjectedError is raised in the role's thread")
            time.sleep(ANSWER_SENDING_S)
            raise InjectedError(f"injected fault {fault.id}")
        self._answer(fault, True, "its calls of the worker API block; it goes on to beat")
        threading.Event().wait(fault.seconds or None)
        self._answer(fault, True, "its calls go on", ended=True)

    def _answer(self, fault: Fault, ok: bool, detail: str, ended: bool = False) -> None:
        self._tell(Injected(fault, ok, detail, self.launch.life, self._node, ended))


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
