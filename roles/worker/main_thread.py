"""Requests of the manager that the role's main thread must handle: probes and self-inflicted faults.

A probe requests a small piece of real work from a suspected role. The connection's thread receives the probe. The
role's handler runs in the thread that registered the handler, at that thread's next call of the worker API. An engine
that hangs blocks that thread, so no answer is sent, although the connection's thread still sends heartbeats.

An injected exit is performed at once in the connection's thread. All other faults are performed in the role's own
thread at its next call of the worker API, where a real fault would also occur. The acknowledgement of a fault is sent
before the fault is performed.
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
"""Bytes allocated to cause a MemoryError: twice the largest size that malloc may serve from memory that it already has
(mallopt(3), M_MMAP_THRESHOLD). So malloc must request memory from the kernel."""


class InjectedError(RuntimeError):
    """An exception that was injected into the role's own code (``rrl inject``, ``[faults]``)."""


class SelfFaults:
    """Performs injected faults of one worker on itself.

    ``send`` sends a message to the manager; ``call_later(seconds, callback)`` schedules a call in the connection's
    loop.
    """

    def __init__(
        self,
        launch: Launch,
        node: NodeName,
        send: Callable[[Injected], None],
        call_later: Callable[[float, Callable[[], object]], object],
    ) -> None:
        self.launch, self._node, self._send, self._call_later = launch, node, send, call_later
        self._pending: Fault | None = None

    def request(self, injection: Inject) -> None:
        """Perform a requested fault if it is an exit; store any other fault for :meth:`trigger`.

        Called in the connection's thread.
        """
        fault = injection.fault
        if injection.tag != self.launch.tag:
            self._answer(fault, False, f"the fault is for step {injection.tag}, but this is step {self.launch.tag}")
        elif fault.kind is FaultKind.EXIT:
            self._answer(fault, True, f"the role exits with code {fault.amount:g}")
            self._call_later(ANSWER_SENDING_S, lambda: os._exit(int(fault.amount)))
        elif fault.kind not in (FaultKind.EXCEPTION, FaultKind.ENGINE_DEAD, FaultKind.OUT_OF_MEMORY):
            self._answer(fault, False, f"a role cannot perform {fault.kind} on itself")
        elif self._pending is not None:
            self._answer(fault, False, f"{self._pending.kind} is still pending in this role")
        else:
            self._pending = fault

    def trigger(self, *, working: bool = False) -> None:
        """Perform a pending fault. The role's thread calls this at each call of the worker API.

        Args:
            working: whether the call reports finished work; ENGINE_DEAD waits for such a call.

        Raises:
            InjectedError: the fault is EXCEPTION.
            MemoryError: the fault is OUT_OF_MEMORY.
        """
        fault = self._pending
        if fault is None or (fault.kind is FaultKind.ENGINE_DEAD and not working):
            return
        self._pending = None
        if fault.kind is FaultKind.OUT_OF_MEMORY:
            bytearray(PROBE_ALLOCATION_BYTES)  # this fails, because the agent has limited the address space
            return
        if fault.kind is FaultKind.EXCEPTION:
            self._answer(fault, True, "the role's thread raises InjectedError")
            time.sleep(ANSWER_SENDING_S)
            raise InjectedError(f"injected fault {fault.id}")
        self._answer(fault, True, "the role's calls of the worker API block; its heartbeats continue")
        threading.Event().wait(fault.seconds or None)
        self._answer(fault, True, "the role's calls of the worker API no longer block", ended=True)

    def _answer(self, fault: Fault, ok: bool, detail: str, ended: bool = False) -> None:
        self._send(Injected(fault, ok, detail, self.launch.incarnation, self._node, ended))


Handler = Callable[[], object]
"""A function that does a small piece of real work and may return a short text about it. An exception means that the
probe failed."""
_MAX_ANSWER_CHARS = 300
"""Maximum number of characters of a handler's text that are sent to the manager."""


class ProbeResponder:
    """Answers the probes of one worker. ``send`` sends a message to the manager."""

    def __init__(self, send: Callable[[ProbeReply], None]) -> None:
        self._send = send
        self._handler: Handler | None = None
        self._thread = 0
        self._pending: deque[Probe] = deque(maxlen=1)
        """The newest unanswered probe, which the connection's thread adds and the role's thread removes."""

    def on_probe(self, handler: Handler) -> None:
        """Register ``handler`` for probes; it runs in the calling thread, inside :meth:`answer`."""
        self._thread = threading.get_ident()
        self._handler = handler

    @property
    def pending(self) -> bool:
        """Whether a probe waits for its answer."""
        return bool(self._pending)

    def on_request(self, probe: Probe, incarnation: Incarnation) -> None:
        """Store a probe for the role's thread, or answer that the role has no handler.

        Called in the connection's thread. ``incarnation`` is the incarnation of this process; a probe for another
        incarnation is ignored.
        """
        if probe.incarnation != incarnation:
            return
        if self._handler is None:
            self._send(ProbeReply(incarnation, probe.id, ProbeResult.NO_HANDLER))
        else:
            self._pending.append(probe)

    def answer(self) -> None:
        """Answer a pending probe if this is the thread that registered the handler.

        Each call of the worker API calls this method. It raises nothing: the manager decides about a failed probe.
        """
        if not self._pending or self._handler is None or threading.get_ident() != self._thread:
            return
        probe = self._pending.popleft()  # removed first, because the handler may call the API, and so this method
        try:
            result = self._handler()
        except BaseException as error:  # the handler is code of the user
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
