"""Load the site's health rules from a TOML file (``/etc/rrl/health.toml``, or ``$RRL_HEALTH_CONFIG``), and name what is
wrong in it in one line: file, line, key, what is wrong, what is right.
"""

from __future__ import annotations

import difflib
import os
import re
import stat
import tomllib
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from ..core.text import on_one_line
from .health_rules import Rules
from .toml_positions import Path as KeyPath
from .toml_positions import lines_of, nearest_line

CONFIG_ENV = "RRL_HEALTH_CONFIG"
DEFAULT_CONFIG_PATH = Path("/etc/rrl/health.toml")
MAX_FILE_BYTES = 2**20
"""a config is a page long"""
MAX_MESSAGE_CHARS = 400
"""of an error message; a value that is longer is cut"""


class RulesError(Exception):
    """The site's rules are wrong; one line: file, line, key, what is wrong, what is right."""


def load_rules(path: Path | None = None) -> Rules:
    """Load the rules from ``path``, else from ``$RRL_HEALTH_CONFIG``, else from :data:`CONFIG`.

    Return the defaults where none is named and :data:`CONFIG` does not exist. Raise :class:`RulesError`, and nothing
    else, for a file that was named and does not exist, cannot be read or is wrong."""
    named = path or (Path(given) if (given := os.environ.get(CONFIG_ENV)) else None)
    if named is None:
        if not DEFAULT_CONFIG_PATH.exists():
            return Rules()
        named = DEFAULT_CONFIG_PATH
    try:
        with named.open("rb") as file:
            status = os.fstat(file.fileno())
            if stat.S_ISREG(status.st_mode) and status.st_mode & stat.S_IWOTH:
                raise RulesError(f"{named}: everybody may write it, and so drain nodes; chmod o-w {named}")
            text = file.read(MAX_FILE_BYTES + 1).decode("utf-8-sig").replace("\r\n", "\n")
    except OSError as error:
        raise RulesError(f"{named}: cannot be read: {error.strerror or error}") from None
    except ValueError:
        raise RulesError(f"{named}: is not UTF-8") from None
    return parse_rules(text, str(named))


def parse_rules(text: str, name: str = "health.toml") -> Rules:
    """Raises :class:`RulesError`."""
    if len(text) > MAX_FILE_BYTES:
        raise RulesError(f"{name}: is larger than 1 MiB; that is no health.toml")
    try:
        data = tomllib.loads(text)
    except RecursionError:
        raise RulesError(f"{name}: tables or arrays are nested too deeply") from None
    except ValueError as error:
        raise RulesError(f"{name}: {on_one_line(error)[:MAX_MESSAGE_CHARS]}") from None
    if wrong := _unknown(Rules, data, ()) or _invalid_value(data):
        line = nearest_line(lines_of(text), wrong[0])
        place = f"{name}:{line}" if line else name
        raise RulesError(f"{place}: {'.'.join(map(str, wrong[0]))}: {on_one_line(wrong[1])[:MAX_MESSAGE_CHARS]}")
    return msgspec.convert(data, Rules)


def _unknown(table: type[Struct], data: dict[str, Any], at: KeyPath) -> tuple[KeyPath, str] | None:
    """The first key that nobody knows, and the nearest one that is known."""
    fields = {field.name: field.type for field in msgspec.structs.fields(table)}
    for key, value in data.items():
        if key not in fields:
            return (*at, key), _did_you_mean(key, list(fields))
        inner = fields[key]
        table_below = isinstance(inner, type) and issubclass(inner, Struct) and isinstance(value, dict)
        if table_below and (wrong := _unknown(inner, value, (*at, key))):
            return wrong
    return None


def _did_you_mean(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, 1)
    return f'unknown key; did you mean "{near[0]}"?' if near else f"unknown key; known here: {', '.join(known)}"


def _invalid_value(data: dict[str, Any]) -> tuple[KeyPath, str] | None:
    try:
        rules = msgspec.convert(data, Rules)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `")
        if where.startswith("key"):  # of a dict: msgspec says only that
            where = where.partition("$")[2]
        path = tuple(int(p) if p.isdigit() else p for p in re.findall(r"[A-Za-z_]\w*|\d+", where.lstrip("$")))
        return path, message[:1].lower() + message[1:]
    for code in rules.xid.classes:
        if not code.isdigit():
            return ("xid", "classes", code), "is no Xid; write its number in quotes"
    negative = [
        ((table, field), value)
        for table in rules.__struct_fields__
        if isinstance(getattr(rules, table), Struct)
        for field, value in msgspec.structs.asdict(getattr(rules, table)).items()
        if isinstance(value, int | float) and value < 0
    ]
    return (negative[0][0], f"must be at least 0, not {negative[0][1]:g}") if negative else None
