"""Text of roles, nodes and users as it may be printed: nothing of it can command a terminal.

A terminal obeys control characters (C0 and C1: cursor, colours, title, clipboard, answers typed into the shell) and
reorders text by directional ones, so that a line shows something else than it says.
"""

from __future__ import annotations

import re

_COMMANDS = re.compile(
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
    return _COMMANDS.sub(lambda match: match[0].encode("unicode_escape", "surrogatepass").decode("ascii"), text)


def escaped_lines(text: str) -> str:
    """The same for text of several lines, whose line breaks stay."""
    return "\n".join(map(escaped, text.split("\n")))


def escaped_json(document: str) -> str:
    """A JSON document in which such a character stands as JSON writes it (``\\u001b``): it says what it said. Between
    its strings a document has no such character but line breaks, which stay."""
    return "\n".join(
        _COMMANDS.sub(lambda match: f"\\u{ord(match[0]):04x}", line) for line in document.split("\n")
    )  # fmt: skip
