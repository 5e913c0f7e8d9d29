"""Faults that a role commits on itself, ordered by the manager: what no signal from outside can do.

An exit is done at once, by the link's thread. The others strike in the role's own thread at its next call of the worker
API, for there its own code is hit as by a real one. The answer leaves first, or nobody could give it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from rrl.roles.faults import TOLD
from rrl.spec.faults import Fault, FaultKind
from rrl.spec.launch import Launch
from rrl.spec.words import NodeName
from rrl.transport.messages import Inject, Injected

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
            self._soon(TOLD, lambda: os._exit(int(fault.amount)))
        elif fault.kind not in (FaultKind.EXCEPTION, FaultKind.ENGINE_DEAD, FaultKind.OUT_OF_MEMORY):
            self._answer(fault, False, f"a role cannot do {fault.kind} to itself")
        elif self._waiting is not None:
            self._answer(fault, False, f"{self._waiting.kind} is still to strike")
        else:
            self._waiting = fault

    def strike(self, *, working: bool = False) -> None:
        """In the role's thread, at each call of the API; ``working``: at one that tells of work done. Raises
        InjectedError or MemoryError."""
        fault = self._waiting
        if fault is None or (fault.kind is FaultKind.ENGINE_DEAD and not working):
            return
        self._waiting = None
        if fault.kind is FaultKind.OUT_OF_MEMORY:  # the agent has limited us: it fails as any other would
            bytearray(NEEDED)
            return
        if fault.kind is FaultKind.EXCEPTION:
            self._answer(fault, True, "InjectedError is raised in the role's thread")
            time.sleep(TOLD)
            raise InjectedError(f"injected fault {fault.id}")
        self._answer(fault, True, "its calls of the worker API block; it goes on to beat")
        threading.Event().wait(fault.seconds or None)
        self._answer(fault, True, "its calls go on", ended=True)

    def _answer(self, fault: Fault, ok: bool, detail: str, ended: bool = False) -> None:
        self._tell(Injected(fault, ok, detail, self.launch.life, self._node, ended))
