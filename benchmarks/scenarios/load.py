"""Loads a scenario file into a :class:`Scenario`, or reports each mistake in one line with a correct form."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from rrl.benchmarks.scenarios.format import Scenario
from rrl.benchmarks.scenarios.validation import mistakes
from rrl.config.toml_positions import lines_of, nearest_line


class ScenarioError(Exception):
    """A scenario file is invalid; the text has one line per mistake, with file, line, key and description."""


def load_all(folder: Path) -> dict[str, Scenario]:
    """Load all ``*.toml`` below a folder, or one file; return them by path without the suffix. Raises ScenarioError."""
    if folder.is_file():
        return {folder.stem: load(folder)}
    paths = sorted(folder.rglob("*.toml")) if folder.is_dir() else []
    if not paths:
        raise ScenarioError(f"{folder}: there is no file *.toml in this folder")
    found: dict[str, Scenario] = {}
    wrong: list[str] = []
    for path in paths:
        try:
            found[path.relative_to(folder).with_suffix("").as_posix()] = load(path)
        except ScenarioError as error:
            wrong.append(str(error))
    if wrong:
        raise ScenarioError("\n".join(wrong))
    return found


def load(path: Path) -> Scenario:
    """Load one file. Raises only ScenarioError."""
    try:
        text = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
        data = tomllib.loads(text)
    except OSError as error:
        raise ScenarioError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ScenarioError(f"{path}: not valid TOML: {' '.join(str(error).split())}") from None
    lines = lines_of(text)
    try:
        scenario = Scenario.model_validate(data)
    except ValidationError as error:
        lines_of_errors = dict.fromkeys(_line_number(path, lines, one, data) for one in error.errors(include_url=False))
        raise ScenarioError("\n".join(lines_of_errors)) from None
    wrong = []
    for loc, words in mistakes(scenario):
        keys = _existing(loc, data)
        wrong.append(f"{path}:{nearest_line(lines, keys) or 1}: {'.'.join(map(str, loc))}: {words}")
    if wrong:
        raise ScenarioError("\n".join(dict.fromkeys(wrong)))
    return scenario


def _line_number(path: Path, numbers: Any, error: Any, data: Any) -> str:
    loc = tuple(part for part in error["loc"] if part != "function-after")
    keys = _existing(loc, data)
    line = nearest_line(numbers, keys)
    place = f"{path}:{line}" if line else str(path)
    name = ".".join(str(part) for part in (loc if error["type"] in ("extra_forbidden", "missing") else keys))
    return f"{place}: {name}: {_what(error, loc)}" if name else f"{place}: {_what(error, loc)}"


def _what(error: Any, loc: tuple[Any, ...]) -> str:
    if error["type"] == "extra_forbidden":
        known = _fields(Scenario, loc[:-1])
        near = difflib.get_close_matches(str(loc[-1]), known, 1)
        return f'unknown key; did you mean "{near[0]}"?' if near else f"unknown key; known here: {', '.join(known)}"
    if error["type"] == "missing":
        return "missing"
    if error["type"] == "literal_error":
        near = difflib.get_close_matches(str(error["input"]), _quoted(error["ctx"]["expected"]), 1)
        hint = f'; did you mean "{near[0]}"?' if near else ""
        return f'must be {error["ctx"]["expected"]}, not "{error["input"]}"{hint}'.replace("'", '"')
    if error["type"] in _WANTED:
        given = _value_text(error["input"])
        return f"must be {_WANTED[error['type']]}, not {given}"
    if (bound := next((key for key in _BOUNDS if key in error.get("ctx", {})), None)) is not None:
        return f"must be {_BOUNDS[bound]} {error['ctx'][bound]:g}, not {_value_text(error['input'])}"
    if error["type"] in ("value_error", "mistake"):
        return " ".join(str(error["msg"]).removeprefix("Value error, ").split())
    return f"{' '.join(str(error['msg']).replace('Input should', 'must').split())}, not {error['input']!r}"[:300]


_WANTED = {
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), 'a table, as in {phase = "a", lasts = "9s"}'),
    **dict.fromkeys(("tuple_type", "list_type"), "a list, as in [ ... ]"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    "string_type": "text in quotes",
    "string_too_short": "text that is not empty",
}
_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}


def _value_text(value: Any) -> str:
    """Return the value as the file has it."""
    if isinstance(value, str):
        return f'"{value}"'
    return str(value).lower() if isinstance(value, bool) else f"{value}"[:100]


def _quoted(expected: str) -> list[str]:
    return [part.strip(" '\"") for piece in expected.split(" or ") for part in piece.split(",")]


def _existing(loc: tuple[Any, ...], data: Any) -> tuple[Any, ...]:
    """Return the part of a place (a path of keys) that exists in the document."""
    path: tuple[Any, ...] = ()
    for part in loc:
        there = part in data if isinstance(data, dict) else isinstance(data, list) and part in range(len(data))
        if there:
            data, path = data[part], (*path, part)
    return path


def _fields(model: type[BaseModel], loc: tuple[Any, ...]) -> list[str]:
    """Return the keys of the table at a place."""
    for part in loc:
        field = next((one for name, one in model.model_fields.items() if part in (name, one.alias)), None)
        if field is None:
            continue  # a name that the file defines, or a number
        inner = _model_in(field.annotation)
        if inner is not None:
            model = inner
    return [field.alias or name for name, field in model.model_fields.items()]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for one in get_args(annotation) if (found := _model_in(one)) is not None), None)
