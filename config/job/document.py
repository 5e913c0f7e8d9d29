"""A job spec as the user gave it: files, TOML text, tables and settings (``--set KEY=VALUE``), merged left to right.

Tables are merged key by key; every other value, also a list, replaces the value before it. The document keeps where
each key was written, so that an error message names the file and line, or the setting.
"""

from __future__ import annotations

import datetime
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...core.text import on_one_line
from ...core.types import UsageError
from ..toml_positions import Path as KeyPath
from ..toml_positions import keys_of, lines_of
from .render import as_value, bare_or_quoted, merged_toml

_MAX_FILE_BYTES = 2**20
"""Maximum size of a file in bytes: far more than a job.toml needs. The limit is for endless devices like /dev/zero."""
_NO_FILE = "job.toml"
"""Path that stands for a job spec without a file."""
_ARGUMENT = "job"
"""Name by which error messages refer to a part that is not a file: the argument ``job`` of ``rrl.submit``."""
_MAX_OPTION_CHARS = 120
"""Maximum number of characters of an option that a message quotes."""


class SpecError(UsageError):
    """The job spec is invalid. The text has a line per mistake: file, line, key, what is wrong, what would be right."""


class Setting(NamedTuple):
    """One value that replaces the value of a key in the files."""

    key: KeyPath
    value: Any
    option: str
    """The option as the user wrote it, such as ``--set run.steps=5``; error messages name it."""
    typed: bool = False
    """True if the value was given in Python, so that no shell can have removed its quotes."""


JobPart = Path | str | Mapping[str, Any]
"""One part of a job spec: a file, TOML text, or a table as Python values."""


class _Place(NamedTuple):
    """Where a key was written."""

    source: int
    """Index of the part or setting in ``JobDocument._sources``, which lists the parts before the settings."""
    line: int
    """Line in the file or text, from 1; 0 for a table or a setting."""


class JobDocument:
    """The merged content of the parts and settings of one job spec.

    Args:
        parts: Files, TOML texts and tables, in their order; at least one.
        settings: Values that replace those of the parts. If several set the same key, the last one counts.

    Raises:
        SpecError: A file cannot be read, a text is not valid TOML, or a table has a value that TOML does not have.
    """

    def __init__(self, parts: Sequence[JobPart], settings: Sequence[Setting] = ()) -> None:
        self.files = [part for part in parts if isinstance(part, Path)]
        self.file = next(iter(self.files), None)
        """The first file; None if there is none."""
        self.source = self.file or Path(_NO_FILE)
        """Relative paths of the job start at the folder of this path: the first file, or else job.toml in the current
        folder, which need not exist."""
        self.data: dict[str, Any] = {}
        """The merged keys, as TOML values."""
        self._sources = [
            *(_source_name(part, index, len(parts)) for index, part in enumerate(parts)),
            *(one_line(setting.option, _MAX_OPTION_CHARS) for setting in settings),
        ]
        self._settings = {len(parts) + index: setting for index, setting in enumerate(settings)}
        self._places: dict[KeyPath, _Place] = {}
        """For each key, its place in the last part or setting that contains it."""
        self._first_places: dict[KeyPath, _Place] = {}
        """The first place of each key. If a key is missing in a table that several files have, the error message names
        the first place of the table."""
        text = ""
        for index, part in enumerate(parts):
            if isinstance(part, Mapping):
                data = _plain(part, self._sources[index])
                lines: Mapping[KeyPath, int] = dict.fromkeys(keys_of(data, ()), 0)
            else:
                text = _read(part) if isinstance(part, Path) else part.replace("\r\n", "\n")
                data, lines = _parsed(self._sources[index], text)
            self._add(data, {key: _Place(index, line) for key, line in lines.items()})
        for index, setting in self._settings.items():
            place = _Place(index, 0)
            data = setting.value
            for name in reversed(setting.key):
                data = {str(name): data}
            self._add(data, {setting.key[:length]: place for length in range(1, len(setting.key) + 1)})
        self._text = text if len(self._sources) == 1 and not isinstance(parts[0], Mapping) else None

    @property
    def name(self) -> str:
        """Return the names of the files and settings, for messages about the whole job spec."""
        return " + ".join(self._sources)

    def text(self) -> str:
        """Return the job spec as one TOML file. A single file or text without settings is returned as it was given."""
        if self._text is not None:
            return self._text
        return f"# Merged by rrl from {one_line(self.name)}\n\n{merged_toml(self.data)}"

    def complaint(self, key: KeyPath, message: str, *, missing: bool = False) -> str:
        """Return one line about a key: file and line, or the setting; then the key and the message.

        Args:
            key: The key. If no file or setting contains it, the line names the place of the table around the key.
            message: What is wrong.
            missing: True if the key is missing. The line then names the first place of the table around the key,
                because the key has to be added there.
        """
        place = self._nearest(key, self._first_places if missing else self._places)
        dotted = dotted_key(key)
        if place is None:
            location = self.name
        elif setting := self._settings.get(place.source):
            location, dotted = self._sources[place.source], "" if key == setting.key else dotted
        else:
            location = f"{self._sources[place.source]}:{place.line}" if place.line else self._sources[place.source]
        return f"{location}: {dotted}: {message}" if dotted else f"{location}: {message}"

    def setting_at(self, key: KeyPath) -> Setting | None:
        """Return the setting from which the value of exactly this key comes; None if it comes from a file."""
        place = self._places.get(key)
        setting = self._settings.get(place.source) if place is not None else None
        return setting if setting is not None and setting.key == key else None

    def order(self, key: KeyPath) -> tuple[int, int]:
        """Return the position of a key, by which error messages are sorted: number of its source, and its line."""
        return self._nearest(key, self._places) or _Place(0, 0)

    def _nearest(self, key: KeyPath, places: Mapping[KeyPath, _Place]) -> _Place | None:
        while key:
            if key in places:
                return places[key]
            key = key[:-1]
        return None

    def _add(self, data: dict[str, Any], places: Mapping[KeyPath, _Place]) -> None:
        try:
            replaced = set(_merge(self.data, data, ()))
        except RecursionError:
            raise SpecError(
                f"{one_line(self.name)}: tables or arrays are nested too deeply; use fewer levels"
            ) from None
        if replaced:
            for known in (self._places, self._first_places):
                outdated = [key for key in known if any(key[:length] in replaced for length in range(1, len(key) + 1))]
                for key in outdated:
                    del known[key]
        self._places.update(places)
        for key, place in places.items():
            self._first_places.setdefault(key, place)


