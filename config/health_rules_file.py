"""Load the site's health rules from a TOML file (``/etc/rrl/health.toml``, or ``$RRL_HEALTH_CONFIG``).

A mistake in the file is reported in one line: file, line, key, what is wrong, what would be right.
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
from ..core.types import UsageError
from .health_rules import Rules
from .toml_positions import Path as KeyPath
from .toml_positions import lines_of, nearest_line

CONFIG_ENV = "RRL_HEALTH_CONFIG"
DEFAULT_CONFIG_PATH = Path("/etc/rrl/health.toml")
MAX_FILE_BYTES = 2**20
"""Maximum size of the file in bytes; a usual file is a page long."""
MAX_MESSAGE_CHARS = 400
"""Maximum length of an error message in characters; a longer value is truncated."""


class RulesError(UsageError):
    """The site's rules are invalid. The text is one line: file, line, key, what is wrong, what would be right."""


def load_rules(path: Path | None = None) -> Rules:
    """Load the rules from ``path``, else from ``$RRL_HEALTH_CONFIG``, else from :data:`DEFAULT_CONFIG_PATH`.

    Return the defaults if neither a path nor the variable is given and :data:`DEFAULT_CONFIG_PATH` does not exist.

    Raises:
        RulesError: The file cannot be read or is invalid, or a file that was named does not exist. Nothing else is
            raised.
    """
    named = path or (Path(given) if (given := os.environ.get(CONFIG_ENV)) else None)
    if named is None:
        if not DEFAULT_CONFIG_PATH.exists():
            return Rules()
        named = DEFAULT_CONFIG_PATH
    try:
        with named.open("rb") as file:
            status = os.fstat(file.fileno())
            if stat.S_ISREG(status.st_mode) and status.st_mode & stat.S_IWOTH:
                raise RulesError(
                    f"{named}: every user can write this file, and could drain nodes with it; run chmod o-w {named}"
                )
            text = file.read(MAX_FILE_BYTES + 1).decode("utf-8-sig").replace("\r\n", "\n")
    except OSError as error:
        raise RulesError(f"{named}: cannot be read: {error.strerror or error}") from None
    except ValueError:
        raise RulesError(f"{named}: is not UTF-8") from None
    return parse_rules(text, str(named))


def parse_rules(text: str, name: str = "health.toml") -> Rules:
    """Parse the text of a health.toml.

    Raises:
        RulesError: The text is not valid. ``name`` is the file name in the message.
    """
    if len(text) > MAX_FILE_BYTES:
        raise RulesError(f"{name}: is larger than 1 MiB; that is not a health.toml")
    try:
        data = tomllib.loads(text)
    except RecursionError:
        raise RulesError(f"{name}: tables or arrays are nested too deeply; use fewer levels") from None
    except ValueError as error:
        raise RulesError(f"{name}: {on_one_line(error)[:MAX_MESSAGE_CHARS]}") from None
    if mistake := _unknown(Rules, data, ()) or _invalid_value(data):
        key, problem = mistake
        line = nearest_line(lines_of(text), key)
        location = f"{name}:{line}" if line else name
        raise RulesError(f"{location}: {'.'.join(map(str, key))}: {on_one_line(problem)[:MAX_MESSAGE_CHARS]}")
    return msgspec.convert(data, Rules)


def _unknown(table: type[Struct], data: dict[str, Any], at: KeyPath) -> tuple[KeyPath, str] | None:
    """Return the first unknown key, and a text that suggests the nearest known key; None if all keys are known."""
    fields = {field.name: field.type for field in msgspec.structs.fields(table)}
    for key, value in data.items():
        if key not in fields:
            return (*at, key), _did_you_mean(key, list(fields))
        inner = fields[key]
        table_below = isinstance(inner, type) and issubclass(inner, Struct) and isinstance(value, dict)
        if table_below and (mistake := _unknown(inner, value, (*at, key))):
            return mistake
    return None


def _did_you_mean(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, 1)
    return f'unknown key; did you mean "{near[0]}"?' if near else f"unknown key; known here: {', '.join(known)}"


def _invalid_value(data: dict[str, Any]) -> tuple[KeyPath, str] | None:
    try:
        rules = msgspec.convert(data, Rules)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `")
        if where.startswith("key"):  # msgspec does not name the key of a dict
            where = where.partition("$")[2]
        path = tuple(int(p) if p.isdigit() else p for p in re.findall(r"[A-Za-z_]\w*|\d+", where.lstrip("$")))
        return path, message[:1].lower() + message[1:]
    for code in rules.xid.classes:
        if not code.isdigit():
            return ("xid", "classes", code), "is not an Xid; write its number in quotes"
    negative = [
        ((table, field), value)
        for table in rules.__struct_fields__
        if isinstance(getattr(rules, table), Struct)
        for field, value in msgspec.structs.asdict(getattr(rules, table)).items()
        if isinstance(value, int | float) and value < 0
    ]
    return (negative[0][0], f"must be at least 0, not {negative[0][1]:g}") if negative else None
