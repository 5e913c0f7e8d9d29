"""Make a :class:`rrl.config.job.schema.Job` from a job spec, or report the mistakes in the job spec.

A report lists all mistakes at once, one line each: the place, what is wrong, and what would be right::

    job.toml:12: roles.rollout.replica: unknown key; did you mean "replicas"?

Whatever the file contains, no exception other than SpecError is raised.
"""

from __future__ import annotations

import datetime
import difflib
import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from ...core.text import on_one_line
from ..model_folder import SHAPE_KEYS, max_length
from ..toml_positions import Path as KeyPath
from .document import JobDocument
from .document import SpecError as SpecError
from .document import dotted_key as _dotted
from .render import as_value
from .resolve import with_dependent_defaults
from .schema import Job, TaskTable
from .validation import check

_MAX_DEPTH = 50
"""Maximum depth of nested tables and arrays."""
_MAX_SHOWN_CHARS = 60
"""Maximum number of characters of a wrong value that a message quotes."""
_RENAMED_KEYS: dict[tuple[str, ...], str] = {
    ("limits", "beat"): "heartbeat",
    ("recovery", "adopt"): "promote",
    ("recovery", "whole"): "full_restarts",
}
"""New names of renamed keys, by the old key."""
_REPLACED_KEYS: dict[tuple[str, ...], str] = {
    ("roles", "rollout", "warm"): 'spare = ["rollout", "train"] in [tags]: spare nodes then generate',
    ("roles", "trainer", "standbys"): 'rollout = ["train"] in [tags], or [] for none',
    ("roles", "trainer", "donor_rollouts"): 'rollout = ["train"] in [tags], or [] for none',
    ("recovery", "failure_rate"): 'rollout = ["train"] in [tags]: the trainer has standbys on as many nodes as its own',
}
"""What to write instead of keys that are gone."""


class _Mistake(NamedTuple):
    """A mistake in the value of a key."""

    key: KeyPath
    message: str
    missing: bool = False
    """True if the key is missing."""
    wanted_text: bool = False
    """True if the value must be text, but is a number, a boolean or a list."""


def load_job(path: Path, folder: Path | None = None) -> Job:
    """Read and validate a job.toml.

    Args:
        path: The file.
        folder: Folder to which relative paths of model and task refer; default: the folder of the file.

    Raises:
        SpecError: The file cannot be read or is wrong. Nothing else is raised.
    """
    return job_from(JobDocument((path,)), folder)


def job_from(document: JobDocument, folder: Path | None = None) -> Job:
    """Validate a job spec.

    Args:
        document: The merged files and settings of the job spec.
        folder: Folder to which relative paths of model and task refer; default: the folder of the first file.

    Raises:
        SpecError: The job spec is wrong. Nothing else is raised.
    """
    mistakes = list(_unsupported_values(document.data, ()))
    if not mistakes:
        try:
            job = Job.model_validate(document.data)
            check(job)
        except ValidationError as error:
            mistakes = list(_translate_errors(error, document.data))
        except PydanticCustomError as error:
            mistakes = [_Mistake((error.context or {})["at"], error.message())]
        else:
            return _with_absolute_paths(job, folder or document.source.parent)
    mistakes.sort(key=lambda one: (document.order(one.key), _dotted(one.key), one.message))
    raise SpecError("\n".join(_complaint(document, mistake) for mistake in mistakes))


def resolved(job: Job) -> dict[str, Any]:
    """Return the spec with every default filled in, as JSON values: durations in seconds, sizes in bytes.

    The target of notifications is masked: it may be a secret, and is read from the job spec alone.
    """
    filled = with_dependent_defaults(job).without_secrets().model_dump(mode="json")
    if job.model is not None and job.model.path is None:
        filled["model"]["max_length"] = max_length(None, job.model.max_length)
    elif job.model is not None:
        filled["model"] = {key: value for key, value in filled["model"].items() if key not in SHAPE_KEYS}
    return filled


def _with_absolute_paths(job: Job, folder: Path) -> Job:
    """Return the job with absolute paths of model and task, which processes in other folders and on nodes can open."""
    changes: dict[str, Any] = {}
    if job.model is not None and job.model.path is not None:
        changes["model"] = job.model.model_copy(update={"path": _absolute(job.model.path, folder)})
    if job.task is not None:
        changes["task"] = _with_absolute_files(job.task, folder)
    if job.eval is not None and job.eval.task is not None:
        changes["eval"] = job.eval.model_copy(update={"task": _with_absolute_files(job.eval.task, folder)})
    return job.model_copy(update=changes) if changes else job