def typed_setting(key: str, value: Any) -> Setting:
    """Return the setting that gives a dotted key a Python value.

    Raises:
        SpecError: The key or value is not valid.
    """
    option = f'set["{key}"]'
    shown = one_line(option, _MAX_OPTION_CHARS)
    if not (path := _key(key)):
        raise SpecError(f'{shown}: is not a key of job.toml; write for example set={{"run.steps": 500}}')
    return Setting(path, _plain(value, shown), option, typed=True)


def parse_setting(text: str) -> Setting:
    """Parse the value of ``--set``: a dotted key, ``=``, and a TOML value or plain text.

    The shell removes quotes, so ``8h`` or ``gpu`` is text although TOML would need quotes. A date or time is text, too:
    ``08:00:00`` is a duration.

    Raises:
        SpecError: The key or value is not valid.
    """
    option = f"--set {text}"
    shown = one_line(option, _MAX_OPTION_CHARS)
    if "=" not in text:
        raise SpecError(f"{shown}: has no value; write for example --set run.steps=500")
    for match in re.finditer("=", text):
        if key := _key(text[: match.start()]):
            return Setting(key, _value(shown, text[match.end() :].strip()), option)
    raise SpecError(f"{shown}: is not a key of job.toml; write for example --set run.steps=500")


def dotted_key(key: KeyPath) -> str:
    """Return a key as TOML text, with the index of a list element in brackets."""
    text = ""
    for part in key:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += ("." if text else "") + bare_or_quoted(part)
    return text


# ── merging ────────────────────────────────────────────────────────────────────────────────────────────────────────
def _merge(into: dict[str, Any], data: dict[str, Any], path: KeyPath) -> Iterator[KeyPath]:
    """Merge ``data`` into a table, and yield the path of each value that was replaced."""
    for key, value in data.items():
        before = into.get(key)
        if isinstance(before, dict) and isinstance(value, dict):
            yield from _merge(before, value, (*path, key))
            continue
        if key in into:
            yield (*path, key)
        into[key] = value


# ── Python values ──────────────────────────────────────────────────────────────────────────────────────────────────
def _source_name(part: JobPart, index: int, parts: int) -> str:
    """Return the name of a part in error messages: a file's path, or else the argument of the Python API."""
    if isinstance(part, Path):
        return one_line(part)
    return _ARGUMENT if parts == 1 else f"{_ARGUMENT}[{index}]"


def _plain(value: Any, shown: str) -> Any:
    """Return a Python value as TOML has it: paths as text, sequences as lists. ``shown`` names it in error messages.

    Raises:
        SpecError: The value, or a value inside it, cannot be written in TOML.
    """
    try:
        return _toml_value(value, (), shown)
    except RecursionError:
        raise SpecError(f"{shown}: tables or arrays are nested too deeply; use fewer levels") from None


def _toml_value(value: Any, path: KeyPath, shown: str) -> Any:
    match value:
        case bool() | int() | float() | str() | datetime.date() | datetime.time():
            return value
        case Path():
            return str(value)
        case list() | tuple():
            return [_toml_value(element, (*path, index), shown) for index, element in enumerate(value)]
        case Mapping():
            for key in value:
                if not isinstance(key, str):
                    wrong = one_line(repr(key), _MAX_OPTION_CHARS)
                    raise SpecError(f"{shown}: {_prefix(path)}the key {wrong} is not text; write it in quotes")
            return {key: _toml_value(inner, (*path, key), shown) for key, inner in value.items()}
    described = "None: leave the key out" if value is None else f"of type {type(value).__name__}"
    raise SpecError(f"{shown}: {_prefix(path)}must be text, a number, a boolean, a list or a dict, not {described}")


