"""Text for people: one line instead of many, and never with characters that command a terminal.

A terminal obeys control characters (C0 and C1: cursor, colours, title, clipboard, answers typed into the shell) and
reorders text by directional characters, so that a line may show something else than it says. :func:`escaped` and its
variants make text of roles, nodes and users safe to print.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

_CONTROL_CHARS = re.compile(
    "["
    "\x00-\x08\x0a-\x1f\x7f-\x9f"  # C0 but for the tab, DEL, C1: among them ESC, CSI and OSC
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # marks, embeddings, overrides and isolates of direction
    "\u2028\u2029"  # line and paragraph separators
    "\ud800-\udfff"  # halves of a surrogate pair, which no output can encode
    "]"
)


def escaped(text: str) -> str:
    """One line: ``text`` with each such character as Python writes it in a literal (``\\x1b``, ``\\u202e``), a line
    break included; a tab, and all other text, stays as it is."""
    return _CONTROL_CHARS.sub(lambda match: match[0].encode("unicode_escape", "surrogatepass").decode("ascii"), text)


def escaped_lines(text: str) -> str:
    """The same for text of several lines, whose line breaks stay."""
    return "\n".join(map(escaped, text.split("\n")))


def escaped_json(document: str) -> str:
    """A JSON document in which such a character stands as JSON writes it (``\\u001b``): it says what it said. Between
    its strings a document has no such character but line breaks, which stay."""
    return "\n".join(
        _CONTROL_CHARS.sub(lambda match: f"\\u{ord(match[0]):04x}", line) for line in document.split("\n")
    )  # fmt: skip


_MAX_LINES = 3
_MAX_CHARS = 400
_TAIL_BYTES = 4096
"""bytes of a file's end that are looked at"""
_MISSING_COMMAND_TEXTS = ("execve(): ", "No module named 'rrl'", "No module named rrl")
"""slurmstepd on an interpreter that is not there; an interpreter without rrl"""


def shows_missing_command(output: str) -> bool:
    """They prove that what was to be started is not there, or cannot be started at all."""
    return any(text in output for text in _MISSING_COMMAND_TEXTS)


def last_lines(text: str) -> str:
    """The last lines of a text that say something, joined by `` / `` and cut at the front."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " / ".join(lines[-_MAX_LINES:])[-_MAX_CHARS:]


def last_lines_of(path: Path) -> str:
    """The same of a file; empty where there is none, or none that can be read."""
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            return last_lines(file.read().decode(errors="replace"))
    except OSError:
        return ""


def exit_invalid_config(reason: object) -> NoReturn:
    """End the process with exit code 2 and the reason in one line on stderr.

    The line is no log message: the launcher reads the last line of a role's command and reports it as the reason of its
    failure, and a person at a terminal reads it as that of any command."""
    sys.stderr.write(f"rrl: {' '.join(str(reason).split())}\n")
    sys.stderr.flush()
    raise SystemExit(2)


@contextmanager
def exits_on_invalid_config(errors: type[Exception] = ValueError) -> Iterator[None]:
    """Inside, such an exception says what is wrong with job.toml. A user's own code goes elsewhere: of what that raises
    the traceback is wanted."""
    try:
        yield
    except errors as error:
        exit_invalid_config(error)


def on_one_line(value: object) -> str:
    """Without line breaks and control characters: what is in a file must not drive a terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in re.sub(r"\s+", " ", str(value)))
