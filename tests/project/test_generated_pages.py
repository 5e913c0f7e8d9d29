"""The generated pages of docs/ agree with the code and with the output of the commands."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer.main

from rrl.cli import main
from rrl.cli.commands import app
from rrl.core.run_dir import RUNS_ENV
from rrl.docs import make_commands, make_detection, make_events, make_json, make_metrics
from rrl.manager.model import events as ev
from rrl.tests.support.cli.json_keys import assert_keys_of_the_page, output_of
from rrl.tests.support.cli.story import Story
from rrl.tests.support.job_toml import JOB

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "maker", [make_commands, make_detection, make_events, make_json, make_metrics], ids=lambda one: one.__name__
)
def test_a_generated_page_is_that_of_the_code(maker: ModuleType) -> None:
    remedy = f"run .venv/bin/python -m {maker.__name__}"
    assert maker.PAGE.read_text() == maker.page(), remedy


def test_the_page_for_coding_agents_is_short_and_names_every_program_that_makes_a_file() -> None:
    page = (ROOT / "AGENTS.md").read_text()
    makers = {path.stem for path in (ROOT / "docs").glob("make_*.py")} - {"make_release"}
    assert set(re.findall(r"rrl\.docs\.(make_\w+)", page)) == makers
    assert len(page.splitlines()) <= 70


def test_every_command_is_on_the_page_of_commands() -> None:
    page = make_commands.page()
    commands = typer.main.get_group(app).commands
    hidden = [name for name, command in commands.items() if command.hidden]
    missing = [name for name in commands if f"### `rrl {name}" not in page and name not in hidden]
    assert missing == [], "these commands are on no page: add each to a section in cli/commands/command_group.py"


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
def subject(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Return the arguments of each command. The default argument is a run in which a rollout was replaced."""
    root, job = tmp_path / "runs", tmp_path / "job.toml"
    monkeypatch.setenv(RUNS_ENV, str(root))
    job.write_text(JOB)
    run = Story().works().recovers("rollout/0").written(root)
    return {"check": [str(job), "--no-task"], "list": [], "": [run.id]}


@pytest.mark.parametrize(
    "command",
    [
        "rrl status --json",
        "rrl list --json",
        "rrl check --json",
        "rrl explain --json",
        "rrl metrics",
        "rrl logs --failed --json",
        "rrl report --json",
    ],
)
def test_the_keys_of_an_output_are_those_of_the_page(
    command: str, subject: dict[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    words = command.split()[1:]
    assert main.run([words[0], *subject.get(words[0], subject[""]), *words[1:]]) == 0
    text = capsys.readouterr().out
    documents: list[dict[str, Any]]
    match output_of(command).form:
        case make_json.LINES:
            documents = [json.loads(line) for line in text.splitlines()]
        case make_json.LIST:
            documents = json.loads(text)
        case _:
            documents = [json.loads(text)]
    assert documents
    for document in documents:
        assert_keys_of_the_page(command, document)
