"""The event loop of a worker's connection: how it is opened and closed, and what a failed task in it does."""

from __future__ import annotations

import asyncio
import logging
import os
import weakref
from typing import Any

_log = logging.getLogger("rrl.worker")


def open_loop(owner: object) -> asyncio.AbstractEventLoop:
    """Return a new event loop, which is closed when ``owner`` is garbage-collected or Python exits.

    The loop is closed because a loop that is still open when Python exits may print a traceback after all other output
    of the process. The traceback would hide the line that says why the process ends. A loop that is running at that
    time is not closed.
    """
    loop = asyncio.new_event_loop()
    weakref.finalize(owner, _close_idle, loop)
    return loop


def _close_idle(loop: asyncio.AbstractEventLoop) -> None:
    if not loop.is_running():
        loop.close()


def die_on_error(task: asyncio.Task[Any]) -> None:
    """End the process if ``task``, a task of the connection, has failed.

    Without this task the worker could not send or receive.
    """
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.critical("a task of the connection to the manager failed; this process exits: %r", error)
        os._exit(1)
