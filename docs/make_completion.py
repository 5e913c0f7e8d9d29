"""Make cli/completion/commands.json, the words that a shell completes, from the commands of rrl.

    .venv/bin/python -m rrl.docs.make_completion

A test (tests/unit/cli/completion/test_candidates.py) compares the file with the code.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from rrl.cli.commands import app
from rrl.cli.commands.job_commands import Shell
from rrl.core.faults import FaultKind

TABLE = Path(__file__).parents[1] / "cli/completion/commands.json"
KINDS: dict[str, Any] = {
    "RUN": "run",
    "RUN...": "run",
    "ROLE/REPLICA": "replica",
    "ROLE[/REPLICA[#INCARNATION]]": "selector",
    "ROLE/REPLICA|NODE": "target",
    "NODE": "node",
    "NODES": "node",
    "JOB.TOML": "file",
    "FILE": "file",
    "PATH": "file",
    "DIR": "folder",
    "FAULT": [kind.value for kind in FaultKind],
    "SHELL": [shell.value for shell in Shell],
    "table|json|html": ["table", "json", "html"],
}
"""The candidates for a value, by the name of the value in the help. Other values are not completed."""
_MAX_HELP_CHARS = 70


def table() -> str:
    """Return the file: each command by its name, with its help, options and arguments."""
    return json.dumps(dict(_commands(typer.main.get_group(app), "")), indent=1) + "\n"


def _commands(command: Any, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if command.hidden:
        return
    options, arguments, repeats = {}, [], False
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            arguments.append(_kind(parameter))
            repeats = parameter.nargs == -1
            continue
        value = {} if parameter.is_flag else {"value": _kind(parameter)}
        for option in parameter.opts if parameter.default is not True else ():  # skip flags that are on by default
            options[option] = {"help": _short(parameter.help or ""), **value}
        for option in parameter.secondary_opts if parameter.default is not False else ():
            options[option] = {"help": ""}
    options["--help"] = {"help": "Show the options and arguments"}
    yield (
        name,
        {
            "help": "" if not name else _short(command.get_short_help_str(200)),
            "options": options,
            "arguments": arguments,
            **({"repeats": True} if repeats else {}),
        },
    )
    for inner in getattr(command, "commands", {}).values():
        yield from _commands(inner, f"{name} {inner.name}".strip())


def _kind(parameter: Any) -> Any:
    return KINDS.get(parameter.metavar, "")


def _short(text: str) -> str:
    """Return the first sentence without its full stop."""
    first = text.split(". ")[0].split("; ")[0].rstrip(".")
    return first if len(first) <= _MAX_HELP_CHARS else first[:_MAX_HELP_CHARS].rpartition(" ")[0] + " ..."


if __name__ == "__main__":
    TABLE.write_text(table(), encoding="utf-8")
