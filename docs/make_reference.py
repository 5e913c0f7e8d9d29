"""docs/job.md: every key of job.toml, drawn from config/job/schema.py.

    .venv/bin/python -m rrl.docs.make_reference

A key's meaning is the line under its field; a test (tests/project/test_docs.py) holds the page to the code.
"""

from __future__ import annotations

import ast
import inspect
import math
import re
import types
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rrl.config.job.render import field_text
from rrl.config.job.schema import Job, PhaseTable
from rrl.core import run_spec
from rrl.core.phases import PHASES, WAIT_EXTERNAL, Phase
from rrl.core.units import DURATION, SIZE, duration_text

PAGE = Path(__file__).parent / "job.md"
_DOCUMENTED_BY: dict[str, type] = {
    "limits": run_spec.Limits,
    "recovery": run_spec.Recovery,
    "health": run_spec.HealthSpec,
}
"""tables whose keys are explained where the manager reads them"""
_INTRODUCTION = """\
# job.toml

Made from `config/job/schema.py` by `.venv/bin/python -m rrl.docs.make_reference`; do not edit.

`rrl check job.toml` validates a file, prints it with every default filled in, and shows what would be submitted.
An unknown key is an error that names the file, the line, and the nearest valid key.

It also tries the task on this machine, within a minute: it builds the task, makes and tokenises the prompts and right
answers of 100 items, scores a few answers, also wrong and empty ones, and prints two prompts with their answers and
rewards. An exception of your task is reported with its file and line. `rrl check --no-task` leaves the task out, for
example on a login node where it cannot work; where a package that the task needs is missing, `rrl check` says that the
task was not tried. With `kind = "local"`, `rrl check` and `rrl submit` also look for each role's command, the network
and the metrics port, and compare memory, replicas and the size of the model with this machine. Exit code 2: the job
cannot work, for the reason in the one line on stderr.

A job needs `[run]`, and either
`[task]` with a `[model]` (a folder in `path`, or `[model.tokenizer]`) or roles of your own (`[commands.NAME]`);
everything else has a default.
`examples/quickstart.toml` is a whole one.

- **duration**: text with its unit, `"500ms"`, `"90s"`, `"15min"`, `"2h"`, `"1d"`, or Slurm's `"1-12:00:00"`
- **size**: text with its unit, `"512MiB"`, `"16GiB"`, `"16GB"`
"""


def reference() -> str:
    """The page."""
    return f"{_INTRODUCTION}\n" + "\n".join(_table(Job, ())).rstrip() + "\n"


def undescribed() -> list[str]:
    """Keys without a meaning."""
    return [line for line in reference().splitlines() if line.startswith("| `") and line.endswith("|  |")]


def _table(model: type[BaseModel], path: tuple[str, ...], many: bool = False) -> list[str]:
    """The table of ``model`` at ``path``, then those in it. What a role shares with all others is not repeated."""
    rows: list[str] = []
    below: list[str] = []
    for name, field in model.model_fields.items():
        if table := _model_of(field.annotation):
            if get_origin(field.annotation) is dict:
                below += _named_by_the_user(table, (*path, name, "*"))
            else:
                below += _table(table, (*path, name), many=get_origin(field.annotation) is tuple)
        elif not path:  # a free table
            below.append(f"## `[{name}]`\n\n{_meaning(field.description)}\n")
        elif name not in _shared(model):
            rows.append(_row(name, field, path))
    if path == ("roles",):
        common = _common(model)
        return [*_section("[roles.*]", common, [_row(*one, path) for one in common.model_fields.items()]), *below]
    title = ".".join(path)
    return [*(_section(f"[[{title}]]" if many else f"[{title}]", model, rows) if path else ()), *below]


def _named_by_the_user(table: type[BaseModel], path: tuple[str, ...]) -> Iterator[str]:
    yield from _table(table, path)
    if table is PhaseTable:
        yield "| phase of rrl's | shortest | longest | it |\n|---|---|---|---|"
        yield from (_phase(one) for one in PHASES.values())
        yield ""


