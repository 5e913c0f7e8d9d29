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
from ...core.types import Incarnation, NodeName, ProbeResult
from ...transport.messages import Inject, Injected, Probe, ProbeReply

PROBE_ALLOCATION_BYTES = 64 * 2**20
"""bytes: twice the most that malloc takes from what it holds (mallopt(3), M_MMAP_THRESHOLD), so that the kernel is
asked"""


class InjectedError(RuntimeError):
    """Raised on demand in the role's own code (``rrl inject``, ``[faults]``)."""


class SelfFaults:
    """``tell`` says something to the manager; ``soon(seconds, do)`` has the link's loop do it then."""

    def __init__(
        self, launch: Launch, node: NodeName, send: Callable[[Injected], None],
        call_later: Callable[[float, Callable[[], object]], object],
    ) -> None:  # fmt: skip
        self.launch, self._node, self._send, self._call_later = launch, node, send, call_later
        self._pending: Fault | None = None

    def request(self, injection: Inject) -> None:
        """In the link's thread."""
        fault = injection.fault
        if injection.tag != self.launch.tag:
            self._answer(fault, False, f"{injection.tag} was meant; this is {self.launch.tag}")
        elif fault.kind is FaultKind.EXIT:
            self._answer(fault, True, f"it ends itself with exit code {fault.amount:g}")
            self._call_later(ANSWER_SENDING_S, lambda: os._exit(int(fault.amount)))
        elif fault.kind not in (FaultKind.EXCEPTION, FaultKind.ENGINE_DEAD, FaultKind.OUT_OF_MEMORY):
            self._answer(fault, False, f"a role cannot do {fault.kind} to itself")
        elif self._pending is not None:
            self._answer(fault, False, f"{self._pending.kind} is still to strike")
        else:
            self._pending = fault

    def trigger(self, *, working: bool = False) -> None:
        """Perform a fault that waits for the role's own thread, which calls this at each call of the worker API.

        ``working``: the call reports finished work. Raises InjectedError or MemoryError, as the fault demands."""
        fault = self._pending
        if fault is None or (fault.kind is FaultKind.ENGINE_DEAD and not working):
            return
        self._pending = None
        if fault.kind is FaultKind.OUT_OF_MEMORY:  # the agent has limited us: it fails as any other would
            bytearray(PROBE_ALLOCATION_BYTES)
            return
        if fault.kind is FaultKind.EXCEPTION:
            self._answer(fault, True, "InjectedError is raised in the role's thread")
            time.sleep(ANSWER_SENDING_S)
            raise InjectedError(f"injected fault {fault.id}")
        self._answer(fault, True, "its calls of the worker API block; it goes on to beat")
        threading.Event().wait(fault.seconds or None)
        self._answer(fault, True, "its calls go on", ended=True)

    def _answer(self, fault: Fault, ok: bool, detail: str, ended: bool = False) -> None:
        self._send(Injected(fault, ok, detail, self.launch.incarnation, self._node, ended))


Handler = Callable[[], object]
"""Does some work and may say in a few words what it did. What it raises is told as the reason why it could not."""
_MAX_ANSWER_CHARS = 300
"""characters of an answer"""


class ProbeResponder:
    """Of one worker. ``tell`` says something to the manager."""

    def __init__(self, send: Callable[[ProbeReply], None]) -> None:
        self._send = send
        self._handler: Handler | None = None
        self._thread = 0
        self._pending: deque[Probe] = deque(maxlen=1)
        """the newest, not answered yet: put by the link's thread, taken by the role's"""

    def on_probe(self, handler: Handler) -> None:
        """``handler`` answers from now on, in this thread."""
        self._thread = threading.get_ident()
        self._handler = handler

    def on_request(self, probe: Probe, incarnation: Incarnation) -> None:
        """In the link's thread. ``life``: whose this process is."""
        if probe.incarnation != incarnation:
            return
        if self._handler is None:
            self._send(ProbeReply(incarnation, probe.id, ProbeResult.NO_HANDLER))
        else:
            self._pending.append(probe)

    def answer(self) -> None:
        """At each call of the API: if there is a question, and this is the thread that can answer it. Raises nothing:
        what becomes of a role whose probe fails is the manager's to decide."""
        if not self._pending or self._handler is None or threading.get_ident() != self._thread:
            return
        probe = self._pending.popleft()  # first: the handler may itself call the API
        try:
            result = self._handler()
        except Exception as error:
            self._send(
                ProbeReply(
                    probe.incarnation,
                    probe.id,
                    ProbeResult.FAILED,
                    f"{type(error).__name__}: {error}"[:_MAX_ANSWER_CHARS],
                )
            )
        else:
            self._send(
                ProbeReply(probe.incarnation, probe.id, ProbeResult.WORKS, str(result or "")[:_MAX_ANSWER_CHARS])
            )
