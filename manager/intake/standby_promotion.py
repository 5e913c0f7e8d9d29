"""Promote standby processes, and repeat the Promote message to processes that have not received it.

The intent is journaled before the message is sent, so a new manager sends the same message. The intent is settled when
the Hello of the promoted member arrives.

No two processes may use one GPU. A standby process that sees all GPUs of its node is promoted only once every other
incarnation on the node has reported which GPUs it uses. A new manager receives these reports within about a second. An
incarnation that is starting reports when it joins. If a report does not come in time, the member is launched in a new
step, for which the cluster chooses the GPUs.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import suppress
from pathlib import Path

from ...cluster.base import Refused, RejectReason
from ...core.launch import tag_of
from ...core.run_dir import RunDir
from ...core.types import Incarnation
from ...transport.messages import Hello, Promote
from ..context import RunContext
from ..model.actions import Launch
from ..model.queries import promoted_to
from ..model.state import Replica
from .admission import GpuRegistry

_log = logging.getLogger("rrl.manager")

RECONNECT_TIMEOUT_S = 2.0
"""Seconds to wait for a current standby process, and for the incarnations that use GPUs on its node, to connect. After
a manager's death they connect to the next manager within 1 s."""
_POLL_INTERVAL_S = 0.02
"""Seconds between two checks while a promotion waits for processes to connect (:data:`RECONNECT_TIMEOUT_S`)."""


class GpusUnreported(Refused):
    """A standby process is not promoted, because another incarnation on its node has not reported its GPUs.

    The rejection counts neither against the replica nor against its node: the replica is launched in a new step.
    """

    reason = RejectReason.GPUS_UNREPORTED


class StandbyPromoter:
    """Sends Promote to the standby processes of one run. ``gpus`` is the registry of the GPUs in use."""

    def __init__(self, context: RunContext, gpus: GpuRegistry) -> None:
        self._context, self._gpus = context, gpus
        self._standbys: dict[Incarnation, tuple[bytes, tuple[str, ...]]] = {}
        """Connection of each connected standby process, and the GPUs that are visible to it."""
        self._postponed: set[Incarnation] = set()
        """Connected standby processes whose Promote waits for a report of the GPUs in use on their node."""

    def on_standby_hello(self, peer: bytes, hello: Hello) -> None:
        """Store the connection of a standby process that has sent Hello."""
        self._standbys[hello.incarnation] = peer, hello.gpus

    def forget(self, standby: Incarnation | None) -> None:
        """Remove a standby process that has joined as a member or is fenced."""
        if standby is not None:
            self._standbys.pop(standby, None)
            self._postponed.discard(standby)

    async def promote(self, action: Launch) -> None:
        """Send Promote to the launch's standby process.

        Raises:
            Refused: The standby process is not connected, or its GPUs are in use.
            GpusUnreported: Another incarnation on its node has not reported its GPUs.
        """
        standby = action.standby
        assert standby is not None
        loop = asyncio.get_running_loop()
        deadline = loop.time() + RECONNECT_TIMEOUT_S
        while standby not in self._standbys or self._unreported(standby):
            if loop.time() > deadline:
                if standby not in self._standbys:
                    raise Refused(f"{standby} on {action.node} is not connected")
                names = ", ".join(map(str, self._unreported(standby)))
                raise GpusUnreported(f"{standby} is not used: {names} on {action.node} has not reported its GPUs")
            await asyncio.sleep(_POLL_INTERVAL_S)
        if not await self.send_promotion(standby):
            raise Refused(f"{standby} on {action.node} sees no free GPU for {action.incarnation}")
        await asyncio.to_thread(link_log, self._context.run_dir, action.incarnation, standby)

    async def send_promotion(self, standby: Incarnation) -> bool:
        """Send Promote to a standby process, with the member that it becomes according to the state.

        The message is postponed (:meth:`send_postponed`) while GPUs of its node are unreported. Return False if too
        few GPUs are free for this member on its node.
        """
        state = self._context.state()
        member = promoted_to(state, standby)
        self._postponed.discard(standby)
        if member is None or member.node is None:
            return True  # the member was fenced in the meantime
        if self._unreported(standby):
            self._postponed.add(standby)
            return True
        peer, gpus = self._standbys[standby]
        if count := self._gpus_to_choose(standby, member):
            gpus = self._gpus.assign(member.incarnation, member.node, gpus, count, state)
            if not gpus:
                return False
        step = member.step or tag_of(state.run, standby)
        await self._context.send(peer, Promote(standby, member.incarnation, step, gpus), None)
        return True

    async def send_postponed(self) -> None:
        """Send the postponed promotions that need not wait any longer. Called after each report of GPUs."""
        for standby in sorted(self._postponed):
            await self.send_promotion(standby)

    def _gpus_to_choose(self, standby: Incarnation, member: Replica) -> int:
        """Return how many of the visible GPUs are chosen for a standby process; 0 if the process uses all of them."""
        count = self._context.state().job.role(member.role).per_member.gpus
        return count if len(self._standbys[standby][1]) > count else 0

    def _unreported(self, standby: Incarnation) -> list[Incarnation]:
        """Return the incarnations that must report their GPUs before this connected standby process is promoted."""
        state = self._context.state()
        member = promoted_to(state, standby)
        if member is None or member.node is None or not self._gpus_to_choose(standby, member):
            return []
        return self._gpus.unreported(member.incarnation, member.node, state, self._standbys)


def link_log(run: RunDir, incarnation: Incarnation, standby: Incarnation) -> None:
    """Link the log of a promoted member to the log of its step, so that the log has both names (blocking)."""
    link = run.log_file(tag_of(run.id, incarnation))
    try:
        with suppress(FileExistsError):
            os.symlink(run.log_file(tag_of(run.id, standby)).name, link)
    except OSError as error:  # a full disk, for example; the standby's log has the lines
        _log.warning("cannot link the log %s to the log of its standby: %s", Path(link).name, error)
