"""A job as job.toml again, with every default filled in: what it prints is a valid job.toml of the same job."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ...core.units import DURATION, SIZE, duration_text, size_text
from ..model_folder import SHAPE_KEYS
from .resolve import resolve
from .roles import POOL
from .schema import Job


def as_toml(job: Job) -> str:
    """Round trip: loading the text gives an equal job (but for ``min_replicas``, whose default is spelt out, and
    ``spares``, which are 0 where there is no pool)."""
    floors = {role.name: role.min_replicas for role in resolve(job, "python").roles}
    roles = {name: role.model_copy(update={"min_replicas": floors[name]}) for name, role in job.every_role().items()}
    built_in = {name: role for name, role in roles.items() if name not in job.commands}
    cluster = job.cluster if job.cluster.form == POOL else job.cluster.model_copy(update={"spares": 0})
    model = job.model
    if model is not None and model.path is not None:  # its config.json has them; they would be refused beside path
        model = model.model_copy(update=dict.fromkeys(SHAPE_KEYS))
    sampling = job.sampling
    if sampling.staleness == "unlimited":  # late would be refused beside it
        sampling = sampling.model_copy(update={"late": None})
    filled = job.model_copy(update={
        "cluster": cluster,
        "sampling": sampling,
        "model": model,
        "roles": job.roles.model_copy(update=built_in) if built_in else None,
        "commands": {name: roles[name] for name in job.commands},
    })  # fmt: skip
    return "\n".join(_table(filled, ())).strip() + "\n"


def _table(model: BaseModel, path: tuple[str, ...]) -> Iterator[str]:
    """Plain keys first: after a [header] they would belong to another table."""
    fields = [(name, field, getattr(model, name)) for name, field in type(model).model_fields.items()]
    plain = [(name, field, value) for name, field, value in fields if value is not None and not _holds_tables(value)]
    if plain and path:
        yield f"\n[{'.'.join(map(_key, path))}]"
    for name, field, value in plain:
        yield f"{name} = {field_text(field, value)}"
    for name, _, value in fields:
        if isinstance(value, BaseModel):
            yield from _table(value, (*path, name))
        elif isinstance(value, dict) and _holds_tables(value):
            for key, one in value.items():
                yield from _table(one, (*path, name, key))
        elif _holds_tables(value):
            for one in value:
                yield f"\n[[{'.'.join((*path, name))}]]"
                yield from (line for line in _table(one, (*path, name)) if not line.startswith("\n["))


def _holds_tables(value: Any) -> bool:
    several = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else ()
    return isinstance(value, BaseModel) or any(isinstance(one, BaseModel) for one in several)


def field_text(field: FieldInfo, value: Any) -> str:
    """A value of that field as job.toml has it, durations and sizes with their units."""
    if DURATION in field.metadata:
        return _value(duration_text(value))
    return _value(size_text(value)) if SIZE in field.metadata else _value(value)


def _value(value: Any) -> str:
    if isinstance(value, dict):
        inner = ", ".join(f"{_key(key)} = {_value(one)}" for key, one in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, str):
        return _text(value)
    return json.dumps(value)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _text(key)


def _text(text: str) -> str:
    """JSON's escapes are TOML's, but for DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
