"""The generated pages of docs/ are those of the code, and describe what is really printed."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer.main

from rrl.cli import main
from rrl.cli.commands import app
from rrl.cli.common.output import JSON_SCHEMA
from rrl.core.run_dir import RUNS_ENV
from rrl.docs import make_commands, make_events, make_json, make_metrics
from rrl.docs.struct_tables import Tables
from rrl.manager.model import events as ev
from rrl.tests.support.cli.story import Story


@pytest.mark.parametrize("maker", [make_commands, make_events, make_json, make_metrics], ids=lambda one: one.__name__)
def test_a_generated_page_is_that_of_the_code(maker: ModuleType) -> None:
    remedy = f"run .venv/bin/python -m {maker.__name__}"
    assert maker.PAGE.read_text() == maker.page(), remedy


def test_every_command_is_on_the_page_of_commands() -> None:
    page = make_commands.page()
    commands = typer.main.get_group(app).commands
    hidden = [name for name, command in commands.items() if command.hidden]
    missing = [name for name in commands if f"### `rrl {name}" not in page and name not in hidden]
    assert missing == [], "add the command to a section in cli/commands/command_group.py"


def test_every_event_is_on_the_page_of_events() -> None:
    page = make_events.page()
    assert all(f"### {event.__name__}\n" in page for event in ev.Event.__args__)


# ── JSON ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _with_json(command: Any, name: str) -> list[str]:
    inner = getattr(command, "commands", {})
    if inner:
        return [found for one in inner.values() for found in _with_json(one, f"{name} {one.name}")]
    return [name] if any("--json" in parameter.opts for parameter in command.params) else []


def test_every_command_with_json_is_on_the_page_of_json_outputs() -> None:
    described = {output.command for output in make_json.OUTPUTS}
    assert {f"{name} --json" for name in _with_json(typer.main.get_group(app), "rrl")} <= described


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run with a failure, which has ended."""
    root = tmp_path / "runs"
    monkeypatch.setenv(RUNS_ENV, str(root))
    story = Story().works().recovers("rollout/0")
    return story.written(root).id


def _keys(command: str) -> set[str]:
    """Return the keys that the page gives for a command."""
    (output,) = [one for one in make_json.OUTPUTS if one.command == command]
    tables = Tables(output.structs)
    return {"schema"} | {
        line.split("`")[1] for struct in output.structs for line in tables.table(struct).splitlines()
        if line.startswith("| `")
    }  # fmt: skip


@pytest.mark.parametrize(
    "command",
    ["rrl status --json", "rrl list --json", "rrl explain --json", "rrl metrics", "rrl logs --failed --json"],
)
def test_the_keys_of_an_output_are_those_of_the_page(
    command: str, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = command.split()[1:]
    assert main.run([words[0], *([] if words[0] == "list" else [run]), *words[1:]]) == 0
    text = capsys.readouterr().out
    (output,) = [one for one in make_json.OUTPUTS if one.command == command]
    documents: list[dict[str, Any]]
    match output.form:
        case make_json.LINES:
            documents = [json.loads(line) for line in text.splitlines()]
        case make_json.LIST:
            documents = json.loads(text)
        case _:
            documents = [json.loads(text)]
    assert documents
    for document in documents:
        assert document["schema"] == JSON_SCHEMA
        assert set(document) == _keys(command)
