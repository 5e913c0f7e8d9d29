"""Make docs/job.md, which describes every key of job.toml, from config/job/schema.py.

    .venv/bin/python -m rrl.docs.make_reference

A key's meaning is the docstring under its field; a test (tests/project/test_docs.py) compares the page with the code.
"""

from __future__ import annotations

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

from rrl.config.job.base import DURATION, SIZE
from rrl.config.job.json_schema import description_of
from rrl.config.job.render import field_text
from rrl.config.job.schema import Job, PhaseTable
from rrl.core.phases import PHASES, WAIT_EXTERNAL, Phase
from rrl.core.units import duration_text

PAGE = Path(__file__).parent / "job.md"
_INTRODUCTION = """\
# job.toml

Made from `config/job/schema.py` by `.venv/bin/python -m rrl.docs.make_reference`; do not edit.

`rrl check job.toml` validates a file. It prints first what matters: the nodes, jobs and GPU-hours of the run, when
Slurm would start it (if Slurm gives an estimate), and doubts. Then follow what would be submitted, and two items of
the task. `--defaults` also prints every key with its value. An unknown key is an error that names the file, the line,
and the nearest valid key.

`rrl check` also tries the task on this machine, within a minute: it builds the task, makes and tokenises the prompts
and right answers of 100 items, scores a few answers, also wrong and empty ones, and prints two prompts with their
answers and rewards. An exception of your task is reported with its file and line. `rrl check --no-task` leaves the
task out, for example on a login node where it cannot work; where a package that the task needs is missing,
`rrl check` says that the task was not tried. With `kind = "local"`, `rrl check` and `rrl submit` also look for each
role's command, the network and the metrics port, and compare memory, replicas and the size of the model with this
machine. Exit code 2: the job cannot work, for the reason in the one line on stderr.

A job needs `[run]`, and either
`[task]` with a `[model]` (a folder in `path`, or `[model.tokenizer]`) or roles of your own (`[commands.NAME]`);
everything else has a default.
`examples/quickstart.toml` is a complete job.

## Several files and single values
`rrl submit`, `rrl check` and `rrl resume` (there with `--job`) take several files, and values of single keys:
```
rrl submit base.toml more.toml --set roles.trainer.learning_rate=1e-6 --set cluster.walltime=8h
```
- Files are merged from left to right, then the settings in their order. Tables are merged key by key. Any other value
  replaces the value before it, also a list and an array of tables (`[[faults.planned]]`).
- The value of `--set` is TOML; other words are text, since the shell removes quotes: `8h`, `gpu`. Put the whole
  setting in single quotes if it has quotes of its own, for a list, or for text that looks like a number:
  `--set 'env.passed=["A"]'`, `--set 'run.name="7"'`.
- Relative paths start at the folder of the first file.
- An error message names the file and line, or the `--set`, in which the wrong key was written.
- `job.toml` in the run directory is the merged job spec as one file. A single file without settings is kept as it is,
  with its comments.

## Editors
`rrl schema > job.schema.json` writes a JSON Schema (draft 7) of job.toml. Editors that know the first line of a file
that `rrl init` wrote, `#:schema ./job.schema.json`, then complete keys, show their meanings and defaults, and mark
mistakes: VS Code with the extension Even Better TOML, and others with the language server Taplo.
`taplo check job.toml` does the same in a shell. Rules about several keys are known to `rrl check` alone.

## Values
- **duration**: text with its unit, `"500ms"`, `"90s"`, `"15min"`, `"2h"`, `"1d"`, or Slurm's `"1-12:00:00"`
- **size**: text with its unit, `"512MiB"`, `"16GiB"`, `"16GB"`
"""


def reference() -> str:
    """Return the page."""
    return f"{_INTRODUCTION}\n" + "\n".join(_table(Job, ())).rstrip() + "\n"


def undescribed() -> list[str]:
    """Return the keys without a meaning."""
    return [line for line in reference().splitlines() if line.startswith("| `") and line.endswith("|  |")]


