"""Make docs/commands.md, which describes every command and option, from the help of rrl.

    .venv/bin/python -m rrl.docs.make_commands

A test (tests/project/test_generated_pages.py) compares the page with the code.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from rrl.cli.commands import app
from rrl.cli.commands.command_group import SECTIONS

PAGE = Path(__file__).parent / "commands.md"
_VALUES: dict[Any, str] = {int: "NUMBER", float: "NUMBER", str: "TEXT"}
"""Names of the values of options that do not define a name for their value."""
_EXPLANATION = re.compile(r"( {2,})(?=\S)")
"""The spaces between a command line and its explanation."""
_INTRODUCTION = """\
# Commands

Made from the help of the commands by `.venv/bin/python -m rrl.docs.make_commands`; do not edit. The option
`--help` of each command shows the same.

Exit codes: 0 for success, 1 if the run or the operation failed, 2 if the request is not valid, 130 after Ctrl-C or `q`.
Those of `rrl health check` describe the node ([health.md](health.md#the-command)). RUN is the id of a run or the
beginning of one; where it may be left out, the newest run is meant. [json.md](json.md) describes what `--json` prints.
"""


def page() -> str:
    """Return the page."""
    group = typer.main.get_group(app)
    parts = [_INTRODUCTION, "## Options of `rrl` itself\n", *_table(group)]
    for title, names in SECTIONS.items():
        parts += [f"## {title}\n", *(part for name in names for part in _command(group.commands[name], f"rrl {name}"))]
    return "\n".join(parts).rstrip() + "\n"


def _command(command: Any, name: str) -> Iterator[str]:
    """Yield the description of a command, or of the commands in its group."""
    inner = getattr(command, "commands", {})
    if inner:
        for one in inner.values():
            yield from _command(one, f"{name} {one.name}")
        return
    usage = " ".join(
        f"[{one.metavar}]" if not one.required else one.metavar for one in command.params if _positional(one)
    )
    yield f"### `{' '.join(filter(None, (name, usage)))}`\n"
    yield from _help(command.help or "")
    yield from _table(command)


def _help(text: str) -> Iterator[str]:
    """Yield the paragraphs of a help text. Paragraphs that typer must not wrap become code blocks."""
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if paragraph.startswith("\b"):
            lines = [_EXPLANATION.sub(r"\1# ", line, count=1) for line in paragraph[1:].strip("\n").splitlines()]
            yield "\n".join(["```", *lines, "```", ""])
        else:
            yield f"{meaning(paragraph)}\n"


def _table(command: Any) -> Iterator[str]:
    rows = [row for one in command.params if (row := _row(one))]
    if rows:
        yield "\n".join(["| argument or option | meaning |", "|---|---|", *rows, ""])


def _row(parameter: Any) -> str:
    if getattr(parameter, "hidden", False):
        return ""
    if _positional(parameter):
        return f"| `{parameter.metavar}` | {meaning(parameter.help)} |"
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    value = "" if parameter.is_flag else f" {parameter.metavar or _VALUES[parameter.type_descriptor.annotation]}"
    default = parameter.default
    shown = "" if default in (None, False, True, "", ()) or callable(default) else f" Default: `{default}`."
    return f"| {names}{value} | {meaning(parameter.help)}{shown} |"


def _positional(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "argument")


def meaning(text: str | None) -> str:
    """Return a docstring as Markdown on one line."""
    plain = re.sub(r":\w+:`~?(?:[\w.]+\.)?([^`]+)`", r"`\1`", " ".join((text or "").split()))
    return plain.replace("``", "`").replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
