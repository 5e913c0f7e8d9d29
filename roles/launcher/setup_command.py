"""Run a command after the shell prelude that sets up its node.

The prelude's stderr goes to the log at once. The end of stderr is also kept, as the reason if the prelude fails.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Sequence

from ...core.role_environment import SHELL_NAME, STARTED, wrap
from ...core.text import last_lines
from .process_group import ProcessGroup

_STDERR_TAIL_BYTES = 2000
"""Number of bytes that are kept from the end of stderr."""
_BASH_PREFIX = rf"^{SHELL_NAME}: (eval: )?(line \d+: )?"
"""Prefix of bash's own messages, which is removed. It names a line of the generated prelude, which users never see."""
_DRAIN_TIMEOUT_S = 1.0
"""Timeout (s) for reading the rest of stderr after the command has ended."""


class SetupCommand:
    """One command and its prelude. If the prelude failed, :meth:`failure_reason` returns why no command was started."""

    def __init__(self, text: str, command: Sequence[str], env: dict[str, str], cwd: str, out: int) -> None:
        """Start the prelude ``text``, which then starts ``command``.

        Stdout and stderr go to the descriptor ``out``. Raises OSError if the process cannot be started.
        """
        self.started = asyncio.Event()
        """Set when the prelude is done and the command itself starts."""
        self._stderr_tail = self._reported = b""
        self._report: int | None = None
        self._stderr_thread: threading.Thread | None = None
        if not text:
            self.group = ProcessGroup.start(command, env, cwd, out)
            self.started.set()
            return
        stderr, stderr_in = os.pipe()
        report, report_in = os.pipe()
        try:
            argv = wrap(text, stderr_in, report_in, command)
            self.group = ProcessGroup.start(argv, env, cwd, out, pass_fds=(stderr_in, report_in))
        except OSError:
            os.close(stderr)
            os.close(report)
            raise
        finally:
            os.close(stderr_in)
            os.close(report_in)
        os.set_blocking(report, False)
        self._report = report
        asyncio.get_running_loop().add_reader(report, self._read_report)
        self._stderr_thread = threading.Thread(
            target=self._copy_stderr, args=(stderr, os.dup(out)), name="setup", daemon=True
        )
        self._stderr_thread.start()

    def failure_reason(self) -> str:
        """Return why the command was not started, or an empty text. Call this after ``group.ended``."""
        self._read_report()
        reported = self._reported.decode(errors="replace")
        if not reported or self.started.is_set():
            return ""
        if self._stderr_thread is not None:
            self._stderr_thread.join(_DRAIN_TIMEOUT_S)
        stderr = last_lines(re.sub(_BASH_PREFIX, "", self._stderr_tail.decode(errors="replace"), flags=re.MULTILINE))
        return f"{reported}: {stderr}" if stderr else reported

    def _read_report(self) -> None:
        """Read the prelude's report: that the command starts, or which part of the prelude failed."""
        if self._report is None:
            return
        try:
            data = os.read(self._report, 4096)
        except BlockingIOError:  # no report yet: the prelude, or its child process, holds the pipe's other end
            return
        self._reported += data
        if self._reported == STARTED:
            self.started.set()
        if not data or self.started.is_set():
            asyncio.get_running_loop().remove_reader(self._report)
            os.close(self._report)
            self._report = None

    def _copy_stderr(self, stderr: int, log: int) -> None:
        with open(stderr, "rb", 0) as stderr_file, open(log, "wb", 0) as log_file:
            while data := stderr_file.read(_STDERR_TAIL_BYTES):
                self._stderr_tail = (self._stderr_tail + data)[-_STDERR_TAIL_BYTES:]
                log_file.write(data)
