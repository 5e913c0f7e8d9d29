"""Find the line of each key of a TOML document that tomllib has already accepted.

No TOML library for Python reports these lines, neither tomlkit, which keeps every byte, nor tomllib. So tomllib parses
each statement by itself, line by line: a key is on the line after which it appears for the first time.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

Path = tuple[str | int, ...]
"""Keys from the root; a number is the index of an array element, from 0."""
_CLOSERS = [closer for length in range(4) for closer in map("".join, product("]}", repeat=length))]
"""What may complete the first lines of a value. If a line leaves more brackets open, its keys count as those of the
next line that can be completed."""
_EXACT_LINES = 300
"""Number of lines of one value whose elements are told apart; parsing each prefix of these lines takes 0.1 s of CPU
time. Later elements count as those of the line after them."""
_ENDS = ("]", '"""', "'''")
"""Marks of which the last line of a value of several lines has at least one."""


def lines_of(text: str) -> Mapping[Path, int]:
    """Return the line (from 1) of every key, header and array element of a valid TOML document."""
    lines: dict[Path, int] = {}
    elements = Counter[Path]()
    """Number of [[headers]] that each array of tables has had so far."""
    table: Path = ()
    statement, begin = "", 1
    for number, line in enumerate(text.split("\n"), 1):
        statement += f"{line}\n"
        if statement.count("\n") > _EXACT_LINES and not any(mark in line for mark in _ENDS):
            continue
        closer, data = _parsed(statement)
        if data is None:
            continue
        if statement.lstrip().startswith("["):
            table = _header(data, begin, lines, elements)
        else:
            for path in keys_of(data, table):
                lines.setdefault(path, begin)
        statement, begin = statement if closer else "", number + 1
    return lines


def nearest_line(lines: Mapping[Path, int], path: Path) -> int | None:
    """Return the line of ``path`` or of the deepest table around it; None if the document has neither."""
    while path:
        if path in lines:
            return lines[path]
        path = path[:-1]
    return None


def keys_of(value: Any, path: Path) -> Iterator[Path]:
    """Yield the path of each key and list element of a table, which is at ``path``."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from keys_of(inner, (*path, key))


def _parsed(statement: str) -> tuple[str, dict[str, Any] | None]:
    """Return what completes the first lines of a statement, and its content; None if it cannot be completed so."""
    for closer in _CLOSERS:
        try:
            return closer, tomllib.loads(statement + closer)
        except tomllib.TOMLDecodeError:
            continue
    return "", None


def _header(data: Any, line: int, lines: dict[Path, int], elements: Counter[Path]) -> Path:
    """Note the lines of the tables that a header names, and return the path of the table that it begins."""
    path: Path = ()
    while data:
        ((name, data),) = data.items()
        path = (*path, name)
        if data == {}:
            lines[path] = line  # the line of the header itself counts, even if [a.b] came before [a]
        lines.setdefault(path, line)
        if isinstance(data, list):
            elements[path] += 1
            data = None
        if path in elements:  # the newest table of an array of tables
            path = (*path, elements[path] - 1)
            lines.setdefault(path, line)
    return path
