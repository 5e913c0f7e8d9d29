"""``rrl top``: starts the application, which needs the extra ``tui``."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from importlib.util import find_spec

from ....api.runs import find_run
from ....api.watching.runs_watcher import RunsWatcher
from ....core.types import UsageError


def top(name: str | None) -> int:
    """Show all runs of this user, or first the run ``name``, until the user leaves; returns an exit code.

    Raises UsageError without Textual, without a terminal, or if there is no such run.
    """
    if find_spec("textual") is None:
        fix = "pip install '.[tui]' in rrl's clone"
        raise UsageError(f"rrl top needs the package textual, which is not installed here; {fix}")
    run = None if name is None else find_run(name)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("rrl top needs a terminal; without one, write: rrl list, or rrl status RUN")
    from .top_app import TopApp

    logging.disable()  # a line on stderr would damage the screen
    app = TopApp(RunsWatcher(run), run)
    app.run(loop=asyncio.new_event_loop())  # unlike asyncio.run, it does not wait for threads
    code = app.return_code or 0
    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # at its end, the interpreter would wait for a thread that a hung file server blocks
    return code
