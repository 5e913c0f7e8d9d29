"""Runs a command in an emulated terminal (pyte), so that tests can read the screen."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import termios
import threading
from collections.abc import Mapping, Sequence

import pyte


class Terminal:
    """A command in a terminal of ``columns`` × ``rows``, with the screen that it has drawn.

    ``environment`` is added to the environment of this process, without ``COLUMNS`` and ``LINES``.
    """

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], columns: int = 100, rows: int = 40) -> None:
        self._mine, theirs = pty.openpty()
        _set_size(self._mine, columns, rows)
        inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            argv,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**inherited, "TERM": "xterm", **environment},
            start_new_session=True,
        )
        os.close(theirs)
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        self._drawn = b""
        self._drawing = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def drawn(self) -> str:
        """Return the whole output of the command so far."""
        return self._drawn.decode(errors="replace")

    @property
    def lines(self) -> list[str]:
        """Return the lines on the screen, without the empty lines after the last text."""
        with self._drawing:
            lines = [line.rstrip() for line in self._screen.display]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    @property
    def echoes(self) -> bool:
        """Return whether the terminal itself prints the keys that are pressed."""
        return bool(termios.tcgetattr(self._mine)[3] & termios.ECHO)

    def press(self, keys: str) -> None:
        os.write(self._mine, keys.encode())

    def resize(self, columns: int, rows: int) -> None:
        """Change the size of the terminal. As in xterm, longer lines are cut off and not wrapped."""
        with self._drawing:
            self._screen.resize(rows, columns)
            _set_size(self._mine, columns, rows)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(30)
        self._reader.join(30)
        os.close(self._mine)

    def _read(self) -> None:
        try:
            while data := os.read(self._mine, 4096):
                with self._drawing:
                    self._drawn += data
                    self._stream.feed(data)
        except OSError:  # the other end was closed
            pass


def _set_size(terminal: int, columns: int, rows: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
