"""Tells shadows what they become, and again to whoever has not heard it.

The intent is in the journal before anything is said, so a new manager says the same. It is settled by the member's own
Hello, not here.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ...core.launch import tag_of
from ...core.run_dir import RunDir
from ...core.types import Incarnation
from ...transport.control.endpoints import Send
from ...transport.messages import Hello, Promote
from ..cluster.base import Refused
from ..model.actions import Launch
from ..model.queries import promoted_to
from ..model.state import State
from .admission import GpuRegistry

_log = logging.getLogger("rrl.manager")

RECONNECT_TIMEOUT_S = 2.0
"""s for a shadow that is believed to be there to be heard: one whose manager died dials the next within 1 s"""
_POLL_INTERVAL_S = 0.02


class StandbyPromoter:
    """``send`` says something to a peer, ``gpus`` knows who has which."""

    def __init__(
        self, run: RunDir, state: Callable[[], State], send: Send,
        gpus: GpuRegistry,
    ) -> None:  # fmt: skip
        self._run, self._state, self._send, self._gpus = run, state, send, gpus
        self._standbys: dict[Incarnation, tuple[bytes, tuple[str, ...]]] = {}
        """shadow → where it can be told something, and the GPUs that it sees"""

    def on_standby_hello(self, peer: bytes, hello: Hello) -> None:
        """A shadow says that it stands by."""
        self._standbys[hello.incarnation] = peer, hello.gpus

    def forget(self, standby: Incarnation | None) -> None:
        """It is heard as what it became, or is no longer believed."""
        if standby is not None:
            self._standbys.pop(standby, None)

    async def promote(self, action: Launch) -> None:
        """Raises Refused where the shadow cannot be told, or has no GPU to give."""
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
        await asyncio.to_thread(link_log, self._run, action.incarnation, standby)

    async def send_promotion(self, standby: Incarnation) -> bool:
        """Whatever the state says that it is now. False: its node has no free GPUs for that."""
        state = self._state()
        member = promoted_to(state, standby)
        if member is None or member.node is None:
            return True  # it was fenced meanwhile
        peer, visible = self._standbys[standby]
        count, gpus = state.job.role(member.role).per_member.gpus, visible
        if count and len(visible) > count:
            gpus = self._gpus.assign(member.incarnation, member.node, visible, count, state)
            if not gpus:
                return False
        step = member.step or tag_of(state.run, standby)
        await self._send(peer, Promote(standby, member.incarnation, step, gpus), None)
        return True


def link_log(run: RunDir, incarnation: Incarnation, standby: Incarnation) -> None:
    """The log of a member is that of the step which it is: for whoever reads logs, a link says so (blocking)."""
    link = run.log_file(tag_of(run.id, incarnation))
    try:
        with suppress(FileExistsError):
            os.symlink(run.log_file(tag_of(run.id, standby)).name, link)
    except OSError as error:  # a full disk: its lines are found as the shadow's
        _log.warning("cannot link the log %s to the log of its standby: %s", Path(link).name, error)
