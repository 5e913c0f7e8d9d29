"""Provides a message handler with the state of one launched rollout, and keeps the handler's events and messages."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from rrl.cluster.base import AllocationRequest, AllocationState, AllocationStatus
from rrl.core.launch import tag_of
from rrl.core.run_dir import RunDir
from rrl.core.run_spec import RunSpec
from rrl.core.types import Incarnation, NodeName
from rrl.health.detection.health_monitor import HealthMonitor
from rrl.manager.context import RunContext
from rrl.manager.intake.finding_gate import restore_monitor
from rrl.manager.intake.message_handler import MessageHandler
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Launch, Request, Why
from rrl.manager.model.reducer import fold
from rrl.manager.model.state import State
from rrl.tests.support.manager.jobs import NODE, ROLLOUTS, RUN
from rrl.tests.support.manager.jobs import job as small_job
from rrl.transport import messages as msg
from rrl.transport.control.endpoints import Incoming

N1 = NodeName("n1")
R1, R2 = Incarnation(ROLLOUTS[0], 1), Incarnation(ROLLOUTS[0], 2)
STEP = tag_of(RUN, R1)
WHY = Why(("because",))
LAUNCHED: tuple[ev.Event, ...] = (
    ev.Intended(Request(AllocationRequest("pool", 1, NODE, 60.0), WHY)),
    ev.AllocationChanged("pool", AllocationStatus(AllocationState.RUNNING, "7", (N1,))),
    ev.Intended(Launch(R1, STEP, "pool", N1, WHY)),
)
WANTED = msg.AdmissionRequest(R1, STEP, N1, 41)
HELLO = msg.Hello(R1, STEP, N1, "host", 42, "starting", weight_address="tcp://127.0.0.1:1")


class Handling:
    """A message handler, the events that it recorded, and the messages that it sent."""

    def __init__(self, folder: Path, *events: ev.Event, job: RunSpec | None = None) -> None:
        self.run = RunDir(folder / RUN)
        self.run.create()
        self.events: list[ev.Event] = []
        self.sent: list[Any] = []
        self.sent_to: list[tuple[bytes, Any]] = []
        self.state: State | None = None
        self.monitor = HealthMonitor()
        for event in (ev.RunStarted(RUN, job or small_job()), *events):
            self.fold(event)
        self._listen()

    def _listen(self) -> None:
        self.context = RunContext(self.run, self.monitor, self._now_state, self._record, self._send, now=lambda: 100.0)
        self.handler = MessageHandler(
            self.context, lambda incarnation: msg.Welcome(incarnation, msg.Peers(1, 1, {})), lambda tag: None
        )

    def handle(self, *messages: Any, peer: bytes = b"peer") -> list[Any]:
        """Handle messages that arrive on one connection; return the messages that the handler sent."""
        self.sent.clear()
        for message in messages:
            asyncio.run(self.handle_now(message, peer))
        return list(self.sent)

    async def handle_now(self, message: Any, peer: bytes) -> None:
        await self.handler.handle(Incoming(peer, 1, message))

    def next_manager(self) -> None:
        """Replace the message handler by that of a new manager, which only has the state."""
        self.monitor = HealthMonitor()
        restore_monitor(self.monitor, self._now_state(), 100.0)
        self._listen()

    def fold(self, event: ev.Event) -> None:
        """Apply an event that the manager itself records, and inform the monitor of launches."""
        seq = self.state.seq + 1 if self.state else 1
        self.state = fold(self.state, ev.Stamped(seq, 100.0, 1, event))
        if isinstance(event, ev.Intended) and isinstance(event.action, Launch):
            self.monitor.on_launched(event.action.incarnation, event.action.node, 100.0, event.action.standby, 10.0)

    def _now_state(self) -> State:
        assert self.state is not None
        return self.state

    def _record(self, event: ev.Event) -> None:
        self.events.append(event)
        self.fold(event)

    async def _send(self, peer: bytes, message: Any, request: int | None) -> None:
        self.sent.append(message)
        self.sent_to.append((peer, message))
