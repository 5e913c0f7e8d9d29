"""job.toml from the disk to a :class:`rrl.config.job.schema.Job`, or to lines that say where the mistake is and what is
right.

    job.toml:12: roles.rollout.replica: unknown key; did you mean "replicas"?

Several mistakes are told at once, a line each. Whatever the file holds, nothing but SpecError is raised.
"""

from __future__ import annotations

import datetime
import difflib
import json
import math
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ...core.text import on_one_line
from ..model_folder import SHAPE_KEYS, max_length
from ..toml_positions import Path as KeyPath
from ..toml_positions import lines_of, nearest_line
from .resolve import resolve
from .schema import Job

_MAX_FILE_BYTES = 2**20
"""bytes; a job.toml is a page long, and /dev/zero has no end"""
_MAX_DEPTH = 50
"""tables and arrays in each other"""
_MAX_SHOWN_CHARS = 60
"""characters of a wrong value that are repeated"""


class SpecError(Exception):
    """The job spec is wrong; the text has one line for each mistake: file, line, key, what is wrong, what is right."""


def load_job(path: Path, folder: Path | None = None) -> Job:
    """Read and validate a job.toml. Raises SpecError and nothing else, whatever the file is.

    ``folder``: where a relative path of a model in it starts, as commands do; default: where the file lies."""
    text = _read(path)
    try:
        data = tomllib.loads(text)
        complaints = list(_unsupported_values(data, ()))
        if not complaints:
            try:
                return _with_absolute_model_path(Job.model_validate(data), folder or path.parent)
            except ValidationError as error:
                complaints = list(_translate_errors(error, data))
        lines = lines_of(text)
    except RecursionError:
        raise SpecError(f"{_one_line(path)}: tables or arrays are nested too deeply") from None
    except ValueError as error:  # TOMLDecodeError, and what int() says of numbers with thousands of digits
        raise SpecError(_syntax(path, text, error)) from None
    located = sorted((nearest_line(lines, key) or 0, _dotted(key), what) for key, what in complaints)
    raise SpecError("\n".join(_error_line(path, line, key, what) for line, key, what in located))


def resolved(job: Job) -> dict[str, Any]:
    """The spec with every default filled in, as JSON values: durations in seconds, sizes in bytes."""
    filled = job.model_dump(mode="json")
    for role in resolve(job, "python").roles:
        table, name = job.table_of(role.name)
        filled[table][name]["min_replicas"] = role.min_replicas
    if job.model is not None and job.model.path is None:
        filled["model"]["max_length"] = max_length(filled["model"])
    elif job.model is not None:
        filled["model"] = {key: value for key, value in filled["model"].items() if key not in SHAPE_KEYS}
    return filled


def _with_absolute_model_path(job: Job, folder: Path) -> Job:
    """A model's path as whoever reads it in another folder, or on another node, finds it too."""
    if job.model is None or job.model.path is None:
        return job
    place = Path(os.path.abspath(folder / Path(job.model.path).expanduser()))  # a link in it stays one
    return job.model_copy(update={"model": job.model.model_copy(update={"path": str(place)})})


