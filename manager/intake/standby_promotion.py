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
from ...core.types import Life
from ...transport.control.endpoints import Send
from ...transport.messages import Become, Hello
from ..cluster.base import Refused
from ..model.actions import Launch
from ..model.queries import became
from ..model.state import State
from .admission import GpusTaken

_log = logging.getLogger("rrl.manager")

RECONNECT = 2.0
"""s for a shadow that is believed to be there to be heard: one whose manager died dials the next within 1 s"""
_LOOK = 0.02


class Adoptions:
    """``send`` says something to a peer, ``gpus`` knows who has which."""

    def __init__(
        self, run: RunDir, state: Callable[[], State], send: Send,
        gpus: GpusTaken,
    ) -> None:  # fmt: skip
        self._run, self._state, self._send, self._gpus = run, state, send, gpus
        self._waiting: dict[Life, tuple[bytes, tuple[str, ...]]] = {}
        """shadow → where it can be told something, and the GPUs that it sees"""

    def heard(self, peer: bytes, hello: Hello) -> None:
        """A shadow says that it stands by."""
        self._waiting[hello.life] = peer, hello.gpus

    def forget(self, shadow: Life | None) -> None:
        """It is heard as what it became, or is no longer believed."""
        if shadow is not None:
            self._waiting.pop(shadow, None)

    async def adopt(self, action: Launch) -> None:
        """Raises Refused where the shadow cannot be told, or has no GPU to give."""
        shadow = action.shadow
        assert shadow is not None
        loop = asyncio.get_running_loop()
        by = loop.time() + RECONNECT
        while shadow not in self._waiting:
            if loop.time() > by:
                raise Refused(f"{shadow} on {action.node} is not connected")
            await asyncio.sleep(_LOOK)
        if not await self.tell(shadow):
            raise Refused(f"{shadow} on {action.node} sees no free GPU for {action.life}")
        await asyncio.to_thread(mark_log, self._run, action.life, shadow)

    async def tell(self, shadow: Life) -> bool:
        """Whatever the state says that it is now. False: its node has no free GPUs for that."""
        state = self._state()
        member = became(state, shadow)
        if member is None or member.node is None:
            return True  # it was fenced meanwhile
        peer, seen = self._waiting[shadow]
        count, gpus = state.job.role(member.role).each.gpus, seen
        if count and len(seen) > count:
            gpus = self._gpus.give(member.life, member.node, seen, count, state)
            if not gpus:
                return False
        step = member.step or tag_of(state.run, shadow)
        await self._send(peer, Become(shadow, member.life, step, gpus), None)
        return True


def mark_log(run: RunDir, life: Life, shadow: Life) -> None:
    """The log of a member is that of the step which it is: for whoever reads logs, a link says so (blocking)."""
    link = run.log_file(tag_of(run.id, life))
    try:
        with suppress(FileExistsError):
            os.symlink(run.log_file(tag_of(run.id, shadow)).name, link)
    except OSError as error:  # a full disk: its lines are found as the shadow's
        _log.warning("cannot link the log %s to the log of its standby: %s", Path(link).name, error)