def _table(model: type[BaseModel], path: tuple[str, ...], many: bool = False) -> list[str]:
    """Return the table of ``model`` at ``path``, then the tables in it, without the keys that all roles share."""
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
            rows.append(_row(model, name))
    if path == ("roles",):
        common = _common(model)
        return [*_section("[roles.*]", common, [_row(common, name) for name in common.model_fields]), *below]
    title = ".".join(path)
    return [*(_section(f"[[{title}]]" if many else f"[{title}]", model, rows) if path else ()), *below]


def _named_by_the_user(table: type[BaseModel], path: tuple[str, ...]) -> Iterator[str]:
    yield from _table(table, path)
    if table is PhaseTable:
        yield "| phase of rrl's | shortest | longest | it |\n|---|---|---|---|"
        yield from (_phase(one) for one in PHASES.values())
        yield ""


def _phase(one: Phase) -> str:
    longest = "unlimited" if one.longest == math.inf else f'`"{duration_text(one.longest)}"`'
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


def _row(table: type[BaseModel], name: str) -> str:
    field = table.model_fields[name]
    return f"| `{name}` | {_value(field)} | {_default(field)} | {_meaning(description_of(table, name))} |"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    return "" if field.default is None else f"`{field_text(field, field.default)}`"


def _meaning(text: str | None) -> str:
    """Return a docstring as Markdown for one cell of a table."""
    plain = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", " ".join((text or "").split()))
    return plain.replace("``", "`").replace("|", "\\|").replace("<", "&lt;")


# ── what may be written ────────────────────────────────────────────────────────────────────────────────────────────
_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
_NAMES: dict[Any, str] = {
    bool: "true or false",
    int: "integer",
    float: "number",
    str: "text",
    dict: "table",
    Any: "any value",
}


def _value(field: FieldInfo) -> str:
    return _named(field.annotation, field.metadata)


def _named(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Return the name of a type in TOML's terms, with its bounds."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _named(arguments[0], annotation.__metadata__)
    if origin in (Union, types.UnionType):
        return " or ".join(_named(one, metadata) for one in arguments if one is not type(None))
    if origin is Literal:
        return ", ".join(f"`{_quoted(one)}`" for one in arguments)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"`{{ {', '.join(annotation.model_fields)} }}`"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return ", ".join(f"`{_quoted(one.value)}`" for one in annotation)
    if origin is tuple:
        return f"list of {_named(arguments[0])}"
    named = "duration" if DURATION in metadata else "size" if SIZE in metadata else _NAMES[origin or annotation]
    return f"{named}{_bounds(metadata)}"


def _bounds(metadata: Sequence[Any]) -> str:
    """Return the bounds of a number as text; empty for sizes and durations, which are always positive."""
    given = [one for each in metadata for one in getattr(each, "metadata", [each])]
    bounds = [f" {sign} {getattr(one, key)}" for key, sign in _BOUNDS.items() for one in given if hasattr(one, key)]
    return "" if DURATION in metadata or SIZE in metadata else ",".join(bounds)


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


# ── reading the code ───────────────────────────────────────────────────────────────────────────────────────────────
def _model_of(annotation: Any) -> type[BaseModel] | None:
    """Return the model of a table, an optional table, an array of tables, or tables that the user names; else None."""
    inside: dict[Any, int] = {tuple: 0, dict: 1, types.UnionType: 0}
    origin = get_origin(annotation)
    one = get_args(annotation)[inside[origin]] if origin in inside else annotation
    return one if isinstance(one, type) and issubclass(one, BaseModel) else None


def _common(roles: type[BaseModel]) -> type[BaseModel]:
    """Return the model with the keys that all roles share."""
    base = next(iter(roles.model_fields.values())).annotation.__mro__[1]  # type: ignore[union-attr]
    assert issubclass(base, BaseModel)
    return base


def _shared(model: type[BaseModel]) -> set[str]:
    """Return the keys that ``model`` inherits unchanged from another table."""
    parent = model.__mro__[1]
    inherited = set(parent.model_fields) if issubclass(parent, BaseModel) else set()
    return inherited - set(model.__annotations__)


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