def _with_absolute_files(task: TaskTable, folder: Path) -> TaskTable:
    file = None if task.file is None else _absolute(task.file, folder)
    files = tuple(one.model_copy(update={"path": _absolute(one.path, folder)}) for one in task.files)
    return task.model_copy(update={"file": file, "files": files})


def _absolute(path: str, folder: Path) -> str:
    return os.path.abspath(folder / Path(path).expanduser())  # symbolic links are not resolved


# ── what TOML allows and a job does not ────────────────────────────────────────────────────────────────────────────
def _unsupported_values(value: Any, path: KeyPath) -> Iterator[_Mistake]:
    """Yield a mistake for each value that is valid TOML but not allowed in the journal, JSON or command lines."""
    if len(path) > _MAX_DEPTH:
        yield _Mistake(path[:2], f"is nested more than {_MAX_DEPTH} levels deep; use fewer levels")
    elif isinstance(value, dict):
        for key, inner in value.items():
            if "\0" in key:
                yield _Mistake(path, f"the key {_format_value(key)} contains a NUL character")
            yield from _unsupported_values(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _unsupported_values(inner, (*path, index))
    elif isinstance(value, str) and "\0" in value:
        yield _Mistake(path, "contains a NUL character (\\u0000)")
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        yield _Mistake(path, "is a number beyond 64 bits; write a number that fits into 64 bits")
    elif isinstance(value, float) and not math.isfinite(value):
        yield _Mistake(path, f"is {value}; write a finite number")
    elif isinstance(value, datetime.date | datetime.time):
        yield _Mistake(path, "is a date or time; write it as text, in quotes")


# ── pydantic's errors in plain words ───────────────────────────────────────────────────────────────────────────────
def _translate_errors(error: ValidationError, data: dict[str, Any]) -> Iterator[_Mistake]:
    """Yield each mistake. Errors of a union's alternatives about the same key are joined."""
    wrong_values: dict[KeyPath, list[ErrorDetails]] = {}
    places: set[KeyPath] = set()
    for pydantic_error in error.errors(include_url=False):
        path = _existing(pydantic_error["loc"], data)
        if at := pydantic_error.get("ctx", {}).get("at"):
            yield _Mistake(tuple(at), str(pydantic_error["msg"]))
        elif pydantic_error["type"] == "extra_forbidden":
            yield _Mistake(path, _unknown(path))
        elif pydantic_error["type"] == "missing":
            path = (*path, pydantic_error["loc"][-1])
            yield _Mistake(path, _missing(path), missing=True)
        else:
            wrong_values.setdefault(path, []).append(pydantic_error)
        places.add(path)
    for path, pydantic_errors in wrong_values.items():
        if any(deeper[: len(path)] == path != deeper for deeper in places):
            continue  # the key is a union: its deepest error is the most specific
        if pydantic_errors[0]["type"] == "value_error":
            yield _Mistake(path, pydantic_errors[0]["msg"].removeprefix("Value error, "))
        else:
            expected = " or ".join(dict.fromkeys(_expected(pydantic_error) for pydantic_error in pydantic_errors))
            value, suggestion = _value_at(path, data), _suggestion(pydantic_errors[0])
            message = f"must be {expected}, not {_format_value(value)}{suggestion}"
            wanted_text = pydantic_errors[0]["type"] == "string_type" and not isinstance(value, dict)
            yield _Mistake(path, message, wanted_text=wanted_text)


def _existing(loc: KeyPath, data: Any) -> KeyPath:
    """Return ``loc`` without the names of a union's alternatives, which pydantic inserts."""
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
        return re.split("[;:.] ", _described(error["loc"]))[0] or f"a string that matches {context['pattern']}"
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


def _suggestion(error: ErrorDetails) -> str:
    """Return a hint if the value nearly matches one of a fixed set of choices, else an empty text."""
    value, expected = error["input"], str(error.get("ctx", {}).get("expected", ""))
    near = difflib.get_close_matches(value, re.findall(r"'([^']+)'", expected), 1) if isinstance(value, str) else []
    return f"; did you mean {_format_value(near[0])}?" if near else ""


def _unknown(loc: KeyPath) -> str:
    table, name = table_at(loc[:-1]), str(loc[-1])
    assert table is not None  # only tables of the schema forbid unknown keys
    if new_name := _RENAMED_KEYS.get(tuple(map(str, loc))):
        return f'was renamed; write "{new_name}" instead'
    if replacement := _REPLACED_KEYS.get(tuple(map(str, loc))):
        return f"was replaced by {replacement}"
    if len(same := [path for path, _ in _tables(Job, ()) if path and path[-1] == name]) == 1:
        return f"unknown key; did you mean {_header(same[0])}?"  # the table of this name, which is inside another table
    if near := difflib.get_close_matches(name, table.model_fields, 1):
        return f"unknown key; did you mean {_format_value(near[0])}?"
    if len(owners := [path for path, owner in _tables(Job, ()) if name in owner.model_fields]) == 1:
        owner = owners[0]
        return f"unknown key; it belongs in {_header(owner)}" if owner else f"unknown key; write [{name}] as a table"
    return f"unknown key; known here: {', '.join(table.model_fields)}"


def _missing(loc: KeyPath) -> str:
    owner, name = table_at(loc[:-1]), str(loc[-1])
    assert owner is not None
    inner = table_at(loc)
    if inner is not None:
        needs = " and ".join(_dotted(path) for path in _required(inner, ()))
        purpose = (inner.__doc__ or "").partition("\n")[0].rstrip(".")
        return f"missing; add a table {_header(loc)}" + (f" with {needs}" if needs else f" ({purpose})")
    described = _described(loc)
    where = f" in {_header(loc[:-1])}" if loc[:-1] else ""
    return f"missing; add {name} = ...{where}" + (f" ({described})" if described else "")


# ── tables and fields of the schema ────────────────────────────────────────────────────────────────────────────────
def table_at(path: KeyPath) -> type[BaseModel] | None:
    """Return the table of the schema at ``path``; None if ``path`` leads to a value or to nothing in the schema."""
    model: type[BaseModel] = Job
    named = False  # True if the next part is a name that the user chose
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
            below: dict[Any, KeyPath] = {dict: ("NAME",), tuple: (0,)}
            yield from _tables(inner, (*path, name, *below.get(get_origin(field.annotation), ())))


def _required(model: type[BaseModel], path: KeyPath) -> Iterator[KeyPath]:
    for name, field in model.model_fields.items():
        if field.is_required():
            inner = _model_in(field.annotation)
            yield from _required(inner, (*path, name)) if inner else [(*path, name)]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model ``M`` in ``M``, ``M | None``, ``tuple[M, ...]`` or ``dict[str, M]``; None if there is none."""
    candidates = (annotation, *get_args(annotation))
    return next((model for model in candidates if isinstance(model, type) and issubclass(model, BaseModel)), None)


def _described(loc: KeyPath) -> str:
    """Return the description of a field as part of a sentence, at most 200 characters; empty without a description."""
    owner = table_at(loc[:-1])
    field = owner.model_fields.get(str(loc[-1])) if owner else None
    if field is None or not field.description:
        return ""
    text = _one_line(field.description, 200).removesuffix(".")
    is_acronym = text[:2].isalpha() and text[:2].isupper()
    return text if is_acronym else text[0].lower() + text[1:]


# ── lines ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def _complaint(document: JobDocument, mistake: _Mistake) -> str:
    message = _one_line(mistake.message, 400)
    setting = document.setting_at(mistake.key) if mistake.wanted_text else None
    if setting is not None and not setting.typed:
        quoted = as_value(str(setting.option.partition("=")[2]))
        message += f"; the shell removes quotes: write --set '{_dotted(mistake.key)}={quoted}'"
    return document.complaint(mistake.key, message, missing=mistake.missing)


def _header(path: KeyPath) -> str:
    return f"[[{_dotted(path[:-1])}]]" if isinstance(path[-1], int) else f"[{_dotted(path)}]"


def _format_value(value: Any) -> str:
    """Return the TOML text of a value, on one line and truncated if it is long."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list) and value:
        return "a list"
    shown = json.dumps(value, ensure_ascii=False)
    return shown if len(shown) <= _MAX_SHOWN_CHARS else f"{shown[:_MAX_SHOWN_CHARS]}..."


def _one_line(value: object, max_chars: int = 1000) -> str:
    text = on_one_line(value)
    return text if len(text) <= max_chars else f"{text[:max_chars]}..."
