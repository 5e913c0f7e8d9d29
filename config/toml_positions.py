"""Find the line of each key of a TOML document that tomllib has already accepted.

No TOML library for Python reports these lines, neither tomlkit, which keeps every byte, nor tomllib. Since the text is
valid, a scanner only has to find where keys, values and headers begin.
"""

from __future__ import annotations

import bisect
import re
import tomllib
from collections.abc import Mapping

Path = tuple[str | int, ...]
"""Keys from the root; a number is the index of an array element, from 0."""

_SPACE = re.compile(r"[ \t]*")
_BLANK = re.compile(r"(?:[ \t\r\n]+|#[^\n]*)*")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPED, _PLAIN = r'"(?:[^"\\\n]|\\.)*"', r"'[^'\n]*'"
_QUOTED_KEY = re.compile(f"{_ESCAPED}|{_PLAIN}")
_STRING = re.compile(rf'"""(?:[^\\]|\\.)*?"{{3,5}}|\'\'\'.*?\'{{3,5}}|{_ESCAPED}|{_PLAIN}', re.DOTALL)
_SCALAR = re.compile(r"[^,\]}#\r\n]*")


def lines_of(text: str) -> Mapping[Path, int]:
    """Return the line (from 1) of every key, header and array element of a valid TOML document."""
    return _Scanner(text).document()


def nearest_line(lines: Mapping[Path, int], path: Path) -> int | None:
    """Return the line of ``path`` or of the deepest table around it; None if the document has neither."""
    while path:
        if path in lines:
            return lines[path]
        path = path[:-1]
    return None


class _Scanner:
    """A recursive-descent scanner over one document."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0
        self._newlines = [match.start() for match in re.finditer("\n", text)]
        self._lines: dict[Path, int] = {}
        self._elements: dict[Path, int] = {}
        """Number of [[headers]] that each array of tables has had so far."""

    def document(self) -> Mapping[Path, int]:
        """Scan the document and return the lines of its keys."""
        table: Path = ()
        self._consume(_BLANK)
        while self._position < len(self._text):
            if self._text.startswith("[", self._position):
                table = self._header()
            else:
                self._assignment(table)
            self._consume(_BLANK)
        return self._lines

    def _header(self) -> Path:
        line = self._current_line()
        array = self._text.startswith("[[", self._position)
        self._position += 2 if array else 1
        *parents, name = self._key()
        self._position += 2 if array else 1
        table: Path = ()
        for part in parents:
            table = self._newest((*table, part), line)
        table = (*table, name)
        if not array:
            self._lines[table] = line  # the line of the header itself counts, even if [a.b] came before [a]
            return table
        self._lines.setdefault(table, line)
        self._elements[table] = self._elements.get(table, 0) + 1
        return self._newest(table, line)

    def _newest(self, path: Path, line: int) -> Path:
        """Return the path of the table that a header refers to: the newest table, if ``path`` is an array of tables."""
        self._lines.setdefault(path, line)
        if path in self._elements:
            path = (*path, self._elements[path] - 1)
            self._lines.setdefault(path, line)
        return path

    def _assignment(self, table: Path) -> None:
        line = self._current_line()
        path = table
        for part in self._key():
            path = (*path, part)
            self._lines.setdefault(path, line)
        self._position += 1  # the equals sign
        self._consume(_SPACE)
        self._value(path)

    def _value(self, path: Path) -> None:
        first = self._text[self._position]
        if first == "[":
            self._array(path)
        elif first == "{":
            self._inline_table(path)
        elif first in "\"'":
            self._consume(_STRING)
        else:
            self._consume(_SCALAR)

    def _array(self, path: Path) -> None:
        self._position += 1
        self._consume(_BLANK)
        index = 0
        while self._text[self._position] != "]":
            self._lines[(*path, index)] = self._current_line()
            self._value((*path, index))
            index += 1
            self._consume(_BLANK)
            if self._text[self._position] == ",":
                self._position += 1
                self._consume(_BLANK)
        self._position += 1

    def _inline_table(self, path: Path) -> None:
        self._position += 1
        self._consume(_BLANK)
        while self._text[self._position] != "}":
            self._assignment(path)
            self._consume(_BLANK)
            if self._text[self._position] == ",":
                self._position += 1
                self._consume(_BLANK)
        self._position += 1

    def _key(self) -> list[str]:
        """Consume a dotted key with the spaces around its parts, and return the parts."""
        keys = []
        while True:
            self._consume(_SPACE)
            if bare := self._consume(_BARE_KEY):
                keys.append(bare)
            else:
                keys.append(str(tomllib.loads(f"key = {self._consume(_QUOTED_KEY)}")["key"]))
            self._consume(_SPACE)
            if not self._text.startswith(".", self._position):
                return keys
            self._position += 1

    def _consume(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self._position)
        if match is None:
            return ""
        self._position = match.end()
        return match.group()

    def _current_line(self) -> int:
        return bisect.bisect_left(self._newlines, self._position) + 1