def _prefix(path: KeyPath) -> str:
    return f"{dotted_key(path)}: " if path else ""


# ── files ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def _read(path: Path) -> str:
    shown = one_line(path)
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise SpecError(f"{shown}: no such file{_setting_hint(path)}") from None
    except IsADirectoryError:
        raise SpecError(f'{shown}: is a folder; name the file in it, for example "{shown}/job.toml"') from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise SpecError(f"{shown}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > _MAX_FILE_BYTES:
        raise SpecError(f"{shown}: is larger than 1 MiB; that is not a job.toml")
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SpecError(f"{shown}:{line}: byte {data[error.start]:#04x} is not UTF-8; save the file as UTF-8") from None


def _setting_hint(path: Path) -> str:
    """Return a hint to write ``--set`` if the name of a missing file has the form ``key=value``, else an empty text."""
    text = str(path)
    key, sign, _ = text.lstrip("+~").partition("=")
    return f"; to set a key, write --set {one_line(text.lstrip('+~'))}" if sign and _key(key) else ""


def _parsed(shown: str, text: str) -> tuple[dict[str, Any], Mapping[KeyPath, int]]:
    """Parse TOML of the file or argument that messages call ``shown``. Raises SpecError if it is invalid."""
    try:
        return tomllib.loads(text), lines_of(text)
    except RecursionError:
        raise SpecError(f"{shown}: tables or arrays are nested too deeply; use fewer levels") from None
    except ValueError as error:  # TOMLDecodeError, or the ValueError of int() for numbers with thousands of digits
        raise SpecError(_syntax(shown, text, error)) from None


def _syntax(shown: str, text: str, error: ValueError) -> str:
    match = re.fullmatch(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", str(error), re.DOTALL)
    if match is None:
        return f"{shown}: not valid TOML: {one_line(error)}"
    message, line, column = match.groups()
    message = re.sub(r"Cannot declare \('(.*)',?\) twice", r"table [\1] is defined twice", message).replace("', '", ".")
    message = _PLAIN_MESSAGES.get(message, message[0].lower() + message[1:])
    if line is None:
        line, message = text.count("\n") + 1, f"{message}, up to the end of the file"
        return f"{shown}:{line}: not valid TOML: {one_line(message)}"
    return f"{shown}:{line}:{column}: not valid TOML: {one_line(message)}"


_PLAIN_MESSAGES = {
    "Cannot overwrite a value": "this key already has a value; write it once",
    "Invalid value": 'invalid value: strings need quotes ("..."), booleans are true or false',
    "Invalid statement": "expected key = value or a [table]",
    "Illegal character '\\n'": "the closing quote of this text is missing",
    "Invalid initial character for a key part": "expected a key; an inline table {...} must be on one line",
    "Expected newline or end of document after a statement": "expected the end of the line after the value",
}
"""Plainer texts for messages of tomllib, by the beginning of the message."""


# ── settings ───────────────────────────────────────────────────────────────────────────────────────────────────────
def _key(text: str) -> KeyPath:
    """Return the path of a dotted TOML key; () if the text is not a key."""
    try:
        table: Any = tomllib.loads(f"{text} = 0") if "\n" not in text else {}
    except (ValueError, RecursionError):
        return ()
    path: KeyPath = ()
    while isinstance(table, dict) and table:
        ((part, table),) = table.items()
        path = (*path, part)
    return path


def _value(shown: str, text: str) -> Any:
    """Return the TOML value of a setting, or its text if that is not TOML.

    Raises SpecError if the text is empty, or begins like a TOML list, table or string but is invalid.
    """
    if not text:
        raise SpecError(f"{shown}: has no value; for an empty text write {as_value('')!r}, quoted for the shell")
    try:
        data = tomllib.loads(f"value = {text}")
    except RecursionError:
        raise SpecError(f"{shown}: arrays or tables are nested too deeply; use fewer levels") from None
    except ValueError as error:
        if text[0] in "[{\"'":
            quoted = "put the setting in single quotes, because the shell removes double quotes"
            raise SpecError(f"{shown}: not valid TOML: {one_line(error)}; {quoted}") from None
        return text
    value = data["value"]
    if len(data) > 1 or isinstance(value, datetime.date | datetime.time):
        return text
    return value


def one_line(value: object, max_chars: int = 1000) -> str:
    """Return a value as text of one line, shortened to ``max_chars`` characters."""
    text = on_one_line(value)
    return text if len(text) <= max_chars else f"{text[:max_chars]}..."
