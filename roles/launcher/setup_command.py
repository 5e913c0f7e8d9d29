"""A command behind the prelude that sets up its node: started, listened to, and judged afterwards.

What is said on stderr meanwhile goes to the log at once and is remembered, because it is the reason if something fails.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Sequence

from ...core.role_environment import BEGUN, NAME, behind
from ...core.text import last_lines
from .process_group import ProcessGroup

_KEPT = 2000
"""bytes of what was said last that are remembered"""
_WHERE = rf"^{NAME}: (eval: )?(line \d+: )?"
"""in front of bash's own words: a line of our text, which nobody knows"""
_REST = 1.0
"""s for the rest of it to be read once the command has ended"""


class SetUp:
    """One command. :meth:`trouble` tells why it was not started, once it has ended."""

    def __init__(self, text: str, command: Sequence[str], env: dict[str, str], cwd: str, out: int) -> None:
        """Starts it; stdout and stderr go to the descriptor ``out``. Raises OSError."""
        self.begun = asyncio.Event()
        """set once everything is set up and the command itself begins"""
        self._said = self._told = b""
        self._report: int | None = None
        self._listening: threading.Thread | None = None
        if not text:
            self.group = ProcessGroup.start(command, env, cwd, out)
            self.begun.set()
            return
        words, words_in = os.pipe()
        report, report_in = os.pipe()
        try:
            argv = behind(text, words_in, report_in, command)
            self.group = ProcessGroup.start(argv, env, cwd, out, keep=(words_in, report_in))
        except OSError:
            os.close(words)
            os.close(report)
            raise
        finally:
            os.close(words_in)
            os.close(report_in)
        os.set_blocking(report, False)
        self._report = report
        asyncio.get_running_loop().add_reader(report, self._hear)
        self._listening = threading.Thread(target=self._listen, args=(words, os.dup(out)), name="setup", daemon=True)
        self._listening.start()

    def trouble(self) -> str:
        """Why the command was not started; empty if it was. After ``group.ended``."""
        self._hear()
        told = self._told.decode(errors="replace")
        if not told or self.begun.is_set():
            return ""
        if self._listening is not None:
            self._listening.join(_REST)
        said = last_lines(re.sub(_WHERE, "", self._said.decode(errors="replace"), flags=re.MULTILINE))
        return f"{told}: {said}" if said else told

    def _hear(self) -> None:
        """What was reported: that the command begins, or what failed."""
        if self._report is None:
            return
        try:
            told = os.read(self._report, 4096)
        except BlockingIOError:  # nothing more, and something that was set up lives on and holds the other end
            return
        self._told += told
        if self._told == BEGUN:
            self.begun.set()
        if not told or self.begun.is_set():
            asyncio.get_running_loop().remove_reader(self._report)
            os.close(self._report)
            self._report = None

    def _listen(self, words: int, log: int) -> None:
        with open(words, "rb", 0) as heard, open(log, "wb", 0) as kept:
            while some := heard.read(_KEPT):
                self._said = (self._said + some)[-_KEPT:]
                kept.write(some)