# ── reading ────────────────────────────────────────────────────────────────────────────────────────────────────────
def _read(path: Path) -> str:
    shown = _one_line(path)
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise SpecError(f"{shown}: no such file") from None
    except IsADirectoryError:
        raise SpecError(f'{shown}: is a folder; name the file in it, for example "{shown}/job.toml"') from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise SpecError(f"{shown}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > _MAX_FILE_BYTES:
        raise SpecError(f"{shown}: is larger than 1 MiB; that is no job.toml")
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SpecError(f"{shown}:{line}: byte {data[error.start]:#04x} is not UTF-8; save the file as UTF-8") from None


def _syntax(path: Path, text: str, error: ValueError) -> str:
    match = re.fullmatch(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", str(error), re.DOTALL)
    if match is None:
        return f"{_one_line(path)}: not valid TOML: {_one_line(error)}"
    what, line, column = match.groups()
    what = re.sub(r"Cannot declare \('(.*)',?\) twice", r"table [\1] is there twice", what).replace("', '", ".")
    what = _PLAIN_MESSAGES.get(what, what[0].lower() + what[1:])
    if line is None:
        line, what = text.count("\n") + 1, f"{what}, up to the end of the file"
        return f"{_one_line(path)}:{line}: not valid TOML: {_one_line(what)}"
    return f"{_one_line(path)}:{line}:{column}: not valid TOML: {_one_line(what)}"


_PLAIN_MESSAGES = {
    "Cannot overwrite a value": "this key has a value already; write it once",
    "Invalid value": 'this is no value; text needs quotes ("..."), booleans are true and false',
    "Invalid statement": "expected key = value or a [table]",
    "Illegal character '\\n'": "the closing quote of this text is missing",
    "Invalid initial character for a key part": "expected a key; an inline table {...} must stand on one line",
    "Expected newline or end of document after a statement": "expected the end of the line after the value",
}
"""What tomllib says, where a newcomer would not understand it."""


def _unsupported_values(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    """What TOML allows and no job can hold: journal, JSON and command lines would each choke on it later."""
    if len(path) > _MAX_DEPTH:
        yield path[:2], f"is nested more than {_MAX_DEPTH} deep"
    elif isinstance(value, dict):
        for key, inner in value.items():
            if "\0" in key:
                yield path, f"the key {_format_value(key)} holds a NUL character"
            yield from _unsupported_values(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _unsupported_values(inner, (*path, index))
    elif isinstance(value, str) and "\0" in value:
        yield path, "holds a NUL character (\\u0000)"
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        yield path, "is a number beyond 64 bits"
    elif isinstance(value, float) and not math.isfinite(value):
        yield path, f"is {value}; write a finite number"
    elif isinstance(value, datetime.date | datetime.time):
        yield path, "is a date or time; write it as text, in quotes"


# ── what pydantic found, in plain words ────────────────────────────────────────────────────────────────────────────
def _translate_errors(error: ValidationError, data: dict[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    """Each mistake once: the alternatives of a union speak of the same key and are joined."""
    unfit: dict[KeyPath, list[ErrorDetails]] = {}
    for found in error.errors(include_url=False):
        if at := found.get("ctx", {}).get("at"):
            yield tuple(at), str(found["msg"])
        elif found["type"] == "extra_forbidden":
            yield found["loc"], _unknown(found["loc"])
        elif found["type"] == "missing":
            yield found["loc"], _missing(found["loc"])
        else:
            unfit.setdefault(_existing(found["loc"], data), []).append(found)
    for path, several in unfit.items():
        if any(deeper[: len(path)] == path != deeper for deeper in unfit):
            continue  # a union: the alternative that came further tells more
        if several[0]["type"] == "value_error":
            yield path, several[0]["msg"].removeprefix("Value error, ")
        else:
            expected = " or ".join(dict.fromkeys(_expected(found) for found in several))
            yield path, f"must be {expected}, not {_format_value(_value_at(path, data))}{_suggestion(several[0], path)}"


def _existing(loc: KeyPath, data: Any) -> KeyPath:
    """The part of ``loc`` that the document has; pydantic puts the names of a union's alternatives in between."""
    path: KeyPath = ()
    for part in loc:
        exists = part in data if isinstance(data, dict) else isinstance(data, list) and part in range(len(data))
        if exists:
            data, path = data[part], (*path, part)
    return path


def _value_at(path: KeyPath, data: Any) -> Any:
    for part in path:
        data = data[part]
    return data


def _expected(error: ErrorDetails) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind in _COMPARED:
        relation, bound = _COMPARED[kind]
        return f"{relation} {context[bound]:g}"
    if kind in ("literal_error", "enum"):
        return str(context["expected"]).replace("'", '"')
    if kind == "string_pattern_mismatch":
        return _described(error["loc"]) or f"text that matches {context['pattern']}"
    if kind == "tuple_type" and table_at(error["loc"]):
        return f"a list of tables, each under [[{_dotted(error['loc'])}]]"
    return _KINDS.get(kind) or str(error["msg"]).removeprefix("Input should be ")


_COMPARED = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}
_KINDS = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "text in quotes",
    "bool_type": "true or false",
    "tuple_type": 'a list, as in ["a", "b"]',
    "dict_type": "a table",
    "model_type": "a table",
    "too_short": "something that is not empty",
    "string_too_short": "something that is not empty",
}


def _suggestion(error: ErrorDetails, path: KeyPath) -> str:
    """A hint for a near miss of a fixed choice."""
    value, expected = error["input"], str(error.get("ctx", {}).get("expected", ""))
    near = difflib.get_close_matches(value, re.findall(r"'([^']+)'", expected), 1) if isinstance(value, str) else []
    return f"; did you mean {_format_value(near[0])}?" if near else ""


def _unknown(loc: KeyPath) -> str:
    table, name = table_at(loc[:-1]), str(loc[-1])
    assert table is not None  # only a table of ours forbids keys
    if near := difflib.get_close_matches(name, table.model_fields, 1):
        return f"unknown key; did you mean {_format_value(near[0])}?"
    if len(tables := [home for home in _tables(Job, ()) if name in home[1].model_fields]) == 1:
        home = tables[0][0]
        return f"unknown key; it belongs in {_header(home)}" if home else f"unknown key; write [{name}] as a table"
    return f"unknown key; known here: {', '.join(table.model_fields)}"


def _missing(loc: KeyPath) -> str:
    owner, name = table_at(loc[:-1]), str(loc[-1])
    assert owner is not None
    inner = table_at(loc)
    if inner is not None:
        needs = " and ".join(_dotted(path) for path in _required(inner, ()))
        purpose = (inner.__doc__ or "").partition("\n")[0]
        return f"missing; add a table {_header(loc)}" + (f" with {needs}" if needs else f" ({purpose})")
    described = _described(loc)
    where = f" in {_header(loc[:-1])}" if loc[:-1] else ""
    return f"missing; add {name} = ...{where}" + (f" ({described})" if described else "")


# ── the schema, walked ─────────────────────────────────────────────────────────────────────────────────────────────
def table_at(path: KeyPath) -> type[BaseModel] | None:
    """The table of the schema that ``path`` leads to; None where it leads to a value or to nothing of ours."""
    model: type[BaseModel] = Job
    named = False  # a name of the user's own follows
    for part in path:
        if isinstance(part, int) or named:
            named = False
            continue
        field = model.model_fields.get(part)
        inner = _model_in(field.annotation) if field else None
        if field is None or inner is None:
            return None
        model, named = inner, get_origin(field.annotation) is dict
    return model


def _tables(model: type[BaseModel], path: KeyPath) -> Iterator[tuple[KeyPath, type[BaseModel]]]:
    yield path, model
    for name, field in model.model_fields.items():
        if (inner := _model_in(field.annotation)) is not None:
            below: KeyPath = () if inner is field.annotation else (0,)
            if get_origin(field.annotation) is dict:
                below = ("NAME",)
            yield from _tables(inner, (*path, name, *below))


def _required(model: type[BaseModel], path: KeyPath) -> Iterator[KeyPath]:
    for name, field in model.model_fields.items():
        if field.is_required():
            inner = _model_in(field.annotation)
            yield from _required(inner, (*path, name)) if inner else [(*path, name)]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model in ``M``, ``M | None``, ``tuple[M, ...]`` or ``dict[str, M]``."""
    candidates = (annotation, *get_args(annotation))
    return next((one for one in candidates if isinstance(one, type) and issubclass(one, BaseModel)), None)


def _described(loc: KeyPath) -> str:
    owner = table_at(loc[:-1])
    field = owner.model_fields.get(str(loc[-1])) if owner else None
    return _one_line(field.description, 200) if field and field.description else ""


# ── lines ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def _error_line(path: Path, line: int, key: str, message: str) -> str:
    place = f"{_one_line(path)}:{line}" if line else _one_line(path)
    return f"{place}: {key}: {_one_line(message, 400)}" if key else f"{place}: {_one_line(message, 400)}"


def _dotted(path: KeyPath) -> str:
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            bare = re.fullmatch(r"[A-Za-z0-9_-]+", part)
            text += ("." if text else "") + (part if bare else _format_value(part))
    return text


def _header(path: KeyPath) -> str:
    return f"[[{_dotted(path[:-1])}]]" if isinstance(path[-1], int) else f"[{_dotted(path)}]"


def _format_value(value: Any) -> str:
    """A value as it would stand in the file, on one line and not too long."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list) and value:
        return "a list"
    shown = json.dumps(value, ensure_ascii=False)
    return shown if len(shown) <= _MAX_SHOWN_CHARS else f"{shown[:_MAX_SHOWN_CHARS]}..."


def _one_line(value: object, max_chars: int = 1000) -> str:
    text = on_one_line(value)
    return text if len(text) <= max_chars else f"{text[:max_chars]}..."
