"""Make text safe and short for people: one line, without characters that control a terminal.

Control characters (C0 and C1) command a terminal: cursor, colours, title, clipboard, input to the shell. Directional
characters reorder text, so that a line may look different from its content. :func:`escaped` and its variants make text
of roles, nodes and users safe to print.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NoReturn

_CONTROL_CHARS = re.compile(
    "["
    "\x00-\x08\x0a-\x1f\x7f-\x9f"  # C0 except the tab, DEL, C1: among them ESC, CSI and OSC
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # marks, embeddings, overrides and isolates of direction
    "\u2028\u2029"  # line and paragraph separators
    "\ud800-\udfff"  # halves of a surrogate pair, which no output can encode
    "]"
)


def escaped(text: str) -> str:
    r"""Return ``text`` on one line, with control characters as Python escapes (``\x1b``, ``\u202e``).

    Line breaks are escaped too; tabs and all other text stay as they are.
    """
    return _CONTROL_CHARS.sub(lambda match: match[0].encode("unicode_escape", "surrogatepass").decode("ascii"), text)


def escaped_lines(text: str) -> str:
    """Return ``text`` with control characters escaped as in :func:`escaped`, except for line breaks, which stay."""
    return "\n".join(map(escaped, text.split("\n")))


def escaped_json(document: str) -> str:
    r"""Return a JSON document with control characters as JSON escapes (``\u001b``), which leaves its value unchanged.

    Line breaks outside of strings stay. A JSON document has no other control characters outside of its strings.
    """
    return "\n".join(_CONTROL_CHARS.sub(lambda match: f"\\u{ord(match[0]):04x}", line) for line in document.split("\n"))


_MAX_LINES = 3
_MAX_CHARS = 400
_MAX_VALUE_CHARS = 80
_TAIL_BYTES = 4096
"""Number of bytes that are read from the end of a file."""
_MISSING_COMMAND_TEXTS = ("execve(): ", "No module named 'rrl'", "No module named rrl")
"""Messages of slurmstepd for a missing interpreter, and of an interpreter without rrl."""


def shows_missing_command(output: str) -> bool:
    """Return whether the output of a failed start proves that the command is missing or cannot be started at all."""
    return any(text in output for text in _MISSING_COMMAND_TEXTS)


def shortened(value: object) -> str:
    """Return a value as Python shows it, on one line and cut after :data:`_MAX_VALUE_CHARS` characters."""
    try:
        text = on_one_line(repr(value))
    except BaseException:  # the method of a user's class may raise anything
        text = object.__repr__(value)
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}..."


def last_lines(text: str) -> str:
    """Return the last non-empty lines of a text, three at most, joined by `` / `` and truncated at the front."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " / ".join(lines[-_MAX_LINES:])[-_MAX_CHARS:]


def last_lines_of(path: Path) -> str:
    """Return :func:`last_lines` of a file; empty if it does not exist or cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            return last_lines(file.read().decode(errors="replace"))
    except OSError:
        return ""


def exit_invalid_config(reason: object) -> NoReturn:
    """End the process with exit code 2 and the reason in one line on stderr.

    The line is not a log message: the launcher reports the last line of a role's command as the reason of its failure,
    and a user reads it at the terminal.
    """
    sys.stderr.write(f"rrl: {' '.join(str(reason).split())}\n")
    sys.stderr.flush()
    raise SystemExit(2)


def on_one_line(value: object) -> str:
    """Return the text of a value without line breaks and control characters, so that it cannot control a terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in re.sub(r"\s+", " ", str(value)))


def plural(number: int, thing: str) -> str:
    """Format a number of things: ``1 node``, ``3 nodes``."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def span(seconds: float) -> str:
    """Format a duration with two units at most: ``7s``, ``2m14s``, ``3h05m``, ``2d04h``."""
    whole = max(0, int(seconds))
    for size, unit, smaller, name in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // smaller:02}{name}"
    return f"{whole}s"
