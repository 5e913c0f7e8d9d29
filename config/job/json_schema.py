"""Describe job.toml as a JSON Schema, with which editors complete, explain and check it.

The schema comes from the tables themselves. It accepts every valid job.toml; rules about several keys are left to
``rrl check``. Draft 7 is the newest version that Taplo, the usual TOML plugin of editors, reads; in draft 7, keywords
beside ``$ref`` are ignored.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ...core import run_spec
from ...core.units import DURATION_PATTERN, SIZE_PATTERN, duration_text, size_text
from .base import DURATION, SIZE
from .roles import RolloutPool
from .schema import HealthTable, Job, LimitsTable, RecoveryTable

_DRAFT = "http://json-schema.org/draft-07/schema#"
_DOCUMENTED_BY: dict[type[BaseModel], type] = {
    LimitsTable: run_spec.Limits,
    RecoveryTable: run_spec.Recovery,
    HealthTable: run_spec.HealthSpec,
}
"""Tables whose keys are described by the fields of the struct that the manager reads."""
_BOUNDS = ("exclusiveMinimum", "exclusiveMaximum", "minimum", "maximum", "gt", "ge", "lt", "le", "multipleOf")
"""Keywords about numbers. They do not apply to durations and sizes, which are text."""


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of job.toml."""
    root = Job.model_json_schema(ref_template="#/definitions/{model}")
    definitions = root.pop("$defs")
    tables: list[type[BaseModel]] = [Job, *_tables_in(Job)]
    for table in dict.fromkeys(tables):
        shown = root if table is Job else definitions[table.__name__]
        shown["description"] = plain(inspect.cleandoc(table.__doc__ or ""))
        for name, field in table.model_fields.items():
            shown["properties"][name] = _property(shown["properties"][name], field, description_of(table, name))
            if table is RolloutPool and name not in RolloutPool.__annotations__:  # its default is in [roles.rollout]
                shown["properties"][name].pop("default", None)
    return {"$schema": _DRAFT, **_without_titles(root), "definitions": _without_titles(definitions)}


def description_of(table: type[BaseModel], name: str) -> str:
    """Return the description of a key, as in the code; empty if the key has no description."""
    field = table.model_fields[name]
    struct = _DOCUMENTED_BY.get(table)
    text = (field.description if struct is None else field_docstrings(struct).get(name)) or ""
    if DURATION in field.metadata:  # a user writes the unit into the value
        text = text.replace("Time (s) ", "Time ", 1)
    return text


def plain(text: str) -> str:
    """Return a docstring on one line, without the markup of references to code."""
    words = " ".join(text.split())
    for role in (":mod:", ":class:", ":func:", ":data:"):
        words = words.replace(role, "")
    return words.replace("``", "`")


def _property(schema: dict[str, Any], field: FieldInfo, description: str) -> dict[str, Any]:
    """Return the schema of one key: without null, which TOML does not have, and with durations and sizes as text."""
    schema = dict(schema)
    if "anyOf" in schema:
        others = [one for one in schema.pop("anyOf") if one != {"type": "null"}]
        schema |= others[0] if len(others) == 1 else {"anyOf": others}
    if DURATION in field.metadata or SIZE in field.metadata:
        schema = {key: value for key, value in schema.items() if key not in _BOUNDS}
        schema |= {"type": "string", "pattern": DURATION_PATTERN if DURATION in field.metadata else SIZE_PATTERN}
    schema.pop("default", None)
    if not field.is_required() and field.default is not None and not isinstance(field.default, BaseModel):
        schema["default"] = _default(field)
    if "$ref" in schema:
        schema = {"allOf": [{"$ref": schema.pop("$ref")}], **schema}
    schema.pop("description", None)
    return {"description": plain(description), **schema} if description else schema


def _default(field: FieldInfo) -> Any:
    if DURATION in field.metadata:
        return duration_text(field.default)
    if SIZE in field.metadata:
        return size_text(field.default)
    return list(field.default) if isinstance(field.default, tuple) else field.default


def _tables_in(table: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Yield the tables inside a table, at every depth."""
    for field in table.model_fields.values():
        for inner in _models_in(field.annotation):
            yield inner
            yield from _tables_in(inner)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and get_origin(annotation) is None and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _without_titles(schema: Any) -> Any:
    """Return a schema without the titles that pydantic derives from names, and without keywords that draft 7 lacks."""
    if isinstance(schema, list):
        return [_without_titles(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if isinstance(properties := schema.get("properties"), dict):  # its keys are keys of job.toml, not keywords
        properties = {name: _without_titles(one) for name, one in properties.items()}
    kept = {key: value for key, value in schema.items() if key not in ("title", "properties", "gt", "ge", "lt", "le")}
    cleaned = {key: _without_titles(value) for key, value in kept.items()}
    return cleaned | ({"properties": properties} if properties is not None else {})


def field_docstrings(struct: type) -> dict[str, str]:
    """Return the docstrings under the fields of a class, by field."""
    body = ast.parse(inspect.getsource(struct)).body[0]
    assert isinstance(body, ast.ClassDef)
    return {
        field.target.id: text.value.value
        for field, text in zip(body.body, body.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
