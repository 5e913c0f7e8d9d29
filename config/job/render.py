"""Write a job as a valid job.toml with every default filled in."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ...core.units import duration_text, size_text
from ..model_folder import SHAPE_KEYS
from .base import DURATION, SIZE
from .resolve import with_dependent_defaults
from .roles import POOL
from .schema import Job


def as_toml(job: Job) -> str:
    """Return the TOML text of a job; loading it gives an equal job.

    Defaults that depend on other keys are written as values, and ``spares`` is 0 without a pool.
    """
    job = with_dependent_defaults(job)
    cluster = job.cluster if job.cluster.form == POOL else job.cluster.model_copy(update={"spares": 0})
    model = job.model
    if model is not None and model.path is not None:  # [model] must not have these keys beside path
        model = model.model_copy(update=dict.fromkeys(SHAPE_KEYS))
    sampling = job.sampling
    if sampling.staleness == "unlimited":  # `late` must not be set then
        sampling = sampling.model_copy(update={"late": None})
    elif sampling.staleness == 0 and sampling.ahead > 0:  # the default of `ahead` would be rejected
        sampling = sampling.model_copy(update={"ahead": None})
    tags = job.tags if job.tags.trainer else job.tags.model_copy(update={"handback": None})  # must not be set then
    filled = job.model_copy(
        update={
            "cluster": cluster,
            "sampling": sampling,
            "model": model,
            "roles": job.roles if job.task is not None else None,
            "tags": tags if job.task is not None else None,
        }
    )
    return "\n".join(_table(filled, ())).strip() + "\n"


def merged_toml(data: Mapping[str, Any]) -> str:
    """Return the TOML text of values that were read from TOML; reading it gives equal values. Comments are lost."""
    return "\n".join(_plain_table(data, ())).strip() + "\n"


def _plain_table(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    """Yield the lines of a table, its plain keys first, and the lines of the tables in it."""
    plain = {key: value for key, value in table.items() if not isinstance(value, dict) and not _holds_dicts(value)}
    if path and (plain or not table):
        yield f"\n[{'.'.join(map(bare_or_quoted, path))}]"
    for key, value in plain.items():
        yield f"{bare_or_quoted(key)} = {as_value(value)}"
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _plain_table(value, (*path, key))
        elif key not in plain:
            for element in value:
                yield f"\n[[{'.'.join(map(bare_or_quoted, (*path, key)))}]]"
                yield from (f"{bare_or_quoted(inner)} = {as_value(element[inner])}" for inner in element)


def _holds_dicts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(element, dict) for element in value)


def _table(model: BaseModel, path: tuple[str, ...]) -> Iterator[str]:
    """Yield the lines of a table. Plain keys come first: after a [header] they would belong to another table."""
    fields = [(name, field, getattr(model, name)) for name, field in type(model).model_fields.items()]
    plain = [(name, field, value) for name, field, value in fields if value is not None and not _holds_tables(value)]
    if plain and path:
        yield f"\n[{'.'.join(map(bare_or_quoted, path))}]"
    for name, field, value in plain:
        yield f"{name} = {field_text(field, value)}"
    for name, _, value in fields:
        if isinstance(value, BaseModel):
            yield from _table(value, (*path, name))
        elif isinstance(value, dict) and _holds_tables(value):
            for key, table in value.items():
                yield from _table(table, (*path, name, key))
        elif _holds_tables(value):
            for table in value:
                yield f"\n[[{'.'.join((*path, name))}]]"
                yield from (line for line in _table(table, (*path, name)) if not line.startswith("\n["))


def _holds_tables(value: Any) -> bool:
    elements = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else ()
    return isinstance(value, BaseModel) or any(isinstance(element, BaseModel) for element in elements)


def field_text(field: FieldInfo, value: Any) -> str:
    """Return the text of a field's value for job.toml, durations and sizes with their units."""
    if DURATION in field.metadata:
        return as_value(duration_text(value))
    return as_value(size_text(value)) if SIZE in field.metadata else as_value(value)


def as_value(value: Any) -> str:
    """Return the TOML text of a value, on one line; tables are inline."""
    if isinstance(value, dict):
        inner = ", ".join(f"{bare_or_quoted(key)} = {as_value(element)}" for key, element in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(as_value, value))}]"
    if isinstance(value, str):
        return _text(value)
    return json.dumps(value)


def bare_or_quoted(key: str) -> str:
    """Return the TOML text of one part of a key, in quotes if it needs them."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _text(key)


def _text(text: str) -> str:
    """Quote a string. JSON's escapes are also TOML's, except for DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
