"""Promote standby processes, and repeat the Promote message to processes that have not received it.

The intent is journaled before the message is sent, so a new manager sends the same message. The intent is settled when
the Hello of the promoted member arrives.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import suppress
from pathlib import Path

from ...core.launch import tag_of
from ...core.run_dir import RunDir
from ...core.types import Incarnation
from ...transport.messages import Hello, Promote
from ..cluster.base import Refused
from ..context import RunContext
from ..model.actions import Launch
from ..model.queries import promoted_to
from .admission import GpuRegistry

_log = logging.getLogger("rrl.manager")

RECONNECT_TIMEOUT_S = 2.0
"""Seconds to wait for a current standby process to connect. After a manager's death it connects to the next manager
within 1 s."""
_POLL_INTERVAL_S = 0.02
"""Seconds between two checks whether a standby process has connected."""


class StandbyPromoter:
    """Sends Promote to the standby processes of one run. ``gpus`` is the registry of the GPUs in use."""

    def __init__(self, context: RunContext, gpus: GpuRegistry) -> None:
        self._context, self._gpus = context, gpus
        self._standbys: dict[Incarnation, tuple[bytes, tuple[str, ...]]] = {}
        """Connection of each connected standby process, and the GPUs that are visible to it."""

    def on_standby_hello(self, peer: bytes, hello: Hello) -> None:
        """Store the connection of a standby process that has sent Hello."""
        self._standbys[hello.incarnation] = peer, hello.gpus

    def forget(self, standby: Incarnation | None) -> None:
        """Remove a standby process that has joined as a member or is fenced."""
        if standby is not None:
            self._standbys.pop(standby, None)

    async def promote(self, action: Launch) -> None:
        """Send Promote to the launch's standby process. Raise Refused if it is not connected or its GPUs are in use."""
        standby = action.standby
        assert standby is not None
        loop = asyncio.get_running_loop()
        deadline = loop.time() + RECONNECT_TIMEOUT_S
        while standby not in self._standbys:
            if loop.time() > deadline:
                raise Refused(f"{standby} on {action.node} is not connected")
            await asyncio.sleep(_POLL_INTERVAL_S)
        if not await self.send_promotion(standby):
            raise Refused(f"{standby} on {action.node} sees no free GPU for {action.incarnation}")
        await asyncio.to_thread(link_log, self._context.run_dir, action.incarnation, standby)

    async def send_promotion(self, standby: Incarnation) -> bool:
        """Send Promote to a standby process, with the member that it becomes according to the state.

        Return False if too few GPUs are free for this member on its node.
        """
        state = self._context.state()
        member = promoted_to(state, standby)
        if member is None or member.node is None:
            return True  # the member was fenced in the meantime
        peer, visible = self._standbys[standby]
        count, gpus = state.job.role(member.role).per_member.gpus, visible
        if count and len(visible) > count:
            gpus = self._gpus.assign(member.incarnation, member.node, visible, count, state)
            if not gpus:
                return False
        step = member.step or tag_of(state.run, standby)
        await self._context.send(peer, Promote(standby, member.incarnation, step, gpus), None)
        return True


def link_log(run: RunDir, incarnation: Incarnation, standby: Incarnation) -> None:
    """Link the log of a promoted member to the log of its step, so that the log has both names (blocking)."""
    link = run.log_file(tag_of(run.id, incarnation))
    try:
        with suppress(FileExistsError):
            os.symlink(run.log_file(tag_of(run.id, standby)).name, link)
    except OSError as error:  # a full disk: its lines are found in the standby's log
        _log.warning("cannot link the log %s to the log of its standby: %s", Path(link).name, error)