def _phase(one: Phase) -> str:
    longest = "for ever" if one.longest == math.inf else f'`"{duration_text(one.longest)}"`'
    meaning = "progresses" if one.progresses else f"waits for {one.waits_for}" if one.waits_for else "does its work"
    if one.name == WAIT_EXTERNAL:
        meaning = "waits for a service outside of the run (`rrl.waiting`)"
    return f'| `{one.name}` | `"{duration_text(one.shortest)}"` | {longest} | {meaning} |'


def _section(title: str, model: type[BaseModel], rows: Sequence[str]) -> Iterator[str]:
    yield f"## `{title}`\n"
    if model.__doc__:
        yield f"{_meaning(inspect.cleandoc(model.__doc__))}\n"
    if rows:
        yield "\n".join(["| key | value | default | meaning |", "|---|---|---|---|", *rows]) + "\n"


def _row(name: str, field: FieldInfo, path: tuple[str, ...]) -> str:
    explained = _DOCUMENTED_BY.get(".".join(path))
    meaning = field.description if explained is None else _field_docstrings(explained).get(name)
    if DURATION in field.metadata:  # a user writes the unit into the value
        meaning = (meaning or "").replace("Time (s) ", "Time ", 1)
    return f"| `{name}` | {_value(field)} | {_default(field)} | {_meaning(meaning or '')} |"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    return "" if field.default is None else f"`{field_text(field, field.default)}`"


def _meaning(text: str | None) -> str:
    """A docstring as Markdown in one cell."""
    plain = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", " ".join((text or "").split()))
    return plain.replace("``", "`").replace("|", "\\|").replace("<", "&lt;")


# ── what may be written ────────────────────────────────────────────────────────────────────────────────────────────
_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
_NAMES: dict[Any, str] = {
    bool: "true or false", int: "integer", float: "number", str: "text", dict: "table", Any: "any value",
}  # fmt: skip


def _value(field: FieldInfo) -> str:
    return _named(field.annotation, field.metadata)


def _named(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """A type in TOML's terms, with its bounds."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _named(arguments[0], annotation.__metadata__)
    if origin in (Union, types.UnionType):
        return " or ".join(_named(one, metadata) for one in arguments if one is not type(None))
    if origin is Literal:
        return ", ".join(f"`{_quoted(one)}`" for one in arguments)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return ", ".join(f"`{_quoted(one.value)}`" for one in annotation)
    if origin is tuple:
        return f"list of {_named(arguments[0])}"
    named = "duration" if DURATION in metadata else "size" if SIZE in metadata else _NAMES[origin or annotation]
    return f"{named}{_bounds(metadata)}"


def _bounds(metadata: Sequence[Any]) -> str:
    """Where it says something: a size or duration above nothing need not say so."""
    given = [one for each in metadata for one in getattr(each, "metadata", [each])]
    bounds = [f" {sign} {getattr(one, key)}" for key, sign in _BOUNDS.items() for one in given if hasattr(one, key)]
    return "" if DURATION in metadata or SIZE in metadata else ",".join(bounds)


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


# ── reading the code ───────────────────────────────────────────────────────────────────────────────────────────────
def _model_of(annotation: Any) -> type[BaseModel] | None:
    """The model of a table, of one that may be left out, of an array of tables, or of tables that the user names."""
    inside: dict[Any, int] = {tuple: 0, dict: 1, types.UnionType: 0}
    origin = get_origin(annotation)
    one = get_args(annotation)[inside[origin]] if origin in inside else annotation
    return one if isinstance(one, type) and issubclass(one, BaseModel) else None


def _common(roles: type[BaseModel]) -> type[BaseModel]:
    """What all roles have in common."""
    base = next(iter(roles.model_fields.values())).annotation.__mro__[1]  # type: ignore[union-attr]
    assert issubclass(base, BaseModel)
    return base


def _shared(model: type[BaseModel]) -> set[str]:
    """Keys that ``model`` has from another table as they are there."""
    parent = model.__mro__[1]
    inherited = set(parent.model_fields) if issubclass(parent, BaseModel) else set()
    return inherited - set(model.__annotations__)


def _field_docstrings(struct: type) -> dict[str, str]:
    """The docstrings under the fields of a class."""
    body = ast.parse(inspect.getsource(struct)).body[0]
    assert isinstance(body, ast.ClassDef)
    return {
        field.target.id: text.value.value
        for field, text in zip(body.body, body.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }  # fmt: skip


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
